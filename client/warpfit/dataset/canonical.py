"""Data sets in canonical form: their columns in order, their content id, their payload."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from warpfit.dataset.tables import (
    BLOCK_BYTES,
    Columns,
    Layout,
    RoundingCheck,
    Table,
    changed_data,
    check_weights,
    open_table,
    warn_of_lost_digits,
)
from warpfit.errors import DatasetNotFoundError, InvalidArgumentError

#: Rows and bytes of each row that are transposed at a time: few enough for the cache, which makes
#: it six times as fast, and one cache line.
_TRANSPOSED_ROWS: Final = 512
_TRANSPOSED_BYTES: Final = 64
#: Data sets of at least this size are hashed in a thread of their own.
_HASHED_IN_THREAD: Final = 8 << 20
#: Most bytes of a data set of which a client keeps a copy of its own; of others it sends views.
_COPIED_BYTES: Final = 2 * BLOCK_BYTES


class PayloadDigest:
    """SHA-256 of a data set, for a large one computed in a thread while its bytes arrive.

    `update` waits until at most ``most_behind`` bytes are not hashed yet.
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
        """Bring scikit-learn shaped arrays into canonical form; see `warpfit.Client.upload`."""
        table = open_table(X, y, weights)
        layout = checked_layout(table, names, dtype)
        rounding = RoundingCheck(layout)
        dataset = cls.loaded(layout, table.sources, rounding)
        warn_of_lost_digits(rounding.lost_digits())
        return dataset

    @classmethod
    def loaded(
        cls,
        layout: Layout,
        sources: Iterable[Columns],
        rounding: RoundingCheck,
    ) -> Dataset:
        """Convert columns to a canonical matrix; see `content_id` for ``rounding`` and errors."""
        matrix = np.empty((layout.columns, layout.rows), dtype=layout.dtype)
        return cls.resident(layout, matrix, content_id(layout, sources, rounding, matrix))

    @classmethod
    def resident(cls, layout: Layout, matrix: NDArray[Any], content_id: bytes) -> Dataset:
        """Wrap a canonical matrix whose id is known, without hashing it.

        Engines give the tenant's key of the data set here, which `Evaluation.dataset_id` names.
        """
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
        return _cut([self.matrix], size)

    def every(self, step: int) -> NDArray[Any]:
        """Return the first row and each one ``step`` rows behind it, of all columns."""
        return self.matrix[:, ::step]


@dataclass(frozen=True, eq=False)
class ColumnsInPlace:
    """A large data set whose numbers stay where the caller has them, and are converted by blocks.

    It takes memory for one block while it is hashed or sent. The numbers must stay what they are.
    """

    layout: Layout
    content_id: bytes
    sources: tuple[Columns, ...]

    @property
    def target(self) -> NDArray[Any] | None:
        """A copy of the target [rows], or None."""
        return self._column(1) if self.layout.has_target else None

    @property
    def weights(self) -> NDArray[Any] | None:
        """A copy of the weights [rows], or None."""
        return self._column(-1) if self.layout.has_weights else None

    def _column(self, source: int) -> NDArray[Any]:
        blocks = [block.reshape(-1) for block in self.sources[source].blocks()]
        return np.concatenate(blocks, dtype=self.layout.dtype, casting="unsafe")

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Return the payload in pieces, as `Dataset.chunks`; raise if it has changed meanwhile."""
        return _cut((block.numbers for block in blocks_of(self.layout, self.sources)), size)

    def every(self, step: int) -> NDArray[Any]:
        """Return some rows of all columns, as `Dataset.every`."""
        rows = -(-self.layout.rows // step)
        taken = np.empty((self.layout.columns, rows), self.layout.dtype)
        for block in blocks_of(self.layout, self.sources):
            part = block.numbers[:, -block.start % step :: step]
            first = -(-block.start // step)
            columns = slice(block.first, block.first + len(part))
            taken[columns, first : first + part.shape[1]] = part
        return taken


@dataclass(frozen=True, slots=True)
class ServerFile:
    """A Parquet file on servers, and the columns of it that make a data set."""

    name: str
    """Path below the server's folder of data."""
    x: tuple[str, ...]
    """Variables; empty for all columns but the other two."""
    y: str
    """Target, or empty."""
    weights: str
    """Weights, or empty."""
    dtype: np.dtype[Any] | None
    """Type of the data on the server; None lets the server choose, as "auto" does."""


@dataclass(frozen=True, eq=False)
class DatasetReference:
    """A data set without numbers here: another process has them, or servers have its file."""

    layout: Layout
    content_id: bytes
    file: ServerFile | None = None
    """The file that servers read it from."""
    target: None = None
    weights: None = None

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Raise DatasetNotFoundError, as `every` does."""
        return self.every(1).data  # type: ignore[return-value]

    def every(self, step: int) -> NDArray[Any]:
        """Raise DatasetNotFoundError."""
        if self.file is not None:
            remedy = "Upload them for this: client.upload(X, y)"
            raise DatasetNotFoundError("the numbers are on the server alone", remedy=remedy)
        raise DatasetNotFoundError(
            "the data set is not resident, and its numbers are in another process",
            remedy="Upload it here: client.upload(X, y) sends nothing to servers that have it",
        )


#: A data set as a client keeps it.
ClientDataset: TypeAlias = Dataset | ColumnsInPlace | DatasetReference


def ranges(dataset: ClientDataset) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the least and the greatest finite number of each variable, [variables] each.

    Rows of weight 0 do not count. A variable without any finite number has the range 0 to 0.
    """
    layout = dataset.layout
    weights = dataset.weights if layout.has_weights else None
    low = np.full(layout.variables, np.inf)
    high = np.full(layout.variables, -np.inf)
    start = 0
    for chunk in dataset.chunks(BLOCK_BYTES):
        numbers = np.frombuffer(chunk, layout.dtype)
        while len(numbers) and start < layout.variables * layout.rows:
            column, row = divmod(start, layout.rows)
            part, numbers = np.split(numbers, [layout.rows - row])
            start += len(part)
            counts = np.isfinite(part)
            if weights is not None:
                counts &= weights[row : row + len(part)] > 0
            low[column] = part.min(initial=low[column], where=counts)
            high[column] = part.max(initial=high[column], where=counts)
    empty = low > high
    low[empty] = high[empty] = 0.0
    return low, high


