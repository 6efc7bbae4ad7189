"""Views of a target y: y = m g(t), with an outer function g and a product m of powers.

A search for t has fewer variables or a smaller formula. Rows are weighted by (m g'(t))^2, which
makes the error of t that of y to first order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from warpfit.ops import CONSTANT, OPERATORS
from warpfit.sklearn.genomes import ADD, DIV, MUL, SUB, Floats, Genomes, packed, tokens
from warpfit.sklearn.pairs.library import product

#: A number this close to 0, 1 or -1 is that, relative to what it belongs to.
ROUND: Final = 1e-3
#: Part of the weight of the rows in which an outer function may have no inverse, for noise.
_OUTSIDE: Final = 0.02
#: Most weight of a row as a multiple of the median: rows that decide alone are badly conditioned.
_MOST_WEIGHT: Final = 10.0
#: Highest exponent of a factor, and how far an exponent may be from half a number, in absolute
#: terms and in standard errors.
_MOST_POWER: Final = 5.0
_NEAR_HALVES: Final = 0.03
_ERRORS: Final = 3.0

_Row = Callable[[Floats], Any]
#: Outer functions, the innermost operator first: where y has an inverse t, t, and dy/dt.
_OUTER: Final[dict[tuple[str, ...], tuple[_Row, _Row, _Row]]] = {
    (): (np.isfinite, lambda y: y, np.ones_like),
    ("inv",): (lambda y: y != 0, lambda y: 1 / y, np.square),
    ("sqrt",): (lambda y: y > 0, np.square, lambda y: 0.5 / y),
    ("sqrt", "inv"): (lambda y: y > 0, lambda y: y**-2.0, lambda y: 0.5 * y**3),
    ("square",): (lambda y: y >= 0, np.sqrt, lambda y: 2 * np.sqrt(y)),
    ("square", "inv"): (lambda y: y > 0, lambda y: y**-0.5, lambda y: 2 * y**1.5),
    ("exp",): (lambda y: y > 0, np.log, lambda y: y),
    ("log",): (lambda y: np.abs(y) < 30, np.exp, lambda y: np.exp(-y)),
    ("sin",): (lambda y: np.abs(y) < 1, np.arcsin, lambda y: np.sqrt(1 - y * y)),
    ("asin",): (lambda y: np.abs(y) < 1.57, np.sin, lambda y: 1 / np.cos(y)),
    ("acos",): (lambda y: np.abs(y - 1.57) < 1.57, np.cos, lambda y: 1 / np.sin(y)),
    ("tanh",): (lambda y: np.abs(y) < 1, np.arctanh, lambda y: 1 - y * y),
}
#: Outer functions that make a factor of t a factor of y.
_HOMOGENEOUS: Final = frozenset(
    {(), ("inv",), ("sqrt",), ("sqrt", "inv"), ("square",), ("square", "inv")}
)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The target seen through the inverse of an outer function, without a factor."""

    outer: tuple[str, ...]
    """Operators applied to t, the innermost first."""
    factor: Genomes | None
    """The product m, [1]; None for 1."""
    target: Floats
    """t of each row, with weighted mean 0 and variance 1."""
    mean: float
    spread: float
    """Weighted mean and standard deviation of t before that."""
    weights: Floats
    """Weight of each row, sum 1."""
    error_scale: float
    """Factor from a squared error of the target to one of y, to first order."""

    def thinned(self, step: int) -> View:
        """Return the view of each so-many-th row."""
        weights, target = self.weights[::step], self.target[::step]
        weights = weights / weights.sum()
        target = target - weights @ target
        spread = np.sqrt(weights @ np.square(target))
        return replace(self, weights=weights, target=target / (spread or 1.0))

    def whole(self, inner: Genomes, a: Floats, b: Floats, operators: Collection[str]) -> Genomes:
        """Build m g(a + b inner) as far as slope and intercept of y do not absorb a and b."""
        if not self.outer and self.factor is None:
            return inner
        nothing = np.zeros(len(inner), np.uint8)
        scaled, negative = nothing > 0, nothing > 0
        size: Any = max(abs(self.mean), self.spread)
        if self.outer in _HOMOGENEOUS:
            a, negative = a / np.abs(b), b < 0
            size = size / np.abs(b)
        else:
            scaled = np.abs(b - 1) >= ROUND
        # A factor inside of exp stays, a summand becomes a factor outside.
        shifted = (np.abs(a) >= ROUND * size) & (self.outer != ("exp",))
        before = negative & shifted & ("sub" in operators)
        behind = shifted & ~before
        scaled, b = scaled | (negative & ~before), np.where(negative, -1.0, b)
        blocks = [
            tokens(np.where(before, CONSTANT, 0), a),
            inner,
            tokens(np.where(scaled, CONSTANT, 0), b),
            tokens(np.where(scaled, MUL, 0)),
            tokens(np.where(before, SUB, 0)),
            tokens(np.where(behind, CONSTANT, 0), a),
            tokens(np.where(behind, ADD, 0)),
        ]
        for name in self.outer:
            if name == "inv":
                blocks = [tokens(nothing + CONSTANT, 1.0), *blocks, tokens(nothing + DIV)]
            else:
                blocks.append(tokens(nothing + OPERATORS[name].code))
        if self.factor is not None:
            repeated = self.factor[np.zeros(len(inner), np.int64)]
            blocks += [repeated, tokens(nothing + MUL)]
        return packed(blocks)


