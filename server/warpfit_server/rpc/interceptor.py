"""Interceptor of all calls: authentication, admission, message timeouts and observation.

gRPC hands a call over on the thread that serves the port, as soon as its metadata have arrived. The
interceptor admits or refuses it on that thread, so that a refusal costs neither a thread nor the
message, which gRPC then does not even read. An admitted call is served by a worker thread: an
upload at once, any other call when its message has arrived.

Before a byte of its message is read, an admitted call has a slot and the bytes of the longest
message that gRPC would receive, both counted for its tenant; and each of its messages must arrive
within a time limit.

A caller may send one request after the other in the same call, which spares both sides the end of
a call and the beginning of the next. Each request is admitted, counted and observed as if it were a
call of its own. Between two of them a call has no slot, but the bytes of the longest message are
still counted, and it is ended if the next request is not there soon, or if memory is short.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from warpfit.codec import MORE_ANSWERS
from warpfit.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from warpfit_server.config import Config
from warpfit_server.observability.calls import Observer, status_of
from warpfit_server.observability.logs import LOGGED_REQUEST_ID
from warpfit_server.observability.measurements import CallRecord
from warpfit_server.rpc.error_details import fail_call
from warpfit_server.rpc.port import Call, ReceiveTimeouts
from warpfit_server.system.worker_threads import Workers
from warpfit_server.tenancy.admission import Admission
from warpfit_server.tenancy.authentication import Authenticator, TokenFile
from warpfit_server.tenancy.quotas import QuotaTable
from warpfit_server.tenancy.tenants import ANONYMOUS, TenantLimits

#: Methods whose messages may be long.
_LONG_MESSAGE_METHODS: Final = ("Evaluate", "Optimize", "UploadVariables")
#: Most bytes of any other message, and most seconds in which it must arrive.
_SHORT_MESSAGE, _SHORT_SECONDS = 64 << 10, 5.0
#: Seconds in which the next request of a call must arrive: a search that breeds for longer can bear
#: the cost of a new call.
_IDLE_SECONDS: Final = 0.5
#: Longest message that is sent without waiting until it is on its way, when nothing counts it.
_LAST_BYTES: Final = 64 << 10
#: Seconds after which a call may be repeated that was refused for want of a thread.
_NO_THREAD_SECONDS: Final = 0.1


class Interceptor:
    """Puts authentication, admission and observation before the methods of a service.

    The main process trusts the calls that other processes forward to it.

    Raises:
        InvalidArgumentError: if the token file or the tenants file cannot be used.
    """

    def __init__(self, config: Config, quotas: QuotaTable, *, is_main: bool = False) -> None:
        self.authenticator = Authenticator(
            TokenFile(config.token_file) if config.token_file else None,
            certificates=bool(config.tls_client_ca),
            trusts_local_socket=is_main,
        )
        tenants = TenantLimits(
            config.limits(), config.tenants_file or None, shared=config.has_tenants
        )
        self.admission = Admission(config, tenants, quotas)
        """Accepts or refuses the calls of this process."""
        # Twice as many as slots: a cancelled call leaves its slot at once, but its thread only
        # when the engine has stopped.
        threads = 2 * max(1, config.max_requests)
        self.workers = Workers(threads, max(1, int(tenants.share(threads))))
        """Threads that serve calls."""
        self.message_seconds = config.message_seconds
        """Time in which a message must arrive."""
        self.timeouts = ReceiveTimeouts()
        """Time limits of the calls that wait for a message."""
        self.idle: set[_IdleCall] = set()
        """Calls that wait for another request."""
        self.is_draining = False
        """Whether no call is kept for another request."""

    def intercept(
        self, handlers: Mapping[str, Any], observer: Observer, *, forwards: bool = False
    ) -> dict[str, Any]:
        """Return gRPC's handlers by the name of the method, each behind this interceptor.

        If they forward calls to another process, which observes them, this process observes only
        those that it refuses.
        """
        return {
            name: grpc.stream_stream_rpc_method_handler(
                _InterceptedMethod(name, handler, self, observer, forwards)
            )
            for name, handler in handlers.items()
        }

    def drain(self) -> None:
        """End the calls that wait for another request, and let no other call wait for one."""
        self.is_draining = True
        for idle in list(self.idle):
            idle.end()


@dataclass(frozen=True, eq=False, slots=True)
class _InterceptedMethod:
    """One method as a handler for gRPC: it admits calls and has them served by worker threads."""

    name: str
    handler: Any
    interceptor: Interceptor
    observer: Observer
    forwards: bool

    def __call__(self, call: Call) -> None:
        """Refuse a call, or have it served."""
        served = self.admit(call, self.interceptor.admission.message_bytes)
        if served is None:
            return
        if self.handler.request_streaming:
            self.interceptor.workers.start(served.record.tenant, served.serve)
        else:
            served.receive()

    def admit(self, call: Call, nbytes: int) -> _ServedCall | None:
        """Count a call, or a request of one that has been answered before, or refuse it.

        ``nbytes`` are those of its message, at most.
        """
        record = call.record = self.observer.new_call(self.name, call, ANONYMOUS)
        served = _ServedCall(self, self.interceptor, record, call)
        try:
            served.admit(nbytes)
        except Exception as error:
            fail_call(call, error, record.trailing)
            self.observer.end(record, status_of(call))
            call.end()
            return None
        # A cancelled call leaves its slot at once, but its memory only when the engine has stopped.
        call.add_callback(served.leave_slot)
        if not self.forwards:
            self.observer.begin(record)
        return served


@dataclass(eq=False, slots=True)
class _ServedCall:
    """One call, from its arrival to its end, and what is counted for it."""

    method: _InterceptedMethod
    interceptor: Interceptor
    record: CallRecord
    call: Call
    message: bytes | None = None
    """The only one, until the method has it."""
    most_bytes: int = 0
    """Most bytes of a message."""
    message_seconds: float = 0.0
    """Time in which a message must arrive."""
    reserved: int = 0
    """Bytes that are counted for its message."""
    slots: list[int] = field(default_factory=list)
    """Holds a 1 while the call has a slot; `leave_slot` takes it out."""
    is_over: bool = False
    """Whether it has been ended because its message did not arrive."""

    def admit(self, nbytes: int) -> None:
        """Find the tenant and count the call, and the bytes that its message may have.

        Raises:
            UnauthenticatedError: without valid credentials.
            PermissionDeniedError: if the tenant is suspended.
            ResourceExhaustedError: if it comes too soon, or too much is in flight.
        """
        admission, record = self.interceptor.admission, self.record
        tenant, is_forwarded = self.interceptor.authenticator.authenticate(
            self.call, record.metadata
        )
        record.tenant = tenant
        limits = admission.limits(tenant)
        self.most_bytes = limits.message_bytes
        self.message_seconds = self.interceptor.message_seconds
        if self.method.name not in _LONG_MESSAGE_METHODS:
            self.most_bytes = min(self.most_bytes, _SHORT_MESSAGE)
            self.message_seconds = min(self.message_seconds, _SHORT_SECONDS)
        if not is_forwarded:  # the process that forwards a call has counted all but its message
            admission.check_rate(tenant, limits.rate)
        if not self.interceptor.workers.has_room(tenant):
            raise _no_thread()
        admission.enter(tenant, limits, nbytes, slot=not is_forwarded)
        self.reserved = nbytes
        if not is_forwarded:
            self.slots.append(1)

    def leave_slot(self, nbytes: int = 0) -> None:
        """Give back the slot, if the call still has one, and bytes of its message.

        Any thread may call this, several times.
        """
        try:
            slots = self.slots.pop()  # atomic, so that only one thread gets it
        except IndexError:
            slots = 0
        if slots or nbytes:
            self.interceptor.admission.leave(self.record.tenant, slots, nbytes)

    def receive(self) -> None:
        """Have the call served once its message is there, or cannot come any more."""
        self.interceptor.timeouts.begin(self, self.message_seconds, self._end_late)
        self.call.receive(self._arrived)

    def _arrived(self, message: bytes | None) -> None:
        self.is_over = not self.interceptor.timeouts.stop(self)
        self.start(message)

    def start(self, message: bytes | None) -> None:
        """Have the call served, with its message."""
        self.message = message
        self.interceptor.workers.start(self.record.tenant, self.serve)

    def serve(self) -> None:
        """Run the method and send its answer."""
        LOGGED_REQUEST_ID.set(self.record.request_id)
        last = None
        try:
            last = self._answer()
        except Exception as error:
            fail_call(self.call, error, self.record.trailing)
            _clear_tracebacks(error)
        finally:
            self.leave_slot(self.reserved)
        if not self.method.forwards:
            self.method.observer.end(self.record, status_of(self.call))
        if not self.is_over and not (last is not None and self._await_more(last)):
            self.call.end(last)

    def _await_more(self, last: bytes) -> bool:
        """Send the last message and wait for another request; return False if that cannot be."""
        interceptor, tenant = self.interceptor, self.record.tenant
        if not self.call.awaits_more or interceptor.is_draining:
            return False
        if not interceptor.admission.reserve_message(tenant):
            return False
        return _IdleCall(self.method, tenant, self.call).begin(last + MORE_ANSWERS)

    def _answer(self) -> bytes | None:
        """Send the answer but for its last message, which is returned unless it is long."""
        handler = self.method.handler
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary
        argument: Any = iter(self._next, None) if handler.request_streaming else self._only()
        answer: Any = behaviour(argument, self.call)
        del argument  # the method alone decides how long the message is kept
        last = self._send_each(answer) if handler.response_streaming else answer
        if last is not None and len(last) > _LAST_BYTES:
            self.call.send(last)
            last = None
        return last

    def _only(self) -> bytes:
        """Return the only message of the call."""
        message, self.message = self._check(self.message), None
        if message is None and not self.call.is_active():
            raise CancelledError("the call has ended", "CANCELLED")
        if message is None:
            raise InvalidArgumentError(
                "the call has no message", "NO_MESSAGE", "Send exactly one request message"
            )
        if len(message) < self.reserved:
            surplus, self.reserved = self.reserved - len(message), len(message)
            self.interceptor.admission.leave(self.record.tenant, 0, surplus)
        return message

    def _next(self) -> bytes | None:
        """Wait for the next message; return None if there is none."""
        timeouts = self.interceptor.timeouts
        timeouts.begin(self, self.message_seconds, self._end_late)
        try:
            message = next(self.call.messages, None)
        finally:
            self.is_over = not timeouts.stop(self)
        return self._check(message)

    def _check(self, message: bytes | None) -> bytes | None:
        """Return a message that has come in time and is not too long."""
        if self.is_over:
            raise _too_late(self.message_seconds)
        if message is not None and len(message) > self.most_bytes:
            raise ResourceExhaustedError(
                f"one message has {len(message)} bytes, the limit is {self.most_bytes}",
                "MESSAGE_TOO_LARGE",
                "Send smaller batches or pieces, or ask for a higher limit",
                needed=len(message),
                available=self.most_bytes,
            )
        return message

    def _end_late(self) -> None:
        """End the call because its message has not arrived; none comes after that."""
        self.is_over = True
        fail_call(self.call, _too_late(self.message_seconds), self.record.trailing)
        self.call.end()

    def _send_each(self, answer: Any) -> bytes | None:
        """Send the messages of an answer, and measure the time that making them takes.

        Returns:
            The last one, which the method returns instead of yielding it.
        """
        record = self.record
        try:
            while True:
                message, is_last = _advance(answer)
                made = time.monotonic_ns()
                if record.finished:
                    record.encode = made - record.finished - record.suspended
                if is_last:
                    return message
                self.call.send(message)
                if record.finished:
                    record.suspended += time.monotonic_ns() - made
                if not self.call.is_active():
                    return None
        finally:
            answer.close()


@dataclass(eq=False, slots=True)
class _IdleCall:
    """A call that has been answered and waits for another request.

    The bytes of the longest message are counted for it, as long as it is in `Interceptor.idle`.
    """

    method: _InterceptedMethod
    tenant: str
    call: Call
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held until the answer is on its way, before which nobody may end the call."""

    def begin(self, answer: bytes) -> bool:
        """Send the last message of an answer and wait; return False if the call has ended."""
        interceptor = self.method.interceptor
        with self.lock:
            interceptor.idle.add(self)
            interceptor.timeouts.begin(self, _IDLE_SECONDS, self.end)
            is_begun = self.call.receive(self._arrived, answer)
        if not is_begun or interceptor.is_draining:
            self.end()
        return is_begun

    def end(self) -> None:
        """End the call, unless a request has come; any thread may call this."""
        with self.lock:
            if self._leave() and self.call.is_active():
                self.call.end()

    def _arrived(self, message: bytes | None) -> None:
        if message is None:
            self.end()
        elif self._leave():
            served = self.method.admit(self.call, len(message))
            if served is not None:
                served.start(message)

    def _leave(self) -> bool:
        """Give the bytes back; return False if another thread has done so."""
        interceptor = self.method.interceptor
        interceptor.timeouts.stop(self)
        try:
            interceptor.idle.remove(self)  # atomic, so that only one thread does
        except KeyError:
            return False
        interceptor.admission.leave(self.tenant, 0, interceptor.admission.message_bytes)
        return True


def _advance(answer: Any) -> tuple[bytes, bool]:
    """Return the next message of an answer, and whether it is the one that the method returns."""
    try:
        return next(answer), False
    except StopIteration as end:
        return end.value, True


def _clear_tracebacks(error: BaseException | None) -> None:
    """Release the frames that an error has left, with all that they hold.

    The error with which gRPC says that a client has gone is held by a frame of its own traceback.
    This reference cycle would keep the call's last messages until Python's garbage collector runs,
    which may be a thousand calls later.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def _too_late(seconds: float) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"no complete message has arrived within {seconds:g} s",
        "MESSAGE_TIMEOUT",
        "Send each message as soon as the call has begun, and smaller ones over a slow network",
    )


def _no_thread() -> ResourceExhaustedError:
    return ResourceExhaustedError(
        "all threads that may serve this tenant are busy",
        "TOO_MANY_REQUESTS",
        "Retry with back-off, or start the server with a higher --max-requests",
        retry_after=_NO_THREAD_SECONDS,
    )
