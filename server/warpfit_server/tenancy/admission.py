"""Admission: whether the server accepts a call now, by calls in flight, rate, memory and queue.

A call over a limit is refused at once, where possible before anything is decoded, and told when a
retry is likely to be accepted. Accepted calls wait in a queue that these limits bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from warpfit.dataset import Layout
from warpfit.errors import ResourceExhaustedError
from warpfit.fitting import FitRequest
from warpfit.request import Evaluation
from warpfit.server_info import Limits
from warpfit_server.config import Config
from warpfit_server.tenancy.quotas import Amounts, QuotaTable
from warpfit_server.tenancy.tenants import TenantLimits

#: Shortest and longest time between the retries of two refused calls, in seconds.
_SHORTEST_RETRY: Final = 0.02
_LONGEST_RETRY: Final = 1.0
#: Factor between the lengths of running calls that a refused caller can tell apart.
_RETRY_STEP: Final = 2.0
#: Largest part of its tenant's queue that one call counts for, however long it is.
_LARGEST_PART: Final = 0.5
#: A limit that is none, in 64 bits.
_UNLIMITED: Final = 2**62
#: Assumed nanoseconds of a call, and of each of its units.
_CALL_NS, _UNIT_NS = 1e5, 0.2999
#: Assumed nanoseconds of a call whose units matter as much as what every call costs.
_TELLING_NS: Final = 1e7
#: Longest estimate in nanoseconds, some days: the sums of many must fit 64 bits.
_LONGEST_ESTIMATE: Final = 2.0**50
#: Most passes over the data that are expected of a fit; most searches end long before they must.
_FIT_PASSES: Final = 20
#: Least weight of a new measurement against those before it.
_NEWEST_WEIGHT: Final = 0.02
#: For each field of `Amounts`: reason of a refusal, its words, and the flag that raises the limit.
_REFUSALS: Final = {
    "calls": ("TOO_MANY_REQUESTS", "calls are in flight", "--max-requests"),
    "nbytes": (
        "QUEUE_FULL",
        "bytes of messages, batches and answers are in flight, or kept for messages to come,",
        "--max-pending-bytes",
    ),
    "engine_ns": ("QUEUE_FULL", "ns of work are in the queue", "--max-queue-seconds"),
    "searches": ("TOO_MANY_SEARCHES", "searches run", "--max-searches"),
}


class CallCost(NamedTuple):
    """The estimated cost of a call in the engine."""

    kind: str
    units: float

    @classmethod
    def of_evaluation(cls, evaluation: Evaluation, layout: Layout) -> CallCost:
        """Return the cost of an evaluation on a data set, in token-rows."""
        derives = evaluation.gradient or evaluation.jacobian or evaluation.variable_gradient
        return cls("derive" if derives else "evaluate", evaluation.token_rows(layout))

    @classmethod
    def of_fit(cls, request: FitRequest, layout: Layout) -> CallCost:
        """Return the cost of a fit on a data set, in token-rows of all passes."""
        passes = min(_FIT_PASSES, 1 + request.settings.max_iterations)
        starts = request.starts / request.problem.batch.vectors
        return cls("fit", request.problem.token_rows(layout) * starts * passes)


class CallCostModel:
    """Estimates the engine time of each kind of work from what calls of about its size took.

    For each power of two of the units it remembers by which factor calls took longer than assumed.
    Between two observed sizes the factor is interpolated. Beyond the observed sizes it counts less
    the shorter the smaller of the two calls is: what small calls take says nothing about large
    ones, and the other way round.
    """

    def __init__(self) -> None:
        self._factors: dict[str, dict[int, tuple[float, float]]] = {}
        """For each kind and size: weight of the observations, and the mean factor."""

    def estimate(self, cost: CallCost) -> int:
        """Return the estimated engine time in nanoseconds."""
        assumed, size = _assumed(cost.units), _size(cost.units)
        known = self._factors.get(cost.kind, {})
        if size in known:
            return int(min(_LONGEST_ESTIMATE, assumed * known[size][1]))
        below = max((s for s in known if s < size), default=None)
        above = min((s for s in known if s > size), default=None)
        if below is not None and above is not None:
            share = (size - below) / (above - below)
            factor = known[below][1] ** (1 - share) * known[above][1] ** share
        else:
            nearest = below if above is None else above
            shorter = assumed if nearest is None else min(assumed, _assumed(2.0**nearest))
            factor = known[nearest][1] if nearest is not None else 1.0
            factor **= shorter / (shorter + _TELLING_NS)
        return int(min(_LONGEST_ESTIMATE, assumed * factor))

    def observe(self, cost: CallCost, nanoseconds: float) -> None:
        """Add an observation. Takes no lock: losing one of two at the same time does no harm."""
        known, size = self._factors.get(cost.kind, {}), _size(cost.units)
        weight, mean = known.get(size, (1.0, 0.0))
        mean += weight * (max(1.0, nanoseconds) / _assumed(cost.units) - mean)
        weight = max(_NEWEST_WEIGHT, 1.0 / (1.0 / weight + 1.0))
        self._factors[cost.kind] = {**known, size: (weight, mean)}


def _assumed(units: float) -> float:
    """Return the nanoseconds that a call is assumed to take before any was observed."""
    return _CALL_NS + _UNIT_NS * units


def _size(units: float) -> int:
    """Return the power of two that is next below some units."""
    return math.frexp(max(1.0, units))[1]


class Admission:
    """Accepts or refuses the calls of one front-end process.

    Calls and bytes in flight are limited for the server and for each tenant, because they are
    finite, and a tenant leaves some of them to the others. Engine time in the queue is limited for
    each tenant alone: the engine takes turns among tenants, so what one has queued does not delay
    another. A call of many hours counts for half of its tenant's queue: it is legitimate work, and
    must not shut its own tenant out either.
    """

    def __init__(self, config: Config, tenants: TenantLimits, quotas: QuotaTable) -> None:
        limits = tenants.server
        queue = int(config.max_queue_seconds * 1e9)
        pending = config.pending_bytes
        self.quotas = quotas
        self.costs = CallCostModel()
        self.is_shared = tenants.is_shared
        """Whether there may be several tenants."""
        self.limits = tenants.limits
        """Limits of a tenant; see `TenantLimits.limits`."""
        self._share = tenants.share
        self._tenant_quota = Amounts(0, int(tenants.share * pending), queue)
        self.message_bytes = limits.message_bytes
        """Bytes that gRPC may hold of a message before its length is known."""
        self._longest_work = int(_LARGEST_PART * queue)
        self._server_quota = Amounts(limits.requests, pending, _UNLIMITED, limits.searches)
        self.most_bytes = min(self._tenant_quota.nbytes, pending)
        """Most bytes that a tenant may have in flight."""
        half = Amounts(0, self._tenant_quota.nbytes // 2), Amounts(0, pending // 2)
        self._waiting = half
        """Most bytes of all calls of a tenant and of the server with which another one may wait."""

    def check_rate(self, tenant: str, rate: float) -> None:
        """Count a call against its tenant's rate; 0 for none.

        Raises:
            ResourceExhaustedError: if it comes too soon; says when it may come.
        """
        if not rate:
            return
        delay = self.quotas.count_call(tenant, time.monotonic(), rate)
        if delay > 0:
            raise ResourceExhaustedError(
                f"calls come faster than {rate:g} a second",
                "RATE_LIMITED",
                "Send larger batches less often, or ask for a higher rate",
                retry_after=delay,
            )

    def await_message(self, tenant: str) -> None:
        """Count the longest message (`message_bytes`) for a call whose message may arrive.

        gRPC receives a message completely before it tells the length, so no less is sure to be
        enough.

        Raises:
            ResourceExhaustedError: if too much is in flight.
        """
        self._acquire(tenant, (0, self.message_bytes, 0), self._tenant_quota)

    def enter(self, tenant: str, limits: Limits, nbytes: int, held: int) -> None:
        """Count a request whose message has arrived; of its bytes ``held`` are counted already.

        Raises:
            ResourceExhaustedError: if too much is in flight.
        """
        own = limits.requests, self._tenant_quota.nbytes, 0
        self._acquire(tenant, (1, nbytes - held, 0), own, held)

    def wait(self, tenant: str, counted: tuple[int, int, int]) -> bool:
        """Count the longest message in place of a request, for a call that waits for another one.

        Such calls take at most half of what there is for calls in flight, one alone, too.

        Returns:
            False if there is no room for that; then nothing has changed.
        """
        calls, nbytes, nanoseconds = counted
        amount = -calls, self.message_bytes - nbytes, -nanoseconds
        held = nbytes - self.message_bytes  # so that nothing is alone
        share = self._share
        return self.quotas.acquire(tenant, amount, *self._waiting, share=share, held=held) is None

    def leave(self, tenant: str, calls: int, nbytes: int) -> None:
        """Count calls in flight and bytes of their messages no more."""
        self.quotas.release(tenant, (calls, nbytes, 0))

    def give_back(self, tenant: str, counted: tuple[int, int, int]) -> None:
        """Count a request no more."""
        self.quotas.release(tenant, counted)

    def reserve(self, tenant: str, nbytes: int, message: int = 0, nanoseconds: int = 0) -> int:
        """Count bytes and estimated engine time of a request, to be given back at its end.

        The bytes of its ``message`` are counted already.

        Returns:
            The engine time that is counted.

        Raises:
            ResourceExhaustedError: if too much is in flight, or the request alone takes more than
                its tenant may; it would keep all others out while it runs.
        """
        needed, most = nbytes + message, self._tenant_quota.nbytes
        if needed > most and most < self._server_quota.nbytes:
            raise ResourceExhaustedError(
                f"the call takes {needed} bytes of memory, one tenant may have {most} in flight",
                "RESULT_TOO_LARGE",
                "Ask for less at once, or start the server with a higher --max-pending-bytes",
                needed=needed,
                available=most,
            )
        counted = min(self._longest_work, nanoseconds)
        self._acquire(tenant, (0, nbytes, counted), self._tenant_quota, message)
        return counted

    @contextmanager
    def searching(self, tenant: str, limits: Limits) -> Iterator[None]:
        """Count a search in a ``with`` block.

        Raises:
            ResourceExhaustedError: if as many run as may.
        """
        if not limits.searches:
            raise ResourceExhaustedError(
                "this server runs no searches for this caller",
                "TOO_MANY_SEARCHES",
                "Start the server with a higher --max-searches",
                needed=1,
                available=0,
            )
        amount = 0, 0, 0, 1
        self._acquire(tenant, amount, (0, 0, 0, limits.searches))
        try:
            yield
        finally:
            self.quotas.release(tenant, amount)

    @contextmanager
    def reserved(
        self, tenant: str, nbytes: int, message: int = 0, nanoseconds: int = 0
    ) -> Iterator[None]:
        """Count bytes and estimated engine time in a ``with`` block; see `reserve`."""
        counted = self.reserve(tenant, nbytes, message, nanoseconds)
        try:
            yield
        finally:
            self.give_back(tenant, (0, nbytes, counted))

    def _acquire(
        self,
        tenant: str,
        amount: Sequence[int],
        own: Sequence[int],
        held: int = 0,
    ) -> None:
        exceeded = self.quotas.acquire(
            tenant, amount, own, self._server_quota, share=self._share, held=held
        )
        if exceeded is None:
            return
        reason, what, flag = _REFUSALS[exceeded.quantity]
        needed = getattr(Amounts(*amount), exceeded.quantity)
        if exceeded.of_tenant:
            message = f"{exceeded.used} {what} of this tenant and the limit is {exceeded.limit}"
            needed += exceeded.used
        else:  # how much other tenants have in flight is secret
            message = f"too many {what} and the limit of the server is {exceeded.limit}"
        raise ResourceExhaustedError(
            message,
            reason,
            f"Retry with back-off, or start the server with a higher {flag}",
            needed=needed,
            available=exceeded.limit,
            retry_after=self._retry_after(),
        )

    def _retry_after(self) -> float:
        """Return the seconds after which a call that is refused now should come again.

        The first retries when the running call is expected to have ended, each later one when a
        further call has, so that they do not all compete for the same place. The length of a call
        is rounded up to one of seven, because most calls may be those of other tenants.
        """
        used = self.quotas.in_flight()
        length, each = used.engine_ns / 1e9 / max(1, used.calls), _SHORTEST_RETRY
        while each < min(_LONGEST_RETRY, length):
            each *= _RETRY_STEP
        each = min(_LONGEST_RETRY, each)
        step = each / math.sqrt(_RETRY_STEP)  # as long as calls are on average that are rounded up
        return self.quotas.retry_delay(time.monotonic(), each, step)
