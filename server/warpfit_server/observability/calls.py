"""The call that a thread serves: its id, its tenant, and what is measured of it.

Every call has an id, the client's own from the metadata ``x-request-id`` or one made here. It goes
back in the trailing metadata, stands in every log line of the call, the engine's too, and travels
with it to the process that answers it.
"""

from __future__ import annotations

import itertools
import logging
import re
import secrets
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import grpc

from warpfit.codec import REQUEST_ID_KEY
from warpfit.dataset import Layout
from warpfit.request import Evaluation, Timings
from warpfit_server.observability.logs import Allowance, works_for
from warpfit_server.observability.measurements import Recorder, Sample
from warpfit_server.tenancy.fair_lock import Turnstile
from warpfit_server.tenancy.tenants import ANONYMOUS

_LOG: Final = logging.getLogger("warpfit.requests")
#: What a client's own id may look like; anything else is replaced.
_ID: Final = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
#: Ends of calls that a client expects and deals with.
_ORDINARY: Final = ("OK", "NOT_FOUND", "CANCELLED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
#: Lines that failed calls of a tenant may cause in a process: at once, and a second.
_LINES_AT_ONCE, _LINES_A_SECOND = 100, 1.0
#: Metadata of the standard for distributed traces (W3C Trace Context).
_TRACE_KEYS: Final = ("traceparent", "tracestate")
#: Characters of each of them that are passed on at most, which is what the standard asks for; of a
#: longer one nothing is.
_TRACE_CHARACTERS: Final = 512


@dataclass(slots=True, eq=False)
class Request:
    """A call while it runs."""

    method: str
    request_id: str
    started: int
    """``time.monotonic_ns()``, as all moments here."""
    tenant: str = ANONYMOUS
    """Whose call it is, once its credentials have been checked."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """That came with the call."""
    places: list[str] = field(default_factory=list)
    """The tenant whose place it has, while it has one."""
    reserved: int = 0
    """Bytes that are counted for its messages."""
    is_over: bool = False
    """Whether it was ended because its message did not come."""
    turnstile: Turnstile | None = None
    """In which it is while it is taken in."""
    programs: int = 0
    tokens: int = 0
    token_rows: int = 0
    received: int = 0
    """Bytes of payload uploaded."""
    timings: Timings | None = None
    """The engine's, once it has finished."""
    finished: int = 0
    """When the engine had finished."""
    suspended: int = 0
    """Nanoseconds since then in which the client or the network was waited for."""
    encode: int = 0
    """Nanoseconds from then to the last message, but for `suspended`."""

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

    def leave_turnstile(self) -> None:
        """Let the next call be taken in, if this one was."""
        turnstile, self.turnstile = self.turnstile, None
        if turnstile is not None:
            turnstile.leave(self.tenant)


_CURRENT: Final[ContextVar[Request | None]] = ContextVar("request", default=None)


class Tracer(Protocol):
    """Makes a trace of a call; see `warpfit_server.observability.tracing`."""

    def record(self, request: Request, status: str, ended: int) -> None:
        """Record a call that ended at ``time.monotonic_ns()`` ``ended``."""

    def close(self) -> None:
        """Send what is left."""


def serve(request: Request) -> None:
    """Let this thread serve a call from now on."""
    _CURRENT.set(request)
    works_for(request.request_id)


def passed_on(context: grpc.ServicerContext) -> tuple[tuple[str, str], ...]:
    """Metadata of a call that go along when another process answers it."""
    kept = (REQUEST_ID_KEY, *_TRACE_KEYS)
    metadata = dict(context.invocation_metadata())
    found = ((key, str(metadata[key])) for key in kept if key in metadata)
    return tuple((key, value) for key, value in found if len(value) <= _TRACE_CHARACTERS)


def asks_for(evaluation: Evaluation, layout: Layout) -> None:
    """Note what the current call wants to be evaluated: it has been decoded and checked."""
    request = _CURRENT.get()
    if request is not None:
        if request.turnstile is not None:
            request.leave_turnstile()
        programs, vectors, rows = evaluation.shape(layout)
        request.programs, request.tokens = programs, len(evaluation.batch.codes)
        request.token_rows = request.tokens * vectors * rows


def answered(timings: Timings) -> None:
    """Note that the engine has finished the current call."""
    request = _CURRENT.get()
    if request is not None:
        request.timings, request.finished = timings, time.monotonic_ns()


def received(size: int) -> None:
    """Note that the current call has uploaded a data set of ``size`` bytes."""
    request = _CURRENT.get()
    if request is not None:
        request.received = size


class Observer:
    """Measures, logs and traces the calls of a process.

    Args:
        recorder: takes the figures.
        tracer: takes traces, or None.

    """

    def __init__(self, recorder: Recorder, tracer: Tracer | None = None) -> None:
        self.begun = recorder.begin
        """Counts a call as running."""
        self._recorder = recorder
        self._tracer = tracer
        self._lines = Allowance(_LINES_AT_ONCE, _LINES_A_SECOND)
        self._names = itertools.count()
        self._prefix = secrets.token_hex(6)

    def arrived(self, method: str, context: grpc.ServicerContext) -> Request:
        """Take notice of a call, and give it its id."""
        metadata = dict(context.invocation_metadata())
        name = metadata.get(REQUEST_ID_KEY)
        if not isinstance(name, str) or _ID.fullmatch(name) is None:
            name = f"{self._prefix}{next(self._names):04x}"
        context.set_trailing_metadata(((REQUEST_ID_KEY, name),))
        return Request(method, name, time.monotonic_ns(), metadata=metadata)

    def ended(self, request: Request, status: str) -> None:
        """Measure, log and trace a call that has ended, whether it had begun or was refused."""
        ended = time.monotonic_ns()
        self._recorder.end(request, _sample(request, status, ended))
        if _LOG.isEnabledFor(logging.DEBUG):
            _log(logging.DEBUG if status in _ORDINARY else logging.INFO, request, status, ended)
        elif status not in _ORDINARY and _LOG.isEnabledFor(logging.INFO):
            left_out = self._lines.take(request.tenant, ended / 1e9)
            if left_out is not None:
                _log(logging.INFO, request, status, ended, left_out)
        if self._tracer is not None:
            self._tracer.record(request, status, ended)


def status_of(context: Any) -> str:
    """Name of the status with which a call is about to end."""
    code = context.code()
    if code is not None and code is not grpc.StatusCode.CANCELLED:
        return str(code.name)
    if code is None and context.is_active():
        return "OK"
    remaining = context.time_remaining()
    return "DEADLINE_EXCEEDED" if remaining is not None and remaining <= 0 else "CANCELLED"


def _sample(request: Request, status: str, ended: int) -> Sample:
    labels, seconds = (request.method, status, request.tenant), (ended - request.started) / 1e9
    timings = request.timings
    if timings is None:
        return Sample(labels, seconds, request.received)
    return Sample(
        labels,
        seconds,
        request.received,
        request.programs,
        request.tokens,
        request.token_rows,
        timings.tier,
        timings.cache_hits,
        stages(request, timings),
    )


def stages(request: Request, timings: Timings) -> tuple[int, ...]:
    """Nanoseconds of each of `measurements.STAGES` of an answered call."""
    copy = timings.copy_in + timings.copy_out
    return timings.decode, timings.queue, copy, timings.compute, request.encode


def _log(level: int, request: Request, status: str, ended: int, left_out: int = 0) -> None:
    works_for(request.request_id)
    seconds = (ended - request.started) / 1e9
    fields = {"method": request.method, "status": status, "tenant": request.tenant}
    measured: dict[str, Any] = {"seconds": round(seconds, 6), "programs": request.programs}
    more = ""
    if left_out:
        measured["left_out"] = left_out
        more = f", after {left_out} failed calls of tenant {request.tenant} without a line"
    _LOG.log(
        level,
        "%s ended %s after %.3f s%s",
        *(request.method, status, seconds, more),
        extra={"fields": {**fields, **measured}},
    )
