"""A front end's connection to the engine: numbered requests go out, their replies come back.

Batches and results lie in segments of shared memory, which the engine maps when a request first
names them. The threads that wait read the replies; see `warpfit_server.ipc.reply_dispatcher`.

While the connection is lost, requests are refused. Requests that the engine had begun when it was
lost are reported, see `warpfit_server.ipc.quarantine`.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.errors import CancelledError, UnavailableError, WarpfitError
from warpfit.fitting import FitRequest, FitSettings
from warpfit.request import Evaluation, Timings
from warpfit_server.ipc import messages
from warpfit_server.ipc.channel import Channel, ChannelClosedError
from warpfit_server.ipc.quarantine import ClearedSuspect, InterruptedBatch, KnownSuspects, digest
from warpfit_server.ipc.reply_dispatcher import ReplyDispatcher
from warpfit_server.ipc.segment_layout import ALONE, FIT_SETTING_ARRAYS, QUEUED, SegmentLayout
from warpfit_server.ipc.segments import Segment, SegmentPool
from warpfit_server.observability.logs import logged_request_id
from warpfit_server.system.shortages import TOO_MANY_FILES, shortage
from warpfit_server.tenancy.tenants import PROBE

#: Seconds after which a front end that cannot send takes the engine for lost.
_SEND_SECONDS: Final = 5.0
#: A connection that lived for less is renewed after as many seconds, so that nothing spins.
_SHORTEST_SECONDS: Final = 0.1
#: What is put into a request's queue when its call has ended, and when the engine is gone.
_ENDED, _LOST = object(), object()


class EngineConnection:
    """The way to the engine; `open` it whenever an engine starts, `shut` it when one is gone.

    Args:
        pool: where segments come from.
        suspects: what may have crashed an engine.

    """

    def __init__(self, pool: SegmentPool, suspects: KnownSuspects | None = None) -> None:
        self.pool = pool
        self.on_loss: Callable[[], None] = lambda: None
        """Called by any thread when the connection is lost, which also happens while the engine
        lives, and whenever `renew` finds that there is none."""
        self.report: Callable[[InterruptedBatch | ClearedSuspect], None] = lambda outcome: None
        """Called with what became of requests that were lost, and of suspects."""
        self._suspects = suspects or KnownSuspects()
        self._channel: Channel | None = None
        self._replies: ReplyDispatcher | None = None
        self._engine = 0
        self._in_flight: dict[int, InFlightRequest] = {}
        self._mapped: set[int] = set()
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
            replies = ReplyDispatcher(channel, self._deliver)
        except OSError as error:
            channel.close()
            raise shortage(error) or error from error
        with self._lock:
            is_late = engine < self._engine
            if not is_late:
                old = self._detach()
                self._channel, self._replies = channel, replies
                self._engine, self._mapped = engine, set()
        if is_late:
            replies.close()
            return
        self._fail(*old)
        threading.Thread(
            target=self._watch, args=(channel, replies), name="engine", daemon=True
        ).start()

    def shut(self) -> None:
        """Fail the requests in flight, and refuse others until the next `open`."""
        with self._lock:
            old = self._detach()
        self._fail(*old)

    def renew(self) -> None:
        """Ask for a new connection if there is none."""
        if self._channel is None:
            self.on_loss()

    def start(self, evaluation: Evaluation, layout: Layout, tenant: str = "") -> InFlightRequest:
        """Send a checked evaluation; the caller must `InFlightRequest.close` it in the end.

        The caller holds a lease on the data set. A probe, of the tenant `PROBE`, is never suspect.

        Args:
            evaluation: what to evaluate.
            layout: layout of its data set.
            tenant: whose call it is.

        Raises:
            UnavailableError: if there is no engine.
            FailedPreconditionError: if engines have died of it.
            ResourceExhaustedError: if there is no memory for batch and results.

        """
        segment_layout = SegmentLayout.of(evaluation, layout)
        rows = evaluation.row_range(layout)
        return self._start(InFlightRequest(self, segment_layout, evaluation, rows, tenant))

    def start_fit(
        self, request: FitRequest, layout: Layout, deadline: float | None, tenant: str = ""
    ) -> InFlightRequest:
        """Send a checked fit, as `start` does.

        Args:
            request: the fit.
            layout: layout of its data set.
            deadline: ``time.monotonic()`` at which the engine stops with what there is, or None.
            tenant: whose call it is.

        """
        settings = request.settings
        arrays = {name: getattr(settings, name) for name in FIT_SETTING_ARRAYS}
        return self._start(
            InFlightRequest(
                self,
                SegmentLayout.of_fit(request, layout),
                request.problem,
                request.problem.row_range(layout),
                tenant,
                {name: array for name, array in arrays.items() if array is not None},
                replace(settings, lower=None, upper=None, fixed=None),
                deadline,
            )
        )

    def _start(self, request: InFlightRequest) -> InFlightRequest:
        if request.tenant != PROBE:
            dataset = request.evaluation.dataset_id
            request.alone = self._suspects.check(dataset, request.digest)
        segment = self.pool.acquire(request.segment_layout.nbytes, request.tenant)
        try:
            request.write(segment)
            self._send(request)
        except BaseException:  # nothing was sent
            with self._lock:
                self._in_flight.pop(request.number, None)
                self._mapped.discard(segment.identifier)  # sending it again does no harm
            self.pool.release(segment)
            raise
        return request

    def _send(self, request: InFlightRequest) -> None:
        identifier = request.segment.identifier
        with self._lock:
            channel, request.replies = self._channel, self._replies
            if channel is None:
                raise unavailable()
            request.number, request.engine = next(self._numbers), self._engine
            descriptors = [] if identifier in self._mapped else [request.segment.descriptor]
            self._mapped.add(identifier)
            self._in_flight[request.number] = request
        with suppress(ChannelClosedError):  # the reader finds this request lost like all others
            channel.send(request.message(), descriptors)

    def _deliver(self, reply: messages.Message) -> None:
        """Hand a reply to the request that it is for."""
        assert isinstance(reply, messages.Reply)  # an engine sends nothing else
        request = self._in_flight.get(reply.request)
        if isinstance(reply, messages.RequestFinished):
            self._in_flight.pop(reply.request, None)
        if request is not None:
            request.queue.put(reply)

    def _watch(self, channel: Channel, replies: ReplyDispatcher) -> None:
        """Fail the requests in flight once the engine is gone."""
        began = time.monotonic()
        replies.watch()
        with self._lock:
            is_lost = channel is self._channel
            lost = self._detach()[1] if is_lost else {}
        self._fail(None, lost)
        if is_lost:
            has_lived = time.monotonic() - began > _SHORTEST_SECONDS
            time.sleep(0.0 if has_lived else _SHORTEST_SECONDS)
            self.on_loss()

    def _detach(self) -> tuple[Channel | None, dict[int, InFlightRequest]]:
        """Take the connection away, and what is in flight on it; under the lock."""
        channel, self._channel = self._channel, None
        lost, self._in_flight = self._in_flight, {}
        return channel, lost

    @staticmethod
    def _fail(channel: Channel | None, lost: Mapping[int, InFlightRequest]) -> None:
        if channel is not None:
            channel.shut()  # `_watch` closes it
        for request in lost.values():
            request.notice(_LOST)

    def release(self, segment: Segment) -> None:
        """Take a segment back that the engine does not use any more; for `InFlightRequest`."""
        if self.pool.release(segment):
            return
        with self._lock:
            channel = self._channel
            self._mapped.discard(segment.identifier)
        if channel is not None:
            with suppress(ChannelClosedError, WarpfitError):  # it is unmapped with the connection
                channel.send(messages.UnmapSegment(segment.identifier))

    def was_not_mapped(self, segment: Segment) -> None:
        """Send a segment's descriptor again next time; for `InFlightRequest`."""
        with self._lock:
            self._mapped.discard(segment.identifier)


