"""Exact rules that bring a program into normal form, never with more tokens.

Real numbers obey each rule where the rule applies. In floating point some round elsewhere than the
original, because constants are combined and sums and products are reordered. Variables and
parameters are taken to be finite, and sums, products and powers of finite numbers not to leave the
range of their type; under these assumptions NaN and infinities stay where they are, unless rules
that hold only where a formula is defined are allowed.

The sign of a zero is not kept: ``0 - x`` becomes ``-x``, and ``1/(b - a)`` may become
``-1/(a - b)``. So a value can change, to that of the formula with 0 of the other sign, where an
operator that tells -0 from 0 has such an operand: inv, div, atan2, gamma, and pow with a negative
exponent. What these make infinite stays infinite, but its sign, and what follows from it,
may change.

In normal form a sum is a constant and terms with coefficients, a product is bases with constant
exponents, and everything else is a call. Subtraction, negation, division, squares and roots exist
only in tokens. Two nodes are equal if their tokens are; they are ordered by length, then by tokens.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Final, TypeGuard

import numpy as np

from warpfit.errors import ResourceExhaustedError
from warpfit.ir import Program
from warpfit.ops import CONSTANT, OPERATORS, Operator

# -------------------------------------------------------------------------------------- normal form

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
    # Positive terms come first, so that the others are subtracted.
    items = [*ordered, *([(constant, number(1.0))] if constant != 0.0 else [])]
    # A negative number takes no token more than a positive one, -1 takes one more.
    first = min(range(len(items)), key=lambda place: (items[place][0] < 0, items[place][0] == -1.0))
    c, node = items.pop(first)
    sign = -1.0 if c == -1.0 else 1.0
    tokens = scaled_tokens(sign * c, node)
    for c, node in items:
        operator = "add" if sign * c >= 0.0 else "sub"
        tokens += scaled_tokens(abs(c), node) + OPERATOR[operator]
    tokens += OPERATOR["neg"] if sign < 0.0 else b""
    nonnegative = constant >= 0.0 and all(c >= 0.0 and t.nonnegative for c, t in ordered)
    alone = constant == 0.0 and len(ordered) == 1 and ordered[0][0] != 0.0
    return Sum(
        tokens,
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
    if has_number:
        inverse = 1.0 / coefficient if coefficient else math.inf
        is_long = abs(inverse) < 2**53 and len(repr(coefficient)) > _SHORT
        divisor = round(inverse) if is_long and above and not below else 0
        if divisor and 1.0 / divisor == coefficient:
            denominator = [token(CONSTANT, divisor)]
        else:
            numerator = [token(CONSTANT, coefficient), *numerator]
    tokens = _joined(numerator)
    if denominator:
        tokens += _joined(denominator) + OPERATOR["div"]
    return tokens + OPERATOR["neg"] if coefficient == -1.0 else tokens


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


# ---------------------------------------------------------------------------------------- the rules

#: Most tokens of a program; the time grows with the square of the length, to two seconds.
MOST_TOKENS: Final = 1_000
#: Most applications of all rules; two or three reach the end.
_MOST_ROUNDS: Final = 12
#: Exponents up to this are written as powers.
_MOST_EXPONENT: Final = 64
#: Coefficients that cancel to less than this part of the largest are rounding errors.
_ROUNDING: Final = 8 * np.finfo(np.float64).eps

_COMMUTATIVE: Final = frozenset({"add", "mul", "min", "max", "eq", "ne", "and", "or"})
_ODD: Final = frozenset(
    {"sin", "tan", "asin", "atan", "sinh", "tanh", "erf", "cbrt", "sign", "round"}
)
_EVEN: Final = frozenset({"cos", "cosh", "logabs", "plog"})
#: Functions whose results each of these functions leaves as they are.
_UNCHANGED: Final = {
    **dict.fromkeys(("floor", "ceil", "round"), frozenset({"floor", "ceil", "round", "sign"})),
    **{"sign": frozenset({"sign"}), "relu": frozenset({"relu"})},
}
#: Functions that undo others where both are defined.
_INVERSES: Final = {
    **{"exp": "log", "log": "exp", "log1p": "expm1", "expm1": "log1p", "sin": "asin"},
    **{"cos": "acos", "tan": "atan", "sinh": "asinh", "cosh": "acosh", "tanh": "atanh"},
}
#: Comparisons by those that say the same of exchanged operands.
_SWAPPED: Final = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
_KEY: Final = attrgetter("key")
_QUARTER: Final = 0.5 * math.pi


class _OutOfRangeError(ArithmeticError):
    """Constants cannot be combined, because the result would overflow or underflow."""


def simplified(program: Program, assume_defined: bool = False) -> Program:
    """Apply the exact rules until nothing changes.

    Args:
        program: the program.
        assume_defined: also apply rules that hold only where the formula is defined.

    Returns:
        A program that is not longer; simplifying it again returns the same.

    Raises:
        ResourceExhaustedError: if the program has more than `MOST_TOKENS` tokens.

    """
    check_length(program, MOST_TOKENS, "simplification")
    rules = Rules(assume_defined)
    seen = [program]
    while len(seen) <= _MOST_ROUNDS:
        following = rules.applied_once(seen[-1])
        if following in seen:
            # Programs that lead to each other have the same length; any start finds the same one.
            return min(seen[seen.index(following) :], key=lambda p: (len(p), p.codes.tobytes()))
        seen.append(following)
    return seen[-1]


def check_length(program: Program, most: int, what: str) -> None:
    """Check that a program has at most so many tokens; raise ResourceExhaustedError if not."""
    if len(program) > most:
        raise ResourceExhaustedError(
            f"the program has {len(program)} tokens, {what} takes {most}",
            "PROGRAM_TOO_LONG",
            "Simplify or write its parts",
            "programs",
        )


@dataclass(frozen=True, slots=True)
class Rules:
    """Builds nodes in normal form."""

    assume_defined: bool
    _known: dict[tuple[str, tuple[Node, ...]], Node] = field(default_factory=dict, init=False)
    """Results by operator and operands: programs that differ in one place share most of them."""

    def applied_once(self, program: Program) -> Program:
        """Return the tokens of a program's normal form."""

        def operator(row: Operator, operands: list[Node]) -> Node:
            key = row.name, tuple(operands)
            if key not in self._known:
                self._known[key] = self.apply(row, operands)
            return self._known[key]

        tokens = np.frombuffer(program.fold(leaf, operator).tokens, TOKEN)
        return Program._unchecked(tokens["code"], tokens["value"].astype(np.float64))

    def apply(self, row: Operator, operands: list[Node]) -> Node:
        """Apply an operator; the result is never longer than with the operator as it is."""
        constants = [_constant(operand) for operand in operands]
        known = [value for value in constants if value is not None]
        if len(known) == len(operands):
            with np.errstate(all="ignore"):
                return leaf(CONSTANT, float(row.numpy(*map(np.float64, known))))
        ordered = sorted(operands, key=_KEY) if row.name in _COMMUTATIVE else operands
        plain = call_node(row.name, ordered)
        rule = _RULES.get(row.name)
        try:
            found = rule(self, *operands) if rule else self.call(row.name, operands)
        except _OutOfRangeError:
            return plain
        return found if len(found) <= len(plain) else plain

    # ------------------------------------------------------------------------------------ sums

    def total(self, constant: float, items: Iterable[tuple[float, Node]]) -> Node:
        """Return a sum of nodes with coefficients."""
        given = list(items)
        found = self._collected(constant, given, distribute=False)
        if not isinstance(found, Sum) or not any(isinstance(term, Sum) for _, term in found.terms):
            return found
        distributed = self._collected(constant, given, distribute=True)
        return min(distributed, found, key=len)

    def _collected(
        self, constant: float, items: list[tuple[float, Node]], *, distribute: bool
    ) -> Node:
        """Return the sum with like terms combined, and a common coefficient before it."""
        coefficients: dict[Node, list[float]] = {}
        waiting = items[::-1]
        while waiting:
            c, node = waiting.pop()
            if isinstance(node, Sum) and (
                distribute or abs(c) == 1.0 or not node.terms or _is_scaled(node)
            ):
                if node.constant != 0.0:
                    constant = _in_range(constant + _multiplied(c, node.constant))
                waiting += [(_multiplied(c, inner), term) for inner, term in node.terms[::-1]]
            else:
                coefficients.setdefault(node, []).append(c)
        terms: list[tuple[float, Node]] = []
        for term, cs in coefficients.items():
            if term.finite or self.assume_defined:
                combined = _sum(cs)
                terms += [(combined, term)] if combined else []
                continue
            # Of an infinite term coefficients of different signs remain apart.
            signs: dict[float, list[float]] = {}
            for c in cs:
                signs.setdefault(math.copysign(1.0, c) if c else 0.0, []).append(c)
            terms += [(_sum(group), term) for group in signs.values()]
        whole = sum_node(constant, terms)
        # Also c * (a + b) for c*a + c*b, unless the coefficients differ.
        scale = abs(terms[0][0]) if terms else 1.0
        if scale in (0.0, 1.0) or len(terms) + (constant != 0.0) < 2:
            return whole
        rest = constant / scale
        if any(abs(c) != scale for c, _ in terms) or len(repr(rest)) > len(repr(constant)) + 1:
            return whole
        inner = sum_node(rest, [(c / scale, term) for c, term in terms])
        return min(whole, sum_node(0.0, [(scale, inner)]), key=len)

    def negative(self, node: Node) -> Node:
        """Return minus a node."""
        return self.total(0.0, [(-1.0, node)])

    # -------------------------------------------------------------------------------- products

    def product(self, coefficient: float, factors: Iterable[tuple[Node, float]]) -> Node:
        """Return a number times powers of nodes; exponents of unknown bases are integers."""
        exponents: dict[Node, list[float]] = {}
        waiting = list(factors)[::-1]
        while waiting:
            base, e = waiting.pop()
            scale, inner = _as_product(base)
            if not inner or e.is_integer():
                with np.errstate(all="ignore"):
                    factor = _in_range(float(np.power(np.float64(scale), e)), scale)
                coefficient = _multiplied(coefficient, factor)
            else:  # the powers whose exponents a fractional one may multiply, or the base
                powers, inner = inner, ((base, 1.0),)
                if scale == 1.0 and len(powers) == 1:
                    of, power = powers[0]
                    if power % 2.0 == 0.0:
                        inner = ((self.absolute(of), power),)
                    elif self._positive(of):
                        inner = powers
            if inner == ((base, 1.0),):
                exponents.setdefault(base, []).append(e)
            elif any(not f.is_integer() and not self._positive(b) for b, f in inner):
                # The root of a node of unknown sign stays whole.
                exponents.setdefault(product_node(inner), []).append(e)
            else:
                waiting += [(b, e * f) for b, f in inner[::-1]]
        collected: list[tuple[Node, float]] = []
        for base, es in exponents.items():
            groups = [es]
            if not (self.assume_defined or (base.finite and base.nonzero)):
                # Exponents of different signs cancel neither 0, infinity nor NaN.
                groups = [[e for e in es if e > 0], [e for e in es if e < 0]]
            collected += [(base, e) for group in groups if (e := math.fsum(group)) != 0.0]
        if coefficient == 0.0 and (self.assume_defined or product_node(collected).finite):
            return number(0.0)
        exponentials = [(e, base.operands[0]) for base, e in collected if _is_exp(base)]
        if self.assume_defined and len(exponentials) > 1:
            whole = self.apply(OPERATORS["exp"], [self.total(0.0, exponentials)])
            rest = [(base, e) for base, e in collected if not _is_exp(base)]
            return self.product(coefficient, [*rest, (whole, 1.0)])
        for place, (base, e) in enumerate(collected):
            # Of an even power with either sign the first in the canonical order is the base.
            if isinstance(base, Sum) and e.is_integer():
                opposite = self.negative(base)
                if e % 2 == 0 and opposite.key < base.key:
                    collected[place] = opposite, e
                elif e % 2 and len(opposite) < len(base):
                    collected[place], coefficient = (opposite, e), -coefficient
        node = product_node(collected)
        return node if coefficient == 1.0 else self.total(0.0, [(coefficient, node)])

    def _positive(self, node: Node) -> bool:
        return self.assume_defined or node.nonnegative

    def power(self, base: Node, exponent: Node) -> Node:
        """Return a node to an exponent, of which constant ones are known."""
        e = _constant(exponent)
        if _constant(base) == 1.0 or e == 0.0:
            return number(1.0)
        if e is not None and abs(e) <= _MOST_EXPONENT:
            if e == 0.5 and base.finite:
                return self.root(base)
            if e.is_integer() or self._positive(base):
                return self.product(1.0, [(base, e)])
        return call_node("pow", [base, exponent])

    def root(self, node: Node) -> Node:
        """Return the square root of a node, that of a square as its absolute value."""
        scale, factors = _as_product(node)
        outside = math.sqrt(scale) if scale > 0.0 else math.nan
        if outside * outside != scale:
            return self.product(1.0, [(node, 0.5)])
        if all(e % 2.0 == 0.0 for _, e in factors):
            return self.product(outside, [(self.absolute(b), e / 2.0) for b, e in factors])
        squares = [(b, e) for b, e in factors if e % 2.0 == 0.0 and self.assume_defined]
        rest = product_node(factor for factor in factors if factor not in squares)
        outer = [(self.absolute(b), e / 2.0) for b, e in squares]
        return self.product(outside, [*outer, (rest, 0.5)])

    def absolute(self, node: Node) -> Node:
        """Return the absolute value, with factors that are never negative outside."""
        scale, factors = _as_product(node)
        parts = [(product_node([factor]), factor) for factor in factors]
        outside = [factor for part, factor in parts if part.nonnegative]
        inside = product_node([factor for part, factor in parts if not part.nonnegative])
        if isinstance(inside, Sum) and inside.terms:
            inside = min(inside, self.negative(inside), key=_KEY)
        if not (isinstance(inside, Sum) and not inside.terms):
            if not (isinstance(inside, Call) and inside.name == "abs"):
                inside = call_node("abs", [inside])
            outside.append((inside, 1.0))
        return self.product(abs(scale), outside)

    # ----------------------------------------------------------------------------------- calls

    def call(self, name: str, operands: Sequence[Node]) -> Node:
        """Return a function of its operands."""
        if len(operands) > 1:
            return call_node(name, sorted(operands, key=_KEY) if name in _COMMUTATIVE else operands)
        (operand,) = operands
        inner, of = (operand.name, operand.operands) if isinstance(operand, Call) else ("", ())
        is_defined = self.assume_defined or (name == "exp" and bool(of) and of[0].nonnegative)
        if inner and _INVERSES.get(name) == inner and is_defined:
            return of[0]
        if inner in _UNCHANGED.get(name, ()):
            return operand
        if name == "exp":
            return self.exponential(operand)
        if name == "log" and inner == "abs":
            return self.call("logabs", of)
        if name == "logabs" and operand.nonnegative:
            return self.call("log", operands)
        if name in ("sin", "cos") and isinstance(operand, Sum) and operand.terms:
            turns = operand.constant / _QUARTER
            if turns and turns.is_integer():
                quarter = (int(turns) + (name == "cos")) % 4
                found = self.call(("sin", "cos")[quarter % 2], [sum_node(0.0, operand.terms)])
                return found if quarter < 2 else self.negative(found)
        if name in _EVEN:
            return call_node(name, [min(operand, self.negative(operand), key=_KEY)])
        if name in _ODD and len(opposite := self.negative(operand)) < len(operand):
            return self.negative(call_node(name, [opposite]))
        return call_node(name, operands)

    def exponential(self, exponent: Node) -> Node:
        """Return exp of a node, in which multiples of logarithms are powers of their arguments."""
        sum_of = exponent if isinstance(exponent, Sum) else None
        constant, terms = (sum_of.constant, sum_of.terms) if sum_of else (0.0, ((1.0, exponent),))
        is_alone = constant == 0.0 and len(terms) == 1

        def becomes_a_power(c: float, node: Node) -> bool:
            if not (isinstance(node, Call) and node.name == "log" and abs(c) <= _MOST_EXPONENT):
                return False
            (of,) = node.operands
            # A factor that overflows would spoil a product that does not.
            return self.assume_defined or (
                is_alone and of.finite and (of.nonnegative or not c.is_integer())
            )

        powers = [
            (node.operands[0], c)
            for c, node in terms
            if becomes_a_power(c, node) and isinstance(node, Call)
        ]
        if not powers:
            return call_node("exp", [exponent])
        rest = sum_node(constant, (term for term in terms if not becomes_a_power(*term)))
        found = self.product(1.0, [*powers, (self.apply(OPERATORS["exp"], [rest]), 1.0)])
        return min(found, call_node("exp", [exponent]), key=len)

    def comparison(self, a: Node, b: Node, name: str) -> Node:
        """Return a comparison; of a multiple with a number as one of the term with the quotient.

        Only a quotient that gives the number again is taken, so that rows on the boundary stay on
        their side.
        """
        for relation, scaled, other in ((name, a, b), (_SWAPPED[name], b, a)):
            number = _constant(other)
            if number is None or not (isinstance(scaled, Sum) and _is_scaled(scaled)):
                continue
            ((c, term),) = scaled.terms
            quotient = number / c if c else math.inf
            if math.isfinite(quotient) and quotient * c == number:
                relation = _SWAPPED[relation] if c < 0.0 else relation
                return call_node(relation, [term, leaf(CONSTANT, quotient)])
        return call_node(name, [a, b])


