"""Check what columns lose in float32, and that weights are finite and not negative."""

from __future__ import annotations

import sys
import warnings
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import InvalidArgumentError

#: Largest relative error of rounding to float32, and absolute one of numbers next to 0.
_RELATIVE: Final = 2.0**-24
_ABSOLUTE: Final = 2.0**-150
#: Rounding by more than this share of a column's spread is worth a warning.
_SHARE: Final = 1e-4
#: Rows that are looked at closely at a time.
_ROWS: Final = 1 << 16


class PrecisionWarning(UserWarning):
    """A data set is uploaded in float32, which loses digits that matter."""


class Rounding:
    """Looks at columns while they are brought to their data set's type.

    Args:
        names: of the columns.
        dtype: of the data set.

    """

    def __init__(self, names: list[str], dtype: np.dtype[Any]) -> None:
        self._names = names
        self._dtype = dtype
        self._losses: list[str] = []

    def look(self, kept: NDArray[Any], given: NDArray[Any], first: int, *, spread: bool) -> None:
        """Compare columns with what was given.

        Most columns pass by their least and greatest number, which are found while the columns are
        in cache; the others are compared number by number.

        Args:
            kept: in the data set's type, [columns, rows].
            given: the same columns as they were given.
            first: number of the first of them.
            spread: whether rounding is compared with the spread; what overflows is always an error.

        Raises:
            InvalidArgumentError: if a number is too large for the type.

        """
        if np.can_cast(given.dtype, self._dtype) or self._dtype.itemsize > 4:
            return
        low = np.fmin.reduce(kept, axis=1).astype(np.float64)
        high = np.fmax.reduce(kept, axis=1).astype(np.float64)
        with np.errstate(invalid="ignore"):
            largest = np.maximum(np.abs(low), np.abs(high))
            keeps = _RELATIVE * largest + _ABSOLUTE <= _SHARE * (high - low)
        for column in np.flatnonzero(~(keeps & (largest < np.inf))).tolist():
            self._compare(kept[column], given[column], self._names[first + column], spread=spread)

    def warn(self) -> None:
        """Warn of the columns that lose digits, if there are any."""
        if self._losses:
            warnings.warn(
                f"float32 loses digits of {'; '.join(self._losses)}. "
                'Upload with dtype="float64", or subtract an offset',
                PrecisionWarning,
                stacklevel=_level_of_caller(),
            )

    def _compare(self, kept: NDArray[Any], given: NDArray[Any], name: str, *, spread: bool) -> None:
        rounding, low, high = 0.0, np.inf, -np.inf
        for start in range(0, len(kept), _ROWS):
            exact = given[start : start + _ROWS].astype(np.float64)
            rounded = kept[start : start + _ROWS].astype(np.float64)
            finite = np.isfinite(exact)
            _check_overflow(exact, finite & ~np.isfinite(rounded), start, name)
            if finite.any():
                exact, rounded = exact[finite], rounded[finite]
                rounding = max(rounding, float(np.abs(exact - rounded).max()))
                low, high = min(low, float(exact.min())), max(high, float(exact.max()))
        if spread and low < high and rounding > _SHARE * (high - low):
            self._losses.append(
                f"{name} (rounds by {rounding:.2g} where the column spans {high - low:.2g})"
            )


def check_weights(weights: NDArray[Any]) -> None:
    """Check that weights [rows] are non-negative and finite.

    Raises:
        InvalidArgumentError: for the first one that is not.

    """
    if weights.min() >= 0 and weights.max() < np.inf:
        return
    row = int(np.flatnonzero(~((weights >= 0) & (weights < np.inf)))[0])
    raise InvalidArgumentError(
        f"the weight of row {row} (counted from 0) is {weights[row]}",
        "BAD_WEIGHT",
        "Give finite weights that are not negative; 0 leaves a row out",
        "weights",
    )


def _check_overflow(
    exact: NDArray[np.float64], overflows: NDArray[np.bool_], start: int, name: str
) -> None:
    if overflows.any():
        row = int(overflows.argmax())
        raise InvalidArgumentError(
            f"{name} is {exact[row]:.6g} in row {start + row} (counted from 0), "
            "too large for float32",
            "OVERFLOW",
            'Upload with dtype="float64", or choose another unit',
            name,
        )


def _level_of_caller() -> int:
    """Stack level, for `warnings.warn` in a function of this module, of who called the package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_own(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_own(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]
