"""The batched driver on problems with known answers, and parameters that programs are linear in."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.engines.fits import fit
from support.engines.operators import programs
from support.engines.references import NumpyEngine
from support.random_programs import thesis_mix
from warpfit import Reason, parse
from warpfit.dataset import Dataset
from warpfit.expressions import reference
from warpfit.expressions.language import to_text
from warpfit.ir import Batch
from warpfit.losses import Loss, LossFunction, gaussian
from warpfit_server.engine.fit import compiled
from warpfit_server.engine.fit.separable import COLUMNS, mark_linear, operator_table

rng = np.random.default_rng(3)
X = rng.uniform(0.5, 2.0, size=(60, 2))
Y = 3.0 * np.exp(-0.7 * X[:, 0]) + 0.5 * X[:, 1]
NOISY = Y + rng.normal(scale=0.1, size=60)
WEIGHTS = rng.uniform(0.1, 2.0, size=60)
EXACT = Dataset.of(X, Y, dtype="float64")
DATA = Dataset.of(X, NOISY, dtype="float64")
WEIGHTED = Dataset.of(X, NOISY, WEIGHTS, dtype="float64")
MODEL = "p1*exp(p2*x1) + p3*x2"
START = [1.0, -0.1, 1.0]
TRUTH = [3.0, -0.7, 0.5]
LINE = "p1*x1 + p2*x2 + p3"
METHODS = ("lm", "bfgs")
TIGHT = {"gradient_tolerance": 1e-12, "step_tolerance": 1e-12, "loss_tolerance": 1e-15}


def design():
    return np.column_stack([X, np.ones(60)])


# ------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("method", METHODS)
def test_a_nonlinear_model_is_recovered(method):
    found = fit(EXACT, [MODEL], [START], method=method, max_iterations=300, **TIGHT)
    np.testing.assert_allclose(found.parameters[0], TRUTH, rtol=1e-5)
    assert found.loss[0] < 1e-10
    assert found.success[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", [DATA, WEIGHTED], ids=["unweighted", "weighted"])
def test_a_linear_model_agrees_with_the_normal_equations(method, data):
    w = np.ones(60) if data.weights is None else data.weights
    a = design()
    expected = np.linalg.solve(a.T @ (w[:, None] * a), a.T @ (w * NOISY))
    found = fit(data, [LINE], [[0.0, 0.0, 0.0]], method=method, max_iterations=200, **TIGHT)
    np.testing.assert_allclose(found.parameters[0], expected, rtol=1e-5)
    left = np.sum(w * np.square(a @ expected - NOISY))
    np.testing.assert_allclose(found.loss[0], left, rtol=1e-9)


@pytest.mark.parametrize("start", [[-3.0, -1.0, -3.0, -1.0], [-300.0, -100.0, -300.0, -100.0]])
def test_a_refused_step_after_many_good_ones_does_not_end_a_search(start):
    """Wood's function: a saddle leaves so little damping that doubling it changes no bit."""
    a, b = np.sqrt([10.0, 0.1])
    columns = np.zeros((6, 6))
    columns[[0, 0, 1, 2, 2, 3], [1, 4, 0, 3, 5, 2]] = [10, -10, -1, 3 * a, -3 * a, -1]
    columns[4:, [1, 3]] = [[a, a], [b, -b]]
    data = Dataset.of(columns, [0, -1, 0, -1, 2 * a, 0], dtype="float64")
    text = "x1*p1 + x2*p2 + x3*p3 + x4*p4 + x5*p1^2 + x6*p3^2"
    found = fit(data, [text], [start], max_iterations=200, **TIGHT)
    assert found.success[0]
    np.testing.assert_allclose(found.parameters[0], 1.0, rtol=1e-9)


def test_standard_errors_and_covariance_of_a_linear_model():
    found = fit(WEIGHTED, [LINE], [[0.0] * 3], standard_errors=True, covariance=True, **TIGHT)
    a = design()
    inverse = np.linalg.inv(a.T @ (WEIGHTS[:, None] * a))
    expected = inverse * found.loss[0] / (60 - 3)
    np.testing.assert_allclose(found.covariance[0], expected, rtol=1e-7)
    np.testing.assert_allclose(found.standard_errors[0], np.sqrt(np.diag(expected)), rtol=1e-7)
    other = fit(
        WEIGHTED, [LINE], [[0.0] * 3], method="bfgs", covariance=True, max_iterations=200, **TIGHT
    )
    np.testing.assert_allclose(other.covariance[0], expected, rtol=1e-4)


