"""The server's metrics for Prometheus: the page, what NVIDIA's library adds to it, and its port.

All front ends send what they measure to the main process (`logs`), which serves
one page for all of them. The multiprocess mode of prometheus_client, files that all processes map,
needs a writable directory, keeps a file for each process that ever was, and costs a call about four
times as much.

NVIDIA's management library (NVML) opens no CUDA context, so the main process may use it. Without
the package ``nvidia-ml-py`` or without a driver there is nothing to report.

Connecting to the port needs no credentials, so the number of its connections is limited. When there
are too many, the oldest one is closed, because a scrape ends long before it would be the oldest.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector

from warpfit.errors import UnavailableError
from warpfit_server.engine.interface import CACHE_EVENTS, CACHE_SIZES, CACHES
from warpfit_server.logs import BUCKET_BOUNDS, CALL_COUNTERS, HISTOGRAMS

if TYPE_CHECKING:
    from warpfit_server.config import Config
    from warpfit_server.dataset_store import DatasetStore
    from warpfit_server.logs import Recorder
    from warpfit_server.processes.engines import Engines
    from warpfit_server.processes.watchdog import Watchdog
    from warpfit_server.tenants import QuotaTable

_PREFIX: Final = "warpfit_"
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_Samples = float | Mapping[Any, float]
_LOG: Final = logging.getLogger("warpfit.metrics")
_MOST_CONNECTIONS: Final = 32
#: Seconds that a client may be silent.
_SECONDS: Final = 5.0


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
    """Read the GPUs that this process may use (``CUDA_VISIBLE_DEVICES``).

    There are none without NVML or when it fails.
    """
    nvml = _library()
    if nvml is None:
        return []
    visible, usages = os.environ.get("CUDA_VISIBLE_DEVICES"), []
    try:
        if visible is None:
            visible = ",".join(map(str, range(nvml.nvmlDeviceGetCount())))
        for name in filter(None, map(str.strip, visible.split(","))):
            handle = (
                nvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdigit()
                else nvml.nvmlDeviceGetHandleByUUID(name)
            )
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            usage = GpuUsage(
                gpu=str(nvml.nvmlDeviceGetIndex(handle)),
                name=str(nvml.nvmlDeviceGetName(handle)),
                memory_used=memory.used,
                memory_total=memory.total,
                utilisation=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            )
            usages.append(usage)
    except nvml.NVMLError as error:
        _LOG.debug("NVML: %s", error)
        return []
    return usages


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


class Measured(Protocol):
    """The parts of a `warpfit_server.server.Server` that have something to report."""

    config: Config
    recorder: Recorder
    quotas: QuotaTable
    engines: Engines
    watchdog: Watchdog
    datasets: DatasetStore

    def processes(self) -> dict[str, int]:
        """Return the process ids by role."""


@dataclass(frozen=True, slots=True, eq=False)
class ServerCollector(Collector):
    """Collects a server's metrics whenever Prometheus asks for them."""

    server: Measured
    gpus: Callable[[], Sequence[GpuUsage]] = gpu_usages

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        server, totals = self.server, self.server.recorder.totals()
        for name, family in CALL_COUNTERS.items():
            counts = totals.counts.items()
            amounts = {labels: n for (counted, labels), n in counts if counted == name}
            yield _counter(name, family.text, amounts, *family.labels)
        for name, family in HISTOGRAMS.items():
            metric = HistogramMetricFamily(_PREFIX + name, family.text, labels=family.labels)
            for (observed, labels), histogram in totals.histograms.items():
                if observed == name:
                    bounds = (*map(str, BUCKET_BOUNDS), "+Inf")
                    buckets = list(zip(bounds, accumulate(histogram.buckets), strict=True))
                    metric.add_metric(labels, buckets, histogram.seconds)
            yield metric
        yield _gauge("requests_in_flight", "Calls that run now", totals.in_flight)

        # The engines.
        serving, supervisors = server.watchdog.readiness.serving, server.engines.supervisors
        engine = (version("warpfit"), server.engines.engine)
        yield _gauge("build_info", "Version and engine", {engine: 1.0}, "version", "engine")
        yield _gauge("ready", "1 if an engine answers rightly", bool(serving))
        devices = [(supervisor.device.label,) for supervisor in supervisors]
        text = "1 if the engine of the device answers rightly"
        ready = {device: device[0] in serving for device in devices}
        yield _gauge("device_ready", text, ready, "device")
        text = "Estimated engine time of the calls that the device has not finished"
        work = {device: ns / 1e9 for device, ns in zip(devices, server.quotas.work(), strict=True)}
        yield _gauge("device_work_seconds", text, work, "device")
        text = "Time that the last health probe of the engine took"
        probes = {(engine.label,): engine.probe_seconds for engine in server.watchdog.engines}
        yield _gauge("probe_seconds", text, probes, "device")
        text = "Engine processes that ended unasked"
        yield _counter("engine_restarts", text, server.engines.restarts, "device", "cause")
        for kinds, make in ((CACHE_EVENTS, _counter), (CACHE_SIZES, _gauge)):
            for kind in kinds:  # without samples of engines that have no caches
                found = {
                    (supervisor.device.label, cache): supervisor.counters[name]
                    for supervisor in supervisors
                    for cache in CACHES
                    if (name := f"{cache}_cache_{kind}") in supervisor.counters
                }
                text = f"Caches of compiled kernels: {kind}"
                yield make(f"cache_{kind}", text, found, "device", "cache")

        # The data sets.
        usage = server.datasets.usage()
        text = "Bytes of all resident data sets, the health probe's included"
        yield _gauge("resident_bytes", text, usage.nbytes)
        text = "Bytes that resident data sets may have"
        yield _gauge("resident_limit_bytes", text, server.config.limits().resident_bytes)
        text = "Resident data sets, the health probe's included"
        yield _gauge("resident_datasets", text, usage.datasets)
        yield _counter("evictions", "Data sets that had to make room for others", usage.evictions)

        # The machine.
        usages = self.gpus()
        for name, text, attribute in (
            ("gpu_memory_used_bytes", "GPU memory in use, by all processes", "memory_used"),
            ("gpu_memory_total_bytes", "GPU memory", "memory_total"),
            ("gpu_utilization_ratio", "Share of time with a kernel at work", "utilisation"),
        ):
            of_gpus = {(gpu.gpu, gpu.name): getattr(gpu, attribute) for gpu in usages}
            yield _gauge(name, text, of_gpus, "gpu", "name")
        memory, files = {}, {}
        for role, number in server.processes().items():
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


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves each connection in a thread of its own; a further one takes the oldest one's place."""

    daemon_threads = True
    request_queue_size = _MOST_CONNECTIONS

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._open: dict[Any, None] = {}
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind the port; the usual one asks a name server for the machine's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Make room for a connection, and serve it."""
        self._open[request] = None
        if len(self._open) > _MOST_CONNECTIONS:
            with suppress(OSError, StopIteration):  # it has just ended
                oldest = next(iter(self._open))
                self._open.pop(oldest, None)
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log why a connection has ended."""
        _LOG.debug("a client of the metrics port was too slow or has gone", exc_info=True)


class _Handler(WSGIRequestHandler):
    """Reads a request and writes its answer."""

    timeout = _SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as its base names it
        """Log requests only if everything is."""
        _LOG.debug(format, *args)


class MetricsPort:
    """Serves a collector's metrics over HTTP, as prometheus_client does; port 0 takes a free one.

    Raises:
        UnavailableError: if the port is taken, or the host is no address of this machine.
    """

    def __init__(self, collector: Collector, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        try:
            self._server = _MetricsServer(host, port)
        except (OSError, UnicodeError) as error:  # UnicodeError of a host that cannot be a name
            raise UnavailableError(
                f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}",
                "PORT_IN_USE",
                "Choose another --metrics-port",
            ) from error
        self._server.set_app(make_wsgi_app(registry))
        self.port: Final = int(self._server.server_port)
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
