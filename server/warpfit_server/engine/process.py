"""The engine process: takes messages from the front door, evaluates, answers.

The main thread reads messages about data sets. Each lane (see `warpfit_server.lanes`) has a thread
that reads its evaluations, runs them and answers, at most ``engine.concurrency`` at a time. When
the front door is gone, the process ends at once.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.errors import CancelledError, DatasetNotFoundError, InternalError, WarpfitError
from warpfit.fitting import FitProgress, FitRequest
from warpfit.request import Evaluation, Timings
from warpfit_server import channel as wire
from warpfit_server.channel import Channel, ChannelClosedError
from warpfit_server.config import Config
from warpfit_server.engine import create_engine, lane_end
from warpfit_server.engine.accounts import Accounts
from warpfit_server.engine.base import Engine, EngineBrokenError, Outputs, Reply, Standing
from warpfit_server.engine.closing import engine_share, finish
from warpfit_server.engine.isolation import Isolation
from warpfit_server.engine.lane_end import LaneEnd
from warpfit_server.engine.roster import Roster
from warpfit_server.engine.stuck import EXIT_BROKEN, EXIT_CANNOT_RUN, Overseer
from warpfit_server.fairness import FairGate
from warpfit_server.frame import FIT_CELLS
from warpfit_server.logs import configure_logging, works_for
from warpfit_server.orders import Evaluate, Optimize, Order
from warpfit_server.segments import Segment
from warpfit_server.shortages import shortage, too_many_files
from warpfit_server.workers import take_short_turns

_LOG: Final = logging.getLogger("warpfit.engine")
#: Least time between two messages of progress.
_PROGRESS_SECONDS: Final = 0.1
#: Fits of a tenant at a time that take no places. One computes while Python prepares the other's
#: next pass; where three pass Python's lock on among themselves, others wait for it for long.
_FITS: Final = 2
#: Evaluations that Python runs at most before compiled code tries again to answer the next ones.
_MOST_PATIENCE: Final = 64
#: Work whose door has died ends after at most this time, and tenants are charged for what compiled
#: code does on their lanes.
_ROUND_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """One piece of work."""

    order: Order
    problem: Evaluate
    segment: Segment
    lane: LaneEnd
    cancelled: NDArray[np.uint8]
    reply: Reply


@dataclass(slots=True, eq=False)
class _Visit:
    """What a lane's thread remembers from one evaluation to the next."""

    lane: LaneEnd
    segment: Segment | None = None
    """The lane's memory."""
    finished: wire.Finished | None = None
    """Answer that has not been sent."""
    kind: bytes = b""
    """Of the last evaluation, if it was plain."""
    tenant: str = ""
    """Of the last evaluation."""
    standing: Standing | None = None
    """Would answer further ones of that kind."""
    patience: int = 1
    """Evaluations of one kind in a row after which such a thing is tried."""
    repeats: int = 0
    """How many there have been."""

    def takes_kind(self) -> bool:
        """Note the kind of what was received; tell whether more of that kind are to be expected."""
        kind, self.kind = self.kind, self.lane.kind()
        self.repeats = self.repeats + 1 if kind and kind == self.kind else 0
        return self.repeats >= self.patience

    def learn(self, seconds: float) -> None:
        """Be more patient if compiled code has answered nothing, and less if it has."""
        self.patience = 1 if seconds else min(2 * self.patience, _MOST_PATIENCE)
        self.repeats = 0


