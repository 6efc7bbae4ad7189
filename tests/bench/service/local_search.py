"""Measure batches that come again: local searches of many workers, and one who forces compiling.

``run.py service/local_search`` starts a server on the first GPU and writes
results/local_search.json. Workers are processes with a client of their own on the server's cores.

* Local search: each worker sends a batch of 300 programs 50 times with new parameters, then the
  next one. The tiers ``auto`` and ``interpreter`` take turns, for losses and for losses with their
  gradients.
* Forced compiling: eight workers send batches that never come again, alone and beside one that
  asks for compiled kernels of ever new batches.

``--other DIRECTORY`` measures the server of another tree in turns with this one; it has to
understand this tree's clients. ``--devices cpu --seconds 1 --rows 1000`` tries the program without
a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from harness import SEED, ServerProcess, percentiles, save

from support.load.worker_processes import Repeats, Workers, throughput

PROGRAMS, TIMES = 300, 50
WORKERS, OTHERS = 16, 8
TIERS = ("auto", "interpreter")


def medians(turns: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the turns, and the least and the greatest rate."""
    found = {name: round(statistics.median(t[name] for t in turns), 3) for name in turns[0]}
    rates = [turn["calls_per_second"] for turn in turns]
    return {**found, "least": round(min(rates), 1), "greatest": round(max(rates), 1)}


def figures(results: list[dict[str, Any]], rows: int) -> dict[str, float]:
    """Return rates and latencies of some workers together."""
    rates = throughput(results, rows)
    walls = [wall for each in results for wall in each["walls"]]
    names = ("calls_per_second", "token_rows_per_second", "failed")
    return {**{name: rates[name] for name in names}, **percentiles(walls)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", help="where the result is written")
    parser.add_argument("--devices", default="0")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--other", type=Path, help="another tree whose server is measured, too")
    options = parser.parse_args()
    with ExitStack() as stack:
        addresses = {"this tree": stack.enter_context(ServerProcess(devices=options.devices))}
        if options.other is not None:
            path = os.pathsep.join(str(options.other / name) for name in ("client", "server"))
            other = ServerProcess(devices=options.devices, PYTHONPATH=path)
            addresses["other tree"] = stack.enter_context(other)
        workers = stack.enter_context(Workers(WORKERS))
        turns: dict[str, list[dict[str, float]]] = {}

        def run(name: str, orders: list[tuple[Any, ...]], rows: int, counted: slice) -> None:
            found = figures(workers.run_each(orders)[counted], rows)
            turns.setdefault(name, []).append(found)
            print(name, {key: round(value, 3) for key, value in found.items()}, flush=True)

        for _ in range(options.turns):
            for tree, server in addresses.items():
                for rows in options.rows:
                    given = server.address, PROGRAMS, rows, options.seconds
                    for gradient in (False, True):
                        for tier in TIERS:
                            kind = "losses and gradients" if gradient else "losses"
                            repeats = Repeats(TIMES, tier, gradient)
                            name = f"{tree}, {rows} rows, {kind}, {tier}"
                            run(name, [(*given, repeats)] * WORKERS, rows, slice(None))
                rows = options.rows[0]
                given = server.address, PROGRAMS, rows, options.seconds
                others, forced = [(*given, None)] * OTHERS, (*given, Repeats(1, "compiled"))
                run(f"{tree}, others alone", others, rows, slice(None))
                beside = slice(0, OTHERS)
                run(f"{tree}, beside forced compiling", [*others, forced], rows, beside)
    found = {name: medians(each) for name, each in turns.items()}
    ratios = {}
    for tree in addresses:
        for name, case in found.items():
            start, _, tier = name.rpartition(", ")
            if name.startswith(tree) and tier == "auto":
                rate = found[f"{start}, interpreter"]["calls_per_second"]
                ratios[f"{start}: auto / interpreter"] = case["calls_per_second"] / rate
        alone, beside = (
            found[f"{tree}, {case}"]["p99_ms"]
            for case in ("others alone", "beside forced compiling")
        )
        ratios[f"{tree}: p99 of others, beside forced compiling / alone"] = beside / alone
    ratios = {name: float(np.round(ratio, 3)) for name, ratio in ratios.items()}
    content = {
        **{"seed": SEED, "workers": WORKERS, "programs": PROGRAMS, "times": TIMES},
        **{"turns": options.turns, "seconds": options.seconds, "devices": options.devices},
        "cases": found,
        "ratios": ratios,
    }
    save("local_search", content, options.directory)


if __name__ == "__main__":
    main()
