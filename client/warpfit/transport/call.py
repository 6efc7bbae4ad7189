"""A remote call: its request, its deadline, what cancels it, and the forks of its process.

A fork copies one thread, and gRPC's locks and pollers as the other threads held them. gRPC deals
with that itself (``GRPC_ENABLE_FORK_SUPPORT``), unless a thread is inside of it at that moment.
So a fork waits here until the calls of other threads have ended, and calls that would begin
meanwhile wait for the fork. Calls that take longer are cut off, and repeated after the fork as
after any interruption. Where one stays all the same, the child cannot use gRPC, and each of its
calls says so at once instead of hanging.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Final, Generic, ParamSpec, Protocol, Self, TypeAlias, TypeVar
from weakref import WeakSet

from warpfit import codec
from warpfit.dataset import ClientDataset
from warpfit.errors import CancelledError, InvalidArgumentError, WarpfitError

#: Signals whose handlers often raise; of those that this system has.
_HELD: Final = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
P = ParamSpec("P")
T = TypeVar("T")
#: Called with the bytes done and the bytes in total, from 0 again when an upload is repeated.
Progress: TypeAlias = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """Report nothing."""


# ------------------------------------------------------------------------- signals and callbacks


class HeldSignals:
    """Holds back what handlers of signals raise while the main thread is in gRPC's code.

    gRPC's conditions are objects of Python, which an exception that comes out of nowhere leaves
    locked: each later call would wait for ever. So a handler runs at once, as always; what it
    raises cancels the call and is raised at the end of the block.
    """

    _innermost: ClassVar[HeldSignals | None] = None

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._outer: HeldSignals | None = None
        self._rpc: Any = None
        self._error: BaseException | None = None
        self._may_raise = True

    def __enter__(self) -> Self:
        if threading.get_ident() != threading.main_thread().ident:
            return self  # exceptions of signals come to the main thread alone
        try:
            for number in _HELD:
                if callable(handler := signal.getsignal(number)):
                    self._handlers[number] = handler
                    signal.signal(number, self._handle)
        except BaseException:
            self._restore()
            raise
        self._outer, HeldSignals._innermost = HeldSignals._innermost, self
        self._may_raise = False  # last, so that nothing is held of a block that does not begin
        return self

    def __exit__(self, *_: object) -> None:
        self._may_raise = True
        if HeldSignals._innermost is self:
            HeldSignals._innermost = self._outer
        try:
            self._restore()
        except BaseException:
            self._restore()
            raise
        if self._error is not None:
            raise self._error from None

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    @property
    def is_holding(self) -> bool:
        """Whether a handler may raise, which only `cover` passes on to the call."""
        return bool(self._handlers)

    @property
    def has_raised(self) -> bool:
        """Whether the block ends with what a handler has raised."""
        return self._error is not None

    def cover(self, rpc: Any) -> None:
        """Cancel gRPC's call if a handler raises before the end of the block, or has done so."""
        self._rpc = rpc
        if self._error is not None:
            rpc.cancel()

    def _handle(self, number: int, frame: Any) -> None:
        if self._may_raise:
            self._handlers[number](number, frame)
            return
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            self._error = error
            if self._rpc is not None:  # by another thread, because this one may have gRPC's locks
                _thread.start_new_thread(self._rpc.cancel, ())

    @classmethod
    @contextmanager
    def released(cls) -> Iterator[None]:
        """Let handlers raise at once in a block, which is not gRPC's code."""
        is_main = threading.get_ident() == threading.main_thread().ident
        held = cls._innermost if is_main else None
        if held is None:
            yield
            return
        held._may_raise = True
        try:
            yield
        finally:
            held._may_raise = False


class _CallbackError(Exception):
    """Carries an exception of the caller's function past the error handling of calls."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class CallingBack(Generic[P, T]):
    """A block whose calls call a function of the caller; what it raises leaves the block as it is.

    The calls of the block would otherwise take an error of another client, or of gRPC, for their
    own, and repeat what succeeds, or end as if their server were gone.
    """

    def __init__(self, function: Callable[P, T]) -> None:
        self._function = function

    def __enter__(self) -> Callable[P, T]:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _CallbackError):
            cause = error.error
            error.__context__ = None  # or Python would make the caller's error its own context
            raise cause

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call the function."""
        try:
            with HeldSignals.released():
                return self._function(*args, **kwargs)
        except Exception as error:
            raise _CallbackError(error) from None


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
    go_on: Callable[[WarpfitError], Any] | None = None
    """Called with the failure of an attempt that may be repeated. It returns the message of the
    next attempt, which goes on after what has been read; None if nothing has."""
    has_gone_on: bool = False
    """Whether something was read before the last failure."""


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
        self.failure: BaseException | None = None
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
        except GeneratorExit:
            raise
        except BaseException as error:  # whatever the user's callback raises
            self.failure = error


