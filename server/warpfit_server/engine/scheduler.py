"""The scheduler: which step the engine runs next, by one fair queue among tenants.

The simple form:

    if a health probe waits, take it
    else, while a suspect has its turn, take nothing but its next step, once all others have ended
    else take the tenant that has used least of the engine, the next one of its requests, and
        the requests that can be merged with it
    run one step, charge the tenants with the time
    queue the requests again, unless they are finished

This is start-time fair queueing (Goyal, Vin and Cheng 1996) with measured instead of announced
costs. The same rule is used twice: among tenants, and within a tenant between *short* requests,
which have used little of the engine so far, and *long* ones, such as fits and large batches. So a
long request does not delay every small call of its tenant, and small calls do not starve it.

A suspect is a request that may have crashed an engine. If the engine dies while it runs alone, the
culprit is known; see `warpfit_server.ipc.quarantine`.

The scheduler has no thread or socket: its caller tells it what has arrived, what steps have cost
and what has ended.

Requests of front ends stand here, too, and which of them are evaluated as one batch. The simple
form of merging:

    join the programs of the requests to one batch, evaluate it, and hand each its results

Then each request costs a few copies, so that many small ones are served by one thread. It does not
matter whether a batch has come before: interpreting it beside others costs less than looking for
its compiled kernels. For a lone request, and for one with many rows, compiled kernels save more
than merging does. So the engine says from how many requests on merging pays.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from ctypes import memmove
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import InternalError, WarpfitError
from warpfit.request import Evaluation, Precision, Tier, Timings
from warpfit_server.engine.evaluation import Finalizer, LoadedDatasets
from warpfit_server.engine.interface import Engine, Outputs, Steps
from warpfit_server.engine.native.intrinsics import array_address
from warpfit_server.ipc.messages import (
    Channel,
    ChannelClosedError,
    Message,
    Reply,
    RequestFinished,
    SubmitEvaluation,
    UnmapSegment,
)
from warpfit_server.ipc.segments import ALONE, BEGUN, PROVEN, Segment
from warpfit_server.shared_batch import SharedBatch
from warpfit_server.tenants import PROBE

#: Seconds of the engine after which a request is a long one.
_SHORT: Final = 0.008
#: Share of a tenant's time for its short requests, relative to 1 for its long ones.
_SHORT_WEIGHT: Final = 4.0
#: Longest time in seconds that a tenant, or a class of its requests, may catch up on after it had
#: nothing to do. It bounds how long others wait when it comes back.
_CREDIT: Final = 0.05
#: Seconds of the engine, used by others, for which a tenant without requests counts as active.
_ACTIVE: Final = 1.0
#: Tenants whose charges are remembered; idle ones are forgotten first.
_REMEMBERED: Final = 1000
#: Waiting requests of one tenant that are examined for merging.
_EXAMINED: Final = 64
#: Seconds after which a step does not keep another tenant's from beginning beside it: it is longer
#: than steps should be, and may be one that cannot be cut.
_OVERDUE: Final = 0.02
#: Seconds between two looks at the clock and at new requests while a suspect has its turn.
_LOOK_SECONDS: Final = 0.05


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """A request as the scheduler sees it."""

    tenant: str
    merge_key: Hashable = None
    """Requests with the same key that have not begun may run as one step; None: never merged."""
    size: int = 0
    """Estimated work of a request that can be merged, in token-rows."""
    merge_from: int = 1
    """Number of requests that wait to be merged with it or run already, this one included, from
    which on it is merged; with fewer it runs alone."""
    used: float = 0.0
    """Seconds of the engine so far."""
    alone: float = 0.0
    """Seconds for which nothing may run beside it; 0 if it is no suspect."""

    @property
    def is_cancelled(self) -> bool:
        """Whether no caller waits for the answer any more."""
        return False

    def note_state(self, state: int) -> None:
        """Let the front end know that the request has begun, or that it runs alone."""

    @property
    def is_long(self) -> bool:
        """Whether it has used more of the engine than a small call needs."""
        return self.used > _SHORT


Item = TypeVar("Item", bound=ScheduledRequest)


@dataclass(slots=True, eq=False)
class _ClassQueue(Generic[Item]):
    """The short or the long requests of a tenant, and what they have used, divided by a weight."""

    weight: float
    requests: OrderedDict[Item, None] = field(default_factory=OrderedDict)
    charge: float = 0.0


class _TenantQueue(Generic[Item]):
    """The waiting requests of a tenant and its use of the engine."""

    def __init__(self, charge: float) -> None:
        self.charge = charge
        self.running = 0
        self.began = 0.0
        """When its last step began, on the scheduler's clock."""
        self.short: _ClassQueue[Item] = _ClassQueue(_SHORT_WEIGHT)
        self.long: _ClassQueue[Item] = _ClassQueue(1.0)

    def add(self, request: Item) -> None:
        """Queue a request last in its class, or first if it is short and has begun."""
        own, other = (self.long, self.short) if request.is_long else (self.short, self.long)
        if not own.requests and other.requests:
            own.charge = max(own.charge, other.charge - _CREDIT)
        own.requests[request] = None
        if request.used and not request.is_long:
            own.requests.move_to_end(request, last=False)

    def first(self) -> Item:
        """Return the next request of the class that has been charged least."""
        short, long = self.short, self.long
        is_long = long.requests and (not short.requests or long.charge < short.charge)
        return next(iter((long if is_long else short).requests))

    def is_queued(self, request: Item) -> bool:
        """Whether a request waits."""
        return request in self.short.requests or request in self.long.requests

    def remove(self, request: Item) -> None:
        """Take a request out of the queue."""
        queue = self.short if request in self.short.requests else self.long
        del queue.requests[request]

    @property
    def is_waiting(self) -> bool:
        """Whether any request waits."""
        return bool(self.short.requests or self.long.requests)


