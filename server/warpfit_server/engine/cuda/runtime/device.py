"""One CUDA device: calls of its driver by compiled code, and its memory and streams through CuPy.

Compiled code calls the driver in a fraction of the time that Python needs. It takes integers from
records: a tuple of them takes ten times as long to hand over.

CuPy is imported when a `CudaDevice` is made, so that the package can be imported without it.
"""

from __future__ import annotations

import ctypes
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import ResourceExhaustedError, UnavailableError
from warpfit_server.compile_cache import check_private, default_cache_directory
from warpfit_server.engine.interface import Arithmetic, Steps
from warpfit_server.engine.native.intrinsics import call_c, call_launch, inlined

_LOG: Final = logging.getLogger("warpfit.engine")
#: Addresses of functions of the driver and of C; ``launches_held`` is 1 while modules are being
#: loaded, until when launches wait.
DRIVER: Final = np.dtype(
    [
        (name, np.int64)
        for name in ("upload", "launch", "record", "load_module", "sleep", "launches_held")
    ]
)
#: Microseconds between two looks at that word.
POLL_MICROSECONDS: Final = 100
#: Codes of the types in structs of arguments, as NumPy has them.
_TYPES: Final = {
    **{"int": "i4", "unsigned": "u4", "long long": "i8", "unsigned long long": "u8"},
    "double": "f8",
}
#: Share of the device's memory that is used by default; the driver needs the rest.
_DEFAULT_SHARE: Final = 0.9
#: Part of the memory limit that the results of one launch may take.
_RESULTS_SHARE: Final = 1 / 8
#: Number of the device; ``CUDA_VISIBLE_DEVICES`` says which one that is.
_DEVICE: Final = 0
#: Bytes of each block's shared memory that CUDA reserves.
_RESERVED_BYTES: Final = 1024
# Priorities of streams: the lowest there is, and one above it.
_PATIENT: Final = 0
_URGENT: Final = -1
# Numbers of the driver and of the runtime.
_DYNAMIC_SHARED_SIZE: Final = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_HOST_TO_DEVICE: Final = 1  # cudaMemcpyHostToDevice
_DEVICE_TO_HOST: Final = 2  # cudaMemcpyDeviceToHost
_SUCCESS: Final = 0  # cudaSuccess
_OUT_OF_MEMORY: Final = 2  # cudaErrorMemoryAllocation
_NOT_READY: Final = 600  # cudaErrorNotReady

# ------------------------------------------------------------------------------ calls of the driver


