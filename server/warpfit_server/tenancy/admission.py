"""Admission: whether the server accepts a call now, by calls in flight, rate, memory and queue.

A call over a limit is refused at once, where possible before anything is decoded, and told when a
retry is likely to be accepted. Accepted calls wait in a queue that these limits bound.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final, Protocol

from warpfit.dataset import Layout
from warpfit.errors import ResourceExhaustedError
from warpfit.fitting import FitRequest
from warpfit.request import Evaluation, Timings
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


class CostModel:
    """Estimates the engine time of each kind of work with a line through what was observed.

    The line has the time of a call and that of its units. The assumed points stay in the sums, so
    that small calls, whose time says nothing about the units, do not decide about large ones.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float, float, float, float]] = {}

    def estimate(self, kind: str, units: float) -> int:
        """Return the estimated nanoseconds of ``units`` of a kind of work."""
        n, x, y, xx, xy = self._sums.get(kind, _ASSUMED)
        slope = max(0.0, (n * xy - x * y) / (n * xx - x * x))
        return int(min(_LONGEST_ESTIMATE, max(0.0, (y - slope * x) / n) + slope * units))

    def observe(self, kind: str, units: float, nanoseconds: float) -> None:
        """Add an observation. Takes no lock: losing one of two at the same time does no harm."""
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


class EngineRun(Protocol):
    """What a reservation reads of `warpfit_server.ipc.engine_connection.InFlightRequest`."""

    @property
    def timings(self) -> Timings | None:
        """Timings of the engine, once it has finished without an error."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Memory and engine time of one call; a context manager that holds them."""

    admission: Admission
    tenant: str
    kind: str
    units: float
    amount: Amounts
    held: int
    """Bytes of the call's message, which are counted already."""
    run: EngineRun | None = None
    """Teaches the cost model when it has finished."""

    def __enter__(self) -> Reservation:
        """Count the memory and engine time.

        Raises:
            ResourceExhaustedError: if too much is in flight.

        """
        admission = self.admission
        admission.acquire(self.tenant, self.amount, admission.tenant_quota, self.held)
        return self

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        """Give them back, and learn from the run."""
        admission = self.admission
        admission.quotas.release(self.tenant, self.amount)
        if self.run is not None and self.run.timings is not None:
            admission.costs.observe(self.kind, self.units, self.run.timings.compute)


class Admission:
    """Accepts or refuses the calls of one front-end process.

    Calls and bytes in flight are limited for the server and for each tenant, because they are
    finite. Engine time in the queue is limited for each tenant alone: the engine takes turns among
    tenants, so what one has queued does not delay another. A call of many hours counts for half of
    its tenant's queue: it is legitimate work, and must not shut its own tenant out either.

    Args:
        config: the server's configuration.
        tenants: limits of the tenants.
        quotas: what is in flight in all front-end processes.

    """

    def __init__(self, config: Config, tenants: TenantLimits, quotas: QuotaTable) -> None:
        limits = tenants.server
        queue = int(config.max_queue_seconds * 1e9)
        pending = config.pending_bytes
        self.quotas = quotas
        self.costs = CostModel()
        self.limits = tenants.limits
        """Limits of a tenant; see `TenantLimits.limits`."""
        self.tenant_quota = Amounts(0, int(tenants.share(pending)), queue)
        """Bytes and engine time that one tenant may have in flight."""
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
        """Count a call that arrives, and the largest message that it may have.

        gRPC receives a message completely before it tells the length, so only the largest message
        that it would receive is sure to be enough; `shrink_message` gives the rest back.

        Args:
            tenant: owner of the call.
            limits: limits of the tenant.
            slot: whether it counts as a call in flight, until `leave`.

        Raises:
            ResourceExhaustedError: if too much is in flight.

        """
        own = Amounts(limits.requests, self.tenant_quota.nbytes, 0)
        self.acquire(tenant, Amounts(int(slot), self.message_bytes, 0), own)

    def leave(self, tenant: str) -> None:
        """Give back the slot of a call in flight."""
        self.quotas.release(tenant, Amounts(calls=1))

    def shrink_message(self, tenant: str, reserved: int, size: int) -> None:
        """Count ``size`` bytes of a message, 0 once it is freed, instead of ``reserved``."""
        if size < reserved:
            self.quotas.release(tenant, Amounts(nbytes=reserved - size))

    def acquire(self, tenant: str, amount: Amounts, own: Amounts, held: int = 0) -> None:
        """Count what a call takes.

        Args:
            tenant: owner of the call.
            amount: what it takes.
            own: what the tenant may have in flight.
            held: bytes that are counted for the call already.

        Raises:
            ResourceExhaustedError: if more would be in flight than may be.

        """
        exceeded = self.quotas.acquire(tenant, amount, own, self._server_quota, held)
        if exceeded is not None:
            raise self._refusal(exceeded, amount)

    def reserve_evaluation(
        self, tenant: str, evaluation: Evaluation, layout: Layout, answer: int, message: int
    ) -> Reservation:
        """Return the reservation of an evaluation, to be held while it waits and runs.

        Args:
            tenant: owner of the call.
            evaluation: what it asks for.
            layout: layout of the data set.
            answer: bytes of the answer.
            message: bytes of the request, which are counted already.

        """
        derives = evaluation.gradient or evaluation.jacobian or evaluation.variable_gradient
        units = evaluation.token_rows(layout)
        return self._reserve(tenant, "derive" if derives else "evaluate", units, answer, message)

    def reserve_fit(
        self, tenant: str, request: FitRequest, layout: Layout, answer: int, message: int
    ) -> Reservation:
        """Return the reservation of a fit, as `reserve_evaluation` does."""
        passes = min(_FIT_PASSES, 1 + request.settings.max_iterations)
        units = request.problem.token_rows(layout) * passes
        return self._reserve(tenant, "fit", units, answer, message)

    def _reserve(
        self, tenant: str, kind: str, units: float, answer: int, message: int
    ) -> Reservation:
        work = min(self._longest_work, self.costs.estimate(kind, units))
        return Reservation(self, tenant, kind, units, Amounts(0, answer, work), message)

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
