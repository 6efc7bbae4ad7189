"""Evaluations of one kind, answered on a lane without Python.

Genetic programming sends batch after batch against one data set. Once Python has answered one of
them, all is known that the next one needs but the batch itself. So compiled code takes the next
packet from the lane, computes, and tells the door: fresh batches by the interpreter
(`warpfit_server.engine.cuda.fresh`), one that comes again and again with other parameters by its
compiled kernels (`warpfit_server.engine.cuda.repeated`). Python, and with it the interpreter lock
that all lanes share, comes in again when something unusual happens: another kind of message, a
batch that compiled code cannot answer, or an error.

What a lane holds for that may be wanted back at any time: for another data set, or because device
memory is short.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine import numba_cache
from warpfit_server.engine.calls import fence
from warpfit_server.engine.cuda.tokens import Tokens
from warpfit_server.engine.lane_end import Line, is_of_kind, now, receive_message, sleep
from warpfit_server.engine.roster import (
    ANSWERED,
    AT_WORK,
    NANOSECONDS,
    NEEDS,
    REVOKED,
    TOKEN_ROWS,
    Place,
    may_start,
    nobody_works,
)
from warpfit_server.orders import Numbers

#: Evaluations after which Python takes notice of them.
AT_A_TIME: Final = 256
#: What serving returns if it stopped between two messages.
BETWEEN: Final = -3
#: Microseconds after which a lane that waits for others looks again: a usual kernel's time.
_PAUSE: Final = 100
_NUMBERS: Final = len(Numbers._fields)
_compiled = numba_cache.njit(nogil=True)


class Memory(NamedTuple):
    """The lane's memory, bytes, twice."""

    bytes: NDArray[np.uint8]
    batch: NDArray[np.uint8]
    """The same for reading, so that compiled code is made for one kind of batch; see `Tokens`."""

    @classmethod
    def of(cls, segment: NDArray[np.uint8]) -> Memory:
        """View a lane's memory."""
        batch = segment.view()
        batch.flags.writeable = False
        return cls(segment, batch)


class Duty(NamedTuple):
    """What compiled code does on a lane."""

    content_id: bytes
    """Of the data set that it uses."""
    serve: Callable[[Line, NDArray[np.uint8], Memory, NDArray[np.int64], int], int]
    """Answers on a line evaluations of a kind, in its memory, with board and place of the roster.
    Returns the size of what came and was not answered, or `BETWEEN`."""
    observe: Callable[[int, float], None]
    """Told the token-rows and seconds of an average evaluation, now and then."""
    release: Callable[[], None]
    """Gives back what it holds; called once."""


class Standings:
    """All lanes that compiled code serves."""

    def __init__(self) -> None:
        self._members: set[Standing] = set()
        self._lock = threading.Lock()

    def join(self, duty: Duty, place: Place) -> Standing:
        """Let compiled code serve one more lane."""
        standing = Standing(duty, place, self._part)
        with self._lock:
            self._members.add(standing)
        return standing

    def revoke(self, content_id: bytes | None = None) -> None:
        """Want everything back, from those that use a data set or from all.

        Those that are just at work give it back in a moment.
        """
        with self._lock:
            members = list(self._members)
        for standing in members:
            if content_id in (None, standing.content_id):
                standing.revoke()

    def _part(self, standing: Standing) -> None:
        with self._lock:
            self._members.discard(standing)


