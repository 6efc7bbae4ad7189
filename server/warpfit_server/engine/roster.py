"""Who is at work in the engine: evaluations that Python runs, and those that compiled code answers.

Compiled code answers on a lane without a word to Python, as long as nothing unusual happens. What
both sides must know of each other stands on a board in memory. Each word has one writer at a time,
and reading an old value does no harm but where a fence stands.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit_server.channel import Channel

#: Lanes that compiled code serves at a time; the others are served by Python.
MOST_PLACES: Final = 16
#: Words of row 0: evaluations that Python runs, and whether one waits for the engine.
BUSY, WAITING = range(2)
#: Words of a lane's row: number of the evaluation that is being answered, 0 for none; whether its
#: memory is wanted back; then, since they were last cleared: evaluations answered, their
#: token-rows, and nanoseconds that they took.
AT_WORK, REVOKED, ANSWERED, TOKEN_ROWS, NANOSECONDS = range(5)
#: Words of a row: a line of the processor's cache.
_WORDS: Final = 8


class Roster:
    """The board, and the cancellation flags of all evaluations at work."""

    def __init__(self) -> None:
        self.board: NDArray[np.int64] = np.zeros((1 + MOST_PLACES, _WORDS), dtype=np.int64)
        """For compiled code."""
        self._free = list(range(MOST_PLACES, 0, -1))
        self._numbers = itertools.count(1)
        self._running: dict[Channel, tuple[int, NDArray[np.uint8]]] = {}
        self._served: dict[int, NDArray[np.uint8]] = {}

    def begin(self, lane: Channel, flag: NDArray[np.uint8]) -> None:
        """Python runs an evaluation of a lane from now on."""
        self._running[lane] = next(self._numbers), flag
        self.board[0, BUSY] = len(self._running)

    def end(self, lane: Channel) -> None:
        """It has ended."""
        del self._running[lane]
        self.board[0, BUSY] = len(self._running)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is at work, for all that is known."""
        return not (self._running or self.answering())

    def running(self) -> list[tuple[Channel, NDArray[np.uint8]]]:
        """Lanes whose evaluations Python runs, with their cancellation flags."""
        return [(lane, flag) for lane, (_, flag) in list(self._running.items())]

    def answering(self) -> int:
        """Evaluations that compiled code is answering."""
        return int(np.count_nonzero(self.board[1:, AT_WORK]))

    def call_back(self, wanted: bool) -> None:
        """Let compiled code give its lanes back after each evaluation, or stop asking for that."""
        self.board[0, WAITING] = wanted

    def reserve(self) -> Place | None:
        """Get a place for a lane that compiled code is to serve; None if all are taken."""
        try:
            number = self._free.pop()
        except IndexError:
            return None
        self.board[number] = 0
        return Place(self, number)

    def occupy(self, number: int, flag: NDArray[np.uint8]) -> None:
        """Compiled code serves a lane, whose evaluations have this flag; for `Place`."""
        self._served[number] = flag

    def vacate(self, number: int) -> None:
        """Take a place back; for `Place`."""
        self._served.pop(number, None)
        self._free.append(number)

    def flags(self) -> Iterator[tuple[tuple[int, int], NDArray[np.uint8]]]:
        """Cancellation flags of all evaluations at work, each with what tells it from others."""
        for number, flag in list(self._running.values()):
            yield (0, number), flag
        for place, flag in list(self._served.items()):
            number = int(self.board[place, AT_WORK])
            if number:
                yield (place, number), flag


@dataclass(frozen=True, slots=True)
class Place:
    """The place of one lane on the board."""

    roster: Roster
    number: int
    """Row of the board."""

    @property
    def words(self) -> NDArray[np.int64]:
        """View of its row."""
        words: NDArray[np.int64] = self.roster.board[self.number]
        return words

    def occupy(self, flag: NDArray[np.uint8]) -> None:
        """Compiled code serves the lane from now on.

        Args:
            flag: cancellation flag of its evaluations.

        """
        self.roster.occupy(self.number, flag)

    def leave(self) -> None:
        """Compiled code serves the lane no more."""
        self.roster.vacate(self.number)
