"""The scikit-learn estimators against a real server."""

import json
import os
import pickle
import re
import runpy
import signal
import time
import tomllib
import warnings
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import yaml

import warpfit
from support.servers.server import ServerProcess
from warpfit.cli.main import main
from warpfit.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from warpfit.expressions.language import to_text

sklearn = pytest.importorskip("sklearn", minversion="1.6")

from sklearn.base import clone  # noqa: E402
from sklearn.exceptions import NotFittedError  # noqa: E402
from sklearn.model_selection import cross_val_score  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

from warpfit.formulas.units import check_units, dimension, dimensions  # noqa: E402
from warpfit.sklearn import (  # noqa: E402
    ParameterOptimizer,
    SearchWarning,
    SymbolicClassifier,
    SymbolicRegressor,
    SymbolicTransformer,
)
from warpfit.sklearn.constraints import consistency  # noqa: E402
from warpfit.sklearn.equations import selected  # noqa: E402
from warpfit.sklearn.genomes import Genomes  # noqa: E402
from warpfit.sklearn.target_search import Progress, TargetSearch  # noqa: E402

#: Operators that are enough for the law; searching with all of them takes three times as long.
FEW = ("+", "*", "/")


@pytest.fixture
def search(server: ServerProcess):
    """Make estimators that search for a short time, unless told otherwise."""

    def make(**changes):
        short = {"population": 30, "generations": 1, "operators": FEW, "random_state": 0}
        short["simplify"] = False  # which takes longer than such a search
        return SymbolicRegressor(address=server.address, **{**short, **changes})

    return make


def noisy(X, deviation=0.1):
    return law(X) + np.random.default_rng(5).normal(0, deviation, len(X))


def law(X):
    return 1.5 * X[:, 0] ** 2 / X[:, 1] + 0.25


def points(rows=300, seed=0):
    return np.random.default_rng(seed).uniform(1, 4, (rows, 3))


@pytest.mark.parametrize(
    "kind",
    [
        ParameterOptimizer,
        pytest.param(SymbolicRegressor, marks=pytest.mark.thorough),
        pytest.param(SymbolicClassifier, marks=pytest.mark.thorough),
        pytest.param(SymbolicTransformer, marks=pytest.mark.thorough),
    ],
)
def test_scikit_learns_own_checks(server: ServerProcess, kind):
    """Those of `check_estimator`; none is expected to fail."""
    small = {"population": 4, "generations": 1, "simplify": False, "operators": ("mul",)}
    search = SymbolicRegressor(address=server.address, **small)
    if kind in (SymbolicClassifier, SymbolicTransformer):
        estimator = kind(search)
    else:
        estimator = search if kind is SymbolicRegressor else kind(address=server.address)
    results = check_estimator(estimator, on_skip=None)
    passed = {result["check_name"] for result in results if result["status"] == "passed"}
    assert {result["status"] for result in results} <= {"passed", "skipped"}
    assert len(passed) > 40
    assert kind is SymbolicTransformer or "check_sample_weight_equivalence_on_dense_data" in passed


def test_formulas_tell_classes_and_are_features(search):
    pandas = pytest.importorskip("pandas")
    X = pandas.DataFrame(points(200), columns=["a", "b", "c"])
    odds = 3.0 * (X.a * X.b - 5.0)
    chance = 1.0 / (1.0 + np.exp(-odds))
    y = np.where(np.random.default_rng(0).uniform(size=200) < chance, "yes", "no")
    model = SymbolicClassifier(search(population=60)).fit(X, y)
    assert model.classes_.tolist() == ["no", "yes"]
    assert np.corrcoef(model.predict_proba(X)[:, 1], chance)[0, 1] > 0.98
    assert model.score(X, y) > 0.85
    assert "a" in model.expression_
    maker = SymbolicTransformer(search(), n_components=3).set_output(transform="pandas")
    features = maker.fit_transform(X, odds)
    assert features.columns.tolist() == maker.get_feature_names_out().tolist()
    assert features.shape == (200, 3)
    assert np.abs(np.corrcoef(features.T) - np.eye(3)).max() < 0.99
    assert abs(np.corrcoef(features.iloc[:, 0], odds)[0, 1]) > 0.999999
    with pytest.raises(InvalidArgumentError, match="n_components"):
        SymbolicTransformer(search(), n_components=0).fit(X, odds)


def test_guesses_begin_a_population(search):
    X = points(100)
    y = 2 * X[:, 0] + np.sin(3.1 * X[:, 1] * X[:, 2] + 0.7) / (1 + X[:, 0])
    guess = "2*x1 + sin(3*x2*x3 + p1)/(1 + x1)"
    model = search(guesses=[guess, "x1"], generations=0).fit(X, y)
    assert model.front_[-1].r2 > 0.999999
    assert search(generations=0).fit(X, y).front_[-1].r2 < 0.999
    for wrong in ("x1", ["x9"], ["+".join(["x1*x2"] * 30)]):
        with pytest.raises(warpfit.WarpfitError, match=r"guesses|x9"):
            search(guesses=wrong).fit(X, y)


def test_a_law_is_found_and_written_in_the_names_of_the_columns(server: ServerProcess):
    pandas = pytest.importorskip("pandas")
    X = points()
    table = pandas.DataFrame(X, columns=["a", "b", "c"])
    model = SymbolicRegressor(address=server.address, random_state=3).fit(table, law(X))
    fresh = points(seed=1)
    np.testing.assert_allclose(
        model.predict(pandas.DataFrame(fresh, columns=["a", "b", "c"])), law(fresh), rtol=1e-6
    )
    assert "a" in model.expression_
    assert "c" not in model.expression_
    np.testing.assert_allclose(
        warpfit.expressions.reference.evaluate_program(
            warpfit.parse(model.expression_, ("a", "b", "c")), fresh.T
        ),
        law(fresh),
        rtol=1e-6,
    )
    assert model.latex()


