"""Plans of launches: device memory of an evaluation with derivatives, and its chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import starmap
from typing import Any, Final, NamedTuple

import numpy as np
from numba import from_dtype, types
from numpy.typing import NDArray

from warpfit.errors import ResourceExhaustedError
from warpfit.losses import mentions_weight
from warpfit.request import Precision
from warpfit_server.engine.autodiff.requested_outputs import RequestedOutputs
from warpfit_server.engine.cuda.derivatives.encoding import (
    INPUTS,
    PROGRAM,
    DerivativeCode,
    place_piece,
)
from warpfit_server.engine.cuda.derivatives.source import (
    INVARIANT_BYTES,
    WARPS,
    block_tiles,
    template,
)
from warpfit_server.engine.cuda.interpreter.source import Variant
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.driver_calls import argument_struct
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset, Span
from warpfit_server.engine.interface import Arithmetic
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.sum_tree import levels_between

#: Bytes of rows that a thread works on at a time. Precise functions are long: their code for more
#: rows would not fit in the instruction cache.
_ROW_BYTES: Final = {Arithmetic.FAST: 64, Arithmetic.PRECISE: 32, Arithmetic.DOUBLE: 32}
#: Most bytes of results that one launch leaves on the device, and their part of its memory.
_CHUNK_BYTES: Final = 64 << 20
_CHUNK_SHARE: Final = 1 / 8
#: Most memory of a warp, which the kernels count in 32 bits.
_MAX_WARP_BYTES: Final = (1 << 31) - 1
#: Most memory of the invariants of all parameter vectors.
_MOST_INVARIANT_BYTES: Final = 1 << 30
#: Most blocks in the second dimension of a grid.
_MAX_JOBS: Final = 0xFFFF
#: Instructions x rows of a launch for each multiprocessor: about 2 ms of an H200, after which other
#: evaluations get their turn.
_INSTRUCTION_ROWS: Final = {Arithmetic.FAST: 12e6, Arithmetic.PRECISE: 10e6, Arithmetic.DOUBLE: 4e6}
#: Classes of work by which jobs are ordered.
_CLASSES: Final = 256
#: Variants of the kernels by their arithmetic.
VARIANT_OF: Final = {
    arithmetic: Variant.of(arithmetic, _ROW_BYTES[arithmetic]) for arithmetic in Arithmetic
}
#: A job, a sum and a parameter.
Ends = tuple[int, int, int]
DERIVATIVE_ARGUMENTS: Final = argument_struct(template("derivatives.cu"), "Arguments")
STATISTICS_ARGUMENTS: Final = argument_struct(template("statistics.cu"), "StatisticsArguments")
_PLACES: Final[Any] = DERIVATIVE_ARGUMENTS.fields
#: Place of each field of 64 bits, in words of `DERIVATIVE_ARGUMENTS`.
WORD_OF: Final = {
    name: int(offset) // 8 for name, (kind, offset, *_) in _PLACES.items() if kind.itemsize == 8
}
#: What the row loss is, in `DERIVATIVE_ARGUMENTS`, see derivatives.cu.
_DEVIATIONS: Final = ("", "squared", "absolute")
_SQUARE_OF_SLOPE: Final = 3
#: Rows of a leaf of statistics.cu, and its numbers.
LEAF_ROWS: Final = 1024
NODE_STATISTICS: Final = 14


class DerivativeGeometry(NamedTuple):
    """Rows of an evaluation; row 0 is the first row of the first tile."""

    aligned: int
    """Row 0, as a row of the data set: a multiple of a tile's rows."""
    first_row: int
    end_row: int
    first_tile: int
    """Number of the first tile, counted from the data set's first row."""
    tiles: int
    """Tiles that have some of the rows."""
    blocks: int
    """Blocks of rows that have some of the rows."""
    first_leaf: int
    """Number of the first leaf of statistics, counted from the data set's first row."""
    leaves: int
    """Leaves of statistics that have some of the rows."""
    pitch: int
    """Bytes from one program's values to the next."""

    @classmethod
    @lru_cache(256)
    def of(cls, variant: Variant, rows: Span) -> DerivativeGeometry:
        """Describe the work on some rows."""
        first_tile, first_leaf = rows[0] // variant.tile, rows[0] // LEAF_ROWS
        aligned = first_tile * variant.tile
        tiles, own = -(-(rows[1] - aligned) // variant.tile), block_tiles(variant)
        return cls(
            aligned=aligned,
            first_row=rows[0] - aligned,
            end_row=rows[1] - aligned,
            first_tile=first_tile,
            tiles=tiles,
            blocks=-(-(first_tile + tiles) // own) - first_tile // own,
            first_leaf=first_leaf,
            leaves=-(-rows[1] // LEAF_ROWS) - first_leaf,
            pitch=tiles * variant.tile * variant.dtype.itemsize,
        )


class DerivativeChunk(NamedTuple):
    """Jobs of one launch, and their ranges of the batch's sums and parameters."""

    first_job: int
    end_job: int
    first_sum: int
    end_sum: int
    first_parameter: int
    end_parameter: int

    @property
    def jobs(self) -> int:
        """Number of jobs."""
        return self.end_job - self.first_job

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.end_parameter - self.first_parameter


@dataclass(frozen=True, slots=True, eq=False)
class LaunchPlan:
    """Everything about the launches of an evaluation that its parameters do not change."""

    code: DerivativeCode
    variant: Variant
    spills: bool
    """Whether intermediate results are in global memory, because shared memory is too small."""
    shared_bytes: int
    """Shared memory of a block."""
    warp_bytes: int
    """Memory of a warp for the program that needs most."""
    words: NDArray[np.int64]
    """`DERIVATIVE_ARGUMENTS` without the addresses of buffers, and without rows; in words."""
    pieces: NDArray[np.int64]
    """Arrays that are uploaded, but for the parameters; see `device_calls`."""
    order: NDArray[np.uint32]
    """Job numbers, about the most work first within each chunk; one of the pieces."""
    chunks: tuple[DerivativeChunk, ...]
    invariant_bytes: int


def stores_values(wanted: RequestedOutputs) -> bool:
    """Return whether the values themselves are written to memory."""
    return any(output is not None for output in (wanted.values, wanted.reductions, wanted.moments))


def squares_slope(arithmetic: Arithmetic, wanted: RequestedOutputs) -> bool:
    """Return whether losses are squares of the slopes f - y, so that values need no level.

    In fast arithmetic both are made of f - y rounded to float32.
    """
    return arithmetic.is_fast and wanted.is_squares and wanted.needs_loss_derivative


@dataclass(frozen=True, slots=True, eq=False)
class LaunchDraft:
    """The part of a `LaunchPlan` that can be made while the programs are still being lowered."""

    variant: Variant
    geometry: DerivativeGeometry
    rows: int
    costs: Ends
    """Bytes that a job, a sum and a parameter leave on the device, if none spills."""
    words: NDArray[np.int64]
    """`DERIVATIVE_ARGUMENTS` without all addresses, and without rows; in words."""


def draft_launches(
    resident: ResidentDataset, precision: Precision, rows: Span, wanted: RequestedOutputs
) -> LaunchDraft:
    """Begin to plan the launches of an evaluation on some rows, or on fewer."""
    variant = VARIANT_OF[Arithmetic.of(resident.dataset.layout.dtype, precision)]
    geometry = DerivativeGeometry.of(variant, rows)
    costs, words = _costs(geometry, wanted), _arguments(resident, wanted)
    if squares_slope(variant.arithmetic, wanted):
        words.view(DERIVATIVE_ARGUMENTS)["deviation"] = _SQUARE_OF_SLOPE
    return LaunchDraft(variant, geometry, rows[1] - rows[0], costs, words)


def plan_launches(
    device: CudaDevice, shared: tuple[int, int], draft: LaunchDraft, code: DerivativeCode
) -> LaunchPlan:
    """Plan the launches of a draft, whose arguments become those of the plan.

    ``shared`` are the bytes of shared memory of a block, usually and at most.
    """
    variant, blocks = draft.variant, draft.geometry.blocks
    order, chunks = np.empty(code.jobs, dtype=np.uint32), np.empty((code.jobs, 6), dtype=np.int64)
    usual, most_shared = shared
    need, invariants, count = plan_jobs(
        code.programs,
        code.sums,
        code.vectors,
        variant.tile * variant.dtype.itemsize,
        draft.costs,
        (most_shared, blocks * WARPS),
        min(_CHUNK_BYTES, int(device.memory_limit * _CHUNK_SHARE)),
        draft.rows / _INSTRUCTION_ROWS[variant.arithmetic],
        device.multiprocessors,
        order,
        chunks,
    )
    check_memory(need)
    invariant_bytes = max(1, invariants * code.vectors) * INVARIANT_BYTES
    _check_invariants(invariant_bytes)
    pieces = code.pieces.copy()
    place_piece(pieces, "order", order)
    spills, words = need > most_shared, draft.words
    words[: len(INPUTS)] = code.addresses
    arguments = words.view(DERIVATIVE_ARGUMENTS)
    arguments["vectors"] = code.vectors
    arguments["warp_bytes"], arguments["shared_bytes"] = need, usual
    return LaunchPlan(
        code=code,
        variant=variant,
        spills=spills,
        shared_bytes=0 if spills else max(usual, need),
        warp_bytes=need,
        words=words,
        pieces=pieces,
        order=order,
        chunks=tuple(starmap(DerivativeChunk, chunks[:count].tolist())),
        invariant_bytes=invariant_bytes,
    )


def _costs(geometry: DerivativeGeometry, wanted: RequestedOutputs) -> Ends:
    """Return the bytes that a job, a sum and a parameter leave on the device, if none spills."""
    a_job = geometry.pitch * stores_values(wanted)
    if wanted.reductions is not None or wanted.moments is not None:
        a_job += geometry.leaves * NODE_STATISTICS * 8
    return a_job, geometry.blocks * 8, geometry.pitch * (wanted.jacobian is not None)


def check_memory(need: int) -> None:
    """Refuse a program whose sums and intermediate results the kernels cannot address."""
    if need > _MAX_WARP_BYTES:
        raise ResourceExhaustedError(
            f"derivatives of a program need {need} bytes for a warp of the device",
            "PROGRAM_TOO_LONG",
            "Split the program, or fit fewer parameters",
            needed=need,
            available=_MAX_WARP_BYTES,
        )


def _check_invariants(size: int) -> None:
    """Refuse parameter vectors whose invariants take too much of the device's memory."""
    if size > _MOST_INVARIANT_BYTES:
        raise ResourceExhaustedError(
            f"constants and parameters of all parameter vectors need {size} bytes of the device",
            "TOO_MANY_VECTORS",
            "Send fewer parameter vectors at a time",
            needed=size,
            available=_MOST_INVARIANT_BYTES,
        )


def _arguments(resident: ResidentDataset, wanted: RequestedOutputs) -> NDArray[np.int64]:
    words = np.zeros(DERIVATIVE_ARGUMENTS.itemsize // 8, dtype=np.int64)
    arguments = words.view(DERIVATIVE_ARGUMENTS)
    layout, loss = resident.dataset.layout, wanted.row_loss
    if loss is not None:
        arguments["weighs_loss"] = not mentions_weight(loss)
    arguments["stride"] = resident.stride * layout.dtype.itemsize
    arguments["node_levels"] = levels_between(1, None)
    arguments["variable_count"] = layout.variables if wanted.variable_gradients is not None else 0
    arguments["wants_loss"] = loss is not None
    arguments["wants_slopes"] = wanted.needs_loss_derivative
    arguments["wants_products"] = wanted.curvatures is not None
    arguments["is_squares"] = wanted.is_squares
    arguments["deviation"] = _DEVIATIONS.index(wanted.deviation)
    arguments["target"] = layout.variables
    return words


# ------------------------------------------------------------------------------ compiled by Numba


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def measure_programs(
    records: NDArray[np.void], sums: NDArray[np.int64], level_bytes: int, work: NDArray[np.int64]
) -> tuple[int, int, int]:
    """Estimate the work of each program: its instructions, and a fourth of its sums.

    Returns:
        The bytes that a warp needs for sums and levels at most, then the invariants and the work of
        all programs.
    """
    need = invariants = total = np.int64(0)
    for index in range(len(records)):
        record = records[index]
        work[index] = np.int64(record.count) + sums[index] // 4
        need = max(need, (sums[index] + 1) // 2 * 16 + level_bytes * np.int64(record.levels))
        invariants += np.int64(record.invariants)
        total += work[index]
    return int(need), int(invariants), int(total)


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def end_of_chunk(
    records: NDArray[np.void],
    sums: NDArray[np.int64],
    vectors: int,
    first: Ends,
    costs: Ends,
    most: int,
) -> Ends:
    """Return the job after the last one that fits in ``most`` bytes, and its sum and parameter.

    Args:
        records: of the programs.
        sums: of each program.
        vectors: of each program.
        first: job, sum and parameter.
        costs: bytes of a job, a sum and a parameter.
        most: bytes, which a single job may exceed.
    """
    job, total, parameter = first
    left = most
    while job < len(records) * vectors and job - first[0] < _MAX_JOBS:
        own, count = sums[job // vectors], np.int64(records[job // vectors].parameters)
        left -= costs[0] + costs[1] * own + costs[2] * count
        if left < 0 and job > first[0]:
            break
        job, total, parameter = job + 1, total + int(own), parameter + int(count)
    return job, total, parameter


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def order_jobs(
    work: NDArray[np.int64], vectors: int, first: int, order: NDArray[np.uint32]
) -> None:
    """List the jobs from a first one on, those of about the most work first."""
    largest = np.int64(1)
    for job in range(first, first + len(order)):
        largest = max(largest, work[job // vectors])
    ends = np.zeros(_CLASSES + 1, dtype=np.int64)
    for job in range(first, first + len(order)):
        ends[(largest - work[job // vectors]) * (_CLASSES - 1) // largest + 1] += 1
    for index in range(_CLASSES):
        ends[index + 1] += ends[index]
    for job in range(first, first + len(order)):
        index = (largest - work[job // vectors]) * (_CLASSES - 1) // largest
        order[ends[index]] = job
        ends[index] += 1


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def plan_jobs(
    records: NDArray[np.void],
    sums: NDArray[np.int64],
    vectors: int,
    level_bytes: int,
    costs: Ends,
    spilling: tuple[int, int],
    most: int,
    launches_each: float,
    multiprocessors: int,
    order: NDArray[np.uint32],
    chunks: NDArray[np.int64],
) -> tuple[int, int, int]:
    """Cut the jobs into launches, whose results fit in ``most`` bytes, and order those of each.

    Args:
        records: of the programs.
        sums: of each program.
        vectors: of each program.
        level_bytes: memory of a warp for each level.
        costs: bytes of a job that does not spill, a sum and a parameter.
        spilling: memory of a warp above which the programs spill, and the warps of a job.
        most: bytes.
        launches_each: launches of a multiprocessor that an instruction is worth, so that none
            takes too long.
        multiprocessors: of the device.
        order: job numbers, to fill in.
        chunks: of each launch, to fill in; [jobs, fields of `DerivativeChunk`].

    Returns:
        The memory that a warp needs at most, the invariants of all programs, and the launches.
    """
    work = np.empty(len(records), dtype=np.int64)
    need, invariants, total = measure_programs(records, sums, level_bytes, work)
    jobs = len(records) * vectors
    launches = max(1.0, np.float64(total) * vectors * launches_each)
    most_jobs = math.ceil(jobs * multiprocessors / launches)
    a_job = costs[0] + (spilling[1] * need if need > spilling[0] else 0)
    costs = max(a_job, most // most_jobs), costs[1], costs[2]
    count, first = 0, (0, 0, 0)
    while first[0] < jobs:
        end = end_of_chunk(records, sums, vectors, first, costs, most)
        order_jobs(work, vectors, first[0], order[first[0] : end[0]])
        for index in range(3):
            chunks[count, 2 * index] = first[index]
            chunks[count, 2 * index + 1] = end[index]
        count, first = count + 1, end
    return need, invariants, count


def load() -> None:
    """Load the compiled functions above, or compile them."""
    records, numbers = types.Array(from_dtype(PROGRAM), 1, "C"), types.int64[::1]
    word, order, ends = types.int64, types.uint32[::1], types.UniTuple(types.int64, 3)
    measure_programs.compile((records, numbers, word, numbers))
    end_of_chunk.compile((records, numbers, word, ends, ends, word))
    order_jobs.compile((numbers, word, word, order))
    limits = types.UniTuple(word, 2), word, types.float64, word
    plan_jobs.compile((records, numbers, word, word, ends, *limits, order, types.int64[:, ::1]))
