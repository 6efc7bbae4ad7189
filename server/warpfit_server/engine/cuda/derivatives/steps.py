"""The steps of an evaluation with derivatives: launches, and results on their way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import CancelledError
from warpfit_server.engine.autodiff.requested_outputs import RequestedOutputs
from warpfit_server.engine.cuda.derivatives.launch_plan import (
    STATISTICS_ARGUMENTS,
    Geometry,
    Piece,
    Plan,
    keeps_values,
)
from warpfit_server.engine.cuda.derivatives.source import WARPS
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.finalize import MOMENTS
from warpfit_server.engine.interface import Steps

_STATISTICS_THREADS: Final = 256
#: Small results, in the order in which they lie on the device.
SUMS: Final = ("losses", "gradients", "variable_gradients", "curvatures")
_SMALL: Final = (*SUMS, "reductions", "moments")


@dataclass(frozen=True, slots=True)
class Kernels:
    """The loaded kernels of one variant."""

    linearise: Any
    evaluate_scalars: Any
    combine: Any
    measure: Any


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """Everything that the launches of one evaluation share."""

    resident: ResidentDataset
    plan: Plan
    wanted: RequestedOutputs
    kernels: Kernels
    arguments: NDArray[np.void]
    """The plan's, with addresses."""
    small: dict[str, tuple[int, int]]
    """Device address and number of float64 of each small result."""


def room_for_small(context: StreamContext, wanted: RequestedOutputs) -> dict[str, tuple[int, int]]:
    """Make room on the device for the small results; return address and size of each."""
    arrays = {name: getattr(wanted, name) for name in _SMALL}
    sizes = {name: array.size for name, array in arrays.items() if array is not None}
    address = context.buffer("small", 8 * max(1, sum(sizes.values())))
    places = {}
    for name, size in sizes.items():
        places[name] = (address, size)
        address += 8 * size
    return places


def piece_by_piece(
    device: CudaDevice,
    context: StreamContext,
    launch: Launch,
    cancelled: NDArray[np.uint8],
    ready: Callable[[int], None],
) -> Steps[int]:
    """Launch piece after piece, taking one piece's results in while the next is computed."""
    pieces = launch.plan.pieces
    for number, piece in enumerate(pieces):
        check_wanted(cancelled)
        start(context, launch, piece)
        if number:
            _land(context, launch, pieces[number - 1], ready)
            yield None
            device.use()
    context.mark("computed")
    small = download_small(context, launch)
    context.stream.synchronize()
    _land(context, launch, pieces[-1], ready)
    take(small, launch.wanted)
    return context.nanoseconds("start", "computed")


def check_wanted(cancelled: NDArray[np.uint8]) -> None:
    """Stop when nobody waits for the answer any more.

    Raises:
        CancelledError: then.

    """
    if cancelled[0]:
        raise CancelledError("the evaluation was cancelled", "CANCELLED")


def take(small: dict[str, NDArray[np.float64]], wanted: RequestedOutputs) -> None:
    """Copy the small results to where they belong."""
    for name, array in small.items():
        getattr(wanted, name).reshape(-1)[:] = array


