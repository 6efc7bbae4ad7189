"""Linear algebra of small matrices, mostly packed lower triangles, for compiled code.

Element (i, j), j <= i, of a matrix stands at ``i (i + 1) / 2 + j``.

Searches whose curvature is ill-conditioned want an orthogonal factor of their Jacobian (`absorb`).
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

from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import inlined, uncounted

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@inlined
def factorise(a: Floats, first: int, stop: int, n: int, cancelled: NDArray[np.uint8]) -> bool:
    """Replace columns of a symmetric matrix by those of its Cholesky factor.

    The rest, from column ``stop`` on, becomes the Schur complement of the columns before it.

    Args:
        a: [n (n + 1) / 2]; the columns before ``first`` have been replaced.
        first: first column to replace.
        stop: end of the columns to replace.
        n: size of the matrix.
        cancelled: [1]; another number than 0 ends the factorisation.

    Returns:
        False if the matrix is not positive definite, or it was cancelled; what ``a`` holds is then
        undefined.
    """
    for j in range(first, stop):
        pivot = a[j * (j + 1) // 2 + j]
        if cancelled[0] or not (pivot > 0.0 and math.isfinite(pivot)):
            return False
        root = math.sqrt(pivot)
        a[j * (j + 1) // 2 + j] = root
        for i in range(j + 1, n):
            row = i * (i + 1) // 2
            a[row + j] /= root
            for k in range(j + 1, i + 1):
                a[row + k] -= a[row + j] * a[k * (k + 1) // 2 + j]
    return True


@inlined
def solve(factor: Floats, b: Floats) -> None:
    """Replace ``b`` by the solution of the system whose Cholesky factor is given."""
    n = len(b)
    for i in range(n):
        row = i * (i + 1) // 2
        rest = b[i]
        for k in range(i):
            rest -= factor[row + k] * b[k]
        b[i] = rest / factor[row + i]
    for reverse in range(n):
        i = n - 1 - reverse
        rest = b[i]
        for k in range(i + 1, n):
            rest -= factor[k * (k + 1) // 2 + i] * b[k]
        b[i] = rest / factor[i * (i + 1) // 2 + i]


@inlined
def element(a: Floats, i: int, j: int) -> float:
    """Return element (i, j) of a symmetric matrix."""
    value: float = a[i * (i + 1) // 2 + j] if i >= j else a[j * (j + 1) // 2 + i]
    return value


@inlined
def reflect(columns: Floats, rows: int, j: int, count: int) -> None:
    """Make a column zero below row ``j`` by a reflection of all columns from it on (Householder).

    Args:
        columns: [count rows], column by column.
        rows: length of each.
        j: the column.
        count: number of columns.
    """
    first = j * rows
    below = 0.0
    for row in range(j + 1, rows):
        below += columns[first + row] ** 2
    if below == 0.0:
        return
    head = columns[first + j]
    length = math.copysign(math.sqrt(head * head + below), head)
    pivot = head + length
    scale = 2.0 / (pivot * pivot + below)
    for k in range(j + 1, count):
        other = k * rows
        share = pivot * columns[other + j]
        for row in range(j + 1, rows):
            share += columns[first + row] * columns[other + row]
        share *= scale
        columns[other + j] -= share * pivot
        for row in range(j + 1, rows):
            columns[other + row] -= share * columns[first + row]
    columns[first + j] = -length


@inlined
def quadratic(a: Floats, h: Floats) -> float:
    """Return h^T A h."""
    total = 0.0
    for i in range(len(h)):
        row = i * (i + 1) // 2
        line = 0.0
        for j in range(i):
            line += a[row + j] * h[j]
        total += h[i] * (2.0 * line + a[row + i] * h[i])
    return total


@inlined
def all_finite(values: Floats) -> bool:
    """Return whether no element is NaN or infinite."""
    finite = True
    for i in range(len(values)):
        finite = finite and math.isfinite(values[i])
    return finite


@inlined
def dot(a: Floats, b: Floats) -> float:
    """Return the sum of products."""
    total = 0.0
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@inlined
def difference(a: Floats, b: Floats, out: Floats) -> None:
    """Fill ``out`` with a - b."""
    for i in range(len(out)):
        out[i] = a[i] - b[i]


@inlined
def copy(source: Floats, target: Floats) -> None:
    """Copy all numbers, without the memory that an assignment to a slice may allocate."""
    for i in range(len(source)):
        target[i] = source[i]


# ------------------------------------------------------------------------------- orthogonal factors

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
                copy(jacobian[column + j, own], block[j])
            difference(values[s, own], target[own], block[n, :rows])
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
