"""Tables of any kind as the columns of a data set."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import DTypeLike

from warpfit.dataset.arrow import ParquetColumns, read_columns
from warpfit.dataset.layout import Layout, canonical_dtype
from warpfit.dataset.sources import ArrayColumns, ColumnNames, Columns, FrameColumns
from warpfit.errors import InvalidArgumentError


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
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise InvalidArgumentError(
                f"names is {names!r}", "NAME_MISMATCH", "Give a list of texts", "names"
            )
        layout = Layout(
            dtype=canonical_dtype(dtype),
            variables=variables,
            rows=rows,
            has_target=self.target is not None,
            has_weights=self.weights is not None,
            names=tuple(names),
        )
        layout.check()
        for column, name in ((self.target, "y"), (self.weights, "weights")):
            if column is not None and column.shape != (rows, 1):
                raise InvalidArgumentError(
                    f"{name} has shape {column.shape}, X has {rows} rows",
                    "BAD_SHAPE",
                    f"Send {name} as [{rows}]",
                    name,
                )
        return layout


def open_table(
    X: Any, y: Any = None, weights: Any = None, x: Sequence[str] | str | None = None
) -> Table:
    """Return the columns of anything that `warpfit.Client.upload` takes, without reading them.

    What can be read only once is read here.
    """
    named = ColumnNames.of(x, y, weights)
    source = _open(X, "X", named)

    def column(given: Any, name: str) -> Columns | None:
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
    ways = ("__arrow_c_stream__", "__arrow_c_array__", "__next__")
    if any(hasattr(data, way) for way in ways):
        return read_columns(data, name, named)
    return ArrayColumns(data, name)
