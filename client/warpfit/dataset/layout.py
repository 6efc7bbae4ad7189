"""The layout of a data set, the header that is hashed first, and checks of the numbers.

The checks find digits that the type of a data set loses, overflow, and weights that are none.
"""

import struct
import sys
import warnings
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from warpfit.errors import InvalidArgumentError, check_encodable

_MAGIC: Final = b"warpfit.dataset.v1\n"
#: Wire code of each dtype.
DTYPES: Final[dict[int, np.dtype[Any]]] = {1: np.dtype("<f4"), 2: np.dtype("<f8")}
DTYPE_CODES: Final[dict[np.dtype[Any], Any]] = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape of a data set: everything about it but the numbers."""

    dtype: np.dtype[Any]
    """float32 or float64, little-endian."""
    variables: int
    rows: int
    has_target: bool = False
    has_weights: bool = False
    names: tuple[str, ...] = ()
    """Variable names, one for each variable, or empty."""

    @property
    def columns(self) -> int:
        """Number of columns of the payload: variables, target and weights."""
        return self.variables + self.has_target + self.has_weights

    @property
    def column_names(self) -> list[str]:
        """Names of the columns in errors: variables without names are x1, x2, ..."""
        variables = self.names or [f"x{number}" for number in range(1, self.variables + 1)]
        return [*variables, *["y"] * self.has_target, *["weights"] * self.has_weights]

    @property
    def nbytes(self) -> int:
        """Size of the payload in bytes."""
        return self.columns * self.rows * self.dtype.itemsize

    def header(self) -> bytes:
        """Return the bytes that are hashed before the payload; see UploadHeader in the contract."""
        encoded = [name.encode() for name in self.names]
        kind = DTYPE_CODES[self.dtype], self.has_target, self.has_weights
        numbers = struct.pack("<BBBQQI", *kind, self.variables, self.rows, len(encoded))
        start = _MAGIC + numbers
        header = bytearray(bytes(4).join((start, *encoded)))
        lengths = np.fromiter(map(len, encoded), np.dtype("<u4"), len(encoded))
        places = len(start) - 4 + np.cumsum(4 + lengths, dtype=np.int64) - lengths
        octets = np.frombuffer(header, np.uint8)
        octets[places[:, None] + range(4)] = lengths[:, None].view(np.uint8)
        return bytes(header)

    def check(self) -> None:
        """Check that there are rows, variables, and names that fit."""
        for count, what in ((self.rows, "rows"), (self.variables, "variables")):
            if count < 1:
                raise InvalidArgumentError(
                    f"the data set has {count} {what}",
                    "EMPTY_DATASET",
                    "Send at least one row and one variable",
                    what,
                )
        if self.names and len(self.names) != self.variables:
            raise InvalidArgumentError(
                f"{len(self.names)} names for {self.variables} variables",
                "NAME_MISMATCH",
                "Name every variable, or none",
                "names",
            )
        for name in self.names if not all(map(str.isascii, self.names)) else ():
            check_encodable(name, "the name", "names")
        if len(set(self.names)) != len(self.names):
            raise InvalidArgumentError(
                "variable names repeat", "NAME_MISMATCH", "Give each a name of its own", "names"
            )


def canonical_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the little-endian dtype of a data set; raise InvalidArgumentError for any other."""
    try:
        canonical = np.dtype(dtype).newbyteorder("<")
    except TypeError:
        canonical = np.dtype(object)
    if canonical not in DTYPE_CODES:
        raise InvalidArgumentError(
            f"dtype {dtype} is not supported",
            "BAD_DTYPE",
            "Use float32, float64 or auto",
            "dtype",
        )
    return canonical


# -------------------------------------------------------------------------------- checks of numbers

#: Largest error of rounding to float32: relative, and absolute for numbers next to 0.
_RELATIVE_ROUNDING: Final = 2.0**-24
_ABSOLUTE_ROUNDING: Final = 2.0**-150
#: Most columns that a warning lists, and most characters of their names.
_MOST_LISTED, _MOST_NAME = 20, 80
#: Rounding by more than this share of a column's span is worth a warning.
_WARNED_SHARE: Final = 1e-4
#: Numbers above this size, or below its inverse, have fourth powers that float32 cannot hold.
_LARGE_IN_FLOAT32: Final = 1e9
#: Integers up to this size are floats of 64 bits.
_EXACT_IN_FLOAT64: Final = 1 << 53
#: Rows that are compared number by number at a time.
_COMPARED_ROWS: Final = 1 << 16


class PrecisionWarning(UserWarning):
    """Numbers are computed with in a type, mostly float32, that loses digits that matter."""


