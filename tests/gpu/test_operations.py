"""Health and metrics of a real server with the CUDA engine."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

import warpfit
from support.servers import health
from support.servers.server import ServerProcess
from warpfit.cli.top import scrape


@pytest.fixture(scope="module")
def server(engine):
    options = "--health-port 0 --metrics-port 0 --front-ends 2 --hang-seconds 5"
    with ServerProcess(*options.split(), devices="0") as process:
        yield process


def test_caches_and_tiers_are_counted(server):
    X = np.ones((1000, 2), np.float32)
    with warpfit.connect(server.address) as client:
        data = client.upload(X, X[:, 0])
        for tier in ("interpreter", "compiled", "compiled"):
            client.evaluate(data, ["x1 + sin(x2)", "x1*x2"], loss="mse", tier=tier)
    time.sleep(1.5)  # until the next probe, after which the engine is asked for its figures
    page = scrape(server.facts["metrics"])
    for tier in ("interpreter", "compiled"):
        assert page.total("warpfit_evaluations_total", tier=tier) >= 1
    for name, least in {"entries": 2, "bytes": 1, "hits_total": 1}.items():
        assert page.total(f"warpfit_cache_{name}", cache="module") >= least
    disk = ("warpfit_cache_hits_total", "warpfit_cache_misses_total")
    assert sum(page.total(name, cache="disk") for name in disk) > 0
    assert page.total("warpfit_compiled_programs_total") >= 2
    assert page.total("warpfit_engine_restarts_total") == 0


def test_gpu_memory_is_measured(server):
    pytest.importorskip("pynvml")
    page = scrape(server.facts["metrics"])
    assert page.total("warpfit_gpu_memory_used_bytes") > 100 << 20
    assert page.total("warpfit_gpu_memory_total_bytes") > 1 << 30
    assert page.total("warpfit_gpu_utilization_ratio") >= 0


def test_a_stopped_engine_is_replaced(server):
    old = server.engine()
    old.send_signal(signal.SIGSTOP)
    assert health.wait_for(server.facts["health"], "NOT_SERVING", timeout=3) < 2
    health.wait_for(server.facts["health"], "SERVING", timeout=60)
    assert server.engine().pid != old.pid
    page = scrape(server.facts["metrics"])
    assert page.total("warpfit_engine_restarts_total", cause="stopped") == 1
