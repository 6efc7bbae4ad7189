"""Streams of a device, each with its events and its buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.cuda.runtime.submission import Submission

if TYPE_CHECKING:
    from warpfit_server.engine.cuda.runtime.device import CudaDevice

_HOST_TO_DEVICE: Final = 1
_DEVICE_TO_HOST: Final = 2
Kept = TypeVar("Kept")


@dataclass(slots=True)
class Elapsed:
    """Time between two marks."""

    start: str
    end: str
    nanoseconds: int = 0


class StreamContext:
    """A stream, events to time it, and named buffers that grow as needed and are kept."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._cuda = device.cupy.cuda
        self.stream = self._cuda.Stream(non_blocking=True)
        self._events: dict[str, Any] = {}
        self._buffers: dict[str, Any] = {}
        self._pinned: dict[str, Any] = {}
        self._submission: Submission | None = None
        self._settled = False
        self.handle = int(self.stream.ptr)
        """What the driver knows the stream by."""
        self._kept: dict[Callable[[], Any], Any] = {}

    @property
    def functions(self) -> NDArray[np.int64]:
        """For `Submission`."""
        return self._device.functions

    def buffer(self, name: str, size: int) -> int:
        """Address of at least ``size`` bytes of device memory; contents do not survive growth.

        Raises:
            ResourceExhaustedError: if the device has no room.

        """
        held = self._buffers.get(name)
        if held is None or held.mem.size < size:
            self._buffers.pop(name, None)
            del held
            self.stream.synchronize()
            held = self._buffers[name] = self._device.allocate(size)
        return int(held.ptr)

    def pinned(self, name: str, size: int) -> NDArray[np.uint8]:
        """At least ``size`` bytes of page-locked host memory, uint8 [size]."""
        held = self._pinned.get(name)
        if held is None or len(held) < size:
            self.stream.synchronize()
            memory = self._cuda.alloc_pinned_memory(max(size, 1))
            held = self._pinned[name] = np.frombuffer(memory, np.uint8, max(size, 1))
        return held[:size]

    def keep(self, make: Callable[[], Kept]) -> Kept:
        """What ``make`` makes, once for this stream."""
        if make not in self._kept:
            self._kept[make] = make()
        kept: Kept = self._kept[make]
        return kept

    def release(self) -> None:
        """Drop the device buffers; the stream must be idle."""
        self._buffers.clear()

    @contextmanager
    def in_one_go(self, elapsed: Elapsed) -> Iterator[None]:
        """Carry out at the end of the block, and wait for, what it asks of the stream.

        Uploads, downloads, launches and marks only; see `Submission`.
        """
        submission = self._submission = Submission(self.functions, self.handle)
        try:
            yield
            start, end = (self.event(name) for name in (elapsed.start, elapsed.end))
            status, elapsed.nanoseconds = submission.run(start, end)
        finally:
            self._submission = None
        self.settled(status)

    def settled(self, status: int) -> None:
        """Take notice that work has been submitted and awaited by compiled code.

        Args:
            status: of the driver.

        Raises:
            CUDADriverError: if it is not 0.

        """
        if status:
            raise self._cuda.driver.CUDADriverError(status)
        self._settled = True

    def settle(self) -> None:
        """Wait for everything that was asked of the stream."""
        if not self._settled:
            self.stream.synchronize()
        self._settled = False

    def upload(self, address: int, source: NDArray[Any]) -> None:
        """Copy page-locked host memory to the device, in stream order."""
        if self._submission is not None:
            self._submission.upload(address, source)
            return
        self._cuda.runtime.memcpyAsync(
            address, source.ctypes.data, source.nbytes, _HOST_TO_DEVICE, self.stream.ptr
        )

    def download(self, target: NDArray[Any], address: int) -> None:
        """Copy device memory to page-locked host memory, in stream order."""
        if self._submission is not None:
            self._submission.download(target, address)
            return
        self._cuda.runtime.memcpyAsync(
            target.ctypes.data, address, target.nbytes, _DEVICE_TO_HOST, self.stream.ptr
        )

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        threads: tuple[int, int, int],
        arguments: Sequence[NDArray[Any]],
        shared: int = 0,
    ) -> None:
        """Launch a kernel.

        Args:
            kernel: the function.
            grid: blocks.
            threads: threads of a block.
            arguments: each an array of one value, passed as it is: a struct or a number.
            shared: bytes of dynamic shared memory.

        """
        if self._submission is not None:
            self._submission.launch(kernel, grid, threads, arguments, shared)
            return
        self._device.await_modules()
        kernel(grid, threads, tuple(map(_by_value, arguments)), shared, self.stream)

    def download_rows(self, target: NDArray[Any], address: int, pitch: int) -> None:
        """Copy rows that lie ``pitch`` bytes apart to a page-locked array [rows, columns]."""
        width = target.shape[1] * target.itemsize
        self._cuda.runtime.memcpy2DAsync(
            target.ctypes.data,
            width,
            address,
            pitch,
            width,
            target.shape[0],
            _DEVICE_TO_HOST,
            self.stream.ptr,
        )

    def clear(self, address: int, size: int) -> None:
        """Set device memory to zero, in stream order."""
        self._cuda.runtime.memsetAsync(address, 0, size, self.stream.ptr)

    def mark(self, name: str) -> None:
        """Record the event ``name`` at the current end of the stream."""
        event = self.event(name)
        if self._submission is not None:
            self._submission.record(event)
        else:
            event.record(self.stream)

    def event(self, name: str) -> Any:
        """Return the event of a name, which may not have been marked yet."""
        if name not in self._events:
            self._events[name] = self._cuda.Event()
        return self._events[name]

    def wait(self, name: str) -> None:
        """Block until the stream has passed the event ``name``, if it was ever marked."""
        if name in self._events:
            self._events[name].synchronize()

    def nanoseconds(self, start: str, end: str) -> int:
        """Device time between two events that the stream has passed."""
        elapsed = self._cuda.get_elapsed_time(self._events[start], self._events[end])
        return int(elapsed * 1e6)


def _by_value(argument: NDArray[Any]) -> NDArray[np.void]:
    """Hide the fields of a struct, which CuPy passes as it is but takes long to describe."""
    return argument.view(np.dtype((np.void, argument.nbytes)))
