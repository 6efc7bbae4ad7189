"""Data sets in canonical form: layout, columns, content id, and checks of the numbers."""

from __future__ import annotations

import hashlib
import math
import struct
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from warpfit.errors import InvalidArgumentError

#: Rows transposed at a time: few enough for the cache, which makes it six times as fast.
_TRANSPOSED_ROWS: Final = 512
#: Bytes of each row transposed at a time: one cache line.
_TRANSPOSED_BYTES: Final = 64
#: Data sets of at least this size are hashed in a thread of their own.
_HASHED_IN_THREAD: Final = 8 << 20
#: Largest error of rounding to float32: relative, and absolute for numbers next to 0.
_RELATIVE_ROUNDING: Final = 2.0**-24
_ABSOLUTE_ROUNDING: Final = 2.0**-150
#: Rounding by more than this share of a column's span is worth a warning.
_WARNED_SHARE: Final = 1e-4
#: Rows that are compared number by number at a time.
_COMPARED_ROWS: Final = 1 << 16
_MAGIC: Final = b"warpfit.dataset.v1\n"
#: Wire code of each dtype.
DTYPES: Final[dict[int, np.dtype[Any]]] = {1: np.dtype("<f4"), 2: np.dtype("<f8")}
DTYPE_CODES: Final[dict[np.dtype[Any], int]] = {dtype: code for code, dtype in DTYPES.items()}


class PrecisionWarning(UserWarning):
    """A data set is uploaded in float32, which loses digits that matter."""


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
        return b"".join(
            [
                _MAGIC,
                struct.pack(
                    "<BBBQQI",
                    DTYPE_CODES[self.dtype],
                    self.has_target,
                    self.has_weights,
                    self.variables,
                    self.rows,
                    len(encoded),
                ),
                *(struct.pack("<I", len(name)) + name for name in encoded),
            ]
        )

    def check(self) -> None:
        """Check the shape.

        Raises:
            InvalidArgumentError: for no rows, no variables, or names that do not fit.

        """
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
        if len(set(self.names)) != len(self.names):
            raise InvalidArgumentError(
                "variable names repeat", "NAME_MISMATCH", "Give each a name of its own", "names"
            )


class PayloadDigest:
    """SHA-256 of a data set, for a large one computed in a thread while its bytes arrive.

    Args:
        layout: layout of the data set.
        most_behind: `update` waits until at most this many bytes are not hashed yet.

    """

    def __init__(self, layout: Layout, most_behind: float = math.inf) -> None:
        self._sha256 = hashlib.sha256(layout.header())
        is_large = layout.nbytes >= _HASHED_IN_THREAD
        self._thread = ThreadPoolExecutor(1, "hash") if is_large else None
        self._most_behind = most_behind
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._behind = 0

    def update(self, data: memoryview) -> None:
        """Hash the next bytes, which must not change any more."""
        if self._thread is None:
            self._sha256.update(data)
            return
        self._pending.append((self._thread.submit(self._sha256.update, data), data.nbytes))
        self._behind += data.nbytes
        self._wait(self._most_behind)

    def finish(self) -> bytes:
        """Return the digest, 32 bytes."""
        self._wait(0)
        self.close()
        return self._sha256.digest()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _wait(self, behind: float) -> None:
        while self._behind > behind:
            future, size = self._pending.popleft()
            future.result()
            self._behind -= size


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in canonical form, as it is uploaded and as it is resident on a server.

    ``matrix`` is C-contiguous [columns, rows]: the variables, then the target if there is one,
    then the weights if there are any. The arrays must not be written to afterwards.
    """

    layout: Layout
    matrix: NDArray[Any]

    @classmethod
    def of(
        cls,
        X: NDArray[Any],
        y: NDArray[Any] | None = None,
        weights: NDArray[Any] | None = None,
        *,
        names: Sequence[str] = (),
        dtype: DTypeLike = np.float32,
    ) -> Dataset:
        """Bring scikit-learn shaped arrays into canonical form.

        Args:
            X: [rows, variables]; a one-dimensional array is one variable.
            y: target [rows], or None.
            weights: weight of each row [rows], non-negative, or None.
            names: one name for each variable, or empty.
            dtype: float32 or float64; what the server computes in.

        Raises:
            InvalidArgumentError: if shapes do not fit, the dtype is neither, a weight is negative
                or not finite, or a number is too large for float32.

        Warns:
            PrecisionWarning: if float32 rounds a column by more than 1e-4 of what it spans.

        """
        X = np.asarray(X)
        X = X[:, np.newaxis] if X.ndim == 1 else X
        if X.ndim != 2:
            raise InvalidArgumentError(
                f"X has {X.ndim} dimensions, not 2", "BAD_SHAPE", "Send [rows, variables]", "X"
            )
        layout = Layout(
            dtype=_canonical_dtype(dtype),
            variables=X.shape[1],
            rows=X.shape[0],
            has_target=y is not None,
            has_weights=weights is not None,
            names=tuple(names),
        )
        layout.check()
        named = ((y, "y"), (weights, "weights"))
        columns = [_column(c, layout.rows, name) for c, name in named if c is not None]
        if weights is not None:
            check_weights(columns[-1])
        return cls.resident(layout, *_converted(layout, X, columns))

    @classmethod
    def resident(cls, layout: Layout, matrix: NDArray[Any], content_id: bytes) -> Dataset:
        """Wrap a canonical matrix whose content id is known, without hashing it again."""
        dataset = cls(layout, matrix)
        dataset.__dict__["content_id"] = content_id
        return dataset

    @property
    def variables(self) -> NDArray[Any]:
        """Variable matrix, [variables, rows]."""
        return self.matrix[: self.layout.variables]

    @property
    def target(self) -> NDArray[Any] | None:
        """Target [rows], or None."""
        return self.matrix[self.layout.variables] if self.layout.has_target else None

    @property
    def weights(self) -> NDArray[Any] | None:
        """Weights [rows], or None."""
        return self.matrix[-1] if self.layout.has_weights else None

    @cached_property
    def content_id(self) -> bytes:
        """SHA-256 of header and payload, 32 bytes."""
        digest = hashlib.sha256(self.layout.header())
        digest.update(self.matrix.data)
        return digest.digest()

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Return views of the payload, of ``size`` bytes each, the last one shorter."""
        payload = self.matrix.reshape(-1).data.cast("B")
        return (payload[start : start + size] for start in range(0, len(payload), size))


