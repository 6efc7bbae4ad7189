"""Launches of an evaluation with derivatives, and the copies of their results to the host.

Small results (losses, gradients, curvatures, statistics) stay on the device until all chunks are
done and are copied together. Large results (values, Jacobian) are copied chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.autodiff.requested_outputs import RequestedOutputs
from warpfit_server.engine.cuda.derivatives.launch_plan import (
    LEAF_ROWS,
    NODE_STATISTICS,
    STATISTICS_ARGUMENTS,
    DerivativeChunk,
    DerivativeGeometry,
    DeviceCode,
    LaunchPlan,
    copy_arguments,
    place_rows,
    stores_values,
)
from warpfit_server.engine.cuda.derivatives.source import BLOCK_TILES, COMBINE_THREADS, WARPS
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.resident_data import (
    ResidentDataset,
    Span,
    run_chunks,
)
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.finalize import MOMENTS
from warpfit_server.engine.interface import RowShard, Steps
from warpfit_server.row_blocks import levels_between, node_rows, nodes_of

_STATISTICS_THREADS: Final = 256
#: Small results that ``combine`` computes, in the order in which they lie on the device.
SUMS: Final = ("losses", "gradients", "variable_gradients", "curvatures")
_SMALL: Final = (*SUMS, "reductions", "moments")


@dataclass(frozen=True, slots=True)
class DerivativeKernels:
    """The loaded kernels of one variant."""

    linearise: Any
    evaluate_scalars: Any
    combine: Any
    measure: Any
    merge_leaves: Any


@dataclass(frozen=True, slots=True, eq=False)
class RowNodes:
    """Memory for what is summed up of nodes of rows: of each node sums, then statistics."""

    address: int
    """Device address, float64 [count, sums + statistics]."""
    sums: int
    """Sums of a node, of all jobs; 0 if none are wanted."""
    statistics: int
    """Numbers of the statistics of a node, of all jobs; 0 if none are wanted."""
    rows: tuple[int, int]
    length: int
    """Rows of a node."""

    @classmethod
    def allocate(
        cls, context: StreamContext, name: str, sums: int, statistics: int, rows: tuple[int, int],
        length: int,
    ) -> RowNodes:  # fmt: skip
        """Make room for the nodes of some rows.

        Raises:
            ResourceExhaustedError: if the device has no room.
        """
        size = 8 * (sums + statistics) * len(nodes_of(rows, length))
        return cls(context.buffer(name, max(1, size)), sums, statistics, rows, length)

    def resized(
        self, context: StreamContext, name: str, rows: tuple[int, int], length: int
    ) -> RowNodes:
        """Make room for the same numbers of nodes of other rows."""
        return RowNodes.allocate(context, name, self.sums, self.statistics, rows, length)

    @property
    def first(self) -> int:
        """Number of the first node on its level."""
        return self.rows[0] // self.length

    @property
    def shape(self) -> tuple[int, int]:
        """Number of nodes, and of numbers of each."""
        return len(nodes_of(self.rows, self.length)), self.sums + self.statistics

    def receive(self, arguments: NDArray[np.void], skip: int, start: int, length: int) -> None:
        """Have a kernel write nodes, behind so many numbers of each.

        Args:
            arguments: of ``combine`` or ``merge_leaves``.
            skip: numbers of a node before those that the kernel writes.
            start: first row of what the kernel is given.
            length: rows of each part of that.
        """
        arguments["nodes"], arguments["node_pitch"] = self.address + 8 * skip, self.shape[1]
        arguments["node"] = start // self.length - self.first
        arguments["node_levels"] = levels_between(length, self.length)

    def staging(self, context: StreamContext) -> NDArray[np.float64]:
        """Return page-locked memory for all numbers."""
        count, width = self.shape
        return context.pinned("nodes", 8 * count * width).view(np.float64).reshape(count, width)


def node_numbers(wanted: RequestedOutputs, code: DeviceCode) -> tuple[int, int]:
    """Return how many sums, and numbers of statistics, of a node are wanted."""
    has_sums = any(getattr(wanted, name) is not None for name in SUMS)
    sums = int(code.records.sums.sum()) * code.vectors
    has_statistics = wanted.reductions is not None or wanted.moments is not None
    return sums * has_sums, code.jobs * NODE_STATISTICS * has_statistics


@dataclass(frozen=True, slots=True, eq=False)
class DerivativeLaunch:
    """State that the launches of all chunks of one evaluation share."""

    resident: ResidentDataset
    """Data set, or window of a streamed one, that the kernels read."""
    plan: LaunchPlan
    geometry: DerivativeGeometry
    """Geometry of these rows, which may be fewer than those of the plan."""
    wanted: RequestedOutputs
    kernels: DerivativeKernels
    arguments: NDArray[np.void]
    """The plan's, with the addresses of buffers."""
    small: dict[str, tuple[int, int]]
    """Device address and number of float64 of each small result."""
    nodes: RowNodes | None = None
    """Set if the results are made of the nodes of these and other rows."""
    columns: slice | None = None
    """Where the rows are among those of the outputs, if they are not all."""

    def on(
        self, window: ResidentDataset, span: Span, columns: slice | None = None
    ) -> DerivativeLaunch:
        """Return the state for a range of rows, which are in ``window``."""
        geometry, arguments = self.plan.geometry.on(span), copy_arguments(self.arguments)
        place_rows(arguments, window, geometry)
        return replace(
            self, resident=window, geometry=geometry, arguments=arguments, columns=columns
        )


