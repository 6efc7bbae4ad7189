"""The CUDA engine loads the compiled functions that it calls. No GPU is needed."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np

from warpfit_server.engine.cuda.jit import kernel_store
from warpfit_server.engine.cuda.runtime.driver_calls import DRIVER

#: Prints the functions whose code is kept on disk and that no part of the CUDA engine has loaded.
SCRIPT = """
import sys
from warpfit_server.engine.cuda import engine, parts
from warpfit_server.engine.native.numba_cache import _SealedCache

for group in parts.GROUPS:
    parts.load_host_code(group)
modules = [m for name, m in sorted(sys.modules.items()) if name.startswith("warpfit_server.")]
functions = {id(f): f for module in modules for f in vars(module).values()}.values()
for function in functions:
    if isinstance(getattr(function, "_cache", None), _SealedCache) and not function.signatures:
        print(function.__module__.rpartition(".")[2], function.__name__)
"""
#: Compiled code alone calls the first, and the CPU engine the second.
OTHERS = {"launches max_slots", "lowering lower_chunk"}


def test_parts_load_all_functions_that_the_engine_calls():
    """The engine would compile any other function itself, for up to 20 s with Python's lock."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    # Compiling a function compiles those that it calls; loading its code does not load theirs.
    assert set(done.stdout.splitlines()) <= OTHERS


def test_modules_are_loaded_by_the_function_that_a_part_compiles():
    kernel_store.load()
    device = SimpleNamespace(
        use=lambda: None,
        functions=np.zeros(1, DRIVER),
        cupy=SimpleNamespace(cuda=SimpleNamespace()),
    )
    assert kernel_store.load_modules(device, []) == []
    assert len(kernel_store._load.signatures) == 1
