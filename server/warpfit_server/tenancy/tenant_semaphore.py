"""A semaphore for each tenant, which shares a front end's decoding time fairly among tenants.

Decoding and checking a batch is Python code, which only one thread of a process runs at a time. A
tenant with fifty calls at once would get fifty turns for each turn of another tenant. So only a few
calls of each tenant are decoded at a time; its others wait in order of arrival, at no cost.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

#: Calls of a tenant that are decoded at a time: one computes in NumPy while another runs Python.
_MOST: Final = 2
#: Seconds after which a thread that waits looks whether its call has ended.
_CHECK_SECONDS: Final = 0.25


class TenantSemaphore:
    """Lets a few threads of each tenant in at a time, in order of arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: dict[str, int] = {}
        self._waiting: dict[str, deque[threading.Event]] = {}

    def acquire(self, tenant: str, check_wanted: Callable[[], None] = lambda: None) -> None:
        """Wait to be let in; `release` must follow.

        ``check_wanted`` is called again and again while the thread waits; its error ends the wait.
        """
        with self._lock:
            inside = self._inside.get(tenant, 0)
            if inside < _MOST:
                self._inside[tenant] = inside + 1
                return
            turn = threading.Event()
            self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            while not turn.wait(_CHECK_SECONDS):
                check_wanted()
            check_wanted()
        except BaseException:
            self._give_up(tenant, turn)
            raise

    def _give_up(self, tenant: str, turn: threading.Event) -> None:
        """Wait no more; pass on a turn that has come meanwhile."""
        with self._lock:
            has_come = turn.is_set()
            if not has_come:
                self._waiting[tenant].remove(turn)
                if not self._waiting[tenant]:
                    del self._waiting[tenant]
        if has_come:
            self.release(tenant)

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
