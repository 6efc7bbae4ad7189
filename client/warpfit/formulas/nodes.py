"""Expressions in normal form, and the shortest tokens of each.

A sum is a constant and terms with coefficients, a product is bases with constant exponents, and
everything else is a call. Subtraction, negation, division, squares and roots exist only in tokens.
Two nodes are equal if their tokens are; nodes are ordered by length, then by tokens.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from warpfit.ops import CONSTANT, OPERATORS

#: Results that are finite wherever the operands are.
_FINITE: Final = frozenset(
    {
        *("sin", "cos", "tan", "atan", "atan2", "tanh", "erf", "logistic", "abs", "floor", "ceil"),
        *("round", "erfc"),
        *("sign", "relu", "min", "max", "sqrtabs", "cbrt", "aq", "fma", "pdiv", "plog", "pinv"),
        *("zdiv", "add", "sub", "mul", "neg", "square", "cube", "where"),
    }
)
#: Results that are 0 or 1, whatever the operands are.
_LOGICAL: Final = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"})
_NONNEGATIVE: Final = _LOGICAL | frozenset(
    {
        *("exp", "abs", "cosh", "sqrtabs", "logistic", "relu", "powabs", "acos", "square", "sqrt"),
        "erfc",
    }
)
#: Coefficients up to this many characters are written as they are, not as a division.
_SHORT: Final = 6


#: Postfix tokens are bytes, which are compared and joined as a whole: of each a code and a value.
TOKEN: Final = np.dtype([("code", "u1"), ("value", ">f8")])


def token(code: int, value: float = 0.0) -> bytes:
    """Return one token."""
    return struct.pack(">Bd", code, value)


#: Token of each operator, by name.
OPERATOR: Final = {name: token(row.code) for name, row in OPERATORS.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A subexpression in normal form.

    The flags hold for finite variables and parameters, and as long as no sum, product or power of
    finite numbers leaves the range of its type.
    """

    tokens: bytes
    finite: bool
    """Whether it is never NaN or infinite."""
    nonzero: bool
    """Whether it is never 0."""
    nonnegative: bool
    """Whether it is never below 0; it may be NaN."""

    @property
    def key(self) -> tuple[int, bytes, bytes]:
        """Place in the canonical order: by length, then by codes, then by values."""
        return len(self.tokens), self.tokens[:: TOKEN.itemsize], self.tokens

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.tokens == other.tokens

    def __hash__(self) -> int:
        return hash(self.tokens)

    def __len__(self) -> int:
        """Count the tokens."""
        return len(self.tokens) // TOKEN.itemsize