def allocate_small_results(
    context: StreamContext, wanted: RequestedOutputs
) -> dict[str, tuple[int, int]]:
    """Make room on the device for the small results; return address and size of each."""
    arrays = {name: getattr(wanted, name) for name in _SMALL}
    sizes = {name: array.size for name, array in arrays.items() if array is not None}
    address = context.buffer("small", 8 * max(1, sum(sizes.values())))
    places = {}
    for name, size in sizes.items():
        places[name] = (address, size)
        address += 8 * size
    return places


def run_launch(
    device: CudaDevice, context: StreamContext, launch: DerivativeLaunch, spans: Sequence[Span]
) -> Steps[int]:
    """Launch all chunks on each range of rows, and copy their results.

    Returns:
        Nanoseconds of the device.
    """
    small: dict[str, NDArray[np.float64]] = {}

    def launch_one(
        window: ResidentDataset, number: int, chunk: DerivativeChunk, side: int
    ) -> Callable[[], None]:
        columns = slice(*(row - spans[0][0] for row in spans[number]))
        own = launch.on(window, spans[number], columns)
        _launch_chunk(context, own, chunk, side)
        if launch.nodes is None and chunk is launch.plan.chunks[-1]:
            small.update(_download_small_results(context, launch))
        return partial(_copy_large_results, context, own, chunk, side)

    wanted = launch.wanted
    size = sum(array.nbytes for array in (wanted.values, wanted.jacobian) if array is not None)
    work = launch.resident, spans, launch.plan.chunks, wanted.cancelled, launch_one, size
    computed = yield from run_chunks(device, context, *work)
    nodes, shard = launch.nodes, launch.wanted.shard
    if nodes is not None and shard is not None:
        nodes = yield from _join(context, launch, nodes, shard)
        device.use()
    if nodes is not None:
        _combine_nodes(context, launch, nodes)
        small = _download_small_results(context, launch)
        context.mark("small")
        yield from context.reach("small")
    for name, array in small.items():
        getattr(launch.wanted, name).reshape(-1)[:] = array
    return computed


def _join(
    context: StreamContext, launch: DerivativeLaunch, nodes: RowNodes, shard: RowShard
) -> Steps[RowNodes | None]:
    """Return the nodes of all rows of an evaluation; None if another engine has them."""
    length = node_rows(launch.resident.dataset.layout, shard.level)
    own = nodes
    if nodes.length < length:
        own = nodes.resized(context, "shard nodes", nodes.rows, length)
        _combine_nodes(context, launch, nodes, own)
    staging = own.staging(context)
    context.download(staging, own.address)
    context.stream.synchronize()
    joined = yield from shard.join(staging)
    if joined is None:
        return None
    whole = own.resized(context, "all nodes", shard.rows, length)
    staging = whole.staging(context)
    staging[...] = joined
    context.upload(whole.address, staging)
    return whole


