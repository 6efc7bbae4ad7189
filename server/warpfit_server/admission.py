"""Whether the server accepts a call now, by calls in flight, rate, memory and queue; and its turn.

A call over a limit is refused at once, where possible before anything is decoded, and told when a
retry is likely to be accepted. Accepted calls wait in a queue that these limits bound.

The tenants of a front-end process share its time by turns. What a front end does for a call is
mostly Python code, which one thread of a process runs at a time. A tenant with fifty calls at once
would get fifty turns for each turn of another tenant. So only a few calls of each tenant are
decoded at a time; its others wait in order of arrival, at no cost. And a tenant whose calls take
long, because they name many variables or ask for long answers, rests until it has used no more than
its share of a core, while other tenants call. It rests for a second at most, and what it has used
beyond that is forgiven: whatever it has done, its next call is not kept out.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from warpfit.dataset import Layout
from warpfit.errors import ResourceExhaustedError
from warpfit.request import Evaluation, FitRequest
from warpfit.server_info import Limits
from warpfit_server.config import Config
from warpfit_server.tenants import Amounts, QuotaTable, TenantLimits

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

    def leave(self, tenant: str, counted: Sequence[int]) -> None:
        """Count a request, or what is given of its `Amounts`, no more."""
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
            self.leave(tenant, (0, nbytes, counted))

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
        # The first call that is refused retries when the running one is expected to have ended,
        # each later one when a further call has, so that they do not all compete for the same
        # place. The length of a call is rounded up to one of seven, because most calls may be those
        # of other tenants.
        used = self.quotas.in_flight()
        length, each = used.engine_ns / 1e9 / max(1, used.calls), _SHORTEST_RETRY
        while each < min(_LONGEST_RETRY, length):
            each *= _RETRY_STEP
        each = min(_LONGEST_RETRY, each)
        step = each / math.sqrt(_RETRY_STEP)  # as long as calls are on average that are rounded up
        retry_after = self.quotas.retry_delay(time.monotonic(), each, step)
        raise ResourceExhaustedError(
            message,
            reason,
            f"Retry with back-off, or start the server with a higher {flag}",
            needed=needed,
            available=exceeded.limit,
            retry_after=retry_after,
        )


# -------------------------------------------------------------------------------------------- turns

#: Calls of a tenant that are decoded at a time: one computes in NumPy while another runs Python.
_MOST: Final = 2
#: Seconds of a core that a tenant may use each second for calls that take long, and the seconds
#: that it may be ahead of that.
_SHARE, _AHEAD = 1 / 3, 0.02
#: Most seconds for which a tenant rests after a charge, however much it has used.
_LONGEST_REST: Final = 1.0
#: Tenants that are remembered as having been charged, before those that have rested are forgotten.
_MOST_CHARGED: Final = 1_000
#: Seconds after which another tenant that has called does not count as calling.
_CALLING_SECONDS: Final = 0.5
#: Seconds after which a thread that waits looks whether its call has ended.
_CHECK_SECONDS: Final = 0.25


class TenantTurns:
    """Lets a few threads of each tenant in at a time, in order of arrival, and has some rest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: dict[str, int] = {}
        self._waiting: dict[str, deque[threading.Event]] = {}
        self._used_until: dict[str, float] = {}
        """Moments until which tenants have used their share up, once they were charged."""
        self._charged: dict[str, float] = {}
        """Seconds that they were charged last."""
        self._latest, self._latest_at, self._another_at = "", 0.0, 0.0
        """The tenant that has called last, when, and when another one has before."""

    def acquire(self, tenant: str, check_wanted: Callable[[], None] = lambda: None) -> float:
        """Wait to be let in, and to have rested; `release` must follow.

        ``check_wanted`` is called again and again while the thread waits; its error ends the wait.

        Returns:
            As `rest`.
        """
        turn = None
        with self._lock:
            if tenant != self._latest:
                self._latest, self._another_at = tenant, self._latest_at
            self._latest_at = time.monotonic()
            inside = self._inside.get(tenant, 0)
            if inside < _MOST:
                self._inside[tenant] = inside + 1
            else:
                turn = threading.Event()
                self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            if turn is not None:
                while not turn.wait(_CHECK_SECONDS):
                    check_wanted()
                check_wanted()
            return self.rest(tenant, check_wanted)
        except BaseException:  # it waits no more, and passes a turn on that has come meanwhile
            with self._lock:
                has_come = turn is None or turn.is_set()
                if turn is not None and not has_come:
                    self._waiting[tenant].remove(turn)
                    if not self._waiting[tenant]:
                        del self._waiting[tenant]
            if has_come:
                self.release(tenant)
            raise

    def charge(self, tenant: str, seconds: float, expected: float = 0.0) -> None:
        """Count time that a thread has computed for a tenant, of which some was ``expected``."""
        with self._lock:
            self._charged[tenant] = min(seconds, _LONGEST_REST * _SHARE)
            self._use(tenant, seconds - expected)
            if len(self._used_until) > _MOST_CHARGED:  # anybody with a certificate may be a tenant
                now = time.monotonic()
                self._used_until = {who: at for who, at in self._used_until.items() if at > now}
                self._charged = {who: self._charged[who] for who in self._used_until}

    def rest(self, tenant: str, check_wanted: Callable[[], None] = lambda: None) -> float:
        """Wait while the tenant has used more than its share and another one calls.

        Returns:
            Seconds that are expected of what the thread does next, as many as the tenant was
            charged last, and are charged already: so threads that rest go on one by one.
        """
        while tenant in self._used_until:
            with self._lock:
                now = time.monotonic()
                until = max(now, self._used_until.get(tenant, now))
                called = self._another_at if tenant == self._latest else self._latest_at
                if called < now - _CALLING_SECONDS:
                    return 0.0
                if until <= now + _AHEAD:
                    expected = self._charged.get(tenant, 0.0)
                    self._use(tenant, expected)
                    return expected
            time.sleep(min(until - now - _AHEAD, _CHECK_SECONDS))
            check_wanted()
        return 0.0

    def _use(self, tenant: str, seconds: float) -> None:
        """Count time as used, or as not used after all if it is negative; under the lock."""
        now = time.monotonic()
        until = max(now, self._used_until.get(tenant, now)) + seconds / _SHARE
        self._used_until[tenant] = min(until, now + _LONGEST_REST)

    def release(self, tenant: str) -> None:
        """Let the tenant's next thread in."""
        with self._lock:
            waiting = self._waiting.get(tenant)
            if waiting is not None:
                waiting.popleft().set()
                if not waiting:
                    del self._waiting[tenant]
                return
            inside = self._inside.pop(tenant)
            if inside > 1:
                self._inside[tenant] = inside - 1