def test_equations_trade_length_for_accuracy(search):
    X = points(100)
    y = noisy(X)
    model = search(random_state=3).fit(X, y)
    sizes = [equation.complexity for equation in model.front_]
    losses = [equation.loss for equation in model.front_]
    assert sizes == sorted(set(sizes))
    assert losses == sorted(losses, reverse=True)
    for equation in model.front_:
        error = warpfit.expressions.reference.evaluate_program(equation.program, X.T) - y
        assert np.mean(error**2) == pytest.approx(equation.loss, rel=1e-6)
    # The same search again. Weights of a power of two round nothing: small ones do not make the
    # shortest description that of the shortest.
    light = search(random_state=3).fit(X, y, np.full(len(X), 2.0**-20))
    assert light.expression_ == model.expression_


def test_equations_are_chosen_by_criterion_or_index_and_leave_as_other_forms(search, monkeypatch):
    sympy = pytest.importorskip("sympy")
    pandas = pytest.importorskip("pandas")
    X = pandas.DataFrame(points(100), columns=["a", "b", "c"])
    y = noisy(points(100))
    model = search().fit(X, y)
    table, front = model.equations_, model.front_
    assert list(table) == front
    frame = table.to_pandas()
    assert frame.equation.tolist() == [equation.equation for equation in front]
    assert frame.r2_held_out.max() > 0.95
    for equation in front:
        error = model.predict(X, front.index(equation)) - y
        assert equation.r2 == pytest.approx(1 - np.mean(error**2) / np.var(y))
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, str(table).splitlines())) <= 80
    assert "held out" in str(table)
    assert f"${front[-1].latex}$" in table._repr_html_().replace("&lt;", "<")
    numbers = re.findall(r"[1-9][0-9.]*", " ".join(f"{e.equation} {e.latex}" for e in front))
    assert max(len(number.replace(".", "")) for number in numbers) <= 4
    picked = {}
    for criterion in ("best", "accuracy", "score", "description_length"):
        model.set_params(model_selection=criterion)
        picked[criterion] = model.program()
    assert picked["accuracy"] == front[-1].program == model.program(-1)
    assert picked["description_length"] == min(front, key=lambda e: e.choice_length).program
    assert picked["score"] == max(front, key=lambda equation: equation.score).program
    np.testing.assert_array_equal(
        model.predict(X, index=len(front) - 1), model.predict(X, index=-1)
    )
    formula = model.sympy(-1)
    assert formula.free_symbols <= set(sympy.symbols("a b c"))
    row = dict(zip("abc", X.iloc[0], strict=True))
    assert float(formula.evalf(subs=row)) == pytest.approx(model.predict(X[:1], index=-1)[0])
    axes = model.plot_front()
    assert (axes.get_yscale(), axes.get_legend()) == ("log", None)  # which would cover points
    assert to_text(model.program(), list("abc"), 4)[:9] in axes.get_title()
    assert model.plot_fit(X, y).lines
    with pytest.raises(InvalidArgumentError, match="equation 99"):
        model.predict(X, index=99)


@pytest.mark.parametrize(
    ("loss", "unit"),
    [
        *[("mse", 1.0), ("nmse", 1e-9), ("rmse", 1e160)],
        *(
            pytest.param(loss, unit, marks=pytest.mark.thorough)
            for loss, units in {
                "mse": (1e-9, 1e160),
                "nmse": (1.0, 1e160),
                "rmse": (1.0, 1e-9),
                "sse": (1.0, 1e-9, 1e160),
            }.items()
            for unit in units
        ),
    ],
)
def test_a_search_and_a_proposal_have_the_same_description_length(search, server, loss, unit):
    """Whatever the loss, weights and the unit of the target are."""
    random = np.random.default_rng(4)
    X, w = random.uniform(1, 3, (120, 2)), random.uniform(0.5, 2.0, 120)
    y = (X[:, 0] * 2.5 + X[:, 1] + random.normal(0, 0.1, 120)) * unit
    model = search(loss=loss).fit(X, y, w)
    with warpfit.connect(server.address) as client:
        data = client.upload(X, y, w, dtype="float64")
        formulas = [equation.program for equation in model.front_]
        found = client.propose(data, formulas, held_out=0.25)
    for equation, proposal in zip(model.front_, found, strict=True):
        if np.isfinite(proposal.description_length):  # squares may overflow
            assert equation.description_length == pytest.approx(
                proposal.description_length, rel=1e-6, abs=1e-6
            )
    assert unit == 1e160 or np.isfinite([each.description_length for each in found]).all()


