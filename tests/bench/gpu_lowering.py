"""Benchmark of the lowering on a CUDA device.

``python tests/bench/gpu_lowering.py [--programs N ...] [--repeats N] [--blocks N ...]`` writes
``tests/bench/results/gpu_lowering.json``: for batches of the thesis mix the device time of the two
kernels, as medians of CUDA events around replays of a CUDA graph with ten launches; and the host's
time for the same with the copies, from the arrays of a batch to its instructions on the device and
the status on the host (``whole``), of which ``pack`` is what goes before the first copy. With
several numbers for ``--blocks``, the blocks of a multiprocessor that a small batch is shared out
to, the kernel is measured with each of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu_interpreter import device_time

from support.repository.results import write_result
from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch
from warpfit_server.engine.cuda.interpreter import lowering
from warpfit_server.engine.cuda.runtime.batch_layout import (
    BatchLayout,
    TokenArrays,
    max_levels,
    pack,
)
from warpfit_server.engine.cuda.runtime.device import CudaDevice

#: Most programs that are drawn; larger batches repeat them.
DRAWN = 5000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, nargs="+", default=[300, 1000, 5000, 50_000])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--blocks", type=int, nargs="+", default=[lowering.BLOCKS_A_MULTIPROCESSOR])
    arguments = parser.parse_args()
    device = CudaDevice()
    programs, parameters = thesis_mix(1, min(DRAWN, max(arguments.programs)))
    rows = []
    for count in arguments.programs:
        repeats = -(-count // len(programs))
        batch = Batch.of((programs * repeats)[:count], (parameters * repeats)[:count])
        rows.append(measure(device, batch, arguments.repeats, arguments.blocks))
        print(rows[-1], flush=True)
    content = {
        "device": {"name": device.name, "driver": device.driver},
        "workload": {"mix": "thesis", "seed": 1, "variables": 10},
        "results": rows,
    }
    print(write_result("gpu_lowering", content))


def measure(device: CudaDevice, batch: Batch, repeats: int, blocks: list[int]) -> dict[str, Any]:
    kernels = lowering.load_lowering(device)
    layout, tokens = BatchLayout.of(batch), TokenArrays.of(batch)
    with device.stream() as context:
        staging = context.pinned("batch", layout.uploaded)
        address = context.buffer("batch", layout.end)
        where = (context, kernels, batch, address)
        levels = max_levels(int(batch.lengths.max()), False)

        def lower(blocks: int) -> None:
            lowering.launch_lowering(*where, 10, blocks * device.multiprocessors)

        def order() -> None:
            lowering.launch_order(*where, len(batch), levels)

        def whole() -> None:
            pack(tokens, layout, staging)
            context.upload(address, staging)
            lower(lowering.BLOCKS_A_MULTIPROCESSOR)
            first_invalid = lowering.launch_order(*where, len(batch), levels)
            context.stream.synchronize()
            assert first_invalid[0] == lowering.ALL_VALID

        whole()
        result = {
            "programs": len(batch),
            "tokens": len(batch.codes),
            "bytes": layout.uploaded,
            "order_us": microseconds(device_time(context, order, repeats)),
            "pack_us": microseconds(host_time(lambda: pack(tokens, layout, staging), repeats)),
            "whole_us": microseconds(host_time(whole, repeats)),
        }
        for number in blocks:
            seconds = device_time(context, partial(lower, number), repeats)
            name = "lower_us" if len(blocks) == 1 else f"lower_us with {number} blocks"
            result[name] = microseconds(seconds)
    return result


def host_time(work: Callable[[], None], repeats: int) -> float:
    """Median seconds of ``work``."""
    times = []
    for _ in range(max(10, repeats)):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 1)


if __name__ == "__main__":
    main()
