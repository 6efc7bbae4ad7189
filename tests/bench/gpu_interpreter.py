"""Benchmark of the interpreter on a CUDA device: time of the kernels, and their bounds.

``python tests/bench/gpu_interpreter.py [--programs N] [--repeats N] [--rows N ...]`` writes
``tests/bench/results/gpu_interpreter.json``. Times are medians of CUDA events around replays of a
CUDA graph with several evaluations, so that the host's launches stay out of them; every
evaluation has losses on the device. ``interpret`` is the interpreter's kernel alone;
``evaluation`` adds the row-invariant subtrees, the sums and their way to the host; ``host`` is the
whole call of ``engine.evaluate``, from arrays to losses, lowering and copies included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import harness
import numpy as np

from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss
from warpfit_server.engine.cuda.engine import CudaEngine
from warpfit_server.engine.cuda.interpreter.launches import BatchLaunch
from warpfit_server.engine.cuda.interpreter.tier import InterpreterTier
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.resident_data import upload
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.interface import run_to_end


@dataclass(frozen=True)
class Setup:
    engine: CudaEngine
    batch: Batch
    repeats: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 10_000, 100_000, 1_000_000])
    arguments = parser.parse_args()
    programs, parameters = thesis_mix(1, arguments.programs)
    setup = Setup(CudaEngine(), Batch.of(programs, parameters), arguments.repeats)
    rows = [
        {"mode": mode, "rows": count, **measure(setup, mode, count)}
        for mode in harness.MODES
        for count in arguments.rows
    ]
    for row in rows:
        print(row, flush=True)
    device = setup.engine.devices()[0]
    content = {
        "device": {"name": device.name, "driver": device.driver},
        "workload": {
            "programs": arguments.programs,
            "tokens": len(setup.batch.codes),
            "seed": 1,
            "loss": "mse on the device",
        },
        "results": rows,
    }
    harness.save("gpu_interpreter", content)


def measure(setup: Setup, mode: str, rows: int) -> dict[str, Any]:
    dtype, precision = harness.MODES[mode]
    dataset = harness.uniform_data(rows, dtype)
    evaluation = Evaluation(
        dataset.content_id, setup.batch, precision=precision, loss=Loss.MSE, values=False
    )
    device = CudaDevice()
    interpreter, resident = InterpreterTier(device), upload(device, dataset)
    with device.stream() as context:
        jobs = (0, len(setup.batch))
        variant = interpreter.variant(resident, evaluation)
        kernels = interpreter.prepare(variant)
        geometry = interpreter.geometry(resident, evaluation, variant)
        given = context, kernels, geometry, setup.batch, 10, jobs[1]
        lowered, commands = BatchLaunch.begin(*given)
        lowered.execute(commands)
        partials = context.buffer("partials 0", jobs[1] * geometry.tiles * 8)

        def kernel() -> None:
            commands = lowered.new_commands()
            lowered.add_jobs(commands, geometry, jobs, partials)
            lowered.execute(commands)

        def whole() -> None:
            commands = lowered.new_commands()
            lowered.add_slots(commands)
            lowered.execute(commands)
            lowered.launch_chunk(geometry, evaluation, jobs, 0)

        kernel_seconds = device_time(context, kernel, setup.repeats)
        whole_seconds = device_time(context, whole, setup.repeats)
    setup.engine.load(dataset)
    outputs = harness.outputs_of(evaluation)
    host = harness.median_seconds(
        lambda: run_to_end(setup.engine.evaluate(evaluation, outputs)), max(setup.repeats, 5)
    )
    setup.engine.unload(dataset.content_id)
    tokens = len(setup.batch.codes) * rows
    return {
        "rows_a_thread": variant.rows,
        "interpret_us": round(kernel_seconds * 1e6, 2),
        "evaluation_us": round(whole_seconds * 1e6, 2),
        "host_us": round(host * 1e6, 2),
        "tokens_per_second": tokens / kernel_seconds,
        "bound": bound(setup, rows, np.dtype(dtype).itemsize, kernel_seconds),
    }


def device_time(context: StreamContext, work: Callable[[], None], repeats: int) -> float:
    """Median seconds of one call of ``work`` within a graph of ten."""
    work()
    context.stream.synchronize()
    context.stream.begin_capture()
    for _ in range(10):
        work()
    graph = context.stream.end_capture()
    graph.launch(context.stream)
    times = []
    for _ in range(repeats):
        context.mark("before")
        graph.launch(context.stream)
        context.mark("after")
        context.wait("after")
        times.append(context.nanoseconds("before", "after") / 10)
    return float(np.median(times)) * 1e-9


def bound(setup: Setup, rows: int, itemsize: int, seconds: float) -> dict[str, Any]:
    """The least time that special functions and device memory allow, for fast mode's functions."""
    special = harness.special_functions(setup.batch)
    special_seconds = (
        special * rows / (harness.SPECIAL_PER_CLOCK * setup.engine.multiprocessors * harness.CLOCK)
    )
    traffic = 11 * rows * itemsize
    memory_seconds = traffic / harness.MEMORY
    least = max(special_seconds, memory_seconds)
    return {
        "special_functions": special * rows,
        "bytes": traffic,
        "special_us": round(special_seconds * 1e6, 2),
        "memory_us": round(memory_seconds * 1e6, 2),
        "fraction": round(least / seconds, 3),
    }


if __name__ == "__main__":
    main()
