"""Segments: anonymous shared memory between the server's processes.

A segment is a memory file without a name (``memfd_create``): the kernel frees it when the last
process that maps it ends, however it ends, so nothing is left over after a crash, and it does not
depend on the size of ``/dev/shm``. Its file descriptor crosses over the socket of
`warpfit_server.ipc.channel`.
"""

from __future__ import annotations

import contextlib
import errno
import math
import mmap
import os
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from warpfit.errors import ResourceExhaustedError
from warpfit_server.system.machine import shortage, too_many_files

_SMALLEST: Final = 64 << 10


class Segment:
    """A piece of shared memory; arrays made by `array` keep the mapping alive."""

    descriptor = -1
    """File descriptor, owned by this object; -1 once closed."""

    def __init__(self, identifier: int, descriptor: int, size: int) -> None:
        self.identifier = identifier
        """Number that names the segment in messages."""
        self.size = size
        """Bytes."""
        self.owner = ""
        """Tenant whose bytes it may hold."""
        self.map = mmap.mmap(descriptor, size)
        """The mapping, whose single bytes are read in a fraction of the time of an array's."""
        self.descriptor = descriptor  # last: if mapping fails, the caller still owns it

    @classmethod
    def create(cls, identifier: int, size: int) -> Segment:
        """Allocate zeroed shared memory.

        Raises:
            ResourceExhaustedError: if the machine has none left, or this process no descriptor.
        """
        descriptor = -1
        try:
            descriptor = os.memfd_create("warpfit", os.MFD_CLOEXEC)
            os.truncate(descriptor, size)
            return cls(identifier, descriptor, size)
        except (OSError, ValueError) as error:
            if descriptor >= 0:
                os.close(descriptor)
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise too_many_files() from error
            raise ResourceExhaustedError(
                f"no shared memory for {size} bytes: {error}",
                "MEMORY",
                "Send smaller batches, or give the server more memory",
                needed=size,
            ) from error

    @classmethod
    def received(cls, identifier: int, descriptor: int | None, size: int) -> Segment:
        """Map a segment that another process has sent.

        ``descriptor`` is None if this process had no room for what came with the message.

        Raises:
            ResourceExhaustedError: if this process can open no more files, or has no memory left.
        """
        if descriptor is None:
            raise too_many_files()
        try:
            segment = cls(identifier, descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise shortage(error) or error from error
        segment.close_descriptor()  # nobody sends it on
        return segment

    def array(self, dtype: DTypeLike, shape: tuple[int, ...], offset: int = 0) -> NDArray[Any]:
        """View of the segment as an array, C order."""
        # np.frombuffer holds an export of the buffer, so the mapping cannot be closed under the
        # array; np.ndarray(buffer=...) would not.
        count = shape[0] if len(shape) == 1 else math.prod(shape)
        if not count:
            return np.empty(shape, dtype)
        found = np.frombuffer(self.map, dtype, count, offset)
        return found if len(shape) == 1 else found.reshape(shape)

    @cached_property
    def address(self) -> int:
        """Address of the mapping in this process, for compiled code."""
        return int(self.array(np.uint8, (self.size,)).ctypes.data)

    def write(self, data: memoryview, offset: int) -> None:
        """Copy bytes into the segment without the page faults that a fresh mapping costs."""
        while data:
            written = os.pwrite(self.descriptor, data, offset)
            data, offset = data[written:], offset + written

    def view(self) -> memoryview:
        """View of the segment as bytes."""
        return memoryview(self.map)

    def close(self) -> None:
        """Close descriptor and mapping; with arrays over it, the mapping goes with the last."""
        self.close_descriptor()
        with contextlib.suppress(BufferError):
            self.map.close()

    def close_descriptor(self) -> None:
        """Close the descriptor alone; Python's mapping keeps one of its own."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        """Close the descriptor of a segment that nobody closed."""
        self.close_descriptor()


class SegmentPool:
    """Allocates segments and keeps idle ones for reuse.

    What is in a segment is undefined until it is written; at worst it is what the same tenant wrote
    earlier, never another one's data.

    At most ``idle_bytes`` in ``idle_segments`` are kept, each of which takes two descriptors here
    and one in each engine. Those that have not been used for longest go first.
    """

    def __init__(self, idle_bytes: int, idle_segments: int = 64) -> None:
        self._most_idle_bytes = idle_bytes
        self._most_idle = idle_segments
        self._lock = threading.Lock()
        self._idle: dict[Segment, None] = {}
        """In the order in which they were released."""
        self._idle_bytes = 0
        self._next = 0
        self.on_close: list[Callable[[Segment], None]] = []
        """Called with each segment that will not be used again, for processes that map it."""

    def acquire(self, size: int, owner: str = "") -> Segment:
        """Return a segment of at least ``size`` bytes for a tenant, to give back with `release`."""
        capacity = max(_SMALLEST, 1 << (size - 1).bit_length())
        segment = self._reuse(capacity, owner)
        if segment is None:
            segment = self.create(capacity)
        elif segment.owner != owner:
            segment.array("u1", (segment.size,))[...] = 0
        segment.owner = owner
        return segment

    def _reuse(self, capacity: int, owner: str) -> Segment | None:
        """Take an idle segment, one of the same owner if there is one."""
        with self._lock:
            # The last one is likely to be in a cache.
            fitting = [segment for segment in reversed(self._idle) if segment.size == capacity]
            if not fitting:
                return None
            found = next((each for each in fitting if each.owner == owner), fitting[0])
            self._take(found)
            return found

    def create(self, size: int) -> Segment:
        """Return a fresh, zeroed segment of exactly ``size`` bytes that will not be reused.

        Idle segments make room for it if this process can open no more files, or has no memory.

        Raises:
            ResourceExhaustedError: if there is no room all the same.
        """
        with self._lock:
            self._next += 1
            identifier = self._next
        try:
            return Segment.create(identifier, size)
        except ResourceExhaustedError:
            if not self.trim():
                raise
            return Segment.create(identifier, size)

    def trim(self) -> bool:
        """Close all idle segments; return whether there were any."""
        return self._close_down_to(0, 0)

    def release(self, segment: Segment, *, is_clean: bool = True) -> None:
        """Take a segment back; close others if too much is idle.

        It ``is_clean`` if no other process writes to it any more; if not, it is closed.
        """
        if not is_clean or segment.size > self._most_idle_bytes:
            self._close(segment)
            return
        with self._lock:
            self._idle[segment] = None
            self._idle_bytes += segment.size
        self._close_down_to(self._most_idle, self._most_idle_bytes)

    def _close_down_to(self, count: int, nbytes: int) -> bool:
        with self._lock:
            closed = []
            while len(self._idle) > count or self._idle_bytes > nbytes:
                closed.append(next(iter(self._idle)))
                self._take(closed[-1])
        for segment in closed:
            self._close(segment)
        return bool(closed)

    def _take(self, segment: Segment) -> None:
        """Count a segment no longer as idle; under the lock."""
        del self._idle[segment]
        self._idle_bytes -= segment.size

    def _close(self, segment: Segment) -> None:
        segment.close()
        for forget in self.on_close:
            forget(segment)
