"""The engine loop: receive requests of all front ends, run their steps, send the answers.

The simple form:

    while True:
        queue.extend(connections.receive())
        step = one whose device is done, or else what the scheduler says
        if there is none, sleep until something arrives, or a device or a future is done
        run the step until it waits for the device, or has ended
        answer what is finished, put the rest back into the queue

One thread does this where steps compute on a device: Python's part of a step runs while the device
computes another one, and no two threads compete for Python's lock. Where steps compute on the
calling thread, without that lock, there are as many threads as steps that gain from running at the
same time. All of them poll the same sockets, and the kernel wakes one for each message: the thread
that receives a request runs its step and sends its answer, so that a lone caller waits for no
second thread. A thread that leaves requests in the queue wakes another one.

This module is run as the engine process. Its main thread makes the engine and handles the messages
of the supervisor, while the threads of the `Loop` serve the front ends. The process ends at once
when the supervisor is gone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.errors import CancelledError, InternalError, UnavailableError, WarpfitError
from warpfit.request import Timings
from warpfit_server.config import Config
from warpfit_server.engine.evaluation import LoadedDatasets
from warpfit_server.engine.interface import DeviceWork, Engine, EngineBrokenError, Steps
from warpfit_server.engine.runner import RequestRunner
from warpfit_server.engine.scheduler import FrontEndConnection, Request, Scheduler
from warpfit_server.ipc import messages
from warpfit_server.ipc.messages import Channel, ChannelClosedError
from warpfit_server.ipc.segments import Segment
from warpfit_server.logs import LOGGED_REQUEST_ID, configure_logging
from warpfit_server.machine import (
    EXIT_BROKEN,
    EXIT_CANNOT_RUN,
    StuckDetector,
    available_cores,
    keep_freed_memory,
    shortage,
    shorten_gil_switch_interval,
)

_LOG: Final = logging.getLogger("warpfit.engine")
#: Seconds for which a thread polls without sleeping after a step: the next request of a search
#: follows soon, and an idle core of a virtual machine takes 50 to 100 microseconds to wake up.
_BUSY_POLL_SECONDS: Final = 0.003
#: Seconds between two looks at the device where there are few cores.
_DEVICE_SECONDS: Final = 30e-6
#: Seconds that a merged evaluation goes on without a pause.
_MERGED_SECONDS: Final = 0.01
#: Seconds between two looks whether requests that wait for a future were cancelled.
_LOOK_SECONDS: Final = 0.05
#: Least number of cores for busy polling, which takes one of them.
_MANY_CORES: Final = 8


class _Step:
    """A step of one request, or of several that are merged."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.is_merged = requests[0].merge_key is not None
        """Whether they are evaluated as one batch, even a lone one. If it pauses, the first request
        of them stands for all in the queue."""
        self.began = time.perf_counter()
        self.wanted: list[Request] = []
        """The requests that had not been cancelled when it began."""
        self.steps: Steps[Timings] | None = None
        """The running evaluation; None until the step has begun."""


