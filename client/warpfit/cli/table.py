"""CSV files of numbers, read with errors that name the place."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import InvalidArgumentError
from warpfit.expressions.real_numbers import leaves_float64

_DELIMITERS: Final = ",;\t"


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Named columns of numbers."""

    names: tuple[str, ...]
    columns: NDArray[np.float64]
    """[rows, columns]."""
    path: Path
    lines: tuple[int, ...]
    """Where each row stands in the file, from 1."""

    def split(self, target: str | None) -> tuple[Table, NDArray[np.float64] | None]:
        """Take the target column out; raise InvalidArgumentError if there is no such column."""
        if target is None:
            return self, None
        if target not in self.names:
            raise InvalidArgumentError(
                f"there is no column {target!r}",
                "UNKNOWN_COLUMN",
                f"The columns are: {', '.join(self.names)}",
                "target",
            )
        index = self.names.index(target)
        rest = replace(
            self,
            names=self.names[:index] + self.names[index + 1 :],
            columns=np.delete(self.columns, index, axis=1),
        )
        return rest, self.columns[:, index]

    def require_training_data(self, target: str) -> None:
        """Check that a formula for a column can be searched for.

        Raises:
            InvalidArgumentError: if it is the only column, names repeat, or a cell is not finite;
                the message then names file, line and column.
        """
        if len(self.names) < 2:
            raise InvalidArgumentError(
                f"{self.path} has no column besides {target!r}",
                "NO_VARIABLES",
                "Add a column from which it can be computed",
                "target",
            )
        repeated = next((name for name in self.names if self.names.count(name) > 1), None)
        if repeated is not None:
            raise InvalidArgumentError(
                f"{self.path} has several columns {repeated!r}",
                "BAD_NAMES",
                "Give each column a name of its own",
            )
        for row, column in np.argwhere(~np.isfinite(self.columns))[:1]:
            raise InvalidArgumentError(
                f"{self.path}, line {self.lines[row]}, column {column + 1} ({self.names[column]}): "
                f"{self.columns[row, column]} is no finite number",
                "NOT_FINITE",
                "Remove the line or the column: a search needs finite numbers",
            )


def read_table(path: Path) -> Table:
    """Read a CSV file, separated by comma, semicolon or tab.

    The first line names the columns; if it holds only numbers, they are named x1, x2, ...

    Raises:
        InvalidArgumentError: if the file cannot be read, or a cell is no number; the message names
            file, line and column.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            delimiter = max(_DELIMITERS, key=first.count)
            return _parse(path, csv.reader(file, delimiter=delimiter))
    except (OSError, ValueError, csv.Error) as error:  # a path may hold a zero byte
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidArgumentError(
            f"{path} cannot be read: {reason}", "BAD_FILE", "Give a CSV file in UTF-8"
        ) from error


def _parse(path: Path, reader: Any) -> Table:
    lines = ((reader.line_num, [cell.strip() for cell in row]) for row in reader)
    filled = ((number, row) for number, row in lines if any(row))
    number, header = next(filled, (0, []))
    named = not header or not all(_is_number(cell) for cell in header)
    names = tuple(header) if named else tuple(f"x{i}" for i in range(1, len(header) + 1))
    found = [*([] if named else [(number, header)]), *filled]
    rows = [_numbers(path, number, row, names) for number, row in found]
    if not rows:
        raise InvalidArgumentError(f"{path} holds no rows of numbers", "EMPTY_FILE")
    return Table(names, np.array(rows), path, tuple(number for number, _ in found))


def _numbers(path: Path, line: int, row: list[str], names: tuple[str, ...]) -> list[float]:
    if len(row) != len(names):
        raise InvalidArgumentError(
            f"{path}, line {line}: {len(row)} cells where the first line has {len(names)}",
            "RAGGED_FILE",
            "Give every line the same number of cells",
        )
    try:
        return [cell_number(cell) for cell in row]
    except ValueError:
        bad = next(index for index, cell in enumerate(row) if not _is_number(cell))
        raise InvalidArgumentError(
            f"{path}, line {line}, column {bad + 1} ({names[bad]}): {row[bad]!r} is no number",
            "NOT_A_NUMBER",
            "Write nan for a missing number, or remove the line or column",
        ) from None


def _is_number(cell: str) -> bool:
    try:
        cell_number(cell)
    except ValueError:
        return False
    return True


def cell_number(cell: str) -> float:
    """Return the number that a cell says.

    Python also reads 1_000 and digits of all scripts, which no other program writes for a number,
    and takes 1e999 for infinity and 1e-999 for 0.

    Raises:
        ValueError: if it is no number, or too large or too small for float64.
    """
    number = float(cell)
    if not cell.isascii() or "_" in cell or leaves_float64(cell, number):
        raise ValueError(f"{cell!r} is no number")
    return number
