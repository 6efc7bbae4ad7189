"""Everything that the server counts, as metrics of Prometheus.

All processes that take calls send what they measure to the front door (`measurements`), which
serves one page for all of them. prometheus_client's own way with several processes, files that all
of them map, needs a writable directory, keeps a file for each process that ever was, and costs a
call about four times as much.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from warpfit_server.data.dataset_store import DatasetStore
from warpfit_server.engine.interface import CACHE_EVENTS, CACHE_SIZES, CACHES
from warpfit_server.observability.gpu_monitor import GpuMonitor
from warpfit_server.observability.measurements import BOUNDS, COUNTERS, HISTOGRAMS, Delta, Recorder
from warpfit_server.processes.engine_supervisor import EngineSupervisor
from warpfit_server.rpc.health import Health

_PREFIX: Final = "warpfit_"
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """Where the figures come from."""

    recorder: Recorder
    supervisor: EngineSupervisor
    datasets: DatasetStore
    health: Health
    resident_limit: int
    """Bytes that data sets may have together."""
    processes: Callable[[], Mapping[str, int]]
    """Process ids by role."""
    probe_seconds: Callable[[], float]
    gpus: GpuMonitor


class MetricsPage:
    """The page of all metrics, in the format that the reader asks for."""

    def __init__(self, sources: Sources) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(ServerCollector(sources))

    def render(self, accept: str) -> tuple[str, bytes]:
        """Return type and content of the page for a request's ``Accept`` header."""
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._registry)


class ServerCollector(Collector):
    """Turns the server's figures into metrics, whenever they are asked for."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        totals = self._sources.recorder.totals()
        yield from _counters(totals)
        yield from _histograms(totals)
        yield _gauge("requests_in_flight", "Calls that run now", totals.in_flight)
        yield from self._engine()
        yield from self._datasets()
        yield from _caches(self._sources.supervisor.counters)
        yield from self._gpus()
        yield from _processes(self._sources.processes())

    def _engine(self) -> Iterator[Metric]:
        supervisor = self._sources.supervisor
        build = GaugeMetricFamily(
            _PREFIX + "build_info", "Version and engine", labels=("version", "engine")
        )
        build.add_metric((version("warpfit"), supervisor.engine), 1)
        yield build
        yield _gauge("ready", "1 if the engine answers rightly", self._sources.health.ready)
        yield _gauge(
            "probe_seconds",
            "Time that the last health probe of the engine took",
            self._sources.probe_seconds(),
        )
        restarts = CounterMetricFamily(
            _PREFIX + "engine_restarts", "Engine processes that ended unasked", labels=("cause",)
        )
        for cause, count in dict(supervisor.restarts).items():
            restarts.add_metric((cause,), count)
        yield restarts

    def _datasets(self) -> Iterator[Metric]:
        usage = self._sources.datasets.usage()
        limit = self._sources.resident_limit
        yield _gauge(
            "resident_bytes",
            "Bytes of all resident data sets, the health probe's included",
            usage.nbytes,
        )
        yield _gauge("resident_limit_bytes", "Bytes that resident data sets may have", limit)
        yield _gauge(
            "resident_datasets", "Resident data sets, the health probe's included", usage.datasets
        )
        evictions = CounterMetricFamily(
            _PREFIX + "evictions", "Data sets that had to make room for others"
        )
        evictions.add_metric((), usage.evictions)
        yield evictions

    def _gpus(self) -> Iterator[Metric]:
        usages = self._sources.gpus.usage()
        for name, text, attribute in (
            ("gpu_memory_used_bytes", "GPU memory in use, by all processes", "memory_used"),
            ("gpu_memory_total_bytes", "GPU memory", "memory_total"),
            ("gpu_utilization_ratio", "Share of time with a kernel at work", "utilisation"),
        ):
            family = GaugeMetricFamily(_PREFIX + name, text, labels=("gpu", "name"))
            for usage in usages:
                family.add_metric((usage.gpu, usage.name), getattr(usage, attribute))
            yield family


def _counters(totals: Delta) -> Iterator[Metric]:
    for name, description in COUNTERS.items():
        family = CounterMetricFamily(_PREFIX + name, description.text, labels=description.labels)
        for (counted, labels), amount in totals.counts.items():
            if counted == name:
                family.add_metric(labels, amount)
        yield family


def _histograms(totals: Delta) -> Iterator[Metric]:
    for name, description in HISTOGRAMS.items():
        family = HistogramMetricFamily(_PREFIX + name, description.text, labels=description.labels)
        for (observed, labels), row in totals.buckets.items():
            if observed == name:
                family.add_metric(labels, _cumulative(row), row[-1])
        yield family


def _cumulative(row: list[float]) -> list[tuple[str, float]]:
    buckets, total = [], 0.0
    for bound, count in zip((*map(str, BOUNDS), "+Inf"), row, strict=False):
        total += count
        buckets.append((bound, total))
    return buckets


def _caches(figures: Mapping[str, float]) -> Iterator[Metric]:
    """Metrics of the engine's caches; engines that have none leave the families empty."""
    for kinds, family_type in (
        (CACHE_EVENTS, CounterMetricFamily),
        (CACHE_SIZES, GaugeMetricFamily),
    ):
        for kind in kinds:
            text = f"Caches of compiled kernels: {kind}"
            family: Any = family_type(f"{_PREFIX}cache_{kind}", text, labels=("cache",))
            for cache in CACHES:
                figure = figures.get(f"{cache}_cache_{kind}")
                if figure is not None:
                    family.add_metric((cache,), figure)
            yield family


def _processes(processes: Mapping[str, int]) -> Iterable[Metric]:
    memory = GaugeMetricFamily(
        _PREFIX + "process_resident_bytes",
        "Memory of a process, shared memory included",
        labels=("process",),
    )
    files = GaugeMetricFamily(
        _PREFIX + "process_open_files", "File descriptors of a process", labels=("process",)
    )
    for role, number in processes.items():
        place = Path(f"/proc/{number}")
        try:
            pages = int((place / "statm").read_text().split()[1])
            descriptors = sum(1 for _ in (place / "fd").iterdir())
        except OSError:
            continue  # it has ended
        memory.add_metric((role,), pages * _PAGE)
        files.add_metric((role,), descriptors)
    return memory, files


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(_PREFIX + name, text)
    family.add_metric((), float(value))
    return family
