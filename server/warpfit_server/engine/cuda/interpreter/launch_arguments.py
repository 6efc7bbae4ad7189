"""What a launch of the interpreter's kernels is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.request import Loss
from warpfit_server.engine.cuda.interpreter.lowering import BLOCKS_A_MULTIPROCESSOR, LoweringKernels
from warpfit_server.engine.cuda.interpreter.source import SCRATCH_LEVELS, Variant
from warpfit_server.engine.cuda.jit.device_library import Mode
from warpfit_server.engine.cuda.jit.grid_layout import token_rows_at_once
from warpfit_server.engine.cuda.runtime.batch_layout import Extent, Parts
from warpfit_server.engine.cuda.runtime.resident_data import ROW_MULTIPLE, ResidentDataset
from warpfit_server.engine.native import numba_cache

#: Field by field the structs of interpreter.cu.
ARGUMENTS: Final = np.dtype(
    [
        *((name, np.uint64) for name in ("instructions", "programs", "order", "slots")),
        *((name, np.uint64) for name in ("variables", "target", "weights", "values", "partials")),
        ("slot_count", np.int64),
        ("stride", np.uint32),
        *((name, np.int32) for name in ("first_row", "end_row", "tiles", "jobs", "first_job")),
        *((name, np.int32) for name in ("jobs_per_block", "vectors", "levels", "absolute")),
    ]
)
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
#: Most groups of jobs: the limit of a grid's second dimension.
_MOST_GROUPS: Final = 0xFFFF
#: Most launches of one evaluation that go to the device together.
MOST_LAUNCHES: Final = 64
#: Warps that a multiprocessor runs at a time.
_RESIDENT_WARPS: Final = 32
#: Threads of a block that adds partial sums up, and of one that computes row-invariant subtrees.
SUM_THREADS: Final = 128
SLOT_THREADS: Final = (32, 4)
_compiled = numba_cache.njit(nogil=True)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The loaded kernels of one variant."""

    variant: Variant
    interpret: Any
    evaluate_slots: Any
    sum_partials: Any
    lowering: LoweringKernels
    flags: NDArray[np.uint8]
    """From `warpfit_server.engine.cuda.interpreter.source.operator_flags`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Jobs and rows that one launch covers."""

    first_job: int
    jobs: int
    start: int
    stop: int


class Work(NamedTuple):
    """Rows of a data set, and how the device shares the work on them out; integers."""

    variables: int
    """Address of the first variable at the first row of the first tile, likewise the next two."""
    target: int
    """0: no losses."""
    weights: int
    stride: int
    """Bytes between variables."""
    first_row: int
    """Rows of the first tile to leave out."""
    end_row: int
    """End of the rows, counted from the first row of the first tile."""
    tiles: int
    absolute: int
    """1 for losses of |f - y|, 0 for (f - y)^2."""
    level_bytes: int
    """Shared memory of one stack level of a warp."""
    warps: int
    """Warps of a block, as far as shared memory allows."""
    rounds: int
    """Programs that a warp runs one after the other when there are plenty."""
    resident_warps: int
    """Warps that the device runs at a time."""
    at_once: int
    """Token-rows of one launch: more are cut by jobs."""
    lowering_blocks: int
    """Blocks that the lowering of a small batch is shared out to."""

    @classmethod
    def of(
        cls,
        resident: ResidentDataset,
        rows: tuple[int, int],
        loss: Loss | None,
        variant: Variant,
        shares: tuple[int, int, int],
    ) -> Work:
        """Describe the work on a range of rows.

        Args:
            resident: the data set.
            rows: start and stop.
            loss: that is wanted.
            variant: of the kernel.
            shares: warps of a block, rounds, multiprocessors.

        """
        start, stop = rows
        aligned = start // ROW_MULTIPLE * ROW_MULTIPLE
        itemsize = variant.dtype.itemsize
        warps, rounds, multiprocessors = shares
        return cls(
            variables=resident.address(0, aligned),
            target=0 if loss is None else resident.target_address(aligned),
            weights=0 if loss is None else resident.weights_address(aligned),
            stride=resident.stride * itemsize,
            first_row=start - aligned,
            end_row=stop - aligned,
            tiles=tiles_of(start, stop, variant),
            absolute=int(loss is Loss.MAE),
            level_bytes=variant.tile * itemsize,
            warps=warps,
            rounds=rounds,
            resident_warps=_RESIDENT_WARPS * multiprocessors,
            at_once=token_rows_of_a_launch(variant, multiprocessors),
            lowering_blocks=BLOCKS_A_MULTIPROCESSOR * multiprocessors,
        )


class Addresses(NamedTuple):
    """Device memory of one evaluation; integers."""

    batch: int
    """Where the batch lies, laid out as its `Parts`."""
    slots: int
    """For values of row-invariant subtrees."""
    values: int
    """For values; 0: none are wanted."""
    partials: int
    """For partial sums; 0: no losses are wanted."""


def token_rows_of_a_launch(variant: Variant, multiprocessors: int) -> int:
    """Token-rows that are interpreted at once."""
    return token_rows_at_once(Mode.of(variant.dtype, variant.precision), multiprocessors) // 2


