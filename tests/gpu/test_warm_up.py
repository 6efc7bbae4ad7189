"""What Numba has to compile is there before anybody waits for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: Prints what has been compiled, or loaded, since the engine was ready.
SCRIPT = """
import numpy as np
from support.engines.compiled_code import compiled
from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss, Precision, Tier
from warpfit.expressions.workload import thesis_mix
from warpfit_server.engine.interface import Outputs, run_to_end
from warpfit_server.engine.cuda.engine import CudaEngine
from warpfit_server.engine.cuda.interpreter import loss_launch
from warpfit_server.engine.cuda.jit import shapes

def answers(engine, dataset, tier, precision, loss):
    for scale in range(6):
        programs, parameters = thesis_mix(1, 30)
        batch = Batch.of(programs, [scale * vector for vector in parameters]).copy()
        evaluation = Evaluation(
            dataset.content_id, batch, loss=loss, values=False, tier=tier, precision=precision
        )
        outputs = Outputs(None, np.zeros((30, 1)), np.zeros(1, np.uint8), lambda _: None)
        run_to_end(engine.evaluate(evaluation, outputs))

engine = CudaEngine()
before = compiled()
assert len(before) > 5
X, y = np.random.default_rng(0).normal(size=(1000, 10)), np.ones(1000)
for dtype in ("float32", "float64"):
    for weights in (None, y):
        dataset = Dataset.of(X, y, weights, dtype=dtype)
        engine.load(dataset)
        for tier in Tier:
            for precision in Precision:
                answers(engine, dataset, tier, precision, Loss.MSE)
                answers(engine, dataset, tier, precision, Loss.R2)
        engine.unload(dataset.content_id)
loss_launch.load()  # other processes compile these types ahead
shapes.load()
print(*sorted(compiled() - before), sep="\\n")
engine.close()
"""


def test_nothing_is_compiled_once_an_engine_is_ready(engine):
    command = [sys.executable, "-c", SCRIPT]
    tests = Path(__file__).parents[1]  # where it finds `support`
    done = subprocess.run(
        command, cwd=tests, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["", ""]
