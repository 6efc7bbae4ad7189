"""Quotas: calls, memory and engine time in flight of each tenant, over all front-end processes.

The processes share one small table. Asking the main process instead would cost a call ten times as
much, and dividing the limits among the processes would be wrong, because a connection stays with
the process that accepted it.

Every tenant has an entry with a column for each process. A process writes only its own column, so
an ordinary lock among its own threads suffices; what is in flight is the sum of the columns. A
process first adds what a call takes, then compares with the limits, and subtracts it again if one
is exceeded: two processes that take the last place in the same microsecond may both refuse it, but
never exceed a limit. Rates have no columns: two processes that count a call in the same microsecond
may count it once. When a process has died, its column is cleared.

The table also has, with a column for each process, the estimated work that each engine has not
finished, by which requests are routed, and for each data set the calls that use it and the moment
of the last use, by which the main process decides what to evict.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

#: Tenants that have an entry of their own; any more share these.
_ENTRIES: Final = 2048
#: Data sets that the table has room for.
DATASET_SLOTS: Final = 4096
_WORD: Final = 8
#: Words of an entry: key, two moments (`QuotaTable.count_call`, `QuotaTable.retry_delay`), then the
#: columns: the calls of each process, then its bytes, its engine time and its searches.
_KEY, _RATE_UNTIL, _RETRY_AT, _COLUMNS = 0, 1, 2, 3
#: Refused calls are asked back within this many seconds after the first of them.
_RETRY_SPREAD: Final = 1.0
#: Quantities of which a call alone may have more than the limit: bytes and engine time.
_OF_ONE_CALL: Final = (1, 2)
#: Offset of the entry with the totals of all tenants.
_SERVER: Final = 0


class Amounts(NamedTuple):
    """Amounts of each quantity that is counted."""

    calls: int = 0
    nbytes: int = 0
    """Bytes of messages that arrive, and of batches and answers."""
    engine_ns: int = 0
    """Estimated time of the engine, in nanoseconds."""
    searches: int = 0
    """Searches, each of which is one of the calls, too."""


class Exceeded(NamedTuple):
    """A limit that a call would exceed."""

    quantity: str
    """Name of the field of `Amounts`."""
    of_tenant: bool
    """Whether it is the tenant's limit, not the server's."""
    used: int
    limit: int


class DatasetUses(NamedTuple):
    """Which calls use the data sets, by the slots of these."""

    calls: list[int]
    """Calls that use it now."""
    moments: list[float]
    """When one has begun or ended last, on the clock of ``time.monotonic()``, which all processes
    of a machine share."""


class QuotaTable:
    """One process's access to the table; the processes that share it have numbers from 0."""

    def __init__(self, descriptor: int, processes: int, process: int, engines: int = 1) -> None:
        self.descriptor = descriptor
        """Descriptor of the shared memory, which this object owns, to pass to other processes."""
        self._processes = processes
        self._process = process
        self._columns = tuple(_COLUMNS + processes * i for i in range(len(Amounts._fields)))
        self._own_columns = tuple(column + process for column in self._columns)
        self._entry_words = _COLUMNS + len(Amounts._fields) * processes
        self._map = mmap.mmap(descriptor, _table_bytes(processes, engines))
        end = (_ENTRIES + 1) * self._entry_words
        self._work = [end + processes * engine for engine in range(engines)]
        self._uses = end + processes * engines
        self._used_at = self._uses + processes * DATASET_SLOTS
        self._words = memoryview(self._map).cast("q")
        self._numbers = memoryview(self._map).cast("d")
        self._lock = threading.Lock()
        self._offsets: dict[str, int] = {}

    @classmethod
    def create(cls, processes: int, engines: int = 1) -> QuotaTable:
        """Make an empty table and return the access of process 0, or of one that only reads."""
        descriptor = os.memfd_create("warpfit-quotas", os.MFD_CLOEXEC)
        os.truncate(descriptor, _table_bytes(processes, engines))
        return cls(descriptor, processes, 0, engines)

    def acquire(
        self,
        tenant: str,
        amount: Sequence[int],
        own: Sequence[int],
        server: Sequence[int],
        *,
        share: float = 1.0,
        held: int = 0,
    ) -> Exceeded | None:
        """Add an amount unless a limit would be exceeded; return that limit, or None.

        The amounts are `Amounts`, or plain tuples, which are made in half the time; what these
        leave out is 0.

        A tenant may have its ``share`` of what the other tenants leave, and one call in any case:
        so none gets all, and the more tenants want much, the less each of them gets (dynamic
        thresholds: Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998).

        A call may exceed the limits of bytes and engine time if it is alone in flight, and for it
        only the ``held`` bytes are counted already.
        """
        words, processes = self._words, self._processes
        offset = self._offsets.get(tenant) or self._offset(tenant)
        alone = [*amount]
        alone[1] += held
        with self._lock:
            self._add(offset, amount, 1)
            for index, more in enumerate(amount):
                if more <= 0:
                    continue
                column = self._columns[index]
                used = sum(words[column : column + processes])
                mine = sum(words[offset + column : offset + column + processes])
                most, of_tenant = server[index], own[index]
                may_exceed = alone[index] if index in _OF_ONE_CALL else 0  # a call alone
                is_own = mine > of_tenant and mine > may_exceed
                is_unfair = mine > share * (most - used + mine) and mine > alone[index]
                if is_own or is_unfair or (used > most and used > may_exceed):
                    self._add(offset, amount, -1)
                    before, limit = (mine, of_tenant) if is_own else (used, most)
                    return Exceeded(Amounts._fields[index], is_own, before - more, limit)
        return None

    def release(self, tenant: str, amount: Sequence[int]) -> None:
        """Subtract what `acquire` has added."""
        offset = self._offset(tenant)
        with self._lock:
            self._add(offset, amount, -1)

    def _add(self, offset: int, amount: Sequence[int], sign: int) -> None:
        words = self._words
        for more, column in zip(amount, self._own_columns, strict=False):
            if more:
                words[_SERVER + column] += sign * more
                words[offset + column] += sign * more

    def _sum(self, start: int) -> int:
        return sum(self._words[start : start + self._processes])

    def count_call(self, tenant: str, now: float, rate: float) -> float:
        """Count a call against a rate; return 0, or the seconds after which it may come again.

        An entry remembers the moment until which its calls have used its rate up; a call is allowed
        while that is less than a second ahead (the generic cell rate algorithm of ITU-T I.371).
        Refused calls are asked back one after the other, as the rate allows. It is a number of
        calls a second; ``now`` is ``time.monotonic()``, which all processes of a machine share.
        """
        offset, numbers = self._offset(tenant), self._numbers
        with self._lock:
            until = max(numbers[offset + _RATE_UNTIL], now) + 1 / rate
            delay = until - now - max(1.0, 1.0 / rate) - 1e-9
            if delay > 0:
                return self._retry_delay(offset, now, delay, 1 / rate)
            numbers[offset + _RATE_UNTIL] = until
        return 0.0

    def retry_delay(self, now: float, first: float, step: float) -> float:
        """Return how many seconds a refused call should wait, so that not all come at once.

        The ``first`` of them waits so long, each further one a ``step`` more than the one before;
        after a second it begins anew.
        """
        with self._lock:
            return self._retry_delay(_SERVER, now, first, step)

    def _retry_delay(self, offset: int, now: float, first: float, step: float) -> float:
        at = offset + _RETRY_AT
        earliest = now + first
        moment = max(earliest, self._numbers[at] + step)
        if moment > earliest + _RETRY_SPREAD:
            moment = earliest
        self._numbers[at] = moment
        return moment - now

    def calls_in_flight(self) -> int:
        """Return the calls in flight of all tenants."""
        return self._sum(_SERVER + self._columns[0])

    def in_flight(self, tenant: str | None = None) -> Amounts:
        """Return the amounts in flight of a tenant, or of the whole server."""
        offset = _SERVER if tenant is None else self._offset(tenant)
        return Amounts(*(self._sum(offset + column) for column in self._columns))

    def add_work(self, engine: int, nanoseconds: int) -> None:
        """Add to the work that an engine has not finished, or subtract from it."""
        with self._lock:
            self._words[self._work[engine] + self._process] += nanoseconds

    def work(self) -> list[int]:
        """Return the estimated nanoseconds of work that each engine has not finished."""
        return [self._sum(start) for start in self._work]

    def use_dataset(self, slot: int, change: int) -> None:
        """Count one more call (1) or one less (-1) that uses the data set of a slot, at this time.

        A front end may still hold the slot of a data set that is gone. Another data set that has it
        then is kept a little longer, which does no harm.
        """
        at = self._processes * slot + self._process
        with self._lock:
            self._words[self._uses + at] += change
            self._numbers[self._used_at + at] = time.monotonic()

    def dataset_uses(self) -> DatasetUses:
        """Return the uses of all data sets at this moment."""
        shape, count = (DATASET_SLOTS, self._processes), DATASET_SLOTS * self._processes
        uses, used_at = self._uses * _WORD, self._used_at * _WORD
        calls = np.frombuffer(self._map, np.int64, count, uses).reshape(shape)
        moments = np.frombuffer(self._map, np.float64, count, used_at).reshape(shape)
        return DatasetUses(calls.sum(axis=1).tolist(), moments.max(axis=1).tolist())

    def clear_process(self, process: int) -> None:
        """Subtract all that a process had in flight which has ended."""
        for slot in range(DATASET_SLOTS):
            self._words[self._uses + self._processes * slot + process] = 0
        for offset in range(0, (_ENTRIES + 1) * self._entry_words, self._entry_words):
            for column in self._columns:
                if self._words[offset + column + process]:
                    self._words[offset + column + process] = 0
        for start in self._work:
            self._words[start + process] = 0

    def close(self) -> None:
        """Unmap the memory; no thread may use the table any more."""
        self._words.release()
        self._numbers.release()
        self._map.close()
        os.close(self.descriptor)

    def _offset(self, tenant: str) -> int:
        """Return where a tenant's entry begins, making one if there is none; it never moves."""
        offset = self._offsets.get(tenant)
        if offset is None:
            # Its own entry, else a free one, else one that is shared; linear probing.
            digest = hashlib.sha256(tenant.encode()).digest()
            key = int.from_bytes(digest[:7], "little") | 1  # never 0, the key of a free entry
            with self._lock:
                fcntl.lockf(self.descriptor, fcntl.LOCK_EX)  # excludes the other processes
                try:
                    for step in range(_ENTRIES):
                        offset = (1 + (key + step) % _ENTRIES) * self._entry_words
                        if self._words[offset + _KEY] in (key, 0):
                            self._words[offset + _KEY] = key
                            break
                    else:
                        offset = (1 + key % _ENTRIES) * self._entry_words
                finally:
                    fcntl.lockf(self.descriptor, fcntl.LOCK_UN)
            self._offsets[tenant] = offset
            if len(self._offsets) > _ENTRIES:
                self._offsets.clear()
        return offset


def _table_bytes(processes: int, engines: int) -> int:
    entries = (_ENTRIES + 1) * (_COLUMNS + len(Amounts._fields) * processes)
    return _WORD * (entries + processes * (engines + 2 * DATASET_SLOTS))
