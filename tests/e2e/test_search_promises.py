"""What a search promises of its table, its reasons and its time; see `test_any_search`, too."""

import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest

import warpfit
from warpfit.errors import DeadlineExceededError, InvalidArgumentError

pytest.importorskip("sklearn", minversion="1.6")


from warpfit.sklearn import SearchWarning, SymbolicRegressor
from warpfit.sklearn.target_search import TargetSearch


@pytest.fixture
def search(server):
    """Make estimators that search for a short time, unless told otherwise."""

    def make(**changes):
        return SymbolicRegressor(
            address=server.address,
            **{"population": 50, "generations": 1, "random_state": 0, **changes},
        )

    return make


@pytest.mark.parametrize(
    "operators",
    [
        ["exp", "log"],
        pytest.param(["+", "*"], marks=pytest.mark.thorough),
        pytest.param(["square"], marks=pytest.mark.thorough),
    ],
)
def test_noise_ends_no_search_with_an_exception(search, operators):
    X = np.random.RandomState(0).uniform(size=(30, 3))
    settings = {"population": 500, "generations": 2, "simplify": False}
    model = search(operators=operators, **settings).fit(X, np.arange(30) % 3)
    assert len(model.front_) > 0


@pytest.mark.thorough  # as the next one, but that a search finds what is simplified
@pytest.mark.parametrize("rule", [{"count": {"sin": 1}}, {"nesting": {"sin": {"sin": 0}}}])
def test_what_a_simplification_makes_keeps_to_the_constraints(search, rule):
    x = np.random.default_rng(3).uniform(0, 10, 200)[:, None]
    model = search(generations=3, constraints=rule).fit(x, np.sin(np.sin(x[:, 0])))
    for equation in model.front_:
        assert "sin(sin(" not in equation.equation
        if "count" in rule:
            assert equation.equation.count("sin(") - equation.equation.count("asin(") <= 1


def test_a_rule_against_the_shortest_form_leaves_no_terms_of_rounding_errors(search):
    x = np.random.default_rng(3).uniform(0, 10, 200)[:, None]
    guess = "0.9999999999999996*cos(sin(x1) + 4.71238898038459) - 4.6e-14*sin(x1)^2 + 9.9e-14"
    rule = {"nesting": {"sin": {"sin": 0}}}
    model = search(constraints=rule, guesses=[guess]).fit(x, np.sin(np.sin(x[:, 0])))
    assert min(equation.loss for equation in model.front_) < 1e-25
    assert "e-" not in " ".join(equation.equation for equation in model.front_ if equation.r2 == 1)
    assert all("sin(sin(" not in equation.equation for equation in model.front_)


def test_a_formula_without_a_value_on_a_row_held_out_ends_no_search(search):
    x = np.linspace(-5, 5, 101)
    x[50] = 0.0
    settings = {"generations": 2, "random_state": 2, "guesses": ["sin(x1)/x1"]}
    with pytest.warns(SearchWarning, match=r"sin\(x1\) / x1 fits .* such as x1 = 0"):
        model = search(**settings).fit(x[:, None], np.sinc(x / np.pi))
    assert (model.reason_, model.n_iter_) == ("generations", 2)
    assert all(np.isfinite(equation.loss) for equation in model.front_)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_short_formula_of_huge_numbers_is_found_or_there_is_an_error(search, most):
    """The factor that brings the numbers to the range of the search takes tokens, too."""
    rules = {"units": ["m"], "target_unit": "m", "dimensionless_constants": True}
    model = search(operators=["add", "mul"], max_size=most, simplify=False, **rules)
    try:
        model.fit(np.array([[0.6], [0.3]]), np.array([1.6e155, 1.3e155]))
    except InvalidArgumentError as error:
        assert error.reason == "UNSATISFIABLE"
        assert most < 3
    else:
        assert all(equation.complexity <= most for equation in model.front_)
        assert len(model.front_) > 0


