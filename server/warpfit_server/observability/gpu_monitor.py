"""Memory and utilisation of the GPUs, from NVIDIA's management library (NVML).

NVML opens no CUDA context, so the main process may use it. Without the package ``nvidia-ml-py`` or
without a driver there is nothing to report.
"""

import logging
import os
from dataclasses import dataclass
from functools import cache
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


def gpu_usages() -> list[GpuUsage]:
    """Read the GPUs that this process may use (``CUDA_VISIBLE_DEVICES``), by one thread at a time.

    There are none without NVML or when it fails.
    """
    nvml = _library()
    if nvml is None:
        return []
    try:
        return [_read(nvml, handle) for handle in _handles(nvml)]
    except nvml.NVMLError as error:
        _LOG.debug("NVML: %s", error)
        return []


def _handles(nvml: Any) -> list[Any]:
    by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [by_index(index) for index in range(nvml.nvmlDeviceGetCount())]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [by_index(int(name)) if name.isdigit() else by_uuid(name) for name in names]


def _read(nvml: Any, handle: Any) -> GpuUsage:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuUsage(
        gpu=str(nvml.nvmlDeviceGetIndex(handle)),
        name=str(nvml.nvmlDeviceGetName(handle)),
        memory_used=memory.used,
        memory_total=memory.total,
        utilisation=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
    )


@cache
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
