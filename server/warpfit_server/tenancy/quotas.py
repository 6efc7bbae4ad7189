"""What every tenant uses at this moment, counted over all doors together.

The doors of a server share one small table in anonymous memory: asking the front door would cost a
call ten times as much, and dividing the limits among the doors would be wrong, because a connection
stays with the door that it came to.

Every tenant has an entry with a column for each door. A door writes its own column alone, so that
its own threads are all that it must keep out, with an ordinary lock; what is in use is the sum of
the columns. A door first writes down what a call takes, then looks whether that is too much, and
takes it back if it is: two doors that take the last place in the same microsecond may both refuse
it, but never exceed a limit. Rates have no columns: two doors that count a call in the same
microsecond may count it once. What a door held when it died is its column, which is cleared.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import threading
from typing import Final, NamedTuple

#: Tenants that have an entry of their own; any more share these.
_SLOTS: Final = 2048
_WORD: Final = 8
#: Words of an entry: key, two moments (see `Ledger.wait` and `Ledger.turn`), then the columns:
#: the calls of each door, the sizes of each door, the work of each door.
_KEY, _ALLOWANCE, _PROMISE, _USED = 0, 1, 2, 3
#: Refused calls are asked back within this many seconds after the first of them.
_SPREAD: Final = 1.0


#: Calls, bytes and nanoseconds, as in `Usage`.
Amounts = tuple[int, int, int]


class Usage(NamedTuple):
    """An amount of each thing that is counted."""

    calls: int = 0
    size: int = 0
    """Bytes of messages on their way in, and of batches and answers."""
    work: int = 0
    """Estimated time of the engine, in nanoseconds."""


_NAMES: Final = Usage._fields
_COUNTS: Final = len(_NAMES)
_CALLS, _SIZE = 0, 1
#: Name of the entry with the totals of all tenants, which can be no tenant's.
_ALL: Final = 0


class Shortage(NamedTuple):
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
        self._columns = tuple(_USED + doors * index for index in range(_COUNTS))
        self._door = door
        self._entry = _USED + _COUNTS * doors
        self._map = mmap.mmap(descriptor, size_of(doors))
        self._words = memoryview(self._map).cast("q")
        self._numbers = memoryview(self._map).cast("d")
        self._lock = threading.Lock()
        self._places: dict[str, int] = {}

    @classmethod
    def create(cls, doors: int) -> Ledger:
        """Make an empty table; return the first door's access."""
        descriptor = os.memfd_create("warpfit-ledger", os.MFD_CLOEXEC)
        os.truncate(descriptor, size_of(doors))
        return cls(descriptor, doors, 0)

    def take(
        self, tenant: str, amount: Amounts, own: Amounts, server: Amounts, held: int = 0
    ) -> Shortage | None:
        """Count an amount, unless that would exceed a limit; return which, or None.

        Size and work of a single call may exceed what they like if nothing else is in flight.

        Args:
            tenant: whose call it is.
            amount: what it uses.
            own: the tenant's limits.
            server: the server's limits.
            held: bytes that have been counted for the same call before.

        """
        place = self._places.get(tenant) or self._find(tenant)
        words, doors, shortage = self._words, self._doors, None
        with self._lock:
            for index, more in enumerate(amount):
                start = self._columns[index]
                mine, first = start + self._door, place + start
                words[mine] += more
                words[place + mine] += more
                if not more or shortage is not None:
                    continue
                alone = more + held if index == _SIZE else more
                for used, most, of_tenant in (
                    (sum(words[start : start + doors]), server[index], False),
                    (sum(words[first : first + doors]), own[index], True),
                ):
                    if used > most and (used > alone or index == _CALLS):
                        shortage = Shortage(_NAMES[index], of_tenant, used - more, most)
                        break
        if shortage is not None:
            self.give(tenant, amount)
        return shortage

    def give(self, tenant: str, amount: Amounts) -> None:
        """Take back what `take` counted."""
        place, words = self._places.get(tenant) or self._find(tenant), self._words
        with self._lock:
            for less, column in zip(amount, self._columns, strict=True):
                if less:
                    mine = column + self._door
                    words[place + mine] -= less
                    words[_ALL + mine] -= less

    def wait(self, tenant: str, now: float, own_rate: float, server_rate: float) -> float:
        """Count a call against the rates; return 0, or the seconds after which it may come again.

        An entry remembers the moment until which its calls have used its rate up; a call is allowed
        while that is less than a second ahead (the generic cell rate algorithm of ITU-T I.371).
        Calls that are refused are asked back one after the other, as the rate allows (`turn`).

        Args:
            tenant: whose call it is.
            now: ``time.monotonic()``, which all processes of a machine share.
            own_rate: calls a second of the tenant, 0 for no limit.
            server_rate: calls a second of all tenants.

        """
        rates = ((self._find(tenant), own_rate), (_ALL, server_rate))
        limited = [(place, rate) for place, rate in rates if rate > 0]
        with self._lock:
            delays = [self._delay(place, rate, now) for place, rate in limited]
            longest = max(delays, default=0.0)
            if longest > 0:
                place, rate = limited[delays.index(longest)]
                return self._turn(place, now, longest, 1 / rate)
            for place, rate in limited:
                at = place + _ALLOWANCE
                self._numbers[at] = max(self._numbers[at], now) + 1 / rate
        return 0.0

    def turn(self, now: float, first: float, step: float) -> float:
        """Give a refused call a moment to come again, so that not all come at the same one.

        Args:
            now: ``time.monotonic()``.
            first: seconds after which the first of them may come.
            step: seconds between two of them.

        Returns:
            Seconds to wait; at most a second more than ``first``: then it begins anew.

        """
        with self._lock:
            return self._turn(_ALL, now, first, step)

    def used(self, tenant: str | None = None) -> Usage:
        """What is in use, by a tenant or by all."""
        place = _ALL if tenant is None else self._find(tenant)
        starts = (place + column for column in self._columns)
        return Usage(*(sum(self._words[start : start + self._doors]) for start in starts))

    def bury(self, door: int) -> None:
        """Give back what a door held that is gone."""
        for place in range(0, (_SLOTS + 1) * self._entry, self._entry):
            for column in self._columns:
                if self._words[place + column + door]:
                    self._words[place + column + door] = 0

    def close(self) -> None:
        """Let go of the memory; no thread may use it any more."""
        self._words.release()
        self._numbers.release()
        self._map.close()
        os.close(self.descriptor)

    # ------------------------------------------------------------------------- under the lock

    def _delay(self, place: int, rate: float, now: float) -> float:
        burst = max(1.0, 1.0 / rate)
        ahead = max(self._numbers[place + _ALLOWANCE], now) + 1 / rate - now
        return ahead - burst - 1e-9

    def _turn(self, place: int, now: float, first: float, step: float) -> float:
        at = place + _PROMISE
        earliest = now + first
        turn = max(earliest, self._numbers[at] + step)
        if turn > earliest + _SPREAD:
            turn = earliest
        self._numbers[at] = turn
        return turn - now

    # ------------------------------------------------------------------------- entries

    def _find(self, tenant: str) -> int:
        """Return where a tenant's entry begins, making one if there is none; it never moves."""
        place = self._places.get(tenant)
        if place is None:
            place = self._places[tenant] = self._open(_key(tenant))
            if len(self._places) > _SLOTS:
                self._places.clear()
        return place

    def _open(self, key: int) -> int:
        """Find a key's entry, else make an empty one its own, else let it share one."""
        with self._lock:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX)  # keeps the other doors out
            try:
                for step in range(_SLOTS):
                    place = (1 + (key + step) % _SLOTS) * self._entry
                    if self._words[place + _KEY] in (key, 0):
                        self._words[place + _KEY] = key
                        return place
            finally:
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN)
        return (1 + key % _SLOTS) * self._entry


def size_of(doors: int) -> int:
    """Bytes of the table for a number of doors."""
    return _WORD * (_SLOTS + 1) * (_USED + _COUNTS * doors)


def _key(tenant: str) -> int:
    digest = hashlib.sha256(tenant.encode()).digest()
    return int.from_bytes(digest[:7], "little") | 1  # positive, never the mark of an empty entry