class Loop:
    """Threads that receive requests, run steps of the engine and answer.

    Args:
        engine: computes the steps.
        runner: makes the steps of requests.
    """

    def __init__(self, engine: Engine, runner: RequestRunner) -> None:
        self._engine = engine
        self._runner = runner
        self._scheduler: Scheduler[Request] = Scheduler(
            engine.step_size, shares_cores=engine.steps_share_cores
        )
        self._lock = threading.Lock()
        """Guards the scheduler, the sets and the numbers below."""
        self._running: set[Request] = set()
        """Requests of which a step is running."""
        self._waits: dict[_Step, DeviceWork | Future[Any]] = {}
        """Device work or future that each step waits for. A step that waits for the device is in
        flight. One that waits for a future, of code that is being loaded or compiled, has ended;
        its request is queued again once the future is done."""
        self._paused: dict[Request, _Step] = {}
        """Merged steps that have paused, by their first request, which waits in the queue."""
        self._idle = 0
        """Threads that have found nothing to do."""
        self._busy_polling = threading.Lock()
        """Held by the one thread that polls without sleeping."""
        self._has_many_cores = available_cores() >= _MANY_CORES
        # Of several threads only one is woken for a socket, until it has read from it.
        self._once = select.EPOLLONESHOT if engine.step_threads > 1 else 0
        self._connections: dict[int, FrontEndConnection] = {}
        self._poll = select.epoll()
        self._wake_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Edge-triggered, so that each write wakes one thread, and no thread has to read.
        self._poll.register(self._wake_event, select.EPOLLIN | select.EPOLLET)

    def start(self) -> None:
        """Start the threads."""
        for number in range(self._engine.step_threads):
            threading.Thread(target=self._run, name=f"step-{number}", daemon=True).start()

    def add(self, connection: FrontEndConnection) -> None:
        """Serve a front end; any thread may call this."""
        connection.on_map = self._engine.map_segment
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
                self._receive(0.0)  # so that everything that has arrived is considered
                step = self._schedule()
                if step is None:
                    self._wait()
                else:
                    self._run_step(step)
        except Exception:
            _LOG.exception("the engine is broken; the supervisor starts a new process")
            os._exit(EXIT_BROKEN)

    def _schedule(self) -> _Step | None:
        """Return the next step: one that the device is done with, or one that begins."""
        with self._lock:
            in_flight = 0
            for step, waits_for in list(self._waits.items()):
                if isinstance(waits_for, Future):
                    if waits_for.done() or step.requests[0].is_cancelled:
                        del self._waits[step]
                        self._scheduler.ended(step.requests, step.requests)
                elif waits_for.done():
                    del self._waits[step]
                    return step
                else:
                    in_flight += 1
            self._scheduler.merged_size = self._engine.step_size
            is_full = in_flight >= self._engine.steps_in_flight
            requests = [] if is_full else self._scheduler.next()
            self._engine.others_wait(len(self._scheduler) > 0)
            self._running.update(requests)
            if not requests:  # nothing waits, or everything waits until a suspect has run
                self._idle += 1
                return None
            leaves_work = self._idle > 0 and len(self._scheduler) > 0
        if leaves_work:
            self._wake()
        paused = self._paused.pop(requests[0], None)
        if paused is None:
            return _Step(requests)
        paused.requests, paused.began = requests, time.perf_counter()
        return paused

    def _run_step(self, step: _Step) -> None:
        """Run a step until it waits for something or has ended; answer what is finished."""
        if step.steps is None:
            for request in step.requests:
                if request.is_cancelled:
                    self._fail(request, CancelledError("the request was cancelled", "CANCELLED"))
                    continue
                step.wanted.append(request)
                if request.steps is None:
                    request.mark_begun()
            if not step.wanted:
                self._finish(step, [])
                return
            if step.is_merged:
                step.steps = self._runner.merger.begin(step.wanted)
            else:
                request = step.wanted[0]
                step.steps = request.steps = request.steps or self._runner.begin(request)
        is_lone, unfinished = len(step.wanted) == 1, step.wanted
        LOGGED_REQUEST_ID.set(step.wanted[0].problem.request_id if is_lone else "")
        waits_for: Future[Any] | DeviceWork | None = None
        pause_at = time.perf_counter() + _MERGED_SECONDS
        try:
            while (waits_for := next(step.steps)) is None and step.is_merged:
                if time.perf_counter() > pause_at:
                    unfinished = step.wanted[:1]
                    self._paused[unfinished[0]] = step
                    break
        except StopIteration as end:
            self._answer(step.wanted, end.value)
            unfinished = []
        except EngineBrokenError:
            raise
        except Exception as error:
            _LOG.debug("a step of %d requests failed: %s", len(step.wanted), error)
            if is_lone:
                self._fail(step.wanted[0], error)
                unfinished = []
            else:
                self._part(step.wanted)
        if step.is_merged and isinstance(waits_for, Future):  # each waits for that on its own
            step.steps.close()
            self._part(step.wanted)
            waits_for = None
        self._finish(step, unfinished, waits_for)

    def _finish(
        self,
        step: _Step,
        unfinished: list[Request],
        waits_for: Future[Any] | DeviceWork | None = None,
    ) -> None:
        """Charge the tenants for a step that has ended, and queue what is unfinished.

        A step that waits for the device goes on later.
        """
        seconds = time.perf_counter() - step.began
        with self._lock:
            if waits_for is not None:
                self._waits[step] = waits_for
            if waits_for is None or isinstance(waits_for, Future):
                self._scheduler.ran(step.requests, seconds)
                self._running.difference_update(step.requests)
            if waits_for is None:
                self._scheduler.ended(step.requests, unfinished)
        if isinstance(waits_for, Future):
            waits_for.add_done_callback(lambda _: self._wake())

    def _wait(self) -> None:
        """Wait for something to do; one thread polls for a while first if no step is running."""
        waits = list(self._waits.values())
        devices = [one for one in waits if not isinstance(one, Future)]
        if devices:
            while not (self._receive(0.0) or any(one.done() for one in devices)):
                if not self._has_many_cores:
                    time.sleep(_DEVICE_SECONDS)
        else:
            has_arrived = False
            if self._has_many_cores and self._busy_polling.acquire(blocking=False):
                try:
                    end = time.perf_counter() + _BUSY_POLL_SECONDS
                    while not (has_arrived or self._running) and time.perf_counter() < end:
                        has_arrived = self._receive(0.0)
                finally:
                    self._busy_polling.release()
            if not has_arrived:
                self._receive(_LOOK_SECONDS if waits else self._scheduler.timeout)
        with self._lock:
            self._idle -= 1

    def _wake(self) -> None:
        """Wake a thread that waits."""
        os.eventfd_write(self._wake_event, 1)

    # ------------------------------------------------------------------------- receiving

    def _receive(self, timeout: float | None) -> bool:
        """Take in what front ends have sent; return whether there was anything.

        Args:
            timeout: seconds to wait for it; None for ever.
        """
        found = self._poll.poll(timeout)
        for descriptor, _ in found:
            if descriptor == self._wake_event:
                continue
            connection = self._connections[descriptor]
            try:
                for message, file in connection.channel.receive_waiting():
                    if (new := connection.receive(message, file)) is not None:
                        self._runner.merger.plan(new)
                        with self._lock:
                            self._scheduler.add(new)
                            self._engine.others_wait(True)
            except ChannelClosedError:  # the front end is gone
                self._poll.unregister(descriptor)
                del self._connections[descriptor]
                connection.channel.close()
                for request in list(connection.requests):  # they end at their next steps
                    request.cancelled[0] = 1
            else:
                if self._once:
                    self._poll.modify(descriptor, select.EPOLLIN | self._once)
        return bool(found)

    # ------------------------------------------------------------------------- answering

    @staticmethod
    def _part(requests: list[Request]) -> None:
        """Let requests that were merged run alone."""
        for request in requests:
            request.merge_key = None

    def _answer(self, requests: list[Request], timings: Timings) -> None:
        """Answer the finished requests of a step; all answers to a front end are sent together.

        A request of a merged step counts its share of the time, by size, as computing, and the rest
        as waiting. From these times front ends learn the engine time of a request.
        """
        answers: dict[FrontEndConnection, list[messages.RequestFinished]] = {}
        total, own = sum([request.size for request in requests]), timings
        for request in requests:
            request.connection.requests.discard(request)
            if len(requests) > 1:
                compute = int(timings.compute) * request.size // max(1, total)
                own = replace(
                    timings, compute=compute, queue=timings.queue + timings.compute - compute
                )
            answer = messages.RequestFinished.of(request.number, own, request.waited)
            answers.setdefault(request.connection, []).append(answer)
        for connection, found in answers.items():
            connection.send(*found)

    def _fail(self, request: Request, error: Exception) -> None:
        """Answer a request with an error."""
        if request.steps is not None:
            request.steps.close()
        if not isinstance(error, WarpfitError):
            _LOG.error("a request failed", exc_info=error)
            failure = InternalError("the engine failed on this batch", "ENGINE_FAILURE")
            error = shortage(error) or failure
        request.connection.requests.discard(request)
        request.connection.send(messages.RequestFinished(request.number, error=error))