def tiles_of(start: int, stop: int, variant: Variant) -> int:
    """Tiles that cover a range of rows, from an aligned row on."""
    return -(-(stop - start // ROW_MULTIPLE * ROW_MULTIPLE) // variant.tile)


class Shares(NamedTuple):
    """How a launch of the interpreter shares jobs and shared memory out; integers."""

    chunk: int
    """Jobs of each launch."""
    group: int
    """Programs that are sorted together: those of a launch, or one if it has but a part of one."""
    warps: int
    """Warps of a block."""
    levels: int
    """Stack levels of each, scratch levels included."""
    scratch: int
    """Scratch levels."""


@_compiled  # type: ignore[untyped-decorator]
def share_out(work: Work, extent: Extent, chunk: int, programs: int, vectors: int) -> Shares:
    """Choose the shares of a batch.

    A block's memory is enough for one warp to run any program. Where several warps share it, each
    has what is usual; programs that need more are sorted to the front, and are run by one alone.

    Args:
        work: layout.
        extent: of the batch.
        chunk: most jobs of a launch.
        programs: how many.
        vectors: parameter vectors.

    """
    scratch = SCRATCH_LEVELS if extent.costly else 0
    most, group = extent.levels + scratch, 1
    levels = most
    if chunk >= vectors:
        group = min(chunk // vectors, programs)
        chunk = group * vectors
        levels = min(extent.usual, extent.levels) + scratch
    warps = max(1, min(work.warps, _SHARED_BYTES // max(1, levels * work.level_bytes)))
    levels = max(levels, -(-most // warps))
    if warps * levels * work.level_bytes > _SHARED_BYTES:
        warps, levels = 1, most
    return Shares(chunk, group, warps, levels, scratch)


@_compiled  # type: ignore[untyped-decorator]
def jobs_at_once(work: Work, tokens: int, jobs: int, vectors: int) -> int:
    """Jobs of one launch, so that it does not keep others waiting for long.

    They are whole programs, or less than one.

    Args:
        work: rows.
        tokens: of all jobs.
        jobs: how many.
        vectors: jobs of each program.

    """
    token_rows = tokens * (work.end_row - work.first_row)
    launches = min(max(1, token_rows // work.at_once), jobs, MOST_LAUNCHES)
    chunk = -(-jobs // launches)
    return chunk if chunk < vectors else -(-chunk // vectors) * vectors


@_compiled  # type: ignore[untyped-decorator]
def tell_slots(
    told: NDArray[np.void],
    addresses: Addresses,
    parts: Parts,
    extent: Extent,
    programs: int,
    vectors: int,
) -> tuple[int, int]:
    """Write the arguments of ``evaluate_slots``; return its grid.

    Args:
        told: to fill; `SLOT_ARGUMENTS` [1].
        addresses: of the evaluation.
        parts: of the batch.
        extent: of the batch.
        programs: how many.
        vectors: parameter vectors.

    """
    one = told[0]
    one.codes = addresses.batch + parts.codes
    one.values = addresses.batch + parts.values
    one.parameters = addresses.batch + parts.parameters
    one.programs = addresses.batch + parts.programs
    one.slots = addresses.batch + parts.slots
    one.results = addresses.slots
    one.slot_count = extent.slots
    one.count = programs
    one.vectors = vectors
    groups = min(-(-vectors // SLOT_THREADS[0]), _MOST_GROUPS)
    return -(-programs // SLOT_THREADS[1]), groups


@_compiled  # type: ignore[untyped-decorator]
def tell_interpreter(
    told: NDArray[np.void],
    work: Work,
    addresses: Addresses,
    parts: Parts,
    extent: Extent,
    shares: Shares,
    vectors: int,
    jobs: tuple[int, int],
) -> tuple[int, int]:
    """Write the arguments of ``interpret``; return groups of jobs and shared memory in bytes.

    A block takes one tile and one group.

    Args:
        told: to fill; `ARGUMENTS` [1].
        work: rows and layout.
        addresses: of the evaluation.
        parts: of the batch.
        extent: of the batch.
        shares: of the batch.
        vectors: parameter vectors.
        jobs: the first one and how many.

    """
    warps, levels = shares.warps, shares.levels
    rounds = min(work.rounds, max(1, jobs[1] * work.tiles // work.resident_warps))
    group = max(warps * rounds, -(-jobs[1] // _MOST_GROUPS))
    one = told[0]
    one.instructions = addresses.batch + parts.instructions
    one.programs = addresses.batch + parts.programs
    one.order = addresses.batch + parts.order
    one.slots = addresses.slots
    one.variables = work.variables
    one.target = work.target
    one.weights = work.weights
    one.values = addresses.values
    one.partials = addresses.partials
    one.slot_count = extent.slots
    one.stride = work.stride
    one.first_row = work.first_row
    one.end_row = work.end_row
    one.tiles = work.tiles
    one.first_job, one.jobs = jobs
    one.jobs_per_block = group
    one.vectors = vectors
    one.levels = levels
    one.absolute = work.absolute
    return -(-jobs[1] // group), _COUNTER_BYTES + warps * levels * work.level_bytes
