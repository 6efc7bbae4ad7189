"""One remote call: its request, the reader of its answer, what carries and what cancels it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, Self

from warpfit import codec
from warpfit.dataset import ClientDataset
from warpfit.errors import CancelledError


def only(messages: Iterable[Any]) -> Any:
    """Return the only message of an answer; raise InternalError if there is none, or another."""
    found = list(islice(messages, 2))
    if len(found) != 1 or found[0] is None:
        raise codec.broken_answer(f"has {'more than one' if found[1:] else 'no'} message")
    return found[0]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A remote call, which may be made several times."""

    method: str
    """Name of the method in evaluator.proto."""
    request: Any
    """The message, or an iterator of messages where the contract says stream."""
    read: Callable[[Iterable[Any]], Any] = only
    """Makes a result of the messages of an answer, while later ones are still on their way."""
    is_single: bool = True
    """Whether the contract promises that the answer is one message."""


class Transport(Protocol):
    """Carries calls to servers and answers back; `warpfit.testing` has one without a network."""

    def call(
        self, call: Call, server: str, seconds: float | None, cancellation: Cancellation | None
    ) -> Any:
        """Make a call at the address of a server; None waits for ever.

        Returns:
            What ``call.read`` makes of the answer.

        Raises:
            WarpfitError: the server's error, or what ``call.read`` raises.
        """

    def forget(self, address: str) -> None:
        """Close the connection to one server."""

    def close(self) -> None:
        """Close all connections; calls in flight fail."""


class Cancellation:
    """Cancels calls that run in other threads."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._lock = threading.Lock()
        self._calls: set[Any] = set()

    @contextmanager
    def within(self, outer: Cancellation | None) -> Iterator[Self]:
        """Cancel this, too, if ``outer`` is cancelled before the block ends."""
        with nullcontext() if outer is None else outer.covering(self):
            yield self

    @contextmanager
    def covering(self, rpc: Any) -> Iterator[None]:
        """Cancel gRPC's call ``rpc`` if `cancel` is called before the block ends."""
        with self._lock:
            self._calls.add(rpc)
        try:
            if self.event.is_set():
                rpc.cancel()
            yield
        finally:
            with self._lock:
                self._calls.discard(rpc)

    def cancel(self) -> None:
        """Cancel all calls, those that begin later too."""
        self.event.set()
        with self._lock:  # so that no call is cancelled that has left its block for another request
            for rpc in self._calls:
                rpc.cancel()

    def sleep(self, seconds: float) -> None:
        """Wait, at most until `cancel` is called."""
        self.event.wait(seconds)

    def check(self) -> None:
        """Raise CancelledError once `cancel` has been called."""
        if self.event.is_set():
            raise CancelledError("the call was cancelled", "CANCELLED")


class UploadStream:
    """Iterator of the messages of an upload, which keeps an exception of the progress callback.

    gRPC iterates in a thread of its own, where an exception would be lost. So an exception ends
    the stream, and the transport raises it in the caller's thread.
    """

    def __init__(
        self, dataset: ClientDataset, chunk_bytes: int, report: Callable[[int, int], None]
    ) -> None:
        self.failure: Exception | None = None
        self._messages = self._stream(dataset, chunk_bytes, report)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        return next(self._messages)

    def _stream(
        self, dataset: ClientDataset, chunk_bytes: int, report: Callable[[int, int], None]
    ) -> Iterator[bytes]:
        """Yield each message, and report it when the next one is asked for."""
        total = dataset.layout.nbytes
        try:
            for sent, message in enumerate(codec.upload_messages(dataset, chunk_bytes)):
                yield message
                report(min(sent * chunk_bytes, total), total)
        except Exception as error:  # whatever the user's callback raises
            self.failure = error
