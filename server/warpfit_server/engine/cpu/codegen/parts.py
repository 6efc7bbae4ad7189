"""Parts of the CPU engine's compiled code: what each is made of, and how it is kept on disk.

`GROUPS` says what is needed when. At the first start several processes compile the parts of a group
into one directory (`apart`)::

    python -m warpfit_server.engine.cpu.codegen.parts DIRECTORY URGENT PART...
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numba
from numba import types

from warpfit import ops
from warpfit_server.engine import validate
from warpfit_server.engine.autodiff import backward_sweep, differentiate, rules
from warpfit_server.engine.cpu import (
    derivative_interpreter,
    interpreter,
    parallel_loop,
    row_loss,
    statistics,
)
from warpfit_server.engine.cpu.codegen import (
    argument_reduction,
    dot_products,
    elementary_functions,
    partials,
    trigonometric,
    vector,
)
from warpfit_server.engine.cpu.codegen import build as cpu_build
from warpfit_server.engine.cpu.codegen import kernels as cpu_kernels
from warpfit_server.engine.cpu.codegen.kernels import FLAVOURS, Flavour
from warpfit_server.engine.cpu.threads import ParallelCode
from warpfit_server.engine.lowering import lower as cpu_lower
from warpfit_server.engine.lowering import schedule
from warpfit_server.engine.native import calls, compile_processes, intrinsics, numba_cache, records
from warpfit_server.system import compile_cache

#: Modules that shape the code.
_SOURCES: Final = (
    *(
        ops,
        vector,
        argument_reduction,
        trigonometric,
        elementary_functions,
        cpu_kernels,
        rules,
        partials,
    ),
    *(dot_products, cpu_build),
    *(intrinsics, calls, schedule, records, cpu_lower, interpreter, backward_sweep, differentiate),
    *(statistics, row_loss, derivative_interpreter, parallel_loop, numba_cache, compile_cache),
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
    for part in numba_cache.compiler():
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
interpret = _runs_pieces(interpreter.interpret_piece)
linearise = _runs_pieces(derivative_interpreter.linearise_piece)


def combine(place: Path) -> Any:
    """Load what Python calls after pieces with derivatives have run."""
    differentiated = numba.typeof(differentiate.empty(1, 1, 1))
    signature = types.void(
        *(_WORDS, _WORDS, differentiated, _GIVEN_NUMBERS, _WORDS, _WORDS, _NUMBERS),
        *(_NUMBERS, _MATRIX, _NUMBERS, types.Array(types.float64, 3, "C")),
    )
    with cached_in(place) as jit:
        return jit(signature, derivative_interpreter.combine)


def check(_: Path) -> None:
    """Load the check of tokens, which Numba keeps in a directory of its own."""
    validate.load()


def parallel(place: Path) -> ParallelCode:
    """Load the functions of `parallel_loop`."""
    one = types.void(_WORDS)
    with cached_in(place) as jit:
        return ParallelCode(
            run=jit(types.int64(_WORDS, _WORD, _WORD), parallel_loop.run),
            help_others=jit(one, parallel_loop.help_others),
            close=jit(one, parallel_loop.close),
        )


# ------------------------------------------------------------------------------ kernels, by LLVM


def kernels(place: Path) -> dict[Flavour, bytes]:
    """Load the object code of the kernels of all operators and losses."""
    return {
        flavour: _object(place / f"{flavour.name}.o", flavour, cpu_build.build)
        for flavour in FLAVOURS
    }


def derivative_kernels(place: Path) -> dict[Flavour, bytes]:
    """Load the object code of the kernels that derivatives take beside these."""
    return {
        flavour: _object(
            place / f"{flavour.name}-derivatives.o", flavour, cpu_build.build_derivatives
        )
        for flavour in FLAVOURS
    }


def _object(path: Path, flavour: Flavour, build: Callable[[Flavour], bytes]) -> bytes:
    return compile_cache.find_or_make(path, lambda: build(flavour))


# ------------------------------------------------------------------------------ side by side


class Part(NamedTuple):
    """A part of the compiled code that a process can compile alone."""

    seconds: float
    """About how long compiling takes."""
    load: Callable[[Path], object]


PARTS: Final = {
    "lower": Part(5.4, lower),
    "kernels": Part(3.4, kernels),
    "interpret": Part(3.1, interpret),
    "parallel": Part(0.8, parallel),
    "check": Part(0.8, check),
    "derive": Part(12.0, derive),
    "linearise": Part(10.0, linearise),
    "derivative_kernels": Part(4.6, derivative_kernels),
    "combine": Part(2.5, combine),
}
#: What is needed at the same time, and is compiled side by side: a start needs "values".
GROUPS: Final = {
    "values": ("lower", "kernels", "interpret", "parallel", "check"),
    "derivatives": ("derive", "linearise", "derivative_kernels", "combine"),
}
#: More would wait for the longest part, and each takes some 300 MiB.
_MOST_PROCESSES: Final = 4


def compile_group(place: Path, group: str, processes: int, *, urgent: bool = True) -> None:
    """Compile a group of parts into ``place`` by other processes, unless that has been done.

    Args:
        place: a directory, which need not be there yet.
        group: of `GROUPS`.
        processes: so many at most.
        urgent: whether somebody waits.

    """
    seconds = {name: PARTS[name].seconds for name in GROUPS[group]}
    shares = compile_processes.share_out(seconds, min(processes, _MOST_PROCESSES))
    # `check` is kept apart, with whatever else Numba compiles of exactly these sources.
    name = f"{group}-{numba_cache.directory().name}"
    compile_processes.compile_once(place, name, __name__, shares, urgent=urgent)


if __name__ == "__main__":
    compile_processes.run_parts({name: part.load for name, part in PARTS.items()}, sys.argv[1:])
