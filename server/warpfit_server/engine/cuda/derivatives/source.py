"""CUDA C++ source of the interpreter of derivatives, generated from the operator table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ops import OPERATORS
from warpfit_server.engine.autodiff.rules import CODES, PRODUCT_CODE, arities, partial_kernels
from warpfit_server.engine.cuda.interpreter.source import (
    Variant,
    device_function,
    is_costly,
    is_direct,
    operator_functions,
    source_of,
)
from warpfit_server.engine.cuda.math.prelude import operator_source, precise_calls, render
from warpfit_server.engine.cuda.runtime.compiler import CudaSource
from warpfit_server.engine.interface import Arithmetic

#: Warps of a block, and the least blocks of a multiprocessor.
WARPS: Final = 8
BLOCKS: Final = 2
#: Bytes of a column in a block of rows, whose sums are partial sums.
_BLOCK_BYTES: Final = 16384
#: Bytes of an invariant on the device: those of a pack.
INVARIANT_BYTES: Final = 16
#: Threads of a block that combines the partial sums of a job.
COMBINE_THREADS: Final = 128
#: Labels of an instruction with two operands.
_FORMS: Final = 6
_OPERANDS: Final = ("t", "u", "v")


class _Case(NamedTuple):
    """The case, or cases, of the switch for one device function."""

    function: str
    arity: int
    macro: str = "CHEAP"


def derivative_source(variant: Variant, *, spills: bool = False) -> CudaSource:
    """Return the kernels of one variant.

    If it ``spills``, intermediate results are in global memory, for programs that need more than
    shared memory has.
    """
    cases = sorted(_cases(variant).items())
    parts = {
        "OPERATORS": [
            *operator_functions(variant.arithmetic),
            *_partial_functions(variant.arithmetic),
        ],
        "CASES": [
            f"      {case.macro}_{case.arity}({label}, {case.function})" for label, case in cases
        ],
        "INVARIANT_CASES": [
            f"      case {label}: t = {case.function}({', '.join(_OPERANDS[: case.arity])}); break;"
            for label, case in cases
        ],
    }
    definitions: dict[str, int | str] = {"FAR": int(spills), "WARPS": WARPS}
    definitions |= {"BLOCK_TILES": block_tiles(variant), "COMBINE_THREADS": COMBINE_THREADS}
    definitions |= {"BLOCKS_AT_LEAST": BLOCKS, "INVARIANT_BYTES": INVARIANT_BYTES}
    text = template("derivatives.cu") + template("linearise.cu")
    own = source_of(variant, definitions, text, parts) + template("statistics.cu")
    last = labels().argmax()
    # Label 0, which does nothing, is one of the cases.
    count = int(labels()[last]) + (_FORMS if arities()[last] == 2 else 1)
    return CudaSource(own, variant.options, count)


def block_tiles(variant: Variant) -> int:
    """Return the number of tiles of a block of rows, a power of two."""
    return _BLOCK_BYTES // (variant.tile * variant.dtype.itemsize)


def template(name: str) -> str:
    """Return the text of a file of CUDA C++ of this package."""
    return resources.files(__package__).joinpath(name).read_text()


@cache
def labels() -> NDArray[np.int64]:
    """Return the case label of each instruction by code, int64 [CODES]; 0 if it does nothing.

    Derivatives with the same text share a label. An instruction with two operands has `_FORMS`
    labels: two for each kind of place of the second one, of which the latter has the operands the
    other way round.
    """
    table = np.zeros(CODES, dtype=np.int64)
    known: dict[object, int] = {}
    end = 1
    for code, identity, arity in _instructions():
        if identity not in known:
            known[identity] = end
            end += _FORMS if arity == 2 else 1
        table[code] = known[identity]
    return table


def _instructions() -> Iterator[tuple[int, object, int]]:
    """Yield the code of every instruction but copies, what identifies its case, and its arity."""
    for row in OPERATORS.values():
        yield row.code, row.name, row.arity
    for kernel in partial_kernels():
        yield kernel.code, (kernel.source, kernel.scaled), kernel.arity + kernel.scaled
    yield PRODUCT_CODE, "product", 2


def _cases(variant: Variant) -> dict[int, _Case]:
    """Return the cases by their first labels."""
    table = labels()
    cases: dict[int, _Case] = {}
    for row in OPERATORS.values():
        macro = _macro(operator_source(row, variant.arithmetic), row.arity, variant)
        cases[int(table[row.code])] = _Case(f"op_{row.name}", row.arity, macro)
    for kernel in partial_kernels():
        arity = kernel.arity + kernel.scaled
        macro = _macro(partial_source(kernel.source, variant.arithmetic), arity, variant)
        case = _Case(kernel.name, arity, macro)
        cases.setdefault(int(table[kernel.code]), case)
    cases[int(table[PRODUCT_CODE])] = _Case("product", 2, "DIRECT")
    return cases


def _macro(expression: str, arity: int, variant: Variant) -> str:
    """Return the kind of macro in derivatives.cu that writes the cases of an expression."""
    if is_costly(expression, variant):
        return "COSTLY"
    return "DIRECT" if arity == 2 and is_direct(expression) else "CHEAP"


def _partial_functions(arithmetic: Arithmetic) -> Iterator[str]:
    """Yield the definition of a device function for each partial derivative."""
    table, defined = labels(), set()
    for kernel in partial_kernels():
        label = int(table[kernel.code])
        if label not in defined:
            defined.add(label)
            operands, expression = (
                list("abc"[: kernel.arity]),
                partial_source(kernel.source, arithmetic),
            )
            if kernel.scaled:
                operands, expression = ["slope", *operands], f"product(slope, {expression})"
            yield device_function(kernel.name, operands, expression)


def partial_source(source: str, arithmetic: Arithmetic) -> str:
    """Translate a derivative to CUDA C++, with approximate functions in fast arithmetic."""
    if not arithmetic.is_fast:
        return render(precise_calls(source), arithmetic.real)
    calls = _fast_calls()
    source = re.sub(r"\b(\w+)\(", lambda call: f"{calls.get(call[1], call[1])}(", source)
    return render(source, arithmetic.real)


@cache
def _fast_calls() -> MappingProxyType[str, str]:
    """Map functions to the approximate functions that replace them in the operator table."""
    calls = {}
    for row in OPERATORS.values():
        exact = re.fullmatch(r"(\w+)\(a(?:, b)?\)", row.kernel)
        fast = re.fullmatch(r"(\w+)\(a(?:, b)?\)", row.cuda_fast or "")
        if exact and fast:
            calls[exact[1]] = fast[1]
    return MappingProxyType(calls)
