"""The compiled tier without a GPU: what runs on which thread, and how rows are cut."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from support.emulators.host_device import install
from warpfit.dataset import Dataset
from warpfit.errors import ProgramError
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss, Tier
from warpfit_server.engine.cuda.jit import tier
from warpfit_server.engine.cuda.runtime.datasets import upload
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.interface import Arithmetic, Outputs, run_to_end


@pytest.fixture
def planner():
    with ThreadPoolExecutor(1, "plan") as threads:
        yield threads


def test_kernels_are_planned_by_another_thread_than_the_loops(planner, monkeypatch):
    dataset = Dataset.of(np.ones((10, 1)), np.ones(10))
    evaluation = Evaluation(dataset.content_id, Batch.of([parse("x1 + x1")]), tier=Tier.COMPILED)
    outputs = Outputs(None, None, np.zeros(1, np.uint8), lambda _: None)
    threads = []

    def make_plan(*_):
        threads.append(threading.current_thread())
        raise ProgramError("a bad token", "BAD_TOKEN")

    monkeypatch.setattr(tier, "make_plan", make_plan)
    monkeypatch.setattr(tier, "GraphCapturer", lambda _: None)
    compiled = tier.CompiledTier(SimpleNamespace(use=lambda: None), None, planner)
    steps = compiled.evaluate(SimpleNamespace(dataset=dataset), evaluation, outputs)
    waits_for = next(steps)
    assert isinstance(waits_for, Future)
    with pytest.raises(ProgramError, match="a bad token"):
        waits_for.result(10)
    with pytest.raises(ProgramError, match="a bad token"):
        next(steps)
    assert [thread.name for thread in threads] == ["plan_0"]


class Graph:
    """In place of a captured graph: the values of two programs are x and 2 x."""

    key, inputs = None, None

    def __init__(self) -> None:
        self.sums, self.arguments, self.launched = np.zeros(2), {}, 0

    def place_partials(self, context, blocks) -> None:
        pass

    def set_arguments(self, arguments) -> None:
        self.arguments |= arguments

    def launch(self, context) -> None:
        head, stop = self.arguments["head"], self.arguments["stop"]

        def rows(name, skipped=0):
            place = self.arguments[name] + 8 * skipped
            return np.ctypeslib.as_array((ctypes.c_double * (stop - head)).from_address(place))

        x, y = rows("variables", head), rows("target", head)
        for factor in (1, 2):
            self.sums[factor - 1] = np.sum((factor * x - y) ** 2)
            if "values" in self.arguments:
                pitch = self.arguments["pitch"] // 8
                rows("values", (factor - 1) * pitch)[:] = factor * x
        self.launched += 1


@pytest.mark.parametrize(
    ("values", "span", "launches"), [(False, None, 18), (True, None, 18), (True, (517, 66_001), 17)]
)
def test_rows_are_cut_into_launches_of_one_graph(monkeypatch, values, span, launches):
    install(monkeypatch)
    x, y = np.random.default_rng(0).normal(size=(2, 70_001))
    dataset, device, graph = Dataset.of(x, y, dtype="float64"), CudaDevice(), Graph()
    batch = Batch.of([parse("x1"), parse("x1 + x1")])
    asked = Evaluation(dataset.content_id, batch, rows=span, loss=Loss.SSE, values=values)
    start, stop = asked.row_range(dataset.layout)
    plan = SimpleNamespace(
        arithmetic=Arithmetic.DOUBLE,
        inputs=SimpleNamespace(fill=lambda *_: None),
        sum_starts=np.arange(3),
    )
    work = tier.CompiledWork(plan, upload(device, dataset), asked, start, stop, 4096, 512, None)
    outputs = Outputs(
        np.zeros((2, 1, stop - start)) if values else None,
        *(np.zeros((2, 1)), np.zeros(1, np.uint8), lambda _: None),
    )
    with monkeypatch.context() as patch:
        patch.setattr(tier, "GraphCapturer", lambda _: None)
        compiled = tier.CompiledTier(device, None, None)
    run_to_end(compiled._run_chunks(work, graph, outputs, 0))
    x, y = x[start:stop], y[start:stop]
    expected = [np.sum((factor * x - y) ** 2) for factor in (1, 2)]
    np.testing.assert_allclose(outputs.losses[:, 0], expected, rtol=1e-12)
    if values:
        np.testing.assert_array_equal(outputs.values[:, 0], [x, 2 * x])
    assert graph.launched == launches
