"""The planner of the CUDA engine: when it compiles, and how it learns."""

from __future__ import annotations

import pytest

pytest.importorskip("cachetools")

from warpfit.request import Tier
from warpfit_server.engine.cuda.plan import Advice, Cost, Planner

LARGE = 300 * 30 * 1_000_000
SMALL = 300 * 30 * 100


def _planner(threads=16):
    """A planner for which compiled kernels launch more slowly and then run faster."""
    return Planner(
        threads,
        {
            (Tier.INTERPRETER, "fast"): Cost(20e-6, 6e12),
            (Tier.COMPILED, "fast"): Cost(60e-6, 12e12),
        },
    )


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


def test_costs_follow_observation():
    planner = _planner()
    truth = Cost(launch=1e-3, rate=5e12)
    for turn in range(400):
        work = SMALL if turn % 2 else LARGE
        planner.observe(Tier.COMPILED, "fast", work, truth.seconds(work))
    learnt = planner.costs[Tier.COMPILED, "fast"]
    assert learnt.launch == pytest.approx(truth.launch, rel=0.02)
    assert learnt.rate == pytest.approx(truth.rate, rel=0.02)


def test_a_tier_found_slow_is_no_longer_chosen():
    planner = _planner()
    for _ in range(60):
        planner.observe(Tier.COMPILED, "fast", LARGE, 1.0)
    assert planner.advise("a", "fast", LARGE, 300) is Advice.INTERPRET
