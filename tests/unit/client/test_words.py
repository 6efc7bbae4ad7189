"""Words of other packages and slips: the error says which word is meant."""

import copy
import inspect
import io
import json
import pickle
import re
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyoperon.sklearn
import pytest
from gplearn import genetic
from sklearn.exceptions import NotFittedError

import warpfit
import warpfit.testing
from support.refusals import refused
from warpfit import sklearn
from warpfit.cli.main import main
from warpfit.errors import did_you_mean, nearest_first
from warpfit.ops import OPERATORS
from warpfit.sklearn import ParameterOptimizer, SymbolicClassifier, SymbolicRegressor, keywords
from warpfit.sklearn.constraints import operator_name
from warpfit.sklearn.equations import Equation, EquationTable
from warpfit.sklearn.keywords import OF_OTHER_ESTIMATORS, OF_OTHER_FITS, OF_OTHER_OBJECTS
from warpfit_server.config import Config

ROWS = np.arange(12.0).reshape(6, 2)
OWN = SymbolicRegressor().get_params()
#: Names of PySR 1.5's `PySRRegressor`, which tests do not install, from its documentation.
PYSR = json.loads((Path(__file__).parents[2] / "data" / "pysr.json").read_text())
ESTIMATORS = {
    **{"optimizer": ParameterOptimizer("p1*x1"), "classifier": SymbolicClassifier()},
    **{"regressor": SymbolicRegressor(), "transformer": sklearn.SymbolicTransformer()},
}


def table_of(*sizes):
    texts = {"equation": 'x1, "2"', "latex": r"2 \cdot x_1", "program": warpfit.parse("x1*2")}
    numbers = {"score": 0.5, "description_length": 2.0, "r2": np.nan, "r2_held_out": 0.5}
    own = [{"complexity": size, "loss": 1.0 / size, "excess": 1.0 / size} for size in sizes]
    return EquationTable(tuple(Equation(**each, **numbers, **texts) for each in own))


TABLE = table_of(1, 2, 3)


@pytest.fixture(scope="module")
def found():
    with warpfit.testing.client() as client:
        data = client.upload(ROWS, ROWS[:, 0])
        yield {
            **{"client": client, "data": data, "fit": client.optimize(data, ["p1*x1"])},
            **{"answer": client.run(data, ["x1"], loss="mse"), "table": TABLE, "warpfit": warpfit},
            **{"search": client.search(data, generations=1), "equation": TABLE[0], **ESTIMATORS},
            **{"proposals": client.propose(data, ["p1*x1"]), "program": warpfit.parse("x1")},
        }


def test_a_missing_attribute_says_what_is_meant(found):
    for owner, name, remedy in (
        *(("fit", "popt", "Use parameters"), ("fit", "predict", r"Use formula\(\)")),
        ("fit", "losss", r"Did you mean loss\?"),
        ("data", "close", r"Use client.release\(data\)"),
        *(("search", name, "Use ") for name in ("front", "equations_", "to_pandas", "get_best")),
        ("warpfit", "SymbolicRegressor", "Write: from warpfit.sklearn import SymbolicRegressor"),
        ("warpfit", "conect", r"Did you mean connect\?"),
        ("warpfit", "search", "Use search of a client"),
        ("program", "to_latex", r"Use latex\(\)"),
        ("proposals", "errors", r"Use \[answer.error for answer in found\]"),
        ("regressor", "plot_fronts", r"Did you mean plot_front\?"),
        *(("regressor", "wild_and_far", "$"), ("regressor", "from_file", ".*pickle or joblib")),
        *(("regressor", name, "Use expression_") for name in ("best_", "formula_", "formula")),
        ("equation", "sympy", r"Use program.sympy\(names\)"),
        ("equation", "complexty", r"Did you mean complexity\?"),
        *(("table", name, rf".*to_pandas\(\).{name}") for name in ("iloc", "columns", "head")),
    ):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'(\. )?{remedy}") as caught:
            getattr(found[owner], name)
        told = "".join(traceback.format_exception(caught.value))
        assert told.count("Did you mean") == remedy.startswith("Did"), "Python adds no guess"
        assert not hasattr(found[owner], name)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_an_attribute_of_another_estimator_says_what_to_call(kind):
    known = {one for each in ESTIMATORS.values() for one in dir(type(each)) if one[0] != "_"}
    known |= OWN.keys() | {"program_", "expression_", "parameters_", "standard_errors_", "loss_"}
    known |= {"n_iter_", "pickle", "sklearn", "client", "programs_", "joblib"}
    for name, remedy in OF_OTHER_OBJECTS.items():
        assert not hasattr(ESTIMATORS[kind], name)
        with pytest.raises(AttributeError, match=f"no attribute '{name}'. Use ") as caught:
            getattr(ESTIMATORS[kind], name)
        assert remedy in str(caught.value)
        assert set(re.findall(r"\w+", remedy)) & known, "what is named is there"


