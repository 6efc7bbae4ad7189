"""What Numba has to compile is there before anybody waits for it; on devices of functions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")
pytest.importorskip("cuda.bindings")

#: Prints what is compiled, or loaded, by evaluations after the rehearsal.
SCRIPT = """
import sys
import numpy as np
from support.compiled_code import compiled
from support.driver import Driver as InterpreterDriver
from support.interpreted import EngineOnLanes, HostEngine, host_device
from support.replayed import Driver, Store
from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss, Tier
from warpfit.workload import thesis_mix
from warpfit_server.engine import lane_end
from warpfit_server.engine.cuda import rehearsal
from warpfit_server.engine.cuda.compiled import CompiledTier

interpreting, driver = InterpreterDriver(), Driver()
tier = CompiledTier(driver.device, Store(driver))
engines = {
    Tier.INTERPRETER: HostEngine(host_device(interpreting)),
    Tier.COMPILED: HostEngine(driver.device, tier),
}
lane_end.rehearse()
for tier, engine in engines.items():
    rehearsal.rehearse(engine, [tier])
before = compiled()
X, y = np.random.default_rng(0).normal(size=(1000, 10)), np.ones(1000)
for tier, engine in engines.items():
    for dtype in ("float32", "float64"):
        for weights in (None, y):
            dataset = Dataset.of(X, y, weights, dtype=dtype)
            with EngineOnLanes(engine, dataset) as lanes:
                for scale in range(6):
                    batch = Batch.of(*thesis_mix(1, 30))
                    lanes.losses(
                        Evaluation(
                            dataset.content_id, batch, loss=Loss.R2, values=False, tier=tier
                        )
                    )
print(len(before), *sorted(compiled() - before), sep="\\n")
"""


def test_nothing_is_compiled_after_the_rehearsal():
    command = [sys.executable, "-c", SCRIPT]
    tests = Path(__file__).parents[1]  # where it finds `support`
    done = subprocess.run(
        command, cwd=tests, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    count, *late = done.stdout.split()
    assert int(count) > 3
    assert late == []
