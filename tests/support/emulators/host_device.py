"""A CUDA device that is this machine's CPU: CuPy and the driver, as far as the engine uses them.

Kernels of CUDA C++ are compiled for the host when they are launched for the first time, and a
launch returns when they have run. The compiled tier, whose kernels are PTX, takes no batch.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.emulators.cuda_on_host import compile_for_host, kernels_of, launch_on_host
from warpfit_server.engine.cuda import engine, parts
from warpfit_server.engine.cuda.jit.tier import CompiledTier
from warpfit_server.engine.cuda.runtime import device
from warpfit_server.engine.cuda.runtime.compiler import CudaSource
from warpfit_server.engine.cuda.runtime.device import DRIVER

_MEMORY = 4 << 30
_DEVICE = {
    **{"name": b"host", "totalGlobalMem": _MEMORY},
    **{"multiProcessorCount": 2, "major": 9, "minor": 0},
}
_SHARED = {"MaxSharedMemoryPerMultiprocessor": 228 << 10, "MaxSharedMemoryPerBlockOptin": 227 << 10}
#: CUDA_ERROR_INVALID_VALUE.
_INVALID_VALUE = 1
#: What memory holds before something is written to it.
_GARBAGE = 0xA5
_WORD = ctypes.c_void_p


def install(patch: pytest.MonkeyPatch) -> None:
    """Have `CudaEngine` use the host for a device until ``patch`` is undone."""
    cupy = SimpleNamespace(cuda=_cuda(), ndarray=_Array, matmul=_matmul)
    patch.setitem(sys.modules, "cupy", cupy)
    patch.setattr(device, "driver_functions", _driver_functions)
    patch.setattr(
        CudaSource, "load",
        lambda source, _: SimpleNamespace(get_function=functools.partial(_Function, source.source)),
    )  # fmt: skip
    patch.setattr(CompiledTier, "supports", lambda *_: False)
    for name in ("begin_compiling", "compile_group"):
        patch.setattr(parts, name, lambda *_, **__: None)
    patch.setattr(engine, "_warm_up", lambda *_: None)


class _Error(RuntimeError):
    """An error of the driver or of the runtime."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class _Function:
    """A kernel; its handle is the address of this object."""

    def __init__(self, source: str, name: str) -> None:
        self.ptr = id(self)
        self._source, self._name = source, name

    def __call__(self, grid, threads, arguments, shared=0, stream=None):
        addresses = [argument.ctypes.data for argument in arguments]
        if not self.launch(grid, threads, addresses, shared):
            raise _Error(_INVALID_VALUE)

    def launch(self, grid: Any, threads: Any, arguments: Sequence[int], shared: int) -> bool:
        given = arguments[: len(kernels_of(self._source)[self._name])]
        return launch_on_host(_library(self._source), self._name, grid, threads, given, shared)


_library = functools.cache(functools.partial(compile_for_host, wraps=True))


@ctypes.CFUNCTYPE(ctypes.c_int, _WORD, _WORD, ctypes.c_size_t, _WORD)
def _upload(target: int, source: int, size: int, _: Any) -> int:
    ctypes.memmove(target, source, size)
    return 0


@ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.py_object, *[ctypes.c_uint] * 7, _WORD, ctypes.POINTER(_WORD), _WORD
)
def _launch(function: Any, *given: Any) -> int:
    *sizes, shared, _, arguments, _ = given
    is_launched = function.launch(sizes[:3], sizes[3:], arguments, shared)
    return 0 if is_launched else _INVALID_VALUE


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, _WORD)
def _record(event: Any, _: Any) -> int:
    event.is_recorded = True
    return 0


def _driver_functions() -> NDArray[np.void]:
    """Make a record as `driver_calls.driver_functions` does; nothing loads modules or sleeps."""
    functions = [ctypes.cast(each, _WORD).value for each in (_upload, _launch, _record)]
    return np.array([(*functions, 0, 0, 0)], DRIVER)


class _Memory:
    """Device memory, as CuPy's pointers have it."""

    def __init__(self, size: int, pool: _Pool) -> None:
        self._bytes = np.full(size + 256, _GARBAGE, dtype=np.uint8)
        self.ptr = self._bytes.ctypes.data + -self._bytes.ctypes.data % 256
        self.mem = SimpleNamespace(size=size)
        self._pool = pool
        pool.used += size

    def __del__(self) -> None:
        self._pool.used -= self.mem.size


class _Pool:
    """A pool of device memory."""

    def __init__(self) -> None:
        self.used, self._limit = 0, _MEMORY

        self.used_bytes = self.total_bytes = lambda: self.used
        self.free_all_blocks = lambda: None

    def set_limit(self, size: int) -> None:
        self._limit = size

    def malloc(self, size: int) -> _Memory:
        size = -(-size // 512) * 512
        if self.used + size > self._limit:
            raise MemoryError
        return _Memory(size, self)


class _Array:
    """An array in device memory."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, memptr: _Memory) -> None:
        self.shape, self.dtype, self.data = shape, np.dtype(dtype), memptr

    @property
    def own(self) -> NDArray[Any]:
        """The same numbers as an array of the host."""
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        numbers = np.frombuffer((ctypes.c_char * size).from_address(self.data.ptr), self.dtype)
        return numbers.reshape(self.shape)

    @property
    def T(self) -> Any:  # noqa: N802
        return SimpleNamespace(own=self.own.T)


def _matmul(left: Any, right: Any, out: _Array) -> None:
    np.matmul(left.own, right.own, out=out.own)


class _Stream:
    """A stream or an event, whose handle is its address: everything has happened already."""

    def __init__(self, **_: Any) -> None:
        self.ptr = id(self)
        self.is_recorded = False

    def nothing(self, *_: object) -> None:
        pass

    __enter__ = __exit__ = synchronize = wait_event = nothing

    def record(self, _: Any) -> None:
        self.is_recorded = True


def _elapsed(*events: _Stream) -> float:
    assert all(event.is_recorded for event in events)
    return 0.01


def _copy_rows(target, pitch, source, source_pitch, width, rows, *_):
    for row in range(rows):
        ctypes.memmove(target + row * pitch, source + row * source_pitch, width)


def _cuda() -> ModuleType:
    """Return what the engine uses of ``cupy.cuda``."""
    cuda: Any = ModuleType("cupy.cuda")
    cuda.runtime = SimpleNamespace(
        CUDARuntimeError=_Error,
        setDevice=lambda _: None,
        getDeviceProperties=lambda _: _DEVICE,
        driverGetVersion=lambda: 13000,
        memGetInfo=lambda: (_MEMORY, _MEMORY),
        memcpyAsync=lambda target, source, size, *_: ctypes.memmove(target, source, size),
        memcpy2DAsync=_copy_rows,
        memsetAsync=lambda address, value, size, _: ctypes.memset(address, value, size),
        eventQuery=lambda _: 0,
        hostRegister=lambda *_: None,
        hostUnregister=lambda *_: None,
    )
    cuda.driver = SimpleNamespace(CUDADriverError=_Error, funcSetAttribute=lambda *_: None)
    cuda.memory = SimpleNamespace(OutOfMemoryError=MemoryError)
    cuda.MemoryPool, cuda.Stream, cuda.Event = _Pool, _Stream, _Stream
    cuda.Device = lambda _: SimpleNamespace(attributes=_SHARED)
    cuda.get_elapsed_time = _elapsed
    cuda.alloc_pinned_memory = lambda size: np.full(size, _GARBAGE, dtype=np.uint8)
    return cuda
