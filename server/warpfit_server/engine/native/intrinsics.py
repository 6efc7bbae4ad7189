"""Building blocks of the functions that Numba compiles, and the loop that runs them on threads.

Callers of native functions take an address and a tuple of integers: ``call_c(address, (a, b))``.

Work is cut into chunks. Whatever runs a chunk is a function of two integers: the address of an
argument block, which lists addresses and sizes of arrays, and the number of the chunk. So a thread
that serves evaluations of different kinds calls all of them alike, without Python in between. Every
block begins with ranges of instances (or of programs), spans of rows, and a flag of one byte that
is set once nobody wants the results any more.

The threads of a `ParallelLoop` take the chunks of a task by an atomic counter, in compiled code.
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
from collections.abc import Callable
from ctypes import addressof, c_char
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import carray, from_dtype, njit, types
from numba.extending import intrinsic, register_jitable
from numpy.typing import NDArray

from warpfit_server.engine.native import numba_cache

_Function = TypeVar("_Function", bound=Callable[..., Any])
_WORD: Final = ir.IntType(64)
_INT: Final = ir.IntType(32)
#: What a function that runs a chunk returns: the chunk is finished, nobody wants the results any
#: more, or memory was short.
FINISHED: Final = 0
CANCELLED: Final = 1
FAILED: Final = 2
#: Arrays that every block begins with, and the first one that depends on the kind of work.
RANGES, SPANS, CANCEL_FLAG, OWN_ARRAYS = range(4)
#: A half-open range.
RANGE: Final = np.dtype([("start", np.int64), ("stop", np.int64)])
#: Words of a block for each array: address, and number of elements.
_ENTRY: Final = 2
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
#: Tasks that helpers work on at a time; further ones run on their caller's thread alone.
_SLOTS: Final = 4
_compiled = numba_cache.njit(nogil=True, error_model="numpy")


def inlined(function: _Function) -> _Function:
    """Make a function callable from compiled code, which it becomes a part of."""
    return cast(_Function, register_jitable(error_model="numpy", no_cfunc_wrapper=True)(function))


@inlined
def aligned(size: int, unit: int) -> int:
    """Round a size up to a multiple of a unit."""
    return -(-size // unit) * unit


def uncounted(function: _Function) -> _Function:
    """Make a function that allocates nothing callable from compiled code.

    It does not count references to arrays, which takes a third of the time otherwise, and it
    becomes a part of its callers: passing the arrays of a workspace, of seven words each, would
    take longer than most of these functions. It must not assign to slices, for which compiled code
    may need a copy.
    """
    options = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(_Function, njit(function, _nrt=False, forceinline=True, **options))


def compiled_intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that generates LLVM instructions callable from compiled code."""
    return cast(Callable[..., Any], intrinsic(function))