def client_dataset(
    table: Table, *, names: Sequence[str] | None = None, dtype: DTypeLike = np.float32
) -> ClientDataset:
    """Hash a table for an upload, see `warpfit.Client.upload`; copy it only if it is small.

    The dtype ``"auto"`` is float32, unless that loses digits that matter, or a column has so large
    or small numbers that their fourth powers leave its range: then it is float64.
    """
    is_auto = isinstance(dtype, str) and dtype == "auto"
    layout = checked_layout(table, names, np.float32 if is_auto else dtype)
    rounding = RoundingCheck(layout, measures=is_auto)
    found: ClientDataset
    try:
        if layout.nbytes <= _COPIED_BYTES:
            found = Dataset.loaded(layout, table.sources, rounding)
        else:
            identity = content_id(layout, table.sources, rounding)
            found = ColumnsInPlace(layout, identity, table.sources)
    except InvalidArgumentError as error:
        if not is_auto or error.reason != "OVERFLOW":
            raise
        return client_dataset(table, names=names, dtype=np.float64)
    if is_auto and rounding.wants_float64:
        return client_dataset(table, names=names, dtype=np.float64)
    warn_of_lost_digits(rounding.lost_digits())
    return found


def checked_layout(table: Table, names: Sequence[str] | None, dtype: DTypeLike) -> Layout:
    """Return the layout of a table; raise InvalidArgumentError for weights that are none."""
    layout = table.layout(names, dtype)
    if table.weights is not None:
        start = 0
        for block in table.weights.blocks():
            check_weights(block[0], start)
            start += block.shape[1]
    return layout


def content_id(
    layout: Layout,
    sources: Iterable[Columns],
    rounding: RoundingCheck,
    matrix: NDArray[Any] | None = None,
) -> bytes:
    """Return the SHA-256 of header and payload, 32 bytes, in one pass over the numbers.

    Each block is hashed as soon as it is complete, while the next one is converted; ``matrix``
    [columns, rows] keeps the converted numbers. ``rounding`` sees all of them.
    """
    digest = PayloadDigest(layout, BLOCK_BYTES if matrix is None else math.inf)
    with closing(digest):
        for block in blocks_of(layout, sources, matrix):
            rounding.check(block.numbers, block.given, block.first, block.start)
            digest.update(block.numbers.data)
        return digest.finish()


class Block(NamedTuple):
    """All rows of some columns, or some rows of one."""

    numbers: NDArray[Any]
    """[columns, rows], C-contiguous, in the data set's dtype."""
    given: NDArray[Any]
    """The same as it was given."""
    first: int
    """Index of the first column."""
    start: int
    """Index of the first row."""


def blocks_of(
    layout: Layout, sources: Iterable[Columns], matrix: NDArray[Any] | None = None
) -> Iterator[Block]:
    """Yield the payload block after block; ``matrix`` is as for `content_id`."""
    first = start = 0
    for source in sources:
        for given in source.blocks():
            columns, rows = given.shape
            if first + columns > layout.columns or start + rows > layout.rows:
                raise changed_data()
            out = None if matrix is None else matrix[first : first + columns, start : start + rows]
            yield Block(_converted(given, layout.dtype, out), given, first, start)
            start += rows
            if start == layout.rows:
                first, start = first + columns, 0
    if first != layout.columns:
        raise changed_data()


def _converted(given: NDArray[Any], dtype: np.dtype[Any], out: NDArray[Any] | None) -> NDArray[Any]:
    """Return numbers in another dtype, C-contiguous; copy only what is not so already."""
    if out is None:
        if given.dtype == dtype and given.flags.c_contiguous:
            return given
        out = np.empty(given.shape, dtype)
    columns, rows = given.shape
    is_transposed = columns > 1 and given.strides[1] != given.itemsize
    group = max(1, _TRANSPOSED_BYTES // dtype.itemsize) if is_transposed else columns
    strip = _TRANSPOSED_ROWS if is_transposed else max(1, rows)
    with np.errstate(over="ignore"):
        for first in range(0, columns, group):
            for start in range(0, rows, strip):
                part = slice(first, first + group), slice(start, start + strip)
                out[part] = given[part]
    return out


def _cut(blocks: Iterable[NDArray[Any]], size: int) -> Iterator[memoryview]:
    """Cut the bytes of blocks into pieces of one size; copy only pieces that span blocks."""
    parts: list[memoryview] = []
    missing = size
    for block in blocks:
        view = block.reshape(-1).data.cast("B")
        while view:
            parts.append(view[:missing])
            view, missing = view[missing:], missing - len(parts[-1])
            if not missing:
                yield parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
                parts, missing = [], size
    if parts:
        yield memoryview(b"".join(parts))
