"""Files of data for the command line: numbers and columns, with errors that name the place."""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import math
import re
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.cli.shared import tell
from warpfit.errors import InvalidArgumentError, did_you_mean, nearest_first, require
from warpfit.expressions.real_numbers import leaves_float64

#: Most seconds, or days, of anything: 31 years, below what clocks and threads can wait for.
MOST_SECONDS: Final = 1e9
#: Separators of cells, the first one that fits is taken.
_DELIMITERS: Final = "\t;,"
#: Lines from which separator and decimal sign are told.
_SAMPLE_LINES: Final = 100
#: Most characters of a line: 65,536 columns of 256 characters.
_LONGEST_LINE: Final = 16 << 20
#: A file may unpack to so many bytes, and to so many times its size: real tables come to 20 times.
_FREE_BYTES, _MOST_RATIO = 8 << 20, 200
#: Bytes that are unpacked before the first row is read, so that a bomb shows early.
_AHEAD: Final = 16 << 20
_EMPTY_REMEDY: Final = "Give a file with a line of names and a line of numbers for each row"
#: Texts of cells without a value, in lower case. NaN is a number.
_MISSING: Final = frozenset({"", "na", "n/a", "#n/a", "<na>", "null", "none", "nat", "?"})
_COMMA_NUMBER: Final = re.compile(r"[+-]?\d*,\d+(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
#: A number with a comma and a point, of which either may stand between thousands.
_GROUPED: Final = re.compile(r"[+-]?\d+(?:\.\d+)+,\d+|[+-]?\d+(?:,\d+)+\.\d+")
#: A number whose comma may stand between its thousands.
_THOUSANDS: Final = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")


# --------------------------------------------------------------------------- numbers of arguments


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


def number(text: str) -> float:
    """Read a number as one of a table."""
    try:
        return cell_number(text.strip())
    except ValueError as error:
        remedy = ". Write 1.5 with a point, and several with spaces between" if "," in text else ""
        raise argparse.ArgumentTypeError(f"{text.strip()!r} is no number{remedy}") from error


def amount(text: str) -> float:
    """Read a number that is not negative."""
    value = number(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text.strip()!r} is no number from 0")
    return value


def seconds(text: str) -> float:
    """Read a time that is not 0."""
    value = number(text)
    if not 0.0 < value <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text.strip()!r} is no time from above 0 to {MOST_SECONDS:g}"
        )
    return value


