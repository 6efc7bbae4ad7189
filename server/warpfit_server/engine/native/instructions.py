"""The instructions of compiled functions, which come with the sources.

Numba finds types and writes LLVM's instructions in Python, which takes three quarters of the time
of compiling and gives the same on all machines. So a file with the sources holds what Numba has
written, before LLVM has seen for which processor. Where a cache has no machine code of a function,
LLVM makes it of these instructions. They count for exactly the sources that they were written from,
for the versions of Numba that `code_libraries` knows, and for processors of one architecture. With
others, functions are compiled as usual. `warpfit_server.write_instructions` writes the file.
"""

from __future__ import annotations

import functools
import lzma
import pickle
from pathlib import Path
from typing import Any, Final, NamedTuple

import llvmlite.binding as llvm
import numba
from numba import config

from warpfit_server.engine.native import code_libraries
from warpfit_server.system import compile_cache

FILE: Final = Path(__file__).with_suffix(".xz")


class Function(NamedTuple):
    """A function as the file has it."""

    signature: str
    """Types of the arguments."""
    library: str
    """Name of the library that Numba makes of it."""
    instructions: str
    """LLVM's, of the function with all that it calls."""
    rest: tuple[Any, ...]
    """The other fields of a function in Numba's cache."""


def find(function: Any, signature: Any, target: Any) -> Any:
    """Return a function in the form in which Numba's cache keeps it; None if it has to be compiled.

    LLVM makes machine code of the instructions, for the processor of this machine. Where Numba is
    told another one, as by the program that writes the instructions, functions are compiled.

    Args:
        function: the Python function.
        signature: types of its arguments.
        target: Numba's context of the processor.
    """
    content = None if config.CPU_NAME else _read().get(name_of(function))
    if content is None:
        return None
    found = Function(*pickle.loads(content))
    if found.signature != str(signature):
        return None
    code = code_libraries.machine_code(target.codegen(), found.library, found.instructions)
    return code, *found.rest


@functools.cache
def _read() -> dict[str, bytes]:
    """Return the functions by name; none if the file was written from other sources.

    Each is pickled by itself, because reading it imports its module: those of CUDA need packages
    that not every machine has.
    """
    try:
        of_sources, functions = lzma.decompress(FILE.read_bytes()).split(b"\n", 1)
    except (OSError, ValueError, lzma.LZMAError):
        return {}
    if of_sources.decode() != stamp():
        return {}
    found: dict[str, bytes] = pickle.loads(functions)
    return found


def stamp() -> str:
    """Return what the instructions depend on: sources, Numba's version, and the architecture."""
    version = ".".join(str(number) for number in numba.version_info.short)
    return " ".join([compile_cache.source_fingerprint(), version, llvm.get_process_triple()])


def name_of(function: Any) -> str:
    """Return the name of a Python function in the file."""
    return f"{function.__module__}.{function.__qualname__}"