def driver_functions() -> NDArray[np.void]:
    """Return a record of `DRIVER`, [1].

    Raises:
        OSError: if there is no driver.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    found = (
        driver.cuMemcpyHtoDAsync_v2,
        driver.cuLaunchKernel,
        driver.cuEventRecord,
        driver.cuModuleLoadData,
        ctypes.CDLL(None).usleep,
    )
    addresses = [ctypes.cast(one, ctypes.c_void_p).value for one in found]
    return np.array([(*addresses, 0)], DRIVER)


def wait_while_held(functions: NDArray[np.void]) -> None:
    """Wait before a launch by Python while modules are being loaded, as `launch` does."""
    while functions["launches_held"][0]:
        time.sleep(1e-6 * POLL_MICROSECONDS)


def argument_struct(source: str, name: str) -> np.dtype[Any]:
    """Return the type of a struct by which a kernel takes its arguments, as its source has it."""
    declared = re.search(rf"^struct {name} {{(.*?)^}};", source, re.DOTALL | re.MULTILINE)
    assert declared, f"the source has no struct {name}"
    found = re.findall(r"^ *(?:const )?(\w[\w ]*?)(\*?) (\w+);", declared[1], re.MULTILINE)
    fields = [(field, "u8" if star else _TYPES[kind]) for kind, star, field in found]
    return np.dtype(fields, align=True)  # a pointer is an address


def argument_type(struct: np.dtype[Any]) -> type[ctypes.Structure]:
    """Return the class of ctypes for a struct, which Python fills in faster than a record.

    Its instances have no attributes but the fields.
    """
    kinds = [struct[name] for name in struct.names or ()]
    fields = list(zip(struct.names or (), map(np.ctypeslib.as_ctypes_type, kinds), strict=True))
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})


def as_record(numbers: Any) -> NDArray[Any]:
    """Return a named tuple of integers as a record, [1]."""
    return np.array([numbers], [(name, np.int64) for name in numbers._fields])


@inlined
def upload(functions: Any, stream: int, address: int, source: int, size: int) -> int:
    """Copy host memory to the device, given both addresses; return the driver's status.

    Memory that is page-locked is copied once the stream gets there. From other memory the driver
    itself copies first, before it returns.
    """
    places = np.int64(address), np.int64(source)
    return call_c(functions[0].upload, (*places, np.int64(size), stream))  # type: ignore[no-any-return]


@inlined
def record(functions: Any, stream: int, event: int) -> int:
    """Record an event, given the driver's handle; return the driver's status."""
    return call_c(functions[0].record, (event, stream))  # type: ignore[no-any-return]


@inlined
def launch(
    functions: Any, stream: int, kernel: int, grid: Any, threads: Any, shared: int, arguments: Any
) -> int:
    """Launch a kernel, given its handle; return the driver's status.

    ``arguments`` are records, each of which is an argument by value.
    """
    places = np.int64(arguments.ctypes.data) + arguments.itemsize * np.arange(len(arguments))
    return launch_at(functions, stream, kernel, grid, threads, shared, places)


@inlined
def launch_at(
    functions: Any, stream: int, kernel: int, grid: Any, threads: Any, shared: int, places: Any
) -> int:
    """Launch a kernel as `launch` does, given the address of each argument."""
    while functions[0].launches_held != 0:
        call_c(functions[0].sleep, (np.int64(POLL_MICROSECONDS),))
    sizes = (grid[0], grid[1], np.int64(1), threads[0], threads[1], np.int64(1), np.int64(shared))
    pointers = np.int64(places.ctypes.data)
    return call_launch(functions[0].launch, (kernel, *sizes, stream, pointers, np.int64(0)))  # type: ignore[no-any-return]


# -------------------------------------------------------------------------------------- the device


class LaunchWork(NamedTuple):
    """Most work of one launch for each multiprocessor.

    A device runs launches in the order in which it gets them, so large work is launched in pieces,
    between which other evaluations get their turn.
    """

    compiled: int
    """Token-rows of compiled kernels."""
    interpreted: int
    """Token-rows of the interpreter, which runs at half the rate of compiled kernels."""
    differentiated: float
    """Instructions x rows of the interpreter of derivatives."""


#: About 2 ms of an H200.
LAUNCH_WORK: Final = {
    Arithmetic.FAST: LaunchWork(180_000_000, 90_000_000, 12e6),
    Arithmetic.PRECISE: LaunchWork(90_000_000, 45_000_000, 10e6),
    Arithmetic.DOUBLE: LaunchWork(45_000_000, 22_500_000, 4e6),
}


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
        functions: from `driver_functions`.
        allocate: `CudaDevice.allocate`.
        priority: of the stream's kernels.
    """

    def __init__(
        self, cuda: Any, functions: NDArray[np.void], allocate: Callable[[int], Any], priority: int
    ) -> None:
        self._cuda = cuda
        self.functions = functions
        """Record of `DRIVER`."""
        self._allocate = allocate
        self.stream = cuda.Stream(non_blocking=True, priority=priority)
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
            self.wait(name)  # raises the error

    def wait(self, name: str) -> None:
        """Block until the stream has passed the event ``name``, if it was ever recorded."""
        if name in self._events:
            self._events[name].synchronize()

    def wait_for(self, other: StreamContext, name: str) -> None:
        """Let all further work of this stream wait for the last event of another stream."""
        self.stream.wait_event(other.event(name))

    def nanoseconds(self, start: str, end: str) -> int:
        """Return the device time between two events that the stream has passed."""
        elapsed = self._cuda.get_elapsed_time(self._events[start], self._events[end])
        return int(elapsed * 1e6)


