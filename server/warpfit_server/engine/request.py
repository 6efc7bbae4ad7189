"""Requests of front ends in the engine process, and the connections that they arrive on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import InternalError, WarpfitError
from warpfit.request import Evaluation, Timings
from warpfit_server.engine.interface import Steps
from warpfit_server.engine.scheduler import ScheduledRequest
from warpfit_server.ipc.channel import Channel, ChannelClosedError
from warpfit_server.ipc.messages import Reply, SubmitEvaluation
from warpfit_server.ipc.segment_layout import BEGUN
from warpfit_server.ipc.segments import Segment

_LOG: Final = logging.getLogger("warpfit.engine")
#: Seconds after which the engine drops a front end that does not read its answers.
_SEND_SECONDS: Final = 1.0


class FrontEndConnection:
    """The engine's end of the connection to a front end."""

    def __init__(self, channel: Channel) -> None:
        channel.give_up_after(_SEND_SECONDS)
        self.channel = channel
        self.segments: dict[int, Segment] = {}
        """Mapped segments of the front end, by number."""
        self.requests: set[Request] = set()
        """Requests without an answer yet."""
        self.on_map: Callable[[Segment], None] = lambda segment: None
        """Called with each segment when it has been mapped."""

    def receive(self, problem: SubmitEvaluation, descriptor: int | None) -> Request:
        """Make a request of a message; map its segment if it is a new one.

        Raises:
            ResourceExhaustedError: if this process cannot map it; the front end is not told.
            InternalError: if it is too small for what it should have.
        """
        number = problem.segment
        if descriptor is not None or number not in self.segments:
            self.segments[number] = Segment.received(number, descriptor, problem.size)
            self.on_map(self.segments[number])
        segment = self.segments[number]
        if problem.segment_layout.nbytes > segment.size:  # compiled code would read beyond its end
            raise InternalError(f"a segment of {segment.size} bytes is too small", "BAD_MESSAGE")
        request = Request(self, problem, segment)
        self.requests.add(request)
        return request

    def send(self, *replies: Reply) -> None:
        """Send replies at once, unless the front end is gone."""
        try:
            self.channel.send_all(replies)
        except ChannelClosedError as error:
            _LOG.debug("an answer was not sent: %s", error)
        except WarpfitError as error:
            _LOG.error("an answer was not sent: %s", error)
            self.channel.shut()  # else the front end would wait for ever


class Request(ScheduledRequest):
    """An evaluation or a fit in the engine process.

    Requests that are merged need no arrays of their own, which take longer to make than all else
    that is done for such a request. So they are made when they are first asked for.
    """

    def __init__(
        self, connection: FrontEndConnection, problem: SubmitEvaluation, segment: Segment
    ) -> None:
        super().__init__(problem.tenant)
        self.connection = connection
        self.problem = problem
        self.segment = segment
        self.number = problem.request
        self.alone = problem.alone
        self.steps: Steps[Timings] | None = None
        """None until the first step."""
        self.waited = 0
        """Nanoseconds from the front end to the first step."""

    @cached_property
    def evaluation(self) -> Evaluation:
        """The evaluation, or that of the fit; its batch is a view of the segment."""
        layout, segment = self.problem.segment_layout, self.segment
        return self.problem.evaluation(layout.batch(segment), segment)

    @cached_property
    def cancelled(self) -> NDArray[np.uint8]:
        """[1]; the front end sets it to 1 when nobody waits for the answer any more."""
        return self.problem.segment_layout.cancelled(self.segment)

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for the answer; a fit sets the flag to 2 when its time is up."""
        return self.segment.map[self.problem.segment_layout.flag_offset] == 1

    def note_state(self, state: int) -> None:
        """Write a state into the segment; the front end reads it if this process dies."""
        self.segment.map[self.problem.segment_layout.flag_offset + 1] = state

    def mark_begun(self) -> None:
        """Note for the front end, and for the timings, that the first step begins."""
        if not self.alone:
            self.note_state(BEGUN)
        self.waited = time.monotonic_ns() - self.problem.submitted
