"""The page of metrics, without a server."""

from types import SimpleNamespace

import pytest

from support.servers.metrics_page import collector
from warpfit_server.engine.interface import COUNTERS
from warpfit_server.observability.gpu_monitor import GpuUsage


def test_a_gpu_engine_has_all_metrics():
    counters = {name: float(number) for number, name in enumerate(COUNTERS)}
    page = collector(counters, {}, gpus=[GpuUsage("0", "H200", 7, 9, 0.5)])
    text = page.render("")[1].decode()
    assert 'warpfit_gpu_memory_used_bytes{gpu="0",name="H200"} 7.0' in text
    assert 'warpfit_engine_restarts_total{cause="hung",device="cuda:0"} 2.0' in text
    for cache in ("module", "disk"):
        for event in ("hits", "misses", "evictions", "damaged"):
            value = counters[f"{cache}_cache_{event}"]
            assert f'warpfit_cache_{event}_total{{cache="{cache}",device="cuda:0"}} {value}' in text
        assert f'warpfit_cache_bytes{{cache="{cache}",device="cuda:0"}}' in text
    for device, ready, work in (("cuda:0", 0.0, 0.0), ("cuda:1", 1.0, 1.5)):
        assert f'warpfit_device_ready{{device="{device}"}} {ready}' in text
        assert f'warpfit_device_work_seconds{{device="{device}"}} {work}' in text


def test_the_kernel_store_counts_hits_and_misses(tmp_path):
    kernels = pytest.importorskip("warpfit_server.engine.cuda.jit.kernel_store")
    store = kernels.KernelStore(SimpleNamespace(cache_directory=tmp_path), threads=1)
    try:
        assert store.find([object()]) is None
        assert store.disk.get("00ff") is None
        counters = store.counters()
    finally:
        store.close()
    assert set(counters) <= set(COUNTERS)
    assert counters["module_cache_misses"] == counters["disk_cache_misses"] == 1
