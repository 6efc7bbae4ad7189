"""A queue of compilations, run by background threads in order of priority."""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from warpfit.errors import UnavailableError

T = TypeVar("T")
#: Nice value of the threads: evaluations and front-end processes come before the compiler.
_NICE: Final = 10
#: Share of the threads that background jobs may occupy. The processes that answer calls need cores
#: at once, which the nice value alone does not give them.
_BACKGROUND: Final = 0.5
#: Most waiting jobs; further background jobs are refused.
_MOST_WAITING: Final = 4096


@dataclass(order=True, slots=True)
class _Job:
    """A job in the heap: lower priorities first, then the order of submission."""

    priority: int
    order: int
    key: Hashable = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    future: Future[Any] = field(compare=False)
    running: bool = field(default=False, compare=False)


@dataclass(slots=True)
class CompileCounters:
    """Figures of a `CompileQueue` since it was made."""

    done: int = 0
    """Jobs that succeeded."""
    seconds: float = 0.0
    """CPU time of all jobs, which does not depend on other load of the machine."""


class CompileQueue:
    """Threads that run jobs by priority, one job a key at a time.

    Jobs of priority 0, which callers wait for, may occupy all threads; background jobs, of positive
    priority, at most half of them.
    """

    def __init__(self, threads: int) -> None:
        self._queue: list[_Job] = []
        self._pending: dict[Hashable, _Job] = {}
        self._order = itertools.count()
        self._wake = threading.Condition()
        self._closed = False
        self.background = max(1, int(_BACKGROUND * threads))
        """Most background jobs that run at a time."""
        self._background_jobs = 0
        self.counters = CompileCounters()
        self._threads = [
            threading.Thread(target=self._run, name=f"warpfit-compile-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: Hashable, work: Callable[[], T], priority: int = 1) -> Future[T] | None:
        """Queue a job unless one of the same key is waiting or running.

        Returns:
            The future of the job, which may have been submitted by an earlier call; None if it is
            refused. Priority 0 is never refused, and raises the priority of a waiting job.

        Raises:
            UnavailableError: for a job of priority 0 after `close`.
        """
        with self._wake:
            known = self._pending.get(key)
            if known is not None and (known.running or known.priority <= priority):
                return known.future
            if self._closed and priority <= 0:
                raise _closed()
            if self._closed or (priority > 0 and len(self._queue) >= _MOST_WAITING):
                return None
            future: Future[T] = Future() if known is None else known.future
            job = _Job(priority, next(self._order), key, work, future)
            self._pending[key] = job
            heapq.heappush(self._queue, job)
            self._wake.notify()
            return future

    def close(self) -> None:
        """Fail the waiting jobs and wait for the running ones."""
        with self._wake:
            self._closed = True
            for job in self._queue:
                # A job whose priority was raised left a stale entry with the same future.
                if self._pending.get(job.key) is job:
                    del self._pending[job.key]
                    job.future.set_exception(_closed())
            self._queue.clear()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        os.nice(_NICE)  # on Linux this affects the calling thread alone
        while (job := self._next()) is not None:
            started = time.thread_time()
            try:
                result = job.work()
            except Exception as error:
                self._finish(job, started)
                job.future.set_exception(error)
            else:
                self._finish(job, started, done=1)
                job.future.set_result(result)

    def _next(self) -> _Job | None:
        with self._wake:
            while not self._closed:
                if not self._may_begin():
                    self._wake.wait()
                    continue
                job = heapq.heappop(self._queue)
                if self._pending.get(job.key) is job:
                    job.running = True
                    self._background_jobs += job.priority > 0
                    return job
            return None

    def _may_begin(self) -> bool:
        """Return whether one more thread may start the first job."""
        if not self._queue:
            return False
        return self._queue[0].priority <= 0 or self._background_jobs < self.background

    def _finish(self, job: _Job, started: float, done: int = 0) -> None:
        with self._wake:
            del self._pending[job.key]
            self._background_jobs -= job.priority > 0
            self.counters.done += done
            self.counters.seconds += time.thread_time() - started


def _closed() -> UnavailableError:
    return UnavailableError("the compiler has been closed", "COMPILER_CLOSED", "Start the engine")
