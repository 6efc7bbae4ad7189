"""A queue of compilations, run by threads of low priority."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from warpfit.errors import UnavailableError

T = TypeVar("T")
#: Nice value of the threads: evaluations and front-end processes come before the compiler.
_NICE: Final = 10
#: Most waiting jobs; further background jobs are refused.
_MOST_WAITING: Final = 4096


@dataclass(slots=True)
class _Job:
    work: Callable[[], Any]
    urgent: bool
    begun: bool = False
    future: Future[Any] = field(default_factory=Future)


class CompileQueue:
    """Threads that run jobs, one job a key at a time.

    Jobs that callers wait for are urgent and have so many threads of their own. Background jobs
    have half as many: the processes that answer calls need cores at once, which the nice value
    alone does not give them.
    """

    def __init__(self, threads: int) -> None:
        self.background = max(1, threads // 2)
        """Most background jobs that run at a time."""
        self._pools = {
            urgent: ThreadPoolExecutor(count, "compile", os.nice, (_NICE,))  # of the thread alone
            for urgent, count in ((True, threads), (False, self.background))
        }
        self._pending: dict[Hashable, _Job] = {}
        self._lock = threading.Lock()
        self._closed = False

    def submit(
        self, key: Hashable, work: Callable[[], T], *, urgent: bool = False
    ) -> Future[T] | None:
        """Queue a job unless one of the same key is waiting or running.

        Returns:
            The future of the job, which may have been submitted by an earlier call; None if it is
            refused. An urgent job is never refused, and makes a waiting one urgent.

        Raises:
            UnavailableError: for an urgent job after `close`.
        """
        with self._lock:
            job = self._pending.get(key)
            if job is not None and (job.urgent or not urgent):
                return job.future
            if self._closed and urgent:
                raise _closed()
            if self._closed or (not urgent and len(self._pending) >= _MOST_WAITING):
                return None
            job = self._pending.setdefault(key, _Job(work, urgent))
            job.urgent = urgent
            self._pools[urgent].submit(self._run, key, job)
            return job.future

    def close(self) -> None:
        """Fail the waiting jobs and wait for the running ones."""
        with self._lock:
            self._closed = True
            waiting = [job for job in self._pending.values() if not job.begun]
            for job in waiting:
                job.begun = True
        for job in waiting:
            job.future.set_exception(_closed())
        for pool in self._pools.values():
            pool.shutdown()

    def _run(self, key: Hashable, job: _Job) -> None:
        with self._lock:
            if job.begun:  # by a thread of the other pool, or failed by `close`
                return
            job.begun = True
        try:
            result = job.work()
        except Exception as error:
            self._finish(key)
            job.future.set_exception(error)
        else:
            self._finish(key)
            job.future.set_result(result)

    def _finish(self, key: Hashable) -> None:
        with self._lock:
            del self._pending[key]


def _closed() -> UnavailableError:
    return UnavailableError("the compiler has been closed", "COMPILER_CLOSED", "Start the engine")