def _is_exp(node: Node) -> TypeGuard[Call]:
    return isinstance(node, Call) and node.name == "exp"


_Rule = Callable[..., Node]
_RULES: Final[dict[str, _Rule]] = {
    "add": lambda rules, a, b: rules.total(0.0, [(1.0, a), (1.0, b)]),
    "sub": lambda rules, a, b: rules.total(0.0, [(1.0, a), (-1.0, b)]),
    "neg": Rules.negative,
    "mul": lambda rules, a, b: rules.product(1.0, [(a, 1.0), (b, 1.0)]),
    "div": lambda rules, a, b: rules.product(1.0, [(a, 1.0), (b, -1.0)]),
    "inv": lambda rules, a: rules.product(1.0, [(a, -1.0)]),
    "square": lambda rules, a: rules.product(1.0, [(a, 2.0)]),
    "cube": lambda rules, a: rules.product(1.0, [(a, 3.0)]),
    "sqrt": Rules.root,
    "sqrtabs": lambda rules, a: rules.root(rules.absolute(a)),
    "pow": Rules.power,
    **{name: partial(Rules.comparison, name=name) for name in _SWAPPED},
    "abs": Rules.absolute,
    "fma": lambda rules, a, b, c: min(
        rules.total(0.0, [(1.0, rules.product(1.0, [(a, 1.0), (b, 1.0)])), (1.0, c)]),
        call_node("fma", [*sorted([a, b], key=_KEY), c]),
        key=len,
    ),
}


