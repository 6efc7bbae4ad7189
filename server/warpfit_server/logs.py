"""Log lines as text or JSON, and the records of calls that they are written from.

Callers, some of them anonymous, choose much of the text in the log: names in certificates,
metadata, texts of errors. So no place in the code writes more than a few lines a second, and
characters that would end a line, or do something to a terminal, are written as escape sequences.

Every call has an id: the client's own from the metadata entry ``x-request-id``, or one made here.
The id goes back in the trailing metadata, and stands in every log line of the call, also in the log
lines of the engine process.

Every front end has a `Recorder`, which adds up the records of many calls at a time. The front end
sends the increments since the last time to the main process, whose own recorder adds them up:
increments need no files, and survive the process that sent them.

OpenTelemetry traces of calls are made if OTEL_TRACES_EXPORTER is ``otlp`` (extra ``tracing``). A
call becomes a span of kind server, a child of the caller's span if the metadata have a Trace
Context; each stage of an answered call becomes a child of that. Spans are made after the call has
ended, from the times that are measured anyway, so that they do not delay it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Final, NamedTuple

import numpy as np

from warpfit.errors import REQUEST_ID_KEY
from warpfit.request import Timings

#: Most names whose lines are counted at a time; with more of them all counts begin anew.
_MOST_NAMES: Final = 10_000
#: Lines that one place in the code may write in a process: in a burst, and a second.
_BURST_LINES, _LINES_A_SECOND = 200, 2.0
#: gRPC's logger. A part of it gets a traceback for each header that is not UTF-8, which callers
#: without credentials can send thousands of a second. Such headers are read as Latin-1 and do no
#: harm.
_GRPC_LOGGER: Final = "grpc"
#: Id of the call that this thread works for, which its log lines carry; "" for none.
LOGGED_REQUEST_ID: Final[ContextVar[str]] = ContextVar("request id", default="")


class LogRateLimiter:
    """Limits the lines of each name, so that a client that repeats a mistake fills no disk.

    It allows ``burst`` lines without a pause, and ``rate`` a second in the long run, by the generic
    cell rate algorithm, as in `warpfit_server.tenants`.
    """

    def __init__(self, burst: int, rate: float) -> None:
        self._ahead = burst / rate
        self._step = 1 / rate
        self._lock = threading.Lock()
        self._used: dict[str, tuple[float, int]] = {}
        """Moment of the next line, and number of lines left out since the last one, by name."""

    def take(self, name: str, now: float) -> int | None:
        """Ask whether a line may be written at ``now``, in seconds on a monotonic clock.

        Returns how many of the name were left out since the last one, or None to leave it out, too.
        """
        with self._lock:
            if name not in self._used and len(self._used) >= _MOST_NAMES:
                self._used.clear()
            until, left_out = self._used.get(name, (now, 0))
            until = max(until, now) + self._step
            if until - now > self._ahead + 1e-9:
                self._used[name] = (until - self._step, left_out + 1)
                return None
            self._used[name] = (until, 0)
            return left_out


class _PlaceLimit(logging.Filter):
    """Leaves out lines of a place in the code that writes too many; debug lines stay."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = LogRateLimiter(_BURST_LINES, _LINES_A_SECOND)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO:
            return True
        left_out = self._lines.take(f"{record.name}:{record.lineno}", time.monotonic())
        if left_out:
            record.msg = f"{record.getMessage()} (after {left_out} such lines that were left out)"
            record.args = None
        return left_out is not None


