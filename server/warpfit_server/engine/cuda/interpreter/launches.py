"""Launches of the interpreter by compiled code, from records of integers.

A batch is packed, uploaded and lowered, its row-invariant subtrees are computed, the interpreter
runs jobs on tiles of rows, and each job's sums over tiles are added up.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch, Program
from warpfit.request import Loss
from warpfit_server.engine.cuda.interpreter.device_lowering import (
    launch_lowering,
    launch_order,
)
from warpfit_server.engine.cuda.interpreter.source import SCRATCH_LEVELS, TEMPLATE, Variant
from warpfit_server.engine.cuda.runtime.batch_layout import (
    BatchBounds,
    BatchLayout,
    lay_out,
    max_slots,
    pack,
    places_of,
)
from warpfit_server.engine.cuda.runtime.driver_calls import (
    argument_struct,
    as_record,
    launch,
    record,
    upload,
)
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset, Span
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import inlined
from warpfit_server.row_blocks import levels_between, node_rows, nodes_of

INTERPRETER_ARGUMENTS: Final = argument_struct(TEMPLATE, "Arguments")
SLOT_ARGUMENTS: Final = argument_struct(TEMPLATE, "SlotArguments")
#: Threads of a block of ``sum_partials`` and of ``evaluate_slots``.
_SUM_THREADS: Final = 128
_SLOT_THREADS: Final = (32, 4)
#: Most programs that a warp runs one after the other.
_PROGRAMS_A_WARP: Final = 2
#: Most blocks in the second dimension of a grid.
_MAX_GRID_Y: Final = 0xFFFF
#: Shared memory of a block that every device grants without asking, less the job counter.
_COUNTER_BYTES: Final = 16
_SHARED_BYTES: Final = 48 * 1024 - _COUNTER_BYTES
_compiled = numba_cache.njit(nogil=True)


class LaunchLimits(NamedTuple):
    """Kernels of one variant and limits of their launches on a device, in integers."""

    interpret: int
    """The driver's handle, as the following ones."""
    evaluate_slots: int
    sum_partials: int
    lower_programs: int
    order_programs: int
    level_bytes: int
    """Shared memory of one stack level of a warp."""
    max_warps: int
    """Most warps of a block."""
    resident_warps: int
    """Warps that the device runs at a time."""


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
        rows: Span,
        loss: Loss | None,
        variant: Variant,
        level: int | None = None,
    ) -> RowTiles:
        """Cut the rows; losses are summed up of each node of a level, or of all rows."""
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

    group: int
    """Programs that are sorted together: all of a launch, or one if a launch has part of one."""
    warps: int
    """Warps of a block."""
    levels: int
    """Stack levels of each warp, scratch levels included."""
    scratch: int
    """Scratch levels."""


