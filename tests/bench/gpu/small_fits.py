"""Fits of many small programs to few rows: through the wire, and by the engine with and without.

``run.py gpu/small_fits`` writes gpu_small_fits.json. 20,000 random expressions of 10 to 40 tokens
over 10 variables, with one to eight parameters and a finite loss at their start, are fitted to 500
rows by Levenberg-Marquardt with at most 15 iterations, and with the tolerances of a user who names
none.

* ``wire``: ``Optimize`` by one client over loopback, for each type and precision.
* ``engine``: the driver of fits in this process, in turns with searches that run on the device from
  pass to pass and with the host's passes alone; the results of both.

``proposals`` are skeletons a second as in service/proposals: 300 of them, 1,000 rows, 8 restarts.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from harness import MODES, SEED, arguments, connected, medians_in_turn, save, seconds_of
from service import proposals

import warpfit
from support.random_programs import random_program
from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.request import Evaluation, FitRequest, FitSettings, Loss, Precision

PROGRAMS = 20_000
ROWS = 500
VARIABLES = 10
MOST_PARAMETERS = 8
ITERATIONS = 15
ROUNDS = 5
Work = tuple[list[warpfit.Program], list[np.ndarray]]


def table(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows, and a target that the mix can fit in part."""
    rng = np.random.default_rng(SEED)
    X = rng.uniform(0.5, 3.0, size=(rows, VARIABLES))
    y = 2.5 * np.exp(-0.4 * X[:, 0]) * X[:, 1] + 0.7 * X[:, 2] / X[:, 3]
    return X, y + 0.05 * rng.normal(size=rows)


def drawn(client: warpfit.Client, data: Any, programs: int) -> Work:
    """Draw programs with a finite loss at their start."""
    rng = np.random.default_rng(SEED)
    found: Work = ([], [])
    while len(found[0]) < programs:
        some = [random_program(rng, int(rng.integers(10, 41))) for _ in range(programs)]
        some = [each for each in some if 1 <= each.parameters <= MOST_PARAMETERS]
        starts = [rng.uniform(0.2, 2.0, size=each.parameters) for each in some]
        losses = client.evaluate(data, some, parameters=starts, loss="mse")
        for program, start, loss in zip(some, starts, losses, strict=True):
            if np.isfinite(loss) and len(found[0]) < programs:
                found[0].append(program)
                found[1].append(start)
    return found


def wire(client: warpfit.Client, tables: dict[str, Any], work: Work) -> dict[str, Any]:
    figures = {}
    for mode, (dtype, precision) in MODES.items():
        data = tables[np.dtype(dtype).name]
        options = {"max_iterations": ITERATIONS, "precision": precision}
        optimize = partial(client.optimize, data, *work, **options)
        seconds, fit = statistics.median(seconds_of(optimize, ROUNDS, warm_up=2)), optimize()
        names, counts = np.unique([str(each) for each in fit.reason.ravel()], return_counts=True)
        figures[mode] = {
            "fits_per_second": round(len(work[0]) / seconds),
            "ms": round(1e3 * seconds, 2),
            "mean_iterations": round(float(fit.iterations.mean()), 2),
            "reasons": dict(zip(names.tolist(), counts.tolist(), strict=True)),
        }
        print(mode, figures[mode], flush=True)
    return figures


def fit(batch: Batch, precision: Precision, context: Any) -> Any:
    """Fit a batch of which no code is kept."""
    from warpfit_server.engine.fit.driver import optimize
    from warpfit_server.engine.interface import run_to_end

    losses: dict[str, Any] = {"loss": Loss.MSE, "values": False, "precision": precision}
    problem = Evaluation(context.dataset.content_id, batch.copy(), **losses)
    request = FitRequest(problem, FitSettings(max_iterations=ITERATIONS))
    return run_to_end(optimize(request, context))


