"""Pairs of formulas weighed a second, with the best kept, on the CPU or on a GPU.

``run.py search/pairs [--device cuda] [--rows 500 ...]`` writes pairs_cpu.json or pairs_cuda.json.
Left and right are values of random formulas; the target is a
product of two of these with noise of the same size, so that the best pairs explain little and
nothing is easily left out. ``product`` is a + b u v, ``beside`` a + b u v + c u, ``sum``
a + b u + c v. ``cpu_seconds`` are those of all threads, for a machine that does other things, too.
The best pairs are compared with those of least squares on a part of the pairs.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from harness import SEED, arguments, save

from support.suites.pairs import plain_best, plain_errors
from warpfit_server.engine.interface import run_to_end
from warpfit_server.engine.search.library import Fit, Weigher

KINDS = {"product": (True, False), "beside": (True, True), "sum": (False, True)}
ROUNDS = 5
#: Of the CPU.
THREADS = 2
#: Right formulas, by device.
RIGHT = {"cpu": 16_384, "cuda": 98_304}


def drawn(count: int, rows: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Draw values with root mean square 1."""
    values = np.exp(0.5 * rng.normal(size=(count, rows))) * rng.choice([-1, 1], (count, 1))
    values += 0.3 * rng.normal(size=(count, 1))
    values /= np.sqrt(np.mean(values**2, axis=1, keepdims=True))
    return values.astype(np.float32)


def measure(weigher: Weigher, device: str, rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    left, right = drawn(weigher.block, rows, rng), drawn(RIGHT[device], rows, rng)
    weights = np.full(rows, 1 / rows)
    target = left[7].astype(float) * right[len(right) // 2]
    target = target / target.std() + rng.normal(size=rows)
    target = (target - target.mean()) / target.std()
    held, found = weigher.prepared(right), dict[str, Any]()
    for name, (is_product, beside) in KINDS.items():
        fit = Fit.of(target, weights, np.empty((0, rows)), is_product, beside)
        steps, seconds, cpu = [], [], []
        for _ in range(ROUNDS + 1):
            begun, begun_cpu = time.perf_counter(), time.process_time()
            work, longest = weigher.best(fit, left, [held], weigher.kept), 0.0
            while True:
                step = time.perf_counter()
                try:
                    waits_for = next(work)
                except StopIteration as end:
                    errors = end.value[0]
                    break
                if waits_for is not None:
                    waits_for.result()
                longest = max(longest, time.perf_counter() - step)
            seconds.append(time.perf_counter() - begun)
            cpu.append(time.process_time() - begun_cpu)
            steps.append(longest)
        some = weigher.prepared(right[:100])
        best = run_to_end(weigher.best(fit, left[:20], [some], 100))[0]
        plain = plain_errors(
            target, weights, np.empty((0, rows)), left[:20], right[:100],
            is_product=is_product, beside=beside,
        )  # fmt: skip
        np.testing.assert_allclose(best, plain_best(plain, 100)[0], rtol=1e-7)
        pairs = len(left) * len(right)
        found[name] = {
            "pairs_a_second": float(f"{pairs / np.median(seconds[1:]):.3g}"),
            "pairs_a_cpu_second": float(f"{pairs / np.median(cpu[1:]):.3g}"),
            "longest_step_ms": round(1e3 * float(np.median(steps[1:])), 2),
            "least_error": float(errors[0]),
            "greatest_error": float(errors[-1]),
        }
    return found


def main() -> None:
    given = arguments(__doc__, "", device="cpu", rows=(128, 500))
    weigher: Any
    if given.device == "cpu":
        from warpfit_server.engine.cpu.pairs import CpuWeigher

        weigher = CpuWeigher(THREADS)
    else:
        from warpfit_server.engine.cuda.runtime.device import CudaDevice
        from warpfit_server.engine.cuda.search import colony

        device = CudaDevice()
        colony.load_pairs(device)
        weigher = colony.CudaWeigher(device)
    result = {
        "rows": {str(rows): measure(weigher, given.device, rows) for rows in given.rows},
        "left": weigher.block, "right": RIGHT[given.device], "kept": weigher.kept,
        "threads": THREADS if given.device == "cpu" else None,
        "blas_threads": os.environ.get("OPENBLAS_NUM_THREADS"),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip
    weigher.close()
    save(given.name or f"pairs_{given.device}", result, given.folder)


if __name__ == "__main__":
    main()