# ------------------------------------------------------------------------------- the engine process


class EngineProcess:
    """An engine, its data sets and its loop, driven by the supervisor.

    Args:
        engine: the engine, which computes.
        channel: channel to the supervisor.
        number: number of the engine in ``config.engines``.
        config: the server's configuration.
    """

    def __init__(self, engine: Engine, channel: Channel, number: int, config: Config) -> None:
        self._engine = engine
        self._channel = channel
        self._datasets = LoadedDatasets(engine)
        runner = RequestRunner(engine, self._datasets, config.chunk_bytes)
        self._loop = Loop(engine, runner)
        self._stuck_detector = StuckDetector(config.stuck_seconds, self._loop.flags)

    def run(self) -> None:
        """Serve until the supervisor says `messages.Stop`.

        Raises:
            ChannelClosedError: if the supervisor is gone.
        """
        self._loop.start()
        self._stuck_detector.start()
        self._channel.send(messages.EngineReady(self._engine.device()))
        while True:
            message, descriptor = self._channel.receive()
            match message:
                case messages.Stop():
                    return
                case messages.ConnectFrontEnd() if descriptor is not None:
                    channel = Channel(socket.socket(fileno=descriptor))
                    self._loop.add(FrontEndConnection(channel))
                case messages.ConnectFrontEnd():  # the front end notices, and asks again
                    _LOG.error("a connection was lost: too many open files")
                case messages.LoadDataset(key, layout):
                    error: WarpfitError | None = None
                    try:
                        segment = Segment.received(message.segment, descriptor, message.size)
                        matrix = segment.array(layout.dtype, (layout.columns, layout.rows))
                        segment.close()  # the matrix keeps the mapping
                        self._datasets.load(Dataset.resident(layout, matrix, key))
                    except WarpfitError as refused:
                        error = refused
                    except (OSError, MemoryError) as failed:
                        error = shortage(failed)
                        if error is None:
                            raise
                    self._channel.send(messages.DatasetLoaded(key, error))
                case messages.UnloadDataset():
                    self._datasets.unload(message.key)
                case messages.RequestCounters():
                    self._channel.send(messages.EngineCounters(self._engine.counters()))
                case _:
                    raise InternalError(f"unexpected message {message}", "BAD_MESSAGE")


