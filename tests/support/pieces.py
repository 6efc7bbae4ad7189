"""Work of the CPU engine whose pieces are Python."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from warpfit_server.engine.cpu_pieces import CANCELLED, Pieces, finish, take
from warpfit_server.engine.cpu_work import Work

_ONE = Pieces.of(np.array([[0, 1]]), np.array([[0, 1]]))
finish(_ONE, take(_ONE))  # compiled before anybody measures time


def work_in_python(run_piece: Callable[[int], object], count: int) -> Work:
    """Pieces that are run by a function, which is given their numbers; False cancels all."""
    numbers = np.arange(count)
    cells = np.column_stack([numbers, numbers + 1])
    pieces = Pieces.of(cells, np.array([[0, 1]]))

    def run(pieces: Pieces, limit: int) -> int:
        began, took = time.perf_counter_ns(), 0
        while took < limit and (piece := take(pieces)) >= 0:
            if run_piece(piece) is False:
                return CANCELLED
            finish(pieces, piece)
            took = time.perf_counter_ns() - began
        return took

    return Work(run, pieces, (), 1, 10**9)
