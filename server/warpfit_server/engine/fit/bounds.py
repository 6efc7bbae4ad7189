"""Bounds and fixed parameters, as every method treats them; compiled where it is called."""

from __future__ import annotations

from typing import Any

import numpy as np

from warpfit_server.engine.fit.jit import jitable
from warpfit_server.engine.fit.searches import FREE, LOWER, UPPER, Floats


@jitable
def find_moving(vector: Floats, point: int, slope: Floats, moving: Any) -> None:
    """Tell which parameters take part in the next step: free, and not pushed out of a bound.

    Args:
        vector: `searches.Searches.vectors` of one search, [:, n].
        point: row of ``vector`` with the parameters from which the step leads.
        slope: gradient there, [n].
        moving: is filled, bool [n].

    """
    for i in range(vector.shape[1]):
        x = vector[point, i]
        below = x <= vector[LOWER, i] and slope[i] > 0.0
        above = x >= vector[UPPER, i] and slope[i] < 0.0
        moving[i] = vector[FREE, i] != 0.0 and not below and not above


@jitable
def within(vector: Floats, i: int, value: float, single: bool) -> float:
    """Bring a value for parameter ``i`` into its bounds, and to what the engine computes with."""
    if single:
        value = float(np.float32(value))
    inside: float = min(max(value, vector[LOWER, i]), vector[UPPER, i])
    return inside
