"""Launches of an evaluation with derivatives, and the copies of their results to the host.

Kernels write small results (losses, gradients, curvatures, statistics) to the host's memory. Large
results (values, Jacobian) are copied chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.autodiff.requested_outputs import RequestedOutputs
from warpfit_server.engine.cuda.derivatives.device_calls import KernelLaunch, run
from warpfit_server.engine.cuda.derivatives.encoding import DerivativeCode
from warpfit_server.engine.cuda.derivatives.launch_plan import (
    DERIVATIVE_ARGUMENTS,
    LEAF_ROWS,
    NODE_STATISTICS,
    STATISTICS_ARGUMENTS,
    WORD_OF,
    DerivativeChunk,
    DerivativeGeometry,
    LaunchPlan,
    stores_values,
)
from warpfit_server.engine.cuda.derivatives.source import COMBINE_THREADS, WARPS, block_tiles
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.resident_data import (
    ResidentDataset,
    Span,
    run_chunks,
)
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.interface import MOMENTS, Steps
from warpfit_server.engine.native.arguments import array_address
from warpfit_server.engine.sum_tree import levels_between, nodes_of

_STATISTICS_THREADS: Final = 256
_SMALL: Final = ("losses", "gradients", "variable_gradients", "curvatures", "reductions", "moments")
#: Small results that ``combine`` computes.
SUMS: Final = frozenset(_SMALL[:4])
#: Fields of `DERIVATIVE_ARGUMENTS` that differ between launches: words, then numbers of 32 bits.
_CHUNK_WORDS: Final = slice(WORD_OF["variables"], WORD_OF["first_tile"] + 1)
_CHUNK_NUMBERS: Final = slice(2 * _CHUNK_WORDS.stop, 2 * _CHUNK_WORDS.stop + 5)


@dataclass(frozen=True, slots=True)
class DerivativeKernels:
    """The loaded kernels of one variant."""

    linearise: Any
    evaluate_invariants: Any
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


def node_numbers(wanted: RequestedOutputs, code: DerivativeCode) -> tuple[int, int]:
    """Return how many sums, and numbers of statistics, of a node are wanted."""
    has_sums = any(getattr(wanted, name) is not None for name in SUMS)
    sums = int(code.sums.sum()) * code.vectors
    has_statistics = wanted.reductions is not None or wanted.moments is not None
    return sums * has_sums, code.jobs * NODE_STATISTICS * has_statistics


@dataclass(frozen=True, slots=True, eq=False)
class DerivativeLaunch:
    """State that the launches of all chunks of one evaluation share."""

    resident: ResidentDataset
    plan: LaunchPlan
    wanted: RequestedOutputs
    kernels: DerivativeKernels
    words: NDArray[np.int64]
    """The plan's arguments, with the addresses of buffers."""
    small: dict[str, NDArray[np.float64]]
    """Page-locked memory of each small result, flat, to which the kernels write."""
    nodes: RowNodes | None
    """Set if the results are made of the nodes of several ranges of rows."""


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkLaunch:
    """A chunk of the jobs on a range of rows."""

    whole: DerivativeLaunch
    resident: ResidentDataset
    """Data set, or window of a streamed one, that the kernels read."""
    geometry: DerivativeGeometry
    columns: slice
    """Where the rows are among those of the outputs."""
    chunk: DerivativeChunk
    side: int


def small_results(
    context: StreamContext, wanted: RequestedOutputs
) -> dict[str, NDArray[np.float64]]:
    """Make room for the small results in page-locked memory, flat."""
    arrays = [(name, array) for name in _SMALL if (array := getattr(wanted, name)) is not None]
    memory = context.pinned("small", 8 * sum(array.size for _, array in arrays)).view(np.float64)
    places, start = {}, 0
    for name, array in arrays:
        places[name] = memory[start : start + array.size]
        start += array.size
    return places


