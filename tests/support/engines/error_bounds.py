"""Errors of results against the table of error bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpfit.expressions.derivatives import FUNCTIONS
from warpfit.expressions.error_bounds import Bound

Array = NDArray[Any]


def error_limit(bound: Bound, operands: Sequence[Array], exact: Array) -> Array:
    """Return the largest allowed distance from the exact values, float64 [rows].

    It is infinite where there is no bound.

    Args:
        bound: bound of the operator.
        operands: columns [rows] of the data's type.
        exact: the exact values in the data's type, [rows].

    """
    names = dict(zip("abc", (x.astype(np.float64) for x in operands), strict=False))
    names["r"] = exact.astype(np.float64)
    with np.errstate(all="ignore"):
        info = np.finfo(exact.dtype)  # NumPy's spacing of the largest number is infinite
        size = np.minimum(np.abs(exact), info.max - np.spacing(info.max / 2))
        ulp = np.spacing(size).astype(np.float64)
        limit = np.maximum(_value(bound.ulp, names) * ulp, _value(bound.absolute, names))
        holds = _value(bound.where, names) if bound.where else True
    return np.asarray(np.where(holds, limit, np.inf))


def _value(text: str, names: Mapping[str, Array]) -> Any:
    return eval(text, {"__builtins__": {}, **FUNCTIONS, **names})


def excess(bound: Bound, operands: Sequence[Array], got: Array, exact: Array) -> Array:
    """Return the error of each result as a share of its limit, float64 [rows]; at most 1 is right.

    An infinity is compared as the largest finite number. Where only one of result and exact value
    is NaN, the error is infinite. The exact values have at least the digits of ``got``.
    """
    with np.errstate(all="ignore"):
        rounded = exact.astype(got.dtype)
        largest = np.longdouble(np.finfo(got.dtype).max)
        wide = [np.clip(x.astype(np.longdouble), -largest, largest) for x in (got, rounded)]
        distance = np.abs(wide[0] - wide[1]).astype(np.float64)
        limit = error_limit(bound, operands, rounded)
        share = np.where(distance == 0, 0.0, distance / limit)
    share = np.where(np.isnan(got) != np.isnan(rounded), np.inf, share)
    return np.where(np.isinf(limit) | (np.isnan(got) & np.isnan(rounded)), 0.0, share)
