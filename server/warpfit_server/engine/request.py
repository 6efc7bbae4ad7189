"""Requests of front ends in the engine process, and the connections that they come over."""

from __future__ import annotations

import logging
import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import WarpfitError
from warpfit.request import Timings
from warpfit_server.engine.interface import Steps
from warpfit_server.ipc.channel import Channel, ChannelClosedError
from warpfit_server.ipc.messages import Reply, Submission, SubmitEvaluation, SubmitFit
from warpfit_server.ipc.segment_layout import BEGUN
from warpfit_server.ipc.segments import Segment

_LOG: Final = logging.getLogger("warpfit.engine")
#: Seconds after which a front end that does not read its answers is given up.
_SEND_SECONDS: Final = 1.0


class Connection:
    """A front end: its channel, the segments that it has sent, and what it waits for."""

    def __init__(self, channel: Channel) -> None:
        channel.give_up_after(_SEND_SECONDS)
        self.channel = channel
        self.segments: dict[int, Segment] = {}
        self.requests: set[Request] = set()
        """Those that have no answer yet."""

    def receive(self, order: Submission, descriptors: list[int]) -> Request:
        """Make a request of a message; its segment is mapped now if it is a new one.

        Raises:
            ResourceExhaustedError: if this process can map no more; the front end is not told.

        """
        problem = problem_of(order)
        identifier = problem.segment
        if descriptors or identifier not in self.segments:
            self.segments[identifier] = Segment.received(identifier, descriptors, problem.size)
        request = Request(self, order, problem, self.segments[problem.segment])
        self.requests.add(request)
        return request

    def send(self, *answers: Reply) -> None:
        """Send answers at once; those to a front end that is gone are nobody's any more."""
        try:
            self.channel.send_all(answers)
        except ChannelClosedError as error:
            _LOG.debug("an answer was not sent: %s", error)
        except WarpfitError as error:
            _LOG.error("an answer was not sent: %s", error)
            self.channel.shut()  # the front end would wait for ever


class Request:
    """An evaluation or a fit on its way through the engine."""

    def __init__(
        self, connection: Connection, order: Submission, problem: SubmitEvaluation, segment: Segment
    ) -> None:
        self.connection = connection
        self.order = order
        self.problem = problem
        """The evaluation, or that of the fit."""
        self.segment = segment
        self.number = problem.request
        self.cancelled: NDArray[np.uint8] = problem.segment_layout.cancelled(segment)
        """[1]; the front end sets it to 1 when nobody waits for the answer any more."""
        self.state = problem.segment_layout.state(segment)
        """[1], which the front end reads if this process dies; see `SegmentLayout.state`."""
        self.alone = problem.alone
        """Seconds for which nothing may run beside it; 0: anything may."""
        self.steps: Steps[Timings] | None = None
        """None until the first step."""
        self.waited = 0
        """Nanoseconds from the front end to the first step."""
        self.evaluation = problem.evaluation(segment)

    @property
    def is_fit(self) -> bool:
        """Whether it is a fit."""
        return isinstance(self.order, SubmitFit)

    @property
    def token_rows(self) -> int:
        """Tokens x parameter vectors x rows of one evaluation."""
        layout = self.problem.segment_layout
        return layout.tokens * layout.vectors * layout.rows

    @property
    def losses(self) -> NDArray[np.float64]:
        """View of the losses, [programs, K]; they were asked for."""
        return self.problem.segment_layout.require("losses", self.segment)

    def begins(self) -> None:
        """Take notice that its first step begins."""
        if not self.alone:
            self.state[0] = BEGUN
        self.waited = time.monotonic_ns() - self.problem.submitted


def problem_of(order: Submission) -> SubmitEvaluation:
    """Return an evaluation itself, or that of a fit."""
    return order.problem if isinstance(order, SubmitFit) else order