@pytest.mark.parametrize("loss", [*Loss, gaussian(0.5), LossFunction.parse("abs(d)^1.5")])
def test_every_loss_gets_better(loss):
    found = fit(WEIGHTED, [MODEL], [START], loss=loss, max_iterations=100)
    if loss is Loss.R2:
        assert found.loss[0] > max(found.initial_loss[0], 0.9)
    else:
        assert found.loss[0] < found.initial_loss[0]
    np.testing.assert_allclose(found.parameters[0], TRUTH, atol=0.6)


# -------------------------------------------------------------------- bounds, fixed, many starts


@pytest.mark.parametrize("method", METHODS)
def test_bounds_hold_and_the_rest_is_optimal(method):
    lower, upper = [[-np.inf, -0.5, -np.inf]], [[np.inf, np.inf, 0.3]]
    found = fit(DATA, [MODEL], [START], method=method, lower=lower, upper=upper, max_iterations=200)
    p = found.parameters[0]
    assert p[1] == -0.5
    assert p[2] == 0.3
    shape = np.exp(-0.5 * X[:, 0])
    best = shape @ (NOISY - 0.3 * X[:, 1]) / (shape @ shape)
    np.testing.assert_allclose(p[0], best, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_start_outside_the_bounds_is_moved_inside(method):
    found = fit(DATA, ["p1*x1"], [[9.0]], method=method, lower=[[-1.0]], upper=[[0.25]])
    assert found.parameters[0] == [0.25]


@pytest.mark.parametrize("method", METHODS)
def test_no_step_that_a_bound_cuts_off_raises_the_loss(method):
    """The bound of p2 leaves of the first step the part that goes uphill, to a plateau."""
    data = Dataset.of([[1, 1], [0, 1]], [-1, -2], dtype="float64")
    text, bounds = "1e-5*x1*tanh(1e5*p1) + x2*p2", [[-np.inf, -1e-9]]
    found = fit(data, [text], [[0.0, 0.0]], method=method, lower=bounds)
    assert found.loss[0] < found.initial_loss[0]


@pytest.mark.parametrize("method", METHODS)
def test_fixed_parameters_stay(method):
    found = fit(
        EXACT, [MODEL], [START], method=method, fixed=[[False, True, False]], max_iterations=100
    )
    assert found.parameters[0][1] == -0.1
    assert found.loss[0] < found.initial_loss[0]
    errors = fit(EXACT, [MODEL], [START], fixed=[[False, True, False]], standard_errors=True)
    assert errors.standard_errors[0][1] == 0.0
    assert (errors.standard_errors[0][[0, 2]] > 0).all()


def test_the_best_start_wins_and_all_can_be_had():
    texts, starts = ["sin(p1*x1)", "x1"], [[[0.1], [4.2], [9.0]], np.empty((3, 0))]
    data = Dataset.of(X, np.sin(4.0 * X[:, 0]), dtype="float64")
    every = fit(data, texts, starts, all_starts=True)
    assert every.loss.shape == (3, 2)
    assert [p.shape for p in every.parameters] == [(3, 1), (3, 0)]
    assert every.start[:, 0].tolist() == [0, 1, 2]
    best = fit(data, texts, starts)
    assert best.start[0] == 1
    assert best.loss[0] == every.loss[:, 0].min()
    assert best.parameters[0] == every.parameters[0][1]
    np.testing.assert_allclose(best.parameters[0], [4.0], rtol=1e-6)


def test_a_start_that_is_not_finite_is_never_the_best():
    data = Dataset.of(X, np.ones(60), dtype="float64")
    loss = LossFunction.parse("log(abs(d))")
    found = fit(data, ["p1"], [[[1.0], [1.5]]], loss=loss, max_iterations=3)
    assert found.start[0] == 1
    assert np.isfinite(found.loss[0])


# -------------------------------------------------------------------------- reasons to end


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("text", "start"), [("log(-p1)", [1.0]), ("p1/(x1 - x1)", [1.0]), ("x1^p1*log(-x1)", [1.0])]
)
def test_a_start_without_a_finite_loss_fails_alone(method, text, start):
    found = fit(EXACT, [text, MODEL], [start, START], method=method, max_iterations=100)
    assert found.reason.tolist()[0] is Reason.NOT_FINITE
    assert found.parameters[0].tolist() == start
    assert found.iterations[0] == 0
    assert found.loss[1] < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_programs_without_free_parameters_end_at_once(method):
    found = fit(EXACT, ["x1", "p1*x1"], [[], [2.0]], method=method, fixed=[[], [True]])
    assert found.reason.tolist() == [Reason.GRADIENT] * 2
    assert found.evaluations.tolist() == [1, 1]
    np.testing.assert_allclose(found.loss[0], np.sum(np.square(X[:, 0] - Y)))


