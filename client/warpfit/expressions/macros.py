"""Functions that are written with operators of the table: those of users and some that they miss.

A macro exists in the client alone. The parser and the front ends replace each call of one by the
operators that it stands for, so that every server computes it, with its derivatives. Between the
reading of a tree and the replacement a macro has a token code of its own, above the table's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from warpfit.errors import InvalidArgumentError
from warpfit.ops import ARITIES, BY_CODE, VARIABLE

#: Most tokens that one macro, and one program with its macros replaced, may have.
_MOST_MACRO_TOKENS: Final = 1_000
_MOST_TOKENS: Final = 100_000

#: Functions by name, over the operands ``a``, ``b`` and ``c``. They are written so that they lose
#: no digits near 0 and do not overflow before their result does; ``erfc`` is exact to an absolute
#: error only.
STANDARD: Final[Mapping[str, str]] = MappingProxyType(
    {
        "asinh": "where(a < 0, -log1p(a*aq(a, a)/(1 + aq(1, a)) - a), "
        "log1p(a*aq(a, a)/(1 + aq(1, a)) + a))",
        "acosh": "log1p(a - 1 + sqrt(a - 1)*sqrt(a + 1))",
        "atanh": "0.5*(log1p(a) - log1p(-a))",
        "sec": "inv(cos(a))",
        "csc": "inv(sin(a))",
        "cot": "inv(tan(a))",
        "sech": "inv(cosh(a))",
        "csch": "inv(sinh(a))",
        "coth": "inv(tanh(a))",
        "sinc": "where(a == 0, 1, sin(a)/a)",
        "mod": "a - floor(a/b)*b",
        "hypot": "abs(a)*sqrt(1 + square(b/a))",
        "heaviside": "0.5*(sign(a) + 1)",
        "clip": "min(max(a, b), c)",
        "erfc": "1 - erf(a)",
        "exp2": "2^a",
        "exp10": "10^a",
        "softplus": "where(a > 0, a + log1p(exp(-a)), log1p(exp(a)))",
        "softsign": "a/(1 + abs(a))",
        "swish": "a*logistic(a)",
        "gelu": "0.5*a*(1 + erf(0.7071067811865476*a))",
        "elu": "where(a > 0, a, expm1(a))",
        "gaussian": "exp(-square(a))",
    }
)


@dataclass(frozen=True, slots=True)
class Macro:
    """A function that is written with operators."""

    name: str
    arity: int
    """Number of operands, 1 to 3."""
    text: str
    """What it stands for, over ``a``, ``b`` and ``c``."""
    codes: tuple[int, ...]
    """Token codes of the text, where variable 0 is the first operand."""
    values: tuple[float, ...]
    code: int = 0
    """Token code that stands for it while a tree is converted; 0 in a text."""

    @property
    def operands(self) -> str:
        """Names of the operands: ``"a"``, ``"ab"`` or ``"abc"``."""
        return "abc"[: self.arity]

    @classmethod
    def of(
        cls, name: str, text: str, codes: Sequence[int], values: Sequence[float], code: int = 0
    ) -> Macro:
        """Make a macro of the tokens of its text.

        Raises:
            InvalidArgumentError: if it has no operands, leaves one out, or is too long.

        """
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
        """Replace its operands, the last ones of postfix tokens, by what it stands for.

        Raises:
            InvalidArgumentError: if the program becomes too long.

        """
        places = _last_operands(codes, self.arity)
        sizes = [stop - start for start, stop in places]
        written = sum(
            sizes[int(v)] if c == VARIABLE else 1
            for c, v in zip(self.codes, self.values, strict=True)
        )
        start = places[0][0]
        _check_size(start + written, _MOST_TOKENS, self.name)
        operands = [(codes[a:b], values[a:b]) for a, b in places]
        del codes[start:], values[start:]
        for code, value in zip(self.codes, self.values, strict=True):
            if code == VARIABLE:
                codes += operands[int(value)][0]
                values += operands[int(value)][1]
            else:
                codes.append(code)
                values.append(value)


def _last_operands(codes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Return where each of the last operands begins and ends in postfix tokens."""
    places: list[tuple[int, int]] = []
    start = len(codes)
    for _ in range(count):
        stop, missing = start, 1
        while missing:
            start -= 1
            missing += int(ARITIES[codes[start]]) - 1
        places.append((start, stop))
    return places[::-1]


def _check_size(tokens: int, most: int, name: str) -> None:
    if tokens > most:
        raise InvalidArgumentError(
            f"{name!r} written out has {tokens} tokens, the limit is {most}",
            "MACRO_TOO_LONG",
            "Nest fewer calls of functions that use an operand several times",
            "expressions",
        )


class Macros:
    """The macros by name and by code; threads may share it."""

    def __init__(self) -> None:
        self.by_name: dict[str, Macro] = {}
        self.by_code: dict[int, Macro] = {}

    def free_code(self, name: str) -> int:
        """Return the code of a macro, or one that none has.

        Raises:
            InvalidArgumentError: if there is none left.

        """
        known = self.by_name.get(name)
        if known is not None:
            return known.code
        free = [code for code in range(255, 127, -1) if code not in {*BY_CODE, *self.by_code}]
        if not free:
            raise InvalidArgumentError(
                "there is no room for another function", "TOO_MANY_MACROS", "Define fewer", "name"
            )
        return free[0]

    def add(self, macro: Macro) -> None:
        """Add a macro, or replace the one of its name."""
        self.by_code[macro.code] = self.by_name[macro.name] = macro
