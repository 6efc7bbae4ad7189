"""A front end's connection to the engine: requests go out with a number, answers come back with it.

Batches and results lie in segments of shared memory, which the engine maps when a request first
names them. Calls that wait read the answers; see `warpfit_server.answers`.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.errors import CancelledError, UnavailableError, WarpfitError
from warpfit.fitting import FitRequest, FitSettings
from warpfit.request import Evaluation, Timings
from warpfit_server import messages
from warpfit_server.answers import Answers
from warpfit_server.channel import Channel, ChannelClosedError
from warpfit_server.frame import Frame
from warpfit_server.logs import current_id
from warpfit_server.messages import REQUESTED, Evaluate, Event, Optimize, Order
from warpfit_server.segments import Segment, SegmentPool

#: Seconds after which a front end that cannot send takes the engine for lost.
_SEND_SECONDS: Final = 5.0
#: What `Run` finds among its events when the call has ended, and when the engine is gone.
_ENDED, _LOST = object(), object()


class EngineConnection:
    """The way to the engine; `open` it whenever an engine starts, `shut` it when one is gone.

    Args:
        pool: where segments come from.
        on_loss: called by another thread when the engine has closed the connection, which it also
            does, without ending, to a front end that does not read.

    """

    def __init__(self, pool: SegmentPool, on_loss: Callable[[], None] = lambda: None) -> None:
        self.pool = pool
        self._on_loss = on_loss
        self._channel: Channel | None = None
        self._answers: Answers | None = None
        """Those that come over the channel."""
        self._runs: dict[int, Run] = {}
        self._known: set[int] = set()
        """Identifiers of the segments that the engine has mapped."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def open(self, end: socket.socket) -> None:
        """Use this socket from now on."""
        self.shut()
        channel = Channel(end)
        channel.give_up_after(_SEND_SECONDS)
        answers = Answers(channel, self._deliver)
        with self._lock:
            self._channel, self._answers = channel, answers
            self._known = set()
        threading.Thread(
            target=self._watch, args=(channel, answers), name="engine", daemon=True
        ).start()

    def shut(self) -> None:
        """Fail the requests in flight, and refuse others until the next `open`."""
        with self._lock:
            channel, self._channel = self._channel, None
            lost, self._runs = self._runs, {}
        if channel is not None:
            channel.shut()
        for run in lost.values():
            run.notice(_LOST)

    @property
    def is_open(self) -> bool:
        """Whether there is an engine, for all that is known."""
        return self._channel is not None

    def start(self, evaluation: Evaluation, layout: Layout, tenant: str = "") -> Run:
        """Hand a checked evaluation to the engine; the caller must `Run.close` in the end.

        The caller holds a lease on the data set.

        Args:
            evaluation: what to evaluate.
            layout: layout of its data set.
            tenant: whose call it is.

        Raises:
            UnavailableError: if there is no engine.
            ResourceExhaustedError: if there is no memory for batch and answer.

        """
        return self._start(_Request(Frame.of(evaluation, layout), evaluation, layout, tenant))

    def start_fit(
        self, request: FitRequest, layout: Layout, deadline: float | None, tenant: str = ""
    ) -> Run:
        """Hand a checked fit to the engine, as `start` does.

        Args:
            request: the fit.
            layout: layout of its data set.
            deadline: ``time.monotonic()`` at which the engine stops with what there is, or None.
            tenant: whose call it is.

        """
        settings = request.settings
        arrays = {name: getattr(settings, name) for name in ("lower", "upper", "fixed")}
        scalars = replace(settings, lower=None, upper=None, fixed=None)
        given = {name: array for name, array in arrays.items() if array is not None}
        frame = Frame.of_fit(request, layout)
        return self._start(
            _Request(frame, request.problem, layout, tenant, given, (scalars, deadline))
        )

    def finished(self, run: Run) -> None:
        """Take a segment back that the engine does not use any more; for `Run`."""
        if self.pool.release(run.segment):
            return
        with self._lock:
            channel, is_known = self._channel, run.segment.identifier in self._known
            self._known.discard(run.segment.identifier)
        if channel is not None and is_known:
            with suppress(ChannelClosedError):  # then it is not mapped any more, either
                channel.send(messages.Unmap(run.segment.identifier))

    def _start(self, request: _Request) -> Run:
        segment = self.pool.acquire(request.frame.nbytes, request.tenant)
        run = Run(self, next(self._numbers), segment, request.frame)
        try:
            request.write(segment)
            self._send(run, request)
        except ChannelClosedError as error:
            self.shut()
            segment.close()
            raise unavailable() from error
        except BaseException:  # nothing was sent
            self._forget(run)
            self.pool.release(segment)
            raise
        return run

    def _send(self, run: Run, request: _Request) -> None:
        identifier = run.segment.identifier
        with self._lock:
            channel, run.answers = self._channel, self._answers
            if channel is None:
                raise unavailable()
            descriptors = [] if identifier in self._known else [run.segment.descriptor]
            self._known.add(identifier)
            self._runs[run.number] = run
        channel.send(request.order(run.number, run.segment), descriptors)

    def _forget(self, run: Run) -> None:
        with self._lock:
            if self._runs.pop(run.number, None) is not None:
                self._known.discard(run.segment.identifier)  # it is sent again, which does no harm

    def _deliver(self, event: messages.Message) -> None:
        """Hand an answer to the call that waits for it."""
        assert isinstance(event, Event)  # an engine sends nothing else
        run = self._runs.get(event.request)
        if isinstance(event, messages.Finished):
            self._runs.pop(event.request, None)
        if run is not None:
            run.events.put(event)

    def _watch(self, channel: Channel, answers: Answers) -> None:
        """Fail the calls once the engine is gone."""
        answers.watch()
        with self._lock:
            is_current = channel is self._channel
        if is_current:
            self.shut()
            self._on_loss()


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """What to send once a segment is there."""

    frame: Frame
    evaluation: Evaluation
    layout: Layout
    tenant: str
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Of a fit, by name."""
    fit: tuple[FitSettings, float | None] | None = None
    """Settings of a fit, without arrays, and when it must stop."""
    submitted: int = field(default_factory=time.monotonic_ns)

    def write(self, segment: Segment) -> None:
        """Copy the batch and the arrays of a fit into the segment."""
        self.frame.write(segment, self.evaluation.batch)
        for name, array in self.arrays.items():
            np.copyto(self.frame.require(name, segment), array)

    def order(self, number: int, segment: Segment) -> Order:
        """Make the message."""
        asked = self.evaluation
        problem = Evaluate(
            request=number,
            segment=segment.identifier,
            size=segment.size,
            frame=self.frame,
            dataset_id=asked.dataset_id,
            rows=asked.row_range(self.layout),
            precision=asked.precision,
            loss=asked.loss,
            tier=asked.tier,
            submitted=self.submitted,
            custom_loss=asked.custom_loss,
            requested=tuple([name for name in REQUESTED if getattr(asked, name)]),
            tenant=self.tenant,
            request_id=current_id(),
        )
        return problem if self.fit is None else Optimize(problem, *self.fit)


class Run:
    """One request in the engine. Used by one thread; `cancel` may come from any other."""

    def __init__(
        self, connection: EngineConnection, number: int, segment: Segment, frame: Frame
    ) -> None:
        self.number = number
        self.segment = segment
        self.frame = frame
        self.events: SimpleQueue[Any] = SimpleQueue()
        """Where `EngineConnection` puts what the engine sends."""
        self.answers: Answers | None = None
        """Of the engine that has the request."""
        self.timings: Timings | None = None
        """Of the engine, once it has finished without an error."""
        self._connection = connection
        self._is_over = self._is_lost = False
        self._flag: NDArray[np.uint8] | None = frame.flag(segment)
        self._lock = threading.Lock()

    @property
    def losses(self) -> NDArray[np.float64] | None:
        """View of the losses, [programs, K], final once `next_event` has returned Finished."""
        return self.frame.losses_view(self.segment)

    def next_event(self) -> Event:
        """Wait for the engine.

        Raises:
            WarpfitError: if the request failed.
            CancelledError: if it was cancelled; the engine may still be at work.

        """
        assert self.answers is not None  # it has been sent
        event = self.answers.next_event(self.events)
        if event is _ENDED:
            raise CancelledError("the call has ended", "CANCELLED")
        if event is _LOST:
            self._is_over = self._is_lost = True
            raise unavailable()
        if isinstance(event, messages.Finished):
            self._is_over = True
            if event.error is not None:
                raise event.error
            self.timings = event.timings
        received: Event = event
        return received

    def cancel(self) -> None:
        """Stop the work, because nobody waits for its answer any more."""
        with self._lock:
            if self._flag is not None:
                self._flag[0] = 1
                self.notice(_ENDED)

    def notice(self, event: object) -> None:
        """Let the call know of something that the engine does not tell."""
        self.events.put(event)
        if self.answers is not None:
            self.answers.wake(self.events)

    def close(self) -> None:
        """Wait until the engine is done, then give the segment back."""
        if not self._is_over:
            self.cancel()
        while not self._is_over:
            with suppress(WarpfitError):
                self.next_event()
        with self._lock:
            self._flag = None  # the segment may soon be another call's
        if self._is_lost:
            self.segment.close()  # an engine that is being killed may still write to it
        else:
            self._connection.finished(self)


def unavailable() -> UnavailableError:
    """Explain that no engine is ready."""
    return UnavailableError(
        "the engine is restarting", "ENGINE_RESTARTING", "Repeat the call after a short wait"
    )
