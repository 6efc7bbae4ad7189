"""A front end's connection to an engine: numbered requests go out, their replies come back.

Any thread sends a request, and waits for its replies by reading from the connection itself. A
thread that waits hands the replies of other requests to their threads, so that a lone call does not
wait for a second thread to wake up (the leader/follower pattern). One thread leads at a time, which
means that it reads; when it has its own reply it passes the lead on to another one that waits.

Batches and results lie in segments of shared memory, which the engine maps when a request first
names them. While the connection is lost, requests are refused. Requests that the engine had begun
when it was lost are reported, see `warpfit_server.ipc.quarantine`.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Final

from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.errors import CancelledError, UnavailableError, WarpfitError
from warpfit.ir import Batch, Program
from warpfit.request import (
    FURTHER_OUTPUTS,
    Evaluation,
    FitProgress,
    FitRequest,
    FitSettings,
    Tier,
    Timings,
)
from warpfit.searching import SearchRequest
from warpfit_server.ipc import messages
from warpfit_server.ipc.messages import Channel, ChannelClosedError, Message
from warpfit_server.ipc.quarantine import BatchOutcome, digest
from warpfit_server.ipc.segments import (
    FIT_SETTING_ARRAYS,
    QUEUED,
    Segment,
    SegmentLayout,
    SegmentPool,
)
from warpfit_server.logs import LOGGED_REQUEST_ID
from warpfit_server.machine import TOO_MANY_FILES, shortage
from warpfit_server.tenants import PROBE

# ------------------------------------------------------------------------------------------ replies

#: Seconds that a lone leader polls before it sleeps, longer than most steps: an idle core of a
#: virtual machine takes some 50 to 100 microseconds to wake up.
_POLL_SECONDS: Final = 0.003
#: What a thread finds in its queue when it becomes the leader.
_LEAD: Final = object()


class ReplyDispatcher:
    """Reads the replies that come over a channel.

    ``deliver`` puts a message into the queue of the request that it is for; `watch` closes the
    channel. ``may_poll`` tells whether a core may be spent on waiting.
    """

    def __init__(
        self,
        channel: Channel,
        deliver: Callable[[Message], None],
        may_poll: Callable[[], bool] = lambda: False,
    ) -> None:
        self._channel = channel
        self._deliver = deliver
        self._may_poll = may_poll
        self._lock = threading.Lock()
        """Guards what follows."""
        self._leader: SimpleQueue[Any] | None = None
        self._followers: dict[SimpleQueue[Any], None] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._reading = threading.Lock()
        """Held while the channel is polled or read."""
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)

    def next_reply(self, queue: SimpleQueue[Any]) -> Any:
        """Wait for the next entry of a request's queue; lead if no other thread does."""
        with self._lock:
            if self._leader is None:
                self._leader = queue
            else:
                self._followers[queue] = None
        try:
            while True:
                if self._leader is queue:
                    with self._reading:
                        end = time.perf_counter() + _POLL_SECONDS if self._may_poll() else 0.0
                        while queue.empty() and not self._is_closed:
                            keeps_polling = not self._followers and time.perf_counter() < end
                            if not self._read(0 if keeps_polling else None):
                                break
                reply = queue.get()
                if reply is not _LEAD:
                    return reply
        finally:
            with self._lock:
                self._followers.pop(queue, None)
                if self._leader is queue:  # the lead is passed on
                    self._leader = next(iter(self._followers), None)
                    if self._leader is not None:
                        del self._followers[self._leader]
                        self._leader.put(_LEAD)

    def wake(self, queue: SimpleQueue[Any]) -> None:
        """Let a thread notice an entry that did not come over the channel."""
        with self._lock:
            if self._leader is queue and not self._is_closed:
                os.eventfd_write(self._wake, 1)

    def receive_now(self) -> None:
        """Deliver what has arrived, unless another thread does; any thread may call this."""
        if self._reading.acquire(blocking=False):
            try:
                if not self._is_closed:
                    self._read(0)
            finally:
                self._reading.release()

    def watch(self) -> None:
        """Wait until the engine is gone, deliver its last replies, and close the channel."""
        hang_up = select.poll()
        hang_up.register(self._channel.fileno(), 0)  # poll always reports hang-ups
        hang_up.poll()
        with self._reading:
            try:
                while True:
                    self._deliver(self._channel.receive()[0])
            except ChannelClosedError:
                pass
            finally:
                self.close()

    def close(self) -> None:
        """Close the channel while no thread reads from it."""
        with self._lock:
            self._is_closed = True
            os.close(self._wake)
        self._channel.close()

    def _read(self, timeout: int | None) -> bool:
        """Deliver what arrives within a timeout; return whether there may be more."""
        for descriptor, _ in self._poll.poll(timeout):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
                continue
            try:
                for message, _ in self._channel.receive_waiting():
                    self._deliver(message)
            except ChannelClosedError:  # `watch` has all requests fail
                return False
        return True


