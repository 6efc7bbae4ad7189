"""The transport that carries requests over gRPC channels.

Evaluations follow one another in a call that stays open, and so do fits, as the contract allows:
beginning and ending a call takes gRPC most of what a small call costs (result ``call_cost`` of the
benchmarks). Very long ones, those with a time limit and every other request are calls of their own.

The first request to a server, and one after a silence, follow a small question, GetServerInfo. Its
answer says which version of the contract the server keeps, and that packets come through: a proxy
may have dropped the connection without a word to either side. Without an answer a new connection is
made.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import chain
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc.experimental import ChannelOptions

from warpfit import codec
from warpfit.errors import DeadlineExceededError, InvalidArgumentError, WarpfitError
from warpfit.transport.call import (
    CALLS,
    PATIENCE_SECONDS,
    QUIET_BEFORE_FORK,
    RENEWED_IN_CHILD,
    HeldSignals,
    Request,
    UploadStream,
    only,
)
from warpfit.transport.connection import Connection, Security, check_address, is_local
from warpfit.transport.failover import NOBODY_THERE
from warpfit.v1 import evaluator_pb2 as pb

#: Metadata of a call.
Metadata: TypeAlias = tuple[tuple[str, str], ...]

#: The methods whose calls carry several requests: what parses a message of an answer, and the field
#: that the last one has.
_OPEN: Final[Mapping[str, tuple[Callable[[bytes], Any], str]]] = {
    "Evaluate": (codec.answer_from_bytes, "timings"),
    "Optimize": (codec.fit_answer_from_bytes, "result"),
}
#: The method whose answer says which version a server is of.
_GREETING: Final = "GetServerInfo"
#: The method whose request has several messages.
_UPLOAD: Final = "UploadVariables"
#: Longest request that follows another one in a call: 0.8 MB need half of the time, and of the
#: processor time, of a call of their own. Beside what a longer one takes, a call does not matter.
_OPEN_BYTES: Final = 4 << 20
#: Least seconds between sending a request and the end of its call without an answer if the request
#: came too late for the server. If the server had ended the call before, the end is seen at once.
_LATE_SECONDS: Final = 0.05
#: Seconds after a late request in which requests of more than half its length are calls of their
#: own: a slow network would carry each of them twice.
_SLOW_SECONDS: Final = 60.0
#: Seconds after which an open call is not used again: servers end one that waits for 0.5 s.
_IDLE_SECONDS: Final = 0.4
#: Seconds without an answer after which a server is asked something small before a request.
_SILENCE_SECONDS: Final = 4.0
#: Longest time in seconds for its answer until a new connection is made.
_GREETING_SECONDS: Final = 2.0
#: Statuses of failures that no server may have sent.
_UNHEARD: Final = (
    *(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED),
    grpc.StatusCode.CANCELLED,
)
#: Statuses with which a server ends a call that waits for a request, without reading another one.
_ENDED: Final = (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)
#: Channels of the parent in a child that was forked. They are kept, because closing them there
#: could wait for a lock that a thread of the parent had.
_PARENTS_CHANNELS: Final[list[Any]] = []
#: gRPC's own messages about a connection that the server has ended before it was ready.
_CONNECTION_ENDED: Final = re.compile("failed to connect to all addresses.*(?:closed|reset|failed)")
#: HealthCheckResponse.ServingStatus by number.
_HEALTH: Final = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
_LOG: Final = logging.getLogger("warpfit")


class GrpcTransport:
    """Calls over a gRPC channel to each server; those to fixed servers are opened at once."""

    def __init__(self, connection: Connection) -> None:
        addresses, config = connection.target.addresses, connection.transport
        if len(addresses) != 1:
            config = config.for_several()
        # The caller's thread reads the answer itself: a thread of gRPC's costs 0.1 ms a call.
        reading = (ChannelOptions.SingleThreadedUnaryStream, 1)
        self._options = [*config.channel_options(), reading]
        self._proxy = config.proxy
        self._security = connection.security
        self._metadata = connection.security.metadata()
        self._open: dict[str, _Channel] = {}
        self._retired: set[_Channel] = set()
        """Channels that have been replaced and still have calls in flight."""
        self._lock = threading.Lock()
        self._closed = False
        RENEWED_IN_CHILD.add(self)
        QUIET_BEFORE_FORK.add(self)
        for address in addresses:
            self._to(address)

    def call(self, request: Request) -> Any:
        """Send a request; an interrupt in the caller's thread cancels it on the server too."""
        if self._closed:
            raise InvalidArgumentError(
                "the client is closed", "CLIENT_CLOSED", "Keep it open as long as it is used"
            )
        with HeldSignals() as held, CALLS:
            try:
                return self._call(request, held)
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                if request.cancellation is not None:
                    request.cancellation.check()  # so that the server is not blamed
                failure = self._error_of(request, error)
            # Outside of the block, so that a traceback shows nothing of gRPC.
            raise failure

    def _call(self, request: Request, held: HeldSignals) -> Any:
        """Send a request over the channel to its server, if need be over a new one."""
        channel = self._open.get(request.server) or self._to(request.server)
        if channel.is_silent and request.method != _GREETING:
            channel = self._greet(channel, request, held)
        with self._lock:
            channel.calls += 1
        try:
            answer = channel.call(request, self._metadata, held)
            if request.method == _GREETING:
                channel.is_known = bool(answer.contract)
            return answer
        except grpc.RpcError as error:
            if request.method == _GREETING and _is_unanswered(error):
                self._replace(channel, request.server)
            raise
        finally:
            with self._lock:
                channel.calls -= 1
                is_over = not channel.calls and channel in self._retired
                self._retired -= {channel} if is_over else set()
            if is_over:
                channel.close()

    def _greet(self, channel: _Channel, request: Request, held: HeldSignals) -> _Channel:
        """Ask a server for its description; return the channel on which it has answered.

        The time of the question is taken from that of the request.
        """
        begun, given = time.monotonic(), request.seconds
        question = Request(
            _GREETING,
            codec.info_request(),
            server=request.server,
            cancellation=request.cancellation,
        )
        if channel.is_known:  # else there is no other connection to be tried
            question.seconds = min(_GREETING_SECONDS, math.inf if given is None else given / 2)
            try:
                self._ask(channel, question, held)
            except grpc.RpcError as error:
                if not _is_unanswered(error):
                    raise
                text = (
                    "%s has not answered for %.1f s on a connection that was idle; connecting anew"
                )
                _LOG.warning(text, request.server, question.seconds)
                channel = self._replace(channel, request.server)
        if not channel.is_known:
            left = None if given is None else max(1e-3, given - (time.monotonic() - begun))
            question.seconds = left
            try:
                self._ask(channel, question, held)
            except grpc.RpcError as error:
                if not _is_unanswered(error):
                    raise
                raise DeadlineExceededError(
                    f"{request.server} has not answered a small question on a new connection in "
                    "the time of the call",
                    "DEADLINE_EXCEEDED",
                    "Check that the server runs and that the network lets its port pass, or raise "
                    "timeout=",
                ) from None
        if given is not None:
            request.seconds = max(1e-3, given - (time.monotonic() - begun))
        return channel

    def _ask(self, channel: _Channel, question: Request, held: HeldSignals) -> None:
        """Ask for a server's description; refuse a server that is too old."""
        codec.check_contract(channel.call(question, self._metadata, held), question.server)
        channel.is_known = True

    def _replace(self, channel: _Channel, address: str) -> _Channel:
        """Return another channel, which shares no connection with one that does not answer.

        The old one is closed once no thread waits for an answer there.
        """
        with self._lock:
            is_first = self._open.get(address) is channel
            if is_first:
                del self._open[address]
            is_idle = is_first and not channel.calls
            self._retired |= {channel} if is_first and not is_idle else set()
        if is_idle:
            channel.close()
        # Channels whose options are the same share a connection.
        return self._to(address, ("warpfit.channel", str(time.monotonic_ns())))

    def _error_of(self, request: Request, error: Any) -> BaseException:
        """Return the exception of a failed call; a progress callback's comes before gRPC's."""
        if isinstance(request.message, UploadStream) and request.message.failure is not None:
            return request.message.failure
        found = codec.error_from_status(
            error.code().name, error.details() or "", error.trailing_metadata()
        )
        if found.reason == "UNAVAILABLE" and _CONNECTION_ENDED.search(found.message):
            found = self._security.handshake_failure(request.server) or found
        is_away = isinstance(found, WarpfitError) and found.reason in NOBODY_THERE
        if is_away and self._proxy is not None and not is_local(request.server):
            proxy = str(self._proxy).removeprefix("http://").rpartition("@")[2]
            found.message = f"{request.server}, asked for by the proxy {proxy}: {found.message}"
        return found

    def _to(self, address: str, *more: tuple[str, str]) -> _Channel:
        with CALLS, self._lock:
            if address not in self._open:
                channel = self._security.channel(address, [*self._options, *more], self._proxy)
                CALLS.watch_forks()
                self._open[address] = _Channel(channel, self._metadata)
            return self._open[address]

    def forget(self, address: str) -> None:
        """Close the channel to a server."""
        with self._lock:
            found = self._open.pop(address, None)
        if found is not None:
            with CALLS:
                found.close()

    def close(self) -> None:
        """Close the channels, and open no others."""
        self._closed = True
        for address in list(self._open):
            self.forget(address)
        for channel in list(self._retired):
            channel.close()

    def before_fork(self, is_quiet: bool) -> None:
        """End the calls that are open, for whose threads gRPC would wait for a second.

        Unless it ``is_quiet``, calls are in flight, too: they fail as if the server were gone.
        """
        for address, channel in list(self._open.items()):
            if is_quiet:
                channel.end_idle(PATIENCE_SECONDS)
            elif self._open.pop(address, None) is not None:
                channel.close()
        for channel in list(self._retired):
            channel.close()

    def after_fork(self) -> None:
        """Begin anew in a child, whose channels must not share the connections of the parent."""
        _PARENTS_CHANNELS.append((self._open, self._retired))
        self._open, self._retired, self._lock = {}, set(), threading.Lock()
        own = "warpfit.process"  # channels whose arguments are the same share a connection
        self._options = [option for option in self._options if option[0] != own]
        self._options.append((own, os.getpid()))


