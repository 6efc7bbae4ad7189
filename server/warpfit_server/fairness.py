"""Fair sharing of the engine among tenants.

Each tenant is charged the time that threads work for it, and who has been charged least goes first
(start-time fair queueing, Goyal, Vin and Cheng 1996, with measured instead of announced costs):

- of the evaluations that wait for a place, that of the least charged tenant gets the next one;
- a tenant that has nothing running need not wait for a place: it gets one of a few extra ones;
- an evaluation that occupies a device for long takes several places, so that not many of them wait
  there before whatever comes next;
- engines share out their cores, and the order in which a device works, by these charges, too.

A tenant that comes back keeps a bounded part of what it did not use; a new one begins with nothing.
"""

from __future__ import annotations

import contextvars
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Mapping
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import CancelledError

#: Places beyond those of the engine, for tenants that have nothing running.
_EXTRA: Final = 4
#: A tenant may be this far ahead of another, in seconds of thread time, before it goes behind it.
_AHEAD: Final = 0.005
#: Longest, in seconds of thread time, that a tenant falls back behind the others while it is away.
#: It goes before them for as long when it comes back, so this bounds how long they wait then.
_CREDIT: Final = 0.1
#: Seconds after which one that waits for its turn looks whether it was cancelled.
_LOOK_AGAIN: Final = 0.1
#: Seconds without a charge after which a tenant is away, and nobody lets it go first.
_LATELY: Final = 1.0
#: Tenants whose charges are remembered while they are away.
_REMEMBERED: Final = 1000
#: Words of a charge: nanoseconds that Python has charged, and that compiled code has; a cache line.
_PYTHON, _COMPILED, _WORDS = 0, 1, 8


class Charge:
    """What a tenant has been charged, in memory that compiled code adds to, too."""

    __slots__ = ("_words",)

    def __init__(self, seconds: float = 0.0) -> None:
        self._words = array("q", [round(1e9 * seconds)] + [0] * (_WORDS - 1))

    @property
    def address(self) -> int:
        """Of two words, int64, whose sum counts; valid while this object lives.

        Python changes the first. Compiled code adds to the second, atomically and for tenants at
        work alone.
        """
        return self._words.buffer_info()[0]

    @property
    def seconds(self) -> float:
        """All of it."""
        return 1e-9 * (self._words[_PYTHON] + self._words[_COMPILED])

    def add(self, seconds: float) -> None:
        """Add to it; one thread at a time."""
        self._words[_PYTHON] += round(1e9 * seconds)

    def raise_to(self, seconds: float) -> None:
        """Let it be no less; for tenants that have nothing at work."""
        self.add(max(0.0, seconds - self.seconds))


