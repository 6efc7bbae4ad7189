"""Requests of front ends in the engine process, and which of them are evaluated as one batch.

The simple form of merging:

    join the programs of the requests to one batch, evaluate it, and hand each its results

Then each request costs a few copies, so that many small ones are served by one thread. It does not
matter whether a batch has come before: interpreting it beside others costs less than looking for
its compiled kernels. For a lone request, and for one with many rows, compiled kernels save more
than merging does. So the engine says from how many requests on merging pays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from ctypes import memmove
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import InternalError, WarpfitError
from warpfit.request import Evaluation, Precision, Tier, Timings
from warpfit_server.engine.interface import Engine, Outputs, Steps
from warpfit_server.engine.native.intrinsics import array_address
from warpfit_server.engine.scheduler import ScheduledRequest
from warpfit_server.ipc.messages import Channel, ChannelClosedError, Reply, SubmitEvaluation
from warpfit_server.ipc.segments import BEGUN, Segment
from warpfit_server.shared_batch import SharedBatch

_LOG: Final = logging.getLogger("warpfit.engine")
#: Seconds after which the engine drops a front end that does not read its answers.
_SEND_SECONDS: Final = 1.0
#: Most batches in a set. When it is full, another one is begun, and the one before is kept.
_REMEMBERED: Final = 8192
#: Most numbers of a request that is merged (tokens, losses, derivatives), and of all that are
#: merged into one step: more of them would be a long step.
_MOST_NUMBERS: Final = 1 << 18
_MOST_OF_A_STEP: Final = 1 << 20
#: The same with gradients, whose programs are differentiated on the host: such a step has no more
#: tokens than an engine lowers at a time.
_MOST_WITH_GRADIENTS: Final = 1 << 15
#: Work of a loss with its gradient, relative to that of the loss alone.
_GRADIENT_WORK: Final = 3


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

    Merged requests need no arrays of their own, and making arrays takes longer than all other work
    for such a request. So a request makes its arrays when they are first needed.
    """

    def __init__(
        self, connection: FrontEndConnection, problem: SubmitEvaluation, segment: Segment
    ) -> None:
        super().__init__(problem.tenant)
        self.connection = connection
        self.problem = problem
        self.segment = segment
        self._flag = problem.segment_layout.flag_offset
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
        """[1]; the front end sets it to 1 when no caller waits for the answer any more."""
        return self.segment.array("u1", (1,), self._flag)

    @property
    def is_cancelled(self) -> bool:
        """Whether no caller waits any more; a fit sets the flag to 2 when its time is up."""
        return self.segment.map[self._flag] == 1

    def note_state(self, state: int) -> None:
        """Write a state into the segment; the front end reads it if this process dies."""
        self.segment.map[self._flag + 1] = state

    def mark_begun(self) -> None:
        """Note for the front end, and for the timings, that the first step begins."""
        if not self.alone:
            self.note_state(BEGUN)
        self.waited = time.monotonic_ns() - self.problem.submitted


class Merger:
    """Decides which requests may be merged; safe to use from threads.

    A batch that has not come before is interpreted: no engine looks for what was compiled for it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: set[int] = set()
        self._older: set[int] = set()

    def plan(self, request: Request) -> None:
        """Set `merge_key`, `merge_from` and `size` of a new request; no key: it runs alone."""
        problem, layout = request.problem, request.problem.segment_layout
        key = (
            *(problem.dataset_id, problem.rows, problem.precision, problem.loss),
            *(problem.outputs, layout.vectors),
        )
        has_come = False
        if problem.tier == Tier.AUTO.name and problem.fit is None:
            # Two threads that do this at once may forget a batch early, which does no harm.
            batch = hash((layout.identity, *key))
            has_come = batch in self._seen
            if not has_come:
                if len(self._seen) >= _REMEMBERED:
                    self._older, self._seen = self._seen, set()
                self._seen.add(batch)
                has_come = batch in self._older
            if not has_come:
                request.problem = problem._replace(tier=Tier.INTERPRETER.name)
        is_mergeable = (  # it asks for built-in losses, or these with gradients, and nothing else
            problem.loss is not None
            and problem.closing is None
            and problem.outputs in ((), ("gradient",))
            and not problem.alone
            and problem.fit is None
            and problem.tier != Tier.COMPILED.name
        )
        if not is_mergeable or not self._engine.should_merge(problem.dataset_id):
            return
        is_derived, step_size = bool(problem.outputs), self._engine.step_size
        numbers = layout.tokens + layout.programs * layout.vectors
        most, work = (_MOST_NUMBERS, _MOST_OF_A_STEP), layout.token_rows
        if is_derived:
            numbers += layout.arrays["gradients"][1][0]
            most, work = (_MOST_WITH_GRADIENTS, _MOST_WITH_GRADIENTS), work * _GRADIENT_WORK
        if work > step_size or numbers > most[0]:
            return
        if has_come:
            least = self._engine.merge_from(
                problem.dataset_id,
                Precision[problem.precision],
                tokens=layout.tokens,
                token_rows=layout.token_rows,
                gradient=is_derived,
            )
            if not least:
                return
            request.merge_from = least
        request.merge_key, request.size = key, max(work, numbers * step_size // most[1])


def join(requests: Sequence[Request]) -> tuple[Evaluation, Outputs]:
    """Return one evaluation of the programs of requests with the same key, and its outputs.

    Merged batches are always interpreted: no engine asks its tier chooser or caches.
    """
    first = requests[0]
    parts = [request.problem.segment_layout.batch_part(request.segment) for request in requests]
    problem = first.problem._replace(tier=Tier.INTERPRETER.name)
    batch = SharedBatch(parts, problem.segment_layout.vectors)
    merged = problem.evaluation(batch, first.segment)
    # A step of several callers goes on although one of them has gone.
    cancelled = first.cancelled if len(requests) == 1 else np.zeros(1, dtype=np.uint8)
    gradients = np.empty(batch.parameter_total) if merged.gradient else None
    losses = np.empty((len(batch), batch.vectors))
    return merged, Outputs(None, losses, cancelled, lambda programs: None, gradients)


def hand_out(outputs: Outputs, requests: Sequence[Request]) -> None:
    """Copy losses and gradients of a joined evaluation to the requests."""
    for name, array in (("losses", outputs.losses), ("gradients", outputs.gradients)):
        if array is None:
            continue
        source = array_address(array)
        for request in requests:
            target, size = request.problem.segment_layout.place(name, request.segment)
            memmove(target, source, size)
            source += size
