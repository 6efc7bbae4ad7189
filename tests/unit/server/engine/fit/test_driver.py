"""The batched driver: answers, ends, batches, linear parameters, interruptions, memory."""

import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.engines.fits import fit
from support.engines.operators import programs
from support.engines.references import NumpyEngine
from support.random_programs import thesis_mix
from warpfit import CancelledError, Reason, parse
from warpfit.dataset import Dataset
from warpfit.expressions import reference
from warpfit.ir import Batch
from warpfit.losses import Loss, LossFunction, gaussian
from warpfit.request import Missing
from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.engine.fit import driver, linear_model
from warpfit_server.engine.fit.linear_model import COLUMNS, mark_linear, operator_table
from warpfit_server.engine.fit.searches import EVALUATIONS
from warpfit_server.machine import available_cores

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
LINE = "p1*x1 + p2*x2 + p3"
DESIGN = np.column_stack([X, np.ones(60)])
METHODS = ("lm", "bfgs")
TIGHT = {"gradient_tolerance": 1e-12, "step_tolerance": 1e-12, "loss_tolerance": 1e-15}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", [DATA, WEIGHTED], ids=["unweighted", "weighted"])
def test_a_linear_model_agrees_with_the_normal_equations(method, data):
    w, a = np.ones(60) if data.weights is None else data.weights, DESIGN
    inverse = np.linalg.inv(a.T @ (w[:, None] * a))
    expected = inverse @ a.T @ (w * NOISY)
    asked = {"standard_errors": True, "covariance": True, "max_iterations": 200, **TIGHT}
    found = fit(data, [LINE], [[0.0, 0.0, 0.0]], method=method, **asked)
    np.testing.assert_allclose(found.parameters[0], expected, rtol=1e-5)
    left = np.sum(w * np.square(a @ expected - NOISY))
    np.testing.assert_allclose(found.loss[0], left, rtol=1e-9)
    covariance = inverse * left / (60 - 3)
    np.testing.assert_allclose(found.covariance[0], covariance, rtol=1e-4)
    np.testing.assert_allclose(found.standard_errors[0], np.sqrt(np.diag(covariance)), rtol=1e-4)
    if method == "lm":
        far = fit(data, [LINE], [[1e3, -1e4, 1e2]], max_iterations=1)
        np.testing.assert_allclose(far.parameters[0], expected, rtol=1e-6)
        assert far.iterations[0] == 1


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


@pytest.mark.parametrize("loss", [*Loss, gaussian(0.5), LossFunction.parse("abs(d)^1.5")])
def test_every_loss_gets_better(loss):
    found = fit(WEIGHTED, [MODEL], [START], loss=loss, max_iterations=100)
    if loss is Loss.R2:
        assert found.loss[0] > max(found.initial_loss[0], 0.9)
    else:
        assert found.loss[0] < found.initial_loss[0]
    np.testing.assert_allclose(found.parameters[0], [3.0, -0.7, 0.5], atol=0.6)


