"""Work on the programs of a batch by compiled code, spread over a few threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Final

from numpy.typing import NDArray

from warpfit.calls.splitting import even_bounds
from warpfit_server.engine.native.compile_processes import NICE
from warpfit_server.system.machine import available_cores

_THREADS: Final = ThreadPoolExecutor(available_cores(), "spread", os.nice, (NICE,))
#: Tokens for each thread, of which compiled code has some 100 microseconds of work.
_TOKENS: Final = 4_000


def spread(lengths: NDArray[Any], threads: int, do: Callable[[slice], None]) -> None:
    """Call a function for consecutive programs, on a few threads at the same time.

    Args:
        lengths: tokens of each program.
        threads: most threads that gain from it.
        do: is called with ranges of programs that make up all; compiled code for the most part.
    """
    threads = min(threads, int(lengths.sum()) // _TOKENS)
    if threads < 2:
        do(slice(0, len(lengths)))
        return
    bounds = even_bounds(lengths.astype(float), threads)
    for done in [_THREADS.submit(do, slice(*edge)) for edge in pairwise(bounds)]:
        done.result()
