"""Arguments and launch configuration of the interpreter's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.request import Evaluation, Loss
from warpfit_server.engine.cuda.interpreter import device_lowering
from warpfit_server.engine.cuda.interpreter.source import SCRATCH_LEVELS, Variant
from warpfit_server.engine.cuda.math.modes import max_token_rows
from warpfit_server.engine.cuda.runtime.batch_layout import BatchBounds, BatchLayout
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset
from warpfit_server.engine.native import numba_cache
from warpfit_server.row_blocks import levels_between, node_rows, nodes_of

#: The struct Arguments of interpreter.cu, field by field.
INTERPRETER_ARGUMENTS: Final = np.dtype(
    [
        *((name, np.uint64) for name in ("instructions", "programs", "order", "slots")),
        *((name, np.uint64) for name in ("variables", "target", "weights", "values", "partials")),
        ("slot_count", np.int64),
        ("stride", np.uint64),
        *((name, np.int32) for name in ("first_row", "end_row", "tiles", "jobs", "first_job")),
        *((name, np.int32) for name in ("jobs_per_block", "vectors", "levels", "absolute")),
    ],
    align=True,
)
#: The struct SlotArguments of interpreter.cu.
SLOT_ARGUMENTS: Final = np.dtype(
    [
        *((name, np.uint64) for name in ("codes", "values", "parameters", "programs")),
        *((name, np.uint64) for name in ("slots", "results")),
        ("slot_count", np.int64),
        *((name, np.int32) for name in ("count", "vectors")),
    ]
)
#: Shared memory of a block that every device grants without asking, less the job counter.
_COUNTER_BYTES: Final = 16
_SHARED_BYTES: Final = 48 * 1024 - _COUNTER_BYTES
#: Most blocks in the second dimension of a grid.
_MAX_GRID_Y: Final = 0xFFFF
#: Most launches of one evaluation in one command list.
MAX_LAUNCHES: Final = 64
#: Warps that a multiprocessor runs at a time.
_RESIDENT_WARPS: Final = 32
#: Threads of a block of ``sum_partials`` and of ``evaluate_slots``.
SUM_THREADS: Final = 128
SLOT_THREADS: Final = (32, 4)
_compiled = numba_cache.njit(nogil=True)


@dataclass(frozen=True, slots=True)
class InterpreterKernels:
    """The loaded kernels of one variant."""

    variant: Variant
    interpret: Any
    evaluate_slots: Any
    sum_partials: Any
    lowering: device_lowering.LoweringKernels
    flags: NDArray[np.uint8]
    """Flags of each operator, see `source.operator_flags`."""


class InterpreterGeometry(NamedTuple):
    """Rows of a data set, and how the device divides the work on them; integers."""

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

    @classmethod
    def of(
        cls,
        resident: ResidentDataset,
        evaluation: Evaluation,
        variant: Variant,
        max_warps: int,
        programs_per_warp: int,
        multiprocessors: int,
        level: int | None,
    ) -> InterpreterGeometry:
        """Describe the work; losses are summed up of each node of a level, or of all rows."""
        rows, loss = evaluation.row_range(resident.dataset.layout), evaluation.loss
        start, stop = rows
        length = None if level is None else node_rows(resident.dataset.layout, level)
        aligned = start // variant.tile * variant.tile
        itemsize = variant.dtype.itemsize
        return cls(
            variables=resident.address(0, aligned),
            target=0 if loss is None else resident.target_address(aligned),
            weights=0 if loss is None else resident.weights_address(aligned),
            stride=resident.stride * itemsize,
            first_row=start - aligned,
            end_row=stop - aligned,
            tiles=-(-(stop - aligned) // variant.tile),
            first_tile=aligned // variant.tile,
            node_levels=levels_between(variant.tile, length),
            nodes=1 if length is None else len(nodes_of(rows, length)),
            absolute=int(loss is Loss.MAE),
            level_bytes=variant.tile * itemsize,
            max_warps=max_warps,
            programs_per_warp=programs_per_warp,
            resident_warps=_RESIDENT_WARPS * multiprocessors,
            max_token_rows=max_interpreted_token_rows(variant, multiprocessors),
            lowering_blocks=device_lowering.BLOCKS_A_MULTIPROCESSOR * multiprocessors,
        )


class DeviceAddresses(NamedTuple):
    """Device memory of one evaluation; integers."""

    batch: int
    """Address of the batch, which is laid out by `BatchLayout`."""
    slots: int
    """Address of the values of row-invariant subtrees."""
    values: int
    """Address of the values; 0 if they are not requested."""
    partials: int
    """Address of the partial sums of losses; 0 if they are not requested."""


def max_interpreted_token_rows(variant: Variant, multiprocessors: int) -> int:
    """Return the most token-rows of a launch; the interpreter runs at half the compiled rate."""
    return max_token_rows(variant.mode, multiprocessors) // 2


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


@_compiled  # type: ignore[untyped-decorator]
def configure_launch(
    geometry: InterpreterGeometry, bounds: BatchBounds, max_jobs: int, programs: int, vectors: int
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
    warps = max(1, min(geometry.max_warps, _SHARED_BYTES // max(1, levels * geometry.level_bytes)))
    levels = max(levels, -(-most // warps))
    if warps * levels * geometry.level_bytes > _SHARED_BYTES:
        warps, levels = 1, most
    return LaunchConfig(jobs, group, warps, levels, scratch)


@_compiled  # type: ignore[untyped-decorator]
def jobs_per_launch(geometry: InterpreterGeometry, tokens: int, jobs: int, vectors: int) -> int:
    """Return the jobs of one launch, so that it does not delay other evaluations for long.

    They are whole programs, of ``vectors`` jobs each, or part of one; the tokens are of all jobs.
    """
    token_rows = tokens * (geometry.end_row - geometry.first_row)
    launches = min(max(1, token_rows // geometry.max_token_rows), jobs, MAX_LAUNCHES)
    share = -(-jobs // launches)
    return share if share < vectors else -(-share // vectors) * vectors


@_compiled  # type: ignore[untyped-decorator]
def fill_slot_arguments(
    arguments: NDArray[np.void],
    addresses: DeviceAddresses,
    layout: BatchLayout,
    bounds: BatchBounds,
    programs: int,
    vectors: int,
) -> tuple[int, int]:
    """Fill in `SLOT_ARGUMENTS` [1] for ``evaluate_slots``; return its grid."""
    one = arguments[0]
    one.codes = addresses.batch + layout.codes
    one.values = addresses.batch + layout.values
    one.parameters = addresses.batch + layout.parameters
    one.programs = addresses.batch + layout.programs
    one.slots = addresses.batch + layout.slots
    one.results = addresses.slots
    one.slot_count = bounds.slots
    one.count = programs
    one.vectors = vectors
    return -(-programs // SLOT_THREADS[1]), min(-(-vectors // SLOT_THREADS[0]), _MAX_GRID_Y)


@_compiled  # type: ignore[untyped-decorator]
def fill_interpreter_arguments(
    arguments: NDArray[np.void],
    geometry: InterpreterGeometry,
    addresses: DeviceAddresses,
    layout: BatchLayout,
    bounds: BatchBounds,
    config: LaunchConfig,
    vectors: int,
    jobs: tuple[int, int],
) -> tuple[int, int]:
    """Fill in `INTERPRETER_ARGUMENTS` [1]; return groups of jobs and bytes of shared memory.

    A block runs one group of jobs on one tile. ``jobs`` are the first job and their number.
    """
    warps, levels = config.warps, config.levels
    rounds = max(1, jobs[1] * geometry.tiles // geometry.resident_warps)
    rounds = min(geometry.programs_per_warp, rounds)
    group = max(warps * rounds, -(-jobs[1] // _MAX_GRID_Y))
    one = arguments[0]
    one.instructions = addresses.batch + layout.instructions
    one.programs = addresses.batch + layout.programs
    one.order = addresses.batch + layout.order
    one.slots = addresses.slots
    one.variables = geometry.variables
    one.target = geometry.target
    one.weights = geometry.weights
    one.values = addresses.values
    one.partials = addresses.partials
    one.slot_count = bounds.slots
    one.stride = geometry.stride
    one.first_row = geometry.first_row
    one.end_row = geometry.end_row
    one.tiles = geometry.tiles
    one.first_job, one.jobs = jobs
    one.jobs_per_block = group
    one.vectors = vectors
    one.levels = levels
    one.absolute = geometry.absolute
    return -(-jobs[1] // group), _COUNTER_BYTES + warps * levels * geometry.level_bytes
