"""Fits of the CUDA engine through the wire: one client over loopback, 100,000 rows.

``run.py gpu/fits [DIRECTORY]`` writes gpu_fit.json, into results/ unless a directory is given. The
work is the random mix: 300 expressions of 10 to 50 tokens over 10 variables with their parameters,
float32.

* ``wire``: ``Optimize`` with 50 iterations, with the tolerances of a user who names none and with
  none at all, so that only what cannot improve ends before the last iteration.
* ``run_viable``: 100 generations, each 300 fresh expressions fitted with up to 50 iterations.

Of the mix as it is drawn, two thirds have no finite loss at their start (a logarithm or a root of a
negative number in one row is enough), and their searches end at once. ``viable`` expressions have
parameters and a finite loss at the start, so that all 300 searches are at work.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import SEED, ServerProcess, median_seconds, save

import warpfit
from support.load import worker_processes
from support.random_programs import thesis_mix
from warpfit.request import Precision

ITERATIONS = 50
GENERATIONS = 100
POOL_MIXES = 12
Work = tuple[list[warpfit.Program], list[np.ndarray]]
EXACT = {"gradient_tolerance": 0.0, "step_tolerance": 0.0, "loss_tolerance": 0.0}


def table(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows, and a target that the mix can fit in part."""
    X, y = worker_processes.table(rows)
    return X, (y + 0.1 * np.random.default_rng(SEED).normal(size=rows)).astype(np.float32)


def wire(client: warpfit.Client, data: Any, viable: Pool) -> dict[str, Any]:
    work = viable.draw(0)
    return {
        precision.value: {"optimize_viable": fits(client, data, work, precision)}
        for precision in Precision
    }


def fits(client: warpfit.Client, data: Any, work: Work, precision: Precision) -> dict[str, Any]:
    programs, parameters = work
    figures = {}
    for name, tolerances in (("default_tolerances", {}), ("no_tolerances", EXACT)):
        options = {"max_iterations": ITERATIONS, "precision": precision, **tolerances}
        optimize = partial(client.optimize, data, programs, parameters, **options)
        seconds, fit = median_seconds(optimize, 5, warm_up=2), optimize()
        figures[name] = {
            "ms": round(1e3 * seconds, 3),
            "mean_iterations": round(float(fit.iterations.mean()), 1),
            "reasons": reasons(fit),
        }
    return figures


def reasons(fit: Any) -> dict[str, int]:
    names, counts = np.unique([str(reason) for reason in fit.reason.ravel()], return_counts=True)
    return {str(name): int(count) for name, count in zip(names, counts, strict=True)}


class Pool:
    """Expressions of the mix with parameters and a finite loss at their start."""

    def __init__(self, client: warpfit.Client, data: Any) -> None:
        self.members = []
        for turn in range(POOL_MIXES):
            programs, parameters = thesis_mix(SEED + 1000 + turn)
            losses = client.evaluate(data, programs, parameters=parameters, loss="mse")
            for program, vector, loss in zip(programs, parameters, losses, strict=True):
                if len(vector) and np.isfinite(loss):
                    self.members.append((program, vector))

    def draw(self, generation: int) -> Work:
        """Draw 300 of them, with parameters of their own."""
        rng = np.random.default_rng(SEED + generation)
        chosen = [self.members[i] for i in rng.choice(len(self.members), 300, replace=False)]
        starts = [vector * rng.uniform(0.9, 1.1, size=vector.shape) for _, vector in chosen]
        return [program for program, _ in chosen], starts


def run(client: warpfit.Client, data: Any, viable: Pool) -> dict[str, Any]:
    """Make a whole run: the expressions are drawn beforehand, everything else counts."""
    work = [viable.draw(turn) for turn in range(GENERATIONS)]
    improved, walls = 0, []
    started = time.perf_counter()
    for programs, parameters in work:
        before = time.perf_counter()
        fit = client.optimize(data, programs, parameters, max_iterations=ITERATIONS)
        walls.append(time.perf_counter() - before)
        with np.errstate(invalid="ignore"):
            improved += int((fit.loss < fit.initial_loss).sum())
    return {
        "generations": GENERATIONS,
        "seconds": round(time.perf_counter() - started, 3),
        "generation_p50_ms": round(float(np.percentile(walls, 50)) * 1e3, 2),
        "generation_p99_ms": round(float(np.percentile(walls, 99)) * 1e3, 2),
        "fits_improved": improved,
    }


def main() -> None:
    with ServerProcess(devices="0") as server, warpfit.connect(server.address) as client:
        (device,) = client.info().devices
        data = client.upload(*table(100_000))
        viable = Pool(client, data)
        content = {
            "seed": SEED,
            "iterations": ITERATIONS,
            "device": {"name": device.name, "driver": device.driver, "memory": device.memory},
            "viable_expressions": len(viable.members),
            "wire": wire(client, data, viable),
            "run_viable": run(client, data, viable),
        }
    save("gpu_fit", content, Path(sys.argv[1]) if sys.argv[1:] else None)


if __name__ == "__main__":
    main()