def _converted(
    layout: Layout, X: NDArray[Any], columns: Sequence[NDArray[Any]]
) -> tuple[NDArray[Any], bytes]:
    """Return the canonical matrix of X and further columns, and its content id.

    Each column is hashed as soon as it is complete, while the next ones are converted.
    """
    rounding = _RoundingCheck(layout)
    matrix = np.empty((layout.columns, layout.rows), dtype=layout.dtype)
    digest = PayloadDigest(layout)
    with closing(digest), np.errstate(over="ignore"):
        for group in _transposed(X, matrix):
            rounding.check(matrix[group], X[:, group].T, group.start)
            digest.update(matrix[group].data)
        for row, column in enumerate(columns, layout.variables):
            matrix[row] = column
            rounding.check(matrix[row : row + 1], column[np.newaxis], row)
            digest.update(matrix[row].data)
        rounding.warn()
        return matrix, digest.finish()


def _transposed(X: NDArray[Any], matrix: NDArray[Any]) -> Iterator[slice]:
    """Write the columns of X to the rows of a matrix; yield each group of columns when complete."""
    group = max(1, _TRANSPOSED_BYTES // matrix.itemsize)
    for first in range(0, X.shape[1], group):
        columns = slice(first, min(first + group, X.shape[1]))
        for start in range(0, len(X), _TRANSPOSED_ROWS):
            part = slice(start, start + _TRANSPOSED_ROWS)
            matrix[columns, part] = X[part, columns].T
        yield columns


def _canonical_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    canonical = np.dtype(dtype).newbyteorder("<")
    if canonical not in DTYPE_CODES:
        raise InvalidArgumentError(
            f"dtype {np.dtype(dtype)} is not supported",
            "BAD_DTYPE",
            "Use float32 or float64",
            "dtype",
        )
    return canonical


def _column(column: NDArray[Any], rows: int, name: str) -> NDArray[Any]:
    array = np.asarray(column)
    if array.shape not in ((rows,), (rows, 1)):
        raise InvalidArgumentError(
            f"{name} has shape {array.shape}, X has {rows} rows",
            "BAD_SHAPE",
            f"Send {name} as [{rows}]",
            name,
        )
    return array.reshape(rows)


class _RoundingCheck:
    """Finds columns that lose digits, or overflow, when they are rounded to float32."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._names = layout.column_names
        self._lossy: list[str] = []

    def check(self, rounded: NDArray[Any], given: NDArray[Any], first: int) -> None:
        """Compare columns with what was given.

        Most columns pass by their least and greatest number, which are found while the columns are
        in cache; the others are compared number by number.

        Args:
            rounded: columns in the data set's dtype, [columns, rows].
            given: the same columns as they were given.
            first: index of the first of them in the data set.

        Raises:
            InvalidArgumentError: if a number is too large for the dtype.

        """
        dtype = self._layout.dtype
        if np.can_cast(given.dtype, dtype) or dtype.itemsize > 4:
            return
        low = np.fmin.reduce(rounded, axis=1).astype(np.float64)
        high = np.fmax.reduce(rounded, axis=1).astype(np.float64)
        with np.errstate(invalid="ignore"):
            largest = np.maximum(np.abs(low), np.abs(high))
            error = _RELATIVE_ROUNDING * largest + _ABSOLUTE_ROUNDING
            passes = (error <= _WARNED_SHARE * (high - low)) & (largest < np.inf)
        for column in np.flatnonzero(~passes).tolist():
            self._compare(rounded[column], given[column], first + column)

    def warn(self) -> None:
        """Warn of the columns that lose digits, if there are any."""
        if self._lossy:
            warnings.warn(
                f"float32 loses digits of {'; '.join(self._lossy)}. "
                'Upload with dtype="float64", or subtract an offset',
                PrecisionWarning,
                stacklevel=_caller_level(),
            )

    def _compare(self, rounded: NDArray[Any], given: NDArray[Any], column: int) -> None:
        largest, low, high = 0.0, np.inf, -np.inf
        for start in range(0, len(rounded), _COMPARED_ROWS):
            exact = given[start : start + _COMPARED_ROWS].astype(np.float64)
            single = rounded[start : start + _COMPARED_ROWS].astype(np.float64)
            finite = np.isfinite(exact)
            _check_overflow(exact, finite & ~np.isfinite(single), start, self._names[column])
            if finite.any():
                exact, single = exact[finite], single[finite]
                largest = max(largest, float(np.abs(exact - single).max()))
                low, high = min(low, float(exact.min())), max(high, float(exact.max()))
        is_weight = self._layout.has_weights and column == self._layout.columns - 1
        if not is_weight and low < high and largest > _WARNED_SHARE * (high - low):
            self._lossy.append(
                f"{self._names[column]} (rounds by {largest:.2g} where the column spans "
                f"{high - low:.2g})"
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


def _caller_level() -> int:
    """Return the ``stacklevel`` for `warnings.warn` of the code that called this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_own(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_own(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]
