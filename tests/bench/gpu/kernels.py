"""Kernels of the CUDA engine, device time alone: interpreter, derivatives, compiled code, lowering.

The work is the random mix with losses. ``interpret_us`` and ``lower_us`` are medians of CUDA events
around replays of a CUDA graph with ten launches, ``gradient_us`` of those around all kernels of a
batch's losses and gradients, ``microseconds`` of those around one launch of a batch's graph
(parameters to the device, all kernels, sums to the host); ``compile_300_expressions_seconds`` is
the time from fresh expressions to loaded modules, with nothing cached.
"""

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numba
import numpy as np
from harness import MODES, arguments, outputs_of, save, uniform_data

from support.random_programs import thesis_mix
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss, Tier
from warpfit_server.engine.cuda.derivatives.tier import DerivativeTier
from warpfit_server.engine.cuda.interpreter import launches
from warpfit_server.engine.cuda.interpreter.launches import as_jobs, cut_tiles, launch_interpreter
from warpfit_server.engine.cuda.interpreter.tier import VARIANTS, BatchLaunch, InterpreterTier
from warpfit_server.engine.cuda.jit.kernel_store import KernelStore
from warpfit_server.engine.cuda.jit.tier import CompiledTier
from warpfit_server.engine.cuda.runtime.datasets import ResidentDataset, upload
from warpfit_server.engine.cuda.runtime.device import CudaDevice, StreamContext
from warpfit_server.engine.interface import run_to_end
from warpfit_server.machine import available_cores

ROWS = (1_000, 10_000, 100_000, 1_000_000)
#: Programs of batches that are lowered; the larger ones repeat those that are drawn.
LOWERED, DRAWN = (300, 1000, 5000, 50_000), 5000


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


def evaluation(resident: ResidentDataset, mode: str, seed: int = 1, **options: Any) -> Evaluation:
    """Make an evaluation of 300 expressions that a seed draws."""
    fields = {"precision": MODES[mode][1], "loss": Loss.MSE, "values": False, **options}
    return Evaluation(resident.dataset.content_id, Batch.of(*thesis_mix(seed)), **fields)


@numba.njit
def interpret(driver: Any, stream: int, kernels: Any, batch: Any, rows: Any, jobs: Any) -> int:
    return launch_interpreter(driver, stream, kernels[0], batch, rows, jobs)


@numba.njit
def lower(driver: Any, stream: int, kernels: Any, batch: Any) -> int:
    return launches.launch_lowering(driver, stream, kernels[0], batch)


def launch(kernel: Callable[..., int], lowered: BatchLaunch, *work: Any) -> None:
    context = lowered.context
    given = context.functions, context.handle, lowered.kernels.record, lowered.record
    context.check_executed(kernel(*given, *work))


def interpreter(device: CudaDevice, repeats: int) -> dict[str, Any]:
    rows, tier = [], InterpreterTier(device)
    for mode, count in product(MODES, ROWS):
        resident = upload(device, uniform_data(count, MODES[mode][0]))
        asked = evaluation(resident, mode)
        variant, jobs = tier.variant(resident, asked, count), len(asked.batch)
        with device.stream() as context:
            tiles = cut_tiles(resident, (0, count), asked.loss, variant)
            lowered = BatchLaunch.begin(context, tier.prepare(variant), asked.batch, 10, jobs)
            partials = context.buffer("partials", jobs * int(tiles["count"][0]) * 8)
            kernel = partial(launch, interpret, lowered, tiles, as_jobs((0, jobs), 0, partials))
            seconds = device_time(context, kernel, repeats)
        rate = len(asked.batch.codes) * count / seconds
        figures = {"interpret_us": round(seconds * 1e6, 2), "tokens_per_second": rate}
        rows.append({"mode": mode, "rows": count, "rows_a_thread": variant.rows, **figures})
    return {"results": rows}


