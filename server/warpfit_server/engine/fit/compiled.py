"""The compiled code of the fit methods, kept on disk like that of the CPU engine."""

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
    levenberg_marquardt,
    searches,
    separable,
    triangles,
)
from warpfit_server.engine.fit.searches import SearchLimits
from warpfit_server.engine.native import intrinsics, numba_cache
from warpfit_server.engine.native.compile_processes import BACKGROUND, compile_once, run_parts
from warpfit_server.system import compile_cache
from warpfit_server.system.compile_cache import usable_cache_directory

_LOG: Final = logging.getLogger("warpfit.fit")
#: Methods with code of their own; most fits need the first one.
METHODS: Final = (Method.LM, Method.BFGS)
#: Modules that shape the code.
_SOURCES: Final = (
    *(bfgs, levenberg_marquardt, searches, separable, triangles, intrinsics, compile_cache),
)
_LOCK: Final = threading.Lock()
_LOADED: Final[dict[tuple[Method, Path | None], CompiledMethod]] = {}


class CompiledMethod(NamedTuple):
    """The compiled functions of a method."""

    advance: Any
    """`levenberg_marquardt.advance` or `bfgs.advance`."""
    mark_linear: Any
    """`separable.mark_linear`; None for BFGS, which does not use it."""


def load(method: Method, directory: Path | None = None) -> CompiledMethod:
    """Load the code of a method, LM or BFGS, or compile it (some seconds) and try to store it."""
    with _LOCK:  # several fits may begin at once
        key = method, directory
        if key not in _LOADED:
            _LOADED[key] = _load(method, directory)
        return _LOADED[key]


def load_in_background(
    method: Method, directory: Path | None = None
) -> Future[CompiledMethod] | None:
    """Load a method's code in another thread, unless it is loaded; see `load`."""
    if (method, directory) in _LOADED:
        return None
    return BACKGROUND.submit(load, method, directory)


def precompile(directory: Path, *, urgent: bool = True) -> None:
    """Compile the code of all methods into ``directory`` by other processes, and load nothing."""
    place = _place(directory)
    with ThreadPoolExecutor(len(METHODS)) as pool:
        list(pool.map(lambda m: _compile_elsewhere(m, place, urgent=urgent), METHODS))


def _place(directory: Path) -> Path:
    return directory / f"fit-{numba_cache.fingerprint(_SOURCES)}"


def _compile_elsewhere(method: Method, place: Path, *, urgent: bool) -> None:
    """Compile in another process, because Numba holds Python's lock for seconds."""
    compile_once(place, str(method), __name__, [[method]], urgent=urgent)


def _load(method: Method, directory: Path | None) -> CompiledMethod:
    started = time.perf_counter()
    with usable_cache_directory(directory) as usable:
        place = _place(usable)
        _compile_elsewhere(method, place, urgent=False)
        code = _compile(method, place)
    _LOG.info("code of %s ready after %.2f s", method, time.perf_counter() - started)
    return code


def _compile(method: Method, place: Path) -> CompiledMethod:
    numbers, words = types.Array(types.float64, 1, "C"), types.Array(types.int64, 1, "C")
    rows, counts = types.Array(types.float64, 2, "C"), types.Array(types.int64, 2, "C")
    limits = numba.typeof(SearchLimits(0.0, 0.0, 0.0, 0, False))
    space = numba.typeof(levenberg_marquardt.workspace(1))
    advance = types.void(counts, rows, rows, counts, *[numbers] * 4, limits)
    advance_in = types.void(*advance.args, space)
    codes = types.Array(types.uint8, 1, "C", readonly=True)
    values = types.Array(types.float64, 1, "C", readonly=True)
    mark = types.void(codes, values, words, words, counts, numbers)
    with numba_cache.cached_in(place) as jit:
        if method != Method.LM:
            return CompiledMethod(jit(advance, bfgs.advance), None)
        # `advance` allocates nothing, so that references need not be counted.
        run = jit(advance_in, levenberg_marquardt.advance, _nrt=False)
        return CompiledMethod(run, jit(mark, separable.mark_linear))


if __name__ == "__main__":
    run_parts({method: partial(_compile, method) for method in METHODS}, sys.argv[1:])
