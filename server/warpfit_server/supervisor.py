"""The front door's side of the engine process: starts it, talks to it, restarts it.

The front door never touches CUDA. When the engine process dies, the calls in flight fail with
UNAVAILABLE, a new process starts and the data sets are loaded again from the host copies.
"""

from __future__ import annotations

import itertools
import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Final

import numpy as np

from warpfit.errors import CancelledError, UnavailableError, WarpfitError
from warpfit.fitting import FitRequest
from warpfit.info import Device
from warpfit.request import Evaluation
from warpfit_server import channel as wire
from warpfit_server.channel import Channel, ChannelClosedError
from warpfit_server.config import Config
from warpfit_server.datasets import ResidentDataset
from warpfit_server.frame import Frame
from warpfit_server.segments import Segment, SegmentPool

_LOG: Final = logging.getLogger("warpfit.supervisor")
_LONGEST_PAUSE: Final = 30.0


class Job:
    """One evaluation in flight, shared by the call that waits for it and the engine.

    The segment goes back to the pool when both have let go, so a call that ends early never frees
    memory that the engine still writes.
    """

    def __init__(self, segment: Segment, frame: Frame, release: Callable[[Segment], None]) -> None:
        self.segment = segment
        self.frame = frame
        self._events: queue.SimpleQueue[wire.Event] = queue.SimpleQueue()
        self._release = release
        self._holders = 2
        self._lock = threading.Lock()

    def post(self, event: wire.Event) -> None:
        """Tell the waiting call."""
        self._events.put(event)

    def next_event(self) -> wire.Event:
        """Wait for the engine.

        Raises:
            WarpfitError: if the evaluation failed.

        """
        event = self._events.get()
        if isinstance(event, wire.Finished) and event.error is not None:
            raise event.error
        return event

    def abandon(self) -> None:
        """Stop the evaluation, because nobody waits for its answer any more."""
        with self._lock:
            if self._holders:
                self.frame.flag(self.segment)[0] = 1
        self.post(wire.Finished(0, error=CancelledError("the call has ended", "CANCELLED")))

    def let_go(self) -> None:
        """Drop one of the two holds on the segment."""
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._release(self.segment)


