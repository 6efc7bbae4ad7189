"""Compiling and loading of the interpreters' kernels, which contain a switch over instructions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from warpfit_server.engine.cuda.interpreter.jump_table import with_jump_table
from warpfit_server.engine.cuda.runtime import nvjitlink, nvrtc
from warpfit_server.engine.cuda.runtime.device import CudaDevice


def compile_switch(source: str, cases: int, options: Sequence[str], architecture: int) -> bytes:
    """Compile CUDA C++ whose switch over labels 0 to ``cases - 1`` gets a jump table.

    Args:
        source: CUDA C++.
        cases: number of case labels.
        options: of NVRTC, without the architecture.
        architecture: compute capability, 90 for 9.0.

    """
    ptx = nvrtc.to_ptx(source, architecture, options)
    return nvjitlink.link(with_jump_table(ptx, cases), architecture)


def load_switch(device: CudaDevice, source: str, cases: int, options: Sequence[str]) -> Any:
    """Load what `compile_switch` makes, or the same from the disk cache; return a CuPy module."""
    architecture = device.architecture
    key = [nvrtc.version(), nvjitlink.version(), str(architecture), *options, source]
    return device.load(key, lambda: compile_switch(source, cases, options, architecture))