def test_every_column_is_that_of_its_formula_and_rows_held_out_choose(search):
    X = points(200)
    y = np.random.default_rng(2).standard_t(2, len(X)) * 5.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = search(simplify=True, operators=("+", "*", "/", "log"))
        model.fit(X, y, np.full(len(X), 10.0))
        light = clone(model).fit(X, y, np.full(len(X), 2.0**-9))
    assert {warning.category for warning in caught} <= {SearchWarning}
    assert light.program_.codes.tolist() == model.program_.codes.tolist()
    order = np.unique(np.column_stack([X, y]), axis=0)
    rng = np.random.default_rng(sklearn.utils.check_random_state(0).randint(2**31))
    held = order[rng.permutation(len(X))[:20]]
    assert model.front_[0].program.variables == 0
    for equation in model.front_:
        assert equation.complexity == len(equation.program)
        value = warpfit.expressions.reference.evaluate_program(equation.program, X.T)
        assert np.mean((value - y) ** 2) == pytest.approx(equation.loss, rel=1e-6)
        value = warpfit.expressions.reference.evaluate_program(equation.program, held[:, :3].T)
        own = 1 - np.mean((value - held[:, 3]) ** 2) / np.var(held[:, 3])
        if equation.is_linear_regression:  # which is fitted to these rows, too
            own = equation.r2_held_out
        assert own == pytest.approx(equation.r2_held_out, abs=1e-6)
    chosen = next(e for e in model.front_ if e.program == model.program_)
    assert chosen.r2_held_out >= 0.0 or chosen.program.variables == 0


@pytest.mark.parametrize(
    "loss", ["poisson of the logarithm", pytest.param("quantile", marks=pytest.mark.thorough)]
)
def test_losses_that_may_be_negative_choose_formulas(search, loss):
    X = points(200)
    y = np.random.default_rng(1).poisson(np.exp(X[:, 0])).astype(float)
    given = warpfit.losses.poisson(log=True) if "log" in loss else loss
    model = search(loss=given, operators=("exp", "*"), generations=4).fit(X, y)
    mean = np.exp(model.predict(X)) if "log" in loss else model.predict(X)
    assert np.corrcoef(mean, np.exp(X[:, 0]))[0, 1] > 0.99
    losses = [equation.loss for equation in model.front_]
    assert loss == "quantile" or min(losses) < 0.0
    low, _ = model.set_params(model_selection="best").plot_front().get_ylim()
    assert low > min(equation.excess for equation in model.front_) / 10 > 0.0
    limit = 1.5 * min(equation.excess for equation in model.front_)
    near = [equation for equation in model.front_ if equation.excess <= limit]
    assert model.program() == max(near, key=lambda equation: equation.score).program


@pytest.mark.thorough
def test_gross_outliers_do_not_hide_a_law(search):
    X = points(150)
    y = law(X)
    y[::20] = 1000.0
    model = search(loss="huber", operators=("+", "*", "/", "square"), generations=6, population=80)
    model.fit(X, y)
    # Where it is smooth the loss lets outliers move the law by a constant.
    fresh = points(seed=1)
    assert np.corrcoef(model.predict(fresh), law(fresh))[0, 1] > 0.9999


