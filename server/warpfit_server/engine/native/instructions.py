"""The instructions of compiled functions, which come with the sources.

Numba finds types and writes LLVM's instructions in Python, which takes three quarters of the time
of compiling and gives the same on all machines. So a file with the sources holds what Numba has
written, before LLVM has seen for which processor. Where a cache has no machine code of a function,
LLVM makes it of these instructions. They count for exactly the sources that they were written from,
for the versions of Numba that `code_libraries` knows, and for processors of one architecture. With
others, functions are compiled as usual. After a change of these sources the file is written again::

    python -m warpfit_server.engine.native.instructions
"""

from __future__ import annotations

import functools
import lzma
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import llvmlite.binding as llvm
import numba
from numba.core.caching import dumps
from numba.core.dispatcher import Dispatcher
from numba.core.environment import lookup_environment

from warpfit.child_processes import python_child
from warpfit_server.engine.native import code_libraries
from warpfit_server.system import compile_cache

FILE: Final = Path(__file__).with_suffix(".xz")
#: The processor for which functions are simplified before they are written: it has what all have.
_NEUTRAL: Final = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}


class _Function(NamedTuple):
    """A function as the file has it."""

    signature: str
    """Types of the arguments."""
    library: str
    """Name of the library that Numba makes of it."""
    instructions: str
    """LLVM's, of the function with all that it calls."""
    rest: tuple[Any, ...]
    """What else Numba's cache keeps of a function."""


def find(function: Any, signature: Any, target: Any) -> Any:
    """Return a function in the form in which Numba's cache keeps it; None if it has to be compiled.

    LLVM makes machine code of the instructions, for the processor of this machine.

    Args:
        function: the Python function.
        signature: types of its arguments.
        target: Numba's context of the processor.
    """
    content = _read().get(_name(function))
    if content is None:
        return None
    found = _Function(*pickle.loads(content))
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


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


# ------------------------------------------------------------------------------------- writing


def write(path: Path = FILE) -> None:
    """Compile all functions in another process, and write their instructions to a file."""
    with tempfile.TemporaryDirectory() as place:
        child = python_child("-m", "warpfit_server.engine.native.instructions", str(path))
        child["env"] = {**(child.get("env") or os.environ), **_NEUTRAL, "NUMBA_CACHE_DIR": place}
        subprocess.run(**child, check=True)


def _write_here(path: Path) -> None:
    of_sources, found = stamp(), {}
    for function, signature, compiled in _compiled_functions():
        instructions = compiled.library.instructions
        named = [one.name for one in llvm.parse_assembly(instructions).global_variables]
        known = [lookup_environment(name) for name in named if "NumbaEnv" in name]
        environments = tuple([one for one in known if one is not None and one.can_cache()])
        _, descriptor, environment, types, is_object, lifted, _, initial, _ = compiled._reduce()
        rest = descriptor, environment, types, is_object, lifted, "", initial, environments
        fields = _Function(str(signature), compiled.library.name, instructions, rest)
        found[_name(function)] = dumps(tuple(fields))
    functions = pickle.dumps(dict(sorted(found.items())), protocol=4)
    path.write_bytes(lzma.compress(of_sources.encode() + b"\n" + functions, preset=9))


def _compiled_functions() -> Iterator[tuple[Any, Any, Any]]:
    """Load all parts; yield functions that caches keep, with their types and their code."""
    from warpfit_server.engine.cpu.codegen import parts  # which import this module
    from warpfit_server.engine.cuda import parts as cuda

    for part in parts.PARTS.values():
        part.load()
    for group in cuda.GROUPS:
        cuda.load_host_code(group)
    functions = {
        value
        for name, module in list(sys.modules.items())
        if name.startswith("warpfit_server.")
        for value in vars(module).values()
        if isinstance(value, Dispatcher)
    }
    for function in functions:
        for signature, compiled in function.overloads.items():
            if isinstance(compiled.library, code_libraries.Whole):
                yield function.py_func, signature, compiled


if __name__ == "__main__":
    _write_here(Path(sys.argv[1])) if sys.argv[1:] else write()
