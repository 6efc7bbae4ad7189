"""Plans of launches: device memory of an evaluation with derivatives, and its chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numba import from_dtype, types
from numpy.typing import NDArray

from warpfit.errors import ResourceExhaustedError
from warpfit.losses import mentions_weight
from warpfit.request import Precision
from warpfit_server.engine.autodiff.requested_outputs import RequestedOutputs
from warpfit_server.engine.cuda.derivatives.encoding import PROGRAM, ProgramRecords
from warpfit_server.engine.cuda.derivatives.source import BLOCK_TILES, BLOCKS, WARPS
from warpfit_server.engine.cuda.interpreter.source import Variant
from warpfit_server.engine.cuda.math.modes import Mode
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset, Span
from warpfit_server.engine.native import numba_cache
from warpfit_server.row_blocks import levels_between

#: Bytes of rows that a thread works on at a time.
ROW_BYTES: Final = 32
#: Most bytes of results that one launch leaves on the device, and their part of its memory.
_CHUNK_BYTES: Final = 64 << 20
_CHUNK_SHARE: Final = 1 / 8
#: Most memory of a warp, which the kernels count in 32 bits.
_MAX_WARP_BYTES: Final = (1 << 31) - 1
#: Most blocks in the second dimension of a grid.
_MAX_JOBS: Final = 0xFFFF
#: Instructions x rows of a launch for each multiprocessor: about 2 ms of an H200, after which other
#: evaluations get their turn.
_INSTRUCTION_ROWS: Final = {Mode.FAST: 12e6, Mode.PRECISE: 10e6, Mode.DOUBLE: 4e6}
#: Classes of work by which jobs are ordered.
_CLASSES: Final = 256
#: Variants of the kernels by their mode.
VARIANT_OF: Final = {mode: Variant.of(mode, ROW_BYTES) for mode in Mode}
#: A job, a sum and a parameter.
Ends = tuple[int, int, int]
#: The struct Arguments of derivatives.cu, field by field.
DERIVATIVE_ARGUMENTS: Final = np.dtype(
    [
        *((name, np.uint64) for name in ("instructions", "programs", "order", "columns")),
        *((name, np.uint64) for name in ("entries", "loads", "constants", "parameters")),
        *((name, np.uint64) for name in ("scalars", "variables", "weights", "values")),
        *((name, np.uint64) for name in ("jacobian", "partials", "far", "losses", "gradients")),
        *((name, np.uint64) for name in ("variable_gradients", "curvatures", "nodes")),
        *((name, np.int64) for name in ("node_pitch", "pitch")),
        *((name, np.int64) for name in ("first_parameter", "stride", "first_tile")),
        *((name, np.int32) for name in ("first_row", "end_row", "tiles", "blocks")),
        *((name, np.int32) for name in ("node", "node_levels")),
        *((name, np.int32) for name in ("first_job", "vectors")),
        *((name, np.int32) for name in ("variable_count", "warp_bytes", "shared_bytes")),
        *((name, np.int32) for name in ("wants_loss", "wants_slopes", "wants_products")),
        *((name, np.int32) for name in ("is_squares", "weighs_loss", "deviation", "target")),
    ],
    align=True,
)
_BYTES: Final = np.dtype((np.void, DERIVATIVE_ARGUMENTS.itemsize))
#: The struct StatisticsArguments of statistics.cu.
STATISTICS_ARGUMENTS: Final = np.dtype(
    [
        *((name, np.uint64) for name in ("values", "target", "weights", "leaves", "nodes")),
        *((name, np.uint64) for name in ("reductions", "moments")),
        *((name, np.int64) for name in ("pitch", "first_row", "end_row", "before")),
        *((name, np.int64) for name in ("first_leaf", "rows", "leaf_pitch", "node_pitch")),
        *((name, np.int32) for name in ("leaf_count", "node", "node_levels")),
    ],
    align=True,
)
#: Rows of a leaf of statistics.cu, and its numbers.
LEAF_ROWS: Final = 1024
NODE_STATISTICS: Final = 14


@dataclass(frozen=True, slots=True, eq=False)
class DeviceCode:
    """A batch's code, on the device or to be uploaded."""

    records: ProgramRecords
    vectors: int
    """Parameter vectors of each program."""
    memory: Any
    """Device memory of the code; None if it is uploaded with the parameters."""
    addresses: dict[str, int]
    """Addresses of the arrays in ``memory``, by the name of the kernel's argument."""
    arrays: dict[str, NDArray[Any]]
    """Arrays that are uploaded with the parameters, by the name of the kernel's argument."""

    @property
    def jobs(self) -> int:
        """Programs times parameter vectors."""
        return len(self.records.programs) * self.vectors

    def select(self, programs: NDArray[np.int64]) -> DeviceCode:
        """Return the code of some programs with one parameter vector each."""
        records = self.records.select(programs)
        return replace(self, records=records, arrays={"programs": records.programs})