@_compiled  # type: ignore[untyped-decorator]
def configure_launch(
    limits: LaunchLimits, bounds: BatchBounds, max_jobs: int, programs: int, vectors: int
) -> LaunchConfig:
    """Choose the configuration of a batch's launches, of at most so many jobs.

    The shared memory of a block is large enough for one warp to run any program. Where several
    warps share it, each has the levels that most programs need; the programs that need more are
    sorted to the front and run by one warp, which has all of the block's levels.
    """
    scratch = SCRATCH_LEVELS if bounds.costly else 0
    most, group = bounds.levels + scratch, 1
    levels = most
    if max_jobs >= vectors:
        group = min(max_jobs // vectors, programs)
        levels = min(bounds.typical_levels, bounds.levels) + scratch
    warps = max(1, min(limits.max_warps, _SHARED_BYTES // max(1, levels * limits.level_bytes)))
    levels = max(levels, -(-most // warps))
    if warps * levels * limits.level_bytes > _SHARED_BYTES:
        warps, levels = 1, most
    return LaunchConfig(group, warps, levels, scratch)


class BatchNumbers(NamedTuple):
    """A batch on the device as its launches take it: addresses, counts, configuration; integers."""

    stream: int
    """The driver's handle."""
    address: int
    """Address of the batch in its `BatchLayout`."""
    slots: int
    """Address of the values of row-invariant subtrees."""
    first_invalid: int
    """Address of page-locked memory for the first invalid program of each group."""
    tokens: int
    programs: int
    parameters: int
    vectors: int
    variables: int
    """Variables of the data set."""
    longest: int = 0
    """Tokens of the longest program; this and the following are noted by `prepare`."""
    group: int = 0
    """As in `LaunchConfig`; likewise the following."""
    warps: int = 0
    levels: int = 0
    scratch: int = 0


@_compiled  # type: ignore[untyped-decorator]
def prepare(
    places: NDArray[np.int64],
    flags: NDArray[np.uint8],
    memory: NDArray[np.uint8],
    kernels: Any,
    numbers: Any,
    max_jobs: int,
) -> None:
    """Pack a batch for the upload, and note the configuration of its launches.

    Args:
        places: of the batch, from `places_of`.
        flags: of the kernels' operators.
        memory: page-locked memory for what is uploaded.
        kernels: record of `LaunchLimits`.
        numbers: record of `BatchNumbers`.
        max_jobs: most jobs of a launch.
    """
    bounds, batch = pack(places, flags, memory), numbers[0]
    config = configure_launch(kernels[0], bounds, max_jobs, batch.programs, batch.vectors)
    batch.longest = bounds.longest
    batch.group, batch.warps = config.group, config.warps
    batch.levels, batch.scratch = config.levels, config.scratch


@_compiled  # type: ignore[untyped-decorator]
def lower(
    driver: NDArray[np.int64], memory: NDArray[np.uint8], kernels: Any, numbers: Any, started: int
) -> int:
    """Upload a packed batch, lower it, and compute its row-invariant subtrees.

    ``started`` is the event that is recorded behind the upload. Returns the driver's first status
    but 0, else 0.
    """
    batch, kernel = numbers[0], kernels[0]
    layout = lay_out(batch.tokens, batch.programs, batch.parameters)
    status = upload(driver, batch.stream, batch.address, memory, layout.uploaded)
    status = status or record(driver, batch.stream, started)
    status = status or launch_lowering(driver, kernel, batch, layout)
    status = status or launch_order(driver, kernel, batch, layout)
    return status or _launch_slots(driver, kernel, batch, layout)


@inlined
def _launch_slots(driver: Any, kernels: Any, batch: Any, layout: BatchLayout) -> int:
    arguments = np.zeros(1, SLOT_ARGUMENTS)
    one = arguments[0]
    one.codes = batch.address + layout.codes
    one.values = batch.address + layout.values
    one.parameters = batch.address + layout.parameters
    one.programs = batch.address + layout.programs
    one.slots = batch.address + layout.slots
    one.results = batch.slots
    one.slot_count = max_slots(batch.tokens, batch.programs)
    one.count = batch.programs
    one.vectors = batch.vectors
    width, height = _SLOT_THREADS
    grid = -(-batch.programs // height), min(-(-batch.vectors // width), _MAX_GRID_Y)
    kernel = kernels.evaluate_slots
    return launch(driver, batch.stream, kernel, grid, (width, height), 0, arguments)


@_compiled  # type: ignore[untyped-decorator]
def run_jobs(
    driver: NDArray[np.int64],
    kernels: Any,
    numbers: Any,
    rows: Any,
    first: int,
    count: int,
    partials: int,
    sums: int,
    values: int,
    computed: int,
) -> int:
    """Interpret some jobs, a block for each tile of rows and group of jobs, and add up their sums.

    Args:
        driver: functions.
        kernels: record of `LaunchLimits`.
        numbers: record of `BatchNumbers`.
        rows: record of `RowTiles`.
        first: first job.
        count: number of jobs.
        partials: address for the sums of each tile; 0 if no losses are wanted.
        sums: address for the sums of nodes, in page-locked memory [nodes, jobs].
        values: address for the values; 0 if they are not wanted.
        computed: event that is recorded behind the kernels.

    Returns:
        The driver's first status but 0, else 0.
    """
    batch, kernel, tiles = numbers[0], kernels[0], rows[0]
    status = launch_interpreter(driver, kernel, batch, tiles, first, count, partials, values)
    if partials != 0 and status == 0:
        arguments = np.array(
            (partials, sums, tiles.tiles, tiles.first_tile, tiles.node_levels), np.int64
        )
        grid, threads = (count, 1), (_SUM_THREADS, 1)
        status = launch(driver, batch.stream, kernel.sum_partials, grid, threads, 0, arguments)
    return status or record(driver, batch.stream, computed)


@inlined
def launch_interpreter(
    driver: Any,
    kernels: Any,
    batch: Any,
    tiles: Any,
    first: int,
    count: int,
    partials: int,
    values: int,
) -> int:
    """Launch the interpreter for some jobs, as `run_jobs`; return the driver's status."""
    layout = lay_out(batch.tokens, batch.programs, batch.parameters)
    rounds = max(1, count * tiles.tiles // kernels.resident_warps)
    rounds = min(_PROGRAMS_A_WARP, rounds)
    group = max(batch.warps * rounds, -(-count // _MAX_GRID_Y))
    arguments = np.zeros(1, INTERPRETER_ARGUMENTS)
    one = arguments[0]
    one.instructions = batch.address + layout.instructions
    one.programs = batch.address + layout.programs
    one.order = batch.address + layout.order
    one.slots = batch.slots
    one.variables = tiles.variables
    one.target = tiles.target
    one.weights = tiles.weights
    one.values = values
    one.partials = partials
    one.slot_count = max_slots(batch.tokens, batch.programs)
    one.stride = tiles.stride
    one.first_row = tiles.first_row
    one.end_row = tiles.end_row
    one.tiles = tiles.tiles
    one.jobs = count
    one.first_job = first
    one.jobs_per_block = group
    one.vectors = batch.vectors
    one.levels = batch.levels
    one.absolute = tiles.absolute
    grid, threads = (tiles.tiles, -(-count // group)), (32 * batch.warps, 1)
    shared = _COUNTER_BYTES + batch.warps * batch.levels * kernels.level_bytes
    kernel = kernels.interpret
    return launch(driver, batch.stream, kernel, grid, threads, shared, arguments)


def load() -> None:
    """Load the compiled functions, or compile them, for the arrays of requests."""
    batch = Batch.of([Program.variable(0)])
    layout = BatchLayout.of(batch)
    memory = np.zeros(max(layout.uploaded, 256), dtype=np.uint8)
    limits = as_record(LaunchLimits(*[1] * len(LaunchLimits._fields)))
    numbers = as_record(BatchNumbers(0, 0, 0, 0, 1, 1, 0, 1, 1))
    prepare(places_of(batch), memory, memory, limits, numbers, 1)
    driver, tiles = np.zeros(1, dtype=np.int64), as_record(RowTiles(*[1] * len(RowTiles._fields)))
    # They are compiled and not called: there may be no device.
    for function, given in (
        (lower, (driver, memory, limits, numbers, 0)),
        (run_jobs, (driver, limits, numbers, tiles, *[0] * 6)),
    ):
        function.compile(tuple(map(numba.typeof, given)))
