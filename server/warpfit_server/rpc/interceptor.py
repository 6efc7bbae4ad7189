"""What stands before every method: who calls, may they, not too often, not too much at once.

gRPC hands a call over on the thread that serves the port, as soon as its metadata are there. On
that thread the guard decides, so that a refusal costs neither a thread nor the message, which
gRPC then does not even read; what is taken is served on a thread of `workers`.

What is taken has a place, a thread and the bytes of the longest message that gRPC would collect,
all counted for its tenant, before a byte of the message is asked for; and its messages must arrive
within a time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import grpc

from warpfit.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from warpfit_server.config import Config
from warpfit_server.observability.calls import Observer, Request, serve, status_of
from warpfit_server.rpc.error_details import fail
from warpfit_server.rpc.port import AtOnce
from warpfit_server.rpc.receive_timeouts import ReceiveTimeouts
from warpfit_server.system.worker_threads import Workers
from warpfit_server.tenancy.admission import Admission
from warpfit_server.tenancy.authentication import Authenticator, TokenFile
from warpfit_server.tenancy.fair_lock import Turnstile
from warpfit_server.tenancy.quotas import Ledger
from warpfit_server.tenancy.tenants import TenantBook, assign_tenant

Send = Callable[[bytes | None], None]
#: Methods whose calls bring batches, and those whose messages may be long.
_BATCHES: Final = ("Evaluate", "Optimize")
_LONG_MESSAGES: Final = (*_BATCHES, "UploadVariables")
#: Most bytes of any other message, and most seconds in which it must arrive.
_SHORT_MESSAGE, _SHORT_SECONDS = 64 << 10, 5.0
#: Seconds after which a call may come again for which there was no thread.
_CROWDED_SECONDS: Final = 0.1


def make_guard(
    config: Config, ledger: Ledger, *, trusts_doors: bool = False
) -> tuple[Admission, Guard]:
    """Make admission and guard of one door.

    Args:
        config: the server's configuration.
        ledger: what all doors count in.
        trusts_doors: whether this is the front door, to which the others pass calls on.

    Raises:
        InvalidArgumentError: if the token file or the tenants file cannot be used.

    """
    has_tenants = bool(config.token_file or config.tls_client_ca)
    book = TenantBook(config.limits(), config.tenants_file or None, shared=has_tenants)
    admission = Admission(config, book, ledger)
    authenticator = Authenticator(
        TokenFile(config.token_file) if config.token_file else None,
        certificates=bool(config.tls_client_ca),
        trusts_doors=trusts_doors,
    )
    # Twice as many as places: a call that was cancelled leaves its place at once, its thread when
    # the engine has stopped.
    threads = 2 * max(1, config.max_requests)
    workers = Workers(threads, max(1, int(book.share(threads))))
    return admission, Guard(authenticator, admission, workers, config.message_seconds)


class Guard:
    """Puts authentication and limits before the methods of a service.

    After it, `warpfit_server.tenancy.tenants.tenant_of` names a call's tenant.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        admission: Admission,
        workers: Workers,
        message_seconds: float,
    ) -> None:
        self.workers = workers
        """Threads that serve the calls."""
        self.message_seconds = message_seconds
        """In which a message must have arrived."""
        self.timeouts = ReceiveTimeouts()
        """Of the calls that wait for a message."""
        self.turnstile = Turnstile()
        """Through which the calls go that bring batches."""
        self._authenticator = authenticator
        self._admission = admission

    def protect(
        self, handlers: Mapping[str, Any], observer: Observer, *, passes_on: bool = False
    ) -> dict[str, Any]:
        """Return the handlers, each behind the guard and observed.

        Args:
            handlers: by the name of the method.
            observer: of this process.
            passes_on: whether another process answers them, which observes them; what is refused
                here it does not see.

        """
        return {
            name: grpc.stream_stream_rpc_method_handler(
                _Method(name, handler, self, observer, passes_on=passes_on)
            )
            for name, handler in handlers.items()
        }

    def let_in(self, request: Request, context: grpc.ServicerContext) -> int:
        """Name the caller's tenant and take the call, which `leave` and `finish` give back.

        Args:
            request: the call.
            context: of the call.

        Returns:
            Bytes that a message of it may have.

        Raises:
            UnauthenticatedError: without valid credentials.
            PermissionDeniedError: if the tenant is suspended.
            ResourceExhaustedError: if it comes too soon, or too much is in flight.

        """
        tenant, is_forwarded = self._authenticator.caller(context, request.metadata)
        request.tenant = tenant
        assign_tenant(context, tenant)
        admission = self._admission
        limits = admission.limits(tenant)
        if not is_forwarded:  # else the door has counted it, but for this copy of its messages
            admission.check_rate(tenant, limits.rate)
        if not self.workers.has_room(tenant):
            raise _crowded()
        admission.enter(tenant, limits, place=not is_forwarded)
        request.reserved = admission.message_bytes
        if not is_forwarded:
            request.places.append(tenant)
        return limits.message_bytes

    def arrived(self, request: Request, size: int) -> None:
        """Count the bytes of a call's only message, instead of what it might have had."""
        self._admission.arrived(request.tenant, size, request.reserved)
        request.reserved = min(size, request.reserved)

    def leave(self, request: Request) -> None:
        """Give the place of a call back, if it has one, whichever thread is the first to say so."""
        try:
            tenant = request.places.pop()
        except IndexError:
            return
        self._admission.leave(tenant)

    def finish(self, request: Request) -> None:
        """Give back all that a call has; its messages are gone."""
        if request.turnstile is not None:
            request.leave_turnstile()
        self.leave(request)
        self.arrived(request, 0)


