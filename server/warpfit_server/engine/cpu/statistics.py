"""Reductions and moments of values, block by block and merged over spans; compiled by Numba."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray
from numpy.typing import NDArray

from warpfit_server.engine.native.intrinsics import inlined, pointer32, pointer64
from warpfit_server.engine.sum_tree import tree_of

Floats = NDArray[np.float64]
#: Sums that are added side by side, so that one addition need not wait for the other.
_LANES: Final = 4
#: Numbers of an instance's reductions: least, greatest, number of non-finite values.
REDUCTIONS: Final = 3
#: Numbers of an instance's moments: sum of weights; means of values and target; sums of squares of
#: both and of products; what the best line leaves of the target's squares; and the first row's
#: value and target, from which the means are counted, so that a large mean costs no digits.
MOMENTS: Final = 9
_TOTAL, _MEAN_F, _MEAN_Y, _SQUARES_F, _SQUARES_Y, _PRODUCTS, _RESIDUAL = range(7)
_FIRST_F, _FIRST_Y = 7, 8


@inlined
def add_reductions(address: int, item_bytes: int, count: int, found: Any, is_first: bool) -> float:
    """Add a block of values to an instance's reductions and return their sum."""
    if is_first:
        found[0], found[1], found[2] = np.inf, -np.inf, 0.0
    if item_bytes == 4:
        return float(_reduce(carray(pointer32(address), count), found))
    return float(_reduce(carray(pointer64(address), count), found))


@inlined
def _reduce(values: Any, found: Any) -> float:
    total = np.zeros(_LANES)
    least, greatest, strange = found[0], found[1], 0
    for row in range(len(values)):
        value = np.float64(values[row])
        total[row % _LANES] += value
        least = value if value < least or value != value else least
        greatest = value if value > greatest or value != value else greatest
        if not np.isfinite(value):
            strange += 1
    found[0], found[1] = least, greatest
    found[2] += strange
    return float((total[0] + total[1]) + (total[2] + total[3]))


def merge_reductions(total: Floats, parts: Floats, rows: int) -> Floats:
    """Turn sums, [instances], and reductions of spans into those of `Outputs`, [instances, 5]."""
    with np.errstate(all="ignore"):
        least, greatest = parts[:, :, 0].min(axis=0), parts[:, :, 1].max(axis=0)
        strange = parts[:, :, 2].sum(axis=0)
        found = np.stack([total, total / rows, least, greatest, strange], axis=1)
    # Which NaN or zero of several is the least, with its sign, is up to NumPy.
    return np.where(np.isnan(found), np.nan, found + 0.0)


@inlined
def add_moments(f: int, y: int, w: int, item_bytes: int, count: int, moments: Any) -> None:
    """Add a block of values, target and weights (none at address 0) to an instance's moments."""
    block = np.zeros(MOMENTS)
    if item_bytes == 4:
        _measure(
            carray(pointer32(f), count), carray(pointer32(y), count),
            carray(pointer32(w if w else y), count), w != 0, block,
        )  # fmt: skip
    else:
        _measure(
            carray(pointer64(f), count), carray(pointer64(y), count),
            carray(pointer64(w if w else y), count), w != 0, block,
        )  # fmt: skip
    _merge(moments, block)


@inlined
def copy(source: Any, target: Any) -> None:
    """Copy numbers one by one; to assign to a slice, compiled code may make another copy."""
    for index in range(len(source)):
        target[index] = np.float64(source[index])


@inlined
def _measure(f: Any, y: Any, w: Any, weighted: bool, block: Any) -> None:
    """Compute the moments of a block in three passes, counted from its first row."""
    first_f, first_y = np.float64(f[0]), np.float64(y[0])
    total = sum_f = sum_y = 0.0
    for row in range(len(f)):
        weight = np.float64(w[row]) if weighted else 1.0
        total += weight
        sum_f += weight * (np.float64(f[row]) - first_f)
        sum_y += weight * (np.float64(y[row]) - first_y)
    if total == 0.0 and sum_f == 0.0:
        return
    mean_f, mean_y = sum_f / total, sum_y / total
    squares_f = squares_y = products = 0.0
    for row in range(len(f)):
        weight = np.float64(w[row]) if weighted else 1.0
        df, dy = np.float64(f[row]) - first_f - mean_f, np.float64(y[row]) - first_y - mean_y
        squares_f += weight * df * df
        squares_y += weight * dy * dy
        products += weight * df * dy
    slope = products / squares_f if squares_f != 0.0 else 0.0
    residual = 0.0
    for row in range(len(f)):
        weight = np.float64(w[row]) if weighted else 1.0
        df, dy = np.float64(f[row]) - first_f - mean_f, np.float64(y[row]) - first_y - mean_y
        left = dy - slope * df
        residual += weight * left * left
    block[_TOTAL], block[_MEAN_F], block[_MEAN_Y] = total, mean_f, mean_y
    block[_SQUARES_F], block[_SQUARES_Y], block[_PRODUCTS] = squares_f, squares_y, products
    block[_RESIDUAL], block[_FIRST_F], block[_FIRST_Y] = residual, first_f, first_y


