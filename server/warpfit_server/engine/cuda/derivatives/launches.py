"""Launches of an evaluation with derivatives: their plan, their arguments, and their results.

A plan cuts the jobs (a program with one parameter vector each) into chunks whose results fit on the
device. All that does not depend on the parameters is planned once, partly while the programs are
still being lowered. Kernels write small results (losses, gradients, curvatures, statistics) to the
host's memory. Large results (values, Jacobian) are copied chunk by chunk.

A call from Python to the driver takes several times as long as one from compiled code, so Python
only lists the arrays to upload and the kernels to launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure, addressof
from dataclasses import dataclass
from functools import lru_cache
from itertools import starmap
from typing import Any, Final, NamedTuple

import numpy as np
from numba import carray, from_dtype, types
from numpy.typing import NDArray

from warpfit.errors import ResourceExhaustedError
from warpfit.losses import mentions_weight
from warpfit.request import Precision
from warpfit_server.engine.autodiff import RequestedOutputs
from warpfit_server.engine.cuda.derivatives import lowering
from warpfit_server.engine.cuda.derivatives.lowering import (
    COMBINE_THREADS,
    INVARIANT_BYTES,
    PROGRAM,
    WARPS,
    DerivativeCode,
    block_tiles,
    template,
)
from warpfit_server.engine.cuda.interpreter.launches import Variant
from warpfit_server.engine.cuda.runtime.datasets import (
    ResidentDataset,
    Span,
    TiledRows,
    run_chunks,
)
from warpfit_server.engine.cuda.runtime.device import (
    DRIVER,
    LAUNCH_WORK,
    CudaDevice,
    StreamContext,
    argument_struct,
    argument_type,
    launch_at,
    record,
    upload,
)
from warpfit_server.engine.interface import MOMENTS, Arithmetic, Steps
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import array_address, pointer_to
from warpfit_server.engine.sum_tree import levels_between, nodes_of

#: Bytes of rows that a thread works on at a time. Precise functions are long: their code for more
#: rows would not fit in the instruction cache.
_ROW_BYTES: Final = {Arithmetic.FAST: 64, Arithmetic.PRECISE: 32, Arithmetic.DOUBLE: 32}
#: Variants of the kernels by their arithmetic.
VARIANT_OF: Final = {
    arithmetic: Variant.of(arithmetic, _ROW_BYTES[arithmetic]) for arithmetic in Arithmetic
}
#: Types of the kernels' arguments.
DERIVATIVE_ARGUMENTS: Final = argument_struct(template("derivatives.cu"), "Arguments")
STATISTICS_ARGUMENTS: Final = argument_struct(template("statistics.cu"), "StatisticsArguments")
_Arguments: Final = argument_type(DERIVATIVE_ARGUMENTS)
_StatisticsArguments: Final = argument_type(STATISTICS_ARGUMENTS)
#: Kinds of row losses, by their numbers in `DERIVATIVE_ARGUMENTS`; see derivatives.cu.
_DEVIATIONS: Final = ("", "squared", "absolute")
_SQUARE_OF_SLOPE: Final = 3
#: Rows of a leaf of statistics.cu, its numbers, and threads of a block.
LEAF_ROWS: Final = 1024
NODE_STATISTICS: Final = 14
_STATISTICS_THREADS: Final = 256
#: Most bytes of results that one launch leaves on the device.
_CHUNK_BYTES: Final = 64 << 20
#: Most memory of a warp, which the kernels count in 32 bits.
_MAX_WARP_BYTES: Final = (1 << 31) - 1
#: Most memory of the invariants of all parameter vectors.
_MOST_INVARIANT_BYTES: Final = 1 << 30
#: Most blocks in the second dimension of a grid.
_MAX_JOBS: Final = 0xFFFF
#: Classes of work by which jobs are ordered.
_CLASSES: Final = 256
#: Alignment of uploaded arrays, in bytes.
_ALIGNMENT: Final = 256
#: Results that kernels write to the host's memory; ``combine`` computes `_SUMS`.
_SMALL: Final = ("losses", "gradients", "variable_gradients", "curvatures", "reductions", "moments")
_SUMS: Final = frozenset(_SMALL[:4])
#: A job, a sum and a parameter.
Ends = tuple[int, int, int]
_compiled = numba_cache.njit(nogil=True)
_octets: Final = pointer_to(types.uint8)


# -------------------------------------------------------------------------------------------- plan


class DerivativeGeometry(NamedTuple):
    """Rows of an evaluation, as the kernels divide them."""

    rows: TiledRows
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
        tiled, own = TiledRows.cut(rows, variant.tile), block_tiles(variant)
        first_leaf = rows[0] // LEAF_ROWS
        return cls(
            rows=tiled,
            blocks=-(-(tiled.first_tile + tiled.tiles) // own) - tiled.first_tile // own,
            first_leaf=first_leaf,
            leaves=-(-rows[1] // LEAF_ROWS) - first_leaf,
            pitch=tiled.tiles * variant.tile * variant.dtype.itemsize,
        )


class DerivativeChunk(NamedTuple):
    """Jobs of one launch, and their ranges of the batch's sums and parameters."""

    first_job: int
    end_job: int
    first_sum: int
    end_sum: int
    first_parameter: int
    end_parameter: int