def pointer_to(kind: Any) -> Any:
    """Return a function that turns an address into a pointer to a Numba type, in compiled code."""

    @compiled_intrinsic
    def convert(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return convert


@compiled_intrinsic
def fence(typing_context: Any) -> Any:
    """Order earlier writes before later reads, as other threads see them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), generate


@compiled_intrinsic
def add_atomically(typing_context: Any, address: Any, number: Any) -> Any:
    """Add to the 64-bit integer at an address; return its value before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@compiled_intrinsic
def replace_atomically(typing_context: Any, address: Any, expected: Any, number: Any) -> Any:
    """Replace the 64-bit integer at an address if it is the expected one; return whether it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        found = builder.cmpxchg(pointer, arguments[1], arguments[2], "seq_cst")
        return builder.zext(builder.extract_value(found, 1), ir.IntType(64))

    return types.int64(types.int64, types.int64, types.int64), generate


def _caller(returned: Any, kinds: list[Any] | None = None) -> Any:
    """Return a function that calls what is at an address, with integers.

    ``kinds`` are LLVM's types of the parameters; None if all have 64 bits.
    """

    @compiled_intrinsic
    def call(typing_context: Any, address: Any, arguments: Any) -> Any:
        parameters = kinds or [_WORD] * len(arguments)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            is_void = returned == types.void
            result = ir.VoidType() if is_void else context.get_value_type(returned)
            function = builder.inttoptr(values[0], ir.FunctionType(result, parameters).as_pointer())
            numbers = [builder.extract_value(values[1], k) for k in range(len(parameters))]
            numbers = [
                builder.trunc(number, kind) if kind == _INT else number
                for number, kind in zip(numbers, parameters, strict=True)
            ]
            found = builder.call(function, numbers)
            return context.get_dummy_value() if is_void else found

        return returned(types.int64, types.UniTuple(types.int64, len(parameters))), generate

    return call


#: Functions of C libraries that return an int.
call_c: Final = _caller(types.int32)
#: ``cuLaunchKernel``.
call_launch: Final = _caller(types.int32, [_WORD, *[_INT] * 7, *[_WORD] * 3])
#: Functions that run a chunk, see `argument_block`; kernels on rows; kernels that sum over rows.
call_chunk: Final = _caller(types.int64)
call_kernel: Final = _caller(types.void)
call_sum: Final = _caller(types.float64)


# ---------------------------------------------------------------------------------- argument blocks


class Range(NamedTuple):
    """RANGE as compiled code returns it."""

    start: int
    stop: int


pointer32: Final = pointer_to(types.float32)
pointer64: Final = pointer_to(types.float64)
_pointer_to_words: Final = pointer_to(types.int64)
_character_at: Final = c_char.from_buffer


def argument_block(arrays: tuple[NDArray[Any], ...]) -> NDArray[np.int64]:
    """List contiguous arrays, which must outlive the block."""
    entries: list[int] = []
    for array in arrays:  # mostly much faster than ``array.ctypes``, but for buffers of records
        plain: Any = array.view(np.uint8) if array.dtype.names else array
        try:
            address = addressof(_character_at(plain))
        except (TypeError, ValueError):  # it is read-only or empty, or has gaps
            assert array.flags.c_contiguous, "compiled code takes arrays for contiguous"
            address = array.ctypes.data
        entries += (address, array.size)
    return np.array(entries, dtype=np.int64)


def array_address(array: NDArray[Any]) -> int:
    """Return the address of a contiguous array."""
    return int(argument_block((array,))[0])


def reader(kind: Any) -> Any:
    """Return a function that gives array number ``index`` of a block, flat, in compiled code.

    Args:
        kind: Numba's type of the elements, or a structured NumPy type.
    """
    pointer = pointer_to(from_dtype(kind) if isinstance(kind, np.dtype) else kind)

    @inlined
    def read(block: int, index: int) -> Any:
        entry = carray(_pointer_to_words(block + 8 * _ENTRY * index), _ENTRY)
        return carray(pointer(entry[0]), entry[1])

    return read


words: Final = reader(types.int64)
floats: Final = reader(types.float64)
octets: Final = reader(types.uint8)
ranges: Final = reader(RANGE)


@inlined
def chunk_ranges(block: int, chunk: int) -> Any:
    """Return the instances of a chunk, its rows, and the number of its span.

    Chunk i is the range of instances i // spans over the span i % spans.
    """
    spans = ranges(block, SPANS)
    span = chunk % len(spans)
    instances, rows = ranges(block, RANGES)[chunk // len(spans)], spans[span]
    return Range(instances.start, instances.stop), Range(rows.start, rows.stop), span


# ------------------------------------------------------------------------- the words of the loop


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
        # One chunk is taken in any case.
        if chunk != words[slot + FIRST] and words[slot + SOON] != NEVER:
            call_c(words[_CLOCK], (_MONOTONIC, int(clock.ctypes.data)))
            now = clock[0] * 1_000_000_000 + clock[1]
            is_soon = words[OTHERS_WAIT] != 0 and now >= words[slot + SOON]
            if is_soon or now >= words[slot + LATE]:
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
