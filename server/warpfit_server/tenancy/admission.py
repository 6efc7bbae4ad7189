"""Whether the server takes a call now: calls in flight, rate, memory and time of the engine.

What is over a limit is refused at once, before anything is decoded where that can be told, with the
time after which a repetition is likely to be taken. What is taken waits in a queue that these
limits bound.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from warpfit.dataset import Layout
from warpfit.errors import ResourceExhaustedError
from warpfit.fitting import FitRequest
from warpfit.request import Evaluation
from warpfit.server_info import Limits
from warpfit_server.config import Config
from warpfit_server.ipc.engine_connection import InFlightRequest
from warpfit_server.tenancy.quotas import Amounts, Ledger, Shortage, Usage
from warpfit_server.tenancy.tenants import TenantBook

#: Shortest and longest time for which the place of another call is waited, in seconds.
_SHORTEST: Final = 0.02
_LONGEST: Final = 1.0
#: One call in flight.
_CALL: Final = (1, 0, 0)
#: Part of its tenant's queue that one call counts for at most, however long it is.
_LARGEST_PART: Final = 0.5
#: No limit of what is counted in 64 bits.
_UNLIMITED: Final = 2**62
#: Sums over observed points (units x, nanoseconds y): number, x, y, x^2, xy. They start with two
#: that are assumed: a call of no units takes 0.1 ms, one of 10^9 token-rows 0.3 s.
_START: Final = (2.0, 1e9, 3.001e8, 1e18, 3e17)
#: Longest estimate in nanoseconds, some days: sums of many must fit 64 bits.
_LONGEST_WORK: Final = 2.0**50
#: Passes over the data that are expected of a fit at most.
_FIT_PASSES: Final = 20
#: What remains of a measurement's weight after each later one.
_REMEMBERED: Final = 0.98
#: What can be short: reason, in words, and the flag that raises the limit.
_MEASURES: Final = {
    "calls": ("TOO_MANY_REQUESTS", "calls are in flight", "--max-requests"),
    "size": (
        "QUEUE_FULL",
        "bytes of messages, batches and answers are in flight",
        "--max-pending-bytes",
    ),
    "work": ("QUEUE_FULL", "ns of work are in the queue", "--max-queue-seconds"),
}


class Pace:
    """Engine time of each kind of work: a straight line through what was observed.

    It has a call's own time and that of its units. What is assumed stays in the sums, so that small
    calls alone, whose time says nothing of the units, do not decide about large ones.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float, float, float, float]] = {}

    def estimate(self, kind: str, units: float) -> int:
        """Estimated nanoseconds of ``units`` of a kind of work."""
        n, x, y, xx, xy = self._sums.get(kind, _START)
        slope = max(0.0, (n * xy - x * y) / (n * xx - x * x))
        return int(min(_LONGEST_WORK, max(0.0, (y - slope * x) / n) + slope * units))

    def observe(self, kind: str, units: float, nanoseconds: float) -> None:
        """Learn from work that is done. Threads may overtake each other: it is an estimate."""
        n, x, y, xx, xy = self._sums.get(kind, _START)
        self._sums[kind] = (
            _START[0] + _REMEMBERED * (n - _START[0]) + 1.0,
            _START[1] + _REMEMBERED * (x - _START[1]) + units,
            _START[2] + _REMEMBERED * (y - _START[2]) + nanoseconds,
            _START[3] + _REMEMBERED * (xx - _START[3]) + units * units,
            _START[4] + _REMEMBERED * (xy - _START[4]) + units * nanoseconds,
        )


@dataclass(slots=True, eq=False)
class Charge:
    """What one call takes of memory and engine time; a context manager that holds it."""

    admission: Admission
    tenant: str
    kind: str
    units: float
    amount: Amounts
    held: int
    """Bytes of its message, which are counted already."""
    run: InFlightRequest | None = None
    """To learn from, once it has finished."""

    def __enter__(self) -> Charge:
        """Take it.

        Raises:
            ResourceExhaustedError: if there is too much in flight.

        """
        admission = self.admission
        admission.take(self.tenant, self.amount, admission.shared, self.held)
        return self

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        """Give it back, and learn from the run."""
        admission = self.admission
        admission.ledger.give(self.tenant, self.amount)
        if self.run is not None and self.run.timings is not None:
            admission.pace.observe(self.kind, self.units, self.run.timings.compute)


