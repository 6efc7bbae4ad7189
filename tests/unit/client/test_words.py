"""Words of other packages and slips: the error says which word is meant."""

import copy
import inspect
import io
import json
import pickle
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

import warpfit
import warpfit.sklearn
import warpfit.testing
from support.refusals import refused
from warpfit.cli.main import main
from warpfit.errors import did_you_mean
from warpfit.ops import OPERATORS
from warpfit.sklearn import (
    ParameterOptimizer,
    SymbolicClassifier,
    SymbolicRegressor,
    SymbolicTransformer,
)
from warpfit.sklearn.constraints import operator_name
from warpfit.sklearn.equations import Equation, EquationTable
from warpfit.sklearn.keywords import (
    OF_OTHER_ESTIMATORS,
    OF_OTHER_FITS,
    OF_OTHER_OBJECTS,
    OF_OTHER_PREDICTIONS,
    check_loss,
)
from warpfit_server.config import Config

ROWS = np.arange(12.0).reshape(6, 2)


@pytest.fixture(scope="module")
def found():
    """Objects of each kind that a caller holds."""
    with warpfit.testing.client() as client:
        data = client.upload(ROWS, ROWS[:, 0])
        fit = client.optimize(data, ["p1*x1"])
        answer = client.run(data, ["x1"], loss="mse")
        of_search = client.search(data, generations=1)
        yield {
            "client": client, "data": data, "fit": fit, "answer": answer, "warpfit": warpfit,
            "search": of_search,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "name", "remedy"),
    [
        ("fit", "popt", "Use parameters"),
        ("fit", "bic", "Use evidence"),
        ("fit", "predict", r"Use formula\(\)"),
        ("fit", "losss", r"Did you mean loss\?"),
        ("data", "shape", "Use layout"),
        ("data", "close", r"Use client.release\(data\)"),
        ("client", "fit", "Use optimize"),
        *(("search", name, "Use ") for name in ("front", "equations_", "to_pandas", "get_best")),
        ("client", "optimise", r"Did you mean optimize\?"),
        ("warpfit", "SymbolicRegressor", "Write: from warpfit.sklearn import SymbolicRegressor"),
        ("warpfit", "conect", r"Did you mean connect\?"),
    ],
)
def test_a_missing_attribute_says_what_is_meant(found, owner, name, remedy):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'. {remedy}"):
        getattr(found[owner], name)
    assert not hasattr(found[owner], name)


def test_a_module_that_is_not_imported_is_named(found):
    found = warpfit.__getattr__  # its own, whatever tests have imported
    with pytest.raises(AttributeError, match=r"Write: import warpfit\.frontends"):
        found("frontends")
    with pytest.raises(AttributeError, match=r"no attribute 'far_and_wild'$"):
        found("far_and_wild")
    with pytest.raises(AttributeError, match=r"no attribute '__wrapped__'$"):
        found("__wrapped__")


def test_what_cannot_be_found_harms_no_copy(found):
    assert copy.deepcopy(found["data"]) is found["data"]
    for name in ("fit", "answer"):
        one = found[name]
        assert repr(copy.copy(one)) == repr(copy.deepcopy(one)) == repr(one)
        assert repr(pickle.loads(pickle.dumps(one))) == repr(one)
        assert not hasattr(one, "_private")
        assert getattr(one, "nothing", 3) == 3


def test_formulas_of_a_search_are_a_sequence(found):
    result = found["search"]
    assert [str(formula) for formula in result] == [*result.texts]
    assert result[-1] == result.best == result.formula(len(result) - 1)
    with pytest.raises(IndexError):
        result[len(result)]


# --------------------------------------------------------------------------------- estimators


def remedy_of(call):
    with pytest.raises(warpfit.InvalidArgumentError) as caught:
        call()
    return caught.value.remedy