def _combine_nodes(
    context: StreamContext,
    launch: DerivativeLaunch,
    nodes: RowNodes,
    parents: RowNodes | None = None,
) -> None:
    """Launch the computation of the results from all nodes, or that of nodes of more rows."""
    (count, width), jobs = nodes.shape, launch.plan.code.jobs
    if nodes.sums:
        arguments = copy_arguments(launch.arguments)
        arguments["partials"], arguments["blocks"] = nodes.address, count
        arguments["pitch"] = width
        arguments["first_tile"] = nodes.first * BLOCK_TILES
        if parents is not None:
            parents.receive(arguments, 0, nodes.rows[0], nodes.length)
        threads = (COMBINE_THREADS, 1, 1)
        context.launch(launch.kernels.combine, (jobs, 1, 1), threads, [arguments])
    if nodes.statistics:
        merged = _statistics_arguments(launch, (0, jobs))
        merged["leaves"], merged["leaf_count"] = nodes.address + 8 * nodes.sums, count
        merged["leaf_pitch"], merged["first_leaf"] = width, nodes.first
        merged["rows"] = nodes.rows[1] - nodes.rows[0]
        if parents is not None:
            parents.receive(merged, nodes.sums, nodes.rows[0], nodes.length)
        threads = (_STATISTICS_THREADS, 1, 1)
        context.launch(launch.kernels.merge_leaves, (jobs, 1, 1), threads, [merged])


def _launch_chunk(
    context: StreamContext, launch: DerivativeLaunch, chunk: DerivativeChunk, side: int
) -> None:
    """Launch one chunk and the copies of its large results; see `resident_data.run_chunks`."""
    geometry, wanted, arguments = launch.geometry, launch.wanted, launch.arguments
    jobs = chunk.jobs[1] - chunk.jobs[0]
    arguments["order"] = int(arguments["order"]) + 4 * chunk.jobs[0]
    arguments["first_job"], arguments["first_parameter"] = chunk.jobs[0], chunk.parameters[0]
    # The kernels count sums from the batch's first job.
    skipped, end = (8 * geometry.blocks * edge for edge in chunk.sums)
    arguments["partials"] = (context.buffer("partials", end - skipped) - skipped) % 2**64
    if geometry.spills:
        size = jobs * geometry.blocks * WARPS * geometry.warp_bytes
        arguments["far"] = context.buffer("spilled", size)
    if stores_values(wanted):
        size = jobs * geometry.pitch
        arguments["values"] = context.buffer(f"values {side}", size)
    if launch.nodes is not None:
        block = BLOCK_TILES * geometry.variant.tile
        launch.nodes.receive(arguments, 0, geometry.aligned + geometry.first_row, block)
    parameters = chunk.parameters[1] - chunk.parameters[0]
    if wanted.jacobian is not None and parameters:
        size = parameters * geometry.pitch
        arguments["jacobian"] = context.buffer(f"jacobian {side}", size)
    grid, threads = (geometry.blocks, jobs, 1), (32 * WARPS, 1, 1)
    context.launch(launch.kernels.linearise, grid, threads, [arguments], geometry.shared_bytes)
    if launch.small.keys() & set(SUMS):
        context.launch(launch.kernels.combine, (jobs, 1, 1), (COMBINE_THREADS, 1, 1), [arguments])
    if wanted.reductions is not None or wanted.moments is not None:
        _launch_statistics(context, launch, chunk, int(arguments["values"]))
    context.mark(f"computed {side}")
    for name, array, (first, stop) in _large_results(launch, chunk):
        staging = _staging(context, geometry, f"{name} {side}", stop - first)
        offset = geometry.first_row * array.itemsize
        context.download_rows(staging, int(arguments[name]) + offset, geometry.pitch)


