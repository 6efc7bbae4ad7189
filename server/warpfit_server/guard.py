"""What stands before every method: who calls, may they, not too often, not too much at once.

gRPC hands a call over on the thread that serves the port, as soon as its metadata are there. On
that thread the guard decides, so that a refusal costs neither a thread nor the message, which
gRPC then does not even read; what is taken is served on a thread of `workers`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import grpc

from warpfit.errors import CancelledError, InvalidArgumentError, ResourceExhaustedError
from warpfit_server.admission import Admission
from warpfit_server.auth import Authenticator, TokenFile
from warpfit_server.config import Config
from warpfit_server.details import fail
from warpfit_server.ledger import Ledger
from warpfit_server.port import AtOnce
from warpfit_server.requests import Observer, Request, serve, status_of
from warpfit_server.tenants import TenantBook, assign_tenant
from warpfit_server.turnstile import Turnstile
from warpfit_server.workers import Workers

Send = Callable[[bytes | None], None]
#: Methods whose calls need a place.
_LONG: Final = ("Evaluate", "Optimize", "UploadVariables")
#: Threads beyond those that --max-requests calls for, for short calls.
_SPARE_THREADS: Final = 16
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
    workers = Workers(2 * config.max_requests + _SPARE_THREADS)
    return admission, Guard(authenticator, admission, workers)


class Guard:
    """Puts authentication and limits before the methods of a service.

    After it, `warpfit_server.tenants.tenant_of` names a call's tenant.
    """

    def __init__(
        self, authenticator: Authenticator, admission: Admission, workers: Workers
    ) -> None:
        self.workers = workers
        """Threads that serve the calls."""
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
            passes_on: whether another process answers them, which observes and gives places; what
                is refused here it does not see.

        """
        return {
            name: grpc.stream_stream_rpc_method_handler(
                _Method(name, handler, self, observer, passes_on=passes_on)
            )
            for name, handler in handlers.items()
        }

    def let_in(self, request: Request, context: grpc.ServicerContext, *, place: bool) -> int:
        """Name the caller's tenant and take the call.

        Args:
            request: the call.
            context: of the call.
            place: whether it needs a place, which `leave` gives back.

        Returns:
            Bytes that a message of it may have.

        Raises:
            UnauthenticatedError: without valid credentials.
            PermissionDeniedError: if the tenant is suspended.
            ResourceExhaustedError: if it comes too soon, or too much is in flight.

        """
        if self.workers.all_busy:
            raise _crowded()
        tenant, is_forwarded = self._authenticator.caller(context, request.metadata)
        request.tenant = tenant
        assign_tenant(context, tenant)
        admission = self._admission
        limits = admission.limits(tenant)
        if not is_forwarded:  # else the door has counted it
            admission.check_rate(tenant, limits.rate)
        if place:
            admission.enter(tenant, limits)
            request.places.append(tenant)
        return limits.message_bytes

    def leave(self, request: Request) -> None:
        """Give the place of a call back, if it has one, whichever thread is the first to say so."""
        try:
            tenant = request.places.pop()
        except IndexError:
            return
        self._admission.leave(tenant)


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
        self._needs_place = name in _LONG and not passes_on

    def __call__(
        self, messages: Iterator[bytes], context: grpc.ServicerContext, send: Send
    ) -> None:
        request = self._observer.arrived(self._name, context)
        try:
            most = self._guard.let_in(request, context, place=self._needs_place)
        except Exception as error:
            fail(context, error, request.trailing)
            self._observer.ended(request, status_of(context))
            send(None)
            return
        if self._needs_place:
            # A call that has ended leaves its place at once, its lane when the engine has stopped.
            context.add_callback(lambda: self._guard.leave(request))
        if not self._passes_on:
            self._observer.begun(request)
        self._guard.workers.start(self._serve, request, most, messages, context, send)

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
            if request.turnstile is not None:
                request.leave_turnstile()
            if self._needs_place:
                self._guard.leave(request)
        if not self._passes_on:
            self._observer.ended(request, status_of(context))
        send(None)

    def _answer(
        self,
        request: Request,
        most: int,
        messages: Iterator[bytes],
        context: grpc.ServicerContext,
        send: Send,
    ) -> None:
        argument = _each_checked(messages, most) if self._streams_in else _only(messages, most)
        if self._needs_place and not self._streams_in:
            self._guard.turnstile.enter(request.tenant)
            request.turnstile = self._guard.turnstile
            if not context.is_active():  # it may have ended while it waited
                raise CancelledError("the call has ended", "CANCELLED")
        answer: Any = self._behaviour(argument, context)
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


def _forget_frames(error: BaseException | None) -> None:
    """Let go of all that the functions had which an error has left.

    The error with which gRPC says that a client has gone lies in a frame of its own traceback. With
    that circle the call's last messages would stay until Python looks for such circles, which may
    be a thousand calls later.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def _only(messages: Iterator[bytes], most: int) -> bytes:
    message = next(messages, None)
    if message is None:
        raise InvalidArgumentError(
            "the call has no message", "NO_MESSAGE", "Send exactly one request message"
        )
    _check_size(message, most)
    return message


def _each_checked(messages: Iterator[bytes], most: int) -> Iterator[bytes]:
    for message in messages:
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


def _crowded() -> ResourceExhaustedError:
    return ResourceExhaustedError(
        "all threads serve calls",
        "TOO_MANY_REQUESTS",
        "Retry with back-off, or start the server with a higher --max-requests",
        retry_after=_CROWDED_SECONDS,
    )
