"""A front end's connection to the engine: requests go out with a number, answers come back with it.

Batches and results lie in segments of shared memory, which the engine maps when a request first
names them. Calls that wait read the answers; see `warpfit_server.ipc.answers`.

If the connection is lost, calls are refused until there is a new one: the engine may be gone. What
it had begun is then reported, see `warpfit_server.ipc.quarantine`.
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
from warpfit_server.ipc import messages
from warpfit_server.ipc.answers import Answers
from warpfit_server.ipc.channel import Channel, ChannelClosedError
from warpfit_server.ipc.messages import REQUESTED, Evaluate, Event, Optimize, Order
from warpfit_server.ipc.quarantine import Casualty, Survivor, Suspects, digest
from warpfit_server.ipc.segment_layout import ALONE, QUEUED, Frame
from warpfit_server.ipc.segments import Segment, SegmentPool
from warpfit_server.observability.logs import current_id
from warpfit_server.system.shortages import TOO_MANY_FILES, shortage
from warpfit_server.tenancy.tenants import PROBE

#: Seconds after which a front end that cannot send takes the engine for lost.
_SEND_SECONDS: Final = 5.0
#: A connection that was lost sooner is renewed after as many seconds, so that nothing spins.
_SHORTEST: Final = 0.1
#: What `Run` finds among its events when the call has ended, and when the engine is gone.
_ENDED, _LOST = object(), object()


class EngineConnection:
    """The way to the engine; `open` it whenever an engine starts, `shut` it when one is gone.

    Args:
        pool: where segments come from.
        suspects: what may have crashed an engine.

    """

    def __init__(self, pool: SegmentPool, suspects: Suspects | None = None) -> None:
        self.pool = pool
        self.on_loss: Callable[[], None] = lambda: None
        """Called by any thread when the connection is lost, which also happens while the engine
        lives, and whenever `renew` finds that there is none."""
        self.report: Callable[[Casualty | Survivor], None] = lambda outcome: None
        """Told what became of requests that were lost, and of suspects."""
        self._suspects = suspects or Suspects()
        self._channel: Channel | None = None
        self._answers: Answers | None = None
        """Those that come over the channel."""
        self._engine = 0
        self._runs: dict[int, Run] = {}
        self._known: set[int] = set()
        """Identifiers of the segments that the engine has mapped."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def open(self, end: socket.socket, engine: int = 0) -> None:
        """Use this socket from now on.

        Args:
            end: of the connection.
            engine: number of the engine at the other end; a connection to an earlier one than the
                last is closed.

        Raises:
            ResourceExhaustedError: if this process can open no more files; the socket is closed.

        """
        channel = Channel(end)
        channel.give_up_after(_SEND_SECONDS)
        try:
            answers = Answers(channel, self._deliver)
        except OSError as error:
            channel.close()
            raise shortage(error) or error from error
        with self._lock:
            is_late = engine < self._engine
            if not is_late:
                old = self._cut()
                self._channel, self._answers = channel, answers
                self._engine, self._known = engine, set()
        if is_late:
            answers.close()
            return
        self._lose(*old)
        threading.Thread(
            target=self._watch, args=(channel, answers), name="engine", daemon=True
        ).start()

    def shut(self) -> None:
        """Fail the requests in flight, and refuse others until the next `open`."""
        with self._lock:
            found = self._cut()
        self._lose(*found)

    def renew(self) -> None:
        """Ask for a new connection if there is none."""
        if self._channel is None:
            self.on_loss()

    def start(self, evaluation: Evaluation, layout: Layout, tenant: str = "") -> Run:
        """Hand a checked evaluation to the engine; the caller must `Run.close` in the end.

        The caller holds a lease on the data set. A probe, of the tenant `PROBE`, is never suspect.

        Args:
            evaluation: what to evaluate.
            layout: layout of its data set.
            tenant: whose call it is.

        Raises:
            UnavailableError: if there is no engine.
            FailedPreconditionError: if engines have died of it.
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
            channel = self._channel
            self._known.discard(run.segment.identifier)
        if channel is not None:
            with suppress(ChannelClosedError, WarpfitError):  # it is unmapped with the connection
                channel.send(messages.Unmap(run.segment.identifier))

    def unmapped(self, run: Run) -> None:
        """Send a segment's descriptor again, as the engine could not take it; for `Run`."""
        with self._lock:
            self._known.discard(run.segment.identifier)

    def _start(self, request: _Request) -> Run:
        alone = 0.0
        if request.tenant != PROBE:
            alone = self._suspects.check(request.evaluation.dataset_id, request.digest)
        segment = self.pool.acquire(request.frame.nbytes, request.tenant)
        run = Run(self, next(self._numbers), segment, request, is_suspect=alone > 0)
        try:
            request.write(segment)
            self._send(run, request, alone)
        except BaseException:  # nothing was sent
            self._forget(run)
            self.pool.release(segment)
            raise
        return run

    def _send(self, run: Run, request: _Request, alone: float) -> None:
        identifier = run.segment.identifier
        with self._lock:
            channel, run.answers = self._channel, self._answers
            if channel is None:
                raise unavailable()
            run.engine = self._engine
            descriptors = [] if identifier in self._known else [run.segment.descriptor]
            self._known.add(identifier)
            self._runs[run.number] = run
        with suppress(ChannelClosedError):  # the run is lost like all others, as its reader finds
            channel.send(request.order(run.number, run.segment, alone), descriptors)

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
        began = time.monotonic()
        answers.watch()
        with self._lock:
            is_lost = channel is self._channel
            lost = self._cut()[1] if is_lost else {}
        self._lose(None, lost)
        if is_lost:
            time.sleep(0.0 if time.monotonic() - began > _SHORTEST else _SHORTEST)
            self.on_loss()

    def _cut(self) -> tuple[Channel | None, dict[int, Run]]:
        """Take the connection away, and what is in flight on it; under the lock."""
        channel, self._channel = self._channel, None
        lost, self._runs = self._runs, {}
        return channel, lost

    @staticmethod
    def _lose(channel: Channel | None, lost: Mapping[int, Run]) -> None:
        if channel is not None:
            channel.shut()  # its answers close it
        for run in lost.values():
            run.notice(_LOST)


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

    def digest(self) -> bytes:
        """Return a name of all that is asked for."""
        return digest(self.evaluation, self.arrays, self.fit and self.fit[0])

    def write(self, segment: Segment) -> None:
        """Copy the batch and the arrays of a fit into the segment."""
        self.frame.write(segment, self.evaluation)
        for name, array in self.arrays.items():
            np.copyto(self.frame.require(name, segment), array)

    def order(self, number: int, segment: Segment, alone: float) -> Order:
        """Make the message; ``alone`` are the seconds for which nothing may run beside it."""
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
            closing=None if asked.custom_loss is None else asked.custom_loss.closing,
            requested=tuple([name for name in REQUESTED if getattr(asked, name)]),
            tenant=self.tenant,
            request_id=current_id(),
            alone=alone,
        )
        return problem if self.fit is None else Optimize(problem, *self.fit)