class EngineProcess:
    """State of the engine process: the engine, its data sets and the threads of its lanes."""

    def __init__(
        self,
        engine: Engine,
        channel: Channel,
        chunk_bytes: int,
        cache_directory: Path | None = None,
        stuck_seconds: float = 30.0,
    ) -> None:
        self._engine = engine
        self._cache_directory = cache_directory
        self._datasets: dict[bytes, Dataset] = {}
        self._channel = channel
        self._chunk_bytes = chunk_bytes
        self._roster = Roster()
        self._gate = FairGate(engine.concurrency)
        self._fits = FairGate(_FITS)
        self._accounts = Accounts(self._gate)
        self._isolation = Isolation(self._roster.compiled_works)
        self._overseer = Overseer(stuck_seconds, self._roster.flags)

    def run(self) -> None:
        """Serve until Stop or the end of the channel."""
        devices = tuple(self._engine.devices())
        lane_end.rehearse()
        threading.Thread(target=self._go_round, name="rounds", daemon=True).start()
        self._overseer.start()
        self._channel.send(wire.Ready(self._engine.name, devices, self._engine.concurrency))
        while True:
            message, descriptors = self._channel.receive()
            match message:
                case wire.Stop():
                    return
                case wire.OpenLanes():
                    for descriptor in descriptors:
                        lane = LaneEnd(socket.socket(fileno=descriptor))
                        threading.Thread(target=self._serve, args=(lane,), daemon=True).start()
                case wire.Load():
                    self._load(message, descriptors)
                case wire.Unload():
                    self._engine.unload(message.content_id)
                    self._datasets.pop(message.content_id, None)
                case wire.Count():
                    self._channel.send(wire.Counted(self._engine.counters()))
                case _:
                    raise InternalError(f"unexpected message {message}", "BAD_MESSAGE")

    def _serve(self, lane: LaneEnd) -> None:
        """Run the evaluations of one lane until its other end is closed."""
        try:
            visit = _Visit(lane)
            while True:
                self._next(visit)
        except ChannelClosedError:
            _LOG.debug("a lane was closed")
        except Exception:
            _LOG.exception("a lane is broken; the front door starts a new process")
            os._exit(EXIT_BROKEN)

    def _next(self, visit: _Visit) -> None:
        """Answer what a lane has not been told yet, and run its next evaluation."""
        lane = visit.lane
        message, descriptors = self._receive(visit)
        if isinstance(message, wire.Unmap):
            visit.segment = None
            return
        if not isinstance(message, Order):
            raise InternalError(f"unexpected message {message}", "BAD_MESSAGE")
        problem = message.problem if isinstance(message, Optimize) else message
        if problem.size:
            visit.segment = _received_segment(problem.size, descriptors)
        if visit.segment is None:
            visit.finished = wire.Finished(error=too_many_files())
            return
        cancelled = problem.frame.flag(visit.segment)
        place = self._roster.reserve(problem.tenant) if visit.takes_kind() else None
        reply = Reply(lane.descriptor, place)
        job = _Job(message, problem, visit.segment, lane, cancelled, reply)
        self._roster.begin(lane, cancelled)
        try:
            visit.finished = self._perform(job)
        finally:
            self._roster.end(lane)
            if place is not None and reply.standing is None:
                place.leave()
        visit.tenant, visit.standing = problem.tenant, reply.standing
        if not problem.keep:
            visit.segment = None

    @contextmanager
    def _turn(self, job: _Job) -> Iterator[None]:
        """Wait for the turn of a piece of work and hold it."""
        problem, frame = job.problem, job.problem.frame
        if problem.urgent:
            yield
            return
        is_fit = isinstance(job.order, Optimize)
        places = self._engine.places(frame.tokens * frame.vectors * frame.rows, fit=is_fit)
        if problem.alone:
            with self._isolation.alone(problem.alone, job.cancelled, _alone_on(job.lane)):
                yield
            return
        with ExitStack() as held:
            if not places:  # fits, that wait for other fits
                held.enter_context(self._fits.turn(problem.tenant, 1, job.cancelled))
            held.enter_context(self._gate.turn(problem.tenant, places, job.cancelled))
            held.enter_context(self._isolation.beside_others(job.cancelled))
            yield

    def _receive(self, visit: _Visit) -> tuple[wire.Message, list[int]]:
        """Wait for the next message, while compiled code answers what it can."""
        lane, answer, visit.finished = visit.lane, visit.finished, None
        standing, visit.standing = visit.standing, None
        if standing is None or visit.segment is None:
            return lane.exchange(answer, awake=self._roster.is_idle)
        if not self._isolation.enter(standing):
            standing.close()
            return lane.exchange(answer, awake=False)
        size = None
        try:
            with self._accounts.account(visit.tenant, standing) as account:
                if answer is not None:
                    lane.send(answer)
                memory = visit.segment.array("u1", (visit.segment.size,))
                while size is None and not standing.is_over:
                    size = standing.serve(lane.line, visit.kind, memory)
        finally:
            self._isolation.leave(standing)
            standing.close()
        visit.learn(account.seconds)
        if size is None:
            return lane.exchange(None, awake=self._roster.is_idle)
        return lane.received(size)

    def _go_round(self) -> None:
        """Look after all lanes now and then.

        The work of doors that have died is cancelled; those that live cancel it themselves.
        """
        last = time.monotonic()
        while True:
            time.sleep(_ROUND_SECONDS)
            for lane, flag in self._roster.running():
                if lane.is_abandoned():
                    flag[0] = 1
            now = time.monotonic()
            self._accounts.charge(now - last)
            last = now

    def _load(self, message: wire.Load, descriptors: Sequence[int]) -> None:
        error: WarpfitError | None = None
        try:
            dataset = _dataset(message, descriptors)
            self._engine.load(dataset)
            self._datasets[dataset.content_id] = dataset
        except WarpfitError as refused:
            error = refused
        except (OSError, MemoryError) as failed:
            error = shortage(failed)
            if error is None:
                raise
        self._channel.send(wire.Loaded(message.content_id, error))

    def _perform(self, job: _Job) -> wire.Finished | None:
        """Do one piece of work; return what to tell the front door, unless it has been told."""
        problem, reply = job.problem, job.reply
        works_for(problem.request_id)
        try:
            if isinstance(job.order, Optimize):
                self._load_steering(job, job.order)
            with self._turn(job):
                reply.queue = time.monotonic_ns() - problem.submitted
                timings = self._run(job)
        except WarpfitError as error:
            finished = wire.Finished(error=error)
        except EngineBrokenError:
            _LOG.exception("the engine is broken; the front door starts a new process")
            os._exit(EXIT_BROKEN)
        except ChannelClosedError:
            raise
        except Exception:
            _LOG.exception("evaluation failed")
            finished = wire.Finished(
                error=InternalError("the engine failed on this batch", "ENGINE_FAILURE")
            )
        else:
            finished = wire.Finished(replace(timings, queue=reply.queue + timings.queue))
        return None if reply.is_sent else finished

    def _run(self, job: _Job) -> Timings:
        if job.cancelled[0]:
            raise CancelledError("cancelled before it ran", "CANCELLED")
        if isinstance(job.order, Optimize):
            return self._optimize(job, job.order)
        return self._evaluate(job)

    def _load_steering(self, job: _Job, message: Optimize) -> None:
        """Load what steers a fit; it may have to be compiled, for which nobody else should wait."""
        # Imported on first use, because importing it costs a start of the server some time.
        from warpfit_server.fit import compiled

        evaluation = _evaluation(job.problem, job.segment)
        compiled.load(FitRequest(evaluation, message.settings).method, self._cache_directory)

    def _evaluate(self, job: _Job) -> Timings:
        message, segment, frame = job.problem, job.segment, job.problem.frame
        asked = _evaluation(message, segment)
        dataset = self._dataset(asked.dataset_id)
        if frame.is_small and asked.custom_loss is None:  # the engine does all of it
            losses = frame.losses_view(segment)
            outputs = Outputs(None, losses, job.cancelled, _nobody_waits, reply=job.reply)
            return self._engine.evaluate(asked, outputs)
        outputs = Outputs(
            values=frame.values_view(segment),
            losses=frame.losses_view(segment),
            cancelled=job.cancelled,
            ready=self._progress(message, job.lane),
            gradients=frame.extra("gradients", segment),
            jacobian=frame.jacobian_view(segment),
            variable_gradients=frame.extra("variable_gradients", segment),
            reductions=frame.extra("reductions", segment),
        )
        evaluation, share = engine_share(asked, outputs)
        timings = self._engine.evaluate(evaluation, share)
        finish(
            asked,
            dataset,
            outputs,
            share.moments,
            frame.extra("scaling", segment),
            frame.extra("correlations", segment),
        )
        return timings

    def _optimize(self, job: _Job, message: Optimize) -> Timings:
        # Imported on first use, because importing it costs a start of the server some time.
        from warpfit_server.fit.driver import Surroundings, optimize

        problem, segment = message.problem, job.segment
        frame = problem.frame
        bounds: Any = {name: frame.extra(name, segment) for name in ("lower", "upper", "fixed")}
        evaluation = _evaluation(problem, segment)
        # An engine keeps what it has made of these arrays, and with it their memory.
        evaluation = replace(evaluation, batch=evaluation.batch.copy())
        request = FitRequest(evaluation, replace(message.settings, **bounds))
        result = optimize(
            request,
            Surroundings(
                engine=self._engine,
                dataset=self._dataset(problem.dataset_id),
                cancelled=job.cancelled,
                deadline=message.deadline,
                report=_fit_progress(message, job.lane),
                cache_directory=self._cache_directory,
            ),
        )
        for name in ("parameters", *FIT_CELLS, "standard_errors", "covariances"):
            array = frame.extra(name, segment)
            if array is not None:
                np.copyto(array, getattr(result, name))
        return result.timings

    def _dataset(self, content_id: bytes) -> Dataset:
        dataset = self._datasets.get(content_id)
        if dataset is None:
            raise DatasetNotFoundError(
                "the data set is not loaded", "DATASET_NOT_FOUND", "Upload it again", "content_id"
            )
        return dataset

    def _progress(self, message: Evaluate, lane: Channel) -> Callable[[int], None]:
        """Report progress when it frees at least one chunk of values for sending."""
        step = max(1, self._chunk_bytes // max(1, message.frame.program_bytes))
        reported = 0

        def ready(programs: int) -> None:
            nonlocal reported
            if message.frame.values and programs - reported >= step:
                reported = programs
                lane.send(wire.Progress(programs))

        return ready


def _alone_on(lane: Channel) -> Callable[[bool], None]:
    """Return what tells a lane whether its evaluation is all that runs."""

    def tell(alone: bool) -> None:
        with suppress(ChannelClosedError):  # the lane's thread finds that out, too
            lane.send(wire.Alone(alone))

    return tell


def _received_segment(size: int, descriptors: Sequence[int]) -> Segment | None:
    """Map a lane's new segment; None if this process can open no more files."""
    if not descriptors:  # it was lost on its way
        return None
    try:
        return Segment(0, descriptors[0], size)
    except OSError as error:
        os.close(descriptors[0])
        if shortage(error) is None:
            raise
        return None


def _dataset(message: wire.Load, descriptors: Sequence[int]) -> Dataset:
    """Map a data set."""
    if not descriptors:  # it was lost on its way
        raise too_many_files()
    segment = Segment(message.segment, descriptors[0], message.size)
    layout = message.layout
    matrix = segment.array(layout.dtype, (layout.columns, layout.rows))
    segment.close()  # the matrix keeps the mapping
    return Dataset.resident(layout, matrix, message.content_id)


def _nobody_waits(programs: int) -> None:
    """Take notice that values are final, of which there are none."""


def _fit_progress(message: Optimize, lane: Channel) -> Callable[[FitProgress], None] | None:
    """Report progress a few times a second, if it is asked for."""
    if not message.settings.progress:
        return None
    reported = time.monotonic()

    def report(progress: FitProgress) -> None:
        nonlocal reported
        if time.monotonic() - reported >= _PROGRESS_SECONDS:
            reported = time.monotonic()
            lane.send(wire.FitProgressed(progress))

    return report


def _evaluation(message: Evaluate, segment: Segment) -> Evaluation:
    wishes: Any = dict.fromkeys(message.wishes, True)
    custom, closing = None, message.closing
    if closing is not None:
        custom = message.frame.custom_loss(segment, closing)
    return Evaluation(
        message.dataset_id,
        message.frame.batch(segment),
        message.rows,
        message.precision,
        message.loss,
        message.frame.values,
        message.tier,
        custom_loss=custom,
        **wishes,
    )


def main(arguments: Sequence[str]) -> None:
    """Run an engine: ``process.py DESCRIPTOR CONFIG``; the supervisor starts it like this."""
    descriptor, text = arguments
    config = Config.from_json(text)
    configure_logging(config.log_level, config.log_format)
    take_short_turns()
    channel = Channel(socket.socket(fileno=int(descriptor)))
    try:
        engine = create_engine(
            config.engine,
            threads=config.threads,
            device=config.device,
            cache_directory=config.cache_path,
        )
        EngineProcess(
            engine, channel, config.chunk_bytes, config.cache_path, config.stuck_seconds
        ).run()
    except ChannelClosedError:
        _LOG.info("the front door is gone")
    except WarpfitError as error:
        _LOG.error("the engine cannot run: %s", error)
        os._exit(EXIT_CANNOT_RUN)
    logging.shutdown()
    os._exit(0)  # a running evaluation must not hold the process


if __name__ == "__main__":
    main(sys.argv[1:])