@pytest.mark.parametrize("method", METHODS)
def test_bounds_hold_and_the_rest_is_optimal(method):
    lower, upper = [[-np.inf, -0.5, -np.inf]], [[np.inf, np.inf, 0.3]]
    for start in (START, [1.0, -9.0, 9.0]):  # one outside is moved inside
        bounds = {"lower": lower, "upper": upper, "max_iterations": 200}
        p = fit(DATA, [MODEL], [start], method=method, **bounds).parameters[0]
        assert p[1:].tolist() == [-0.5, 0.3]
        shape = np.exp(-0.5 * X[:, 0])
        best = shape @ (NOISY - 0.3 * X[:, 1]) / (shape @ shape)
        np.testing.assert_allclose(p[0], best, rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_no_step_that_a_bound_cuts_off_raises_the_loss(method):
    """The bound of p2 leaves of the first step the part that goes uphill, to a plateau."""
    data = Dataset.of([[1, 1], [0, 1]], [-1, -2], dtype="float64")
    text, bounds = "1e-5*x1*tanh(1e5*p1) + x2*p2", [[-np.inf, -1e-9]]
    found = fit(data, [text], [[0.0, 0.0]], method=method, lower=bounds)
    assert found.loss[0] < found.initial_loss[0]


@pytest.mark.parametrize("method", METHODS)
def test_fixed_parameters_stay(method):
    options = {"fixed": [[False, True, False]], "standard_errors": True, "max_iterations": 100}
    found = fit(EXACT, [MODEL], [START], method=method, **options)
    assert found.parameters[0][1] == -0.1
    assert found.loss[0] < found.initial_loss[0]
    assert found.standard_errors[0][1] == 0.0
    assert (found.standard_errors[0][[0, 2]] > 0).all()


def test_the_best_start_wins_and_all_can_be_had():
    texts, starts = ["sin(p1*x1)", "x1"], [[[0.1], [4.2], [9.0]], np.empty((3, 0))]
    data = Dataset.of(X, np.sin(4.0 * X[:, 0]), dtype="float64")
    every, best = fit(data, texts, starts, all_starts=True), fit(data, texts, starts)
    assert every.loss.shape == (3, 2)
    assert [p.shape for p in every.parameters] == [(3, 1), (3, 0)]
    assert every.start[:, 0].tolist() == [0, 1, 2]
    assert best.start[0] == 1
    assert best.loss[0] == every.loss[:, 0].min()
    assert best.parameters[0] == every.parameters[0][1]
    np.testing.assert_allclose(best.parameters[0], [4.0], rtol=1e-6)
    infinite = LossFunction.parse("log(abs(d))")  # at the first start
    found = fit(CONSTANT, ["p1"], [[[1.0], [1.5]]], loss=infinite, max_iterations=3)
    assert found.start[0] == 1
    assert np.isfinite(found.loss[0])


WEIGHTLESS = Dataset.of(X, NOISY, np.zeros(60), dtype="float64")
CONSTANT = Dataset.of(X, np.ones(60), dtype="float64")
#: Its squares vanish.
TINY = Dataset.of(X, 1e-170 * Y, dtype="float64")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("data", "text", "options"),
    [
        *((EXACT, text, {}) for text in ("log(-p1)", "p1/(x1 - x1)", "x1^p1*log(-x1)")),
        (EXACT, "p1*log(-x1)", {"missing": Missing.DROP}),
        *((WEIGHTLESS, text, {"loss": Loss.MSE}) for text in ("p1*x1", "x1")),
        (WEIGHTLESS, "p1*x1", {"loss": Loss.MAE}),
        *((CONSTANT, "p1", {"loss": Loss.R2}), (TINY, "p1*x1", {})),  # without variation, squares
    ],
)
def test_what_has_no_finite_loss_fails_alone(method, data, text, options):
    if (method, options.get("loss")) == ("lm", Loss.MAE):
        pytest.skip("not a loss of squares")
    starts = [[1.0] if "p1" in text else [], START]
    found = fit(data, [text, MODEL], starts, method=method, max_iterations=100, **options)
    assert found.reason[0] is Reason.NOT_FINITE
    assert not found.success[0]
    assert found.parameters[0].tolist() == starts[0] or data is TINY
    assert found.iterations[0] == 0 or data is not EXACT or options
    assert (found.reason[1] is Reason.NOT_FINITE) == (data is not EXACT)


@pytest.mark.parametrize("method", METHODS)
def test_programs_without_free_parameters_end_at_once(method):
    found = fit(EXACT, ["x1", "p1*x1"], [[], [2.0]], method=method, fixed=[[], [True]])
    assert found.reason.tolist() == [Reason.GRADIENT] * 2
    assert found.evaluations.tolist() == [1, 1]
    np.testing.assert_allclose(found.loss[0], np.sum(np.square(X[:, 0] - Y)))


def test_rank_deficient_jacobians():
    found = fit(DATA, ["(p1 + p2)*x1 + p3"], [[0.0, 0.0, 0.0]], standard_errors=True, **TIGHT)
    expected, *_ = np.linalg.lstsq(DESIGN[:, (0, 2)], NOISY, rcond=None)
    p = found.parameters[0]
    np.testing.assert_allclose([p[0] + p[1], p[2]], expected, rtol=1e-6)
    assert np.isnan(found.standard_errors[0][:2]).all()
    assert np.isfinite(found.standard_errors[0][2])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", [(0, 1), (0, 2)])
def test_more_parameters_than_rows(method, rows):
    options = {"rows": rows, "max_iterations": 200, "covariance": True}
    found = fit(DATA, [LINE], [[0.0] * 3], method=method, **options)
    assert np.isfinite(found.parameters[0]).all()
    assert found.loss[0] < 1e-6
    assert np.isnan(found.covariance[0]).any()


