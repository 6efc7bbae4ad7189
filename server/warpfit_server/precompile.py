"""``warpfit precompile``: compiles ahead of time what the CPU engine and its fits need.

The compiled code is for the processor of this machine; another machine compiles its own.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from warpfit_server.system.compile_cache import (
    check_private,
    default_cache_directory,
    engine_environment,
    make_private_directory,
)
from warpfit_server.system.resources import available_cores


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status.

    Raises:
        InvalidArgumentError: if others could have written to the cache.

    """
    parser = argparse.ArgumentParser(
        prog="warpfit precompile",
        description="Compile what the CPU engine and its fits need, so that servers start at once.",
    )
    parser.add_argument(
        "--cache-dir", type=Path, metavar="DIR", help="default: the user's cache directory"
    )
    directory = parser.parse_args(arguments).cache_dir or default_cache_directory()
    directory = directory.absolute()
    make_private_directory(directory)
    check_private(directory)
    os.environ.update(engine_environment(directory))  # before Numba is imported
    from warpfit_server.engine.cpu.codegen import loader
    from warpfit_server.engine.fit import compiled

    started = time.perf_counter()
    loader.precompile(directory, available_cores())
    engine_ready = time.perf_counter()
    print(f"the CPU engine: {engine_ready - started:.1f} s", flush=True)
    compiled.precompile(directory)
    print(f"fits: {time.perf_counter() - engine_ready:.1f} s", flush=True)
    print(f"warpfit: the code is in {directory}")
    return 0