def test_edge_data_bring_no_warning_of_numpy(search):
    X, y = points(50), points(50)[:, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for rows, target in ((X, 0 * y + 3), (0 * X + 1, y), (X[:1], y[:1]), (X, y * 1e90)):
            model = search(operators=("*", "/", "exp", "log")).fit(rows, target)
            assert model.predict(rows).shape == target.shape
            model.predict(-1e300 * rows)


def test_constraints_other_losses_and_symbols_hold_in_the_search(search):
    X = points(150)
    y = law(X)
    y[::10] += 50.0
    model = search(
        operators=("+", "*", "/", "square", "exp"),
        loss="mae",
        constraints={"count": {"exp": 0}, "depth": 4},
        complexity_of_operators={"/": 2},
        population=80,
        generations=12,
        simplify=False,
    ).fit(X, y)
    clean = np.arange(len(X)) % 10 > 0
    np.testing.assert_allclose(model.predict(X, index=-1)[clean], law(X)[clean], rtol=1e-3)
    assert "exp" not in str(model.equations_)


def test_monotonicity_holds_in_every_row(search):
    X = points(100)
    y = np.sin(3.0 * X[:, 0]) - X[:, 1] ** 2 + 0.5 * X[:, 0]
    signs = {"x1": "increasing", "x2": "decreasing"}
    model = search(constraints={"monotonic": signs}, population=None, generations=8).fit(X, y)
    assert len(model.front_) > 1
    for index in range(len(model.front_)):
        for column, sign in ((0, 1.0), (1, -1.0)):
            moved = X + 1e-6 * np.eye(3)[column]
            assert (sign * (model.predict(moved, index) - model.predict(X, index)) > -1e-12).all()


def test_functions_that_are_written_with_operators_are_searched_too(search, tmp_path):
    X = points(60)
    y = np.sinc(X[:, 0] * X[:, 1] / np.pi) + 2.0
    settings = {"operators": ("mul", "sinc"), "random_state": 1, "checkpoint": tmp_path / "s.npz"}
    model = search(population=100, generations=6, **settings).fit(X, y)
    np.testing.assert_allclose(model.predict(X), y, atol=1e-4)
    assert search(generations=0, **settings).fit(X, y).predict(X).shape == y.shape


@pytest.mark.parametrize(
    "kind",
    [
        "regressor",
        *(pytest.param(k, marks=pytest.mark.thorough) for k in ("classifier", "transformer")),
    ],
)
def test_a_fit_that_fails_leaves_an_estimator_as_it_was(search, kind):
    def use_too_early(estimator, generation, front):
        estimator.predict(X)

    def fail(*_):
        raise LookupError("mine")

    X, inner = points(60), search(generations=1)
    y = noisy(X) if kind != "classifier" else X[:, 0] > X[:, 1]
    estimator = {
        "regressor": inner,
        "classifier": SymbolicClassifier(inner),
        "transformer": SymbolicTransformer(inner),
    }[kind]
    use = estimator.transform if kind == "transformer" else estimator.predict
    own = "callback" if kind == "regressor" else "search__callback"
    estimator.set_params(**{own: use_too_early})
    for _ in range(2):
        with pytest.raises(NotFittedError):
            estimator.fit(X, y)
        with pytest.raises(NotFittedError):
            use(X)
        assert not hasattr(estimator, "equations_")
    estimator.set_params(**{own: None}).fit(X, y)
    before = use(X)
    estimator.set_params(**{own: fail})
    with pytest.raises(LookupError, match="mine"):
        estimator.fit(X[:, ::-1][:, :2], y)
    np.testing.assert_array_equal(use(X), before)


def test_searches_go_on_from_the_last_one_or_from_a_file(search, tmp_path):
    X, heard = points(100), []
    y = noisy(X)

    def listen(model, generation, front):
        heard.append((generation, front[-1].loss))
        return len(heard) == 2

    file = tmp_path / "search.npz"
    model = search(generations=10**6, callback=listen, checkpoint=file).fit(X, y)
    assert (model.reason_, model.n_iter_) == ("callback", heard[-1][0])
    assert len(heard) == 2 and heard[0][1] >= heard[1][1]
    for error in (UnavailableError("mine"), DeadlineExceededError("mine")):  # not the server's
        with pytest.raises(type(error), match="mine"):
            search(callback=Mock(side_effect=error)).fit(X, y)
    more = search(generations=0, checkpoint=file).fit(X, y)
    assert more.front_[-1].loss <= model.front_[-1].loss * 1.02
    cold = search(generations=0).fit(X, y)
    assert cold.front_[-1].loss >= more.front_[-1].loss
    again = model.set_params(warm_start=True, generations=0, checkpoint=None).fit(X, y)
    assert again.front_[-1].loss <= more.front_[-1].loss * 1.02
    file.write_bytes(b"no archive")
    with pytest.raises(InvalidArgumentError, match="checkpoint"):
        search(checkpoint=file).fit(X, y)


@pytest.mark.parametrize(
    ("columns", "seconds"), [(300, 2.0), (5, 0.01)], ids=["many columns", "hardly any time"]
)
def test_the_time_holds_and_what_there_was_no_time_for_is_said(search, capsys, columns, seconds):
    X = np.random.default_rng(0).normal(size=(200, columns))
    model = search(max_seconds=seconds, generations=10**6, verbose=True, population=500)
    begun = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, X[:, 0] * X[:, -1])
    assert time.monotonic() - begun < seconds + 30.0  # of a search that would never end
    said = capsys.readouterr().err
    assert said.index("connection to a server") < said.index("upload of 200 rows")
    if columns > 5:
        assert said.index("upload of 200 rows") < said.index("library of short formulas")
        return
    assert (model.n_iter_, model.reason_) == (0, "max_seconds")
    (message,) = [text for text in map(str, (w.message for w in caught)) if "generation" in text]
    assert "left no time for a generation" in message
    assert "no generation has run" in model.undone_


def test_of_large_tables_so_many_rows_are_drawn_as_there_is_time_for(search, capsys):
    X = np.zeros((300_000, 9))
    X[:, 0] = np.arange(300_000)
    search(max_seconds=1.0, population=100, verbose=True).fit(X, X[:, 0])
    assert "upload of 100,000 rows" in capsys.readouterr().err


def test_noise_does_not_hide_variables_that_predict(search):
    """Least squares with all variables are hardly better on new rows."""
    rng = np.random.default_rng(0)
    X, beyond = rng.normal(size=(250, 6)), rng.normal(size=(4000, 6))
    slopes = np.array([1.0, -0.8, 0.6, 0.5, -0.4, 0.0])
    y = X @ slopes + rng.normal(0.0, 1.5, 250)
    model = search(generations=0, population=100, held_out=0.0).fit(X, y)
    found = np.mean(np.square(model.predict(beyond) - beyond @ slopes))
    design = np.column_stack([np.ones(250), X])
    linear = np.linalg.lstsq(design, y)[0]
    best = np.mean(np.square(linear[0] + beyond @ (linear[1:] - slopes)))
    assert found < 3.0 * best
    chosen = model.front_[selected(model.front_, "prediction")]
    assert chosen.predictive_length == pytest.approx(
        min(equation.predictive_length for equation in model.front_), abs=0.5
    )


def test_linear_regression_is_chosen_where_nothing_predicts_better(search, monkeypatch):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 9)) * np.array([1e3, 1, 1, 1, 1, 1, 1, 1, 1e-3])
    y = X @ np.array([1e-3, 1, -1, 1, -1, 1, -1, 1, 1e3]) + rng.normal(0.0, 3.0, 120)
    design = np.column_stack([np.ones(120), X])
    linear = design @ np.linalg.lstsq(design, y, rcond=1e-15)[0]
    model = search(generations=0, population=100).fit(X, y)
    np.testing.assert_allclose(model.predict(X), linear, rtol=1e-9)
    chosen = model.front_[selected(model.front_, "prediction")]
    assert chosen.is_linear_regression
    assert chosen.complexity == len(model.program_) == 4 * 9 + 1 > model.size_limit
    place = model.front_.index(chosen)
    assert str(model.equations_).endswith(
        f"equation {place} is the linear regression of all variables"
    )
    # Limits that are given hold for it, too.
    for settings in ({"max_size": 25}, {"constraints": {"depth": 30}}, {"operators": ("add",)}):
        other = search(generations=0, population=100, **settings).fit(X, y)
        assert not any(equation.is_linear_regression for equation in other.front_)
        assert max(equation.complexity for equation in other.front_) <= other.size_limit

    # Without time for the fits of a cross-validation, too; and a law is not lost.
    def over(*_):
        raise DeadlineExceededError("the time is over")

    monkeypatch.setattr(TargetSearch, "_fitted", over)
    model = search(generations=0, population=100).fit(X, y)
    assert len(model.program_) == 4 * 9 + 1
    y = X[:, 1] * X[:, 2] + rng.normal(0.0, 0.3, 120)
    model = search(generations=0, population=100).fit(X, y)
    assert np.corrcoef(model.predict(X), X[:, 1] * X[:, 2])[0, 1] > 0.999


