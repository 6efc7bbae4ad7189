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
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.errors import DatasetNotFoundError, ResourceExhaustedError
from warpfit.ir import Program
from warpfit.request import Evaluation, Precision, Tier, Timings
from warpfit_server.engine.base import (
    Device,
    EngineBrokenError,
    Linearisation,
    Outputs,
    Reply,
    Standing,
)
from warpfit_server.engine.cuda.calibrate import Calibration
from warpfit_server.engine.cuda.compiled import CompiledTier
from warpfit_server.engine.cuda.derivatives import DerivativeTier
from warpfit_server.engine.cuda.device import CudaDevice
from warpfit_server.engine.cuda.fresh import FreshBatches
from warpfit_server.engine.cuda.interpreter import Interpreter, Tuning
from warpfit_server.engine.cuda.kernels import KernelStore
from warpfit_server.engine.cuda.plan import (
    GRADIENT,
    STARTING_COSTS,
    Advice,
    Costs,
    Planner,
    fingerprint,
)
from warpfit_server.engine.cuda.prepared import Prepared
from warpfit_server.engine.cuda.rehearsal import rehearse
from warpfit_server.engine.cuda.resident import EvaluationTier, ResidentDataset, upload
from warpfit_server.engine.cuda.standing import Standings
from warpfit_server.resources import available_cores

_LOG: Final = logging.getLogger("warpfit.engine")
#: Evaluations in flight at once: enough to overlap copies, kernels and work on the host, and to
#: launch what waits together.
_CONCURRENCY: Final = 16


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
    concurrency = _CONCURRENCY

    def __init__(
        self,
        device: int = 0,
        memory_limit: int | None = None,
        cache_directory: Path | None = None,
        tuning: Tuning | None = None,
        threads: int | None = None,
    ) -> None:
        self._device = CudaDevice(device, memory_limit, cache_directory)
        self._interpreter = Interpreter(self._device, tuning)
        started = time.perf_counter()
        self._interpreter.prepare_all()
        self._derivatives = DerivativeTier(self._device, available_cores())
        self._derivatives.prepare_all()
        _LOG.info("interpreter ready after %.2f s", time.perf_counter() - started)
        kernels = KernelStore(self._device, threads or available_cores())
        self._compiled = CompiledTier(self._device, kernels)
        self._planner = Planner(kernels.workers.background, self._calibrated(kernels))
        self._fresh = FreshBatches(self._device)
        self._standings = Standings()
        self._device.on_shortage = self._standings.revoke
        # Cutting a batch into kernels takes Python time that its answer should not wait for.
        self._background = ThreadPoolExecutor(1, "prepare")
        self._residents: dict[bytes, ResidentDataset] = {}
        self._lock = threading.Lock()
        rehearse(self)

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

    def places(self, token_rows: int, *, fit: bool) -> int:
        """One for each: large ones take turns on the device."""
        return 1

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
        self._standings.revoke(content_id)

    def evaluate(self, evaluation: Evaluation, outputs: Outputs) -> Timings:
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
        try:
            if not _has_two_tiers(evaluation):
                return self._derivatives.evaluate(resident, evaluation, outputs)
            return self._evaluate(resident, evaluation, outputs)
        except self._device.errors as error:
            raise self._explained(error) from error

    def linearise(
        self,
        evaluation: Evaluation,
        row_loss: Program,
        *,
        curvature: bool,
        cancelled: NDArray[np.uint8],
    ) -> Linearisation:
        """Compute losses, gradients and curvatures in one pass; see `base.Engine`."""
        resident = self._resident(evaluation.dataset_id)
        try:
            return self._derivatives.linearise(
                resident, evaluation, row_loss, curvature=curvature, cancelled=cancelled
            )
        except self._device.errors as error:
            raise self._explained(error) from error

    def counters(self) -> Mapping[str, float]:
        """Return the figures of the caches of compiled kernels; see `base.COUNTERS`."""
        return self._compiled.counters()

    def close(self) -> None:
        """Stop the compiler and free all device memory."""
        self._background.shutdown(cancel_futures=True)
        self._standings.revoke()
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
    ) -> Timings:
        tier, prepared = evaluation.tier, None
        if tier is Tier.AUTO:
            prepared = self._choose(resident, evaluation)
            tier = Tier.INTERPRETER if prepared is None else Tier.COMPILED
        interpreter: EvaluationTier = self._interpreter
        if evaluation.gradient:
            interpreter = self._derivatives
        started = time.perf_counter()
        if tier is Tier.COMPILED:
            timings = self._compiled.evaluate(resident, evaluation, outputs, prepared)
        else:
            timings = interpreter.evaluate(resident, evaluation, outputs)
        if tier is Tier.INTERPRETER or timings.cache_hits:  # nothing waited for a compiler
            mode, token_rows = _work(resident, evaluation)
            seconds = time.perf_counter() - started - 1e-9 * timings.queue
            self._planner.observe(tier, mode, token_rows, seconds)
        if outputs.reply is not None:
            outputs.reply.standing = self._stand(resident, evaluation, outputs.reply, tier)
        return timings

    def _stand(
        self, resident: ResidentDataset, evaluation: Evaluation, reply: Reply, tier: Tier
    ) -> Standing | None:
        """Let compiled code answer the next evaluations of this kind, if it has answered this."""
        if reply.place is None or not reply.is_sent:
            return None
        mode, _ = _work(resident, evaluation)
        observe = partial(self._planner.observe, tier, mode)
        start, stop = evaluation.row_range(resident.dataset.layout)
        # As calibrated: what is observed under load holds the wait for others, too.
        cost = 1e9 * (stop - start) / self._planner.start.tiers[tier, mode].rate
        try:
            if tier is Tier.COMPILED:
                duty = self._compiled.duty(resident, evaluation, observe, cost)
            else:
                kind = self._interpreter.kind(resident, evaluation, cost)
                duty = self._fresh.duty(kind, observe, alone=evaluation.tier is Tier.AUTO)
        except ResourceExhaustedError as error:
            _LOG.debug("compiled code does not serve a lane: %s", error)
            return None
        return self._standings.join(duty, reply.place)

    def _resident(self, content_id: bytes) -> ResidentDataset:
        with self._lock:
            resident = self._residents.get(content_id)
        if resident is None:
            raise DatasetNotFoundError(
                f"data set {content_id.hex()[:16]} is not on the device",
                "DATASET_NOT_FOUND",
                "Upload it again",
                "dataset_id",
            )
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
