"""Searches whose outer form or whose groups of rows are given, against a real server."""

import pickle
import warnings

import numpy as np
import pytest

import warpfit
from support.servers.server import ServerProcess
from warpfit.expressions.reference import evaluate_program

pytest.importorskip("sklearn", minversion="1.6")

from warpfit.sklearn import (
    SymbolicRegressor,
)


@pytest.fixture
def search(server: ServerProcess):
    """Make estimators that search for a short time, unless told otherwise."""

    def make(**changes):
        few: dict = {"operators": ("+", "*", "/", "square", "sqrt")}
        few |= {"generations": 40, "random_state": 0, "simplify": False}
        return SymbolicRegressor(address=server.address, **{**few, **changes})

    return make


def points(rows=100):
    return np.random.default_rng(0).uniform(0.5, 3.0, (rows, 3))


def test_the_functions_of_a_template_are_found(search, tmp_path):
    pandas = pytest.importorskip("pandas")
    X = pandas.DataFrame(points(), columns=["a", "b", "c"])
    y = 1.7 * X.a * X.b * np.exp(-0.4 * X.c**2)
    file = tmp_path / "state.npz"
    model = search(template="f(a, b)*exp(-g(c))", simplify=True, checkpoint=file).fit(X, y)
    assert model.subformulas_ == {"f": "1.7 * a * b", "g": "0.4 * c ^ 2"}
    assert model.expression_ == "1.7 * a * b * exp(-0.4 * c ^ 2)"
    assert {"f", "g", "equation", "latex"} <= {*model.equations_.to_pandas().columns}
    # Nothing but the functions is searched: no intercept, and g does not see the other columns.
    assert all("exp(" in e.equation for e in model.front_)
    assert not any("a" in e.subformulas["g"] or "b" in e.subformulas["g"] for e in model.front_)
    copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(copy.predict(X), y, rtol=1e-9)
    # The search goes on from the last one or a file, which another template refuses.
    with pytest.raises(warpfit.InvalidArgumentError, match="template"):
        search(template=None, checkpoint=file).fit(X, y)
    copy.set_params(warm_start=True, generations=0, population=2, simplify=False)
    assert copy.fit(X, y).score(X, y) > 0.999999


@pytest.mark.parametrize(
    ("template", "law"),
    [
        # Functions of expressions and of functions, an operator that is written with others, and a
        # number of the template that is not fitted.
        ("sech(f(x1/x2)) + 0.3*x3", lambda a, b, c: 1 / np.cosh(1.2 * a / b) + 0.3 * c),
        ("g(x3, h(x1))", lambda a, b, c: c / (1 + a**2)),
    ],
)  # fmt: skip
def test_templates_substitute_and_have_parameters(search, template, law):
    X = points()
    y = law(*X.T)
    model = search(template=template).fit(X, y)
    np.testing.assert_allclose(model.predict(X), y, rtol=1e-6)


@pytest.mark.parametrize(
    ("template", "meant"),
    [("sinn(x1)/x2", "sin"), ("f(x1) + logg(x2)", "log"), ("f(x1) + g1(x2)*fun(x3)", "")],
)
def test_a_function_of_a_template_like_a_known_one_is_warned_of(template, meant):
    with warnings.catch_warnings(record=True) as caught, pytest.raises(warpfit.UnavailableError):
        warnings.simplefilter("always")
        SymbolicRegressor(template=template, address="127.0.0.1:1").fit(points(), points()[:, 0])
    assert [str(each.message).partition(" Write ")[2][:4] for each in caught] == [
        f"{meant} "
    ] * bool(meant)


@pytest.mark.parametrize(
    ("template", "reason", "says"),
    [
        ("x1 + p1", "BAD_TEMPLATE", "0 functions"),
        ("f(x1) + 0*g(x2)", "BAD_TEMPLATE", "does not depend on g"),
        ("f(x1) + f(x1, x2)", "WRONG_ARITY", "f takes 1 operand"),
        ("f(x1) + height", "UNKNOWN_NAME", "height"),
    ],
)
def test_templates_that_make_no_sense(template, reason, says):
    X = points(40)
    with pytest.raises(warpfit.WarpfitError, match=says) as failure:
        SymbolicRegressor(template=template).fit(X, X[:, 0])
    assert failure.value.reason == reason