class _Channel:
    """A channel to a server with the remote methods.

    On the wire, a stream of one message looks like a single message. Where the contract promises
    one message the method is called as a unary one, which saves 0.1 ms a call.
    """

    def __init__(self, channel: Any, metadata: Metadata) -> None:
        service = pb.DESCRIPTOR.services_by_name["Evaluator"]
        self._channel = channel
        self.calls = 0
        """Calls in flight, counted by the transport."""
        self.is_known = False
        """Whether the server has described itself, and nothing has been wrong since."""
        self._heard_at = -math.inf
        self._streamed: dict[str, Any] = {}
        self._single: dict[str, Any] = {}
        self._open: dict[str, OpenCalls] = {}
        for method in service.methods:
            request, answer = map(GetMessageClass, (method.input_type, method.output_type))
            is_bytes = method.name in (*_OPEN, _UPLOAD)
            serializer = None if is_bytes else request.SerializeToString
            way = f"/{service.full_name}/{method.name}", serializer, answer.FromString
            unary = channel.stream_unary if method.name == _UPLOAD else channel.unary_unary
            self._single[method.name] = unary(*way)
            if method.server_streaming:
                self._streamed[method.name] = channel.unary_stream(*way)
            if method.name in _OPEN:
                given = channel.stream_stream(way[0]), metadata, *_OPEN[method.name]
                self._open[method.name] = OpenCalls(*given)

    @property
    def is_silent(self) -> bool:
        """Whether the server has not been heard of lately."""
        return not self.is_known or time.monotonic() - self._heard_at > _SILENCE_SECONDS

    def call(self, request: Request, metadata: Metadata, held: HeldSignals) -> Any:
        """Send a request; raise what gRPC raises."""
        try:
            answer = self._send(request, metadata, held)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:  # the next one may be another version
                self.is_known = False
            elif error.code() not in _UNHEARD:
                self._heard_at = time.monotonic()
            raise
        self._heard_at = time.monotonic()
        return answer

    def _send(self, request: Request, metadata: Metadata, held: HeldSignals) -> Any:
        seconds, message = request.seconds, request.message
        traced = trace_context()
        open_calls = None if traced or seconds is not None else self._open.get(request.method)
        if open_calls is not None and open_calls.arrives_in_time(len(message)):
            return open_calls.call(request, held)
        options = {"timeout": seconds, "metadata": (*metadata, *traced)}
        single, streamed = self._single[request.method], self._streamed.get(request.method)
        may_be_ended = held.is_holding or request.cancellation is not None
        if request.is_single and not may_be_ended and request.method != _UPLOAD:
            return request.read((only((single(message, **options),)),))
        # This thread reads a stream itself, while a future has to wait for one of gRPC's.
        rpc = (streamed or single.future)(message, **options)
        held.cover(rpc)
        try:
            with nullcontext() if (token := request.cancellation) is None else token.covering(rpc):
                return request.read(rpc if streamed else (only((rpc.result(),)),))
        except grpc.RpcError:
            raise
        except BaseException:
            rpc.cancel()
            raise

    def close(self) -> None:
        """Close the channel; calls in flight fail."""
        for open_calls in self._open.values():  # before: gRPC waits until nobody has an open call
            open_calls.close()
        self._channel.close()

    def end_idle(self, patience: float) -> None:
        """End the open calls that are idle, and wait for some seconds at most for their ends."""
        until = time.monotonic() + patience
        ended = [call for calls in self._open.values() for call in calls.end_idle()]
        for call in ended:
            call.has_ended.wait(max(0.0, until - time.monotonic()))


