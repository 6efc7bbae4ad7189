"""The tier of derivatives: everything that needs more than values and one of the six losses.

One launch runs all programs with their derivatives (`derivatives.cu`), another turns sums over
columns into losses, gradients and curvatures, a third takes statistics of values that stay on the
device. The driver of fits comes back with the same programs and other parameters: their code stays
on the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from warpfit.errors import CancelledError
from warpfit.ir import Batch, Program
from warpfit.losses import DIFFERENCE
from warpfit.request import Evaluation, Precision, Tier, Timings
from warpfit_server.engine import cpu_cache
from warpfit_server.engine.base import Linearisation, Outputs
from warpfit_server.engine.cuda import nvrtc
from warpfit_server.engine.cuda.compile import link
from warpfit_server.engine.cuda.compile import version as link_version
from warpfit_server.engine.cuda.derivative_code import encode
from warpfit_server.engine.cuda.derivative_launch import (
    ROW_BYTES,
    STATISTICS_ARGUMENTS,
    DeviceCode,
    Geometry,
    Piece,
    Plan,
    keeps_values,
    make_plan,
)
from warpfit_server.engine.cuda.derivative_source import WARPS, case_count, derivative_source
from warpfit_server.engine.cuda.device import CudaDevice, Elapsed, StreamContext
from warpfit_server.engine.cuda.jump_table import with_jump_table
from warpfit_server.engine.cuda.resident import ResidentDataset
from warpfit_server.engine.cuda.source import Variant
from warpfit_server.engine.differentiate import (
    lower_with_derivatives,
    no_row_loss,
    row_loss_tokens,
)
from warpfit_server.engine.wanted import Wanted, room_for_curvatures, wanted_by

#: Batches whose code stays on the device.
_KEPT: Final = 32
_ALIGNMENT: Final = 256
_STATISTICS_THREADS: Final = 256
#: Small results, in the order in which they lie on the device.
_SUMS: Final = ("losses", "gradients", "variable_gradients", "curvatures")
_SMALL: Final = (*_SUMS, "reductions", "moments")


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The loaded kernels of one variant."""

    linearise: Any
    evaluate_scalars: Any
    combine: Any
    measure: Any


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """Everything that the launches of one evaluation share."""

    resident: ResidentDataset
    plan: Plan
    wanted: Wanted
    kernels: _Kernels
    arguments: NDArray[np.void]
    """The plan's, with addresses."""
    small: dict[str, tuple[int, int]]
    """Device address and number of float64 of each small result."""