class _Method:
    """One method: takes its calls in on the port's thread, has them served on another one."""

    #: For gRPC, which its own health service tells the same: a call of this object waits for
    #: nothing, and says with `send` what it has to say ...
    experimental_non_blocking: Final = True
    #: ... and it is made where it arrives.
    experimental_thread_pool: Final = AtOnce()

    def __init__(
        self, name: str, handler: Any, guard: Guard, observer: Observer, *, passes_on: bool
    ) -> None:
        self._name = name
        self._behaviour = next(
            found
            for found in (handler.unary_unary, handler.unary_stream, handler.stream_unary)
            if found is not None
        )
        self._streams_in = handler.request_streaming
        self._streams_out = handler.response_streaming
        self._guard = guard
        self._observer = observer
        self._passes_on = passes_on
        self._brings_batch = name in _BATCHES
        is_long = name in _LONG_MESSAGES
        self._most_bytes = sys.maxsize if is_long else _SHORT_MESSAGE
        seconds = guard.message_seconds
        self._seconds = seconds if is_long else min(_SHORT_SECONDS, seconds)

    def __call__(
        self, messages: Iterator[bytes], context: grpc.ServicerContext, send: Send
    ) -> None:
        request = self._observer.arrived(self._name, context)
        try:
            most = min(self._most_bytes, self._guard.let_in(request, context))
        except Exception as error:
            fail(context, error, request.trailing)
            self._observer.ended(request, status_of(context))
            send(None)
            return
        # A call that has ended leaves its place at once, its segment when the engine has stopped.
        context.add_callback(lambda: self._guard.leave(request))
        if not self._passes_on:
            self._observer.begun(request)
        self._guard.workers.start(
            request.tenant, self._serve, request, most, messages, context, send
        )

    def _serve(
        self,
        request: Request,
        most: int,
        messages: Iterator[bytes],
        context: grpc.ServicerContext,
        send: Send,
    ) -> None:
        serve(request)
        try:
            self._answer(request, most, messages, context, send)
        except Exception as error:
            fail(context, error, request.trailing)
            _forget_frames(error)
        finally:
            self._guard.finish(request)
        if not self._passes_on:
            self._observer.ended(request, status_of(context))
        if not request.is_over:
            send(None)

    def _answer(
        self,
        request: Request,
        most: int,
        messages: Iterator[bytes],
        context: grpc.ServicerContext,
        send: Send,
    ) -> None:
        receive = partial(self._receive, messages, request, context, send)
        argument: Any
        if self._streams_in:
            argument = _each_checked(receive, most)
        else:
            argument = _only(receive, most)
            self._guard.arrived(request, len(argument))
        if self._brings_batch:
            self._guard.turnstile.enter(request.tenant)
            request.turnstile = self._guard.turnstile
            if not context.is_active():  # it may have ended while it waited
                raise CancelledError("the call has ended", "CANCELLED")
        answer: Any = self._behaviour(argument, context)
        del argument
        if not self._streams_out:
            send(answer)
            return
        try:
            for message in answer:
                made = time.monotonic_ns()
                if request.finished:  # what the engine's end and this message have between them
                    request.encode = made - request.finished - request.suspended
                send(message)
                if request.finished:
                    request.suspended += time.monotonic_ns() - made
                if not context.is_active():
                    return
        finally:
            answer.close()

    def _receive(
        self,
        messages: Iterator[bytes],
        request: Request,
        context: grpc.ServicerContext,
        send: Send,
    ) -> bytes | None:
        """Wait for the next message; None if there is none."""
        timeouts = self._guard.timeouts
        timeouts.begin(request, self._seconds, partial(self._end, request, context, send))
        try:
            message = next(messages, None)
        finally:
            if not timeouts.stop(request):
                request.is_over = True
        if request.is_over:
            raise _too_slow(self._seconds)
        return message

    def _end(self, request: Request, context: grpc.ServicerContext, send: Send) -> None:
        """End a call whose message does not come; what waits for it then finds no message."""
        request.is_over = True
        fail(context, _too_slow(self._seconds), request.trailing)
        send(None)


def _forget_frames(error: BaseException | None) -> None:
    """Let go of all that the functions had which an error has left.

    The error with which gRPC says that a client has gone lies in a frame of its own traceback. With
    that circle the call's last messages would stay until Python looks for such circles, which may
    be a thousand calls later.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def _only(receive: Callable[[], bytes | None], most: int) -> bytes:
    message = receive()
    if message is None:
        raise InvalidArgumentError(
            "the call has no message", "NO_MESSAGE", "Send exactly one request message"
        )
    _check_size(message, most)
    return message


def _each_checked(receive: Callable[[], bytes | None], most: int) -> Iterator[bytes]:
    while (message := receive()) is not None:
        _check_size(message, most)
        yield message


def _check_size(message: bytes, most: int) -> None:
    if len(message) > most:
        raise ResourceExhaustedError(
            f"one message has {len(message)} bytes, the limit is {most}",
            "MESSAGE_TOO_LARGE",
            "Send smaller batches or pieces, or ask for a higher limit",
            needed=len(message),
            available=most,
        )


def _too_slow(seconds: float) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"no complete message has arrived within {seconds:g} s",
        "MESSAGE_TIMEOUT",
        "Send each message as soon as the call has begun, and smaller ones over a slow network",
    )


def _crowded() -> ResourceExhaustedError:
    return ResourceExhaustedError(
        "all threads that may serve this tenant are busy",
        "TOO_MANY_REQUESTS",
        "Retry with back-off, or start the server with a higher --max-requests",
        retry_after=_CROWDED_SECONDS,
    )
