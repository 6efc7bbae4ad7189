"""Columns of numbers as callers have them, read by blocks: of NumPy arrays and pandas frames."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import InvalidArgumentError
from warpfit.expressions.real_numbers import real_numbers

#: Most numbers of a block, and their bytes as float64.
BLOCK_BYTES: Final = 16 << 20
BLOCK_NUMBERS: Final = BLOCK_BYTES // 8
#: Most names that an error lists.
_LISTED_NAMES: Final = 20


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
                listed = ", ".join(map(repr, names[:_LISTED_NAMES])) or "none with names"
                more = ", ..." if len(names) > _LISTED_NAMES else ""
                raise InvalidArgumentError(
                    f"X has {counts[name]} columns {name!r}",
                    "UNKNOWN_COLUMN",
                    f"Name columns of X; there are: {listed}{more}",
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
            raise InvalidArgumentError(
                f"{name} has {self._array.ndim} dimensions, not 2",
                "BAD_SHAPE",
                "Send [rows, variables]",
                name,
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
        self.names = labels if all(isinstance(label, str) for label in labels) else ()

    def select(self, names: Sequence[str]) -> Columns:
        """Return the columns of these names."""
        indices = [self.names.index(name) for name in names]
        return FrameColumns(self._frame.iloc[:, indices], self._name)

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield pieces of one column after the other."""
        rows, columns = self.shape
        for column in range(columns):
            for part in row_blocks(rows):
                series = self._frame.iloc[part, column]
                yield real_numbers(series, self._column_name(column), part.start)[np.newaxis]

    def _column_name(self, column: int) -> str:
        named = f"{column} of {self._name}"
        return f"column {self.names[column]!r}" if self.names else f"column {named}"


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
