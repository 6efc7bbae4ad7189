"""Fits and evaluations take as much memory as `warpfit_server.limits` says, and release it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.system.machine import available_cores

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


@pytest.fixture(scope="module", autouse=True)
def compiled_code():
    """Compile to disk, so that the processes below load it."""
    parts.precompile(available_cores())


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
