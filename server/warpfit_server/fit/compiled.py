"""The steering code, compiled by Numba and kept on disk like the CPU engine's."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import types

from warpfit.fitting import Method
from warpfit_server.code_cache import default_cache_directory
from warpfit_server.engine.cpu_cache import writable
from warpfit_server.engine.cpu_code import cached_in
from warpfit_server.engine.cpu_threads import NICE
from warpfit_server.fit import bfgs, bounds, levenberg_marquardt, searches, triangles
from warpfit_server.fit.searches import Limits

_LOG: Final = logging.getLogger("warpfit.fit")
_MODULES: Final = (bfgs, bounds, levenberg_marquardt, searches, triangles)
_LOCK: Final = threading.Lock()
_LOADED: Final[dict[tuple[Method, Path | None], Any]] = {}
_LOADER: Final = ThreadPoolExecutor(2, "fit-loader")


def load(method: Method, directory: Path | None = None) -> Any:
    """Load a method's ``advance``, or compile it (some seconds) and try to store it.

    Args:
        method: LM or BFGS.
        directory: where compiled code is kept; None for the engine's default.

    """
    with _LOCK:  # many fits may come at once
        key = method, directory
        if key not in _LOADED:
            _LOADED[key] = _load(method, directory)
        return _LOADED[key]


def load_in_background(method: Method, directory: Path | None = None) -> Future[Any] | None:
    """Load a method's ``advance`` in another thread, unless that has been done; see `load`."""
    if (method, directory) in _LOADED:
        return None
    return _LOADER.submit(load, method, directory)


def _load(method: Method, directory: Path | None) -> Any:
    started = time.perf_counter()
    place = (directory or default_cache_directory()) / f"fit-{_fingerprint()[:32]}"
    with writable(place) as kept:
        done = kept / f"{method}.complete"
        if not done.exists():
            _compile_elsewhere(method, kept)
            done.touch()
        advance = _compile(method, kept)
    _LOG.info("steering code of %s ready after %.2f s", method, time.perf_counter() - started)
    return advance


def _compile_elsewhere(method: Method, place: Path) -> None:
    """Compile in a process of its own: here Numba would keep all other calls from Python's lock."""
    command = (sys.executable, "-m", __name__, method, str(place))
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False
    )
    if ended.returncode:
        _LOG.warning("a process that compiled %s ended with %s", method, ended.returncode)


def _compile(method: Method, place: Path) -> Any:
    numbers = types.Array(types.float64, 1, "C")
    rows, counts = types.Array(types.float64, 2, "C"), types.Array(types.int64, 2, "C")
    limits = numba.typeof(Limits(0.0, 0.0, 0.0, 0, False))
    signature = types.void(counts, rows, rows, counts, *[numbers] * 4, limits)
    module = levenberg_marquardt if method == Method.LM else bfgs
    with cached_in(place) as jit:
        return jit(signature, module.advance)


def _fingerprint() -> str:
    """Hash everything that shapes the code."""
    digest = hashlib.sha256()
    for module in _MODULES:
        digest.update(Path(str(module.__file__)).read_bytes())
    host = (llvm.get_process_triple(), llvm.get_host_cpu_name())
    for part in (llvmlite.__version__, numba.__version__, *host):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


if __name__ == "__main__":
    os.nice(NICE)
    _compile(Method(sys.argv[1]), Path(sys.argv[2]))
