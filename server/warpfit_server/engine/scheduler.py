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
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Generic, TypeVar

from warpfit_server.ipc.segments import ALONE, BEGUN, PROVEN
from warpfit_server.tenancy.tenants import PROBE

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

    def add_charge(self, request: Item, seconds: float) -> None:
        """Charge a step of a request to its class and to the tenant."""
        queue = self.long if request.is_long else self.short
        queue.charge += seconds / queue.weight
        self.charge += seconds

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
            tenant.add_charge(request, share)
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
        if tenants and self._is_crowded():
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

    def _is_crowded(self) -> bool:
        """Tell whether a step would slow down another one while several tenants are active."""
        if not (self._shares_cores and self._begun):
            return False
        tenants = [tenant for name, tenant in self._tenants.items() if name != PROBE]
        if not any(tenant.running for tenant in tenants):
            return False
        recently = self._virtual_time - _ACTIVE
        return sum(tenant.is_waiting or tenant.charge > recently for tenant in tenants) > 1

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
