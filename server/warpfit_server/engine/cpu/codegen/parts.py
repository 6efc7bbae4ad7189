"""Parts of the CPU engine's compiled code, each compiled by itself, cached on disk and loaded.

`GROUPS` says what is needed when. At the first start several processes compile the groups one after
the other (`numba_cache.begin`)::

    python -m warpfit_server.engine.cpu.codegen.parts DIRECTORY LOCK:GROUP:PART,...
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple

import llvmlite.binding as llvm
import numpy as np

from warpfit import ops
from warpfit_server import compile_cache
from warpfit_server.engine.autodiff import (
    CODE_COUNT,
    PRODUCT_CODE,
    differentiate_chunk,
    partial_kernels,
)
from warpfit_server.engine.cpu import colony, pairs
from warpfit_server.engine.cpu.codegen.kernels import (
    COPY,
    DOT_SHAPES,
    LOSS_KERNELS,
    PRODUCT,
    Kernels,
    KernelSet,
    build,
    build_derivatives,
    symbol,
    target_machine,
)
from warpfit_server.engine.cpu.derivatives import combine_chunk, linearise_chunk
from warpfit_server.engine.cpu.interpreter import interpret_chunk
from warpfit_server.engine.fit import driver as fits
from warpfit_server.engine.interface import Arithmetic
from warpfit_server.engine.lowering import COPY_CODE, load_check, lower_chunk
from warpfit_server.engine.native import intrinsics, numba_cache
from warpfit_server.engine.search import composition, genome

_LOG: Final = logging.getLogger(__name__)


class Part(NamedTuple):
    """A part of the compiled code that a process can compile alone."""

    seconds: float
    """About how long compiling takes."""
    load: Callable[[], Any]
    """Load it, or compile and store it."""


def _chunk_function(seconds: float, function: Any) -> Part:
    return Part(seconds, partial(numba_cache.load_chunk_function, function))


def _kernels(
    seconds: float, suffix: str, build_object: Callable[[Arithmetic], bytes]
) -> dict[str, Part]:
    """Return the parts that load object files of kernels, one for each arithmetic."""

    def load_object(arithmetic: Arithmetic) -> bytes:
        file = f"{arithmetic.label}{suffix}-{numba_cache.host_tag()}.o"
        return compile_cache.find_or_make(
            numba_cache.default_directory() / file, partial(build_object, arithmetic)
        )

    return {
        f"{arithmetic.label}{suffix}": Part(seconds, partial(load_object, arithmetic))
        for arithmetic in Arithmetic
    }


_KERNELS: Final = _kernels(1.9, "-kernels", build)
_DERIVATIVE_KERNELS: Final = _kernels(3.5, "-derivatives", build_derivatives)
_DOUBLE_DERIVATIVES: Final = f"{Arithmetic.DOUBLE.label}-derivatives"
PARTS: Final = {
    "lower": _chunk_function(1.0, lower_chunk),
    **_KERNELS,
    "interpret": _chunk_function(0.8, interpret_chunk),
    "parallel": Part(0.4, intrinsics.load),
    "check": Part(0.1, load_check),
    "differentiate": _chunk_function(2.5, differentiate_chunk),
    "linearise": _chunk_function(2.0, linearise_chunk),
    **_DERIVATIVE_KERNELS,
    "combine": _chunk_function(0.7, combine_chunk),
    "populate": _chunk_function(1.8, colony.populate_chunk),
    "breed": _chunk_function(2.6, colony.breed_chunk),
    "screen": _chunk_function(1.8, colony.screen_chunk),
    "fit": _chunk_function(2.0, colony.fit_chunk),
    "keep": _chunk_function(0.3, colony.keep_chunk),
    "weigh": Part(1.0, pairs.load),
    "rules": Part(0.6, genome.load),
    "compose": Part(1.0, composition.load),
    **{name: Part(*part) for name, part in fits.PARTS.items()},
}
#: What is needed at the same time, in the order of need; a start needs "values". Parts that stand
#: together call the same functions, which one process compiles once for all of them if there are no
#: instructions of them (`numba_cache`).
GROUPS: Final = {
    "values": (("lower",), *[(name,) for name in _KERNELS], ("interpret",), ("parallel", "check")),
    "derivatives": (
        *(("differentiate",), ("linearise", "combine")),
        *[(name,) for name in (_DOUBLE_DERIVATIVES, *fits.PARTS)],
    ),
    "search": (
        ("populate", "breed", "rules", "compose"),
        ("screen", "fit", "keep", "weigh"),
    ),
    "float32 derivatives": tuple(
        [(name,) for name in _DERIVATIVE_KERNELS if name != _DOUBLE_DERIVATIVES]
    ),
}
#: More would wait for the longest part, and each takes some 300 MiB.
_MOST_PROCESSES: Final = 4


def begin_compiling(processes: int, groups: Iterable[str] = GROUPS) -> None:
    """Start so many processes at most that compile what has not been compiled of the groups."""
    seconds = {
        _file(group): {names: sum(PARTS[name].seconds for name in names) for names in GROUPS[group]}
        for group in groups
    }
    place, most = numba_cache.default_directory(), min(processes, _MOST_PROCESSES)
    numba_cache.begin(place, __name__, seconds, most)


def load_group(group: str, processes: int) -> dict[str, Any]:
    """Load the parts of a group by name, which so many processes compile first if need be."""
    start = time.perf_counter()
    begin_compiling(processes, [group])
    numba_cache.wait(numba_cache.default_directory(), _file(group))
    found = {name: PARTS[name].load() for together in GROUPS[group] for name in together}
    _LOG.info("code for %s is ready after %.2f s", group, time.perf_counter() - start)
    return found


def precompile(processes: int) -> None:
    """Compile all groups by so many processes at most, without loading them."""
    begin_compiling(processes)
    for group in GROUPS:
        numba_cache.wait(numba_cache.default_directory(), _file(group))


def _file(group: str) -> str:
    return f"{group}-{numba_cache.host_tag()}"


def load(processes: int = 1) -> Kernels:
    """Load the code that a start needs, for values and the six losses; return the kernels.

    Where it is not kept on disk, it is compiled by so many processes first.
    """
    names = {row.code: name for name, row in ops.OPERATORS.items()} | {COPY_CODE: COPY}
    kernels = {}
    found = load_group("values", processes)
    for arithmetic, part in zip(Arithmetic, _KERNELS, strict=True):
        owner = _link(found[part])
        addresses = np.zeros(CODE_COUNT, dtype=np.int64)
        for index, name in names.items():
            addresses[index] = owner.get_function_address(symbol(name))
        losses = {name: owner.get_function_address(symbol(name)) for name in LOSS_KERNELS}
        kernels[arithmetic] = KernelSet(addresses, losses, np.zeros(0, dtype=np.int64), (owner,))
    return kernels


def load_derivatives(kernels: Kernels, processes: int) -> Kernels:
    """Load the code for derivatives and fits; return kernels of float64, otherwise as `load`.

    Data sets are of float64 unless a caller says otherwise, so that a first fit waits for no more.
    """
    # Importing the driver of fits takes longer than a step: the first fit finds it imported.
    importlib.import_module("warpfit_server.engine.fit.driver")
    return _with_derivatives(kernels, load_group("derivatives", processes))


def load_single_derivatives(kernels: Kernels, processes: int) -> Kernels:
    """Load the kernels for derivatives in float32 as well."""
    return _with_derivatives(kernels, load_group("float32 derivatives", processes))


def _with_derivatives(kernels: Kernels, found: dict[str, Any]) -> Kernels:
    """Return the kernels of those arithmetics for which those of derivatives were loaded."""
    names = {kernel.code: kernel.name for kernel in partial_kernels()} | {PRODUCT_CODE: PRODUCT}
    both = {}
    for arithmetic, part in zip(Arithmetic, _DERIVATIVE_KERNELS, strict=True):
        if part not in found:
            continue
        owner, own = _link(found[part]), kernels[arithmetic]
        addresses = own.addresses.copy()
        for index, name in names.items():
            addresses[index] = owner.get_function_address(symbol(name))
        dots = [owner.get_function_address(symbol(shape.name)) for shape in DOT_SHAPES]
        owners = (*own.owners, owner)
        both[arithmetic] = KernelSet(addresses, own.losses, np.array(dots, np.int64), owners)
    return both


def load_search(processes: int) -> None:
    """Load the code for searches, which is compiled first where it is not kept on disk."""
    importlib.import_module("warpfit_server.engine.search.driver")  # which takes longer than a step
    load_group("search", processes)


def _link(code: bytes) -> Any:
    """Link an object file; return the execution engine that owns its code."""
    library = ctypes.CDLL(None)  # Python itself is linked with the functions of C's math.h
    for function in sorted(ops.KERNEL_FUNCTIONS - {"abs", "digamma", "mod"}):
        pointer = ctypes.cast(getattr(library, function), ctypes.c_void_p).value
        llvm.add_symbol(function, pointer)
    owner = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
    owner.add_object_file(llvm.ObjectFileRef.from_data(code))
    owner.finalize_object()
    return owner


if __name__ == "__main__":
    numba_cache.run_parts({name: part.load for name, part in PARTS.items()}, sys.argv[1:])