def test_a_formula_that_is_exact_on_the_sample_alone_ends_no_search(search):
    x = np.random.default_rng(0).uniform(1.0, 4.0, 2000)
    y = np.where(np.arange(2000) == 77, 50.0, x**2)
    model = search(generations=2, sample_rows=50, simplify=False).fit(x[:, None], y)
    assert (model.reason_, model.n_iter_) == ("generations", 2)


def test_shortening_undoes_no_exact_formula(search):
    x = np.random.default_rng(0).uniform(0.0, 1.0, 3000)
    model = search(generations=3, guesses=["x1*sin(63*x1)"])
    model.fit(x[:, None], x * np.sin(20 * np.pi * x))
    assert model.reason_ == "tolerance"
    assert min(equation.excess for equation in model.front_) < 1e-18
    assert model.score(x[:, None], x * np.sin(20 * np.pi * x)) > 1.0 - 1e-15


@pytest.mark.parametrize("seconds", [0.05, 0.5])
def test_groups_have_their_constants_or_it_is_said_that_they_have_not(search, seconds):
    pandas = pytest.importorskip("pandas")
    g = np.random.default_rng(0)
    x, is_a = g.uniform(0.0, 6.0, 200), g.integers(0, 2, 200)
    y = np.where(is_a, 2.0, 5.0) * np.exp(-x / 3.0) + 0.05 * g.normal(size=200)
    table = pandas.DataFrame({"x": x, "g": np.where(is_a, "A", "B")})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = search(group="g", max_seconds=seconds).fit(table, y)
    said = " ".join(str(each.message) for each in caught)
    assert model.constants_.constants or ("no generation" in said and "groups" in said)


@pytest.mark.parametrize("seconds", [0.05, None])
def test_a_guess_is_never_lost_and_never_gets_worse(search, seconds):
    g = np.random.default_rng(0)
    x = g.uniform(0.0, 6.0, 200)
    y = 3.0 * np.exp(-0.4 * x) + 0.5 + 0.02 * g.normal(size=200)
    y[::17] += 20.0 * g.normal(size=12)
    guess = "3*exp(-0.4*x1) + 0.5"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SearchWarning)
        settings = {"guesses": [guess], "max_seconds": seconds, "simplify": False}
        model = search(loss="mae", population=20, generations=0, **settings).fit(x[:, None], y)
    best = min(e.loss for e in model.front_ if e.complexity <= len(warpfit.parse(guess)))
    assert best <= np.mean(np.abs(3.0 * np.exp(-0.4 * x) + 0.5 - y)) * (1.0 + 1e-12)


UNITS = {"units": ["m", "1/m"], "target_unit": "m", "dimensionless_constants": True}


def test_units_of_numbers_are_those_of_the_target(search):
    g = np.random.default_rng(1)
    X = np.column_stack([g.uniform(1, 3, 200), g.uniform(0.5, 2, 200)])
    model = search(**UNITS).fit(X, X[:, 0] * np.sin(X[:, 1] * X[:, 0]))
    assert model.expression_ == "x1 * sin(x1 * x2)"
    model = search(**UNITS).fit(X, 2.5 * X[:, 0] * np.exp(-0.7 * X[:, 1] * X[:, 0]))
    assert model.expression_ == "2.5 * x1 * exp(-0.7 * x1 * x2)"
    assert all(equation.program.variables for equation in model.front_)  # a number is no length
    with pytest.raises(InvalidArgumentError, match="no product of powers") as caught:
        search(**{**UNITS, "units": ["kg", "m/s"], "target_unit": "K"}).fit(X, X[:, 0])
    assert (caught.value.reason, caught.value.field) == ("UNITS_DIFFER", "target_unit")


