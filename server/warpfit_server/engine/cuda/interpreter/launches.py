"""Launches of the interpreter, and the copies of their results to the host.

A batch is uploaded and lowered, its row-invariant subtrees are computed, the interpreter runs jobs
on tiles of rows, and each job's sums over tiles are added up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch, Program
from warpfit.request import Evaluation, Loss, Timings
from warpfit_server.engine.cuda.interpreter.device_lowering import (
    ALL_VALID,
    LoweringKernels,
    add_lowering,
    add_order,
    check_length,
    raise_invalid_program,
)
from warpfit_server.engine.cuda.interpreter.source import SCRATCH_LEVELS, TEMPLATE, Variant
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
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.interface import Steps, aside
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
#: Shared memory of a block that every device grants without asking, less the job counter.
_COUNTER_BYTES: Final = 16
_SHARED_BYTES: Final = 48 * 1024 - _COUNTER_BYTES


def load() -> None:
    """Load the compiled functions, or compile them, for the arrays of requests."""
    batch = Batch.of([Program.variable(0)])
    layout = BatchLayout.of(batch)
    memory = np.zeros(max(layout.uploaded, 256), dtype=np.uint8)
    pack(TokenArrays.of(batch), layout, memory, memory)
    CommandList(np.zeros(0, dtype=np.int64), 0).execute()


class LaunchLimits(NamedTuple):
    """Limits of the launches of one variant on a device, in integers."""

    level_bytes: int
    """Shared memory of one stack level of a warp."""
    max_warps: int
    """Most warps of a block."""
    programs_per_warp: int
    """Most programs that a warp runs one after the other."""
    resident_warps: int
    """Warps that the device runs at a time."""
    max_token_rows: int
    """Most token-rows of a launch that has more than one job."""
    lowering_blocks: int
    """Blocks among which the lowering of a small batch is divided."""


@dataclass(frozen=True, slots=True)
class InterpreterKernels:
    """The loaded kernels of one variant."""

    variant: Variant
    limits: LaunchLimits
    interpret: Any
    evaluate_slots: Any
    sum_partials: Any
    lowering: LoweringKernels
    flags: NDArray[np.uint8]
    """Flags of each operator, see `source.operator_flags`."""


class RowTiles(NamedTuple):
    """Rows of a data set, cut into tiles, and where their columns lie; integers."""

    variables: int
    """Address of the first variable, at the first row of the first tile."""
    target: int
    """Likewise of the target; 0: no losses."""
    weights: int
    """Likewise of the weights; 0: all are 1."""
    stride: int
    """Bytes between variables."""
    first_row: int
    """Rows of the first tile to leave out."""
    end_row: int
    """End of the rows, counted from the first row of the first tile."""
    tiles: int
    first_tile: int
    """Number of the first tile, counted from the data set's first row."""
    node_levels: int
    """Levels of the tree of sums above tiles to add up."""
    nodes: int
    """Nodes that have some of the rows at the last of them."""
    absolute: int
    """1 for losses of |f - y|, 0 for (f - y)^2."""

    @classmethod
    def of(
        cls,
        resident: ResidentDataset,
        evaluation: Evaluation,
        variant: Variant,
        level: int | None = None,
    ) -> RowTiles:
        """Cut the rows; losses are summed up of each node of a level, or of all rows."""
        rows, loss = evaluation.row_range(resident.dataset.layout), evaluation.loss
        length = None if level is None else node_rows(resident.dataset.layout, level)
        first_tile = rows[0] // variant.tile
        aligned = first_tile * variant.tile
        return cls(
            variables=resident.address(0, aligned),
            target=0 if loss is None else resident.target_address(aligned),
            weights=0 if loss is None else resident.weights_address(aligned),
            stride=resident.stride * variant.dtype.itemsize,
            first_row=rows[0] - aligned,
            end_row=rows[1] - aligned,
            tiles=-(-(rows[1] - aligned) // variant.tile),
            first_tile=first_tile,
            node_levels=levels_between(variant.tile, length),
            nodes=1 if length is None else len(nodes_of(rows, length)),
            absolute=int(loss is Loss.MAE),
        )


class LaunchConfig(NamedTuple):
    """Division of jobs and shared memory among blocks and warps, in integers."""

    jobs: int
    """Jobs of each launch."""
    group: int
    """Programs that are sorted together: all of a launch, or one if a launch has part of one."""
    warps: int
    """Warps of a block."""
    levels: int
    """Stack levels of each warp, scratch levels included."""
    scratch: int
    """Scratch levels."""


def configure_launch(
    limits: LaunchLimits, bounds: BatchBounds, max_jobs: int, programs: int, vectors: int
) -> LaunchConfig:
    """Choose the configuration of a batch's launches, of at most so many jobs.

    The shared memory of a block is large enough for one warp to run any program. Where several
    warps share it, each has the levels that most programs need; the programs that need more are
    sorted to the front and run by one warp, which has all of the block's levels.
    """
    scratch = SCRATCH_LEVELS if bounds.costly else 0
    most, group, jobs = bounds.levels + scratch, 1, max_jobs
    levels = most
    if jobs >= vectors:
        group = min(jobs // vectors, programs)
        jobs = group * vectors
        levels = min(bounds.typical_levels, bounds.levels) + scratch
    warps = max(1, min(limits.max_warps, _SHARED_BYTES // max(1, levels * limits.level_bytes)))
    levels = max(levels, -(-most // warps))
    if warps * levels * limits.level_bytes > _SHARED_BYTES:
        warps, levels = 1, most
    return LaunchConfig(jobs, group, warps, levels, scratch)


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
    """First invalid program of each group, or `ALL_VALID`; known once the batch is lowered."""

    @classmethod
    def begin(
        cls,
        context: StreamContext,
        kernels: InterpreterKernels,
        batch: Batch,
        variables: int,
        max_jobs: int,
    ) -> Steps[tuple[BatchLaunch, CommandList]]:
        """Return a batch, of which a launch has so many jobs, and the commands that lower it.

        Raises:
            ResourceExhaustedError: if a program is too long, or the device has no room.
        """
        layout = BatchLayout.of(batch)
        staging = context.pinned("batch", layout.uploaded)
        packed = TokenArrays.of(batch), layout, staging, kernels.flags
        bounds = yield from aside(layout.uploaded, partial(pack, *packed))
        check_length(bounds.longest)
        config = configure_launch(kernels.limits, bounds, max_jobs, len(batch), batch.vectors)
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
        add_lowering(*where, variables, bounds.longest, kernels.limits.lowering_blocks)
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
        tiles: RowTiles,
        jobs: Jobs,
        partials: int,
        values: int = 0,
    ) -> None:
        """Add the interpretation of some jobs: a block for each tile of rows and group of jobs.

        ``partials`` and ``values`` are where the first job's go; 0 for what is not wanted.
        """
        config, layout, limits = self.config, self.layout, self.kernels.limits
        first, count = jobs
        rounds = max(1, count * tiles.tiles // limits.resident_warps)
        rounds = min(limits.programs_per_warp, rounds)
        group = max(config.warps * rounds, -(-count // _MAX_GRID_Y))
        arguments = INTERPRETER_ARGUMENTS.pack(
            instructions=self.address + layout.instructions,
            programs=self.address + layout.programs,
            order=self.address + layout.order,
            slots=self.slots,
            variables=tiles.variables,
            target=tiles.target,
            weights=tiles.weights,
            values=values,
            partials=partials,
            slot_count=self.bounds.slots,
            stride=tiles.stride,
            first_row=tiles.first_row,
            end_row=tiles.end_row,
            tiles=tiles.tiles,
            jobs=count,
            first_job=first,
            jobs_per_block=group,
            vectors=self.batch.vectors,
            levels=config.levels,
            absolute=tiles.absolute,
        )
        grid, threads = (tiles.tiles, -(-count // group), 1), (32 * config.warps, 1, 1)
        shared = _COUNTER_BYTES + config.warps * config.levels * limits.level_bytes
        commands.launch(self.kernels.interpret, grid, threads, arguments, shared=shared)

    def add_sums(
        self,
        commands: CommandList,
        tiles: RowTiles,
        jobs: int,
        partials: int,
        sums: NDArray[np.float64],
    ) -> None:
        """Add the sums of jobs' partial sums, to page-locked memory [nodes, jobs]."""
        numbers = partials, address_of(sums), tiles.tiles, tiles.first_tile
        threads = (_SUM_THREADS, 1, 1)
        kernel, levels = self.kernels.sum_partials, tiles.node_levels
        commands.launch(kernel, (jobs, 1, 1), threads, *numbers, levels)

    def launch_chunk(
        self, tiles: RowTiles, evaluation: Evaluation, jobs: Jobs, side: int
    ) -> Staging:
        """Launch some jobs and the copies of their results; see `resident_data.run_chunks`."""
        context, variant, count = self.context, self.kernels.variant, jobs[1]
        itemsize = variant.dtype.itemsize
        pitch = tiles.tiles * variant.tile * itemsize
        partials = values = 0
        sums = staging = None
        if evaluation.loss is not None:
            partials = context.buffer(f"partials {side}", count * tiles.tiles * 8)
            sums = context.pinned(f"sums {side}", 8 * tiles.nodes * count).view(np.float64)
            sums = sums.reshape(tiles.nodes, -1)
        if evaluation.values:
            values = context.buffer(f"values {side}", count * pitch)
        commands = self.new_commands()
        self.add_jobs(commands, tiles, jobs, partials, values)
        if sums is not None:
            self.add_sums(commands, tiles, count, partials, sums)
        self.execute(commands)
        context.mark(f"computed {side}")
        if values:
            rows = tiles.end_row - tiles.first_row
            memory = context.pinned(f"values {side}", count * rows * itemsize)
            staging = memory.view(variant.dtype).reshape(count, rows)
            context.download_rows(staging, values + tiles.first_row * itemsize, pitch)
        return sums, staging

    def run(
        self,
        commands: CommandList,
        tiles: RowTiles,
        losses: NDArray[np.float64],
        started: int,
    ) -> Steps[Timings]:
        """Launch all jobs on all rows after the lowering, and fill in the sums of row losses.

        ``started`` is ``time.perf_counter_ns()`` of the evaluation's beginning.

        Raises:
            ProgramError: for the first bad token.
        """
        context, jobs = self.context, losses.size
        partials = context.buffer("partials", 8 * jobs * tiles.tiles)
        sums = context.pinned("sums", 8 * jobs).view(np.float64)
        self.add_jobs(commands, tiles, (0, jobs), partials)
        self.add_sums(commands, tiles, jobs, partials, sums)
        commands.record(context.event("computed"))
        self.execute(commands)
        launched = time.perf_counter_ns()
        yield from context.reach("computed")
        self.check()
        losses.reshape(-1)[:] = sums
        compute = context.nanoseconds("started", "computed")
        copy_out = max(0, time.perf_counter_ns() - launched - compute)
        return Timings(copy_in=launched - started, compute=compute, copy_out=copy_out)