def test_what_is_there_after_a_fit_or_an_import_says_so():
    for model in ESTIMATORS.values():
        names = re.findall(r"^(\w+_) :", inspect.getdoc(model), re.MULTILINE)
        assert names, "attributes of the documentation"
        for name in names:
            assert not hasattr(model, name)
            with pytest.raises(NotFittedError, match="not fitted yet"):
                getattr(model, name)
    found = warpfit.__getattr__  # its own, whatever tests have imported
    for name, words in (
        ("frontends", r"Write: import warpfit\.frontends"),
        ("far_and_wild", r"no attribute 'far_and_wild'$"),
        ("__wrapped__", r"no attribute '__wrapped__'$"),
    ):
        with pytest.raises(AttributeError, match=words):
            found(name)


@pytest.mark.parametrize("kind", ["data", "fit", "answer", "table", "equation", *ESTIMATORS])
def test_what_cannot_be_found_harms_no_copy(found, kind):
    one = found[kind]
    if kind == "data":
        assert copy.deepcopy(one) is one
        return
    for other in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
        assert (type(other), repr(other)) == (type(one), repr(one))
    for name in ("_private", "__wrapped__", "feature_names_in_"):
        assert not hasattr(one, name)
    assert getattr(one, "nothing_of_it", 3) == 3
    if kind in ESTIMATORS:
        assert repr(one).startswith(type(one).__name__)


def mistaken(**given):
    return refused("no keyword", SymbolicRegressor, **given)


@pytest.mark.parametrize("value", [3, None, "mse", ["a", "b"]])
def test_a_keyword_of_another_program_is_answered_by_ours(value):
    others = {"sample_weight", "SymbolicClassifier(search", "DataFrame"}
    for name in OF_OTHER_ESTIMATORS:
        assert name not in OWN
        remedy = mistaken(**{name: value}).remedy
        words = set(remedy.replace("=", " ").replace(",", " ").split())
        assert remedy.startswith("Leave it out: ") or words & (OWN.keys() | others), remedy


def test_each_keyword_of_other_packages_is_known():
    kinds = (genetic.SymbolicRegressor, genetic.SymbolicClassifier, genetic.SymbolicTransformer)
    for kind in (*kinds, pyoperon.sklearn.SymbolicRegressor):
        theirs = inspect.signature(kind).parameters.keys()
        assert not theirs - OWN.keys() - OF_OTHER_ESTIMATORS.keys()
    assert not set(PYSR["settings"]) - OWN.keys() - OF_OTHER_ESTIMATORS.keys()
    own = inspect.signature(SymbolicRegressor.fit).parameters
    assert not set(PYSR["fit"]) - own.keys() - OF_OTHER_FITS.keys()
    methods = {name for name in PYSR["methods"] if not hasattr(SymbolicRegressor, name)}
    assert not methods - OF_OTHER_OBJECTS.keys()


