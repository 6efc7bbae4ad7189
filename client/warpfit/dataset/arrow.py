"""Columns of Arrow tables, of everything that exports them, and of Parquet files, by pyarrow."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from numpy.typing import NDArray

from warpfit.dataset.sources import (
    ColumnNames,
    Columns,
    changed_data,
    columns_at_once,
    missing_value,
    no_numbers,
    row_blocks,
)
from warpfit.errors import InvalidArgumentError

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
    """Columns of a Parquet file, which is read again for every pass.

    Args:
        path: of the file; its name ends in ``.parquet``.
        names: columns to read, by default all.

    Raises:
        InvalidArgumentError: if it is no such file.

    """

    def __init__(self, path: str | os.PathLike[str], names: Sequence[str] | None = None) -> None:
        self._path = os.fspath(path)
        if not self._path.endswith(".parquet"):
            raise _bad_file(self._path, "its name does not end in .parquet")
        with self._open() as file:
            columns = file.schema_arrow.names
            if len(set(columns)) < len(columns):
                raise _bad_file(self._path, "names of columns repeat")
            self.names: tuple[str, ...] = tuple(columns if names is None else names)
            self.shape: tuple[int, int] = (file.metadata.num_rows, len(self.names))

    def select(self, names: Sequence[str]) -> Columns:
        """Return the columns of these names."""
        return ParquetColumns(self._path, names)

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield pieces of one column after the other; short columns are read several at once."""
        pyarrow = _pyarrow()
        with self._open() as file:
            if not set(self.names) <= set(file.schema_arrow.names):
                raise changed_data()
            for names in columns_at_once(self.names, self.shape[0]):
                batches = file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False)
                try:
                    if len(names) > 1:
                        table = pyarrow.Table.from_batches(batches)
                        yield from ArrowColumns(table.select(names)).blocks()
                    else:
                        yield from _column_blocks(names[0], (batch.column(0) for batch in batches))
                except (OSError, pyarrow.ArrowException) as error:
                    raise _bad_file(self._path, str(error)) from error

    def _open(self) -> Any:
        pyarrow = _pyarrow()
        try:
            from pyarrow.parquet import ParquetFile

            return ParquetFile(self._path, buffer_size=_READ_BYTES, pre_buffer=False)
        except (OSError, pyarrow.ArrowException) as error:
            raise _bad_file(self._path, str(error)) from error


def read_columns(data: Any, name: str, named: ColumnNames) -> ArrowColumns:
    """Return the columns of an object that exports Arrow data, or of an iterator of such objects.

    Nothing is copied. A stream is read to its end; of its columns only those named are kept.

    Raises:
        InvalidArgumentError: if it is no table.

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
    types, kind = pyarrow.types, chunk.type
    if types.is_decimal(kind):
        chunk = chunk.cast(pyarrow.float64())
    elif not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise no_numbers(name, f"its type is {kind}")
    numbers: NDArray[Any] = chunk.to_numpy(zero_copy_only=False)
    return numbers


def _bad_file(path: str, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{path!r} cannot be read: {why}",
        "BAD_FILE",
        "Give the path of a Parquet file, or read the file and pass its table",
        "X",
    )


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise InvalidArgumentError(
            "Arrow, Polars and Parquet need pyarrow, which is not installed",
            "MISSING_PACKAGE",
            "Install it (pip install 'warpfit[arrow]'), or pass NumPy arrays",
            "X",
        ) from error
    return pyarrow
