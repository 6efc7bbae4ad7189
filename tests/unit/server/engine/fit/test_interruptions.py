"""Fits that a deadline or their caller ends, work of other threads, and the memory of fits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numba
import numpy as np
import pytest

from support.engines.fits import fit, tight
from support.engines.references import NumpyEngine
from warpfit import CancelledError, Reason
from warpfit.dataset import Dataset
from warpfit.fitting import Accuracy
from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.engine.fit import driver, triangles
from warpfit_server.engine.fit.searches import EVALUATIONS
from warpfit_server.system.machine import available_cores

X = np.random.default_rng(3).uniform(0.5, 2.0, size=(60, 2))
EXACT = Dataset.of(X, 3.0 * np.exp(-0.7 * X[:, 0]) + 0.5 * X[:, 1], dtype="float64")
MODEL = "p1*exp(p2*x1) + p3*x2"
START = [1.0, -0.1, 1.0]
METHODS = ("lm", "bfgs")


@pytest.mark.parametrize("method", METHODS)
def test_a_deadline_that_has_passed_returns_what_there_is(method):
    found = fit(EXACT, [MODEL, "x1"], [START, []], method=method, deadline=time.monotonic() - 1)
    assert found.reason.tolist() == [Reason.DEADLINE, Reason.GRADIENT]
    assert found.loss[0] <= found.initial_loss[0]


class StuckEngine(NumpyEngine):
    """Hangs after some passes until it is cancelled."""

    def __init__(self, dataset, passes):
        super().__init__(dataset)
        self.left = passes

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
    started = time.monotonic()
    found = fit(
        EXACT,
        [MODEL, "x1"],
        [START, []],
        method=method,
        engine=StuckEngine(EXACT, passes),
        deadline=started + 0.3,
        covariance=True,
    )
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
    """So that the engine's thread goes on with other requests."""
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


@pytest.mark.parametrize("accuracy", Accuracy)
@pytest.mark.parametrize("degree", [1, 4, 6])
def test_a_linear_fit_that_gets_no_better_ends(accuracy, degree):
    """Hundreds of good steps once made the damping 0, and a loop that doubled it had no end."""
    x = np.linspace(500, 505, 80)
    z = (x - 502.5) / 2.5
    y = 1 + z - z**2 / 2 + 0.3 * z**3 - 0.2 * z**4 + 0.01 * np.sin(50 * x)
    data = Dataset.of(x[:, None], y, dtype="float64")
    text = " + ".join(["p1", *(f"p{k + 1}*x1^{k}" for k in range(1, degree + 1))])
    found = fit(data, [text], [np.ones(degree + 1)], **tight(accuracy))
    assert found.iterations[0] <= accuracy.max_iterations


@pytest.mark.parametrize("method", METHODS)
def test_compiled_steps_look_at_the_flag_of_cancellation(monkeypatch, method):
    """A flag that is set while a step is computed leaves searches as they were."""
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


def test_a_fit_with_a_deadline_can_be_cancelled():
    class Cancelling(NumpyEngine):
        def linearise(self, *arguments, cancelled, **options):
            cancelled[0] = len(self.sizes) > 1
            return (yield from super().linearise(*arguments, cancelled=cancelled, **options))

    engine = Cancelling(EXACT)
    with pytest.raises(CancelledError):
        fit(EXACT, [MODEL], [START], engine=engine, deadline=time.monotonic() + 60)
    assert len(engine.sizes) == 3


# ------------------------------------------------------------------------------------------- memory


#: Fits or evaluates in a process of its own; prints what is counted for that, and how much more
#: memory than before was resident at most, and soon afterwards; in MiB.
_PROGRAM = """
import sys, threading, time
import numpy as np
from warpfit.dataset import Dataset
from warpfit.fitting import FitRequest, FitSettings, Method
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss
from support.random_programs import thesis_mix
from warpfit import parse
from warpfit_server.engine.interface import Outputs, run_to_end
from warpfit_server.engine.cpu.engine import CpuEngine
from warpfit_server.engine.fit.driver import FitContext, optimize
from warpfit_server.engine.native.compile_processes import BACKGROUND
from warpfit_server.limits import evaluation_memory, fit_memory
from warpfit_server.system.machine import give_back_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

method, kind = sys.argv[1:]
rng = np.random.default_rng(1)
x = rng.uniform(0.1, 5, (300, 10))
data = Dataset.of(x, 2 * x[:, 0] + x[:, 1])
if kind == "starts":
    programs, parameters = thesis_mix(1, 300)
    starts = [np.tile(p, (100, 1)) for p in parameters]
elif kind == "vectors":
    programs, starts = [parse("x1")] * 500, [np.empty((1000, 0))] * 500
elif kind == "tokens":
    programs = [parse("*".join(f"sin({i}.5*x1)" for i in range(200)))] * 500
    starts = [[]] * 500
else:
    programs = [parse("+".join(f"p{i + 1}*sin({i + 1}*x{i % 10 + 1})" for i in range(60)))] * 20
    starts = [rng.uniform(0.5, 2, (20, 60)) for _ in programs]
engine = CpuEngine(2)
engine.load(data)

def compute(programs, starts):
    evaluation = Evaluation(
        *(data.content_id, Batch.of(programs, starts)), loss=Loss.MSE, values=False,
        correlation=kind == "vectors",
    )
    cancelled = np.zeros(1, np.uint8)
    if method == "evaluate":
        losses, moments = (np.empty((*evaluation.shape(data.layout)[:2], n)) for n in (1, 7))
        moments = moments if evaluation.correlation else None
        outputs = Outputs(None, losses, cancelled, lambda count: None, moments=moments)
        run_to_end(engine.evaluate(evaluation, outputs))
        return (8 * losses.size + evaluation_memory(evaluation, data.layout)) / 2**20
    request = FitRequest(evaluation, FitSettings(method=Method(method), max_iterations=3))
    run_to_end(optimize(request, FitContext(engine.linearise, engine.evaluate, data, cancelled)))
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
grown = 0.0
if method == "evaluate":
    for _ in range(2):
        compute(programs, starts)
    give_back_memory()
    grown = resident() - before - left
print(counted, most, left, grown)
"""


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("lm", "parameters"),
        pytest.param("evaluate", "tokens", marks=pytest.mark.thorough),
        pytest.param("bfgs", "starts", marks=pytest.mark.thorough),
        pytest.param("evaluate", "vectors", marks=pytest.mark.thorough),
    ],
)
def test_memory_is_estimated_and_released(method, kind):
    parts.precompile(available_cores())  # to disk, so that the process loads it
    command = (sys.executable, "-c", _PROGRAM, method, kind)
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # one heap, which can be given back
    tests = Path(__file__).parents[4]  # where it finds `support`
    ended = subprocess.run(
        command, cwd=tests, capture_output=True, text=True, check=True, timeout=120, env=environment
    )
    counted, most, left, grown = map(float, ended.stdout.split())
    assert most > 20.0, "the measurement sees it"
    assert most / 1.3 < counted < 1.4 * most
    assert left < 0.15 * most
    assert grown < 0.15 * most


def test_a_factorisation_looks_at_the_flag_of_cancellation():
    matrix = np.array([2.0, 1.0, 2.0])
    factorise = numba.njit(triangles.factorise)
    assert factorise(matrix.copy(), 0, 2, 2, np.zeros(1, dtype=np.uint8))
    assert not factorise(matrix.copy(), 0, 2, 2, np.ones(1, dtype=np.uint8))
