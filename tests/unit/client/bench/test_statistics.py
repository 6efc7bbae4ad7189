"""Statistics of `warpfit bench`, the workload, and what is counted for the roofline."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpfit.bench import roofline, work
from warpfit.bench.arrivals import arrivals
from warpfit.bench.hardware import Peaks
from warpfit.bench.scenarios import PROFILES, QUICK, Kind, Scenario
from warpfit.bench.statistics import crossover, summarise, told_percentile
from warpfit.bench.work import Expressions, moved, redrawn, table
from warpfit.expressions.workload import thesis_mix
from warpfit.ops import BY_CODE
from warpfit.parse import parse

POSITIVE = st.floats(1e-6, 1e3)


@given(st.lists(POSITIVE, min_size=1, max_size=60))
def test_a_summary_is_ordered_and_encloses_the_median(samples):
    found = summarise(samples)
    assert found.n == len(samples)
    assert found.least <= found.low <= found.median <= found.high <= found.greatest
    assert found.p10 <= found.median <= found.p90
    assert found.median == pytest.approx(float(np.median(samples)))


def test_the_interval_of_the_median_covers_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        found = summarise(rng.exponential(size=41))
        covered += found.low <= np.log(2) <= found.high
    assert 0.92 <= covered / 400 <= 0.995


def test_no_percentile_is_told_without_measurements_beyond_it():
    assert summarise(range(499)).p99 is None
    assert summarise(range(500)).p99 == pytest.approx(494.01)
    assert told_percentile(np.arange(49.0), 90) is None
    assert told_percentile(np.arange(50.0), 90) is not None


def test_nothing_measured_is_an_error():
    with pytest.raises(ValueError, match="nothing was measured"):
        summarise([])


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([2, 3, 4], 10.0),
        ([0.5, 0.6, 0.9], None),
        ([0.5, 2, 4], 10**1.5),
        ([2, 0.5, 2], 10**2.5),  # below 1 once more: only what holds from there on counts
    ],
)
def test_crossover(ratios, expected):
    found = crossover([10, 100, 1000], ratios)
    assert found == (None if expected is None else pytest.approx(expected))


# ----------------------------------------------------------------------------------------- work


def test_fresh_batches_share_no_expression_but_their_shapes():
    drawn = Expressions(3)
    first, _ = drawn.fresh(40, (10, 50))
    second, parameters = drawn.fresh(40, (10, 50))
    assert not set(first) & set(second)
    assert [len(program) for program in first] == [len(program) for program in second]
    assert [p.parameters for p in second] == [len(vector) for vector in parameters]


def test_another_stream_draws_other_expressions():
    one, other = (Expressions(3, (run,)).fresh(40, (10, 50))[0] for run in (1, 2))
    assert not set(one) & set(other)


def test_a_batch_larger_than_the_trees_has_no_expression_twice(monkeypatch):
    monkeypatch.setattr(work, "_TREES", 40)
    programs, _ = Expressions(1).fresh(300, (30, 30))
    assert len(set(programs)) == 300


def test_redrawing_keeps_the_mix_of_operators():
    programs, _ = thesis_mix(1, 300)
    before, after = (
        np.bincount(np.concatenate([p.codes for p in some]), minlength=256)
        for some in (programs, redrawn(programs, np.random.default_rng(0)))
    )
    operators = [code for code in BY_CODE if before[code]]
    assert before[operators].sum() == after[operators].sum()
    assert np.all(np.abs(before - after)[operators] < 0.3 * before[operators])


def test_moving_changes_every_parameter_a_little():
    vectors = [np.array([1.0, 2.0]), np.array([]), np.array([3.0])]
    found = moved(vectors, np.random.default_rng(0))
    assert [len(v) for v in found] == [2, 0, 1]
    for old, new in zip(vectors, found, strict=True):
        assert np.all(new != old)
        assert np.all(np.abs(new / old - 1) <= 0.1)


def test_tables_are_the_same_for_the_same_seed():
    one, two, other = table(50, 1), table(50, 1), table(50, 2)
    assert np.array_equal(one.X, two.X)
    assert not np.array_equal(one.X, other.X)
    assert one.X.dtype == np.float32


# ------------------------------------------------------------------------------------ scenarios

OFFERS = {"a": (9, "interpreter"), "b": (500, "compiled")}


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_no_scenario_is_measured_twice(profile):
    for engine, tiers in (("cpu", ["interpreter"]), ("cuda", ["interpreter", "compiled"])):
        wanted = [*profile.scenarios(engine, tiers), *profile.peers(engine, OFFERS)]
        keys = [scenario.key for scenario in wanted]
        assert len(set(keys)) == len(keys)
        assert all(scenario.expressions >= 1 for scenario in wanted)


def test_a_cpu_is_not_asked_for_compiled_kernels():
    assert all(s.tier == "interpreter" for s in QUICK.scenarios("cpu", ["interpreter"]))
    tiers = {s.tier for s in QUICK.scenarios("cuda", ["interpreter", "compiled"])}
    assert tiers == {"interpreter", "compiled"}


def test_slow_peers_get_fewer_expressions_in_a_quick_profile():
    quick = {s.expressions for s in QUICK.peers("cuda", {"slow": (50, "compiled")})}
    full = {s.expressions for s in PROFILES["full"].peers("cuda", {"slow": (50, "compiled")})}
    assert (quick, full) == ({50}, {300})


# ------------------------------------------------------------------------------------- roofline

PEAKS = Peaks("made up", 1e12, 0.0, 1e11, "")


def test_the_bound_counts_instructions_special_functions_and_bytes():
    scenario = Scenario(engine="cpu", rows=1000, expressions=1)
    programs = [parse("x1 + x2*exp(x3)")]
    found = roofline.bound(scenario, programs, PEAKS)
    assert found["operations"] == (3 + 9) * 1000
    assert found["bytes"] == 11 * 1000 * 4
    assert found["by"] == "memory"
    assert found["seconds"] == pytest.approx(44_000 / 1e11)


def test_a_unit_for_special_functions_has_its_own_roof():
    peaks = Peaks("made up", 1e12, 1e9, 1e15, "")
    programs = [parse("x1 ^ x2")]
    found = roofline.bound(Scenario(engine="cuda", rows=100, expressions=1), programs, peaks)
    assert (found["by"], found["seconds"]) == ("special functions", pytest.approx(200 / 1e9))
    precise = Scenario(engine="cuda", rows=100, expressions=1, precision="precise")
    assert roofline.bound(precise, programs, peaks)["by"] == "issue"


# ------------------------------------------------------------------------------------- arrivals


@settings(max_examples=40)
@given(st.floats(5, 500), st.floats(0.5, 3), st.floats(0, 2), st.sampled_from(["even", "poisson"]))
def test_arrivals_come_in_order_and_in_the_number_asked_for(rate, seconds, ramp, kind):
    moments = arrivals(rate, seconds, ramp, kind, seed=1)
    assert np.all(np.diff(moments) >= 0)
    assert np.all((moments >= 0) & (moments <= ramp + seconds + 1e-9))
    expected = rate * (ramp / 2 + seconds)
    assert abs(len(moments) - expected) <= (1 if kind == "even" else 6 * np.sqrt(expected) + 1)


def test_the_rate_grows_during_the_ramp():
    moments = arrivals(1000, 1.0, 1.0, "even", seed=1)
    early, late = ((moments < 0.5).sum(), ((moments >= 0.5) & (moments < 1)).sum())
    assert early == pytest.approx(125, abs=2)
    assert late == pytest.approx(375, abs=2)
    assert (moments >= 1).sum() == pytest.approx(1000, abs=2)


def test_titles_tell_what_kind_of_scenario_it_is():
    assert "at once" in Scenario(engine="cpu", kind=Kind.WORKERS, workers=4).title
    assert "fits" in Scenario(engine="cpu", kind=Kind.OPTIMIZE).title
