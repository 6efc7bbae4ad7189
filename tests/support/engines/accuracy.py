"""Distances in units in the last place, and which special values must agree."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Array = NDArray[Any]
#: Functions whose NumPy float64 form may itself be several ulp off need more digits as the truth.
_WIDE = np.longdouble


def ulps(got: Array, truth: Array) -> NDArray[np.float64]:
    """Distance of ``got`` from ``truth`` in ulp of got's type; 0 where both are special alike.

    A NaN, or an infinity, that only one of them has counts as infinitely far, but for an overflow
    on one side only, right at the type's largest number. ``truth`` may have more digits.
    """
    with np.errstate(all="ignore"):
        rounded = truth.astype(got.dtype)
        info = np.finfo(got.dtype)  # whose largest number NumPy gives an infinite ulp
        below = info.max - np.spacing(info.max / 2)
        spacing = np.spacing(np.minimum(np.abs(rounded), below)).astype(_WIDE)
        distance = np.abs(got.astype(_WIDE) - truth.astype(_WIDE)) / spacing
        limit = _WIDE(np.finfo(got.dtype).max)
        overflow = np.isinf(got) & (np.abs(truth) >= limit * (1 - _WIDE(np.finfo(got.dtype).eps)))
        overflow &= np.signbit(got) == np.signbit(truth)
        overflow |= np.isinf(rounded) & (got == np.copysign(limit, truth))
    alike = (got == rounded) | (np.isnan(got) & np.isnan(truth)) | overflow
    return np.where(alike, 0.0, np.where(np.isnan(distance), np.inf, distance)).astype(np.float64)


def rounded_threshold(operands: list[Array], dtype: DTypeLike) -> NDArray[np.bool_]:
    """Rows whose operand is the protected operators' threshold rounded to ``dtype``.

    There the definition on float64 and the operator on ``dtype`` take different branches: the
    table says that the threshold is rounded to the data's type.
    """
    threshold = np.dtype(dtype).type(0.001)
    return np.any([np.abs(x) == threshold for x in operands], axis=0)
