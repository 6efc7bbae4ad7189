"""Benchmark of the lowering on a CUDA device.

``python tests/bench/gpu_lowering.py [--programs N ...] [--repeats N]`` writes
``tests/bench/results/gpu_lowering.json``: for batches of the random mix the device time of the two
kernels, as medians of CUDA events around replays of a CUDA graph with ten launches; and the host's
time for the same with the copies, from the arrays of a batch to its instructions on the device and
the status on the host (``whole``), of which ``pack`` is what goes before the first copy.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from gpu_interpreter import device_time
from harness import median_seconds, save

from warpfit.expressions.workload import thesis_mix
from warpfit.ir import Batch
from warpfit_server.engine.cuda.interpreter import device_lowering
from warpfit_server.engine.cuda.runtime.batch_layout import (
    BatchLayout,
    TokenArrays,
    max_levels,
    pack,
)
from warpfit_server.engine.cuda.runtime.command_list import CommandList
from warpfit_server.engine.cuda.runtime.device import CudaDevice

#: Most programs that are drawn; larger batches repeat them.
DRAWN = 5000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, nargs="+", default=[300, 1000, 5000, 50_000])
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    device = CudaDevice()
    programs, parameters = thesis_mix(1, min(DRAWN, max(arguments.programs)))
    rows = []
    for count in arguments.programs:
        repeats = -(-count // len(programs))
        batch = Batch.of((programs * repeats)[:count], (parameters * repeats)[:count])
        rows.append(measure(device, batch, arguments.repeats))
        print(rows[-1], flush=True)
    content = {
        "device": {"name": device.name, "driver": device.driver},
        "workload": {"mix": "thesis", "seed": 1, "variables": 10},
        "results": rows,
    }
    save("gpu_lowering", content)


def measure(device: CudaDevice, batch: Batch, repeats: int) -> dict[str, Any]:
    kernels = device_lowering.load_lowering(device)
    layout, tokens = BatchLayout.of(batch), TokenArrays.of(batch)
    with device.stream() as context:
        staging = context.pinned("batch", layout.uploaded)
        address = context.buffer("batch", layout.end)
        where = kernels, batch, layout, address
        groups = context.pinned("first invalid", 4).view(np.uint32)
        longest = int(batch.lengths.max())
        flags = np.zeros(256, dtype=np.uint8)
        levels = max_levels(int(batch.lengths.max()), False)

        def lower() -> None:
            blocks = device_lowering.BLOCKS_A_MULTIPROCESSOR * device.multiprocessors
            commands = CommandList(context.functions, context.handle)
            device_lowering.add_lowering(commands, *where, 10, longest, blocks)
            context.check_executed(commands.execute())

        def order() -> None:
            commands = CommandList(context.functions, context.handle)
            device_lowering.add_order(commands, *where, len(batch), levels, groups)
            context.check_executed(commands.execute())

        def pack_batch() -> None:
            pack(tokens, layout, staging, flags)

        def whole() -> None:
            pack_batch()
            context.upload(address, staging)
            lower()
            order()
            context.stream.synchronize()
            assert groups[0] == device_lowering.ALL_VALID

        whole()
        turns = max(10, repeats)
        return {
            "programs": len(batch),
            "tokens": len(batch.codes),
            "bytes": layout.uploaded,
            "order_us": microseconds(device_time(context, order, repeats)),
            "pack_us": microseconds(median_seconds(pack_batch, turns)),
            "whole_us": microseconds(median_seconds(whole, turns)),
            "lower_us": microseconds(device_time(context, lower, repeats)),
        }


def microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 1)


if __name__ == "__main__":
    main()
