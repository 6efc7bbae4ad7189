"""A queue of compilations, run by a few processes of the lowest priority.

The simple form, in each of a few threads:

    while True:
        job = next job that a caller waits for, or else one that nobody waits for yet
        send it to the process of this thread, and wait for the answer

Writing and assembling code takes seconds of a core, and some of it is Python. In processes of their
own it takes idle cores only and never Python's lock, so that neither the engine's loop nor the
processes that answer calls wait for it, whoever asked for it. A process begins with the first job,
keeps what it has loaded for the next ones, and ends when there is none for a while, or with the
engine.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

from warpfit.child_processes import python_child
from warpfit.errors import InternalError, UnavailableError, WarpfitError

#: Cores of which one compiles, and most processes, each of which takes some 250 MiB.
_CORES_A_PROCESS: Final = 4
_MOST_PROCESSES: Final = 8
#: Nice value of the processes, the lowest priority.
_NICE: Final = 19
#: Most waiting jobs; further ones that nobody waits for are refused.
_MOST_WAITING: Final = 4096
#: Seconds without a job after which a process ends.
_IDLE_SECONDS: Final = 60.0


@dataclass(slots=True, eq=False)
class _Job:
    key: Hashable
    work: Callable[[CompileProcess], Any]
    future: Future[Any] = field(default_factory=Future)


class CompileQueue:
    """Jobs that are run once for each key, those first that callers wait for.

    Args:
        cores: of the engine, of which a quarter compiles, but at least one.
        module: is run by ``python -m`` as the process of each thread, and calls `serve`.
    """

    def __init__(self, cores: int, module: str) -> None:
        self.processes = max(1, min(_MOST_PROCESSES, cores // _CORES_A_PROCESS))
        """Most jobs that run at a time."""
        self._module = module
        self._urgent: deque[_Job] = deque()
        self._others: deque[_Job] = deque()
        self._pending: dict[Hashable, _Job] = {}
        """Waiting and running jobs."""
        self._running: set[CompileProcess] = set()
        self._is_closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"compile-{number}", daemon=True)
            for number in range(self.processes)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, key: Hashable, work: Callable[[CompileProcess], Any], *, urgent: bool = False
    ) -> Future[Any] | None:
        """Queue a job unless one of the same key is waiting or running.

        Args:
            key: of the job.
            work: gets the process of the thread that runs it; it may do without.
            urgent: whether a caller waits.

        Returns:
            The future of the job, which may have been submitted by an earlier call; None if it is
            refused. An urgent job is never refused, and makes a waiting one urgent.

        Raises:
            UnavailableError: for an urgent job after `close`.
        """
        with self._changed:
            if self._is_closed:
                if urgent:
                    raise _closed()
                return None
            job = self._pending.get(key)
            if job is None:
                if not urgent and len(self._pending) >= _MOST_WAITING:
                    return None
                job = self._pending[key] = _Job(key, work)
                (self._urgent if urgent else self._others).append(job)
                self._changed.notify()
            elif urgent and job in self._others:
                self._others.remove(job)
                self._urgent.append(job)
            return job.future

    def close(self) -> None:
        """Fail all jobs and end the processes."""
        with self._changed:
            self._is_closed = True
            jobs = list(self._pending.values())
            self._urgent.clear()
            self._others.clear()
            self._changed.notify_all()
            for process in self._running:
                process.abort()
        for thread in self._threads:
            thread.join()
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(_closed())

    def _run(self) -> None:
        with CompileProcess(self._module) as process:
            while (job := self._next(process)) is not None:
                error: Exception | None = None
                result = None
                try:
                    result = job.work(process)
                except Exception as failed:
                    error = failed
                with self._changed:
                    del self._pending[job.key]
                    self._running.discard(process)
                    if self._is_closed:  # `close` fails the job
                        return
                if error is not None:
                    job.future.set_exception(error)
                else:
                    job.future.set_result(result)

    def _next(self, process: CompileProcess) -> _Job | None:
        """Wait for a job and take it; return None once the queue is closed."""

        def is_needed() -> bool:
            return bool(self._is_closed or self._urgent or self._others)

        with self._changed:
            if not self._changed.wait_for(is_needed, _IDLE_SECONDS):
                process.stop()
                self._changed.wait_for(is_needed)
            if self._is_closed:
                return None
            self._running.add(process)
            return (self._urgent or self._others).popleft()


class CompileProcess:
    """A process that answers one job after the other, started by the first one it gets.

    Args:
        module: is run by ``python -m`` and calls `serve`.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._child: subprocess.Popen[bytes] | None = None
        self._is_aborted = False

    def run(self, job: object) -> Any:
        """Return the answer to a job, which can be pickled.

        Raises:
            WarpfitError: if the process raises it.
            InternalError: for another error of the process, or if it has died of the job.
            OSError: if no process can be started.
        """
        if self._child is None:
            child = python_child("-m", self._module)
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._child = subprocess.Popen(**child, **pipes, cwd="/")
            if self._is_aborted:  # while it was being started
                self._child.kill()
        to, answers = self._child.stdin, self._child.stdout
        assert to is not None
        assert answers is not None
        try:
            pickle.dump(job, to, pickle.HIGHEST_PROTOCOL)
            to.flush()
            answer = pickle.load(answers)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self.stop()
            raise InternalError(
                "a process that compiled kernels has died",
                "COMPILER_DIED",
                "Ask for the interpreter",
            ) from error
        if isinstance(answer, WarpfitError):
            raise answer
        return answer

    def abort(self) -> None:
        """Let the job that runs fail, and all further ones; any thread may call this."""
        self._is_aborted = True
        child = self._child
        if child is not None:
            child.kill()

    def stop(self) -> None:
        """End the process; the next job starts another one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with suppress(OSError), child:  # which closes the pipes and waits
                pass

    def __enter__(self) -> Self:
        """Return the process itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process."""
        self.stop()


def serve(run: Callable[[Any], Any]) -> None:
    """Answer the jobs of a `CompileProcess` until the process that started this one has gone."""
    os.nice(_NICE)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    with suppress(EOFError, BrokenPipeError):
        while True:
            job, answer = pickle.load(sys.stdin.buffer), None
            try:
                answer = run(job)
            except WarpfitError as error:
                answer = error
            except Exception as error:
                answer = InternalError(f"compiling failed: {error!r}", "COMPILATION_FAILED")
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()


def _closed() -> UnavailableError:
    return UnavailableError("the compiler has been closed", "COMPILER_CLOSED", "Start the engine")
