"""What a launch of the interpreter's kernels is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.request import Loss
from warpfit_server.engine import numba_cache
from warpfit_server.engine.cuda.layout import token_rows_at_once
from warpfit_server.engine.cuda.library import Mode
from warpfit_server.engine.cuda.resident import ROW_MULTIPLE, ResidentDataset
from warpfit_server.engine.cuda.source import SCRATCH_LEVELS, Variant
from warpfit_server.engine.cuda.staging import Extent, Parts

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
        *((name, np.uint64) for name in ("codes", "values", "parameters", "slots", "results")),
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
    costly: NDArray[np.bool_]
    """Whether an operator needs scratch levels, by wire code."""


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
        )


class Addresses(NamedTuple):
    """Device memory of one evaluation; integers."""

    batch: int
    """Where the staged batch was copied to."""
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


@_compiled  # type: ignore[untyped-decorator]
def jobs_at_once(work: Work, tokens: int, jobs: int) -> int:
    """Jobs of one launch, so that it does not keep others waiting for long.

    Args:
        work: rows.
        tokens: of all jobs.
        jobs: how many.

    """
    token_rows = tokens * (work.end_row - work.first_row)
    launches = min(max(1, token_rows // work.at_once), jobs, MOST_LAUNCHES)
    return -(-jobs // launches)


@_compiled  # type: ignore[untyped-decorator]
def tell_slots(
    told: NDArray[np.void], addresses: Addresses, parts: Parts, count: int, vectors: int
) -> tuple[int, int]:
    """Write the arguments of ``evaluate_slots``; return its grid.

    Args:
        told: to fill; `SLOT_ARGUMENTS` [1].
        addresses: of the evaluation.
        parts: of the staged batch.
        count: slots.
        vectors: parameter vectors.

    """
    one = told[0]
    one.codes = addresses.batch + parts.codes
    one.values = addresses.batch + parts.values
    one.parameters = addresses.batch + parts.parameters
    one.slots = addresses.batch + parts.slots
    one.results = addresses.slots
    one.count = count
    one.vectors = vectors
    return -(-count // SLOT_THREADS[1]), -(-vectors // SLOT_THREADS[0])


@_compiled  # type: ignore[untyped-decorator]
def tell_interpreter(
    told: NDArray[np.void],
    work: Work,
    addresses: Addresses,
    parts: Parts,
    extent: Extent,
    vectors: int,
    jobs: tuple[int, int],
) -> tuple[int, int, int]:
    """Write the arguments of ``interpret``; return groups of jobs, warps and shared memory.

    A block takes one tile and one group. Its shared memory is in bytes.

    Args:
        told: to fill; `ARGUMENTS` [1].
        work: rows and layout.
        addresses: of the evaluation.
        parts: of the staged batch.
        extent: of the staged batch.
        vectors: parameter vectors.
        jobs: the first one and how many.

    """
    levels = extent.levels + (SCRATCH_LEVELS if extent.costly else 0)
    warps = min(work.warps, _SHARED_BYTES // max(1, levels * work.level_bytes))
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
    return -(-jobs[1] // group), warps, _COUNTER_BYTES + warps * levels * work.level_bytes
