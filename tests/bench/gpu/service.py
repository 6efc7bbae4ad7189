"""The CUDA engine through the wire: latency of one client, throughput of many.

Calls ask for losses of thesis-mix expressions of 10 to 50 tokens over 10 variables, float32, fast
mode. Fresh batches are drawn from a pool of programs, so that no batch comes again within a run.
Where EvoGP is installed it evaluates such trees in the program's own process, from trees and data
that are on the device. NumPy on one core, pyoperon and warpfit's CPU engine on all of them evaluate
a generation of the same mix, too. ``--devices cpu``, ``--seconds`` of each run of many workers, and
``--scale`` of the numbers of calls try it without a GPU.
"""

import os
import statistics
import time
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from harness import SEED, arguments, connected, percentiles, save, seconds_of, start_up_seconds
from peers import Table, agreement, evogp_peer, numpy_peer, pyoperon_peer

import warpfit
from support.load.worker_processes import Pool, Workers, table, throughput
from support.random_programs import thesis_mix
from warpfit.expressions import reference
from warpfit.ir import Program

ROWS = 100_000
PROGRAMS = 300
WORKERS = (16, 64)
#: Expressions and rows that EvoGP evaluates.
EVOGP = ((300, ROWS), (5_000, 1_000), (5_000, 10_000), (50_000, 1_000), (300, 1_000_000))


def timed(
    client: warpfit.Client, data: Any, batches: Iterable[Any], skipped: int, **options: Any
) -> dict[str, Any]:
    """Time a call for each batch, the first ones left out; and the server's stages, in us."""
    walls, timings = [], []
    for batch in batches:
        started = time.perf_counter()
        answer = client.run(data, *batch, loss="mse", precision="fast", **options)
        walls.append(time.perf_counter() - started)
        timings.append(answer.timings)
    found = percentiles(walls[skipped:])
    for stage in ("decode", "queue", "copy_in", "compute", "copy_out"):
        median = statistics.median(getattr(each, stage) for each in timings[skipped:])
        found[f"{stage}_us"] = round(median / 1e3, 1)
    return found


def fresh(
    client: warpfit.Client, data: Any, pool: Pool, calls: int, count: int = PROGRAMS, **options: Any
) -> dict[str, Any]:
    """Every call has a batch that the server has not seen."""
    # Large batches are flat arrays from the beginning, as a vectorised search has them.
    draw = pool.draw_lists if count <= PROGRAMS else lambda count: (pool.draw(count),)
    batches = (draw(count) for _ in range(calls))
    return {"calls": calls, **timed(client, data, batches, max(1, calls // 15), **options)}


def repeated(client: warpfit.Client, data: Any, tier: str, calls: int) -> dict[str, Any]:
    """Every call has the same expressions and new parameters; the first one compiles."""
    programs, parameters = thesis_mix(SEED)
    rng = np.random.default_rng(SEED)
    batches = (
        (programs, [vector * rng.uniform(0.9, 1.1, size=vector.shape) for vector in parameters])
        for _ in range(calls + 1)
    )
    return timed(client, data, batches, max(1, calls // 15) + 1, tier=tier)


def sustained(workers: Workers, address: str, count: int, seconds: float) -> dict[str, Any]:
    """Token-rows a second of many worker processes, each call with another batch."""
    results = workers.run(count, (address, PROGRAMS, ROWS, seconds, None))
    walls = [wall for each in results for wall in each["walls"]]
    return {"workers": count, **throughput(results, ROWS), **percentiles(walls)}


def one_client(client: warpfit.Client, scale: float) -> dict[str, Any]:
    """Latencies of one client, each with batches that never come again but where it says so."""
    pool, content = Pool(SEED), dict[str, Any]()

    def calls(number: int) -> int:
        return max(3, int(number * scale))

    for rows in (1_000, 10_000, 100_000, 1_000_000):
        data = client.upload(*table(rows))
        content[f"fresh 300 x {rows}"] = fresh(client, data, pool, calls(300))
        if rows <= 10_000:
            content[f"fresh 5000 x {rows}"] = fresh(client, data, pool, calls(40), 5_000)
        if rows == 1_000:
            content["fresh 50000 x 1000"] = fresh(client, data, pool, calls(10), 50_000)
        if rows == ROWS:
            slopes = fresh(client, data, pool, calls(100), gradient=True)
            content["fresh 300 x 100000, gradient"] = slopes
            for tier in ("compiled", "interpreter", "auto"):
                turns = calls(2000 if tier == "auto" else 300)
                content[f"repeated {tier}"] = repeated(client, data, tier, turns)
        client.release(data, everywhere=True)
    return content


def evogp(calls: int) -> dict[str, Any]:
    """Losses of EvoGP, from its trees on the device to numbers on the host."""
    pool, content = Pool(SEED), {}
    for count, rows in EVOGP:
        given = Table(*table(rows))
        programs = list(map(Program.bind, *pool.draw_lists(count)))
        tokens, few = sum(map(len, programs)), programs[:PROGRAMS]
        expected = reference.evaluate_programs(few, given.X[:1_000].T)
        values = evogp_peer(given, 1, few).values(1_000)
        walls = seconds_of(evogp_peer(given, 1, programs).run, calls, warm_up=2)
        content[f"{count} x {rows}"] = {
            "values_within_1_percent": agreement(values, expected),
            "token_rows_per_second": tokens * rows / statistics.median(walls),
            **percentiles(walls),
        }
    return content


def cpu_peers(rounds: int) -> dict[str, Any]:
    """Seconds of one generation on this machine's processors: NumPy, pyoperon, warpfit's engine."""
    given = Table(*table(ROWS))
    programs, parameters = Pool(SEED).draw_lists(PROGRAMS)
    bound = list(map(Program.bind, programs, parameters))
    expected = reference.evaluate_programs(bound, given.X[:1_000].T)
    content: dict[str, Any] = {"cores": os.cpu_count()}
    for name, peer in (("NumPy, one core", numpy_peer), ("pyoperon, all cores", pyoperon_peer)):
        job = peer(given, os.cpu_count() or 1, bound)
        walls = seconds_of(job.run, rounds, warm_up=1)
        share = agreement(job.values(1_000), expected)
        content[name] = {"values_within_1_percent": share, **percentiles(walls)}
    with connected() as (_, client):
        data = client.upload(*given)
        content["warpfit, all cores"] = fresh(client, data, Pool(SEED), 3 * rounds)
    return content


def main() -> None:
    options = arguments(__doc__, "gpu_service", devices="0", seconds=10.0, scale=1.0)
    with connected(devices=options.devices) as (server, client):
        (device,) = client.info().devices
        content: dict[str, Any] = {
            "seed": SEED,
            "device": {"name": device.name, "driver": device.driver, "memory": device.memory},
            "one client": one_client(client, options.scale),
        }
        counts = [count for count in WORKERS if count <= 4 * (os.cpu_count() or 1)]
        with Workers(max(counts, default=0)) as workers:
            run = partial(sustained, workers, server.address, seconds=options.seconds)
            content["sustained"] = [run(count) for count in counts]
    if find_spec("evogp"):
        content["EvoGP"] = evogp(max(3, int(60 * options.scale)))
    content["CPU"] = cpu_peers(max(2, int(10 * options.scale)))
    content["start_up_seconds"] = start_up_seconds(options.devices)
    save(options.name, content, options.folder)
