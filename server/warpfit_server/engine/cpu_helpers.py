"""Threads that help evaluations on the CPU: each goes where the least charged tenant's work is.

A queue of requests for help would be long where many evaluations run, and who comes last would wait
for everybody before: a tenant that has asked for little behind one that floods the engine.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from warpfit_server.engine.cpu_work import Work

#: Token-rows below which waking another thread costs more than it gains.
_WORK_WORTH_A_THREAD: Final = 300_000
#: Seconds after which a thread looks again whether work that had to pause may go on.
_LOOK_AGAIN: Final = 0.002


class Helpers:
    """Threads shared by all evaluations, started when they are first wanted.

    Args:
        threads: how many may help; the thread that brings an evaluation works on it, too.

    """

    def __init__(self, threads: int) -> None:
        self._most = threads
        self._threads: list[threading.Thread] = []
        self._works: list[Work] = []
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._left = threading.Condition(self._lock)
        self._looking = False
        self._closed = False

    def run(self, work: Work, ready: Any = None) -> None:
        """Do the work on the calling thread and those that come to help.

        Args:
            work: to do.
            ready: told how many programs are finished, from the first, whenever there are more.

        Raises:
            Exception: what a thread, or ``ready``, raised.

        """
        worth = work.cost // _WORK_WORTH_A_THREAD + 1
        work.wanted = min(self._most, work.remaining - 1, worth - 1)
        if work.wanted > 0:
            with self._lock:
                self._start(work.wanted)
                for other in self._works:
                    other.make_way()
                self._works.append(work)
                self._changed.notify(work.wanted)
        try:
            work.lead(ready)
        finally:
            work.stop()
            if work.wanted > 0:
                self._part(work)
        if work.failure is not None:
            raise work.failure

    def close(self) -> None:
        """End the threads; no work may be at hand any more."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _start(self, wanted: int) -> None:
        """See to it that there are so many threads; they inherit the caller's priority."""
        for number in range(len(self._threads), wanted):
            name = f"warpfit-cpu-{number}"
            self._threads.append(threading.Thread(target=self._help, name=name, daemon=True))
            self._threads[-1].start()

    def _part(self, work: Work) -> None:
        """Wait until nobody helps with a piece of work any more."""
        with self._lock:
            self._works.remove(work)
            self._left.wait_for(lambda: not work.helping)

    def _help(self) -> None:
        while (work := self._next()) is not None:
            work.help()
            with self._lock:
                work.helping -= 1
                if not work.helping:
                    self._left.notify_all()
            del work  # a thread without work holds nothing of the last evaluation

    def _next(self) -> Work | None:
        """Wait for work to help with; None at the end."""
        with self._lock:
            while not self._closed:
                open_works = [w for w in self._works if w.helping < w.wanted and w.remaining]
                able = [work for work in open_works if not work.turn.must_pause()]
                if able:
                    work = min(able, key=lambda work: work.turn.charged_so_far())
                    work.helping += 1
                    self._changed.notify()  # who finds nothing to do goes back to sleep
                    return work
                self._wait(is_held_up=bool(open_works))
        return None

    def _wait(self, *, is_held_up: bool) -> None:
        """Sleep; one thread looks again soon if there is work that has to pause."""
        if not is_held_up or self._looking:
            self._changed.wait()
            return
        self._looking = True
        self._changed.wait(_LOOK_AGAIN)
        self._looking = False
