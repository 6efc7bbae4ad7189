"""Data sets in device memory, and the launches of a tier on windows of their rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.errors import CancelledError
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.interface import Steps, offload

#: Rows of the variables are padded to whole 128-byte lines, the unit of device memory traffic.
ROW_MULTIPLE: Final = 32
#: Rows after the last column that a kernel may read but never uses.
SLACK_ROWS: Final = 512
#: Rows that the first row of a window is a multiple of: what kernels take for a block at most.
ALIGNED_ROWS: Final = 4096
#: Part of the device's memory that the results of one launch may take.
RESULTS_SHARE: Final = 1 / 8
#: Most rows that kernels count.
_MOST_ROWS: Final = 1 << 30
#: Bytes of each copy to the device.
_CHUNK_BYTES: Final = 8 << 20
#: First row, and the row after the last one.
Span = tuple[int, int]
Chunk = TypeVar("Chunk")
NextWindow = Callable[[], Steps["ResidentDataset"]]


@dataclass(eq=False)
class ResidentDataset:
    """A data set on the device; its memory is freed with the last reference."""

    dataset: Dataset
    columns: Any
    """CuPy array [columns, stride]: variables, then target, then weights; padding is 0."""
    first_row: int = 0
    """Row of the data set that the columns begin with."""
    window_rows: int = _MOST_ROWS
    """Most rows that one evaluation of a tier takes, a power of two."""
    row_tiles: dict[Hashable, Any] = field(default_factory=dict)
    """Tiles into which the interpreter has cut ranges of the rows, see `InterpreterTier`."""
    is_streamed: ClassVar[bool] = False
    """Whether only windows of the rows are on the device."""

    @property
    def stride(self) -> int:
        """Elements from one variable to the next, a multiple of `ROW_MULTIPLE`."""
        return int(self.columns.shape[1])

    @contextmanager
    def windows(
        self, spans: Sequence[Span], context: StreamContext, cancelled: NDArray[np.uint8]
    ) -> Iterator[NextWindow]:
        """Lend a function to call once for each of some ranges of rows, for data that has them.

        What the function returns may be used by what is launched on the context's stream before
        the next call, or before the end of the block.

        Args:
            spans: ranges of at most `window_rows` rows, from `cut_rows`.
            context: the only stream that uses the data.
            cancelled: the function raises CancelledError if it has become 1 and rows are not there.
        """

        def whole() -> Steps[ResidentDataset]:
            return self
            yield

        yield whole

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


def run_chunks(
    device: CudaDevice,
    context: StreamContext,
    resident: ResidentDataset,
    spans: Sequence[Span],
    chunks: Sequence[Chunk],
    cancelled: NDArray[np.uint8],
    launch: Callable[[ResidentDataset, int, Chunk, int], Callable[[], None]],
    result_bytes: int,
) -> Steps[int]:
    """Launch all chunks on each span of rows, and copy their results.

    Large results are copied while the next chunk is computed. Without them nothing of an evaluation
    waits in the device's queue while others have their turns.

    Args:
        device: that computes.
        context: the stream.
        resident: the data set.
        spans: from `cut_rows`.
        chunks: of the jobs.
        cancelled: 1 to raise CancelledError.
        launch: marks ``begun {side}``, launches the kernels of a chunk, and marks ``computed
            {side}``. It is given what has the rows, the number of the span, the chunk, and the
            side, 0 and 1 in turn: a side's buffers are those of one chunk at a time. It returns
            what copies the results, called when the stream has passed all that was launched.
        result_bytes: of all chunks on all rows.

    Returns:
        Nanoseconds of the kernels.
    """
    count = len(spans) * len(chunks)
    each, ahead = result_bytes // count, 1 if result_bytes else 0
    end = "copied" if result_bytes else "computed"
    pending: list[tuple[int, Callable[[], None]]] = []
    computed = 0

    def finish() -> Steps[None]:
        nonlocal computed
        side, copy_results = pending.pop(0)
        yield from context.reach(f"{end} {side}")
        computed += context.nanoseconds(f"begun {side}", f"computed {side}")
        yield from offload(each, copy_results)

    with resident.windows(spans, context, cancelled) as next_window:
        for number, (node, chunk) in enumerate(product(range(len(spans)), chunks)):
            check_cancelled(cancelled)
            if number % len(chunks) == 0:
                window = yield from next_window()
            side = number % 2
            pending.append((side, launch(window, node, chunk, side)))
            if result_bytes:
                context.mark(f"{end} {side}")
            if len(pending) > ahead:
                yield from finish()
                if number < count - 1:
                    yield None
                    device.use()
        while pending:
            yield from finish()
    return computed


def check_cancelled(cancelled: NDArray[np.uint8]) -> None:
    """Raise CancelledError if the caller has cancelled the evaluation."""
    if cancelled[0]:
        raise CancelledError("the evaluation was cancelled", "CANCELLED")


def cut_rows(rows: Span, length: int) -> list[Span]:
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


def longest(spans: Sequence[Span]) -> Span:
    """Return the range that has most rows, and so touches most blocks, of those of `cut_rows`."""
    return max(spans, key=lambda span: span[1] - span[0])


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
