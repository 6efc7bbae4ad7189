"""Data sets on a device, and the launches of a tier on their rows.

A data set that fits lies in the device's memory. A larger one passes through it in windows of rows:
the columns stay in the host's memory, page-locked, so that the device reads them by itself. There
are a few buffers for windows on the device, each with a stream that fills it. An evaluation has two
of them at most: while kernels run on one window, the next one is copied. The host does not wait
for that, because the streams wait for each other::

    buffer 0                      buffer 1                      computation
    copy window 0                 copy window 1                 wait for window 0, run the kernels
    wait for its kernels          wait for its kernels          wait for window 1, run the kernels
    copy window 2                 copy window 3                 ...

Evaluations get buffers in the order in which they ask for windows. So two at the same time do not
wait for each other's kernels, and more of them take turns from window to window.

A window ends where a node of the tree of sums ends. So the sums of the windows, added up as the
tree says, have the bits that they would have if all rows were on the device.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice, pairwise, product
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset, Layout
from warpfit.errors import CancelledError, ResourceExhaustedError
from warpfit_server.engine.cuda.runtime.device import CudaDevice, StreamContext
from warpfit_server.engine.interface import Steps, offload

#: Rows of the variables are padded to whole 128-byte lines, the unit of device memory traffic.
ROW_MULTIPLE: Final = 32
#: Rows after the last column that a kernel may read but never uses.
_SLACK_ROWS: Final = 512
#: The first row of a window is a multiple of this, the most rows of a block of any kernel.
ALIGNED_ROWS: Final = 4096
#: Most rows that kernels count.
_MOST_ROWS: Final = 1 << 30
#: Bytes of each copy of a resident data set to the device.
_CHUNK_BYTES: Final = 8 << 20
#: Part of the memory that a data set may take; a larger one is streamed.
_RESIDENT_SHARE: Final = 0.75
#: Windows on the device: two for each of two evaluations, which then do not wait for each other.
_BUFFERS: Final = 4
#: Part of the memory that they may take together, and most bytes of each: at 50 GB/s 128 MiB take
#: 2.7 ms, against which the host's work for a window is little.
_WINDOWS_SHARE: Final = 0.25
_MOST_WINDOW_BYTES: Final = 128 << 20
#: Least rows of a window; with fewer, the host's work takes longer than the device's.
_LEAST_ROWS: Final = 4 * ALIGNED_ROWS
#: First row, and the row after the last one.
Span = tuple[int, int]
Chunk = TypeVar("Chunk")
NextWindow = Callable[[], Steps["ResidentDataset"]]


# -------------------------------------------------------------------------------------------- rows


class TiledRows(NamedTuple):
    """Rows of a data set as tiles of equal length, which are counted from its first row."""

    aligned: int
    """First row of the first tile."""
    first_row: int
    """First of the rows, counted from the first row of the first tile, as the next."""
    end_row: int
    first_tile: int
    """Number of the first tile."""
    tiles: int
    """Tiles that have some of the rows."""

    @classmethod
    def cut(cls, rows: Span, length: int) -> TiledRows:
        """Cut rows into tiles of a length."""
        first = rows[0] // length
        aligned = first * length
        end = rows[1] - aligned
        return cls(aligned, rows[0] - aligned, end, first, -(-end // length))


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
    """Return the range of `cut_rows` that has most rows, and so touches most blocks."""
    return max(spans, key=lambda span: span[1] - span[0])


def rows_that_fit(size: int, row_bytes: int, least: int) -> int:
    """Return the rows for which some bytes have room: a power of two, not less than ``least``."""
    return 1 << (max(size // row_bytes, least).bit_length() - 1)


# ------------------------------------------------------------------------------ resident data sets


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

        Kernels may read a window if they are launched on the context's stream before the next call,
        or before the end of the block.

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


def upload(device: CudaDevice, dataset: Dataset) -> ResidentDataset:
    """Copy a data set to the device.

    Raises:
        ResourceExhaustedError: if the device has no room for it.
    """
    layout = dataset.layout
    stride = -(-layout.rows // ROW_MULTIPLE) * ROW_MULTIPLE
    size = (layout.columns * stride + _SLACK_ROWS) * layout.dtype.itemsize
    with device.stream() as context:
        memory = device.allocate(size)
        context.clear(memory.ptr, size)
        columns = device.cupy.ndarray((layout.columns, stride), layout.dtype, memptr=memory)
        resident = ResidentDataset(dataset, columns)
        for number, column in enumerate(dataset.matrix):
            source, address = column.view(np.uint8), resident.address(number, 0)
            for chunk, start in enumerate(range(0, len(source), _CHUNK_BYTES)):
                octets, name = source[start : start + _CHUNK_BYTES], f"chunk {chunk % 2}"
                staging = context.pinned(name, _CHUNK_BYTES)[: len(octets)]
                context.wait(name)
                staging[:] = octets
                context.upload(address + start, staging)
                context.mark(name)
    return resident


# ------------------------------------------------------------------------------ streamed data sets


def must_stream(layout: Layout, memory: int) -> bool:
    """Return whether a data set is too large to lie in ``memory`` bytes of the device."""
    return layout.nbytes > _RESIDENT_SHARE * memory


def _window_bytes(memory: int) -> int:
    """Return the bytes of a window, by the bytes of device memory."""
    return min(int(memory * _WINDOWS_SHARE) // _BUFFERS, _MOST_WINDOW_BYTES)


def window_rows(layout: Layout, memory: int) -> int:
    """Return the rows of a window: a power of two, by the bytes of device memory.

    Raises:
        ResourceExhaustedError: if the memory has no room for the windows.
    """
    row_bytes = layout.columns * layout.dtype.itemsize
    most = _window_bytes(memory) // row_bytes - ALIGNED_ROWS
    if most < _LEAST_ROWS:
        needed = int(_BUFFERS * (_LEAST_ROWS + ALIGNED_ROWS) * row_bytes / _WINDOWS_SHARE)
        raise ResourceExhaustedError(
            f"{memory} bytes of device memory are too few to stream {layout.columns} columns",
            "DEVICE_MEMORY",
            "Upload fewer variables, or raise --device-memory",
            needed=needed,
            available=memory,
        )
    return int(1 << (most.bit_length() - 1))


@dataclass(slots=True, eq=False)
class _Window:
    """A window that an evaluation has asked for."""

    source: StreamedDataset
    span: Span
    side: int = -1
    """Number of its buffer; -1 until it has one."""
    begun: Future[None] = field(default_factory=Future)
    """Done when the copy of its rows has been launched."""


class WindowBuffers:
    """Device memory of windows, which all streamed data sets of an engine use in turn.

    Raises:
        ResourceExhaustedError: if the device has no room for it.
    """

    def __init__(self, device: CudaDevice) -> None:
        size = _window_bytes(device.memory_limit) + 8 * _SLACK_ROWS
        self.memory = [device.allocate(size) for _ in range(_BUFFERS)]
        self._copies = [device.new_stream(urgent=True) for _ in range(_BUFFERS)]
        self._lock = threading.Lock()
        self._free = deque(range(_BUFFERS))
        self._waiting: deque[_Window] = deque()

    def ask(self, window: _Window) -> None:
        """Have a window filled once it is its turn."""
        with self._lock:
            self._waiting.append(window)
        self._fill()

    def let_wait(self, context: StreamContext, window: _Window) -> None:
        """Let a stream wait for the rows of a window whose copy has begun."""
        context.wait_for(self._copies[window.side], "filled")

    def end(self, window: _Window, context: StreamContext) -> None:
        """Give the buffer of a window to others, or cease to wait for one.

        Kernels that have been launched on the context's stream may still read the rows.
        """
        with self._lock:
            if window.side < 0:
                self._waiting.remove(window)
                return
            # A window that no kernel has read may still be filled. The pages are unlocked after a
            # wait for the context's stream, which therefore waits for the copy, too.
            self.let_wait(context, window)
            context.mark("window read")
            self._copies[window.side].wait_for(context, "window read")
            self._free.append(window.side)
        self._fill()

    def _fill(self) -> None:
        """Launch the copies of the windows whose turn it is."""
        begun = []
        with self._lock:
            while self._free and self._waiting:
                window = self._waiting.popleft()
                window.side = self._free.popleft()
                window.source.copy(self._copies[window.side], window.span, window.side)
                self._copies[window.side].mark("filled")
                begun.append(window)
        for window in begun:  # an evaluation that wakes may ask for windows
            window.begun.set_result(None)


class StreamedDataset(ResidentDataset):
    """A data set in the host's memory, of which windows of rows pass through the device.

    Args:
        device: that evaluates.
        dataset: whose arrays stay valid as long as this is used.
        buffers: the windows.

    Raises:
        ResourceExhaustedError: if windows are too small for the columns.
    """

    def __init__(self, device: CudaDevice, dataset: Dataset, buffers: WindowBuffers) -> None:
        layout = dataset.layout
        rows = window_rows(layout, device.memory_limit)
        shape = layout.columns, rows + ALIGNED_ROWS
        self._windows = [
            device.cupy.ndarray(shape, layout.dtype, memptr=memory) for memory in buffers.memory
        ]
        super().__init__(dataset, self._windows[0], window_rows=rows)
        self._device = device
        self.buffers = buffers
        weakref.finalize(self, device.lock_pages(dataset.matrix)).atexit = False

    is_streamed = True

    @contextmanager
    def windows(
        self, spans: Sequence[Span], context: StreamContext, cancelled: NDArray[np.uint8]
    ) -> Iterator[NextWindow]:
        """Lend a function that returns windows; see `ResidentDataset.windows`.

        Nothing is copied before it is called, so that the batch, which the evaluation copies to the
        device before, does not wait behind rows.
        """
        coming = (_Window(self, span) for span in spans)
        asked: deque[_Window] = deque()
        is_first_used = False

        def next_window() -> Steps[ResidentDataset]:
            nonlocal is_first_used
            self._device.use()
            if is_first_used:
                self.buffers.end(asked.popleft(), context)
            is_first_used = True
            for window in islice(coming, 2 - len(asked)):
                asked.append(window)
                self.buffers.ask(window)
            while not asked[0].begun.done():
                yield asked[0].begun
                check_cancelled(cancelled)  # a cancelled request goes on at once
            self._device.use()
            self.buffers.let_wait(context, asked[0])
            return self._window(asked[0].span, asked[0].side)

        try:
            yield next_window
        finally:
            self._device.use()
            for window in asked:
                self.buffers.end(window, context)

    def _window(self, span: Span, side: int) -> ResidentDataset:
        first = span[0] // ALIGNED_ROWS * ALIGNED_ROWS
        return ResidentDataset(self.dataset, self._windows[side], first)

    def copy(self, copies: StreamContext, span: Span, side: int) -> None:
        """Launch the copy of a span's rows, from the aligned row before it on."""
        window = self._window(span, side)
        for number, column in enumerate(self.dataset.matrix):
            source = column[window.first_row : span[1]]
            copies.upload(window.address(number, window.first_row), source)


# ---------------------------------------------------------------------------------------- launches


def run_chunks(
    device: CudaDevice,
    context: StreamContext,
    resident: ResidentDataset,
    spans: Sequence[Span],
    chunks: Sequence[Chunk],
    cancelled: NDArray[np.uint8],
    launch: Callable[[ResidentDataset, int, Chunk, int], Callable[[], None]],
    result_bytes: int,
    *,
    overlap: bool = True,
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
            {side}``. It is given the data set or window that has the rows, the number of the
            span, the chunk, and the side, 0 and 1 in turn: one chunk at a time uses the buffers of
            a side. It returns a function that copies the results, which is called when the stream
            has passed all launches of the chunk.
        result_bytes: of all chunks on all rows.
        overlap: whether a chunk may be launched before the results of the last one are copied.

    Returns:
        Nanoseconds of the kernels.
    """
    count = len(spans) * len(chunks)
    each, ahead = result_bytes // count, int(overlap and result_bytes > 0)
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
