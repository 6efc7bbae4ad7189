"""Parts of the CPU engine's compiled code: what each is made of, and how it is kept on disk.

Numba and LLVM compile on one core, whatever the number of threads. So at the first start several
processes compile parts of the code into one directory::

    python -m warpfit_server.engine.cpu_code DIRECTORY PART...
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import types

from warpfit import ops
from warpfit_server import cache_files
from warpfit_server.engine import (
    calls,
    cpu_build,
    cpu_circular,
    cpu_dots,
    cpu_interpret,
    cpu_kernels,
    cpu_linearise,
    cpu_lower,
    cpu_math,
    cpu_parallel,
    cpu_partials,
    cpu_pieces,
    cpu_reduction,
    cpu_row_loss,
    cpu_statistics,
    cpu_vector,
    differentiate,
    intrinsics,
    numba_cache,
    rules,
    schedule,
    sweep,
)
from warpfit_server.engine.cpu_kernels import FLAVOURS, Flavour
from warpfit_server.engine.cpu_threads import ParallelCode

_log = logging.getLogger(__name__)
#: Modules that shape the code.
_SOURCES: Final = (
    *(ops, cpu_vector, cpu_reduction, cpu_circular, cpu_math, cpu_kernels, rules, cpu_partials),
    *(cpu_dots, cpu_build),
    *(intrinsics, calls, schedule, cpu_pieces, cpu_lower, cpu_interpret, sweep, differentiate),
    *(cpu_statistics, cpu_row_loss, cpu_linearise, cpu_parallel, numba_cache, cache_files),
)
_WORD: Final = types.int64
_WORDS: Final = types.Array(types.int64, 1, "C")
_NUMBERS: Final = types.Array(types.float64, 1, "C")
_MATRIX: Final = types.Array(types.float64, 2, "C")
_GIVEN_NUMBERS: Final = types.Array(types.float64, 1, "C", readonly=True)
_PIECE: Final = types.int64(_WORD, _WORD)
_lock = threading.Lock()

_Jit = Callable[..., Any]


def fingerprint() -> str:
    """Hash everything that shapes the code: sources, compilers, CPU."""
    digest = hashlib.sha256()
    for module in _SOURCES:
        digest.update(Path(str(module.__file__)).read_bytes())
    for part in (
        llvmlite.__version__,
        numba.__version__,
        llvm.get_process_triple(),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
    ):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


# ------------------------------------------------------------------------- parts made by Numba


@contextlib.contextmanager
def cached_in(place: Path) -> Iterator[_Jit]:
    """Give a compiler whose results Numba keeps below ``place``."""

    def jit(signature: Any, function: Any, **options: Any) -> Any:
        options = {"nogil": True, "error_model": "numpy", **options}
        return numba_cache.njit(signature, **options)(function)

    with _lock:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(place)
        try:
            yield jit
        finally:
            numba.config.CACHE_DIR = before


def _runs_pieces(function: Any) -> Callable[[Path], Any]:
    def load(place: Path) -> Any:
        with cached_in(place) as jit:
            return jit(_PIECE, function)

    return load


lower = _runs_pieces(cpu_lower.lower_piece)
derive = _runs_pieces(differentiate.differentiate_piece)
interpret = _runs_pieces(cpu_interpret.interpret_piece)
linearise = _runs_pieces(cpu_linearise.linearise_piece)


def combine(place: Path) -> Any:
    """Load what Python calls after pieces with derivatives have run."""
    differentiated = numba.typeof(differentiate.empty(1, 1, 1))
    signature = types.void(
        *(_WORDS, _WORDS, differentiated, _GIVEN_NUMBERS, _WORDS, _WORDS, _NUMBERS),
        *(_NUMBERS, _MATRIX, _NUMBERS, types.Array(types.float64, 3, "C")),
    )
    with cached_in(place) as jit:
        return jit(signature, cpu_linearise.combine)


def parallel(place: Path) -> ParallelCode:
    """Load the functions of `cpu_parallel`."""
    one = types.void(_WORDS)
    with cached_in(place) as jit:
        return ParallelCode(
            run=jit(types.int64(_WORDS, _WORD, _WORD), cpu_parallel.run),
            help_others=jit(one, cpu_parallel.help_others),
            close=jit(one, cpu_parallel.close),
        )


# ------------------------------------------------------------------------------ kernels, by LLVM


def kernels(place: Path) -> dict[Flavour, bytes]:
    """Load the object code of all kernels."""
    return {flavour: _object(place / f"{flavour.name}.o", flavour) for flavour in FLAVOURS}


def _object(path: Path, flavour: Flavour) -> bytes:
    stored = cache_files.find(path)
    if stored is not None:
        return stored
    code = cpu_build.build(flavour)
    cache_files.write(path, code)
    return code


# ------------------------------------------------------------------------------ side by side

#: What is compiled apart from the rest, and about how many seconds it takes.
PARTS: Final[dict[str, tuple[float, Callable[[Path], object]]]] = {
    "derive": (11.6, derive),
    "linearise": (6.4, linearise),
    "lower": (5.2, lower),
    "kernels": (4.8, kernels),
    "parallel": (2.0, parallel),
    "interpret": (3.0, interpret),
    "combine": (2.1, combine),
}
#: More would wait for the longest part, and each takes some 300 MiB.
_MOST_PROCESSES: Final = 4


def compile_all(place: Path, processes: int) -> None:
    """Compile all parts into ``place`` by other processes, unless that has been done.

    This one would keep the memory that it took, some 160 MiB. One engine at a time does so, and
    others wait for it. What a process fails to compile is left to whoever loads it, and so is
    everything where nothing can be kept.

    Args:
        place: a directory, which need not be there yet.
        processes: so many at most.

    """
    done = place / "complete"
    if done.exists():
        return
    with _locked(place / "lock") as is_locked:
        if done.exists() or not is_locked:
            return
        _log.info("compiling the CPU engine into %s (first start only, 10 to 40 s)", place)
        found = shares(min(processes, _MOST_PROCESSES))
        children = [_start(place, names) for names in found]
        for child, names in zip(children, found, strict=True):
            if child.wait():
                _log.warning("a process that compiled %s ended with %s", names, child.returncode)
        cache_files.write_plain(done, b"")


def shares(count: int) -> list[list[str]]:
    """Share the parts out to processes, the next longest one to who has least to do."""
    found: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(PARTS, key=lambda name: -PARTS[name][0]):
        min(found, key=lambda names: sum(PARTS[other][0] for other in names)).append(name)
    return found


def _start(place: Path, names: Sequence[str]) -> subprocess.Popen[bytes]:
    command = (sys.executable, "-m", __name__, str(place), *names)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _compile(place: Path, names: Sequence[str]) -> None:
    for name in names:
        PARTS[name][1](place)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Lock a file; give False if there can be none, as on a disk that is full or read-only."""
    try:
        cache_files.make_private(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        _log.warning("cannot compile by several processes: %s", error)
        yield False
        return
    with os.fdopen(descriptor, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems; then two may compile the same
            _log.debug("cannot lock %s: %s", path, error)
        yield True


if __name__ == "__main__":
    _compile(Path(sys.argv[1]), sys.argv[2:])
