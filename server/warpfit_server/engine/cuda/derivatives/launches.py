"""Launches of an evaluation with derivatives, and the copies of their results to the host.

Small results (losses, gradients, curvatures, statistics) stay on the device until all chunks are
done and are copied together. Large results (values, Jacobian) are copied chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.autodiff.requested_outputs import RequestedOutputs
from warpfit_server.engine.cuda.derivatives.launch_plan import (
    NODE_STATISTICS,
    STATISTICS_ARGUMENTS,
    DerivativeChunk,
    DerivativeGeometry,
    DeviceCode,
    LaunchPlan,
    place_rows,
    stores_values,
)
from warpfit_server.engine.cuda.derivatives.source import BLOCK_TILES, COMBINE_THREADS, WARPS
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.resident_data import (
    ResidentDataset,
    Span,
    check_cancelled,
)
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.finalize import MOMENTS
from warpfit_server.engine.interface import Steps

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
    """Memory for what is summed up of nodes of rows, which pass through the device in turn."""

    sums: int
    """Device address of the sums of each job, [node, sums]."""
    statistics: int
    """Device address of the statistics, [jobs, node, NODE_STATISTICS]; 0 if none are wanted."""
    first: int
    """Number of the first node on its level."""
    count: int
    rows: int
    """Rows of all nodes."""

    @classmethod
    def allocate(
        cls, context: StreamContext, wanted: RequestedOutputs, code: DeviceCode,
        first: int, count: int, rows: int,
    ) -> RowNodes:  # fmt: skip
        """Make room for so many nodes, of which the first has a number on its level.

        Raises:
            ResourceExhaustedError: if the device has no room.

        """
        size = 8 * count * int(code.records.sums.sum()) * code.vectors
        sums, statistics = context.buffer("node sums", size), 0
        if wanted.reductions is not None or wanted.moments is not None:
            size = 8 * count * code.jobs * NODE_STATISTICS
            statistics = context.buffer("node statistics", size)
        return cls(sums, statistics, first, count, rows)


@dataclass(frozen=True, slots=True, eq=False)
class DerivativeLaunch:
    """State that the launches of all chunks of one evaluation share."""

    resident: ResidentDataset
    """What has the rows."""
    plan: LaunchPlan
    geometry: DerivativeGeometry
    """Of the rows, which may be fewer than the plan's."""
    wanted: RequestedOutputs
    kernels: DerivativeKernels
    arguments: NDArray[np.void]
    """The plan's, with the addresses of buffers."""
    small: dict[str, tuple[int, int]]
    """Device address and number of float64 of each small result."""
    nodes: RowNodes | None = None
    """Set if these are the rows of one node, and other nodes follow or came before."""
    node: int = 0
    """Number of this node among them."""
    columns: slice | None = None
    """Where the rows are among those of the outputs, if they are not all."""

    def on(
        self, window: ResidentDataset, span: Span, node: int = 0, columns: slice | None = None
    ) -> DerivativeLaunch:
        """Return the state for a node of rows, which are in ``window``."""
        geometry, arguments = self.plan.geometry.on(span), self.arguments.copy()
        place_rows(arguments, window, geometry)
        return replace(
            self, resident=window, geometry=geometry, arguments=arguments, node=node,
            columns=columns,
        )  # fmt: skip


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


def run_chunks(
    device: CudaDevice,
    context: StreamContext,
    launch: DerivativeLaunch,
    spans: Sequence[Span],
    cancelled: NDArray[np.uint8],
    ready: Callable[[int], None],
) -> Steps[int]:
    """Launch all chunks on each node of rows; copy their results while the next are computed.

    Returns:
        Nanoseconds of the device.

    """
    pending: list[tuple[DerivativeLaunch, DerivativeChunk, int]] = []
    with launch.resident.windows(spans, context, cancelled) as next_window:
        pieces = product(enumerate(spans), launch.plan.chunks)
        for number, ((node, span), chunk) in enumerate(pieces):
            check_cancelled(cancelled)
            if chunk is launch.plan.chunks[0]:
                columns = slice(span[0] - spans[0][0], span[1] - spans[0][0])
                own = launch.on((yield from next_window()), span, node, columns)
            launch_chunk(context, own, chunk, number % 2)
            pending.append((own, chunk, number % 2))
            if len(pending) > 1:
                _copy_large_results(context, *pending.pop(0), ready)
                yield None
                device.use()
    if launch.nodes is not None:
        _combine_nodes(context, launch, launch.nodes)
    context.mark("computed")
    small = download_small_results(context, launch)
    context.stream.synchronize()
    _copy_large_results(context, *pending.pop(), ready)
    copy_small_results(small, launch.wanted)
    return context.nanoseconds("start", "computed")


