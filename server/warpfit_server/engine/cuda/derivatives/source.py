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
from warpfit_server.engine.autodiff.rules import CODES, PRODUCT_CODE, PartialKernel, partial_kernels
from warpfit_server.engine.cuda.interpreter.source import Variant, is_costly
from warpfit_server.engine.cuda.math.precise import precise_calls
from warpfit_server.engine.cuda.math.prelude import (
    REAL_NAMES,
    operator_source,
    packs,
    prelude,
    render,
)
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
    own = resources.files(__package__)
    template = own.joinpath("derivatives.cu").read_text()
    cases = _cases(variant)
    row_cases = [
        f"      {'COSTLY' if case.costly else 'CHEAP'}({label}, {case.expression})"
        for label, case in enumerate(cases, start=1)
    ]
    scalar_cases = [
        f"      case {label}: t[0] = {case.expression}; break;"
        for label, case in enumerate(cases, start=1)
    ]
    return (
        _definitions(variant, spills=spills)
        + prelude(variant.dtype, variant.precision)
        + packs()
        + template.replace("@OPERATORS@", "\n".join(_functions(variant)))
        .replace("@CASES@", "\n".join(row_cases))
        .replace("@SCALAR_CASES@", "\n".join(scalar_cases))
        + own.joinpath("statistics.cu").read_text()
    )


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
        expression = operator_source(row, variant.dtype, variant.precision)
        cases[int(table[row.code])] = _Case(
            f"op_{row.name}({operands})", is_costly(expression, variant)
        )
    for kernel in partial_kernels():
        operands = ", ".join(_OPERANDS[: kernel.arity + kernel.scaled])
        costly = is_costly(
            partial_source(kernel.source, REAL_NAMES[variant.dtype], fast=variant.fast), variant
        )
        cases.setdefault(int(table[kernel.code]), _Case(f"{kernel.name}({operands})", costly))
    cases[int(table[PRODUCT_CODE])] = _Case("product(t[i], u[i])")
    cases[int(table[COPY_CODE])] = _Case("t[i]")
    return [cases[label] for label in range(1, len(cases) + 1)]


def _functions(variant: Variant) -> Iterator[str]:
    """Yield the definition of a device function for each operator and each partial derivative."""
    for row in OPERATORS.values():
        expression = operator_source(row, variant.dtype, variant.precision)
        operands = ", ".join(f"real {operand}" for operand in row.operands)
        yield (
            f"__device__ __forceinline__ real op_{row.name}({operands}) {{ return {expression}; }}"
        )
    table, defined = labels(), set()
    for kernel in partial_kernels():
        label = int(table[kernel.code])
        if label not in defined:
            defined.add(label)
            yield _partial_function(kernel, variant)


def _partial_function(kernel: PartialKernel, variant: Variant) -> str:
    names = "abc"[: kernel.arity]
    operands = ", ".join(
        f"real {name}" for name in ("slope" if kernel.scaled else "", *names) if name
    )
    expression = partial_source(kernel.source, REAL_NAMES[variant.dtype], fast=variant.fast)
    if kernel.scaled:
        expression = f"product(slope, {expression})"
    return f"__device__ __forceinline__ real {kernel.name}({operands}) {{ return {expression}; }}"


def partial_source(source: str, real: str, *, fast: bool) -> str:
    """Translate a derivative to CUDA C++, with approximate functions if ``fast``."""
    if not fast:
        return render(precise_calls(source), real)
    calls = _fast_calls()
    source = re.sub(r"\b(\w+)\(", lambda call: f"{calls.get(call[1], call[1])}(", source)
    return render(source, real)


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


def _definitions(variant: Variant, *, spills: bool) -> str:
    return (
        f"typedef {REAL_NAMES[variant.dtype]} real;\n"
        f"#define REAL_BYTES {variant.dtype.itemsize}\n"
        f"#define ROWS {variant.rows}\n"
        f"#define FAST {int(variant.fast)}\n"
        f"#define FAR {int(spills)}\n"
        f"#define WARPS {WARPS}\n"
        f"#define BLOCK_TILES {BLOCK_TILES}\n"
        f"#define COMBINE_THREADS {COMBINE_THREADS}\n"
        f"#define BLOCKS_AT_LEAST {BLOCKS}\n"
    )