class Turn:
    """The place or places of one evaluation in the engine, held inside a ``with`` block."""

    def __init__(
        self, gate: FairGate, tenant: str, places: int, cancelled: NDArray[np.uint8] | None
    ) -> None:
        self._gate = gate
        self.tenant = tenant
        self._places = places
        self._cancelled = cancelled
        self._thread = 0
        self._started = self._worked = 0.0
        self._reported = 0.0  # of that thread's work
        self._token: contextvars.Token[Turn] | None = None
        self.charged = False
        """Whether the engine reports the time itself."""

    def __enter__(self) -> Self:
        """Wait for the place.

        Raises:
            CancelledError: if the evaluation was cancelled meanwhile.

        """
        self._gate.enter(self.tenant, self._places, self._cancelled)
        self._thread = threading.get_ident()
        self._started, self._worked = time.perf_counter(), time.thread_time()
        self._token = _TURN.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it, charged with the whole time if the engine has not reported any work.

        If it has, what this thread has done beside is charged.
        """
        assert self._token is not None
        _TURN.reset(self._token)
        unreported = time.perf_counter() - self._started
        if self.charged:
            unreported = max(0.0, time.thread_time() - self._worked - self._reported)
        self._gate.leave(self.tenant, unreported, self._places)

    def charge(self, seconds: float) -> None:
        """Add time that the calling thread has worked."""
        self.note(seconds)
        self._gate.charge(self.tenant, seconds)

    def account(self) -> Charge:
        """Where compiled code charges the tenant, while the turn lasts; see `note`."""
        return self._gate.account_of(self.tenant)

    def note(self, seconds: float) -> None:
        """Take note that the calling thread has worked, which is charged already."""
        self.charged = True
        if threading.get_ident() == self._thread:
            self._reported += seconds

    def goes_behind(self) -> bool:
        """Tell whether the work of another tenant that was here lately should go first."""
        return self._gate.goes_behind(self.tenant)


class FairGate:
    """Gives the places of an engine to the evaluations of tenants.

    Args:
        places: evaluations that run at a time.

    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._taken = 0
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[threading.Event, int]]] = {}
        self._charges: dict[str, Charge] = {}
        self._last: dict[str, float] = {}  # ``time.monotonic()`` of the last charge
        self._level = 0.0  # what the least charged tenant at work has been charged, or had been
        self._lock = threading.Lock()

    def turn(
        self, tenant: str, places: int = 1, cancelled: NDArray[np.uint8] | None = None
    ) -> Turn:
        """Make a turn, to be waited for and held in a ``with`` block.

        Args:
            tenant: whose evaluation it is.
            places: that it takes; it begins when one is free.
            cancelled: flag that ends the wait, [1]; None for none.

        """
        return Turn(self, tenant, places, cancelled)

    def enter(self, tenant: str, places: int, cancelled: NDArray[np.uint8] | None) -> None:
        """Wait for a place and take as many; for `Turn`."""
        ticket = self._enter(tenant, places)
        if ticket is None:
            return
        while not ticket.wait(_LOOK_AGAIN):
            if cancelled is not None and cancelled[0] and self._withdraw(tenant, ticket):
                raise CancelledError("cancelled while it waited for its turn", "CANCELLED")

    def _withdraw(self, tenant: str, ticket: threading.Event) -> bool:
        """Wait no more; False if there is a place after all."""
        with self._lock:
            queue = self._waiting.get(tenant, deque())
            entry = next((one for one in queue if one[0] is ticket), None)
            if entry is None:
                return False
            queue.remove(entry)
            if not queue:
                del self._waiting[tenant]
            return True

    def leave(self, tenant: str, seconds: float, places: int) -> None:
        """Charge a tenant and give its places back; for `Turn`."""
        with self._lock:
            self._add(tenant, seconds)
            self._note_level()
            self._taken -= places
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
            if self._waiting:
                self._serve()

    def account(self, used: Mapping[str, float], elapsed: float) -> None:
        """Charge tenants for evaluations that have run without a place.

        Args:
            used: seconds of each that had any.
            elapsed: seconds in which they ran.

        """
        with self._lock:
            always, most = [], 0.0
            for tenant, seconds in used.items():
                self._welcome(tenant)
                self._add(tenant, seconds)
                most = max(most, self._charges[tenant].seconds)
                # Who used less had nothing at work at times, and is away as far as that goes.
                if seconds >= elapsed:
                    always.append(self._charges[tenant].seconds)
            self._level = max(self._level, min(always, default=most))

    def charge(self, tenant: str, seconds: float) -> None:
        """Charge a tenant at work."""
        with self._lock:
            self._add(tenant, seconds)

    def account_of(self, tenant: str) -> Charge:
        """Find where a tenant at work is charged; for `Turn`."""
        charge = self._charges.get(tenant)
        if charge is None:  # it has not entered
            with self._lock:
                charge = self._charges.setdefault(tenant, Charge())
        return charge

    def charged(self, tenant: str) -> float:
        """Seconds that a tenant has been charged, if remembered; a hint without the lock."""
        charge = self._charges.get(tenant)
        return 0.0 if charge is None else charge.seconds

    def goes_behind(self, tenant: str) -> bool:
        """Tell whether a tenant that was charged lately, here or not, is charged clearly less."""
        since = time.monotonic() - _LATELY
        with self._lock:
            self._last = {name: last for name, last in self._last.items() if last > since}
            lately = [self.charged(name) for name in self._last if name in self._charges]
            return self.charged(tenant) > min(lately, default=np.inf) + _AHEAD

    # ------------------------------------------------------------------------- under the lock

    def _add(self, tenant: str, seconds: float) -> None:
        self._charges[tenant].add(seconds)
        self._last[tenant] = time.monotonic()

    def _enter(self, tenant: str, places: int) -> threading.Event | None:
        """Take places; if none is free return what will be set when there is."""
        with self._lock:
            self._welcome(tenant)
            if self._may_run(tenant) and not self._waiting:
                self._start(tenant, places)
                return None
            ticket = threading.Event()
            self._waiting.setdefault(tenant, deque()).append((ticket, places))
            self._serve()
            return ticket

    def _serve(self) -> None:
        """Give places to those who wait, the least charged tenant first."""
        while able := [tenant for tenant in self._waiting if self._may_run(tenant)]:
            tenant = min(able, key=self.charged)
            queue = self._waiting[tenant]
            ticket, places = queue.popleft()
            if not queue:
                del self._waiting[tenant]
            self._start(tenant, places)
            ticket.set()

    def _may_run(self, tenant: str) -> bool:
        if self._taken < self._places:
            return True
        return not self._running[tenant] and self._running.total() < self._places + _EXTRA

    def _start(self, tenant: str, places: int) -> None:
        self._taken += places
        self._running[tenant] += 1

    def _note_level(self) -> None:
        least = min(map(self.charged, self._running), default=0.0)
        self._level = max(self._level, least)

    def _welcome(self, tenant: str) -> None:
        """Let a tenant that was away begin near the others."""
        self._note_level()
        active = [*self._running, *self._waiting]
        if tenant not in active:
            charge = self._charges.setdefault(tenant, Charge(self._level))
            charge.raise_to(self._level - _CREDIT)
        if len(self._charges) > _REMEMBERED:
            kept = {tenant, *active}
            self._charges = {name: self._charges[name] for name in kept}


class _Alone(Turn):
    """The turn of work that nobody shares the engine with."""

    def __init__(self) -> None:
        super().__init__(FairGate(1), "", 1, None)

    def charge(self, seconds: float) -> None:
        """Nobody counts."""


_ALONE: Final = _Alone()
_TURN: Final[contextvars.ContextVar[Turn]] = contextvars.ContextVar("turn", default=_ALONE)


def current_turn() -> Turn:
    """Return the turn of the evaluation that this thread runs."""
    return _TURN.get()
