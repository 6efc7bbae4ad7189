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
from warpfit.info import Limits
from warpfit.request import Evaluation
from warpfit_server.config import Config
from warpfit_server.engine_connection import Run
from warpfit_server.ledger import Amounts, Ledger, Shortage, Usage
from warpfit_server.tenants import TenantBook

#: Shortest and longest time for which the place of another call is waited, in seconds.
_SHORTEST: Final = 0.02
_LONGEST: Final = 1.0
#: One call in flight.
_CALL: Final = (1, 0, 0)
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
    "size": ("QUEUE_FULL", "bytes of batches and answers are in flight", "--max-pending-bytes"),
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
    run: Run | None = None
    """To learn from, once it has finished."""

    def __enter__(self) -> Charge:
        """Take it.

        Raises:
            ResourceExhaustedError: if there is too much in flight.

        """
        admission = self.admission
        admission.take(self.tenant, self.amount, admission.shared)
        return self

    def __exit__(self, kind: object, value: object, traceback: object) -> None:
        """Give it back, and learn from the run."""
        admission = self.admission
        admission.ledger.give(self.tenant, self.amount)
        if self.run is not None and self.run.timings is not None:
            admission.pace.observe(self.kind, self.units, self.run.timings.compute)


class Admission:
    """Takes or refuses calls, in one door.

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
        self.shared: Amounts = (0, int(book.share(pending)), int(book.share(work)))
        """What one tenant may take of what all share."""
        self._server_rate = limits.rate
        self._server: Amounts = (limits.requests, pending, work)

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

    def enter(self, tenant: str, limits: Limits) -> None:
        """Count a call as one in flight until it leaves.

        Raises:
            ResourceExhaustedError: if too many are.

        """
        self.take(tenant, _CALL, (limits.requests, 0, 0))

    def leave(self, tenant: str) -> None:
        """Count a call no more that has entered."""
        self.ledger.give(tenant, _CALL)

    def take(self, tenant: str, amount: Amounts, own: Amounts) -> None:
        """Count what a call takes.

        Args:
            tenant: whose call it is.
            amount: what it takes.
            own: what the tenant may have in flight.

        Raises:
            ResourceExhaustedError: if more is in flight than may be.

        """
        shortage = self.ledger.take(tenant, amount, own, self._server)
        if shortage is not None:
            raise self._refusal(shortage, amount)

    def evaluation(self, tenant: str, evaluation: Evaluation, layout: Layout, size: int) -> Charge:
        """Count an evaluation's memory and engine time while it waits and runs.

        Args:
            tenant: whose call it is.
            evaluation: that it asks for.
            layout: of the data set.
            size: bytes of batch and answer.

        """
        derives = evaluation.gradient or evaluation.jacobian or evaluation.variable_gradient
        units = evaluation.token_rows(layout)
        return self._charge(tenant, "derive" if derives else "evaluate", units, size)

    def fit(self, tenant: str, request: FitRequest, layout: Layout, size: int) -> Charge:
        """Count a fit as `evaluation` does; most searches end long before they must."""
        passes = min(_FIT_PASSES, 1 + request.settings.max_iterations)
        units = request.problem.token_rows(layout) * passes
        return self._charge(tenant, "fit", units, size)

    def _charge(self, tenant: str, kind: str, units: float, size: int) -> Charge:
        work = self.pace.estimate(kind, units)
        return Charge(self, tenant, kind, units, (0, size, work))

    def _refusal(self, shortage: Shortage, amount: Amounts) -> ResourceExhaustedError:
        reason, what, flag = _MEASURES[shortage.measure]
        whose = "of this tenant " if shortage.of_tenant else ""
        return ResourceExhaustedError(
            f"{shortage.used} {what} {whose}and the limit is {shortage.limit}",
            reason,
            f"Retry with back-off, or start the server with a higher {flag}",
            needed=shortage.used + getattr(Usage(*amount), shortage.measure),
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