#: Constants of the law of `grouped`, by group.
CONSTANTS = {"Bern": (2.0, 0.7, 5.1), "Chur": (-3.3, 1.9, 0.4), "Thun": (0.8, 0.2, -2.0)}


def grouped(rows=120, noise=0.0):
    """Return columns a and b and a station, and the target p1*a/(b + p2) + p3."""
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    X = points(rows)
    station = np.array(list(CONSTANTS))[rng.permutation(rows) % len(CONSTANTS)]
    p = np.array([CONSTANTS[name] for name in station]).T
    y = p[0] * X[:, 0] / (X[:, 1] + p[1]) + p[2] + rng.normal(0.0, noise, rows)
    table = pandas.DataFrame({"a": X[:, 0], "station": station, "b": X[:, 1]})
    return table, y


def test_groups_have_one_formula_and_constants_of_their_own(search):
    optimize = pytest.importorskip("scipy.optimize")
    X, y = grouped(noise=0.01)
    model = search(group="station", held_out=0.0, generations=0, guesses=["a / (b + 1.5)"]).fit(
        X, y
    )
    assert model.groups_.tolist() == list(CONSTANTS)
    assert model.expression_.count("p") == 3
    assert model.score(X, y) > 0.999
    # The predictions of each group are those of a fit of the law to its rows alone.
    for name, start in CONSTANTS.items():
        own = (X.station == name).to_numpy()
        rows = X[own][["a", "b"]].to_numpy().T
        law = lambda x, p, q, r: p * x[0] / (x[1] + q) + r  # noqa: E731
        fit, _ = optimize.curve_fit(law, rows, y[own], start)
        np.testing.assert_allclose(model.predict(X[own]), law(rows, *fit), rtol=1e-4, atol=1e-4)
        program = model.program(group=name)
        np.testing.assert_allclose(evaluate_program(program, rows), model.predict(X[own]))
        np.testing.assert_allclose(model.to_numpy(group=name)(rows.T), model.predict(X[own]))
        for form in (model.code("python", group=name), model.latex(group=name)):
            assert "p1" not in form
        assert not {str(symbol) for symbol in model.sympy(group=name).free_symbols} - {"a", "b"}
        assert list(model.constants_[name]) == ["p1", "p2", "p3"]
    assert "Chur" in str(model.equations_)
    assert model.constants_.to_pandas().shape == (3, 3)
    # Each group pays for its constants.
    chosen = next(e for e in model.front_ if e.program == model.program_)
    level = 0.5 * len(y) * (np.log(2 * np.pi * chosen.excess) + 1)
    count = chosen.complexity + 3 * 3
    assert chosen.description_length == pytest.approx(level + 0.5 * count * np.log(len(y)), rel=0.1)
    copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copy.predict(X), model.predict(X))
    with pytest.raises(warpfit.InvalidArgumentError, match="no group Genf in fit") as failure:
        copy.predict(X.assign(station="Genf"))
    assert failure.value.reason == "BAD_GROUPS"


@pytest.mark.parametrize(
    ("settings", "change", "says"),
    [
        ({"group": "town"}, {}, "a, station, b"),
        ({"group": "station"}, {"station": "Bern"}, "there are 1 groups"),
        ({"group": "station"}, {"station": np.arange(120)}, "there are 120 groups"),
        ({"group": "station"}, {"station": np.arange(120) // 3 % 39}, "fewer than 5"),
        ({"group": "station"}, {"station": ["Bern"] * 60 + [np.nan] * 60}, "row 60 has no group"),
        ({"group": "station", "loss": "rmse"}, {}, "mean or sum"),
        ({"group": "station", "model_selection": "evidence"}, {}, "evidence"),
    ],
)
def test_groups_that_make_no_sense(settings, change, says):
    X, y = grouped()
    with pytest.raises(warpfit.InvalidArgumentError, match=says):
        SymbolicRegressor(**settings).fit(X.assign(**change), y)
