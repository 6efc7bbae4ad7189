"""The common part of both fit methods; compiled where compiled code calls it."""

from __future__ import annotations

from typing import Any

import numpy as np

from warpfit_server.engine.fit import searches
from warpfit_server.engine.native.intrinsics import inlined


@inlined
def parts_of(
    s: int,
    edges: searches.Integers,
    vectors: searches.Floats,
    numbers: searches.Floats,
    counters: searches.Integers,
    gradients: searches.Floats,
) -> Any:
    """Return views of the vectors, numbers, counters and new gradient of search ``s``."""
    begin, end = edges[s, searches.PARAMETERS], edges[s + 1, searches.PARAMETERS]
    return vectors[:, begin:end], numbers[s], counters[s], gradients[begin:end]


@inlined
def find_moving(vector: searches.Floats, point: int, slope: searches.Floats, moving: Any) -> None:
    """Find the parameters that take part in the next step: free, and not pushed out of a bound.

    Args:
        vector: `Searches.vectors` of one search, [:, n].
        point: row of ``vector`` with the parameters that the step begins at.
        slope: gradient there, [n].
        moving: receives the answer, bool [n].
    """
    for i in range(vector.shape[1]):
        x = vector[point, i]
        below = x <= vector[searches.LOWER, i] and slope[i] > 0.0
        above = x >= vector[searches.UPPER, i] and slope[i] < 0.0
        moving[i] = vector[searches.FREE, i] != 0.0 and not below and not above


@inlined
def within(vector: searches.Floats, i: int, value: float, limits: searches.SearchLimits) -> float:
    """Round a value of parameter ``i`` as the engine does, and move it into the bounds."""
    if limits.single:
        value = float(np.float32(value))
    inside: float = min(max(value, vector[searches.LOWER, i]), vector[searches.UPPER, i])
    return inside


@inlined
def ends(
    counter: searches.Integers, steepest: float, tolerance: float, limits: searches.SearchLimits
) -> bool:
    """End a search at a point where the loss is flat, or whose iterations are used up."""
    if steepest <= tolerance:
        counter[searches.REASON] = searches.GRADIENT
    elif counter[searches.ITERATIONS] >= limits.iterations:
        counter[searches.REASON] = searches.ITERATIONS_USED
    return bool(counter[searches.REASON] != searches.RUNNING)