# ---------------------------------------------------------------------------------- calls and forks

#: Seconds for which a fork waits for the calls of other threads.
PATIENCE_SECONDS: Final = 1.0
#: Objects with a method ``after_fork``, which makes their locks and channels new in a child.
RENEWED_IN_CHILD: Final[WeakSet[Any]] = WeakSet()
#: Transports, whose method ``before_fork`` ends what keeps gRPC's threads busy between calls, and
#: calls that are in flight unless it is told that there are none.
QUIET_BEFORE_FORK: Final[WeakSet[Any]] = WeakSet()


class _Calls:
    """The threads that are inside of gRPC; each enters this context for the time of a call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Taken directly: the handler of a signal may raise while Python enters a Condition, which
        would stay locked."""
        self._changed = threading.Condition(self._lock)
        self._inside: dict[int, int] = {}
        """Calls in each other by thread: a callback of a call may make another one."""
        self._forks = 0
        """Threads that are about to fork."""
        self._is_used = False
        self._watches_forks = False
        self._failure = ""
        """Why gRPC does not work in this process, a child; empty where it does."""

    def __enter__(self) -> Self:
        """Begin a call; raise InvalidArgumentError in a child that cannot make any."""
        thread = threading.get_ident()
        with self._lock:
            while self._forks and thread not in self._inside:
                self._changed.wait()
            if self._failure:
                raise InvalidArgumentError(
                    f"this process cannot make calls: {self._failure}",
                    "FORKED",
                    "Start worker processes with multiprocessing's method 'spawn' or 'forkserver', "
                    "or fork before the first call",
                )
            self._is_used = True
            self._inside[thread] = self._inside.get(thread, 0) + 1
        return self

    def __exit__(self, *_: object) -> None:
        thread = threading.get_ident()
        with self._lock:
            self._inside[thread] -= 1
            if not self._inside[thread]:
                del self._inside[thread]
            if self._forks:
                self._changed.notify_all()

    def watch_forks(self) -> None:
        """Have forks wait for calls from now on; the first channel must have been made before.

        gRPC registers its own handlers with its first channel. Of the handlers before a fork the
        last one that was registered is called first, and gRPC's would wait for threads that these
        set free.
        """
        with self._changed:
            if not self._watches_forks and hasattr(os, "register_at_fork"):  # not on Windows
                self._watches_forks = True
                os.register_at_fork(
                    before=self.before_fork,
                    after_in_parent=self.after_fork_in_parent,
                    after_in_child=self.after_fork_in_child,
                )

    def before_fork(self) -> None:
        with self._changed:
            self._forks += 1
            self._changed.wait_for(lambda: not self._others(), PATIENCE_SECONDS)
            is_quiet = not self._others()
        for transport in list(QUIET_BEFORE_FORK):
            transport.before_fork(is_quiet)
        with self._changed:
            self._changed.wait_for(lambda: not self._others(), PATIENCE_SECONDS)

    def after_fork_in_parent(self) -> None:
        with self._changed:
            self._forks -= 1
            self._changed.notify_all()

    def after_fork_in_child(self) -> None:
        others, own = self._others(), threading.get_ident()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._inside = {thread: n for thread, n in self._inside.items() if thread == own}
        self._forks = 0
        if others:
            self._failure = "it was forked while another thread was in a call, as gRPC cannot be"
        elif self._is_used and not self._failure:
            told = os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "")  # when gRPC was imported
            if told.lower() not in ("1", "true", "yes", "on"):
                self._failure = (
                    "it was forked, and gRPC was loaded without GRPC_ENABLE_FORK_SUPPORT=1, which "
                    "warpfit sets if it is imported before grpc"
                )
        for renewed in list(RENEWED_IN_CHILD):
            renewed.after_fork()

    def _others(self) -> bool:
        return any(thread != threading.get_ident() for thread in self._inside)


#: Context of the calls of all clients in this process.
CALLS: Final = _Calls()
