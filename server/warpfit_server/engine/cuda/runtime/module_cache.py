"""A cache of loaded modules in memory; `warpfit_server.system.compile_cache` has those on disk."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cachetools import LRUCache

from warpfit_server.system.compile_cache import CacheCounters

Value = TypeVar("Value")


@dataclass(slots=True, eq=False)
class _Entry(Generic[Value]):
    value: Value
    size: int
    leases: int = 0


class LeasedCache(Generic[Value]):
    """An LRU cache, bounded in bytes and count, that never evicts a value in use.

    `lease` and `add` take a value into use until an equal number of calls of `release`. Values that
    are not in use are evicted, the least recently used first, when a bound is exceeded. The bounds
    count values in use too, which may exceed them on their own. Safe to use from several threads.

    Args:
        max_bytes: most bytes of all values together.
        max_count: most values.
    """

    def __init__(self, max_bytes: int, max_count: int) -> None:
        self._max_bytes = max_bytes
        self._max_count = max_count
        self._idle: LRUCache[Hashable, _Entry[Value]] = LRUCache(
            float("inf"), getsizeof=lambda entry: entry.size
        )
        self._leased: dict[Hashable, _Entry[Value]] = {}
        self._leased_bytes = 0
        self._lock = threading.Lock()
        self.counters = CacheCounters()

    def __len__(self) -> int:
        """Count the values."""
        with self._lock:
            return len(self._idle) + len(self._leased)

    def __contains__(self, key: Hashable) -> bool:
        """Return whether a value is there; neither a hit nor a use."""
        with self._lock:
            return key in self._leased or key in self._idle

    @property
    def bytes(self) -> int:
        """Bytes of all values together."""
        with self._lock:
            return self._bytes()

    def lease(self, key: Hashable) -> Value | None:
        """Take a value into use; None if it is not there."""
        with self._lock:
            entry = self._leased.get(key)
            if entry is None:
                entry = self._idle.pop(key, None)
                if entry is None:
                    self.counters.misses += 1
                    return None
                self._hold(key, entry)
            self.counters.hits += 1
            entry.leases += 1
            return entry.value

    def add(self, key: Hashable, value: Value, size: int) -> Value:
        """Take a value into use: the one under the key if there is one, else ``value``."""
        with self._lock:
            entry = self._leased.get(key)
            if entry is None:
                entry = self._idle.pop(key, None) or _Entry(value, size)
                self._hold(key, entry)
            entry.leases += 1
            self._evict()
            return entry.value

    def release(self, key: Hashable) -> None:
        """End one use of a value."""
        with self._lock:
            entry = self._leased[key]
            entry.leases -= 1
            if entry.leases:
                return
            del self._leased[key]
            self._leased_bytes -= entry.size
            self._idle[key] = entry
            self._evict()

    def clear(self) -> None:
        """Drop all values that are not in use."""
        with self._lock:
            self._idle.clear()

    def _hold(self, key: Hashable, entry: _Entry[Value]) -> None:
        self._leased[key] = entry
        self._leased_bytes += entry.size

    def _bytes(self) -> int:
        return int(self._idle.currsize) + self._leased_bytes

    def _evict(self) -> None:
        while self._idle and (
            self._bytes() > self._max_bytes or len(self._idle) + len(self._leased) > self._max_count
        ):
            self._idle.popitem()
            self.counters.evictions += 1
