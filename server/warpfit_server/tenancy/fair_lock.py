"""Fair sharing of a door's own time among tenants.

Decoding and checking a batch is Python, of which a process runs one thread at a time, in turns. So
a tenant with fifty calls at once would have fifty turns for each of another's. Of each tenant a
few calls are taken in at a time; its others wait, first come, first served, and cost nothing.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Final

#: Calls of a tenant that are taken in at a time: one computes in NumPy while the other runs Python.
_TOGETHER: Final = 2


class Turnstile:
    """Lets a few calls of each tenant in at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: Counter[str] = Counter()
        self._waiting: dict[str, deque[threading.Event]] = {}

    def enter(self, tenant: str) -> None:
        """Wait for a turn, which `leave` ends."""
        with self._lock:
            if self._inside[tenant] < _TOGETHER:
                self._inside[tenant] += 1
                return
            turn = threading.Event()
            self._waiting.setdefault(tenant, deque()).append(turn)
        turn.wait()

    def leave(self, tenant: str) -> None:
        """End a turn, and give it to the tenant's next call."""
        with self._lock:
            waiting = self._waiting.get(tenant)
            if waiting is not None:
                waiting.popleft().set()
                if not waiting:
                    del self._waiting[tenant]
                return
            self._inside[tenant] -= 1
            if not self._inside[tenant]:
                del self._inside[tenant]
