"""The steering code, compiled by Numba and kept on disk like the CPU engine's."""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
import time
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
from warpfit_server.fit import bfgs, bounds, levenberg_marquardt, searches, triangles
from warpfit_server.fit.searches import Limits

_LOG: Final = logging.getLogger("warpfit.fit")
_MODULES: Final = (bfgs, bounds, levenberg_marquardt, searches, triangles)
_LOCK: Final = threading.Lock()


def load(method: Method, directory: Path | None = None) -> Any:
    """Load a method's ``advance``, or compile it (some seconds) and try to store it.

    Args:
        method: LM or BFGS.
        directory: where compiled code is kept; None for the engine's default.

    """
    with _LOCK:  # many fits may come at once
        return _load(method, directory)


@functools.cache
def _load(method: Method, directory: Path | None) -> Any:
    started = time.perf_counter()
    numbers = types.Array(types.float64, 1, "C")
    rows, counts = types.Array(types.float64, 2, "C"), types.Array(types.int64, 2, "C")
    limits = numba.typeof(Limits(0.0, 0.0, 0.0, 0, False))
    signature = types.void(counts, rows, rows, counts, *[numbers] * 4, limits)
    place = (directory or default_cache_directory()) / f"fit-{_fingerprint()[:32]}"
    module = levenberg_marquardt if method == Method.LM else bfgs
    with writable(place) as kept, cached_in(kept) as jit:
        advance = jit(signature, module.advance)
    _LOG.info("steering code of %s ready after %.2f s", method, time.perf_counter() - started)
    return advance


def _fingerprint() -> str:
    """Hash everything that shapes the code."""
    digest = hashlib.sha256()
    for module in _MODULES:
        digest.update(Path(str(module.__file__)).read_bytes())
    host = (llvm.get_process_triple(), llvm.get_host_cpu_name())
    for part in (llvmlite.__version__, numba.__version__, *host):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()
