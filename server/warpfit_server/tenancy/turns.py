"""Turns: how the tenants of a front-end process share its time.

What a front end does for a call is mostly Python code, which one thread of a process runs at a
time. A tenant with fifty calls at once would get fifty turns for each turn of another tenant. So
only a few calls of each tenant are decoded at a time; its others wait in order of arrival, at no
cost. And a tenant whose calls take long, because they name many variables or ask for long answers,
rests until it has used no more than its share of a core, while other tenants call. It rests for a
second at most, and what it has used beyond that is forgiven: whatever it has done, its next call is
not kept out.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

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
