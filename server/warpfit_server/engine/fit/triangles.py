"""Linear algebra of small matrices, mostly packed lower triangles, for compiled code.

Element (i, j), j <= i, of a matrix stands at ``i (i + 1) / 2 + j``.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.native.intrinsics import inlined

Floats = NDArray[np.float64]


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
