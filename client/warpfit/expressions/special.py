"""Functions of the kernel language that NumPy has not, or not for all numbers.

`power`, `erf`, `erfc`, `tgamma` and `lgamma` need nothing but NumPy and the standard library: their
text is copied into the functions that `warpfit.Program.code` writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np


def power(a: Any, b: Any) -> Any:
    """Return a to the power of b, also where NumPy has sqrt(a) for b = 0.5: at -inf and -0."""
    is_other = (np.asarray(b) == 0.5) & ((np.asarray(a) == 0.0) | (np.asarray(a) == -np.inf))
    return np.where(is_other, np.abs(a), np.power(a, b))


def erf(a: np.ndarray) -> np.ndarray:
    """Return the error function in float64."""
    return np.asarray(np.vectorize(math.erf, otypes=[float])(a))


def erfc(a: np.ndarray) -> np.ndarray:
    """Return 1 - erf(a) in float64, without the cancellation."""
    return np.asarray(np.vectorize(math.erfc, otypes=[float])(a))


def tgamma(a: np.ndarray) -> np.ndarray:
    """Return the gamma function in float64, at its poles as C: ±inf at ±0, else NaN."""

    def one(x: float) -> float:
        try:
            return math.gamma(x)
        except (OverflowError, ValueError):
            return math.copysign(math.inf, x) if x > -1.0 else math.nan

    return np.asarray(np.vectorize(one, otypes=[float])(a))


def lgamma(a: np.ndarray) -> np.ndarray:
    """Return log |gamma(a)| in float64; next to 1 and 2 with an absolute error of 1e-15."""

    def one(x: float) -> float:
        try:
            return math.lgamma(x)
        except (OverflowError, ValueError):
            return math.inf

    return np.asarray(np.vectorize(one, otypes=[float])(a))


#: Coefficients of 1 / z^2, 1 / z^4, ... in log(z) - 1 / (2 z) - digamma(z).
SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)


def digamma(
    a: Any,
    select: Callable[..., Any] = np.where,
    floor: Callable[..., Any] = np.floor,
    log: Callable[..., Any] = np.log,
    tan: Callable[..., Any] = np.tan,
) -> Any:
    """Return the derivative of `lgamma`: ∓inf at ±0, and 0 at its other poles.

    Reflection where a < 1/2, recurrence to z >= 8.5, and there the asymptotic series (Abramowitz
    and Stegun 1964, 6.3.7, 6.3.6 and 6.3.18). Other arguments than NumPy arrays bring their own
    functions.
    """
    is_reflected = a < 0.5
    x = select(is_reflected, 1.0 - a, a)
    z = x + 8.0
    inverse_square = 1.0 / (z * z)
    series = SERIES[-1] * inverse_square
    for coefficient in SERIES[-2::-1]:
        series = (series + coefficient) * inverse_square
    steps = 1.0 / x
    for k in range(1, 8):
        steps = steps + 1.0 / (x + float(k))
    result = log(z) - 0.5 / z - series - steps
    fraction = a - floor(a + 0.5)
    reflected = result - math.pi / tan(math.pi * fraction)
    is_pole = (a < 0.0) & (floor(a) == a)
    return select(is_pole, 0.0, select(is_reflected, reflected, result))
