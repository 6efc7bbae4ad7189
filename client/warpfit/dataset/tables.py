"""The layout of a data set, and tables of any kind as its columns, read by blocks.

NumPy arrays and pandas frames are read as they are. Arrow tables, what exports them, and Parquet
files are read by pyarrow.

The layout has the header that is hashed first. The checks find digits that the type of a data set
loses, overflow, and weights that are none.
"""

from __future__ import annotations

import os
import struct
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from warpfit.errors import (
    InvalidArgumentError,
    check_encodable,
    did_you_mean,
    list_of_texts,
    nearest_first,
    require,
)
from warpfit.expressions.real_numbers import missing_value, no_numbers, real_numbers, unwrapped

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


# -------------------------------------------------------------------------------- arrays and frames

#: Most numbers of a block, and their bytes as float64.
BLOCK_BYTES: Final = 16 << 20
BLOCK_NUMBERS: Final = BLOCK_BYTES // 8


T = TypeVar("T")


class Columns(Protocol):
    """Columns of numbers, all with the same rows."""

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each column, or empty."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    def select(self, names: Sequence[str]) -> Columns:
        """Return the columns of these names, each of which is there once."""

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield column after column: all rows of some columns, or the next rows of one.

        Each block is an array of real numbers [columns, rows], a view where that is possible. An
        InvalidArgumentError says that a cell is no number, or missing.
        """


@dataclass(frozen=True, slots=True)
class ColumnNames:
    """The columns of a table that a caller has named; None stands for what is not named."""

    x: Sequence[str] | None = None
    """Variables; None takes all columns but the other two."""
    y: str | None = None
    weights: str | None = None

    @classmethod
    def of(cls, x: Any, y: Any = None, weights: Any = None) -> ColumnNames:
        """Take names in a list, an array or pandas' index, or a single one; other data name none.

        Raises:
            InvalidArgumentError: if ``x`` is anything else than names.
        """
        x = unwrapped(x)
        if isinstance(x, Set | Mapping):
            x = list_of_texts(x, "x")
        given = [x] if isinstance(x, str) or not isinstance(x, Iterable) else list(x)
        for name in given:
            if not (x is None or isinstance(name, str)):
                raise InvalidArgumentError(
                    f"x names a column {name!r}, which is no text",
                    "UNKNOWN_COLUMN",
                    "Give names of columns of X",
                    "x",
                )
        others = (name if isinstance(name, str) else None for name in (y, weights))
        return cls(None if x is None else list(map(str, given)), *others)

    def variables(self, names: tuple[str, ...]) -> list[str]:
        """Return the names of the variables."""
        others = (self.y, self.weights)
        return [n for n in names if n not in others] if self.x is None else list(self.x)

    def read(self, names: tuple[str, ...]) -> list[str]:
        """Return the columns to read; raise InvalidArgumentError unless each is there once."""
        others = [name for name in (self.y, self.weights) if name is not None]
        asked = [*(self.x or ()), *others]
        counts = Counter(names)
        for name in asked:
            if counts[name] != 1:
                listed = nearest_first(name, map(repr, names)) or "none with names"
                raise InvalidArgumentError(
                    f"X has {counts[name]} columns {name!r}",
                    "UNKNOWN_COLUMN",
                    did_you_mean(
                        name,
                        () if counts[name] else names,
                        f"Name columns of X; there are: {listed}",
                    ),
                    "x",
                )
        return list(dict.fromkeys([*self.variables(names), *others]))


class ArrayColumns:
    """Columns of an array [rows, columns], or of what NumPy makes an array of; [rows] is one."""

    names: tuple[str, ...] = ()

    def __init__(self, data: Any, name: str) -> None:
        self._array = real_numbers(data, name)
        if self._array.ndim == 1:
            self._array = self._array[:, np.newaxis]
        if self._array.ndim != 2:
            wanted = "[rows, variables]" if name == "X" else "one number for each row of X"
            raise InvalidArgumentError(
                f"{name} has {self._array.ndim} dimensions", "BAD_SHAPE", f"Give {wanted}", name
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        rows, columns = self._array.shape
        return rows, columns

    def select(self, names: Sequence[str]) -> Columns:
        """Raise an error: the columns have no names."""
        ColumnNames(x=names).read(())
        return self

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield views of as many columns as fit in a block, or of pieces of one."""
        rows, columns = self.shape
        for group in columns_at_once(range(columns), rows):
            for part in row_blocks(rows):
                yield self._array[part, group[0] : group[-1] + 1].T