def _combine_nodes(context: StreamContext, launch: DerivativeLaunch, nodes: RowNodes) -> None:
    """Launch the computation of all results from the sums of all nodes."""
    jobs, arguments = launch.plan.code.jobs, launch.arguments.copy()
    if launch.small.keys() & set(SUMS):
        arguments["partials"], arguments["blocks"] = nodes.sums, nodes.count
        arguments["first_tile"] = nodes.first * BLOCK_TILES
        threads = (COMBINE_THREADS, 1, 1)
        context.launch(launch.kernels.combine, (jobs, 1, 1), threads, [arguments])
    if nodes.statistics:
        merged = _statistics_arguments(launch, (0, jobs))
        merged["leaves"], merged["leaf_count"] = nodes.statistics, nodes.count
        merged["first_leaf"], merged["rows"] = nodes.first, nodes.rows
        threads = (_STATISTICS_THREADS, 1, 1)
        context.launch(launch.kernels.merge_leaves, (jobs, 1, 1), threads, [merged])


def launch_chunk(
    context: StreamContext, launch: DerivativeLaunch, chunk: DerivativeChunk, side: int
) -> None:
    """Launch one chunk and the copies of its large results.

    ``side`` is 0 or 1, alternating, so that large results are copied while the next are computed.
    """
    geometry, wanted = launch.geometry, launch.wanted
    arguments = launch.arguments.copy()
    jobs = chunk.jobs[1] - chunk.jobs[0]
    arguments["order"] += 4 * chunk.jobs[0]
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
        arguments["nodes"], arguments["node"] = launch.nodes.sums, launch.node
        arguments["node_count"] = launch.nodes.count
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
    for name, array, (first, stop) in _large_results(launch, chunk):
        staging = _staging(context, geometry, f"{name} {side}", stop - first)
        offset = geometry.first_row * array.itemsize
        context.download_rows(staging, int(arguments[name]) + offset, geometry.pitch)
    context.mark(f"chunk {side}")


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
    if launch.nodes is not None:
        skipped = 8 * NODE_STATISTICS * launch.nodes.count * chunk.jobs[0]
        arguments["nodes"] = launch.nodes.statistics + skipped
        arguments["node"], arguments["node_count"] = launch.node, launch.nodes.count
    grid, threads = (-(-geometry.leaves * 32 // _STATISTICS_THREADS), jobs, 1), _STATISTICS_THREADS
    context.launch(launch.kernels.measure, grid, (threads, 1, 1), [arguments])
    context.launch(launch.kernels.merge_leaves, (jobs, 1, 1), (threads, 1, 1), [arguments])


def _statistics_arguments(launch: DerivativeLaunch, jobs: tuple[int, int]) -> NDArray[np.void]:
    """Return the arguments that say where the statistics of some jobs are written."""
    arguments = np.zeros((), dtype=STATISTICS_ARGUMENTS)
    for name, numbers in (("reductions", 5), ("moments", MOMENTS)):
        if name in launch.small:
            arguments[name] = launch.small[name][0] + 8 * numbers * jobs[0]
    return arguments


def download_small_results(
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


def copy_small_results(small: dict[str, NDArray[np.float64]], wanted: RequestedOutputs) -> None:
    """Copy the small results, which have arrived, to the outputs."""
    for name, array in small.items():
        getattr(wanted, name).reshape(-1)[:] = array


def _copy_large_results(
    context: StreamContext,
    launch: DerivativeLaunch,
    chunk: DerivativeChunk,
    side: int,
    ready: Callable[[int], None],
) -> None:
    """Wait for a chunk and copy its large results to the outputs."""
    context.wait(f"chunk {side}")
    for name, array, (first, stop) in _large_results(launch, chunk):
        staging = _staging(context, launch.geometry, f"{name} {side}", stop - first)
        array[first:stop, launch.columns or slice(None)] = staging
    is_last = launch.nodes is None or launch.node == launch.nodes.count - 1
    if launch.wanted.values is not None and is_last:
        ready(chunk.jobs[1] // launch.plan.code.vectors)


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