def test_the_value_is_translated_into_a_setting():
    for given, ours in (
        ({"maxdepth": 5}, "Write constraints={'depth': 5}"),
        ({"nested_constraints": {"sin": {"sin": 0}}}, "constraints={'nesting': {'sin': {'sin'"),
        ({"unary_operators": ["cos", "inv(x) = 1/x"]}, "Write operators=['cos', 'inv']"),
        ({"unary_operators": ["s(x) = cos(x)^2"]}, "['s'] after warpfit.define('s', 'cos(a)^2')"),
        ({"unary_operators": ["s(x::T) where {T} = 2x"]}, "define('s', 'a formula of a, b and c')"),
        ({"binary_operators": ["greater", "plus", "mult"]}, "Write operators=['gt', 'add', 'mul']"),
        ({"binary_operators": ["cond"]}, "['cond_'] after warpfit.define('cond_', 'where(a > 0, b"),
        ({"allowed_symbols": "add,mul,aq,constant"}, "Write operators=['add', 'mul', 'aq']"),
        ({"elementwise_loss": "HuberLoss(2.0)"}, "loss=warpfit.losses.huber(2.0)"),
        ({"elementwise_loss": "LPDistLoss{3}()"}, "loss='abs(d)^3'"),
        ({"elementwise_loss": "l(x, y) = sum(x .- y)"}, "loss= as text over f, y, w and d"),
        ({"metric": "mean absolute error"}, "Write loss='mae'"),
        ({"objectives": ["r2", "length"]}, "Write loss='r2'"),
        ({"batch_size": 50}, "Write sample_rows=50"),
        ({"max_samples": 0.9}, "sample_rows= with a number of rows"),
        ({"verbosity": 0}, "Write verbose=False"),
        ({"equation_file": "hall.csv"}, "Write output='hall.csv'"),
        ({"feature_names": ["r", "k"]}, "a DataFrame with columns ['r', 'k']"),
        ({"model_selection_criterion": "minimum_description_length"}, "'description_length'"),
        ({"tournament_size": 5}, "Leave it out: the engine varies"),
        ({"init_depth": (2, 6)}, "Write constraints={'depth': 6}"),
        ({"X_units": ["m"]}, "Write units= of the estimator"),
        ({"wild": 3}, "help(SymbolicRegressor) lists"),
        *(({"maxsize": 20}, "max_size=20"), ({"timeout_in_seconds": 60}, "Write max_seconds=60")),
        *(({"seed": 3}, "Write random_state=3"), ({"niterations": 40}, "Write generations=40")),
        ({"elementwise_loss": "QuantileLoss(0.9)"}, "loss=warpfit.losses.quantile(0.9)"),
        ({"function_set": ("add", "div")}, "Write operators=['add', 'div']"),
        ({"weights": 1}, "Write sample_weight= of fit"),
    ):
        remedy = mistaken(**given).remedy
        assert ours.strip() in remedy
        if re.match(r"Write \w+=(?!.* after )\S", remedy):
            model = eval(f"SymbolicRegressor({remedy.removeprefix('Write ')})", {**globals()})
            with pytest.raises(ValueError, match="Found array with 0 sample"):
                model.fit(np.empty((0, 1)), np.empty(0))
            model.n_features_in_ = 1
            model._given = []
            model._check_settings()


def test_a_whole_call_is_translated_at_once():
    error = mistaken(
        binary_operators=["+", "*"], unary_operators=["cos"], niterations=5, alpha=1.0, progres=1
    )
    assert error.remedy.startswith("Write operators=['+', '*', 'cos'], generations=5. Leave out a")
    assert all(name in str(error) for name in ("'niterations'", "'alpha'", "'progres'"))
    assert "alpha: Leave it out: the engine" in error.__notes__[0]
    several = {"binary_operators": ["+"], "populations": 3, "loss_function": "f"}
    assert mistaken(unary_operators=["sq(x) = x*x"], **several).remedy.startswith(
        "Write operators=['sq', '+'] after warpfit.define('sq', 'a*a'). populations: Write popul"
    ), "what is no code has the name of its keyword"
    assert "Did you mean max_seconds=" in mistaken(max_second=3).remedy


def test_a_keyword_of_another_fit_or_prediction_is_answered_by_ours():
    model = SymbolicRegressor()
    others = {model.fit: OF_OTHER_FITS, model.predict: keywords.OF_OTHER_PREDICTIONS}
    for method, name in [(method, name) for method, names in others.items() for name in names]:
        given = [[[1.0]], [1.0]][: 1 + (method == model.fit)]
        refused(f"no keyword '{name}'", method, *given, **{name: None})
    for name in ("max_seconds", "niterations"):
        refused(r" SymbolicRegressor\(\.\.\.\)$", model.fit, [[1.0]], [1.0], **{name: 3})


def test_keywords_of_a_search_belong_into_it():
    for name, written in (
        ("max_seconds", r"Write search=SymbolicRegressor\(max_seconds=3\)$"),
        ("niterations", r"Write search=SymbolicRegressor\(generations=3\)$"),
        ("populations", r"Write search=SymbolicRegressor\(...\): population="),
        ("hall_of_fame", r"Write n_components=3$|Leave it out: equations_"),
    ):
        for kind in (SymbolicClassifier, sklearn.SymbolicTransformer):
            refused(written, kind, **{name: 3})
        refused("Leave it out: a classifier", SymbolicClassifier, loss="mae")


def test_parameters_are_set_by_our_names():
    model, one = SymbolicRegressor().set_params(max_size=7), SymbolicClassifier(SymbolicRegressor())
    refused("Write max_size=9", model.set_params, maxsize=9)
    refused("Did you mean max_size=?", model.set_params, max_siz=9)
    assert model.max_size == 7 and one.set_params(search__max_size=5).search.max_size == 5
    refused("search=SymbolicRegressor", one.set_params, max_size=3)
    refused("Write max_size=3", one.set_params, search__maxsize=3)
    refused("Use search, random_state", SymbolicClassifier, wild=3)
    refused(r"Write start=\[1.0\]", ParameterOptimizer, "p1*x1", p0=[1.0])
    refused("sample_weight", ParameterOptimizer, "p1*x1", sigma=[1.0])
    refused(r"Did you mean bounds=\?", ParameterOptimizer, "p1*x1", bound=(0, 1))


