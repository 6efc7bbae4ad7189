"""The CUDA engine: resident data sets, and the tiers that evaluate batches on them."""

from __future__ import annotations

import threading
from pathlib import Path
from types import MappingProxyType
from typing import Final

from warpfit.dataset import Dataset
from warpfit.errors import DatasetNotFoundError, InvalidArgumentError
from warpfit.request import Evaluation, Tier, Timings
from warpfit_server.engine.base import Device, Outputs
from warpfit_server.engine.cuda.device import CudaDevice
from warpfit_server.engine.cuda.interpreter import Interpreter, Tuning
from warpfit_server.engine.cuda.resident import EvaluationTier, ResidentDataset, upload

#: Evaluations in flight at once: enough to overlap copies, kernels and work on the host.
_CONCURRENCY: Final = 8


class CudaEngine:
    """Evaluates batches on one CUDA device; safe to call from several threads.

    Args:
        device: CUDA device number.
        memory_limit: bytes of device memory to use; None for 90% of the device.
        cache_directory: where compiled code is kept; None for the user's cache directory.
        tuning: how the interpreter lays work out; None for the measured best.

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
    ) -> None:
        self._device = CudaDevice(device, memory_limit, cache_directory)
        self._tiers: MappingProxyType[Tier, EvaluationTier] = MappingProxyType(
            {Tier.INTERPRETER: Interpreter(self._device, tuning)}
        )
        self._residents: dict[bytes, ResidentDataset] = {}
        self._lock = threading.Lock()

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
                tiers=tuple(self._tiers),
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

    def evaluate(self, evaluation: Evaluation, outputs: Outputs) -> Timings:
        """Evaluate a checked batch into ``outputs``.

        Raises:
            CancelledError: if ``outputs.cancelled`` became 1; the outputs are then undefined.
            DatasetNotFoundError: if the data set is not loaded.
            InvalidArgumentError: if the evaluation names a tier that this engine lacks.
            ResourceExhaustedError: if device memory is short; the next evaluation works.

        """
        resident = self._resident(evaluation.dataset_id)
        return self._tier(evaluation).evaluate(resident, evaluation, outputs)

    def close(self) -> None:
        """Free all device memory."""
        with self._lock:
            self._residents.clear()
        self._device.close()

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

    def _tier(self, evaluation: Evaluation) -> EvaluationTier:
        """Pick the tier: the one asked for, or the interpreter, which answers at once."""
        asked = Tier.INTERPRETER if evaluation.tier is Tier.AUTO else evaluation.tier
        if asked not in self._tiers:
            raise InvalidArgumentError(
                f"this engine has no {asked.value} tier",
                "TIER_UNAVAILABLE",
                f"Ask for one of {', '.join(tier.value for tier in self._tiers)}",
                "tier",
            )
        return self._tiers[asked]