def test_rank_deficient_jacobians():
    found = fit(DATA, ["(p1 + p2)*x1 + p3"], [[0.0, 0.0, 0.0]], standard_errors=True, **TIGHT)
    expected, *_ = np.linalg.lstsq(design()[:, (0, 2)], NOISY, rcond=None)
    p = found.parameters[0]
    np.testing.assert_allclose([p[0] + p[1], p[2]], expected, rtol=1e-6)
    assert np.isnan(found.standard_errors[0][:2]).all()
    assert np.isfinite(found.standard_errors[0][2])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [(0, 1), (0, 2)])
def test_more_parameters_than_rows(method, rows):
    found = fit(
        DATA, [LINE], [[0.0] * 3], method=method, rows=rows, max_iterations=200, covariance=True
    )
    assert np.isfinite(found.parameters[0]).all()
    assert found.loss[0] < 1e-6
    assert np.isnan(found.covariance[0]).any()


@pytest.mark.parametrize("method", METHODS)
def test_iterations_are_limited(method):
    found = fit(EXACT, [MODEL], [START], method=method, max_iterations=2)
    assert found.reason[0] is Reason.ITERATIONS
    assert found.iterations[0] == 2
    none = fit(EXACT, [MODEL], [START], method=method, max_iterations=0)
    assert none.parameters[0].tolist() == START
    assert none.loss[0] == none.initial_loss[0]


@pytest.mark.parametrize("tolerance", ["gradient", "step", "loss"])
def test_each_tolerance_ends_a_search_with_its_reason(tolerance):
    off = {"gradient_tolerance": 0.0, "step_tolerance": 0.0, "loss_tolerance": 0.0}
    found = fit(DATA, [MODEL], [START], **(off | {f"{tolerance}_tolerance": 1e-3}))
    assert found.reason[0] is Reason(tolerance)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", ["mse", "sse", "mae"])
def test_a_fit_to_rows_without_weight_does_not_converge(method, loss):
    if (method, loss) == ("lm", "mae"):
        pytest.skip("not a loss of squares")
    data = Dataset.of(X, NOISY, np.zeros(60), dtype="float64")
    found = fit(data, [MODEL, "x1"], [START, []], method=method, loss=Loss(loss))
    assert found.reason.tolist() == [Reason.NOT_FINITE] * 2
    assert not found.success.any()
    assert found.parameters[0].tolist() == START


@pytest.mark.parametrize("loss", [Loss.R2, Loss.NMSE])
def test_a_loss_without_a_value_does_not_converge(loss):
    """The variation of a constant target is 0."""
    data = Dataset.of(X, np.ones(60), dtype="float64")
    found = fit(data, ["p1"], [[3.0]], loss=loss)
    assert found.reason[0] is Reason.NOT_FINITE


def test_rows_of_weight_0_give_no_degrees_of_freedom():
    weights = np.where(np.arange(60) % 3 == 0, 0.0, WEIGHTS)
    some = weights > 0
    asked = {"standard_errors": True, **TIGHT}
    found = fit(Dataset.of(X, NOISY, weights, dtype="float64"), [LINE], [[0.0] * 3], **asked)
    only = Dataset.of(X[some], NOISY[some], weights[some], dtype="float64")
    expected = fit(only, [LINE], [[0.0] * 3], **asked)
    np.testing.assert_allclose(found.standard_errors[0], expected.standard_errors[0], rtol=1e-9)


def test_a_linear_model_takes_one_iteration_from_any_start():
    found = fit(DATA, [LINE], [[1e3, -1e4, 1e2]], max_iterations=1)
    expected, *_ = np.linalg.lstsq(design(), NOISY, rcond=None)
    np.testing.assert_allclose(found.parameters[0], expected, rtol=1e-6)
    assert found.iterations[0] == 1


# --------------------------------------------------------------------------- batches


def test_searches_that_have_ended_drop_out_of_the_batch():
    engine = NumpyEngine(DATA)
    fit(DATA, ["x1"] * 30 + [MODEL, LINE], [[]] * 30 + [START, [0.0] * 3], engine=engine)
    assert engine.sizes[0] == 32
    assert engine.sizes[1] == 2
    assert engine.sizes[-1] == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_search_repeats_exactly_alone_and_in_any_batch(method):
    drawn, parameters = thesis_mix(4, 12, variables=2)
    texts = [to_text(program) for program in drawn]
    options = {"method": method, "max_iterations": 10}
    together = fit(DATA, texts, parameters, **options)
    again = fit(DATA, texts, parameters, **options)
    for name in ("loss", "initial_loss", "iterations", "evaluations", "reason"):
        np.testing.assert_array_equal(getattr(together, name), getattr(again, name))
    for index in range(0, 12, 5):
        alone = fit(DATA, [texts[index]], [parameters[index]], **options)
        assert alone.parameters[0].tobytes() == together.parameters[index].tobytes()
        assert alone.reason[0] is together.reason[index]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@settings(max_examples=12)
