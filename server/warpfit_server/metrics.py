"""The server's metrics for Prometheus.

All front ends send what they measure to the main process (`observability.measurements`), which
serves one page for all of them. The multiprocess mode of prometheus_client, files that all
processes map, needs a writable directory, keeps a file for each process that ever was, and costs a
call about four times as much.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from warpfit_server.engine.interface import CACHE_EVENTS, CACHE_SIZES, CACHES
from warpfit_server.observability.gpu_monitor import GpuUsage, gpu_usages
from warpfit_server.observability.measurements import (
    BUCKET_BOUNDS,
    CALL_COUNTERS,
    HISTOGRAMS,
    MetricsDelta,
)

if TYPE_CHECKING:
    from warpfit_server.server import Server

_PREFIX: Final = "warpfit_"
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_Samples = float | Mapping[Any, float]


@dataclass(frozen=True, slots=True, eq=False)
class ServerCollector(Collector):
    """Collects a server's metrics whenever Prometheus asks for them."""

    server: Server
    gpus: Callable[[], Sequence[GpuUsage]] = gpu_usages

    def render(self, accept: str) -> tuple[str, bytes]:
        """Return type and content of the page for a request's ``Accept`` header."""
        encode, content_type = choose_encoder(accept)
        registry = CollectorRegistry()
        registry.register(self)
        return content_type, encode(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        totals = self.server.recorder.totals()
        yield from _call_counters(totals)
        yield from _call_histograms(totals)
        yield _gauge("requests_in_flight", "Calls that run now", totals.in_flight)
        yield from self._engine()
        yield from self._datasets()
        yield from self._caches()
        yield from self._gpus()
        yield from _processes(self.server.processes())

    def _engine(self) -> Iterator[Metric]:
        serving = self.server.readiness.serving
        engine = (version("warpfit"), self.server.engines.engine)
        yield _gauge("build_info", "Version and engine", {engine: 1.0}, "version", "engine")
        yield _gauge("ready", "1 if an engine answers rightly", bool(serving))
        labels = [(supervisor.device.label,) for supervisor in self.server.engines.supervisors]
        text = "1 if the engine of the device answers rightly"
        ready = {label: label[0] in serving for label in labels}
        yield _gauge("device_ready", text, ready, "device")
        text = "Estimated engine time of the calls that the device has not finished"
        work = {
            label: ns / 1e9 for label, ns in zip(labels, self.server.quotas.work(), strict=True)
        }
        yield _gauge("device_work_seconds", text, work, "device")
        text = "Time that the last health probe of the engine took"
        probes = {(watchdog.label,): watchdog.probe_seconds for watchdog in self.server.watchdogs}
        yield _gauge("probe_seconds", text, probes, "device")
        text = "Engine processes that ended unasked"
        yield _counter("engine_restarts", text, self.server.engines.restarts, "device", "cause")

    def _datasets(self) -> Iterator[Metric]:
        usage = self.server.datasets.usage()
        text = "Bytes of all resident data sets, the health probe's included"
        yield _gauge("resident_bytes", text, usage.nbytes)
        text = "Bytes that resident data sets may have"
        yield _gauge("resident_limit_bytes", text, self.server.config.limits().resident_bytes)
        text = "Resident data sets, the health probe's included"
        yield _gauge("resident_datasets", text, usage.datasets)
        yield _counter("evictions", "Data sets that had to make room for others", usage.evictions)

    def _caches(self) -> Iterator[Metric]:
        """Yield the metrics of the engines' caches, without samples for engines that have none."""
        for kinds, make in ((CACHE_EVENTS, _counter), (CACHE_SIZES, _gauge)):
            for kind in kinds:
                samples = {
                    (supervisor.device.label, cache): supervisor.counters[name]
                    for supervisor in self.server.engines.supervisors
                    for cache in CACHES
                    if (name := f"{cache}_cache_{kind}") in supervisor.counters
                }
                text = f"Caches of compiled kernels: {kind}"
                yield make(f"cache_{kind}", text, samples, "device", "cache")

    def _gpus(self) -> Iterator[Metric]:
        usages = self.gpus()
        for name, text, attribute in (
            ("gpu_memory_used_bytes", "GPU memory in use, by all processes", "memory_used"),
            ("gpu_memory_total_bytes", "GPU memory", "memory_total"),
            ("gpu_utilization_ratio", "Share of time with a kernel at work", "utilisation"),
        ):
            samples = {(usage.gpu, usage.name): getattr(usage, attribute) for usage in usages}
            yield _gauge(name, text, samples, "gpu", "name")


def _call_counters(totals: MetricsDelta) -> Iterator[Metric]:
    for name, family in CALL_COUNTERS.items():
        samples = {labels: n for (counted, labels), n in totals.counts.items() if counted == name}
        yield _counter(name, family.text, samples, *family.labels)


def _call_histograms(totals: MetricsDelta) -> Iterator[Metric]:
    for name, family in HISTOGRAMS.items():
        metric = HistogramMetricFamily(_PREFIX + name, family.text, labels=family.labels)
        for (observed, labels), row in totals.buckets.items():
            if observed == name:
                bounds = (*map(str, BUCKET_BOUNDS), "+Inf")
                buckets = list(zip(bounds, accumulate(row[:-1]), strict=True))
                metric.add_metric(labels, buckets, row[-1])
        yield metric


def _processes(processes: Mapping[str, int]) -> Iterator[Metric]:
    memory, files = {}, {}
    for role, number in processes.items():
        place = Path(f"/proc/{number}")
        try:
            pages = int((place / "statm").read_text().split()[1])
            files[role,] = sum(1.0 for _ in (place / "fd").iterdir())
        except OSError:
            continue  # it has ended
        memory[role,] = float(pages * _PAGE_BYTES)
    text = "Memory of a process, shared memory included"
    yield _gauge("process_resident_bytes", text, memory, "process")
    yield _gauge("process_open_files", "File descriptors of a process", files, "process")


def _family(kind: Any, name: str, text: str, samples: _Samples, *labels: str) -> Metric:
    """Make a metric family of one number, or of numbers by the values of its labels."""
    family: Metric = kind(_PREFIX + name, text, labels=labels)
    for values, value in (samples if isinstance(samples, Mapping) else {(): samples}).items():
        family.add_metric(values, float(value))  # type: ignore[attr-defined]
    return family


_gauge = partial(_family, GaugeMetricFamily)
_counter = partial(_family, CounterMetricFamily)
