"""Calls of another tenant beside a search: their latency alone, and while a search runs.

``run.py search/beside [--devices cpu] [--seconds 8]`` writes search_beside_DEVICE.json. One client
asks for the losses of 300 programs of the random mix on 1,000 rows, one call after the other. In
turns it is alone, and beside a search of another client, which is a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import numpy as np
from harness import SEED, arguments, connected, percentiles, save

import warpfit
from support.random_programs import thesis_mix

ROWS = 1_000
ROUNDS = 3
SEARCH = """
import sys
import numpy as np
import warpfit
rng = np.random.default_rng(1)
X = rng.uniform(0.3, 3, (1000, 10))
with warpfit.connect(sys.argv[1]) as client:
    with client.upload(X, X[:, 0] * np.exp(-X[:, 1]) + np.sin(X[:, 2] * X[:, 3])) as data:
        started = False
        def progress(found):
            global started
            if not started:
                print("searches", flush=True)
            started = True
        found = client.search(data, seconds=float(sys.argv[2]), pairs=True, progress=progress)
        print(found.tried / found.seconds)
"""


def latencies(client: warpfit.Client, data: Any, batches: list[Any], seconds: float) -> list[float]:
    """Return the seconds of each call in a span of time."""
    times, end = [], time.perf_counter() + seconds
    while (started := time.perf_counter()) < end:
        client.run(data, *batches[len(times) % len(batches)], loss="mse", precision="fast")
        times.append(time.perf_counter() - started)
    return times


def main() -> None:
    given = arguments(__doc__, "", devices="cpu", seconds=8.0)
    rng = np.random.default_rng(SEED)
    X = rng.uniform(0.5, 2, (ROWS, 10))
    batches = [thesis_mix(SEED + turn) for turn in range(20)]
    alone: list[float] = []
    beside: list[float] = []
    rates: list[float] = []
    with connected(devices=given.devices) as (server, client):
        data = client.upload(X, X[:, 0] * X[:, 1], dtype="float32")
        latencies(client, data, batches, 2.0)
        for turn in range(ROUNDS):
            alone += latencies(client, data, batches, given.seconds)
            span = str(given.seconds + 2.0)
            command = [sys.executable, "-c", SEARCH, server.address, span]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as search:
                assert search.stdout is not None
                assert search.stdout.readline() == "searches\n"
                times = latencies(client, data, batches, given.seconds)
                rates.append(float(search.stdout.readline()))
            if turn > 0:  # the first one compiles
                beside += times
    device = "cpu" if given.devices.startswith("cpu") else "gpu"
    content = {
        "rows": ROWS, "programs": 300, "seconds": given.seconds,
        "alone": percentiles(alone) | {"calls": len(alone)},
        "beside": percentiles(beside) | {"calls": len(beside)},
        "formulas_per_second_of_the_search": rates[1:],
    }  # fmt: skip
    save(given.name or f"search_beside_{device}", content, given.folder)


if __name__ == "__main__":
    main()
