"""Parts of the CUDA engine's compiled code, each compiled by another process; needs no GPU.

NVRTC and nvJitLink compile on one core and keep some 250 MiB, so several processes compile the
groups of parts into the cache (`numba_cache.begin`), and the engine loads them from there::

    python -m warpfit_server.engine.cuda.parts DIRECTORY LOCK:NAME:ARCHITECTURE/GROUP/PART,...
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

from warpfit_server.engine.autodiff import differentiate_chunk
from warpfit_server.engine.cuda.derivatives import launches as derivative_launches
from warpfit_server.engine.cuda.derivatives import tier as derivatives
from warpfit_server.engine.cuda.derivatives.lowering import derivative_source
from warpfit_server.engine.cuda.interpreter import launches
from warpfit_server.engine.cuda.interpreter import tier as interpreter
from warpfit_server.engine.cuda.interpreter.launches import (
    Variant,
    interpreter_source,
    lowering_source,
)
from warpfit_server.engine.cuda.jit import kernel_store, tier
from warpfit_server.engine.cuda.runtime.compiler import CudaSource
from warpfit_server.engine.fit import driver as fits
from warpfit_server.engine.lowering import load_check
from warpfit_server.engine.native import numba_cache


def _variants(
    compile_variant: Callable[[Variant], CudaSource], seconds: dict[Variant, float]
) -> dict[str, tuple[float, Callable[[], CudaSource]]]:
    return {
        f"{variant.arithmetic.label}-{variant.rows}": (duration, partial(compile_variant, variant))
        for variant, duration in seconds.items()
    }


_INTERPRETERS: Final = dict(zip(interpreter.VARIANTS, (0.9, 2.3, 2.4, 2.9, 2.0, 4.0), strict=True))
_DERIVATIVES: Final = dict(zip(derivatives.VARIANTS, (5.2, 11.8, 7.7), strict=True))
#: Kernels by group: approximate seconds for compute capability 9.0, and the source.
_KERNELS: Final = {
    "values": {
        "lowering": (1.0, lowering_source),
        "graph kernels": (0.3, tier.graph_source),
        **_variants(interpreter_source, _INTERPRETERS),
    },
    "derivatives": _variants(partial(derivative_source, spills=False), _DERIVATIVES),
    "spilling": _variants(partial(derivative_source, spills=True), _DERIVATIVES),
}
#: Functions that Numba compiles, by group: seconds, and the function that loads them.
_HOST_CODE: Final[dict[str, dict[str, tuple[float, Callable[[], object]]]]] = {
    "values": {
        "check": (0.8, load_check),
        "launches": (1.2, launches.load),
    },
    "derivatives": {
        "host lowering": (3.5, derivative_launches.load),
        "kernel plans": (2.5, partial(numba_cache.load_chunk_function, differentiate_chunk)),
        "kernel loads": (0.5, kernel_store.load),
        **fits.PARTS,
    },
    "spilling": {},
}
#: Names of the parts of each group, in the order of need. A start needs "values".
GROUPS: Final = {group: (*_KERNELS[group], *_HOST_CODE[group]) for group in _KERNELS}


def begin_compiling(
    directory: Path, architecture: int, processes: int, groups: Iterable[str] = GROUPS
) -> None:
    """Start so many processes at most that compile what the cache has not of the groups."""
    seconds: dict[str, dict[tuple[str, ...], float]] = {
        _files(architecture)[group]: {
            (f"{architecture}/{group}/{name}",): part[0]
            for name, part in (_KERNELS[group] | _HOST_CODE[group]).items()
        }
        for group in groups
    }
    numba_cache.begin(directory / "cubin", __name__, seconds, processes)


def compile_group(group: str, directory: Path, architecture: int, processes: int) -> None:
    """Have a group of `GROUPS` compiled into the cache by other processes; wait for it."""
    begin_compiling(directory, architecture, processes, [group])
    numba_cache.wait(directory / "cubin", _files(architecture)[group])


def load_host_code(group: str) -> None:
    """Load what Numba has compiled of a group, which no call compiles then."""
    for _, load in _HOST_CODE[group].values():
        load()


def precompile(directory: Path, architecture: int, processes: int) -> None:
    """Compile all groups for a compute capability; otherwise as `compile_group`."""
    begin_compiling(directory, architecture, processes)
    for group in GROUPS:
        numba_cache.wait(directory / "cubin", _files(architecture)[group])


@functools.cache
def _files(architecture: int) -> dict[str, str]:
    """Return a name for each group, with a hash of all that the code of all groups depends on."""
    sources = [source() for group in _KERNELS.values() for _, source in group.values()]
    host = numba_cache.default_directory().name, numba_cache.host_tag()
    text = "\0".join([*host, *(word for source in sources for word in source.key(architecture))])
    return {group: f"{group}-{hashlib.sha256(text.encode()).hexdigest()[:32]}" for group in GROUPS}


def _run(directory: Path, name: str) -> None:
    """Compile the part ``architecture/group/name`` for a cache directory."""
    architecture, group, part = name.split("/")
    if part in _HOST_CODE[group]:
        _HOST_CODE[group][part][1]()
    else:
        _KERNELS[group][part][1]().cached(int(architecture), directory)


if __name__ == "__main__":
    named = [name for word in sys.argv[2:] for name in word.split(":", 2)[2].split(",")]
    directory = Path(sys.argv[1]).parent
    numba_cache.run_parts({n: partial(_run, directory, n) for n in named}, sys.argv[1:])
