"""Gradients and fits of the CUDA engine: on the device, and through the wire.

``python tests/bench/gpu_fit.py [DIRECTORY]`` writes gpu_fit.json, into results/ unless a directory
is given. The work is the random mix: 300 expressions of 10 to 50 tokens over 10 variables with
their parameters, float32.

* ``device``: milliseconds of the device (CUDA events), and of the engine with its host's work, for
  the loss alone (interpreter), loss and gradient, and one Levenberg-Marquardt pass (loss, gradient
  and curvature of the whole batch), medians.
* ``wire``: one client over loopback, 100,000 rows: ``Evaluate`` with and without gradients, and
  ``Optimize`` with 50 iterations, with the tolerances of a user who names none and with none at
  all, so that only what cannot improve ends before the last iteration.
* ``run``: 100 generations, each 300 fresh expressions fitted with up to 50 iterations.

Of the mix as it is drawn, two thirds have no finite loss at their start (a logarithm or a root of a
negative number in one row is enough), and their searches end at once. ``viable`` expressions have
parameters and a finite loss at the start, so that all 300 searches are at work.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import SEED, ServerProcess, median_seconds, outputs_of, save

import warpfit
from warpfit.dataset import Dataset
from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch
from warpfit.losses import SQUARES
from warpfit.request import Evaluation, Loss, Precision, Tier
from warpfit_server.engine.cuda.engine import CudaEngine
from warpfit_server.engine.interface import Selection, run_to_end

ITERATIONS = 50
GENERATIONS = 100
REPETITIONS = 15
POOL_MIXES = 12
Work = tuple[list[warpfit.Program], list[np.ndarray]]
EXACT = {"gradient_tolerance": 0.0, "step_tolerance": 0.0, "loss_tolerance": 0.0}


def table(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the bench, and a target that the mix can fit in part."""
    rng = np.random.default_rng(SEED)
    X = rng.uniform(0.5, 2.0, size=(rows, 10)).astype(np.float32)
    y = 1.5 * X[:, 0] * np.exp(-0.5 * X[:, 1]) + np.log(X[:, 2]) + 0.1 * rng.normal(size=rows)
    return X, y.astype(np.float32)


class Bench:
    """Times passes of the engine on one data set."""

    def __init__(self, engine: CudaEngine, rows: int) -> None:
        self.engine = engine
        self.data = Dataset.of(*table(rows), dtype="float32")
        engine.load(self.data)
        self.batch = Batch.of(*thesis_mix(SEED))
        self.selection = Selection(self.batch, np.arange(len(self.batch)))
        self.flag = np.zeros(1, np.uint8)

    def evaluate(
        self, precision: Precision, *, gradient: bool, tier: Tier = Tier.INTERPRETER
    ) -> int:
        evaluation = Evaluation(
            self.data.content_id, self.batch, loss=Loss.MSE, values=False, precision=precision,
            gradient=gradient, tier=tier,
        )  # fmt: skip
        return run_to_end(self.engine.evaluate(evaluation, outputs_of(evaluation))).compute

    def linearise(self, precision: Precision) -> int:
        evaluation = Evaluation(self.data.content_id, self.batch, precision=precision)
        options = {"curvature": True, "cancelled": self.flag, "selection": self.selection}
        run_to_end(self.engine.linearise(evaluation, SQUARES, **options))
        return 0

    def figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        for precision in Precision:
            loss = timed(lambda p=precision: self.evaluate(p, gradient=False))
            gradient = timed(lambda p=precision: self.evaluate(p, gradient=True))
            compiled = timed(
                lambda p=precision: self.evaluate(p, gradient=True, tier=Tier.COMPILED)
            )
            marquardt = timed(lambda p=precision: self.linearise(p))
            figures[precision.value] = {
                "loss": loss,
                "loss_and_gradient": gradient,
                "loss_and_gradient_compiled": compiled,
                "levenberg_marquardt_pass": {"engine_ms": marquardt["engine_ms"]},
                "gradient_to_loss_on_device": round(gradient["device_ms"] / loss["device_ms"], 2),
                "pass_to_loss_of_engine": round(marquardt["engine_ms"] / loss["engine_ms"], 2),
                "pass_of_engine_to_loss_on_device": round(
                    marquardt["engine_ms"] / loss["device_ms"], 2
                ),
            }
        return figures


def timed(call: Callable[[], int]) -> dict[str, float]:
    """Median milliseconds of the device and of the whole call."""
    device, walls = [], []
    for turn in range(REPETITIONS + 3):
        started = time.perf_counter()
        compute = call()
        if turn >= 3:
            walls.append(time.perf_counter() - started)
            device.append(compute)
    return {
        "device_ms": round(statistics.median(device) / 1e6, 4),
        "engine_ms": round(statistics.median(walls) * 1e3, 4),
    }


def wire(client: warpfit.Client, data: Any, viable: Pool) -> dict[str, Any]:
    mix = thesis_mix(SEED)
    return {
        precision.value: {
            **evaluations(client, data, mix, precision),
            "optimize_viable": fits(client, data, viable.draw(0), precision),
        }
        for precision in Precision
    }


def evaluations(
    client: warpfit.Client, data: Any, work: Work, precision: Precision
) -> dict[str, float]:
    programs, parameters = work
    common = {"parameters": parameters, "loss": "mse", "precision": precision}
    asked = {"loss_ms": {"tier": "interpreter"}, "loss_and_gradient_ms": {"gradient": True}}
    found = {}
    for name, options in asked.items():
        call = partial(client.run, data, programs, **common, **options)
        found[name] = round(1e3 * median_seconds(call, REPETITIONS, warm_up=2), 3)
    return {**found, "ratio": round(found["loss_and_gradient_ms"] / found["loss_ms"], 2)}


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
    engine = CudaEngine()
    (device,) = engine.devices()
    content: dict[str, Any] = {
        "seed": SEED,
        "iterations": ITERATIONS,
        "device": {"name": device.name, "driver": device.driver, "memory": device.memory},
        "engine": {
            str(rows): Bench(engine, rows).figures() for rows in (1_000, 10_000, 100_000, 1_000_000)
        },
    }
    engine.close()
    with ServerProcess(devices="0") as server, warpfit.connect(server.address) as client:
        data = client.upload(*table(100_000))
        viable = Pool(client, data)
        content["viable_expressions"] = len(viable.members)
        content["wire"] = wire(client, data, viable)
        content["run_viable"] = run(client, data, viable)
    save("gpu_fit", content, Path(sys.argv[1]) if sys.argv[1:] else None)


if __name__ == "__main__":
    main()
