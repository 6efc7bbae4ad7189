"""The engine's loop: requests of all front ends in, steps out, answers back.

The simple form, of each of the few threads that run steps:

    while True:
        queue.extend(connections.receive())     # it waits if there is nothing to do
        step = scheduler.next()                 # who goes next is decided there and nowhere else
        run the step                            # copy in, lower, launch, wait: no lock held
        answer what is finished, put the rest back into the queue

There are as many threads as steps that gain from running at the same time. All wait for the same
sockets, and the kernel wakes one of them for what arrives: it receives a request, runs its step and
answers it, so that a lone caller waits for no second thread. A thread that leaves something in the
queue wakes another one.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import CancelledError, InternalError, ResourceExhaustedError, WarpfitError
from warpfit.request import Timings
from warpfit_server.engine.hang_detector import EXIT_BROKEN
from warpfit_server.engine.interface import Engine, EngineBrokenError, Outputs, Steps, run_to_end
from warpfit_server.engine.isolation import Isolation
from warpfit_server.engine.merging import merge_key, merged, scatter
from warpfit_server.engine.request import Connection, Request, problem_of
from warpfit_server.engine.scheduler import Scheduler, Task
from warpfit_server.ipc import messages
from warpfit_server.ipc.channel import ChannelClosedError
from warpfit_server.observability.logs import works_for
from warpfit_server.system.resources import available_cores
from warpfit_server.system.shortages import shortage

_LOG: Final = logging.getLogger("warpfit.engine")
#: Seconds that a thread stays awake for the next request after a step: the callers of a search send
#: it soon, and an idle core of a virtual machine takes some 50 to 100 microseconds to wake up.
_AWAKE_SECONDS: Final = 0.003
#: Cores from which on one of them is spared for that.
_MANY_CORES: Final = 8
#: A socket is given to one thread, until that has read from it.
_READABLE_ONCE: Final = select.EPOLLIN | select.EPOLLONESHOT
Tasks = list[Task[Request]]


class Loop:
    """Threads that receive requests, run steps of the engine and answer.

    Args:
        engine: what computes.
        begin: makes the steps of a request.

    """

    def __init__(self, engine: Engine, begin: Callable[[Request], Steps[Timings]]) -> None:
        self._engine = engine
        self._begin = begin
        self._scheduler: Scheduler[Request] = Scheduler(engine.step_size)
        self._isolation = Isolation(self._scheduler)
        self._queue = threading.Lock()
        """Guards the scheduler, the isolation, `_at_work` and `_idle`."""
        self._idle = 0
        """Threads that have found nothing to do."""
        self._awake = threading.Lock()
        """Held by the one thread that waits without sleeping."""
        self._has_many_cores = available_cores() >= _MANY_CORES
        self._connections: dict[int, Connection] = {}
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Each write wakes one thread; it is never read, and would take 2**64 writes to be full.
        self._poll.register(self._wake, select.EPOLLIN | select.EPOLLET)
        self._at_work: dict[Request, NDArray[np.uint8]] = {}

    def start(self) -> None:
        """Start the threads."""
        for number in range(self._engine.steps_in_flight):
            threading.Thread(target=self._run, name=f"step-{number}", daemon=True).start()

    def add(self, connection: Connection) -> None:
        """Serve a front end; any thread may call this."""
        descriptor = connection.channel.fileno()
        self._connections[descriptor] = connection
        self._poll.register(descriptor, _READABLE_ONCE)

    def flags(self) -> Iterator[tuple[Request, NDArray[np.uint8]]]:
        """Cancellation flags of the requests of which a step is running."""
        with self._queue:
            found = list(self._at_work.items())
        yield from found

    # ------------------------------------------------------------------------- a thread

    def _run(self) -> None:
        try:
            while True:
                self._step(self._next())
        except Exception:
            _LOG.exception("the engine is broken; the front end starts a new process")
            os._exit(EXIT_BROKEN)

    def _next(self) -> Tasks:
        """Return the tasks of the next step, once there is one."""
        self._receive(0.0)  # what has arrived is considered, too
        while not (tasks := self._choose()):
            self._wait()
            with self._queue:
                self._idle -= 1
        return tasks

    def _choose(self) -> Tasks:
        with self._queue:
            tasks = self._isolation.next()
            for task in tasks:
                self._at_work[task.item] = task.item.cancelled
            if not tasks:  # nothing waits, or everything waits until a suspect has run
                self._idle += 1
            leaves_work = bool(tasks) and self._idle > 0 and len(self._scheduler) > 0
        if leaves_work:
            os.eventfd_write(self._wake, 1)
        return tasks

    def _wait(self) -> None:
        """Wait for something to do; the first to do so stays awake for a while if nothing runs."""
        if self._has_many_cores and self._awake.acquire(blocking=False):
            try:
                end = time.perf_counter() + _AWAKE_SECONDS
                while not self._at_work and time.perf_counter() < end:
                    if self._receive(0.0):
                        return
            finally:
                self._awake.release()
        self._receive(self._isolation.timeout)

    def _step(self, tasks: Tasks) -> None:
        """Run a step, answer what is finished, and queue the rest again."""
        began = time.perf_counter()
        waits_for: Future[Any] | None = None
        if len(tasks) > 1:
            left = self._run_merged(tasks)
        else:
            waits_for, left = self._run_alone(tasks[0])
        seconds = time.perf_counter() - began
        with self._queue:
            self._scheduler.ran(tasks, seconds)
            for task in tasks:
                del self._at_work[task.item]
            if waits_for is None:
                self._isolation.ended(tasks, left)
        if waits_for is not None:
            waits_for.add_done_callback(lambda _: self._resume(tasks))

    def _resume(self, tasks: Tasks) -> None:
        """Queue a task again that has waited for something."""
        with self._queue:
            self._isolation.ended(tasks, tasks)
        os.eventfd_write(self._wake, 1)

    # ------------------------------------------------------------------------- receiving

    def _receive(self, timeout: float | None) -> bool:
        """Take in what front ends have sent; tell whether there was anything.

        Args:
            timeout: seconds to wait for it; None for ever.

        """
        found = self._poll.poll(timeout)
        for descriptor, _ in found:
            if descriptor == self._wake:
                continue
            connection = self._connections[descriptor]
            try:
                for message, descriptors in connection.channel.receive_waiting():
                    self._take(connection, message, descriptors)
            except ChannelClosedError:
                self._drop(descriptor, connection)
            else:
                self._poll.modify(descriptor, _READABLE_ONCE)
        return bool(found)

    def _take(
        self, connection: Connection, message: messages.Message, descriptors: list[int]
    ) -> None:
        match message:
            case messages.UnmapSegment():
                connection.segments.pop(message.segment, None)
            case messages.SubmitEvaluation() | messages.SubmitFit():
                try:
                    request = connection.receive(message, descriptors)
                except ResourceExhaustedError as error:
                    connection.send(
                        messages.RequestFinished(problem_of(message).request, error=error)
                    )
                    return
                task = Task(request, request.problem.tenant, *self._merging(request))
                with self._queue:
                    self._scheduler.add(task)
            case _:
                raise InternalError(f"unexpected message {message}", "BAD_MESSAGE")

    def _merging(self, request: Request) -> tuple[Any, int]:
        """Tell with what a request can be merged, and its token-rows."""
        evaluation = request.evaluation
        key = None if request.is_fit or request.alone else merge_key(evaluation)
        try:
            if key is None or not self._engine.gains_from_merging(evaluation):
                return None, 0
        except WarpfitError:  # its own step tells the caller
            return None, 0
        return key, request.token_rows

    def _drop(self, descriptor: int, connection: Connection) -> None:
        """Forget a front end that is gone; its requests end at their next steps."""
        self._poll.unregister(descriptor)
        del self._connections[descriptor]
        connection.channel.close()
        for request in list(connection.requests):
            request.cancelled[0] = 1

    # ------------------------------------------------------------------------- at work

    def _run_alone(self, task: Task[Request]) -> tuple[Future[Any] | None, Tasks]:
        """Run one step of a task; return what it waits for, and the task if it is not over."""
        request = task.item
        works_for(request.problem.request_id)
        try:
            if request.cancelled[0]:
                raise CancelledError("the request was cancelled", "CANCELLED")
            if request.steps is None:
                request.begins()
                request.steps = self._begin(request)
            return next(request.steps), [task]
        except StopIteration as end:
            self._answer([request], end.value)
        except Exception as error:
            if request.steps is not None:
                request.steps.close()
            self._fail(request, error)
        return None, []

    def _run_merged(self, tasks: Tasks) -> Tasks:
        """Run the evaluations of several tasks as one; return the tasks that must run alone."""
        requests = [task.item for task in tasks]
        wanted = [request for request in requests if not request.cancelled[0]]
        for request in wanted:
            request.begins()
        if wanted:
            try:
                timings = self._evaluate_merged(wanted)
            except EngineBrokenError:
                raise
            except Exception as error:  # one of them is at fault: each runs alone
                _LOG.debug("a merged evaluation failed: %s", error)
                for task in tasks:
                    task.merge_key = None
                return tasks
            self._answer(wanted, timings)
        for request in requests:
            if request not in wanted:
                self._fail(request, CancelledError("the request was cancelled", "CANCELLED"))
        return []

    def _evaluate_merged(self, requests: list[Request]) -> Timings:
        whole = merged([request.evaluation for request in requests])
        losses = np.empty((len(whole.batch), whole.batch.vectors))
        outputs = Outputs(None, losses, np.zeros(1, dtype=np.uint8), _ignore)
        timings = run_to_end(self._engine.evaluate(whole, outputs))
        scatter(losses, [request.losses for request in requests])
        return timings

    def _answer(self, requests: list[Request], timings: Timings) -> None:
        """Answer requests that a step has finished, each front end's at once."""
        answers: dict[Connection, list[messages.RequestFinished]] = {}
        for request in requests:
            request.connection.requests.discard(request)
            own = replace(timings, queue=request.waited + timings.queue)
            answer = messages.RequestFinished.of(request.number, own)
            answers.setdefault(request.connection, []).append(answer)
        for connection, found in answers.items():
            connection.send(*found)

    def _fail(self, request: Request, error: Exception) -> None:
        if isinstance(error, EngineBrokenError):
            raise error
        if not isinstance(error, WarpfitError):
            _LOG.error("a request failed", exc_info=error)
            failure = InternalError("the engine failed on this batch", "ENGINE_FAILURE")
            error = shortage(error) or failure
        request.connection.requests.discard(request)
        request.connection.send(messages.RequestFinished(request.number, error=error))


def _ignore(programs: int) -> None:
    """Take notice that values are final, of which there are none."""
