"""Memory and utilisation of the visible GPUs, with a fake of NVML."""

from types import SimpleNamespace

import pytest

from warpfit_server import metrics
from warpfit_server.metrics import gpu_usages


class NvmlError(Exception):
    pass


def fake_nvml():
    """As much of pynvml as is used, with two GPUs."""

    def by_index(index):
        if index > 1:
            raise NvmlError("no such GPU")
        return index

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=by_index,
        nvmlDeviceGetHandleByUUID={"GPU-a": 0, "GPU-b": 1}.__getitem__,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=100 + handle, total=1000),
        nvmlDeviceGetIndex=lambda handle: handle,
        nvmlDeviceGetName=lambda handle: "GPU",
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=25),
    )


@pytest.mark.parametrize(
    ("visible", "gpus"), [(None, "01"), ("1", "1"), ("GPU-b, 0", "10"), ("", ""), ("5", "")]
)
def test_only_visible_gpus_are_read(monkeypatch, visible, gpus):
    monkeypatch.setattr(metrics, "_library", fake_nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    usages = gpu_usages()
    assert [usage.gpu for usage in usages] == list(gpus)
    assert all(usage.memory_used == 100 + int(usage.gpu) for usage in usages)
    assert all(usage.utilisation == 0.25 for usage in usages)