class Run:
    """One request in the engine. Used by one thread; `cancel` may come from any other."""

    def __init__(
        self,
        connection: EngineConnection,
        number: int,
        segment: Segment,
        request: _Request,
        *,
        is_suspect: bool,
    ) -> None:
        self.number = number
        self.segment = segment
        self.frame = frame = request.frame
        self.engine = 0
        """Number of the engine that it was sent to."""
        self._request = request
        self._is_suspect = is_suspect
        self.events: SimpleQueue[Any] = SimpleQueue()
        """Where `EngineConnection` puts what the engine sends."""
        self.answers: Answers | None = None
        """Of the engine that has the request."""
        self.timings: Timings | None = None
        """Of the engine, once it has finished without an error."""
        self._connection = connection
        self._is_over = self._is_lost = self._is_cancelled = False
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
            self._report_loss()
            raise unavailable()
        if isinstance(event, messages.Finished):
            self._is_over = True
            if self._is_suspect and not self._is_cancelled:
                dataset = self._request.evaluation.dataset_id
                self._connection.report(Survivor(dataset, self._request.digest()))
            if event.error is not None:
                if event.error.reason == TOO_MANY_FILES:
                    self._connection.unmapped(self)
                raise event.error
            self.timings = event.timings
        received: Event = event
        return received

    def cancel(self) -> None:
        """Stop the work, because nobody waits for its answer any more."""
        with self._lock:
            if self._flag is not None:
                self._flag[0] = 1
                self._is_cancelled = True
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

    def _report_loss(self) -> None:
        """Tell what the engine had begun when it was lost."""
        state = int(self.frame.state(self.segment)[0])
        if state != QUEUED and self._request.tenant != PROBE:
            batch, dataset = self._request.digest(), self._request.evaluation.dataset_id
            self._connection.report(Casualty(self.engine, dataset, batch, state == ALONE))


def unavailable() -> UnavailableError:
    """Explain that no engine is ready."""
    return UnavailableError(
        "the engine is restarting", "ENGINE_RESTARTING", "Repeat the call after a short wait"
    )
