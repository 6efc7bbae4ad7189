"""The board: evaluations that threads of the CPU engine work on, without Python.

The simple form, of each thread that computes, of which there are as many as cores:

    while True:
        while some evaluation has pieces left:
            run the next piece of the least charged tenant's, and charge the tenant
        sleep until there is more

Who brings an evaluation to an empty board works on it, too, because waking others takes a while,
until the board has more.

Python would let one thread at a time decide what it does next, and a dozen threads that do so every
half millisecond wait for each other. So they decide in compiled code. The board is an array of
words that all threads share: a head, then places for evaluations. Words that many change are
changed atomically, and threads sleep on them as mutexes do (futex(2)).
"""

from __future__ import annotations

import ctypes
import platform
from typing import Any, Final

import numpy as np
from numba import carray
from numpy.typing import NDArray

from warpfit_server.engine.calls import add_atomically, call_4, call_5, fence, nanoseconds
from warpfit_server.engine.cpu_pieces import (
    CANCELLED,
    FINISHED,
    pointer_to_bytes,
    pointer_to_words,
    run_piece,
)
from warpfit_server.engine.schedule import inlined

#: Nanoseconds of thread time that a tenant may be ahead of another before a thread changes over.
_AHEAD: Final = 5_000_000
#: Nanoseconds that a thread without work sleeps at most.
_LONG: Final = 10_000_000_000
#: Words of a cache line.
_LINE: Final = 8
#: Words of the head, and of a place; those that many threads change have cache lines of their own.
HEAD_WORDS: Final = 24
PLACE_WORDS: Final = 24
#: Words of the head: whether threads should end, addresses of functions of the C library.
_CLOSED, _CLOCK, _SYSCALL = 0, 1, 2
#: Changes of the board (what threads without work sleep on), such threads.
_CHANGES, _ASLEEP = 8, 16
#: Words of a place: whether threads may come, what runs a piece and is given, how many pieces there
#: are, how many threads may come, addresses of the tenant's charge and of what is set when a piece
#: is finished, and what ended the work too early.
OPEN, FUNCTION, RECORD, PIECES, WANTED, CHARGE, DONE, ENDED = 0, 1, 2, 3, 4, 5, 6, 7
#: The next piece that nobody has taken; threads that are there; how often the last one has left;
#: the changes of the board when it had nothing but this, or -1.
NEXT, INSIDE, EMPTIED, _ALONE = 8, 16, 17, 18
#: No place: the head is there.
_NOWHERE: Final = 0


