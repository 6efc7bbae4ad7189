"""The engine loop: receive requests of all front ends, run their steps, send the answers.

The simple form:

    while True:
        go on with steps whose device is done
        queue.extend(connections.receive())     # sleeps if there is nothing to do
        step = isolation.next()                 # a probe, a suspect, or what the scheduler says
        run the step until it waits for the device, or has ended
        answer what is finished, put the rest back into the queue

One thread does this where steps compute on a device: Python's part of a step runs while the device
computes another one, and no two threads compete for Python's lock. Where steps compute on the
calling thread, without that lock, there are as many threads as steps that gain from running at the
same time. All of them poll the same sockets, and the kernel wakes one for each message: the thread
that receives a request runs its step and sends its answer, so that a lone caller waits for no
second thread. A thread that leaves requests in the queue wakes another one.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import CancelledError, InternalError, WarpfitError
from warpfit.request import Timings
from warpfit_server.engine.interface import DeviceWork, Engine, EngineBrokenError, Steps
from warpfit_server.engine.isolation import Isolation
from warpfit_server.engine.request import FrontEndConnection, Request
from warpfit_server.engine.runner import RequestRunner
from warpfit_server.engine.scheduler import Scheduler
from warpfit_server.ipc import messages
from warpfit_server.ipc.channel import ChannelClosedError
from warpfit_server.observability.logs import LOGGED_REQUEST_ID
from warpfit_server.system.resources import available_cores
from warpfit_server.system.shortages import shortage
from warpfit_server.system.stuck_detector import EXIT_BROKEN

_LOG: Final = logging.getLogger("warpfit.engine")
#: Seconds for which a thread polls without sleeping after a step: the next request of a search
#: follows soon, and an idle core of a virtual machine takes 50 to 100 microseconds to wake up.
_BUSY_POLL_SECONDS: Final = 0.003
#: Seconds between two looks at the device where there are few cores.
_DEVICE_SECONDS: Final = 30e-6
#: Seconds between two looks whether requests that wait for a future were cancelled.
_LOOK_SECONDS: Final = 0.05
#: Least number of cores for busy polling, which takes one of them.
_MANY_CORES: Final = 8


@dataclass(slots=True, eq=False)
class _Step:
    """A step that has begun, of one request or of several that are merged."""

    requests: list[Request]
    wanted: list[Request]
    """The requests that have not been cancelled."""
    steps: Steps[Timings]
    began: float
    is_merged: bool
    """Whether its requests can be merged, even if it has one only: it has no pauses then."""


class Loop:
    """Threads that receive requests, run steps of the engine and answer.

    Args:
        engine: that computes.
        runner: that runs requests on the engine.

    """

    def __init__(self, engine: Engine, runner: RequestRunner) -> None:
        self._engine = engine
        self._runner = runner
        self._scheduler: Scheduler[Request] = Scheduler(
            engine.step_size, shares_cores=engine.steps_share_cores
        )
        self._isolation = Isolation(self._scheduler)
        self._lock = threading.Lock()
        """Guards the scheduler, the isolation, and all sets and lists."""
        self._running: set[Request] = set()
        """Requests of which a step is running."""
        self._waiting: set[Request] = set()
        """Requests that wait for a future."""
        self._in_flight: dict[_Step, DeviceWork | Future[Any]] = {}
        """Steps with what they wait for, which is the device."""
        self._idle = 0
        """Threads that have found nothing to do."""
        self._busy_polling = threading.Lock()
        """Held by the one thread that polls without sleeping."""
        self._has_many_cores = available_cores() >= _MANY_CORES
        # Of several threads only one is woken for a socket, until it has read from it.
        self._once = select.EPOLLONESHOT if engine.step_threads > 1 else 0
        self._connections: dict[int, FrontEndConnection] = {}
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Edge-triggered, so that each write wakes one thread and nobody has to read.
        self._poll.register(self._wake, select.EPOLLIN | select.EPOLLET)

    def start(self) -> None:
        """Start the threads."""
        for number in range(self._engine.step_threads):
            threading.Thread(target=self._run, name=f"step-{number}", daemon=True).start()

    def add(self, connection: FrontEndConnection) -> None:
        """Serve a front end; any thread may call this."""
        descriptor = connection.channel.fileno()
        self._connections[descriptor] = connection
        self._poll.register(descriptor, select.EPOLLIN | self._once)

    def flags(self) -> Iterator[tuple[Request, NDArray[np.uint8]]]:
        """Yield the requests with a running step, and their flags, for the stuck detector."""
        with self._lock:
            running = list(self._running)
        for request in running:
            yield request, request.cancelled

    # ------------------------------------------------------------------------- a thread

    def _run(self) -> None:
        try:
            while True:
                ended = self._take_ended()
                for step in ended:
                    self._advance(step)
                self._receive(0.0)  # so that everything that has arrived is considered
                requests = self._choose()
                if requests:
                    self._begin(requests)
                    continue
                if not ended:
                    self._wait()
                with self._lock:
                    self._idle -= 1
        except Exception:
            _LOG.exception("the engine is broken; the supervisor starts a new process")
            os._exit(EXIT_BROKEN)

    def _take_ended(self) -> list[_Step]:
        """Take the steps in flight that can go on."""
        if not self._in_flight:
            return []
        with self._lock:
            ended = [step for step, work in self._in_flight.items() if work.done()]
            for step in ended:
                del self._in_flight[step]
        return ended

    def _choose(self) -> list[Request]:
        """Take the requests of the next step, if one can begin."""
        with self._lock:
            self._end_wait([request for request in self._waiting if request.is_cancelled])
            is_full = len(self._in_flight) >= self._engine.steps_in_flight
            self._scheduler.merged_size = self._engine.step_size
            requests = [] if is_full else self._isolation.next()
            self._engine.others_wait(len(self._scheduler) > 0)
            self._running.update(requests)
            if not requests:  # nothing waits, or everything waits until a suspect has run
                self._idle += 1
            leaves_work = bool(requests) and self._idle > 0 and len(self._scheduler) > 0
        if leaves_work:
            os.eventfd_write(self._wake, 1)
        return requests

    def _wait(self) -> None:
        """Wait for something to do; one thread polls for a while first if no step is running."""
        if self._in_flight:
            work = list(self._in_flight.values())
            while not (self._receive(0.0) or any(one.done() for one in work)):
                if not self._has_many_cores:
                    time.sleep(_DEVICE_SECONDS)
            return
        if self._has_many_cores and self._busy_polling.acquire(blocking=False):
            try:
                end = time.perf_counter() + _BUSY_POLL_SECONDS
                while not self._running and time.perf_counter() < end:
                    if self._receive(0.0):
                        return
            finally:
                self._busy_polling.release()
        self._receive(_LOOK_SECONDS if self._waiting else self._isolation.timeout)

    def _resume(self, requests: list[Request]) -> None:
        """Queue a request again that has waited for a future, unless it was cancelled meanwhile."""
        with self._lock:
            self._end_wait([request for request in requests if request in self._waiting])
        os.eventfd_write(self._wake, 1)

    def _end_wait(self, requests: list[Request]) -> None:
        """Queue requests that wait for a future; under the lock."""
        self._waiting.difference_update(requests)
        self._isolation.ended(requests, requests)

    # ------------------------------------------------------------------------- receiving

    def _receive(self, timeout: float | None) -> bool:
        """Take in what front ends have sent; return whether there was anything.

        Args:
            timeout: seconds to wait for it; None for ever.

        """
        found = self._poll.poll(timeout)
        for descriptor, _ in found:
            if descriptor == self._wake:
                continue
            connection = self._connections[descriptor]
            try:
                for message, file in connection.channel.receive_waiting():
                    self._handle(connection, message, file)
            except ChannelClosedError:
                self._drop(descriptor, connection)
            else:
                if self._once:
                    self._poll.modify(descriptor, select.EPOLLIN | self._once)
        return bool(found)

    def _handle(
        self, connection: FrontEndConnection, message: messages.Message, descriptor: int | None
    ) -> None:
        match message:
            case messages.UnmapSegment():
                connection.segments.pop(message.segment, None)
            case messages.SubmitEvaluation():
                try:
                    request = connection.receive(message, descriptor)
                except WarpfitError as error:
                    connection.send(messages.RequestFinished(message.request, error=error))
                    return
                self._runner.plan_merging(request)
                with self._lock:
                    self._scheduler.add(request)
                    self._engine.others_wait(True)
            case _:
                raise InternalError(f"unexpected message {message}", "BAD_MESSAGE")

    def _drop(self, descriptor: int, connection: FrontEndConnection) -> None:
        """Forget a front end that is gone; its requests end at their next steps."""
        self._poll.unregister(descriptor)
        del self._connections[descriptor]
        connection.channel.close()
        for request in list(connection.requests):
            request.cancelled[0] = 1

    # ------------------------------------------------------------------------- running

    def _begin(self, requests: list[Request]) -> None:
        """Run a step of a request, or of several as one, until it waits or has ended."""
        began = time.perf_counter()
        wanted = []
        for request in requests:
            if request.is_cancelled:
                self._fail(request, CancelledError("the request was cancelled", "CANCELLED"))
                continue
            wanted.append(request)
            if request.steps is None:
                request.mark_begun()
        is_merged = requests[0].is_merged(len(requests))
        if is_merged:
            steps = self._runner.begin_merged(wanted)
        else:
            request = requests[0]
            steps = request.steps = request.steps or self._runner.begin(request)
        step = _Step(requests, wanted, steps, began, is_merged)
        if wanted:
            self._advance(step)
        else:
            self._end(step, [])

    def _advance(self, step: _Step) -> None:
        """Go on with a step until it waits, or has ended: answer, or queue what is unfinished."""
        unfinished = step.wanted
        is_lone = len(step.wanted) == 1
        LOGGED_REQUEST_ID.set(step.wanted[0].problem.request_id if is_lone else "")
        waits_for: Future[Any] | DeviceWork | None = None
        try:
            while (waits_for := next(step.steps)) is None and step.is_merged:
                pass
        except StopIteration as end:
            self._answer(step.wanted, end.value)
            unfinished = []
        except Exception as error:
            unfinished = self._failed(step, error)
        if step.is_merged and isinstance(waits_for, Future):  # each waits for that on its own
            step.steps.close()
            waits_for, unfinished = None, self._part(step.wanted)
        if waits_for is None or isinstance(waits_for, Future):
            self._end(step, unfinished, waits_for)
            return
        with self._lock:
            self._in_flight[step] = waits_for

    def _end(
        self, step: _Step, unfinished: list[Request], waits_for: Future[Any] | None = None
    ) -> None:
        """Charge the tenants for a step, and queue the rest again once it can go on."""
        seconds = time.perf_counter() - step.began
        with self._lock:
            self._scheduler.ran(step.requests, seconds)
            self._running.difference_update(step.requests)
            if waits_for is None:
                self._isolation.ended(step.requests, unfinished)
            else:
                self._waiting.update(step.requests)
        if waits_for is not None:
            waits_for.add_done_callback(lambda _: self._resume(step.requests))

    def _failed(self, step: _Step, error: Exception) -> list[Request]:
        """Answer a request whose step has failed; return those that must run alone instead."""
        if len(step.wanted) == 1 or isinstance(error, EngineBrokenError):
            self._fail(step.wanted[0], error)
            return []
        _LOG.debug("a merged evaluation failed: %s", error)
        return self._part(step.wanted)

    @staticmethod
    def _part(requests: list[Request]) -> list[Request]:
        """Let requests that were merged run alone; return them."""
        for request in requests:
            request.merge_key = None
        return requests

    def _answer(self, requests: list[Request], timings: Timings) -> None:
        """Answer the finished requests of a step, those of each front end together."""
        answers: dict[FrontEndConnection, list[messages.RequestFinished]] = {}
        for request in requests:
            request.connection.requests.discard(request)
            answer = messages.RequestFinished.of(request.number, timings, request.waited)
            answers.setdefault(request.connection, []).append(answer)
        for connection, found in answers.items():
            connection.send(*found)

    def _fail(self, request: Request, error: Exception) -> None:
        """Answer a request with an error; raise what ends the process."""
        if isinstance(error, EngineBrokenError):
            raise error
        if request.steps is not None:
            request.steps.close()
        if not isinstance(error, WarpfitError):
            _LOG.error("a request failed", exc_info=error)
            failure = InternalError("the engine failed on this batch", "ENGINE_FAILURE")
            error = shortage(error) or failure
        request.connection.requests.discard(request)
        request.connection.send(messages.RequestFinished(request.number, error=error))
