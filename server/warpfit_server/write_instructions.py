"""Writes the instructions that come with the sources; see `engine.native.numba_cache`.

After any change, even of a comment, of a file that `compile_cache.source_fingerprint` hashes::

    python -m warpfit_server.write_instructions
"""

from __future__ import annotations

import lzma
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import llvmlite.binding as llvm
from numba import config
from numba.core.caching import dumps
from numba.core.dispatcher import Dispatcher
from numba.core.environment import lookup_environment

from warpfit.child_processes import python_child
from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.engine.cuda import parts as cuda
from warpfit_server.engine.native.numba_cache import (
    INSTRUCTIONS,
    Function,
    Whole,
    name_of,
    stamp,
)

#: Functions are simplified for this processor before they are written: it has what all have. Numba
#: puts Python's hashes of texts into names.
_NEUTRAL: Final = {
    **{"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""},
    "PYTHONHASHSEED": "0",
}


def write(path: Path = INSTRUCTIONS) -> None:
    """Compile all functions in another process, and write their instructions to a file."""
    with tempfile.TemporaryDirectory() as place:
        environment = {**os.environ, **_NEUTRAL, "NUMBA_CACHE_DIR": place}
        child = python_child("-m", "warpfit_server.write_instructions", str(path),
                             environment=environment)  # fmt: skip
        subprocess.run(**child, check=True)


def _write_here(path: Path) -> None:
    """Load all parts, and write the instructions of the functions that caches keep."""
    of_sources, found = stamp(), {}
    assert config.CPU_NAME, "these instructions would be made of those that are there"
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
            if not isinstance(compiled.library, Whole):
                continue
            instructions = compiled.library.instructions
            named = [one.name for one in llvm.parse_assembly(instructions).global_variables]
            known = [lookup_environment(name) for name in named if "NumbaEnv" in name]
            environments = tuple([one for one in known if one is not None and one.can_cache()])
            _, descriptor, environment, types, is_object, lifted, _, initial, _ = compiled._reduce()
            rest = descriptor, environment, types, is_object, lifted, "", initial, environments
            fields = Function(str(signature), compiled.library.name, instructions, rest)
            found[name_of(function.py_func)] = dumps(tuple(fields))
    written = pickle.dumps(dict(sorted(found.items())), protocol=4)
    path.write_bytes(lzma.compress(of_sources.encode() + b"\n" + written, preset=9))


if __name__ == "__main__":
    _write_here(Path(sys.argv[1])) if sys.argv[1:] else write()
