"""A front end's connection to the engine: numbered requests go out, their replies come back.

Batches and results lie in segments of shared memory, which the engine maps when a request first
names them. The threads that wait read the replies; see `warpfit_server.ipc.reply_dispatcher`.

While the connection is lost, requests are refused. Requests that the engine had begun when it was
lost are reported, see `warpfit_server.ipc.quarantine`.
"""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from warpfit.dataset import Layout
from warpfit.errors import WarpfitError
from warpfit.request import Evaluation
from warpfit_server.ipc import messages
from warpfit_server.ipc.channel import Channel, ChannelClosedError
from warpfit_server.ipc.in_flight_request import LOST, InFlightRequest, unavailable
from warpfit_server.ipc.quarantine import ClearedSuspect, InterruptedBatch
from warpfit_server.ipc.reply_dispatcher import ReplyDispatcher
from warpfit_server.ipc.segments import Segment, SegmentPool
from warpfit_server.system.machine import shortage

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
        self.report: Callable[[InterruptedBatch | ClearedSuspect], None] = lambda outcome: None
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
        try:
            self._send(request)
        except BaseException:
            with self._lock:
                self._in_flight.pop(request.number, None)
                self._mapped.discard(request.segment.identifier)  # another time does no harm
            raise

    def _send(self, request: InFlightRequest) -> None:
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
        with suppress(ChannelClosedError):  # the reader finds this request lost like all others
            channel.send(request.message(), descriptor)

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