def test_parameters_are_set_by_our_names():
    model = SymbolicRegressor().set_params(max_size=7)
    assert model.max_size == 7
    assert remedy_of(lambda: model.set_params(maxsize=9)) == "Write max_size=9"
    assert remedy_of(lambda: model.set_params(max_siz=9)) == "Did you mean max_size=?"
    assert model.max_size == 7
    one = SymbolicClassifier(search=SymbolicRegressor())
    assert one.set_params(search__max_size=5).search.max_size == 5
    assert "search=SymbolicRegressor" in remedy_of(lambda: one.set_params(max_size=3))
    assert "Write max_size=3" in remedy_of(lambda: one.set_params(search__maxsize=3))


def test_words_of_curve_fit_are_answered():
    for keywords, ours in (
        ({"p0": [1.0]}, "Write start=[1.0]"),
        ({"sigma": [1.0]}, "sample_weight"),
        ({"bound": (0, 1)}, "Did you mean bounds=?"),
    ):
        assert ours in remedy_of(partial(ParameterOptimizer, "p1*x1", **keywords))


@pytest.mark.parametrize(
    ("loss", "ours"),
    [
        ("mean absolute error", "loss='mae'"),
        ("L1DistLoss()", "loss='mae'"),
        ("log loss", "SymbolicClassifier"),
        ("spearman", "no sums over rows"),
        ("loss(prediction, target) = (prediction - target)^2", "loss='(f - y)^2'"),
        ("my_loss(x, z, weights) = weights * abs(x - z)", "loss='w * abs(f - y)'"),
    ],
)
def test_a_loss_of_another_package_is_ours(loss, ours):
    model = SymbolicRegressor(loss=loss)
    assert ours in remedy_of(lambda: model.fit(ROWS, ROWS[:, 0]))
    assert ours in remedy_of(lambda: SymbolicRegressor(elementwise_loss=loss))
    for own in ("mse", "huber", "abs(f - y)", "(prediction - target)^2"):
        check_loss(own)


def test_limits_of_arguments_name_the_call_that_has_them():
    model = SymbolicRegressor(constraints={"sin": 9, "pow": (-1, 1)})
    assert "client.search(data, arguments=...)" in remedy_of(lambda: model.fit(ROWS, ROWS[:, 0]))
    model = SymbolicRegressor(constraints={"dept": 3})
    assert remedy_of(lambda: model.fit(ROWS, ROWS[:, 0])) == "Did you mean depth?"


def test_texts_in_a_column_may_name_groups(tmp_path, capsys, monkeypatch):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"dose": [1.0, 2.0, 3.0], "kind": ["a", "b", "a"]})
    for model in (SymbolicRegressor(), ParameterOptimizer("p1*dose")):
        remedy = remedy_of(lambda model=model: model.fit(table, [1.0, 2.0, 3.0]))
        assert "group='kind' of SymbolicRegressor" in remedy
    file = tmp_path / "doses.csv"
    table.assign(rate=[1, 2, 3]).to_csv(file, index=False)
    for words, is_said in (
        (["search", str(file), "--target", "rate"], True),
        (["eval", str(file), "dose"], False),
    ):
        monkeypatch.setattr("sys.argv", ["warpfit", *words])
        assert main() == 2
        told = capsys.readouterr().err
        assert "--ignore kind" in told
        assert ("--group kind" in told) == is_said


# ------------------------------------------------------------------------------------------- slips


def model(**settings):
    return SymbolicRegressor(**settings).fit(ROWS, ROWS[:, 0])


def frame(**settings):
    table = pytest.importorskip("pandas").DataFrame(ROWS, columns=["mass", "length"])
    return SymbolicRegressor(**settings).fit(table, ROWS[:, 0])


