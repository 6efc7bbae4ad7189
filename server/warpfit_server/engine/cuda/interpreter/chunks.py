"""Launches of the interpreter chunk by chunk, and the copies of their results to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.ir import Batch
from warpfit.request import Evaluation
from warpfit_server.engine.cuda.interpreter.device_lowering import (
    ALL_VALID,
    check_length,
    launch_lowering,
    launch_order,
    raise_invalid_program,
)
from warpfit_server.engine.cuda.interpreter.kernel_arguments import (
    INTERPRETER_ARGUMENTS,
    SLOT_ARGUMENTS,
    SLOT_THREADS,
    SUM_THREADS,
    DeviceAddresses,
    InterpreterGeometry,
    InterpreterKernels,
    LaunchConfig,
    configure_launch,
    fill_interpreter_arguments,
    fill_slot_arguments,
)
from warpfit_server.engine.cuda.runtime.batch_layout import (
    BatchBounds,
    BatchLayout,
    TokenArrays,
    bound_batch,
    pack,
)
from warpfit_server.engine.cuda.runtime.resident_data import Span
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.interface import Outputs, Steps
from warpfit_server.engine.sum_tree import parent_nodes, sum_nodes
from warpfit_server.row_blocks import levels_between, node_rows, nodes_of

#: First job of a launch, and the number of its jobs.
Jobs = tuple[int, int]
#: Where the results of a launch arrive: sums of losses, [nodes, jobs], and values, [jobs, rows];
#: None for those that are not wanted.
Staging = tuple[NDArray[np.float64] | None, NDArray[Any] | None]


@dataclass(frozen=True, slots=True, eq=False)
class LoweredBatch:
    """A batch whose lowering has been launched, and what all its chunks share."""

    kernels: InterpreterKernels
    batch: Batch
    layout: BatchLayout
    bounds: BatchBounds
    config: LaunchConfig
    addresses: DeviceAddresses
    variables: int
    """Variables of the data set."""
    first_invalid: NDArray[np.uint32]
    """Result of `launch_order`, which is valid once the stream has passed the lowering."""

    def check(self) -> None:
        """Check that all programs could be lowered, once the stream has passed that.

        Raises:
            ProgramError: for the first bad token.
            ResourceExhaustedError: if a variable's index is too large to encode.
        """
        program = int(self.first_invalid.min())
        if program != ALL_VALID:
            raise_invalid_program(self.batch, program, self.variables)


def lower_batch(
    context: StreamContext,
    kernels: InterpreterKernels,
    geometry: InterpreterGeometry,
    batch: Batch,
    variables: int,
    max_jobs: int,
) -> LoweredBatch:
    """Upload a batch and launch its lowering.

    Raises:
        ResourceExhaustedError: if a program is too long, or the device has no room.
    """
    check_length(batch)
    tokens, layout = TokenArrays.of(batch), BatchLayout.of(batch)
    bounds = bound_batch(tokens, kernels.flags)
    config = configure_launch(geometry, bounds, max_jobs, len(batch), batch.vectors)
    staging = context.pinned("batch", layout.uploaded)
    pack(tokens, layout, staging)
    address = context.buffer("batch", layout.end)
    size = bounds.slots * batch.vectors * kernels.variant.dtype.itemsize
    slots = context.buffer("slots", max(1, size))
    context.upload(address, staging)
    where = (context, kernels.lowering, batch, address)
    launch_lowering(*where, variables, geometry.lowering_blocks)
    first_invalid = launch_order(*where, config.group, config.levels - config.scratch)
    addresses = DeviceAddresses(address, slots, 0, 0)
    which = kernels, batch, layout, bounds
    return LoweredBatch(*which, config, addresses, variables, first_invalid)


def evaluate_slots(context: StreamContext, lowered: LoweredBatch) -> None:
    """Launch the computation of all row-invariant subtrees."""
    batch, arguments = lowered.batch, np.zeros(1, dtype=SLOT_ARGUMENTS)
    sizes = (lowered.bounds, len(batch), batch.vectors)
    grid = fill_slot_arguments(arguments, lowered.addresses, lowered.layout, *sizes)
    kernel, threads = lowered.kernels.evaluate_slots, (*SLOT_THREADS, 1)
    context.launch(kernel, (*grid, 1), threads, [arguments[0]])


def launch_chunk(
    context: StreamContext,
    lowered: LoweredBatch,
    geometry: InterpreterGeometry,
    evaluation: Evaluation,
    jobs: Jobs,
    side: int,
) -> Staging:
    """Launch some jobs and the copies of their results; see `resident_data.run_chunks`."""
    variant = lowered.kernels.variant
    pitch = geometry.tiles * variant.tile * variant.dtype.itemsize
    partials = values = 0
    if evaluation.loss is not None:
        partials = context.buffer(f"partials {side}", jobs[1] * geometry.tiles * 8)
    if evaluation.values:
        values = context.buffer(f"values {side}", jobs[1] * pitch)
    addresses = lowered.addresses._replace(values=values, partials=partials)
    interpret(context, lowered, geometry, addresses, jobs)
    sums = staging = None
    if partials:
        sums = _sum_partials(context, lowered, geometry, addresses, jobs[1], side)
    context.mark(f"computed {side}")
    if values:
        rows = geometry.end_row - geometry.first_row
        memory = context.pinned(f"values {side}", jobs[1] * rows * variant.dtype.itemsize)
        staging = memory.view(variant.dtype).reshape(jobs[1], rows)
        skipped = geometry.first_row * variant.dtype.itemsize
        context.download_rows(staging, values + skipped, pitch)
    return sums, staging


def interpret(
    context: StreamContext,
    lowered: LoweredBatch,
    geometry: InterpreterGeometry,
    addresses: DeviceAddresses,
    jobs: Jobs,
) -> None:
    """Launch the interpreter: a block for each tile of rows and group of jobs."""
    arguments, config = np.zeros(1, dtype=INTERPRETER_ARGUMENTS), lowered.config
    groups, shared = fill_interpreter_arguments(
        *(arguments, geometry, addresses, lowered.layout, lowered.bounds, config),
        *(lowered.batch.vectors, jobs),
    )
    grid, threads = (geometry.tiles, groups, 1), (32 * config.warps, 1, 1)
    context.launch(lowered.kernels.interpret, grid, threads, [arguments[0]], shared)


def _sum_partials(
    context: StreamContext,
    lowered: LoweredBatch,
    geometry: InterpreterGeometry,
    addresses: DeviceAddresses,
    jobs: int,
    side: int,
) -> NDArray[np.float64]:
    """Launch the sums of each job's partial sums; return where they will arrive, [nodes, jobs]."""
    sums = context.pinned(f"sums {side}", 8 * geometry.nodes * jobs).view(np.float64)
    numbers = (addresses.partials, sums.ctypes.data, geometry.tiles, geometry.first_tile)
    arguments = [np.array(number, dtype=np.int64) for number in (*numbers, geometry.node_levels)]
    context.launch(lowered.kernels.sum_partials, (jobs, 1, 1), (SUM_THREADS, 1, 1), arguments)
    return sums.reshape(geometry.nodes, -1)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkResults:
    """Collects the results of chunks from staging memory for the outputs of an evaluation."""

    lowered: LoweredBatch
    outputs: Outputs
    spans: Sequence[Span]
    """Rows of the chunks, in turn."""
    length: int
    """Rows of a node of the tree of sums; a span is one, or several nodes of a shard."""
    sums: list[list[NDArray[np.float64]]]
    """Sums of the loss terms of some jobs in turn, [nodes, jobs], for each span."""

    def copy(self, number: int, jobs: Jobs, staging: Staging) -> None:
        """Copy the results of some jobs on the span with a number.

        Raises:
            ProgramError: for the first bad token.
        """
        self.lowered.check()
        (sums, values), outputs, batch = staging, self.outputs, self.lowered.batch
        if sums is not None:
            self.sums[number].append(sums.copy())
        if values is not None and outputs.values is not None:
            first, end = jobs[0], sum(jobs)
            start, stop = (row - self.spans[0][0] for row in self.spans[number])
            whole = outputs.values.reshape(len(batch) * batch.vectors, -1)
            whole[first:end, start:stop] = values
            if number == len(self.spans) - 1:
                outputs.ready(end // batch.vectors)

    def sum_up(self, layout: Layout) -> Steps[None]:
        """Fill in the losses, if they are wanted, once all chunks have been copied."""
        losses, shard, first = self.outputs.losses, self.outputs.shard, self.spans[0][0]
        nodes = None if losses is None else np.block(self.sums)
        length = self.length
        if shard is not None:
            length = node_rows(layout, shard.level)
            count = len(nodes_of((first, self.spans[-1][1]), length))
            mine = np.empty((count, 0))
            if nodes is not None:
                levels = levels_between(self.length, length)
                mine = parent_nodes(nodes, first // self.length, levels)
            nodes, first = (yield from shard.join(mine)), shard.rows[0]
        if losses is not None and nodes is not None:
            losses[...] = sum_nodes(nodes, first // length).reshape(losses.shape)
