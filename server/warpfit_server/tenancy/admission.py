"""Admission: whether the server accepts a call now, by calls in flight, rate, memory and queue.

A call over a limit is refused at once, where possible before anything is decoded, and told when a
retry is likely to be accepted. Accepted calls wait in a queue that these limits bound.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from warpfit.dataset import Layout
from warpfit.errors import ResourceExhaustedError
from warpfit.fitting import FitRequest
from warpfit.request import Evaluation
from warpfit.server_info import Limits
from warpfit_server.config import Config
from warpfit_server.tenancy.quotas import Amounts, Exceeded, QuotaTable
from warpfit_server.tenancy.tenants import TenantLimits

#: Shortest and longest time between the retries of two refused calls, in seconds.
_SHORTEST_RETRY: Final = 0.02
_LONGEST_RETRY: Final = 1.0
#: Largest part of its tenant's queue that one call counts for, however long it is.
_LARGEST_PART: Final = 0.5
#: A limit that is none, in 64 bits.
_UNLIMITED: Final = 2**62
#: Sums over observed points (units x, nanoseconds y): count, x, y, x^2, xy. They start with two
#: assumed points: a call of no units takes 0.1 ms, one of 10^9 token-rows 0.3 s.
_ASSUMED: Final = (2.0, 1e9, 3.001e8, 1e18, 3e17)
#: Longest estimate in nanoseconds, some days: the sums of many must fit 64 bits.
_LONGEST_ESTIMATE: Final = 2.0**50
#: Most passes over the data that are expected of a fit; most searches end long before they must.
_FIT_PASSES: Final = 20
#: Factor by which each later measurement reduces the weight of a measurement.
_DECAY: Final = 0.98
#: For each field of `Amounts`: reason of a refusal, its words, and the flag that raises the limit.
_REFUSALS: Final = {
    "calls": ("TOO_MANY_REQUESTS", "calls are in flight", "--max-requests"),
    "nbytes": (
        "QUEUE_FULL",
        "bytes of messages, batches and answers are in flight",
        "--max-pending-bytes",
    ),
    "engine_ns": ("QUEUE_FULL", "ns of work are in the queue", "--max-queue-seconds"),
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
        return cls("fit", request.problem.token_rows(layout) * passes)


class CostModel:
    """Estimates the engine time of each kind of work with a line through what was observed.

    The line has the time of a call and that of its units. The assumed points stay in the sums, so
    that small calls, whose time says nothing about the units, do not decide about large ones.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float, float, float, float]] = {}

    def estimate(self, cost: CallCost) -> int:
        """Return the estimated engine time in nanoseconds."""
        n, x, y, xx, xy = self._sums.get(cost.kind, _ASSUMED)
        slope = max(0.0, (n * xy - x * y) / (n * xx - x * x))
        return int(min(_LONGEST_ESTIMATE, max(0.0, (y - slope * x) / n) + slope * cost.units))

    def observe(self, cost: CallCost, nanoseconds: float) -> None:
        """Add an observation. Takes no lock: losing one of two at the same time does no harm."""
        kind, units = cost
        n, x, y, xx, xy = (
            assumed + _DECAY * (old - assumed)
            for assumed, old in zip(_ASSUMED, self._sums.get(kind, _ASSUMED), strict=True)
        )
        self._sums[kind] = (
            n + 1.0,
            x + units,
            y + nanoseconds,
            xx + units * units,
            xy + units * nanoseconds,
        )


