"""Plans of launches: device memory of an evaluation with derivatives, and its chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import ResourceExhaustedError
from warpfit.losses import mentions_weight
from warpfit.request import Evaluation
from warpfit_server.engine.autodiff.requested_outputs import RequestedOutputs
from warpfit_server.engine.cuda.derivatives.encoding import ProgramRecords
from warpfit_server.engine.cuda.derivatives.source import BLOCK_TILES, BLOCKS, WARPS
from warpfit_server.engine.cuda.interpreter.source import Variant
from warpfit_server.engine.cuda.math.modes import Mode
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset, Span
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


@dataclass(frozen=True, slots=True, eq=False)
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
        """Return the geometry of other rows."""
        aligned = rows[0] // self.variant.tile * self.variant.tile
        first, end = (row - aligned for row in rows)
        return replace(self, aligned=aligned, first_row=first, end_row=end)

    @property
    def tiles(self) -> int:
        """Tiles that have some of the rows."""
        return -(-self.end_row // self.variant.tile)

    @property
    def first_tile(self) -> int:
        """Number of the first tile, counted from the data set's first row."""
        return self.aligned // self.variant.tile

    @property
    def blocks(self) -> int:
        """Blocks of rows that have some of the rows."""
        return -(-(self.first_tile + self.tiles) // BLOCK_TILES) - self.first_tile // BLOCK_TILES

    @property
    def first_leaf(self) -> int:
        """Number of the first leaf of statistics, counted from the data set's first row."""
        return (self.aligned + self.first_row) // LEAF_ROWS

    @property
    def leaves(self) -> int:
        """Leaves of statistics that have some of the rows."""
        return -(-(self.aligned + self.end_row) // LEAF_ROWS) - self.first_leaf

    @property
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
    """Job numbers, the most work first within each chunk."""
    chunks: tuple[DerivativeChunk, ...]
    scalar_bytes: int


def stores_values(wanted: RequestedOutputs) -> bool:
    """Return whether the values themselves are written to memory."""
    return any(output is not None for output in (wanted.values, wanted.reductions, wanted.moments))


def plan_launches(
    device: CudaDevice,
    resident: ResidentDataset,
    evaluation: Evaluation,
    wanted: RequestedOutputs,
    code: DeviceCode,
) -> LaunchPlan:
    """Plan the launches of an evaluation on its rows, or on fewer; see `place_rows`."""
    geometry = _geometry(device, resident, evaluation, code)
    most = min(_CHUNK_BYTES, int(device.memory_limit * _CHUNK_SHARE))
    chunks = tuple(_chunks(code, geometry, wanted, most))
    chunk_of_job = np.repeat(np.arange(len(chunks)), [c.jobs[1] - c.jobs[0] for c in chunks])
    work = code.records.work.repeat(code.vectors)
    scalars = int(code.records.programs["scalars"].sum(dtype=np.int64)) * code.vectors
    return LaunchPlan(
        code,
        geometry,
        _arguments(resident, wanted, geometry, code),
        np.lexsort((-work, chunk_of_job)).astype(np.uint32),
        chunks,
        max(1, scalars) * geometry.variant.dtype.itemsize,
    )


def _geometry(
    device: CudaDevice, resident: ResidentDataset, evaluation: Evaluation, code: DeviceCode
) -> DerivativeGeometry:
    mode = Mode.of(resident.dataset.layout.dtype, evaluation.precision)
    variant = Variant.of(mode, ROW_BYTES)
    levels = code.records.programs["levels"].astype(np.int64)
    sum_bytes = -(-code.records.sums // 2) * 16
    need = int((sum_bytes + levels * variant.tile * variant.dtype.itemsize).max())
    _check_memory(need)
    usual = device.shared_bytes(BLOCKS)
    spills = need > device.shared_bytes(1)
    geometry = DerivativeGeometry(
        variant=variant,
        aligned=0,
        first_row=0,
        end_row=0,
        spills=spills,
        usual_bytes=usual,
        shared_bytes=0 if spills else max(usual, need),
        warp_bytes=need,
    )
    return geometry.on(evaluation.row_range(resident.dataset.layout))


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
    code: DeviceCode, geometry: DerivativeGeometry, wanted: RequestedOutputs, most: int
) -> Iterator[DerivativeChunk]:
    """Cut the jobs so that the results of one launch fit in ``most`` bytes."""
    vectors = code.vectors
    counts = code.records.programs["parameters"].repeat(vectors).astype(np.int64)
    sums = code.records.sums.repeat(vectors)
    sizes = sums * geometry.blocks * 8
    if wanted.reductions is not None or wanted.moments is not None:
        sizes += geometry.leaves * NODE_STATISTICS * 8
    sizes += geometry.pitch * (stores_values(wanted) + counts * (wanted.jacobian is not None))
    if geometry.spills:
        sizes += geometry.blocks * WARPS * geometry.warp_bytes
    if code.jobs <= _MAX_JOBS and sizes.sum() <= most:
        yield DerivativeChunk((0, code.jobs), (0, int(sums.sum())), (0, int(counts.sum())))
        return
    parameter_edges, sum_edges, used = (
        np.concatenate([[0], np.cumsum(each)]).tolist() for each in (counts, sums, sizes)
    )
    first = 0
    while first < code.jobs:
        stop = int(np.searchsorted(used, used[first] + most, side="right")) - 1
        stop = min(max(stop, first + 1), first + _MAX_JOBS)
        yield DerivativeChunk(
            (first, stop),
            (sum_edges[first], sum_edges[stop]),
            (parameter_edges[first], parameter_edges[stop]),
        )
        first = stop


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


def place_rows(
    arguments: NDArray[np.void], resident: ResidentDataset, geometry: DerivativeGeometry
) -> None:
    """Fill in the rows of a geometry, which are in ``resident``."""
    arguments["variables"] = resident.address(0, geometry.aligned)
    if arguments["wants_loss"]:
        arguments["weights"] = resident.weights_address(geometry.aligned)
    for name in ("first_row", "end_row", "first_tile", "tiles", "blocks"):
        arguments[name] = getattr(geometry, name)
