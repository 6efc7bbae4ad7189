"""The threads that serve calls."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

_LOG: Final = logging.getLogger("warpfit.workers")
#: Longest time in seconds that a thread of a door waits for another one that runs Python: a tenth
#: of Python's own, because a call waits for several, and what each has to do is shorter still.
_SWITCH_SECONDS: Final = 0.0005
_Task = tuple[Callable[..., None], tuple[Any, ...]]


class Workers:
    """Threads that serve a call each, made when they are first needed.

    It does what an executor of the standard library does, for a third of the time: a call has no
    future that anybody would ask.

    Args:
        most: threads at most.

    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0

    @property
    def all_busy(self) -> bool:
        """Whether every thread serves a call; a further one would wait for one of them."""
        return self._idle <= 0 and self._threads >= self._most

    def start(self, task: Callable[..., None], *arguments: Any) -> None:
        """Run a task on one of the threads."""
        with self._lock:
            grows = self._idle <= 0 and self._threads < self._most
            if grows:
                self._threads += 1
                name = f"call-{self._threads}"
            else:
                self._idle -= 1  # below zero for tasks that wait
        self._tasks.put((task, arguments))
        if grows:
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def close(self) -> None:
        """Let the threads end when they have no task any more."""
        with self._lock:
            threads, self._threads = self._threads, self._most
        for _ in range(threads):
            self._tasks.put(None)

    def _work(self) -> None:
        while (found := self._tasks.get()) is not None:
            task, arguments = found
            try:
                task(*arguments)
            except Exception:
                _LOG.exception("a call was not brought to its end")
            del found, task, arguments  # a thread without work holds nothing of the last call
            with self._lock:
                self._idle += 1


def take_short_turns() -> None:
    """Let the threads of this process, which is a door, take shorter turns than is usual."""
    sys.setswitchinterval(_SWITCH_SECONDS)
