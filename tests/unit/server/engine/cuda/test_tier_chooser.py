"""The tier chooser of the CUDA engine."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cachetools")

from warpfit.request import Tier
from warpfit_server.engine.cuda.tier_chooser import Decision, TierChooser, TierCost, WorkKind
from warpfit_server.engine.interface import Arithmetic

FAST = WorkKind(Arithmetic.FAST)
LARGE = 300 * 30 * 1_000_000
SMALL = 300 * 30 * 100


def _chooser(threads=16):
    """A tier chooser for which compiled kernels launch more slowly and then run faster."""
    tiers = {
        (Tier.INTERPRETER, Arithmetic.FAST): TierCost(20e-6, 6e12),
        (Tier.COMPILED, Arithmetic.FAST): TierCost(60e-6, 12e12),
    }
    return TierChooser(threads, tiers)


def test_small_work_is_always_interpreted():
    chooser = _chooser()
    decisions = {
        chooser.choose("a", FAST, SMALL, 300, loaded=loaded)
        for loaded in (False, True)
        for _ in range(10_000)
    }
    assert decisions == {Decision.INTERPRET}


def test_compiles_once_when_the_savings_forgone_reach_the_price():
    chooser = _chooser()
    saving = chooser.costs[Tier.INTERPRETER, FAST].seconds(LARGE)
    saving -= chooser.costs[Tier.COMPILED, FAST].seconds(LARGE)
    price = 300 * 0.012 / 16
    count = int(price / saving) + 5
    decisions = [chooser.choose("a", FAST, LARGE, 300, loaded=False) for _ in range(count)]
    turn = decisions.index(Decision.INTERPRET_AND_COMPILE)
    assert turn == pytest.approx(price / saving, abs=1.5)
    assert set(decisions[:turn]) == set(decisions[turn + 1 :]) == {Decision.INTERPRET}
    assert chooser.choose("a", FAST, LARGE, 300, loaded=True) is Decision.COMPILED


def test_kernels_that_were_pushed_out_are_made_again_when_they_would_have_paid():
    chooser = _chooser()
    decisions = [chooser.choose("a", FAST, LARGE, 300, loaded=False) for _ in range(10_000)]
    turns = [i for i, one in enumerate(decisions) if one is Decision.INTERPRET_AND_COMPILE]
    assert len(turns) > 2
    assert set(np.diff(turns)) == {turns[0] + 1}


def test_merging_is_compared_with_compiled_kernels():
    chooser = _chooser()
    interpreted = chooser.costs[Tier.INTERPRETER, FAST]
    compiled = chooser.costs[Tier.COMPILED, FAST]
    # On few rows nothing is gained by compiling, and on many merging does not make up for it.
    assert chooser.merge_from(FAST, SMALL) == 1
    assert chooser.merge_from(FAST, LARGE) == 0
    between = [n * 108_000_000 for n in range(2, 7)]
    least = [chooser.merge_from(FAST, size) for size in between]
    assert least == sorted(least)
    assert least[-1] > 2
    for size, count in zip(between, least, strict=True):
        merged = [interpreted.launch / n + size / interpreted.rate for n in (count, count - 1) if n]
        assert merged[0] <= compiled.seconds(size)
        assert all(one > compiled.seconds(size) for one in merged[1:])


def test_costs_follow_observation():
    chooser = _chooser()
    truth = TierCost(launch=1e-3, rate=5e12)
    for turn in range(400):
        work = SMALL if turn % 2 else LARGE
        chooser.observe(Tier.COMPILED, FAST, work, truth.seconds(work))
    learnt = chooser.costs[Tier.COMPILED, FAST]
    assert learnt.launch == pytest.approx(truth.launch, rel=0.02)
    assert learnt.rate == pytest.approx(truth.rate, rel=0.02)


def test_a_tier_found_slow_is_no_longer_chosen():
    chooser = _chooser()
    for _ in range(60):
        chooser.observe(Tier.COMPILED, FAST, LARGE, 1.0)
    assert chooser.choose("a", FAST, LARGE, 300, loaded=True) is Decision.INTERPRET


def test_a_tier_that_looked_slow_is_tried_again_after_a_while():
    chooser = _chooser()
    usual = chooser.costs[Tier.INTERPRETER, FAST].seconds(LARGE)
    for _ in range(60):
        chooser.observe(Tier.COMPILED, FAST, LARGE, 20 * usual)
    choices = []
    for _ in range(3_000):
        chooser.observe(Tier.INTERPRETER, FAST, LARGE, usual)
        choices.append(chooser.choose("a", FAST, LARGE, 300, loaded=True))
    assert set(choices[:300]) == {Decision.INTERPRET}
    assert choices[-1] is Decision.COMPILED


def test_a_slow_device_runs_compiled_kernels_slowly_until_they_are_observed():
    chooser = _chooser()
    key = Tier.COMPILED, FAST
    slow = 5 * chooser.costs[key].seconds(LARGE)
    interpreted = 5 * chooser.costs[Tier.INTERPRETER, FAST].seconds(LARGE)
    for _ in range(60):
        chooser.observe(Tier.INTERPRETER, FAST, LARGE, interpreted)
    assert chooser.costs[key].seconds(LARGE) == pytest.approx(slow, rel=0.2)
    chooser.observe(*key, LARGE, slow)
    for _ in range(60):
        chooser.observe(Tier.INTERPRETER, FAST, LARGE, 3 * interpreted)
    assert chooser.costs[key].seconds(LARGE) == pytest.approx(slow, rel=0.2)
