"""Forks of a process whose threads use gRPC.

A fork copies one thread, and gRPC's locks and pollers as the other threads held them. gRPC deals
with that itself (``GRPC_ENABLE_FORK_SUPPORT``), unless a thread is inside of it at that moment.
So a fork waits here until the calls of other threads have ended, and calls that would begin
meanwhile wait for the fork. Calls that take longer are cut off, and repeated after the fork as
after any interruption. Where one stays all the same, the child cannot use gRPC, and each of its
calls says so at once instead of hanging.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Final, Self
from weakref import WeakSet

from warpfit.errors import InvalidArgumentError

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
        self._changed = threading.Condition(threading.Lock())
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
        with self._changed:
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
        with self._changed:
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
            if not self._watches_forks:
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
        self._changed = threading.Condition(threading.Lock())
        self._inside = {thread: n for thread, n in self._inside.items() if thread == own}
        self._forks = 0
        if others:
            self._failure = "it was forked while another thread was in a call, as gRPC cannot be"
        elif self._is_used and not self._failure and not _grpc_supports_forks():
            self._failure = (
                "it was forked, and gRPC was loaded without GRPC_ENABLE_FORK_SUPPORT=1, which "
                "warpfit sets if it is imported before grpc"
            )
        for renewed in list(RENEWED_IN_CHILD):
            renewed.after_fork()

    def _others(self) -> bool:
        return any(thread != threading.get_ident() for thread in self._inside)


def _grpc_supports_forks() -> bool:
    """Return whether gRPC was told to support forks when it was imported; see `configure_grpc`."""
    return os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower() in ("1", "true", "yes", "on")


#: Context of the calls of all clients in this process.
CALLS: Final = _Calls()