def start(context: StreamContext, launch: Launch, piece: Piece) -> None:
    """Launch one piece and the copies of its large results."""
    geometry, wanted = launch.plan.geometry, launch.wanted
    arguments = launch.arguments.copy()
    jobs = piece.jobs[1] - piece.jobs[0]
    arguments["order"] += 4 * piece.jobs[0]
    arguments["first_job"], arguments["first_parameter"] = piece.jobs[0], piece.parameters[0]
    # The kernels count sums from the batch's first job.
    skipped, end = (8 * geometry.spans * edge for edge in piece.sums)
    arguments["partials"] = (context.buffer("partials", end - skipped) - skipped) % 2**64
    if geometry.far:
        size = jobs * geometry.spans * WARPS * geometry.warp_bytes
        arguments["far"] = context.buffer("far", size)
    if keeps_values(wanted):
        size = jobs * geometry.pitch
        arguments["values"] = context.buffer(f"values {piece.side}", size)
    parameters = piece.parameters[1] - piece.parameters[0]
    if wanted.jacobian is not None and parameters:
        size = parameters * geometry.pitch
        arguments["jacobian"] = context.buffer(f"jacobian {piece.side}", size)
    grid, threads = (geometry.spans, jobs, 1), (32 * WARPS, 1, 1)
    context.launch(launch.kernels.linearise, grid, threads, [arguments], geometry.shared_bytes)
    if launch.small.keys() & set(SUMS):
        context.launch(launch.kernels.combine, (jobs, 1, 1), (32, 1, 1), [arguments])
    if wanted.reductions is not None or wanted.moments is not None:
        _measure(context, launch, piece, int(arguments["values"]))
    for name, array, (first, stop) in _large(launch, piece):
        staged = _staged(context, geometry, f"{name} {piece.side}", stop - first)
        offset = geometry.first_row * array.itemsize
        context.download_rows(staged, int(arguments[name]) + offset, geometry.pitch)
    context.mark(f"piece {piece.side}")


def _measure(context: StreamContext, launch: Launch, piece: Piece, values: int) -> None:
    """Take statistics of a piece's values."""
    geometry, resident = launch.plan.geometry, launch.resident
    arguments = np.zeros((), dtype=STATISTICS_ARGUMENTS)
    itemsize = geometry.variant.dtype.itemsize
    arguments["values"] = values + geometry.first_row * itemsize
    arguments["pitch"] = geometry.pitch // itemsize
    arguments["rows"] = geometry.end_row - geometry.first_row
    for name, numbers in (("reductions", 5), ("moments", MOMENTS)):
        if name in launch.small:
            arguments[name] = launch.small[name][0] + 8 * numbers * piece.jobs[0]
    if "moments" in launch.small:
        first = geometry.aligned + geometry.first_row
        arguments["target"] = resident.target_address(first)
        arguments["weights"] = resident.weights_address(first)
    grid = (piece.jobs[1] - piece.jobs[0], 1, 1)
    context.launch(launch.kernels.measure, grid, (_STATISTICS_THREADS, 1, 1), [arguments])


def download_small(context: StreamContext, launch: Launch) -> dict[str, NDArray[np.float64]]:
    """Start the copy of the small results; return where they will arrive."""
    total = sum(size for _, size in launch.small.values())
    if not total:
        return {}
    staged = context.pinned("small", 8 * total).view(np.float64)
    context.download(staged, next(iter(launch.small.values()))[0])
    arrays, start = {}, 0
    for name, (_, size) in launch.small.items():
        arrays[name] = staged[start : start + size]
        start += size
    return arrays


def _land(
    context: StreamContext, launch: Launch, piece: Piece, ready: Callable[[int], None]
) -> None:
    """Wait for a piece and take its large results to where they belong."""
    context.wait(f"piece {piece.side}")
    for name, array, (first, stop) in _large(launch, piece):
        staged = _staged(context, launch.plan.geometry, f"{name} {piece.side}", stop - first)
        array[first:stop] = staged
    if launch.wanted.values is not None:
        ready(piece.jobs[1] // launch.plan.code.batch.vectors)


def _large(launch: Launch, piece: Piece) -> Iterator[tuple[str, NDArray[Any], tuple[int, int]]]:
    """Large results that are wanted, [..., rows], with a piece's range of them."""
    wanted = launch.wanted
    if wanted.values is not None:
        yield "values", wanted.values.reshape(launch.plan.code.jobs, -1), piece.jobs
    if wanted.jacobian is not None and piece.parameters[0] < piece.parameters[1]:
        yield "jacobian", wanted.jacobian, piece.parameters


def _staged(context: StreamContext, geometry: Geometry, name: str, count: int) -> NDArray[Any]:
    rows, dtype = geometry.end_row - geometry.first_row, geometry.variant.dtype
    return context.pinned(name, count * rows * dtype.itemsize).view(dtype).reshape(count, rows)
