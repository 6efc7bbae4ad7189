"""Symbols, words and names of the text language, for the parser and the printer."""

import math
import re
from collections.abc import Mapping
from typing import Final

from warpfit.ops import OPERATORS, Operator

#: Operators by infix symbol.
INFIX: Final[Mapping[str, Operator]] = {
    row.symbol: row for row in OPERATORS.values() if row.symbol and row.arity == 2
} | {"**": OPERATORS["pow"]}
#: Operators by prefix symbol.
PREFIX: Final[Mapping[str, Operator]] = {
    row.symbol: row for row in OPERATORS.values() if row.symbol and row.arity == 1
}
#: Symbols that are words; a variable with such a name needs backticks.
WORDS: Final = frozenset(symbol for symbol in (*INFIX, *PREFIX) if symbol.isalpha())

#: Operators that are written as a power with this exponent.
WHOLE_POWERS: Final[Mapping[str, str]] = {"square": "2", "cube": "3"}

RIGHT_ASSOCIATIVE: Final = frozenset({"pow"})
#: Operators that do not chain: an operand that is a comparison needs parentheses.
COMPARISONS: Final = frozenset({"lt", "le", "gt", "ge", "eq", "ne"})
#: Operators that can be called with two or more operands, which are combined from the left.
CHAINED: Final = frozenset({"add", "mul", "min", "max", "and", "or"})

#: Named constants; a variable of the same name takes precedence.
CONSTANTS: Final[Mapping[str, float]] = {
    **dict.fromkeys(("inf", "Inf", "infinity", "oo"), math.inf),
    **dict.fromkeys(("nan", "NaN"), math.nan),
    **dict.fromkeys(("e", "E"), math.e),
    "pi": math.pi,
}

#: Names of operators and standard macros in other languages and libraries.
ALIASES: Final[Mapping[str, str]] = {
    **{"plus": "add", "Add": "add", "subtract": "sub", "minus": "sub"},
    **{"multiply": "mul", "times": "mul", "Mul": "mul", "divide": "div", "truediv": "div"},
    **{"power": "pow", "Pow": "pow", "negative": "neg", "reciprocal": "inv"},
    **{"Abs": "abs", "fabs": "abs", "absolute": "abs", "sgn": "sign"},
    **{"ln": "log", "sqr": "square", "ceiling": "ceil"},
    **{"minimum": "min", "Min": "min", "maximum": "max", "Max": "max"},
    **{"arcsin": "asin", "arccos": "acos", "arctan": "atan", "arctan2": "atan2"},
    **{"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"},
    **{"equal": "eq", "not_equal": "ne"},
    **{"logical_and": "and", "logical_or": "or", "logical_not": "not"},
    **{"ifelse": "where", "ite": "where", "cond": "where", "select": "where"},
    **{"sigmoid": "logistic", "sig": "logistic", "expit": "logistic"},
    **{"arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh"},
    **{"Mod": "mod", "remainder": "mod", "rint": "round"},
    **{"around": "round", "fix": "trunc", "degrees": "rad2deg", "radians": "deg2rad"},
    **{"Heaviside": "heaviside", "silu": "swish", "gauss": "gaussian", "clamp": "clip"},
    **{"loggamma": "lgamma", "gammaln": "lgamma"},
    **{"AQ": "aq", "analytic_quotient": "aq", "protectedDiv": "zdiv"},
}

#: Names of variables that need no backticks, unless they are among `WORDS`.
IDENTIFIER: Final = re.compile(r"[^\W\d]\w*")
#: A variable or parameter by its position, counted from 1.
INDEXED: Final = re.compile(r"([xp])0*([1-9][0-9]{0,9})")

_SYMBOLS: Final = sorted(
    {symbol for symbol in (*INFIX, *PREFIX, "(", ")", ",") if not symbol.isalpha()},
    key=len,
    reverse=True,
)
#: The next token of a text, behind white space; a character that has no meaning is one, too.
TOKEN: Final = re.compile(
    r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|\#[0-9a-fA-F]{16}"
    rf"|{IDENTIFIER.pattern}"
    r"|`(?:[^`]|``)*`"
    rf"|{'|'.join(re.escape(symbol) for symbol in _SYMBOLS)}"
    r"|\S)"
)