@pytest.mark.parametrize(
    ("meant", "call"),
    {
        "square": lambda: model(operators=["sqare"]),
        "count": lambda: model(constraints={"counts": {"sin": 1}}),
        "increasing": lambda: model(constraints={"monotonic": {"x1": "increase"}}),
        "mass": lambda: frame(constraints={"monotonic": {"mas": "increasing"}}),
        "prediction": lambda: model(model_selection="predictions"),
        "cpu": lambda: model(engine="cpus"),
        "numbers": lambda: model(snap="number"),
        "length": lambda: frame(units={"lenght": "m", "mass": "kg"}),
        "mass ": lambda: frame(group="Mass"),
    }.items(),
)
def test_the_name_that_was_meant_is_said(meant, call):
    refused(rf"Did you mean .*{meant.strip()}", call)


def test_a_slip_in_an_operator_is_told_from_another_operator():
    for name in OPERATORS:
        if len(name) > 2:
            refused(r"Did you mean \w+\?", operator_name, name + "q")


def test_what_is_like_no_name_gets_the_list():
    assert did_you_mean("zzzz", ["abc"], "Use abc") == "Use abc"
    assert did_you_mean("zzzz", [], "Use nothing") == "Use nothing"
    assert did_you_mean(3, [1, 2], "Use 1 or 2") == "Use 1 or 2"
    assert did_you_mean(None, ["none"], "") == "Did you mean none?"


def test_a_long_list_of_names_takes_no_time():
    asked = []
    names = (asked.append(place) or f"name{place}" for place in range(10**9))
    assert did_you_mean("name7", names, "") == "Did you mean name7?"
    assert len(asked) < 10_000


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["search", "t.csv", "--target", "y", "--max-secnds", "3"], "--max-seconds"),
        (["serach", "t.csv"], "search"),
        (["search", "t.csv", "--target", "y", "--model-selection", "acuracy"], "accuracy"),
        (["eval", "t.csv", "x1", "--los", "mse", "--wieghts", "w"], "--weights"),
        (["mcp", "--rot", "."], "--root"),
    ],
)
def test_a_slip_in_a_command_is_answered(words, meant, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["warpfit", *words])
    with pytest.raises(SystemExit):
        main()
    assert f"Did you mean {meant}?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        Config.from_arguments(["--max-requsts", "3"], {})
    assert "Did you mean --max-requests?" in capsys.readouterr().err


# --------------------------------------------------- keywords, methods and attributes of estimators


OWN = SymbolicRegressor().get_params()
#: Names of PySR 1.5's `PySRRegressor`, which tests do not install, from its documentation.
PYSR = json.loads((Path(__file__).parents[2] / "data" / "pysr.json").read_text())
ESTIMATORS = (ParameterOptimizer, SymbolicClassifier, SymbolicRegressor, SymbolicTransformer)


def mistaken(**keywords):
    return refused("no keyword", SymbolicRegressor, **keywords)


@pytest.mark.parametrize("value", [3, None, "mse", ["a", "b"]])
def test_a_keyword_of_another_program_is_answered_by_ours(value):
    others = {"sample_weight", "SymbolicClassifier(search", "DataFrame"}
    others.add("SymbolicTransformer(n_components")
    for name in OF_OTHER_ESTIMATORS:
        assert name not in OWN
        remedy = mistaken(**{name: value}).remedy
        words = set(remedy.replace("=", " ").replace(",", " ").split())
        assert remedy.startswith("Leave it out: ") or words & (OWN.keys() | others), remedy


