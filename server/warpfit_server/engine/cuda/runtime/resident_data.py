"""Data sets in device memory, and the interface of the tiers that evaluate batches on them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.errors import CancelledError
from warpfit.request import Evaluation, Timings
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.interface import Outputs, Steps

#: Rows of the variables are padded to whole 128-byte lines, the unit of device memory traffic.
ROW_MULTIPLE: Final = 32
#: Rows after the last column that a kernel may read but never uses.
SLACK_ROWS: Final = 512
#: Most rows that kernels count.
_MOST_ROWS: Final = 1 << 30
#: Bytes of each copy to the device.
_CHUNK_BYTES: Final = 8 << 20


@dataclass(eq=False)
class ResidentDataset:
    """A data set on the device; its memory is freed with the last reference."""

    dataset: Dataset
    columns: Any
    """CuPy array [columns, stride]: variables, then target, then weights; padding is 0."""
    first_row: int = 0
    """Row of the data set that the columns begin with."""
    sum_rows: int | None = None
    """Rows of the evaluation if it has more than those that are on the device; else None."""
    window_rows: int = _MOST_ROWS
    """Most rows that one evaluation of a tier takes, a power of two."""
    is_streamed: ClassVar[bool] = False
    """Whether only windows of the rows are on the device."""

    @property
    def variables(self) -> Any:
        """CuPy array [variables, stride]; rows beyond the data set's are padding."""
        return self.columns[: self.dataset.layout.variables]

    @property
    def stride(self) -> int:
        """Elements from one variable to the next, a multiple of `ROW_MULTIPLE`."""
        return int(self.columns.shape[1])

    def turn(self, cancelled: NDArray[np.uint8]) -> Steps[Any]:
        """Wait until no other evaluation uses the windows; return a context that ends the use.

        Raises:
            CancelledError: if ``cancelled`` became 1.

        """
        return nullcontext()
        yield

    def windows(
        self, spans: Sequence[tuple[int, int]]
    ) -> Generator[tuple[ResidentDataset, tuple[int, int]]]:
        """Yield each of some ranges of rows, from `cut_rows`, with data that has them."""
        for span in spans:
            yield self, span

    def address(self, column: int, row: int) -> int:
        """Return the device address of one element."""
        size = self.dataset.layout.dtype.itemsize
        place = column * self.stride + row - self.first_row
        return int(self.columns.data.ptr) + place * size

    def target_address(self, row: int) -> int:
        """Return the device address of the target at ``row``."""
        return self.address(self.dataset.layout.variables, row)

    def weights_address(self, row: int) -> int:
        """Return the device address of the weights at ``row``; 0 without weights."""
        layout = self.dataset.layout
        return self.address(layout.columns - 1, row) if layout.has_weights else 0


class EvaluationTier(Protocol):
    """A way to evaluate batches on a resident data set: interpreted or compiled."""

    def evaluate(
        self, resident: ResidentDataset, evaluation: Evaluation, outputs: Outputs
    ) -> Steps[Timings]:
        """Evaluate as `warpfit_server.engine.interface.Engine.evaluate` does."""


def check_cancelled(cancelled: NDArray[np.uint8]) -> None:
    """Raise CancelledError if the caller has cancelled the evaluation."""
    if cancelled[0]:
        raise CancelledError("the evaluation was cancelled", "CANCELLED")


def cut_rows(rows: tuple[int, int], length: int) -> list[tuple[int, int]]:
    """Cut rows into nodes of the tree of sums, unless there are no more than one node has.

    Args:
        rows: first row, and the row after the last one.
        length: rows of a node, a power of two.

    Returns:
        Ranges of rows, of which only the first and the last may be less than a node.

    """
    start, stop = rows
    if stop - start <= length:
        return [rows]
    edges = [start, *range((start // length + 1) * length, stop, length), stop]
    return list(pairwise(edges))


def upload(device: CudaDevice, dataset: Dataset) -> ResidentDataset:
    """Copy a data set to the device.

    Raises:
        ResourceExhaustedError: if the device has no room for it.

    """
    layout = dataset.layout
    stride = -(-layout.rows // ROW_MULTIPLE) * ROW_MULTIPLE
    size = (layout.columns * stride + SLACK_ROWS) * layout.dtype.itemsize
    with device.stream() as context:
        memory = device.allocate(size)
        context.clear(memory.ptr, size)
        columns = device.cupy.ndarray((layout.columns, stride), layout.dtype, memptr=memory)
        resident = ResidentDataset(dataset, columns)
        for column in range(layout.columns):
            _upload_column(context, dataset.matrix[column], resident.address(column, 0))
    return resident


def _upload_column(context: StreamContext, column: Any, address: int) -> None:
    source = column.view(np.uint8)
    for number, start in enumerate(range(0, len(source), _CHUNK_BYTES)):
        chunk = source[start : start + _CHUNK_BYTES]
        name = f"chunk {number % 2}"
        staging = context.pinned(name, _CHUNK_BYTES)[: len(chunk)]
        context.wait(name)
        staging[:] = chunk
        context.upload(address + start, staging)
        context.mark(name)
