"""The tier of derivatives: everything that needs more than values and one of the six losses.

One launch runs all programs with their derivatives (`tier.cu`), another turns sums over
columns into losses, gradients and curvatures, a third takes statistics of values that stay on the
device. The driver of fits comes back with the same programs and other parameters: their code stays
on the device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch, Program
from warpfit.losses import DIFFERENCE
from warpfit.request import Evaluation, Precision, Tier, Timings
from warpfit_server.engine.autodiff.differentiate import no_row_loss, row_loss_tokens
from warpfit_server.engine.autodiff.requested_outputs import (
    RequestedOutputs,
    linearisation_outputs,
    requested_outputs,
)
from warpfit_server.engine.cuda.derivatives.encoding import DerivativeCode, ProgramRecords
from warpfit_server.engine.cuda.derivatives.launch_plan import (
    ROW_BYTES,
    DeviceCode,
    Plan,
    keeps_values,
    make_plan,
)
from warpfit_server.engine.cuda.derivatives.lowering import DerivativeLowering
from warpfit_server.engine.cuda.derivatives.source import case_count, derivative_source
from warpfit_server.engine.cuda.derivatives.steps import (
    SUMS,
    Kernels,
    Launch,
    check_wanted,
    download_small,
    piece_by_piece,
    room_for_small,
    start,
    take,
)
from warpfit_server.engine.cuda.interpreter.jump_table import with_jump_table
from warpfit_server.engine.cuda.interpreter.source import Variant
from warpfit_server.engine.cuda.runtime import nvrtc
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.nvjitlink import link
from warpfit_server.engine.cuda.runtime.nvjitlink import version as link_version
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset
from warpfit_server.engine.cuda.runtime.streams import Elapsed, StreamContext
from warpfit_server.engine.interface import Linearisation, Outputs, Steps
from warpfit_server.engine.lowering_cache import Recurring
from warpfit_server.engine.validate import check_sound

_ALIGNMENT: Final = 256


class DerivativeTier:
    """Evaluates batches with derivatives, losses of one's own and statistics.

    Args:
        device: to evaluate on.
        threads: that lower one batch.

    """

    def __init__(self, device: CudaDevice, threads: int) -> None:
        self._device = device
        self._kernels: dict[tuple[Variant, bool], Kernels] = {}
        self._plans: Recurring[Plan] = Recurring()
        """Of passes of fits; their code stays on the device."""
        self._lock = threading.Lock()
        self._lowering = DerivativeLowering(device.cache_directory, threads)

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
    ) -> Steps[Timings]:
        """Evaluate as `warpfit_server.engine.interface.Engine.evaluate` does."""
        check_sound(evaluation.batch, resident.dataset.layout.variables)
        wanted = requested_outputs(evaluation, outputs)
        return (
            yield from self._run(resident, evaluation, wanted, outputs.cancelled, outputs.ready)
        )

    def linearise(
        self,
        resident: ResidentDataset,
        evaluation: Evaluation,
        row_loss: Program,
        *,
        curvature: bool,
        cancelled: NDArray[np.uint8],
    ) -> Steps[Linearisation]:
        """Linearise as `warpfit_server.engine.interface.Engine.linearise` does."""
        found, wanted = linearisation_outputs(evaluation.batch, row_loss, curvature=curvature)
        yield from self._run(resident, evaluation, wanted, cancelled, _nobody, keep=True)
        return found

    def forget(self) -> None:
        """Free the code that is kept on the device."""
        self._plans.clear()

    def _run(
        self,
        resident: ResidentDataset,
        evaluation: Evaluation,
        wanted: RequestedOutputs,
        cancelled: NDArray[np.uint8],
        ready: Callable[[int], None],
        *,
        keep: bool = False,
    ) -> Steps[Timings]:
        started = time.perf_counter_ns()
        plan = self._plan(resident, evaluation, wanted, keep=keep)
        is_small = wanted.values is None and wanted.jacobian is None
        with self._device.stream() as context:
            if len(plan.pieces) == 1 and is_small:
                check_wanted(cancelled)
                computed = self._at_once(context, resident, evaluation, wanted, plan)
            else:
                launch = self._begin(context, resident, evaluation, wanted, plan)
                computed = yield from piece_by_piece(
                    self._device, context, launch, cancelled, ready
                )
        prepared = time.perf_counter_ns() - started - computed
        return Timings(
            copy_in=max(0, prepared),
            compute=computed,
            tier=Tier.INTERPRETER,
        )

    def _at_once(
        self,
        context: StreamContext,
        resident: ResidentDataset,
        evaluation: Evaluation,
        wanted: RequestedOutputs,
        plan: Plan,
    ) -> int:
        """Launch what has no large results; return nanoseconds of the device."""
        elapsed = Elapsed("start", "computed")
        with context.in_one_go(elapsed):
            launch = self._begin(context, resident, evaluation, wanted, plan)
            start(context, launch, plan.pieces[0])
            context.mark("computed")
            small = download_small(context, launch)
        take(small, wanted)
        return elapsed.nanoseconds

    def _begin(
        self,
        context: StreamContext,
        resident: ResidentDataset,
        evaluation: Evaluation,
        wanted: RequestedOutputs,
        plan: Plan,
    ) -> Launch:
        """Upload the parameters and compute what depends on them alone."""
        kernels = self._prepare(plan.geometry.variant, far=plan.geometry.far)
        arguments = plan.arguments.copy()
        parameters = np.asarray(evaluation.batch.parameters, dtype=np.float64)
        arrays = {**plan.code.arrays, "order": plan.order, "parameters": parameters}
        offsets, size = _places(arrays)
        staging = context.pinned("inputs", size)
        base = context.buffer("inputs", size)
        _stage(arrays, offsets, staging)
        for name, offset in offsets.items():
            arguments[name] = base + offset
        context.upload(base, staging)
        arguments["scalars"] = context.buffer("scalars", plan.scalar_bytes)
        small = room_for_small(context, wanted)
        for name in small.keys() & set(SUMS):
            arguments[name] = small[name][0]
        context.mark("start")
        grid = (plan.code.jobs, 1, 1)
        context.launch(kernels.evaluate_scalars, grid, (32, 1, 1), [arguments])
        return Launch(resident, plan, wanted, kernels, arguments, small)

    def _plan(
        self,
        resident: ResidentDataset,
        evaluation: Evaluation,
        wanted: RequestedOutputs,
        *,
        keep: bool,
    ) -> Plan:
        """Plan of an evaluation, from those kept if it is there."""

        def make(batch: Batch) -> Plan:
            code = self._lower(resident, batch, wanted)
            placed = self._keep(batch, code) if keep else _uploaded_later(batch, code)
            return make_plan(self._device, resident, evaluation, wanted, placed)

        batch = evaluation.batch
        wishes = (wanted.row_loss, wanted.curvatures is not None)
        place = (resident.dataset.layout, resident.address(0, 0))
        needs = (batch.vectors, evaluation.rows, evaluation.precision, *wishes, *place)
        return self._plans.of_arrays(batch, needs, make) if keep else make(batch)

    def _lower(
        self, resident: ResidentDataset, batch: Batch, wanted: RequestedOutputs
    ) -> DerivativeCode:
        row_loss = no_row_loss()
        if wanted.row_loss is not None:
            layout = resident.dataset.layout
            program = DIFFERENCE if wanted.is_squares else wanted.row_loss
            row_loss = row_loss_tokens(program, layout.variables, weighted=layout.has_weights)
        return self._lowering.lower(
            batch,
            row_loss,
            wanted.lowering_flags,
            keeps_values=keeps_values(wanted) or bool(wanted.deviation),
            products=wanted.curvatures is not None,
        )

    def _keep(self, batch: Batch, code: DerivativeCode) -> DeviceCode:
        """Copy code to memory of its own on the device."""
        with self._device.stream() as context:
            memory, addresses = _upload(self._device, context, code.arrays)
        return DeviceCode(batch, ProgramRecords(code.programs, code.sums), memory, addresses, {})

    def _prepare(self, variant: Variant, *, far: bool) -> Kernels:
        with self._lock:
            if (variant, far) not in self._kernels:
                module = self._load(variant, far=far)
                kernels = Kernels(
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


def _uploaded_later(batch: Batch, code: DerivativeCode) -> DeviceCode:
    """Have code uploaded together with the parameters."""
    return DeviceCode(batch, code, None, {}, code.arrays)


def _nobody(_: int) -> None:
    """Nobody waits for values."""


def _places(arrays: dict[str, NDArray[Any]]) -> tuple[dict[str, int], int]:
    """Lay arrays one behind the other; return offsets and the size of all."""
    offsets, size = {}, 0
    for name, array in arrays.items():
        offsets[name] = size
        size += -(-max(array.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
    return offsets, size


def _stage(
    arrays: dict[str, NDArray[Any]], offsets: dict[str, int], staging: NDArray[np.uint8]
) -> None:
    """Copy arrays to where they lie in memory from which the device copies."""
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1)
        staging[offsets[name] :][: array.nbytes] = flat.view(np.uint8)


def _upload(
    device: CudaDevice, context: StreamContext, arrays: dict[str, NDArray[Any]]
) -> tuple[Any, dict[str, int]]:
    """Copy arrays to memory of their own on the device; return it and their addresses."""
    offsets, size = _places(arrays)
    staging = context.pinned("code", size)
    _stage(arrays, offsets, staging)
    memory = device.allocate(size)
    context.upload(memory.ptr, staging)
    return memory, {name: int(memory.ptr) + offset for name, offset in offsets.items()}