class CudaDevice:
    """The first visible device with its memory pool and its stream contexts.

    Args:
        memory_limit: bytes for data sets, results and scratch; None for 90% of ``share``.
        cache_directory: where compiled code is kept; None for `default_cache_directory`.
        share: part of the device's memory that is for this process.

    Raises:
        UnavailableError: if CuPy is not installed or the device does not answer.
        InvalidArgumentError: if others could have written to the cache directory.
    """

    def __init__(
        self,
        memory_limit: int | None = None,
        cache_directory: Path | None = None,
        share: float = 1.0,
    ) -> None:
        try:
            import cupy
        except ImportError as error:
            raise UnavailableError(
                "CuPy is not installed",
                "NO_CUPY",
                "pip install '.[cuda13]' (or cuda12), or run with --devices cpu",
            ) from error
        except OSError as error:  # CuPy creates its cache directory on import
            raise UnavailableError(
                f"CuPy cannot be loaded: {error}",
                "NO_CUPY",
                "Let --cache-dir name a directory that can be written, or run with --devices cpu",
            ) from error
        self.cupy = cupy
        self.cache_directory = cache_directory or default_cache_directory()
        check_private(self.cache_directory)
        runtime = self.cupy.cuda.runtime
        try:
            runtime.setDevice(_DEVICE)
            properties = runtime.getDeviceProperties(_DEVICE)
            driver = runtime.driverGetVersion()
        except runtime.CUDARuntimeError as error:
            raise UnavailableError(
                f"the CUDA device does not answer: {error}",
                "NO_CUDA_DEVICE",
                "Check nvidia-smi, or run with --devices cpu",
            ) from error
        self.driver = f"{driver // 1000}.{driver % 1000 // 10}"
        self.name: str = properties["name"].decode()
        self.memory: int = properties["totalGlobalMem"]
        self.multiprocessors: int = properties["multiProcessorCount"]
        self.compute_capability = (properties["major"], properties["minor"])
        self.memory_limit = memory_limit or int(self.memory * share * _DEFAULT_SHARE)
        self._pool = self.cupy.cuda.MemoryPool()
        self._pool.set_limit(size=self.memory_limit)
        self._idle: list[StreamContext] = []
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._stays_pageable = False
        """Whether it has been logged that memory cannot be page-locked."""
        self.functions = driver_functions()
        """Record of `DRIVER`."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """Exceptions by which the driver and the runtime report errors."""
        cuda = self.cupy.cuda
        return cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError

    def is_out_of_memory(self, error: Exception) -> bool:
        """Return whether one of `errors` means nothing but a lack of memory."""
        return getattr(error, "status", None) == _OUT_OF_MEMORY

    @property
    def architecture(self) -> int:
        """Compute capability as one number: 90 for 9.0."""
        major, minor = self.compute_capability
        return int(major) * 10 + int(minor)

    def shared_bytes(self, blocks: int) -> int:
        """Return the bytes of shared memory of a block, if ``blocks`` share a multiprocessor."""
        attributes = self.cupy.cuda.Device(_DEVICE).attributes
        each = attributes["MaxSharedMemoryPerMultiprocessor"] // blocks - _RESERVED_BYTES
        return int(min(each, attributes["MaxSharedMemoryPerBlockOptin"])) // 16 * 16

    def allow_shared(self, function: Any, size: int) -> None:
        """Allow launches of a function to use up to ``size`` bytes of dynamic shared memory."""
        self.cupy.cuda.driver.funcSetAttribute(function.ptr, _DYNAMIC_SHARED_SIZE, size)

    def use(self) -> None:
        """Make this the calling thread's current device; CUDA requires it once in each thread."""
        if not getattr(self._thread, "uses", False):
            self.cupy.cuda.runtime.setDevice(_DEVICE)
            self._thread.uses = True

    def allocate(self, size: int) -> Any:
        """Allocate device memory, which is freed when the returned CuPy pointer is dropped.

        Raises:
            ResourceExhaustedError: with the needed and the available bytes.
        """
        out_of_memory = self.cupy.cuda.memory.OutOfMemoryError
        try:
            return self._pool.malloc(size)
        except out_of_memory:
            self.trim()
        try:
            return self._pool.malloc(size)
        except out_of_memory as error:
            raise self.no_room(size) from error

    def no_room(self, size: int | None = None) -> ResourceExhaustedError:
        """Return the error for memory that has no room for ``size`` bytes.

        None is for memory that CUDA allocates itself, such as a graph or page-locked memory; it
        does not say which memory was short.
        """
        available = self.available()
        short = f"the device has {available} bytes left where {size} are needed"
        if size is not None and size <= available:
            short = f"the device has {available} bytes left, but not {size} in one piece"
        elif size is None:
            short = (
                f"CUDA lacks memory: the device has {available} bytes left, and the host perhaps "
                "none that can be page-locked"
            )
        return ResourceExhaustedError(
            short,
            "DEVICE_MEMORY",
            "Ask for fewer programs, parameter vectors or rows a call, or unload data sets",
            needed=size,
            available=available,
        )

    def result_bytes(self, most: int) -> int:
        """Return how many bytes of results a launch may leave on the device, ``most`` or fewer."""
        return min(most, int(self.memory_limit * _RESULTS_SHARE))

    def available(self) -> int:
        """Return the bytes that can still be allocated, by the limit and on the device."""
        free, _ = self.cupy.cuda.runtime.memGetInfo()
        unused = self._pool.total_bytes() - self._pool.used_bytes()
        return int(max(0, min(self.memory_limit - self._pool.used_bytes(), free + unused)))

    def trim(self) -> None:
        """Free the buffers of idle streams and the unused blocks of the pool."""
        with self._lock:
            for context in self._idle:
                context.release()
        self._pool.free_all_blocks()

    def lock_pages(self, array: NDArray[Any]) -> Callable[[], None]:
        """Page-lock an array of the host, so that streams copy from it at the full rate.

        Returns:
            A function that unlocks it.
        """
        self.use()
        runtime = self.cupy.cuda.runtime
        try:
            runtime.hostRegister(array.ctypes.data, array.nbytes, 0)
        except runtime.CUDARuntimeError as error:
            level = logging.DEBUG if self._stays_pageable else logging.WARNING
            self._stays_pageable = True
            told = array.nbytes, str(error)  # the error itself would keep the array
            _LOG.log(level, "%d bytes stay pageable, which is slow to copy: %s", *told)
            return lambda: None

        def unlock() -> None:
            self.use()
            runtime.hostUnregister(array.ctypes.data)

        return unlock

    def new_stream(self, *, urgent: bool) -> StreamContext:
        """Create a stream that `stream` does not lend.

        As blocks of a kernel end, those of kernels of urgent streams take their place first.
        Searches always have something to compute and are not urgent, so calls hardly wait for them.
        """
        priority = _URGENT if urgent else _PATIENT
        return StreamContext(self.cupy.cuda, self.functions, self.allocate, priority)

    @contextmanager
    def stream(self) -> Iterator[StreamContext]:
        """Lend an idle stream with its buffers, or a new one."""
        self.use()
        with self._lock:
            context = self._idle.pop() if self._idle else None
        context = context or self.new_stream(urgent=True)
        try:
            yield context
        finally:
            self.use()  # the work may have been continued by another thread
            context.stream.synchronize()
            with self._lock:
                self._idle.append(context)

    def close(self) -> None:
        """Free all memory but that of data sets."""
        self.use()
        self.trim()
        with self._lock:
            self._idle.clear()


class PageLocks:
    """Page-locks memory of other processes, by a thread of its own: it takes some milliseconds.

    The driver itself copies memory that is not locked yet, or cannot be, at a fraction of the rate.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        # Reentrant, so that the collection of an owner may put something into it anywhere.
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="page locks", daemon=True)
        self._thread.start()

    def lock(self, owner: object, memory: NDArray[np.uint8]) -> None:
        """Lock memory soon, and unlock it when its owner is gone; it stays mapped until then."""
        unlocks: list[Callable[[], None]] = []

        def lock() -> None:
            unlocks.append(self._device.lock_pages(memory))

        def unlock() -> None:
            unlocks.pop()()

        self._work.put(lock)
        weakref.finalize(owner, self._work.put, unlock).atexit = False

    def close(self) -> None:
        """Finish the work of the thread, and end it."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # the driver has failed, and requests say so
                _LOG.warning("memory was not locked or unlocked: %s", error)
            del work  # else the memory stays mapped