@inlined
def _is_empty(moments: Any) -> bool:
    """Whether no row has weight; a mean that is not a number must not be lost."""
    return bool(moments[_TOTAL] == 0.0 and moments[_MEAN_F] == 0.0)


@inlined
def _merge(moments: Any, block: Any) -> None:
    """Merge two sets of moments (Chan, Golub and LeVeque, American Statistician 37, 1983).

    The sum of squares that the best line leaves is merged likewise: it grows by what the best line
    through three points leaves, weighted by the squares and by ``common``; the points stand for the
    two lines and for the step between the two means. By Lagrange's identity that is a sum of
    squares, so that nothing cancels where all points are on one line.
    """
    if _is_empty(moments):
        copy(block, moments)
        return
    if _is_empty(block):
        return
    total = moments[_TOTAL] + block[_TOTAL]
    df = (block[_FIRST_F] - moments[_FIRST_F]) + (block[_MEAN_F] - moments[_MEAN_F])
    dy = (block[_FIRST_Y] - moments[_FIRST_Y]) + (block[_MEAN_Y] - moments[_MEAN_Y])
    share = block[_TOTAL] / total
    common = moments[_TOTAL] * share
    squares, other = moments[_SQUARES_F], block[_SQUARES_F]
    slope = moments[_PRODUCTS] / squares if squares != 0.0 else 0.0
    other_slope = block[_PRODUCTS] / other if other != 0.0 else 0.0
    step = df * df * common
    left, other_left = dy - slope * df, dy - other_slope * df
    turn = slope - other_slope
    whole = squares + other + step
    moments[_RESIDUAL] += block[_RESIDUAL]
    if whole != 0.0:
        moments[_RESIDUAL] += (
            other * (squares / whole) * turn * turn
            + common * (squares / whole) * left * left
            + common * (other / whole) * other_left * other_left
        )
    else:
        moments[_RESIDUAL] += common * dy * dy
    moments[_TOTAL] = total
    moments[_MEAN_F] += df * share
    moments[_MEAN_Y] += dy * share
    moments[_SQUARES_F] = whole
    moments[_SQUARES_Y] += block[_SQUARES_Y] + dy * dy * common
    moments[_PRODUCTS] += block[_PRODUCTS] + df * dy * common


@inlined
def _merge_up(moments: Any, level: int) -> None:
    for instance in range(moments.shape[1]):
        _merge(moments[level + 1, instance], moments[level, instance])
        moments[level, instance] = 0.0


#: For moments, [levels, instances, MOMENTS].
carry_moments, node_moments = tree_of(_merge_up)


@inlined
def merge_spans(moments: Any, first: int) -> None:
    """Merge moments of spans, [spans, instances * MOMENTS], into the first's by the tree of sums.

    ``first`` is the number of the first span on its level.
    """
    last = first + len(moments) - 1
    width = 1
    # Two neighbours may have no ancestor in common but the root.
    while first // width != last // width:
        for index in range(1, len(moments)):
            parent = (first + index) // (2 * width) * (2 * width)
            into = max(parent - first, 0)
            if (first + index) % width == 0 and into < index:
                for begin in range(0, moments.shape[1], MOMENTS):
                    end = begin + MOMENTS
                    _merge(moments[into, begin:end], moments[index, begin:end])
        width *= 2


def from_zero(moments: Floats) -> Floats:
    """Turn moments, [instances, MOMENTS], into those of `Outputs`, [instances, 7]."""
    found = moments[:, : _RESIDUAL + 1].copy()
    with np.errstate(all="ignore"):
        found[:, [_MEAN_F, _MEAN_Y]] += moments[:, [_FIRST_F, _FIRST_Y]]
    # Which of two NaNs a sum keeps, with its sign, is up to the compiled code.
    return np.where(np.isnan(found), np.nan, found)
