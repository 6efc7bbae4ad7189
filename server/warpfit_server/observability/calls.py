"""Records of calls: the id of each call, what is measured of it, its log line and its trace.

Every call has an id: the client's own from the metadata entry ``x-request-id``, or one made here.
The id goes back in the trailing metadata, stands in every log line of the call, also in those of
the engine process, and travels with a call that is forwarded to another process.
"""

import logging
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any, Final

import grpc

from warpfit.errors import REQUEST_ID_KEY
from warpfit_server.observability.logs import LOGGED_REQUEST_ID, LogRateLimiter
from warpfit_server.observability.measurements import CallRecord, Recorder
from warpfit_server.observability.tracing import SpanTracer

_LOG: Final = logging.getLogger("warpfit.requests")
#: Ids that clients may choose; any other is replaced.
_ID: Final = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
#: Statuses that clients expect and handle; calls that end with another one are logged.
_ORDINARY: Final = ("OK", "NOT_FOUND", "CANCELLED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")
#: Log lines that the failed calls of a tenant may cause in a process: in a burst, and a second.
_BURST_LINES, _LINES_A_SECOND = 100, 1.0


class Observer:
    """Measures, logs and, if there is a tracer, traces the calls of a process."""

    def __init__(self, recorder: Recorder, tracer: SpanTracer | None = None) -> None:
        self.begin = recorder.begin
        """Counts a call as running."""
        self._recorder = recorder
        self._tracer = tracer
        self._lines = LogRateLimiter(_BURST_LINES, _LINES_A_SECOND)

    def new_call(self, method: str, metadata: Mapping[str, Any], tenant: str) -> CallRecord:
        """Make the record of a request that has arrived with these metadata, with its id."""
        name = metadata.get(REQUEST_ID_KEY)
        if not isinstance(name, str) or _ID.fullmatch(name) is None:
            name = secrets.token_hex(8)  # a number would tell how many calls others make
        return CallRecord(method, name, time.monotonic_ns(), tenant, metadata)

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
    if code is not None and code is not grpc.StatusCode.CANCELLED:
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
