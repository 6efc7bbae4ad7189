"""Functions that are written with operators of the table: those of users and some that they miss.

A macro exists in the client alone. The parser and the front ends replace each call of one by the
operators that it stands for, so that every server computes it, with its derivatives. Between the
reading of a tree and the replacement a macro has a token code of its own, above the table's.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import RLock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import InvalidArgumentError
from warpfit.expressions.grammar import ALIASES, IDENTIFIER, WORDS
from warpfit.ops import ARITIES, BY_CODE, OPERATORS, VARIABLE

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
        """Replace its operands, the last ones of postfix tokens, by what it stands for."""
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
            raise InvalidArgumentError(
                f"{name!r} cannot be the name of a function",
                "BAD_NAME",
                "Give a name of letters, digits and _ that no operator has; see OPERATORS.md",
                "name",
            )
        if re.search(rf"\b{name}\s*\(", text):
            raise InvalidArgumentError(
                f"{name!r} calls itself", "RECURSION", "Write it without a call of itself", "text"
            )
        tokens = self._parse(text)
        with self._lock:
            macro = Macro.of(name, text, *tokens, self._free_code(name))
            self.operands[macro.code] = macro.arity
            self._by_code[macro.code] = self._by_name[name] = macro

    def find(self, name: str) -> Macro | None:
        """Return the macro of a name, or None."""
        if name not in self._by_name and name in STANDARD:
            with self._lock:
                if name not in self._by_name:
                    self.define(name, STANDARD[name])
        return self._by_name.get(name)

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
            try:
                own = self._program(codes[start:stop].tolist(), values[start:stop].tolist())
            except InvalidArgumentError as error:
                error.expression = program
                raise
            all_codes += bytes(own[0])
            all_values.extend(own[1])
            sizes.append(len(own[0]))
        return (
            np.frombuffer(bytes(all_codes), dtype=np.uint8),
            np.frombuffer(all_values.tobytes()),
            np.array(sizes, dtype=np.uint32),
        )

    def _program(self, codes: list[int], values: list[float]) -> tuple[list[int], list[float]]:
        if self._by_code.keys().isdisjoint(codes):
            return codes, values
        written: tuple[list[int], list[float]] = [], []
        for code, value in zip(codes, values, strict=True):
            macro = self._by_code.get(code)
            if macro is not None:
                macro.apply(*written)
            else:
                written[0].append(code)
                written[1].append(value)
        return written

    def _free_code(self, name: str) -> int:
        known = self._by_name.get(name)
        if known is not None:
            return known.code
        for code in range(255, 127, -1):
            if code not in BY_CODE and code not in self._by_code:
                return code
        raise InvalidArgumentError(
            "there is no room for another function", "TOO_MANY_MACROS", "Define fewer", "name"
        )
