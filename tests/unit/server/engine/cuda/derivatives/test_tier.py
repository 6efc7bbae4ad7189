"""The tier of derivatives, without a device."""

from __future__ import annotations

import threading
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch
from warpfit_server.engine.cuda.derivatives import tier as tier_module
from warpfit_server.engine.cuda.derivatives.tier import DerivativeTier
from warpfit_server.engine.interface import run_to_end


def test_kernels_for_programs_that_spill_are_loaded_by_another_thread(monkeypatch):
    """The engine's thread goes on with other requests until they are there."""
    compiled, outcomes, loaded = threading.Event(), [MemoryError(), "kernels"], []

    def load(tier, variant, *, spills):
        assert compiled.is_set()
        loaded.append((variant, spills))
        if isinstance(outcome := outcomes.pop(0), Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(DerivativeTier, "_load", load)
    device = SimpleNamespace()
    tier = DerivativeTier(device, 1, lambda: compiled.wait(20))
    plan = SimpleNamespace(variant="any", spills=True)
    first, second = tier._prepare(plan), tier._prepare(plan)
    waits_for = next(first)
    assert next(second) is waits_for
    assert not waits_for.done()
    compiled.set()
    with pytest.raises(MemoryError):  # for which memory was short
        run_to_end(first)
    assert run_to_end(tier._prepare(plan)) == "kernels"
    assert run_to_end(tier._prepare(plan)) == "kernels"
    assert loaded == [("any", True)] * 2


@pytest.mark.parametrize(("tokens", "jobs"), [(400, 10**6), (10**6, 12), (400, 12), (1, 1)])
def test_a_large_batch_is_cut_into_parts(monkeypatch, tokens, jobs):
    monkeypatch.setattr(tier_module, "_MOST_TOKENS", tokens)
    monkeypatch.setattr(tier_module, "_MOST_JOBS", jobs)
    programs, parameters = thesis_mix(1, 60)
    batch = Batch.of(programs, [np.stack([vector] * 3) for vector in parameters])
    edges = tier_module._part_edges(batch)
    assert edges[0] == 0
    assert edges[-1] == 60
    for first, stop in pairwise(edges):
        part = batch[first:stop]
        assert len(part) == 1 or (len(part.codes) <= tokens and 3 * len(part) <= jobs)
        if stop < 60:
            more = batch[first : stop + 1]
            assert len(more.codes) > tokens or 3 * len(more) > jobs
