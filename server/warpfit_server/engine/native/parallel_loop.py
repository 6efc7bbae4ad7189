"""A parallel loop: threads take the chunks of a task by an atomic counter, in compiled code.

The simple form, of the calling thread and of each helper thread:

    while (chunk := next chunk that nobody has taken) is not None:
        run the chunk

A task may end early, once it has run for some time and others wait for the threads. Each thread
looks at the clock before each chunk, so that no estimate of what a chunk costs has to be right.

The helpers run compiled code only and never take Python's lock. They sleep on a word of shared
memory (futex(2)) while there is nothing to do. Several callers may run a task at the same time, one
in each slot of the array of words that all threads share, so that the end of one task overlaps with
the beginning of the next.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import types
from numpy.typing import NDArray

from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import (
    FAILED,
    FINISHED,
    add_atomically,
    array_address,
    call_c,
    call_chunk,
    fence,
    inlined,
    replace_atomically,
)

#: Words of a cache line: words that many threads change have a line of their own.
_LINE: Final = 8
#: Words of the head: whether the helpers should end, the addresses of syscall(2) and
#: clock_gettime(2), whether others wait for the threads, whether a task is about to begin; how
#: often something has changed (the helpers sleep on it), and how many helpers sleep.
_CLOSED, _SYSCALL, _CLOCK, OTHERS_WAIT, _EXPECTED = range(5)
_CHANGES, ASLEEP, HEAD_WORDS = 8, 16, 24
#: Words of a slot: whether threads may take chunks, the function and the argument block that it is
#: given, the first chunk, the chunk after the last one, the moments from which the task ends if
#: others wait and in any case, what a chunk returned that ended the task; the next chunk; threads
#: inside; how often the last thread has left (the caller sleeps on it).
OPEN, FUNCTION, ARGUMENTS, FIRST, STOP, SOON, LATE, ENDED = range(8)
NEXT, INSIDE, _EMPTIED, SLOT_WORDS = 8, 16, 17, 24
#: Looks at whether the last helper has left before the caller sleeps: some 50 us, the time that it
#: would take to wake it.
_LOOKS: Final = 10_000
#: Looks at whether a task that is expected has begun before a helper sleeps again: some 0.5 ms.
_LOOKS_AHEAD: Final = 100_000
#: A moment that never comes, in nanoseconds, and the clock of ``time.monotonic_ns()``.
NEVER: Final = 2**62
_MONOTONIC: Final = 1
#: Longest sleep in seconds, after which a thread looks again.
_LONG: Final = 10
#: Number of the futex system call; newer architectures share one.
_FUTEX: Final = {"x86_64": 202}.get(platform.machine(), 98)
_WAIT_PRIVATE, _WAKE_PRIVATE = 128, 129
_compiled = numba_cache.njit(nogil=True, error_model="numpy")


def new_words(slots: int) -> NDArray[np.int64]:
    """Allocate the shared words, int64, aligned to cache lines."""
    size = HEAD_WORDS + slots * SLOT_WORDS
    memory = np.zeros(size + _LINE, dtype=np.int64)
    start = -(memory.ctypes.data // memory.itemsize) % _LINE
    words = memory[start : start + size]
    library = ctypes.CDLL(None)
    words[_SYSCALL] = ctypes.cast(library.syscall, ctypes.c_void_p).value or 0
    words[_CLOCK] = ctypes.cast(library.clock_gettime, ctypes.c_void_p).value or 0
    return words


def load() -> None:
    """Load the compiled functions below, or compile them."""
    words, word = types.int64[::1], types.int64
    numba_cache.load(expect, types.void(words, word))
    numba_cache.load(begin, types.void(words, word, word))
    numba_cache.load(finish, word(words, word))
    numba_cache.load(help_others, types.void(words))
    numba_cache.load(close, types.void(words))


# ------------------------------------------------------------------------------ compiled by Numba


@_compiled  # type: ignore[untyped-decorator]
def expect(words: Any, helpers: int) -> None:
    """Wake so many helpers for a task that is about to begin, because that takes them a while."""
    words[_EXPECTED] = 1
    _announce(words, helpers)


@_compiled  # type: ignore[untyped-decorator]
def begin(words: Any, slot: int, helpers: int) -> None:
    """Wake ``helpers`` threads to run the chunks of a filled slot, until `finish`.

    The calling thread alone uses the slot.
    """
    fence()
    words[slot + OPEN] = 1
    words[_EXPECTED] = 0
    _announce(words, helpers)


@_compiled  # type: ignore[untyped-decorator]
def finish(words: Any, slot: int) -> int:
    """Run the chunks of a slot that nobody has taken; return how the task ended once it has."""
    _work(words, slot)
    words[slot + OPEN] = 0
    while True:
        seen = words[slot + _EMPTIED]
        for _ in range(_LOOKS):
            fence()
            if words[slot + INSIDE] == 0:
                return int(words[slot + ENDED])
        _sleep(words, slot + _EMPTIED, seen)


@_compiled  # type: ignore[untyped-decorator]
def help_others(words: Any) -> None:
    """Work on every open slot until `close` is called; the body of a helper thread."""
    while True:
        seen = words[_CHANGES]
        fence()
        if words[_CLOSED] != 0:
            return
        for slot in range(HEAD_WORDS, len(words), SLOT_WORDS):
            if words[slot + OPEN] != 0:
                _work(words, slot)
        looks = _LOOKS_AHEAD
        while words[_EXPECTED] != 0 and words[_CHANGES] == seen and looks > 0:
            fence()
            looks -= 1
        _add(words, ASLEEP, 1)
        _sleep(words, _CHANGES, seen)
        _add(words, ASLEEP, -1)


@_compiled  # type: ignore[untyped-decorator]
def close(words: Any) -> None:
    """Let the helpers end."""
    words[_CLOSED] = 1
    _announce(words, 1 << 20)


@inlined
def _work(words: Any, slot: int) -> None:
    """Take and run chunks of a slot until there are no more."""
    _add(words, slot + INSIDE, 1)
    clock = np.zeros(2, dtype=np.int64)
    while words[slot + OPEN] != 0:
        chunk = words[slot + NEXT]
        fence()
        if chunk >= words[slot + STOP]:
            break
        if _is_cut(words, slot, chunk, clock):
            words[slot + OPEN] = 0
            break
        if replace_atomically(_address(words, slot + NEXT), chunk, chunk + 1) == 0:
            continue  # another thread has taken it
        ended = call_chunk(words[slot + FUNCTION], (words[slot + ARGUMENTS], chunk))
        if ended != FINISHED:
            words[slot + ENDED] = ended
            words[slot + OPEN] = 0
    if _add(words, slot + INSIDE, -1) == 1:
        _add(words, slot + _EMPTIED, 1)
        _wake(words, slot + _EMPTIED, 1)


@inlined
def _is_cut(words: Any, slot: int, chunk: int, clock: Any) -> bool:
    """Tell whether the task ends before a chunk, of which one has been taken in any case."""
    if chunk == words[slot + FIRST] or words[slot + SOON] == NEVER:
        return False
    call_c(words[_CLOCK], (_MONOTONIC, int(clock.ctypes.data)))
    now = clock[0] * 1_000_000_000 + clock[1]
    is_soon = words[OTHERS_WAIT] != 0 and now >= words[slot + SOON]
    return bool(is_soon or now >= words[slot + LATE])


@inlined
def _announce(words: Any, helpers: int) -> None:
    """Tell sleeping helpers that something has changed."""
    _add(words, _CHANGES, 1)
    if helpers > 0 and words[ASLEEP] > 0:
        _wake(words, _CHANGES, helpers)


@inlined
def _address(words: Any, index: int) -> int:
    return int(words.ctypes.data + 8 * index)


@inlined
def _add(words: Any, index: int, number: int) -> int:
    """Add to a word atomically; return its old value."""
    return int(add_atomically(np.int64(_address(words, index)), np.int64(number)))


@inlined
def _wake(words: Any, index: int, count: int) -> None:
    call_c(words[_SYSCALL], (_FUTEX, _address(words, index), _WAKE_PRIVATE, int(count)))


@inlined
def _sleep(words: Any, index: int, seen: int) -> None:
    """Sleep until woken, unless a word differs from ``seen``."""
    time = np.empty(2, dtype=np.int64)
    time[0], time[1] = _LONG, 0
    futex = (_FUTEX, _address(words, index), _WAIT_PRIVATE, int(seen & 0xFFFFFFFF))
    call_c(words[_SYSCALL], (*futex, int(time.ctypes.data)))
    time[0] = 0  # keeps the array alive until here


# ------------------------------------------------------------------------- callers, and the threads

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
        words = self.words[self.slot : self.slot + SLOT_WORDS].tolist()
        is_taken = words[NEXT] >= words[STOP]
        is_over = is_taken or not words[OPEN]
        return not self.has_helpers or (is_over and not words[INSIDE])

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
        self._words = new_words(_SLOTS)
        first, size = HEAD_WORDS, SLOT_WORDS
        self._free = [first + size * n for n in range(_SLOTS)]
        self._helpers: list[threading.Thread] = []
        self._lock = threading.Lock()

    def others_wait(self, wait: bool) -> None:
        """Let tasks end soon, or late, from now on; any thread may call this."""
        self._words[OTHERS_WAIT] = wait

    def expect(self, helpers: int) -> None:
        """Wake helpers for a task that the caller is about to begin."""
        helpers = min(self._threads - 1, helpers)
        if helpers > 0:
            self._start()
            expect(self._words, helpers)

    def begin(
        self,
        function: int,
        block: NDArray[np.int64],
        first: int,
        stop: int,
        helpers: int,
        ends: tuple[int, int] = (NEVER, NEVER),
    ) -> ParallelTask:
        """Let helpers begin to run chunks; somebody must call `ParallelTask.result`.

        Args:
            function: address of what runs a chunk; see `argument_block`.
            block: its argument block.
            first: chunk.
            stop: chunk after the last one.
            helpers: threads that gain from helping, at most.
            ends: moments from which it ends if others wait, and in any case, on the clock of
                ``time.monotonic_ns()``; by default all chunks run.
        """
        helpers = min(self._threads - 1, stop - first, helpers)
        if helpers > 0:
            self._start()
        with self._lock:
            slot = self._free.pop() if self._free else None
        if slot is None:  # all are taken: one in memory that no helper looks at
            words, place, helpers = new_words(1), HEAD_WORDS, 0
            words[OTHERS_WAIT] = True
        else:
            words, place = self._words, slot
        task = function, array_address(block), first, stop, *ends, FINISHED
        words[place + NEXT] = first
        words[place + FUNCTION : place + ENDED + 1] = task
        begin(words, place, max(0, helpers))
        return ParallelTask(self, words, place, helpers > 0)

    def finish(self, words: NDArray[np.int64], slot: int) -> int:
        """Wait for a task and free its slot; see `ParallelTask.result`."""
        ended, stop = finish(words, slot), int(words[slot + NEXT])
        if words is self._words:
            with self._lock:
                self._free.append(slot)
        if ended == FAILED:
            raise MemoryError("no memory for intermediate results")
        return stop

    def close(self) -> None:
        """End the helper threads; nothing may be running any more."""
        close(self._words)
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
        help_others(self._words)