class RoundingCheck:
    """Finds columns that lose digits, or overflow, when they are rounded to a data set's type.

    Args:
        layout: of the data set.
        measures: whether to find sizes, too, for `leaves_float32`.
    """

    def __init__(self, layout: Layout, *, measures: bool = False) -> None:
        self._layout = layout
        self._measures = measures
        self._largest = np.zeros(layout.columns)
        self._names = layout.column_names
        # Wide enough for the difference of two integers that float64 cannot tell apart.
        self._low = np.full(layout.columns, np.inf, np.longdouble)
        self._high = np.full(layout.columns, -np.inf, np.longdouble)
        self._error = np.zeros(layout.columns)

    def check(self, rounded: NDArray[Any], given: NDArray[Any], first: int, start: int) -> None:
        """Compare sampled rows and columns with the data that a caller gave.

        Most columns pass by their least and greatest number, which are found while the columns are
        in cache; the others are compared number by number. Both arrays are [columns, rows];
        ``first`` and ``start`` are the indices of their first column and row.
        """
        dtype = self._layout.dtype
        if dtype.itemsize > 4:
            # Integers may be rounded, too; where there is no wider float, none of them is found.
            is_long = given.dtype.kind in "iu" and given.dtype.itemsize == 8
            for column, numbers in enumerate(given, first) if is_long else ():
                least, greatest = int(numbers.min()), int(numbers.max())
                self._widen(column, np.longdouble(least), np.longdouble(greatest))
                if max(abs(least), abs(greatest)) > _EXACT_IN_FLOAT64:
                    for begin in range(0, len(numbers), _COMPARED_ROWS):
                        exact = numbers[begin : begin + _COMPARED_ROWS]
                        lost = np.abs(exact.astype(np.longdouble) - exact.astype(np.float64)).max()
                        self._error[column] = max(self._error[column], float(lost))
            return
        if np.can_cast(given.dtype, dtype) and not self._measures:
            return
        low = np.fmin.reduce(rounded, axis=1).astype(np.float64)
        high = np.fmax.reduce(rounded, axis=1).astype(np.float64)
        with np.errstate(invalid="ignore"):
            largest = np.maximum(np.abs(low), np.abs(high))
            columns = slice(first, first + len(given))
            self._largest[columns] = np.fmax(self._largest[columns], largest)
            if np.can_cast(given.dtype, dtype):
                return
            error = _RELATIVE_ROUNDING * largest + _ABSOLUTE_ROUNDING
            passes = (error <= _WARNED_SHARE * (high - low)) & (largest < np.inf)
        for column in range(len(given)):
            place = first + column
            if passes[column]:
                self._widen(place, low[column], high[column])
                continue
            for begin in range(0, given.shape[1], _COMPARED_ROWS):
                exact = given[column, begin : begin + _COMPARED_ROWS].astype(np.float64)
                single = rounded[column, begin : begin + _COMPARED_ROWS].astype(np.float64)
                finite = np.isfinite(exact)
                overflows = finite & ~np.isfinite(single)
                if overflows.any():
                    row, name = int(overflows.argmax()), self._names[place]
                    raise InvalidArgumentError(
                        f"{name} is {exact[row]:.6g} in row {start + begin + row} "
                        "(counted from 0), too large for float32",
                        "OVERFLOW",
                        'Upload with dtype="float64", or choose another unit',
                        name,
                    )
                if finite.any():
                    exact, single = exact[finite], single[finite]
                    lost = float(np.abs(exact - single).max())
                    self._error[place] = max(self._error[place], lost)
                    self._widen(place, exact.min(), exact.max())

    @property
    def leaves_float32(self) -> bool:
        """Whether powers and products of variables or the target may leave the range of float32."""
        sizes = self._largest[: len(self._largest) - self._layout.has_weights]
        is_far = (sizes > _LARGE_IN_FLOAT32) | ((sizes < 1.0 / _LARGE_IN_FLOAT32) & (sizes > 0.0))
        return bool(is_far.any())

    @property
    def wants_float64(self) -> bool:
        """Whether the dtype "auto" is float64 for these numbers, which were rounded to float32."""
        return bool(self.lost_digits()) or self.leaves_float32

    def lost_digits(self) -> str:
        """Say which columns lose digits that matter; empty if none does."""
        if self._layout.has_weights:
            self._low[-1] = 0.0  # weights count by their size
        with np.errstate(invalid="ignore"):
            span = self._high - self._low
            # A constant must keep digits of its own.
            span = np.where(span == 0.0, np.abs(self._high), span)
            is_lossy = (span > 0) & (self._error > _WARNED_SHARE * span)
        lossy = np.flatnonzero(is_lossy).tolist()
        listed = [
            f"{self._names[column][:_MOST_NAME]} (rounds by {self._error[column]:.2g} where the "
            f"column spans {span[column]:.2g})"
            for column in lossy[:_MOST_LISTED]
        ]
        if len(lossy) > len(listed):
            listed.append(f"{len(lossy) - len(listed)} more columns")
        return f"{self._layout.dtype.name} loses digits of {'; '.join(listed)}" if lossy else ""

    def _widen(self, column: int, low: np.floating[Any], high: np.floating[Any]) -> None:
        self._low[column] = min(self._low[column], low)
        self._high[column] = max(self._high[column], high)


def warn_of_lost_digits(text: str) -> None:
    """Warn the caller of this package, if there is anything to warn of."""
    if text:
        is_widest = text.startswith("float64")
        remedy = "Subtract" if is_widest else 'Upload with dtype="float64", or subtract'
        warnings.warn(
            f"{text}. {remedy} an offset",
            PrecisionWarning,
            stacklevel=caller_level(),
        )


def check_weights(weights: NDArray[Any], start: int = 0) -> None:
    """Check that the weights of rows from ``start`` on are non-negative and finite."""
    if weights.min() >= 0 and weights.max() < np.inf:
        return
    row = int(np.flatnonzero(~((weights >= 0) & (weights < np.inf)))[0])
    raise InvalidArgumentError(
        f"the weight of row {start + row} (counted from 0) is {weights[row]}",
        "BAD_WEIGHT",
        "Give finite weights that are not negative; 0 leaves a row out",
        "weights",
    )


def caller_level() -> int:
    """Return the ``stacklevel`` for `warnings.warn` of the code that called this package."""
    level, frame, own = 1, sys._getframe(1), __name__.partition(".")[0]
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == own:
        level, frame = level + 1, frame.f_back
    return level
