"""nvJitLink: PTX text to machine code, in background threads and without a GPU."""

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

from cuda.bindings import nvjitlink

from warpfit.errors import InternalError, UnavailableError

T = TypeVar("T")
#: Evaluations and front doors go before the compiler.
_NICE: Final = 10
#: Share of the threads that work on what nobody waits for: whatever takes and answers calls wants
#: cores meanwhile, and priorities alone do not see to it that it gets them soon enough.
_BACKGROUND: Final = 0.5


def version() -> str:
    """Version of the linker, such as ``"13.0"``; part of the key of every cubin."""
    major, minor = nvjitlink.version()
    return f"{major}.{minor}"


def link(ptx: str, architecture: int, functions: bytes = b"") -> bytes:
    """Assemble PTX and link it with the relocatable machine code of library functions.

    Releases the interpreter lock while it works.

    Raises:
        InternalError: with the log of the linker, if it fails.

    """
    options = [f"-arch=sm_{architecture}", "-O3"]
    handle = nvjitlink.create(len(options), options)
    try:
        source = ptx.encode() + b"\0"
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, source, len(source), "warpfit")
        if functions:
            nvjitlink.add_data(
                handle, nvjitlink.InputType.CUBIN, functions, len(functions), "functions"
            )
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
    except nvjitlink.nvJitLinkError as error:
        raise InternalError(
            f"the generated code does not link: {_log(handle)}", "LINK_FAILED"
        ) from error
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin)


def _log(handle: int) -> str:
    log = bytearray(nvjitlink.get_error_log_size(handle))
    if log:
        nvjitlink.get_error_log(handle, log)
    return log.rstrip(b"\0").decode(errors="replace")


@dataclass(order=True, slots=True)
class _Job:
    priority: int
    order: int
    key: Hashable = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    future: Future[Any] = field(compare=False)
    running: bool = field(default=False, compare=False)


@dataclass(slots=True)
class CompileCounters:
    """What the workers have done since they started."""

    done: int = 0
    failed: int = 0
    refused: int = 0
    """Requests that found the queue full."""
    seconds: float = 0.0
    """CPU time of all jobs together: other programs on the machine make no difference to it."""


class Workers:
    """Background threads that run keyed jobs by priority, each key once at a time.

    Jobs of priority 0, which somebody waits for, may take all threads, the others half of them.

    Args:
        threads: number of threads.
        queue_limit: most jobs that wait; further ones of positive priority are refused.

    """

    def __init__(self, threads: int, queue_limit: int = 4096) -> None:
        self._queue: list[_Job] = []
        self._flying: dict[Hashable, _Job] = {}
        self._queue_limit = queue_limit
        self._order = itertools.count()
        self._wake = threading.Condition()
        self._closed = False
        self.background = max(1, int(_BACKGROUND * threads))
        """Most jobs of positive priority at a time."""
        self._in_background = 0
        self.counters = CompileCounters()
        self._threads = [
            threading.Thread(target=self._run, name=f"warpfit-compile-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: Hashable, work: Callable[[], T], priority: int = 1) -> Future[T] | None:
        """Queue a job unless its key is queued or running; the lowest priority runs first.

        Returns:
            The future of the job, also where another call submitted it; None if it is refused.
            A job of priority 0 (somebody waits for it) is never refused, and lifts a queued one.

        Raises:
            UnavailableError: for a job of priority 0 after `close`.

        """
        with self._wake:
            known = self._flying.get(key)
            if known is not None and (known.running or known.priority <= priority):
                return known.future
            if self._closed and priority <= 0:
                raise _closed()
            if self._closed or (priority > 0 and len(self._queue) >= self._queue_limit):
                self.counters.refused += 1
                return None
            future: Future[T] = Future() if known is None else known.future
            job = _Job(priority, next(self._order), key, work, future)
            self._flying[key] = job
            heapq.heappush(self._queue, job)
            self._wake.notify()
            return future

    def close(self) -> None:
        """Fail what is queued, wait for what runs."""
        with self._wake:
            self._closed = True
            for job in self._queue:
                # A job that was lifted leaves a stale entry with the same future behind.
                if self._flying.get(job.key) is job:
                    del self._flying[job.key]
                    job.future.set_exception(_closed())
            self._queue.clear()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        os.nice(_NICE)  # of this thread alone, on Linux
        while (job := self._next()) is not None:
            started = time.thread_time()
            try:
                result = job.work()
            except Exception as error:
                self._finish(job, started, failed=1)
                job.future.set_exception(error)
            else:
                self._finish(job, started)
                job.future.set_result(result)

    def _next(self) -> _Job | None:
        with self._wake:
            while not self._closed:
                if not self._may_begin():
                    self._wake.wait()
                    continue
                job = heapq.heappop(self._queue)
                if self._flying.get(job.key) is job:
                    job.running = True
                    self._in_background += job.priority > 0
                    return job
            return None

    def _may_begin(self) -> bool:
        """Whether there is a job for one more thread."""
        if not self._queue:
            return False
        return self._queue[0].priority <= 0 or self._in_background < self.background

    def _finish(self, job: _Job, started: float, failed: int = 0) -> None:
        with self._wake:
            del self._flying[job.key]
            self._in_background -= job.priority > 0
            self.counters.done += 1 - failed
            self.counters.failed += failed
            self.counters.seconds += time.thread_time() - started


def _closed() -> UnavailableError:
    return UnavailableError("the compiler has been closed", "COMPILER_CLOSED", "Start the engine")