def whole_from(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from ``least``, and below 2^31."""

    def read(text: str) -> int:
        value = number(text)
        if not (value.is_integer() and least <= value < 2**31):
            raise argparse.ArgumentTypeError(f"{text.strip()!r} is no whole number from {least}")
        return int(value)

    return read


def _encoding(name: str) -> str:
    """Read the name of an encoding of text."""
    try:
        "".encode(name)
        b"".decode(name)
    except (LookupError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{name!r} is no encoding of text") from error
    return name


# ----------------------------------------------------------------------------------------- tables


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """The columns of a file that a command uses."""

    file: str
    """Name of the file in error messages."""
    names: tuple[str, ...]
    """Names of the variables."""
    columns: NDArray[np.float64]
    """The variables, [rows, variables]."""
    target: NDArray[np.float64] | None
    """[rows]."""
    weights: NDArray[np.float64] | None
    """[rows]."""
    places: tuple[str, ...]
    """Where each row stands in the file, such as "line 2"."""
    group: int | None = None
    """Place of the variable that says of which group a row is."""
    left_out: int = 0
    """Rows of the file that lack a value and are left out."""
    groups: tuple[str, ...] = ()
    """Texts of the groups, whose numbers from 0 stand in their column; empty if it has numbers."""

    def require_finite(self, target: str, weights: str | None, *, of_target: bool = False) -> None:
        """Check that a formula for the target can be searched for, or fitted with ``of_target``.

        Raises:
            InvalidArgumentError: if a cell is not finite, with file, line and column.
        """
        named = [] if of_target else [*zip(self.names, self.columns.T, strict=True)]
        named += [(target, self.target)] if self.target is not None else []
        named += [(str(weights), self.weights)] if self.weights is not None else []
        for name, column in named:
            for row in np.flatnonzero(~np.isfinite(column))[:1]:
                raise InvalidArgumentError(
                    f"{self.file}, {self.places[row]}, column {name!r}: {column[row]} is no finite "
                    "number",
                    "NOT_FINITE",
                    f"Remove the line{'' if of_target else ' or the column'}: a "
                    f"{'fit' if of_target else 'search'} needs finite numbers",
                )


def add_table_flags(parser: argparse.ArgumentParser, *, needs_target: bool) -> None:
    """Add the file of a command and what says which of its cells are used."""
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="CSV, also with .gz; Parquet; - is standard input")
    add("--target", metavar="COLUMN", required=needs_target, help="column to predict")
    group = parser.add_argument_group(
        "columns", "NAMES have commas between; a flag may be repeated; a number is a position"
    )
    add = group.add_argument
    add("--columns", action="append", metavar="NAMES", help="variables (default: all others)")
    add("--ignore", action="append", metavar="NAMES", help="columns that are not read")
    add("--weights", metavar="COLUMN", help="column with the weights of the rows")
    add(
        "--missing",
        type=lambda word: "refuse" if word == "error" else word,  # the word of older versions
        choices=("refuse", "drop"),
        default="refuse",
        help="cells without a value: refuse them, or leave their rows out (default: refuse)",
    )
    add(
        "--encoding",
        type=_encoding,
        default="utf-8",
        metavar="NAME",
        help="of a CSV file, such as latin-1 or utf-16 (default: utf-8)",
    )
    add(
        "--decimal",
        choices=("point", "comma"),
        help="decimal sign of a CSV file (default: as its first 100 lines have it)",
    )


def read_table(options: argparse.Namespace) -> Table:
    """Read the file that a command's flags name, and say how many rows are left out.

    Raises:
        InvalidArgumentError: as `table_of_file`.
    """
    table = table_of_file(options)
    if table.left_out:
        rows = table.left_out + len(table.columns)
        tell(f"warpfit: {table.left_out} of {rows} rows lack a value and are left out")
    return table


def table_of_file(options: argparse.Namespace, content: io.BytesIO | None = None) -> Table:
    """Read the file that a command's flags name.

    The first line of a CSV file names the columns. If it holds only numbers, they are named x1, x2,
    and so on. Cells are separated by tab, semicolon or comma, or by white space in a file that has
    none of these. Lines that begin with # are comments; the first one names the columns if it has
    as many cells as the lines below it. Files with gzip's or Parquet's first
    bytes are read as such, whatever their names.

    Args:
        options: the flags of `add_table_flags`.
        content: of the file, where it is in memory already.

    Raises:
        InvalidArgumentError: if the file cannot be read, a column is not there, or a cell that is
            used is no number; the message names file, line and column.
    """
    is_input = content is None and str(options.file) == "-"
    file = "standard input" if is_input else str(options.file)
    try:
        # A command closes no standard stream.
        stream = 0 if is_input else options.file
        with (
            open(stream, "rb", closefd=not is_input)
            if content is None
            else io.BufferedReader(content)
        ) as raw:
            start = raw.peek(4)[:4]
            if start == b"PAR1":
                return _read_parquet(raw, file, options)
            data: Any = raw
            if start[:2] == b"\x1f\x8b":
                data = io.BufferedReader(_Unpacked(raw), _AHEAD)
                data.peek()
            named = getattr(options, "encoding", "utf-8")
            is_utf8 = named.lower().replace("_", "-") in ("utf-8", "utf8")
            way = ("utf-8-sig", "surrogateescape") if is_utf8 else (named, "strict")
            text = io.TextIOWrapper(data, *way, newline="")
            return _read_csv(text, file, options)
    except (OSError, ValueError, EOFError, zlib.error, csv.Error) as error:
        # A path may hold a zero byte, which is a ValueError.
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidArgumentError(
            f"{file} cannot be read: {reason}",
            "BAD_FILE",
            "Give a CSV file in UTF-8, or name its --encoding, also with .gz, or a Parquet file",
        ) from error


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """The columns of a file that are used, as positions from 0."""

    names: tuple[str, ...]
    """Names of all columns."""
    variables: list[int]
    target: int | None
    weights: int | None
    group: int | None

    @classmethod
    def of(cls, file: str, names: Sequence[str], options: argparse.Namespace) -> ColumnChoice:
        """Find the columns that the flags name; raise InvalidArgumentError."""
        places = {name: place for place, name in reversed([*enumerate(names)])}

        def find(name: str, flag: str) -> int:
            if name in places:
                return places[name]
            if name.isascii() and name.isdecimal() and 0 < int(name) <= len(names):
                return int(name) - 1
            raise InvalidArgumentError(
                f"there is no column {name!r} in {file}",
                "UNKNOWN_COLUMN",
                did_you_mean(name, names, f"The columns are: {nearest_first(name, names)}"),
                flag,
            )

        def find_all(given: Iterable[str], flag: str) -> list[int]:
            parts = chain.from_iterable([g] if g in places else g.split(",") for g in given)
            return [find(part.strip(), flag) for part in parts]

        target = None if options.target is None else find(options.target, "target")
        weights = None if options.weights is None else find(options.weights, "weights")
        named = getattr(options, "group", None)
        group = None if named is None else find(named, "group")
        ignored = {target, weights, *find_all(options.ignore or (), "ignore")}
        wanted = range(len(names))
        variables = list(find_all(options.columns, "columns") if options.columns else wanted)
        variables += [group] if group is not None and group not in variables else []
        variables = [index for index in variables if index not in ignored or index == group]
        if not {*variables} - {group}:
            what = {"the target": target, "the weights": weights, "the group": group}
            taken = [f"{names[at]} is {role}" for role, at in what.items() if at is not None]
            raise InvalidArgumentError(
                f"no column of {file} is left for variables{': ' * bool(taken)}{', '.join(taken)}",
                "NO_VARIABLES",
                f"The columns are: {', '.join(names)}",
                "columns",
            )
        chosen = cls(tuple(names), variables, target, weights, group)
        if len(set(chosen.used)) < len(chosen.used):
            raise InvalidArgumentError(
                "a column is used twice", "BAD_NAMES", "Name it once, in one of the flags"
            )
        uses = Counter(names[index] for index in chosen.used)
        for index in chosen.used:
            if uses[names[index]] > 1 or not names[index]:
                problem = "has no name" if not names[index] else f"is another {names[index]!r}"
                raise InvalidArgumentError(
                    f"column {index + 1} of {file} {problem}",
                    "BAD_NAMES",
                    f"Give each column a name of its own, or leave it out: --ignore {index + 1}",
                )
        return chosen

    @property
    def used(self) -> list[int]:
        return [*self.variables, *(i for i in (self.target, self.weights) if i is not None)]

    def table(
        self,
        file: str,
        numbers: NDArray[np.float64],
        places: Sequence[str],
        missing: NDArray[np.bool_],
        groups: Sequence[str] = (),
    ) -> Table:
        """Return the table of the columns in use, [rows, columns], without the rows that miss."""
        left_out = int(missing.sum())
        if left_out:
            numbers = numbers[~missing]
            places = [place for place, is_out in zip(places, missing, strict=True) if not is_out]
        if not len(numbers):
            raise InvalidArgumentError(
                f"{file} holds no rows of numbers", "EMPTY_FILE", _EMPTY_REMEDY
            )
        variables = len(self.variables)
        others = iter(numbers[:, variables:].T)
        target, weights = (None if i is None else next(others) for i in (self.target, self.weights))
        names = tuple(self.names[index] for index in self.variables)
        group = None if self.group is None else self.variables.index(self.group)
        columns = numbers[:, :variables]
        own = target, weights, tuple(places), group, left_out, tuple(groups)
        return Table(file, names, columns, *own)


def _read_csv(text: io.TextIOWrapper, file: str, options: argparse.Namespace) -> Table:
    each = iter(partial(_line, text), "")
    sample = list(islice(each, _SAMPLE_LINES))
    below = next((line for line in sample if not _is_comment(line)), "")
    if below.strip() and _is_comment(sample[0]):
        # It names the columns if it has as many cells as the line below it.
        bare, between = sample[0].lstrip().removeprefix("#"), _delimiter([below])
        sign = None if between == " " else between
        own, others = (len(line.split(sign)) for line in (bare, below))
        sample[0] = bare.lstrip() if own == others else sample[0]
    delimiter = _delimiter([line for line in sample if not _is_comment(line)])
    # A comment becomes an empty line, so that places of errors stay right.
    told = ("\n" if _is_comment(line) else line for line in chain(sample, each))
    lines_read = (" ".join(line.split()) for line in told) if delimiter == " " else told
    reader = csv.reader(lines_read, delimiter=delimiter)
    stripped = ((reader.line_num, [cell.strip() for cell in row]) for row in reader)
    lines: Iterator[tuple[int, list[str]]] = ((n, row) for n, row in stripped if any(row))
    read = list(islice(lines, _SAMPLE_LINES))
    if not read:
        raise InvalidArgumentError(f"{file} holds no rows of numbers", "EMPTY_FILE", _EMPTY_REMEDY)
    first = [cell for cell in read[0][1] if not _is_missing(cell)]
    numbered = all(_is_number(cell) or _COMMA_NUMBER.fullmatch(cell) for cell in first)
    names = [f"x{i + 1}" if numbered else cell for i, cell in enumerate(read[0][1])]
    for index, name in enumerate(names):
        _check_encoding(name, file, read[0][0], index)
    selection = ColumnChoice.of(file, names, options)
    used = selection.used
    rows = read if numbered else read[1:]
    has_commas = options.decimal == "comma" or (
        options.decimal is None
        and any(_COMMA_NUMBER.fullmatch(row[i]) and not _THOUSANDS.fullmatch(row[i])
                for _, row in rows for i in used if i < len(row))
    )  # fmt: skip
    numbers, places, missing = array("d"), array("q"), array("b")
    groups: dict[str, int] = {}
    cells = [row[i] for _, row in rows for i in used if i == selection.group and i < len(row)]
    has_texts = not all(_is_number(cell) or _is_missing(cell) for cell in cells)
    for line, row in chain(rows, lines):
        if len(row) != len(names):
            raise InvalidArgumentError(
                f"{file}, line {line}: {len(row)} cells where the first line has {len(names)}",
                "RAGGED_FILE",
                "Give every line the same number of cells",
            )
        lacks = False
        for index in used:
            cell = row[index]
            if has_texts and index == selection.group and not _is_missing(cell):
                _check_encoding(cell, file, line, index)
                numbers.append(float(groups.setdefault(cell, len(groups))))
                continue
            try:
                value = cell_number(cell.replace(",", ".") if has_commas else cell)
                if has_commas and "." in cell:
                    raise ValueError(cell)
            except ValueError:
                if not _is_missing(cell):
                    place = file, line, index, names[index]
                    has_numbers = any(map(_is_number, row)) or len(places) > 0 or numbered
                    has_groups = hasattr(options, "group")
                    kinds = has_commas, has_numbers, has_groups
                    raise _bad_cell(cell, *place, *kinds) from None
                value = math.nan
                if options.missing == "refuse":
                    raise InvalidArgumentError(
                        f"{file}, line {line}, column {index + 1} ({names[index]}): there is no "
                        "value",
                        "MISSING_VALUE",
                        "Give --missing drop to leave such rows out, or write a number; nan is one",
                    ) from None
            lacks = lacks or (value != value and options.missing == "drop")
            numbers.append(value)
        places.append(line)
        missing.append(lacks)
    return selection.table(
        file,
        np.frombuffer(numbers, np.float64).reshape(len(places), len(used)),
        [f"line {line}" for line in places],
        np.frombuffer(missing, np.bool_),
        tuple(groups),
    )


def _is_comment(line: str) -> bool:
    bare = line.lstrip().lower()
    return bare.startswith("#") and not bare.startswith("#n/a")  # which is a cell without a value


def _line(text: io.TextIOWrapper) -> str:
    """Return the next line, "" at the end; raise ValueError for one that no table has."""
    line = text.readline(_LONGEST_LINE + 1)
    if len(line) > _LONGEST_LINE:
        raise ValueError(f"a line has more than {_LONGEST_LINE >> 20} million characters")
    return line


class _Packed:
    """Counts the bytes that are read of a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.taken = file, 0

    def read(self, size: int = -1) -> bytes:
        """Return at most ``size`` bytes."""
        data = self._file.read(size)
        self.taken += len(data)
        return data


class _Unpacked(io.RawIOBase):
    """The content of a file in gzip's format; one that is made of almost nothing is refused."""

    def __init__(self, file: IO[bytes]) -> None:
        self._packed, self._given = _Packed(file), 0
        packed: Any = self._packed  # gzip only reads
        self._content = gzip.GzipFile(fileobj=packed, mode="rb")

    def readable(self) -> bool:
        """Return that this can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with content; return the number of bytes."""
        data = self._content.read(len(buffer))
        buffer[: len(data)] = data
        self._given += len(data)
        if self._given > max(_FREE_BYTES, _MOST_RATIO * self._packed.taken):
            raise ValueError(
                f"it unpacks to more than {_MOST_RATIO} times its size, as no table of "
                "measurements does; unpack it with gunzip if it is meant"
            )
        return len(data)


def _delimiter(sample: Sequence[str]) -> str:
    """Return the delimiter: the character that occurs equally often in each of the first lines."""
    bare = [re.sub('"[^"]*"', "", line) for line in sample[:20] if line.strip()]
    for delimiter in _DELIMITERS:
        counts = {line.count(delimiter) for line in bare}
        if len(counts) == 1 and counts != {0}:
            return delimiter
    if not any(map("".join(bare).count, ";,")):
        widths = {len(line.split()) for line in bare}
        if len(widths) == 1 and widths != {1}:
            return " "
    # No separator, or lines of different lengths, which are an error with its place.
    return max(_DELIMITERS, key=bare[0].count) if bare and any(map(bare[0].count, ";\t")) else ","


def _bad_cell(
    cell: str,
    file: str,
    line: int,
    index: int,
    name: str,
    has_commas: bool,
    has_numbers: bool,
    has_groups: bool,
) -> InvalidArgumentError:
    _check_encoding(cell, file, line, index)
    remedy = f"Write nan for a missing number, or leave the column out: --ignore {name}"
    if has_groups:
        remedy += f"; --group {name} takes texts for names of groups"
    if _GROUPED.fullmatch(cell):
        point, comma = cell.replace(".", "").replace(",", "."), cell.replace(",", "")
        if cell.rindex(".") > cell.rindex(","):
            point, comma = comma, cell.replace(".", "").replace(",", ".")
        remedy = f"It could be {point} or {comma}: write it without signs between thousands"
    elif not has_numbers:
        remedy = "A line below the names that holds units, or other text, has to be removed"
    elif _COMMA_NUMBER.fullmatch(cell):
        remedy = "If the comma is the decimal sign, give --decimal comma"
    elif has_commas and _is_number(cell):
        remedy = "The decimal sign of this file is the comma; give --decimal point if it is not"
    return InvalidArgumentError(
        f"{file}, line {line}, column {index + 1} ({name}): {cell!r} is no number",
        "NOT_A_NUMBER",
        remedy,
    )


def _check_encoding(cell: str, file: str, line: int, index: int) -> None:
    """Refuse bytes that are no UTF-8, which the reader has kept as surrogates."""
    if any("\udc80" <= character <= "\udcff" for character in cell):
        raise InvalidArgumentError(
            f"{file}, line {line}, column {index + 1}: the text is not in UTF-8",
            "BAD_FILE",
            "Name its encoding, such as --encoding latin-1, or save the file in UTF-8",
        )


def _is_missing(cell: str) -> bool:
    return cell.lower() in _MISSING


def _is_number(cell: str) -> bool:
    try:
        cell_number(cell)
    except ValueError:
        return False
    return True


def _read_parquet(raw: IO[bytes], file: str, options: argparse.Namespace) -> Table:
    require("pyarrow", "warpfit[arrow]")
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        # A pipe cannot be read from its end.
        parquet = ParquetFile(raw if raw.seekable() else io.BytesIO(raw.read()))
        selection = ColumnChoice.of(file, parquet.schema_arrow.names, options)
        names = [selection.names[index] for index in selection.used]
        found = parquet.read(columns=names)
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error
    numbers = np.empty((found.num_rows, len(names)))
    missing = np.zeros(found.num_rows, np.bool_)
    for column, (index, name) in enumerate(zip(selection.used, names, strict=True)):
        values: Any = found.column(name)
        kinds = (pyarrow.types.is_integer, pyarrow.types.is_floating, pyarrow.types.is_boolean)
        if not any(is_kind(values.type) for is_kind in (*kinds, pyarrow.types.is_decimal)):
            raise InvalidArgumentError(
                f"{file}, column {index + 1} ({name}) holds {values.type}, no numbers",
                "NOT_A_NUMBER",
                f"Leave the column out: --ignore {name}",
            )
        empty = values.is_null().to_numpy()
        if options.missing == "refuse" and empty.any():
            raise InvalidArgumentError(
                f"{file}, row {int(empty.argmax()) + 1}, column {index + 1} ({name}): there is no "
                "value",
                "MISSING_VALUE",
                "Give --missing drop to leave such rows out",
            )
        numbers[:, column] = values.cast(pyarrow.float64(), safe=False).to_numpy()
        if options.missing == "drop":
            missing |= np.isnan(numbers[:, column])
    return selection.table(file, numbers, [f"row {i + 1}" for i in range(len(numbers))], missing)