def test_each_keyword_of_other_packages_is_known():
    gplearn = pytest.importorskip("gplearn.genetic")
    operon = pytest.importorskip("pyoperon.sklearn")
    kinds = (gplearn.SymbolicRegressor, gplearn.SymbolicClassifier, gplearn.SymbolicTransformer)
    for kind in (*kinds, operon.SymbolicRegressor):
        theirs = inspect.signature(kind).parameters.keys()
        assert not theirs - OWN.keys() - OF_OTHER_ESTIMATORS.keys()
    assert not set(PYSR["settings"]) - OWN.keys() - OF_OTHER_ESTIMATORS.keys()
    own = inspect.signature(SymbolicRegressor.fit).parameters
    assert not set(PYSR["fit"]) - own.keys() - OF_OTHER_FITS.keys()
    methods = {name for name in PYSR["methods"] if not hasattr(SymbolicRegressor, name)}
    assert not methods - OF_OTHER_OBJECTS.keys()


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"niterations": 40}, "Write generations=40"),
        ({"maxdepth": 5}, "Write constraints={'depth': 5}"),
        ({"nested_constraints": {"sin": {"sin": 0}}}, "constraints={'nesting': {'sin': {'sin'"),
        ({"unary_operators": ["cos", "inv(x) = 1/x"]}, "Write operators=['cos', 'inv']"),
        ({"function_set": ("add", "div")}, "Write operators=['add', 'div']"),
        ({"allowed_symbols": "add,mul,constant,variable"}, "Write operators=['add', 'mul']"),
        ({"elementwise_loss": "HuberLoss(2.0)"}, "loss=warpfit.losses.huber(2.0)"),
        ({"metric": "mean absolute error"}, "Write loss='mae'"),
        ({"objectives": ["r2", "length"]}, "Write loss='r2'"),
        ({"timeout_in_seconds": 60}, "Write max_seconds=60"),
        ({"batch_size": 50}, "Write sample_rows=50"),
        ({"max_samples": 0.9}, "sample_rows= with a number of rows"),
        ({"verbosity": 0}, "Write verbose=False"),
        ({"equation_file": "hall.csv"}, "Write output='hall.csv'"),
        ({"feature_names": ["r", "k"]}, "a DataFrame with columns ['r', 'k']"),
        ({"model_selection_criterion": "minimum_description_length"}, "'description_length'"),
        ({"tournament_size": 5}, "Leave it out: the engine varies"),
        ({"parsimony": 0.01}, "Write max_size="),
    ],
)
def test_the_value_is_translated(given, ours):
    assert ours in mistaken(**given).remedy


@pytest.mark.parametrize(
    "given",
    [
        {"maxdepth": 5}, {"nested_constraints": {"sin": {"sin": 0}}}, {"maxsize": 20},
        {"unary_operators": ["cos", "inv(x) = 1/x"]}, {"elementwise_loss": "HuberLoss(2.0)"},
        {"allowed_symbols": "add,sub,mul,div,constant,variable,aq"}, {"metric": "rmse"},
        {"model_selection_criterion": "bayesian_information_criterion"}, {"print_precision": 5},
    ],
)  # fmt: skip
def test_what_is_to_be_written_is_a_setting(given):
    written = mistaken(**given).remedy.removeprefix("Write ")
    model = eval(f"SymbolicRegressor({written})", {**globals()})
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


@pytest.mark.parametrize("kind", [SymbolicClassifier, SymbolicTransformer])
@pytest.mark.parametrize("name", ["max_seconds", "operators", "niterations"])
def test_keywords_of_a_search_belong_into_it(kind, name):
    refused("search=SymbolicRegressor", kind, **{name: 3})


def test_a_keyword_of_another_fit_or_prediction_is_answered_by_ours():
    model = SymbolicRegressor()
    others = {model.fit: OF_OTHER_FITS, model.predict: OF_OTHER_PREDICTIONS}
    for method, name in [(method, name) for method, names in others.items() for name in names]:
        refused(
            f"no keyword '{name}'",
            method,
            [[1.0]],
            *[[1.0]] * (method == model.fit),
            **{name: None},
        )


def test_a_slip_is_answered_by_the_nearest_keyword():
    assert "Did you mean max_seconds=" in mistaken(max_second=3).remedy
    refused("Use search, random_state", SymbolicClassifier, wild=3)


# ------------------------------------------------------------------------------------- attributes


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_an_attribute_of_another_program_says_what_to_call(kind):
    model = kind("p1*x1") if kind is ParameterOptimizer else kind()
    for name, remedy in OF_OTHER_OBJECTS.items():
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=f"no attribute '{name}'. Use ") as caught:
            getattr(model, name)
        assert remedy in str(caught.value)


