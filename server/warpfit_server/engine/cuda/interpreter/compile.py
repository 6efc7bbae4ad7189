"""Compiling and loading of kernels from CUDA C++."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from warpfit_server.engine.cuda.interpreter.jump_table import with_jump_table
from warpfit_server.engine.cuda.runtime import nvjitlink, nvrtc
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.system import compile_cache


class CudaSource(NamedTuple):
    """CUDA C++ with its compiler options."""

    source: str
    options: tuple[str, ...]
    """Options of NVRTC, without the architecture."""
    cases: int = 0
    """If not 0, the switch over labels 0 to ``cases - 1`` gets a jump table."""

    def key(self, architecture: int) -> list[str]:
        """Return everything that the machine code for a compute capability depends on."""
        versions = nvrtc.version(), nvjitlink.version(), str(architecture)
        return [*versions, *self.options, self.source]

    def compile(self, architecture: int) -> bytes:
        """Compile for a compute capability, 90 for 9.0; needs no GPU."""
        if not self.cases:
            return nvrtc.to_cubin(self.source, architecture, self.options)
        ptx = nvrtc.to_ptx(self.source, architecture, self.options)
        return nvjitlink.link(with_jump_table(ptx, self.cases), architecture)

    def cached(self, architecture: int, directory: Path) -> bytes:
        """Return the machine code from a cache directory, or compile and store it."""
        name = hashlib.sha256("\0".join(self.key(architecture)).encode()).hexdigest()
        place = directory / "cubin" / f"{name}.cubin"
        return compile_cache.find_or_make(place, lambda: self.compile(architecture))

    def load(self, device: CudaDevice) -> Any:
        """Load the machine code for a device from its cache, or compile it; return a module."""
        device.use()
        module = device.cupy.cuda.function.Module()
        module.load(self.cached(device.architecture, device.cache_directory))
        return module