_CHUNK: Final = np.dtype([(name, np.int64) for name in DerivativeChunk._fields])


@dataclass(frozen=True, slots=True, eq=False)
class LaunchDraft:
    """The part of a `LaunchPlan` that can be made while the programs are still being lowered."""

    variant: Variant
    blocks: int
    """Blocks of rows."""
    rows: int
    costs: Ends
    """Bytes that a job, a sum and a parameter leave on the device, if none spills."""
    arguments: Structure
    """`DERIVATIVE_ARGUMENTS` without all addresses, and without rows."""


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
    arguments: Structure
    """`DERIVATIVE_ARGUMENTS` without the addresses of buffers, and without rows."""
    order: NDArray[np.uint32]
    """Job numbers, about the most work first within each chunk."""
    chunks: tuple[DerivativeChunk, ...]
    invariant_bytes: int


def stores_values(wanted: RequestedOutputs) -> bool:
    """Return whether the values themselves are written to memory."""
    return wanted.values is not None or wants_statistics(wanted)


def wants_statistics(wanted: RequestedOutputs) -> bool:
    """Return whether statistics of the values are computed."""
    return wanted.reductions is not None or wanted.moments is not None


def squares_slope(arithmetic: Arithmetic, wanted: RequestedOutputs) -> bool:
    """Return whether losses are squares of the slopes f - y, so that values need no slot.

    In fast arithmetic both are made of f - y rounded to float32.
    """
    return arithmetic.is_fast and wanted.is_squares and wanted.needs_loss_derivative


def draft_launches(
    resident: ResidentDataset, precision: Precision, rows: Span, wanted: RequestedOutputs
) -> LaunchDraft:
    """Begin to plan the launches of an evaluation on some rows, or on fewer."""
    layout, loss = resident.dataset.layout, wanted.row_loss
    variant = VARIANT_OF[Arithmetic.of(layout.dtype, precision)]
    geometry = DerivativeGeometry.of(variant, rows)
    a_job = geometry.pitch * stores_values(wanted)
    a_job += geometry.leaves * NODE_STATISTICS * 8 * wants_statistics(wanted)
    costs = a_job, geometry.blocks * 8, geometry.pitch * (wanted.jacobian is not None)
    arguments = _Arguments()
    if loss is not None:
        arguments.weighs_loss = not mentions_weight(loss)
    arguments.stride = resident.stride * layout.dtype.itemsize
    arguments.node_levels = levels_between(1, None)
    arguments.variable_count = layout.variables if wanted.variable_gradients is not None else 0
    arguments.wants_loss = loss is not None
    arguments.wants_slopes = wanted.needs_loss_derivative
    arguments.wants_products = wanted.curvatures is not None
    arguments.is_squares = wanted.is_squares
    arguments.deviation = _DEVIATIONS.index(wanted.deviation)
    if squares_slope(variant.arithmetic, wanted):
        arguments.deviation = _SQUARE_OF_SLOPE
    arguments.target = layout.variables
    return LaunchDraft(variant, geometry.blocks, rows[1] - rows[0], costs, arguments)