@pytest.mark.thorough
def test_functions_of_ones_own_travel_with_an_estimator(search, tmp_path):
    warpfit.define("halved_", "exp(-a)")
    warpfit.define("bump_", "halved_(square(a))")
    X = np.random.default_rng(0).normal(size=(60, 2))
    y = 2.0 * np.exp(-(X[:, 0] ** 2)) + 1.0
    settings = {"operators": ["mul", "bump_"], "generations": 0, "simplify": False}
    model = search(checkpoint=tmp_path / "s.npz", **settings).fit(X, y)
    (tmp_path / "m").write_bytes(pickle.dumps(model.set_params(checkpoint=None)))
    code = (
        "import pickle, sys; from warpfit.parse import MACROS; from pathlib import Path\n"
        "MACROS.find('sinc'), MACROS.find('sech')  # which take the codes of the others\n"
        f"model = pickle.loads(Path({str(tmp_path / 'm')!r}).read_bytes())\n"
        "print(model.programs_found()[0])\n"
        "model._check_settings()  # which know the operators\n"
        "from warpfit.sklearn.target_search import load\n"
        "from warpfit.sklearn.forms import Form\n"
        f"print(load(Path({str(tmp_path / 's.npz')!r}), Form(), 99, 2).program(0))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split("\n")[0] == str(model.programs_found()[0])
    assert "exp(-" in found.stdout.split("\n")[1]


@pytest.mark.parametrize("most", [pytest.param(1, marks=pytest.mark.thorough), 5])
def test_the_greatest_size_is_that_of_the_formulas_as_they_are_shown(search, most):
    X = np.random.default_rng(0).uniform(1.0, 3.0, (100, 2))
    model = search(max_size=most).fit(X, 2.0 * X[:, 0] * X[:, 1] + 3.0)
    assert max(equation.complexity for equation in model.front_) <= most
    assert all(equation.complexity == len(equation.program) for equation in model.front_)
    with pytest.raises(InvalidArgumentError, match=f"max_size={most}"):
        search(max_size=most, guesses=["x1 + x2 + x1*x2 + sin(x1) + 1"]).fit(X, X[:, 0])


def test_the_time_begins_when_the_server_is_ready(search, monkeypatch):
    """A start and its compiler take none of it, and the result says how long they took."""
    begun, ready = [], []
    wait, run = SymbolicRegressor._get_ready, TargetSearch.run

    def wait_and_note(self, client):
        wait(self, client)
        ready.append(self)

    def note_and_run(self, progress):
        assert ready
        begun.append(self.begun)
        return run(self, progress)

    monkeypatch.setattr(SymbolicRegressor, "_get_ready", wait_and_note)
    monkeypatch.setattr(TargetSearch, "run", note_and_run)
    X = np.random.default_rng(0).normal(size=(100, 2))
    model = search(max_seconds=100.0, generations=0).fit(X, X[:, 0])
    assert model.start_seconds_ > 0.0
    assert len(begun) == 1


def test_a_linear_regression_needs_no_time(search, monkeypatch):
    def over(*_):
        raise DeadlineExceededError("the time is over")

    monkeypatch.setattr(TargetSearch, "_part", over)
    g = np.random.default_rng(0)
    X = g.normal(size=(100, 3))
    with pytest.warns(SearchWarning, match="no generation has run"):
        model = search(max_seconds=5.0).fit(X, X @ [1.0, 2.0, 3.0] + g.normal(size=100))
    assert model.reason_ == "max_seconds" and "no generation has run" in model.undone_
    assert any(equation.is_linear_regression for equation in model.front_)


def test_few_rows_pay_for_no_long_formula(search):
    g = np.random.default_rng(0)
    X, y = g.normal(size=(10, 4)), g.normal(size=10)
    with pytest.warns(SearchWarning, match="tokens, which 10 rows do not pay for"):
        model = search(generations=2, model_selection="accuracy", simplify=False).fit(X, y)
    assert model.front_[-1].r2 > 0.9
    assert model.program_.variables == 0
    law = search(model_selection="accuracy").fit(X, X[:, 0] * X[:, 1] + 0.5)
    assert law.expression_ == "x1 * x2 + 0.5"