def test_a_formula_that_fits_the_noise_makes_no_law_of_it(search):
    """It leaves less than a hundredth of the variance, but predicts no row so well."""
    X = np.random.default_rng(0).normal(size=(60, 15))
    y = X[:, 0] + 0.12 * np.random.default_rng(1).normal(size=60)
    guess = "x1 + " + " + ".join(f"0.01*x{column}" for column in range(2, 16))
    settings = {"operators": ("+", "*"), "max_size": 60, "held_out": 0.0}
    model = search(generations=0, guesses=[guess], **settings).fit(X, y)
    assert not np.isnan([equation.predictive_length for equation in model.front_]).any()
    assert max(len(equation.program) for equation in model.front_) < 20  # it only decorates
    assert len(model.program_) < 10


@pytest.mark.thorough
def test_a_shortened_law_is_chosen_without_time_for_a_second_cross_validation(search, monkeypatch):
    X = points()
    y = 2 * X[:, 0] + X[:, 1] * X[:, 2]
    y += 0.2 * y.std() * np.random.default_rng(5).normal(size=len(y))
    fitted, times = TargetSearch._fitted, []

    def over_after_six(self, *arguments):
        times.append(1)
        if len(times) > 6:  # the last fit, and those of a cross-validation
            raise DeadlineExceededError("the time is over")
        return fitted(self, *arguments)

    monkeypatch.setattr(TargetSearch, "_fitted", over_after_six)
    model = search(simplify=True, guesses=["2.1*x1 + 0.99*x2*x3 + 0.01"]).fit(X, y)
    assert len(model.program_) == 7, model.expression_
    chosen = model.front_[selected(model.front_, "prediction")]
    assert chosen.program == model.program_
    assert not np.isnan(chosen.predictive_length)


@pytest.mark.parametrize(
    "how",
    [*(pytest.param(h, marks=pytest.mark.thorough) for h in ("interrupt", "terminate")), "server"],
)
def test_what_was_found_is_kept(search, monkeypatch, tmp_path, capsys, how):
    X = points(100)
    y = np.column_stack([noisy(X), X[:, 0]])
    signs = {"monotonic": {"x1": "increasing"}}
    cut = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "server": None}[how]

    def end(*_):
        if cut is None:
            raise UnavailableError("nobody is there")
        os.kill(os.getpid(), cut)

    # The engine reports once a second, and where it ends.
    monkeypatch.setattr(Progress, "report", end)
    with pytest.warns(SearchWarning, match="were found until then"):
        model = search(generations=10**6, max_size=9, constraints=signs).fit(X, y)
    assert model.reason_ == how
    assert len(model.front_[0]) > 1
    assert [len(e.program) for e in model.front_[1]] == [1]  # a target that nobody has looked at
    for equation in model.front_[0]:
        error = warpfit.expressions.reference.evaluate_program(equation.program, X.T) - y[:, 0]
        assert np.mean(error**2) == pytest.approx(equation.loss, rel=1e-9)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    table = np.column_stack([X, y[:, 0]])
    np.savetxt(tmp_path / "t.csv", table, delimiter=",", header="a,b,c,y", comments="")
    words = ["search", str(tmp_path / "t.csv"), "--target", "y", "--json", str(tmp_path / "t.json")]
    words += ["--address", model.address, "--operators", "+", "*", "--template", "f(a, b) + c"]
    assert main(words) == {"interrupt": 130, "terminate": 143, "server": 2}[how]
    document = json.loads((tmp_path / "t.json").read_text())
    assert document["reason"] == how
    assert "y = " in capsys.readouterr().out


def test_nothing_is_uploaded_or_fitted_once_the_time_is_over(search, monkeypatch):
    measured, linear, late = TargetSearch._measured, [], []

    def until_over(self, programs):
        found = measured(self, programs)
        linear.extend(self.kept)  # has been measured before the search
        self.deadline = time.monotonic()
        monkeypatch.setattr(TargetSearch, "_part", lambda *_: late.append("an upload"))
        monkeypatch.setattr(TargetSearch, "_shorten", lambda *_: late.append("a fit"))
        return found

    monkeypatch.setattr(TargetSearch, "_measured", until_over)
    X = points(200)
    y = X @ [1.0, 2.0, 3.0] + np.random.default_rng(0).normal(size=200)
    model = search(generations=0).fit(X, y)
    assert len(model.front_) > 1 and len(linear) == 1
    assert late == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [(KeyboardInterrupt, "interrupt"), (lambda: UnavailableError("nobody is there"), "server")],
)
def test_what_the_engine_had_found_is_kept(search, monkeypatch, error, reason):
    found = []

    def end(progress, target, what):
        found.extend(what.front().programs)
        raise error()

    monkeypatch.setattr(Progress, "report", end)
    X = points(100)
    with pytest.warns(SearchWarning, match="were found until then"):
        model = search(generations=10**6, loss="mse").fit(X, noisy(X))
    assert model.reason_ == reason
    assert {equation.program for equation in model.front_} & {*found}


