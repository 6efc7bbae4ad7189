"""The threads that serve calls."""

import logging
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

_LOG: Final = logging.getLogger("warpfit.workers")
#: Interval in seconds at which Python threads take turns: a tenth of Python's own, because a call
#: waits for several threads, and what each has to do takes less time still.
_SWITCH_SECONDS: Final = 0.0005
_Task = tuple[str, Callable[..., None], tuple[Any, ...]]


class Workers:
    """A pool of threads that each serve one call at a time, started when they are first needed.

    It costs a third of the time of `concurrent.futures.ThreadPoolExecutor`, because it makes no
    future. There are at most ``most`` threads, and ``most_each`` of them work for the same owner.
    """

    def __init__(self, most: int, most_each: int | None = None) -> None:
        self._most = most
        self._most_each = most if most_each is None else most_each
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        self._busy: dict[str, int] = {}

    def has_room(self, owner: str) -> bool:
        """Return whether a task would begin at once and its owner may have one more."""
        if self._idle <= 0 and self._threads >= self._most:
            return False
        return self._busy.get(owner, 0) < self._most_each

    def start(self, owner: str, task: Callable[..., None], *arguments: Any) -> None:
        """Run a task on one of the threads; the caller has asked `has_room`."""
        with self._lock:
            self._busy[owner] = self._busy.get(owner, 0) + 1
            grows = self._idle <= 0 and self._threads < self._most
            if grows:
                self._threads += 1
                name = f"call-{self._threads}"
            else:
                self._idle -= 1  # below zero for tasks that wait
        self._tasks.put((owner, task, arguments))
        if grows:
            try:
                threading.Thread(target=self._work, name=name, daemon=True).start()
            except RuntimeError as error:  # the system has no more; another thread takes the task
                _LOG.error("no new thread for calls: %s", error)
                with self._lock:
                    self._threads -= 1
                    self._idle -= 1

    def _work(self) -> None:
        while True:
            owner, task, arguments = self._tasks.get()
            try:
                task(*arguments)
            except Exception:
                _LOG.exception("serving a call failed")
            del task, arguments  # an idle thread keeps nothing of the last call alive
            with self._lock:
                self._idle += 1
                busy = self._busy.pop(owner)
                if busy > 1:
                    self._busy[owner] = busy - 1


def take_short_turns() -> None:
    """Let the Python threads of this process take shorter turns than usual."""
    sys.setswitchinterval(_SWITCH_SECONDS)