@pytest.mark.parametrize("method", METHODS)
def test_iterations_are_limited(method):
    two, zero = ({"method": method, "max_iterations": most} for most in (2, 0))
    found, none = (fit(EXACT, [MODEL], [START], **options) for options in (two, zero))
    assert found.reason[0] is Reason.ITERATIONS
    assert found.iterations[0] == 2
    assert none.parameters[0].tolist() == START
    assert none.loss[0] == none.initial_loss[0]


@pytest.mark.parametrize("tolerance", ["gradient", "step", "loss"])
def test_each_tolerance_ends_a_search_with_its_reason(tolerance):
    off = {"gradient_tolerance": 0.0, "step_tolerance": 0.0, "loss_tolerance": 0.0}
    found = fit(DATA, [MODEL], [START], **(off | {f"{tolerance}_tolerance": 1e-3}))
    assert found.reason[0] is Reason(tolerance)


def test_rows_of_weight_0_give_no_degrees_of_freedom():
    weights = np.where(np.arange(60) % 3 == 0, 0.0, WEIGHTS)
    some = weights > 0
    asked = {"standard_errors": True, **TIGHT}
    found = fit(Dataset.of(X, NOISY, weights, dtype="float64"), [LINE], [[0.0] * 3], **asked)
    only = Dataset.of(X[some], NOISY[some], weights[some], dtype="float64")
    expected = fit(only, [LINE], [[0.0] * 3], **asked)
    np.testing.assert_allclose(found.standard_errors[0], expected.standard_errors[0], rtol=1e-9)


def test_searches_that_have_ended_drop_out_of_the_batch():
    engine = NumpyEngine(DATA)
    fit(DATA, ["x1"] * 30 + [MODEL, LINE], [[]] * 30 + [START, [0.0] * 3], engine=engine)
    assert engine.sizes[0] == 32
    assert engine.sizes[1] == 2
    assert engine.sizes[-1] == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_search_repeats_exactly_alone_and_in_any_batch(method):
    texts, parameters = thesis_mix(4, 12, variables=2)
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
    options = {"method": method, "max_iterations": 8, "covariance": True}
    found = fit(data, drawn, starts, **options)
    finite = found.reason != Reason.NOT_FINITE
    assert (found.loss[finite] <= found.initial_loss[finite]).all()
    assert np.isfinite(found.loss[finite]).all()
    assert np.isfinite(np.concatenate(found.parameters)).all()


@pytest.mark.parametrize("method", METHODS)
def test_float32_parameters_are_what_the_engine_computed_with(method):
    p = fit(Dataset.of(X, NOISY, dtype="float32"), [MODEL], [START], method=method).parameters[0]
    np.testing.assert_array_equal(p, p.astype(np.float32).astype(float))
    # The hyperbolic tangent has a value at infinity, which is where the first step would lead.
    data = Dataset.of(X, np.ones(60), dtype="float32")
    found = fit(data, ["tanh(1e-39*p1)"], [[0.0]], method=method)
    np.testing.assert_array_equal(found.parameters[0], np.finfo(np.float32).max)
    assert found.loss[0] < found.initial_loss[0]


@pytest.fixture(scope="module", autouse=True)
def loaded():
    driver.load()


def linear(*drawn):
    batch = Batch.of(drawn, [np.zeros(program.parameters) for program in drawn])
    starts = batch.parameter_starts
    marks, nodes = np.ones(int(starts[-1])), np.empty((int(batch.lengths.max()), COLUMNS), np.int64)
    mark_linear(batch.codes, batch.values, batch.starts, starts, operator_table(), nodes, marks)
    return [marks[a:b].tolist() for a, b in itertools.pairwise(starts.tolist())]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("(1 - exp(-p2*x1))*p1", [1, 0]), ("(p1 + p2*x1)/(1 + p3*x1)", [1, 1, 0])),
        *(("p1*p2*x1", [1, 0]), ("p1*(p2*x1 + p3)", [0, 1, 1]), ("p1*x1 + square(p1)", [0])),
        *(("-p1 - (x1 - p2)/x2", [1, 1]), ("where(x1 > p1, p2*x1, p3)", [0, 1, 1]), ("x1", [])),
        ("fma(p1, x1, p2) + fma(p3, p4, p5)", [1, 1, 1, 0, 1]),
        ("floor(p1) + abs(p2) + min(p3, x1)", [0, 0, 0]),
    ],
)
def test_linear_parameters_of_formulas(text, expected):
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
        vectors = first, second, (first + second) / 2
        a, b, half = (reference.evaluate_program(program, x, p) for p in vectors)
        size = np.maximum(np.abs(a), np.abs(b))
        usable = np.isfinite(a) & np.isfinite(b) & np.isfinite(half) & (size < 1e100)
        largest = np.max(np.abs(program.values[np.isfinite(program.values)]), initial=1.0)
    if usable.any() and largest < 1e6:
        error = np.abs(half - (a + b) / 2)[usable]
        assert error.max() <= 1e-6 * max(1.0, size[usable].max())


