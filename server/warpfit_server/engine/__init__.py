"""The engine process: loop, scheduler, fits, and the engines that evaluate batches.

The engines (`cpu`, `cuda`) know nothing of sockets, messages, tenants or gRPC.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from warpfit.errors import UnavailableError
from warpfit_server.engine.interface import Engine

_LOG: Final = logging.getLogger("warpfit.engine")


def create_engine(
    name: str, *, threads: int | None = None, device: int = 0, cache_directory: Path | None = None
) -> Engine:
    """Create an engine by name; ``auto`` takes CUDA if a device answers, else the CPU.

    Raises:
        WarpfitError: if the engine cannot run on this machine.

    """
    if name != "cpu":
        try:
            from warpfit_server.engine.cuda.engine import CudaEngine

            return CudaEngine(device, cache_directory=cache_directory, threads=threads)
        except (ImportError, UnavailableError) as error:
            if name == "cuda":
                raise _cuda_missing(error) from error
            _LOG.info("no CUDA device (%s); the CPU engine serves", error)
    from warpfit_server.engine.cpu.engine import CpuEngine

    return CpuEngine(threads=threads, cache_directory=cache_directory)


def _cuda_missing(error: Exception) -> UnavailableError:
    if isinstance(error, UnavailableError):
        return error
    return UnavailableError(
        f"the CUDA libraries are not installed: {error}",
        "NO_CUDA",
        "Install them (pip install 'warpfit[cuda13]' or '[cuda12]'), or run with --engine cpu",
    )
