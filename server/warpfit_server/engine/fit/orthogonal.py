"""Orthogonal factorisation of the Jacobians of searches whose curvature is ill-conditioned.

The curvature J^T W J squares the condition of the Jacobian J: where its columns are nearly
parallel, as those of polynomials far from 0, it does not hold the digits that tell them apart. The
factorisation W^1/2 J = Q R does. Householder's reflections work R up block of rows by block of rows
(Golub and Van Loan, "Matrix Computations", 4th edition, 2013, section 5.2), always in the order of
the rows, so that the bits depend neither on threads nor on how many rows are given at a time.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.fit import triangles
from warpfit_server.engine.fit.searches import Floats, Integers
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import uncounted

#: Rows that are worked into a factor at a time.
BLOCK: Final = 64


# It allocates nothing, so that references need not be counted.
@numba_cache.njit(nogil=True, error_model="numpy", _nrt=False)  # type: ignore[untyped-decorator]
def absorb(
    jacobian: Floats,
    values: Floats,
    target: Floats,
    weights: Floats,
    counts: Integers,
    scratch: Floats,
    factors: Floats,
    rights: Floats,
    cancelled: NDArray[np.uint8],
) -> None:
    """Work rows into the factors of some searches.

    Args:
        jacobian: derivatives by the parameters of all searches, [P, rows].
        values: [searches, rows].
        target: [rows].
        weights: [rows], or empty for 1 everywhere.
        counts: parameters of each search, [searches].
        scratch: memory, [most parameters of a search + 2, BLOCK].
        factors: R of each search, [n, n], row by row; flat. Of no rows it is 0.
        rights: Q^T W^1/2 times the residuals, [P]. Of no rows it is 0.
        cancelled: [1]; another thread writes another number than 0 to end this early.
    """
    column = square = 0
    for s in range(len(counts)):
        n = counts[s]
        factor, right = factors[square : square + n * n], rights[column : column + n]
        block, roots = scratch[: n + 1], scratch[n + 1]
        for first in range(0, len(target), BLOCK):
            if cancelled[0]:
                return
            rows = min(BLOCK, len(target) - first)
            own = slice(first, first + rows)
            for j in range(n):
                triangles.copy(jacobian[column + j, own], block[j])
            triangles.difference(values[s, own], target[own], block[n, :rows])
            for row in range(rows):
                roots[row] = math.sqrt(weights[first + row]) if len(weights) else 1.0
            for j in range(n + 1):
                elements = block[j]
                for row in range(rows):
                    # Where a row has no weight, its values need not be finite.
                    weighted = roots[row] * elements[row]
                    elements[row] = weighted if roots[row] > 0.0 else 0.0
                for row in range(rows, BLOCK):
                    elements[row] = 0.0
            _absorb_block(factor, right, block)
        column, square = column + n, square + n * n


@uncounted
def _absorb_block(factor: Any, right: Any, block: Any) -> None:
    """Make a block zero by reflections with the rows of the factor."""
    n = len(right)
    for j in range(n):
        own = block[j]
        below = _product(own, own)
        if below == 0.0:
            continue
        head = factor[j * n + j]
        length = math.copysign(math.sqrt(head * head + below), head)
        pivot = head + length
        scale = 2.0 / (pivot * pivot + below)
        factor[j * n + j] = -length
        for k in range(j + 1, n + 1):
            other = block[k]
            above = factor[j * n + k] if k < n else right[j]
            share = scale * (pivot * above + _product(own, other))
            if k < n:
                factor[j * n + k] -= share * pivot
            else:
                right[j] -= share * pivot
            for row in range(BLOCK):
                other[row] -= share * own[row]


@uncounted
def _product(a: Any, b: Any) -> float:
    """Return the product of two columns, as four sums, because each addition waits for another."""
    first = second = third = fourth = 0.0
    for row in range(0, BLOCK, 4):
        first += a[row] * b[row]
        second += a[row + 1] * b[row + 1]
        third += a[row + 2] * b[row + 2]
        fourth += a[row + 3] * b[row + 3]
    return float((first + second) + (third + fourth))