class EngineSupervisor:
    """Owns the engine process, the channel to it and the jobs in flight."""

    def __init__(self, config: Config, pool: SegmentPool) -> None:
        self._config = config
        self._pool = pool
        self._lock = threading.Lock()
        self._channel: Channel | None = None  # None while no engine is ready
        self._jobs: dict[int, Job] = {}
        self._loads: dict[bytes, Future[None]] = {}
        self._attached: set[int] = set()
        self._ready: wire.Ready | None = None
        self._started = threading.Event()
        self._stopping = threading.Event()
        self._numbers = itertools.count(1)
        self._resident: Callable[[], Iterator[ResidentDataset]] = lambda: iter(())
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def start(self, resident: Callable[[], Iterator[ResidentDataset]]) -> None:
        """Start the engine process and wait until it is ready.

        Args:
            resident: yields the data sets, leased, that every new engine process must load.

        Raises:
            UnavailableError: if the engine cannot run on this machine; its log says why.

        """
        self._resident = resident
        self._thread.start()
        self._started.wait()
        if self._ready is None:
            raise UnavailableError(
                f"the {self._config.engine} engine did not start",
                "ENGINE_FAILED",
                "See the log lines above; --engine cpu runs everywhere",
            )

    @property
    def engine(self) -> str:
        """Name of the engine."""
        return self._ready.engine if self._ready else self._config.engine

    @property
    def devices(self) -> tuple[Device, ...]:
        """What the engine computes on."""
        return self._ready.devices if self._ready else ()

    def submit(self, evaluation: Evaluation, dataset: ResidentDataset) -> Job:
        """Hand a checked evaluation to the engine; the caller must `Job.let_go` in the end.

        The caller holds a lease on the data set.

        Raises:
            UnavailableError: if no engine is ready.
            ResourceExhaustedError: if there is no memory for batch and answer.

        """
        job = self._job(Frame.of(evaluation, dataset.layout), evaluation)
        self._send_job(job, self._order(job, evaluation, dataset), dataset)
        return job

    def submit_fit(
        self, request: FitRequest, dataset: ResidentDataset, deadline: float | None
    ) -> Job:
        """Hand a checked fit to the engine, as `submit` does.

        Args:
            request: the fit.
            dataset: leased by the caller.
            deadline: ``time.monotonic()`` at which the engine stops with what there is, or None.

        """
        job = self._job(Frame.of_fit(request, dataset.layout), request.problem)
        arrays = {name: getattr(request.settings, name) for name in ("lower", "upper", "fixed")}
        for name, array in arrays.items():
            if array is not None:
                np.copyto(job.frame.require(name, job.segment), array)
        settings = replace(request.settings, lower=None, upper=None, fixed=None)
        order = wire.Optimize(self._order(job, request.problem, dataset), settings, deadline)
        self._send_job(job, order, dataset)
        return job

    def _job(self, frame: Frame, evaluation: Evaluation) -> Job:
        segment = self._pool.acquire(frame.nbytes)
        frame.write(segment, evaluation.batch)
        return Job(segment, frame, self._give_back)

    def _order(self, job: Job, evaluation: Evaluation, dataset: ResidentDataset) -> wire.Evaluate:
        return wire.Evaluate(
            request=next(self._numbers),
            segment=job.segment.identifier,
            size=job.segment.size,
            frame=job.frame,
            dataset_id=evaluation.dataset_id,
            rows=evaluation.row_range(dataset.layout),
            precision=evaluation.precision,
            loss=evaluation.loss,
            tier=evaluation.tier,
            submitted=time.monotonic_ns(),
            custom_loss=evaluation.custom_loss,
            wishes=tuple(wish for wish in wire.WISHES if getattr(evaluation, wish)),
        )

    def _send_job(
        self, job: Job, order: wire.Evaluate | wire.Optimize, dataset: ResidentDataset
    ) -> None:
        try:
            self._enqueue(job, order, dataset)
        except UnavailableError:
            job.let_go()
            job.let_go()
            raise

    def load(self, dataset: ResidentDataset) -> Future[None]:
        """Give a data set to the engine; without an engine the next one loads it as it starts.

        The future fails with ResourceExhaustedError if the device has no room.
        """
        with self._lock:
            if self._channel is None:
                done: Future[None] = Future()
                done.set_result(None)
                return done
            return self._load(self._channel, dataset)

    def unload(self, content_id: bytes) -> None:
        """Make the engine forget a data set."""
        with self._lock:
            if self._loads.pop(content_id, None) is not None:
                self._tell(wire.Unload(content_id))

    def stop(self) -> None:
        """End the engine process; jobs in flight fail."""
        self._stopping.set()
        with self._lock:
            self._tell(wire.Stop())
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    # ------------------------------------------------------------------- under self._lock

    def _enqueue(
        self, job: Job, order: wire.Evaluate | wire.Optimize, dataset: ResidentDataset
    ) -> None:
        message = order.problem if isinstance(order, wire.Optimize) else order
        with self._lock:
            if self._channel is None:
                raise _unavailable()
            self._load(self._channel, dataset)
            fresh = message.segment not in self._attached
            try:
                self._channel.send(order, [job.segment.descriptor] if fresh else [])
            except ChannelClosedError as error:
                raise _unavailable() from error
            self._attached.add(message.segment)
            self._jobs[message.request] = job

    def _load(self, channel: Channel, dataset: ResidentDataset) -> Future[None]:
        future = self._loads.get(dataset.content_id)
        if future is not None:
            return future
        future = self._loads[dataset.content_id] = Future()
        segment = dataset.segment
        load = wire.Load(dataset.content_id, dataset.layout, segment.identifier, segment.size)
        try:
            channel.send(load, [segment.descriptor])
        except ChannelClosedError:
            future.set_result(None)  # the next engine loads it as it starts
        return future

    def _tell(self, message: wire.Message) -> None:
        """Send to the engine if there is one; a dying engine need not hear it."""
        if self._channel is not None:
            try:
                self._channel.send(message)
            except ChannelClosedError:
                _LOG.debug("the engine is gone, %s not sent", type(message).__name__)

    # ------------------------------------------------------------------- the watching thread

    def _watch(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            code = self._run_engine()
            if self._stopping.is_set():
                return
            failures = 0 if time.monotonic() - started > _LONGEST_PAUSE else failures + 1
            if not self._started.is_set():
                _LOG.error("the engine process ended with code %s as it started", code)
                self._started.set()
                return
            pause = 0.0 if failures <= 2 else min(_LONGEST_PAUSE, 0.25 * 2**failures)
            _LOG.error("the engine process ended with code %s; a new one starts", code)
            self._stopping.wait(pause)

    def _run_engine(self) -> int:
        channel, theirs = Channel.pair()
        with theirs:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "warpfit_server.engine.process"),
                    *(str(theirs.fileno()), self._config.to_json()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for the front door, which drains first
            )
        try:
            while True:
                self._handle(channel, *channel.receive())
        except ChannelClosedError:
            self._forget_engine()
        finally:
            channel.close()
            process.kill()
        return process.wait()

    def _handle(self, channel: Channel, message: wire.Message, descriptors: list[int]) -> None:
        match message:
            case wire.Progress() | wire.FitProgressed():
                with self._lock:
                    job = self._jobs[message.request]
                job.post(message)
            case wire.Finished():
                with self._lock:
                    job = self._jobs.pop(message.request)
                job.post(message)
                job.let_go()
            case wire.Ready():
                self._welcome(channel, message)
            case wire.Loaded():
                self._settle_load(message)
            case _:
                _LOG.error("unexpected message %s with %d files", message, len(descriptors))

    def _welcome(self, channel: Channel, ready: wire.Ready) -> None:
        with self._lock:
            self._ready = ready
            self._channel = channel
        for dataset in self._resident():
            self.load(dataset)
        self._started.set()

    def _settle_load(self, message: wire.Loaded) -> None:
        with self._lock:
            future = self._loads.get(message.content_id)
            if message.error is not None:
                self._loads.pop(message.content_id, None)
        if future is None:
            return
        if message.error is None:
            future.set_result(None)
        else:
            _LOG.warning("data set %s: %s", message.content_id.hex()[:16], message.error)
            future.set_exception(message.error)

    def _forget_engine(self) -> None:
        with self._lock:
            self._channel = None
            jobs, self._jobs = list(self._jobs.values()), {}
            loads, self._loads = list(self._loads.values()), {}
            self._attached.clear()
        for job in jobs:
            job.post(wire.Finished(0, error=_unavailable()))
            job.let_go()
        for future in loads:
            if not future.done():
                future.set_result(None)

    def _give_back(self, segment: Segment) -> None:
        if self._pool.release(segment):
            return
        with self._lock:
            if segment.identifier in self._attached:
                self._attached.discard(segment.identifier)
                self._tell(wire.Detach(segment.identifier))


def _unavailable() -> WarpfitError:
    return UnavailableError(
        "the engine is restarting", "ENGINE_RESTARTING", "Repeat the call after a short wait"
    )
