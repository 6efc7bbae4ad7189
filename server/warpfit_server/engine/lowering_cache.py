"""The lowering cache: the lowered programs of batches that come again.

With few rows, lowering programs takes longer than running them. The driver of fits selects programs
of the same batch with every pass; clients with a search of their own send the same programs again,
each time in other memory.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

from cachetools import LRUCache

from warpfit.ir import Batch
from warpfit_server.engine.interface import Steps
from warpfit_server.shared_batch import BatchSummary, contents

Made = TypeVar("Made")
#: Tokens of all cached batches, some 30 MB with their derivatives.
_MOST_TOKENS: Final = 400_000
#: Tokens that a batch counts for at least, because small ones take memory, too.
_LEAST_TOKENS: Final = 2_000
#: Batches that are remembered, so that a batch that comes again is cached.
_REMEMBERED: Final = 256


class LoweringCache(Generic[Made]):
    """Keeps the lowered form of batches, most recently used ones longest; safe for threads.

    Args:
        most_tokens: of all cached batches; None for `_MOST_TOKENS`.
    """

    def __init__(self, most_tokens: int | None = None) -> None:
        self._most = most_tokens or _MOST_TOKENS
        self._kept: LRUCache[Hashable, tuple[int, tuple[bytes, ...], Made]] = LRUCache(
            self._most, lambda entry: max(_LEAST_TOKENS, entry[0])
        )
        """Tokens, contents where they are compared, and what was made."""
        self._seen: LRUCache[Hashable, bool] = LRUCache(_REMEMBERED)
        # Reentrant: allocating while a thread holds it may collect a batch, and so call `_forget`.
        self._lock = threading.RLock()

    def by_batch(
        self, batch: Batch, needs: tuple[Hashable, ...], make: Callable[[Batch], Steps[Made]]
    ) -> Steps[Made]:
        """Return the cached value for this batch, computing it once; dropped with the batch.

        A batch that exceeds the limit is cached, too, and alone: every pass of a fit needs it, and
        the limit on the memory of fits allows for it.

        Args:
            batch: in memory of its own; its parameters do not matter.
            needs: what the result depends on beside the programs.
            make: makes it in steps; the result must not refer to the batch.
        """
        key = ("batch", id(batch), *needs)
        with self._lock:
            known = self._kept.get(key)
        if known is not None:
            return known[2]
        made = yield from make(batch)
        with self._lock:
            self._kept[key] = min(len(batch.codes), self._most), (), made
        weakref.finalize(batch, self._forget, key).atexit = False
        return made

    def by_programs(
        self, batch: Batch, needs: tuple[Hashable, ...], make: Callable[[Batch], Steps[Made]]
    ) -> Steps[Made]:
        """Return the cached value for these programs, or compute it.

        It is cached from the second time on, unless the batch exceeds the limit.

        Args:
            batch: in memory that other batches will use later; its parameters do not matter.
            needs: what the result depends on beside the programs.
            make: makes it in steps.
        """
        if self.has_come(batch, needs):
            return (yield from self.keep(batch, needs, make))
        return (yield from make(batch))

    def has_come(self, batch: Batch, needs: tuple[Hashable, ...]) -> bool:
        """Note the programs of a batch; return whether the same have come before, and are kept."""
        if batch.token_count > self._most:
            return False
        key = ("programs", BatchSummary.of(batch).identity, *needs)
        with self._lock:
            has_come = key in self._seen
            self._seen[key] = True
        return has_come

    def keep(
        self, batch: Batch, needs: tuple[Hashable, ...], make: Callable[[Batch], Steps[Made]]
    ) -> Steps[Made]:
        """Return the cached value for these programs, or compute and keep it; see `by_programs`."""
        key, content = ("programs", BatchSummary.of(batch).identity, *needs), contents(batch)
        with self._lock:
            known = self._kept.get(key)
        if known is not None and known[1] == content:
            return known[2]
        made = yield from make(batch.without_parameters())
        with self._lock:
            self._kept[key] = len(batch.codes), content, made
        return made

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()
            self._seen.clear()

    def __len__(self) -> int:
        """Count the cached batches."""
        return len(self._kept)

    def _forget(self, key: Hashable) -> None:
        with self._lock:
            self._kept.pop(key, None)