def run_launch(
    device: CudaDevice, context: StreamContext, launch: DerivativeLaunch, spans: Sequence[Span]
) -> Steps[int]:
    """Launch all chunks on each range of rows, and copy their results.

    Returns:
        Nanoseconds of the device.
    """

    def launch_one(
        window: ResidentDataset, number: int, chunk: DerivativeChunk, side: int
    ) -> Callable[[], None]:
        geometry = DerivativeGeometry.of(launch.plan.variant, spans[number])
        columns = slice(*(row - spans[0][0] for row in spans[number]))
        own = _ChunkLaunch(launch, window, geometry, columns, chunk, side)
        _launch_chunk(context, own)
        return partial(_copy_large_results, context, own)

    wanted = launch.wanted
    size = sum(array.nbytes for array in (wanted.values, wanted.jacobian) if array is not None)
    work = launch.resident, spans, launch.plan.chunks, wanted.cancelled, launch_one, size
    computed = yield from run_chunks(device, context, *work)
    if launch.nodes is not None:
        _combine_nodes(context, launch, launch.nodes)
        context.mark("small")
        yield from context.reach("small")
    for name, array in launch.small.items():
        getattr(wanted, name).reshape(-1)[:] = array
    return computed


def _combine_nodes(context: StreamContext, launch: DerivativeLaunch, nodes: RowNodes) -> None:
    """Launch the computation of the results from all nodes."""
    (count, width), jobs, kernels = nodes.shape, launch.plan.code.jobs, launch.kernels
    if nodes.sums:
        words = launch.words.copy()
        arguments = words.view(DERIVATIVE_ARGUMENTS)
        arguments["partials"], arguments["blocks"] = nodes.address, count
        arguments["pitch"] = width
        arguments["first_tile"] = nodes.first * block_tiles(launch.plan.variant)
        place = array_address(words)
        run(context, KernelLaunch(kernels.combine.ptr, jobs, 1, COMBINE_THREADS, place))
    if nodes.statistics:
        merged = _statistics_arguments(launch, 0)
        merged["leaves"], merged["leaf_count"] = nodes.address + 8 * nodes.sums, count
        merged["leaf_pitch"], merged["first_leaf"] = width, nodes.first
        merged["rows"] = nodes.rows[1] - nodes.rows[0]
        place = merged.ctypes.data
        run(context, KernelLaunch(kernels.merge_leaves.ptr, jobs, 1, _STATISTICS_THREADS, place))


