"""Words of other packages and slips: the error says which word is meant."""

import copy
import pickle
import traceback
from functools import partial

import numpy as np
import pytest

import warpfit
import warpfit.testing
from warpfit.cli.main import main
from warpfit.errors import did_you_mean, nearest_first
from warpfit.losses import as_loss
from warpfit.ops import OPERATORS
from warpfit.sklearn import ParameterOptimizer, SymbolicClassifier, SymbolicRegressor
from warpfit.sklearn.constraints import operator_name
from warpfit.sklearn.keywords import check_loss
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
            "search": of_search, "proposals": client.propose(data, ["p1*x1"]),
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
        ("warpfit", "search", "Use search of a client"),
        ("warpfit", "curve_fit", "Use optimize of a client"),
        ("proposals", "errors", r"Use \[answer.error for answer in found\]"),
        ("proposals", "bes", r"Did you mean best\?"),
    ],
)
def test_a_missing_attribute_says_what_is_meant(found, owner, name, remedy):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'. {remedy}"):
        getattr(found[owner], name)
    assert not hasattr(found[owner], name)


def test_python_adds_no_guess_of_its_own(found):
    for owner, name in (
        (warpfit, "conect"),
        (found["fit"], "losss"),
        (found["client"], "optimise"),
    ):
        with pytest.raises(AttributeError) as caught:
            getattr(owner, name)
        told = "".join(traceback.format_exception(caught.value))
        assert told.count("Did you mean") == 1


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
    assert result.formula() == result.best
    assert result[-1] == result.best == result.formula(len(result) - 1)
    with pytest.raises(IndexError):
        result[len(result)]


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda c, d: c.optimize(d, ["p1*x1"], p0=[1]), "Write parameters="),
        (lambda c, d: c.optimize(d, ["p1*x1"], vary=[1]), "Write fixed="),
        (lambda c, d: c.optimize(d, ["p1*x1"], min=[1]), "Write bounds="),
        (lambda c, d: c.search(d, random_state=1), "Write seed="),
        (lambda c, d: c.search(d, constraints={}), "counts=, nesting="),
        (lambda c, d: c.propose(d, ["x1"], p0=1), "Use held_out, loss, "),
        (lambda c, d: c.upload(ROWS, weight=[1]), "Did you mean weights=?"),
        (lambda c, d: c.upload(ROWS, yerr=[1]), "Write weights="),
        (lambda c, d: c.optimize(d, ["p1*x1"], sigma=[1]), "weights= to upload"),
        (lambda c, d: c.optimize(d, ["p1*x1"], maxfev=9), "max_iterations="),
        (lambda c, d: c.evaluate(d, ["x1"], operators={"a": "b"}), "from_deap"),
        (lambda c, d: c.search(d, max_seconds=3), "seconds="),
        (lambda c, d: c.evaluate(d, ["np.exp(x1)"]), "without np, such as exp"),
        (lambda c, d: warpfit.define("logistic", "1/(1+exp(-a))"), "Use it as it is"),
        (lambda c, d: warpfit.connect(host="h", port=1), 'the address as "HOST:PORT"'),
        (lambda c, d: warpfit.connect_async(timeout=1), "timeout= to each call"),
        (lambda c, d: warpfit.connect(adress="h:1"), "Did you mean address=?"),
        (lambda c, d: warpfit.local(devices="cpu"), 'local("--devices", "cpu")'),
        (lambda c, d: warpfit.define("2nd", "a*a"), "begins with a letter"),
    ],
)
def test_a_word_of_another_package_in_a_call_is_answered(found, call, remedy):
    with pytest.raises(warpfit.WarpfitError) as caught:
        call(found["client"], found["data"])
    assert remedy in caught.value.remedy


# --------------------------------------------------------------------------------- estimators


def refused(call):
    with pytest.raises(warpfit.InvalidArgumentError) as caught:
        call()
    return caught.value.remedy


def test_parameters_are_set_by_our_names():
    model = SymbolicRegressor().set_params(max_size=7)
    assert model.max_size == 7
    assert refused(lambda: model.set_params(maxsize=9)) == "Write max_size=9"
    assert refused(lambda: model.set_params(max_siz=9)) == "Did you mean max_size=?"
    assert model.max_size == 7
    one = SymbolicClassifier(search=SymbolicRegressor())
    assert one.set_params(search__max_size=5).search.max_size == 5
    assert "search=SymbolicRegressor" in refused(lambda: one.set_params(max_size=3))
    assert "Write max_size=3" in refused(lambda: one.set_params(search__maxsize=3))


def test_words_of_curve_fit_are_answered():
    for keywords, ours in (
        ({"p0": [1.0]}, "Write start=[1.0]"),
        ({"sigma": [1.0]}, "sample_weight"),
        ({"bound": (0, 1)}, "Did you mean bounds=?"),
    ):
        assert ours in refused(partial(ParameterOptimizer, "p1*x1", **keywords))


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
    assert ours in refused(lambda: model.fit(ROWS, ROWS[:, 0]))
    assert ours in refused(lambda: SymbolicRegressor(elementwise_loss=loss))
    for own in ("mse", "huber", "abs(f - y)", "(prediction - target)^2"):
        check_loss(own)