def new_board(places: int) -> NDArray[np.int64]:
    """Make a board on which nobody works."""
    size = HEAD_WORDS + places * PLACE_WORDS
    memory = np.zeros(size + _LINE, dtype=np.int64)
    start = -(memory.ctypes.data // memory.itemsize) % _LINE
    board = memory[start : start + size]
    board[_CLOCK], board[_SYSCALL] = _address_of("clock_gettime"), _address_of("syscall")
    return board


def _address_of(name: str) -> int:
    address = ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
    assert address is not None
    return address


#: Number of the system call; all newer architectures share one.
_FUTEX: Final = {"x86_64": 202}.get(platform.machine(), 98)
_WAIT_PRIVATE, _WAKE_PRIVATE = 128, 129


# ------------------------------------------------------------------------------- called by Python


def lead(board: Any, place: int, limit: int) -> int:
    """Let threads come to a place that has been filled in, and wait until all is done.

    The place is closed then. After some nanoseconds it returns in any case, to be called again.
    Returns the nanoseconds that it has worked itself, as it does while there is nothing else.
    """
    deadline = nanoseconds(board[_CLOCK]) + limit
    if board[place + OPEN] == 0:
        _open(board, place)
    worked = _work_alone(board, place, deadline)
    while True:
        seen = board[place + EMPTIED]
        fence()
        if not _has_pieces(board, place):
            _close(board, place)
            return worked
        left = deadline - nanoseconds(board[_CLOCK])
        if left <= 0:
            return worked
        _sleep(board, place + EMPTIED, seen, left)


def withdraw(board: Any, place: int) -> None:
    """Give no more pieces of a place out, and close it."""
    board[place + NEXT] = board[place + PIECES]
    _close(board, place)


@inlined
def _open(board: Any, place: int) -> None:
    is_alone = True
    for other in range(HEAD_WORDS, len(board), PLACE_WORDS):
        is_alone = is_alone and board[other + OPEN] == 0
    fence()
    board[place + OPEN] = 1
    fence()
    changes = _wake(board, board[place + WANTED] - is_alone)
    board[place + _ALONE] = changes if is_alone else -1


@inlined
def _close(board: Any, place: int) -> None:
    """Close a place, and wait until no thread is there any more."""
    board[place + OPEN] = 0
    while True:
        seen = board[place + EMPTIED]
        fence()
        if board[place + INSIDE] == 0:
            return
        _sleep(board, place + EMPTIED, seen, _LONG)


def compute(board: Any) -> None:
    """Work on what there is until the board is closed."""
    while True:
        seen = board[_CHANGES]
        fence()
        if board[_CLOSED] != 0:
            return
        _work(board)
        _add(board, _ASLEEP, 1)
        _sleep(board, _CHANGES, seen, _LONG)
        _add(board, _ASLEEP, -1)


def close(board: Any) -> None:
    """Let the threads that compute end."""
    board[_CLOSED] = 1
    _wake(board, 1 << 20)


def run_alone(board: Any, place: int) -> int:
    """Run all pieces of a place that is not open; return the nanoseconds that it took."""
    began = nanoseconds(board[_CLOCK])
    while _has_pieces(board, place):
        _run(board, place, board[place + NEXT])
        board[place + NEXT] += 1
    took = nanoseconds(board[_CLOCK]) - began
    _charge(board, place, took)
    return int(took)


# ------------------------------------------------------------------------------- at work


@inlined
def _work(board: Any) -> None:
    """Run pieces, the least charged tenant's first, as long as there are any."""
    before, place = nanoseconds(board[_CLOCK]), _NOWHERE
    while True:
        best = _choose(board, place)
        if best == _NOWHERE:
            break
        if best != place:
            _leave(board, place)
            place = best if _join(board, best) else _NOWHERE
        if place != _NOWHERE:
            before = _take_piece(board, place, before)
    _leave(board, place)


@inlined
def _work_alone(board: Any, place: int, deadline: int) -> int:
    """Run pieces of one place as long as the board has nothing else; return what that took."""
    if board[place + _ALONE] < 0:
        return 0
    began = before = nanoseconds(board[_CLOCK])
    is_alone = _join(board, place)
    if is_alone:
        while (
            _has_pieces(board, place)
            and board[place + _ALONE] == board[_CHANGES]
            and before < deadline
        ):
            before = _take_piece(board, place, before)
        _leave(board, place)
        is_alone = board[place + _ALONE] == board[_CHANGES]
    if not is_alone:
        board[place + _ALONE] = -1
        if _has_pieces(board, place):
            _wake(board, 1)  # in this thread's stead, for which there may have been no room before
    return int(before - began)


@inlined
def _take_piece(board: Any, place: int, before: int) -> int:
    """Run the next piece, if any, and charge the time since ``before``; return the time."""
    piece = _add(board, place + NEXT, 1)
    if piece < board[place + PIECES]:
        _run(board, place, piece)
    now = nanoseconds(board[_CLOCK])
    _charge(board, place, now - before)
    return int(now)


@inlined
def _choose(board: Any, place: int) -> int:
    """Choose where to go on, best where the thread is.

    The least charged tenant comes first, and of its evaluations the one with fewest threads. A
    thread changes over to a tenant that is charged clearly less, and within a tenant if there are
    at least two threads fewer.
    """
    best, least, fewest = _NOWHERE, 0, 0
    for other in range(HEAD_WORDS, len(board), PLACE_WORDS):
        if board[other + OPEN] == 0 or not _has_pieces(board, other):
            continue
        inside = board[other + INSIDE]
        if other != place and inside >= board[other + WANTED]:
            continue
        charge = _charged(board, other)
        # The charge of a tenant changes while this reads it for one evaluation after the other.
        if best != _NOWHERE and board[other + CHARGE] == board[best + CHARGE]:
            is_better = inside < fewest
        else:
            is_better = best == _NOWHERE or charge < least
        if is_better:
            best, least, fewest = other, charge, inside
    if place == _NOWHERE or best == _NOWHERE or not _has_pieces(board, place):
        return best
    if board[best + CHARGE] == board[place + CHARGE]:
        return best if fewest + 1 < board[place + INSIDE] else place
    return best if least + _AHEAD < _charged(board, place) else place


@inlined
def _has_pieces(board: Any, place: int) -> bool:
    """Whether there are pieces that nobody has taken."""
    return bool(board[place + NEXT] < board[place + PIECES])


@inlined
def _join(board: Any, place: int) -> bool:
    """Come to a place; False if there is no room any more, or the work has ended."""
    before = _add(board, place + INSIDE, 1)
    if before < board[place + WANTED] and board[place + OPEN] != 0:
        return True
    _leave(board, place)
    return False


@inlined
def _leave(board: Any, place: int) -> None:
    """Leave a place, if any; the last one wakes who waits for the work."""
    if place == _NOWHERE:
        return
    if _add(board, place + INSIDE, -1) == 1:
        _add(board, place + EMPTIED, 1)
        _futex_wake(board, place + EMPTIED, 1)


@inlined
def _run(board: Any, place: int, piece: int) -> None:
    """Run a piece; what is cancelled or fails ends the work."""
    ended = run_piece(board[place + FUNCTION], board[place + RECORD], piece)
    if ended == FINISHED:
        fence()
        carray(pointer_to_bytes(board[place + DONE]), board[place + PIECES])[piece] = 1
        return
    board[place + NEXT] = board[place + PIECES]
    if ended != CANCELLED or board[place + ENDED] == FINISHED:
        board[place + ENDED] = ended


@inlined
def _charged(board: Any, place: int) -> int:
    charge = carray(pointer_to_words(board[place + CHARGE]), 2)
    return int(charge[0] + charge[1])


@inlined
def _charge(board: Any, place: int, took: int) -> None:
    add_atomically(np.int64(board[place + CHARGE] + 8), np.int64(took))


# ------------------------------------------------------------------------------- sleeping


@inlined
def _address(board: Any, word: int) -> int:
    return int(board.ctypes.data + 8 * word)


@inlined
def _add(board: Any, word: int, number: int) -> int:
    """Add to a word atomically; return what it was before."""
    return int(add_atomically(np.int64(_address(board, word)), np.int64(number)))


@inlined
def _wake(board: Any, count: int) -> int:
    """Tell threads without work that the board has changed; return the changes until now."""
    changes = _add(board, _CHANGES, 1) + 1
    if count > 0 and board[_ASLEEP] > 0:
        _futex_wake(board, _CHANGES, count)
    return changes


@inlined
def _futex_wake(board: Any, word: int, count: int) -> None:
    given = (_FUTEX, _address(board, word), _WAKE_PRIVATE, int(count))
    call_4(board[_SYSCALL], given)


@inlined
def _sleep(board: Any, word: int, seen: int, limit: int) -> None:
    """Sleep for some nanoseconds, or until woken, unless a word is no more what it was."""
    time = np.empty(2, dtype=np.int64)
    time[0], time[1] = limit // 1_000_000_000, limit % 1_000_000_000
    given = (
        _FUTEX,
        _address(board, word),
        _WAIT_PRIVATE,
        int(seen & 0xFFFFFFFF),
        int(time.ctypes.data),
    )
    call_5(board[_SYSCALL], given)
    time[0] = 0  # it lives until here
