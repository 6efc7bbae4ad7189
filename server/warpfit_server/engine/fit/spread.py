"""Work on the programs or searches of a fit by compiled code, spread over a few threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.calls.splitting import even_bounds
from warpfit_server.engine.native.compile_processes import NICE
from warpfit_server.system.machine import available_cores

_THREADS: Final = ThreadPoolExecutor(available_cores(), "spread", os.nice, (NICE,))
#: Least microseconds of work for each thread: until one has woken up and has been waited for, some
#: 200 have passed.
_LEAST: Final = 500.0
#: Tokens of programs on which compiled code works in a microsecond.
TOKENS: Final = 40.0


def spread(work: NDArray[np.float64], threads: int, do: Callable[[slice], None]) -> None:
    """Call a function for consecutive programs or searches, on a few threads at the same time.

    Args:
        work: estimated microseconds of each.
        threads: most threads that gain from it.
        do: is called with ranges that make up all; compiled code for the most part.
    """
    threads = min(threads, int(work.sum() / _LEAST))
    if threads < 2:
        do(slice(0, len(work)))
        return
    bounds = even_bounds(work, threads)
    for done in [_THREADS.submit(do, slice(*edge)) for edge in pairwise(bounds)]:
        done.result()
