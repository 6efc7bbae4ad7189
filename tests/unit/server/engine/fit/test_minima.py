"""Levenberg-Marquardt reaches the minimum and says truly why it ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from support.engines import nist
from support.engines.fits import fit, tight
from support.engines.more_garbow_hillstrom import problems
from warpfit import Reason
from warpfit.calls import splitting
from warpfit.dataset import Dataset
from warpfit.expressions import reference
from warpfit.fitting import Accuracy, Tolerances
from warpfit.parse import parse
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.fit import driver

MGH = {problem.name: problem for problem in problems()}


def polynomial(degree: int) -> str:
    """Return the text of a polynomial of x1."""
    return " + ".join(f"p{i + 1}*x1^{i}" if i else "p1" for i in range(degree + 1))


@pytest.mark.filterwarnings("ignore::numpy.exceptions.RankWarning")
@pytest.mark.parametrize("accuracy", Accuracy)
@pytest.mark.parametrize(
    ("x", "degree"),
    [
        (np.linspace(500.0, 505.0, 80), 4),
        (np.linspace(1000.0, 1010.0, 82), 5),
        (np.arange(1980.0, 2021.0), 3),
        (np.arange(1980.0, 2021.0), 6),
        (np.linspace(1e6, 1e6 + 1.0, 60), 2),
        (np.linspace(1e6, 1e6 + 1.0, 60), 5),
        (np.linspace(1e6, 1e6 + 1.0, 80), 6),
    ],
)
def test_polynomials_far_from_0_are_as_those_of_polyfit(x, degree, accuracy):
    """Where float64 hardly tells the powers apart, neither finds the minimum, and says so."""
    z = (x - x.mean()) / (np.ptp(x) / 2.0)
    y = 1.0 + z - 0.5 * z**2 + 0.3 * z**3 + 0.01 * np.sin(50.0 * x)
    data = Dataset.of(x[:, None], y, dtype="float64")
    found = fit(data, [polynomial(degree)], [np.ones(degree + 1)], **tight(accuracy))
    exact = np.square(np.polyval(np.polyfit(x, y, degree), x) - y).sum()
    assert found.loss[0] <= 1.01 * exact
    assert found.success[0] or (x[0], degree) in ((1980.0, 6), (1e6, 5), (1e6, 6))
    assert not found.success[0] or found.loss[0] <= 1.01 * least_by_legendre(z, y, degree)
    assert found.iterations[0] <= 20


def least_by_legendre(z, y, degree) -> float:
    """Return the least sum of squares of polynomials, from a basis that tells them apart."""
    legendre = np.polynomial.legendre
    return np.square(legendre.legval(z, legendre.legfit(z, y, degree)) - y).sum()


@settings(max_examples=15, deadline=None)
@given(
    st.floats(0.0, 7.0), st.floats(-1.0, 2.0), st.integers(1, 4), st.sampled_from([0.0, 0.1, 1.0])
)
@example(6.0, 0.0, 4, 0.0)
@example(5.0, np.log10(2.0), 3, 0.1)
@example(4.0, 0.0, 4, 0.1)
def test_no_polynomial_is_called_a_minimum_that_is_none(place, width, degree, noise):
    z, rng = np.linspace(-1.0, 1.0, 70), np.random.default_rng(0)
    x = 10.0**place + 10.0**width * 0.5 * (z + 1.0)
    y = 1.0 + z - 0.5 * z**2 + 0.3 * z**3 + 0.4 * z**4 + noise * rng.normal(size=70)
    data = Dataset.of(x[:, None], y, dtype="float64")
    found = fit(data, [polynomial(degree)], [np.ones(degree + 1)], **tight(Accuracy.FINAL))
    z = 2.0 * (x - x.mean()) / np.ptp(x)
    least = least_by_legendre(z, y, degree) + 1e-6 * np.square(y - y.mean()).sum()
    assert not found.success[0] or found.loss[0] <= 1.001 * least
    if place <= 2.0 <= 2.0 + width:
        assert found.success[0]


def test_factors_of_several_threads_have_the_bits_of_one_thread(monkeypatch):
    monkeypatch.setattr(driver, "_MUCH_WORK", 1.0)
    x, rng = np.linspace(500.0, 505.0, 300), np.random.default_rng(0)
    y = np.sin(x) + rng.normal(size=300)
    data = Dataset.of(x[:, None], y, rng.uniform(size=300), dtype="float64")
    texts = [polynomial(degree) for degree in (4, 1, 3, 4, 2, 4, 3)]
    starts = [np.ones(text.count("p")) for text in texts]
    cut = []

    def even_bounds(work, parts):
        cut.append(bounds := splitting.even_bounds(work, parts))
        return bounds

    monkeypatch.setattr(driver, "even_bounds", even_bounds)
    one, several = (
        fit(data, texts, starts, rows=(7, 290), threads=threads, **tight(Accuracy.FINAL))
        for threads in (1, 3)
    )
    assert max(map(len, cut)) == 4
    assert np.concatenate(one.parameters).tobytes() == np.concatenate(several.parameters).tobytes()
    assert one.loss.tobytes() == several.loss.tobytes()
    assert one.success.all()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("p1*(p2/x1 + x1 + (p3/x1 + x2*x2)*p4) + p5", 5),
        ("p1*x1 + p2*x1 + p3 + p4", 4),
        ("p1*exp(p2*x1) + p3*exp(p2*x1 + p4)", 4),
    ],
)
def test_parameters_with_the_same_effect_do_not_run_away(text, count):
    """The values would be differences of huge terms."""
    rng = np.random.default_rng(0)
    x = rng.uniform(1.0, 4.0, (100, 2))
    y = np.sin(3.0 * x[:, 0]) - x[:, 1] ** 2 + 0.5 * x[:, 0]
    found = fit(
        Dataset.of(x, y, dtype="float64"),
        [text],
        [np.linspace(1.0, 2.0, count)],
        max_iterations=200,
    )
    assert np.abs(found.parameters[0]).max() < 1e9


def test_columns_that_float32_cannot_tell_apart_are_no_success_far_from_the_minimum():
    x = np.arange(1980.0, 2021.0)
    y = np.polyval([0.3, -0.5, 1.0, 1.0], (x - 2000.0) / 20.0)
    found = fit(Dataset.of(x[:, None], y), [polynomial(3)], [np.ones(4)])
    assert not found.success[0] or found.loss[0] < 0.1 * np.square(y - y.mean()).sum()


@pytest.mark.parametrize("accuracy", Accuracy)
def test_bounded_linear_least_squares_are_as_those_of_bvls(accuracy):
    x, y = np.arange(5.0), np.array([6.0, 1.0, -3.0, 0.0, 3.0])
    data = Dataset.of(x[:, None], y, dtype="float64")
    rng = np.random.default_rng(1)
    lower, upper = rng.uniform(-9, 0, (40, 3)), rng.uniform(0, 3, (40, 3))
    lower[0], upper[0] = [-np.inf, -np.inf, 2.0], [-2.0, np.inf, np.inf]
    starts = np.clip(np.zeros((40, 3)), lower, upper)
    bounds = {"lower": list(lower), "upper": list(upper)}
    found = fit(data, [polynomial(2)] * 40, list(starts), **tight(accuracy), **bounds)
    pairs = zip(lower, upper, strict=True)
    exact = [2.0 * lsq_linear(np.vander(x, 3)[:, ::-1], y, b, "bvls").cost for b in pairs]
    np.testing.assert_allclose(found.loss, exact, rtol=1e-9)
    assert found.success.all()


def test_a_bound_of_a_nonlinear_model_is_left_again():
    x = np.linspace(0.0, 3.0, 50)
    data = Dataset.of(x[:, None], 2.0 * np.exp(-0.7 * x) + 0.3, dtype="float64")
    text, start = "p1*exp(-p2*x1) + p3", [0.5, 5.0, 0.0]
    bounds = {"lower": [[0.5, 0.1, 0.0]], "upper": [[3.0, 5.0, 1.0]]}
    found = fit(data, [text], [start], **tight(Accuracy.FINAL), **bounds)
    np.testing.assert_allclose(found.parameters[0], [2.0, 0.7, 0.3], rtol=1e-6)
    assert found.success[0]


@pytest.mark.parametrize(
    ("name", "times", "most"),
    [("Powell singular", 1, 100), ("Brown-Dennis", 1, 900), ("Brown almost linear", 100, 60)],
)
def test_hard_problems_converge(name, times, most):
    problem = MGH[name]
    data = Dataset.of(problem.columns, problem.target, dtype="float64")
    found = fit(data, [problem.formula], [times * problem.start], **tight(Accuracy.FINAL))
    assert found.success[0]
    assert found.iterations[0] <= most
    assert found.loss[0] <= max(problem.minimum * (1 + 1e-6), 1e-12)


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("Freudenstein-Roth", 48.98425368),
        ("Jennrich-Sampson", 124.3621823556),
        ("Trigonometric", 2.795056e-5),
    ],
)
def test_minima_with_residuals_where_columns_are_parallel_are_minima(name, local):
    """The linear model promises much there, by steps that make the loss greater."""
    problem = MGH[name]
    data = Dataset.of(problem.columns, problem.target, dtype="float64")
    found = fit(data, [problem.formula], [problem.start], **tight(Accuracy.FINAL))
    np.testing.assert_allclose(found.loss, local, rtol=1e-6)
    assert found.success[0], found.reason[0]


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize(
    ("text", "truth"),
    [("exp(p1*x1) + exp(p2*x1)", [0.4, 0.4]), ("(p1 + x1)*(p2 + x1)", [1.0, 1.0])],
)
def test_laws_of_two_equal_terms_are_found(text, truth, noise):
    """Their columns are parallel there, where without noise no residuals are left.

    This noise bends the law the other way than terms that differ.
    """
    x = np.linspace(0.1, 3.0, 40)
    y = reference.evaluate_program(parse(text), x[None], truth) - noise * (x - 1.5) ** 2 + noise
    data = Dataset.of(x[:, None], y, dtype="float64")
    start = np.array(truth) * np.linspace(0.5, 1.2, len(truth))
    found = fit(data, [text], [start], **tight(Accuracy.FINAL))
    assert found.success[0], found.reason[0]


def test_a_minimum_at_infinity_is_one_in_screening_and_none_in_the_end():
    """Osborne 1 from ten times its start, in a valley along which two exponentials become one.

    Its least loss is that of the limit, (b + c x) exp(-d x), and it is not the least of all.
    """
    problem = MGH["Osborne 1"]
    data, start = Dataset.of(problem.columns, problem.target, dtype="float64"), 10.0 * problem.start
    found = fit(data, [problem.formula], [start])
    limit = fit(
        data,
        ["p1 + (p2 + p3*x1)*exp(-x1*p4)"],
        [[1.4, -0.4, 1e-3, -6e-3]],
        **tight(Accuracy.FINAL),
    )
    assert found.reason[0] is Reason.GRADIENT
    assert limit.loss[0] < found.loss[0] < (1.0 + 1e-6) * limit.loss[0]
    t, y = problem.columns[:, 0], problem.target
    a, b, c, d, e = found.parameters[0]
    columns = np.stack(
        [np.ones_like(t), np.exp(-d * t), np.exp(-e * t), -b * t * np.exp(-d * t),
         -c * t * np.exp(-e * t)]
    )  # fmt: skip
    residuals = a + b * columns[1] + c * columns[2] - y
    cosines = columns @ residuals / np.linalg.norm(columns, axis=1) / np.linalg.norm(residuals)
    assert np.abs(cosines).max() <= Tolerances.of(data.layout.dtype).gradient
    assert not fit(data, [problem.formula], [start], **tight(Accuracy.FINAL)).success[0]


def test_a_parameter_that_hardly_matters_does_not_hold_the_other_one():
    """A step that moves both is too long from there; what follows is a curved valley."""
    problem = MGH["Powell badly scaled"]
    data = Dataset.of(problem.columns, problem.target, dtype="float64")
    found = fit(data, [problem.formula], [100.0 * problem.start], **tight(Accuracy.FINAL))
    assert found.initial_loss[0] > 0.9
    assert found.loss[0] < 1e-7
    assert not found.success[0]


@pytest.mark.parametrize("start", [[-11.0, -32.6], [0.144, -24.4], [5.3, -9.7], [0.27, -8.3]])
def test_no_plateau_is_called_converged_in_screening(start):
    """A power so steep that it sees one row at most moves the loss by next to nothing."""
    x = np.linspace(0.1, 5.0, 100)
    y = 1.5 * x**1.7 + 0.1 * np.sin(40.0 * x)
    data = Dataset.of(x[:, None], y, dtype="float64")
    found = fit(data, ["p1*x1^p2"], [start], **tight(Accuracy.SCREENING))
    again = fit(data, ["p1*x1^p2"], found.parameters, **tight(Accuracy.FINAL))
    assert not found.success[0] or again.loss[0] > 0.99 * found.loss[0]


@pytest.mark.parametrize("method", ["lm", "bfgs"])
def test_a_target_whose_squares_vanish_is_not_finite_from_any_start(method):
    x = np.linspace(0.1, 3.0, 40)
    data = Dataset.of(x[:, None], 1e-170 * (2.0 + 3.0 * x), dtype="float64")
    found = fit(data, ["p1 + p2*x1"], [[1.0, 1.0]], method=method)
    assert found.reason[0] is Reason.NOT_FINITE


# ------------------------------------------------------------------------ NIST's certified problems


PROBLEMS = {name: nist.load(name) for name in nist.FORMULAS}
CASES = [(name, start) for name in PROBLEMS for start in (1, 2)]


@pytest.fixture(scope="module")
def engine():
    """An engine with all problems loaded."""
    compiled = CpuEngine(threads=1)
    for problem in PROBLEMS.values():
        compiled.load(problem.dataset)
    yield compiled
    compiled.close()


@pytest.fixture(scope="module")
def outcomes(engine):
    """Digits of parameters, of the sum of squares, iterations, digits of standard errors."""
    return {(name, start): nist.outcome(engine, PROBLEMS[name], start) for name, start in CASES}


@pytest.mark.parametrize(("name", "start"), CASES)
def test_six_certified_digits(outcomes, name, start):
    parameters, squares, _, errors = outcomes[name, start]
    assert parameters.min() >= 6, parameters
    assert squares >= (2 if name in nist.ROUNDED_AWAY else 6)
    assert errors.min() >= (2 if name in nist.ROUNDED_AWAY else 6), errors


def test_iterations_are_few_from_every_start(outcomes):
    """MINPACK needs 295 for MGH10 and 763 for Bennett5, and does not find BoxBOD from its first."""
    assert max(iterations for _, _, iterations, _ in outcomes.values()) <= 600  # MGH10
    assert outcomes["Bennett5", 1][2] <= 100
    assert outcomes["BoxBOD", 1][2] <= 60


@pytest.mark.parametrize(
    ("name", "start"),
    [pytest.param(*c, marks=pytest.mark.thorough if c[1] == 2 else ()) for c in CASES],
)
def test_final_accuracy_reaches_six_certified_digits(engine, name, start):
    problem, final = PROBLEMS[name], Tolerances.of(np.dtype("float64"), Accuracy.FINAL)
    found = fit(
        problem.dataset,
        [problem.formula],
        [problem.starts[start - 1]],
        engine=engine,
        max_iterations=Accuracy.FINAL.max_iterations,
        gradient_tolerance=final.gradient,
        step_tolerance=final.step,
        loss_tolerance=final.loss,
    )
    assert found.success[0]
    assert nist.ordered_digits(problem, found.parameters[0], problem.certified).min() >= 6
