"""The compiled tier without a GPU: what runs on which thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings")

from warpfit.dataset import Dataset
from warpfit.errors import ProgramError
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation, Tier
from warpfit_server.engine.cuda.jit import tier
from warpfit_server.engine.interface import Outputs


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