def engine(work: Work) -> dict[str, Any]:
    """Measure the driver without a server, with and without searches on the device."""
    from warpfit_server.engine.cuda.engine import CudaEngine
    from warpfit_server.engine.fit.driver import FitContext

    cuda, figures = CudaEngine(), {}
    for mode, (dtype, precision) in MODES.items():
        data = Dataset.of(*table(ROWS), dtype=dtype)
        cuda.load(data)
        given = cuda.linearise, cuda.evaluate, data, np.zeros(1, np.uint8)
        context = FitContext(*given, threads=cuda.threads)
        contexts = {"device": replace(context, small_fits=cuda.small_fits), "host": context}
        batch = Batch.of(*work)

        cases = {
            name: partial(fit, batch, precision, context) for name, context in contexts.items()
        }
        seconds = medians_in_turn(cases, rounds=3)
        own, other = cases["device"](), cases["host"]()
        both = np.isfinite(own.losses) & np.isfinite(other.losses)
        with np.errstate(all="ignore"):
            ratio = (own.losses / other.losses)[both]
        figures[mode] = {
            "fits_per_second": {name: round(len(work[0]) / s) for name, s in seconds.items()},
            "same_losses": round(float((own.losses == other.losses)[both].mean()), 4),
            "within_a_thousandth": round(float((np.abs(ratio - 1.0) < 1e-3).mean()), 4),
            "better_by_that": round(float((ratio < 1.0 - 1e-3).mean()), 4),
            "worse_by_that": round(float((ratio > 1.0 + 1e-3).mean()), 4),
            "same_reasons": round(float((own.reasons == other.reasons).mean()), 4),
        }
        print(mode, figures[mode], flush=True)
        cuda.unload(data.content_id)
    figures["longest_step_ms"] = longest_step(cuda, work)
    print("longest step", figures["longest_step_ms"], flush=True)
    cuda.close()
    return figures


def longest_step(cuda: Any, work: Work) -> dict[str, float]:
    """Return how long launches of fits take on the device, with the time of a launch, in ms."""
    from warpfit_server.engine.cuda.derivatives import tier
    from warpfit_server.engine.fit.driver import FitContext, optimize
    from warpfit_server.engine.interface import run_to_end

    times: list[float] = []
    launch = tier.run

    def timed(context: Any, *launches: Any, events: Any = ()) -> None:
        context.stream.synchronize()
        started = time.perf_counter()
        launch(context, *launches, events=events)
        context.stream.synchronize()
        times.append(time.perf_counter() - started)

    data = Dataset.of(*table(ROWS), dtype=np.float64)
    cuda.load(data)
    tier.run = timed
    try:
        problem = Evaluation(data.content_id, Batch.of(*work), loss=Loss.MSE, values=False)
        context = FitContext(
            cuda.linearise, cuda.evaluate, data, np.zeros(1, np.uint8), small_fits=cuda.small_fits
        )
        run_to_end(optimize(FitRequest(problem, FitSettings(max_iterations=200)), context))
    finally:
        tier.run = launch
        cuda.unload(data.content_id)
    found = np.array(times) * 1e3
    median, longest = round(float(np.median(found)), 3), round(float(found.max()), 3)
    return {"launches": len(times), "median": median, "longest": longest}


def main() -> None:
    options = arguments(__doc__, "gpu_small_fits")
    with connected(devices="0") as (_, client):
        (device,) = client.info().devices
        tables = {name: client.upload(*table(ROWS), dtype=name) for name in ("float32", "float64")}
        work = drawn(client, tables["float32"], PROGRAMS)
        counts = np.array([len(start) for start in work[1]])
        content = {
            "seed": SEED,
            "device": {"name": device.name, "driver": device.driver, "memory": device.memory},
            "programs": PROGRAMS,
            "rows": ROWS,
            "iterations": ITERATIONS,
            "mean_parameters": round(float(counts.mean()), 2),
            "mean_tokens": round(float(np.mean([len(each.codes) for each in work[0]])), 1),
            "wire": wire(client, tables, work),
            "proposals": proposals.measured(client, 1000),
        }
    content["engine"] = engine(work)
    save(options.name, content, options.folder)


if __name__ == "__main__":
    main()
