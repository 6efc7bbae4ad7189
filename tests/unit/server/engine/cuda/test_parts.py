"""What the CUDA engine calls of compiled code, other processes compile and it loads; no GPU."""

from __future__ import annotations

import subprocess
import sys

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
    """What a part does not load, the engine compiles: for 20 s, in which it does little else."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.splitlines()) == OTHERS