@pytest.mark.parametrize("method", METHODS)
def test_a_deadline_that_has_passed_returns_what_there_is(method):
    found = fit(EXACT, [MODEL, "x1"], [START, []], method=method, deadline=time.monotonic() - 1)
    assert found.reason.tolist() == [Reason.DEADLINE, Reason.GRADIENT]
    assert found.loss[0] <= found.initial_loss[0]


def test_a_fit_with_a_deadline_can_be_cancelled():
    class Cancelling(NumpyEngine):
        def linearise(self, *arguments, cancelled, **options):
            cancelled[0] = len(self.sizes) > 1
            return (yield from super().linearise(*arguments, cancelled=cancelled, **options))

    engine = Cancelling(EXACT)
    with pytest.raises(CancelledError):
        fit(EXACT, [MODEL], [START], engine=engine, deadline=time.monotonic() + 60)
    assert len(engine.sizes) == 3


class StuckEngine(NumpyEngine):
    left = 0

    def linearise(self, evaluation, row_loss, *, cancelled, **options):
        self.left -= 1
        while self.left < 0:
            if cancelled[0]:
                self.left = 1
                raise CancelledError("the evaluation was cancelled", "CANCELLED")
            time.sleep(0.001)
        return (yield from super().linearise(evaluation, row_loss, cancelled=cancelled, **options))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("passes", [1, 4])
def test_a_pass_is_cancelled_at_the_deadline_of_its_fit(method, passes):
    fit(EXACT, [MODEL], [START], method=method)  # loads the code
    engine, started = StuckEngine(EXACT), time.monotonic()
    engine.left = passes
    options = {"engine": engine, "deadline": started + 0.3, "covariance": True}
    found = fit(EXACT, [MODEL, "x1"], [START, []], method=method, **options)
    assert 0.25 < time.monotonic() - started < 30
    assert found.reason.tolist() == [Reason.DEADLINE, Reason.GRADIENT]
    assert found.loss[0] <= found.initial_loss[0]
    assert np.isfinite(found.loss).all()
    (again,) = fit(EXACT, [MODEL], found.parameters[:1], max_iterations=0).loss
    assert again == found.loss[0], "loss and parameters belong together"
    assert np.isfinite(found.covariance[0]).all(), "computed in spite of what was cut off"


LARGE = "+".join(f"p{i + 1}*sin({i + 1}*x1)" for i in range(110))


