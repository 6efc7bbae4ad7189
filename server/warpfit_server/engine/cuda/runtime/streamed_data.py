"""Data sets that are larger than the device's memory: they pass through it in windows of rows.

The columns stay in the host's memory, page-locked, so that the device reads them by itself. There
are a few buffers for windows on the device, each with a stream that fills it. An evaluation has two
of them at most: while kernels run on one window, the next one is copied. Nobody on the host waits
for that: the streams wait for each other::

    buffer 0                      buffer 1                      computation
    copy window 0                 copy window 1                 wait for window 0, run the kernels
    wait for its kernels          wait for its kernels          wait for window 1, run the kernels
    copy window 2                 copy window 3                 ...

Evaluations get buffers in the order in which they ask for windows. So two at the same time do not
wait for each other's kernels, and more of them take turns from window to window.

A window ends where a node of the tree of sums ends. So what is summed up of each window, added up
as the tree says, has the bits that it would have if all rows were on the device.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset, Layout
from warpfit.errors import ResourceExhaustedError
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.resident_data import (
    ALIGNED_ROWS,
    SLACK_ROWS,
    NextWindow,
    ResidentDataset,
    Span,
    check_cancelled,
)
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.interface import Steps

#: Part of the memory that a data set may take; a larger one is streamed.
_RESIDENT_SHARE: Final = 0.75
#: Windows on the device: two each for as many evaluations as shall not wait for each other.
_BUFFERS: Final = 4
#: Part of the memory that they may take together, and most bytes of each: at 50 GB/s 128 MiB take
#: 2.7 ms, against which the host's work for a window is little.
_WINDOWS_SHARE: Final = 0.25
_MOST_WINDOW_BYTES: Final = 128 << 20
#: Bytes after a window that a kernel may read but never uses.
_SLACK_BYTES: Final = 8 * SLACK_ROWS
#: Least rows of a window; with fewer, the host's work takes longer than the device's.
_LEAST_ROWS: Final = 4 * ALIGNED_ROWS


def must_stream(layout: Layout, memory: int) -> bool:
    """Return whether a data set is too large to lie in so many bytes of device memory."""
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
        size = _window_bytes(device.memory_limit) + _SLACK_BYTES
        self.memory = [device.allocate(size) for _ in range(_BUFFERS)]
        self._copies = [device.new_stream() for _ in range(_BUFFERS)]
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

        What has been asked of the context's stream may still read the rows.
        """
        with self._lock:
            if window.side < 0:
                self._waiting.remove(window)
                return
            # A window that nobody has read may still be filled: whoever waits for the context's
            # stream, before the pages are unlocked, waits for that, too.
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
        for window in begun:  # what they wake may ask for windows
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

        Nothing is copied before it is called, so that what the evaluation itself copies to the
        device before does not wait behind rows.
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
