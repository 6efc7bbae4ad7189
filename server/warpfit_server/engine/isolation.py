"""Isolation: requests that are suspected of having crashed an engine run alone, one at a time.

If the engine dies meanwhile, the culprit is known; see `warpfit_server.ipc.quarantine`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from warpfit_server.engine.request import Request
from warpfit_server.engine.scheduler import Scheduler
from warpfit_server.ipc.segment_layout import ALONE, BEGUN
from warpfit_server.tenancy.tenants import PROBE

#: Seconds between two looks at the clock and at new requests while a suspect waits or runs.
_POLL: Final = 0.05


@dataclass(slots=True, eq=False)
class _Trial:
    """The suspect whose turn it is."""

    suspect: Request
    until: float
    """End of the time for which it waits for the others, or the others for it; on the clock."""
    is_alone: bool = False


class Isolation:
    """Takes steps from the scheduler, and lets suspects run alone.

    At a suspect's turn no other request may begin a step for at most `Request.alone` seconds, until
    all running steps have ended, and then for as long again. A suspect runs beside others if their
    steps do not end in that time, or once it takes longer itself. Probes never wait.

    Calls must not overlap, like those of the scheduler.

    Args:
        scheduler: that chooses the steps.
        clock: returns seconds.
    """

    def __init__(
        self, scheduler: Scheduler[Request], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._running = 0
        """Requests with a step that runs or waits for a future; without probes."""
        self._trial: _Trial | None = None

    @property
    def timeout(self) -> float | None:
        """Seconds after which `next` may return something although nothing has arrived or ended."""
        return None if self._trial is None else _POLL

    def next(self) -> list[Request]:
        """Take the requests of the next step: none, one, or several to be merged.

        Each must come back through `Scheduler.ran` and `ended`.
        """
        requests = self._scheduler.next(PROBE) or self._next()
        self._running += _count(requests)
        return requests

    def ended(self, requests: list[Request], unfinished: list[Request]) -> None:
        """Take note that a step has ended, and what it waited for; queue unfinished requests.

        Args:
            requests: those of the step.
            unfinished: those of them that have more steps.
        """
        self._running -= _count(requests)
        for request in unfinished:
            self._scheduler.add(request)
        if self._trial is not None and self._trial.suspect in requests and not unfinished:
            self._trial = None

    def _next(self) -> list[Request]:
        if self._trial is None:
            requests = self._scheduler.next()
            if not (requests and requests[0].alone):
                return requests
            self._scheduler.put_back(requests[0])
            self._trial = _Trial(requests[0], self._clock() + requests[0].alone)
        trial, now = self._trial, self._clock()
        suspect = trial.suspect
        if not (trial.is_alone or self._running):
            trial.is_alone, trial.until = True, now + suspect.alone
            suspect.state = ALONE
        elif now >= trial.until or suspect.is_cancelled:
            return self._end_trial(suspect)
        return self._scheduler.take(suspect) if trial.is_alone else []

    def _end_trial(self, suspect: Request) -> list[Request]:
        """Let others run beside the suspect from now on."""
        suspect.state = BEGUN
        suspect.alone = 0.0
        self._trial = None
        return self._scheduler.take(suspect) or self._next()


def _count(requests: list[Request]) -> int:
    return sum(request.tenant != PROBE for request in requests)