@pytest.mark.parametrize(
    ("method", "much"), [("lm", "searches"), ("bfgs", "searches"), ("lm", "parameters")]
)
def test_much_work_beside_passes_is_done_by_another_thread(monkeypatch, method, much):
    problem, options = (EXACT, [MODEL, "x1"], [START, []]), {"method": method, "covariance": True}
    if much == "parameters":
        problem = EXACT, [LARGE, LARGE], [np.ones(110), np.full(110, 0.5)]
        options["max_iterations"] = 2  # until they converge they take a minute
    expected, threads = fit(*problem, **options), set()

    def watched(function):
        def call(*arguments):
            threads.add(threading.get_ident())
            return function(*arguments)

        return call

    if much == "searches":
        monkeypatch.setattr(driver, "_MUCH_WORK", 1.0)
        monkeypatch.setattr(driver, "_PIECE", 0.5)
    for name in ("_advance", "_drop_finished"):
        monkeypatch.setattr(driver._Driver, name, watched(getattr(driver._Driver, name)))
    monkeypatch.setattr(driver, "estimate_covariances", watched(driver.estimate_covariances))
    found = fit(*problem, **options)
    assert threads
    assert threading.get_ident() not in threads
    for name in ("loss", "iterations", "reason"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    np.testing.assert_array_equal(found.parameters[0], expected.parameters[0])


@pytest.mark.parametrize("method", METHODS)
def test_compiled_steps_look_at_the_flag_of_cancellation(monkeypatch, method):
    advance = driver._Driver._advance

    def cancelled_meanwhile(self, new, some):
        if counters := self._active.counters[some, EVALUATIONS].max():
            self._context.cancelled[0] = 1
        before = self._active.vectors.copy()
        advance(self, new, some)
        assert bool(counters) == np.array_equal(before, self._active.vectors)

    monkeypatch.setattr(driver._Driver, "_advance", cancelled_meanwhile)
    with pytest.raises(CancelledError):
        fit(EXACT, [MODEL] * 3, [START] * 3, method=method)
    matrix, factorise = np.array([2.0, 1.0, 2.0]), numba.njit(linear_model.factorise)
    assert factorise(matrix.copy(), 0, 2, 2, np.zeros(1, dtype=np.uint8))
    assert not factorise(matrix.copy(), 0, 2, 2, np.ones(1, dtype=np.uint8))


#: Fits or evaluates in a process of its own; prints what is counted for that, and how much more
#: memory than before was resident at most, and soon afterwards; in MiB.
_PROGRAM = """
import sys, threading, time
import numpy as np
from support.engines.fits import prepared
from support.engines.references import outputs_for
from support.random_programs import thesis_mix
from warpfit import parse
from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.fit.driver import optimize
from warpfit_server.engine.interface import run_to_end
from warpfit_server.engine.native.numba_cache import BACKGROUND
from warpfit_server.limits import evaluation_memory, fit_memory
from warpfit_server.machine import give_back_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

method, kind = sys.argv[1:]
rng = np.random.default_rng(1)
x = rng.uniform(0.1, 5, (300, 10))
data = Dataset.of(x, 2 * x[:, 0] + x[:, 1])
if kind == "starts":
    programs, parameters = thesis_mix(1, 300)
    starts = [np.tile(p, (100, 1)) for p in parameters]
elif kind == "tokens":
    programs = [parse("*".join(f"sin({i}.5*x1)" for i in range(200)))] * 500
    starts = [[]] * 500
else:
    programs = [parse("+".join(f"p{i + 1}*sin({i + 1}*x{i % 10 + 1})" for i in range(60)))] * 20
    starts = [rng.uniform(0.5, 2, (20, 60)) for _ in programs]
engine = CpuEngine(2)
engine.load(data)

def compute(programs, starts):
    if method == "evaluate":
        batch = Batch.of(programs, starts)
        asked = Evaluation(data.content_id, batch, loss=Loss.MSE, values=False)
        outputs = outputs_for(asked, data.layout)
        run_to_end(engine.evaluate(asked, outputs))
        return (outputs.losses.nbytes + evaluation_memory(asked, data.layout)) / 2**20
    settings = {"method": method, "max_iterations": 3, "loss": Loss.MSE, "engine": engine}
    request, context = prepared(data, programs, starts, **settings)
    run_to_end(optimize(request, context))
    return fit_memory(request, data.layout) / 2**20

compute(programs[:1], [starts[0][:1]])
BACKGROUND.shutdown()  # else code that is loaded meanwhile would count, too
before, seen, ended = resident(), [0.0], []

def watch():
    while not ended:
        seen.append(resident())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
counted = compute(programs, starts)
ended.append(True)
watcher.join()
if method == "evaluate":
    give_back_memory()  # else the allocator keeps 8 MiB at the end of the heap
most, end = max(seen) - before, time.monotonic() + 5.0
while (left := resident() - before) > 0.1 * most and time.monotonic() < end:
    time.sleep(0.01)  # the thread that advanced the searches gives its memory back by itself
print(counted, most, left)
"""


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("lm", "parameters"),
        pytest.param("evaluate", "tokens", marks=pytest.mark.thorough),
        pytest.param("bfgs", "starts", marks=pytest.mark.thorough),
    ],
)
def test_memory_is_estimated_and_released(method, kind):
    parts.precompile(available_cores())  # to disk, so that the process loads it
    command = (sys.executable, "-c", _PROGRAM, method, kind)
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # one heap, which can be given back
    tests = Path(__file__).parents[4]  # where it finds `support`
    options = {"cwd": tests, "env": environment, "capture_output": True, "text": True}
    ended = subprocess.run(command, check=True, timeout=120, **options)
    counted, most, left = map(float, ended.stdout.split())
    assert most > 20.0, "the measurement sees it"
    assert most / 1.3 < counted < 1.4 * most
    assert left < 0.15 * most