def views(
    operators: Collection[str], X: Floats, target: Floats, weights: Floats, width: int
) -> Iterator[View]:
    """Yield the view of the target itself, and those of the functions and products that fit it.

    Args:
        operators: names of the operators that formulas may have.
        X: variables, [rows, variables].
        target: [rows].
        weights: of each row, sum 1.
        width: most tokens of a formula.

    """
    yield from _seen(operators, target, weights, None, np.ones_like(target))
    exponents = factor_exponents(X, target, weights) if {"mul", "div"} <= set(operators) else {}
    if "sqrt" not in operators:
        exponents = {place: power for place, power in exponents.items() if power % 1 == 0}
    # The rest may be a constant alone if all variables are in the product, which a library has.
    if 0 < len(exponents) < X.shape[1]:
        program = product(exponents, operators)
        if len(program) < width:
            with np.errstate(all="ignore"):
                values = np.prod([X[:, i] ** power for i, power in exponents.items()], axis=0)
            yield from _seen(operators, target, weights, Genomes.of([program]), values)


def _seen(
    operators: Collection[str],
    target: Floats,
    weights: Floats,
    factor: Genomes | None,
    values: Floats,
) -> Iterator[View]:
    for outer, (inside, inverse, slope) in _OUTER.items():
        if not {"div" if name == "inv" else name for name in outer} <= set(operators):
            continue
        with np.errstate(all="ignore"):
            y = target / values
            seen, scale = inverse(y), np.square(slope(y) * values) * weights
            sound = inside(y) & np.isfinite(seen) & np.isfinite(scale)
            if weights[~sound].sum() > _OUTSIDE:
                continue
            seen, scale = np.where(sound, seen, 0.0), np.where(sound, scale, 0.0)
            scale = np.minimum(scale, _MOST_WEIGHT * np.median(scale[sound]))
            size = float(scale.sum())
            scale = scale / size
            mean = float(scale @ seen)
            spread = float(np.sqrt(scale @ np.square(seen - mean)))
        if not outer and factor is None:
            spread = spread or 1.0  # There is a view of a constant, too.
        if np.isfinite(spread) and spread > 0.0:
            shifted = np.where(sound, (seen - mean) / spread, 0.0)
            yield View(outer, factor, shifted, mean, spread, scale, size * spread**2)


def factor_exponents(X: Floats, target: Floats, weights: Floats) -> dict[int, float]:
    """Return the exponents of the variables that the target seems to be a product of powers in.

    The logarithm of |y| is regressed on those of the |x|, their squares and their products: a
    variable is a factor if its slope is close to a half or whole number, and is no part of a
    significant square or product.
    """
    with np.errstate(all="ignore"):
        logs, response = np.log(np.abs(X)), np.log(np.abs(target))
    usable = np.flatnonzero(np.isfinite(logs).all(axis=0) & (np.ptp(logs, axis=0) > 0.1))
    rows = np.isfinite(response)
    pairs = [(i, j) for place, i in enumerate(usable) for j in usable[place:]]
    count = 1 + len(usable) + len(pairs)
    if not len(usable) or rows.sum() < 2 * count or weights[~rows].sum() > _OUTSIDE:
        return {}
    centred = (logs - logs[rows].mean(axis=0))[rows]
    design = np.column_stack(
        [
            np.ones(len(centred)),
            centred[:, usable],
            *(centred[:, i] * centred[:, j] for i, j in pairs),
        ]
    )
    slopes, *_ = np.linalg.lstsq(design, response[rows], rcond=None)
    left = response[rows] - design @ slopes
    inverse = np.linalg.pinv(design.T @ design)
    errors = np.sqrt(np.diag(inverse) * (left @ left) / (len(left) - count)) + 1e-9
    bent = {
        place
        for pair, slope, error in zip(
            pairs, slopes[1 + len(usable) :], errors[1 + len(usable) :], strict=True
        )
        if abs(slope) > _ERRORS * error + _NEAR_HALVES
        for place in pair
    }
    found = {}
    for place, slope, error in zip(usable.tolist(), slopes[1:], errors[1:], strict=False):
        power = float(np.round(2 * slope) / 2)
        near = abs(slope - power) < _NEAR_HALVES + _ERRORS * error and error < 0.12
        if place not in bent and near and 0 < abs(power) <= _MOST_POWER:
            found[place] = power
    return found
