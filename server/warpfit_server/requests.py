"""The call that a thread serves: its id, its tenant, and what is measured of it.

Every call has an id, the client's own from the metadata ``x-request-id`` or one made here. It goes
back in the trailing metadata, stands in every log line of the call, the engine's too, and travels
with it to the process that answers it.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import grpc

from warpfit.codec import REQUEST_ID_KEY
from warpfit.dataset import Layout
from warpfit.request import Evaluation, Timings
from warpfit_server.logs import works_for
from warpfit_server.measurements import Measured, Recorder
from warpfit_server.tenants import tenant_of

_LOG: Final = logging.getLogger("warpfit.requests")
#: What a client's own id may look like; anything else is replaced.
_ID: Final = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
#: Ends of calls that a client expects and deals with.
_ORDINARY: Final = ("OK", "NOT_FOUND", "CANCELLED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
#: Metadata of the standard for distributed traces (W3C Trace Context).
_TRACE_KEYS: Final = ("traceparent", "tracestate")


@dataclass(slots=True, eq=False)
class Request:
    """A call while it runs."""

    method: str
    request_id: str
    started: int
    """``time.monotonic_ns()``, as all moments here."""
    tenant: str = ""
    """Known when the call has ended: its credentials may be checked while it runs."""
    trace: dict[str, str] = field(default_factory=dict)
    """Trace Context of the caller."""
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
    def trailing(self) -> tuple[tuple[str, str], ...]:
        """Metadata that every answer carries."""
        return ((REQUEST_ID_KEY, self.request_id),)


_CURRENT: Final[ContextVar[Request | None]] = ContextVar("request", default=None)


class Tracer(Protocol):
    """Makes a trace of a call; see `warpfit_server.tracing`."""

    def record(self, request: Request, status: str, ended: int) -> None:
        """Record a call that ended at ``time.monotonic_ns()`` ``ended``."""

    def close(self) -> None:
        """Send what is left."""


def current_trailing() -> tuple[tuple[str, str], ...]:
    """Trailing metadata of the call that this thread serves."""
    request = _CURRENT.get()
    return () if request is None else request.trailing


def passed_on(context: grpc.ServicerContext) -> tuple[tuple[str, str], ...]:
    """Metadata of a call that go along when another process answers it."""
    kept = (REQUEST_ID_KEY, *_TRACE_KEYS)
    return tuple((key, str(value)) for key, value in context.invocation_metadata() if key in kept)


def asks_for(evaluation: Evaluation, layout: Layout) -> None:
    """Note what the current call wants to be evaluated."""
    request = _CURRENT.get()
    if request is not None:
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
        self._recorder = recorder
        self._tracer = tracer

    def observed(self, handlers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the handlers, each call of which is observed."""
        return {name: self._observed(name, handler) for name, handler in handlers.items()}

    def _observed(self, method: str, handler: Any) -> Any:
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(self._stream(method, handler.unary_stream))
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(self._unary(method, handler.stream_unary))
        return grpc.unary_unary_rpc_method_handler(self._unary(method, handler.unary_unary))

    def _unary(self, method: str, behaviour: Callable[..., bytes]) -> Callable[..., bytes]:
        def observed(request: Any, context: grpc.ServicerContext) -> bytes:
            with self._call(method, context):
                return behaviour(request, context)

        return observed

    def _stream(
        self, method: str, behaviour: Callable[..., Iterator[bytes]]
    ) -> Callable[..., Iterator[bytes]]:
        def observed(message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            with self._call(method, context) as request:
                for answer in behaviour(message, context):
                    made = time.monotonic_ns()
                    if request.finished:
                        request.encode = made - request.finished - request.suspended
                    yield answer
                    if request.finished:
                        request.suspended += time.monotonic_ns() - made

        return observed

    @contextmanager
    def _call(self, method: str, context: grpc.ServicerContext) -> Iterator[Request]:
        request = _begin(method, context)
        _CURRENT.set(request)
        works_for(request.request_id)
        self._recorder.begin()
        status = None
        try:
            yield request
            status = _status(context, "OK")
        finally:
            ended = time.monotonic_ns()
            request.tenant = tenant_of(context)
            status = status or _status(context, "UNKNOWN")
            self._recorder.end(_measured(request, status, ended))
            _log(request, status, ended)
            if self._tracer is not None:
                self._tracer.record(request, status, ended)
            _CURRENT.set(None)
            works_for("")


def _begin(method: str, context: grpc.ServicerContext) -> Request:
    request_id, trace = "", dict[str, str]()
    for key, value in context.invocation_metadata():
        if key == REQUEST_ID_KEY and isinstance(value, str) and _ID.fullmatch(value):
            request_id = value
        elif key in _TRACE_KEYS:
            trace[key] = str(value)
    request_id = request_id or secrets.token_hex(8)
    request = Request(method, request_id, time.monotonic_ns(), trace=trace)
    context.set_trailing_metadata(request.trailing)
    return request


def _status(context: Any, otherwise: str) -> str:
    """Name of the status with which a call ends; ``otherwise`` if none was set for a live call."""
    code = context.code()
    if code is not None and code is not grpc.StatusCode.CANCELLED:
        return str(code.name)
    if code is None and context.is_active():
        return otherwise
    remaining = context.time_remaining()
    return "DEADLINE_EXCEEDED" if remaining is not None and remaining <= 0 else "CANCELLED"


def _measured(request: Request, status: str, ended: int) -> Measured:
    tenant = (request.tenant,)
    counts: list[tuple[str, tuple[str, ...], float]] = [
        ("requests", (request.method, status, request.tenant), 1.0)
    ]
    observations = [("request_seconds", (request.method,), (ended - request.started) / 1e9)]
    if request.received:
        counts.append(("received_bytes", tenant, request.received))
    timings = request.timings
    if timings is not None:
        counts += [
            ("programs", tenant, request.programs),
            ("tokens", tenant, request.tokens),
            ("token_rows", tenant, request.token_rows),
            ("evaluations", (timings.tier.value,), 1.0),
            ("compiled_programs", (), timings.cache_hits),
        ]
        for stage, nanoseconds in stages(request, timings):
            observations.append(("stage_seconds", (stage,), nanoseconds / 1e9))
    return counts, observations


def stages(request: Request, timings: Timings) -> tuple[tuple[str, int], ...]:
    """Name and nanoseconds of each stage of an answered call."""
    return (
        ("decode", timings.decode),
        ("queue", timings.queue),
        ("copy", timings.copy_in + timings.copy_out),
        ("kernel", timings.compute),
        ("encode", request.encode),
    )


def _log(request: Request, status: str, ended: int) -> None:
    level = logging.DEBUG if status in _ORDINARY else logging.INFO
    if _LOG.isEnabledFor(level):
        seconds = (ended - request.started) / 1e9
        fields = {"method": request.method, "status": status, "tenant": request.tenant}
        measured = {"seconds": round(seconds, 6), "programs": request.programs}
        _LOG.log(
            level,
            "%s ended %s after %.3f s",
            *(request.method, status, seconds),
            extra={"fields": {**fields, **measured}},
        )
