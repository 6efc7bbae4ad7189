"""Where a formula is sure to be defined: interval arithmetic over the operator table.

An interval contains every value that a subexpression takes in a box of the variables (Moore 1966).
What cannot be shown to be a finite number everywhere in a box counts as undefined there: the
statement "defined" is a proof, its opposite is none. A box that decides nothing is cut in halves,
because intervals overestimate the more, the wider they are and the more often a variable occurs.

All boxes are computed at once, as arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Program
from warpfit.ops import CONSTANT, OPERATORS, VARIABLE, Operator, lgamma, tgamma

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: Functions that are not rounded correctly are widened by this part of their values.
_ROUNDING: Final = 16 * float(np.finfo(np.float64).eps)
#: Most boxes that are looked at, and most times that each is cut.
_MOST_BOXES: Final = 4096
_MOST_CUTS: Final = 24
#: Random points in each of the first boxes in which a formula may be undefined.
_POINTS: Final = 16
_MOST_SAMPLED: Final = 256
#: Where the gamma function of positive numbers is least.
_GAMMA_BOTTOM: Final = 1.4616321449683622
#: Angles above have no place in their period.
_MOST_ANGLE: Final = 1e15
_PROTECTED: Final = 0.001


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """One interval for each box; where it is not defined, the ends are infinite."""

    low: Floats
    high: Floats
    defined: Mask
    """Whether every value is proved to be a finite number."""


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Boxes of variables, both ends [variables, boxes]."""

    low: Floats
    high: Floats

    def __len__(self) -> int:
        """Count the boxes."""
        return int(self.low.shape[1])

    def __getitem__(self, chosen: Any) -> Boxes:
        """Select boxes."""
        return Boxes(self.low[:, chosen], self.high[:, chosen])

    def joined(self, other: Boxes) -> Boxes:
        """Return these boxes and others."""
        return Boxes(np.hstack([self.low, other.low]), np.hstack([self.high, other.high]))

    def halves(self, sizes: Floats) -> Boxes:
        """Cut each box across its longest side, as part of ``sizes`` [variables]; 0 is not cut."""
        with np.errstate(all="ignore"):
            lengths = (self.high / 2.0 - self.low / 2.0) / sizes[:, None]
        side = np.argmax(np.where(sizes[:, None] > 0.0, lengths, -1.0), axis=0)
        each = np.arange(len(self))
        middle = self.low[side, each] / 2.0 + self.high[side, each] / 2.0
        low, high = self.low.copy(), self.high.copy()
        high[side, each], low[side, each] = middle, middle
        return Boxes(self.low, high).joined(Boxes(low, self.high))


def intervals(program: Program, boxes: Boxes) -> Intervals:
    """Return an interval of the values of a program without parameters in each box."""
    count = len(boxes)

    def leaf(code: int, value: float) -> Intervals:
        if code == VARIABLE:
            return _made(boxes.low[int(value)], boxes.high[int(value)])
        number = np.full(count, value if code == CONSTANT else math.nan)
        return _made(number, number)

    def operator(row: Operator, operands: list[Intervals]) -> Intervals:
        if row.name not in _RULES:
            return _made(np.zeros(count), np.zeros(count), np.zeros(count, bool))
        return _RULES[row.name](*operands)

    with np.errstate(all="ignore"):
        return program.fold(leaf, operator)


