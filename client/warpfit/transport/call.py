"""A remote call: its request, its deadline, what cancels it, and the transport that carries it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, Self, TypeAlias

from warpfit import codec
from warpfit.dataset import ClientDataset
from warpfit.errors import CancelledError

#: Called with the bytes done and the bytes in total, from 0 again when an upload is repeated.
Progress: TypeAlias = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """Report nothing."""


class Deadline:
    """A moment that all attempts of a call share."""

    def __init__(self, timeout: float | None = None) -> None:
        """Begin ``timeout`` seconds; None, infinity, and 1e9 and more never end."""
        # gRPC takes a deadline that its clock cannot count for one that has passed.
        self.timeout = timeout if timeout is not None and timeout < 1e9 else None
        self._end = None if self.timeout is None else time.monotonic() + self.timeout

    def remaining(self) -> float | None:
        """Return the seconds left, at least 0; None without a deadline."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def part(self, share: float) -> Deadline:
        """Return a deadline after this share of the time left."""
        remaining = self.remaining()
        return Deadline(None if remaining is None else max(1e-3, share * remaining))


class Cancellation:
    """Cancels calls that run in other threads."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._calls: set[Any] = set()

    @contextmanager
    def covering(self, rpc: Any) -> Iterator[None]:
        """Cancel gRPC's call ``rpc`` if `cancel` is called before the block ends."""
        with self._lock:
            self._calls.add(rpc)
        try:
            if self.is_cancelled():
                rpc.cancel()
            yield
        finally:
            with self._lock:
                self._calls.discard(rpc)

    def cancel(self) -> None:
        """Cancel all calls, those that begin later too."""
        self._event.set()
        with self._lock:  # so that no call is cancelled that has left its block for another request
            for rpc in self._calls:
                rpc.cancel()

    def is_cancelled(self) -> bool:
        """Return whether `cancel` has been called."""
        return self._event.is_set()

    def sleep(self, seconds: float) -> None:
        """Wait, at most until `cancel` is called."""
        self._event.wait(seconds)

    def check(self) -> None:
        """Raise CancelledError once `cancel` has been called."""
        if self.is_cancelled():
            raise CancelledError("the call was cancelled", "CANCELLED")


def only(messages: Iterable[Any]) -> Any:
    """Return the only message of an answer; raise InternalError if there is none, or another."""
    found = list(islice(messages, 2))
    if len(found) != 1 or found[0] is None:
        raise codec.broken_answer(f"has {'more than one' if found[1:] else 'no'} message")
    return found[0]


@dataclass(slots=True, eq=False)
class Request:
    """A request to a server. It may be sent several times, one attempt after the other."""

    method: str
    """Name of the method in evaluator.proto."""
    message: Any
    """The message, or an iterator of messages where the contract says stream."""
    read: Callable[[Iterable[Any]], Any] = only
    """Makes a result of the messages of an answer, while later ones are still on their way."""
    is_single: bool = True
    """Whether the contract promises that the answer is one message."""
    dataset: ClientDataset | None = None
    """Data set of the request, which decides between servers, and is uploaded where it is not
    resident."""
    deadline: Deadline = Deadline()  # noqa: RUF009 (it never ends)
    report: Progress = silent
    """Called with the progress of an upload."""
    server: str = ""
    """Address for the present attempt, as the next two."""
    seconds: float | None = None
    """Time for its answer; None waits for ever."""
    cancellation: Cancellation | None = None
    """Ends it; None if nothing but an interrupt does."""


class Transport(Protocol):
    """Carries requests to servers and answers back; `warpfit.testing` has one without a network."""

    def call(self, request: Request) -> Any:
        """Send a request to its server.

        Returns:
            What ``request.read`` makes of the answer.

        Raises:
            WarpfitError: the server's error, or what ``request.read`` raises.
        """

    def forget(self, address: str) -> None:
        """Close the connection to one server."""

    def close(self) -> None:
        """Close all connections; calls in flight fail."""


class UploadStream:
    """Iterator of the messages of an upload, which keeps an exception of the progress callback.

    gRPC iterates in a thread of its own, where an exception would be lost. So an exception ends
    the stream, and the transport raises it in the caller's thread.
    """

    def __init__(self, dataset: ClientDataset, chunk_bytes: int, report: Progress) -> None:
        self.failure: Exception | None = None
        self._messages = self._stream(dataset, chunk_bytes, report)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        return next(self._messages)

    def _stream(
        self, dataset: ClientDataset, chunk_bytes: int, report: Progress
    ) -> Iterator[bytes]:
        """Yield each message, and report it when the next one is asked for."""
        total = dataset.layout.nbytes
        try:
            for sent, message in enumerate(codec.upload_messages(dataset, chunk_bytes)):
                yield message
                report(min(sent * chunk_bytes, total), total)
        except Exception as error:  # whatever the user's callback raises
            self.failure = error
