"""Numba's functions, compiled once and cached on disk in files with checksums.

Numba's own cache reads its pickles without a check: a file that is cut off ends the process, a full
disk does too, and what anybody may have written is executed. Here the same pickles are in files of
`warpfit_server.system.compile_cache`, and what cannot be read is compiled again.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import sys
from pathlib import Path
from typing import Any, Final

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import types
from numba.core import caching
from numba.core.compiler_lock import global_compiler_lock
from numba.np import linalg

from warpfit_server.engine.native import instructions
from warpfit_server.engine.native.code_libraries import compiler_options
from warpfit_server.system import compile_cache
from warpfit_server.system.compile_cache import default_cache_directory, numba_directory


def _no_blas() -> None:
    raise ImportError("no compiled function calls BLAS")


# Numba imports SciPy, if there is one, only to look for BLAS: a fifth of the time of a start.
linalg.ensure_blas = _no_blas

#: The types of a function that runs a chunk; see `arguments`.
_CHUNK: Final = types.int64(types.int64, types.int64)


def njit(**options: Any) -> Any:
    """Return a decorator for functions that are compiled at calls, and whose code is kept on disk.

    Its options are those of ``numba.njit``, but for ``cache``.
    """

    def decorate(function: Any) -> Any:
        compiled = numba.njit(**compiler_options(), **options)(function)
        if numba.config.DISABLE_JIT:
            return compiled
        compiled._cache = _SealedCache(function)
        return compiled

    return decorate


class _Locator(caching.UserProvidedCacheLocator):  # type: ignore[misc]
    """Tells Numba the directory of a function's code, which need not exist.

    It depends on the function's module, and not on where and when that was installed.
    """

    def __init__(self, function: Any, source: str) -> None:
        super().__init__(function, source)
        self._cache_path = str(default_directory() / function.__module__)

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

    def load_overload(self, signature: Any, target: Any) -> Any:
        """Load a function's machine code; if it is not kept yet, make it of the instructions."""
        found = super().load_overload(signature, target)
        if found is None:
            made = instructions.find(self._py_func, signature, target)
            if made is not None:
                self._cache_file.save(self._index_key(signature, target.codegen()), made)
                found = self._impl.rebuild(target, made)
        return found


def load(function: Any, signature: Any) -> None:
    """Load the code of a function of `njit`, or compile it and try to store it.

    Calls convert their arguments to the types of the signature from then on, and never compile.
    """
    with global_compiler_lock:
        function.disable_compile(False)
        # Numba looks for the types of a call's arguments: code that is stored with a whole
        # signature would be found by this function alone, and compiled again by a call.
        function.compile(signature.args)
        function.disable_compile()
    found = function.overloads[signature.args].signature.return_type
    assert found == signature.return_type, f"{function} returns {found}"


def load_chunk_function(function: Any) -> None:
    """Load the code of a function that runs a chunk, see `arguments`, as `load` does."""
    load(function, _CHUNK)


@functools.cache
def address_of(function: Any) -> int:
    """Return the address at which C code may call a compiled function."""
    (compiled,) = function.overloads.values()
    name = compiled.fndesc.llvm_cfunc_wrapper_name
    return int(compiled.library.get_pointer_to_function(name))


@functools.cache
def host_tag() -> str:
    """Return a hash of the compilers and of this very processor, for which they compile."""
    host = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    compilers = sys.implementation.cache_tag, llvmlite.__version__, numba.__version__
    text = "\0".join([*host, *compilers, llvm.get_process_triple()])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def default_directory() -> Path:
    """Return where code is kept that was compiled of exactly these sources."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    return Path(named) if named else _own_directory()


@functools.cache
def _own_directory() -> Path:
    """Return the directory for processes without `compile_cache.engine_environment`."""
    return numba_directory(default_cache_directory())
