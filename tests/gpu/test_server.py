"""A real server with the CUDA engine: answers, tiers, and a real illegal memory access."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import warpfit
from support.engines.references import reference_loss
from support.random_programs import thesis_mix
from support.servers.server import ServerProcess
from warpfit.expressions import reference
from warpfit.request import Loss, Tier

ROWS = 100_000
OPERATORS = ("add", "sub", "mul", "sqrtabs", "sin")
#: Prints what has been compiled, or loaded, since the engine was ready.
WARM_UP = """
import numpy as np
from support.engines.operators import compiled
from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss, Precision, Tier
from support.random_programs import thesis_mix
from warpfit_server.engine.interface import Outputs, run_to_end
from warpfit_server.engine.cuda.engine import CudaEngine
from warpfit_server.engine.cuda.interpreter import launches

def answers(engine, dataset, tier, precision, loss):
    for scale in range(6):
        programs, parameters = thesis_mix(1, 30)
        batch = Batch.of(programs, [scale * vector for vector in parameters]).copy()
        given = dict(loss=loss, values=False, tier=tier, precision=precision)
        evaluation = Evaluation(dataset.content_id, batch, **given)
        outputs = Outputs(None, np.zeros((30, 1)), np.zeros(1, np.uint8), lambda _: None)
        run_to_end(engine.evaluate(evaluation, outputs))

engine = CudaEngine()
engine._derivatives.result()  # these follow in the background
engine._warming.result()
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
launches.load()  # another process compiles these types ahead
print(*sorted(compiled() - before), sep="\\n")
engine.close()
"""


@pytest.fixture(scope="module")
def server(engine):
    with ServerProcess(devices="0") as process:
        yield process


@pytest.fixture
def client(server):
    with warpfit.connect(server.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(ROWS, 10)).astype(np.float32)
    return X, rng.normal(size=ROWS).astype(np.float32)


def test_info_names_the_device(client):
    (device,) = client.info().devices
    assert client.info().engine == "cuda"
    assert device.memory > 1 << 30
    assert device.compute_capability
    assert device.driver
    assert device.tiers == (Tier.INTERPRETER, Tier.COMPILED)


@pytest.mark.parametrize("tier", list(Tier))
def test_values_and_losses(client, table, tier):
    X, y = table
    programs, parameters = thesis_mix(5, 30, operators=OPERATORS)
    data = client.upload(X, y)
    values = client.evaluate(data, programs, parameters=parameters, tier=tier)
    answer = client.run(data, programs, parameters, loss="mse", tier=tier)
    expected = reference.evaluate_programs(programs, X.T, parameters).T
    np.testing.assert_allclose(values, expected, rtol=2e-3, atol=2e-3)
    losses = reference_loss(Loss.MSE, values.T.astype(float), y)
    np.testing.assert_allclose(answer.losses, losses, rtol=1e-6)
    if tier is not Tier.AUTO:
        assert answer.timings.tier is tier


def test_a_repeated_batch_is_compiled_in_the_background(client, table):
    X, y = table
    X = np.abs(X) + np.float32(0.5)  # most expressions of the mix are finite there
    data = client.upload(np.tile(X, (5, 1)), np.tile(y, 5))
    call = partial(client.run, data, *thesis_mix(6, 300), loss="mse", precision="fast")
    answer = first = call()
    assert first.timings.tier is Tier.INTERPRETER
    deadline = time.monotonic() + 60
    while answer.timings.tier is not Tier.COMPILED:
        assert time.monotonic() < deadline, "never compiled"
        answer = call()
    finite = np.isfinite(first.losses) & np.isfinite(answer.losses)
    assert finite.sum() > 30
    close = np.isclose(first.losses[finite], answer.losses[finite], rtol=1e-2)
    assert close.mean() > 0.95  # fast mode: approximations differ, and some losses are all rounding


def test_an_illegal_memory_access_costs_only_a_retry(engine, tmp_path):
    X = np.arange(12.0).reshape(4, 3)
    trigger = tmp_path / "fault"
    paths = [str(Path(__file__).parent / "fault"), os.environ.get("PYTHONPATH", "")]
    path, impatient = os.pathsep.join(filter(None, paths)), warpfit.RetryPolicy(total_seconds=0)
    with (
        ServerProcess(devices="0", PYTHONPATH=path, TEST_WARPFIT_FAULT=str(trigger)) as server,
        warpfit.connect(server.address) as client,
        warpfit.connect(server.address, retry=impatient) as other,
    ):
        data = client.upload(X)
        healthy = server.engine().pid
        np.testing.assert_array_equal(client.evaluate(data, ["x1 + x2"])[:, 0], X[:, 0] + X[:, 1])
        for _ in range(2):
            trigger.touch()
            values = client.evaluate(data, ["x1 * x3"])
            np.testing.assert_array_equal(values[:, 0], X[:, 0] * X[:, 2])
            assert not trigger.exists()
        assert server.engine().pid != healthy
        trigger.touch()
        with pytest.raises(warpfit.errors.UnavailableError):
            other.evaluate(data, ["x1"])


def test_a_data_set_larger_than_the_device_memory_that_is_allowed(client):
    rng = np.random.default_rng(0)
    X = rng.uniform(0.5, 2, size=(1_000_000, 10)).astype(np.float32)
    y = (3.0 * X[:, 0] * np.exp(-0.5 * X[:, 1])).astype(np.float32)
    batch, options = thesis_mix(5, 30, operators=OPERATORS), {"loss": "mse", "tier": "interpreter"}
    with (
        ServerProcess("--device-memory", "48MiB", devices="0") as process,
        warpfit.connect(process.address) as other,
    ):
        both = client, other
        found = [each.run(each.upload(X, y), *batch, **options).losses for each in both]
        np.testing.assert_array_equal(*found)
        fit = other.optimize(other.upload(X, y), ["p1 * x1 * exp(p2 * x2)"], [[1.0, 0.0]])
        np.testing.assert_allclose(fit.parameters[0], [3.0, -0.5], rtol=1e-4)


def test_nothing_is_compiled_once_an_engine_is_ready(engine):
    options = {"capture_output": True, "text": True, "timeout": 120}
    tests = Path(__file__).parents[1]  # where it finds `support`
    done = subprocess.run([sys.executable, "-c", WARM_UP], cwd=tests, check=False, **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["", ""]