def test_an_interrupt_before_anything_is_found_is_raised(search, monkeypatch):
    def end(*_, **options):
        if "seed" in options:  # the other one shows that a server is ready
            raise KeyboardInterrupt

    monkeypatch.setattr(warpfit.Client, "search", end)
    with pytest.raises(KeyboardInterrupt):
        search().fit(points(50), law(points(50)))


def test_a_checkpoint_that_cannot_be_written_is_a_warning(search, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("warpfit.sklearn.target_search.save", fail)
    with pytest.warns(SearchWarning, match="No space left"):
        model = search(checkpoint=tmp_path / "s.npz").fit(points(50), law(points(50)))
    assert model.front_


def test_populations_that_stand_still_are_given_up(search):
    X, y = points(50), np.random.default_rng(0).normal(size=50)
    settings = {"population": 20, "generations": 30, "max_size": 3}
    model = search(**settings).fit(X, y)
    assert model.n_iter_ == 30
    assert len(model.front_) >= 1
    assert search(early_stopping=5, **settings).fit(X, y).n_iter_ < 20


def test_several_targets_have_a_front_each(search):
    X = points(100)
    y = np.column_stack([X[:, 0] * X[:, 1], X[:, 2] - 2.0])
    model = search(simplify=True)
    np.testing.assert_allclose(model.fit(X, y).predict(X), y, rtol=1e-8)
    assert len(model.equations_) == len(model.program_) == 2
    assert model.latex(output=1) == "x_{3} - 2"
    for ask in (model.latex, model.chance, model.programs_found, model.plot_front):
        with pytest.raises(InvalidArgumentError, match="an output from 0 to 1"):
            ask(output=2)


def test_models_work_in_scikit_learn_and_travel_without_a_server(search):
    X = points(120)
    model = search(simplify=False)
    scores = cross_val_score(make_pipeline(StandardScaler(), model), X, law(X), cv=2)
    assert scores.min() > 0.8
    fitted = clone(model).fit(X, law(X))
    copy = pickle.loads(pickle.dumps(fitted))
    copy.address = "127.0.0.1:1"
    np.testing.assert_array_equal(copy.predict(X), fitted.predict(X))


def test_parameters_of_a_known_law(server: ServerProcess):
    X = points()
    model = ParameterOptimizer("p1*x1^p2/x2 + p3", address=server.address).fit(X, law(X))
    np.testing.assert_allclose(model.parameters_, [1.5, 2.0, 0.25], rtol=1e-6)
    assert model.score(X, law(X)) == pytest.approx(1.0)
    assert model.reason_.converged
    assert model.standard_errors_.shape == (3,)
    assert "p1" not in model.expression_
    huber = ParameterOptimizer("p1*x1^p2/x2 + p3", loss="huber", address=server.address)
    assert huber.fit(X, law(X)).standard_errors_ is None


def test_several_starts_get_out_of_a_wrong_valley(server: ServerProcess):
    X = np.linspace(0, 3, 100)[:, None]
    y = np.sin(4.0 * X[:, 0])
    one = ParameterOptimizer("sin(p1*x1)", address=server.address).fit(X, y)
    many = ParameterOptimizer(
        "sin(3*p1*x1)", starts=30, random_state=0, address=server.address
    ).fit(X, y)
    assert one.loss_ > 0.1
    assert many.loss_ < 1e-10
    bounded = ParameterOptimizer("p1*x1", bounds=(0.0, 0.1), address=server.address).fit(X, y)
    assert 0.0 <= bounded.parameters_[0] <= 0.1
    given = ParameterOptimizer("sin(p1*x1)", start=[4.1], address=server.address).fit(X, y)
    assert given.parameters_[0] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"operators": ["add", "nonsense"]}, "UNKNOWN_OPERATOR"),
        ({"operators": []}, "UNKNOWN_OPERATOR"),
        ({"population": 1}, "BAD_SETTING"),
        ({"max_size": 0}, "BAD_SETTING"),
        ({"population": 10**9}, "BAD_SETTING"),
        ({"population": 100_000, "max_size": 1000}, "BAD_SETTING"),
        ({"sample_rows": 0.5}, "BAD_SETTING"),
        ({"max_seconds": -1.0}, "BAD_SETTING"),
        ({"units": {"x9": "m"}}, "BAD_SETTING"),
        ({"units": ["m", "florin", "s"]}, "UNKNOWN_UNIT"),
        ({"fit_iterations": 0}, "BAD_SETTING"),
        ({"dimensionless_constants": True}, "BAD_SETTING"),
        ({"target_unit": "florin"}, "UNKNOWN_UNIT"),
        ({"held_out": 1.0}, "BAD_SETTING"),
        ({"engine": "abacus"}, "BAD_SETTING"),
        ({"model_selection": "taste"}, "BAD_SETTING"),
        ({"operators": 5}, "UNKNOWN_OPERATOR"),
        ({"max_seconds": "9"}, "BAD_SETTING"),
        ({"tolerance": "small"}, "BAD_SETTING"),
        ({"callback": "print"}, "BAD_SETTING"),
        ({"checkpoint": "/no/such/folder/file"}, "BAD_SETTING"),
        ({"complexity_of_operators": 2}, "BAD_SETTING"),
        ({"constraints": {"nesting": {"sin": 1}}}, "BAD_SETTING"),
        ({"constraints": {"width": 3}}, "BAD_SETTING"),
        ({"constraints": {"monotonic": {"x1": "sideways"}}}, "BAD_SETTING"),
        ({"constraints": {"monotonic": "x1"}}, "BAD_SETTING"),
        ({"loss": "nonsense"}, "BAD_ENUM"),
    ],
)
def test_settings_that_make_no_sense(settings, reason):
    with pytest.raises(InvalidArgumentError) as caught:
        SymbolicRegressor(**settings).fit(points(), law(points()))
    assert caught.value.reason == reason


