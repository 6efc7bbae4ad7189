"""Parts of the CPU engine's compiled code, each compiled by itself and cached on disk.

`GROUPS` says what is needed when. At the first start several processes compile the parts of a group
into one directory (`compile_processes`)::

    python -m warpfit_server.engine.cpu.codegen.parts DIRECTORY URGENT PART...
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from numba import types

from warpfit import ops
from warpfit.expressions import special
from warpfit_server import row_blocks
from warpfit_server.engine import sum_tree, validate
from warpfit_server.engine.autodiff import backward_pass, differentiate, rules
from warpfit_server.engine.cpu import (
    derivative_interpreter,
    interpreter,
    row_loss,
    statistics,
)
from warpfit_server.engine.cpu.codegen import (
    argument_reduction,
    build,
    dot_products,
    elementary_functions,
    kernels,
    trigonometric,
    vector,
)
from warpfit_server.engine.cpu.codegen.kernels import FLAVOURS, Flavour
from warpfit_server.engine.lowering import graph, lower, lowered, schedule
from warpfit_server.engine.native import (
    arguments,
    compile_processes,
    intrinsics,
    numba_cache,
    parallel_loop,
)
from warpfit_server.engine.native.numba_cache import cached_in
from warpfit_server.engine.native.threads import ParallelCode
from warpfit_server.system import compile_cache

#: Modules that shape the code.
_SOURCES: Final = (
    *(ops, special, vector, argument_reduction, trigonometric, elementary_functions, kernels),
    *(dot_products, build, rules, intrinsics, arguments, graph, lowered, schedule, lower),
    *(backward_pass, differentiate, interpreter, statistics, row_loss, derivative_interpreter),
    *(sum_tree, row_blocks, parallel_loop, compile_cache),
)
_WORD: Final = types.int64


def directory_of(cache: Path) -> Path:
    """Return the directory, in that of all compiled code, for exactly these sources."""
    return cache / f"cpu-{numba_cache.fingerprint(_SOURCES)}"


class Part(NamedTuple):
    """A part of the compiled code that a process can compile alone."""

    seconds: float
    """About how long compiling takes."""
    load: Callable[[Path], Any]
    """Load it from a directory, or compile and store it there."""


def _runs_chunks(function: Any) -> Callable[[Path], Any]:
    def load(place: Path) -> Any:
        with cached_in(place) as jit:
            return jit(types.int64(_WORD, _WORD), function)

    return load


def _objects(suffix: str, compile_object: Callable[[Flavour], bytes]) -> Callable[[Path], Any]:
    """Return what loads the object files of kernels of all flavours."""

    def load(place: Path) -> dict[Flavour, bytes]:
        return {
            flavour: compile_cache.find_or_make(
                place / f"{flavour.name}{suffix}.o", functools.partial(compile_object, flavour)
            )
            for flavour in FLAVOURS
        }

    return load


PARTS: Final = {
    "lower": Part(5.4, _runs_chunks(lower.lower_chunk)),
    "kernels": Part(3.4, _objects("", build.build)),
    "interpret": Part(3.1, _runs_chunks(interpreter.interpret_chunk)),
    "parallel": Part(0.8, ParallelCode.load),
    # Numba keeps the check of tokens in a directory of its own.
    "check": Part(0.8, lambda _: validate.load()),
    "differentiate": Part(12.0, _runs_chunks(differentiate.differentiate_chunk)),
    "linearise": Part(10.0, _runs_chunks(derivative_interpreter.linearise_chunk)),
    "derivative_kernels": Part(4.6, _objects("-derivatives", build.build_derivatives)),
    "combine": Part(2.5, _runs_chunks(derivative_interpreter.combine_chunk)),
}
#: What is needed at the same time, and is compiled side by side: a start needs "values".
GROUPS: Final = {
    "values": ("lower", "kernels", "interpret", "parallel", "check"),
    "derivatives": ("differentiate", "linearise", "derivative_kernels", "combine"),
}
#: More would wait for the longest part, and each takes some 300 MiB.
_MOST_PROCESSES: Final = 4


def compile_group(place: Path, group: str, processes: int, *, urgent: bool = True) -> None:
    """Compile a group into ``place`` by so many processes at most, unless that has been done.

    No caller waits for it unless it is ``urgent``.
    """
    seconds = {name: PARTS[name].seconds for name in GROUPS[group]}
    shares = compile_processes.share_out(seconds, min(processes, _MOST_PROCESSES))
    # `check` is in Numba's own directory, which changes with other sources, too.
    name = f"{group}-{numba_cache.default_directory().name}"
    compile_processes.compile_once(place, name, __name__, shares, urgent=urgent)


if __name__ == "__main__":
    compile_processes.run_parts({name: part.load for name, part in PARTS.items()}, sys.argv[1:])
