"""Threads that run parallel loops, started when they are first needed."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.native import parallel_loop
from warpfit_server.engine.native.arguments import FAILED, FINISHED, array_address

#: Tasks that helpers work on at a time; further ones run on their caller's thread alone.
_SLOTS: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class ParallelTask:
    """Chunks that helpers have begun to run; implements `interface.DeviceWork`."""

    loop: ParallelLoop
    words: NDArray[np.int64]
    slot: int
    has_helpers: bool

    def done(self) -> bool:
        """Return whether `result` need not wait for helpers; without any it runs all chunks."""
        words = self.words[self.slot : self.slot + parallel_loop.SLOT_WORDS].tolist()
        is_taken = words[parallel_loop.NEXT] >= words[parallel_loop.STOP]
        is_over = is_taken or not words[parallel_loop.OPEN]
        return not self.has_helpers or (is_over and not words[parallel_loop.INSIDE])

    def result(self) -> int:
        """Run the chunks that nobody has taken, and wait for the others; to be called once.

        Returns:
            The chunk after those that have run, if none has ended the task.

        Raises:
            MemoryError: if there was not enough memory for a chunk.
        """
        return self.loop.finish(self.words, self.slot)


class ParallelLoop:
    """Runs chunks of work on the calling thread and on helper threads.

    Args:
        threads: how many compute at the same time for one caller, the caller included.
        niceness: of the helper threads, on Linux.
    """

    def __init__(self, threads: int, niceness: int = 0) -> None:
        self._threads = threads
        self._niceness = niceness
        self._words = parallel_loop.new_words(_SLOTS)
        first, size = parallel_loop.HEAD_WORDS, parallel_loop.SLOT_WORDS
        self._free = [first + size * n for n in range(_SLOTS)]
        self._helpers: list[threading.Thread] = []
        self._lock = threading.Lock()

    def others_wait(self, wait: bool) -> None:
        """Let tasks end after the present piece, or not, from now on; any thread may call this."""
        self._words[parallel_loop.OTHERS_WAIT] = wait

    def expect(self, helpers: int) -> None:
        """Wake helpers for a task that the caller is about to begin."""
        helpers = min(self._threads - 1, helpers)
        if helpers > 0:
            self._start()
            parallel_loop.expect(self._words, helpers)

    def begin(
        self,
        function: int,
        block: NDArray[np.int64],
        first: int,
        stop: int,
        helpers: int,
        piece: int | None = None,
    ) -> ParallelTask:
        """Let helpers begin to run chunks; somebody must call `ParallelTask.result`.

        Args:
            function: address of what runs a chunk; see `arguments`.
            block: its argument block.
            first: chunk.
            stop: chunk after the last one.
            helpers: threads that gain from helping, at most.
            piece: chunks after which, and after as many again, it ends if others wait; None for
                all.
        """
        helpers = min(self._threads - 1, stop - first, helpers)
        if helpers > 0:
            self._start()
        with self._lock:
            slot = self._free.pop() if self._free else None
        if slot is None:  # all are taken: one in memory that no helper looks at
            words, place, helpers = parallel_loop.new_words(1), parallel_loop.HEAD_WORDS, 0
            words[parallel_loop.OTHERS_WAIT] = True
        else:
            words, place = self._words, slot
        task = function, array_address(block), first, stop, piece or stop - first, FINISHED
        words[place + parallel_loop.NEXT] = first
        words[place + parallel_loop.FUNCTION : place + parallel_loop.ENDED + 1] = task
        parallel_loop.begin(words, place, max(0, helpers))
        return ParallelTask(self, words, place, helpers > 0)

    def finish(self, words: NDArray[np.int64], slot: int) -> int:
        """Do what `ParallelTask.result` does."""
        ended, stop = parallel_loop.finish(words, slot), int(words[slot + parallel_loop.NEXT])
        if words is self._words:
            with self._lock:
                self._free.append(slot)
        if ended == FAILED:
            raise MemoryError("no memory for intermediate results")
        return stop

    def close(self) -> None:
        """End the helper threads; nothing may be running any more."""
        parallel_loop.close(self._words)
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
        parallel_loop.help_others(self._words)
