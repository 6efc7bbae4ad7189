"""Simulations of clusters by `cluster_model`: workers, GPUs and failures that were not measured.

``python tests/bench/capacity.py`` reads the measured costs of a call, checks the model against the
runs of `gpu_service.json`, simulates clusters, and writes results/capacity.json, from which
`figures.py` makes the tables of deploy/capacity.md. It takes about two minutes on one core.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import simpy
from cluster_model import (
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
#: Hours between failures of a server: 419 unexpected interruptions of 16,384 GPUs in 54 days
#: ("The Llama 3 Herd of Models", 2024, section 3.3.4), and machines that are taken back once a day.
LIFE = {"a computing centre": 16_384 * 54 * 24 / 419, "machines taken back daily": 24.0}
#: Seconds until there is another machine for a server that was lost.
BACK = 600.0
#: Latency that a search should see, in seconds, at the 99th percentile.
GOAL = 0.02
#: Bytes a second from pinned memory of the host to the device, measured beside an H200.
PCIE = 55e9
TERABYTE = 1e12


def worker_seconds(trees: int = 300) -> dict[str, float]:
    """Measure what a worker with DEAP does between two calls; processor seconds a generation."""
    from deap import algorithms, base, creator, gp, tools

    from warpfit.frontends import as_program

    random.seed(SEED)
    creator.create("Error", base.Fitness, weights=(-1.0,))
    creator.create("Tree", gp.PrimitiveTree, fitness=creator.Error)
    primitives = gp.PrimitiveSet("f", 10, "x")
    for name, arity in (("add", 2), ("sub", 2), ("mul", 2), ("div", 2), ("exp", 1), ("sqrt", 1)):
        primitives.addPrimitive(None, arity, name=name)
    toolbox = base.Toolbox()
    toolbox.register("mate", gp.cxOnePoint)
    toolbox.register("branch", gp.genFull, min_=0, max_=2)
    toolbox.register("mutate", gp.mutUniform, expr=toolbox.branch, pset=primitives)
    names = [f"x{number}" for number in range(10)]
    times: dict[str, list[float]] = {"variation": [], "conversion": []}
    for _ in range(7):
        grown = [creator.Tree(gp.genHalfAndHalf(primitives, 4, 5)) for _ in range(trees)]
        for tree in grown:
            tree.fitness.values = (random.random(),)
        started = time.process_time()
        chosen = tools.selTournament(grown, trees, 5)
        children = algorithms.varAnd(chosen, toolbox, cxpb=0.7, mutpb=0.25)
        varied = time.process_time()
        for tree in children:
            as_program(tree, names)
        times["variation"].append(varied - started)
        times["conversion"].append(time.process_time() - varied)
    tokens = statistics.mean(map(len, children))
    return {"tokens": tokens, **{name: min(series) for name, series in times.items()}}


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


def choices(costs: Costs) -> dict[str, Any]:
    """Compare clients that know which of two servers is less loaded with others that draw one."""
    return {
        choice: describe(simulate(costs, Scenario(1_000, 100, choice=choice)))
        for choice in ("two", "one")
    }


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


# ---------------------------------------------------------------------------------- a whole year


def year(
    servers: int, replicas: int, life: float, back: float, datasets: int = 100
) -> dict[str, Any]:
    """Simulate the failures of a year; what they mean for data sets on ``replicas`` servers each.

    One fails after ``life`` hours on average; ``back`` seconds later it, or another one in its
    place, serves again, without data.
    """
    env, draw = simpy.Environment(), random.Random(SEED)
    holders = [draw.sample(range(servers), min(replicas, servers)) for _ in range(datasets)]
    held: list[list[int]] = [[] for _ in range(servers)]
    for number, places in enumerate(holders):
        for place in places:
            held[place].append(number)
    down, seen = [False] * servers, {"failures": 0, "uploads": 0}

    def live(place: int) -> Iterator[simpy.events.Event]:
        while True:
            yield env.timeout(draw.expovariate(1 / (life * 3600)))
            down[place] = True
            seen["failures"] += 1
            # Clients upload again at once only what no server has any more.
            seen["uploads"] += sum(all(down[p] for p in holders[n]) for n in held[place])
            yield env.timeout(back)
            down[place] = False

    for place in range(servers):
        env.process(live(place))
    env.run(until=365 * 86_400)
    return {"servers": servers, "replicas": replicas, "datasets": datasets, **seen}


def years() -> Iterator[dict[str, Any]]:
    """Simulate years of clusters, with one to three copies of each data set."""
    for kind, life in LIFE.items():
        for servers in (10, 1_000):
            for held in (1, 2, 3):
                yield {"kind": kind, **year(servers, held, life, BACK)}


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
    own = worker_seconds()
    think = own["variation"] + own["conversion"]
    thinks = {"compiled": 0.0, "deap": think}
    return {
        "costs": lambda: {**asdict(costs), "alone": costs.alone},
        "bounds": lambda: bounds(costs),
        "network": lambda: {"latency": LATENCY, "bandwidth": BANDWIDTH},
        "worker": lambda: own,
        "goal_seconds": lambda: GOAL,
        "validation": lambda: list(validation(costs)),
        "clusters": lambda: {kind: list(clusters(costs, s)) for kind, s in thinks.items()},
        "choices": lambda: choices(costs),
        "replicas": lambda: list(replicas(costs, thinks)),
        "losses": lambda: list(losses(costs, think)),
        "years": lambda: list(years()),
        "back_seconds": lambda: BACK,
        "life_hours": lambda: LIFE,
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
