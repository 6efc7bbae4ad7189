"""The planner of the CUDA engine: when it compiles, and how it learns."""

from __future__ import annotations

import pytest

pytest.importorskip("cachetools")

from warpfit.request import Tier
from warpfit_server.engine.cuda.plan import Advice, Cost, Planner

LARGE = 300 * 30 * 1_000_000
SMALL = 300 * 30 * 100


def _planner(threads=16):
    return Planner(threads)


def test_small_work_is_always_interpreted():
    planner = _planner()
    advice = {planner.advise("a", "fast", SMALL, 300) for _ in range(10_000)}
    assert advice == {Advice.INTERPRET}


def test_compiles_once_when_the_savings_forgone_reach_the_price():
    planner = _planner()
    saving = planner.costs[Tier.INTERPRETER, "fast"].seconds(LARGE)
    saving -= planner.costs[Tier.COMPILED, "fast"].seconds(LARGE)
    price = 300 * 0.012 / 16
    advice = [planner.advise("a", "fast", LARGE, 300) for _ in range(int(price / saving) + 5)]
    turn = advice.index(Advice.INTERPRET_AND_COMPILE)
    assert turn == pytest.approx(price / saving, abs=1.5)
    assert set(advice[:turn]) == {Advice.INTERPRET}
    assert set(advice[turn + 1 :]) == {Advice.COMPILED_IF_READY}


def test_batches_are_counted_apart():
    planner = _planner()
    for number in range(2000):
        assert planner.advise(number, "fast", LARGE, 300) is Advice.INTERPRET


def test_rates_follow_observation():
    planner = _planner()
    for _ in range(60):
        planner.observe(Tier.COMPILED, "fast", LARGE, 1.0)
    assert planner.costs[Tier.COMPILED, "fast"].rate == pytest.approx(LARGE, rel=0.01)
    assert planner.advise("a", "fast", LARGE, 300) is Advice.INTERPRET


def test_short_evaluations_tell_nothing_of_the_rate():
    cost = Cost(launch=20e-6, rate=1e12)
    assert cost.corrected(1000, 30e-6) is cost
    assert cost.corrected(0, 1.0) is cost
