"""Compiled kernels by key: in memory, on disk, or from the compiler, each made once."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.cuda import compile as linker
from warpfit_server.engine.cuda import library, ptx
from warpfit_server.engine.cuda.cache import DiskCache, LeasedCache
from warpfit_server.engine.cuda.compile import Workers
from warpfit_server.engine.cuda.device import CudaDevice
from warpfit_server.engine.cuda.library import DeviceLibrary, Mode
from warpfit_server.engine.cuda.shapes import Shape

_ENTRY: Final = "evaluate"
#: Instructions that a call of a library function stands for, roughly.
_CALL_WORK: Final = 100
#: The same for a leaf, most of which are in registers already.
_LEAF_WORK: Final = 0.3
#: Device memory that a loaded module takes beside its code, roughly.
_MODULE_OVERHEAD: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class KernelKey:
    """What one kernel computes; ``text`` holds every thing that shapes its machine code."""

    mode: Mode
    output: ptx.Output
    shapes: tuple[Shape, ...]
    text: str

    def __hash__(self) -> int:
        """Hash the text, which says it all."""
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        """Compare the texts."""
        return isinstance(other, KernelKey) and self.text == other.text


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A loaded kernel; its code stays on the device as long as this lives."""

    function: Any
    module: Any
    size: int


class KernelStore:
    """Makes kernels in background threads and keeps them.

    Args:
        device: the device to load on.
        threads: compiler threads.
        max_bytes: most bytes of loaded code.
        max_count: most loaded kernels.
        disk_bytes: most bytes of machine code on disk.

    """

    def __init__(
        self,
        device: CudaDevice,
        threads: int,
        max_bytes: int = 1 << 30,
        max_count: int = 20_000,
        disk_bytes: int = 1 << 30,
    ) -> None:
        self._device = device
        self.cache: LeasedCache[Kernel] = LeasedCache(max_bytes, max_count)
        self.disk = DiskCache(_disk_directory(device.cache_directory), disk_bytes)
        self.workers = Workers(threads)
        self._libraries: dict[tuple[Mode, bool], DeviceLibrary] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()

    def library(self, mode: Mode, *, derivatives: bool = False) -> DeviceLibrary:
        """Device library of a mode, built when first needed."""
        with self._lock:
            known = self._libraries.get((mode, derivatives))
            if known is None:
                known = library.build(mode, self._device.architecture, derivatives=derivatives)
                self._libraries[mode, derivatives] = known
            return known

    def key(self, mode: Mode, output: ptx.Output, shapes: tuple[Shape, ...]) -> KernelKey:
        """Key of the kernel that evaluates a group of expressions."""
        device_library = self.library(mode, derivatives=output.gradient)
        return KernelKey(mode, output, shapes, kernel_key(device_library, output, shapes))

    def work(self, mode: Mode, shapes: Sequence[Shape]) -> NDArray[np.float64]:
        """Instructions for a row of each expression, roughly; [expressions]."""
        lengths = {
            token: _CALL_WORK if template.function else len(template.instructions)
            for token, template in self.library(mode).templates.items()
        }
        return np.array(
            [
                sum(
                    lengths.get(token, _LEAF_WORK)
                    for token in zip(s.codes, s.operands, strict=True)
                )
                for s in shapes
            ],
            dtype=np.float64,
        )

    def lease(self, keys: Sequence[KernelKey]) -> list[Kernel] | None:
        """Take kernels into use if all are loaded; `release` the same keys afterwards."""
        taken: list[Kernel] = []
        for number, key in enumerate(keys):
            kernel = self.cache.lease(key)
            if kernel is None:
                self.release(keys[:number])
                return None
            taken.append(kernel)
        return taken

    def release(self, keys: Sequence[KernelKey]) -> None:
        """End the use of kernels."""
        for key in keys:
            self.cache.release(key)

    def request(self, keys: Sequence[KernelKey], priority: int = 1) -> list[Future[None]]:
        """Have the missing kernels made; a full queue refuses those of positive priority."""
        submitted = [
            self.workers.submit(key, partial(self._make, key), priority)
            for key in dict.fromkeys(keys)
            if key not in self.cache
        ]
        return [future for future in submitted if future is not None]

    def counters(self) -> Mapping[str, float]:
        """Return the figures of the caches in memory and on disk; see `base.COUNTERS`."""
        figures = {"module_cache_bytes": self.cache.bytes, "module_cache_entries": len(self.cache)}
        for name, counters in (("module", self.cache.counters), ("disk", self.disk.counters)):
            figures |= {f"{name}_cache_{key}": value for key, value in asdict(counters).items()}
        return figures

    def close(self) -> None:
        """Stop the threads and unload what is not in use."""
        self.workers.close()
        self.cache.clear()

    def _make(self, key: KernelKey) -> None:
        """Load a kernel, from disk or compiled; runs in a compiler thread."""
        cubin = self.disk.get(key.text)
        if cubin is None:
            cubin = self._compile(key)
            self.disk.put(key.text, cubin)
        self._device.use()
        module = self._device.cupy.cuda.function.Module()
        module.load(cubin)
        kernel = Kernel(module.get_function(_ENTRY), module, len(cubin) + _MODULE_OVERHEAD)
        self.cache.add(key, kernel, kernel.size)
        self.cache.release(key)

    def _compile(self, key: KernelKey) -> bytes:
        device_library = self.library(key.mode, derivatives=key.output.gradient)
        # All in Python: many threads would wait for its lock, and evaluations behind all of them.
        with self._writing:
            text = ptx.module(device_library, key.output, [ptx.Entry(_ENTRY, key.shapes)])
        return linker.link(text, device_library.architecture, device_library.functions)


def kernel_key(device_library: DeviceLibrary, output: ptx.Output, shapes: tuple[Shape, ...]) -> str:
    """Hash of everything that shapes a kernel's machine code, as a file name."""
    digest = hashlib.blake2b(digest_size=20)
    digest.update(device_library.key)
    digest.update(f"{ptx.GENERATION} {output} {linker.version()}".encode())
    for shape in shapes:
        digest.update(shape.key)
    return digest.hexdigest()


def _disk_directory(cache_directory: Path) -> Path:
    return cache_directory / "kernels"