class Admission:
    """Accepts or refuses the calls of one front-end process.

    Calls and bytes in flight are limited for the server and for each tenant, because they are
    finite. Engine time in the queue is limited for each tenant alone: the engine takes turns among
    tenants, so what one has queued does not delay another. A call of many hours counts for half of
    its tenant's queue: it is legitimate work, and must not shut its own tenant out either.
    """

    def __init__(self, config: Config, tenants: TenantLimits, quotas: QuotaTable) -> None:
        limits = tenants.server
        queue = int(config.max_queue_seconds * 1e9)
        pending = config.pending_bytes
        self.quotas = quotas
        self.costs = CostModel()
        self.limits = tenants.limits
        """Limits of a tenant; see `TenantLimits.limits`."""
        self._tenant_quota = Amounts(0, int(tenants.share(pending)), queue)
        self.message_bytes = limits.message_bytes
        """Bytes that gRPC may hold of a message before its length is known."""
        self._longest_work = int(_LARGEST_PART * queue)
        self._server_rate = limits.rate
        self._server_quota = Amounts(limits.requests, pending, _UNLIMITED)

    def check_rate(self, tenant: str, own: float) -> None:
        """Count a call against the rates, of which ``own`` is the tenant's.

        Raises:
            ResourceExhaustedError: if it comes too soon; says when it may come.

        """
        server = self._server_rate
        if not (own or server):
            return
        delay = self.quotas.count_call(tenant, time.monotonic(), own, server)
        if delay > 0:
            rate = min(own or server, server or own)
            raise ResourceExhaustedError(
                f"calls come faster than {rate:g} a second",
                "RATE_LIMITED",
                "Send larger batches less often, or ask for a higher rate",
                retry_after=delay,
            )

    def enter(self, tenant: str, limits: Limits, *, slot: bool = True) -> None:
        """Count a call that arrives, unless not ``slot``, and the longest message it may have.

        gRPC receives a message completely before it tells the length, so only the longest message
        that it would receive is sure to be enough; `shrink_message` gives the rest back.

        Raises:
            ResourceExhaustedError: if too much is in flight.

        """
        own = Amounts(limits.requests, self._tenant_quota.nbytes, 0)
        self._acquire(tenant, Amounts(int(slot), self.message_bytes, 0), own)

    def leave(self, tenant: str) -> None:
        """Give back the slot of a call in flight."""
        self.quotas.release(tenant, Amounts(calls=1))

    def shrink_message(self, tenant: str, reserved: int, size: int) -> None:
        """Count ``size`` bytes of a message, 0 once it is freed, instead of ``reserved``."""
        if size < reserved:
            self.quotas.release(tenant, Amounts(nbytes=reserved - size))

    @contextmanager
    def reserve(self, tenant: str, cost: CallCost, answer: int, message: int) -> Iterator[None]:
        """Count the engine time and the bytes of ``answer`` while a call waits and runs.

        The bytes of its ``message`` are counted already.

        Raises:
            ResourceExhaustedError: if too much is in flight.

        """
        engine_ns = min(self._longest_work, self.costs.estimate(cost))
        amount = Amounts(0, answer, engine_ns)
        self._acquire(tenant, amount, self._tenant_quota, message)
        try:
            yield
        finally:
            self.quotas.release(tenant, amount)

    def _acquire(self, tenant: str, amount: Amounts, own: Amounts, held: int = 0) -> None:
        exceeded = self.quotas.acquire(tenant, amount, own, self._server_quota, held)
        if exceeded is not None:
            raise self._refusal(exceeded, amount)

    def _refusal(self, exceeded: Exceeded, amount: Amounts) -> ResourceExhaustedError:
        reason, what, flag = _REFUSALS[exceeded.quantity]
        needed = getattr(amount, exceeded.quantity)
        if exceeded.of_tenant:
            message = f"{exceeded.used} {what} of this tenant and the limit is {exceeded.limit}"
            needed += exceeded.used
        else:  # how much other tenants have in flight is secret
            message = f"too many {what} and the limit of the server is {exceeded.limit}"
        return ResourceExhaustedError(
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
        further call has, so that they do not all compete for the same slot.
        """
        used = self.quotas.in_flight()
        each = used.engine_ns / 1e9 / max(1, used.calls)
        each = min(_LONGEST_RETRY, max(_SHORTEST_RETRY, each))
        return self.quotas.retry_delay(time.monotonic(), each, each)
