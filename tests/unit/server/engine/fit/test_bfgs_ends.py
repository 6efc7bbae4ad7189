"""What BFGS says where it ends: the first-order condition, its widths, bounds, restarts."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import lsq_linear

from support.engines.fits import fit, tight
from support.engines.gradients import steepest_cosine
from support.engines.more_garbow_hillstrom import problems
from warpfit import LossFunction, Reason
from warpfit.dataset import Dataset
from warpfit.expressions import reference
from warpfit.fitting import Accuracy
from warpfit.losses import huber, log_cosh, poisson, quantile
from warpfit.parse import parse
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.fit.bfgs import has_kinks

rng = np.random.default_rng(17)
X = np.linspace(0.1, 3.0, 40)
WAVE = 1.2 + 0.01 * np.sin(9 * X)
YEARS = np.arange(1980.0, 2021.0)
U = (YEARS - 2000.0) / 20.0
TREND = 1 + 0.5 * U + 0.3 * U**2 - 0.4 * U**3 + 0.02 * rng.normal(size=41)
CUBIC = "p1 + p2*x1 + p3*x1^2 + p4*x1^3"
LARGEST_COSINE = {Accuracy.SCREENING: 1e-2, Accuracy.FINAL: 1e-6}


@pytest.fixture(scope="module")
def cpu():
    engine = CpuEngine(threads=1)
    yield engine
    engine.close()


def search(cpu, columns, target, text, start, accuracy=Accuracy.FINAL, **options):
    data = Dataset.of(np.reshape(columns, (len(target), -1)), target, dtype="float64")
    cpu.load(data)
    options = tight(accuracy) | {"method": "bfgs"} | options
    return fit(data, [text], [start], engine=cpu, **options)


@pytest.mark.parametrize(
    "accuracy", [Accuracy.FINAL, pytest.param(Accuracy.SCREENING, marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize(
    ("columns", "target", "text", "start"),
    [
        (X, X**2, "x1^p1", [-40.0]),
        (YEARS, TREND, CUBIC, [1.0] * 4),
        (X, WAVE, "p1 + x1*0 + tanh(p2)", [0.3, 20.0]),
        (X, WAVE, "p1*x1*0 + p1/(1 + exp(p2))", [0.3, -40.0]),
        (X, np.exp(-X), "p1*exp(-p2*x1)", [-1.0, -18.0]),
        *[
            (p.columns, p.target, p.formula, p.start * 100.0)
            for p in problems()
            if p.name.split()[0] in ("Jennrich-Sampson", "Kowalik", "Chebyquad", "Brown")
        ],
    ],
)
def test_no_search_converges_where_the_gradient_is_not_small(
    cpu, accuracy, columns, target, text, start
):
    found = search(cpu, columns, target, text, start, accuracy)
    p, program = found.parameters[0], parse(text)
    values, slopes = reference.differentiate(program, np.reshape(columns, (len(target), -1)).T, p)
    residuals = values - target
    with np.errstate(all="ignore"):
        sizes = np.abs(target) + np.abs(residuals)
        noise = 1e-14 * np.linalg.norm(sizes) / np.linalg.norm(residuals)
    if found.success[0] and noise < 1.0:
        cosine = steepest_cosine(slopes.T, residuals, np.ones(len(p), dtype=bool))
        assert cosine <= max(LARGEST_COSINE[accuracy], noise)


@pytest.mark.parametrize(
    ("columns", "target", "text", "start", "best"),
    [
        (X, X**2, "x1^p1", [-40.0], 0.0),
        (X, WAVE, "p1 + x1*0 + tanh(p2)", [0.3, 20.0], np.var(WAVE) * 40),
        (YEARS, TREND, CUBIC, [1.0] * 4, np.polyfit(U, TREND, 3, full=True)[1][0]),
    ],
)
def test_searches_reach_the_minimum_from_far(cpu, columns, target, text, start, best):
    found = search(cpu, columns, target, text, start)
    np.testing.assert_allclose(found.loss[0], best, rtol=1e-6, atol=1e-20)


@pytest.mark.filterwarnings("ignore::numpy.exceptions.RankWarning")
@pytest.mark.parametrize("accuracy", Accuracy)
@pytest.mark.parametrize(
    ("x", "degree"),
    [
        (np.linspace(1000.0, 1010.0, 82), 5),
        (np.arange(1980.0, 2021.0), 4),
        (np.linspace(1e6, 1e6 + 1.0, 60), 2),
        (np.linspace(1e6, 1e6 + 1.0, 60), 6),
    ],
)
def test_no_polynomial_far_from_0_is_falsely_converged(cpu, x, degree, accuracy):
    """The curvature does not hold the digits that tell the columns apart."""
    z = (x - x.mean()) / (np.ptp(x) / 2.0)
    y = 1.0 + z - 0.5 * z**2 + 0.3 * z**3 + 0.01 * np.sin(50.0 * x)
    text = " + ".join(f"p{i + 1}*x1^{i}" if i else "p1" for i in range(degree + 1))
    found = search(cpu, x, y, text, np.ones(degree + 1), accuracy)
    best = np.square(np.polyval(np.polyfit(x, y, degree), x) - y).sum()
    assert found.loss[0] <= 1.01 * best or not found.success[0]


def test_lines_with_one_bound_take_a_few_evaluations(cpu):
    for seed in range(20):
        draw = np.random.default_rng(seed)
        x = np.linspace(0.1, 4, 20)
        y = 1 + 0.5 * x + 0.05 * draw.normal(size=20)
        bounds = {"lower": [[-np.inf, -np.inf]], "upper": [[0.8, np.inf]]}
        found = search(cpu, x, y, "p1 + p2*x1", [0.0, 0.0], **bounds)
        slope = x @ (y - 0.8) / (x @ x)
        np.testing.assert_allclose(found.parameters[0], [0.8, slope], rtol=1e-7)
        assert found.success[0]
        assert found.evaluations[0] < 30


@pytest.mark.parametrize("seed", range(10))
def test_bounded_linear_problems_have_the_loss_of_bvls(cpu, seed):
    draw = np.random.default_rng(seed)
    n = 2 + seed % 4
    matrix = draw.normal(size=(20, n)) @ (np.eye(n) + 0.7 * draw.normal(size=(n, n)))
    target = matrix @ draw.normal(size=n) + draw.normal(size=20)
    best = np.linalg.lstsq(matrix, target)[0]
    width = np.abs(best) + 0.1
    lower = best + width * draw.uniform(-1.5, 0.3, n)
    upper = lower + width * draw.uniform(0.1, 2.0, n)
    text = " + ".join(f"p{i}*x{i}" for i in range(1, n + 1))
    found = search(cpu, matrix, target, text, lower, lower=[lower], upper=[upper])
    exact = lsq_linear(matrix, target, (lower, upper), "bvls", 1e-15)
    np.testing.assert_allclose(found.loss[0], 2.0 * exact.cost, rtol=1e-9)
    assert found.success[0]


@pytest.mark.parametrize("method", ["lm", "bfgs"])
@pytest.mark.parametrize(("text", "start"), [("p1*x1 + p2", 0.0), ("exp(p1)*x1 + p2", 0.5)])
def test_fixed_parameters_count_nowhere(cpu, text, start, method):
    x = np.linspace(0, 10, 50)
    y = 1e10 + 2 * x + 0.1 * rng.normal(size=50)
    found = search(cpu, x, y, text, [start, 1e10], fixed=[[False, True]], method=method)
    residuals = y - 1e10
    best = np.square(residuals - x * (x @ residuals) / (x @ x)).sum()
    np.testing.assert_allclose(found.loss[0], best, rtol=1e-5)  # values have 17 digits
    assert found.success[0]


@pytest.mark.parametrize("method", ["lm", "bfgs"])
def test_a_search_that_cannot_go_on_has_stalled(cpu, method):
    """At the kink of a parameter the gradient does not vanish."""
    found = search(cpu, X, np.zeros(40), "1 + abs(p1 - 0.5)", [3.0], method=method)
    assert found.reason[0] is Reason.STALLED
    np.testing.assert_allclose(found.parameters[0], [0.5])


@pytest.mark.parametrize(
    ("loss", "text", "start", "best"),
    [
        ("abs(d)", "p1", [9.0], 2.0),
        (quantile(0.9), "p1", [-50.0], 4.6),
        (poisson(), "p1", [1e-3], 2.0),
        (poisson(log=True), "p1", [-8.0], np.log(2.0)),
        (log_cosh(), "p1", [-300.0], None),
        (huber(0.5), "p1", [900.0], None),
        ("exp(d) - d + 1e6", "p1", [-9.0], None),
    ],
)
def test_other_losses_converge_to_their_minima(cpu, loss, text, start, best):
    """Constants that are added to a loss do not matter to the first-order condition."""
    y = np.array([0.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 3.0, 5.0])
    function = LossFunction.parse(loss) if isinstance(loss, str) else loss
    found = search(cpu, y, y, text, start, loss=function, accuracy=Accuracy.FINAL)
    grid = np.linspace(-9, 9, 180_001)
    if best is None:
        columns = np.stack([np.repeat(grid, 9), np.tile(y, len(grid))])
        sums = reference.evaluate_program(function.row, columns).reshape(-1, 9).sum(axis=1)
        best = grid[sums.argmin()]
    assert found.success[0]
    np.testing.assert_allclose(found.parameters[0], [best], atol=1e-3 if best != 4.6 else 0.5)


@pytest.mark.parametrize(
    "text", ["abs(d)", "where(d <= 0, -d, 2*d)", "max(f, y)", "exp(abs(f - 1))"]
)
def test_kinks_are_where_the_prediction_decides(text):
    assert has_kinks(LossFunction.parse(text).row)


@pytest.mark.parametrize(
    "text",
    ["f - y*log(f)", "where(y > 2, square(d), exp(d))", "abs(y)*square(d)", "max(w, 1)*exp(f)"],
)
def test_cases_of_the_target_are_no_kinks(text):
    assert not has_kinks(LossFunction.parse(text).row)


def test_the_edge_of_a_losss_domain_is_no_minimum(cpu):
    """At the edge, where the first prediction is 0, the loss falls along the edge only."""
    x = np.linspace(0.1, 4.0, 60)
    y = np.where(x < 0.4, 0.0, np.round(np.exp(0.3 + 0.5 * x)))
    found = search(cpu, x, y, "p1 + p2*x1", [1.0, 1.0], loss=poisson(), accuracy=Accuracy.FINAL)
    line = found.parameters[0] + [-0.001, 0.01]
    at = line[0] + line[1] * x
    better = (at - np.where(y > 0.0, y * np.log(at), 0.0)).sum()
    assert at.min() > -1e-9
    assert not found.success[0] or found.loss[0] <= better
