"""The model behind deploy/capacity.md keeps the laws that every queueing system keeps."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from capacity.model import Scenario, bounds, measured, simulate

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
