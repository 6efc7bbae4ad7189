"""The tier of derivatives, without a device."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

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
