"""A batch on its way through the interpreter, and the copies of its results to the host."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit.request import Evaluation, Timings
from warpfit_server.engine.cuda.interpreter.device_lowering import (
    ALL_VALID,
    check_length,
    raise_invalid_program,
)
from warpfit_server.engine.cuda.interpreter.launches import (
    PART,
    as_jobs,
    configure_launch,
    lower,
    new_batch,
    run_jobs,
)
from warpfit_server.engine.cuda.interpreter.source import Variant
from warpfit_server.engine.cuda.runtime.batch_layout import BatchBounds, lay_out, max_slots
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.interface import Steps
from warpfit_server.engine.native.arguments import array_address
from warpfit_server.shared_batch import SharedBatch

#: First job of a launch, and the number of its jobs.
Jobs = tuple[int, int]
#: Where the results of a launch arrive: sums of losses, [nodes, jobs], and values, [jobs, rows];
#: None for those that are not wanted.
Staging = tuple[NDArray[np.float64] | None, NDArray[Any] | None]


@dataclass(frozen=True, slots=True)
class InterpreterKernels:
    """The loaded kernels of one variant."""

    variant: Variant
    record: NDArray[Any]
    """Record of `LaunchLimits`."""
    costly: int
    """See `source.costly_operators`."""
    functions: Mapping[str, Any]
    """CuPy's functions, without which the kernels would be unloaded."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchLaunch:
    """A batch on its way through the device, and what all its launches share."""

    context: StreamContext
    kernels: InterpreterKernels
    batch: Batch
    variables: int
    """Variables of the data set."""
    record: NDArray[Any]
    """Record of `launches.BATCH`."""
    first_invalid: NDArray[np.uint32]
    """First invalid program of each group, or `ALL_VALID`; known once the batch is lowered."""

    @classmethod
    def begin(
        cls,
        context: StreamContext,
        kernels: InterpreterKernels,
        batch: Batch,
        variables: int,
        max_jobs: int,
    ) -> BatchLaunch:
        """Copy a batch to the device from where it lies and lower it; record ``started``.

        ``max_jobs`` are the most jobs of a launch.

        Raises:
            ResourceExhaustedError: if a program is too long, or the device has no room.
        """
        shared = SharedBatch.viewing(batch)
        summary, count = shared.summary, len(shared.parts)
        check_length(summary.longest)
        counts = shared.token_count, len(shared), shared.parameter_total, shared.vectors
        address = context.buffer("batch", lay_out(*counts[:3]).end)
        apart = context.buffer("parts", shared.room) if shared.is_apart else 0
        size = max_slots(*counts[:2]) * shared.vectors * kernels.variant.dtype.itemsize
        slots = context.buffer("slots", max(1, size))
        first_invalid = context.pinned("first invalid", 4 * counts[1]).view(np.uint32)
        record = new_batch(counts, variables, address, slots, array_address(first_invalid))
        bounds = BatchBounds.of(summary, kernels.costly)
        configure_launch(record, kernels.record, summary.longest, *bounds, max_jobs)
        parts = context.pinned("part records", count * PART.itemsize).view(PART)
        given = shared.places, apart, parts, kernels.record, record, context.event("started").ptr
        context.check_executed(lower(context.functions, context.handle, *given))
        return cls(context, kernels, shared, variables, record, first_invalid)

    def check(self) -> None:
        """Check that all programs could be lowered, once the stream has passed that.

        Raises:
            ProgramError: for the first bad token.
            ResourceExhaustedError: if a variable's index is too large to encode.
        """
        groups = -(-len(self.batch) // int(self.record["group"][0]))
        program = min(self.first_invalid[:groups].tolist())
        if program != ALL_VALID:
            raise_invalid_program(self.batch, program, self.variables)

    def launch(
        self, tiles: NDArray[Any], jobs: Jobs, sums: NDArray[Any] | None, values: int, side: str
    ) -> None:
        """Launch some jobs, and record the event ``computed`` of a side; see `run_jobs`.

        Raises:
            CUDADriverError: if the device reports an error.
        """
        context, partials, target = self.context, 0, 0
        if sums is not None:
            size = 8 * jobs[1] * int(tiles["count"][0])
            partials, target = context.buffer("partials" + side, size), array_address(sums)
        device = context.functions, context.handle
        given = self.kernels.record, self.record, tiles, as_jobs(jobs, values, partials)
        computed = context.event("computed" + side).ptr
        context.check_executed(run_jobs(*device, *given, target, computed))

    def launch_chunk(
        self, tiles: NDArray[Any], evaluation: Evaluation, jobs: Jobs, side: str
    ) -> Staging:
        """Launch some jobs and the copies of their results; see `resident_data.run_chunks`."""
        context, variant, count, one = self.context, self.kernels.variant, jobs[1], tiles[0]
        pitch = int(one["count"]) * variant.tile * variant.dtype.itemsize
        values, sums, staging = 0, None, None
        if evaluation.loss is not None:
            nodes = int(one["nodes"])
            sums = context.pinned("sums" + side, 8 * nodes * count).view(np.float64)
            sums = sums.reshape(nodes, -1)
        if evaluation.values:
            values = context.buffer("values" + side, count * pitch)
        context.mark("begun" + side)
        self.launch(tiles, jobs, sums, values, side)
        if values:
            first, end = int(one["first_row"]), int(one["end_row"])
            memory = context.pinned("values" + side, count * (end - first) * variant.dtype.itemsize)
            staging = memory.view(variant.dtype).reshape(count, -1)
            context.download_rows(staging, values + first * variant.dtype.itemsize, pitch)
        return sums, staging

    def compute_losses(
        self, tiles: NDArray[Any], losses: NDArray[np.float64], started: int
    ) -> Steps[Timings]:
        """Launch all jobs on all rows after the lowering, and fill in the sums of row losses.

        ``started`` is ``time.perf_counter_ns()`` of the evaluation's beginning.

        Raises:
            ProgramError: for the first bad token.
        """
        context = self.context
        sums = context.pinned("sums", 8 * losses.size).view(np.float64)
        self.launch(tiles, (0, losses.size), sums, 0, "")
        launched = time.perf_counter_ns()
        yield from context.reach("computed")
        self.check()
        losses.reshape(-1)[:] = sums
        compute = context.nanoseconds("started", "computed")
        copy_out = max(0, time.perf_counter_ns() - launched - compute)
        return Timings(copy_in=launched - started, compute=compute, copy_out=copy_out)
