"""Parts of the CUDA engine's compiled code, each compiled by another process; needs no GPU.

`GROUPS` says what is needed when. NVRTC and nvJitLink compile on one core and keep some 250 MiB, so
several processes compile the parts of a group into the cache (`compile_processes`), and the engine
loads them from there::

    python -m warpfit_server.engine.cuda.parts DIRECTORY URGENT ARCHITECTURE/PART...
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from warpfit_server.engine import validate
from warpfit_server.engine.cuda.derivatives import lowering as derivative_lowering
from warpfit_server.engine.cuda.derivatives import tier as derivatives
from warpfit_server.engine.cuda.interpreter import device_lowering, loss_launch
from warpfit_server.engine.cuda.interpreter import tier as interpreter
from warpfit_server.engine.cuda.interpreter.source import Variant
from warpfit_server.engine.cuda.jit import graph_launch
from warpfit_server.engine.cuda.runtime.device import cached_cubin
from warpfit_server.engine.native import compile_processes, numba_cache


class Part(NamedTuple):
    """Code that one process compiles."""

    seconds: float
    """Approximate duration; the longest part begins first."""
    compile: Callable[[int, Path], object]
    """Compile for a compute capability (90 for 9.0) into a cache directory, unless it is there."""


def _compile_interpreter(variant: Variant, architecture: int, directory: Path) -> None:
    interpreter.interpreter_switch(variant).cached(architecture, directory)


def _compile_derivatives(variant: Variant, architecture: int, directory: Path) -> None:
    derivatives.derivative_switch(variant, spills=False).cached(architecture, directory)


def _compile_lowering(architecture: int, directory: Path) -> None:
    key = device_lowering.lowering_key(architecture)
    cached_cubin(directory, key, lambda: device_lowering.lowering_cubin(architecture))


def _compile_host_code(load: Callable[[], None], _architecture: int, _directory: Path) -> None:
    load()


def _compile_derivative_lowering(_architecture: int, directory: Path) -> None:
    derivative_lowering.load(directory)


def _variants(
    compile_variant: Callable[[Variant, int, Path], None], seconds: dict[Variant, float]
) -> dict[str, Part]:
    return {
        f"{variant.dtype}-{variant.precision}-{variant.rows}": Part(
            duration, partial(compile_variant, variant)
        )
        for variant, duration in seconds.items()
    }


_INTERPRETERS: Final = dict(zip(interpreter.VARIANTS, (0.9, 2.3, 2.4, 2.9, 2.0, 4.0), strict=True))
_DERIVATIVES: Final = dict(zip(derivatives.VARIANTS, (5.2, 11.8, 7.7), strict=True))
#: Parts by group. A start needs "values". Seconds are of compute capability 9.0.
GROUPS: Final = {
    "values": {
        "lowering": Part(1.0, _compile_lowering),
        "check": Part(0.8, partial(_compile_host_code, validate.load)),
        "losses": Part(8.0, partial(_compile_host_code, loss_launch.load)),
        "graphs": Part(5.0, partial(_compile_host_code, graph_launch.load)),
        **_variants(_compile_interpreter, _INTERPRETERS),
    },
    "derivatives": {
        "lowering": Part(15.0, _compile_derivative_lowering),
        **_variants(_compile_derivatives, _DERIVATIVES),
    },
}


def compile_group(
    group: str,
    directory: Path,
    architecture: int,
    processes: int,
    *,
    urgent: bool = True,
) -> None:
    """Compile a group of parts into the cache by other processes, unless that has been done.

    Args:
        group: of `GROUPS`.
        directory: of the cache.
        architecture: compute capability, 90 for 9.0.
        processes: so many at most.
        urgent: whether a caller waits.
    """
    parts = GROUPS[group]
    seconds = {f"{architecture}/{group}/{name}": part.seconds for name, part in parts.items()}
    shares = compile_processes.share_out(seconds, processes)
    name = f"{group}-{_fingerprint(architecture)}"
    compile_processes.compile_once(directory / "cubin", name, __name__, shares, urgent=urgent)


def precompile(directory: Path, architecture: int, processes: int) -> None:
    """Compile all groups for a compute capability; otherwise as `compile_group`."""
    for group in GROUPS:
        compile_group(group, directory, architecture, processes)


def _fingerprint(architecture: int) -> str:
    """Return a hash of what shapes the code of all groups."""
    switches = [interpreter.interpreter_switch(variant) for variant in interpreter.VARIANTS]
    switches += [derivatives.derivative_switch(v, spills=False) for v in derivatives.VARIANTS]
    keys = [
        device_lowering.lowering_key(architecture),
        *(one.key(architecture) for one in switches),
    ]
    host = numba_cache.default_directory().name, derivative_lowering.directory_name()
    text = "\0".join([*host, *(word for key in keys for word in key)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _run(place: Path, name: str) -> None:
    """Compile the part ``architecture/group/name`` for the cache of which a folder is given."""
    architecture, group, part = name.split("/")
    GROUPS[group][part].compile(int(architecture), place.parent)


if __name__ == "__main__":
    names = sys.argv[3:]
    compile_processes.run_parts({n: partial(_run, name=n) for n in names}, sys.argv[1:])
