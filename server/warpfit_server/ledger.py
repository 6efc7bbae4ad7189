"""What every tenant uses at this moment, counted over all doors together.

The doors of a server share one small table in anonymous memory. A call changes it under a lock
that the kernel keeps (and takes away from a process that dies), which costs a few microseconds:
asking the front door would cost a call ten times as much, and dividing the limits among the doors
would be wrong, because a connection stays with the door that it came to.

Each entry holds totals, and beside them every door's part of them, so that what a door held when it
died can be given back.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import threading
from dataclasses import dataclass
from typing import Final

#: Tenants that are counted at a time; those with nothing in flight make room for others.
_SLOTS: Final = 1024
_WORD: Final = 8
#: Words of an entry: key, allowance (see `Ledger.wait`), then what is in use.
_KEY, _ALLOWANCE, _USED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Usage:
    """An amount of each thing that is counted."""

    calls: int = 0
    size: int = 0
    """Bytes of batches and answers."""
    work: int = 0
    """Estimated time of the engine, in nanoseconds."""

    def words(self) -> tuple[int, int, int]:
        """The amounts in the order of the table."""
        return self.calls, self.size, self.work


_NAMES: Final = ("calls", "size", "work")
_COUNTS: Final = len(_NAMES)
_CALLS: Final = 0
#: Name of the entry with the totals of all tenants, which can be no tenant's.
_ALL: Final = 0


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why something was not granted."""

    measure: str
    """``calls``, ``size`` or ``work``."""
    of_tenant: bool
    """Whether it is the tenant's limit, not the server's."""
    used: int
    limit: int