class Standing:
    """One lane that compiled code serves; see `warpfit_server.engine.base.Standing`."""

    def __init__(self, duty: Duty, place: Place, part: Callable[[Standing], None]) -> None:
        self.content_id = duty.content_id
        """Of the data set."""
        self._place = place
        self._part = part
        self._observe = duty.observe
        self._duty: Duty | None = duty
        self._noted = (0, 0, 0)  # what was answered, its token-rows and nanoseconds
        self._lock = threading.Lock()

    def serve(self, line: Line, kind: bytes, segment: NDArray[np.uint8]) -> int | None:
        """Answer until that is over, or until something comes that it cannot answer."""
        duty = self._duty
        if duty is None:
            return None
        self._place.occupy(segment)
        board = self._place.roster.board
        text = np.frombuffer(kind, np.uint8)
        size = int(duty.serve(line, text, Memory.of(segment), board, self._place.number))
        return None if size == BETWEEN else size

    @property
    def is_over(self) -> bool:
        """Whether everything was wanted back."""
        return bool(self._place.words[REVOKED])

    def seconds(self) -> float:
        """Time that all evaluations so far have taken; the planner is told of the latest, too."""
        with self._lock:
            words = self._place.words
            now = int(words[ANSWERED]), int(words[TOKEN_ROWS]), int(words[NANOSECONDS])
            answered, token_rows, nanoseconds = np.subtract(now, self._noted).tolist()
            self._noted = now
        if answered:
            self._observe(token_rows // answered, 1e-9 * nanoseconds / answered)
        return 1e-9 * now[2]

    def revoke(self) -> None:
        """Want everything back: at once if nothing is at work, else the lane's thread gives it."""
        if not _ask_back(self._place.words):
            self._release()

    def close(self) -> None:
        """Give everything back; the lane's thread alone calls this."""
        self._release()
        self._place.leave()

    def _release(self) -> None:
        with self._lock:
            duty, self._duty = self._duty, None
        if duty is not None:
            self._part(self)
            duty.release()


# ------------------------------------------------------------------------------ compiled by Numba


@_compiled  # type: ignore[untyped-decorator]
def _ask_back(words: NDArray[np.int64]) -> bool:
    """Write down that everything is wanted back; return whether it is in use."""
    words[REVOKED] = 1
    fence()
    return bool(words[AT_WORK] != 0)


@_compiled  # type: ignore[untyped-decorator]
def begin(
    line: Line,
    kind: NDArray[np.uint8],
    memory: Memory,
    board: NDArray[np.int64],
    place: int,
    cost: float,
) -> tuple[int, int]:
    """Wait for the next evaluation, and until it may begin.

    Args:
        line: of the lane.
        kind: that is to be answered.
        memory: of the lane.
        board: of the roster.
        place: of the lane.
        cost: nanoseconds of the device for one token with one parameter vector.

    Returns:
        Size of what came, and ``time.monotonic_ns()`` of the beginning: 0 if it is Python's.

    """
    size = receive_message(line, nobody_works(board))
    if not is_of_kind(line, size, kind):
        return int(size), 0
    while not may_start(board, place) and memory.bytes[0] == 0:
        sleep(line, _PAUSE)
    words, began, numbers = board[place], now(line), read_numbers(line)
    words[NEEDS] = int(cost * numbers.tokens * numbers.vectors)
    words[AT_WORK] = began
    fence()
    if words[REVOKED] == 0 and memory.bytes[0] == 0:
        return int(size), began
    words[AT_WORK] = 0
    return int(size), 0


@_compiled  # type: ignore[untyped-decorator]
def end(line: Line, board: NDArray[np.int64], place: int, began: int, token_rows: int) -> bool:
    """Take note of an evaluation; return whether everything was wanted back.

    Args:
        line: of the lane.
        board: of the roster.
        place: of the lane.
        began: as `begin` returned it.
        token_rows: tokens x parameter vectors x rows; 0 if it could not be answered.

    """
    words = board[place]
    words[AT_WORK] = 0
    fence()
    if token_rows > 0:
        words[ANSWERED] += 1
        words[TOKEN_ROWS] += token_rows
        words[NANOSECONDS] += now(line) - began
    return bool(words[REVOKED] != 0)


@_compiled  # type: ignore[untyped-decorator]
def read_numbers(line: Line) -> Numbers:
    """Read the beginning of the packet that was received."""
    n = line.packet[: 8 * _NUMBERS].view(np.int64)
    return Numbers(
        *(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12])
    )


@_compiled  # type: ignore[untyped-decorator]
def view_tokens(memory: Memory, numbers: Numbers) -> Tokens:
    """View the batch in a lane's memory."""
    batch = memory.batch
    return Tokens(
        codes=_part(batch, numbers.codes_at, numbers.tokens),
        values=_part(batch, numbers.values_at, 8 * numbers.tokens).view(np.float64),
        lengths=_part(batch, numbers.lengths_at, 4 * numbers.programs).view(np.uint32),
        parameter_counts=_part(batch, numbers.counts_at, 4 * numbers.programs).view(np.uint32),
        parameters=_part(batch, numbers.parameters_at, 8 * numbers.parameters).view(np.float64),
        vectors=numbers.vectors,
    )


@_compiled  # type: ignore[untyped-decorator]
def _part(batch: NDArray[np.uint8], start: int, size: int) -> NDArray[np.uint8]:
    return batch[start : start + size]
