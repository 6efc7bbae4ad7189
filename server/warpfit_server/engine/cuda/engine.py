"""The CUDA engine: resident data sets, and the tiers that evaluate batches on them.

Values and the six built-in losses, with their gradients, are interpreted or compiled. Everything
else that needs derivatives, losses of one's own or statistics is always interpreted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.errors import DatasetNotFoundError, ResourceExhaustedError
from warpfit.ir import Program
from warpfit.request import Evaluation, Precision, Tier, Timings
from warpfit_server.engine.cuda.calibration import Calibration
from warpfit_server.engine.cuda.derivatives.tier import DerivativeTier
from warpfit_server.engine.cuda.interpreter.tier import Interpreter, Tuning
from warpfit_server.engine.cuda.jit.kernel_store import KernelStore
from warpfit_server.engine.cuda.jit.prepare import Prepared
from warpfit_server.engine.cuda.jit.tier import CompiledTier
from warpfit_server.engine.cuda.planner import (
    GRADIENT,
    STARTING_COSTS,
    Advice,
    Costs,
    Planner,
    fingerprint,
)
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.resident_data import EvaluationTier, ResidentDataset, upload
from warpfit_server.engine.cuda.warm_up import warm_up
from warpfit_server.engine.interface import (
    Device,
    EngineBrokenError,
    Linearisation,
    Outputs,
    Steps,
)
from warpfit_server.system.resources import available_cores

_LOG: Final = logging.getLogger("warpfit.engine")
#: Steps in flight at once: one computes while another is copied in, or its losses are sent.
_STEPS_IN_FLIGHT: Final = 2
#: Token-rows of a step for each multiprocessor; in fast mode some 2 ms of an H200.
_STEP_SIZE: Final = 110_000_000
#: Batches that are remembered, to tell those that come again.
_REMEMBERED: Final = 4096


class CudaEngine:
    """Evaluates batches on one CUDA device; safe to call from several threads.

    Args:
        device: CUDA device number.
        memory_limit: bytes of device memory to use; None for 90% of the device.
        cache_directory: where compiled code is kept; None for the user's cache directory.
        tuning: how the interpreter lays work out; None for the measured best.
        threads: threads that compile kernels; None for one a core, half of them
            for what nobody waits for.

    Raises:
        UnavailableError: if CuPy is not installed or the device does not answer.

    """

    name = "cuda"
    steps_in_flight = _STEPS_IN_FLIGHT

    def __init__(
        self,
        device: int = 0,
        memory_limit: int | None = None,
        cache_directory: Path | None = None,
        tuning: Tuning | None = None,
        threads: int | None = None,
    ) -> None:
        self._device = CudaDevice(device, memory_limit, cache_directory)
        self.step_size = _STEP_SIZE * self._device.multiprocessors
        self._seen: LRUCache[Hashable, bool] = LRUCache(_REMEMBERED)
        self._interpreter = Interpreter(self._device, tuning)
        started = time.perf_counter()
        self._interpreter.prepare_all()
        self._derivatives = DerivativeTier(self._device, available_cores())
        self._derivatives.prepare_all()
        _LOG.info("interpreter ready after %.2f s", time.perf_counter() - started)
        kernels = KernelStore(self._device, threads or available_cores())
        self._compiled = CompiledTier(self._device, kernels)
        self._planner = Planner(kernels.workers.background, self._calibrated(kernels))
        # Cutting a batch into kernels takes Python time that its answer should not wait for.
        self._background = ThreadPoolExecutor(1, "prepare")
        self._residents: dict[bytes, ResidentDataset] = {}
        self._lock = threading.Lock()
        warm_up(self)

    @property
    def multiprocessors(self) -> int:
        """Multiprocessors of the device."""
        return self._device.multiprocessors

    def devices(self) -> list[Device]:
        """Describe the device."""
        major, minor = self._device.compute_capability
        return [
            Device(
                name=self._device.name,
                memory=self._device.memory,
                compute_capability=f"{major}.{minor}",
                driver=self._device.driver,
                tiers=(Tier.INTERPRETER, Tier.COMPILED),
            )
        ]

    def load(self, dataset: Dataset) -> None:
        """Copy a data set to the device.

        Raises:
            ResourceExhaustedError: if the device has no room for it.

        """
        resident = upload(self._device, dataset)
        with self._lock:
            self._residents[dataset.content_id] = resident

    def unload(self, content_id: bytes) -> None:
        """Forget a data set; its memory is freed once the evaluations that use it have ended."""
        with self._lock:
            self._residents.pop(content_id, None)

    def gains_from_merging(self, evaluation: Evaluation) -> bool:
        """Batches that come again alone get compiled kernels, unless they are merged."""
        if evaluation.tier is not Tier.AUTO:
            return evaluation.tier is Tier.INTERPRETER
        identity = _identity(evaluation, fingerprint(evaluation.batch))
        with self._lock:
            has_been_seen = identity in self._seen
            self._seen[identity] = True
        return not has_been_seen

    def evaluate(self, evaluation: Evaluation, outputs: Outputs) -> Steps[Timings]:
        """Evaluate a batch into ``outputs``.

        Raises:
            ProgramError: for the first bad token.
            CancelledError: if ``outputs.cancelled`` became 1; the outputs are then undefined.
            DatasetNotFoundError: if the data set is not loaded.
            ResourceExhaustedError: if device memory is short, or the compiled tier was asked for
                and cannot take the batch; the next evaluation works.
            EngineBrokenError: if the device reports an error, after which it answers no more.

        """
        resident = self._resident(evaluation.dataset_id)
        self._device.use()
        try:
            if not _has_two_tiers(evaluation):
                return (yield from self._derivatives.evaluate(resident, evaluation, outputs))
            return (yield from self._evaluate(resident, evaluation, outputs))
        except self._device.errors as error:
            raise self._explained(error) from error

    def linearise(
        self,
        evaluation: Evaluation,
        row_loss: Program,
        *,
        curvature: bool,
        cancelled: NDArray[np.uint8],
    ) -> Steps[Linearisation]:
        """Compute losses, gradients and curvatures in one pass; see `interface.Engine`."""
        resident = self._resident(evaluation.dataset_id)
        self._device.use()
        try:
            return (
                yield from self._derivatives.linearise(
                    resident, evaluation, row_loss, curvature=curvature, cancelled=cancelled
                )
            )
        except self._device.errors as error:
            raise self._explained(error) from error

    def counters(self) -> Mapping[str, float]:
        """Return the figures of the caches of compiled kernels; see `interface.COUNTERS`."""
        return self._compiled.counters()

    def close(self) -> None:
        """Stop the compiler and free all device memory."""
        self._background.shutdown(cancel_futures=True)
        self._compiled.close()
        self._derivatives.forget()
        with self._lock:
            self._residents.clear()
        self._device.close()

    def _calibrated(self, kernels: KernelStore) -> Costs:
        tiers: dict[Tier, EvaluationTier] = {
            Tier.INTERPRETER: self._interpreter,
            Tier.COMPILED: self._compiled,
        }
        try:
            return Calibration(self._device, tiers, kernels.workers.counters).costs()
        except ResourceExhaustedError as error:
            _LOG.warning("the planner starts from another device's figures: %s", error)
            return STARTING_COSTS

    def _evaluate(
        self, resident: ResidentDataset, evaluation: Evaluation, outputs: Outputs
    ) -> Steps[Timings]:
        tier, prepared = evaluation.tier, None
        if tier is Tier.AUTO:
            prepared = self._choose(resident, evaluation)
            tier = Tier.INTERPRETER if prepared is None else Tier.COMPILED
        interpreter: EvaluationTier = self._interpreter
        if evaluation.gradient:
            interpreter = self._derivatives
        started = time.perf_counter()
        if tier is Tier.COMPILED:
            timings = yield from self._compiled.evaluate(resident, evaluation, outputs, prepared)
        else:
            timings = yield from interpreter.evaluate(resident, evaluation, outputs)
        if tier is Tier.INTERPRETER or timings.cache_hits:  # nothing waited for a compiler
            mode, token_rows = _work(resident, evaluation)
            seconds = time.perf_counter() - started
            self._planner.observe(tier, mode, token_rows, seconds)
        return timings

    def _resident(self, content_id: bytes) -> ResidentDataset:
        with self._lock:
            resident = self._residents.get(content_id)
        if resident is None:
            raise DatasetNotFoundError
        return resident

    def _explained(self, error: Exception) -> Exception:
        """Tell errors of the device that only say that memory is short from those that break it."""
        if self._device.is_out_of_memory(error):
            return self._device.out_of_memory()
        return EngineBrokenError(str(error))

    def _choose(self, resident: ResidentDataset, evaluation: Evaluation) -> Prepared | None:
        """Take compiled kernels if they are loaded and pay, else interpret, which needs none."""
        if not self._compiled.supports(evaluation):
            return None
        mark = fingerprint(evaluation.batch)
        loaded = self._compiled.loaded(resident, evaluation, mark)
        mode, token_rows = _work(resident, evaluation)
        advice = self._planner.advise(
            _identity(evaluation, mark),
            mode,
            token_rows,
            len(evaluation.batch),
            loaded=loaded is not None,
        )
        if advice is Advice.INTERPRET_AND_COMPILE:
            # The memory of the batch is used again after the answer.
            detached = replace(evaluation, batch=evaluation.batch.without_parameters())
            self._background.submit(self._request_compile, resident, detached)
        return loaded if advice is Advice.COMPILED else None

    def _request_compile(self, resident: ResidentDataset, evaluation: Evaluation) -> None:
        """Have kernels made; in the background, where nobody waits for the outcome."""
        try:
            self._compiled.request_compile(resident, evaluation)
        except Exception as error:
            _LOG.warning("a batch was not compiled: %s", error)


def _has_two_tiers(evaluation: Evaluation) -> bool:
    """Whether an evaluation asks for no more than values, or a built-in loss with its gradient."""
    return not (
        evaluation.jacobian
        or evaluation.variable_gradient
        or evaluation.reductions
        or evaluation.needs_moments
        or evaluation.custom_loss is not None
        or (evaluation.gradient and evaluation.values)
    )


def _identity(evaluation: Evaluation, mark: int) -> Hashable:
    """Tell repeated batches; a collision only compiles something early or late."""
    wanted = (evaluation.values, evaluation.loss, evaluation.gradient, evaluation.precision)
    return (mark, evaluation.dataset_id, evaluation.rows, *wanted)


def _work(resident: ResidentDataset, evaluation: Evaluation) -> tuple[str, int]:
    """Mode of arithmetic and token-rows of an evaluation."""
    layout = resident.dataset.layout
    mode = "fast" if evaluation.precision is Precision.FAST else "precise"
    if layout.dtype.itemsize == 8:
        mode = "float64"
    return mode + GRADIENT * evaluation.gradient, evaluation.token_rows(layout)
