"""What was made of the programs of a batch, for when they come again with other parameters.

With few rows, to lower programs takes longer than to run them. The driver of fits comes with the
same arrays of programs at every pass; clients that search by themselves send the same programs
again and again, each time in other memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from cachetools import LRUCache

from warpfit.ir import Batch

Made = TypeVar("Made")
#: Tokens of all batches of which something is kept, some 30 MB with their derivatives ...
_MOST_TOKENS: Final = 400_000
#: ... of which each batch counts for these at least: small ones take memory, too.
_LEAST_TOKENS: Final = 2_000
#: Batches that are remembered, to keep something of those that come again.
_REMEMBERED: Final = 256


class Recurring(Generic[Made]):
    """Keeps what was made of batches, those used least recently go; safe to use from threads."""

    def __init__(self) -> None:
        self._kept: LRUCache[Hashable, tuple[int, Made]] = LRUCache(_MOST_TOKENS, _size)
        self._seen: LRUCache[Hashable, bool] = LRUCache(_REMEMBERED)
        # Arrays may go, and `_forget` be called, whenever a thread that holds it allocates.
        self._lock = threading.RLock()

    def of_arrays(
        self, batch: Batch, needs: tuple[Hashable, ...], make: Callable[[Batch], Made]
    ) -> Made:
        """Return what was made of the same arrays, or make it; kept as long as the arrays live.

        Of a batch that is larger than all that is kept otherwise it is kept, too, and alone: every
        pass of a fit needs it, and the limit on the memory of fits has allowed for it.

        Args:
            batch: whose arrays are its own; its parameters do not matter.
            needs: what it depends on beside the programs.
            make: makes it.

        """
        arrays = (batch.codes, batch.values, batch.lengths)
        key = (*map(id, arrays), *needs)
        with self._lock:
            known = self._kept.get(key)
        if known is not None:
            return known[1]
        made = make(batch)
        with self._lock:
            self._kept[key] = min(len(batch.codes), _MOST_TOKENS), made
        if key in self._kept:
            for array in arrays:
                weakref.finalize(array, self._forget, key).atexit = False
        return made

    def of_programs(
        self, batch: Batch, needs: tuple[Hashable, ...], make: Callable[[Batch], Made]
    ) -> Made:
        """Return what was made of the same programs, or make it; kept from the second time on.

        Args:
            batch: in memory that will be used again; its parameters do not matter.
            needs: what it depends on beside the programs.
            make: makes it.

        """
        key = (_text(batch), *needs)
        mark = hash(key)
        with self._lock:
            known, has_been_seen = self._kept.get(key), mark in self._seen
            self._seen[mark] = True
        if known is not None:
            return known[1]
        return self._keep(key, batch.without_parameters(), make) if has_been_seen else make(batch)

    def is_kept(self, batch: Batch, needs: tuple[Hashable, ...]) -> bool:
        """Tell whether something is kept that was made of the same programs."""
        with self._lock:
            return (_text(batch), *needs) in self._kept

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._seen.clear()

    def __len__(self) -> int:
        """Count what is kept."""
        return len(self._kept)

    def _keep(self, key: Hashable, batch: Batch, make: Callable[[Batch], Made]) -> Made:
        entry = len(batch.codes), make(batch)
        if _size(entry) <= _MOST_TOKENS:
            with self._lock:
                self._kept[key] = entry
        return entry[1]

    def _forget(self, key: Hashable) -> None:
        with self._lock:
            self._kept.pop(key, None)


def _size(entry: tuple[int, object]) -> int:
    return max(_LEAST_TOKENS, entry[0])


def _text(batch: Batch) -> tuple[int, bytes]:
    """Tell programs apart, bit by bit: how many there are, and their arrays one after the other.

    To compare arrays, NumPy would give Python's lock up, and wait for it behind other threads.
    """
    arrays = (batch.codes, batch.values, batch.lengths, batch.parameter_counts)
    return len(batch), b"".join([array.tobytes() for array in arrays])