class Admission:
    """Takes or refuses calls, in one door.

    Places and bytes in flight are limited for the server and for each tenant, because they are
    finite. Engine time in the queue is limited for each tenant alone: the engine takes turns among
    tenants, so what one has queued costs another nothing. A call of many hours counts for half of
    its tenant's queue: it is legitimate work, and must not shut its own tenant out either.

    Args:
        config: the server's configuration.
        book: limits of the tenants.
        ledger: what is in use, in all doors.

    """

    def __init__(self, config: Config, book: TenantBook, ledger: Ledger) -> None:
        limits = book.server
        work = int(config.max_queue_seconds * 1e9)
        pending = config.pending_bytes
        self.ledger = ledger
        self.pace = Pace()
        self.limits = book.limits
        """Limits of a tenant; see `TenantBook.limits`."""
        self.shared: Amounts = (0, int(book.share(pending)), work)
        """Bytes and engine time that one tenant may have in flight."""
        self.message_bytes = limits.message_bytes
        """Bytes that gRPC may hold of a message before anybody knows how long it is."""
        self._longest_work = int(_LARGEST_PART * work)
        self._server_rate = limits.rate
        self._server: Amounts = (limits.requests, pending, _UNLIMITED)

    def check_rate(self, tenant: str, own: float) -> None:
        """Count a call against the rates.

        Args:
            tenant: whose call it is.
            own: the tenant's rate.

        Raises:
            ResourceExhaustedError: if it comes too soon; says when it may come.

        """
        server = self._server_rate
        if not (own or server):
            return
        delay = self.ledger.wait(tenant, time.monotonic(), own, server)
        if delay > 0:
            rate = min(own or server, server or own)
            raise ResourceExhaustedError(
                f"calls come faster than {rate:g} a second",
                "RATE_LIMITED",
                "Send larger batches less often, or ask for a higher rate",
                retry_after=delay,
            )

    def enter(self, tenant: str, limits: Limits, *, place: bool = True) -> None:
        """Count a call that arrives, and as many bytes as its message may have.

        gRPC collects a message before it tells how long it is, so that only the longest that it
        would collect is sure to be enough; `arrived` gives back what the message has not needed.

        Args:
            tenant: whose call it is.
            limits: of the tenant.
            place: whether it counts as a call in flight, until `leave`.

        Raises:
            ResourceExhaustedError: if too much is in flight.

        """
        own = (limits.requests, self.shared[1], 0)
        self.take(tenant, (int(place), self.message_bytes, 0), own)

    def leave(self, tenant: str) -> None:
        """Count a call no more that has entered with a place."""
        self.ledger.give(tenant, _CALL)

    def arrived(self, tenant: str, size: int, reserved: int) -> None:
        """Count ``size`` bytes of a message, 0 once it is gone, instead of ``reserved``."""
        if size < reserved:
            self.ledger.give(tenant, (0, reserved - size, 0))

    def take(self, tenant: str, amount: Amounts, own: Amounts, held: int = 0) -> None:
        """Count what a call takes.

        Args:
            tenant: whose call it is.
            amount: what it takes.
            own: what the tenant may have in flight.
            held: bytes that are counted for the call already.

        Raises:
            ResourceExhaustedError: if more is in flight than may be.

        """
        shortage = self.ledger.take(tenant, amount, own, self._server, held)
        if shortage is not None:
            raise self._refusal(shortage, amount)

    def evaluation(
        self, tenant: str, evaluation: Evaluation, layout: Layout, answer: int, message: int
    ) -> Charge:
        """Count an evaluation's memory and engine time while it waits and runs.

        Args:
            tenant: whose call it is.
            evaluation: that it asks for.
            layout: of the data set.
            answer: bytes of the answer.
            message: bytes of the request, which are counted already.

        """
        derives = evaluation.gradient or evaluation.jacobian or evaluation.variable_gradient
        units = evaluation.token_rows(layout)
        return self._charge(tenant, "derive" if derives else "evaluate", units, answer, message)

    def fit(
        self, tenant: str, request: FitRequest, layout: Layout, answer: int, message: int
    ) -> Charge:
        """Count a fit as `evaluation` does; most searches end long before they must."""
        passes = min(_FIT_PASSES, 1 + request.settings.max_iterations)
        units = request.problem.token_rows(layout) * passes
        return self._charge(tenant, "fit", units, answer, message)

    def _charge(self, tenant: str, kind: str, units: float, answer: int, message: int) -> Charge:
        work = min(self._longest_work, self.pace.estimate(kind, units))
        return Charge(self, tenant, kind, units, (0, answer, work), message)

    def _refusal(self, shortage: Shortage, amount: Amounts) -> ResourceExhaustedError:
        reason, what, flag = _MEASURES[shortage.measure]
        needed = getattr(Usage(*amount), shortage.measure)
        if shortage.of_tenant:
            message = f"{shortage.used} {what} of this tenant and the limit is {shortage.limit}"
            needed += shortage.used
        else:  # how much others have in flight is theirs to know
            message = f"too many {what} and the limit of the server is {shortage.limit}"
        return ResourceExhaustedError(
            message,
            reason,
            f"Retry with back-off, or start the server with a higher {flag}",
            needed=needed,
            available=shortage.limit,
            retry_after=self._turn(),
        )

    def _turn(self) -> float:
        """Seconds until a call that is refused now should come again.

        The first comes when the call that runs is expected to have ended, each later one when a
        further one has, so that not all of them come for the same place.
        """
        used = self.ledger.used()
        each = used.work / 1e9 / max(1, used.calls)
        each = min(_LONGEST, max(_SHORTEST, each))
        return self.ledger.turn(time.monotonic(), each, each)