# ---------------------------------------------------------------------------------------- a request

_LOG: Final = logging.getLogger("warpfit.requests")
#: Outputs that a boolean of an evaluation asks for.
_SWITCHES: Final = ("values", *FURTHER_OUTPUTS)
#: What is put into a request's queue when its call has ended, and when the engine is gone.
_ENDED: Final = object()
LOST: Final = object()


class InFlightRequest:
    """A request in an engine. Used by one thread; `cancel` may come from any other.

    ``arrays`` are those of a fit's settings, ``fit_settings`` the others; None for an evaluation.
    """

    segment: Segment
    connection: EngineConnection
    """The one that has sent it."""
    replies: ReplyDispatcher | None = None
    """Dispatcher of the connection that it was sent over; None before it was sent."""
    number = -1
    process = 0
    """Number of the engine process that it was sent to."""
    device = ""
    """Label of the device that it was sent to."""
    alone = 0.0
    """Seconds for which nothing may run beside it, if it is a suspect."""
    timings: Timings | None = None
    """Timings of the engine, once it has finished without an error."""
    progress: FitProgress | None = None
    """The latest of a fit, once there is any."""
    _search: SearchRequest | None = None

    def __init__(
        self,
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
        """Replies of the engine, which `EngineConnection` delivers."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when it is closed."""
        self._rows = rows
        self._arrays = arrays
        self._fit_settings = fit_settings
        self._deadline = deadline
        self._submitted = time.monotonic_ns()
        self._is_over = self._is_lost = self._is_cancelled = False
        self._has_segment = False
        """Whether the segment is this request's, and so its flags."""
        self._lock = threading.Lock()

    @classmethod
    def of_evaluation(
        cls, evaluation: Evaluation, layout: Layout, tenant: str = ""
    ) -> InFlightRequest:
        """Make a request of a checked evaluation on a data set of a layout."""
        rows = evaluation.row_range(layout)
        return cls(SegmentLayout.of(evaluation, layout), evaluation, rows, tenant)

    @classmethod
    def of_fit(
        cls, request: FitRequest, layout: Layout, deadline: float | None, tenant: str = ""
    ) -> InFlightRequest:
        """Make a request of a checked fit.

        ``deadline`` is the ``time.monotonic()`` at which the engine stops with what there is, or
        None.
        """
        settings = request.settings
        arrays = {name: getattr(settings, name) for name in FIT_SETTING_ARRAYS}
        return cls(
            SegmentLayout.of_fit(request, layout),
            request.problem,
            request.problem.row_range(layout),
            tenant,
            {name: array for name, array in arrays.items() if array is not None},
            replace(settings, lower=None, upper=None, fixed=None),
            deadline,
        )

    @classmethod
    def of_search(
        cls, request: SearchRequest, layout: Layout, deadline: float | None, tenant: str = ""
    ) -> InFlightRequest:
        """Make a request of a checked search; ``deadline`` as of a fit.

        It has no arrays. So its batch, of which the segment has the flags, stands for nothing.
        """
        batch, rows = Batch.of([Program.constant(0.0)]), request.row_range(layout)
        nothing = Evaluation(request.dataset_id, batch, rows, values=False, tier=Tier.INTERPRETER)
        made = cls(SegmentLayout.of(nothing, layout), nothing, rows, tenant, deadline=deadline)
        made._search = request
        return made

    def split(self, bounds: Sequence[int]) -> list[InFlightRequest]:
        """Return requests for parts of the programs, which use this one's segment.

        Each counts as the whole request where it may have crashed an engine.

        For the bounds see `SegmentLayout.split`.
        """
        evaluation, settings = self.evaluation, (self._arrays, self._fit_settings, self._deadline)
        parts = [
            InFlightRequest(layout, evaluation, self._rows, self.tenant, *settings)
            for layout in self.segment_layout.split(evaluation.batch, bounds)
        ]
        for part in parts:
            part.attach(self.segment)
        return parts

    def digest(self) -> bytes:
        """Return a hash of the request's inputs."""
        arrays = map(self._arrays.get, FIT_SETTING_ARRAYS)
        return digest(self.evaluation, self._fit_settings, self._search, *arrays)

    def write(self, segment: Segment) -> None:
        """Copy all inputs into a segment, which is the request's from now on."""
        self.segment_layout.write(segment, self.evaluation, self._arrays)
        self.attach(segment)

    def attach(self, segment: Segment) -> None:
        """Use a segment that has all inputs."""
        self.segment = segment
        self._has_segment = True

    def message(self) -> messages.SubmitEvaluation:
        """Make the message that submits the request."""
        evaluation, custom = self.evaluation, self.evaluation.custom_loss
        settings = self._fit_settings
        return messages.SubmitEvaluation(
            request=self.number,
            segment=self.segment.identifier,
            size=self.segment.size,
            segment_layout=self.segment_layout,
            dataset_id=evaluation.dataset_id,
            rows=self._rows,
            precision=evaluation.precision._name_,
            loss=None if evaluation.loss is None else evaluation.loss._name_,
            tier=evaluation.tier._name_,
            submitted=self._submitted,
            closing=None if custom is None else custom.closing.name,
            outputs=tuple([name for name in _SWITCHES if getattr(evaluation, name)]),
            tenant=self.tenant,
            request_id=LOGGED_REQUEST_ID.get(),
            alone=self.alone,
            fit=None if settings is None else (settings, self._deadline),
            search=None if self._search is None else (self._search, self._deadline),
        )

    def array(self, name: str) -> NDArray[Any] | None:
        """View of a result, final once `next_reply` has returned RequestFinished, or None."""
        return self.segment_layout.array(name, self.segment)

    def shares(self) -> Iterator[tuple[float, Timings]]:
        """Yield 1 and the timings, if it has finished; see `SplitRequest.shares`."""
        if self.timings is not None:
            yield 1.0, self.timings

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
        if reply is LOST:
            self._is_over = self._is_lost = True
            state = self.segment_layout.state(self.segment)
            if state != QUEUED and self.tenant != PROBE:  # the engine had begun it
                _LOG.warning("a batch of tenant %s was in an engine that was lost", self.tenant)
                own = self.evaluation.dataset_id, self.digest(), self.process
                self.connection.report(BatchOutcome(*own, state))
            raise unavailable()
        if isinstance(reply, messages.RequestFinished):
            self._is_over = True
            if self.alone and not self._is_cancelled:
                self.connection.report(BatchOutcome(self.evaluation.dataset_id, self.digest()))
            if reply.error is not None:
                if reply.error.reason == TOO_MANY_FILES:
                    self.connection.was_not_mapped(self.segment)
                raise reply.error
            self.timings = reply.timings
        received: messages.Reply = reply
        return received

    def cancel(self) -> None:
        """Stop the work, because nobody waits for its result any more."""
        with self._lock:
            if self._has_segment:
                self.segment.map[self.segment_layout.flag_offset] = 1
                self._is_cancelled = True
                self.notice(_ENDED)

    def take(self, entry: object) -> None:
        """Take a reply of the engine, for `next_reply`; any thread may call this."""
        if isinstance(entry, messages.FitProgressed):
            self.progress = entry.progress
        self.queue.put(entry)

    def notice(self, entry: object) -> None:
        """Queue an entry that is not the engine's, and wake the thread that waits for it."""
        self.take(entry)
        if self.replies is not None:
            self.replies.wake(self.queue)

    def close(self) -> None:
        """Wait until the engine is done, then give the segment back."""
        # An engine that is being killed may still write to it.
        self.connection.pool.release(self.segment, is_clean=self.end())

    def end(self) -> bool:
        """Wait until the engine is done; return False if the engine was lost."""
        if not self._is_over:
            self.cancel()
        while not self._is_over:
            with suppress(WarpfitError):
                self.next_reply()
        self.on_end()
        with self._lock:
            self._has_segment = False  # it may soon be another call's
        return not self._is_lost


def unavailable() -> UnavailableError:
    """Return the error for calls that come while no engine is ready."""
    return UnavailableError(
        "the engine is restarting", "ENGINE_RESTARTING", "Repeat the call after a short wait"
    )


# ----------------------------------------------------------------------------------- the connection

#: Seconds after which a front end that cannot send takes the engine for lost.
_SEND_SECONDS: Final = 5.0
#: Seconds after which another connection is asked for when one is lost. An engine that was killed
#: is gone by then: the kernel closes its connections a while before it ends, with a GPU 0.2 s.
_RENEWAL_SECONDS: Final = 1.0


class EngineConnection:
    """Sends requests to the engine; `open` it when an engine starts, `shut` it when one is gone."""

    def __init__(self, pool: SegmentPool) -> None:
        self.pool = pool
        pool.on_close.append(self._unmap)
        self.on_loss: Callable[[], None] = lambda: None
        """Called by any thread, some time after the connection was lost and by `renew`, if there is
        none: it may have been lost while the engine lives."""
        self.report: Callable[[BatchOutcome], None] = lambda outcome: None
        """Called with what became of requests that were lost, and of suspects."""
        self.may_poll: Callable[[], bool] = lambda: False
        """Tells whether a call that waits may poll for its reply instead of sleeping."""
        self._channel: Channel | None = None
        self._replies: ReplyDispatcher | None = None
        self._process = 0
        self._in_flight: dict[int, InFlightRequest] = {}
        self._mapped: set[int] = set()
        """Identifiers of the segments that the engine has mapped."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def open(self, end: socket.socket, process: int = 0) -> None:
        """Use this socket from now on.

        It is closed if it leads to an earlier engine process than the last one, or if there is a
        connection to the same one: that may have been asked for when the process had just begun.

        Raises:
            ResourceExhaustedError: if this process can open no more files; the socket is closed.
        """
        channel = Channel(end)
        channel.give_up_after(_SEND_SECONDS)
        try:
            replies = ReplyDispatcher(channel, self._deliver, lambda: self.may_poll())
        except OSError as error:
            channel.close()
            raise shortage(error) or error from error
        with self._lock:
            is_connected = self._channel is not None and process == self._process
            is_needed = process >= self._process and not is_connected
            if is_needed:
                old = self._detach()
                self._channel, self._replies = channel, replies
                self._process, self._mapped = process, set()
        if not is_needed:
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

    @property
    def is_open(self) -> bool:
        """Whether there is an engine at the other end."""
        return self._channel is not None

    def renew(self) -> None:
        """Ask for a new connection if there is none."""
        if self._channel is None:
            self.on_loss()

    def start(self, evaluation: Evaluation, layout: Layout, tenant: str = "") -> InFlightRequest:
        """Send a checked evaluation to this engine, suspect or not, as a probe is.

        The caller holds a lease on the data set, and must close the request that is returned.

        Raises:
            UnavailableError: if there is no engine.
            ResourceExhaustedError: if there is no memory for batch and results.
        """
        request = InFlightRequest.of_evaluation(evaluation, layout, tenant)
        segment = self.pool.acquire(request.segment_layout.nbytes, request.tenant)
        try:
            request.write(segment)
            self.send(request)
        except BaseException:  # nothing was sent
            self.pool.release(segment)
            raise
        return request

    def send(self, request: InFlightRequest) -> None:
        """Send a request that has a segment; if that fails, nothing was sent."""
        identifier = request.segment.identifier
        with self._lock:
            request.connection = self
            channel, request.replies = self._channel, self._replies
            if channel is None:
                raise unavailable()
            request.number, request.process = next(self._numbers), self._process
            descriptor = None if identifier in self._mapped else request.segment.descriptor
            self._mapped.add(identifier)
            self._in_flight[request.number] = request
        try:
            channel.send(request.message(), descriptor)
        except ChannelClosedError:
            pass  # the reader finds this request lost like all others
        except BaseException:
            with self._lock:
                self._in_flight.pop(request.number, None)
                self._mapped.discard(identifier)  # another time does no harm
            raise

    def _deliver(self, reply: messages.Message) -> None:
        """Hand a reply to the request that it is for."""
        assert isinstance(reply, messages.Reply)  # an engine sends nothing else
        request = self._in_flight.get(reply.request)
        if isinstance(reply, messages.RequestFinished):
            self._in_flight.pop(reply.request, None)
        if request is not None:
            request.take(reply)

    def _watch(self, channel: Channel, replies: ReplyDispatcher) -> None:
        """Fail the requests in flight once the engine is gone."""
        replies.watch()
        with self._lock:
            is_lost = channel is self._channel
            lost = self._detach()[1] if is_lost else {}
        self._fail(None, lost)
        if is_lost:
            time.sleep(_RENEWAL_SECONDS)
            self.renew()

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
            request.notice(LOST)

    def _unmap(self, segment: Segment) -> None:
        """Let the engine unmap a segment that will not be used again."""
        with self._lock:
            channel = self._channel if segment.identifier in self._mapped else None
            self._mapped.discard(segment.identifier)
        if channel is not None:
            with suppress(ChannelClosedError, WarpfitError):  # it is unmapped with the connection
                channel.send(messages.UnmapSegment(segment.identifier))

    def was_not_mapped(self, segment: Segment) -> None:
        """Send a segment's descriptor again next time; for `InFlightRequest`."""
        with self._lock:
            self._mapped.discard(segment.identifier)
