"""CUDA C++ source of the interpreter's kernels, generated from the operator table.

lowering.cu writes the instructions that interpreter.cu reads. Both sources begin with the numbers
of their encoding, and with batch.cu, which declares a batch on the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ops import ARITIES, OPERATORS, PARAMETER, VARIABLE, Operator
from warpfit_server.engine.cuda.math.prelude import (
    compiler_options,
    operator_source,
    packs,
    prelude,
)
from warpfit_server.engine.cuda.runtime.compiler import CudaSource
from warpfit_server.engine.interface import Arithmetic

# --------------------------------------------------------------------------------------- encoding

#: Word 0 of an instruction: case label, flags, and the index of a leaf to load before the case.
LABEL_BITS: Final = 10
LABEL_MASK: Final = (1 << LABEL_BITS) - 1
LOAD_VARIABLE: Final = 1 << 10
LOAD_SLOT: Final = 1 << 11
PUSH: Final = 1 << 12
INDEX_SHIFT: Final = 13
#: Largest index of a leaf that word 0 can carry.
INDEX_LIMIT: Final = 1 << (32 - INDEX_SHIFT)

#: Cases of a binary operator, added to its label, by the source of the operand that is not on top
#: of the stack. The odd number after each is the case in which it is the first operand.
FROM_VARIABLE: Final = 0
FROM_SLOT: Final = 2
FROM_STACK: Final = 4

#: Stack height of ``evaluate_slots``; a row-invariant subtree that needs more is hoisted in parts.
SLOT_LEVELS: Final = 16

#: Traits of a lowered program: its number of slots (row-invariant subtrees), the stack levels that
#: it needs below the top, and whether it is invalid.
SLOTS_MASK: Final = (1 << 20) - 1
NEED_SHIFT: Final = 20
NEED_MASK: Final = 31
INVALID: Final = 1 << 31
#: Flag in the order of programs: this one needs more stack levels than a warp has.
DEEP: Final = 1 << 31
#: Flag in the order of programs: some program of the launch is invalid, so none is interpreted.
SKIPPED: Final = 1 << 30

_CASES: Final = {1: 1, 2: 6, 3: 1}
#: Case label of the instruction that ends a program; label 0 does nothing.
END_LABEL: Final = 1 + sum(_CASES[row.arity] for row in OPERATORS.values())
#: Number of case labels.
CASES: Final = END_LABEL + 1
#: The numbers above, as definitions of the same names.
_ENCODING: Final = "".join(
    f"#define {name} {globals()[name]}u\n"
    for name in __annotations__
    if isinstance(globals()[name], int)
)

#: Declarations of a batch on the device, and the kernels, with places for the generated code.
BATCH_SOURCE: Final = resources.files(__package__).joinpath("batch.cu").read_text()
TEMPLATE: Final = resources.files(__package__).joinpath("interpreter.cu").read_text()
_LOWERING: Final = resources.files(__package__).joinpath("lowering.cu").read_text()


def labels() -> NDArray[np.int64]:
    """Return the first case label of each operator by wire code; int64 [256], 0 for other codes."""
    if CASES > 1 << LABEL_BITS:
        raise ValueError(f"{CASES} case labels do not fit {LABEL_BITS} bits")
    table = np.zeros(256, dtype=np.int64)
    label = 1
    for row in OPERATORS.values():
        table[row.code] = label
        label += _CASES[row.arity]
    return table


# --------------------------------------------------------------------------------------- lowering

#: What ``order_programs`` reports for a group without an invalid program.
ALL_VALID: Final = 0xFFFFFFFF
#: Threads of a block of each kernel.
JOIN_THREADS: Final = 256
LOWER_THREADS: Final = 32
ORDER_THREADS: Final = 1024
#: Bits of a row of the operator table, next to the label.
_ARITY_SHIFT: Final = 10
_IS_KNOWN, _IS_VARIABLE, _IS_PARAMETER = 1 << 12, 1 << 13, 1 << 14
#: Most operands whose code is still to be written: one for each stack level.
_MOST_PENDING: Final = 32


def lowering_source() -> CudaSource:
    """Return the source of the lowering kernels."""
    numbers = {"ARITY_SHIFT": _ARITY_SHIFT, "IS_KNOWN": _IS_KNOWN}
    numbers |= {"IS_VARIABLE": _IS_VARIABLE, "IS_PARAMETER": _IS_PARAMETER, "NONE": ALL_VALID}
    numbers |= {"LOWER_THREADS": LOWER_THREADS, "ORDER_THREADS": ORDER_THREADS}
    numbers |= {"MOST_PENDING": _MOST_PENDING, "JOIN_THREADS": JOIN_THREADS}
    defines = [f"#define {name} {number}u\n" for name, number in numbers.items()]
    table = np.zeros(256, dtype=np.uint32)  # label, arity and flags by token code
    known = ARITIES >= 0
    table[known] = _IS_KNOWN | ARITIES[known].astype(np.uint32) << _ARITY_SHIFT
    table |= labels().astype(np.uint32)
    table[VARIABLE] |= _IS_VARIABLE
    table[PARAMETER] |= _IS_PARAMETER
    rows = ", ".join(f"{row}u" for row in table.tolist())
    declared = f"__device__ const unsigned OPERATOR_TABLE[256] = {{{rows}}};\n"
    text = "".join([_ENCODING, BATCH_SOURCE, *defines, declared, _LOWERING])
    return CudaSource(text, ("--std=c++17",))


# ------------------------------------------------------------------------------------- interpreter

_CALL: Final = re.compile(r"\b(\w+)\(")
#: Calls short enough to be unrolled over all rows; an operator that calls anything else loops.
_SHORT: Final = frozenset(
    {
        *("select", "float", "double", "abs", "floor", "ceil", "rint", "sqrt", "rsqrtf"),
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
    """Arithmetic and rows a thread of one compiled form of the interpreter."""

    arithmetic: Arithmetic
    rows: int
    """Rows a thread: a multiple of 4 (float32) or 2 (float64)."""

    @classmethod
    def of(cls, arithmetic: Arithmetic, row_bytes: int) -> Variant:
        """Return the variant whose threads work on ``row_bytes`` of rows at a time."""
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
    table, rows = labels(), OPERATORS.values()
    # The least blocks of 256 threads a multiprocessor bound the registers.
    blocks = 4 if variant.rows * variant.dtype.itemsize <= 64 else 2
    cases: list[str] = []
    called: list[str] = []
    unary: list[str] = []
    invariant: list[str] = []
    for row in rows:
        arity = row.arity
        operands = ", ".join(f"stack[height - {arity - i}]" for i in range(arity))
        invariant.append(
            f"      case {row.code}: stack[height - {arity}] = op_{row.name}({operands}); "
            f"height -= {arity - 1}; break;"
        )
        macro, given = _macro(row, variant), f"(op_{row.name}, {table[row.code]})"
        if not macro.startswith("CALLED"):
            cases.append(f"        {macro}{given}")
            continue
        called.append(f"    {macro.replace('CALLED', 'STEPS_OF')}{given}")
        if row.arity == 1:
            unary.append(f"        case {table[row.code]}:")
        else:
            cases.append(f"        {macro}{given}")
    if unary:
        cases += [*unary, "        CALLED_UNARY"]
    parts = {
        "OPERATORS": operator_functions(variant.arithmetic),
        "CASES": cases,
        "CALLED": called,
        "INVARIANT_CASES": invariant,
    }
    template = _ENCODING + BATCH_SOURCE + TEMPLATE
    text = source_of(variant, {"BLOCKS_AT_LEAST": blocks}, template, parts)
    return CudaSource(text, variant.options, CASES)


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
        return f"{'CALLED' if variant.arithmetic.is_fast else 'COSTLY'}_{shape}"
    merged = row.arity == 2 and not is_direct(expression)
    return f"MERGED_{shape}" if merged else shape


def is_costly(expression: str, variant: Variant) -> bool:
    """Return whether a rendered expression is too long to be unrolled over a thread's rows."""
    short = _SHORT_FLOAT if variant.dtype == np.float32 else _SHORT
    return not set(_CALL.findall(expression)) <= short


def is_direct(expression: str) -> bool:
    """Return whether a rendered expression is so short that each form of it has its own code."""
    return set(_CALL.findall(expression)) <= _DIRECT and "/" not in expression