class DefinedRegion:
    """Where in the box of some data a formula is proved to be defined, to judge others by.

    Args:
        program: the formula, with numbers and without parameters.
        low: least value of each variable, [variables].
        high: greatest value of each, [variables].
        sample: some rows of the data, [variables, rows].
        boxes: most boxes that are looked at.

    """

    def __init__(
        self,
        program: Program,
        low: Floats,
        high: Floats,
        sample: Floats,
        boxes: int = _MOST_BOXES,
    ) -> None:
        """Prove where the formula is defined; look elsewhere at points."""
        self._most = boxes
        with np.errstate(all="ignore"):
            self._sizes = high / 2.0 - low / 2.0
        whole = Boxes(low[:, None], high[:, None])
        self._proved, open_boxes = self._divided(program, whole)
        some = open_boxes[:: max(1, len(open_boxes) // _MOST_SAMPLED)]
        parts = np.random.default_rng(0).random((_POINTS, *some.low.shape))
        drawn = some.low + parts * (some.high - some.low)
        self.open_points: Floats = np.moveaxis(drawn, 0, 1).reshape(len(low), -1)
        """Points beside those where the formula may be undefined, [variables, points]: its values
        are huge there at a pole, and empty where it is proved to be defined everywhere."""
        drawn = np.hstack([sample[: len(low)], self.open_points])
        self._points = drawn[:, np.isfinite(evaluate_program(program, drawn))]
        self._kept: dict[Program, bool] = {}

    def keeps(self, program: Program) -> bool:
        """Tell whether another formula is defined wherever the first one is known to be.

        It has to be proved where the first one is proved, and to be a finite number at the points
        where the first one was seen to be.
        """
        if program not in self._kept:
            values = evaluate_program(program, self._points)
            self._kept[program] = bool(np.isfinite(values).all()) and not len(
                self._divided(program, self._proved)[1]
            )
        return self._kept[program]

    def _divided(self, program: Program, boxes: Boxes) -> tuple[Boxes, Boxes]:
        """Return boxes in which a formula is defined, and those in which this is open."""
        sizes = np.zeros_like(self._sizes)
        used = program.values[program.codes == VARIABLE].astype(int)
        sizes[used] = self._sizes[used]
        proved, most = boxes[:0], self._most + len(boxes)
        for _ in range(_MOST_CUTS):
            found = intervals(program, boxes).defined
            proved, boxes = proved.joined(boxes[found]), boxes[~found]
            most -= len(found)
            if not len(boxes) or most < 0 or not sizes.any():
                break
            boxes = boxes.halves(sizes)
        return proved, boxes


# ---------------------------------------------------------------------------------------- rules


def _made(low: Floats, high: Floats, defined: Mask | None = None) -> Intervals:
    """Return intervals; one that is not finite is not defined, because it would be infinite."""
    finite = np.isfinite(low) & np.isfinite(high)
    known = finite if defined is None else finite & defined
    return Intervals(np.where(known, low, -np.inf), np.where(known, high, np.inf), known)


def _limited(found: Intervals, defined: Mask) -> Intervals:
    """Return intervals that are defined at most where others are."""
    return _made(found.low, found.high, found.defined & defined)


def _widened(found: Intervals, least: float = -math.inf, most: float = math.inf) -> Intervals:
    """Allow for rounding errors, within the range of a function."""
    low = np.maximum(found.low - _ROUNDING * np.abs(found.low), least)
    high = np.minimum(found.high + _ROUNDING * np.abs(found.high), most)
    return _made(low, high, found.defined)


def _where(chosen: Mask, a: Intervals, b: Intervals) -> Intervals:
    return _made(
        np.where(chosen, a.low, b.low),
        np.where(chosen, a.high, b.high),
        np.where(chosen, a.defined, b.defined),
    )


def _hull(*parts: Intervals) -> Intervals:
    low = np.minimum.reduce([part.low for part in parts])
    high = np.maximum.reduce([part.high for part in parts])
    return _made(low, high, np.logical_and.reduce([part.defined for part in parts]))


def _number(like: Intervals, low: float, high: float | None = None) -> Intervals:
    shape = like.low.shape
    return _made(np.full(shape, low), np.full(shape, low if high is None else high))


def _corners(function: Callable[..., Any], a: Intervals, b: Intervals) -> Intervals:
    """Return the hull of a function that is monotone in each operand."""
    values = [function(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return _made(np.minimum.reduce(values), np.maximum.reduce(values), a.defined & b.defined)


def _monotone(
    name: str,
    a: Intervals,
    *,
    domain: tuple[float, float] = (-math.inf, math.inf),
    values: tuple[float, float] = (-math.inf, math.inf),
) -> Intervals:
    """Return the hull of an operator that is monotone in a closed domain."""
    function = OPERATORS[name].numpy
    ends = [np.asarray(function(end), np.float64) for end in (a.low, a.high)]
    inside = (a.low >= domain[0]) & (a.high <= domain[1])
    found = _made(np.minimum(*ends), np.maximum(*ends), a.defined & inside)
    return _widened(found, *values)


def _exact(name: str, a: Intervals) -> Intervals:
    """Return the hull of a monotone operator that rounds correctly."""
    function = OPERATORS[name].numpy
    ends = [np.asarray(function(end), np.float64) for end in (a.low, a.high)]
    return _made(np.minimum(*ends), np.maximum(*ends), a.defined & (ends[0] == ends[0]))


def _abs(a: Intervals) -> Intervals:
    """Return |a|."""
    ends = np.abs(a.low), np.abs(a.high)
    holds_zero = (a.low <= 0.0) & (a.high >= 0.0)
    return _made(np.where(holds_zero, 0.0, np.minimum(*ends)), np.maximum(*ends), a.defined)


def _div(a: Intervals, b: Intervals) -> Intervals:
    return _limited(_corners(np.divide, a, b), ~_holds_zero(b))


def _pow(a: Intervals, b: Intervals) -> Intervals:
    """Return a^b; x^y is monotone in both operands for x > 0, and for x <= 0 y is an integer."""
    whole = (b.low == b.high) & (b.low == np.floor(b.low))
    positive = (a.low > 0.0) | ((a.low == 0.0) & (b.low > 0.0))
    found = _corners(np.power, a, b)
    even = whole & (np.fmod(b.low, 2.0) == 0.0)
    size = _abs(a)
    of_size = _corners(np.power, size, b)
    found = _where(even, of_size, found)
    has_pole = _holds_zero(a) & (b.low < 0.0)
    return _widened(_limited(found, positive | (whole & ~has_pole)))


def _holds_zero(a: Intervals) -> Mask:
    return np.asarray((a.low <= 0.0) & (a.high >= 0.0))


def _wave(a: Intervals, top: float, function: Callable[[Floats], Floats]) -> Intervals:
    """Return the hull of a sine whose maxima are at ``top`` + 2 k pi."""
    turn = 2.0 * math.pi
    slack = _ROUNDING * np.maximum(np.abs(a.low), np.abs(a.high))

    def reaches(place: float) -> Mask:
        first = np.ceil((a.low - slack - place) / turn)
        return np.asarray(first * turn + place <= a.high + slack)

    ends = function(a.low), function(a.high)
    far = (np.abs(a.low) > _MOST_ANGLE) | (np.abs(a.high) > _MOST_ANGLE)
    high = np.where(far | reaches(top), 1.0, np.maximum(*ends))
    low = np.where(far | reaches(top + math.pi), -1.0, np.minimum(*ends))
    return _widened(_made(low, high, a.defined), -1.0, 1.0)


def _tan(a: Intervals) -> Intervals:
    slack = _ROUNDING * np.maximum(np.abs(a.low), np.abs(a.high))
    first = np.ceil((a.low - slack - math.pi / 2.0) / math.pi)
    has_pole = first * math.pi + math.pi / 2.0 <= a.high + slack
    far = (np.abs(a.low) > _MOST_ANGLE) | (np.abs(a.high) > _MOST_ANGLE)
    return _limited(_monotone("tan", a), ~has_pole & ~far)


def _truth(yes: Mask, no: Mask, *operands: Intervals) -> Intervals:
    """Return 1 where a statement is sure to hold, 0 where it is sure not to, else both."""
    defined = np.logical_and.reduce([operand.defined for operand in operands])
    return _made(np.where(yes, 1.0, 0.0), np.where(no, 0.0, 1.0), defined)


def _mod(a: Intervals, b: Intervals) -> Intervals:
    """Return a hull of the remainder, which has the sign of b and is no larger."""
    found = _made(np.minimum(b.low, 0.0), np.maximum(b.high, 0.0), a.defined & b.defined)
    is_whole = (a.low >= 0.0) & (a.high < b.low)  # then nothing is taken off
    return _limited(_where(is_whole & found.defined, a, found), ~_holds_zero(b))


def _less(a: Intervals, b: Intervals) -> Intervals:
    return _truth(a.high < b.low, a.low >= b.high, a, b)


def _at_most(a: Intervals, b: Intervals) -> Intervals:
    return _truth(a.high <= b.low, a.low > b.high, a, b)


def _equal(a: Intervals, b: Intervals) -> Intervals:
    same = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return _truth(same, (a.high < b.low) | (b.high < a.low), a, b)


def _not(a: Intervals) -> Intervals:
    return _truth(*_sides(a)[::-1], a)


def _sides(a: Intervals) -> tuple[Mask, Mask]:
    """Return where a number is sure not to be 0, and where it is sure to be."""
    return ~_holds_zero(a), np.asarray((a.low == 0.0) & (a.high == 0.0))


def _and(a: Intervals, b: Intervals) -> Intervals:
    (a_yes, a_no), (b_yes, b_no) = _sides(a), _sides(b)
    return _truth(a_yes & b_yes, a_no | b_no, a, b)


def _extreme(function: Callable[..., Any], a: Intervals, b: Intervals) -> Intervals:
    return _made(function(a.low, b.low), function(a.high, b.high), a.defined & b.defined)


def _protected(
    inside: Callable[[Intervals], Intervals], otherwise: float, b: Intervals
) -> Intervals:
    """Return a function of b where |b| > 0.001, elsewhere a number."""
    size = _abs(b)
    far, near = size.low > _PROTECTED, size.high <= _PROTECTED
    # On one side of 0 the operand is cut off at the limit, on both sides the result is joined.
    above = _made(np.maximum(b.low, _PROTECTED), np.maximum(b.high, _PROTECTED), b.defined)
    below = _made(np.minimum(b.low, -_PROTECTED), np.minimum(b.high, -_PROTECTED), b.defined)
    number = _number(b, otherwise)
    mixed = _hull(inside(above), inside(below), number)
    return _limited(_where(far, inside(b), _where(near, number, mixed)), b.defined)


def _log(name: str, a: Intervals) -> Intervals:
    return _monotone(name, a, domain=(math.ulp(0.0), math.inf))


def _gamma(function: Callable[[Floats], Any], a: Intervals) -> Intervals:
    """Return a function that falls to its bottom and rises from there, for positive numbers."""
    ends = np.asarray(function(a.low)), np.asarray(function(a.high))
    holds_bottom = (a.low <= _GAMMA_BOTTOM) & (a.high >= _GAMMA_BOTTOM)
    bottom = float(np.asarray(function(np.array([_GAMMA_BOTTOM])))[0])
    low = np.where(holds_bottom, bottom, np.minimum(*ends))
    slack = 1e-14  # the absolute error of lgamma beside its zeros
    found = _widened(_made(low, np.maximum(*ends), a.defined & (a.low > 0.0)))
    return _made(found.low - slack, found.high + slack, found.defined)


#: How each operator of the table makes intervals of intervals. An operator that has no rule here
#: counts as one that may be undefined everywhere.
_RULES: Final[Mapping[str, Callable[..., Intervals]]] = {
    "add": lambda a, b: _made(a.low + b.low, a.high + b.high, a.defined & b.defined),
    "sub": lambda a, b: _made(a.low - b.high, a.high - b.low, a.defined & b.defined),
    "mul": partial(_corners, np.multiply),
    "div": _div,
    "pow": _pow,
    "neg": lambda a: _made(-a.high, -a.low, a.defined),
    "abs": _abs,
    **{name: partial(_log, name) for name in ("log", "log2", "log10")},
    "log1p": partial(_monotone, "log1p", domain=(math.nextafter(-1.0, 0.0), math.inf)),
    "exp": partial(_monotone, "exp", values=(0.0, math.inf)),
    "sqrt": partial(_monotone, "sqrt", domain=(0.0, math.inf), values=(0.0, math.inf)),
    "inv": lambda a: _div(_number(a, 1.0), a),
    "square": lambda a: _exact("square", _abs(a)),
    **{name: partial(_monotone, name) for name in ("cube", "cbrt", "atan", "sinh", "expm1")},
    **{name: partial(_monotone, name, values=(-1.0, 1.0)) for name in ("tanh", "erf")},
    "erfc": partial(_monotone, "erfc", values=(0.0, 2.0)),
    "mod": _mod,
    "min": partial(_extreme, np.minimum),
    "max": partial(_extreme, np.maximum),
    "sin": lambda a: _wave(a, math.pi / 2.0, np.sin),
    "cos": lambda a: _wave(a, 0.0, np.cos),
    "tan": _tan,
    **{name: partial(_monotone, name, domain=(-1.0, 1.0)) for name in ("asin", "acos")},
    # The angle of (b, a) is monotone in both where b > 0.
    "atan2": lambda a, b: _widened(
        _limited(
            _where(b.low > 0.0, _corners(np.arctan2, a, b), _number(a, -math.pi, math.pi)),
            a.defined & b.defined,
        )
    ),
    "cosh": lambda a: _monotone("cosh", _abs(a), values=(1.0, math.inf)),
    **{name: partial(_exact, name) for name in ("floor", "ceil", "round", "sign", "relu")},
    "lt": _less,
    "le": _at_most,
    "gt": lambda a, b: _less(b, a),
    "ge": lambda a, b: _at_most(b, a),
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
    "and": _and,
    "or": lambda a, b: _not(_and(_not(a), _not(b))),
    "not": _not,
    "where": lambda a, b, c: _limited(
        _where(_sides(a)[0], b, _where(_sides(a)[1], c, _hull(b, c))), a.defined
    ),
    "fma": lambda a, b, c: _RULES["add"](_corners(np.multiply, a, b), c),
    "aq": lambda a, b: _widened(
        _div(a, _widened(_corners(np.hypot, _number(b, 1.0), _abs(b)), 1.0))
    ),
    "logabs": lambda a: _log("log", _abs(a)),
    "sqrtabs": lambda a: _RULES["sqrt"](_abs(a)),
    "powabs": lambda a, b: _pow(_abs(a), b),
    "logistic": partial(_monotone, "logistic", values=(0.0, 1.0)),
    "pdiv": lambda a, b: _limited(_protected(partial(_div, a), 1.0, b), a.defined),
    "plog": partial(_protected, lambda b: _log("log", _abs(b)), 0.0),
    "pinv": partial(_protected, lambda b: _div(_number(b, 1.0), b), 0.0),
    # It is 1 where b is 0; next to 0 the quotient grows without bound.
    "zdiv": lambda a, b: _limited(
        _where(_sides(b)[1], _number(a, 1.0), _div(a, b)), a.defined & b.defined
    ),
    "gamma": partial(_gamma, tgamma),
    "lgamma": partial(_gamma, lgamma),
}
