"""Statistics of a block of values, and how those of blocks are merged."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray
from numpy.typing import NDArray

from warpfit_server.engine.cpu_pieces import pointer32, pointer64
from warpfit_server.engine.schedule import (
    inlined,
)

Floats = NDArray[np.float64]
#: Sums that are added side by side, so that one addition need not wait for the other.
_LANES: Final = 4
#: Numbers of a cell's reductions (sum, least, greatest, not finite) and moments.
REDUCTIONS: Final = 4
MOMENTS: Final = 6


@inlined
def add_reductions(address: int, itemsize: int, count: int, found: Any, first: bool) -> None:
    """Add a block of values to sum, least, greatest and number of non-finite ones."""
    if first:
        found[0], found[1], found[2], found[3] = 0.0, np.inf, -np.inf, 0.0
    if itemsize == 4:
        _reduce(carray(pointer32(address), count), found)
    else:
        _reduce(carray(pointer64(address), count), found)


@inlined
def _reduce(values: Any, found: Any) -> None:
    total = np.zeros(_LANES)
    least, greatest, strange = found[1], found[2], 0
    for row in range(len(values)):
        value = np.float64(values[row])
        total[row % _LANES] += value
        least = value if value < least or value != value else least
        greatest = value if value > greatest or value != value else greatest
        if not np.isfinite(value):
            strange += 1
    found[0] += (total[0] + total[1]) + (total[2] + total[3])
    found[1], found[2] = least, greatest
    found[3] += strange


def merge_reductions(parts: Floats, rows: int) -> Floats:
    """Turn reductions of spans, [spans, cells, 4], into those of `Outputs`, [cells, 5]."""
    with np.errstate(all="ignore"):
        total = parts[:, :, 0].sum(axis=0)
        least, greatest = parts[:, :, 1].min(axis=0), parts[:, :, 2].max(axis=0)
        strange = parts[:, :, 3].sum(axis=0)
        return np.stack([total, total / rows, least, greatest, strange], axis=1)


@inlined
def add_moments(
    f: int, y: int, w: int, itemsize: int, count: int, moments: Any, first: bool
) -> None:
    """Add a block of values, target and weights (none at address 0) to a cell's moments."""
    block = np.zeros(MOMENTS)
    if itemsize == 4:
        _measure(
            carray(pointer32(f), count), carray(pointer32(y), count),
            carray(pointer32(w if w else y), count), w != 0, block,
        )  # fmt: skip
    else:
        _measure(
            carray(pointer64(f), count), carray(pointer64(y), count),
            carray(pointer64(w if w else y), count), w != 0, block,
        )  # fmt: skip
    if first:
        _copy(block, moments)
    else:
        _merge(moments, block)


@inlined
def _copy(source: Any, target: Any) -> None:
    for index in range(len(source)):
        target[index] = source[index]


@inlined
def _measure(f: Any, y: Any, w: Any, weighted: bool, block: Any) -> None:
    """Compute the moments of a block in two passes."""
    total = sum_f = sum_y = 0.0
    for row in range(len(f)):
        weight = np.float64(w[row]) if weighted else 1.0
        total += weight
        sum_f += weight * np.float64(f[row])
        sum_y += weight * np.float64(y[row])
    if total == 0.0 and sum_f == 0.0:
        return
    mean_f, mean_y = sum_f / total, sum_y / total
    squares_f = squares_y = products = 0.0
    for row in range(len(f)):
        weight = np.float64(w[row]) if weighted else 1.0
        df, dy = np.float64(f[row]) - mean_f, np.float64(y[row]) - mean_y
        squares_f += weight * df * df
        squares_y += weight * dy * dy
        products += weight * df * dy
    block[0], block[1], block[2] = total, mean_f, mean_y
    block[3], block[4], block[5] = squares_f, squares_y, products


@inlined
def _merge(moments: Any, block: Any) -> None:
    """Merge two sets of moments (Chan, Golub and LeVeque, American Statistician 37, 1983)."""
    total = moments[0] + block[0]
    if moments[0] == 0.0:
        _copy(block, moments)
        return
    if block[0] == 0.0:
        return
    df, dy = block[1] - moments[1], block[2] - moments[2]
    share = block[0] / total
    common = moments[0] * share
    moments[0] = total
    moments[1] += df * share
    moments[2] += dy * share
    moments[3] += block[3] + df * df * common
    moments[4] += block[4] + dy * dy * common
    moments[5] += block[5] + df * dy * common


def merge_moments(parts: Floats) -> Floats:
    """Merge moments of spans, [spans, cells, 6], as `_merge` does."""
    merged: Floats = parts[0].copy()
    for part in parts[1:]:
        with np.errstate(all="ignore"):
            total = merged[:, 0] + part[:, 0]
            share = np.where(total == 0.0, 0.0, part[:, 0] / total)
            difference = part[:, 1:3] - merged[:, 1:3]
            common = merged[:, 0] * share
            merged[:, 1:3] += difference * share[:, None]
            merged[:, 3:5] += part[:, 3:5] + np.square(difference) * common[:, None]
            merged[:, 5] += part[:, 5] + difference[:, 0] * difference[:, 1] * common
            merged[:, 0] = total
    return merged
