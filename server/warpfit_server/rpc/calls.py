"""Calls as this server serves them: authentication, admission, time limits, observation.

gRPC has a thread of its pool serve each call, and reads a message only when that thread asks for
it. So a call is refused before a byte of its message is read if its tenant has too many open calls,
or too many bytes in flight: the bytes of the longest message that gRPC would receive are counted
until its message is there. Threads that repeat refused calls at once would have a core refuse them,
so where a tenant has many refusals a second, further ones are held back for a part of the time
after which the call may be repeated.

A request takes a place among the calls in flight when its message has arrived, and leaves it before
a long message of its answer is sent, at the latest when the engine has finished. So a client that
sends nothing, or does not read its answer, keeps no place. It keeps its open call, and the bytes of
its answer stay counted.

A caller may send one request after the other in the same call, which spares both sides the end of
a call and the beginning of the next. Each request is admitted, counted and observed as if it were a
call of its own.

The work of a request waits for its tenant's turn, and a turn ends when the request is decoded. The
processor time of the turn and of the answer, beyond a moment, is charged to the tenant, which rests
if it has used too much. A thread serves many calls, so its processor time is read when each request
begins, also one that is refused.

Whatever a client keeps a thread waiting for has a time limit: a message that it sends, a message
that it takes, and the next request of a call. gRPC itself waits for ever, so another thread cancels
the calls whose time is up. A call that has not sent its first message for a while makes way before
that if its tenant begins another one for which there is no room.

A failed call ends with a google.rpc.Status, which has warpfit's own detail and the standard ones.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from warpfit.codec import ERROR_METADATA_KEY, error_to_status
from warpfit.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    WarpfitError,
)
from warpfit.server_info import Limits
from warpfit_server.admission import Admission, TenantTurns
from warpfit_server.config import Config
from warpfit_server.logs import LOGGED_REQUEST_ID, CallRecord, Observer, call_id, ended_status
from warpfit_server.machine import available_cores, shortage
from warpfit_server.tenants import ANONYMOUS, Authenticator, QuotaTable, TenantLimits, TokenFile

# ------------------------------------------------------------------------------- errors as statuses

_SERVICE_LOG: Final = logging.getLogger("warpfit.service")
_DOMAIN: Final = "warpfit"
_FACTS: Final = ("field", "expression", "token", "needed", "available")


def fail_call(context: Any, error: Exception, trailing: tuple[tuple[str, str], ...]) -> None:
    """Give a call the status of an error, unless it has a status already.

    Metadata that every answer carries, ``trailing``, are sent beside those of the error.
    """
    if context.code() is not None:
        return
    if isinstance(error, grpc.RpcError) and not context.is_active():
        _SERVICE_LOG.debug("the client went away")
        return
    if isinstance(error, CancelledError) and context.time_remaining() == 0:
        error = DeadlineExceededError(  # gRPC ends such a call as if its caller had cancelled it
            "the deadline of the call passed", "DEADLINE_EXCEEDED", "Raise timeout="
        )
    if not isinstance(error, WarpfitError):
        known = shortage(error)
        if known is None:
            _SERVICE_LOG.error("call failed", exc_info=error)
        error = known or InternalError(
            "the server failed on this call", "INTERNAL", "Report it as a bug"
        )
    standard = status_pb2.Status(details=_standard_details(error)).SerializeToString()
    details = ERROR_METADATA_KEY, error_to_status(error, standard)
    context.set_trailing_metadata((*trailing, details))
    context.set_code(grpc.StatusCode[error.status])
    context.set_details(str(error))


def _standard_details(error: WarpfitError) -> list[any_pb2.Any]:
    """Return the applicable details of google.rpc, for tools that know no others."""
    facts = {name: getattr(error, name) for name in _FACTS}
    known = {name: str(value) for name, value in facts.items() if value not in (None, "")}
    messages: list[Any] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason, domain=_DOMAIN, metadata={**known, "remedy": error.remedy}
        )
    ]
    if isinstance(error, InvalidArgumentError):
        place = error.field
        if error.expression is not None:  # such as programs[3].tokens[4]
            token = "" if error.token is None else f".tokens[{error.token}]"
            place = f"programs[{error.expression}]{token}"
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=place, description=error.message
        )
        messages.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, ResourceExhaustedError):
        short = error_details_pb2.QuotaFailure.Violation(
            subject=error.reason, description=error.message
        )
        messages.append(error_details_pb2.QuotaFailure(violations=[short]))
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        messages.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = [any_pb2.Any() for _ in messages]
    for entry, message in zip(packed, messages, strict=True):
        entry.Pack(message)
    return packed


_LOG: Final = logging.getLogger("warpfit.calls")
#: Most bytes of a message of a method without long ones, and most seconds until it has arrived.
_SHORT_MESSAGE, _SHORT_SECONDS = 64 << 10, 5.0
#: Seconds in which the next request of a call must arrive: a search that breeds for longer can bear
#: the cost of a new call.
_IDLE_SECONDS: Final = 0.5
#: Processor time in seconds that a request may take here without a charge: most take less.
_FREE_SECONDS: Final = 0.002
#: Longest message of an answer that is short: it is sent when nothing counts the request any more.
_LAST_BYTES: Final = 64 << 10
#: Seconds after which a call may be repeated that was refused because too many are open.
_RETRY_SECONDS: Final = 0.1
#: Refusals of a tenant in a second that are told at once, most seconds that another one is held
#: back, their part of the time until a retry, and most that are held back at a time.
_FREE_REFUSALS, _HELD_SECONDS, _HELD_PART, HELD_REFUSALS = 20, 0.25, 0.9, 64
#: Tenants whose refusals are remembered.
_MOST_REFUSED: Final = 1000
#: A call polls for the engine's answer while there are at least so many cores for each call in
#: flight.
_CORES_A_CALL: Final = 8
#: Seconds without a first message after which a call makes way for another one of its tenant, those
#: until another one makes way, too, and those that a call waits for room in all.
_SILENT_SECONDS, _WAY_SECONDS, _MOST_WAY_SECONDS = 1.0, 0.05, 0.5
#: Seconds between two looks for calls whose time is up.
_LOOK_SECONDS: Final = 0.25


class CallTimeouts:
    """Cancels calls that wait for their client for too long, from a thread of its own.

    The waiting thread and this one both remove a call from a dictionary, which only one of them
    succeeds in.
    """

    def __init__(self) -> None:
        self._limits: dict[Any, float] = {}
        threading.Thread(target=self._watch, name="call-timeouts", daemon=True).start()

    def begin(self, context: Any, seconds: float) -> None:
        """Cancel a call after some seconds, unless `end` comes first."""
        self._limits[context] = time.monotonic() + seconds

    def end(self, context: Any) -> bool:
        """Stop waiting for a call; return False if its time was up and it has been cancelled."""
        return self._limits.pop(context, None) is not None

    def cancel(self, context: Any) -> bool:
        """Cancel a call that waits, as if its time was up; return False if it has ended to wait."""
        if not self.end(context):
            return False
        try:
            context.cancel()
        except Exception:  # whatever it is, the other calls are looked at
            _LOG.exception("a call could not be cancelled")
        return True

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            for context, limit in self._limits.copy().items():
                if limit <= now:
                    self.cancel(context)


class OpenCalls:
    """Counts the open calls of a process, each of which has a thread.

    A tenant may have as many as it leaves free for the others: one alone takes half of them, a
    second one a quarter. Where there are no tenants, all may be taken.
    """

    def __init__(self, most: int, *, is_shared: bool) -> None:
        self._most = most
        self._is_shared = is_shared
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self.total = 0
        """Open calls of all tenants."""

    def enter(self, tenant: str) -> None:
        """Count a call.

        Raises:
            ResourceExhaustedError: if its tenant has too many.
        """
        with self._lock:
            own, free = self._counts.get(tenant, 0), self._most - self.total
            if free <= 0 or (self._is_shared and own >= free):
                raise ResourceExhaustedError(
                    "as many calls are open as this tenant may have",
                    "TOO_MANY_REQUESTS",
                    "Retry with back-off, or start the server with a higher --max-requests",
                    retry_after=_RETRY_SECONDS,
                )
            self._counts[tenant] = own + 1
            self.total += 1

    def leave(self, tenant: str) -> None:
        """Count a call no more."""
        with self._lock:
            self.total -= 1
            left = self._counts.pop(tenant) - 1
            if left:
                self._counts[tenant] = left

    @property
    def are_scarce(self) -> bool:
        """Whether more than three quarters of the calls are open; then none waits for a request."""
        return 4 * self.total > 3 * self._most


@dataclass(frozen=True, slots=True)
class Method:
    """A method of the service: its behaviour, and whether its messages are streams."""

    behaviour: Callable[[Any, Call], Any]
    """Takes the message, or an iterator of messages, and the call; returns the answer, or is a
    generator of the messages of the answer that returns the last one."""
    uploads: bool = False
    """Whether the request is a stream of messages."""
    streams: bool = False
    """Whether the answer is one; only then may requests follow one another in a call."""

    @property
    def has_long_messages(self) -> bool:
        """Whether its messages may be as long as the server allows."""
        return self.uploads or self.streams


class CallHandlers:
    """Serves the calls of the service's methods in one process.

    Raises:
        InvalidArgumentError: if the token file or the tenants file cannot be used.
    """

    def __init__(self, config: Config, quotas: QuotaTable) -> None:
        self.authenticator = Authenticator(
            TokenFile(config.token_file) if config.token_file else None,
            certificates=bool(config.tls_client_ca),
        )
        tenants = TenantLimits(
            config.limits(), config.tenants_file or None, shared=config.has_tenants
        )
        self.admission = Admission(config, tenants, quotas)
        """Accepts or refuses the requests of this process."""
        self.open_calls = OpenCalls(config.open_calls, is_shared=tenants.is_shared)
        """Calls that have a thread."""
        self.message_seconds = config.message_seconds
        """Time in which a message must arrive, or be taken."""
        self.turns = TenantTurns()
        """Turns of the tenants at the time of this process."""
        self.timeouts = CallTimeouts()
        """Time limits of the calls that wait for their client."""
        self.waiting: set[Any] = set()
        """Calls that wait for another request."""
        self.silent: dict[Any, tuple[str, float]] = {}
        """Calls that wait for their first message, with tenant and moment, in their order."""
        self.held = threading.BoundedSemaphore(HELD_REFUSALS)
        """Counts the refusals that are held back."""
        self._refusals: dict[str, tuple[int, int]] = {}
        """Last second in which each tenant was refused, and how often in it."""
        self.is_draining = False
        """Whether no call is kept for another request."""
        self._most_polling = available_cores() // _CORES_A_CALL

    def handlers(self, methods: Mapping[str, Method], observer: Observer) -> dict[str, Any]:
        """Return gRPC's handlers by the name of the method."""

        def handler(name: str, method: Method) -> Any:
            return grpc.stream_stream_rpc_method_handler(
                lambda given, context: Call(self, name, method, observer, given, context).serve()
            )

        return {name: handler(name, method) for name, method in methods.items()}

    def may_poll(self) -> bool:
        """Return whether a call may spend a core on waiting for the engine's answer.

        It is the only one of this process, whose other calls it would keep from Python's lock.
        """
        is_lone = self.open_calls.total <= 1
        return is_lone and self.admission.quotas.calls_in_flight() <= self._most_polling

    def hold(self, tenant: str, retry_after: float, remaining: float | None) -> float:
        """Count a refusal; return the seconds for which it is held back, then `held` counts it.

        Args:
            tenant: which is refused.
            retry_after: seconds after which the call may be repeated.
            remaining: seconds until the call's deadline; None without one.
        """
        now = int(time.monotonic())
        second, count = self._refusals.get(tenant, (now, 0))
        count = count + 1 if second == now else max(1, count // 2)
        if len(self._refusals) > _MOST_REFUSED:
            self._refusals.clear()
        self._refusals[tenant] = now, count
        seconds = min(_HELD_SECONDS, _HELD_PART * retry_after)
        is_free = count <= _FREE_REFUSALS or (remaining is not None and remaining < 2.0 * seconds)
        return 0.0 if is_free or not self.held.acquire(blocking=False) else seconds

    def make_way(self, tenant: str, take: Callable[[], object]) -> None:
        """Reserve a call's resources; silent calls of the same tenant make way for it.

        What a call may send counts from the moment at which gRPC may receive it, so that calls that
        send nothing would keep all others out. The call that has been silent for longest is
        cancelled first.

        Raises:
            ResourceExhaustedError: as ``take`` did, if no call makes way in time.
        """
        began = looked = time.monotonic()
        while True:
            try:
                take()
            except ResourceExhaustedError:
                now = time.monotonic()
                if now >= looked:
                    looked = now + _WAY_SECONDS
                    silent = [
                        context
                        for context, (who, since) in self.silent.copy().items()
                        if who == tenant and since <= now - _SILENT_SECONDS
                    ]
                    is_late = now > began + _MOST_WAY_SECONDS
                    # A call whose message arrives just now cannot be cancelled.
                    if is_late or not any(map(self.timeouts.cancel, silent)):
                        raise
                time.sleep(_WAY_SECONDS / 10)
            else:
                return

    def drain(self) -> None:
        """End the calls that wait for another request, and let no other call wait for one."""
        self.is_draining = True
        for context in list(self.waiting):
            context.cancel()


class Call:
    """One call, from its arrival to its end, and what is counted for its present request."""

    record: CallRecord
    """Record of the present request, with its tenant."""
    limits: Limits
    """Limits of its tenant."""

    def __init__(
        self,
        handlers: CallHandlers,
        name: str,
        method: Method,
        observer: Observer,
        messages: Iterator[bytes],
        context: Any,
    ) -> None:
        self._handlers = handlers
        self._name = name
        self._method = method
        self._observer = observer
        self._messages = messages
        self._context = context
        self._metadata = dict(context.invocation_metadata())
        self._id = call_id(self._metadata)
        self._is_open = False
        """Whether it is one of `CallHandlers.open_calls`."""
        self._has_failed = False
        self._held_seconds = 0.0
        """How long the refusal of the call is held back."""
        self._is_over = False
        """Whether gRPC has said that it has ended."""
        self._on_end: Callable[[], None] | None = None
        self._places: list[int] = []
        """Holds a 1 while the present request is a call in flight; `_take_place` takes it out."""
        self._nbytes = self._nanoseconds = 0
        """Bytes and engine time in flight that are counted for the present request, or the bytes
        for the next one while the call waits for it."""
        self._has_turn = False
        self._charged_until = self._free = self._expected = 0.0
        """Processor time of this thread that has been charged; what is left without charge; and
        what has been charged before it is spent."""

    def is_active(self) -> bool:
        """Return whether the call has not ended."""
        return not self._is_over

    def time_remaining(self) -> float | None:
        """Return the seconds until the caller's deadline; None without one."""
        remaining: float | None = self._context.time_remaining()
        return remaining

    def on_end(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called if the call ends before the present request is answered."""
        self._on_end = callback
        if self._is_over:
            callback()

    def reserve(self, nbytes: int, nanoseconds: int) -> None:
        """Count bytes and estimated engine time until the present request is answered.

        Raises:
            ResourceExhaustedError: as `Admission.reserve`.
        """
        admission = self._handlers.admission
        counted = admission.reserve(self.record.tenant, nbytes, self._nbytes, nanoseconds)
        self._nbytes += nbytes
        self._nanoseconds = counted

    def check_wanted(self) -> None:
        """Raise if the call has ended meanwhile, so that nothing more is done for it."""
        # gRPC itself may not have noticed yet that the deadline has passed.
        if self._is_over or self._context.time_remaining() == 0:
            raise CancelledError("the call has ended", "CANCELLED")

    def end_turn(self) -> None:
        """Let the next request of the tenant have its turn: the present one is decoded."""
        if self._has_turn:
            self._has_turn = False
            if not self._method.streams:
                self._charge()
            self._handlers.turns.release(self.record.tenant)

    def _begin_charges(self) -> None:
        """Charge for nothing that this thread has computed until now."""
        self._charged_until, self._free = time.thread_time(), _FREE_SECONDS

    def _charge(self) -> None:
        """Charge the tenant for what this thread has computed since the last time."""
        now = time.thread_time()
        spent, self._charged_until = now - self._charged_until, now
        free = min(spent, self._free)
        self._free -= free
        if spent > free or self._expected:
            self._handlers.turns.charge(self.record.tenant, spent - free, self._expected)
            self._expected = 0.0

    def serve(self) -> Iterator[bytes]:
        """Yield the messages of the answers, request by request."""
        context, handlers = self._context, self._handlers
        self._is_over = not context.add_callback(self._ended)
        message: bytes | None = None
        LOGGED_REQUEST_ID.set(self._id)
        try:
            while self._begin(message):
                last = yield from self._answer(message)
                message = None  # the method alone decides how long the message is kept
                if last is not None:
                    handlers.timeouts.begin(context, handlers.message_seconds)
                    yield last
                if not self._nbytes:
                    break
                handlers.waiting.add(context)
                handlers.timeouts.begin(context, _IDLE_SECONDS)
                try:
                    message = None if handlers.is_draining else next(self._messages, None)
                except grpc.RpcError:  # the client has gone, or the time is up
                    break
                finally:
                    handlers.timeouts.end(context)
                    handlers.waiting.discard(context)
                if message is None:
                    break
            if not self._has_failed:
                context.set_trailing_metadata(self.record.trailing)
        finally:
            handlers.timeouts.end(context)
            if self._nbytes:
                handlers.admission.leave(self.record.tenant, (0, self._nbytes))
            if self._is_open:
                handlers.open_calls.leave(self.record.tenant)
            if self._held_seconds:
                time.sleep(self._held_seconds)
                handlers.held.release()

    def _begin(self, message: bytes | None) -> bool:
        """Admit a request, whose message is there if it is not the first; return False if not.

        The open call is counted, and the bytes that its message may have.
        """
        own = self._name, self._id, time.monotonic_ns(), ANONYMOUS, self._metadata
        self.record = CallRecord(*own)
        try:
            handlers, admission = self._handlers, self._handlers.admission
            tenant = handlers.authenticator.authenticate(self._context, self.record.metadata)
            self.record.tenant = tenant
            limits = self.limits = admission.limits(tenant)
            admission.check_rate(tenant, limits.rate)
            if not self._is_open:
                handlers.make_way(tenant, partial(handlers.open_calls.enter, tenant))
                self._is_open = True
            if message is None:
                handlers.make_way(tenant, partial(admission.await_message, tenant))
                self._nbytes = admission.message_bytes
        except Exception as error:
            self._fail(error)
            self._observer.end(self.record, ended_status(self._context))
            return False
        self._observer.begin(self.record)
        return True

    def _take_place(self) -> int:
        """Return 1 if the present request is a call in flight, which it then is no more, else 0."""
        try:
            return self._places.pop()  # atomic, so that only one thread gets it
        except IndexError:
            return 0

    def _leave_place(self) -> None:
        """Count the present request among the calls in flight no more."""
        if self._take_place():
            self._handlers.admission.leave(self.record.tenant, (1,))

    def _ended(self) -> None:
        """Take notice that the call has ended; gRPC calls this in a thread of its own.

        A cancelled call leaves its place at once, but its memory only when the engine has stopped.
        """
        self._is_over = True
        self._leave_place()
        on_end = self._on_end
        if on_end is not None:
            on_end()

    def _fail(self, error: Exception) -> None:
        """End the call with the status of an error; a refusal is held back."""
        self._has_failed = True
        if isinstance(error, ResourceExhaustedError) and error.retry_after:
            own = self.record.tenant, error.retry_after, self.time_remaining()
            self._held_seconds = self._handlers.hold(*own)
            error.retry_after -= self._held_seconds
        fail_call(self._context, error, self.record.trailing)
        # The error with which gRPC says that a client has gone is held by a frame of its own
        # traceback. This reference cycle would keep the call's last messages until Python's garbage
        # collector runs, which may be a thousand calls later.
        held: BaseException | None = error
        while held is not None:
            held.__traceback__ = None
            held = held.__context__

    def _answer(self, message: bytes | None) -> Generator[bytes, None, bytes | None]:
        """Yield the messages of an answer; return the last one unless that is long."""
        last = None
        self._begin_charges()
        try:
            if message is None:
                self._handlers.silent[self._context] = self.record.tenant, time.monotonic()
                try:
                    message = self._next()
                finally:
                    del self._handlers.silent[self._context]
            request: Any = self._enter(message)
            del message
            answer = self._method.behaviour(request, self)
            del request
            last = (yield from self._send_each(answer)) if self._method.streams else answer
            if len(last) > _LAST_BYTES:
                self._leave_place()
                self._handlers.timeouts.begin(self._context, self._handlers.message_seconds)
                yield last
                self._handlers.timeouts.end(self._context)
                last = None
        except Exception as error:
            self._fail(error)
        finally:
            self._on_end = None
            self.end_turn()
            if self._method.streams:
                self._charge()
            # It is counted no more, but for the longest message if another one may come.
            handlers, tenant = self._handlers, self.record.tenant
            counted = self._take_place(), self._nbytes, self._nanoseconds
            self._nbytes = self._nanoseconds = 0
            may_wait = self._method.streams and not (self._has_failed or self._is_over)
            may_wait = may_wait and not (handlers.is_draining or handlers.open_calls.are_scarce)
            if may_wait and handlers.admission.wait(tenant, counted):
                self._nbytes = handlers.admission.message_bytes
            else:
                handlers.admission.leave(tenant, counted)
            is_well = not (self._has_failed or self._is_over)
            self._observer.end(self.record, "OK" if is_well else ended_status(self._context))
        return last

    def _enter(self, message: bytes | None) -> Any:
        """Count a request whose first message has arrived as a call in flight.

        Returns:
            The message, or an iterator of all messages of an upload.

        Raises:
            InvalidArgumentError: if there is no message.
            ResourceExhaustedError: if it is too long, or too much is in flight.
        """
        if message is None:
            raise InvalidArgumentError(
                "the call has no message", "NO_MESSAGE", "Send at least one request message"
            )
        if len(message) > self.limits.message_bytes:  # the next request of a call
            raise _too_large(len(message), self.limits.message_bytes)
        uploads = self._method.uploads
        nbytes = self._nbytes if uploads else len(message)  # others of an upload may be longer
        self._handlers.admission.enter(self.record.tenant, self.limits, nbytes, self._nbytes)
        self._nbytes = nbytes
        self._places.append(1)
        if self._is_over:
            self._leave_place()
        self._begin_charges()
        self._expected = self._handlers.turns.acquire(self.record.tenant, self.check_wanted)
        self._has_turn = True
        return chain((message,), iter(self._next, None)) if uploads else message

    def _next(self) -> bytes | None:
        """Wait for the next message; return None if there is none."""
        timeouts, seconds = self._handlers.timeouts, self._handlers.message_seconds
        most = self.limits.message_bytes
        if not self._method.has_long_messages:
            most, seconds = min(most, _SHORT_MESSAGE), min(seconds, _SHORT_SECONDS)
        timeouts.begin(self._context, seconds)
        began = time.monotonic()
        try:
            message = next(self._messages, None)
        finally:
            if not timeouts.end(self._context):  # then gRPC says that the call was cancelled
                raise DeadlineExceededError(
                    f"no complete message has arrived within {time.monotonic() - began:.1f} s",
                    "MESSAGE_TIMEOUT",
                    "Send each message as soon as the call has begun, and smaller ones over a slow "
                    "network",
                )
        if message is None and self._is_over:
            raise CancelledError("the call has ended", "CANCELLED")
        if message is not None and len(message) > most:
            raise _too_large(len(message), most)
        return message

    def _send_each(self, answer: Any) -> Generator[bytes, None, bytes]:
        """Yield the messages of an answer but the last one, which is returned.

        The time that making them takes is measured. The call is cancelled if the client does not
        take a message in time.
        """
        record, handlers = self.record, self._handlers
        message: bytes
        try:
            while True:
                try:
                    message, is_last = next(answer), False
                except StopIteration as end:
                    message, is_last = end.value, True
                made = time.monotonic_ns()
                if record.finished:
                    record.encode = made - record.finished - record.suspended
                if is_last:
                    return message
                is_long = len(message) > _LAST_BYTES
                if record.finished or is_long:
                    self._leave_place()
                handlers.timeouts.begin(self._context, handlers.message_seconds)
                yield message
                handlers.timeouts.end(self._context)
                if is_long:
                    self._charge()
                    self._expected = handlers.turns.rest(record.tenant, self.check_wanted)
                if record.finished:
                    record.suspended += time.monotonic_ns() - made
        finally:
            answer.close()


def _too_large(nbytes: int, most: int) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"one message has {nbytes} bytes, the limit is {most}",
        "MESSAGE_TOO_LARGE",
        "Send smaller batches or pieces, or ask for a higher limit",
        needed=nbytes,
        available=most,
    )
