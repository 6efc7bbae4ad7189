"""Loads the CPU engine's compiled code from disk; only the very first start compiles."""

from __future__ import annotations

import ctypes
import logging
import time
from dataclasses import dataclass
from typing import Any, Final

import llvmlite.binding as llvm
import numpy as np
from numpy.typing import NDArray

from warpfit import ops
from warpfit_server.engine.autodiff import rules
from warpfit_server.engine.cpu.codegen import build, dot_products, parts
from warpfit_server.engine.cpu.codegen.kernels import COPY, LOSS_KERNELS, Flavour, symbol
from warpfit_server.engine.lowering.lowered import COPY_CODE

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


#: Kernels by flavour. The functions that call them are loaded with them.
Kernels = dict[Flavour, KernelSet]


def load(processes: int = 1) -> Kernels:
    """Load the code that a start needs, for values and the six losses; return the kernels.

    Where it is not kept on disk, it is compiled by so many processes first.
    """
    found = _load_group("values", processes, urgent=True)
    return {flavour: _link_kernels(code) for flavour, code in found["kernels"].items()}


def load_derivatives(kernels: Kernels, processes: int) -> Kernels:
    """Load the code for derivatives and fits; return the kernels of both, otherwise as `load`."""
    found = _load_group("derivatives", processes, urgent=False)
    return {
        flavour: _link_derivatives(kernels[flavour], content)
        for flavour, content in found["derivative_kernels"].items()
    }


def _load_group(group: str, processes: int, *, urgent: bool) -> dict[str, Any]:
    start = time.perf_counter()
    found = parts.load_group(group, processes, urgent=urgent)
    _LOG.info("code for %s is ready after %.2f s", group, time.perf_counter() - start)
    return found


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
    for function in sorted(ops.KERNEL_FUNCTIONS - {"abs", "digamma", "mod"}):
        pointer = ctypes.cast(getattr(library, function), ctypes.c_void_p).value
        llvm.add_symbol(function, pointer)
    owner = llvm.create_mcjit_compiler(llvm.parse_assembly(""), build.target_machine())
    owner.add_object_file(llvm.ObjectFileRef.from_data(code))
    owner.finalize_object()
    return owner
