"""Columns of Arrow tables, of everything that exports them, and of Parquet files, by pyarrow."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, Final

from numpy.typing import NDArray

from warpfit.dataset import sources
from warpfit.dataset.sources import ColumnNames, Columns, row_blocks
from warpfit.errors import InvalidArgumentError, require
from warpfit.expressions.real_numbers import missing_value, no_numbers

#: Bytes of a Parquet file that are read at a time, and rows that are decoded at a time.
_READ_BYTES: Final = 1 << 20
_BATCH_ROWS: Final = 1 << 19
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
                raise sources.changed_data()
            for name in self.names:  # before decoding, which may take a thousand times the file
                _check_type(types[name], f"column {name!r}")
            for names in sources.columns_at_once(self.names, self.shape[0]):
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
            parts = [_table(part, named) for part in data]
            table = pyarrow.concat_tables(parts) if parts else pyarrow.table({})
    except (TypeError, pyarrow.ArrowException) as error:
        raise no_numbers(name, str(error)) from error
    return ArrowColumns(table)


def _table(data: Any, named: ColumnNames) -> Any:
    """Return what exports an Arrow stream as a table; a lone column has no name."""
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
    start = 0
    for chunk in chunks:
        for part in row_blocks(len(chunk)):
            yield _numbers(chunk[part], f"column {name!r}", start + part.start)[None]
        start += len(chunk)


def _numbers(chunk: Any, name: str, start: int) -> NDArray[Any]:
    """Return the numbers of an Arrow array of which ``start`` is the first row."""
    pyarrow = _pyarrow()
    if chunk.null_count:
        row = chunk.is_null().to_numpy(zero_copy_only=False).argmax()
        raise missing_value(name, start + int(row))
    _check_type(chunk.type, name)
    if pyarrow.types.is_decimal(chunk.type):
        chunk = chunk.cast(pyarrow.float64())
    numbers: NDArray[Any] = chunk.to_numpy(zero_copy_only=False)
    return numbers


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
