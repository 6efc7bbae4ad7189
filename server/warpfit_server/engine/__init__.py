"""The engine process: loop, scheduler, fits, and the engines that evaluate batches.

The engines (`cpu`, `cuda`) know nothing of sockets, messages, tenants or gRPC.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

from warpfit.errors import UnavailableError
from warpfit_server.engine.interface import Engine


def create_engine(
    kind: str,
    *,
    threads: int | None = None,
    memory_share: float = 1.0,
    device_memory: int | None = None,
    cache_directory: Path | None = None,
) -> Engine:
    """Create an engine of a kind, ``"cpu"`` or ``"cuda"``; the latter on the first visible GPU.

    Args:
        kind: of the engine.
        threads: threads of the CPU engine, or that lower and compile for the CUDA engine; None for
            all cores.
        memory_share: part of the GPU's memory that is for this engine.
        device_memory: bytes of the GPU's memory to use; None for most of it.
        cache_directory: where code for GPUs is kept; None for the user's cache directory. What
            Numba compiles is kept where `compile_cache.engine_environment` says.

    Raises:
        WarpfitError: if the engine cannot run on this machine.
    """
    if kind == "cpu":
        from warpfit_server.engine.cpu.engine import CpuEngine

        return CpuEngine(threads=threads)
    # The driver takes a third of a second for it, in which the modules below are imported.
    threading.Thread(target=_make_context, name="context", daemon=True).start()
    try:
        from warpfit_server.engine.cuda.engine import CudaEngine
    except ImportError as error:
        raise UnavailableError(
            f"the CUDA libraries are not installed: {error}",
            "NO_CUDA",
            "Install them (pip install 'warpfit[cuda13]' or '[cuda12]'), or run with --devices cpu",
        ) from error
    limit = None if device_memory is None else int(device_memory * memory_share)
    return CudaEngine(
        memory_limit=limit,
        memory_share=memory_share,
        cache_directory=cache_directory,
        threads=threads,
    )


def _make_context() -> None:
    """Make the context of the first visible GPU, which CuPy uses later; CuPy says what is wrong."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
