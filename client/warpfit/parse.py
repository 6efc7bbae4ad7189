"""The parser of the text language: ``parse("5 - abs(x1)*sqrt(p1)/10 + 2^x2")``.

Operators from the lowest precedence to the highest (`warpfit.ops` has the numbers):

====================  =========================================================================
``or``, ``and``       left-associative
``not``               prefix
``< <= > >= == !=``   do not chain: write ``a < b and b < c``
``+ -``, ``* /``      left-associative
``-``                 prefix; before a number it makes a negative constant
``^`` or ``**``       right-associative; ``-x^2`` is ``-(x^2)``, ``2^-x`` is ``2^(-x)``;
                      ``x^2`` and ``x^3`` are ``square(x)`` and ``cube(x)``, and ``x^2.0`` is
                      ``pow(x, 2)``, whose exponent is a constant like others
====================  =========================================================================

Operands are

* numbers that float64 can hold: ``2``, ``.5``, ``1e-3``; ``#`` and 16 hexadecimal digits is the
  float64 with these bits;
* variables: ``x1``, ``x2``, ... by position, or the names of the data set;
* parameters ``p1``, ``p2``, ..., and the constants ``pi``, ``e``, ``inf`` and ``nan``;
* calls of any operator, or function of `define`, by its name or an alias. ``add``, ``mul``,
  ``min``, ``max``, ``and`` and ``or`` take two or more operands;
* any expression in parentheses.

A name of the data set takes precedence over everything but a call. Where it hides ``x1`` or ``p1``,
``x01`` and ``p01`` still mean the first variable and parameter. A name that is no identifier is
written in backticks, and a backtick in it is doubled.

The method is Dijkstra's shunting yard with explicit stacks, so that only memory limits the length
and the nesting of a text.

Functions that are written with operators (`Macros`) exist in the client alone: the parser and the
front ends replace each call of one by the operators that it stands for, so that every server
computes it, with its derivatives. Between the reading of a tree and the replacement a macro has a
token code of its own, above the table's.
"""

from __future__ import annotations

import math
import re
import string
import struct
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from threading import RLock
from types import MappingProxyType
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import (
    InvalidArgumentError,
    ParseError,
    list_of_texts,
    nearest_first,
    similar,
)
from warpfit.expressions.language import (
    ALIASES,
    AMBIGUOUS_DIVISIONS,
    CHAINED,
    COMPARISONS,
    CONSTANTS,
    IDENTIFIER,
    INDEXED,
    INFIX,
    PREFIX,
    RIGHT_ASSOCIATIVE,
    TOKEN,
    WHOLE_POWERS,
    WORDS,
)
from warpfit.expressions.real_numbers import leaves_float64
from warpfit.ir import Program
from warpfit.ops import ARITIES, BY_CODE, CONSTANT, OPERATORS, PARAMETER, VARIABLE, Operator

# -------------------------------------------------------- functions that are written with operators

#: Most tokens that one macro, and one program with its macros replaced, may have.
_MOST_MACRO_TOKENS: Final = 1_000
_MOST_TOKENS: Final = 100_000