def plan_launches(
    device: CudaDevice, shared: tuple[int, int], draft: LaunchDraft, code: DerivativeCode
) -> LaunchPlan:
    """Plan the launches of a draft, whose arguments the plan takes over.

    ``shared`` are the bytes of shared memory of a block, usually and at most.

    Raises:
        ResourceExhaustedError: if the kernels cannot address the memory of a warp, or the
            invariants take too much.
    """
    variant, arguments = draft.variant, draft.arguments
    order, chunks = np.empty(code.jobs, dtype=np.uint32), np.empty(code.jobs, _CHUNK)
    usual, most_shared = shared
    need, invariants, count = plan_jobs(
        code.programs,
        code.sums,
        code.vectors,
        variant.tile * variant.dtype.itemsize,
        draft.costs,
        (most_shared, draft.blocks * WARPS),
        device.result_bytes(_CHUNK_BYTES),
        draft.rows / LAUNCH_WORK[variant.arithmetic].differentiated,
        device.multiprocessors,
        order,
        chunks,
    )
    invariant_bytes = max(1, invariants * code.vectors) * INVARIANT_BYTES
    check_memory(need, invariant_bytes)
    for name, address in code.addresses.items():
        setattr(arguments, name, address)
    arguments.vectors = code.vectors
    arguments.warp_bytes, arguments.shared_bytes = need, usual
    spills = need > most_shared
    return LaunchPlan(
        code=code,
        variant=variant,
        spills=spills,
        shared_bytes=0 if spills else max(usual, need),
        warp_bytes=need,
        arguments=arguments,
        order=order,
        chunks=tuple(starmap(DerivativeChunk, chunks[:count].tolist())),
        invariant_bytes=invariant_bytes,
    )


def check_memory(warp_bytes: int, invariant_bytes: int) -> None:
    """Refuse a batch whose intermediate results or invariants the device has no room for."""
    if warp_bytes > _MAX_WARP_BYTES:
        raise ResourceExhaustedError(
            f"derivatives of a program need {warp_bytes} bytes for a warp of the device",
            "PROGRAM_TOO_LONG",
            "Split the program, or fit fewer parameters",
            needed=warp_bytes,
            available=_MAX_WARP_BYTES,
        )
    if invariant_bytes > _MOST_INVARIANT_BYTES:
        raise ResourceExhaustedError(
            f"constants and parameters of all parameter vectors need {invariant_bytes} bytes of "
            "the device",
            "TOO_MANY_VECTORS",
            "Send fewer parameter vectors at a time",
            needed=invariant_bytes,
            available=_MOST_INVARIANT_BYTES,
        )


# ---------------------------------------------------------------------------------------- launches


def copied(arguments: Structure) -> Structure:
    """Copy a struct of arguments."""
    return type(arguments).from_buffer_copy(arguments)


@dataclass(frozen=True, slots=True)
class DerivativeKernels:
    """The loaded kernels of one variant."""

    linearise: Any
    evaluate_invariants: Any
    combine: Any
    measure: Any
    merge_leaves: Any
    fit: Any = None
    """Only of those that do not spill."""


@dataclass(frozen=True, slots=True, eq=False)
class RowNodes:
    """Memory for the results of nodes of rows, of which the results of all rows are made.

    A node has sums, then statistics, of all jobs.
    """

    address: int
    """Device address, float64 [nodes, sums + statistics]."""
    sums: int
    """Sums of a node; 0 if none are wanted."""
    statistics: int
    """Numbers of the statistics of a node; 0 if none are wanted."""
    rows: Span
    length: int
    """Rows of a node."""

    @classmethod
    def allocate(
        cls, context: StreamContext, wanted: RequestedOutputs, code: DerivativeCode, rows: Span,
        length: int,
    ) -> RowNodes:  # fmt: skip
        """Make room for the nodes of some rows.

        Raises:
            ResourceExhaustedError: if the device has no room.
        """
        has_sums = any(getattr(wanted, name) is not None for name in _SUMS)
        sums = int(code.sums.sum()) * code.vectors * has_sums
        statistics = code.jobs * NODE_STATISTICS * wants_statistics(wanted)
        size = 8 * (sums + statistics) * len(nodes_of(rows, length))
        return cls(context.buffer("nodes", max(1, size)), sums, statistics, rows, length)

    @property
    def first(self) -> int:
        """Number of the first node on its level."""
        return self.rows[0] // self.length

    def receive(self, arguments: Structure, skip: int, start: int, length: int) -> None:
        """Have a kernel write its part of the nodes.

        Args:
            arguments: of ``combine`` or ``merge_leaves``.
            skip: numbers of a node before those that the kernel writes.
            start: first row that the kernel is given.
            length: rows of each partial result that the kernel is given.
        """
        arguments.nodes = self.address + 8 * skip
        arguments.node_pitch = self.sums + self.statistics
        arguments.node = start // self.length - self.first
        arguments.node_levels = levels_between(length, self.length)


