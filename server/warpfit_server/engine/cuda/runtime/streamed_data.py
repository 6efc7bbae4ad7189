"""Data sets that are larger than the device's memory: they pass through it in windows of rows.

The columns stay in the host's memory, page-locked, so that the device reads them by itself. There
are two windows on the device. While kernels run on one of them, a stream of its own fills the
other::

    copy into windows 0 and 1
    for each window in turn:
        wait for its copy
        compute on it                  # meanwhile the other window is filled
        copy the rows after the other window's into it

A window ends where a node of the tree of sums ends. So what is summed up of each window, added up
as the tree says, has the bits that it would have if all rows were on the device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset, Layout
from warpfit.errors import ResourceExhaustedError
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.resident_data import (
    SLACK_ROWS,
    ResidentDataset,
    check_cancelled,
)
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.interface import Steps

#: Part of the memory that a data set may take; a larger one is streamed.
_RESIDENT_SHARE: Final = 0.75
#: Part of the memory that both windows may take together, and most bytes of each: at 50 GB/s
#: 128 MiB take 2.7 ms, against which the host's work for a window is little.
_WINDOWS_SHARE: Final = 0.25
_MOST_WINDOW_BYTES: Final = 128 << 20
#: Rows that the first row of a window is a multiple of: what kernels take for a block at most.
ALIGNED_ROWS: Final = 4096
#: Bytes after a window that a kernel may read but never uses.
_SLACK_BYTES: Final = 8 * SLACK_ROWS
#: Least rows of a window; with fewer, the host's work takes longer than the device's.
_LEAST_ROWS: Final = 4 * ALIGNED_ROWS


def must_stream(layout: Layout, memory: int) -> bool:
    """Return whether a data set is too large to lie in so many bytes of device memory."""
    return layout.nbytes > _RESIDENT_SHARE * memory


def _window_bytes(memory: int) -> int:
    """Return the bytes of a window, by the bytes of device memory."""
    return min(int(memory * _WINDOWS_SHARE) // 2, _MOST_WINDOW_BYTES)


def window_rows(layout: Layout, memory: int) -> int:
    """Return the rows of a window: a power of two, by the bytes of device memory.

    Raises:
        ResourceExhaustedError: if the memory has no room for two windows.

    """
    row_bytes = layout.columns * layout.dtype.itemsize
    most = _window_bytes(memory) // row_bytes - ALIGNED_ROWS
    if most < _LEAST_ROWS:
        needed = int(2 * (_LEAST_ROWS + ALIGNED_ROWS) * row_bytes / _WINDOWS_SHARE)
        raise ResourceExhaustedError(
            f"{memory} bytes of device memory are too few to stream {layout.columns} columns",
            "DEVICE_MEMORY",
            "Upload fewer variables, or raise --device-memory",
            needed=needed,
            available=memory,
        )
    return int(1 << (most.bit_length() - 1))


class WindowBuffers:
    """Device memory of two windows, which all streamed data sets of an engine use in turn.

    Raises:
        ResourceExhaustedError: if the device has no room for it.

    """

    def __init__(self, device: CudaDevice) -> None:
        size = _window_bytes(device.memory_limit) + _SLACK_BYTES
        self.memory = [device.allocate(size) for _ in range(2)]
        self._lock = threading.Lock()
        self._last: Future[None] = Future()
        self._last.set_result(None)

    def turn(self, cancelled: NDArray[np.uint8]) -> Steps[Any]:
        """Wait until no other evaluation uses the windows; return a context that ends the use."""
        own: Future[None] = Future()
        with self._lock:
            before, self._last = self._last, own
        try:
            while not before.done():
                yield before  # a cancelled request goes on at once
                check_cancelled(cancelled)
        except BaseException:  # nobody waits any more; the next one waits for those before
            before.add_done_callback(lambda _: own.set_result(None))
            raise
        ending = ExitStack()
        ending.callback(own.set_result, None)
        return ending


class StreamedDataset(ResidentDataset):
    """A data set in the host's memory, of which windows of rows pass through the device.

    Args:
        device: that evaluates.
        dataset: whose arrays stay valid as long as this is used.
        buffers: the windows.

    Raises:
        ResourceExhaustedError: if two windows are too small for the columns.

    """

    def __init__(self, device: CudaDevice, dataset: Dataset, buffers: WindowBuffers) -> None:
        super().__init__(dataset, None)
        layout = dataset.layout
        self._device = device
        self.buffers = buffers
        self.window_rows = window_rows(layout, device.memory_limit)
        shape = layout.columns, self.window_rows + ALIGNED_ROWS
        self._windows = [
            device.cupy.ndarray(shape, layout.dtype, memptr=memory) for memory in buffers.memory
        ]
        weakref.finalize(self, device.lock_pages(dataset.matrix)).atexit = False

    is_streamed = True

    def address(self, column: int, row: int) -> int:
        """Return 0: only windows are on the device."""
        return 0

    @property
    def stride(self) -> int:
        """Elements from one variable to the next in a window."""
        return int(self._windows[0].shape[1])

    def turn(self, cancelled: NDArray[np.uint8]) -> Steps[Any]:
        """Wait until no other evaluation uses the windows; return a context that ends the use."""
        return self.buffers.turn(cancelled)

    def windows(
        self, spans: Sequence[tuple[int, int]]
    ) -> Generator[tuple[ResidentDataset, tuple[int, int]]]:
        """Yield each span with a window that has its rows.

        The caller must have the turn, and must close the iterator before it ends that. The stream
        of the computation must have passed all work on a window before the next one is asked for.

        Args:
            spans: of at most `window_rows`, from `resident_data.cut_rows`.

        """
        whole = spans[-1][1] - spans[0][0]
        with self._device.stream() as copies:
            for number in range(min(2, len(spans))):
                self._copy(copies, spans[number], number)
            for number, span in enumerate(spans):
                copies.wait(f"window {number % 2}")
                self._device.use()
                yield self._window(span, number % 2, whole), span
                if number + 2 < len(spans):
                    self._device.use()
                    self._copy(copies, spans[number + 2], number % 2)

    def _window(self, span: tuple[int, int], side: int, whole: int) -> ResidentDataset:
        first = span[0] // ALIGNED_ROWS * ALIGNED_ROWS
        return ResidentDataset(self.dataset, self._windows[side], first, whole)

    def _copy(self, copies: StreamContext, span: tuple[int, int], side: int) -> None:
        """Launch the copy of a span's rows, from the aligned row before it on."""
        window = self._window(span, side, 0)
        for number, column in enumerate(self.dataset.matrix):
            source = column[window.first_row : span[1]]
            copies.upload(window.address(number, window.first_row), source)
        copies.mark(f"window {side}")
