"""``warpfit precompile``: compiles ahead of time what an engine and its fits need.

It needs no GPU: the compilers are told for which architectures they compile. Code for the CPU is
for the processor of this machine; another one compiles its own.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from warpfit.errors import InvalidArgumentError
from warpfit_server.compile_cache import (
    check_private,
    default_cache_directory,
    engine_environment,
    make_private_directory,
)
from warpfit_server.machine import available_cores

#: Least compute capability of a GPU that the engine runs on, and largest number that is one.
_LEAST, _MOST = 70, 999
_CPU: Final = "cpu"


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status.

    Raises:
        InvalidArgumentError: if others could have written to the cache, or architectures are named
            for the CPU engine, or none for the CUDA engine.
    """
    parser = argparse.ArgumentParser(
        prog="warpfit precompile",
        description="Compile what an engine and its fits need, so that servers start at once.",
    )
    parser.add_argument("--engine", choices=(_CPU, "cuda"), default=_CPU, help="default: cpu")
    parser.add_argument(
        "--architectures",
        metavar="80,90,...",
        help="compute capabilities for the CUDA engine; no GPU is needed",
    )
    parser.add_argument(
        "--cache-dir", type=Path, metavar="DIR", help="default: the user's cache directory"
    )
    options = parser.parse_args(arguments)
    text, architectures = options.architectures, list[int]()
    if text is not None:
        try:
            architectures = [int(word) for word in text.split(",")]
        except ValueError:
            parser.error(f"argument --architectures: {text!r} is no list such as 80,90")
        if not all(_LEAST <= architecture <= _MOST for architecture in architectures):
            what = f"{text!r}: 9.0 is written 90, and {_LEAST} is the least"
            parser.error(f"argument --architectures: {what}")
    if (options.engine == _CPU) == bool(architectures):
        raise InvalidArgumentError(
            "--architectures belongs to --engine cuda",
            "BAD_OPTION",
            "Name both, such as --engine cuda --architectures 80,90, or neither",
        )
    directory = (options.cache_dir or default_cache_directory()).absolute()
    make_private_directory(directory)
    check_private(directory)
    os.environ.update(engine_environment(directory))  # before Numba is imported
    os.chdir(directory)  # in the working directory Numba would look for a file of settings
    cores = available_cores()
    jobs: dict[str, Callable[[], None]] = {}
    if architectures:
        from warpfit_server.engine.cuda import parts as cuda

        for architecture in architectures:
            name = f"the CUDA engine for compute capability {architecture / 10}"
            jobs[name] = partial(cuda.precompile, directory, architecture, cores)
    else:
        from warpfit_server.engine.cpu.codegen import parts as cpu

        jobs["the CPU engine"] = partial(cpu.precompile, cores)
    for name, compile_it in jobs.items():
        started = time.perf_counter()
        compile_it()
        print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
    print(f"warpfit: the code is in {directory}")
    return 0