def test_what_an_attribute_is_answered_with_is_there():
    known = {one for kind in ESTIMATORS for one in dir(kind) if one[0] != "_"} | OWN.keys()
    known |= {"program_", "expression_", "parameters_", "standard_errors_", "loss_", "n_iter_"}
    known |= {"pickle", "sklearn", "client", "programs_"}
    for text in OF_OTHER_OBJECTS.values():
        assert set(re.findall(r"\w+", text)) & known, text


def test_a_slip_in_an_attribute_is_answered_by_the_nearest():
    with pytest.raises(AttributeError, match=r"Did you mean plot_front\?"):
        SymbolicRegressor().plot_fronts  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'wild_and_far'$"):
        SymbolicRegressor().wild_and_far  # noqa: B018
    with pytest.raises(AttributeError, match="pickle or joblib"):
        SymbolicRegressor.from_file("hall_of_fame.csv")
    assert not hasattr(SymbolicRegressor, "from_file")


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_copies_pickles_and_questions_for_attributes_work(kind):
    model = kind("p1*x1") if kind is ParameterOptimizer else kind()
    for other in (pickle.loads(pickle.dumps(model)), copy.copy(model), copy.deepcopy(model)):
        assert type(other) is kind
        assert other.get_params().keys() == model.get_params().keys()
    assert not hasattr(model, "feature_names_in_")
    assert not hasattr(model, "__wrapped__")
    assert getattr(model, "nothing_of_it", 3) == 3
    assert repr(model).startswith(kind.__name__)


def test_what_is_there_after_a_fit_says_so():
    for name in ("equations_", "front_", "subformulas_", "constants_"):
        with pytest.raises(NotFittedError, match="not fitted yet"):
            getattr(SymbolicRegressor(), name)


# ------------------------------------------------------------------------------ table of equations


def table(count=3):
    rows = [
        Equation(
            complexity=size, loss=1.0 / size, excess=1.0 / size, score=0.5, description_length=2.0,
            r2=float("nan"), r2_held_out=0.5, program=warpfit.parse("x1*2"), equation='x1, "2"',
            latex=r"2 \cdot x_1",
        )
        for size in range(1, count + 1)
    ]  # fmt: skip
    return EquationTable(tuple(rows))


def test_what_a_frame_has_is_in_the_frame():
    for name in ("iloc", "loc", "columns", "sort_values", "head", "shape"):
        with pytest.raises(AttributeError, match=rf"to_pandas\(\).{name}"):
            getattr(table(), name)
        assert not hasattr(table(), name)


def test_rows_are_taken_as_of_a_sequence_and_columns_from_the_frame():
    assert table()[-1].complexity == 3
    assert [each.complexity for each in table()[1:]] == [2, 3]
    assert [each.complexity for each in table()] == [1, 2, 3]
    for columns in ("loss", ["loss", "score"]):
        with pytest.raises(warpfit.InvalidArgumentError, match="to_pandas"):
            table()[columns]
    with pytest.raises(IndexError):
        table()[3]
    assert str(pickle.loads(pickle.dumps(table()))) == str(copy.deepcopy(table())) == str(table())


def test_the_table_is_latex_and_csv_that_a_frame_reads():
    lines = table().latex_table().splitlines()
    assert lines[0] == r"\begin{tabular}{rrrrrl}"
    assert lines[2] == r"size & loss & held out & score & length & equation \\"
    assert lines[4].endswith(r"& $2 \cdot x_1$ \\")
    assert len(lines) == 3 + 5 + 1
    read = pytest.importorskip("pandas").read_csv(io.StringIO(table().to_csv()))
    assert read["complexity"].tolist() == [1, 2, 3]
    assert read["loss"].tolist() == [1.0, 0.5, 1.0 / 3.0]
    assert read["equation"].tolist() == ['x1, "2"'] * 3
    assert read["r2"].isna().all()
