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
from typing import Any, Final, NamedTuple

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import types

from warpfit.fitting import Method
from warpfit_server import cache_files
from warpfit_server.code_cache import usable
from warpfit_server.engine import numba_cache
from warpfit_server.engine.cpu_code import cached_in
from warpfit_server.engine.cpu_threads import NICE
from warpfit_server.fit import (
    bfgs,
    bounds,
    levenberg_marquardt,
    searches,
    separable,
    triangles,
)
from warpfit_server.fit.searches import Limits

_LOG: Final = logging.getLogger("warpfit.fit")
_MODULES: Final = (
    *(bfgs, bounds, levenberg_marquardt, searches, separable, triangles),
    *(numba_cache, cache_files),
)
_LOCK: Final = threading.Lock()
_LOADED: Final[dict[tuple[Method, Path | None], Steering]] = {}
_LOADER: Final = ThreadPoolExecutor(2, "fit-loader")


class Steering(NamedTuple):
    """What steers the searches of a method."""

    advance: Any
    """`levenberg_marquardt.advance` or `bfgs.advance`."""
    mark_linear: Any
    """`separable.mark_linear`; None for BFGS, which does not use it."""


def load(method: Method, directory: Path | None = None) -> Steering:
    """Load the code of a method, or compile it (some seconds) and try to store it.

    Args:
        method: LM or BFGS.
        directory: where compiled code is kept; None for the engine's default.

    """
    with _LOCK:  # many fits may come at once
        key = method, directory
        if key not in _LOADED:
            _LOADED[key] = _load(method, directory)
        return _LOADED[key]


def load_in_background(method: Method, directory: Path | None = None) -> Future[Steering] | None:
    """Load a method's code in another thread, unless that has been done; see `load`."""
    if (method, directory) in _LOADED:
        return None
    return _LOADER.submit(load, method, directory)


def _load(method: Method, directory: Path | None) -> Steering:
    started = time.perf_counter()
    with usable(directory) as usable_directory:
        kept = usable_directory / f"fit-{_fingerprint()[:32]}"
        done = kept / f"{method}.complete"
        if not done.exists():
            _compile_elsewhere(method, kept)
            cache_files.write_plain(done, b"")
        steering = _compile(method, kept)
    _LOG.info("steering code of %s ready after %.2f s", method, time.perf_counter() - started)
    return steering


def _compile_elsewhere(method: Method, place: Path) -> None:
    """Compile in a process of its own: here Numba would keep all other calls from Python's lock."""
    command = (sys.executable, "-m", __name__, method, str(place))
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False
    )
    if ended.returncode:
        _LOG.warning("a process that compiled %s ended with %s", method, ended.returncode)


def _compile(method: Method, place: Path) -> Steering:
    numbers, words = types.Array(types.float64, 1, "C"), types.Array(types.int64, 1, "C")
    rows, counts = types.Array(types.float64, 2, "C"), types.Array(types.int64, 2, "C")
    limits = numba.typeof(Limits(0.0, 0.0, 0.0, 0, False))
    space = numba.typeof(levenberg_marquardt.workspace(1))
    advance = types.void(counts, rows, rows, counts, *[numbers] * 4, limits)
    advance_in = types.void(*advance.args, space)
    codes = types.Array(types.uint8, 1, "C", readonly=True)
    values = types.Array(types.float64, 1, "C", readonly=True)
    mark = types.void(codes, values, words, words, counts, numbers)
    with cached_in(place) as jit:
        if method != Method.LM:
            return Steering(jit(advance, bfgs.advance), None)
        # It allocates nothing, so that no references need to be counted.
        run = jit(advance_in, levenberg_marquardt.advance, _nrt=False)
        return Steering(run, jit(mark, separable.mark_linear))


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