#: Functions by name, over the operands ``a``, ``b`` and ``c``. They are written so that neither
#: they nor their derivatives lose digits near 0 and far from it, that they do not overflow before
#: their result does (but for subnormal operands and results), and that they have their limits at
#: infinity.
STANDARD: Final[Mapping[str, str]] = {
    "asinh": "where(abs(a) > 1e9, sign(a)*(logabs(a) + 0.6931471805599453), where(a < 0, "
    "-log1p(a*(aq(a, a)/(1 + aq(1, a)) - 1)), log1p(a*(aq(a, a)/(1 + aq(1, a)) + 1))))",
    "acosh": "where(a > 1e9, log(a) + 0.6931471805599453, log1p(a - 1 + sqrt(a - 1)*sqrt(a + 1)))",
    "atanh": "0.5*(log1p(a) - log1p(-a))",
    "sec": "inv(cos(a))",
    "csc": "inv(sin(a))",
    "cot": "inv(tan(a))",
    "sech": "inv(cosh(a))",
    "csch": "inv(sinh(a))",
    "coth": "inv(tanh(a))",
    # Taylor's series up to a^14; the derivative of the quotient cancels near 0.
    "sinc": "where(abs(a) < 0.5, fma(square(a), fma(square(a), fma(square(a), fma(square(a), "
    "fma(square(a), fma(square(a), fma(square(a), -7.647163731819816e-13, 1.6059043836821613e-10), "
    "-2.505210838544172e-08), 2.7557319223985893e-06), -0.0001984126984126984), "
    "0.008333333333333333), -0.16666666666666666), 1), where(abs(a) == inf, 0, sin(a)/a))",
    "fmod": "where(abs(a) < abs(b), a, sign(a)*mod(abs(a), abs(b)))",
    "trunc": "where(a < 0, ceil(a), floor(a))",
    "copysign": "where(b < 0 or inv(b) < 0, -abs(a), abs(a))",
    # The larger magnitude is taken out, so that no square overflows.
    "hypot": "where(abs(a) == inf or abs(b) == inf, inf, where(max(abs(a), abs(b)) == 0, 0, "
    "max(abs(a), abs(b))*sqrt(1 + square(min(abs(a), abs(b))/max(abs(a), abs(b))))))",
    # The operand is reduced before it is multiplied by pi: exact zeros, and digits far out.
    "sinpi": "sin(pi*(a - round(a)))*(1 - 2*mod(round(a), 2))",
    "cospi": "sin(pi*(0.5 - abs(a - round(a))))*(1 - 2*mod(round(a), 2))",
    "deg2rad": "a*0.017453292519943295",
    "rad2deg": "a*57.29577951308232",
    "asec": "acos(inv(a))",
    "acsc": "asin(inv(a))",
    "acot": "atan(inv(a))",
    "asech": "acosh(inv(a))",
    "acsch": "asinh(inv(a))",
    "acoth": "atanh(inv(a))",
    "heaviside": "0.5*(sign(a) + 1)",
    "clip": "min(max(a, b), c)",
    "exp2": "2^a",
    "exp10": "10^a",
    "softplus": "where(a > 0, a + log1p(exp(-a)), log1p(exp(a)))",
    "softsign": "where(abs(a) < 1, a/(1 + abs(a)), sign(a)*(1 - inv(1 + abs(a))))",
    # Below -1000 the second factor is 0, which minus infinity would make NaN.
    "swish": "max(a, -1000)*logistic(a)",
    "gelu": "0.5*max(a, -1000)*erfc(-0.7071067811865476*a)",
    "elu": "where(a > 0, a, expm1(a))",
    "gaussian": "exp(-square(a))",
    "factorial": "gamma(a + 1)",
}


