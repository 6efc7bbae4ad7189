"""The pieces of one evaluation on the CPU, taken by many threads without Python.

Python lets one thread at a time take something out of a list. Where a dozen threads come back for
more every half millisecond, they wait for each other: so they take pieces in compiled code, by an
atomic counter, and come back to Python now and then to see whether somebody else should go first.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.calls import add_atomically, fence, nanoseconds
from warpfit_server.engine.schedule import inlined

#: Words that threads share: number of the next piece, and whether they should come back at once.
NEXT: Final = 0
INTERRUPTED: Final = 1
_WORDS: Final = 2
#: What functions that run pieces return if the evaluation was cancelled.
CANCELLED: Final = -1


class Pieces(NamedTuple):
    """Ranges of cells times spans of rows; piece i is range i // spans over span i % spans."""

    words: NDArray[np.int64]
    cells: NDArray[np.int64]
    """Start and stop of each range of cells, [ranges, 2]."""
    spans: NDArray[np.int64]
    """Start and stop of each span of rows, [spans, 2]."""
    done: NDArray[np.uint8]
    """1 for each piece that is finished."""
    clock: int
    """Address of ``clock_gettime``."""

    @classmethod
    def of(cls, cells: NDArray[np.int64], spans: NDArray[np.int64]) -> Pieces:
        """Collect all pieces, none of which has been taken."""
        done = np.zeros(len(cells) * len(spans), dtype=np.uint8)
        return cls(np.zeros(_WORDS, dtype=np.int64), cells, spans, done, _CLOCK)


def _address_of_clock() -> int:
    function = ctypes.CDLL(None).clock_gettime
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


_CLOCK: Final = _address_of_clock()


@inlined
def take(pieces: Any) -> int:
    """Take the next piece; -1 if there is none, or the thread should come back to Python."""
    if pieces.words[INTERRUPTED] != 0 or pieces.words[NEXT] >= len(pieces.done):
        return -1
    piece = int(add_atomically(np.int64(pieces.words.ctypes.data + 8 * NEXT), np.int64(1)))
    return piece if piece < len(pieces.done) else -1


@inlined
def part(pieces: Any, piece: int) -> Any:
    """Cells and rows of a piece, half-open ranges, and the index of its span."""
    group, span = piece // len(pieces.spans), piece % len(pieces.spans)
    cells = (pieces.cells[group, 0], pieces.cells[group, 1])
    return cells, (pieces.spans[span, 0], pieces.spans[span, 1]), span


@inlined
def next_piece(pieces: Any, piece: int, deadline: int) -> int:
    """Note that a piece is finished; take another one, unless it is too late for that."""
    finish(pieces, piece)
    return -1 if nanoseconds(pieces.clock) >= deadline else take(pieces)


@inlined
def finish(pieces: Any, piece: int) -> None:
    """Note that a piece is finished, once its results can be seen."""
    fence()
    pieces.done[piece] = 1
