"""The scikit-learn estimators against a real server."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import warpfit
from support.servers.server import ServerProcess
from warpfit.errors import InvalidArgumentError, ParseError

sklearn = pytest.importorskip("sklearn", minversion="1.6")

from sklearn.base import clone  # noqa: E402
from sklearn.model_selection import cross_val_score  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402
from sklearn.utils.estimator_checks import check_estimator  # noqa: E402

from warpfit.sklearn import ParameterOptimizer, SymbolicRegressor  # noqa: E402


def law(X):
    return 1.5 * X[:, 0] ** 2 / X[:, 1] + 0.25


def points(rows=300, seed=0):
    return np.random.default_rng(seed).uniform(1, 4, (rows, 3))


@pytest.mark.parametrize("kind", [SymbolicRegressor, ParameterOptimizer])
def test_scikit_learns_own_checks(server: ServerProcess, kind):
    """Those of `check_estimator`; none is expected to fail."""
    small = {"population": 20, "generations": 2} if kind is SymbolicRegressor else {}
    estimator = kind(address=server.address, **small)
    results = check_estimator(estimator, on_skip=None)
    passed = {result["check_name"] for result in results if result["status"] == "passed"}
    assert {result["status"] for result in results} <= {"passed", "skipped"}
    assert len(passed) > 40
    assert "check_sample_weight_equivalence_on_dense_data" in passed


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


def test_equations_trade_length_for_accuracy(server: ServerProcess):
    X = points()
    y = law(X) + np.random.default_rng(5).normal(0, 0.1, len(X))
    settings = {"address": server.address, "random_state": 3, "population": 100, "generations": 8}
    model = SymbolicRegressor(**settings).fit(X, y)
    sizes = [equation.size for equation in model.equations_]
    losses = [equation.loss for equation in model.equations_]
    assert sizes == sorted(set(sizes))
    assert losses == sorted(losses, reverse=True)
    assert max(sizes) <= model.max_size
    for equation in model.equations_:
        error = warpfit.expressions.reference.evaluate_program(equation.program, X.T) - y
        assert np.mean(error**2) == pytest.approx(equation.loss, rel=1e-6)
    again = SymbolicRegressor(**settings).fit(X, y)
    assert again.expression_ == model.expression_
    other = SymbolicRegressor(**{**settings, "random_state": 4}).fit(X, y)
    assert [e.text for e in other.equations_] != [e.text for e in model.equations_]


def test_populations_that_stand_still_are_given_up(server: ServerProcess):
    rng = np.random.default_rng(0)
    settings = {"address": server.address, "population": 20, "generations": 60, "random_state": 0}
    model = SymbolicRegressor(max_size=3, **settings).fit(points(30), rng.normal(size=30))
    assert model.n_iter_ == 60
    assert len(model.equations_) >= 2


def test_weights_mean_repetition(server: ServerProcess):
    X = points(40)
    y = law(X) + np.random.default_rng(5).normal(0, 0.5, len(X))
    weights = np.random.default_rng(6).integers(0, 4, len(X))
    settings = {"address": server.address, "random_state": 0, "population": 50, "generations": 4}
    weighted = SymbolicRegressor(**settings).fit(X, y, weights)
    repeated = SymbolicRegressor(**settings).fit(X.repeat(weights, axis=0), y.repeat(weights))
    assert weighted.expression_ == repeated.expression_
    with pytest.raises(ValueError, match="non-zero"):
        SymbolicRegressor(**settings).fit(X, y, np.zeros(len(X)))


def test_models_work_in_scikit_learn_and_travel_without_a_server(server: ServerProcess):
    X = points(120)
    model = SymbolicRegressor(address=server.address, population=100, generations=8, random_state=1)
    scores = cross_val_score(make_pipeline(StandardScaler(), model), X, law(X), cv=3)
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
        ({"fit_iterations": 0}, "BAD_SETTING"),
    ],
)
def test_settings_that_make_no_sense(settings, reason):
    with pytest.raises(InvalidArgumentError) as caught:
        SymbolicRegressor(**settings).fit(points(), law(points()))
    assert caught.value.reason == reason


def test_errors_of_the_optimizer(server: ServerProcess):
    X = points()
    with pytest.raises(ParseError):
        ParameterOptimizer("p1*", address=server.address).fit(X, law(X))
    with pytest.raises(InvalidArgumentError, match="starts"):
        ParameterOptimizer(starts=0, address=server.address).fit(X, law(X))


def test_an_embedded_server_does_when_there_is_no_address():
    X = points(50)
    model = ParameterOptimizer("p1*x1^2/x2 + p2").fit(X, law(X))
    np.testing.assert_allclose(model.parameters_, [1.5, 0.25], rtol=1e-6)
