"""Work of the CPU engine whose pieces are Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np

from warpfit_server.code_cache import default_cache_directory
from warpfit_server.engine.cpu_cache import load_board
from warpfit_server.engine.cpu_helpers import BoardCode, Helpers
from warpfit_server.engine.cpu_pieces import CANCELLED, FAILED, FINISHED
from warpfit_server.engine.cpu_work import Work
from warpfit_server.fairness import current_turn

_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


@cache
def _code() -> BoardCode:
    return load_board(default_cache_directory())


def helpers_on(cores: int) -> Helpers:
    """Threads of an engine with so many cores."""
    return Helpers(cores, _code())


def run(helpers: Helpers, work: Work, ready: Callable[[int], None] | None = None) -> None:
    """Do the work for the tenant whose turn it is on this thread."""
    helpers.run(work, current_turn(), ready)


def work_in_python(run_piece: Callable[[int], object], count: int) -> Work:
    """Pieces that are run by a function, which is given their numbers.

    False cancels all; an exception fails, as no memory would.
    """
    cancelled = np.zeros(1, dtype=np.uint8)

    def call(record: int, piece: int) -> int:
        try:
            wanted = run_piece(piece) is not False
        except Exception:
            return FAILED
        cancelled[0] |= not wanted
        return FINISHED if wanted else CANCELLED

    function = _FUNCTION(call)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    alive = np.empty(1, dtype=object)
    alive[0] = function
    numbers = np.arange(count)
    cells = np.column_stack([numbers, numbers + 1])
    return Work(address, (alive,), cells, np.array([[0, 1]]), 1, 10**9, cancelled)
