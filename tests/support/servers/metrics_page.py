"""The collector of a server's metrics, without a server."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from warpfit_server.config import Config
from warpfit_server.dataset_store import StoreUsage
from warpfit_server.logs import Recorder
from warpfit_server.metrics import GpuUsage, ServerCollector


def collector(
    *counters: Mapping[str, float], gpus: Sequence[GpuUsage] = (), recorder: Recorder | None = None
) -> ServerCollector:
    """Collect the metrics of engines with these counters, of which the last one serves."""
    labels = [f"cuda:{number}" for number in range(len(counters))]
    supervisors = [
        SimpleNamespace(device=SimpleNamespace(label=label), counters=own)
        for label, own in zip(labels, counters, strict=True)
    ]
    restarts = {("cuda:0", "hung"): 2}
    server = SimpleNamespace(
        recorder=recorder or Recorder(),
        engines=SimpleNamespace(engine="cuda", restarts=restarts, supervisors=supervisors),
        datasets=SimpleNamespace(usage=lambda: StoreUsage(1, 100, 3)),
        watchdog=SimpleNamespace(
            readiness=SimpleNamespace(serving=frozenset(labels[-1:])),
            engines=[SimpleNamespace(label="cuda:0", probe_seconds=0.5)],
        ),
        config=Config(max_resident_bytes=1000),
        processes=lambda: {"main": 1, "engine": 2**22 + 1},  # no such process
        quotas=SimpleNamespace(work=lambda: [1_500_000_000 * n for n in range(len(labels))]),
    )
    return ServerCollector(server, lambda: gpus)
