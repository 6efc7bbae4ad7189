"""Streams of a device, each with its events and its buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.interface import Steps

_HOST_TO_DEVICE: Final = 1
_DEVICE_TO_HOST: Final = 2
#: cudaSuccess and cudaErrorNotReady.
_SUCCESS: Final = 0
_NOT_READY: Final = 600


@dataclass(slots=True)
class _Passing:
    """An event that a stream is about to pass; implements `DeviceWork`."""

    runtime: Any
    event: Any
    has_passed: bool = False
    """Whether `done` has found so, and no failure."""

    def done(self) -> bool:
        """Return whether the stream has passed it, or has failed."""
        status = self.runtime.eventQuery(self.event.ptr)
        self.has_passed = status == _SUCCESS
        return bool(status != _NOT_READY)

    def result(self) -> None:
        """Wait until the stream has passed it."""
        self.event.synchronize()


class StreamContext:
    """A stream with named events, and with named buffers that grow as needed and are kept.

    Args:
        cuda: ``cupy.cuda``.
        functions: from `driver_calls.driver_functions`.
        allocate: `CudaDevice.allocate`.
    """

    def __init__(
        self, cuda: Any, functions: NDArray[np.int64], allocate: Callable[[int], Any]
    ) -> None:
        self._cuda = cuda
        self.functions = functions
        """Addresses of the driver functions that `driver_calls` has."""
        self._allocate = allocate
        self.stream = cuda.Stream(non_blocking=True)
        self.handle = int(self.stream.ptr)
        """The driver's handle of the stream."""
        self._events: dict[str, Any] = {}
        self._buffers: dict[str, Any] = {}
        self._pinned: dict[str, Any] = {}

    def buffer(self, name: str, size: int) -> int:
        """Return the address of ``size`` bytes of device memory; growing loses the content.

        Raises:
            ResourceExhaustedError: if the device has no room.
        """
        held = self._buffers.get(name)
        if held is None or held.mem.size < size:
            self._buffers.pop(name, None)
            del held
            self.stream.synchronize()
            held = self._buffers[name] = self._allocate(size)
        return int(held.ptr)

    def pinned(self, name: str, size: int) -> NDArray[np.uint8]:
        """Return page-locked host memory, uint8 [size]; growing loses the content."""
        held = self._pinned.get(name)
        if held is None or len(held) < size:
            self.stream.synchronize()
            memory = self._cuda.alloc_pinned_memory(max(size, 1))
            held = self._pinned[name] = np.frombuffer(memory, np.uint8, max(size, 1))
        return held[:size]

    def release(self) -> None:
        """Drop the device buffers; the stream must be idle."""
        self._buffers.clear()

    def check_executed(self, status: int) -> None:
        """Raise a CUDADriverError for the driver's status of executed commands, if it is not 0."""
        if status:
            raise self._cuda.driver.CUDADriverError(status)

    def upload(self, address: int, source: NDArray[Any]) -> None:
        """Copy page-locked host memory to the device, in stream order."""
        self._cuda.runtime.memcpyAsync(
            address, source.ctypes.data, source.nbytes, _HOST_TO_DEVICE, self.stream.ptr
        )

    def download(self, target: NDArray[Any], address: int) -> None:
        """Copy device memory to page-locked host memory, in stream order."""
        self._cuda.runtime.memcpyAsync(
            target.ctypes.data, address, target.nbytes, _DEVICE_TO_HOST, self.stream.ptr
        )

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
        self.event(name).record(self.stream)

    def event(self, name: str) -> Any:
        """Return the CuPy event of a name, which may not have been recorded yet."""
        if name not in self._events:
            self._events[name] = self._cuda.Event()
        return self._events[name]

    def reach(self, name: str) -> Steps[None]:
        """Wait until the stream has passed the event ``name``; the engine works on meanwhile."""
        passing = _Passing(self._cuda.runtime, self._events[name])
        yield passing
        if not passing.has_passed:
            self.wait(name)  # raises what has gone wrong

    def wait(self, name: str) -> None:
        """Block until the stream has passed the event ``name``, if it was ever recorded."""
        if name in self._events:
            self._events[name].synchronize()

    def wait_for(self, other: StreamContext, name: str) -> None:
        """Let what is asked of this stream from now on wait for another stream's last event."""
        self.stream.wait_event(other.event(name))

    def nanoseconds(self, start: str, end: str) -> int:
        """Return the device time between two events that the stream has passed."""
        elapsed = self._cuda.get_elapsed_time(self._events[start], self._events[end])
        return int(elapsed * 1e6)
