"""Threads that compute on the CPU: as many at a time as there are cores.

The thread that brings an evaluation leads it, and others help. Who gets a core next, to lead or to
help, is the work of the least charged tenant. A queue of requests for help would be long where many
evaluations run, and who comes last would wait for everybody before: a tenant that has asked for
little behind one that floods the engine. And with more threads than cores the system's scheduler
would choose among them, which knows nothing of tenants.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from warpfit_server.engine.cpu_work import Work

#: Token-rows below which waking another thread costs more than it gains.
_WORK_WORTH_A_THREAD: Final = 300_000
#: Seconds of thread time that a tenant may be ahead of another before its threads make way.
_AHEAD: Final = 0.005


class Helpers:
    """Threads shared by all evaluations, started when they are first wanted.

    Args:
        threads: how many may help; the thread that brings an evaluation works on it, too. One more
            compute at a time.

    """

    def __init__(self, threads: int) -> None:
        self._most = threads
        self._threads: list[threading.Thread] = []
        self._works: list[Work] = []
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._left = threading.Condition(self._lock)
        self._closed = False
        self._asleep = 0
        """Threads that wait for something to help with, and that nobody has woken."""
        self._free = threads + 1
        """Cores that nobody computes on."""
        self._reserved = 0
        """Cores that wait for a thread which has been woken to help."""
        self._leads: list[tuple[Work, threading.Event]] = []
        """Threads that wait for a core to lead their work on."""

    def run(self, work: Work, ready: Callable[[int], None] | None = None) -> None:
        """Do the work on the calling thread and those that come to help.

        Args:
            work: to do.
            ready: told how many programs are finished, from the first, whenever there are more.

        Raises:
            Exception: what a thread, or ``ready``, raised.

        """
        worth = work.cost // _WORK_WORTH_A_THREAD + 1
        work.wanted = min(self._most, work.remaining - 1, worth - 1)
        if worth == 1:  # it is done sooner than a core could be asked for
            while work.remaining:
                work.run_some()
            return
        if work.wanted > 0:
            with self._lock:
                self._start(work.wanted)
                self._make_way(work)
                self._works.append(work)
                self._wake(work.wanted)
        self._take_core(work)
        try:
            self._lead(work, ready)
        finally:
            work.stop()
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

    def _lead(self, work: Work, ready: Callable[[int], None] | None) -> None:
        """Run the work to its end on the calling thread, which reports what is ready."""
        while True:
            self._go_on(work, ready)
            if not work.remaining:
                return
            with self._lock:
                self._give_core()
            self._take_core(work)

    def _go_on(self, work: Work, ready: Callable[[int], None] | None = None) -> None:
        """Take pieces until none is left or another tenant should go first."""
        while work.remaining:
            work.run_some()
            if ready is not None:
                work.report(ready)
            if self._must_yield(work):
                return

    def _start(self, wanted: int) -> None:
        """See to it that there are so many threads; they inherit the caller's priority."""
        for number in range(len(self._threads), wanted):
            name = f"warpfit-cpu-{number}"
            self._threads.append(threading.Thread(target=self._help, name=name, daemon=True))
            self._threads[-1].start()

    def _part(self, work: Work) -> None:
        """Wait until nobody helps with a piece of work any more, then give its leader's core up.

        Not before, as who comes next would be in the way of those who end it.
        """
        with self._lock:
            if work.wanted > 0:
                self._works.remove(work)
                self._left.wait_for(lambda: not work.helping)
            self._give_core()

    def _help(self) -> None:
        while (work := self._next()) is not None:
            try:
                self._go_on(work)
            except BaseException as error:
                work.failure = error
                work.stop()
            with self._lock:
                work.helping -= 1
                if not work.helping:
                    self._left.notify_all()
                self._give_core(helps_on=True)
            del work  # a thread without work holds nothing of the last evaluation

    def _must_yield(self, work: Work) -> bool:
        """Whether others should have the core: who leads takes turns within a tenant, too."""
        if not self._leads and len(self._works) < 2:  # without the lock: the common case
            return False
        with self._lock:
            if any(_charge(lead) <= _charge(work) for lead, _ in self._leads):
                return True
            return any(_goes_before(other, work) for other in filter(_wants_help, self._works))

    def _take_core(self, work: Work) -> None:
        """Wait for a core."""
        with self._lock:
            if self._free:
                self._free -= 1
                return
            self._make_way(work)
            turn = threading.Event()
            self._leads.append((work, turn))
        turn.wait()

    # ------------------------------------------------------------------------- under the lock

    def _make_way(self, work: Work) -> None:
        """Let threads come back soon that work for tenants which are clearly ahead."""
        for other in self._works:
            if _goes_before(work, other):
                other.interrupt()

    def _give_core(self, *, helps_on: bool = False) -> None:
        """Pass a core on: to a thread that waits to lead, or to one that helps.

        Args:
            helps_on: whether the calling thread looks for other work to help with.

        """
        helped = self._to_help() if self._asleep or helps_on else None
        least = min((_charge(lead) for lead, _ in self._leads), default=np.inf)
        if helped is not None and _charge(helped) < least:
            self._reserved += 1
            if not helps_on:
                self._wake(1)
        else:
            self._free += 1
            self._let_lead()

    def _let_lead(self) -> None:
        """Give free cores to threads that wait to lead, the least charged tenant's first."""
        while self._free and self._leads:
            entry = min(self._leads, key=lambda entry: _charge(entry[0]))
            self._leads.remove(entry)
            self._free -= 1
            entry[1].set()

    def _next(self) -> Work | None:
        """Wait for work to help with, and a core; None at the end."""
        with self._lock:
            while not self._closed:
                self._free, self._reserved = self._free + self._reserved, 0
                work = self._to_help() if self._free else None
                if work is not None:
                    self._free -= 1
                    work.helping += 1
                    self._wake(1)  # who finds nothing to do goes back to sleep
                    return work
                self._let_lead()
                self._asleep += 1
                self._changed.wait()
        return None

    def _wake(self, count: int) -> None:
        """Let so many threads look for something to help with, as far as there are any."""
        count = min(count, self._asleep)
        self._asleep -= count
        self._changed.notify(count)

    def _to_help(self) -> Work | None:
        """Work of the least charged tenant that wants help."""
        return min(filter(_wants_help, self._works), key=_charge, default=None)


def _wants_help(work: Work) -> bool:
    return work.helping < work.wanted and work.remaining > 0


def _charge(work: Work) -> float:
    return work.turn.charged_so_far()


def _goes_before(work: Work, other: Work) -> bool:
    return _charge(work) + _AHEAD < _charge(other)
