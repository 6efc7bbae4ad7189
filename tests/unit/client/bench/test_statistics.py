"""Statistics, batches, scenarios and bounds of `warpfit bench`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpfit.bench import batches
from warpfit.bench.batches import RECORDED, Expressions, operations, recorded
from warpfit.bench.hardware import Peaks
from warpfit.bench.scenarios import PROFILES, Scenario
from warpfit.bench.statistics import crossover, percentile, summarise
from warpfit.parse import parse


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60))
def test_the_interval_encloses_the_median(samples):
    found = summarise(samples)
    assert found["n"] == len(samples)
    assert found["low"] <= found["median"] <= found["high"]
    assert found["median"] == pytest.approx(float(np.median(samples)), rel=1e-4)


def test_a_percentile_needs_measurements_beyond_it():
    assert summarise(range(499))["p99"] is None
    assert summarise(range(500))["p99"] == pytest.approx(494.01)
    assert percentile(np.arange(49.0), 90) is None
    assert percentile(np.arange(50.0), 90) is not None


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


# -------------------------------------------------------------------------------------- batches


def test_fresh_batches_share_lengths_but_no_expression():
    drawn = Expressions(3)
    first, _ = drawn.draw(40)
    second, parameters = drawn.draw(40)
    assert not set(first) & set(second)
    assert [len(program) for program in first] == [len(program) for program in second]
    assert [p.parameters for p in second] == [len(vector) for vector in parameters]
    assert not set(first) & set(Expressions(3, (1,)).draw(40)[0])


@pytest.mark.parametrize("workload", RECORDED)
def test_recorded_populations_are_whole(workload):
    programs, parameters = recorded(workload)
    assert len(programs) == 1_000
    assert [p.parameters for p in programs] == [len(vector) for vector in parameters]
    assert max(p.variables for p in programs) <= batches.VARIABLES


def test_a_batch_of_a_population_is_a_sample_without_repetition():
    drawn = Expressions(1)
    population = {id(program) for program in recorded(RECORDED[2])[0]}
    first, second = ({id(p) for p in drawn.draw(300, RECORDED[2])[0]} for _ in range(2))
    assert len(first) == 300
    assert first <= population
    assert first != second


@pytest.mark.parametrize(
    ("texts", "operators", "different"),
    [
        (["x1 + x2*exp(x3)"], 3, 3),
        (["sin(x1) * sin(x1)", "sin(x1) + 1"], 5, 3),  # equal values
        (["x1 * exp(p1 + 2)"], 1, 1),  # the same for all rows
        (["x1 + p1", "x1 + p1"], 2, 2),  # parameters of two expressions
    ],
)
def test_operations_that_depend_on_the_row_are_counted(texts, operators, different):
    assert operations([parse(text) for text in texts])[1:] == (operators, different)


# ------------------------------------------------------------------------------------ scenarios


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_no_scenario_is_measured_twice(profile):
    for engine, tiers in (("cpu", ["interpreter"]), ("cuda", ["interpreter", "compiled"])):
        wanted = list(profile.scenarios(engine, tiers, ["a", "b"]))
        assert len({scenario.key for scenario in wanted}) == len(wanted)
        assert {scenario.tier for scenario in wanted} == set(tiers)
        assert {scenario.workload for scenario in wanted} == {"thesis", *RECORDED}


# ------------------------------------------------------------------------------------- roofline


def test_the_bound_counts_instructions_special_functions_and_bytes():
    scenario = Scenario(engine="cpu", rows=1000, expressions=1)
    peaks = Peaks("made up", 1e12, 0.0, 1e11, "")
    found = peaks.bound(scenario, [parse("x1 + x2*exp(x3)")])
    assert found["operations"] == (3 + 9) * 1000
    assert found["bytes"] == 11 * 1000 * 4
    assert found["by"] == "memory"
    assert found["seconds"] == pytest.approx(44_000 / 1e11)


def test_a_unit_for_special_functions_has_its_own_roof():
    peaks = Peaks("made up", 1e12, 1e9, 1e15, "")
    programs = [parse("x1 ^ x2")]
    found = peaks.bound(Scenario(engine="cuda", rows=100, expressions=1), programs)
    assert (found["by"], found["seconds"]) == ("special functions", pytest.approx(200 / 1e9))
    precise = Scenario(engine="cuda", rows=100, expressions=1, precision="precise")
    assert peaks.bound(precise, programs)["by"] == "issue"