@dataclass(frozen=True, slots=True)
class Macro:
    """A function that is written with operators."""

    name: str
    arity: int
    """Number of operands, 1 to 3."""
    text: str
    """Expression over ``a``, ``b`` and ``c`` that replaces a call."""
    codes: tuple[int, ...]
    """Token codes of the text, where variable 0 is the first operand."""
    values: tuple[float, ...]
    code: int
    """Token code that stands for it while a tree is converted."""

    @property
    def operands(self) -> str:
        """Names of the operands: ``"a"``, ``"ab"`` or ``"abc"``."""
        return "abc"[: self.arity]

    @classmethod
    def of(
        cls, name: str, text: str, codes: Sequence[int], values: Sequence[float], code: int
    ) -> Macro:
        """Make a macro of the tokens of its text; raise InvalidArgumentError if it is none."""
        used = {int(v) for c, v in zip(codes, values, strict=True) if c == VARIABLE}
        if used not in ({0}, {0, 1}, {0, 1, 2}):
            raise InvalidArgumentError(
                f"{name!r} is not written with a, with a and b, or with a, b and c",
                "BAD_OPERANDS",
                "Its operands are a, b and c, in this order; x1, p1 and the like have no meaning",
                "text",
            )
        _check_size(len(codes), _MOST_MACRO_TOKENS, name)
        return cls(name, len(used), text, tuple(codes), tuple(values), code)

    def apply(self, codes: list[int], values: list[float]) -> None:
        """Replace the operands, the last of the postfix tokens, by the macro's expansion."""
        operands: list[tuple[list[int], list[float]]] = []
        start = len(codes)
        for _ in range(self.arity):
            stop, missing = start, 1
            while missing:
                start -= 1
                missing += int(ARITIES[codes[start]]) - 1
            operands.insert(0, (codes[start:stop], values[start:stop]))
        written = sum(
            len(operands[int(v)][0]) if c == VARIABLE else 1
            for c, v in zip(self.codes, self.values, strict=True)
        )
        _check_size(start + written, _MOST_TOKENS, self.name)
        del codes[start:], values[start:]
        for code, value in zip(self.codes, self.values, strict=True):
            if code == VARIABLE:
                codes += operands[int(value)][0]
                values += operands[int(value)][1]
            else:
                codes.append(code)
                values.append(value)


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A function that stays a token of its own where a parser is told so."""

    name: str
    arity: int
    code: int
    """Code of the token."""

    @property
    def operands(self) -> str:
        """Names of the operands: ``"a"``, ``"ab"``, ...."""
        return string.ascii_lowercase[: self.arity]


def _check_size(tokens: int, most: int, name: str) -> None:
    if tokens > most:
        raise InvalidArgumentError(
            f"{name!r} written out has {tokens} tokens, the limit is {most}",
            "MACRO_TOO_LONG",
            "Nest fewer calls of functions that use an operand several times",
            "expressions",
        )


class Macros:
    """The macros of this process by name; threads may share it."""

    def __init__(self, parse: Callable[[str], tuple[Sequence[int], Sequence[float]]]) -> None:
        """Take the function that returns the token codes and values of a text over a, b and c."""
        self._parse = parse
        self._by_name: dict[str, Macro] = {}
        self._by_code: dict[int, Macro] = {}
        self._lock = RLock()
        self.operands = np.maximum(ARITIES, 0).astype(np.int64)
        """Operands of each code, those of macros too; 0 for leaves; [256]."""

    def define(self, name: str, text: str) -> None:
        """Add a macro, or replace the one of its name; see `warpfit.define`."""
        if not (isinstance(name, str) and isinstance(text, str)):
            raise InvalidArgumentError(
                "a function is defined by two texts",
                "BAD_NAME",
                "Give its name and an expression over a, b and c, such as 'sin(a)/a'",
                "text",
            )
        if not IDENTIFIER.fullmatch(name) or name in {*OPERATORS, *ALIASES, *WORDS}:
            is_taken = name in {*OPERATORS, *ALIASES}
            raise InvalidArgumentError(
                f"{name!r} is an operator" if is_taken else f"{name!r} is no name of a function",
                "BAD_NAME",
                "Use it as it is, or define another name"
                if is_taken
                else "Give a name of letters, digits and _ that begins with a letter",
                "name",
            )
        if re.search(rf"\b{name}\s*\(", text):
            raise InvalidArgumentError(
                f"{name!r} calls itself", "RECURSION", "Write it without a call of itself", "text"
            )
        tokens = self._parse(text)
        with self._lock:
            if name in self._by_name:
                code = self._by_name[name].code
            else:
                code = max(set(range(128, 256)) - {*BY_CODE, *self._by_code}, default=0)
            if not code:
                raise InvalidArgumentError(
                    "there is no room for another function",
                    "TOO_MANY_MACROS",
                    "Define fewer",
                    "name",
                )
            macro = Macro.of(name, text, *tokens, code)
            self.operands[macro.code] = macro.arity
            self._by_code[macro.code] = self._by_name[name] = macro

    def find(self, name: str) -> Macro | None:
        """Return the macro of a name, or None."""
        if name not in self._by_name and name in STANDARD:
            with self._lock:
                if name not in self._by_name:
                    self.define(name, STANDARD[name])
        return self._by_name.get(name)

    def used_in(self, text: str) -> dict[str, str]:
        """Return the text of each macro of `warpfit.define` that a text names, by its name.

        Those that others name come first, so that they can be defined in this order.
        """
        found: dict[str, str] = {}
        for name in dict.fromkeys(re.findall(r"\w+", text)):
            macro = self._by_name.get(name)
            if macro is not None and macro.text != STANDARD.get(name):
                found |= {**self.used_in(macro.text), name: macro.text}
        return found

    def define_all(self, texts: Mapping[str, str]) -> list[str]:
        """Define macros, in this order; return the names of those that are others here and stay."""
        with self._lock:
            different = []
            for name, text in texts.items():
                known = self._by_name.get(name)
                if known is None:
                    self.define(name, text)
                elif known.text != text:
                    different.append(name)
        return different

    def with_code(self, code: int) -> Macro | None:
        """Return the macro of a token code, or None."""
        return self._by_code.get(code)

    def names(self) -> list[str]:
        """Return the names of all macros."""
        return list(dict.fromkeys([*STANDARD, *self._by_name]))

    def written_out(
        self, codes: NDArray[np.uint8], values: NDArray[np.float64], lengths: NDArray[Any]
    ) -> tuple[NDArray[np.uint8], NDArray[np.float64], NDArray[np.uint32]]:
        """Replace the macros of programs, which are given as in a `warpfit.ir.Population`.

        An InvalidArgumentError with its index says that a program becomes too long.
        """
        if not (ARITIES < 0).take(codes).any():
            return codes, values, lengths.astype(np.uint32)
        all_codes, all_values, sizes = bytearray(), array("d"), []
        ends = np.cumsum(lengths).tolist()
        for program, (start, stop) in enumerate(pairwise([0, *ends])):
            own_codes, own_values = codes[start:stop].tolist(), values[start:stop].tolist()
            if not self._by_code.keys().isdisjoint(own_codes):
                given = zip(own_codes, own_values, strict=True)
                own_codes, own_values = [], []
                for code, value in given:
                    macro = self._by_code.get(code)
                    if macro is None:
                        own_codes.append(code)
                        own_values.append(value)
                        continue
                    try:
                        macro.apply(own_codes, own_values)
                    except InvalidArgumentError as error:
                        error.expression = program
                        raise
            all_codes += bytes(own_codes)
            all_values.extend(own_values)
            sizes.append(len(own_codes))
        return (
            np.frombuffer(bytes(all_codes), dtype=np.uint8),
            np.frombuffer(all_values.tobytes()),
            np.array(sizes, dtype=np.uint32),
        )


# --------------------------------------------------------------------------------------- the parser

#: Texts that a parser caches: their number, and the longest in characters.
_MOST_TEXTS: Final = 4096
_LONGEST_TEXT: Final = 4096
#: Names whose tokens a parser caches.
_MOST_LEAVES: Final = 4096

_DIGITS: Final = frozenset("0123456789")
#: Raised digits at the end of a name.
_RAISED: Final = re.compile("[\u00b2\u00b3\u00b9\u2070\u2074-\u2079]+$")
_NEGATION: Final = PREFIX["-"]
#: What is on the stack for an open group; no operator has such a low precedence.
_OPEN: Final = (-1, 0, -1)
_POWER: Final = OPERATORS["pow"].code
_POWERS: Final = frozenset(symbol for symbol, row in INFIX.items() if row.code == _POWER)
_WHOLE_POWERS: Final = {digit: OPERATORS[name].code for name, digit in WHOLE_POWERS.items()}
_COMPARISON_CODES: Final = frozenset(OPERATORS[name].code for name in COMPARISONS)


#: Operators before which those of the same precedence do not go: they associate to the right, or
#: do not chain.
_ALONE: Final = frozenset({*RIGHT_ASSOCIATIVE, *COMPARISONS})
#: Least precedence of the right operand, own precedence and code of each operator.
_INFIX: Final = {
    symbol: (row.precedence - (row.name not in _ALONE), row.precedence, row.code)
    for symbol, row in INFIX.items()
}
#: Symbols before which a minus is an operator, not the sign of the number between.
_BEFORE_MINUS: Final = frozenset(s for s, row in _INFIX.items() if row[0] >= _NEGATION.precedence)

#: The functions that are written with operators.
MACROS: Final = Macros(lambda text: Parser(("a", "b", "c"), indexed=False).tokens(text))


def parse(text: str, names: Sequence[str] = ()) -> Program:
    """Parse one expression.

    Args:
        text: the expression.
        names: names of the data set's variables in order, or empty.

    Raises:
        ParseError: if the text is no expression; it names the place and a remedy.
        InvalidArgumentError: if ``names`` is one text.
    """
    if not isinstance(text, str):
        raise ParseError(
            f"the text of an expression cannot be of type {type(text).__name__}",
            "NOT_A_TEXT",
            "Give text such as 'x1 + p1'; warpfit.frontends converts other libraries' objects",
        )
    return parser(list_of_texts(names)).parse(text)


@lru_cache(maxsize=32)
def parser(names: tuple[str, ...] = ()) -> Parser:
    """Return the parser for a data set with these variable names, which all callers share."""
    return Parser(names)


def define(name: str, text: str) -> None:
    """Define a function of one's own, for all expressions of this process.

    ::

        warpfit.define("sinc", "where(a == 0, 1, sin(a)/a)")
        client.evaluate(data, ["sinc(x1)"])

    The function is replaced by the operators that it is written with before anything is sent, so
    that every server computes it, with its derivatives. It is known by its name in texts, and to
    the front ends of other libraries. A later definition of the same name replaces it.

    Args:
        name: the function's name.
        text: an expression over its operands ``a``, ``b`` and ``c``; it may call functions that
            are defined already, but not itself.

    Raises:
        ParseError: if the text is no expression.
        InvalidArgumentError: if the name is an operator's or no name, if the operands are not a,
            a and b, or a, b and c, or if the function is too long.
    """
    MACROS.define(name, text)
    parser.cache_clear()


def function(name: str) -> Operator | Macro | None:
    """Return the operator or macro of a name or alias; None if there is none."""
    name = ALIASES.get(name, name)
    return OPERATORS.get(name) or MACROS.find(name)


def function_names() -> list[str]:
    """Return the names of all operators and macros."""
    return [*OPERATORS, *MACROS.names()]


class Parser:
    """Parser for one list of variable names, with bounded caches; threads can share it."""

    def __init__(
        self,
        names: Sequence[str] = (),
        functions: Mapping[str, Macro | Placeholder] = MappingProxyType({}),
        *,
        indexed: bool = True,
    ) -> None:
        """Take the names of variables, all different, and what functions mean.

        ``functions`` take precedence over operators; ``indexed`` says whether x1 and p1 are known.
        """
        self.names = tuple(names)
        self.indexed = indexed
        self.variables = {name: float(index) for index, name in enumerate(self.names)}
        self.leaves = {
            name: (VARIABLE, index)
            for name, index in self.variables.items()
            if IDENTIFIER.fullmatch(name) and name not in WORDS  # others are quoted
        }
        self._functions = functions
        self._cached = lru_cache(_MOST_TEXTS)(self._parse)

    def parse(self, text: str) -> Program:
        """Parse one expression, as `warpfit.parse.parse`."""
        return self._cached(text) if len(text) <= _LONGEST_TEXT else self._parse(text)

    def function(self, name: str) -> Operator | Macro | Placeholder | None:
        """Return the operator or macro that a name means."""
        return self._functions.get(name) or function(name)

    def _parse(self, text: str) -> Program:
        codes, values = self.tokens(text)
        return Program._unchecked(bytes(codes), array("d", values).tobytes())

    def tokens(self, text: str) -> tuple[list[int], list[float]]:
        """Return the token codes and values of one expression."""
        return _Reader(self, text).read()


#: Similar names, which are looked for once: many skeletons of a call have the same wrong one.
_close_matches: Final = lru_cache(64)(similar)
#: Names of packages, whose functions have none here.
_PACKAGES: Final = frozenset({"np", "numpy", "math", "sympy", "sp", "jnp", "torch"})
#: What is meant by names of functions that are like no name of ours, or like that of another one.
_MEANT: Final = {
    **{"cosine": "cos", "sine": "sin", "tangent": "tan", "tg": "tan", "arctg": "atan"},
    **{"ctg": "cot", "cotan": "cot", "sh": "sinh", "ch": "cosh", "th": "tanh", "lg": "log10"},
    **{"if": "where", "iif": "where", "step": "heaviside", "root": "sqrt", "modulo": "mod"},
}
#: What is written instead of functions that take two operands elsewhere, and one here.
_OF_TWO: Final = {
    "log": "Write log(a)/log(b) for the base b, or log10(a) or log2(a)",
    "atan": "Write atan2(a, b)",
    "round": "Write round(100*a)/100 for two decimals",
}
#: An equation such as "y = p1*x1": its sign, and what stands behind it.
_EQUATION: Final = re.compile(r"\s*\w+(?:\([\w\s,]*\))?\s*(=)(?!=)\s*(\S.*)", re.DOTALL)


class _Group:
    """An open call or group in parentheses."""

    __slots__ = ("first", "operands", "row")

    def __init__(self, row: Operator | Macro | Placeholder | None, first: int) -> None:
        self.row = row
        """Name of the function that is called; None for a group in parentheses."""
        self.first = first
        """Index of its first token of the text."""
        self.operands = 1


class _Reader:
    """Reads one text from left to right and writes its tokens in postfix order."""

    def __init__(self, parser: Parser, text: str) -> None:
        self.parser = parser
        self.text = text
        # White space at the end is no token's, and the search would begin anew at each character.
        self.tokens = [*TOKEN.findall(text.rstrip()), "", ""]
        self.at = 0
        self.codes: list[int] = []
        self.values: list[float] = []
        #: Operators whose last operand is still being read: precedence, code, and the number of
        #: tokens before; `_OPEN` for each open group.
        self.stack: list[tuple[int, int, int]] = [_OPEN]
        self.groups: list[_Group] = []

    def read(self) -> tuple[list[int], list[float]]:
        """Return the token codes and values of the text."""
        tokens, leaves, stack = self.tokens, self.parser.leaves, self.stack
        codes, values = self.codes, self.values
        wants_operand, at = True, 0
        while True:
            token = tokens[at]
            at += 1
            if wants_operand:
                leaf = leaves.get(token)
                if leaf is not None and tokens[at] != "(":
                    codes.append(leaf[0])
                    values.append(leaf[1])
                    wants_operand = False
                else:
                    self.at = at
                    wants_operand = self._operand(token)
                    at = self.at
                continue
            infix = _INFIX.get(token)
            if infix is not None:
                first, precedence, code = infix
                while stack[-1][0] > first:
                    codes.append(stack.pop()[1])
                    values.append(0.0)
                if code == _POWER and tokens[at] in _WHOLE_POWERS and tokens[at + 1] not in _POWERS:
                    codes.append(_WHOLE_POWERS[tokens[at]])
                    values.append(0.0)
                    at += 1
                    continue
                if stack[-1][1] in _COMPARISON_CODES and code in _COMPARISON_CODES:
                    remedy = "Write 'a < b and b < c', or put one comparison in parentheses"
                    self._fail("comparisons do not chain", "CHAINED_COMPARISON", remedy, at - 1)
                stack.append((precedence, code, -1))
                wants_operand = True
                continue
            self.at = at
            while stack[-1][0] >= 0:  # the pending operators of this group
                codes.append(stack.pop()[1])
                values.append(0.0)
            if token == ")":
                if not self.groups:
                    self._fail("')' was never opened", "UNBALANCED", "Remove it, or add '('")
                stack.pop()
                group = self.groups.pop()
                row = group.row
                if row is None:
                    continue
                chained = row.name in CHAINED
                if group.operands != row.arity and not (chained and group.operands > row.arity):
                    wanted = f"{row.arity} or more" if chained else str(row.arity)
                    plural = "s" if row.arity > 1 else ""
                    usual = f"Write {row.name}({', '.join(row.operands)})"
                    self._fail(
                        f"{row.name} takes {wanted} operand{plural}, got {group.operands}",
                        "WRONG_ARITY",
                        (_OF_TWO.get(row.name) if group.operands == 2 else None) or usual,
                        group.first,
                    )
                self._apply(row)
            elif token == ",":
                row = self.groups[-1].row if self.groups else None
                if row is None:
                    remedy = "Only calls have commas; decimals are written with a point"
                    self._fail("',' stands outside a call", "UNEXPECTED_COMMA", remedy)
                group = self.groups[-1]
                if group.operands > 1 and row.name in CHAINED:
                    self._apply(row)
                group.operands += 1
                wants_operand = True
            elif token:
                is_known = token in (*PREFIX, "(") or IDENTIFIER.match(token) or len(token) > 1
                if not (is_known or _is_number(token)):
                    self._bad_character(token)
                usual = "Write an operator between the operands; * is never left out"
                self._fail(
                    f"an operator is missing before {token!r}",
                    "EXPECTED_OPERATOR",
                    (self._quoted(at - 2) if at > 1 else "") or usual,
                )
            elif self.groups:
                opened = self.groups[-1].first
                self._fail("'(' is never closed", "UNBALANCED", "Add ')'", opened)
            else:
                return codes, values

    def _operand(self, token: str) -> bool:
        """Read an operand that is no known name; return whether an operand is still missing."""
        if token[:1] in _DIGITS:
            return self._constant(self._number(token))
        if token == "(":
            self._open(None, self.at - 1)
            return True
        if self.tokens[self.at] == "(" and token not in PREFIX and IDENTIFIER.fullmatch(token):
            called = self.parser.function(token)
            if called is None:
                self._unknown(token, "function", (*function_names(), *ALIASES))
            self._open(called, self.at - 1)
            self.at += 1
            return True
        row = PREFIX.get(token)
        if row is not None:
            self.stack.append((row.precedence, row.code, len(self.codes)))
            return True
        if token == "+":
            return True
        if token[:1] == "`" and len(token) > 1:
            name = token[1:-1].replace("``", "`")
            if name not in self.parser.variables:
                self._unknown(name, "variable", self.parser.names)
            self._leaf(token, VARIABLE, self.parser.variables[name])
        elif token[:1] == "#" and len(token) > 1:
            (value,) = struct.unpack(">d", bytes.fromhex(token[1:]))
            self._constant(value)
        elif IDENTIFIER.fullmatch(token) and token not in INFIX:
            indexed = INDEXED.fullmatch(token) if self.parser.indexed else None
            if token in self.parser.variables:
                self._leaf(token, VARIABLE, self.parser.variables[token])
            elif indexed and int(indexed[2]) < 2**31:
                code = VARIABLE if indexed[1] == "x" else PARAMETER
                self._leaf(token, code, float(indexed[2]) - 1)
            elif token in CONSTANTS:
                self._constant(CONSTANTS[token])
            else:
                if token in function_names():
                    remedy = f"Write its operands in parentheses: {token}(...)"
                    self._fail(f"{token} is a function without operands", "UNKNOWN_NAME", remedy)
                self._unknown(token, "name", (*self.parser.names, *CONSTANTS))
        elif _is_number(token):
            self._constant(self._number(token))
        elif token and token not in (*INFIX, ")", ","):
            self._bad_character(token)
        else:
            is_floor = token == "/" and self.tokens[self.at - 2 : self.at - 1] == ["/"]
            usual = "Write a number, a variable, a parameter, a call or a group in parentheses"
            self._fail(
                f"an operand is missing {f'before {token!r}' if token else 'at the end'}",
                "EXPECTED_OPERAND",
                "Write floor(a/b) for a // b" if is_floor else usual,
            )
        return False

    def _leaf(self, token: str, code: int, value: float) -> None:
        if len(self.parser.leaves) < _MOST_LEAVES:
            self.parser.leaves[token] = code, value
        self.codes.append(code)
        self.values.append(value)

    def _number(self, token: str) -> float:
        value = float(token)
        if (value == 0.0 or value == math.inf) and leaves_float64(token, value):
            shown = token if len(token) <= 40 else f"{token[:37]}..."
            limit = "inf" if value else "0"
            remedy = f"Write {limit} if that is meant, or choose other units"
            self._fail(f"float64 cannot hold {shown}", "OVERFLOW", remedy)
        return value

    def _constant(self, value: float) -> bool:
        """Write a constant; a minus directly before it is its sign."""
        _, code, before = self.stack[-1]
        is_signed = code == _NEGATION.code and before == len(self.codes)
        if is_signed and self.tokens[self.at] not in _BEFORE_MINUS:
            self.stack.pop()
            value = -value
        self.codes.append(CONSTANT)
        self.values.append(value)
        return False

    def _open(self, row: Operator | Macro | Placeholder | None, first: int) -> None:
        self.groups.append(_Group(row, first))
        self.stack.append(_OPEN)

    def _apply(self, row: Operator | Macro | Placeholder) -> None:
        if isinstance(row, Macro):
            row.apply(self.codes, self.values)
        else:
            self.codes.append(row.code)
            self.values.append(0.0)

    def _quoted(self, token: int) -> str:
        """Return a remedy if a name with other characters than letters stands at a token."""
        rest = self.text[self._places()[token] :]
        odd = [n for n in self.parser.names if rest.startswith(n) and not IDENTIFIER.fullmatch(n)]
        quoted = max(odd, key=len, default="").replace("`", "``")
        return f"Write names with such characters in backticks: `{quoted}`" if quoted else ""

    def _unknown(self, name: str, what: str, known: Iterable[str]) -> NoReturn:
        known = tuple(dict.fromkeys(known))
        meant = _MEANT.get(name) if what == "function" else None
        close = [meant] if meant else _close_matches(name[:100], known, 3)
        numbered = re.fullmatch(r"([xp])0+", name)
        if remedy := self._quoted(self.at - 1):
            pass
        elif numbered and self.parser.indexed:
            remedy = f"{numbered[1]} is numbered from 1 on: {numbered[1]}1, {numbered[1]}2, ..."
        elif name in _PACKAGES:
            remedy = f"Write functions without {name}, such as exp(x) and sin(x)"
        elif raised := _RAISED.search(name):
            power = unicodedata.normalize("NFKC", raised[0])
            remedy = f"Write a power as {name[: raised.start()] or 'x'}^{power}"
        elif name in AMBIGUOUS_DIVISIONS:
            remedy = (
                "Programs differ in its value at a divisor of 0. Write zdiv(a, b) for 1 there, or "
                "where(b == 0, 0, a/b) for 0; warpfit.define adds a function of your own"
            )
        elif close:
            remedy = f"Did you mean {' or '.join(close)}?"
        elif what == "function":
            listed = nearest_first(name, function_names())
            remedy = f"Functions are {listed}; warpfit.define adds one"
        else:
            listed = nearest_first(name, self.parser.names) or "x1, x2, ..."
            remedy = f"Variables are {listed}; parameters are p1, p2, ..."
        self._fail(f"unknown {what} {name!r}", f"UNKNOWN_{what.upper()}", remedy)

    def _bad_character(self, character: str) -> NoReturn:
        remedy = {
            "=": "Write == to compare",
            "`": "Close the quoted name with another backtick",
            "[": "Use parentheses; variables are x1, x2, ...",
            "{": "Use parentheses: formulas are no LaTeX",
            "\\": "Formulas are no LaTeX: write sin(x), sqrt(x), a*b, a/b without a backslash",
            "|": "Write abs(x) for |x|, and (a or b) for a disjunction",
            **dict.fromkeys("\u00d7\u00b7\u22c5\u2217\u2022", "Write * to multiply"),
            **dict.fromkeys("\u00f7\u2215\u2044", "Write / to divide"),
            **dict.fromkeys("\u2212\u2013\u2014", "Write - for a minus"),
            **dict.fromkeys("\u221a\u221b", "Write sqrt(x) or cbrt(x)"),
            **dict.fromkeys("\u2264\u2265\u2260", "Write <=, >= or !="),
            "!": "Write != to compare, and gamma(x + 1) for a factorial",
            "%": "Write mod(a, b) for a % b",
            "&": "Write (a and b) for a conjunction",
            "~": "Write (not a) for a negation",
            "?": "Write where(a, b, c) for a ? b : c",
        }.get(character, "Remove it, or put a variable's name in backticks")
        self._fail(f"{character!r} has no meaning", "UNEXPECTED_CHARACTER", remedy)

    def _fail(self, message: str, reason: str, remedy: str, token: int | None = None) -> NoReturn:
        """Raise the error of a token of the text, by default the one that was read last."""
        position = self._places()[self.at - 1 if token is None else token]
        equation = _EQUATION.match(self.text)
        if equation is not None and position <= equation.end(1):
            remedy = f"Write what stands behind the equals sign alone: {equation[2][:100]}"
        raise ParseError(message, reason, remedy, text=self.text, position=position)

    def _places(self) -> list[int]:
        """Return the index of each token's first character, and that of the end."""
        found = [match.start(1) for match in TOKEN.finditer(self.text.rstrip())]
        return [*found, len(self.text)]


def place_in(given: str, printed: str, position: int) -> tuple[str, int]:
    """Return a text and the index in it of what stands at a place of its program's printed text.

    The place is known if both texts have what stands there equally often; else the printed text and
    the place in it are returned.
    """
    places = [(match[1], match.start(1)) for match in TOKEN.finditer(printed.rstrip())]
    token = next((text for text, start in places if start == position), "")
    ours = [start for text, start in places if text == token]
    theirs = [match.start(1) for match in TOKEN.finditer(given.rstrip()) if match[1] == token]
    if not token or len(ours) != len(theirs):
        return printed, position
    return given, theirs[ours.index(position)]


def _is_number(token: str) -> bool:
    """Tell a number from other tokens; digits of other scripts count as in Python."""
    try:
        float(token)
    except ValueError:
        return False
    return True
