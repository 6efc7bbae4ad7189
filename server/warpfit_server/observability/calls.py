"""Records of calls: the id of each call, what is measured of it, its log line and its trace.

Every call has an id: the client's own from the metadata entry ``x-request-id``, or one made here.
The id goes back in the trailing metadata, stands in every log line of the call, also in those of
the engine process, and travels with a call that is forwarded to another process.
"""

import itertools
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import grpc

from warpfit.codec import REQUEST_ID_KEY
from warpfit.dataset import Layout
from warpfit.request import Evaluation, Timings
from warpfit_server.observability.logs import LogRateLimiter, set_logged_request_id
from warpfit_server.observability.measurements import CallMeasurement, Recorder

_LOG: Final = logging.getLogger("warpfit.requests")
#: Ids that clients may choose; any other is replaced.
_ID: Final = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
#: Statuses that clients expect and handle; calls that end with another one are logged.
_ORDINARY: Final = ("OK", "NOT_FOUND", "CANCELLED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
#: Log lines that the failed calls of a tenant may cause in a process: in a burst, and a second.
_BURST_LINES, _LINES_A_SECOND = 100, 1.0
#: Metadata entries of W3C Trace Context.
_TRACE_KEYS: Final = ("traceparent", "tracestate")
#: Longest value of a trace entry that is passed on; the standard asks for at least 512 characters.
_TRACE_CHARACTERS: Final = 512


@dataclass(slots=True, eq=False)
class CallRecord:
    """The record of one call. All moments are ``time.monotonic_ns()``."""

    method: str
    request_id: str
    started: int
    tenant: str
    """Owner of the call; the anonymous tenant until the credentials have been checked."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    on_decoded: Callable[[], None] | None = None
    """Called when the batch of the call has been decoded and checked."""
    programs: int = 0
    tokens: int = 0
    token_rows: int = 0
    received: int = 0
    """Bytes of payload uploaded."""
    timings: Timings | None = None
    """Timings of the engine, once it has finished."""
    finished: int = 0
    """Moment at which the engine had finished; 0 before."""
    suspended: int = 0
    """Nanoseconds since `finished` spent waiting for the client or the network."""
    encode: int = 0
    """Nanoseconds from `finished` to the last message, without `suspended`."""

    @property
    def trace(self) -> dict[str, str]:
        """Trace Context of the caller."""
        return {
            key: str(self.metadata[key])
            for key in _TRACE_KEYS
            if len(self.metadata.get(key, ())) in range(1, _TRACE_CHARACTERS + 1)
        }

    @property
    def trailing(self) -> tuple[tuple[str, str], ...]:
        """Metadata that every answer carries."""
        return ((REQUEST_ID_KEY, self.request_id),)


_CURRENT: Final[ContextVar[CallRecord | None]] = ContextVar("call", default=None)


class Tracer(Protocol):
    """Records traces of calls; see `warpfit_server.observability.tracing`."""

    def record(self, call: CallRecord, status: str, ended: int) -> None:
        """Record a call that ended at ``time.monotonic_ns()`` ``ended``."""

    def close(self) -> None:
        """Send what is left."""


def set_current_call(call: CallRecord) -> None:
    """Let the functions below, and the log lines of this thread, refer to a call."""
    _CURRENT.set(call)
    set_logged_request_id(call.request_id)


def end_decoding() -> None:
    """Let the next call be decoded: the current one only waits for the engine from now on."""
    call = _CURRENT.get()
    if call is not None and call.on_decoded is not None:
        call.on_decoded()


def record_work(evaluation: Evaluation, layout: Layout) -> None:
    """Note what the current call asks for: its batch has been decoded and checked."""
    call = _CURRENT.get()
    if call is not None:
        programs, vectors, rows = evaluation.shape(layout)
        call.programs, call.tokens = programs, len(evaluation.batch.codes)
        call.token_rows = call.tokens * vectors * rows


def record_answer(timings: Timings) -> None:
    """Note that the engine has finished the current call."""
    call = _CURRENT.get()
    if call is not None:
        call.timings, call.finished = timings, time.monotonic_ns()


def record_upload(size: int) -> None:
    """Note that the current call has uploaded a data set of ``size`` bytes."""
    call = _CURRENT.get()
    if call is not None:
        call.received = size


def forwarded_metadata(context: grpc.ServicerContext) -> tuple[tuple[str, str], ...]:
    """Return the metadata entries of a call that go along when another process answers it."""
    kept = (REQUEST_ID_KEY, *_TRACE_KEYS)
    metadata = dict(context.invocation_metadata())
    found = ((key, str(metadata[key])) for key in kept if key in metadata)
    return tuple((key, value) for key, value in found if len(value) <= _TRACE_CHARACTERS)


class Observer:
    """Measures, logs and, if there is a tracer, traces the calls of a process."""

    def __init__(self, recorder: Recorder, tracer: Tracer | None = None) -> None:
        self.begin = recorder.begin
        """Counts a call as running."""
        self._recorder = recorder
        self._tracer = tracer
        self._lines = LogRateLimiter(_BURST_LINES, _LINES_A_SECOND)
        self._numbers = itertools.count()
        self._prefix = secrets.token_hex(6)

    def new_call(self, method: str, context: grpc.ServicerContext, tenant: str) -> CallRecord:
        """Make the record of a call that has arrived, and give the call its id."""
        metadata = dict(context.invocation_metadata())
        name = metadata.get(REQUEST_ID_KEY)
        if not isinstance(name, str) or _ID.fullmatch(name) is None:
            name = f"{self._prefix}{next(self._numbers):04x}"
        call = CallRecord(method, name, time.monotonic_ns(), tenant, metadata)
        context.set_trailing_metadata(call.trailing)
        return call

    def end(self, call: CallRecord, status: str) -> None:
        """Measure, log and trace a call that has ended, whether it was served or refused."""
        ended = time.monotonic_ns()
        self._recorder.end(call, _sample(call, status, ended))
        if _LOG.isEnabledFor(logging.DEBUG):
            _log(logging.DEBUG if status in _ORDINARY else logging.INFO, call, status, ended)
        elif status not in _ORDINARY and _LOG.isEnabledFor(logging.INFO):
            left_out = self._lines.take(call.tenant, ended / 1e9)
            if left_out is not None:
                _log(logging.INFO, call, status, ended, left_out)
        if self._tracer is not None:
            self._tracer.record(call, status, ended)


def status_of(context: Any) -> str:
    """Return the name of the status with which a call is about to end."""
    code = context.code()
    if code is not None and code is not grpc.StatusCode.CANCELLED:
        return str(code.name)
    if code is None and context.is_active():
        return "OK"
    remaining = context.time_remaining()
    return "DEADLINE_EXCEEDED" if remaining is not None and remaining <= 0 else "CANCELLED"


def stages(call: CallRecord, timings: Timings) -> tuple[int, ...]:
    """Return the nanoseconds of each of `measurements.CALL_STAGES` of an answered call."""
    copy = timings.copy_in + timings.copy_out
    return timings.decode, timings.queue, copy, timings.compute, call.encode


def _sample(call: CallRecord, status: str, ended: int) -> CallMeasurement:
    labels, seconds = (call.method, status, call.tenant), (ended - call.started) / 1e9
    timings = call.timings
    if timings is None:
        return CallMeasurement(labels, seconds, call.received)
    return CallMeasurement(
        labels,
        seconds,
        call.received,
        call.programs,
        call.tokens,
        call.token_rows,
        timings.tier,
        timings.cache_hits,
        stages(call, timings),
        timings.device,
    )


def _log(level: int, call: CallRecord, status: str, ended: int, left_out: int = 0) -> None:
    set_logged_request_id(call.request_id)
    seconds = (ended - call.started) / 1e9
    fields = {"method": call.method, "status": status, "tenant": call.tenant}
    measured: dict[str, Any] = {"seconds": round(seconds, 6), "programs": call.programs}
    more = ""
    if left_out:
        measured["left_out"] = left_out
        more = f", after {left_out} failed calls of tenant {call.tenant} without a line"
    _LOG.log(
        level,
        "%s ended %s after %.3f s%s",
        *(call.method, status, seconds, more),
        extra={"fields": {**fields, **measured}},
    )
