"""Numba's functions, compiled once and cached on disk in files with checksums.

Numba's own cache reads its pickles without a check: a file that is cut off ends the process, a full
disk does too, and what anybody may have written is executed. Here the same pickles are in files of
`warpfit_server.system.compile_cache`, and what cannot be read is compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import llvmlite
import llvmlite.binding as llvm
import numba
from numba.core import caching
from numba.np import linalg

from warpfit_server.system import compile_cache
from warpfit_server.system.compile_cache import default_cache_directory, numba_directory


def _no_blas() -> None:
    raise ImportError("no compiled function calls BLAS")


# Numba imports SciPy, if there is one, only to look for BLAS: a fifth of the time of a start.
linalg.ensure_blas = _no_blas

_LOCK: Final = threading.Lock()


def njit(signature: Any = None, **options: Any) -> Any:
    """Return a decorator that compiles a function and caches its code on disk.

    Args:
        signature: compile at once for these types, and for no others; None compiles at calls.
        **options: of ``numba.njit``, but for ``cache``.
    """

    def decorate(function: Any) -> Any:
        compiled = numba.njit(**options)(function)
        if numba.config.DISABLE_JIT:
            return compiled
        compiled._cache = _SealedCache(function)
        if signature is not None:
            compiled.compile(signature)
            compiled.disable_compile()
        return compiled

    return decorate


class _Locator(caching.UserProvidedCacheLocator):  # type: ignore[misc]
    """Tells Numba the directory of a function's code, which need not exist.

    It depends on the function's module, and not on where and when that was installed.
    """

    def __init__(self, function: Any, source: str) -> None:
        super().__init__(function, source)
        place = Path(numba.config.CACHE_DIR or _own_directory())
        self._cache_path = str(place / function.__module__)

    def get_source_stamp(self) -> str:
        """Return nothing: each version of the sources has a directory of its own."""
        return ""

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> _Locator:
        """Serve any function."""
        return cls(py_func, py_file)

    def ensure_cache_path(self) -> None:
        """Do nothing: the directory is made when a file is written."""


class _SealedFiles(caching.IndexDataCacheFile):  # type: ignore[misc]
    """Numba's index and data files, with checksums."""

    def _load_index(self) -> dict[Any, str]:
        content = compile_cache.find(Path(self._index_path))
        if content is None:
            return {}
        version, rest = pickle.loads(content)
        if version != self._version:  # the rest might not be readable
            return {}
        stamp, overloads = pickle.loads(rest)
        return overloads if stamp == self._source_stamp else {}

    def _save_index(self, overloads: dict[Any, str]) -> None:
        rest = self._dump((self._source_stamp, overloads))
        compile_cache.write(Path(self._index_path), pickle.dumps((self._version, rest)))

    def _load_data(self, name: str) -> Any:
        content = compile_cache.find(Path(self._data_path(name)))
        if content is None:
            raise FileNotFoundError(name)  # which Numba takes for a miss
        return pickle.loads(content)

    def _save_data(self, name: str, data: Any) -> None:
        compile_cache.write(Path(self._data_path(name)), self._dump(data))


class _Implementation(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class _SealedCache(caching.FunctionCache):  # type: ignore[misc]
    _impl_class = _Implementation

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        locator = self._impl.locator
        self._cache_file = _SealedFiles(
            locator.get_cache_path(), self._impl.filename_base, locator.get_source_stamp()
        )


@contextlib.contextmanager
def cached_in(directory: Path) -> Iterator[Callable[..., Any]]:
    """Yield a compiler ``jit(signature, function, **options)`` that caches code in a directory."""

    def jit(signature: Any, function: Any, **options: Any) -> Any:
        options = {"nogil": True, "error_model": "numpy", **options}
        return njit(signature, **options)(function)

    with _LOCK:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(directory)
        try:
            yield jit
        finally:
            numba.config.CACHE_DIR = before


def address_of(function: Any) -> int:
    """Return the address at which C code may call a compiled function."""
    (compiled,) = function.overloads.values()
    name = compiled.fndesc.llvm_cfunc_wrapper_name
    return int(compiled.library.get_pointer_to_function(name))


def fingerprint(modules: Iterable[ModuleType], *files: str) -> str:
    """Return a hash of what shapes compiled code: sources, compilers, and this very processor."""
    digest = hashlib.sha256()
    for file in (*(str(module.__file__) for module in modules), __file__, *files):
        digest.update(Path(file).read_bytes())
    host = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    for text in (llvmlite.__version__, numba.__version__, llvm.get_process_triple(), *host):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:32]


def default_directory() -> Path:
    """Return where code is cached of functions that are compiled outside of `cached_in`."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    return Path(named) if named else _own_directory()


@functools.cache
def _own_directory() -> Path:
    """Return the directory for processes without `compile_cache.engine_environment`."""
    return numba_directory(default_cache_directory())
