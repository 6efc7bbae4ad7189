"""One CUDA device: its memory and streams, through CuPy.

CuPy is imported when a `CudaDevice` is made, so that the package can be imported without it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import ResourceExhaustedError, UnavailableError
from warpfit_server.engine.cuda.runtime.driver_calls import driver_functions
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.interface import Arithmetic
from warpfit_server.system.compile_cache import check_private, default_cache_directory

_LOG: Final = logging.getLogger("warpfit.engine")
#: Share of the device's memory that is used by default; the driver needs the rest.
_DEFAULT_SHARE: Final = 0.9
_ERROR_OUT_OF_MEMORY: Final = 2
#: Number of the device; ``CUDA_VISIBLE_DEVICES`` says which one that is.
_DEVICE: Final = 0
#: Bytes of each block's shared memory that CUDA reserves.
_RESERVED_BYTES: Final = 1024
#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
_DYNAMIC_SHARED_SIZE: Final = 8
#: Token-rows of a launch for each multiprocessor: about 2 ms of an H200.
_TOKEN_ROWS: Final = {
    Arithmetic.FAST: 180_000_000,
    Arithmetic.PRECISE: 90_000_000,
    Arithmetic.DOUBLE: 45_000_000,
}


def max_token_rows(arithmetic: Arithmetic, multiprocessors: int) -> int:
    """Return the most token-rows of one launch of compiled kernels.

    A device runs launches in the order in which it gets them, so large work is launched in pieces,
    between which other evaluations get their turn.
    """
    return _TOKEN_ROWS[arithmetic] * multiprocessors


def max_interpreted_token_rows(arithmetic: Arithmetic, multiprocessors: int) -> int:
    """Return the most token-rows of one launch of an interpreter.

    It runs at half the rate of compiled kernels.
    """
    return max_token_rows(arithmetic, multiprocessors) // 2


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
        self.cupy = _import_cupy()
        self.cache_directory = cache_directory or default_cache_directory()
        check_private(self.cache_directory)
        runtime = self.cupy.cuda.runtime
        try:
            runtime.setDevice(_DEVICE)
            properties = runtime.getDeviceProperties(_DEVICE)
            self.driver = _version(runtime.driverGetVersion())
        except runtime.CUDARuntimeError as error:
            raise UnavailableError(
                f"the CUDA device does not answer: {error}",
                "NO_CUDA_DEVICE",
                "Check nvidia-smi, or run with --devices cpu",
            ) from error
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
        """Addresses of the driver functions that `driver_calls` has."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """Exceptions by which the driver and the runtime report errors."""
        cuda = self.cupy.cuda
        return cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError

    def is_out_of_memory(self, error: Exception) -> bool:
        """Return whether one of `errors` means nothing but a lack of memory."""
        return getattr(error, "status", None) == _ERROR_OUT_OF_MEMORY

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
        """Return the error for memory that is too little for so many bytes.

        None is for what CUDA allocates itself, such as a graph or page-locked memory; it does not
        say which memory was short.
        """
        available = self.available()
        short = f"the device has {available} bytes left where {size} are needed"
        if size is None:
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
            What unlocks it.
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

    def new_stream(self) -> StreamContext:
        """Create a stream that is lent to nobody."""
        return StreamContext(self.cupy.cuda, self.functions, self.allocate)

    @contextmanager
    def stream(self) -> Iterator[StreamContext]:
        """Lend an idle stream with its buffers, or a new one."""
        self.use()
        with self._lock:
            context = self._idle.pop() if self._idle else None
        context = context or self.new_stream()
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

    What is not locked yet, or cannot be, is copied by the driver itself, at a fraction of the rate.
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
        """Finish what has been asked for, and end the thread."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # the driver has failed, and requests say so
                _LOG.warning("memory was not locked or unlocked: %s", error)
            del work  # else the memory stays mapped


def _import_cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise UnavailableError(
            "CuPy is not installed",
            "NO_CUPY",
            "pip install 'warpfit[cuda13]' (or cuda12), or run with --devices cpu",
        ) from error
    except OSError as error:  # CuPy creates its cache directory on import
        raise UnavailableError(
            f"CuPy cannot be loaded: {error}",
            "NO_CUPY",
            "Let --cache-dir name a directory that can be written, or run with --devices cpu",
        ) from error
    return cupy


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
