"""CUDA C++ source of the interpreter, generated from the operator table."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import numpy as np

from warpfit.ops import OPERATORS, Operator
from warpfit_server.engine.cuda.interpreter import bytecode
from warpfit_server.engine.cuda.interpreter.compile import CudaSource
from warpfit_server.engine.cuda.math.prelude import (
    compiler_options,
    operator_source,
    packs,
    prelude,
)
from warpfit_server.engine.interface import Arithmetic

_CALL: Final = re.compile(r"\b(\w+)\(")
#: Calls short enough to be unrolled over all rows; an operator that calls anything else loops.
_SHORT: Final = frozenset(
    {
        *("select", "float", "double", "abs", "floor", "ceil", "sqrt", "rsqrtf"),
        *("quotient", "root", "exponential", "logarithm", "product_sum"),
        *("fast_pow", "fast_pow_positive", "fast_sqrt", "fast_tanh"),
        *("__fdividef", "__logf", "__log2f", "__log10f", "__expf", "__fmaf_rn"),
    }
)
#: The same for float32 alone, where these are 10 to 20 instructions.
_SHORT_FLOAT: Final = _SHORT | {"exp", "log"}
#: Calls in binary operators that get a body for each source of an operand; an exact division does
#: not.
_DIRECT: Final = frozenset({"__fdividef"})

#: The kernels, with places for what is generated.
TEMPLATE: Final = resources.files(__package__).joinpath("interpreter.cu").read_text()
#: Stack levels above the top that the operands of a costly operator use.
SCRATCH_LEVELS: Final = 2


@dataclass(frozen=True, slots=True)
class Variant:
    """Arithmetic and rows a thread of one compiled form of the interpreter."""

    arithmetic: Arithmetic
    rows: int
    """Rows a thread: a multiple of 4 (float32) or 2 (float64)."""

    @classmethod
    def of(cls, arithmetic: Arithmetic, row_bytes: int) -> Variant:
        """Return the variant in which a thread works on so many bytes of rows at a time."""
        return cls(arithmetic, row_bytes // arithmetic.dtype.itemsize)

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64."""
        return self.arithmetic.dtype

    @property
    def tile(self) -> int:
        """Rows of a tile, on which a warp works."""
        return 32 * self.rows

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC options, without the architecture."""
        return ("--std=c++17", *compiler_options(self.arithmetic))


def source_of(
    variant: Variant, definitions: dict[str, int | str], template: str, parts: dict[str, list[str]]
) -> str:
    """Return a complete CUDA C++ source: definitions, prelude, and a template with its parts."""
    numbers = {"REAL_BYTES": variant.dtype.itemsize, "ROWS": variant.rows}
    numbers |= {"FAST": int(variant.arithmetic.is_fast)}
    defines = [f"#define {name} {number}\n" for name, number in (numbers | definitions).items()]
    for name, lines in parts.items():
        template = template.replace(f"@{name}@", "\n".join(lines))
    start = f"typedef {variant.arithmetic.real} real;\n{''.join(defines)}"
    return start + prelude(variant.arithmetic) + packs() + template


def operator_functions(arithmetic: Arithmetic) -> list[str]:
    """Return the definition of a device function for each operator."""
    return [
        device_function(f"op_{row.name}", row.operands, operator_source(row, arithmetic))
        for row in OPERATORS.values()
    ]


def device_function(name: str, operands: Iterable[str], expression: str) -> str:
    """Return the definition of a device function of numbers."""
    parameters = ", ".join(f"real {operand}" for operand in operands)
    return f"__device__ __forceinline__ real {name}({parameters}) {{ return {expression}; }}"


def interpreter_source(variant: Variant) -> CudaSource:
    """Return the kernels of one variant."""
    table, rows = bytecode.labels(), OPERATORS.values()
    # The least blocks of 256 threads a multiprocessor bound the registers.
    blocks = 4 if variant.rows * variant.dtype.itemsize <= 64 else 2
    parts = {
        "OPERATORS": operator_functions(variant.arithmetic),
        "CASES": [f"        {_macro(r, variant)}(op_{r.name}, {table[r.code]})" for r in rows],
        "SCALAR_CASES": [_scalar_case(row, f"op_{row.name}") for row in rows],
    }
    template = bytecode.header() + TEMPLATE
    text = source_of(variant, {"BLOCKS_AT_LEAST": blocks}, template, parts)
    return CudaSource(text, variant.options, bytecode.CASES)


def costly_operators(variant: Variant) -> int:
    """Return the operators that need scratch levels, as `BatchSummary.operators` has them."""
    return sum(
        1 << row.code
        for row in OPERATORS.values()
        if row.arity == 3 or is_costly(operator_source(row, variant.arithmetic), variant)
    )


def _macro(row: Operator, variant: Variant) -> str:
    """Return the name of the macro in interpreter.cu that writes the cases of an operator."""
    expression = operator_source(row, variant.arithmetic)
    if row.arity == 3:
        return "TERNARY"
    shape = "UNARY" if row.arity == 1 else "BINARY"
    if is_costly(expression, variant):
        return f"COSTLY_{shape}"
    merged = row.arity == 2 and not is_direct(expression)
    return f"MERGED_{shape}" if merged else shape


def is_costly(expression: str, variant: Variant) -> bool:
    """Return whether a rendered expression is too long to be unrolled over a thread's rows."""
    short = _SHORT_FLOAT if variant.dtype == np.float32 else _SHORT
    return not set(_CALL.findall(expression)) <= short


def is_direct(expression: str) -> bool:
    """Return whether a rendered expression is so short that each form of it has its own code."""
    return set(_CALL.findall(expression)) <= _DIRECT and "/" not in expression


def _scalar_case(row: Operator, name: str) -> str:
    height = row.arity
    operands = ", ".join(f"stack[height - {height - i}]" for i in range(row.arity))
    return (
        f"      case {row.code}: stack[height - {height}] = {name}({operands}); "
        f"height -= {height - 1}; break;"
    )
