"""Compiled code of the CPU engine, kept on disk so that only the very first start compiles."""

from __future__ import annotations

import ctypes
import ctypes.util
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numpy.typing import NDArray

from warpfit import ops
from warpfit_server.engine.autodiff import rules
from warpfit_server.engine.cpu.codegen import build, dot_products, partials, parts
from warpfit_server.engine.cpu.codegen.kernels import COPY, LOSS_KERNELS, Flavour, symbol
from warpfit_server.engine.cpu.threads import ParallelCode
from warpfit_server.engine.lowering import schedule
from warpfit_server.system.compile_cache import usable_cache_directory

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Kernels:
    """Loaded kernels of one flavour; the addresses are valid while the object lives."""

    addresses: NDArray[np.int64]
    """By code of the instruction, int64 [rules.CODES]; 0 where there is none."""
    losses: dict[str, int]
    """By name of the loss kernel."""
    dots: NDArray[np.int64]
    """Kernels of sums of products, in the order of `dot_products.DOT_SHAPES`, int64; empty where
    there are no derivatives."""
    owners: tuple[Any, ...]
    """LLVM execution engines that own the code."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """The compiled code that a start needs: for values and the six losses."""

    lower: int
    """Address of what runs a piece of lowering; the next one of an evaluation."""
    interpret: int
    parallel: ParallelCode
    kernels: dict[Flavour, Kernels]
    owners: tuple[Any, ...]
    """What has to live as long as these addresses are used."""


@dataclass(frozen=True, eq=False)
class Derivatives:
    """The compiled code that evaluations with derivatives need besides `Compiled`."""

    combine: Any
    differentiate: int
    """Address of what runs a piece of lowering; the next one of an evaluation."""
    linearise: int
    kernels: dict[Flavour, Kernels]
    """Kernels of operators, losses and derivatives."""
    owners: tuple[Any, ...]


def load(directory: Path, processes: int = 1) -> Compiled:
    """Load the engine's code from ``directory``, or compile it and try to store it there.

    Args:
        directory: where compiled code is kept.
        processes: that may compile at the first start.

    Raises:
        InvalidArgumentError: if others could have written to the directory.

    """
    start = time.perf_counter()
    with usable_cache_directory(directory) as usable_directory:
        kept = _place(usable_directory)
        parts.compile_group(kept, "values", processes)
        runners = parts.lower(kept), parts.interpret(kept)
        parallel, objects = parts.parallel(kept), parts.kernels(kept)
        parts.check(kept)
    kernels = {flavour: _load_kernels(code) for flavour, code in objects.items()}
    _log.info("CPU engine ready after %.2f s", time.perf_counter() - start)
    lower, interpret = (_address_of(runner) for runner in runners)
    return Compiled(lower, interpret, parallel, kernels, runners)


def load_derivatives(directory: Path, compiled: Compiled, processes: int = 1) -> Derivatives:
    """Load the code for derivatives; otherwise as `load`."""
    start = time.perf_counter()
    with usable_cache_directory(directory) as usable_directory:
        kept = _place(usable_directory)
        parts.compile_group(kept, "derivatives", processes, urgent=False)
        runners = parts.derive(kept), parts.linearise(kept)
        combine, objects = parts.combine(kept), parts.derivative_kernels(kept)
    kernels = {
        flavour: _add_derivatives(compiled.kernels[flavour], code)
        for flavour, code in objects.items()
    }
    _log.info("derivatives ready after %.2f s", time.perf_counter() - start)
    differentiate, linearise = (_address_of(runner) for runner in runners)
    return Derivatives(combine, differentiate, linearise, kernels, runners)


def precompile(directory: Path, processes: int) -> None:
    """Compile everything that `load` and `load_derivatives` would, and load nothing."""
    for group in ("values", "derivatives"):
        parts.compile_group(_place(directory), group, processes)


def _place(directory: Path) -> Path:
    return directory / f"cpu-{parts.fingerprint()[:32]}"


def _load_kernels(code: bytes) -> Kernels:
    owner = _linked(code)
    names = {row.code: name for name, row in ops.OPERATORS.items()} | {schedule.COPY_CODE: COPY}
    addresses = np.zeros(rules.CODES, dtype=np.int64)
    for index, name in names.items():
        addresses[index] = owner.get_function_address(symbol(name))
    losses = {name: owner.get_function_address(symbol(name)) for name in LOSS_KERNELS}
    return Kernels(addresses, losses, np.zeros(0, dtype=np.int64), (owner,))


def _add_derivatives(kernels: Kernels, code: bytes) -> Kernels:
    owner = _linked(code)
    names = {kernel.code: kernel.name for kernel in rules.partial_kernels()}
    addresses = kernels.addresses.copy()
    for index, name in (names | {rules.PRODUCT_CODE: partials.PRODUCT}).items():
        addresses[index] = owner.get_function_address(symbol(name))
    dots = [owner.get_function_address(symbol(shape.name)) for shape in dot_products.DOT_SHAPES]
    owners = (*kernels.owners, owner)
    return Kernels(addresses, kernels.losses, np.array(dots, dtype=np.int64), owners)


def _linked(code: bytes) -> Any:
    """Load an object file; return the execution engine that owns its code."""
    _make_library_visible()
    owner = llvm.create_mcjit_compiler(llvm.parse_assembly(""), build.target_machine())
    owner.add_object_file(llvm.ObjectFileRef.from_data(code))
    owner.finalize_object()
    return owner


def _make_library_visible() -> None:
    """Tell LLVM's linker where the C library's functions are."""
    name = ctypes.util.find_library("m")
    library = ctypes.CDLL(name)
    for function in sorted(ops.KERNEL_FUNCTIONS - {"abs"}):
        pointer = ctypes.cast(getattr(library, function), ctypes.c_void_p).value
        llvm.add_symbol(function, pointer)


def _address_of(runner: Any) -> int:
    """Find where the function begins that C code may call."""
    (compiled,) = runner.overloads.values()
    name = compiled.fndesc.llvm_cfunc_wrapper_name
    return int(compiled.library.get_pointer_to_function(name))