@dataclass(frozen=True, slots=True, eq=False)
class DerivativeLaunch:
    """An evaluation on its way through the device: the state that the launches of chunks share."""

    context: StreamContext
    resident: ResidentDataset
    plan: LaunchPlan
    wanted: RequestedOutputs
    kernels: DerivativeKernels
    arguments: Structure
    """The plan's arguments, with the addresses of buffers."""
    small: Mapping[str, NDArray[np.float64]]
    """Page-locked memory of each small result, flat, to which the kernels write."""
    nodes: RowNodes | None
    """Set if the results are made of the nodes of several ranges of rows."""

    @classmethod
    def begin(
        cls,
        context: StreamContext,
        resident: ResidentDataset,
        parameters: NDArray[np.float64],
        wanted: RequestedOutputs,
        plan: LaunchPlan,
        kernels: DerivativeKernels,
        nodes: RowNodes | None,
    ) -> DerivativeLaunch:
        """Upload the parameters, and launch the computation of all invariants."""
        arguments, small, start = copied(plan.arguments), {}, 0
        arrays = [(name, array) for name in _SMALL if (array := getattr(wanted, name)) is not None]
        memory = context.pinned("small", 8 * sum(array.size for _, array in arrays))
        for name, array in arrays:
            small[name] = memory.view(np.float64)[start : start + array.size]
            start += array.size
        parameters = np.ascontiguousarray(parameters, dtype=np.float64)
        uploaded = {**plan.code.arrays, "order": plan.order, "parameters": parameters}
        addresses = upload_arrays(context, uploaded, lambda size: context.buffer("inputs", size))
        for name, address in addresses.items():
            setattr(arguments, name, address)
        arguments.invariants = context.buffer("invariants", plan.invariant_bytes)
        for name in _SUMS & small.keys():
            setattr(arguments, name, array_address(small[name]))
        place = addressof(arguments)
        run(context, KernelLaunch(kernels.evaluate_invariants.ptr, plan.code.jobs, 1, 32, place))
        return cls(context, resident, plan, wanted, kernels, arguments, small, nodes)

    def run(self, device: CudaDevice, spans: Sequence[Span]) -> Steps[int]:
        """Launch all chunks on each range of rows, and copy their results.

        Returns:
            Nanoseconds of the device.
        """

        def launch_one(
            window: ResidentDataset, number: int, chunk: DerivativeChunk, side: int
        ) -> Callable[[], None]:
            columns = slice(*(row - spans[0][0] for row in spans[number]))
            geometry = DerivativeGeometry.of(self.plan.variant, spans[number])
            return self._launch_chunk(window, geometry, columns, chunk, side)

        wanted = self.wanted
        size = sum(array.nbytes for array in (wanted.values, wanted.jacobian) if array is not None)
        work = self.resident, spans, self.plan.chunks, wanted.cancelled, launch_one, size
        computed = yield from run_chunks(device, self.context, *work)
        nodes, kernels, jobs = self.nodes, self.kernels, self.plan.code.jobs
        if nodes is not None:  # of which the results are computed
            count, width = len(nodes_of(nodes.rows, nodes.length)), nodes.sums + nodes.statistics
            launches = []
            if nodes.sums:
                arguments = copied(self.arguments)
                arguments.partials, arguments.blocks = nodes.address, count
                arguments.pitch = width
                arguments.first_tile = nodes.first * block_tiles(self.plan.variant)
                place = addressof(arguments)
                launches.append(KernelLaunch(kernels.combine.ptr, jobs, 1, COMBINE_THREADS, place))
            if nodes.statistics:
                merged = self._statistics_arguments(0)
                merged.leaves, merged.leaf_count = nodes.address + 8 * nodes.sums, count
                merged.leaf_pitch, merged.first_leaf = width, nodes.first
                merged.rows = nodes.rows[1] - nodes.rows[0]
                given = kernels.merge_leaves.ptr, jobs, 1, _STATISTICS_THREADS, addressof(merged)
                launches.append(KernelLaunch(*given))
            run(self.context, *launches)
            self.context.mark("small")
            yield from self.context.reach("small")
        for name, array in self.small.items():
            getattr(wanted, name).reshape(-1)[:] = array
        return computed

    def _launch_chunk(
        self,
        window: ResidentDataset,
        geometry: DerivativeGeometry,
        columns: slice,
        chunk: DerivativeChunk,
        side: int,
    ) -> Callable[[], None]:
        """Launch a chunk on rows of the data set, and the copies of its large results.

        Args:
            window: the data set, or a window of a streamed one, that has the rows.
            geometry: the rows.
            columns: where the rows are in the outputs.
            chunk: the jobs.
            side: see `datasets.run_chunks`.

        Returns:
            A function that copies the large results to the outputs once they have arrived.
        """
        context, plan, wanted, kernels = self.context, self.plan, self.wanted, self.kernels
        rows, arguments = geometry.rows, copied(self.arguments)
        jobs, count = chunk.end_job - chunk.first_job, chunk.end_parameter - chunk.first_parameter
        arguments.variables = window.address(0, rows.aligned)
        if wanted.row_loss is not None:
            arguments.weights = window.weights_address(rows.aligned)
        values = jacobian = 0
        if stores_values(wanted):
            values = context.buffer(f"values {side}", jobs * geometry.pitch)
        if wanted.jacobian is not None and count:
            jacobian = context.buffer(f"jacobian {side}", count * geometry.pitch)
        arguments.values, arguments.jacobian = values, jacobian
        # The kernels count sums from the batch's first job.
        skipped, end = 8 * geometry.blocks * chunk.first_sum, 8 * geometry.blocks * chunk.end_sum
        arguments.partials = context.buffer("partials", end - skipped) - skipped
        if plan.spills:
            size = jobs * geometry.blocks * WARPS * plan.warp_bytes
            arguments.far = context.buffer("spilled", size)
        arguments.first_parameter, arguments.first_tile = chunk.first_parameter, rows.first_tile
        arguments.first_row, arguments.end_row = rows.first_row, rows.end_row
        arguments.tiles, arguments.blocks = rows.tiles, geometry.blocks
        arguments.first_job = chunk.first_job
        arguments.order += 4 * chunk.first_job
        if self.nodes is not None:
            block = block_tiles(plan.variant) * plan.variant.tile
            self.nodes.receive(arguments, 0, rows.aligned + rows.first_row, block)
        place, shared, grid = addressof(arguments), plan.shared_bytes, (geometry.blocks, jobs)
        launches = [KernelLaunch(kernels.linearise.ptr, *grid, 32 * WARPS, place, shared)]
        if self.small.keys() & _SUMS:
            launches.append(KernelLaunch(kernels.combine.ptr, jobs, 1, COMBINE_THREADS, place))
        if wants_statistics(wanted):
            statistics = self._chunk_statistics(window, geometry, chunk, values)
            blocks, place = -(-geometry.leaves * 32 // _STATISTICS_THREADS), addressof(statistics)
            launches += [
                KernelLaunch(kernels.measure.ptr, blocks, jobs, _STATISTICS_THREADS, place),
                KernelLaunch(kernels.merge_leaves.ptr, jobs, 1, _STATISTICS_THREADS, place),
            ]
        run(context, *launches, events=(f"begun {side}", f"computed {side}"))
        copies: list[tuple[NDArray[Any], NDArray[Any]]] = []
        dtype, length = plan.variant.dtype, rows.end_row - rows.first_row

        def download(name: str, address: int, target: NDArray[Any]) -> None:
            memory = context.pinned(f"{name} {side}", len(target) * length * dtype.itemsize)
            staging = memory.view(dtype).reshape(len(target), length)
            start = address + rows.first_row * dtype.itemsize
            context.download_rows(staging, start, geometry.pitch)
            copies.append((target[:, columns], staging))

        if wanted.values is not None:
            whole = wanted.values.reshape(plan.code.jobs, -1)
            download("values", values, whole[chunk.first_job : chunk.end_job])
        if wanted.jacobian is not None and count:
            parameters = slice(chunk.first_parameter, chunk.end_parameter)
            download("jacobian", jacobian, wanted.jacobian[parameters])

        def copy_results() -> None:
            for target, staging in copies:
                target[...] = staging
            if wanted.values is not None and columns.stop == wanted.values.shape[-1]:
                wanted.ready(chunk.end_job // plan.code.vectors)

        return copy_results

    def _chunk_statistics(
        self,
        window: ResidentDataset,
        geometry: DerivativeGeometry,
        chunk: DerivativeChunk,
        values: int,
    ) -> Structure:
        """Return the arguments of the statistics of a chunk's values, which lie at an address."""
        rows, jobs = geometry.rows, chunk.end_job - chunk.first_job
        arguments = self._statistics_arguments(chunk.first_job)
        arguments.values, arguments.before = values, rows.aligned
        arguments.pitch = geometry.pitch // self.plan.variant.dtype.itemsize
        arguments.first_row, arguments.end_row = rows.first_row, rows.end_row
        arguments.rows = rows.end_row - rows.first_row
        size = jobs * geometry.leaves * NODE_STATISTICS * 8
        arguments.leaves = self.context.buffer("leaves", size)
        arguments.leaf_count, arguments.first_leaf = geometry.leaves, geometry.first_leaf
        arguments.leaf_pitch = NODE_STATISTICS * jobs
        if self.wanted.moments is not None:
            arguments.target = window.target_address(rows.aligned)
            arguments.weights = window.weights_address(rows.aligned)
        if self.nodes is not None:
            skip = self.nodes.sums + NODE_STATISTICS * chunk.first_job
            self.nodes.receive(arguments, skip, rows.aligned + rows.first_row, LEAF_ROWS)
        return arguments

    def _statistics_arguments(self, first_job: int) -> Structure:
        """Return the arguments that say where the statistics of jobs from one on are written."""
        arguments = _StatisticsArguments()
        arguments.node_levels = levels_between(1, None)
        for name, numbers in (("reductions", 5), ("moments", MOMENTS)):
            if name in self.small:
                place = array_address(self.small[name]) + 8 * numbers * first_job
                setattr(arguments, name, place)
        return arguments


# ----------------------------------------------------------------------------------- driver calls


class KernelLaunch(NamedTuple):
    """A kernel to launch, in integers."""

    kernel: int
    """The driver's handle."""
    columns: int
    """Blocks in the first dimension of the grid."""
    rows: int
    threads: int
    """Threads of a block."""
    arguments: int
    """Address of the struct that is the kernel's argument."""
    shared: int = 0
    """Bytes of shared memory of a block."""
    more: int = 0
    """Address of a second argument, of a kernel that has one."""


_LAUNCH: Final = np.dtype([(name, np.int64) for name in KernelLaunch._fields])
#: An array to upload: its address, its bytes, and its place in the device memory.
_PIECE: Final = np.dtype([(name, np.int64) for name in ("source", "size", "offset")])


def upload_arrays(
    context: StreamContext, arrays: Mapping[str, NDArray[Any]], allocate: Callable[[int], int]
) -> dict[str, int]:
    """Copy arrays to device memory, one behind the other, in stream order.

    Args:
        context: whose stream copies.
        arrays: contiguous, by name; empty ones are left out.
        allocate: returns the address of device memory, given the number of bytes.

    Returns:
        Their addresses there.

    Raises:
        CUDADriverError: if the device reports an error.
    """
    pieces, offsets, size = [], {}, 0
    for name, array in arrays.items():
        if array.nbytes:
            pieces.append((array_address(array), array.nbytes, size))
            offsets[name] = size
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    address, staging = allocate(size), context.pinned("inputs", size)
    given = np.array(pieces, _PIECE), staging
    context.check_executed(upload_pieces(context.functions, context.handle, address, *given))
    return {name: address + offset for name, offset in offsets.items()}


def run(context: StreamContext, *launches: KernelLaunch, events: Sequence[str] = ()) -> None:
    """Launch kernels one after the other, with an event before and one behind them.

    Raises:
        CUDADriverError: if the device reports an error.
    """
    begun, computed = [context.event(name).ptr for name in events] or (0, 0)
    given = context.handle, np.array(list(launches), _LAUNCH), begun, computed
    context.check_executed(run_launches(context.functions, *given))


# ------------------------------------------------------------------------------ compiled by Numba


@_compiled  # type: ignore[untyped-decorator]
def upload_pieces(
    driver: NDArray[np.void],
    stream: int,
    address: int,
    pieces: NDArray[np.void],
    staging: NDArray[np.uint8],
) -> int:
    """Copy pieces to the device by way of page-locked memory; return the driver's status."""
    for index in range(len(pieces)):
        piece = pieces[index]
        source, target = carray(_octets(piece.source), piece.size), staging[piece.offset :]
        for octet in range(piece.size):
            target[octet] = source[octet]
    return int(upload(driver, stream, address, staging.ctypes.data, len(staging)))


@_compiled  # type: ignore[untyped-decorator]
def run_launches(
    driver: NDArray[np.void], stream: int, launches: NDArray[np.void], begun: int, computed: int
) -> int:
    """Launch kernels, records of `KernelLaunch`, between the records of events that are not 0.

    Returns the driver's first status but 0, else 0.
    """
    if begun != 0:
        status = record(driver, stream, begun)
        if status != 0:
            return int(status)
    places = np.empty(2, dtype=np.int64)
    for index in range(len(launches)):
        one = launches[index]
        grid, threads = (one.columns, one.rows), (one.threads, 1)
        # The driver reads the addresses of as many arguments as the kernel has.
        places[0], places[1] = one.arguments, one.more
        status = launch_at(driver, stream, one.kernel, grid, threads, one.shared, places)
        if status != 0:
            return int(status)
    return 0 if computed == 0 else int(record(driver, stream, computed))


@_compiled  # type: ignore[untyped-decorator]
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


@_compiled  # type: ignore[untyped-decorator]
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


@_compiled  # type: ignore[untyped-decorator]
def order_jobs(
    work: NDArray[np.int64], vectors: int, first: int, order: NDArray[np.uint32]
) -> None:
    """List the jobs from a first one on, about the most work first."""
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


@_compiled  # type: ignore[untyped-decorator]
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
    chunks: NDArray[np.void],
) -> tuple[int, int, int]:
    """Cut the jobs into launches, whose results fit in ``most`` bytes, and order the jobs of each.

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
        chunks: records of `DerivativeChunk`, to fill in; [jobs], of which each launch takes one.

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
        chunk = chunks[count]
        chunk.first_job, chunk.first_sum, chunk.first_parameter = first
        chunk.end_job, chunk.end_sum, chunk.end_parameter = end
        count, first = count + 1, end
    return need, invariants, count


def load() -> None:
    """Load the compiled functions of this module and of `lowering`, or compile them."""
    lowering.load()
    records, numbers = _records(PROGRAM), types.int64[::1]
    word, order, ends = types.int64, types.uint32[::1], types.UniTuple(types.int64, 3)
    functions = _records(DRIVER), word
    upload_pieces.compile((*functions, word, _records(_PIECE), types.uint8[::1]))
    run_launches.compile((*functions, _records(_LAUNCH), word, word))
    measure_programs.compile((records, numbers, word, numbers))
    end_of_chunk.compile((records, numbers, word, ends, ends, word))
    order_jobs.compile((numbers, word, word, order))
    limits = types.UniTuple(word, 2), word, types.float64, word
    plan_jobs.compile((records, numbers, word, word, ends, *limits, order, _records(_CHUNK)))


def _records(dtype: np.dtype[Any]) -> types.Array:
    return types.Array(from_dtype(dtype), 1, "C")
