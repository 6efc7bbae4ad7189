"""The tier chooser of the CUDA engine and its calibration."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cachetools")
pytest.importorskip("cuda.bindings")

from warpfit.request import Tier
from warpfit_server.engine.cuda.calibration import fit_cost, from_file, to_json
from warpfit_server.engine.cuda.tier_chooser import (
    DEFAULT_COSTS,
    CostTable,
    Decision,
    TierChooser,
    TierCost,
)

LARGE = 300 * 30 * 1_000_000
SMALL = 300 * 30 * 100


def _chooser(threads=16):
    """A tier chooser for which compiled kernels launch more slowly and then run faster."""
    tiers = {
        (Tier.INTERPRETER, "fast"): TierCost(20e-6, 6e12),
        (Tier.COMPILED, "fast"): TierCost(60e-6, 12e12),
    }
    return TierChooser(threads, CostTable(tiers, {"fast": 0.012}))


def test_costs_are_fitted_to_two_measurements():
    truth = TierCost(launch=1e-4, rate=5e12)
    work = [10**6, 10**9]
    measured = fit_cost(work, [truth.seconds(w) for w in work])
    assert measured.launch == pytest.approx(truth.launch)
    assert measured.rate == pytest.approx(truth.rate)
    noisy = fit_cost([10**6, 10**9], [2e-4, 1e-4])
    assert noisy.launch > 0
    assert noisy.rate > 0


def test_costs_are_read_back_from_a_file(tmp_path):
    path = tmp_path / "costs"
    path.write_bytes(to_json(DEFAULT_COSTS))
    assert from_file(path) == DEFAULT_COSTS


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"costs": [], "compile_seconds": {}}'])
def test_a_damaged_or_missing_file_gives_no_costs(tmp_path, content):
    path = tmp_path / "costs"
    path.write_bytes(content)
    assert from_file(path) is None
    assert from_file(tmp_path / "missing") is None


def test_small_work_is_always_interpreted():
    chooser = _chooser()
    decisions = {
        chooser.choose("a", "fast", SMALL, 300, loaded=loaded)
        for loaded in (False, True)
        for _ in range(10_000)
    }
    assert decisions == {Decision.INTERPRET}


def test_compiles_once_when_the_savings_forgone_reach_the_price():
    chooser = _chooser()
    saving = chooser.costs[Tier.INTERPRETER, "fast"].seconds(LARGE)
    saving -= chooser.costs[Tier.COMPILED, "fast"].seconds(LARGE)
    price = 300 * 0.012 / 16
    count = int(price / saving) + 5
    decisions = [chooser.choose("a", "fast", LARGE, 300, loaded=False) for _ in range(count)]
    turn = decisions.index(Decision.INTERPRET_AND_COMPILE)
    assert turn == pytest.approx(price / saving, abs=1.5)
    assert set(decisions[:turn]) == set(decisions[turn + 1 :]) == {Decision.INTERPRET}
    assert chooser.choose("a", "fast", LARGE, 300, loaded=True) is Decision.COMPILED


def test_kernels_that_were_pushed_out_are_made_again_when_they_would_have_paid():
    chooser = _chooser()
    decisions = [chooser.choose("a", "fast", LARGE, 300, loaded=False) for _ in range(10_000)]
    turns = [i for i, one in enumerate(decisions) if one is Decision.INTERPRET_AND_COMPILE]
    assert len(turns) > 2
    assert set(np.diff(turns)) == {turns[0] + 1}


def test_costs_follow_observation():
    chooser = _chooser()
    truth = TierCost(launch=1e-3, rate=5e12)
    for turn in range(400):
        work = SMALL if turn % 2 else LARGE
        chooser.observe(Tier.COMPILED, "fast", work, truth.seconds(work))
    learnt = chooser.costs[Tier.COMPILED, "fast"]
    assert learnt.launch == pytest.approx(truth.launch, rel=0.02)
    assert learnt.rate == pytest.approx(truth.rate, rel=0.02)


def test_a_tier_found_slow_is_no_longer_chosen():
    chooser = _chooser()
    for _ in range(60):
        chooser.observe(Tier.COMPILED, "fast", LARGE, 1.0)
    assert chooser.choose("a", "fast", LARGE, 300, loaded=True) is Decision.INTERPRET