class DerivativeTier:
    """Evaluates batches with derivatives, losses of one's own and statistics."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._kernels: dict[tuple[Variant, bool], _Kernels] = {}
        self._plans: LRUCache[Hashable, Plan] = LRUCache(_KEPT)
        self._lock = threading.Lock()
        self._differentiate = cpu_cache.load_differentiate(device.cache_directory)

    def prepare_all(self) -> None:
        """Load every variant but those for huge programs; the first start compiles them."""
        variants = [
            Variant(np.dtype(dtype), precision, ROW_BYTES // np.dtype(dtype).itemsize)
            for dtype, precision in (
                (np.float32, Precision.FAST),
                (np.float32, Precision.PRECISE),
                (np.float64, Precision.PRECISE),
            )
        ]
        with ThreadPoolExecutor(len(variants), "derivatives") as threads:
            list(threads.map(lambda variant: self._load(variant, far=False), variants))
        for variant in variants:
            self._prepare(variant, far=False)

    def evaluate(
        self, resident: ResidentDataset, evaluation: Evaluation, outputs: Outputs
    ) -> Timings:
        """Evaluate as `warpfit_server.engine.base.Engine.evaluate` does."""
        wanted = wanted_by(evaluation, outputs)
        timings = self._run(resident, evaluation, wanted, outputs.cancelled, outputs.ready)
        if outputs.losses is not None and evaluation.loss is not None:
            rows = evaluation.row_range(resident.dataset.layout)
            outputs.losses[...] = resident.losses(evaluation.loss, outputs.losses, *rows)
        return timings

    def linearise(
        self,
        resident: ResidentDataset,
        evaluation: Evaluation,
        row_loss: Program,
        *,
        curvature: bool,
        cancelled: NDArray[np.uint8],
    ) -> Linearisation:
        """Linearise as `warpfit_server.engine.base.Engine.linearise` does."""
        batch = evaluation.batch
        losses = np.empty((len(batch), batch.vectors))
        gradients = np.empty(len(batch.parameters))
        wanted = Wanted(losses=losses, gradients=gradients, row_loss=row_loss)
        if curvature:
            wanted = replace(wanted, curvatures=room_for_curvatures(batch))
        self._run(resident, evaluation, wanted, cancelled, _nobody, keep=True)
        return Linearisation(losses, gradients, wanted.curvatures)

    def forget(self) -> None:
        """Free the code that is kept on the device."""
        with self._lock:
            self._plans.clear()

    def _run(
        self,
        resident: ResidentDataset,
        evaluation: Evaluation,
        wanted: Wanted,
        cancelled: NDArray[np.uint8],
        ready: Callable[[int], None],
        *,
        keep: bool = False,
    ) -> Timings:
        started = time.perf_counter_ns()
        with self._device.stream() as context:
            plan = self._plan(context, resident, evaluation, wanted, keep=keep)
            if len(plan.pieces) == 1 and wanted.values is None and wanted.jacobian is None:
                _check_wanted(cancelled)
                computed = self._at_once(context, resident, evaluation, wanted, plan)
            else:
                launch = self._begin(context, resident, evaluation, wanted, plan)
                computed = _piece_by_piece(context, launch, cancelled, ready)
        prepared = time.perf_counter_ns() - started - computed
        return Timings(copy_in=max(0, prepared), compute=computed, tier=Tier.INTERPRETER)

    def _at_once(
        self,
        context: StreamContext,
        resident: ResidentDataset,
        evaluation: Evaluation,
        wanted: Wanted,
        plan: Plan,
    ) -> int:
        """Launch what has no large results; return nanoseconds of the device."""
        elapsed = Elapsed("start", "computed")
        with context.in_one_go(elapsed):
            launch = self._begin(context, resident, evaluation, wanted, plan)
            _start(context, launch, plan.pieces[0])
            context.mark("computed")
            small = _download_small(context, launch)
        _take(small, wanted)
        return elapsed.nanoseconds

    def _begin(
        self,
        context: StreamContext,
        resident: ResidentDataset,
        evaluation: Evaluation,
        wanted: Wanted,
        plan: Plan,
    ) -> _Launch:
        """Upload the parameters and compute what depends on them alone."""
        kernels = self._prepare(plan.geometry.variant, far=plan.geometry.far)
        arguments = plan.arguments.copy()
        parameters = np.asarray(evaluation.batch.parameters, dtype=np.float64)
        arrays: dict[str, NDArray[Any]] = {"order": plan.order, "parameters": parameters}
        offsets, size = _places(arrays)
        staging = context.pinned("inputs", size)
        base = context.buffer("inputs", size)
        for name, array in arrays.items():
            staging[offsets[name] :][: array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
            arguments[name] = base + offsets[name]
        context.upload(base, staging)
        arguments["scalars"] = context.buffer("scalars", plan.scalar_bytes)
        small = _room_for_small(context, wanted)
        for name in small.keys() & set(_SUMS):
            arguments[name] = small[name][0]
        context.mark("start")
        grid = (plan.code.jobs, 1, 1)
        context.launch(kernels.evaluate_scalars, grid, (32, 1, 1), [arguments])
        return _Launch(resident, plan, wanted, kernels, arguments, small)

    def _plan(
        self,
        context: StreamContext,
        resident: ResidentDataset,
        evaluation: Evaluation,
        wanted: Wanted,
        *,
        keep: bool,
    ) -> Plan:
        """Plan of an evaluation, from those kept if it is there."""
        batch, layout = evaluation.batch, resident.dataset.layout
        key = (
            *(id(batch.codes), id(batch.values), id(batch.lengths), batch.vectors),
            *(wanted.row_loss, wanted.curvatures is not None, layout, resident.address(0, 0)),
            *(evaluation.rows, evaluation.precision),
        )
        if keep:
            with self._lock:
                known = self._plans.get(key)
            if known is not None:
                return known
        code = self._lower(context, resident, batch, wanted)
        plan = make_plan(self._device, resident, evaluation, wanted, code)
        if keep:
            with self._lock:
                self._plans[key] = plan
        return plan

    def _lower(
        self, context: StreamContext, resident: ResidentDataset, batch: Batch, wanted: Wanted
    ) -> DeviceCode:
        row_loss = no_row_loss()
        if wanted.row_loss is not None:
            layout = resident.dataset.layout
            program = DIFFERENCE if wanted.is_squares else wanted.row_loss
            row_loss = row_loss_tokens(program, layout.variables, weighted=layout.has_weights)
        lowered = lower_with_derivatives(self._differentiate, batch, row_loss, wanted.wishes)
        code = encode(
            lowered,
            batch,
            keeps_values=keeps_values(wanted),
            has_loss=wanted.row_loss is not None,
            products=wanted.curvatures is not None,
        )
        memory, addresses = _upload(self._device, context, code.arrays)
        return DeviceCode(batch, code, memory, addresses)

    def _prepare(self, variant: Variant, *, far: bool) -> _Kernels:
        with self._lock:
            if (variant, far) not in self._kernels:
                module = self._load(variant, far=far)
                kernels = _Kernels(
                    linearise=module.get_function("linearise"),
                    evaluate_scalars=module.get_function("evaluate_scalars"),
                    combine=module.get_function("combine"),
                    measure=module.get_function("measure"),
                )
                if not far:
                    self._device.allow_shared(kernels.linearise, self._device.shared_bytes(1))
                self._kernels[variant, far] = kernels
            return self._kernels[variant, far]

    def _load(self, variant: Variant, *, far: bool) -> Any:
        architecture = self._device.architecture
        key = [nvrtc.version(), link_version(), str(architecture), *variant.options]
        key.append(derivative_source(variant, far=far))
        return self._device.load(key, lambda: derivative_cubin(variant, architecture, far=far))


def derivative_cubin(variant: Variant, architecture: int, *, far: bool) -> bytes:
    """Compile one variant for compute capability ``architecture``; needs no GPU."""
    ptx = nvrtc.to_ptx(derivative_source(variant, far=far), architecture, variant.options)
    return link(with_jump_table(ptx, case_count()), architecture)


def _nobody(_: int) -> None:
    """Nobody waits for values."""


def _places(arrays: dict[str, NDArray[Any]]) -> tuple[dict[str, int], int]:
    """Lay arrays one behind the other; return offsets and the size of all."""
    offsets, size = {}, 0
    for name, array in arrays.items():
        offsets[name] = size
        size += -(-max(array.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
    return offsets, size


def _upload(
    device: CudaDevice, context: StreamContext, arrays: dict[str, NDArray[Any]]
) -> tuple[Any, dict[str, int]]:
    """Copy arrays to memory of their own on the device; return it and their addresses."""
    offsets, size = _places(arrays)
    staging = context.pinned("code", size)
    for name, array in arrays.items():
        staging[offsets[name] :][: array.nbytes] = array.reshape(-1).view(np.uint8)
    memory = device.allocate(size)
    context.upload(memory.ptr, staging)
    return memory, {name: int(memory.ptr) + offset for name, offset in offsets.items()}


def _room_for_small(context: StreamContext, wanted: Wanted) -> dict[str, tuple[int, int]]:
    arrays = {name: getattr(wanted, name) for name in _SMALL}
    sizes = {name: array.size for name, array in arrays.items() if array is not None}
    address = context.buffer("small", 8 * max(1, sum(sizes.values())))
    places = {}
    for name, size in sizes.items():
        places[name] = (address, size)
        address += 8 * size
    return places


def _piece_by_piece(
    context: StreamContext,
    launch: _Launch,
    cancelled: NDArray[np.uint8],
    ready: Callable[[int], None],
) -> int:
    """Launch piece after piece, taking one piece's results in while the next is computed."""
    pieces = launch.plan.pieces
    for number, piece in enumerate(pieces):
        _check_wanted(cancelled)
        _start(context, launch, piece)
        if number:
            _land(context, launch, pieces[number - 1], ready)
    context.mark("computed")
    small = _download_small(context, launch)
    context.stream.synchronize()
    _land(context, launch, pieces[-1], ready)
    _take(small, launch.wanted)
    return context.nanoseconds("start", "computed")


