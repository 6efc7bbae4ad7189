"""Engines evaluate batches on resident data sets; they know nothing of gRPC or processes."""

from __future__ import annotations

from pathlib import Path

from warpfit_server.engine.base import Engine


def create_engine(
    name: str, *, threads: int | None = None, device: int = 0, cache_directory: Path | None = None
) -> Engine:
    """Create an engine by name; ``auto`` takes CUDA when a device answers.

    Raises:
        WarpfitError: if the engine cannot run on this machine.

    """
    from warpfit_server.engine.cpu import CpuEngine

    return CpuEngine(threads=threads, cache_directory=cache_directory)