def printable(text: str) -> str:
    """Return a text on one line: control characters, line ends and the like are escaped."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def _request_id(record: logging.LogRecord) -> str:
    """Return the id of the call that a line is about; lines of other packages are about none."""
    return LOGGED_REQUEST_ID.get() if record.name.startswith("warpfit") else ""


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if request_id := _request_id(record):
            entry["request_id"] = request_id
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class _TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        request_id = _request_id(record)
        record.message = printable(record.message)
        line = super().formatMessage(record)
        return f"{line} [{request_id}]" if request_id else line

    def formatException(self, ei: Any) -> str:  # noqa: N802 (logging's name)
        # Indented, so that no line of it looks like one of the log's own.
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"    {printable(line)}" for line in lines)


def json_line(message: str, level: str = "info", **fields: object) -> str:
    """Return a line of the log in JSON for what does not go through `logging`."""
    record = logging.makeLogRecord({"msg": message, "name": "warpfit", "levelname": level})
    record.fields = fields
    return _JsonFormatter().format(record)


def configure_logging(level: str, style: str) -> None:
    """Log to standard error from ``level`` on, as ``text`` or ``json`` lines.

    gRPC's own lines, of which each failed handshake causes some, are left out in this process and
    its children unless the environment has ``GRPC_VERBOSITY``; gRPC reads it as it is imported.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    handler = logging.StreamHandler()
    handler.setFormatter(
        _JsonFormatter()
        if style == "json"
        else _TextFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    )
    handler.addFilter(_PlaceLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger(_GRPC_LOGGER).setLevel(logging.CRITICAL)


# --------------------------------------------------------------------------------- records of calls

#: Upper bounds of the buckets of every histogram, in seconds.
BUCKET_BOUNDS: Final = (
    *(round(step * 10.0**power, 9) for power in range(-5, 2) for step in (1.0, 2.5, 5.0)),
    100.0,
)
#: Seconds between two reports of a front end, which also show that it lives.
REPORT_SECONDS: Final = 0.5
#: Counters of a tenant's amounts, which are fields of a record.
_AMOUNTS: Final = ("received_bytes", "programs", "tokens", "token_rows")
_SERVICE: Final = "warpfit.v1.Evaluator"
_LOG: Final = logging.getLogger("warpfit.requests")
#: Ids that clients may choose; any other is replaced.
_ID: Final = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
#: Statuses that clients expect and handle; calls that end with another one are logged.
_ORDINARY: Final = ("OK", "NOT_FOUND", "CANCELLED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
#: Log lines that the failed calls of a tenant may cause in a process: in a burst, and a second.
_RECORD_BURST_LINES, _RECORD_LINES_A_SECOND = 100, 1.0


class Family(NamedTuple):
    """A metric family: its documentation and the names of its labels."""

    text: str
    labels: tuple[str, ...]


CALL_COUNTERS: Final[Mapping[str, Family]] = {
    "requests": Family("Calls that have ended", ("method", "status", "tenant")),
    "programs": Family("Programs evaluated or fitted", ("tenant",)),
    "tokens": Family("Tokens of the programs evaluated or fitted", ("tenant",)),
    "token_rows": Family("Tokens times rows evaluated, one pass each", ("tenant",)),
    "evaluations": Family(
        "Batches evaluated, by the tier and the device that ran them", ("tier", "device")
    ),
    "compiled_programs": Family("Programs served by kernels that were compiled already", ()),
    "received_bytes": Family("Payload of the data sets that were uploaded", ("tenant",)),
}
HISTOGRAMS: Final[Mapping[str, Family]] = {
    "request_seconds": Family("Time of a call from its arrival to its end", ("method",)),
    "stage_seconds": Family(
        "Time of an answered call in one stage: decode, queue, copy, kernel, encode", ("stage",)
    ),
}
#: Stages of an answered call.
CALL_STAGES: Final = ("decode", "queue", "copy", "kernel", "encode")
#: Calls whose measurements are kept before they are added up.
_MOST_CALLS: Final = 256
#: Metadata entries of W3C Trace Context.
TRACE_KEYS: Final = ("traceparent", "tracestate")
#: Longest value of a trace entry that is passed on; the standard asks for at least 512 characters.
TRACE_CHARACTERS: Final = 512
#: Name of a family and the values of its labels.
Series = tuple[str, tuple[str, ...]]


@dataclass(slots=True, eq=False)
class CallRecord:
    """The record of one call. All moments are ``time.monotonic_ns()``."""

    method: str
    request_id: str
    started: int
    tenant: str
    """Owner of the call; the anonymous tenant until the credentials have been checked."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    received_bytes: int = 0
    """Payload uploaded."""
    programs: int = 0
    tokens: int = 0
    token_rows: int = 0
    decode: int = 0
    """Nanoseconds until its batch was decoded and checked."""
    timings: Timings | None = None
    """Timings of the engine, once it has finished."""
    finished: int = 0
    """Moment at which the engine had finished; 0 before."""
    suspended: int = 0
    """Nanoseconds since `finished` spent waiting for the client or the network."""
    encode: int = 0
    """Nanoseconds from `finished` to the last message, without `suspended`."""
    status: str = ""
    """Name of the status with which it has ended."""
    ended: int = 0

    @property
    def seconds(self) -> float:
        """Time that the call took."""
        return (self.ended - self.started) / 1e9

    def stages(self, timings: Timings) -> tuple[int, ...]:
        """Return the nanoseconds of each of `CALL_STAGES` of an answered call."""
        copy = timings.copy_in + timings.copy_out
        return timings.decode, timings.queue, copy, timings.compute, self.encode

    @property
    def trace(self) -> dict[str, str]:
        """Trace Context of the caller."""
        return {
            key: str(self.metadata[key])
            for key in TRACE_KEYS
            if len(self.metadata.get(key, ())) in range(1, TRACE_CHARACTERS + 1)
        }

    @property
    def trailing(self) -> tuple[tuple[str, str], ...]:
        """Metadata that every answer carries."""
        return ((REQUEST_ID_KEY, self.request_id),)


@dataclass(slots=True)
class Histogram:
    """Observations of a time."""

    buckets: list[float] = field(default_factory=lambda: [0.0] * (len(BUCKET_BOUNDS) + 1))
    """Observations in each bucket alone; the last one is for +Inf."""
    seconds: float = 0.0
    """Sum of all observations."""


@dataclass(slots=True, eq=False)
class MetricsDelta:
    """Increments of counters and histograms."""

    counts: dict[Series, float] = field(default_factory=dict)
    histograms: dict[Series, Histogram] = field(default_factory=dict)
    in_flight: int = 0
    """Calls that run at this moment; not an increment."""

    def count(self, name: str, labels: tuple[str, ...], amount: float = 1.0) -> None:
        """Add to a counter."""
        series = (name, labels)
        self.counts[series] = self.counts.get(series, 0.0) + amount

    def observe(self, name: str, labels: tuple[str, ...], seconds: Sequence[float]) -> None:
        """Add observations to a histogram."""
        histogram = self.histograms.setdefault((name, labels), Histogram())
        for bucket in np.searchsorted(BUCKET_BOUNDS, seconds).tolist():
            histogram.buckets[bucket] += 1.0
        histogram.seconds += float(np.sum(seconds))

    def add(self, calls: Sequence[CallRecord]) -> None:
        """Add the measurements of ended calls; programs count if they were answered."""
        times: dict[str, list[float]] = {}
        amounts: Counter[Series] = Counter()
        for call in calls:
            amounts["requests", (call.method, call.status, call.tenant)] += 1
            times.setdefault(call.method, []).append(call.seconds)
            for name in _AMOUNTS[: None if call.timings else 1]:
                if amount := getattr(call, name):
                    amounts[name, (call.tenant,)] += amount
        for method, seconds in times.items():
            self.observe("request_seconds", (method,), seconds)
        for (name, labels), total in amounts.items():
            self.count(name, labels, total)
        answered = [(call, call.timings) for call in calls if call.timings is not None]
        if not answered:
            return
        ran = Counter([(timings.tier, timings.device) for _, timings in answered])
        for (tier, devices), count in ran.items():
            for device in devices.split(","):
                self.count("evaluations", (str(tier), device), count)
        self.count("compiled_programs", (), sum([timings.cache_hits for _, timings in answered]))
        stages = np.array([call.stages(timings) for call, timings in answered], np.float64).T / 1e9
        for stage, seconds in zip(CALL_STAGES, stages.tolist(), strict=True):
            self.observe("stage_seconds", (stage,), seconds)

    def merge(self, other: MetricsDelta) -> None:
        """Add the increments of another one."""
        for (name, labels), amount in other.counts.items():
            self.count(name, labels, amount)
        for series, theirs in other.histograms.items():
            mine = self.histograms.setdefault(series, Histogram())
            mine.buckets = [a + b for a, b in zip(mine.buckets, theirs.buckets, strict=True)]
            mine.seconds += theirs.seconds


class Recorder:
    """Counters and histograms of this process and, in the main process, of the others too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delta = MetricsDelta()
        self._ended: deque[CallRecord] = deque()
        self._running: set[CallRecord] = set()
        self._running_elsewhere: dict[int, int] = {}

    def begin(self, call: CallRecord) -> None:
        """Count a call as running."""
        self._running.add(call)

    def end(self, call: CallRecord) -> None:
        """Record a call that has ended, whether or not it was counted as running."""
        self._running.discard(call)
        self._ended.append(call)
        if len(self._ended) >= _MOST_CALLS:
            with self._lock:
                self._add_up()

    def take(self) -> MetricsDelta:
        """Return the records since the last call, and forget them."""
        with self._lock:
            self._add_up()
            taken, self._delta = self._delta, MetricsDelta()
        taken.in_flight = len(self._running)
        return taken

    def add(self, process: int, delta: MetricsDelta) -> None:
        """Add what another process has recorded."""
        with self._lock:
            self._running_elsewhere[process] = delta.in_flight
            self._delta.merge(delta)

    def forget(self, process: int) -> None:
        """Take notice that another process, with the calls that it had, is gone."""
        with self._lock:
            self._running_elsewhere.pop(process, None)

    def totals(self) -> MetricsDelta:
        """Return everything recorded so far."""
        with self._lock:
            self._add_up()
            elsewhere = sum(self._running_elsewhere.values())
            copy = MetricsDelta(in_flight=len(self._running) + elsewhere)
            copy.merge(self._delta)
        return copy

    def _add_up(self) -> None:
        """Add up the calls that have ended; the lock is held, but calls go on ending."""
        count = len(self._ended)
        if count:
            self._delta.add([self._ended.popleft() for _ in range(count)])


class SpanTracer:
    """Makes the spans of calls by a tracer provider of the OpenTelemetry SDK."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation import tracecontext

        self._api = trace
        self._provider = provider
        self._propagator = tracecontext.TraceContextTextMapPropagator()
        self._tracer = provider.get_tracer("warpfit", version("warpfit"))

    def record(self, call: CallRecord) -> None:
        """Make the spans of a call that has ended."""
        to_wall = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            f"{_SERVICE}/{call.method}",
            context=self._propagator.extract(call.trace),
            kind=self._api.SpanKind.SERVER,
            start_time=call.started + to_wall,
            attributes={
                "rpc.system": "grpc",
                "rpc.service": _SERVICE,
                "rpc.method": call.method,
                "rpc.grpc.status": call.status,
                "warpfit.request_id": call.request_id,
                "warpfit.tenant": call.tenant,
                "warpfit.programs": call.programs,
                "warpfit.tokens": call.tokens,
            },
        )
        if call.status in ("INTERNAL", "UNKNOWN", "UNAVAILABLE"):
            span.set_status(self._api.StatusCode.ERROR, call.status)
        if call.timings is not None:  # the stages follow one another; `finished` ends the kernel's
            named = dict(zip(CALL_STAGES, call.stages(call.timings), strict=True))
            encode = named.pop("encode")
            start = call.finished - sum(named.values()) + to_wall
            context = self._api.set_span_in_context(span)
            for name, nanoseconds in (*named.items(), ("encode", encode)):
                stage = self._tracer.start_span(name, context=context, start_time=start)
                start += nanoseconds
                stage.end(start)
        span.end(call.ended + to_wall)

    def close(self) -> None:
        """Send the remaining records."""
        self._provider.shutdown()


def make_tracer(environment: Mapping[str, str]) -> SpanTracer | None:
    """Make the tracer that OTEL_TRACES_EXPORTER asks for; OTEL_* variables say where spans go.

    There is none, and the log says so, if OpenTelemetry is not installed: the variable may be meant
    for another program.
    """
    if "otlp" not in environment.get("OTEL_TRACES_EXPORTER", "").split(","):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        _LOG.warning("no traces: OTEL_TRACES_EXPORTER needs pip install 'warpfit[tracing]'")
        return None
    provider = TracerProvider(resource=Resource.create({"service.name": "warpfit"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return SpanTracer(provider)


def call_id(metadata: Mapping[str, Any]) -> str:
    """Return the id of a call with these metadata, which all its requests have."""
    name = metadata.get(REQUEST_ID_KEY)
    if isinstance(name, str) and _ID.fullmatch(name):
        return name
    return secrets.token_hex(8)  # a number would tell how many calls others make


class Observer:
    """Measures, logs and, if there is a tracer, traces the calls of a process."""

    def __init__(self, recorder: Recorder, tracer: SpanTracer | None = None) -> None:
        self.begin = recorder.begin
        """Counts a call as running."""
        self._recorder = recorder
        self._tracer = tracer
        self._lines = LogRateLimiter(_RECORD_BURST_LINES, _RECORD_LINES_A_SECOND)

    def end(self, call: CallRecord, status: str) -> None:
        """Measure, log and trace a call that has ended, whether it was served or refused."""
        call.status, call.ended = status, time.monotonic_ns()
        self._recorder.end(call)
        if _LOG.isEnabledFor(logging.DEBUG):
            _log(logging.DEBUG if status in _ORDINARY else logging.INFO, call)
        elif status not in _ORDINARY and _LOG.isEnabledFor(logging.INFO):
            left_out = self._lines.take(call.tenant, call.ended / 1e9)
            if left_out is not None:
                _log(logging.INFO, call, left_out)
        if self._tracer is not None:
            self._tracer.record(call)


def ended_status(context: Any) -> str:
    """Return the name of the status with which a request has ended, or its call is about to end."""
    code = context.code()
    if code is not None and code.name != "CANCELLED":  # the main process does not load gRPC
        return str(code.name)
    if code is None and context.is_active():
        return "OK"
    remaining = context.time_remaining()
    return "DEADLINE_EXCEEDED" if remaining is not None and remaining <= 0 else "CANCELLED"


def _log(level: int, call: CallRecord, left_out: int = 0) -> None:
    LOGGED_REQUEST_ID.set(call.request_id)
    fields = {"method": call.method, "status": call.status, "tenant": call.tenant}
    measured: dict[str, Any] = {"seconds": round(call.seconds, 6), "programs": call.programs}
    more = ""
    if left_out:
        measured["left_out"] = left_out
        more = f", after {left_out} failed calls of tenant {call.tenant} without a line"
    _LOG.log(
        level,
        "%s ended %s after %.3f s%s",
        *(call.method, call.status, call.seconds, more),
        extra={"fields": {**fields, **measured}},
    )
