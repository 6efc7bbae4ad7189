"""The steering code, compiled by Numba and kept on disk like the CPU engine's."""

from __future__ import annotations

import logging
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numba
from numba import types

from warpfit.fitting import Method
from warpfit_server.engine.fit import (
    bfgs,
    bounds,
    levenberg_marquardt,
    searches,
    separable,
    triangles,
)
from warpfit_server.engine.fit.searches import Limits
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.compile_processes import BACKGROUND, compile_once, run_parts
from warpfit_server.system import compile_cache
from warpfit_server.system.compile_cache import usable_cache_directory

_LOG: Final = logging.getLogger("warpfit.fit")
#: Methods with code of their own, that of which most fits need first.
METHODS: Final = (Method.LM, Method.BFGS)
_MODULES: Final = (
    *(bfgs, bounds, levenberg_marquardt, searches, separable, triangles, compile_cache),
)
_LOCK: Final = threading.Lock()
_LOADED: Final[dict[tuple[Method, Path | None], Steering]] = {}


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
    return BACKGROUND.submit(load, method, directory)


def precompile(directory: Path) -> None:
    """Compile the code of all methods, and load nothing."""
    with ThreadPoolExecutor(len(METHODS)) as pool:
        list(pool.map(lambda m: _compile_elsewhere(m, _place(directory), urgent=True), METHODS))


def _place(directory: Path) -> Path:
    return directory / f"fit-{numba_cache.fingerprint(_MODULES)}"


def _compile_elsewhere(method: Method, place: Path, *, urgent: bool) -> None:
    """Compile in a process of its own: here Numba would keep all other calls from Python's lock."""
    compile_once(place, str(method), __name__, [[method]], urgent=urgent)


def _load(method: Method, directory: Path | None) -> Steering:
    started = time.perf_counter()
    with usable_cache_directory(directory) as usable_directory:
        kept = _place(usable_directory)
        _compile_elsewhere(method, kept, urgent=False)
        steering = _compile(method, kept)
    _LOG.info("steering code of %s ready after %.2f s", method, time.perf_counter() - started)
    return steering


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
    with numba_cache.cached_in(place) as jit:
        if method != Method.LM:
            return Steering(jit(advance, bfgs.advance), None)
        # It allocates nothing, so that no references need to be counted.
        run = jit(advance_in, levenberg_marquardt.advance, _nrt=False)
        return Steering(run, jit(mark, separable.mark_linear))


if __name__ == "__main__":
    run_parts({method: partial(_compile, method) for method in METHODS}, sys.argv[1:])