def test_units_keep_formulas_consistent(search):
    X = points(100)
    model = search(units=["m", "s", "kg"], operators=("+", "-", "*", "/", "exp"))
    model.fit(X, X[:, 0] / X[:, 1] + 0.01 * X[:, 2] ** 2)
    check = consistency(dimensions(["m", "s", "kg"], (), 3))
    for equation in model.front_:
        program = equation.program
        assert check(Genomes.of([program])).all(), equation.equation


@pytest.mark.thorough
def test_constants_without_dimension_leave_the_unit_to_the_variables(search):
    X = points(100)
    settings = {"units": ["m", "s", "kg"], "operators": ("+", "-", "*", "/"), "generations": 4}
    settings |= {"dimensionless_constants": True, "target_unit": "m/s"}
    y = 3.0 * X[:, 0] / X[:, 1] + 0.5
    model = search(**settings, population=100, simplify=True).fit(X, y)
    of_variables, speed = dimensions(["m", "s", "kg"], (), 3), dimension("m/s")
    formulas = [equation.program for equation in model.front_ if equation.program.variables]
    assert formulas
    for program in formulas:  # none has an intercept, which would be a speed
        check_units(program, np.append(of_variables, speed), speed)
        assert consistency(of_variables, 0.0, speed)(Genomes.of([program])).all()


@pytest.mark.thorough
def test_an_embedded_server_does_when_there_is_no_address():
    X = points(50)
    model = ParameterOptimizer("p1*x1^2/x2 + p2").fit(X, law(X))
    np.testing.assert_allclose(model.parameters_, [1.5, 0.25], rtol=1e-6)


def test_the_shell_prints_the_front_and_writes_a_plot_and_json(
    server: ServerProcess, tmp_path, capsys, monkeypatch
):
    def refuse(*_, **__):
        raise AssertionError("there may be no pandas")

    monkeypatch.setattr("pandas.DataFrame.__init__", refuse)
    X = points(80)
    table = np.column_stack([X, X[:, 0] * X[:, 1]])
    np.savetxt(tmp_path / "t.csv", table, delimiter=",", header="a,b,c,y", comments="")
    files = ["--json", str(tmp_path / "t.json"), "--plot", str(tmp_path / "t.png")]
    words = ["search", str(tmp_path / "t.csv"), "--target", "y", "--quiet", *files]
    assert main([*words, "--address", server.address, "--operators", "+", "*"]) == 0
    assert "y = a * b" in capsys.readouterr().out
    document = json.loads((tmp_path / "t.json").read_text())
    assert document["front"][document["chosen"]]["equation"] == "a * b"
    assert (tmp_path / "t.png").stat().st_size > 1000
    assert main([*words, "--loss", "nonsense"]) == 2


@pytest.mark.parametrize("station", ["north", "4.5"])
def test_the_shell_takes_groups_by_texts_and_numbers(tmp_path, monkeypatch, station):
    taken = []

    def connect(model):
        taken.append((model._names(), model.groups_.tolist()))
        raise ZeroDivisionError

    monkeypatch.setattr(SymbolicRegressor, "_client", connect)
    lines = [f"{station if row % 2 else 7},{row},{row**2}" for row in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["station,a,y", *lines]))
    words = [str(tmp_path / "t.csv"), "--target", "y", "--columns", "a", "--group", "station"]
    with pytest.raises(ZeroDivisionError):
        main(["search", *words])
    assert taken == [(("a",), ["7", "north"] if station == "north" else [4.5, 7.0])]
    assert main(["search", *words[:-1], "nowhere"]) == 2


@pytest.mark.thorough
def test_srbenchs_harness_takes_the_example(server: ServerProcess, monkeypatch):
    """The harness of 2025 clones ``est``, sets parameters, and reads formulas of a population."""
    pandas, sympy = pytest.importorskip("pandas"), pytest.importorskip("sympy")
    monkeypatch.setenv("WARPFIT_ADDRESS", server.address)
    monkeypatch.setenv("WARPFIT_THREADS", "1")
    place = Path(__file__).resolve().parents[2] / "client" / "examples" / "srbench"
    method = runpy.run_path(str(place / "regressor.py"))
    kwargs = method["eval_kwargs"]
    assert set(kwargs) <= {"test_params", "pre_train", "max_train_samples", "scale_x", "scale_y"}
    assert isinstance(method["hyper_params"], list)
    est, X = clone(method["est"]), pandas.DataFrame(points(120), columns=["a", "b", "c"])
    y = pandas.Series(law(points(120)))
    est.set_params(max_time=3600, random_state=1, **{})
    kwargs["pre_train"](est, X, y)
    est.set_params(**{**kwargs["test_params"], "max_time": 4.0})
    est.fit(X, y.to_numpy())
    assert est.score(X, y) > 0.99
    symbols = sympy.symbols("a b c")
    population = method["get_population"](est)
    assert 1 < len(population) <= 100
    best = method["get_best_solution"](est)
    for one in (est, best, *population[:20]):
        text = method["model"](one, X)
        found = sympy.lambdify(symbols, sympy.sympify(text))(*X.to_numpy().T)
        np.testing.assert_allclose(found + np.zeros(120), one.predict(X), rtol=1e-5, atol=1e-9)
        assert method["complexity"](one) >= 1
        assert method["get_population"](one) == [one] or one is est
    assert method["complexity"](best) == method["complexity"](est)
    assert method["model"](best, X) == method["model"](est, X)
    names = {str(one) for one in sympy.sympify(method["model"](est)).free_symbols}
    assert names <= {"x_0", "x_1", "x_2"}
    metadata = yaml.safe_load((place / "metadata.yml").read_text())
    assert set(metadata) == {"authors", "email", "name", "description", "url"}
    project = tomllib.loads((place.parents[2] / "pyproject.toml").read_text())["project"]
    assert metadata["authors"] == [each["name"] for each in project["authors"]]
    assert metadata["url"] == project["urls"]["Repository"]


