"""Simulations of clusters by `model`: workers, GPUs and failures that were not measured.

``run.py capacity/simulate`` reads the measured costs of a call, checks the model against the
runs of `gpu_service.json`, simulates clusters, and writes results/capacity.json, from which
`figures.py` makes the tables of deploy/capacity.md. It takes about five minutes on one core.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from capacity.model import (
    BANDWIDTH,
    LATENCY,
    Costs,
    Scenario,
    Seen,
    bounds,
    calibrated,
    measured,
    result,
    simulate,
)
from harness import SEED, save

#: Workers and GPUs of the simulated clusters.
SIZES = (
    *((10, 1), (100, 1), (1_000, 1), (100, 10), (1_000, 10), (10_000, 10)),
    *((1_000, 100), (10_000, 100), (10_000, 1_000)),
)
#: Seconds between two calls of a worker that breeds 300 trees with DEAP: tournaments, crossover and
#: mutation, measured once on one core, and their conversion.
BREEDING = (
    3.7e-3 + 300e-6 * result("conversion")["median_microseconds_an_expression"]["deap"]["this"]
)
#: Latency that a search should see, in seconds, at the 99th percentile.
GOAL = 0.02
#: Bytes a second from pinned memory of the host to the device, measured beside an H200.
PCIE = 55e9
TERABYTE = 1e12


def describe(seen: Seen) -> dict[str, Any]:
    """Summarise a run; milliseconds."""
    return {
        "calls_per_second": seen.rate,
        "ttok_per_second": seen.rate * TOKEN_ROWS / 1e12,
        **{f"p{q:g}_ms": seen.quantile(q / 100) * 1e3 for q in (50, 90, 99)},
        "busiest": max(seen.use, key=lambda name: seen.use[name]),
        "use": {name: round(share, 3) for name, share in seen.use.items()},
    }


#: Token-rows of a call: those of `gpu_service`'s sustained runs.
TOKEN_ROWS = statistics.mean(
    case["token_rows_per_second"] / case["calls_per_second"]
    for case in result("gpu_service")["sustained"]
)


def validation(costs: Costs) -> Iterator[dict[str, Any]]:
    """Compare the model with what was measured: workers beside the server on its 16 cores."""
    service = result("gpu_service")
    alone = {**service["one client"]["fresh 300 x 100000"], "workers": 1, "calls_per_second": None}
    for case in (alone, *service["sustained"]):
        seen = simulate(costs, Scenario(case["workers"], same_machine=True), 40_000)
        found = describe(seen)
        yield {
            "workers": case["workers"],
            **{
                name: {"measured": case[name], "model": found[name]}
                for name in ("calls_per_second", "p50_ms", "p90_ms", "p99_ms")
                if case[name] is not None
            },
        }


def clusters(costs: Costs, think: float) -> Iterator[dict[str, Any]]:
    """Simulate every size of cluster; every server holds the data set."""
    for workers, gpus in SIZES:
        seen = simulate(costs, Scenario(workers, gpus, think=think))
        yield {"workers": workers, "gpus": gpus, **describe(seen)}


def replicas(costs: Costs, thinks: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Find how many servers have to hold a data set that so many workers share."""
    for kind, think in thinks.items():
        for workers in (10, 100, 1_000, 10_000):
            few, many = 0, 1
            while _p99(costs, workers, many, think) > GOAL:
                few, many = many, many * 2
            while many - few > max(1, few // 20):
                middle = (few + many) // 2
                slow = _p99(costs, workers, middle, think) > GOAL
                few, many = (middle, many) if slow else (few, middle)
            yield {"worker": kind, "workers": workers, "replicas": many}


def _p99(costs: Costs, workers: int, servers: int, think: float) -> float:
    calls = max(6_000, workers)
    return simulate(costs, Scenario(workers, servers, think=think), calls).quantile(0.99)


def losses(costs: Costs, think: float) -> Iterator[dict[str, Any]]:
    """Kill servers in the middle of a run, for good."""
    for workers, gpus, killed in ((200, 2, 1), (1_000, 10, 1), (1_000, 10, 5)):
        for failover in (0.3, 1.0):
            scenario = Scenario(workers, gpus, think=think, killed=killed, failover=failover)
            calls = 3 * failover * workers / (think + costs.alone)  # until well after the failure
            seen = simulate(costs, scenario, int(calls))
            yield {
                **{"workers": workers, "gpus": gpus, "killed": killed, "failover": failover},
                **describe(seen),
                "repeated": seen.repeated,
                "longest_ms": max(seen.latencies) * 1e3,
            }


# ------------------------------------------------------------------------------------ a terabyte


def terabyte(costs: Costs) -> Iterator[dict[str, Any]]:
    """Estimate a data set of 1 TB, float32, ten variables and a target, on so many GPUs.

    Each GPU has its share of the rows and returns partial sums; one process sends the batch to all
    and adds the sums up. The slowest share is what the answer waits for.
    """
    rows = TERABYTE / (11 * 4)
    memory = 0.9 * result("gpu_service")["device"]["memory"]
    upload = result("transport_16_cores")["upload"]["gb_s"] * 1e9
    draw = random.Random(SEED)
    for gpus in (1, 8, 64, 1_000):
        share = rows / gpus
        fits = TERABYTE / gpus <= memory
        kernels = costs.device * share / 1e5
        passing = 0.0 if fits else TERABYTE / gpus / PCIE
        waits = [max(draw.lognormvariate(0, costs.spread) for _ in range(gpus)) for _ in range(200)]
        host = (costs.front_end + costs.step + costs.request) * statistics.mean(waits)
        yield {
            "gpus": gpus,
            "resident": fits,
            "kernels_seconds": max(kernels, passing),
            "gathering_seconds": gpus * costs.client + host + 2 * LATENCY,
            "bytes_for_each_gpu": TERABYTE / gpus,
            "upload_by_one_client_seconds": TERABYTE / upload,
            "reload_of_one_gpu_seconds": TERABYTE / gpus / BANDWIDTH,
        }


# ------------------------------------------------------------------------------------------ main


def contents() -> dict[str, Callable[[], Any]]:
    """Return the parts of the result, each a function."""
    found = result("gpu_service")["sustained"][-1]
    costs = calibrated(measured(), found["calls_per_second"], found["workers"])
    thinks = {"compiled": 0.0, "deap": BREEDING}
    return {
        "costs": lambda: {**asdict(costs), "alone": costs.alone},
        "bounds": lambda: bounds(costs),
        "network": lambda: {"latency": LATENCY, "bandwidth": BANDWIDTH},
        "breeding_seconds": lambda: BREEDING,
        "goal_seconds": lambda: GOAL,
        "validation": lambda: list(validation(costs)),
        "clusters": lambda: {kind: list(clusters(costs, s)) for kind, s in thinks.items()},
        "replicas": lambda: list(replicas(costs, thinks)),
        "losses": lambda: list(losses(costs, BREEDING)),
        "terabyte": lambda: list(terabyte(costs)),
    }


def main() -> None:
    """Simulate, and write the result."""
    content: dict[str, Any] = {"seed": SEED}
    for name, part in contents().items():
        started = time.perf_counter()
        content[name] = part()
        print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    save("capacity", content)


if __name__ == "__main__":
    main()
