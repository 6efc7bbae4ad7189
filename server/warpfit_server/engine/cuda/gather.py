"""Group commit: what arrives while others are at work is done together, in one go.

A lone caller does its own work at once. Callers that come while all leaders are busy wait; the next
leader does the work of all that wait for the same thing, and the cost of a launch is shared. A
leader that is done hands its role to one that waits, so that nobody works for others after its own
work is done.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from warpfit.errors import ResourceExhaustedError

Work = TypeVar("Work")

#: Groups at work at the same time: one is prepared while the device computes the other.
_LEADERS: Final = 2


@dataclass(slots=True, eq=False)
class _Caller(Generic[Work]):
    key: Hashable
    work: Work
    event: threading.Event = field(default_factory=threading.Event)
    leads: bool = False
    error: BaseException | None = None


class Gather(Generic[Work]):
    """Calls ``together`` with the work of one or more callers; safe to use from several threads.

    Args:
        together: does the work of a group, all of one key.
        most: most callers of a group.

    """

    def __init__(self, together: Callable[[Sequence[Work]], None], most: int) -> None:
        self._together = together
        self._most = most
        self._waiting: deque[_Caller[Work]] = deque()
        self._leaders = 0
        self._lock = threading.Lock()

    def run(self, key: Hashable, work: Work) -> None:
        """Return when the work is done, alone or with other work of the same key.

        Raises:
            Exception: what ``together`` raised. A ResourceExhaustedError of a group is not passed
                on: its members are tried one by one.

        """
        caller = _Caller(key, work)
        with self._lock:
            self._waiting.append(caller)
            if self._leaders < _LEADERS:
                self._leaders += 1
                caller.leads = True
                caller.event.set()
        caller.event.wait()
        if caller.leads:
            self._lead(caller)
        if caller.error is not None:
            raise caller.error

    def _lead(self, leader: _Caller[Work]) -> None:
        with self._lock:
            group = [c for c in self._waiting if c.key == leader.key and not c.leads]
            group = [leader, *group[: self._most - 1]]
            for caller in group:
                self._waiting.remove(caller)
        try:
            self._do(group)
        finally:
            self._hand_over()
            for caller in group[1:]:
                caller.event.set()

    def _hand_over(self) -> None:
        with self._lock:
            heir = next((caller for caller in self._waiting if not caller.leads), None)
            if heir is None:
                self._leaders -= 1
                return
            heir.leads = True
            heir.event.set()

    def _do(self, group: Sequence[_Caller[Work]]) -> None:
        try:
            self._together([caller.work for caller in group])
        except ResourceExhaustedError as error:
            if len(group) == 1:
                group[0].error = error
                return
            for caller in group:
                self._do([caller])
        except BaseException as error:
            for caller in group:
                caller.error = error
