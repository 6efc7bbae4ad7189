"""Rules, bounds and models of the benchmarks."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.engines.accuracy import Bound, excess
from support.repository.symbolic import is_solution

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from capacity.model import Scenario, bounds, measured, simulate

NAMES = ("sigma", "theta")


@pytest.mark.parametrize(
    ("found", "true", "expected"),
    [
        ("0.3333333*x1 + 2.00001*x2", "sigma/3 + 2*theta", True),
        ("x1*x2 + 3.7", "sigma*theta", True),
        ("2.5*x1*x2", "sigma*theta", True),
        ("sqrt(square(x1))*x2 - 1e-9/x1", "sigma*theta", True),
        ("sqrt(2/(1 - x2/x1) - 1)", "(1 + theta/sigma)/sqrt(1 - theta^2/sigma^2)", True),
        ("x1 + x2", "sigma*theta", False),
        ("3.0", "sigma*theta", False),
        ("x1*x2 + 0.001*x1", "sigma*theta", False),
    ],
)
def test_a_formula_is_found_if_difference_or_ratio_is_constant(found, true, expected):
    assert is_solution(found, true, NAMES) is expected


def test_what_takes_too_long_is_not_found():
    assert not is_solution("x1", "sigma", NAMES, seconds=0.0)


# ------------------------------------------------------------------------------------- error bounds


def test_excess_is_the_share_of_the_bound():
    one = np.ones(1, np.float32)
    ulp = float(np.spacing(one)[0])
    assert excess(Bound("2"), [one], one + np.float32(ulp), one)[0] == 0.5
    assert excess(Bound("2"), [one], one + np.float32(4 * ulp), one)[0] == 2.0
    assert excess(Bound("2", "0.0009765625"), [one], one + np.float32(2**-11), one)[0] == 0.5
    assert excess(Bound("0"), [one], one + np.float32(ulp), one)[0] == np.inf
    assert excess(Bound("2", where="a < 1"), [one], one + 1, one)[0] == 0.0


@pytest.mark.parametrize(
    ("got", "exact"),
    [(np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (3e38, -np.inf), (-np.inf, np.inf)],
)
def test_special_values_of_one_alone_exceed_any_bound(got, exact):
    column = [np.ones(1, np.float32)]
    pair = np.array([got], np.float32), np.array([exact])
    assert excess(Bound("1000"), column, *pair)[0] > 1


def test_an_overflow_on_one_side_only_is_no_error():
    largest = np.finfo(np.float32).max
    got = np.array([np.inf, largest], np.float32)
    exact = np.array([largest, np.inf], np.float64)
    assert (excess(Bound("2"), [np.ones(2, np.float32)], got, exact) <= 1).all()


# -------------------------------------------------------------- the model behind deploy/capacity.md


COSTS = replace(measured(), busy=2.0)


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(5, think=0.004),
        Scenario(60, 3),
        Scenario(30, 2, replicas=1),
        Scenario(24, same_machine=True),
        Scenario(20, 4, killed=2, failover=0.01),
    ],
)
def test_calls_under_way_are_their_rate_times_their_time(scenario):
    """Little's law; also that no call is lost when a server is."""
    seen = simulate(COSTS, scenario, 2_000)
    mean = sum(seen.latencies) / len(seen.latencies)
    assert seen.inside == pytest.approx(seen.rate * mean, rel=0.05)
    assert max(seen.use.values()) <= 1.01


def test_a_lone_caller_waits_for_nobody():
    assert simulate(COSTS, Scenario(1, same_machine=True), 500).quantile(0.5) == pytest.approx(
        COSTS.alone, rel=0.06
    )


@pytest.mark.parametrize("resource", ["device", "cores", "network"])
def test_many_workers_reach_what_the_scarcest_resource_allows_and_no_more(resource):
    scarce = {
        "device": replace(COSTS, device=10 * COSTS.device),
        "cores": replace(COSTS, front_end=6 * COSTS.front_end, busy=1.0),
        "network": replace(COSTS, request_bytes=40 * COSTS.request_bytes),
    }[resource]
    scarce = replace(scarce, spread=0.1)  # one slow call in a hundred leaves cores idle
    least = bounds(scarce)
    assert max(least, key=least.__getitem__) == resource
    rate = simulate(scarce, Scenario(200), 3_000).rate * least[resource]
    assert 0.9 < rate < 1.03


def test_twice_the_servers_carry_twice_the_workers():
    """Not quite: of two servers a client knows the less loaded one, of four the better of two."""
    one, two = (simulate(COSTS, Scenario(20 * n, n), 4_000).rate for n in (2, 4))
    assert two == pytest.approx(2 * one, rel=0.1)
