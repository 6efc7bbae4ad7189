"""The page of metrics, without a server."""

from types import SimpleNamespace

import pytest

from warpfit_server.engine.interface import COUNTERS


def test_the_kernel_store_counts_hits_and_misses(tmp_path):
    kernels = pytest.importorskip("warpfit_server.engine.cuda.jit.kernel_store")
    store = kernels.KernelStore(SimpleNamespace(cache_directory=tmp_path), cores=1)
    try:
        assert store.find([object()]) is None
        assert store.disk.get("00ff") is None
        counters = store.counters()
    finally:
        store.close()
    assert set(counters) <= set(COUNTERS)
    assert counters["module_cache_misses"] == counters["disk_cache_misses"] == 1
