"""The server's metrics for Prometheus: the page, what NVIDIA's library adds to it, and its port.

All front ends send what they measure to the main process (`observability.records`), which serves
one page for all of them. The multiprocess mode of prometheus_client, files that all processes map,
needs a writable directory, keeps a file for each process that ever was, and costs a call about four
times as much.

NVIDIA's management library (NVML) opens no CUDA context, so the main process may use it. Without
the package ``nvidia-ml-py`` or without a driver there is nothing to report.

Connecting to the port needs no credentials. So one thread serves all connections, with a limit of
their number and of their time: prometheus_client's own server would give each of them a thread for
as long as it stays. When there are too many connections, the oldest one is closed, because a scrape
ends long before it would be the oldest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from http import HTTPStatus
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

from warpfit.errors import UnavailableError
from warpfit_server.engine.interface import CACHE_EVENTS, CACHE_SIZES, CACHES
from warpfit_server.observability.records import (
    BUCKET_BOUNDS,
    CALL_COUNTERS,
    HISTOGRAMS,
)

if TYPE_CHECKING:
    from warpfit_server.server import Server

_PREFIX: Final = "warpfit_"
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_Samples = float | Mapping[Any, float]
_LOG: Final = logging.getLogger("warpfit.metrics")
_MOST_CONNECTIONS: Final = 32
#: Most bytes of the lines of a request.
_MOST_BYTES: Final = 16 << 10
#: Seconds within which a request must come and its answer be read.
_SECONDS: Final = 5.0
#: Returns type and content of the page for a request's ``Accept`` header.
Render = Callable[[str], tuple[str, bytes]]


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
        serving, supervisors = server.readiness.serving, server.engines.supervisors
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
        probes = {(watchdog.label,): watchdog.probe_seconds for watchdog in server.watchdogs}
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


class MetricsPort:
    """Serves one page over HTTP, which the port's thread renders; port 0 takes a free one.

    Raises:
        UnavailableError: if the port is taken, or the host is no address of this machine.
    """

    def __init__(self, render: Render, host: str, port: int) -> None:
        self._render = render
        self._open: dict[asyncio.StreamWriter, None] = {}
        self._loop = asyncio.new_event_loop()
        try:
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, host, port, limit=_MOST_BYTES)
            )
        except (OSError, UnicodeError) as error:  # UnicodeError of a host that cannot be a name
            self._loop.close()
            raise UnavailableError(
                f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}",
                "PORT_IN_USE",
                "Choose another --metrics-port",
            ) from error
        self.port: Final = int(self._server.sockets[0].getsockname()[1])
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the port and its connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        """Serve until the loop is stopped, and close what is open then."""

        async def close() -> None:
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        self._loop.run_forever()
        self._loop.run_until_complete(close())
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > _MOST_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(_SECONDS):
                request = await reader.readuntil(b"\r\n\r\n")
                writer.write(_answer(request, self._render))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            _LOG.debug("a client of the metrics port was too slow, sent too much, or has gone")
        finally:
            self._open.pop(writer, None)
            writer.transport.abort()


def _answer(request: bytes, render: Render) -> bytes:
    """Answer a connection's only HTTP request, given with the empty line at its end."""
    first, *lines = request.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    if path != "/metrics":
        return _response(HTTPStatus.NOT_FOUND, "text/plain", b"the metrics are at /metrics\n")
    if method not in ("GET", "HEAD"):
        return _response(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"use GET\n")
    headers = {name.lower(): value for name, _, value in (line.partition(":") for line in lines)}
    try:
        content_type, content = render(headers.get("accept", "").strip())
    except Exception:
        _LOG.exception("the metrics could not be collected")
        return _response(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", b"see the log\n")
    return _response(HTTPStatus.OK, content_type, content, has_body=method == "GET")


def _response(
    status: HTTPStatus, content_type: str, content: bytes, *, has_body: bool = True
) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: {content_type}\r\n"
        f"Content-Length: {len(content)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (content if has_body else b"")
