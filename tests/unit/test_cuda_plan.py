"""The planner of the CUDA engine: when it compiles, and how it learns."""

from __future__ import annotations

import pytest

pytest.importorskip("cachetools")

from warpfit.ir import Batch, Program
from warpfit.request import Tier
from warpfit.workload import thesis_mix
from warpfit_server.engine.cuda.calibrate import fitted, read, write
from warpfit_server.engine.cuda.plan import (
    STARTING_COSTS,
    Advice,
    Cost,
    Costs,
    Planner,
    fingerprint,
)

LARGE = 300 * 30 * 1_000_000
SMALL = 300 * 30 * 100


def _planner(threads=16):
    """A planner for which compiled kernels launch more slowly and then run faster."""
    tiers = {
        (Tier.INTERPRETER, "fast"): Cost(20e-6, 6e12),
        (Tier.COMPILED, "fast"): Cost(60e-6, 12e12),
    }
    return Planner(threads, Costs(tiers, {"fast": 0.012}))


def test_costs_are_fitted_to_what_was_measured():
    truth = Cost(launch=1e-4, rate=5e12)
    work = [10**6, 10**9]
    measured = fitted(work, [truth.seconds(w) for w in work])
    assert measured.launch == pytest.approx(truth.launch)
    assert measured.rate == pytest.approx(truth.rate)


def test_costs_stay_positive_when_noise_turns_the_points_round():
    noisy = fitted([10**6, 10**9], [2e-4, 1e-4])
    assert noisy.launch > 0
    assert noisy.rate > 0


def test_costs_come_back_from_disk(tmp_path):
    path = tmp_path / "costs"
    path.write_bytes(write(STARTING_COSTS))
    assert read(path) == STARTING_COSTS


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"costs": [], "compile_seconds": {}}'])
def test_a_damaged_file_of_costs_is_no_file(tmp_path, content):
    path = tmp_path / "costs"
    path.write_bytes(content)
    assert read(path) is None
    assert read(tmp_path / "missing") is None


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


def test_fingerprints_tell_tokens_apart_and_ignore_parameters():
    programs, parameters = thesis_mix(1, 50)
    seen = {fingerprint(Batch.of(*thesis_mix(seed, 50))) for seed in range(200)}
    assert len(seen) == 200
    batch = Batch.of(programs, parameters)
    moved = Batch.of(programs, [vector + 1.0 for vector in parameters])
    assert fingerprint(batch) == fingerprint(moved)
    x, c = Program.variable(0), Program.constant
    close = [Program.apply("add", x, c(0.0)), Program.apply("add", x, c(-0.0))]
    close += [Program.apply("sub", x, c(0.0)), Program.apply("add", c(0.0), x)]
    assert len({fingerprint(Batch.of([program])) for program in close}) == 4
