"""The compiled tier without a GPU: what runs on which thread, and how rows are cut."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from support.emulators.host_device import install
from warpfit.dataset import Dataset
from warpfit.errors import ProgramError
from warpfit.ir import Batch
from warpfit.ops import OPERATORS
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss, Tier
from warpfit_server.engine.cuda.jit import tier
from warpfit_server.engine.cuda.jit.kernel_plan import MAX_GRAPHS, KernelPlan, best_layout
from warpfit_server.engine.cuda.jit.kernel_store import MOST_BYTES
from warpfit_server.engine.cuda.jit.tier import IdleGraphs
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


# -------------------------------------------------------------------------------------------- plans


def test_kernels_get_blocks_by_their_work():
    plan = KernelPlan(**dict.fromkeys([one.name for one in fields(KernelPlan)]))
    plan = replace(plan, shares=np.array([0.001, 0.4, 0.599]))
    assert plan.blocks(vectors=1, most=1000, total=100) == (1, 40, 60)
    assert plan.blocks(vectors=10, most=5, total=100) == (1, 4, 5)
    assert plan.blocks(vectors=1000, most=5, total=100) == (1, 1, 1)


@pytest.mark.parametrize("arithmetic", Arithmetic)
def test_layouts_fit_a_multiprocessor(arithmetic):
    for names in (("add", "mul"), ("add", "exp")):
        codes = np.array([OPERATORS[name].code for name in names], dtype=np.uint8)
        layout = best_layout(arithmetic, codes)
        assert layout.threads % 32 == 0
        assert layout.threads <= 1024
        assert layout.threads >= layout.group_size  # a thread stores at most one sum


# ------------------------------------------------------------------------------------------- graphs


def graph(key, size=1):
    return SimpleNamespace(key=key, code_bytes=size)


def test_each_graph_is_lent_once():
    idle, first, second = IdleGraphs(), graph("a"), graph("a")
    idle.keep(first)
    idle.keep(second)
    assert {id(idle.take("a")), id(idle.take("a"))} == {id(first), id(second)}
    assert idle.take("a") is None


def test_the_code_of_all_graphs_is_bounded():
    idle = IdleGraphs()
    for number in range(10):
        idle.keep(graph(number, MOST_BYTES // 4))
    assert list(idle) == [6, 7, 8, 9]
    idle.keep(graph("large", MOST_BYTES + 1))
    assert "large" not in idle
    for number in range(2 * MAX_GRAPHS):
        idle.keep(graph(f"small {number}"))
    assert len(idle) == MAX_GRAPHS
