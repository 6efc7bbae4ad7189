"""CUDA C++ source of the interpreter, generated from the operator table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ops import OPERATORS, Operator
from warpfit.request import Precision
from warpfit_server.engine.cuda.interpreter import bytecode
from warpfit_server.engine.cuda.math.modes import Mode
from warpfit_server.engine.cuda.math.prelude import (
    REAL_NAMES,
    compiler_options,
    is_fast,
    operator_source,
    packs,
    prelude,
)
from warpfit_server.engine.cuda.runtime.batch_layout import COSTLY, TERNARY

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

#: Stack levels above the top that the operands of a costly operator use.
SCRATCH_LEVELS: Final = 2


@dataclass(frozen=True, slots=True)
class Variant:
    """Data type, precision and rows a thread of one compiled form of the interpreter."""

    dtype: np.dtype[Any]
    """float32 or float64."""
    precision: Precision
    rows: int
    """Rows a thread: a multiple of 4 (float32) or 2 (float64)."""

    @classmethod
    def of(cls, mode: Mode, row_bytes: int) -> Variant:
        """Return the variant in which a thread works on so many bytes of rows at a time."""
        return cls(mode.dtype, mode.precision, row_bytes // mode.dtype.itemsize)

    @property
    def fast(self) -> bool:
        """Return whether approximate operators are used; float64 is always precise."""
        return is_fast(self.dtype, self.precision)

    @property
    def tile(self) -> int:
        """Rows of a tile, on which a warp works."""
        return 32 * self.rows

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC options, without the architecture."""
        return ("--std=c++17", *compiler_options(self.dtype, self.precision))


def interpreter_source(variant: Variant) -> str:
    """Return the complete CUDA C++ source of one variant."""
    template = resources.files(__package__).joinpath("interpreter.cu").read_text()
    operators, cases, scalar_cases = [], [], []
    table = bytecode.labels()
    for row in OPERATORS.values():
        expression = operator_source(row, variant.dtype, variant.precision)
        name = f"op_{row.name}"
        operands = ", ".join(f"real {operand}" for operand in row.operands)
        operators.append(
            f"__device__ __forceinline__ real {name}({operands}) {{ return {expression}; }}"
        )
        macro = _macro(row, expression, variant)
        cases.append(f"        {macro}({name}, {table[row.code]})")
        scalar_cases.append(_scalar_case(row, name))
    return (
        _definitions(variant)
        + prelude(variant.dtype, variant.precision)
        + packs()
        + template.replace("@OPERATORS@", "\n".join(operators))
        .replace("@CASES@", "\n".join(cases))
        .replace("@SCALAR_CASES@", "\n".join(scalar_cases))
    )


def costly_codes(variant: Variant) -> NDArray[np.bool_]:
    """Return whether an operator needs scratch levels of the stack, by wire code; bool [256]."""
    table = np.zeros(256, dtype=np.bool_)
    for row in OPERATORS.values():
        expression = operator_source(row, variant.dtype, variant.precision)
        table[row.code] = row.arity == 3 or is_costly(expression, variant)
    return table


def operator_flags(variant: Variant) -> NDArray[np.uint8]:
    """Return the flags of `runtime.batch_layout` by wire code; uint8 [256]."""
    flags = costly_codes(variant).astype(np.uint8) * np.uint8(COSTLY)
    flags[[row.code for row in OPERATORS.values() if row.arity == 3]] |= TERNARY
    return flags


def _definitions(variant: Variant) -> str:
    return (
        f"typedef {REAL_NAMES[variant.dtype]} real;\n"
        f"#define REAL_BYTES {variant.dtype.itemsize}\n"
        f"#define ROWS {variant.rows}\n"
        f"#define FAST {int(variant.fast)}\n"
        f"#define SLOT_LEVELS {bytecode.SLOT_LEVELS}\n"
        f"#define SLOTS_MASK {bytecode.SLOTS_MASK}u\n"
        f"#define DEEP {bytecode.DEEP}u\n"
        f"#define SKIPPED {bytecode.SKIPPED}u\n"
        f"#define END_LABEL {bytecode.END}\n"
        f"#define BLOCKS_AT_LEAST {_blocks(variant)}\n"
    )


def _blocks(variant: Variant) -> int:
    """Return the least blocks of 256 threads a multiprocessor, which bounds the registers."""
    return 4 if variant.rows * variant.dtype.itemsize <= 64 else 2


def _macro(row: Operator, expression: str, variant: Variant) -> str:
    """Return the name of the macro in interpreter.cu that writes the cases of an operator."""
    if row.arity == 3:
        return "TERNARY"
    shape = "UNARY" if row.arity == 1 else "BINARY"
    if is_costly(expression, variant):
        return f"COSTLY_{shape}"
    short = set(_CALL.findall(expression)) <= _DIRECT and "/" not in expression
    merged = row.arity == 2 and not short
    return f"MERGED_{shape}" if merged else shape


def is_costly(expression: str, variant: Variant) -> bool:
    """Return whether a rendered expression is too long to be unrolled over a thread's rows."""
    short = _SHORT_FLOAT if variant.dtype == np.float32 else _SHORT
    return not set(_CALL.findall(expression)) <= short


def _scalar_case(row: Operator, name: str) -> str:
    height = row.arity
    operands = ", ".join(f"stack[height - {height - i}]" for i in range(row.arity))
    return (
        f"      case {row.code}: stack[height - {height}] = {name}({operands}); "
        f"height -= {height - 1}; break;"
    )
