"""When the calls of an open-loop load begin, whatever becomes of those before them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def arrivals(rate: float, seconds: float, ramp: float, kind: str, seed: int) -> Floats:
    """Seconds after the start at which calls begin, increasing.

    The rate grows from 0 to ``rate`` during ``ramp`` seconds and stays there for ``seconds``.

    Args:
        rate: calls a second.
        seconds: time at the full rate.
        ramp: time before that.
        kind: ``"poisson"``, as many independent callers arrive, or ``"even"``.
        seed: of the Poisson process.

    """
    total = rate * (ramp / 2 + seconds)
    if kind == "even":
        return _inverse(np.arange(0.5, int(total), dtype=np.float64), rate, ramp)
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(size=int(total + 6 * np.sqrt(total) + 10))
    counts = np.cumsum(gaps)
    return _inverse(counts[counts < total], rate, ramp)


def _inverse(counts: Floats, rate: float, ramp: float) -> Floats:
    """Moment by which so many calls are due: the inverse of the integrated rate."""
    growing = np.sqrt(2 * counts * ramp / rate)
    steady = counts / rate + ramp / 2
    return np.where(counts < rate * ramp / 2, growing, steady)
