"""Threads that compute on the CPU: as many as there are cores.

What they turn to next is the work of the least charged tenant. With more threads than cores the
system's scheduler would choose among them, which knows nothing of tenants. So the thread that
brings an evaluation waits, unless nothing else is there. Threads decide in compiled code: see
`cpu_board`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from warpfit_server.engine import cpu_board as board
from warpfit_server.engine.cpu_pieces import CANCELLED, FAILED, FINISHED
from warpfit_server.engine.cpu_work import Work
from warpfit_server.fairness import Charge, Turn

#: Whoever runs Python, here or in a door, wants a core for a moment only, to take, begin or answer
#: a call, and goes before what computes. At the same priority Linux may let it wait for 3 ms.
NICE: Final = 10
#: Token-rows below which waking another thread costs more than it gains.
_WORK_WORTH_A_THREAD: Final = 300_000
#: Evaluations that threads may help with at a time; further ones do without.
_PLACES: Final = 64
#: Nanoseconds after which who waits tells what is ready, and, if nothing is to be told, after which
#: it looks whether the evaluation was cancelled before anybody came.
_TELL, _LOOK = 2_000_000, 100_000_000


@dataclass(frozen=True, eq=False)
class BoardCode:
    """Compiled functions of `cpu_board`, by their names there."""

    lead: Any
    withdraw: Any
    compute: Any
    close: Any
    run_alone: Any


class Helpers:
    """Threads shared by all evaluations, started when they are first wanted.

    Args:
        cores: threads that compute.
        code: what they run.

    """

    def __init__(self, cores: int, code: BoardCode) -> None:
        self._cores = cores
        self._code = code
        self._board = board.new_board(_PLACES)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._places = [board.HEAD_WORDS + board.PLACE_WORDS * n for n in range(_PLACES)]
        """Free ones."""
        self._charges: dict[int, Charge] = {}
        """Of who used a place last: threads that come too late may still look at it."""

    def run(self, work: Work, turn: Turn, ready: Callable[[int], None] | None = None) -> None:
        """Have the work done; the calling thread waits, or works as long as there is nothing else.

        Args:
            work: to do.
            turn: whose tenant is charged.
            ready: told how many programs are finished, from the first, whenever there are more.

        Raises:
            MemoryError: if there was not enough for a piece.
            Exception: what ``ready`` raised.

        """
        with self._place() as (words, place):
            self._fill(words, place, work, turn)
            worth = work.cost // _WORK_WORTH_A_THREAD + 1
            if worth == 1 or words is not self._board:  # a thread would come too late, or none
                turn.note(1e-9 * self._code.run_alone(words, place))
            else:
                words[place + board.WANTED] = min(self._cores, len(work.done), worth)
                self._lead(place, work, turn, ready)
            ended = int(words[place + board.ENDED])
        if ended == FAILED:
            raise MemoryError("no memory for intermediate results")
        if ready is not None and ended == FINISHED:
            work.report(ready)

    def close(self) -> None:
        """End the threads; no work may be at hand any more."""
        self._code.close(self._board)
        for thread in self._threads:
            thread.join()

    def _lead(
        self, place: int, work: Work, turn: Turn, ready: Callable[[int], None] | None
    ) -> None:
        self._start()
        try:
            limit = _LOOK if ready is None else _TELL
            while True:
                turn.note(1e-9 * self._code.lead(self._board, place, limit))
                if not self._board[place + board.OPEN]:
                    return
                if work.cancelled[0]:
                    self._board[place + board.ENDED] = CANCELLED
                    return
                if ready is not None:
                    work.report(ready)
        finally:
            if self._board[place + board.OPEN]:
                self._code.withdraw(self._board, place)

    def _start(self) -> None:
        """See to it that there are threads."""
        with self._lock:
            for number in range(len(self._threads), self._cores):
                name = f"warpfit-cpu-{number}"
                thread = threading.Thread(target=self._compute, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _compute(self) -> None:
        os.nice(NICE)  # of this thread alone, on Linux
        self._code.compute(self._board)

    @contextmanager
    def _place(self) -> Iterator[tuple[Any, int]]:
        """A place on the board; if none is free, on another one that nobody looks at."""
        with self._lock:
            place = self._places.pop() if self._places else None
        if place is None:
            yield board.new_board(1), board.HEAD_WORDS
            return
        try:
            yield self._board, place
        finally:
            with self._lock:
                self._places.append(place)

    def _fill(self, words: Any, place: int, work: Work, turn: Turn) -> None:
        charge = turn.account()
        if words is self._board:
            self._charges[place] = charge
        entries = np.zeros(board.NEXT + 1, dtype=np.int64)
        entries[board.FUNCTION] = work.function
        entries[board.RECORD] = work.record.ctypes.data
        entries[board.PIECES] = len(work.done)
        entries[board.CHARGE] = charge.address
        entries[board.DONE] = work.done.ctypes.data
        words[place : place + len(entries)] = entries