class _OpenCall:
    """A call in which requests follow one another; used by one thread at a time."""

    def __init__(
        self, method: Any, metadata: Metadata, parse: Callable[[bytes], Any], last: str
    ) -> None:
        self._parse, self._last = parse, last
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        self.has_ended = threading.Event()
        """Set once gRPC's thread has dealt with the end of the call."""
        self.is_complete = False
        """Whether the whole answer to the last request has been read."""
        self.rpc = method(iter(self._requests.get, None), metadata=metadata)
        """gRPC's call, whose thread sends what is put into the queue until the call ends."""
        if not self.rpc.add_callback(self._end):
            self._end()

    def _end(self) -> None:
        self._requests.put(None)
        self.has_ended.set()

    def send(self, request: bytes) -> None:
        """Send a request; the whole answer to the last one must have been received."""
        self.is_complete = False
        self._requests.put(request)

    def receive(self) -> Any:
        """Return the next message of an answer; None after the last one, or if the call has ended.

        Raises:
            grpc.RpcError: with the status, if the server ends the call with an error instead.
            InternalError: if a message is none.
        """
        data = None if self.is_complete else next(self.rpc, None)
        if data is None:
            return None
        message = self._parse(data)
        self.is_complete = message.HasField(self._last)
        return message


class OpenCalls:
    """The open calls of a method at one server; threads may share it.

    Args:
        method: as a stream of bytes in both directions.
        metadata: of all calls.
        parse: makes a message of bytes of an answer.
        last: the field that only the last message of an answer has.
    """

    def __init__(
        self, method: Any, metadata: Metadata, parse: Callable[[bytes], Any], last: str
    ) -> None:
        self._given = method, metadata, parse, last
        self._idle: deque[tuple[float, _OpenCall]] = deque()
        self._lock = threading.Lock()
        self._is_closed = False
        self._longest, self._slow_until = _OPEN_BYTES, 0.0
        """Bytes of the longest request that is likely to arrive in time, and until when if it is
        less than usual."""

    def arrives_in_time(self, size: int) -> bool:
        """Return whether a request of so many bytes is likely to arrive before a call ends."""
        if self._longest < _OPEN_BYTES and time.monotonic() > self._slow_until:
            self._longest = _OPEN_BYTES
        return size <= self._longest

    def call(self, request: Request, held: HeldSignals) -> Any:
        """Send a request and return the result of ``request.read``.

        Raises:
            grpc.RpcError: with the status, if the server has ended the call instead.
            UnavailableError: if the channel was closed meanwhile: by the client's end, or a fork.
        """
        begun = time.monotonic()
        with self._lock:
            late = []
            while self._idle and self._idle[0][0] < begun - _IDLE_SECONDS:
                late.append(self._idle.popleft()[1])
            call = self._idle.pop()[1] if self._idle else None
        for one in late:
            one.rpc.cancel()
        answer = None if call is None else self._ask(call, request, held)
        if answer is not None:
            return answer
        now = time.monotonic()
        if call is not None and now - begun > _LATE_SECONDS:
            self._longest, self._slow_until = len(request.message) // 2, now + _SLOW_SECONDS
        try:
            call = _OpenCall(*self._given)
        except ValueError as error:  # gRPC's word for a channel that was closed a moment ago
            raise codec.error_from_status("CANCELLED", "", None) from error
        return self._ask(call, request, held, is_new=True)

    def close(self) -> None:
        """End idle calls now, and busy ones as they become idle."""
        with self._lock:
            self._is_closed = True
        self.end_idle()

    def end_idle(self) -> list[_OpenCall]:
        """End the calls that are idle, and return them."""
        with self._lock:
            idle = [call for _, call in self._idle]
            self._idle.clear()
        for call in idle:
            call.rpc.cancel()
        return idle

    def _ask(
        self, call: _OpenCall, request: Request, held: HeldSignals, *, is_new: bool = False
    ) -> Any:
        """Send a request in a call; return None if the server has ended that without reading it."""
        token, first = request.cancellation, None
        held.cover(call.rpc)
        try:
            with nullcontext() if token is None else token.covering(call.rpc):
                call.send(request.message)
                first = call.receive()
                if first is None and not is_new:
                    return None  # the server has not waited long enough
                rest = iter(call.receive, None)
                answer = request.read(rest if first is None else chain((first,), rest))
        except BaseException as error:
            call.rpc.cancel()
            is_cancelled = held.has_raised or (token is not None and token.is_cancelled())
            if is_new or first is not None or is_cancelled or not isinstance(error, grpc.RpcError):
                raise
            if call.rpc.code() not in _ENDED:
                raise
            return None
        with self._lock:
            is_kept = call.is_complete and not self._is_closed
            if is_kept:
                self._idle.append((time.monotonic(), call))
        if not is_kept:
            call.rpc.cancel()
        return answer


