"""Memory and utilisation of the GPUs, from NVIDIA's management library (NVML).

NVML opens no CUDA context, so the main process may use it. Without the package ``nvidia-ml-py`` or
without a driver there is nothing to report.
"""

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_LOG: Final = logging.getLogger("warpfit.gpu")


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """Memory and utilisation of a GPU at one moment."""

    gpu: str
    """Its index, as nvidia-smi counts."""
    name: str
    memory_used: int
    """Bytes, of all processes."""
    memory_total: int
    utilisation: float
    """Share of the last sample period in which a kernel ran, 0 to 1."""


class GpuMonitor:
    """Reads the GPUs that this process may use (``CUDA_VISIBLE_DEVICES``)."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._visible = environment.get("CUDA_VISIBLE_DEVICES")
        self._lock = threading.Lock()
        self._nvml = _library()

    def usage(self) -> list[GpuUsage]:
        """Read all visible GPUs; return none without NVML or when it fails."""
        if self._nvml is None:
            return []
        try:
            with self._lock:
                return [self._read(handle) for handle in self._handles()]
        except self._nvml.NVMLError as error:
            _LOG.debug("NVML: %s", error)
            return []

    def _handles(self) -> list[Any]:
        by_index = self._nvml.nvmlDeviceGetHandleByIndex
        if self._visible is None:
            return [by_index(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        names = [name.strip() for name in self._visible.split(",") if name.strip()]
        by_uuid = self._nvml.nvmlDeviceGetHandleByUUID
        return [by_index(int(name)) if name.isdigit() else by_uuid(name) for name in names]

    def _read(self, handle: Any) -> GpuUsage:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return GpuUsage(
            gpu=str(self._nvml.nvmlDeviceGetIndex(handle)),
            name=str(self._nvml.nvmlDeviceGetName(handle)),
            memory_used=memory.used,
            memory_total=memory.total,
            utilisation=self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        )


def _library() -> Any:
    """Load NVML, or return None where it is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        _LOG.debug("no NVML: %s", error)
        return None
    return pynvml