@dataclass(frozen=True, eq=False)
class DerivativeGeometry:
    """Rows of an evaluation and memory of its blocks; row 0 is the first row of the first tile."""

    variant: Variant
    aligned: int
    """Row 0, as a row of the data set: a multiple of a tile's rows."""
    first_row: int
    end_row: int
    spills: bool
    """Whether intermediate results are in global memory, because shared memory is too small."""
    usual_bytes: int
    """Shared memory of a block unless a program needs more."""
    shared_bytes: int
    """Shared memory of a block."""
    warp_bytes: int
    """Memory of a warp for the program that needs most."""

    def on(self, rows: Span) -> DerivativeGeometry:
        """Return the geometry of these rows."""
        aligned, first, end = _aligned(rows, self.variant.tile)
        if (aligned, first, end) == (self.aligned, self.first_row, self.end_row):
            return self
        return replace(self, aligned=aligned, first_row=first, end_row=end)

    @cached_property
    def tiles(self) -> int:
        """Tiles that have some of the rows."""
        return -(-self.end_row // self.variant.tile)

    @cached_property
    def first_tile(self) -> int:
        """Number of the first tile, counted from the data set's first row."""
        return self.aligned // self.variant.tile

    @cached_property
    def blocks(self) -> int:
        """Blocks of rows that have some of the rows."""
        return -(-(self.first_tile + self.tiles) // BLOCK_TILES) - self.first_tile // BLOCK_TILES

    @cached_property
    def first_leaf(self) -> int:
        """Number of the first leaf of statistics, counted from the data set's first row."""
        return (self.aligned + self.first_row) // LEAF_ROWS

    @cached_property
    def leaves(self) -> int:
        """Leaves of statistics that have some of the rows."""
        return -(-(self.aligned + self.end_row) // LEAF_ROWS) - self.first_leaf

    @cached_property
    def pitch(self) -> int:
        """Bytes from one program's values to the next."""
        return self.tiles * self.variant.tile * self.variant.dtype.itemsize


@dataclass(frozen=True, slots=True)
class DerivativeChunk:
    """Jobs of one launch, and their ranges of the batch's sums and parameters."""

    jobs: tuple[int, int]
    sums: tuple[int, int]
    parameters: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class LaunchPlan:
    """Everything about the launches of an evaluation that its parameters do not change."""

    code: DeviceCode
    geometry: DerivativeGeometry
    arguments: NDArray[np.void]
    """`DERIVATIVE_ARGUMENTS` without the addresses of buffers, and without rows."""
    order: NDArray[np.uint32]
    """Job numbers, about the most work first within each chunk."""
    chunks: tuple[DerivativeChunk, ...]
    scalar_bytes: int


def stores_values(wanted: RequestedOutputs) -> bool:
    """Return whether the values themselves are written to memory."""
    return any(output is not None for output in (wanted.values, wanted.reductions, wanted.moments))


def plan_launches(
    device: CudaDevice,
    resident: ResidentDataset,
    precision: Precision,
    rows: Span,
    wanted: RequestedOutputs,
    code: DeviceCode,
) -> LaunchPlan:
    """Plan the launches of an evaluation on some rows, or on fewer; see `place_rows`."""
    variant = VARIANT_OF[Mode.of(resident.dataset.layout.dtype, precision)]
    records = code.records.programs, code.records.sums
    level_bytes = variant.tile * variant.dtype.itemsize
    work = np.empty(len(records[0]), dtype=np.int64)
    need, scalars, total_work = measure_programs(*records, level_bytes, work)
    geometry = _geometry(device, variant, need, rows)
    most = min(_CHUNK_BYTES, int(device.memory_limit * _CHUNK_SHARE))
    instruction_rows = total_work * code.vectors * (rows[1] - rows[0])
    launches = instruction_rows / _INSTRUCTION_ROWS[variant.mode]
    most_jobs = math.ceil(code.jobs * device.multiprocessors / max(1.0, launches))
    chunks = tuple(_chunks(code, geometry, wanted, most, most_jobs))
    order = np.empty(code.jobs, dtype=np.uint32)
    for chunk in chunks:
        order_jobs(work, code.vectors, chunk.jobs[0], order[slice(*chunk.jobs)])
    return LaunchPlan(
        code,
        geometry,
        _arguments(resident, wanted, geometry, code),
        order,
        chunks,
        max(1, scalars * code.vectors) * variant.dtype.itemsize,
    )


def _geometry(device: CudaDevice, variant: Variant, need: int, rows: Span) -> DerivativeGeometry:
    """Describe the work on rows of programs that need so much memory of a warp at most."""
    _check_memory(need)
    usual = device.shared_bytes(BLOCKS)
    spills = need > device.shared_bytes(1)
    aligned, first, end = _aligned(rows, variant.tile)
    return DerivativeGeometry(
        variant=variant,
        aligned=aligned,
        first_row=first,
        end_row=end,
        spills=spills,
        usual_bytes=usual,
        shared_bytes=0 if spills else max(usual, need),
        warp_bytes=need,
    )


def _aligned(rows: Span, tile: int) -> tuple[int, int, int]:
    """Return the row that begins the first tile, and the rows' range from there on."""
    aligned = rows[0] // tile * tile
    return aligned, rows[0] - aligned, rows[1] - aligned


def _check_memory(need: int) -> None:
    """Refuse a program whose sums and intermediate results the kernels cannot address."""
    if need > _MAX_WARP_BYTES:
        raise ResourceExhaustedError(
            f"derivatives of a program need {need} bytes for a warp of the device",
            "PROGRAM_TOO_LONG",
            "Split the program, or fit fewer parameters",
            needed=need,
            available=_MAX_WARP_BYTES,
        )


def _chunks(
    code: DeviceCode,
    geometry: DerivativeGeometry,
    wanted: RequestedOutputs,
    most: int,
    most_jobs: int,
) -> Iterator[DerivativeChunk]:
    """Cut the jobs into launches of at most ``most_jobs``, whose results fit in ``most`` bytes."""
    a_job = geometry.pitch * stores_values(wanted)
    if wanted.reductions is not None or wanted.moments is not None:
        a_job += geometry.leaves * NODE_STATISTICS * 8
    if geometry.spills:
        a_job += geometry.blocks * WARPS * geometry.warp_bytes
    a_job = max(a_job, most // most_jobs)
    costs = a_job, geometry.blocks * 8, geometry.pitch * (wanted.jacobian is not None)
    records, first = (code.records.programs, code.records.sums, code.vectors), (0, 0, 0)
    while first[0] < code.jobs:
        end = end_of_chunk(*records, first, costs, most)
        yield DerivativeChunk(*zip(first, end, strict=True))
        first = end


def _arguments(
    resident: ResidentDataset,
    wanted: RequestedOutputs,
    geometry: DerivativeGeometry,
    code: DeviceCode,
) -> NDArray[np.void]:
    arguments = np.zeros((), dtype=DERIVATIVE_ARGUMENTS)
    for name, address in code.addresses.items():
        arguments[name] = address
    layout, loss = resident.dataset.layout, wanted.row_loss
    if loss is not None:
        arguments["weighs_loss"] = not mentions_weight(loss)
    arguments["stride"] = resident.stride * layout.dtype.itemsize
    arguments["warp_bytes"] = geometry.warp_bytes
    arguments["node_levels"] = levels_between(1, None)
    arguments["shared_bytes"] = geometry.usual_bytes
    arguments["vectors"] = code.vectors
    arguments["variable_count"] = layout.variables if wanted.variable_gradients is not None else 0
    arguments["wants_loss"] = loss is not None
    arguments["wants_slopes"] = wanted.needs_loss_derivative
    arguments["wants_products"] = wanted.curvatures is not None
    arguments["is_squares"] = wanted.is_squares
    arguments["deviation"] = ("", "squared", "absolute").index(wanted.deviation)
    arguments["target"] = layout.variables
    return arguments


def copy_arguments(arguments: NDArray[np.void]) -> NDArray[np.void]:
    """Copy `DERIVATIVE_ARGUMENTS` as they are; NumPy would copy each field, ten times longer."""
    copied: NDArray[np.void] = arguments.view(_BYTES).copy().view(DERIVATIVE_ARGUMENTS)
    return copied


def place_rows(
    arguments: NDArray[np.void], resident: ResidentDataset, geometry: DerivativeGeometry
) -> None:
    """Fill in the rows of a geometry, which are in ``resident``."""
    arguments["variables"] = resident.address(0, geometry.aligned)
    if arguments["wants_loss"]:
        arguments["weights"] = resident.weights_address(geometry.aligned)
    for name in ("first_row", "end_row", "first_tile", "tiles", "blocks"):
        arguments[name] = getattr(geometry, name)


# ------------------------------------------------------------------------------ compiled by Numba


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def measure_programs(
    records: NDArray[np.void], sums: NDArray[np.int64], level_bytes: int, work: NDArray[np.int64]
) -> tuple[int, int, int]:
    """Estimate the work of each program: its instructions, and a fourth of its sums.

    Returns:
        The bytes that a warp needs for sums and levels at most, then the scalars and the work of
        all programs.
    """
    need = scalars = total = np.int64(0)
    for index in range(len(records)):
        record = records[index]
        work[index] = np.int64(record.count) + sums[index] // 4
        need = max(need, (sums[index] + 1) // 2 * 16 + level_bytes * np.int64(record.levels))
        scalars += np.int64(record.scalars)
        total += work[index]
    return int(need), int(scalars), int(total)


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


def load() -> None:
    """Load the compiled functions above, or compile them."""
    records, numbers = types.Array(from_dtype(PROGRAM), 1, "C"), types.int64[::1]
    ends, word = types.UniTuple(types.int64, 3), types.int64
    measure_programs.compile((records, numbers, word, numbers))
    end_of_chunk.compile((records, numbers, word, ends, ends, word))
    order_jobs.compile((numbers, word, word, types.uint32[::1]))
