"""Interceptor of all calls: authentication, admission, message timeouts and observation.

gRPC hands a call over on the thread that serves the port, as soon as its metadata have arrived. The
interceptor admits or refuses it on that thread, so that a refusal costs neither a thread nor the
message, which gRPC then does not even read. An admitted call is served by a worker thread.

Before a byte of its message is read, an admitted call has a slot, a thread and the bytes of the
longest message that gRPC would receive, all counted for its tenant; and each of its messages must
arrive within a time limit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import grpc

from warpfit.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from warpfit_server.config import Config
from warpfit_server.observability.calls import CallRecord, Observer, set_current_call, status_of
from warpfit_server.rpc.error_details import fail_call
from warpfit_server.rpc.port import InlineExecutor
from warpfit_server.rpc.receive_timeouts import ReceiveTimeouts
from warpfit_server.system.worker_threads import Workers
from warpfit_server.tenancy.admission import Admission
from warpfit_server.tenancy.authentication import Authenticator, TokenFile
from warpfit_server.tenancy.quotas import QuotaTable
from warpfit_server.tenancy.tenant_semaphore import TenantSemaphore
from warpfit_server.tenancy.tenants import ANONYMOUS, TenantLimits, assign_tenant

Send = Callable[[bytes | None], None]
#: Methods whose messages are batches, and those whose messages may be long.
_BATCH_METHODS: Final = ("Evaluate", "Optimize")
_LONG_MESSAGE_METHODS: Final = (*_BATCH_METHODS, "UploadVariables")
#: Most bytes of any other message, and most seconds in which it must arrive.
_SHORT_MESSAGE, _SHORT_SECONDS = 64 << 10, 5.0
#: Seconds after which a call may be repeated that was refused for want of a thread.
_NO_THREAD_SECONDS: Final = 0.1


class Interceptor:
    """Puts authentication, admission and observation before the methods of a service.

    Args:
        config: the server's configuration.
        quotas: what is in flight in all front-end processes.
        is_main: whether this is the main process, to which the others forward calls.

    Raises:
        InvalidArgumentError: if the token file or the tenants file cannot be used.

    """

    def __init__(self, config: Config, quotas: QuotaTable, *, is_main: bool = False) -> None:
        has_certificates = bool(config.tls_client_ca)
        tokens = TokenFile(config.token_file) if config.token_file else None
        has_tenants = has_certificates or tokens is not None
        tenants = TenantLimits(config.limits(), config.tenants_file or None, shared=has_tenants)
        self.admission = Admission(config, tenants, quotas)
        """Accepts or refuses the calls of this process."""
        self.authenticator = Authenticator(
            tokens, certificates=has_certificates, trusts_local_socket=is_main
        )
        # Twice as many as slots: a cancelled call leaves its slot at once, but its thread only
        # when the engine has stopped.
        threads = 2 * max(1, config.max_requests)
        self.workers = Workers(threads, max(1, int(tenants.share(threads))))
        """Threads that serve calls."""
        self.message_seconds = config.message_seconds
        """Time in which a message must arrive."""
        self.timeouts = ReceiveTimeouts()
        """Of calls that wait for a message."""
        self.decoding = TenantSemaphore()
        """Held by calls while their batch is decoded."""

    def intercept(
        self, handlers: Mapping[str, Any], observer: Observer, *, forwards: bool = False
    ) -> dict[str, Any]:
        """Return the handlers, each behind this interceptor.

        Args:
            handlers: gRPC method handlers by the name of the method.
            observer: observer of this process.
            forwards: whether the handlers forward calls to another process, which observes them;
                then this process observes only those that it refuses.

        """
        return {
            name: grpc.stream_stream_rpc_method_handler(
                _InterceptedMethod(name, handler, self, observer, forwards=forwards)
            )
            for name, handler in handlers.items()
        }


class _InterceptedMethod:
    """One method as a handler for gRPC: it admits calls and has them served by worker threads."""

    #: Tells gRPC to call this object on the port's own thread, and that it answers with `send`.
    experimental_non_blocking: Final = True
    experimental_thread_pool: Final = InlineExecutor()

    def __init__(
        self,
        name: str,
        handler: Any,
        interceptor: Interceptor,
        observer: Observer,
        *,
        forwards: bool,
    ) -> None:
        self.name = name
        self.interceptor = interceptor
        self.observer = observer
        self.forwards = forwards
        self.behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary
        self.streams_in = handler.request_streaming
        self.streams_out = handler.response_streaming
        self.has_batch = name in _BATCH_METHODS
        is_long = name in _LONG_MESSAGE_METHODS
        self.most_bytes = sys.maxsize if is_long else _SHORT_MESSAGE
        seconds = interceptor.message_seconds
        self.message_seconds = seconds if is_long else min(_SHORT_SECONDS, seconds)

    def __call__(
        self, messages: Iterator[bytes], context: grpc.ServicerContext, send: Send
    ) -> None:
        record = self.observer.new_call(self.name, context, ANONYMOUS)
        call = _Call(self, record, messages, context, send)
        try:
            call.admit()
        except Exception as error:
            fail_call(context, error, record.trailing)
            self.observer.end(record, status_of(context))
            send(None)
            return
        # A cancelled call leaves its slot at once, but its memory only when the engine has stopped.
        context.add_callback(call.leave_slot)
        if not self.forwards:
            self.observer.begin(record)
        self.interceptor.workers.start(record.tenant, call.serve)


class _Call:
    """One call, from its arrival to its end, and what is counted for it."""

    def __init__(
        self,
        method: _InterceptedMethod,
        record: CallRecord,
        messages: Iterator[bytes],
        context: grpc.ServicerContext,
        send: Send,
    ) -> None:
        self._method = method
        self._record = record
        self._messages = messages
        self._context = context
        self._send = send
        self._interceptor = method.interceptor
        self._admission = method.interceptor.admission
        self._most_bytes = 0
        self._reserved = 0  # bytes that are counted for its message
        self._slots: list[str] = []  # its tenant, while the call has a slot
        self._is_decoding = False  # whether it holds the semaphore
        self._is_over = False  # whether it has been ended because its message did not arrive

    def admit(self) -> None:
        """Find the tenant and count the call.

        Raises:
            UnauthenticatedError: without valid credentials.
            PermissionDeniedError: if the tenant is suspended.
            ResourceExhaustedError: if it comes too soon, or too much is in flight.

        """
        admission, record = self._admission, self._record
        tenant, is_forwarded = self._interceptor.authenticator.authenticate(
            self._context, record.metadata
        )
        record.tenant = tenant
        assign_tenant(self._context, tenant)
        limits = admission.limits(tenant)
        self._most_bytes = min(self._method.most_bytes, limits.message_bytes)
        if not is_forwarded:  # the process that forwards a call has counted all but its message
            admission.check_rate(tenant, limits.rate)
        if not self._interceptor.workers.has_room(tenant):
            raise _no_thread()
        admission.enter(tenant, limits, slot=not is_forwarded)
        self._reserved = admission.message_bytes
        if not is_forwarded:
            self._slots.append(tenant)

    def leave_slot(self) -> None:
        """Give the slot back, if the call has one; any thread may call this, several times."""
        try:
            tenant = self._slots.pop()  # atomic, so that only one thread gets it
        except IndexError:
            return
        self._admission.leave(tenant)

    def serve(self) -> None:
        """Receive the messages, run the method and send its answer."""
        set_current_call(self._record)
        try:
            self._answer()
        except Exception as error:
            fail_call(self._context, error, self._record.trailing)
            _clear_tracebacks(error)
        finally:
            self._end_decoding()
            self.leave_slot()
            self._shrink_message(0)
        if not self._method.forwards:
            self._method.observer.end(self._record, status_of(self._context))
        if not self._is_over:
            self._send(None)

    def _answer(self) -> None:
        method = self._method
        argument: Any
        if method.streams_in:
            argument = iter(self._receive, None)
        else:
            argument = self._receive()
            if argument is None:
                raise InvalidArgumentError(
                    "the call has no message", "NO_MESSAGE", "Send exactly one request message"
                )
            self._shrink_message(len(argument))
        if method.has_batch:
            self._begin_decoding()
        answer: Any = method.behaviour(argument, self._context)
        del argument  # the method alone decides how long the message is kept
        if method.streams_out:
            self._send_each(answer)
        else:
            self._send(answer)

    def _receive(self) -> bytes | None:
        """Wait for the next message; return None if there is none."""
        seconds, timeouts = self._method.message_seconds, self._interceptor.timeouts
        timeouts.begin(self, seconds, self._end_late)
        try:
            message = next(self._messages, None)
        finally:
            if not timeouts.stop(self):
                self._is_over = True
        if self._is_over:
            raise _too_late(seconds)
        if message is not None and len(message) > self._most_bytes:
            raise ResourceExhaustedError(
                f"one message has {len(message)} bytes, the limit is {self._most_bytes}",
                "MESSAGE_TOO_LARGE",
                "Send smaller batches or pieces, or ask for a higher limit",
                needed=len(message),
                available=self._most_bytes,
            )
        return message

    def _end_late(self) -> None:
        """End the call because its message has not arrived; `_receive` then gets no message."""
        self._is_over = True
        fail_call(self._context, _too_late(self._method.message_seconds), self._record.trailing)
        self._send(None)

    def _shrink_message(self, size: int) -> None:
        """Count ``size`` bytes for the call's message instead of what is counted."""
        self._admission.shrink_message(self._record.tenant, self._reserved, size)
        self._reserved = min(size, self._reserved)

    def _begin_decoding(self) -> None:
        """Wait until few other calls of the tenant are being decoded."""
        self._interceptor.decoding.acquire(self._record.tenant)
        self._is_decoding = True
        self._record.on_decoded = self._end_decoding
        if not self._context.is_active():  # it may have ended while it waited
            raise CancelledError("the call has ended", "CANCELLED")

    def _end_decoding(self) -> None:
        if self._is_decoding:
            self._is_decoding = False
            self._record.on_decoded = None  # the record outlives the call
            self._interceptor.decoding.release(self._record.tenant)

    def _send_each(self, answer: Any) -> None:
        """Send the messages of an answer, and measure the time that making them takes."""
        record = self._record
        try:
            for message in answer:
                made = time.monotonic_ns()
                if record.finished:
                    record.encode = made - record.finished - record.suspended
                self._send(message)
                if record.finished:
                    record.suspended += time.monotonic_ns() - made
                if not self._context.is_active():
                    return
        finally:
            answer.close()


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