def _launch_statistics(
    context: StreamContext, launch: DerivativeLaunch, chunk: DerivativeChunk, values: int
) -> None:
    """Launch the statistics of a chunk's values, which lie at the address ``values``."""
    geometry, resident = launch.geometry, launch.resident
    jobs = chunk.jobs[1] - chunk.jobs[0]
    arguments = _statistics_arguments(launch, chunk.jobs)
    arguments["values"], arguments["before"] = values, geometry.aligned
    arguments["pitch"] = geometry.pitch // geometry.variant.dtype.itemsize
    arguments["first_row"], arguments["end_row"] = geometry.first_row, geometry.end_row
    arguments["rows"] = geometry.end_row - geometry.first_row
    size = jobs * geometry.leaves * NODE_STATISTICS * 8
    arguments["leaves"], arguments["leaf_count"] = context.buffer("leaves", size), geometry.leaves
    arguments["first_leaf"] = geometry.first_leaf
    if "moments" in launch.small:
        arguments["target"] = resident.target_address(geometry.aligned)
        arguments["weights"] = resident.weights_address(geometry.aligned)
    arguments["leaf_pitch"] = NODE_STATISTICS * jobs
    if launch.nodes is not None:
        skip = launch.nodes.sums + NODE_STATISTICS * chunk.jobs[0]
        start = geometry.aligned + geometry.first_row
        launch.nodes.receive(arguments, skip, start, LEAF_ROWS)
    grid, threads = (-(-geometry.leaves * 32 // _STATISTICS_THREADS), jobs, 1), _STATISTICS_THREADS
    context.launch(launch.kernels.measure, grid, (threads, 1, 1), [arguments])
    context.launch(launch.kernels.merge_leaves, (jobs, 1, 1), (threads, 1, 1), [arguments])


def _statistics_arguments(launch: DerivativeLaunch, jobs: tuple[int, int]) -> NDArray[np.void]:
    """Return the arguments that say where the statistics of some jobs are written."""
    arguments = np.zeros((), dtype=STATISTICS_ARGUMENTS)
    arguments["node_levels"] = levels_between(1, None)
    for name, numbers in (("reductions", 5), ("moments", MOMENTS)):
        if name in launch.small:
            arguments[name] = launch.small[name][0] + 8 * numbers * jobs[0]
    return arguments


def _download_small_results(
    context: StreamContext, launch: DerivativeLaunch
) -> dict[str, NDArray[np.float64]]:
    """Launch the copy of the small results; return where they will arrive."""
    total = sum(size for _, size in launch.small.values())
    if not total:
        return {}
    staging = context.pinned("small", 8 * total).view(np.float64)
    context.download(staging, next(iter(launch.small.values()))[0])
    arrays, start = {}, 0
    for name, (_, size) in launch.small.items():
        arrays[name] = staging[start : start + size]
        start += size
    return arrays


def _copy_large_results(
    context: StreamContext, launch: DerivativeLaunch, chunk: DerivativeChunk, side: int
) -> None:
    """Copy the large results of a chunk, which have arrived, to the outputs."""
    for name, array, (first, stop) in _large_results(launch, chunk):
        staging = _staging(context, launch.geometry, f"{name} {side}", stop - first)
        array[first:stop, launch.columns or slice(None)] = staging
    values, columns = launch.wanted.values, launch.columns
    if values is not None and (columns is None or columns.stop == values.shape[-1]):
        launch.wanted.ready(chunk.jobs[1] // launch.plan.code.vectors)


def _large_results(
    launch: DerivativeLaunch, chunk: DerivativeChunk
) -> Iterator[tuple[str, NDArray[Any], tuple[int, int]]]:
    """Yield the large results that are wanted, [..., rows], each with the chunk's range."""
    wanted = launch.wanted
    if wanted.values is not None:
        yield "values", wanted.values.reshape(launch.plan.code.jobs, -1), chunk.jobs
    if wanted.jacobian is not None and chunk.parameters[0] < chunk.parameters[1]:
        yield "jacobian", wanted.jacobian, chunk.parameters


def _staging(
    context: StreamContext, geometry: DerivativeGeometry, name: str, count: int
) -> NDArray[Any]:
    rows, dtype = geometry.end_row - geometry.first_row, geometry.variant.dtype
    return context.pinned(name, count * rows * dtype.itemsize).view(dtype).reshape(count, rows)
