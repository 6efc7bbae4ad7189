"""What was made of the programs of a batch, for when they come again with other parameters.

With few rows, to lower programs takes longer than to run them. The driver of fits comes with the
same arrays of programs at every pass; clients that search by themselves send the same programs
again and again, each time in other memory.
"""

from __future__ import annotations

import threading
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
        self._kept: LRUCache[Hashable, tuple[Batch, Made]] = LRUCache(_MOST_TOKENS, _size)
        self._seen: LRUCache[Hashable, bool] = LRUCache(_REMEMBERED)
        self._lock = threading.Lock()

    def of_arrays(
        self, batch: Batch, needs: tuple[Hashable, ...], make: Callable[[Batch], Made]
    ) -> Made:
        """Return what was made of the same arrays, or make it.

        Args:
            batch: whose arrays are its own; its parameters do not matter.
            needs: what it depends on beside the programs.
            make: makes it.

        """
        # They live, and keep their identity, as long as what was made of them is kept.
        key = (id(batch.codes), id(batch.values), id(batch.lengths), *needs)
        with self._lock:
            known = self._kept.get(key)
        return self._keep(key, batch, make) if known is None else known[1]

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
        made = make(batch)
        if _size((batch, made)) <= _MOST_TOKENS:
            with self._lock:
                self._kept[key] = batch, made
        return made


def _size(entry: tuple[Batch, object]) -> int:
    return max(_LEAST_TOKENS, len(entry[0].codes))


def _text(batch: Batch) -> tuple[int, bytes]:
    """Tell programs apart, bit by bit: how many there are, and their arrays one after the other.

    To compare arrays, NumPy would give Python's lock up, and wait for it behind other threads.
    """
    arrays = (batch.codes, batch.values, batch.lengths, batch.parameter_counts)
    return len(batch), b"".join([array.tobytes() for array in arrays])
