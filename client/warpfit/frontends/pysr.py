"""Expression strings of PySR and SymbolicRegression.jl to `Program`.

Their safe operators give NaN where NumPy gives an infinity: ``log`` at 0 and 0 to a negative power.
Either way the loss of such a row is not a finite number.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from warpfit.errors import list_of_texts
from warpfit.frontends.prefix import other_kind
from warpfit.ir import Program
from warpfit.parse import Macro, Parser

#: Functions of Julia and SymbolicRegression.jl that warpfit has not, or that mean something else
#: than its function of the same name, over the operands a, b and c.
FUNCTIONS: Final[Mapping[str, str]] = {
    "cond": "where(a > 0, b, 0)",
    "logical_or": "a > 0 or b > 0",
    "logical_and": "a > 0 and b > 0",
    "mult": "a*b",
    "muladd": "fma(a, b, c)",
    "clamp": "where(a > c, c, where(a < b, b, a))",
    "abs2": "square(a)",
    "identity": "a",
    "sqrt_abs": "sqrtabs(a)",
    "pow_abs": "powabs(a, b)",
    "log_abs": "logabs(a)",
    "log2_abs": "log2(abs(a))",
    "log10_abs": "log10(abs(a))",
    "log1p_abs": "log1p(abs(a))",
    "acosh_abs": "acosh(abs(a) + 1)",
    "atanh_clip": "atanh(mod(a + 1, 2) - 1)",
    "fourthroot": "sqrt(sqrt(a))",
    "sinc": "where(a == 0, 1, where(abs(a) == inf, 0, sinpi(a)/(pi*a)))",
    "tanpi": "sinpi(a)/cospi(a)",
    "sind": "sinpi(a/180)",
    "cosd": "cospi(a/180)",
    "tand": "sinpi(a/180)/cospi(a/180)",
    "asind": "rad2deg(asin(a))",
    "acosd": "rad2deg(acos(a))",
    "atand": "rad2deg(atan(a))",
    "rem": "fmod(a, b)",
    "mod1": "where(mod(a, b) == 0, b, mod(a, b))",
    "fld": "round((a - mod(a, b))/b)",
    "cld": "-round((-a - mod(-a, b))/b)",
    "flipsign": "where(b < 0 or inv(b) < 0, -a, a)",
}
_SAFE: Final = re.compile(r"\bsafe_(?=\w+\s*\()")
#: Julia writes the exponent of a Float32 with f.
_FLOAT32: Final = re.compile(r"\b(\d+(?:\.\d*)?|\.\d+)f([+-]?\d+)")
_SUBSCRIPTS: Final = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_NUMBERED: Final = re.compile(r"\bx(\d{1,9})\b")


def from_pysr(text: str, names: Sequence[str] = (), *, first: int = 0) -> Program:
    """Convert an expression string, such as an ``equation`` of PySR's table or ``get_best()``.

    Args:
        text: the expression.
        names: names of the variables in order, if they have names; otherwise they are x0, x1, ....
        first: number of the first variable without a name: 0 in PySR, 1 in SymbolicRegression.jl.

    Raises:
        InvalidArgumentError: for what is no string.
        ParseError: if the text cannot be parsed; the text in it is the rewritten one.
    """
    if not isinstance(text, str):
        wanted = "one of its strings, such as the column equation; from_sympy takes SymPy's objects"
        raise other_kind(text, "PySR", wanted)
    text = _FLOAT32.sub(r"\1e\2", text.translate(_SUBSCRIPTS))
    text = _SAFE.sub("", text)
    if not names:
        text = _NUMBERED.sub(lambda match: f"x{int(match[1]) + 1 - first}", text)
    return Parser(list_of_texts(names), _macros()).parse(text)


@lru_cache(maxsize=1)
def _macros() -> Mapping[str, Macro]:
    operands = Parser(("a", "b", "c"), indexed=False)
    return {n: Macro.of(n, text, *operands.tokens(text), 0) for n, text in FUNCTIONS.items()}