class FrameColumns:
    """Columns of a pandas frame, each of which may have its own dtype."""

    def __init__(self, frame: Any, name: str) -> None:
        self._frame, self._name = frame, name
        self.shape: tuple[int, int] = frame.shape
        # pandas numbers the columns of a frame that was made without names.
        labels = tuple(frame.columns)
        others = [label for label in labels if not isinstance(label, str)]
        if 0 < len(others) < len(labels):
            raise InvalidArgumentError(
                f"{name} has a column {others[0]!r}, which is no text, beside others with names",
                "BAD_NAMES",
                f"Make all labels texts, as by {name}.columns = {name}.columns.map(str)",
                name,
            )
        self.names = () if others else labels

    def select(self, names: Sequence[str]) -> Columns:
        """Return the columns of these names."""
        indices = [self.names.index(name) for name in names]
        return FrameColumns(self._frame.iloc[:, indices], self._name)

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield pieces of one column after the other."""
        rows, columns = self.shape
        for column in range(columns):
            name = repr(self.names[column]) if self.names else f"{column} of {self._name}"
            for part in row_blocks(rows):
                series = self._frame.iloc[part, column]
                yield real_numbers(series, f"column {name}", part.start)[np.newaxis]


def row_blocks(rows: int) -> Iterator[slice]:
    """Yield the rows of a column in pieces of a block."""
    for start in range(0, rows, BLOCK_NUMBERS):
        yield slice(start, min(start + BLOCK_NUMBERS, rows))


def columns_at_once(columns: Sequence[T], rows: int) -> Iterator[list[T]]:
    """Yield columns in groups that fit in a block, or one by one."""
    count = max(1, BLOCK_NUMBERS // max(1, rows))
    for first in range(0, len(columns), count):
        yield list(columns[first : first + count])


def changed_data() -> InvalidArgumentError:
    """Return the error for numbers that are not those that were hashed."""
    return InvalidArgumentError(
        "the data are not what they were when they were uploaded first",
        "DATA_CHANGED",
        "Do not change arrays, tables or files while their handle is in use, or upload them again",
        "X",
    )


# -------------------------------------------------------------------------------- Arrow and Parquet

#: Bytes of a Parquet file that are read at a time, and rows that are decoded at a time.
_READ_BYTES: Final = 1 << 20
_BATCH_ROWS: Final = 1 << 19
#: Methods of what exports Arrow data.
_EXPORTS: Final = ("__arrow_c_stream__", "__arrow_c_array__")
#: Names of the columns of a table that is made of a lone column.
_NAMELESS: Final = ("",)


class ArrowColumns:
    """Columns of a pyarrow table."""

    def __init__(self, table: Any) -> None:
        self._table = table
        names = tuple(table.column_names)
        self.names: tuple[str, ...] = () if names == _NAMELESS else names
        self.shape: tuple[int, int] = table.shape

    def select(self, names: Sequence[str]) -> Columns:
        """Return the columns of these names."""
        return ArrowColumns(self._table.select(list(names)))

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield views of the pieces of one column after the other."""
        for name, column in zip(self._table.column_names, self._table.columns, strict=True):
            yield from _column_blocks(name, column.chunks)


