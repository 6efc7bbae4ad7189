"""Linear algebra on packed lower triangles, row by row; compiled where compiled code calls it.

Element (i, j), j <= i, of a matrix stands at ``i (i + 1) / 2 + j``.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from warpfit_server.fit.jit import jitable

Floats = NDArray[np.float64]


@jitable
def factorise(a: Floats, n: int) -> bool:
    """Replace a symmetric matrix by its Cholesky factor; False if it is not positive definite."""
    for i in range(n):
        row = i * (i + 1) // 2
        for j in range(i + 1):
            column = j * (j + 1) // 2
            rest = a[row + j]
            for k in range(j):
                rest -= a[row + k] * a[column + k]
            if j < i:
                a[row + j] = rest / a[column + j]
            elif rest > 0.0 and math.isfinite(rest):
                a[row + i] = math.sqrt(rest)
            else:
                return False
    return True


@jitable
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


@jitable
def quadratic(a: Floats, h: Floats) -> float:
    """Value of h^T A h."""
    total = 0.0
    for i in range(len(h)):
        row = i * (i + 1) // 2
        line = 0.0
        for j in range(i):
            line += a[row + j] * h[j]
        total += h[i] * (2.0 * line + a[row + i] * h[i])
    return total


@jitable
def all_finite(values: Floats) -> bool:
    """Whether no element is NaN or infinite."""
    return bool(np.isfinite(values).all())


@jitable
def dot(a: Floats, b: Floats) -> float:
    """Sum of products."""
    total = 0.0
    for i in range(len(a)):
        total += a[i] * b[i]
    return total
