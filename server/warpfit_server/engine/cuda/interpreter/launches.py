"""Launches of the interpreter, and the copies of their results to the host.

A batch is uploaded and lowered, its row-invariant subtrees are computed, the interpreter runs jobs
on tiles of rows, and each job's sums over tiles are added up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.ir import Batch, Program
from warpfit.request import Evaluation, Timings
from warpfit_server.engine.cuda.interpreter.device_lowering import (
    ALL_VALID,
    add_lowering,
    add_order,
    check_length,
    raise_invalid_program,
)
from warpfit_server.engine.cuda.interpreter.launch_config import (
    COUNTER_BYTES,
    InterpreterGeometry,
    InterpreterKernels,
    LaunchConfig,
    configure_launch,
)
from warpfit_server.engine.cuda.interpreter.source import TEMPLATE
from warpfit_server.engine.cuda.runtime.batch_layout import (
    BatchBounds,
    BatchLayout,
    TokenArrays,
    pack,
)
from warpfit_server.engine.cuda.runtime.command_list import (
    ArgumentStruct,
    CommandList,
    address_of,
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
INTERPRETER_ARGUMENTS: Final = ArgumentStruct(TEMPLATE, "Arguments")
SLOT_ARGUMENTS: Final = ArgumentStruct(TEMPLATE, "SlotArguments")
#: Threads of a block of ``sum_partials`` and of ``evaluate_slots``.
_SUM_THREADS: Final = 128
_SLOT_THREADS: Final = (32, 4)
#: Most blocks in the second dimension of a grid.
_MAX_GRID_Y: Final = 0xFFFF


def load() -> None:
    """Load the compiled functions, or compile them, for the arrays of requests."""
    batch = Batch.of([Program.variable(0)])
    layout = BatchLayout.of(batch)
    memory = np.zeros(max(layout.uploaded, 256), dtype=np.uint8)
    pack(TokenArrays.of(batch), layout, memory, memory)
    CommandList(np.zeros(0, dtype=np.int64), 0).execute()


@dataclass(slots=True, eq=False)
class BatchLaunch:
    """A batch on its way through the device, and what all its launches share."""

    context: StreamContext
    kernels: InterpreterKernels
    batch: Batch
    layout: BatchLayout
    bounds: BatchBounds
    config: LaunchConfig
    address: int
    """Address of the batch in its layout."""
    slots: int
    """Address of the values of row-invariant subtrees."""
    variables: int
    """Variables of the data set."""
    first_invalid: NDArray[np.uint32]
    """What `add_order` reports, valid once the stream has passed the lowering."""

    @classmethod
    def begin(
        cls,
        context: StreamContext,
        kernels: InterpreterKernels,
        geometry: InterpreterGeometry,
        batch: Batch,
        variables: int,
        max_jobs: int,
    ) -> tuple[BatchLaunch, CommandList]:
        """Return a batch, of which a launch has so many jobs, and the commands that lower it.

        Raises:
            ResourceExhaustedError: if a program is too long, or the device has no room.
        """
        layout = BatchLayout.of(batch)
        staging = context.pinned("batch", layout.uploaded)
        bounds = pack(TokenArrays.of(batch), layout, staging, kernels.flags)
        check_length(bounds.longest)
        config = configure_launch(geometry, bounds, max_jobs, len(batch), batch.vectors)
        address = context.buffer("batch", layout.end)
        size = bounds.slots * batch.vectors * kernels.variant.dtype.itemsize
        slots = context.buffer("slots", max(1, size))
        groups = -(-len(batch) // config.group)
        first_invalid = context.pinned("first invalid", 4 * groups).view(np.uint32)
        shared = context, kernels, batch, layout, bounds, config
        found = cls(*shared, address, slots, variables, first_invalid)
        commands = found.new_commands()
        commands.upload(address, staging)
        commands.record(context.event("started"))
        where = commands, kernels.lowering, batch, layout, address
        add_lowering(*where, variables, bounds.longest, geometry.lowering_blocks)
        add_order(*where, config.group, config.levels - config.scratch, first_invalid)
        found.add_slots(commands)
        return found, commands

    def new_commands(self) -> CommandList:
        """Return an empty list of commands for the stream."""
        return CommandList(self.context.functions, self.context.handle)

    def execute(self, commands: CommandList) -> None:
        """Make calls of the driver.

        Raises:
            CUDADriverError: if the device reports an error.
        """
        self.context.check_executed(commands.execute())

    def check(self) -> None:
        """Check that all programs could be lowered, once the stream has passed that.

        Raises:
            ProgramError: for the first bad token.
            ResourceExhaustedError: if a variable's index is too large to encode.
        """
        program = int(self.first_invalid.min())
        if program != ALL_VALID:
            raise_invalid_program(self.batch, program, self.variables)

    def add_slots(self, commands: CommandList) -> None:
        """Add the computation of all row-invariant subtrees."""
        programs, vectors, layout = len(self.batch), self.batch.vectors, self.layout
        arguments = SLOT_ARGUMENTS.pack(
            codes=self.address + layout.codes,
            values=self.address + layout.values,
            parameters=self.address + layout.parameters,
            programs=self.address + layout.programs,
            slots=self.address + layout.slots,
            results=self.slots,
            slot_count=self.bounds.slots,
            count=programs,
            vectors=vectors,
        )
        width, height = _SLOT_THREADS
        grid = -(-programs // height), min(-(-vectors // width), _MAX_GRID_Y), 1
        commands.launch(self.kernels.evaluate_slots, grid, (width, height, 1), arguments)

    def add_jobs(
        self,
        commands: CommandList,
        geometry: InterpreterGeometry,
        jobs: Jobs,
        partials: int,
        values: int = 0,
    ) -> None:
        """Add the interpretation of some jobs: a block for each tile of rows and group of jobs.

        ``partials`` and ``values`` are where the first job's go; 0 for what is not wanted.
        """
        config, layout, (first, count) = self.config, self.layout, jobs
        rounds = max(1, count * geometry.tiles // geometry.resident_warps)
        rounds = min(geometry.programs_per_warp, rounds)
        group = max(config.warps * rounds, -(-count // _MAX_GRID_Y))
        arguments = INTERPRETER_ARGUMENTS.pack(
            instructions=self.address + layout.instructions,
            programs=self.address + layout.programs,
            order=self.address + layout.order,
            slots=self.slots,
            variables=geometry.variables,
            target=geometry.target,
            weights=geometry.weights,
            values=values,
            partials=partials,
            slot_count=self.bounds.slots,
            stride=geometry.stride,
            first_row=geometry.first_row,
            end_row=geometry.end_row,
            tiles=geometry.tiles,
            jobs=count,
            first_job=first,
            jobs_per_block=group,
            vectors=self.batch.vectors,
            levels=config.levels,
            absolute=geometry.absolute,
        )
        grid, threads = (geometry.tiles, -(-count // group), 1), (32 * config.warps, 1, 1)
        shared = COUNTER_BYTES + config.warps * config.levels * geometry.level_bytes
        commands.launch(self.kernels.interpret, grid, threads, arguments, shared=shared)

    def add_sums(
        self,
        commands: CommandList,
        geometry: InterpreterGeometry,
        jobs: int,
        partials: int,
        sums: NDArray[np.float64],
    ) -> None:
        """Add the sums of jobs' partial sums, to page-locked memory [nodes, jobs]."""
        numbers = partials, address_of(sums), geometry.tiles, geometry.first_tile
        threads = (_SUM_THREADS, 1, 1)
        kernel, levels = self.kernels.sum_partials, geometry.node_levels
        commands.launch(kernel, (jobs, 1, 1), threads, *numbers, levels)

    def launch_chunk(
        self, geometry: InterpreterGeometry, evaluation: Evaluation, jobs: Jobs, side: int
    ) -> Staging:
        """Launch some jobs and the copies of their results; see `resident_data.run_chunks`."""
        context, variant, count = self.context, self.kernels.variant, jobs[1]
        itemsize = variant.dtype.itemsize
        pitch = geometry.tiles * variant.tile * itemsize
        partials = values = 0
        sums = staging = None
        if evaluation.loss is not None:
            partials = context.buffer(f"partials {side}", count * geometry.tiles * 8)
            sums = context.pinned(f"sums {side}", 8 * geometry.nodes * count).view(np.float64)
            sums = sums.reshape(geometry.nodes, -1)
        if evaluation.values:
            values = context.buffer(f"values {side}", count * pitch)
        commands = self.new_commands()
        self.add_jobs(commands, geometry, jobs, partials, values)
        if sums is not None:
            self.add_sums(commands, geometry, count, partials, sums)
        self.execute(commands)
        context.mark(f"computed {side}")
        if values:
            rows = geometry.end_row - geometry.first_row
            memory = context.pinned(f"values {side}", count * rows * itemsize)
            staging = memory.view(variant.dtype).reshape(count, rows)
            context.download_rows(staging, values + geometry.first_row * itemsize, pitch)
        return sums, staging

    def run(
        self,
        commands: CommandList,
        geometry: InterpreterGeometry,
        losses: NDArray[np.float64],
        started: int,
    ) -> Steps[Timings]:
        """Launch all jobs on all rows at once, after the lowering; fill in sums of row losses.

        ``started`` is ``time.perf_counter_ns()`` of the evaluation's beginning.

        Raises:
            ProgramError: for the first bad token.
        """
        context, jobs = self.context, losses.size
        partials = context.buffer("partials", 8 * jobs * geometry.tiles)
        sums = context.pinned("sums", 8 * jobs).view(np.float64)
        for first in range(0, jobs, self.config.jobs):
            part = first, min(self.config.jobs, jobs - first)
            self.add_jobs(commands, geometry, part, partials + 8 * first * geometry.tiles)
        self.add_sums(commands, geometry, jobs, partials, sums)
        commands.record(context.event("computed"))
        self.execute(commands)
        launched = time.perf_counter_ns()
        yield from context.reach("computed")
        self.check()
        losses.reshape(-1)[:] = sums
        compute = context.nanoseconds("started", "computed")
        copy_out = max(0, time.perf_counter_ns() - launched - compute)
        return Timings(copy_in=launched - started, compute=compute, copy_out=copy_out)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkResults:
    """Collects the results of chunks from staging memory for the outputs of an evaluation."""

    launch: BatchLaunch
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
        self.launch.check()
        (sums, values), outputs, batch = staging, self.outputs, self.launch.batch
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