class ParquetColumns:
    """Columns of a Parquet file, which is read again for every pass."""

    def __init__(self, path: str) -> None:
        self._path = path
        with self._open() as file:
            self.names: tuple[str, ...] = tuple(file.schema_arrow.names)
            if len(set(self.names)) < len(self.names):
                raise _bad_file(path, "names of columns repeat")
            metadata = file.metadata
            self.shape: tuple[int, int] = (metadata.num_rows, len(self.names))
            groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
            self.group_bytes: int = max((group.total_byte_size for group in groups), default=0)
            """Decompressed bytes of the largest row group, as the file says."""

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> ParquetColumns:
        """Open what a caller says is a Parquet file, if its name ends in ``.parquet``."""
        name = os.fspath(path)
        if not name.endswith(".parquet"):
            raise _bad_file(name, "its name does not end in .parquet")
        check_encodable(name, "the path", "X")
        return cls(name)

    def select(self, names: Sequence[str]) -> Columns:
        """Return the columns of these names."""
        selected = copy(self)
        selected.names, selected.shape = tuple(names), (self.shape[0], len(names))
        return selected

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield pieces of one column after the other; short columns are read several at once."""
        with self._open() as file:
            types = dict(zip(file.schema_arrow.names, file.schema_arrow.types, strict=True))
            if not types.keys() >= set(self.names):
                raise changed_data()
            for name in self.names:  # before decoding, which may take a thousand times the file
                _check_type(types[name], f"column {name!r}")
            for names in columns_at_once(self.names, self.shape[0]):
                batches = file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False)
                if len(names) > 1:
                    table = _pyarrow().Table.from_batches(batches)
                    yield from ArrowColumns(table.select(names)).blocks()
                else:
                    yield from _column_blocks(names[0], (b.column(names[0]) for b in batches))

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """Open the file; errors of pyarrow inside the ``with`` block become one of this library."""
        pyarrow = _pyarrow()
        from pyarrow.parquet import ParquetFile

        try:
            with ParquetFile(self._path, buffer_size=_READ_BYTES, pre_buffer=False) as file:
                yield file
        except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
            raise _bad_file(self._path, str(error)) from error


def read_columns(data: Any, name: str, named: ColumnNames) -> ArrowColumns:
    """Return the columns of an object that exports Arrow data, or of an iterator of such objects.

    Nothing is copied. A stream is read to its end; of its columns only those named are kept.
    """
    pyarrow = _pyarrow()
    try:
        if hasattr(data, "__arrow_c_array__") and not hasattr(data, "__arrow_c_stream__"):
            data = pyarrow.chunked_array([pyarrow.array(data)])
        if hasattr(data, "__arrow_c_stream__"):
            table = _table(data, named)
        else:
            parts = []
            for part in data:
                if not any(hasattr(part, way) for way in _EXPORTS):
                    raise InvalidArgumentError(
                        f"{name} is a {type(data).__name__}, whose items are of type "
                        f"{type(part).__name__}",
                        "NOT_NUMBERS",
                        f"Give an array, a table, or list({name}). Items of an iterator are record "
                        "batches or frames",
                        name,
                    )
                parts.append(_table(part, named))
            table = pyarrow.concat_tables(parts) if parts else pyarrow.table({})
    except pyarrow.ArrowException as error:  # such as 128-bit integers of Polars
        raise InvalidArgumentError(
            f"{name} has a column, or items, that pyarrow does not read: {error}",
            "NOT_NUMBERS",
            "Convert columns of other types to Float64 or Int64 first",
            name,
        ) from error
    except TypeError as error:
        raise no_numbers(name, str(error)) from error
    return ArrowColumns(table)


def _table(data: Any, named: ColumnNames) -> Any:
    """Return an object that exports an Arrow stream as a table; a lone column has no name."""
    pyarrow = _pyarrow()
    try:
        reader = pyarrow.RecordBatchReader.from_stream(data)
    except pyarrow.ArrowInvalid:  # its items are no records
        return pyarrow.Table.from_arrays([pyarrow.chunked_array(data)], list(_NAMELESS))
    if named.x is None:
        return reader.read_all()
    names = named.read(tuple(reader.schema.names))
    schema = pyarrow.schema([reader.schema.field(name) for name in names])
    return pyarrow.Table.from_batches((batch.select(names) for batch in reader), schema)


def _column_blocks(name: str, chunks: Iterable[Any]) -> Iterator[NDArray[Any]]:
    """Yield the numbers of the chunks of a column, [1, rows] each."""
    types, start, quoted = _pyarrow().types, 0, f"column {name!r}"
    for chunk in chunks:
        for part in row_blocks(len(chunk)):
            block = chunk[part]
            if block.null_count:
                row = block.is_null().to_numpy(zero_copy_only=False).argmax()
                raise missing_value(quoted, start + part.start + int(row))
            _check_type(block.type, quoted)
            if types.is_decimal(block.type):
                block = block.cast(_pyarrow().float64())
            yield block.to_numpy(zero_copy_only=False)[None]
        start += len(chunk)


def _check_type(kind: Any, name: str) -> None:
    types = _pyarrow().types
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal)
    if not any(test(kind) for test in tests):
        raise no_numbers(name, f"its type is {kind}")


def _bad_file(path: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{path!r} cannot be read: {why}",
        "BAD_FILE",
        "Give the path of a Parquet file, or read the file and pass its table",
        "X",
    )


def _pyarrow() -> Any:
    require("pyarrow", "warpfit[arrow]", "X")
    import pyarrow

    return pyarrow


# ------------------------------------------------------------------------------- tables of any kind


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The columns of a data set."""

    variables: Columns
    target: Columns | None = None
    weights: Columns | None = None

    @property
    def sources(self) -> tuple[Columns, ...]:
        """All columns, in the order of the payload."""
        return tuple(c for c in (self.variables, self.target, self.weights) if c is not None)

    def layout(self, names: Sequence[str] | None, dtype: DTypeLike) -> Layout:
        """Return the layout of the data set; names are by default those of the columns."""
        rows, variables = self.variables.shape
        names = self.variables.names if names is None else names
        names = list_of_texts(names, reason="NAME_MISMATCH")
        layout = Layout(
            dtype=canonical_dtype(dtype),
            variables=variables,
            rows=rows,
            has_target=self.target is not None,
            has_weights=self.weights is not None,
            names=names,
        )
        layout.check()
        for column, name in ((self.target, "y"), (self.weights, "weights")):
            if column is not None and column.shape != (rows, 1):
                count, columns = column.shape
                raise InvalidArgumentError(
                    f"{name} has {count} rows and {columns} columns, X has {rows} rows",
                    "BAD_SHAPE",
                    "Give one number for each row of X",
                    name,
                )
        return layout


def open_table(
    X: Any, y: Any = None, weights: Any = None, x: Sequence[str] | str | None = None
) -> Table:
    """Return the columns of anything that `warpfit.Client.upload` takes, without reading them.

    What can be read only once is read here.
    """
    named = ColumnNames.of(x, unwrapped(y), unwrapped(weights))
    source = _open(X, "X", named)

    def column(given: Any, name: str) -> Columns | None:
        given = unwrapped(given)
        if isinstance(given, str):
            return source.select([given])
        return None if given is None else _open(given, name, ColumnNames())

    variables = source
    if named != ColumnNames():
        named.read(source.names)
        variables = source.select(named.variables(source.names))
    return Table(variables, column(y, "y"), column(weights, "weights"))


def _open(data: Any, name: str, named: ColumnNames) -> Columns:
    if isinstance(data, ParquetColumns):
        return data
    if isinstance(data, str | os.PathLike):
        return ParquetColumns.of(data)
    if hasattr(data, "iloc"):
        return FrameColumns(data.to_frame() if data.ndim == 1 else data, name)
    if any(hasattr(data, way) for way in (*_EXPORTS, "__next__")):
        return read_columns(data, name, named)
    return ArrayColumns(data, name)