@pytest.mark.parametrize("size", [1e155, pytest.param(1e-170, marks=pytest.mark.thorough)])
def test_targets_whose_squares_overflow_or_vanish(search, size):
    X = points(60)
    y = size * (2 * X[:, 0] + 3 * X[:, 1])
    model = search(generations=3, population=100, random_state=0).fit(X, y)
    np.testing.assert_allclose(model.predict(X), y, rtol=1e-9)
    assert model.score(X, y) > 1 - 1e-12


def test_rows_of_weight_0_are_left_out_and_masked_data_refused(search):
    X = points(60)
    y, w = 2 * X[:, 0] + 3 * X[:, 1], np.ones(60)
    X[:3], y[:3], w[:3] = np.nan, np.inf, 0.0
    model = search(generations=2, population=100, random_state=0).fit(X, y, sample_weight=w)
    np.testing.assert_allclose(model.predict(X[3:]), y[3:], rtol=1e-9)
    assert model.score(X, y, w) > 1 - 1e-12
    masked = np.ma.array(X[3:], mask=np.arange(X[3:].size).reshape(X[3:].shape) == 7)
    for call in (lambda: model.fit(masked, y[3:]), lambda: model.predict(masked)):
        with pytest.raises(warpfit.WarpfitError, match="no value in row 2"):
            call()
    with pytest.raises(warpfit.WarpfitError, match="real numbers"):
        model.fit(np.array([["1"], ["2_0"]], dtype=object), [1.0, 2.0])


@pytest.mark.thorough
def test_chance_tells_a_law_from_noise(search):
    """The rank of a true target among shuffled ones; noise has any rank."""
    X = points(120)
    noise = np.random.default_rng(1).normal(size=len(X))
    model = search(max_size=7, generations=1).fit(X, np.column_stack([law(X) + noise, noise]))
    found, nothing = (model.chance(n=19, output=output) for output in (0, 1))
    assert found.probability == 0.05
    assert found.share == 0.0
    assert "x1" in found.expression
    assert 0.05 < nothing.probability <= 1.0
    assert nothing.probability == pytest.approx((1 + 19 * nothing.share) / 20)
    assert np.isfinite(nothing.shuffled_losses).all()
    again = model.chance(n=19, output=1)
    assert again.shuffled_losses.tolist() == nothing.shuffled_losses.tolist()
    assert "of 19 shuffled targets" in str(again)
    for change, reason in (
        ({"loss": "poisson"}, "LOSS_UNSUITABLE"),
        ({"operators": ("nosuch",)}, "UNKNOWN_OPERATOR"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            pickle.loads(pickle.dumps(model)).set_params(**change).chance(n=9)
        assert caught.value.reason == "NO_DATA"
        with pytest.raises(InvalidArgumentError) as caught:
            model.set_params(**change).chance(n=9)
        assert caught.value.reason == reason
        model.set_params(loss="mse")
    for wrong in ({"n": 0}, {"n": np.nan}, {"n": 2.5}, {"seed": -1}, {"seed": np.inf}):
        with pytest.raises(InvalidArgumentError, match=f"{next(iter(wrong))} is"):
            model.chance(**wrong)
    with pytest.raises(InvalidArgumentError, match="15 different rows"):
        search(generations=0).fit(X[:15], law(X[:15])).chance()


def test_evidence_chooses_an_equation(search):
    X = points(120)
    model = search(model_selection="evidence").fit(X, noisy(X))
    evidence = [equation.evidence for equation in model.front_]
    assert model.program_ == model.front_[int(np.argmax(evidence))].program
    assert int(np.argmax(evidence)) > 0
    with pytest.raises(InvalidArgumentError, match="one of squares"):
        search(model_selection="evidence", loss="mae").fit(X, noisy(X))


@pytest.mark.parametrize(
    "column",
    [["x", "y", "z"] * 4, ["1", "2", "3"] * 4, np.array(["2020-01-01"] * 12, "M8[D]"),
     np.array(["x", 1.0, None] * 4, object)],
)  # fmt: skip
def test_columns_of_text_or_dates_are_named(column):
    """Before any server is asked."""
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"a": np.arange(12.0), "when": column})
    for make in (SymbolicRegressor, ParameterOptimizer):
        with pytest.raises(InvalidArgumentError, match="'when'"):
            make(address="127.0.0.1:1").fit(frame, frame.a)