def derivatives(device: CudaDevice, repeats: int) -> dict[str, Any]:
    rows, tier = [], DerivativeTier(device, available_cores(), lambda: None)
    tier.prepare_all()
    for mode, count in product(MODES, ROWS):
        resident = upload(device, uniform_data(count, MODES[mode][0]))
        asked = evaluation(resident, mode, gradient=True)
        turns = [tier.evaluate(resident, asked, outputs_of(asked)) for _ in range(repeats + 2)]
        seconds = float(np.median([run_to_end(turn).compute for turn in turns][2:])) / 1e9
        rate = len(asked.batch.codes) * count / seconds
        figures = {"gradient_us": round(seconds * 1e6, 1), "tokens_per_second": rate}
        rows.append({"mode": mode, "rows": count, **figures})
    return {"results": rows}


def compiled(device: CudaDevice, repeats: int) -> dict[str, Any]:
    rows, threads, rng = [], available_cores(), np.random.default_rng(2)
    kernels, planner = KernelStore(device, threads), ThreadPoolExecutor(1)
    for mode, count in product(MODES, ROWS[1:]):
        tier = CompiledTier(device, kernels, planner)
        resident = upload(device, uniform_data(count, MODES[mode][0]))
        asked, times = evaluation(resident, mode, tier=Tier.COMPILED), []
        for _ in range(2 * repeats):
            moved = asked.batch.parameters * rng.uniform(0.9, 1.1)
            turn = replace(asked, batch=replace(asked.batch, parameters=moved))
            times.append(run_to_end(tier.evaluate(resident, turn, outputs_of(turn))).compute)
        seconds = float(np.median(times[2:])) / 1e9
        rate = len(asked.batch.codes) * count / seconds
        figures = {"microseconds": round(seconds * 1e6, 1), "token_rows_per_second": rate}
        rows.append({"mix": "thesis mix", "mode": mode, "rows": count, **figures})
    seconds_to_compile = {mode: compile_seconds(device, kernels, planner, mode) for mode in MODES}
    return {
        "compiler_threads": kernels.compile_queue.processes,
        "compile_300_expressions_seconds": seconds_to_compile,
        "results": rows,
    }


def compile_seconds(
    device: CudaDevice, kernels: KernelStore, planner: Executor, mode: str
) -> float:
    """From 300 fresh expressions to loaded modules, the device library already built."""
    tier, times = CompiledTier(device, kernels, planner), []
    resident = upload(device, uniform_data(1000, MODES[mode][0]))
    for seed in range(7, 11):
        fresh, started = evaluation(resident, mode, seed, tier=Tier.COMPILED), time.perf_counter()
        kernels.request(tier.plan(resident, fresh).keys, urgent=True).result()
        times.append(time.perf_counter() - started)
    return float(np.median(times[1:]))  # the first one builds the library


def lowering(device: CudaDevice, repeats: int) -> dict[str, Any]:
    programs, parameters = thesis_mix(1, DRAWN)
    tier, rows = InterpreterTier(device), []
    kernels = tier.prepare(VARIANTS[0])
    for count in LOWERED:
        times = -(-count // DRAWN)
        batch = Batch.of((programs * times)[:count], (parameters * times)[:count])
        with device.stream() as context:
            lowered = BatchLaunch.begin(context, kernels, batch, 10, count)
            seconds = device_time(context, partial(launch, lower, lowered), repeats)
        figures = {"tokens": len(batch.codes), "lower_us": round(1e6 * seconds, 1)}
        rows.append({"programs": count, **figures})
    return {"results": rows}


PARTS = {each.__name__: each for each in (interpreter, derivatives, compiled, lowering)}


def main() -> None:
    options = arguments(__doc__, "", parts=tuple(PARTS), repeats=15)
    for part in options.parts:
        with tempfile.TemporaryDirectory() as cache:  # nothing is cached before
            device = CudaDevice(cache_directory=Path(cache))
            found = PARTS[part](device, options.repeats)
        content = {"device": {"name": device.name, "driver": device.driver}, **found}
        save(f"gpu_{part}", content, options.folder)