def test_limits_of_arguments_name_the_call_that_has_them():
    model = SymbolicRegressor(constraints={"sin": 9, "pow": (-1, 1)})
    assert "client.search(data, arguments=...)" in refused(lambda: model.fit(ROWS, ROWS[:, 0]))
    model = SymbolicRegressor(constraints={"dept": 3})
    assert refused(lambda: model.fit(ROWS, ROWS[:, 0])) == "Did you mean depth?"


def test_texts_in_a_column_may_name_groups(tmp_path, capsys, monkeypatch):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"dose": [1.0, 2.0, 3.0], "kind": ["a", "b", "a"]})
    for model in (SymbolicRegressor(), ParameterOptimizer("p1*dose")):
        remedy = refused(lambda model=model: model.fit(table, [1.0, 2.0, 3.0]))
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


def call(method, *arguments, **options):
    with warpfit.testing.client() as client:
        data = client.upload(ROWS, ROWS[:, 0])
        getattr(client, method)(data, *arguments, **options)


evaluate, fit = partial(call, "evaluate", ["x1"]), partial(call, "optimize", ["p1*x1"])
search = partial(call, "search", generations=1)


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
        "javascript": lambda: warpfit.parse("x1").code("JS"),
        "cos": lambda: warpfit.parse("coss(x1)"),
        "huber": lambda: as_loss("hubber"),
        "relative": lambda: warpfit.LossFunction.parse("d^2", "relativ"),
        "square ": lambda: warpfit.Program.apply("sqare", warpfit.Program.variable(0)),
        "nmse": lambda: evaluate(loss="NMSE"),
        "compiled": lambda: evaluate(tier="compile"),
        "max_depth": lambda: search(max_dept=3),
        "drop": lambda: fit(missing="drops"),
    }.items(),
)
def test_the_name_that_was_meant_is_said(meant, call):
    with pytest.raises(warpfit.WarpfitError, match=rf"Did you mean .*{meant.strip()}"):
        call()


def test_a_slip_in_an_operator_is_told_from_another_operator():
    for name in OPERATORS:
        if len(name) > 2:
            with pytest.raises(warpfit.InvalidArgumentError, match=r"Did you mean \w+\?"):
                operator_name(name + "q")


@pytest.mark.parametrize(
    ("given", "known"),
    [("params", "partial"), ("min", "missing"), ("weights", "digits"), ("cosine", "cospi"),
     ("plus", "softplus"), ("cond", "round"), ("units", "quiet"), ("gpu", "cpu")],
)  # fmt: skip
def test_another_word_is_no_slip(given, known):
    assert did_you_mean(given, [known], "") == ""


def test_a_list_that_is_too_long_has_the_closest_names():
    assert nearest_first("b", ["c", "a", "b"]) == "c, a, b"
    assert (
        did_you_mean("max_iter", ["partial", "max_iterations"], "")
        == "Did you mean max_iterations?"
    )
    assert nearest_first("seeds", [*map(str, range(90)), "seed"]).startswith("seed, ")
    assert nearest_first("q", map(str, range(90))).endswith(", ...")


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


def test_help_names_a_default_once(capsys):
    with pytest.raises(SystemExit):
        Config.from_arguments(["--help"], {"WARPFIT_CACHE_DIR": "/somewhere"})
    told = " ".join(capsys.readouterr().out.split())
    assert "compiled code (default: /somewhere) --" in told


SEARCH = ["search", "t.csv", "--target", "y"]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["search", "t.csv", "--target", "y", "--max-secnds", "3"], "--max-seconds"),
        (["serach", "t.csv"], "search"),
        (["search", "t.csv", "--target", "y", "--model-selection", "acuracy"], "accuracy"),
        (["eval", "t.csv", "x1", "--los", "mse", "--wieghts", "w"], "--weights"),
        (["mcp", "--rot", "."], "--root"),
        ([*SEARCH, "--units", "kg"], "only in Python: SymbolicRegressor(units=...)"),
        ([*SEARCH, "--latex"], "only in Python: program.latex(names)"),
        ([*SEARCH, "--time", "3"], "Write --max-seconds"),
        ([*SEARCH, "--seed", "3"], "Write --random-state"),
        (["fit", "t.csv", "x1", "--target", "y", "--p0", "1", "2"], "Write --params"),
        (["fit", "t.csv", "x1", "--target", "y", "--bounds", "0"], "client.optimize(..., bounds="),
        (["fit", "t.csv", "x1", "--target", "y", "--params", "1,2"], "several with spaces"),
        (["eval", "t.csv", "a", "*", "b"], "Quote an expression"),
        ([*SEARCH, "--hurz", "3"], "unrecognized arguments: --hurz 3\n"),
    ],
)
def test_a_slip_in_a_command_is_answered(words, meant, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["warpfit", *words])
    with pytest.raises(SystemExit):
        main()
    is_slip = meant.lstrip("-").replace("-", "").isalpha()
    assert (f"Did you mean {meant}?" if is_slip else meant) in capsys.readouterr().err
    with pytest.raises(SystemExit):
        Config.from_arguments(["--max-requsts", "3"], {})
    assert "Did you mean --max-requests?" in capsys.readouterr().err
