"""CUDA C++ source of the interpreter of derivatives, generated from the operator table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ops import OPERATORS
from warpfit_server.engine.autodiff.rules import CODES, PRODUCT_CODE, partial_kernels
from warpfit_server.engine.cuda.interpreter.source import (
    Variant,
    device_function,
    is_costly,
    operator_functions,
    source_of,
)
from warpfit_server.engine.cuda.math.modes import Mode
from warpfit_server.engine.cuda.math.precise import precise_calls
from warpfit_server.engine.cuda.math.prelude import operator_source, render
from warpfit_server.engine.lowering.lowered import COPY_CODE

#: Warps of a block, and the least blocks of a multiprocessor.
WARPS: Final = 8
BLOCKS: Final = 2
#: Tiles of a block of rows, whose sums are partial sums.
BLOCK_TILES: Final = 2 * WARPS
#: Threads of a block that combines the partial sums of a job.
COMBINE_THREADS: Final = 128
_OPERANDS: Final = ("t[i]", "u[i]", "v[i]")


@dataclass(frozen=True, slots=True)
class _Case:
    """A case of the switch: a CUDA C++ expression over the operands ``t[i]``, ``u[i]``..."""

    expression: str
    costly: bool = False


def derivative_source(variant: Variant, *, spills: bool = False) -> str:
    """Return the complete CUDA C++ source of one variant.

    If it ``spills``, intermediate results are in global memory, for programs that need more than
    shared memory has.
    """
    cases = list(enumerate(_cases(variant), start=1))
    parts = {
        "OPERATORS": [*operator_functions(variant.mode), *_partial_functions(variant.mode)],
        "CASES": [
            f"      {'COSTLY' if case.costly else 'CHEAP'}({label}, {case.expression})"
            for label, case in cases
        ],
        "SCALAR_CASES": [
            f"      case {label}: t[0] = {case.expression}; break;" for label, case in cases
        ],
    }
    definitions: dict[str, int | str] = {"FAR": int(spills), "WARPS": WARPS}
    definitions |= {"BLOCK_TILES": BLOCK_TILES, "COMBINE_THREADS": COMBINE_THREADS}
    definitions |= {"BLOCKS_AT_LEAST": BLOCKS}
    own = source_of(variant, definitions, template("derivatives.cu"), parts)
    return own + template("statistics.cu")


def template(name: str) -> str:
    """Return the text of a file of CUDA C++ of this package."""
    return resources.files(__package__).joinpath(name).read_text()


@cache
def labels() -> NDArray[np.int64]:
    """Return the case label of each instruction by code, int64 [CODES]; 0 for other codes.

    Derivatives with the same text share a label.
    """
    table = np.zeros(CODES, dtype=np.int64)
    known: dict[object, int] = {}
    for code, identity in _instructions():
        table[code] = known.setdefault(identity, len(known) + 1)
    return table


def case_count() -> int:
    """Return the number of case labels, label 0, which does nothing, included."""
    return int(labels().max()) + 1


def _instructions() -> Iterator[tuple[int, object]]:
    """Yield the code of every instruction, and what identifies its case."""
    for row in OPERATORS.values():
        yield row.code, row.name
    for kernel in partial_kernels():
        yield kernel.code, (kernel.source, kernel.scaled)
    yield PRODUCT_CODE, "product"
    yield COPY_CODE, "copy"


def _cases(variant: Variant) -> list[_Case]:
    """Return the cases in the order of their labels."""
    table = labels()
    cases: dict[int, _Case] = {}
    for row in OPERATORS.values():
        operands = ", ".join(_OPERANDS[: row.arity])
        expression = operator_source(row, variant.mode)
        cases[int(table[row.code])] = _Case(
            f"op_{row.name}({operands})", is_costly(expression, variant)
        )
    for kernel in partial_kernels():
        operands = ", ".join(_OPERANDS[: kernel.arity + kernel.scaled])
        costly = is_costly(partial_source(kernel.source, variant.mode), variant)
        cases.setdefault(int(table[kernel.code]), _Case(f"{kernel.name}({operands})", costly))
    cases[int(table[PRODUCT_CODE])] = _Case("product(t[i], u[i])")
    cases[int(table[COPY_CODE])] = _Case("t[i]")
    return [cases[label] for label in range(1, len(cases) + 1)]


def _partial_functions(mode: Mode) -> Iterator[str]:
    """Yield the definition of a device function for each partial derivative."""
    table, defined = labels(), set()
    for kernel in partial_kernels():
        label = int(table[kernel.code])
        if label not in defined:
            defined.add(label)
            operands, expression = list("abc"[: kernel.arity]), partial_source(kernel.source, mode)
            if kernel.scaled:
                operands, expression = ["slope", *operands], f"product(slope, {expression})"
            yield device_function(kernel.name, operands, expression)


def partial_source(source: str, mode: Mode) -> str:
    """Translate a derivative to CUDA C++, with approximate functions in fast mode."""
    if not mode.is_fast:
        return render(precise_calls(source), mode.real)
    calls = _fast_calls()
    source = re.sub(r"\b(\w+)\(", lambda call: f"{calls.get(call[1], call[1])}(", source)
    return render(source, mode.real)


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
