"""The planner of the CUDA engine: when it compiles, and how it learns."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cachetools")
pytest.importorskip("cuda.bindings")

from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch, Program
from warpfit.request import Tier
from warpfit_server.engine.cuda import calibration
from warpfit_server.engine.cuda.calibration import Calibration, fitted, read, write
from warpfit_server.engine.cuda.planner import (
    STARTING_COSTS,
    Advice,
    Cost,
    Costs,
    Planner,
    fingerprint,
)
from warpfit_server.engine.cuda.runtime.nvjitlink import CompileCounters

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


class Clock:
    """Time that passes only when somebody works."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def time_ns(self):
        return 12345


class Compiling:
    """A tier that builds a library once, which nobody counts, and compiles each batch once."""

    def __init__(self, clock, counters, library, compiling):
        self.clock, self.counters, self.seen = clock, counters, set()
        self.library, self.compiling = library, compiling

    def evaluate(self, resident, evaluation, outputs):
        mode = (evaluation.precision, resident.dataset.layout.dtype)
        new = {("library", mode), (fingerprint(evaluation.batch), mode)} - self.seen
        for what, _ in new:
            self.clock.now += self.library if what == "library" else self.compiling / 5
            self.counters.seconds += 0.0 if what == "library" else self.compiling
        self.clock.now += 1e-3
        self.seen |= new
        yield None


def test_the_price_is_what_the_compiler_takes_for_programs_it_has_not_seen(monkeypatch):
    clock, counters = Clock(), CompileCounters()
    monkeypatch.setattr(calibration, "time", clock)
    monkeypatch.setattr(calibration, "upload", lambda device, data: SimpleNamespace(dataset=data))
    tiers = {
        Tier.INTERPRETER: Compiling(clock, CompileCounters(), 0.0, 0.0),
        Tier.COMPILED: Compiling(clock, counters, library=3.0, compiling=0.5),
    }
    costs = Calibration(None, tiers, counters)._measured()
    expected = pytest.approx(0.5 / 100)
    assert costs.compile_seconds == {"fast": expected, "precise": expected, "float64": expected}
    assert costs.tiers[Tier.COMPILED, "fast"].launch == pytest.approx(1e-3, rel=0.1)


def test_a_batch_that_repeats_thousands_of_times_is_compiled():
    """300 expressions on 100,000 rows, with costs as measured on one H200 with 16 cores."""
    tiers = dict(STARTING_COSTS.tiers)
    tiers[Tier.INTERPRETER, "fast"] = Cost(558e-6, 12e12)
    tiers[Tier.COMPILED, "fast"] = Cost(125e-6, 40e12)
    planner = Planner(16, Costs(tiers, {"fast": 0.0133, "precise": 0.06, "float64": 0.07}))
    work = 9_000 * 100_000
    advice = [planner.advise("a", "fast", work, 300, loaded=False) for _ in range(1_000)]
    assert 300 < advice.index(Advice.INTERPRET_AND_COMPILE) < 700


def test_small_work_is_always_interpreted():
    planner = _planner()
    advice = {
        planner.advise("a", "fast", SMALL, 300, loaded=loaded)
        for loaded in (False, True)
        for _ in range(10_000)
    }
    assert advice == {Advice.INTERPRET}


def test_compiles_once_when_the_savings_forgone_reach_the_price():
    planner = _planner()
    saving = planner.costs[Tier.INTERPRETER, "fast"].seconds(LARGE)
    saving -= planner.costs[Tier.COMPILED, "fast"].seconds(LARGE)
    price = 300 * 0.012 / 16
    count = int(price / saving) + 5
    advice = [planner.advise("a", "fast", LARGE, 300, loaded=False) for _ in range(count)]
    turn = advice.index(Advice.INTERPRET_AND_COMPILE)
    assert turn == pytest.approx(price / saving, abs=1.5)
    assert set(advice[:turn]) == set(advice[turn + 1 :]) == {Advice.INTERPRET}
    assert planner.advise("a", "fast", LARGE, 300, loaded=True) is Advice.COMPILED


def test_kernels_that_were_pushed_out_are_made_again_when_they_would_have_paid():
    planner = _planner()
    advice = [planner.advise("a", "fast", LARGE, 300, loaded=False) for _ in range(10_000)]
    turns = [i for i, one in enumerate(advice) if one is Advice.INTERPRET_AND_COMPILE]
    assert len(turns) > 2
    assert set(np.diff(turns)) == {turns[0] + 1}


def test_kernels_that_are_there_are_used_at_once():
    assert _planner().advise("a", "fast", LARGE, 300, loaded=True) is Advice.COMPILED


def test_batches_are_counted_apart():
    planner = _planner()
    for number in range(2000):
        assert planner.advise(number, "fast", LARGE, 300, loaded=False) is Advice.INTERPRET


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
    assert planner.advise("a", "fast", LARGE, 300, loaded=True) is Advice.INTERPRET


def test_fingerprints_tell_tokens_apart_and_ignore_parameters():
    programs, parameters = thesis_mix(1, 50)
    seen = {fingerprint(Batch.of(*thesis_mix(seed, 50))) for seed in range(40)}
    assert len(seen) == 40
    batch = Batch.of(programs, parameters)
    moved = Batch.of(programs, [vector + 1.0 for vector in parameters])
    assert fingerprint(batch) == fingerprint(moved)
    x, c = Program.variable(0), Program.constant
    close = [Program.apply("add", x, c(0.0)), Program.apply("add", x, c(-0.0))]
    close += [Program.apply("sub", x, c(0.0)), Program.apply("add", c(0.0), x)]
    assert len({fingerprint(Batch.of([program])) for program in close}) == 4
