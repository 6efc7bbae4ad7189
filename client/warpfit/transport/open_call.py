"""Calls that stay open: one request follows the other in a call, as the contract allows.

Beginning and ending a call takes gRPC most of what a small call costs; the result ``call_cost`` of
the benchmarks compares both. The calling thread reads gRPC's events itself, by the inner object
that gRPC's own blocking calls have.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Final

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from warpfit.codec import MORE_REQUESTS
from warpfit.errors import CancelledError
from warpfit.transport.call import Cancellation

#: Seconds after which a call is not used again: servers end one that waits for 0.5 s.
_IDLE_SECONDS: Final = 0.4
_MESSAGE, _STATUS = (
    cygrpc.OperationType.receive_message,
    cygrpc.OperationType.receive_status_on_client,
)
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_Metadata = tuple[tuple[str, str], ...] | None


class CallEndedError(grpc.RpcError):
    """The server, or gRPC, has ended a call instead of answering."""

    def __init__(self, status: Any) -> None:
        super().__init__(status.details())
        self._status = status

    def code(self) -> grpc.StatusCode:
        """Return the status with which it has ended."""
        return _CODES.get(self._status.code(), grpc.StatusCode.UNKNOWN)

    def details(self) -> str:
        """Return the text of the status."""
        return self._status.details() or ""

    def trailing_metadata(self) -> Any:
        """Return the metadata that came with the status."""
        return self._status.trailing_metadata() or ()


class OpenCall:
    """A call in which requests follow one another; used by one thread at a time.

    Args:
        channel: that it is made on.
        method: path of the method.
        metadata: of the call.
    """

    def __init__(self, channel: Any, method: bytes, metadata: _Metadata) -> None:
        self._begin = channel._channel.segregated_call
        self._method, self._metadata = method, metadata
        self._call: Any = None
        self._due = 0
        """Batches of operations whose events have not been read."""
        self._receives = False
        """Whether one of them receives a message."""
        self._status: Any = None
        self._is_cancelled = False

    def send(self, request: bytes) -> None:
        """Send a request, and let `receive` return the messages of its answer.

        Raises:
            CallEndedError: if the call has ended.
        """
        operations = [cygrpc.SendMessageOperation(request, 0), cygrpc.ReceiveMessageOperation(0)]
        if self._call is not None:
            self._start(operations)
            return
        first = (
            cygrpc.SendInitialMetadataOperation(self._metadata, 0),
            *operations,
            cygrpc.ReceiveInitialMetadataOperation(0),
        )
        batches = ((first, None), ((cygrpc.ReceiveStatusOnClientOperation(0),), None))
        defaults = cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS
        given = defaults, self._method, None, None, self._metadata, None, batches, None, None
        try:
            self._call = self._begin(*given)
        except ValueError as error:  # gRPC's word for a channel that was closed a moment ago
            raise CancelledError("the client was closed", "CANCELLED") from error
        self._due, self._receives = len(batches), True
        if self._is_cancelled:
            self.cancel()

    def receive(self) -> bytes:
        """Wait for the next message of the answer.

        Raises:
            CallEndedError: if the call has ended; nothing of it is left.
        """
        if not self._receives:
            self._start([cygrpc.ReceiveMessageOperation(0)])
        message = None
        while message is None and self._due:
            message = self._read()
        if message is None:
            raise CallEndedError(self._status)
        return message

    def cancel(self) -> None:
        """Cancel the call, now or when it begins; any thread may call this."""
        self._is_cancelled = True
        if self._call is not None:  # gRPC ignores it if the call has ended
            self._call.cancel(cygrpc.StatusCode.cancelled, "the caller has cancelled")

    def close(self) -> None:
        """Cancel the call, if it has not ended, and wait for its end."""
        if self._due:
            self.cancel()
        self.finish()

    def finish(self) -> None:
        """Wait for the end of a call that the server ends, or that was cancelled."""
        while self._due:
            self._read()

    def _start(self, operations: list[Any]) -> None:
        if not self._call.operate(operations, None):
            raise CallEndedError(self._status)
        self._due += 1
        self._receives = True

    def _read(self) -> bytes | None:
        """Wait for the next event, and return the message that it may have brought."""
        try:
            event = self._call.next_event()
        except BaseException:  # an interrupt, after which gRPC has dropped the call
            self._due = 0
            raise
        self._due -= 1
        message: bytes | None = None
        for operation in event.batch_operations:
            kind = operation.type()
            if kind == _MESSAGE:
                message, self._receives = operation.message(), False
            elif kind == _STATUS:
                self._status = operation
        return message


class OpenCalls:
    """The open calls of a method at one server; threads may share it.

    Args:
        channel: to the server.
        method: path of the method.
        metadata: of all calls.
        parse: makes a message of an answer of bytes; one with ``timings`` is the last of its
            answer, and says by ``more`` whether the server waits for another request.
    """

    def __init__(
        self, channel: Any, method: str, metadata: _Metadata, parse: Callable[[bytes], Any]
    ) -> None:
        self._given = channel, method.encode(), metadata
        self._parse = parse
        self._idle: deque[tuple[float, OpenCall]] = deque()
        self._lock = threading.Lock()
        self._is_closed = False

    def ask(self, request: bytes, cancellation: Cancellation | None) -> Iterator[Any]:
        """Send a request and yield the messages of its answer.

        Raises:
            CallEndedError: if the server has ended the call instead.
            CancelledError: if the client was closed before.
        """
        idle = self._take()
        if idle is not None:
            messages = self._answer(idle, request, cancellation)
            try:
                first = next(messages)
            except CallEndedError as error:
                if error.code() is not grpc.StatusCode.OK:
                    raise
                # The server has not waited long enough; it has not read the request.
            else:
                yield first
                yield from messages
                return
        yield from self._answer(OpenCall(*self._given), request, cancellation)

    def close(self) -> None:
        """End the calls that are idle, and those that become it."""
        with self._lock:
            self._is_closed = True
            idle = [call for _, call in self._idle]
            self._idle.clear()
        for call in idle:
            call.close()

    def _answer(
        self, call: OpenCall, request: bytes, cancellation: Cancellation | None
    ) -> Iterator[Any]:
        try:
            with nullcontext() if cancellation is None else cancellation.covering(call):
                call.send(request + MORE_REQUESTS)
                message = self._parse(call.receive())
                while not message.HasField("timings"):
                    yield message
                    message = self._parse(call.receive())
        except BaseException:
            call.close()
            raise
        if message.more:
            self._put(call)
        else:
            call.finish()
        yield message

    def _take(self) -> OpenCall | None:
        """Return an idle call that the server has not ended yet, if there is one."""
        earliest = time.monotonic() - _IDLE_SECONDS
        with self._lock:
            late = []
            while self._idle and self._idle[0][0] < earliest:
                late.append(self._idle.popleft()[1])
            found = self._idle.pop()[1] if self._idle else None
        for call in late:
            call.close()
        return found

    def _put(self, call: OpenCall) -> None:
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._idle.append((time.monotonic(), call))
        if is_closed:
            call.close()