class Ledger:
    """One process's access to the table.

    Args:
        descriptor: of the memory, owned by this object.
        doors: how many processes share it.
        door: number of this one, from 0.

    """

    def __init__(self, descriptor: int, doors: int, door: int) -> None:
        self.descriptor = descriptor
        """Of the memory, to give to other doors."""
        self._doors = doors
        self._door = door
        self._entry = _USED + _COUNTS * (1 + doors)
        self._map = mmap.mmap(descriptor, size_of(doors))
        self._words = memoryview(self._map).cast("q")
        self._numbers = memoryview(self._map).cast("d")
        self._lock = _Lock(descriptor if doors > 1 else None)
        self._places: dict[str, int] = {}

    @classmethod
    def create(cls, doors: int) -> Ledger:
        """Make an empty table; return the first door's access."""
        descriptor = os.memfd_create("warpfit-ledger", os.MFD_CLOEXEC)
        os.truncate(descriptor, size_of(doors))
        return cls(descriptor, doors, 0)

    def take(self, tenant: str, amount: Usage, own: Usage, server: Usage) -> Shortage | None:
        """Count an amount, unless that would exceed a limit; return which, or None.

        Size and work of a single call may exceed what they like if nothing else is in flight.

        Args:
            tenant: whose call it is.
            amount: what it uses.
            own: the tenant's limits.
            server: the server's limits.

        """
        with self._lock:
            place = self._find(tenant)
            shortage = self._short(_ALL, amount, server, of_tenant=False)
            shortage = shortage or self._short(place, amount, own, of_tenant=True)
            if shortage is None:
                self._add(place, amount, 1)
            return shortage

    def give(self, tenant: str, amount: Usage) -> None:
        """Take back what `take` counted."""
        with self._lock:
            self._add(self._find(tenant), amount, -1)

    def wait(self, tenant: str, now: float, own_rate: float, server_rate: float) -> float:
        """Count a call against the rates; return 0, or the seconds until it would be allowed.

        An entry remembers the moment until which its calls have used its rate up; a call is allowed
        while that is less than a second ahead (the generic cell rate algorithm of ITU-T I.371).

        Args:
            tenant: whose call it is.
            now: ``time.monotonic()``, which all processes of a machine share.
            own_rate: calls a second of the tenant, 0 for no limit.
            server_rate: calls a second of all tenants.

        """
        with self._lock:
            rates = ((self._find(tenant), own_rate), (_ALL, server_rate))
            limited = [(place, rate) for place, rate in rates if rate > 0]
            delay = max((self._delay(place, rate, now) for place, rate in limited), default=0.0)
            if delay <= 0:
                for place, rate in limited:
                    at = place + _ALLOWANCE
                    self._numbers[at] = max(self._numbers[at], now) + 1 / rate
            return max(0.0, delay)

    def used(self, tenant: str | None = None) -> Usage:
        """What is in use, by a tenant or by all."""
        with self._lock:
            start = (_ALL if tenant is None else self._find(tenant)) + _USED
            return Usage(*self._words[start : start + _COUNTS])

    def bury(self, door: int) -> None:
        """Give back what a door held that is gone."""
        with self._lock:
            for slot in range(_SLOTS + 1):
                start = slot * self._entry + _USED
                held = start + _COUNTS * (1 + door)
                for index in range(_COUNTS):
                    self._words[held + index] = 0
                    parts = self._words[start + _COUNTS + index : start + self._entry - _USED]
                    self._words[start + index] = sum(parts[::_COUNTS])

    def close(self) -> None:
        """Let go of the memory; no thread may use it any more."""
        self._words.release()
        self._numbers.release()
        self._map.close()
        os.close(self.descriptor)

    # ------------------------------------------------------------------------- under the lock

    def _short(
        self, place: int, amount: Usage, limit: Usage, *, of_tenant: bool
    ) -> Shortage | None:
        most = limit.words()
        for index, more in enumerate(amount.words()):
            if not more:
                continue
            used = self._words[place + _USED + index]
            if used + more > most[index] and (used or index == _CALLS):
                return Shortage(_NAMES[index], of_tenant, used, most[index])
        return None

    def _add(self, place: int, amount: Usage, sign: int) -> None:
        words, own = self._words, _COUNTS * (1 + self._door)
        for index, value in enumerate(amount.words(), _USED):
            if value:
                change = sign * value
                words[place + index] += change
                words[place + own + index] += change
                words[_ALL + index] += change
                words[_ALL + own + index] += change

    def _delay(self, place: int, rate: float, now: float) -> float:
        burst = max(1.0, 1.0 / rate)
        ahead = max(self._numbers[place + _ALLOWANCE], now) + 1 / rate - now
        return ahead - burst - 1e-9

    def _find(self, tenant: str) -> int:
        """Return where a tenant's entry begins, making one if there is none."""
        key = _key(tenant)
        place = self._places.get(tenant)
        if place is not None and self._words[place + _KEY] == key:
            return place
        place = self._search(key)
        if self._words[place + _KEY] != key:
            self._words[place + _KEY] = key
            self._numbers[place + _ALLOWANCE] = 0.0
        if len(self._places) > _SLOTS:
            self._places.clear()
        self._places[tenant] = place
        return place

    def _search(self, key: int) -> int:
        """Find a key's entry, else an empty one, else one whose tenant has nothing in flight."""
        idle = None
        for step in range(_SLOTS):
            place = (1 + (key + step) % _SLOTS) * self._entry
            if self._words[place + _KEY] in (key, 0):
                return place
            if idle is None and not any(self._words[place + _USED : place + _USED + _COUNTS]):
                idle = place
        return (1 + key % _SLOTS) * self._entry if idle is None else idle


class _Lock:
    """Keeps out other threads and, if there is a file, other processes that lock it."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._threads = threading.Lock()

    def __enter__(self) -> None:
        self._threads.acquire()
        if self._descriptor is not None:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        self._threads.release()


def size_of(doors: int) -> int:
    """Bytes of the table for a number of doors."""
    return _WORD * (_SLOTS + 1) * (_USED + _COUNTS * (1 + doors))


def _key(tenant: str) -> int:
    digest = hashlib.sha256(tenant.encode()).digest()
    return int.from_bytes(digest[:7], "little") | 1  # positive, never the mark of an empty entry