#: Coefficients with their nodes, and bases with their exponents.
Terms = tuple[tuple[float, Node], ...]
Factors = tuple[tuple[Node, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Leaf(Node):
    """A variable, a parameter, or a constant that is not finite."""


@dataclass(frozen=True, slots=True, eq=False)
class Sum(Node):
    """A constant plus terms; without terms it is a number."""

    constant: float
    terms: Terms


@dataclass(frozen=True, slots=True, eq=False)
class Product(Node):
    """Powers with constant exponents; a number before them is the coefficient of a `Sum`."""

    factors: Factors


@dataclass(frozen=True, slots=True, eq=False)
class Call(Node):
    """An operator and its operands; more than two if it is associative."""

    name: str
    operands: tuple[Node, ...]


def leaf(code: int, value: float) -> Node:
    """Return a variable, a parameter or a constant."""
    if code == CONSTANT and math.isfinite(value):
        return number(value)
    if math.isnan(value):
        value = math.nan  # of any sign and payload
    return Leaf(token(code, value), code != CONSTANT, False, code == CONSTANT and value > 0)


def number(value: float) -> Sum:
    """Return a finite constant; -0 becomes 0."""
    value += 0.0
    return Sum(token(CONSTANT, value), True, value != 0.0, value >= 0.0, value, ())


def sum_node(constant: float, terms: Iterable[tuple[float, Node]]) -> Node:
    """Return a sum of different terms, none of them a number."""
    ordered = tuple(sorted(terms, key=lambda term: term[1].key))
    if not ordered:
        return number(constant)
    if constant == 0.0 and len(ordered) == 1 and ordered[0][0] == 1.0:
        return ordered[0][1]
    nonnegative = constant >= 0.0 and all(c >= 0.0 and t.nonnegative for c, t in ordered)
    alone = constant == 0.0 and len(ordered) == 1 and ordered[0][0] != 0.0
    return Sum(
        _sum_tokens(constant, ordered),
        all(term.finite for _, term in ordered),
        (nonnegative and constant > 0.0) or (alone and ordered[0][1].nonzero),
        nonnegative,
        constant,
        ordered,
    )


def product_node(factors: Iterable[tuple[Node, float]]) -> Node:
    """Return a product of powers."""
    ordered = tuple(sorted(factors, key=lambda factor: (factor[0].key, factor[1])))
    if not ordered:
        return number(1.0)
    if len(ordered) == 1 and ordered[0][1] == 1.0:
        return ordered[0][0]
    return Product(
        product_tokens(1.0, ordered),
        all(
            base.finite and (e > 0 or base.nonzero) and (e.is_integer() or base.nonnegative)
            for base, e in ordered
        ),
        all(base.nonzero and (e > 0 or base.finite) for base, e in ordered),
        all(base.nonnegative or e % 2 == 0 or not e.is_integer() for base, e in ordered),
        ordered,
    )


def call_node(name: str, operands: Sequence[Node]) -> Call:
    """Return an operator over its operands; a chain if there are more than it takes."""
    first = OPERATORS[name].arity - 1
    tokens = b"".join(node.tokens for node in operands[:first])
    tokens += b"".join(node.tokens + OPERATOR[name] for node in operands[first:])
    branches = operands[1:] if name == "where" else operands
    finite = name in _LOGICAL or (name in _FINITE and all(node.finite for node in operands))
    if name in ("log", "logabs"):
        argument = operands[0]
        finite = argument.finite and argument.nonzero and (argument.nonnegative or name != "log")
    elif name == "mod":
        finite = all(node.finite for node in operands) and operands[1].nonzero
    return Call(
        tokens,
        finite,
        name == "cosh" or (name in ("abs", "sqrtabs", "cbrt") and operands[0].nonzero),
        name in _NONNEGATIVE
        or (name in ("min", "where") and all(node.nonnegative for node in branches))
        or (name == "mod" and operands[1].nonnegative)
        or (name == "max" and any(node.nonnegative for node in branches)),
        name,
        tuple(operands),
    )


# --------------------------------------------------------------------------------------- tokens


def _sum_tokens(constant: float, terms: Terms) -> bytes:
    """Return positive terms first, so that the others are subtracted."""
    items = [*terms, *([(constant, number(1.0))] if constant != 0.0 else [])]
    # A negative number takes no token more than a positive one, -1 takes one more.
    first = min(range(len(items)), key=lambda place: (items[place][0] < 0, items[place][0] == -1.0))
    c, node = items.pop(first)
    sign = -1.0 if c == -1.0 else 1.0
    tokens = scaled_tokens(sign * c, node)
    for c, node in items:
        operator = "add" if sign * c >= 0.0 else "sub"
        tokens += scaled_tokens(abs(c), node) + OPERATOR[operator]
    return tokens if sign > 0.0 else tokens + OPERATOR["neg"]


def scaled_tokens(coefficient: float, node: Node) -> bytes:
    """Return the tokens of a number times a node."""
    if isinstance(node, Sum) and not node.terms:
        return token(CONSTANT, coefficient * node.constant)
    factors = node.factors if isinstance(node, Product) else ((node, 1.0),)
    return node.tokens if coefficient == 1.0 else product_tokens(coefficient, factors)


def product_tokens(coefficient: float, factors: Factors) -> bytes:
    """Return the tokens of a product: a number, the factors above, the factors below."""
    above = [(base, e) for base, e in factors if e > 0]
    below = [(base, -e) for base, e in factors if e < 0]
    has_number = abs(coefficient) != 1.0
    numerator, denominator = _group_tokens(above), _group_tokens(below)
    if not above and not has_number:
        unusual = [factor for factor in below if _power_tokens(factor[1]) is None]
        if not unusual:
            tokens = _joined(denominator) + OPERATOR["inv"]
            return tokens if coefficient > 0 else tokens + OPERATOR["neg"]
        base, e = unusual[0]
        below.remove(unusual[0])
        numerator, denominator = _group_tokens([(base, -e)]), _group_tokens(below)
    if has_number and above and not below and _is_reciprocal(coefficient):
        denominator = [token(CONSTANT, round(1.0 / coefficient))]
    elif has_number:
        numerator = [token(CONSTANT, coefficient), *numerator]
    tokens = _joined(numerator)
    if denominator:
        tokens += _joined(denominator) + OPERATOR["div"]
    return tokens + OPERATOR["neg"] if coefficient == -1.0 else tokens


def _is_reciprocal(value: float) -> bool:
    """Tell whether a number is better written as a division by an integer."""
    if value == 0.0 or not abs(1.0 / value) < 2**53 or len(repr(value)) <= _SHORT:
        return False
    divisor = round(1.0 / value)
    return divisor != 0 and 1.0 / divisor == value


def _group_tokens(factors: Sequence[tuple[Node, float]]) -> list[bytes]:
    """Return the factors; those with the same integer exponent are multiplied before the power."""
    groups: dict[float, list[Node]] = {}
    pieces = []
    for base, e in factors:
        if e == 1.0:
            pieces.append(base.tokens)
        elif e.is_integer():
            groups.setdefault(e, []).append(base)
        else:
            pieces.append(_with_power([base], e))
    return pieces + [_with_power(bases, e) for e, bases in groups.items()]


def _with_power(bases: Sequence[Node], e: float) -> bytes:
    if e == 0.5 and isinstance(bases[0], Call) and bases[0].name == "abs":
        return bases[0].operands[0].tokens + OPERATOR["sqrtabs"]
    power = _power_tokens(e)
    if power is None:
        power = token(CONSTANT, e) + OPERATOR["pow"]
    return _joined([base.tokens for base in bases]) + power


def _power_tokens(e: float) -> bytes | None:
    names = {0.5: "sqrt", 2.0: "square", 3.0: "cube"}
    return b"" if e == 1.0 else OPERATOR.get(names.get(e, ""))


def _joined(pieces: Sequence[bytes]) -> bytes:
    return pieces[0] + b"".join(piece + OPERATOR["mul"] for piece in pieces[1:])
