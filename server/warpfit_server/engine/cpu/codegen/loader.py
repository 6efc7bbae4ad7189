"""Loads the CPU engine's compiled code from disk; only the very first start compiles."""

from __future__ import annotations

import ctypes
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import llvmlite.binding as llvm
import numpy as np
from numpy.typing import NDArray

from warpfit import ops
from warpfit_server.engine.autodiff import rules
from warpfit_server.engine.cpu.codegen import build, dot_products, parts
from warpfit_server.engine.cpu.codegen.kernels import COPY, LOSS_KERNELS, Flavour, symbol
from warpfit_server.engine.lowering.lowered import COPY_CODE
from warpfit_server.engine.native.numba_cache import address_of
from warpfit_server.engine.native.threads import ParallelCode
from warpfit_server.system.compile_cache import usable_cache_directory

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class KernelSet:
    """Loaded kernels of one flavour; the addresses are valid while the object lives."""

    addresses: NDArray[np.int64]
    """Addresses by code of the instruction, int64 [rules.CODES]; 0 where there is no kernel."""
    losses: dict[str, int]
    """Addresses by name of the loss kernel."""
    dots: NDArray[np.int64]
    """Addresses in the order of `dot_products.DOT_SHAPES`; empty without derivatives."""
    owners: tuple[Any, ...]
    """LLVM execution engines that own the code."""


@dataclass(frozen=True, eq=False)
class CompiledCode:
    """The compiled code that a start needs: for values and the six losses."""

    lower: int
    """Address of a function that runs a chunk, see `arguments`; so is the next."""
    interpret: int
    parallel: ParallelCode
    kernels: dict[Flavour, KernelSet]
    owners: tuple[Any, ...]
    """Owners of the code, which must live as long as these addresses are used."""


@dataclass(frozen=True, eq=False)
class CompiledDerivatives:
    """The compiled code that derivatives need besides `CompiledCode`."""

    lower: int
    """Address of a function that runs a chunk, see `arguments`; so are the next."""
    differentiate: int
    linearise: int
    combine: int
    kernels: dict[Flavour, KernelSet]
    """Kernels of operators, losses and derivatives."""
    owners: tuple[Any, ...]


def load(directory: Path, processes: int = 1) -> CompiledCode:
    """Load the engine's code from ``directory``, or compile it by processes and try to cache it.

    Raises:
        InvalidArgumentError: if others could have written to the directory.
    """
    found = _load_group(directory, "values", processes, urgent=True)
    kernels = {flavour: _link_kernels(code) for flavour, code in found["kernels"].items()}
    functions = found["lower"], found["interpret"]
    lower, interpret = (address_of(function) for function in functions)
    return CompiledCode(lower, interpret, found["parallel"], kernels, functions)


def load_derivatives(directory: Path, code: CompiledCode, processes: int) -> CompiledDerivatives:
    """Load the code for derivatives; otherwise as `load`."""
    found = _load_group(directory, "derivatives", processes, urgent=False)
    kernels = {
        flavour: _link_derivatives(code.kernels[flavour], content)
        for flavour, content in found["derivative_kernels"].items()
    }
    functions = found["differentiate"], found["linearise"], found["combine"]
    differentiate, linearise, combine = (address_of(function) for function in functions)
    return CompiledDerivatives(code.lower, differentiate, linearise, combine, kernels, functions)


def _load_group(directory: Path, group: str, processes: int, *, urgent: bool) -> dict[str, Any]:
    """Load the parts of a group by name, which are compiled first if they are not cached."""
    start = time.perf_counter()
    with usable_cache_directory(directory) as usable_directory:
        place = parts.directory_of(usable_directory)
        parts.compile_group(place, group, processes, urgent=urgent)
        found = {name: parts.PARTS[name].load(place) for name in parts.GROUPS[group]}
    _LOG.info("code for %s is ready after %.2f s", group, time.perf_counter() - start)
    return found


def precompile(directory: Path, processes: int) -> None:
    """Compile what `load` and `load_derivatives` load, without loading it."""
    for group in parts.GROUPS:
        parts.compile_group(parts.directory_of(directory), group, processes)


def _link_kernels(code: bytes) -> KernelSet:
    owner = _link(code)
    names = {row.code: name for name, row in ops.OPERATORS.items()} | {COPY_CODE: COPY}
    addresses = np.zeros(rules.CODES, dtype=np.int64)
    for index, name in names.items():
        addresses[index] = owner.get_function_address(symbol(name))
    losses = {name: owner.get_function_address(symbol(name)) for name in LOSS_KERNELS}
    return KernelSet(addresses, losses, np.zeros(0, dtype=np.int64), (owner,))


def _link_derivatives(kernels: KernelSet, code: bytes) -> KernelSet:
    owner = _link(code)
    names = {kernel.code: kernel.name for kernel in rules.partial_kernels()}
    addresses = kernels.addresses.copy()
    for index, name in (names | {rules.PRODUCT_CODE: build.PRODUCT}).items():
        addresses[index] = owner.get_function_address(symbol(name))
    dots = [owner.get_function_address(symbol(shape.name)) for shape in dot_products.DOT_SHAPES]
    owners = (*kernels.owners, owner)
    return KernelSet(addresses, kernels.losses, np.array(dots, dtype=np.int64), owners)


def _link(code: bytes) -> Any:
    """Link an object file; return the execution engine that owns its code."""
    library = ctypes.CDLL(None)  # Python itself is linked with the functions of C's math.h
    for function in sorted(ops.KERNEL_FUNCTIONS - {"abs", "digamma"}):
        pointer = ctypes.cast(getattr(library, function), ctypes.c_void_p).value
        llvm.add_symbol(function, pointer)
    owner = llvm.create_mcjit_compiler(llvm.parse_assembly(""), build.target_machine())
    owner.add_object_file(llvm.ObjectFileRef.from_data(code))
    owner.finalize_object()
    return owner
