"""The tier chooser of the CUDA engine and its calibration."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cachetools")
pytest.importorskip("cuda.bindings")

from warpfit.request import Tier
from warpfit_server.engine.cuda import calibration
from warpfit_server.engine.cuda.calibration import Calibration, fit_cost, from_file, to_json
from warpfit_server.engine.cuda.jit.kernel_plan import fingerprint
from warpfit_server.engine.cuda.runtime.compile_queue import CompileCounters
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


class Clock:
    """A clock that only `Compiling` advances."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def time_ns(self):
        return 12345


class Compiling:
    """A tier that builds a library, which is not counted, and compiles each batch once."""

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


def test_compile_seconds_are_those_of_new_programs_without_the_library(monkeypatch):
    clock, counters = Clock(), CompileCounters()
    monkeypatch.setattr(calibration, "time", clock)
    monkeypatch.setattr(calibration, "upload", lambda device, data: SimpleNamespace(dataset=data))
    tiers = {
        Tier.INTERPRETER: Compiling(clock, CompileCounters(), 0.0, 0.0),
        Tier.COMPILED: Compiling(clock, counters, library=3.0, compiling=0.5),
    }
    costs = Calibration(None, tiers, counters)._measure(lambda: True)
    expected = pytest.approx(0.5 / 100)
    assert costs.compile_seconds == {"fast": expected, "precise": expected, "float64": expected}
    assert costs.tiers[Tier.COMPILED, "fast"].launch == pytest.approx(1e-3, rel=0.1)


def test_a_batch_that_repeats_thousands_of_times_is_compiled():
    """300 expressions on 100,000 rows, with costs as measured on one H200 with 16 cores."""
    tiers = dict(DEFAULT_COSTS.tiers)
    tiers[Tier.INTERPRETER, "fast"] = TierCost(558e-6, 12e12)
    tiers[Tier.COMPILED, "fast"] = TierCost(125e-6, 40e12)
    chooser = TierChooser(16, CostTable(tiers, {"fast": 0.0133, "precise": 0.06, "float64": 0.07}))
    work = 9_000 * 100_000
    decisions = [chooser.choose("a", "fast", work, 300, loaded=False) for _ in range(1_000)]
    assert 300 < decisions.index(Decision.INTERPRET_AND_COMPILE) < 700


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


def test_batches_are_counted_apart():
    chooser = _chooser()
    for number in range(2000):
        assert chooser.choose(number, "fast", LARGE, 300, loaded=False) is Decision.INTERPRET


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
