"""Lets what is suspected of having crashed an engine run alone, one suspect after the other.

If the engine dies then, it is clear what of; see `warpfit_server.ipc.quarantine`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from warpfit_server.engine.request import Request
from warpfit_server.engine.scheduler import Scheduler, Task
from warpfit_server.ipc.segment_layout import ALONE, BEGUN
from warpfit_server.tenancy.tenants import PROBE

#: Seconds between two looks whether a suspect's time is over, and whether somebody waits for it.
_LOOK: Final = 0.05


@dataclass(slots=True, eq=False)
class _Trial:
    """A suspect whose turn it is."""

    task: Task[Request]
    until: float
    """When others need no longer wait for it, or it for others, on the clock."""
    is_alone: bool = False


class Isolation:
    """Takes steps from the scheduler, and lets suspects run alone.

    When it is a suspect's turn, others are kept from starting for at most `Request.alone` seconds
    until all that runs has ended, and then for as long again. A suspect that they do not make room
    for, or that takes longer, runs beside them. Probes are not kept waiting.

    Calls must not overlap, as those of the scheduler.

    Args:
        scheduler: of the steps.
        clock: tells seconds.

    """

    def __init__(
        self, scheduler: Scheduler[Request], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._running = 0
        """Tasks of which a step runs, and those that wait for a future; without probes."""
        self._trial: _Trial | None = None

    @property
    def timeout(self) -> float | None:
        """Seconds after which `next` may return something although nothing has come or ended."""
        return None if self._trial is None else _LOOK

    def next(self) -> list[Task[Request]]:
        """Take the tasks of the next step: none, one, or several that are merged.

        Each must come back through `Scheduler.ran` and `ended`.
        """
        tasks = self._scheduler.next(PROBE) or self._next()
        self._running += _count(tasks)
        return tasks

    def ended(self, tasks: list[Task[Request]], left: list[Task[Request]]) -> None:
        """Take notice of the end of a step, and of what it has waited for afterwards.

        Args:
            tasks: those of the step.
            left: of these, the ones that have more steps, which are queued.

        """
        self._running -= _count(tasks)
        for task in left:
            self._scheduler.add(task)
        if self._trial is not None and self._trial.task in tasks and not left:
            self._trial = None

    def _next(self) -> list[Task[Request]]:
        if self._trial is None:
            tasks = self._scheduler.next()
            if not (tasks and tasks[0].item.alone):
                return tasks
            self._scheduler.put_back(tasks[0])
            self._trial = _Trial(tasks[0], self._clock() + tasks[0].item.alone)
        trial, now = self._trial, self._clock()
        request = trial.task.item
        if not (trial.is_alone or self._running):
            trial.is_alone, trial.until = True, now + request.alone
            request.state[0] = ALONE
        elif now >= trial.until or request.cancelled[0]:
            return self._give_up(trial)
        return self._scheduler.take(trial.task) if trial.is_alone else []

    def _give_up(self, trial: _Trial) -> list[Task[Request]]:
        """Let others in; the suspect runs beside them from now on."""
        request = trial.task.item
        request.state[0] = BEGUN
        request.alone = 0.0
        self._trial = None
        return self._scheduler.take(trial.task) or self._next()


def _count(tasks: list[Task[Request]]) -> int:
    return sum(task.tenant != PROBE for task in tasks)