def _is_unanswered(error: Any) -> bool:
    """Return whether the time of a call ended without a word of the server."""
    is_late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return is_late and codec.ERROR_METADATA_KEY not in dict(error.trailing_metadata() or ())


def trace_context() -> Metadata:
    """Return the caller's span of OpenTelemetry as W3C Trace Context; empty without one."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or not trace.get_current_span().get_span_context().is_valid:
        return ()  # nobody can have made a span without that module
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())


def health(
    address: str, service: str, timeout: float, security: Security | None = None
) -> tuple[str, str]:
    """Return a service's status from grpc.health.v1, and why a call for it failed.

    The status is the one of gRPC if the call failed, and the reason is empty otherwise.

    It needs no package that has the stubs of the health service. A health port speaks plain text,
    the main port what ``security`` says.
    """
    security = security or Security()
    check_address(address)
    name = service.encode()[:127].decode(errors="ignore").encode()
    request = b"\n" + bytes([len(name)]) + name if name else b""  # HealthCheckRequest.service
    with CALLS, security.channel(address, []) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
        try:
            answer = check(request, timeout=timeout, metadata=security.metadata())
        except grpc.RpcError as error:
            status, details = str(error.code().name), error.details() or ""
            found = codec.error_from_status(status, details, None)
            if _CONNECTION_ENDED.search(details):
                found = security.handshake_failure(address) or found
            return status, str(found)
    # HealthCheckResponse.status
    number = answer[1] if answer[:1] == b"\x08" and len(answer) > 1 else 0
    return (_HEALTH[number] if number < len(_HEALTH) else "UNKNOWN"), ""