def test_a_loss_of_another_package_is_ours():
    for loss, ours in (
        *(("mean absolute error", "loss='mae'"), ("log loss", "SymbolicClassifier")),
        ("spearman", "no sums over rows"),
        ("loss(prediction, target) = (prediction - target)^2", "loss='(f - y)^2'"),
        ("my_loss(x, z, weights) = weights * abs(x - z)", "loss='w * abs(f - y)'"),
        ("l(x, y) = begin return (x-y)^2 end", "loss='(f-y)^2'"),
        ("l(p, t) = p > t ? (p-t) : t > 1 ? 2 : 3", "'where(f > y, (f-y), where(y > 1, 2, 3))'"),
    ):
        refused(re.escape(ours), SymbolicRegressor(loss=loss).fit, ROWS, ROWS[:, 0])
        refused(re.escape(ours), SymbolicRegressor, elementwise_loss=loss)
        for own in ("mse", "huber", "abs(f - y)", "(prediction - target)^2"):
            keywords.check_loss(own)


def test_texts_in_a_column_may_name_groups(tmp_path, capsys):
    table = pd.DataFrame({"dose": [1.0, 2.0, 3.0], "kind": ["a", "b", "a"]})
    for model in (SymbolicRegressor(), ParameterOptimizer("p1*dose")):
        refused("group='kind' of SymbolicRegressor", model.fit, table, [1.0, 2.0, 3.0])
    file = tmp_path / "doses.csv"
    table.assign(rate=[1, 2, 3]).to_csv(file, index=False)
    for words in (["search", str(file), "--target", "rate"], ["eval", str(file), "dose"]):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert "--ignore kind" in told
        assert ("--group kind" in told) == (words[0] == "search")


def test_the_name_that_was_meant_is_said():
    for meant, settings in (
        *(("square", {"operators": ["sqare"]}), ("count", {"constraints": {"counts": {"sin": 1}}})),
        ("depth", {"constraints": {"dept": 3}}),
        ("increasing", {"constraints": {"monotonic": {"mass": "increase"}}}),
        ("mass", {"constraints": {"monotonic": {"mas": "increasing"}}}),
        ("prediction", {"model_selection": "predictions"}),
        *(("length", {"units": {"lenght": "m", "mass": "kg"}}), ("mass", {"group": "Mass"})),
        *(("cpu", {"engine": "cpus"}), ("numbers", {"snap": "number"})),
    ):
        frame = pd.DataFrame(ROWS, columns=["mass", "length"])
        refused(rf"Did you mean .*{meant}", SymbolicRegressor(**settings).fit, frame, ROWS[:, 0])


def test_a_slip_in_an_operator_and_limits_of_arguments_are_answered():
    refused(r"Did you mean cos\?", operator_name, "cosine")
    assert [operator_name(name) for name in ("plus", "**", "cond")] == ["add", "pow", "where"]
    model = SymbolicRegressor(constraints={"sin": 9, "pow": (-1, 1)})
    refused(r"client.search\(data, arguments=...\)", model.fit, ROWS, ROWS[:, 0])
    for name in OPERATORS:
        if len(name) > 2:
            refused(r"Did you mean \w+\?", operator_name, name + "q")


def test_another_word_is_no_slip():
    for given, known in (
        *(("params", "partial"), ("min", "missing"), ("weights", "digits"), ("cosine", "cospi")),
        *(("plus", "softplus"), ("cond", "round"), ("units", "quiet"), ("gpu", "cpu")),
    ):
        assert did_you_mean(given, [known], "") == ""


def test_a_list_has_the_closest_names_and_a_long_one_takes_no_time():
    assert nearest_first("b", ["c", "a", "b"]) == "c, a, b"
    assert did_you_mean("max_iter", ["partial", "max_iterations"], "").endswith("max_iterations?")
    assert nearest_first("seeds", [*map(str, range(90)), "seed"]).startswith("seed, ")
    assert nearest_first("q", map(str, range(90))).endswith(", ...")
    assert did_you_mean("zzzz", ["abc"], "Use abc") == "Use abc"
    assert did_you_mean(3, [1, 2], "Use 1 or 2") == "Use 1 or 2"
    assert did_you_mean(None, ["none"], "") == "Did you mean none?"
    asked = []
    names = (asked.append(place) or f"name{place}" for place in range(10**9))
    assert did_you_mean("name7", names, "") == "Did you mean name7?"
    assert len(asked) < 10_000


