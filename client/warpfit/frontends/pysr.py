"""Expression strings of PySR and SymbolicRegression.jl to `Program`.

Their safe operators give NaN where NumPy gives an infinity: ``log`` at 0 and 0 to a negative power.
Either way the loss of such a row is not a finite number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from warpfit.errors import ParseError
from warpfit.ir import Program
from warpfit.parse import parser

#: Functions that are written with others; ``{0}`` and ``{1}`` stand for the operands.
MACROS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "cond": "where({0} > 0, {1}, 0)",
        "logical_or": "({0} > 0 or {1} > 0)",
        "logical_and": "({0} > 0 and {1} > 0)",
        "erfc": "(1 - erf({0}))",
        "exp2": "(2 ^ {0})",
        "abs2": "square({0})",
        "mod": "({0} - floor({0} / {1}) * {1})",
        "asinh": "(sign({0}) * log(abs({0}) + sqrt({0} * {0} + 1)))",
        "acosh": "log({0} + sqrt({0} * {0} - 1))",
        "atanh": "(0.5 * log((1 + {0}) / (1 - {0})))",
    }
)
_MACRO: Final = re.compile(rf"\b({'|'.join(sorted(MACROS, key=len, reverse=True))})\s*\(")
_SAFE: Final = re.compile(r"\bsafe_(?=\w+\s*\()")
#: Julia writes the exponent of a Float32 with f.
_FLOAT32: Final = re.compile(r"\b(\d+\.?\d*|\.\d+)f([+-]?\d+)")
_SUBSCRIPTS: Final = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_NUMBERED: Final = re.compile(r"\bx(\d+)\b")


def from_pysr(text: str, names: Sequence[str] = (), *, first: int = 0) -> Program:
    """Convert an expression string, such as an ``equation`` of PySR's table or ``get_best()``.

    Args:
        text: the expression.
        names: names of the variables in order, if they have names; otherwise they are x0, x1, ....
        first: number of the first variable without a name: 0 in PySR, 1 in SymbolicRegression.jl.

    Raises:
        ParseError: if the text cannot be parsed; the text in it is the rewritten one.

    """
    text = _FLOAT32.sub(r"\1e\2", text.translate(_SUBSCRIPTS))
    text = _expanded(_SAFE.sub("", text))
    if not names:
        text = _NUMBERED.sub(lambda match: f"x{int(match[1]) + 1 - first}", text)
    return parser(tuple(names)).parse(text)


def _expanded(text: str) -> str:
    """Write the functions of `MACROS` out, the last one first: it contains no other."""
    while calls := list(_MACRO.finditer(text)):
        call = calls[-1]
        operands, end = _operands(text, call.end())
        template = MACROS[call[1]]
        if len(operands) != 1 + ("{1}" in template):
            raise ParseError(
                f"{call[1]} has {len(operands)} operands",
                "WRONG_ARITY",
                f"It stands for {template}",
                text=text,
                position=call.start(),
            )
        written = template.format(*(f"({operand})" for operand in operands))
        text = text[: call.start()] + written + text[end:]
    return text


def _operands(text: str, start: int) -> tuple[list[str], int]:
    """Operands of the call whose parenthesis opens before ``start``, and where it ends."""
    depth, begun = 0, start
    operands = []
    for place in range(start, len(text)):
        if text[place] == "(":
            depth += 1
        elif text[place] == ")" and depth:
            depth -= 1
        elif text[place] == ")" or (text[place] == "," and not depth):
            operands.append(text[begun:place])
            begun = place + 1
            if text[place] == ")":
                return operands, begun
    raise ParseError("'(' is never closed", "UNBALANCED", "Add ')'", text=text, position=start - 1)
