"""The page of metrics, without a server."""

from types import SimpleNamespace

import pytest

from warpfit_server.data.dataset_store import StoreUsage
from warpfit_server.engine.interface import COUNTERS
from warpfit_server.metrics import ServerCollector
from warpfit_server.observability.gpu_monitor import GpuUsage
from warpfit_server.observability.measurements import Recorder
from warpfit_server.rpc.health import Health


def page(counters, usages=()):
    """The metrics of a server that has done nothing, as text."""
    health = Health("service", ["cuda:0", "cuda:1"])
    health.set_device("cuda:1", True)
    collector = ServerCollector(
        recorder=Recorder(),
        engines=SimpleNamespace(
            engine="cuda",
            restarts={("cuda:0", "hung"): 2},
            supervisors=[
                SimpleNamespace(device=SimpleNamespace(label=label), counters=own)
                for label, own in (("cuda:0", counters), ("cuda:1", {}))
            ],
        ),
        datasets=SimpleNamespace(usage=lambda: StoreUsage(1, 100, 3)),
        health=health,
        resident_limit=1000,
        processes=lambda: {"engine": 2**22 + 1},  # no such process
        probe_seconds=lambda: {"cuda:0": 0.5},
        work=lambda: [0, 1_500_000_000],
        gpus=SimpleNamespace(usage=lambda: list(usages)),
    )
    return collector.render("")[1].decode()


def test_a_gpu_engine_has_all_metrics():
    counters = {name: float(number) for number, name in enumerate(COUNTERS)}
    text = page(counters, [GpuUsage("0", "H200", 7, 9, 0.5)])
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
        assert store.lease([object()]) is None
        assert store.disk.get("00ff") is None
        counters = store.counters()
    finally:
        store.close()
    assert set(counters) <= set(COUNTERS)
    assert counters["module_cache_misses"] == counters["disk_cache_misses"] == 1