SEARCH = ["search", "t.csv", "--target", "y"]
FIT = ["fit", "t.csv", "x1", "--target", "y"]


def test_a_slip_in_a_command_is_answered(capsys):
    for run, words, meant in (
        (main, ["serach", "t.csv"], "search"),
        (main, ["search", "t.csv", "--target", "y", "--model-selection", "acuracy"], "accuracy"),
        (main, ["eval", "t.csv", "x1", "--los", "mse", "--wieghts", "w"], "--weights"),
        (lambda words: Config.from_arguments(words, {}), ["--max-requsts", "3"], "--max-requests"),
        (main, [*SEARCH, "--units", "kg"], "only in Python: SymbolicRegressor(units=...)"),
        (main, [*SEARCH, "--time", "3"], "Write --max-seconds"),
        (main, [*FIT, "--bounds", "0"], "client.optimize(..., bounds="),
        (main, [*FIT, "--params", "1,2"], "several with spaces"),
        (main, [*SEARCH, "--hurz", "3"], "unrecognized arguments: --hurz 3\n"),
    ):
        with pytest.raises(SystemExit):
            run(words)
        is_slip = meant.strip("-").replace("-", "").isalpha()
        assert (f"Did you mean {meant}?" if is_slip else meant) in capsys.readouterr().err


def test_help_names_a_default_once(capsys):
    with pytest.raises(SystemExit):
        Config.from_arguments(["--help"], {"WARPFIT_CACHE_DIR": "/somewhere"})
    told = " ".join(capsys.readouterr().out.split())
    assert "compiled code (default: /somewhere) --" in told


def test_formulas_of_a_search_are_a_sequence(found):
    result = found["search"]
    assert [str(formula) for formula in result] == [*result.texts]
    assert result[-1] == result.best == result.formula() == result.formula(len(result) - 1)
    with pytest.raises(IndexError):
        result[len(result)]


def test_rows_are_taken_as_of_a_sequence_and_columns_from_the_frame():
    assert TABLE[-1].complexity == 3 and [each.complexity for each in TABLE[1:]] == [2, 3]
    assert [each.complexity for each in TABLE] == [1, 2, 3]
    for columns in ("loss", ["loss", "score"]):
        refused("to_pandas", TABLE.__getitem__, columns)
    with pytest.raises(IndexError):
        TABLE[3]


def test_the_printed_table_marks_what_is_chosen_and_shows_the_number_that_decides():
    rows = [replace(row, taken_by_constants=5.0 * place) for place, row in enumerate(TABLE)]
    rows[2] = replace(rows[2], is_supported=False)
    shown = EquationTable(tuple(rows), below="more", chosen=1, criterion="prediction")
    header, *lines = str(shown).splitlines()
    assert header.split()[-3:] == ["length", "choice", "equation"]
    assert [line[0] for line in lines[:3]] == [" ", "*", "?"]
    assert [line.split()[-3] for line in lines[:3]] == ["2", "7", "12"]
    assert lines[3:] == ["", "* chosen by 'prediction', ? not supported by the rows", "more"]
    assert "<td>*</td><td>2</td>" in shown._repr_html_()
    assert "chosen by" in shown._repr_html_()
    assert "choice" not in str(TABLE), "where it is the description length"


def test_the_table_is_latex_and_csv_that_a_frame_reads(tmp_path):
    lines = TABLE.latex_table([0, 2], precision=2, columns=["loss", "equation"]).splitlines()
    assert lines[2] == r"loss & equation \\"
    assert lines[4:6] == [r"1 & $2 \cdot x_1$ \\", r"0.33 & $2 \cdot x_1$ \\"]
    refused("no column 'lost'", TABLE.latex_table, columns=["lost"])
    text = TABLE.to_csv(tmp_path / "front.csv")
    assert (tmp_path / "front.csv").read_text() == text
    lines = TABLE.latex_table().splitlines()
    assert lines[0] == r"\begin{tabular}{rrrrrl}"
    assert lines[2] == r"size & loss & held out & score & length & equation \\"
    assert lines[4].endswith(r"& $2 \cdot x_1$ \\") and len(lines) == 3 + 5 + 1
    read = pd.read_csv(io.StringIO(text))
    assert read["complexity"].tolist() == [1, 2, 3]
    assert read["loss"].tolist() == [1.0, 0.5, 1.0 / 3.0]
    assert read["equation"].tolist() == ['x1, "2"'] * 3 and read["r2"].isna().all()