@dataclass(slots=True, eq=False)
class _Turn(Generic[Item]):
    """The turn of a suspect."""

    suspect: Item
    until: float
    """End of the time for which it waits for the others, or the others for it; on the clock."""
    is_alone: bool = False


class Scheduler(Generic[Item]):
    """The fair queue. Calls must not overlap; the caller holds a lock.

    At a suspect's turn no other request may begin a step for at most `ScheduledRequest.alone`
    seconds, until all running steps have ended, and then for as long again. A suspect runs beside
    others if their steps do not end in that time, or once it takes longer itself. Probes never
    wait.

    Args:
        merged_size: most token-rows of the requests that are merged into one step; may be changed.
        shares_cores: whether steps that run at the same time slow each other down. Then only one
            runs at a time while several tenants are active, unless it takes too long.
        clock: returns seconds.
    """

    def __init__(
        self,
        merged_size: int,
        *,
        shares_cores: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.merged_size = merged_size
        self._shares_cores = shares_cores
        self._clock = clock
        self._tenants: OrderedDict[str, _TenantQueue[Item]] = OrderedDict()
        self._virtual_time = 0.0
        """Highest charge of a tenant when it was chosen."""
        self._waiting = 0
        self._begun = 0
        """Requests with a step that runs or waits for a future; without probes."""
        self._turn: _Turn[Item] | None = None
        """The turn of a suspect, if there is one."""

    def __len__(self) -> int:
        """Count the waiting requests."""
        return self._waiting

    @property
    def timeout(self) -> float | None:
        """Seconds after which `next` may return something although nothing has arrived or ended."""
        if self._turn is not None:
            return _LOOK_SECONDS
        return _OVERDUE if self._shares_cores and self._waiting else None

    def add(self, request: Item) -> None:
        """Queue a request, when it arrives or after one of its steps."""
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            if len(self._tenants) >= _REMEMBERED:
                idle = [n for n, t in self._tenants.items() if not (t.is_waiting or t.running)]
                for name in idle[: len(idle) // 2 + 1]:  # known for longest
                    del self._tenants[name]
            tenant = self._tenants[request.tenant] = _TenantQueue(self._virtual_time)
        elif not (tenant.is_waiting or tenant.running):
            tenant.charge = max(tenant.charge, self._virtual_time - _CREDIT)
        tenant.add(request)
        self._waiting += 1

    def next(self) -> list[Item]:
        """Take the requests of the next step: none, one, or several to be merged.

        Each must come back through `ran`, and then through `ended`.
        """
        if not self._waiting:
            return []
        probes = self._tenants.get(PROBE)
        if probes is not None and probes.is_waiting:
            return self._take(probes, probes.first())
        requests = self._next_of_turn() if self._turn is not None else self._next_of_tenants()
        self._begun += len(requests)
        return requests

    def ran(self, requests: list[Item], seconds: float) -> None:
        """Charge the tenants for a step.

        Args:
            requests: as `next` returned them.
            seconds: duration of the step, shared among the requests by their sizes.
        """
        total = sum([request.size for request in requests])
        for request in requests:
            share = seconds * request.size / total if total else seconds / len(requests)
            tenant = self._tenants[request.tenant]
            queue = tenant.long if request.is_long else tenant.short
            queue.charge += share / queue.weight
            tenant.charge += share
            tenant.running -= 1
            request.used += share

    def ended(self, requests: list[Item], unfinished: list[Item]) -> None:
        """Note the end of a step and its wait; queue unfinished requests again.

        Args:
            requests: the requests of the step.
            unfinished: the requests among them that have more steps.
        """
        self._begun -= sum([request.tenant != PROBE for request in requests])
        for request in unfinished:
            self.add(request)
        if self._turn is not None and self._turn.suspect in requests and not unfinished:
            self._turn = None

    def _next_of_tenants(self) -> list[Item]:
        """Take requests of the tenant that has been charged least, or begin a suspect's turn."""
        tenants = [tenant for tenant in self._tenants.values() if tenant.is_waiting]
        if tenants and self._shares_cores and self._begun:
            others = [tenant for name, tenant in self._tenants.items() if name != PROBE]
            recently = self._virtual_time - _ACTIVE
            active = sum(tenant.is_waiting or tenant.charge > recently for tenant in others)
            running = [tenant for tenant in others if tenant.running]
            if running and active > 1:  # a step would slow down another one
                began = max(tenant.began for tenant in self._tenants.values() if tenant.running)
                is_overdue = began < self._clock() - _OVERDUE
                tenants = [tenant for tenant in tenants if is_overdue and not tenant.running]
        if not tenants:
            return []
        tenant = min(tenants, key=lambda t: t.charge)
        self._virtual_time = max(self._virtual_time, tenant.charge)
        first = tenant.first()
        if first.alone:
            self._turn = _Turn(first, self._clock() + first.alone)
            return self._next_of_turn()
        return self._take(tenant, first)

    def _next_of_turn(self) -> list[Item]:
        """Take the suspect's next step once it may run, or end its turn."""
        assert self._turn is not None
        turn, suspect, now = self._turn, self._turn.suspect, self._clock()
        if not (turn.is_alone or self._begun):
            turn.is_alone, turn.until = True, now + suspect.alone
            suspect.note_state(ALONE)
        elif now >= turn.until or suspect.is_cancelled:  # others run beside it from now on
            suspect.note_state(PROVEN if turn.is_alone else BEGUN)
            suspect.alone, self._turn = 0.0, None
        tenant, may_run = self._tenants.get(suspect.tenant), turn.is_alone or self._turn is None
        if may_run and tenant is not None and tenant.is_queued(suspect):
            return self._take(tenant, suspect)
        return [] if self._turn is not None else self._next_of_tenants()

    def _take_one(self, tenant: _TenantQueue[Item], request: Item) -> None:
        tenant.remove(request)
        tenant.running, tenant.began = tenant.running + 1, self._clock()
        self._waiting -= 1

    def _take(self, tenant: _TenantQueue[Item], first: Item) -> list[Item]:
        """Take a request of a tenant, with those merged with it, from the tenants in turn.

        If there are so few that the first one runs alone, it loses its key.
        """
        self._take_one(tenant, first)
        if first.merge_key is None or first.used:
            return [first]
        room, found = self.merged_size - first.size, []
        tenants = [tenant for tenant in self._tenants.values() if tenant.short.requests]
        tenants.sort(key=lambda t: t.charge)
        queues = []
        for tenant in tenants:
            examined = islice(tenant.short.requests, _EXAMINED)
            same = [r for r in examined if r.merge_key == first.merge_key and not r.used]
            queues.append((tenant, iter(same)))
        while queues:
            left = []
            for tenant, queue in queues:
                request = next(queue, None)
                if request is None or request.size > room:
                    continue
                room -= request.size
                found.append((tenant, request))
                left.append((tenant, queue))
            queues = left
        # Where others run, more will come: their number tells a lone caller from many.
        if 1 + len(found) + self._begun < first.merge_from:
            first.merge_key = None
            return [first]
        for tenant, request in found:
            self._take_one(tenant, request)
        return [first, *(request for _, request in found)]


# ----------------------------------------------------------------------- requests and their merging

_LOG: Final = logging.getLogger("warpfit.engine")
#: Seconds after which the engine drops a front end that does not read its answers.
_SEND_SECONDS: Final = 1.0
#: Most batches in a set. When it is full, another one is begun, and the one before is kept.
_REMEMBERED_BATCHES: Final = 8192
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

    def receive(self, message: Message, descriptor: int | None) -> Request | None:
        """Take in a message; return the request if it is one that can be served.

        The segment of a request is mapped if it is a new one. A request without one is answered.

        Raises:
            InternalError: for a message that front ends do not send.
        """
        if isinstance(message, UnmapSegment):
            self.segments.pop(message.segment, None)
            return None
        if not isinstance(message, SubmitEvaluation):
            raise InternalError(f"unexpected message {message}", "BAD_MESSAGE")
        number = message.segment
        try:
            if descriptor is not None or number not in self.segments:
                self.segments[number] = Segment.received(number, descriptor, message.size)
                self.on_map(self.segments[number])
            segment = self.segments[number]
            if message.segment_layout.nbytes > segment.size:  # code would read beyond its end
                text = f"a segment of {segment.size} bytes is too small"
                raise InternalError(text, "BAD_MESSAGE")
        except WarpfitError as error:
            self.send(RequestFinished(message.request, error=error))
            return None
        request = Request(self, message, segment)
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
        """Steps of the evaluation; None before the first one."""
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
    """Decides which requests may be merged, and evaluates them; safe to use from threads.

    A batch that has not come before is interpreted: no engine looks for what was compiled for it.
    """

    def __init__(self, engine: Engine, datasets: LoadedDatasets, finalizer: Finalizer) -> None:
        self._engine, self._datasets, self._finalizer = engine, datasets, finalizer
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
                if len(self._seen) >= _REMEMBERED_BATCHES:
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

    def begin(self, requests: Sequence[Request]) -> Steps[Timings]:
        """Evaluate requests with the same `merge_key` as one batch; fill in the results of each.

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
        outputs = Outputs(None, losses, cancelled, lambda programs: None, gradients)
        timings = yield from self._datasets.evaluate(merged, outputs)
        dataset = self._datasets.whole(merged.dataset_id)
        yield from self._finalizer.finalize(merged, dataset, outputs)
        for name, array in (("losses", outputs.losses), ("gradients", outputs.gradients)):
            if array is None:
                continue
            source = array_address(array)
            for request in requests:
                target, size = request.problem.segment_layout.place(name, request.segment)
                memmove(target, source, size)
                source += size
        return timings
