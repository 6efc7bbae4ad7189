"""Parts of the CPU engine's compiled code, each compiled by itself and cached on disk.

`GROUPS` says what is needed when. At the first start several processes compile the parts of a group
(`compile_processes`)::

    python -m warpfit_server.engine.cpu.codegen.parts DIRECTORY URGENT PART...
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from warpfit_server.engine.autodiff.differentiate import differentiate_chunk
from warpfit_server.engine.cpu.codegen import build
from warpfit_server.engine.cpu.codegen.kernels import FLAVOURS, Flavour
from warpfit_server.engine.cpu.derivative_interpreter import combine_chunk, linearise_chunk
from warpfit_server.engine.cpu.interpreter import interpret_chunk
from warpfit_server.engine.fit import compiled as fits
from warpfit_server.engine.lowering import validate
from warpfit_server.engine.lowering.lower import lower_chunk
from warpfit_server.engine.native import compile_processes, numba_cache, parallel_loop
from warpfit_server.system import compile_cache


class Part(NamedTuple):
    """A part of the compiled code that a process can compile alone."""

    seconds: float
    """About how long compiling takes."""
    load: Callable[[], Any]
    """Load it, or compile and store it."""


def _chunk_function(seconds: float, function: Any) -> Part:
    return Part(seconds, partial(numba_cache.load_chunk_function, function))


def _objects(suffix: str, compile_object: Callable[[Flavour], bytes]) -> dict[Flavour, bytes]:
    """Load the object files of kernels of all flavours."""
    ending = f"{suffix}-{numba_cache.host_tag()}.o"
    return {
        flavour: compile_cache.find_or_make(
            numba_cache.default_directory() / f"{flavour.name}{ending}",
            partial(compile_object, flavour),
        )
        for flavour in FLAVOURS
    }


PARTS: Final = {
    "lower": _chunk_function(5.4, lower_chunk),
    "kernels": Part(3.4, partial(_objects, "", build.build)),
    "interpret": _chunk_function(3.1, interpret_chunk),
    "parallel": Part(0.8, parallel_loop.load),
    "check": Part(0.8, validate.load),
    "differentiate": _chunk_function(12.0, differentiate_chunk),
    "linearise": _chunk_function(10.0, linearise_chunk),
    "derivative_kernels": Part(4.6, partial(_objects, "-derivatives", build.build_derivatives)),
    "combine": _chunk_function(2.5, combine_chunk),
    **{name: Part(*part) for name, part in fits.PARTS.items()},
}
#: What is needed at the same time, and is compiled side by side: a start needs "values".
GROUPS: Final = {
    "values": ("lower", "kernels", "interpret", "parallel", "check"),
    "derivatives": ("differentiate", "linearise", "derivative_kernels", "combine", *fits.PARTS),
}
#: More would wait for the longest part, and each takes some 300 MiB.
_MOST_PROCESSES: Final = 4


def load_group(group: str, processes: int, *, urgent: bool) -> dict[str, Any]:
    """Load the parts of a group by name, which are compiled first if they are not cached.

    Otherwise as `compile_group`.
    """
    compile_group(group, processes, urgent=urgent)
    return {name: PARTS[name].load() for name in GROUPS[group]}


def compile_group(group: str, processes: int, *, urgent: bool = True) -> None:
    """Compile a group by so many processes at most, unless that has been done.

    No caller waits for it unless it is ``urgent``.
    """
    seconds = {name: PARTS[name].seconds for name in GROUPS[group]}
    shares = compile_processes.share_out(seconds, min(processes, _MOST_PROCESSES))
    name, place = f"{group}-{numba_cache.host_tag()}", numba_cache.default_directory()
    compile_processes.compile_once(place, name, __name__, shares, urgent=urgent)


def precompile(processes: int) -> None:
    """Compile all groups, without loading them; otherwise as `compile_group`."""
    for group in GROUPS:
        compile_group(group, processes)


def _run(_: Path, name: str) -> None:
    PARTS[name].load()


if __name__ == "__main__":
    compile_processes.run_parts({name: partial(_run, name=name) for name in PARTS}, sys.argv[1:])