def _constant(node: Node) -> float | None:
    """Return the value of a constant, None for other nodes."""
    if isinstance(node, Sum) and not node.terms:
        return node.constant
    if isinstance(node, Leaf) and node.tokens[0] == CONSTANT:
        return float(np.frombuffer(node.tokens, TOKEN)["value"][0])
    return None


def _is_scaled(node: Sum) -> bool:
    """Tell whether a sum is a number times one term."""
    return node.constant == 0.0 and len(node.terms) == 1


def _as_product(node: Node) -> tuple[float, Factors]:
    """Return a node as a number and factors."""
    if isinstance(node, Sum) and not node.terms:
        return node.constant, ()
    scale = 1.0
    if isinstance(node, Sum) and _is_scaled(node):
        scale, node = node.terms[0]
    return scale, node.factors if isinstance(node, Product) else ((node, 1.0),)


def _sum(coefficients: Sequence[float]) -> float:
    total = math.fsum(coefficients)
    largest = max(map(abs, coefficients))
    return 0.0 if abs(total) <= _ROUNDING * largest else _in_range(total)


def _multiplied(a: float, b: float) -> float:
    return _in_range(a * b, a, b)


def _in_range(value: float, *factors: float) -> float:
    """Return a number that is neither infinite nor 0 without a factor that is 0."""
    if not math.isfinite(value) or (value == 0.0 and factors and all(factors)):
        raise _OutOfRangeError
    return value
