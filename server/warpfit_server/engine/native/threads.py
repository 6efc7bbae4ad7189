"""Threads that run parallel loops, started when they are first needed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numba import types
from numpy.typing import NDArray

from warpfit_server.engine.native import parallel_loop
from warpfit_server.engine.native.arguments import FAILED
from warpfit_server.engine.native.numba_cache import cached_in

#: Tasks that helpers work on at a time; further ones run on their caller's thread alone.
_SLOTS: Final = 4


@dataclass(frozen=True, eq=False)
class ParallelCode:
    """Compiled functions of `parallel_loop`, by their names there."""

    run: Any
    help_others: Any
    close: Any

    @classmethod
    def load(cls, place: Path) -> ParallelCode:
        """Load the functions from a directory, or compile and store them there."""
        words, word = types.int64[::1], types.int64
        with cached_in(place) as jit:
            return cls(
                run=jit(word(words, word, word), parallel_loop.run),
                help_others=jit(types.void(words), parallel_loop.help_others),
                close=jit(types.void(words), parallel_loop.close),
            )


class ParallelLoop:
    """Runs chunks of work on the calling thread and on helper threads.

    Args:
        threads: how many compute at the same time for one caller, the caller included.
        code: compiled functions.
        niceness: of the helper threads, on Linux.
    """

    def __init__(self, threads: int, code: ParallelCode, niceness: int = 0) -> None:
        self._threads = threads
        self._code = code
        self._niceness = niceness
        self._words = parallel_loop.new_words(_SLOTS)
        first, size = parallel_loop.HEAD_WORDS, parallel_loop.SLOT_WORDS
        self._free = [first + size * n for n in range(_SLOTS)]
        self._helpers: list[threading.Thread] = []
        self._lock = threading.Lock()

    def run(
        self, function: int, block: NDArray[np.int64], first: int, stop: int, helpers: int
    ) -> None:
        """Run chunks and wait for all of them.

        Args:
            function: address of what runs a chunk; see `arguments`.
            block: its argument block.
            first: chunk.
            stop: chunk after the last one.
            helpers: threads that gain from helping, at most.

        Raises:
            MemoryError: if there was not enough memory for a chunk.
        """
        helpers = min(self._threads - 1, stop - first - 1, helpers)
        if helpers > 0:
            self._start()
        with self._slot() as (words, slot):
            entries = np.zeros(parallel_loop.NEXT + 1, dtype=np.int64)
            entries[parallel_loop.FUNCTION] = function
            entries[parallel_loop.ARGUMENTS] = block.ctypes.data
            entries[parallel_loop.NEXT], entries[parallel_loop.STOP] = first, stop
            words[slot : slot + len(entries)] = entries
            ended = self._code.run(words, slot, max(0, helpers))
        if ended == FAILED:
            raise MemoryError("no memory for intermediate results")

    def close(self) -> None:
        """End the helper threads; nothing may be running any more."""
        self._code.close(self._words)
        for thread in self._helpers:
            thread.join()

    def _start(self) -> None:
        with self._lock:
            for number in range(len(self._helpers), self._threads - 1):
                name = f"parallel-{number}"
                thread = threading.Thread(target=self._help, name=name, daemon=True)
                self._helpers.append(thread)
                thread.start()

    def _help(self) -> None:
        os.nice(self._niceness)  # of this thread alone, on Linux
        self._code.help_others(self._words)

    @contextmanager
    def _slot(self) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Take a slot; if all are taken, one in memory that no helper looks at."""
        with self._lock:
            slot = self._free.pop() if self._free else None
        if slot is None:
            yield parallel_loop.new_words(1), parallel_loop.HEAD_WORDS
            return
        try:
            yield self._words, slot
        finally:
            with self._lock:
                self._free.append(slot)