def create_engine(
    kind: str,
    *,
    threads: int | None = None,
    memory_share: float = 1.0,
    device_memory: int | None = None,
    cache_directory: Path | None = None,
) -> Engine:
    """Create an engine of a kind, ``"cpu"`` or ``"cuda"``; the latter on the first visible GPU.

    Args:
        kind: kind of the engine.
        threads: threads of the CPU engine, or threads that lower and compile for the CUDA engine;
            None for all cores.
        memory_share: part of the GPU's memory that is for this engine.
        device_memory: bytes of the GPU's memory to use; None for most of it.
        cache_directory: where code for GPUs is kept; None for the user's cache directory. What
            Numba compiles is kept where `compile_cache.engine_environment` says.

    Raises:
        WarpfitError: if the engine cannot run on this machine.
    """
    if kind == "cpu":
        from warpfit_server.engine.cpu.engine import CpuEngine

        return CpuEngine(threads=threads)

    def make_context() -> None:
        """Make the context of the first visible GPU for CuPy, which says what is wrong, if any."""
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

    # The driver takes a third of a second for it, in which the modules below are imported.
    threading.Thread(target=make_context, name="context", daemon=True).start()
    try:
        from warpfit_server.engine.cuda.engine import CudaEngine
    except ImportError as error:
        raise UnavailableError(
            f"the CUDA libraries are not installed: {error}",
            "NO_CUDA",
            "Install them (pip install 'warpfit[cuda13]', or cuda12), or run with --devices cpu",
        ) from error
    limit = None if device_memory is None else int(device_memory * memory_share)
    return CudaEngine(
        memory_limit=limit,
        memory_share=memory_share,
        cache_directory=cache_directory,
        threads=threads,
    )


def main(arguments: Sequence[str]) -> None:
    """Run an engine process; `EngineSupervisor` starts it.

    Args:
        arguments: number of a socket, number of the engine in ``Config.engines``, and a `Config`.
    """
    descriptor, number, text = arguments
    config = Config.from_json(text)
    configure_logging(config.log_level, config.log_format)
    shorten_gil_switch_interval()
    keep_freed_memory()
    channel = Channel(socket.socket(fileno=int(descriptor)))
    device = config.engines[int(number)]
    try:
        engine = create_engine(
            device.kind,
            threads=config.engine_threads(int(number)),
            memory_share=device.share,
            device_memory=config.device_memory,
            cache_directory=config.cache_path,
        )
        EngineProcess(engine, channel, int(number), config).run()
    except ChannelClosedError:
        _LOG.info("the supervisor is gone")
    except WarpfitError as error:
        _LOG.error("the engine %s cannot run: %s", device.label, error)
        os._exit(EXIT_CANNOT_RUN)
    logging.shutdown()
    os._exit(0)  # without waiting for a running step


if __name__ == "__main__":
    main(sys.argv[1:])