def _check_wanted(cancelled: NDArray[np.uint8]) -> None:
    if cancelled[0]:
        raise CancelledError("the evaluation was cancelled", "CANCELLED")


def _take(small: dict[str, NDArray[np.float64]], wanted: Wanted) -> None:
    """Copy the small results to where they belong."""
    for name, array in small.items():
        getattr(wanted, name).reshape(-1)[:] = array


def _start(context: StreamContext, launch: _Launch, piece: Piece) -> None:
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
    if launch.small.keys() & set(_SUMS):
        context.launch(launch.kernels.combine, (jobs, 1, 1), (32, 1, 1), [arguments])
    if wanted.reductions is not None or wanted.moments is not None:
        _measure(context, launch, piece, int(arguments["values"]))
    for name, array, (first, stop) in _large(launch, piece):
        staged = _staged(context, geometry, f"{name} {piece.side}", stop - first)
        offset = geometry.first_row * array.itemsize
        context.download_rows(staged, int(arguments[name]) + offset, geometry.pitch)
    context.mark(f"piece {piece.side}")


def _measure(context: StreamContext, launch: _Launch, piece: Piece, values: int) -> None:
    """Take statistics of a piece's values."""
    geometry, resident = launch.plan.geometry, launch.resident
    arguments = np.zeros((), dtype=STATISTICS_ARGUMENTS)
    itemsize = geometry.variant.dtype.itemsize
    arguments["values"] = values + geometry.first_row * itemsize
    arguments["pitch"] = geometry.pitch // itemsize
    arguments["rows"] = geometry.end_row - geometry.first_row
    for name, numbers in (("reductions", 5), ("moments", 6)):
        if name in launch.small:
            arguments[name] = launch.small[name][0] + 8 * numbers * piece.jobs[0]
    if "moments" in launch.small:
        first = geometry.aligned + geometry.first_row
        arguments["target"] = resident.target_address(first)
        arguments["weights"] = resident.weights_address(first)
    grid = (piece.jobs[1] - piece.jobs[0], 1, 1)
    context.launch(launch.kernels.measure, grid, (_STATISTICS_THREADS, 1, 1), [arguments])


