"""Benchmark of compiled kernels on a CUDA device: repeated batches with new parameters, losses.

``python tests/bench/gpu_compiled.py [DIRECTORY]`` writes results/gpu_compiled.json.
Times are medians of CUDA events around one launch of the batch's CUDA graph: parameters to the
device, all kernels, sums to the host. ``compile`` is the time from 300 fresh expressions to loaded
modules, nothing cached.
"""

import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from harness import (
    CLOCK,
    MEMORY,
    MODES,
    SPECIAL_PER_CLOCK,
    outputs_of,
    save,
    special_functions,
    uniform_data,
)

from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss, Tier
from warpfit_server.engine.cuda.jit.kernel_store import KernelStore
from warpfit_server.engine.cuda.jit.shapes import shapes_of_batch
from warpfit_server.engine.cuda.jit.tier import CompiledTier
from warpfit_server.engine.cuda.math.modes import Mode
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset, upload
from warpfit_server.engine.interface import run_to_end
from warpfit_server.system.resources import available_cores

MIXES = {"thesis mix": None, "+ - *": ("add", "sub", "mul")}
#: Threads that compile: one a core, as in a server for what somebody waits for.
THREADS = available_cores()
#: Instructions a clock of a multiprocessor; half as many in float64.
ISSUED_PER_CLOCK = 128


class Bench:
    """A device with its kernels, in a cache directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.device = CudaDevice(cache_directory=directory)
        self.kernels = KernelStore(self.device, THREADS)
        self._residents: dict[Any, ResidentDataset] = {}

    def resident(self, rows: int, dtype: Any) -> ResidentDataset:
        if (rows, dtype) not in self._residents:
            self._residents.clear()
            self._residents[rows, dtype] = upload(self.device, uniform_data(rows, dtype))
        return self._residents[rows, dtype]

    def evaluation(self, resident: ResidentDataset, mix: str, mode: str, seed: int) -> Evaluation:
        options = {} if MIXES[mix] is None else {"operators": MIXES[mix]}
        programs, parameters = thesis_mix(seed, **options)
        batch = Batch.of(programs, parameters)
        return Evaluation(
            resident.dataset.content_id,
            batch,
            precision=MODES[mode][1],
            loss=Loss.MSE,
            values=False,
            tier=Tier.COMPILED,
        )

    def seconds(self, rows: int, mix: str, mode: str, repeats: int = 30) -> tuple[float, int]:
        """Return the median device seconds of a repeated batch, and its tokens."""
        tier = CompiledTier(self.device, self.kernels)
        resident = self.resident(rows, MODES[mode][0])
        evaluation = self.evaluation(resident, mix, mode, 1)
        rng = np.random.default_rng(2)
        times = []
        for _ in range(repeats):
            moved = evaluation.batch.parameters * rng.uniform(0.9, 1.1)
            turn = replace(evaluation, batch=replace(evaluation.batch, parameters=moved))
            times.append(run_to_end(tier.evaluate(resident, turn, outputs_of(turn))).compute / 1e9)
        return float(np.median(times[2:])), len(evaluation.batch.codes)


def compile_seconds(bench: Bench, mode: str) -> float:
    """300 fresh expressions to loaded modules, the device library already built."""
    tier = CompiledTier(bench.device, bench.kernels)
    resident = bench.resident(1000, MODES[mode][0])
    first = bench.evaluation(resident, "thesis mix", mode, 7)
    run_to_end(tier.evaluate(resident, first, outputs_of(first)))
    times = []
    for seed in (8, 9, 10):
        fresh = bench.evaluation(resident, "thesis mix", mode, seed)
        started = time.perf_counter()
        plan = tier.plan(resident, fresh)
        bench.kernels.request(plan.keys, urgent=True).result()
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def bound(bench: Bench, batch: Batch, mode: str, rows: int, seconds: float) -> dict[str, Any]:
    """Least time that special functions, issued instructions and memory allow.

    ``instructions`` are those of the generated code for a row, as if nothing were shared between
    expressions or hoisted out of the row loop; ``special_functions`` count for fast mode alone.
    """
    library_mode = Mode.of(np.dtype(MODES[mode][0]), MODES[mode][1])
    special = special_functions(batch) * rows
    instructions = bench.kernels.work(library_mode, shapes_of_batch(batch).shapes).sum() * rows
    word = library_mode.dtype.itemsize
    clock = bench.device.multiprocessors * CLOCK
    least = {
        "special_us": special / (SPECIAL_PER_CLOCK * clock) * 1e6 if mode == "float32 fast" else 0,
        "issue_us": instructions / (ISSUED_PER_CLOCK * 4 / word * clock) * 1e6,
        "memory_us": 11 * rows * word / MEMORY * 1e6,
    }
    return {
        "special_functions": special,
        "instructions": int(instructions),
        "bytes": 11 * rows * word,
        **{name: round(value, 1) for name, value in least.items()},
        "fraction": round(max(least.values()) / (seconds * 1e6), 3),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        rows = []
        for mix, mode, count in product(MIXES, MODES, (10_000, 100_000, 1_000_000)):
            seconds, tokens = bench.seconds(count, mix, mode)
            row: dict[str, Any] = {
                "mix": mix,
                "mode": mode,
                "rows": count,
                "tokens": tokens,
                "microseconds": round(seconds * 1e6, 1),
                "token_rows_per_second": tokens * count / seconds,
            }
            batch = bench.evaluation(bench.resident(count, MODES[mode][0]), mix, mode, 1).batch
            row["bound"] = bound(bench, batch, mode, count, seconds)
            rows.append(row)
            print(row, flush=True)
        content = {
            "device": {"name": bench.device.name, "driver": bench.device.driver},
            "compiler_threads": THREADS,
            "compile_300_expressions_seconds": {
                mode: compile_seconds(bench, mode) for mode in MODES
            },
            "results": rows,
        }
    save("gpu_compiled", content, Path(sys.argv[1]) if sys.argv[1:] else None)


if __name__ == "__main__":
    main()
