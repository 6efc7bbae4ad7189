"""Who is at work in the engine: evaluations that Python runs, and those that compiled code answers.

Compiled code answers on a lane without a word to Python, as long as nothing unusual happens. What
both sides must know of each other stands on a board in memory. Each word has one writer at a time,
and reading an old value does no harm but where a fence stands.

Compiled code limits itself as `warpfit_server.fairness.FairGate` limits what Python runs: some
evaluations at a time, and a tenant that floods the engine does not keep others out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit_server.channel import Channel
from warpfit_server.engine import numba_cache

#: Lanes that compiled code serves at a time; the others are served by Python.
MOST_PLACES: Final = 64
#: Word of row 0: evaluations that Python runs.
BUSY: Final = 0
#: Words of a lane's row: number of the evaluation that is being answered, 0 for none; whether its
#: memory is wanted back; number of the tenant; nanoseconds that the device needs for what is at
#: work; then, since the place was reserved: evaluations answered, their token-rows, and nanoseconds
#: that they took.
AT_WORK, REVOKED, TENANT, NEEDS, ANSWERED, TOKEN_ROWS, NANOSECONDS = range(7)
#: Evaluations that compiled code answers at a time: enough to keep a device busy ...
_AT_ONCE: Final = 16
#: ... and with those of tenants that have less than half of the device.
_AT_MOST: Final = 32
#: Work in nanoseconds that waits on the device for what was launched before it: enough to hide what
#: the host does meanwhile, and no more, because nobody can go before it.
_AHEAD: Final = 2_000_000
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
        return not (self._running or self.compiled_works())

    def compiled_works(self) -> bool:
        """Whether compiled code is at work on a lane."""
        return bool(self.board[1:, AT_WORK].any())

    def running(self) -> list[tuple[Channel, NDArray[np.uint8]]]:
        """Lanes whose evaluations Python runs, with their cancellation flags."""
        return [(lane, flag) for lane, (_, flag) in list(self._running.items())]

    def reserve(self, tenant: str) -> Place | None:
        """Get a place for a tenant's lane that compiled code is to serve; None if all are taken."""
        try:
            number = self._free.pop()
        except IndexError:
            return None
        self.board[number] = 0
        self.board[number, TENANT] = hash(tenant)
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


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def nobody_works(board: NDArray[np.int64]) -> bool:
    """`Roster.is_idle` for compiled code."""
    return bool(board[0, BUSY] == 0 and np.all(board[1:, AT_WORK] == 0))


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def may_start(board: NDArray[np.int64], number: int) -> bool:
    """Tell whether a lane may begin an evaluation, or should wait for others.

    A tenant that has nothing at work may, unless there are very many.
    """
    total, own, needs = 0, 0, 0
    for row in range(1, len(board)):
        if board[row, AT_WORK] != 0:
            total += 1
            needs += board[row, NEEDS]
            own += board[row, TENANT] == board[number, TENANT]
    if own == 0 or (2 * own < total and needs < _AHEAD):
        return total < _AT_MOST
    return total < _AT_ONCE and needs < _AHEAD


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def has_nothing_else(board: NDArray[np.int64], number: int) -> bool:
    """Tell whether the tenant of a lane has no other evaluation at work."""
    for row in range(1, len(board)):
        is_at_work = row != number and board[row, AT_WORK] != 0
        if is_at_work and board[row, TENANT] == board[number, TENANT]:
            return False
    return True