def _download_small(context: StreamContext, launch: _Launch) -> dict[str, NDArray[np.float64]]:
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
    context: StreamContext, launch: _Launch, piece: Piece, ready: Callable[[int], None]
) -> None:
    """Wait for a piece and take its large results to where they belong."""
    context.wait(f"piece {piece.side}")
    for name, array, (first, stop) in _large(launch, piece):
        staged = _staged(context, launch.plan.geometry, f"{name} {piece.side}", stop - first)
        array[first:stop] = staged
    if launch.wanted.values is not None:
        ready(piece.jobs[1] // launch.plan.code.batch.vectors)


def _large(launch: _Launch, piece: Piece) -> Iterator[tuple[str, NDArray[Any], tuple[int, int]]]:
    """Large results that are wanted, [..., rows], with a piece's range of them."""
    wanted = launch.wanted
    if wanted.values is not None:
        yield "values", wanted.values.reshape(launch.plan.code.jobs, -1), piece.jobs
    if wanted.jacobian is not None and piece.parameters[0] < piece.parameters[1]:
        yield "jacobian", wanted.jacobian, piece.parameters


def _staged(context: StreamContext, geometry: Geometry, name: str, count: int) -> NDArray[Any]:
    rows, dtype = geometry.end_row - geometry.first_row, geometry.variant.dtype
    return context.pinned(name, count * rows * dtype.itemsize).view(dtype).reshape(count, rows)
