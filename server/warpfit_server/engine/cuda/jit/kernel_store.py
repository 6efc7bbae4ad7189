"""A store of compiled kernels by key: loaded, on disk, or made by the compiler, once each.

Kernels that are requested together are compiled by several processes, and loaded together once all
are compiled. The driver loads a module only when the device is idle, and delays launches meanwhile.
Modules loaded one by one would each wait for the launches since the last one, and delay further
launches in turn. So launches are held back in `driver_calls` until all modules are loaded: one wait
for the device, and then some 0.1 ms a module.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from cachetools import LRUCache
from numba import from_dtype, types
from numpy.typing import NDArray

from warpfit_server.engine.autodiff import CODE_COUNT
from warpfit_server.engine.cuda.jit import renderer, templates
from warpfit_server.engine.cuda.jit.renderer import Output
from warpfit_server.engine.cuda.runtime import compiler
from warpfit_server.engine.cuda.runtime.compile_queue import CompileProcess, CompileQueue, serve
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.driver_calls import DRIVER
from warpfit_server.engine.interface import Arithmetic
from warpfit_server.engine.lowering import COPY_CODE, Lowered
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import call_c
from warpfit_server.system.compile_cache import CacheCounters, DiskCache

_LOG: Final = logging.getLogger("warpfit.engine")
_ENTRY: Final = "evaluate"
#: Estimated work of a call of a library function, in instructions.
_CALL_WORK: Final = 100
#: Most bytes of loaded code, loaded kernels, and bytes of machine code on disk.
MOST_BYTES, MOST_KERNELS, _MOST_DISK_BYTES = 1 << 30, 20_000, 1 << 30


@dataclass(frozen=True, slots=True)
class KernelKey:
    """Identifies a kernel; ``text`` is a hash of everything that its machine code depends on."""

    arithmetic: Arithmetic = field(compare=False)
    output: Output = field(compare=False)
    programs: Lowered = field(compare=False)
    text: str


class Kernel(NamedTuple):
    """A loaded kernel; its code stays on the device as long as this object exists."""

    function: Any
    module: Any
    size: int
    """Bytes, so many at least that `MOST_KERNELS` fill the cache."""


#: Architecture, arithmetic and outputs of a kernel, and its programs.
KernelJob = tuple[int, Arithmetic, Output, Lowered]


def compile_kernel(job: KernelJob) -> bytes:
    """Return the machine code of a kernel; the first one of an arithmetic takes half a second more.

    Raises:
        InternalError: with the linker's log, if linking fails.
    """
    architecture, arithmetic, output, programs = job
    library = templates.build(arithmetic, architecture, derivatives=output.gradient)
    text = renderer.module(library, output, {_ENTRY: programs})
    return compiler.link(text, architecture, library.functions)


class _KernelCache(LRUCache[KernelKey, Kernel]):
    """Kernels by key; those that are dropped stay loaded until nobody uses them any more."""

    def __init__(self) -> None:
        super().__init__(MOST_BYTES, lambda kernel: kernel.size)
        self.counters = CacheCounters()

    def popitem(self) -> tuple[KernelKey, Kernel]:
        """Evict the least recently used kernel."""
        self.counters.evictions += 1
        return super().popitem()


class KernelStore:
    """Has kernels compiled, and keeps them loaded and on disk.

    Args:
        device: that the kernels are for.
        cores: of which a quarter may compile.
    """

    def __init__(self, device: CudaDevice, cores: int) -> None:
        self._device = device
        self._cache = _KernelCache()
        self.disk = DiskCache(device.cache_directory / "kernels", _MOST_DISK_BYTES)
        self.compile_queue = CompileQueue(cores, compile_kernel.__module__)
        self._loader = ThreadPoolExecutor(1, "load")
        self._lock = threading.Lock()

    def key(self, arithmetic: Arithmetic, output: Output, programs: Lowered) -> KernelKey:
        """Return the key of the kernel that evaluates a group of programs, without its numbers."""
        parts = renderer.GENERATION, output, compiler.linker_version()
        content = [repr(parts).encode(), *(array.tobytes() for array in programs)]
        content.append(self._library(arithmetic, output).key)
        text = hashlib.blake2b(b"\0".join(content), digest_size=20).hexdigest()
        return KernelKey(arithmetic, output, programs, text)

    def instruction_lengths(self, arithmetic: Arithmetic, output: Output) -> NDArray[np.float64]:
        """Estimate the work of an instruction by its code, in those of the device; [CODE_COUNT]."""
        lengths = np.zeros(CODE_COUNT)
        lengths[COPY_CODE] = 1.0
        for code, template in self._library(arithmetic, output).templates.items():
            lengths[code] = _CALL_WORK if template.function else len(template.instructions)
        return lengths

    def are_loaded(self, keys: Sequence[KernelKey]) -> bool:
        """Return whether all kernels are loaded; neither a hit nor a use."""
        with self._lock:
            return all(key in self._cache for key in keys)

    def find(self, keys: Sequence[KernelKey]) -> list[Kernel] | None:
        """Return kernels if all are loaded, else None."""
        with self._lock:
            found = [self._cache.get(key) for key in keys]
            missing = found.count(None)
            self._cache.counters.misses += missing
            self._cache.counters.hits += len(keys) - missing
            return None if missing else found  # type: ignore[return-value]

    def count_hits(self, kernels: int) -> None:
        """Count kernels as found that a graph has kept loaded."""
        with self._lock:
            self._cache.counters.hits += kernels

    def request(
        self, keys: Sequence[KernelKey], *, urgent: bool = False
    ) -> Future[dict[KernelKey, Kernel]]:
        """Have the missing kernels compiled and loaded.

        Returns:
            A future of all kernels, or of the first error. Kernels that a full queue refused, which
            happens only if they are not urgent, are left out.
        """
        done: Future[dict[KernelKey, Kernel]] = Future()
        with self._lock:
            kernels = {key: self._cache[key] for key in keys if key in self._cache}
        submit = self.compile_queue.submit
        jobs = {
            key: job
            for key in dict.fromkeys(keys)
            if key not in kernels
            and (job := submit(key, partial(self._cubin, key), urgent=urgent)) is not None
        }
        if jobs:
            load = partial(self._loader.submit, self._load, kernels, jobs, done)
            _when_all_done(list(jobs.values()), load)
        else:
            done.set_result(kernels)
        return done

    def counters(self) -> Mapping[str, float]:
        """Return the figures of the caches in memory and on disk; see `interface.COUNTERS`."""
        cache = self._cache
        figures = {"module_cache_bytes": cache.currsize, "module_cache_entries": len(cache)}
        for name, counters in (("module", cache.counters), ("disk", self.disk.counters)):
            figures |= {f"{name}_cache_{key}": value for key, value in asdict(counters).items()}
        return figures

    def close(self) -> None:
        """Stop the threads and unload what is not in use."""
        self.compile_queue.close()
        self._loader.shutdown()
        with self._lock:
            self._cache.clear()

    def _library(self, arithmetic: Arithmetic, output: Output) -> templates.DeviceLibrary:
        """Return the device library; the first call takes some tenths of a second."""
        return templates.build(arithmetic, self._device.architecture, derivatives=output.gradient)

    def _cubin(self, key: KernelKey, process: CompileProcess) -> bytes:
        """Return machine code, from disk if it is there; runs in a thread of the queue."""
        cubin = self.disk.get(key.text)
        if cubin is None:
            job = self._device.architecture, key.arithmetic, key.output, key.programs
            cubin = process.run(job)
            self.disk.put(key.text, cubin)
        return cubin

    def _load(
        self,
        kernels: dict[KernelKey, Kernel],
        jobs: Mapping[KernelKey, Future[bytes]],
        done: Future[dict[KernelKey, Kernel]],
    ) -> None:
        """Load kernels that have been compiled beside others; runs in the loader's thread."""
        try:
            with self._lock:  # another request may have loaded some of them
                kernels |= {key: self._cache[key] for key in jobs if key in self._cache}
            cubins = {key: job.result() for key, job in jobs.items() if key not in kernels}
            modules = load_modules(self._device, list(cubins.values()))
            for (key, cubin), module in zip(cubins.items(), modules, strict=True):
                size = max(len(cubin), MOST_BYTES // MOST_KERNELS)
                kernels[key] = Kernel(module.get_function(_ENTRY), module, size)
            with self._lock:
                self._cache.update({key: kernels[key] for key in cubins})
        except Exception as error:
            _LOG.warning("kernels were not loaded: %s", error)  # a caller may not wait for them
            done.set_exception(error)
        else:
            done.set_result(kernels)


def _when_all_done(jobs: Sequence[Future[Any]], then: Callable[[], object]) -> None:
    """Call a function when the last of one or more jobs is done, in the thread that ends it."""
    left, lock = len(jobs), threading.Lock()

    def count(_: object) -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            then()

    for job in jobs:
        job.add_done_callback(count)


def load_modules(device: CudaDevice, cubins: Sequence[bytes]) -> list[Any]:
    """Load machine code; only one thread of a device at a time may call this.

    Returns:
        CuPy modules in the order of ``cubins``, unloaded when they are dropped.

    Raises:
        CUDADriverError: if one cannot be loaded, for example for want of device memory; the
            others are unloaded then.
    """
    device.use()
    images = np.array([np.frombuffer(cubin, np.uint8).ctypes.data for cubin in cubins], np.int64)
    handles = np.zeros(len(cubins), dtype=np.uint64)
    status = _load(device.functions, images, handles)
    cuda = device.cupy.cuda
    modules = [cuda.function.Module() for _ in cubins]
    for module, handle in zip(modules, handles.tolist(), strict=True):
        module.ptr = handle
    if status:
        raise cuda.driver.CUDADriverError(status)
    return modules


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def _load(
    functions: NDArray[np.void], images: NDArray[np.int64], handles: NDArray[np.uint64]
) -> int:
    """Fill in handles, which stay 0 from the first failure on; return the driver's status.

    Compiled, because Python code would wait for Python's lock while all launches are held back.
    """
    status = 0
    functions[0].launches_held = 1
    for number in range(len(images)):
        handle = np.int64(handles.ctypes.data) + 8 * number
        status = call_c(functions[0].load_module, (handle, images[number]))
        if status != 0:
            break
    functions[0].launches_held = 0
    return int(status)


def load() -> None:
    """Load the compiled function above, or compile it."""
    functions = types.Array(from_dtype(DRIVER), 1, "C")
    numba_cache.load(_load, types.int64(functions, types.int64[::1], types.uint64[::1]))


if __name__ == "__main__":  # the process that compiles kernels, which `CompileQueue` runs
    serve(compile_kernel)