class InFlightRequest:
    """A request in the engine. Used by one thread; `cancel` may come from any other.

    Args:
        connection: that it is sent over.
        segment_layout: of its arrays.
        evaluation: what to evaluate or to fit.
        rows: half-open row range.
        tenant: whose call it is.
        arrays: arrays of a fit's settings by name.
        fit_settings: settings of a fit without arrays; None for an evaluation.
        deadline: when a fit must stop.

    """

    segment: Segment
    replies: ReplyDispatcher | None = None
    """Of the connection that it was sent over."""
    number = -1
    engine = 0
    """Number of the engine that it was sent to."""
    alone = 0.0
    """Seconds for which nothing may run beside it, if it is a suspect."""
    timings: Timings | None = None
    """Of the engine, once it has finished without an error."""

    def __init__(
        self,
        connection: EngineConnection,
        segment_layout: SegmentLayout,
        evaluation: Evaluation,
        rows: tuple[int, int],
        tenant: str,
        arrays: Mapping[str, NDArray[Any]] = MappingProxyType({}),
        fit_settings: FitSettings | None = None,
        deadline: float | None = None,
    ) -> None:
        self.segment_layout = segment_layout
        self.evaluation = evaluation
        self.tenant = tenant
        self.queue: SimpleQueue[Any] = SimpleQueue()
        """Where `EngineConnection` puts the engine's replies."""
        self._connection = connection
        self._rows = rows
        self._arrays = arrays
        self._fit_settings = fit_settings
        self._deadline = deadline
        self._submitted = time.monotonic_ns()
        self._is_over = self._is_lost = self._is_cancelled = False
        self._flag: NDArray[np.uint8] | None = None
        self._lock = threading.Lock()

    def digest(self) -> bytes:
        """Return a hash of all that is requested."""
        return digest(self.evaluation, self._arrays, self._fit_settings)

    def write(self, segment: Segment) -> None:
        """Copy all inputs into a segment, which is the request's from now on."""
        self.segment = segment
        self.segment_layout.write(segment, self.evaluation, self._arrays)
        self._flag = self.segment_layout.cancelled(segment)

    def message(self) -> messages.Submission:
        """Make the message that submits the request."""
        evaluation, custom = self.evaluation, self.evaluation.custom_loss
        problem = messages.SubmitEvaluation(
            request=self.number,
            segment=self.segment.identifier,
            size=self.segment.size,
            segment_layout=self.segment_layout,
            dataset_id=evaluation.dataset_id,
            rows=self._rows,
            precision=evaluation.precision.name,
            loss=None if evaluation.loss is None else evaluation.loss.name,
            tier=evaluation.tier.name,
            submitted=self._submitted,
            closing=None if custom is None else custom.closing.name,
            outputs=tuple([name for name in messages.OUTPUTS if getattr(evaluation, name)]),
            tenant=self.tenant,
            request_id=logged_request_id(),
            alone=self.alone,
        )
        if self._fit_settings is None:
            return problem
        return messages.SubmitFit(problem, self._fit_settings, self._deadline)

    def array(self, name: str) -> NDArray[Any] | None:
        """View of a result, final once `next_reply` has returned RequestFinished, or None."""
        return self.segment_layout.array(name, self.segment)

    def next_reply(self) -> messages.Reply:
        """Wait for the engine.

        Raises:
            WarpfitError: if the request failed.
            CancelledError: if it was cancelled; the engine may still be at work.

        """
        assert self.replies is not None  # it has been sent
        reply = self.replies.next_reply(self.queue)
        if reply is _ENDED:
            raise CancelledError("the call has ended", "CANCELLED")
        if reply is _LOST:
            self._is_over = self._is_lost = True
            self._report_loss()
            raise unavailable()
        if isinstance(reply, messages.RequestFinished):
            self._finish(reply)
        received: messages.Reply = reply
        return received

    def _finish(self, reply: messages.RequestFinished) -> None:
        self._is_over = True
        if self.alone and not self._is_cancelled:
            dataset = self.evaluation.dataset_id
            self._connection.report(ClearedSuspect(dataset, self.digest()))
        if reply.error is not None:
            if reply.error.reason == TOO_MANY_FILES:
                self._connection.was_not_mapped(self.segment)
            raise reply.error
        self.timings = reply.timings

    def cancel(self) -> None:
        """Stop the work, because nobody waits for its result any more."""
        with self._lock:
            if self._flag is not None:
                self._flag[0] = 1
                self._is_cancelled = True
                self.notice(_ENDED)

    def notice(self, entry: object) -> None:
        """Put something into the queue that the engine has not sent."""
        self.queue.put(entry)
        if self.replies is not None:
            self.replies.wake(self.queue)

    def close(self) -> None:
        """Wait until the engine is done, then give the segment back."""
        if not self._is_over:
            self.cancel()
        while not self._is_over:
            with suppress(WarpfitError):
                self.next_reply()
        with self._lock:
            self._flag = None  # the segment may soon be another call's
        if self._is_lost:
            self.segment.close()  # an engine that is being killed may still write to it
        else:
            self._connection.release(self.segment)

    def _report_loss(self) -> None:
        """Report the request if the engine had begun it when it was lost."""
        state = int(self.segment_layout.state(self.segment)[0])
        if state != QUEUED and self.tenant != PROBE:
            batch, dataset = self.digest(), self.evaluation.dataset_id
            self._connection.report(InterruptedBatch(self.engine, dataset, batch, state == ALONE))


def unavailable() -> UnavailableError:
    """Return the error for calls that come while no engine is ready."""
    return UnavailableError(
        "the engine is restarting", "ENGINE_RESTARTING", "Repeat the call after a short wait"
    )
