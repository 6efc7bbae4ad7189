"""Losses are there: closed, and announced to whoever waits, by code compiled by Numba.

Shared by the compiled steps of the tiers, which hold no interpreter lock then.
"""

from __future__ import annotations

import socket
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit_server.channel import TOLD
from warpfit_server.engine import numba_cache
from warpfit_server.engine.base import Reply
from warpfit_server.engine.calls import call_4
from warpfit_server.engine.cuda.resident import Closing
from warpfit_server.engine.cuda.submission import SEND

_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)


class Report(NamedTuple):
    """To whom losses are announced, and since when they have been under way; integers."""

    descriptor: int
    """-1: to nobody."""
    queue: int
    started: int
    compiled: int = 0
    """1 for the compiled tier."""
    cache_hits: int = 0

    @classmethod
    def of(cls, reply: Reply | None, started: int, waited: int, *compiled: int) -> Report:
        """Report of an evaluation.

        Args:
            reply: to whom; None for nobody.
            started: ``time.perf_counter_ns()`` of its beginning.
            waited: nanoseconds of its wait for its turn, since then.
            compiled: and cache hits, if not 0.

        """
        descriptor, queue = (-1, 0) if reply is None else (reply.descriptor, reply.queue)
        return cls(descriptor, queue + waited, started + waited, *compiled)


@numba_cache.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def close(sums: NDArray[np.float64], closing: Closing, losses: NDArray[np.float64]) -> None:
    """Turn sums into losses, as `ResidentDataset.losses` does; both may be the same array."""
    for job in range(len(sums)):
        loss = sums[job] / closing.total
        if closing.root:
            loss = np.sqrt(loss)
        losses[job] = 1.0 - loss if closing.complement else loss


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def announce(
    functions: NDArray[np.int64],
    report: Report,
    clock: NDArray[np.int64],
    elapsed: NDArray[np.float32],
    told: NDArray[np.int64],
) -> bool:
    """Write the times down and tell whoever waits; return whether that worked.

    Args:
        functions: from `driver_functions`.
        report: whom to tell.
        clock: seconds and nanoseconds, when all was launched and when all was done; [4].
        elapsed: milliseconds of the device; [1].
        told: to fill and send, see `warpfit_server.channel.Told`.

    """
    launched = clock[0] * 1_000_000_000 + clock[1]
    done = clock[2] * 1_000_000_000 + clock[3]
    computed = np.int64(elapsed[0] * 1e6)
    told[0], told[1], told[2], told[3] = TOLD, report.queue, launched - report.started, computed
    told[4] = max(0, done - launched - computed)
    told[5], told[6] = report.compiled, report.cache_hits
    if report.descriptor < 0:
        return False
    place, size = np.int64(told.ctypes.data), 8 * len(told)
    return bool(call_4(functions[SEND], (report.descriptor, place, size, _NO_SIGNAL)) == size)
