"""What server/README.md says of faults and overload is what the result files have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "server" / "README.md").read_text()
GUARDS = {
    "guard": "2 cores, CPU engine",
    "guard_16_cores": "16 cores, CPU engine",
    "guard_cuda": "16 cores, H200",
}


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"tests/bench/results/{name}.json").read_text())
    return found


@pytest.mark.parametrize(("name", "machine"), GUARDS.items())
def test_overload_and_greedy_tenants(name, machine):
    measured = result(name)
    over, greedy = measured["ten_times_overload"], measured["greedy_tenant"]
    ratios = [f"{case['p99_ratio']:.1f}" for case in greedy.values()]
    figures = (
        f"{over['peak_calls_per_second']:.0f}",
        f"{over['goodput_of_peak']:.2f}",
        f"{over['refused_as_one_client_saw_it']['p99_ms']:.1f} ms",
        ", ".join(ratios),
    )
    assert f"| {machine} | {' | '.join(figures)} |" in README
    assert max(case["p99_ratio"] for case in greedy.values()) <= 2
    for part in (over, over["ten_times_the_clients_that_obey"]):
        assert part["goodput_of_peak"] >= 0.9
    assert over["refused_as_one_client_saw_it"]["p99_ms"] < 10


def test_overload_with_cores_of_their_own():
    measured = result("guard")["ten_times_overload"]
    assert (measured["server_cores"], measured["generator_cores"]) == (1, 1)
    for part in (measured, measured["ten_times_the_clients_that_obey"]):
        assert f"{part['goodput_of_peak_for_the_same_cpu_time']:.2f}" in README


def test_faults():
    faults = result("faults")["faults"]
    assert all(fault["as_expected"] for fault in faults.values())
    seen = faults["killed_in_mid_upload"]
    grown = (seen["after"]["private_bytes"] - seen["before"]["private_bytes"]) / 1e6
    assert f"{seen['killed']:,} clients killed" in README
    assert f"{grown:.1f} MB" in README


def test_fuzzing():
    fuzz = result("fuzz")
    assert fuzz["crashes"] == fuzz["internal"] == len(fuzz["not_allowed"]) == 0
    grown = max(part["private_mib"] for part in fuzz["growth_after_a_fifth"].values())
    assert f"{fuzz['requests']:,} fuzzed requests" in README
    assert f"{grown:.1f} MiB" in README