def _launch_chunk(context: StreamContext, launch: _ChunkLaunch) -> None:
    """Launch one chunk and the copies of its large results; see `resident_data.run_chunks`."""
    whole, geometry, chunk, side = launch.whole, launch.geometry, launch.chunk, launch.side
    plan, wanted, resident, words = whole.plan, whole.wanted, launch.resident, whole.words.copy()
    variables = resident.address(0, geometry.aligned)
    weights = values = jacobian = far = 0
    if wanted.row_loss is not None:
        weights = resident.weights_address(geometry.aligned)
    # The kernels count sums from the batch's first job.
    skipped, end = 8 * geometry.blocks * chunk.first_sum, 8 * geometry.blocks * chunk.end_sum
    partials = context.buffer("partials", end - skipped) - skipped
    if plan.spills:
        size = chunk.jobs * geometry.blocks * WARPS * plan.warp_bytes
        far = context.buffer("spilled", size)
    if stores_values(wanted):
        values = context.buffer(f"values {side}", chunk.jobs * geometry.pitch)
    if wanted.jacobian is not None and chunk.parameters:
        jacobian = context.buffer(f"jacobian {side}", chunk.parameters * geometry.pitch)
    addresses = variables, weights, values, jacobian, partials, far
    words[_CHUNK_WORDS] = *addresses, chunk.first_parameter, geometry.first_tile
    rows = geometry.first_row, geometry.end_row, geometry.tiles, geometry.blocks
    words.view(np.int32)[_CHUNK_NUMBERS] = *rows, chunk.first_job
    words[WORD_OF["order"]] += 4 * chunk.first_job
    if whole.nodes is not None:
        block = block_tiles(plan.variant) * plan.variant.tile
        start = geometry.aligned + geometry.first_row
        whole.nodes.receive(words.view(DERIVATIVE_ARGUMENTS), 0, start, block)
    kernels, place = whole.kernels, array_address(words)
    jobs, shared = chunk.jobs, plan.shared_bytes
    grid = geometry.blocks, jobs
    launches = [KernelLaunch(kernels.linearise.ptr, *grid, 32 * WARPS, place, shared)]
    if whole.small.keys() & SUMS:
        launches.append(KernelLaunch(kernels.combine.ptr, jobs, 1, COMBINE_THREADS, place))
    if wanted.reductions is not None or wanted.moments is not None:
        statistics = _chunk_statistics(context, launch, values)
        place, blocks = statistics.ctypes.data, -(-geometry.leaves * 32 // _STATISTICS_THREADS)
        launches += [
            KernelLaunch(kernels.measure.ptr, blocks, jobs, _STATISTICS_THREADS, place),
            KernelLaunch(kernels.merge_leaves.ptr, jobs, 1, _STATISTICS_THREADS, place),
        ]
    run(context, *launches, events=(f"begun {side}", f"computed {side}"))
    for name, array, (first, stop) in _large_results(launch):
        staging = _staging(context, launch, name, stop - first)
        offset = geometry.first_row * array.itemsize
        address = values if name == "values" else jacobian
        context.download_rows(staging, address + offset, geometry.pitch)


def _chunk_statistics(
    context: StreamContext, launch: _ChunkLaunch, values: int
) -> NDArray[np.void]:
    """Return the arguments of the statistics of a chunk's values, which lie at an address."""
    whole, geometry, resident = launch.whole, launch.geometry, launch.resident
    chunk = launch.chunk
    arguments = _statistics_arguments(whole, chunk.first_job)
    arguments["values"], arguments["before"] = values, geometry.aligned
    arguments["pitch"] = geometry.pitch // whole.plan.variant.dtype.itemsize
    arguments["first_row"], arguments["end_row"] = geometry.first_row, geometry.end_row
    arguments["rows"] = geometry.end_row - geometry.first_row
    size = chunk.jobs * geometry.leaves * NODE_STATISTICS * 8
    arguments["leaves"], arguments["leaf_count"] = context.buffer("leaves", size), geometry.leaves
    arguments["first_leaf"] = geometry.first_leaf
    if "moments" in whole.small:
        arguments["target"] = resident.target_address(geometry.aligned)
        arguments["weights"] = resident.weights_address(geometry.aligned)
    arguments["leaf_pitch"] = NODE_STATISTICS * chunk.jobs
    if whole.nodes is not None:
        skip = whole.nodes.sums + NODE_STATISTICS * chunk.first_job
        start = geometry.aligned + geometry.first_row
        whole.nodes.receive(arguments, skip, start, LEAF_ROWS)
    return arguments


def _statistics_arguments(launch: DerivativeLaunch, first_job: int) -> NDArray[np.void]:
    """Return the arguments that say where the statistics of jobs from one on are written."""
    arguments = np.zeros((), dtype=STATISTICS_ARGUMENTS)
    arguments["node_levels"] = levels_between(1, None)
    for name, numbers in (("reductions", 5), ("moments", MOMENTS)):
        if name in launch.small:
            arguments[name] = array_address(launch.small[name]) + 8 * numbers * first_job
    return arguments


def _copy_large_results(context: StreamContext, launch: _ChunkLaunch) -> None:
    """Copy the large results of a chunk, which have arrived, to the outputs."""
    for name, array, (first, stop) in _large_results(launch):
        array[first:stop, launch.columns] = _staging(context, launch, name, stop - first)
    whole = launch.whole
    values = whole.wanted.values
    if values is not None and launch.columns.stop == values.shape[-1]:
        whole.wanted.ready(launch.chunk.end_job // whole.plan.code.vectors)


def _large_results(
    launch: _ChunkLaunch,
) -> Iterator[tuple[str, NDArray[Any], tuple[int, int]]]:
    """Yield the large results that are wanted, [..., rows], each with the chunk's range."""
    wanted, chunk = launch.whole.wanted, launch.chunk
    if wanted.values is not None:
        yield "values", wanted.values.reshape(launch.whole.plan.code.jobs, -1), chunk[:2]
    if wanted.jacobian is not None and chunk.parameters:
        yield "jacobian", wanted.jacobian, chunk[4:]


def _staging(context: StreamContext, launch: _ChunkLaunch, name: str, count: int) -> NDArray[Any]:
    """Return page-locked memory for a large result, of as many jobs or parameters as given."""
    rows = launch.geometry.end_row - launch.geometry.first_row
    dtype = launch.whole.plan.variant.dtype
    memory = context.pinned(f"{name} {launch.side}", count * rows * dtype.itemsize)
    return memory.view(dtype).reshape(count, rows)
