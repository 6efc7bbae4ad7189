"""Calls that stay open: one request follows the other in a call, as the contract allows.

Beginning and ending a call takes gRPC most of what a small call costs; the result ``call_cost`` of
the benchmarks compares both.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from queue import SimpleQueue
from typing import Any, Final

import grpc

from warpfit import codec
from warpfit.errors import CancelledError
from warpfit.transport.call import Cancellation

#: Seconds after which a call is not used again: servers end one that waits for 0.5 s.
_IDLE_SECONDS: Final = 0.4
#: Statuses with which a server ends a call that waits for a request, without reading another one.
_ENDED: Final = (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)


class _OpenCall:
    """A call in which requests follow one another; used by one thread at a time."""

    def __init__(self, method: Any, metadata: Any) -> None:
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        self.has_ended = threading.Event()
        """Set once gRPC's thread has dealt with the end of the call."""
        self.rpc = method(iter(self._requests.get, None), metadata=metadata)
        """gRPC's call, whose thread sends what is put into the queue until the call ends."""
        if not self.rpc.add_callback(self._end):
            self._end()

    def _end(self) -> None:
        self._requests.put(None)
        self.has_ended.set()

    def ask(self, request: bytes) -> Generator[Any, None, bool]:
        """Send a request and yield the messages of its answer; return whether it has an end.

        Raises:
            InternalError: if a message is none.
        """
        self._requests.put(request)
        for data in self.rpc:
            message = codec.answer_from_bytes(data)
            yield message
            if message.HasField("timings"):
                return True
        return False


class OpenCalls:
    """The open calls of Evaluate at one server; threads may share it.

    Args:
        method: Evaluate as a stream of bytes in both directions.
        metadata: of all calls.
    """

    def __init__(self, method: Any, metadata: Any) -> None:
        self._given = method, metadata
        self._idle: deque[tuple[float, _OpenCall]] = deque()
        self._lock = threading.Lock()
        self._is_closed = False

    def ask(self, request: bytes, cancellation: Cancellation) -> Iterator[Any]:
        """Send a request and yield the messages of its answer.

        Raises:
            grpc.RpcError: with the status, if the server has ended the call instead.
            CancelledError: if the client was closed before.
        """
        call = self._take()
        if call is not None:
            answer = self._answer(call, request, cancellation)
            first = None
            try:
                first = next(answer, None)
            except grpc.RpcError:
                if cancellation.event.is_set() or call.rpc.code() not in _ENDED:
                    raise
            if first is not None:
                yield first
                yield from answer
                return
            # The server has not waited long enough; it has not read the request.
        try:
            call = _OpenCall(*self._given)
        except ValueError as error:  # gRPC's word for a channel that was closed a moment ago
            raise CancelledError("the client was closed", "CANCELLED") from error
        yield from self._answer(call, request, cancellation)

    def close(self) -> None:
        """End the calls that are idle, and those that become it."""
        with self._lock:
            self._is_closed = True
        self.end_idle()

    def end_idle(self, patience: float = 0.0) -> None:
        """End the calls that are idle, and wait for some seconds at most until they have ended."""
        with self._lock:
            idle = [call for _, call in self._idle]
            self._idle.clear()
        for call in idle:
            call.rpc.cancel()
        until = time.monotonic() + patience
        for call in idle if patience else ():
            call.has_ended.wait(max(0.0, until - time.monotonic()))

    def _answer(self, call: _OpenCall, request: bytes, cancellation: Cancellation) -> Iterator[Any]:
        try:
            with cancellation.covering(call.rpc):
                is_complete = yield from call.ask(request)
        except BaseException:
            call.rpc.cancel()
            raise
        with self._lock:
            is_kept = is_complete and not self._is_closed
            if is_kept:
                self._idle.append((time.monotonic(), call))
        if not is_kept:
            call.rpc.cancel()

    def _take(self) -> _OpenCall | None:
        """Return an idle call that the server has not ended yet, if there is one."""
        earliest = time.monotonic() - _IDLE_SECONDS
        with self._lock:
            late = []
            while self._idle and self._idle[0][0] < earliest:
                late.append(self._idle.popleft()[1])
            found = self._idle.pop()[1] if self._idle else None
        for call in late:
            call.rpc.cancel()
        return found