@given(drawn=st.lists(programs(variables=2, parameters=3), min_size=1, max_size=4))
@example([parse("x1 + powabs(p2, fma(281, -0.75, x1 / (p1 + (p1 + (p1 + x1)))))")])
@example([parse("p2 + powabs(p2, fma(216, -1, atan2(x1, p1 + p1)))")])
def test_random_programs_never_get_worse(method, dtype, drawn):
    data = Dataset.of(X, NOISY, dtype=dtype)
    starts = [np.linspace(0.5, 1.5, program.parameters) for program in drawn]
    found = fit(
        data, [to_text(p) for p in drawn], starts, method=method, max_iterations=8, covariance=True
    )
    finite = found.reason != Reason.NOT_FINITE
    assert (found.loss[finite] <= found.initial_loss[finite]).all()
    assert np.isfinite(found.loss[finite]).all()
    for parameters in found.parameters:
        assert np.isfinite(parameters).all()


@pytest.mark.parametrize("method", METHODS)
def test_a_step_beyond_the_range_of_the_data_type_ends_at_its_border(method):
    """The hyperbolic tangent has a value at infinity, which is where the first step would lead."""
    data = Dataset.of(X, np.ones(60), dtype="float32")
    found = fit(data, ["tanh(1e-39*p1)"], [[0.0]], method=method)
    np.testing.assert_array_equal(found.parameters[0], np.finfo(np.float32).max)
    assert found.loss[0] < found.initial_loss[0]


def test_float32_parameters_are_what_the_engine_computed_with():
    data = Dataset.of(X, NOISY, dtype="float32")
    p = fit(data, [MODEL], [START]).parameters[0]
    np.testing.assert_array_equal(p, p.astype(np.float32).astype(float))


# -------------------------------------------------------------------------------- linear parameters


@pytest.fixture(scope="module", autouse=True)
def loaded():
    compiled.load()


def linear(*drawn):
    """Return the marks of each program's parameters."""
    batch = Batch.of(drawn, [np.zeros(program.parameters) for program in drawn])
    starts = batch.parameter_starts
    marks, nodes = np.ones(int(starts[-1])), np.empty((int(batch.lengths.max()), COLUMNS), np.int64)
    mark_linear(batch.codes, batch.values, batch.starts, starts, operator_table(), nodes, marks)
    return [marks[a:b].tolist() for a, b in itertools.pairwise(starts.tolist())]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p1*exp(-p2*x1) + p3", [1, 0, 1]),
        ("(1 - exp(-p2*x1))*p1", [1, 0]),
        ("p1*exp(p2/(x1 + p3))", [1, 0, 0]),
        ("(p1 + p2*x1)/(1 + p3*x1)", [1, 1, 0]),
        ("p1*p2*x1", [1, 0]),
        ("p1*(p2*x1 + p3)", [0, 1, 1]),
        ("p1*x1 + square(p1)", [0]),
        ("-p1 - (x1 - p2)/x2", [1, 1]),
        ("where(x1 > p1, p2*x1, p3)", [0, 1, 1]),
        ("fma(p1, x1, p2) + fma(p3, p4, p5)", [1, 1, 1, 0, 1]),
        ("floor(p1) + abs(p2) + min(p3, x1)", [0, 0, 0]),
        ("x1", []),
    ],
)
def test_formulas(text, expected):
    assert linear(parse(text)) == [expected]


@given(programs(parameters=3), st.integers(0, 2**32 - 1))
def test_a_program_is_affine_in_the_marked_parameters(program, seed):
    """Half way between two vectors of the marked parameters is half way between the values."""
    (marks,) = linear(program)
    rng = np.random.default_rng(seed)
    x = rng.uniform(0.5, 2.0, size=(3, 20))
    first, second = rng.uniform(0.5, 2.0, size=(2, program.parameters))
    second = np.where(np.array(marks) == 1.0, second, first)
    with np.errstate(all="ignore"):
        a, b, half = (
            reference.evaluate_program(program, x, p) for p in (first, second, (first + second) / 2)
        )
        size = np.maximum(np.abs(a), np.abs(b))
        usable = np.isfinite(a) & np.isfinite(b) & np.isfinite(half) & (size < 1e100)
        largest = np.max(np.abs(program.values[np.isfinite(program.values)]), initial=1.0)
    if usable.any() and largest < 1e6:
        np.testing.assert_allclose(
            half[usable], ((a + b) / 2)[usable], rtol=1e-6, atol=1e-6 * max(1.0, size[usable].max())
        )
