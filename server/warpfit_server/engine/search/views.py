"""Views of a target: y = m g(t), with an outer function g and a product m of powers of variables.

A search for t has fewer variables or a smaller formula than one for y. Rows are weighted by (m
g'(t))^2, which makes the error of t that of y to first order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from warpfit.ir import Population
from warpfit.ops import CONSTANT, OPERATORS
from warpfit_server.engine.search.library import (
    ADD,
    DIV,
    MUL,
    SUB,
    Floats,
    formulas_of,
    packed,
    product,
    tokens,
)

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
#: Largest standard error of an exponent, and least range of the logarithm of a factor.
_MOST_ERROR: Final = 0.12
_LEAST_RANGE: Final = 0.1

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
    factor: Population | None
    """The product m, one formula; None for 1."""
    target: Floats
    """t of each row, with weighted mean 0 and variance 1."""
    mean: float
    spread: float
    """Weighted mean and standard deviation of t before that."""
    weights: Floats
    """Weight of each row, sum 1."""
    error_scale: float
    """Factor from a squared error of the target to one of y, to first order."""

    def whole(
        self, inner: Population, a: Floats, b: Floats, operators: Collection[str], is_scaled: bool
    ) -> Population:
        """Build m g(a + b inner).

        If slope and intercept of y are fitted (``is_scaled``), a and b are left out as far as these
        make up for them.
        """
        if is_scaled and not self.outer and self.factor is None:
            return inner
        nothing = np.zeros(len(inner), np.uint8)
        negative = nothing > 0
        scaled = np.abs(b - 1) >= ROUND
        size: Any = max(abs(self.mean), self.spread)
        if is_scaled and self.outer in _HOMOGENEOUS:
            with np.errstate(all="ignore"):  # A formula with a slope of 0 has no finite numbers.
                a, negative, scaled = a / np.abs(b), b < 0, nothing > 0
                size = size / np.abs(b)
        shifted = np.abs(a) >= ROUND * size
        if is_scaled and self.outer == ("exp",):
            shifted = nothing > 0  # The summand is a factor of y.
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
            blocks += [self.factor[np.zeros(len(inner), np.int64)], tokens(nothing + MUL)]
        return packed(blocks)


def views(
    operators: Collection[str],
    columns: Sequence[int],
    X: Floats,
    target: Floats,
    weights: Floats,
    width: int,
) -> Iterator[View]:
    """Yield the view of the target itself, and those of the functions and products that fit it.

    Args:
        operators: names of the operators that formulas may have.
        columns: variables that a product may have.
        X: [variables, rows].
        target: [rows].
        weights: of each row, sum 1.
        width: most tokens of a formula.
    """
    yield from _seen(operators, target, weights, None, np.ones_like(target))
    exponents: dict[int, float] = {}
    if {"mul", "div"} <= set(operators):
        found = factor_exponents(X[columns], target, weights)
        exponents = {columns[place]: power for place, power in found.items()}
    if "sqrt" not in operators:
        exponents = {column: power for column, power in exponents.items() if power % 1 == 0}
    # The rest may be a constant alone if all variables are in the product, which a library has.
    if 0 < len(exponents) < len(columns):
        formula = product(exponents, operators)
        if len(formula) < width:
            with np.errstate(all="ignore"):
                values = np.prod([X[i] ** power for i, power in exponents.items()], axis=0)
            yield from _seen(operators, target, weights, formulas_of([formula]), values)


def _seen(
    operators: Collection[str],
    target: Floats,
    weights: Floats,
    factor: Population | None,
    values: Floats,
) -> Iterator[View]:
    for outer, (inside, inverse, slope) in _OUTER.items():
        if not {"div" if name == "inv" else name for name in outer} <= set(operators):
            continue
        with np.errstate(all="ignore"):
            y = target / values
            seen, scale = inverse(y), np.square(slope(y) * values) * weights
            sound = inside(y) & np.isfinite(seen) & np.isfinite(scale)
            if not weights[~sound].sum() <= _OUTSIDE:
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


def factor_exponents(X: Floats, target: Floats, weights: Floats) -> Mapping[int, float]:
    """Return the exponents of the variables that the target seems to be a product of powers in.

    The logarithm of |y| is regressed on those of the |x|, their squares and their products: a
    variable is a factor if its slope is close to a half or whole number, and is no part of a
    significant square or product.

    Args:
        X: [variables, rows].
        target: [rows].
        weights: of each row, sum 1.
    """
    with np.errstate(all="ignore"):
        logs, response = np.log(np.abs(X)), np.log(np.abs(target))
        ranges = np.ptp(logs, axis=1)
    usable = np.flatnonzero(np.isfinite(logs).all(axis=1) & (ranges > _LEAST_RANGE))
    rows, first, second = np.isfinite(response), *np.triu_indices(len(usable))
    count = 1 + len(usable) + len(first)
    if not len(usable) or rows.sum() < 2 * count or weights[~rows].sum() > _OUTSIDE:
        return {}
    centred = logs[usable][:, rows]
    centred -= centred.mean(axis=1, keepdims=True)
    design = np.vstack([np.ones(rows.sum()), centred, centred[first] * centred[second]]).T
    inverse = np.linalg.pinv(design.T @ design)
    slopes = inverse @ (design.T @ response[rows])
    left = response[rows] - design @ slopes
    errors = np.sqrt(np.diag(inverse) * (left @ left) / (len(left) - count)) + 1e-9
    curved = np.abs(slopes) > _ERRORS * errors + _NEAR_HALVES
    bent = np.zeros(len(usable), bool)
    bent[[*first[curved[1 + len(usable) :]], *second[curved[1 + len(usable) :]]]] = True
    slopes, errors = slopes[1 : 1 + len(usable)], errors[1 : 1 + len(usable)]
    powers = np.round(2 * slopes) / 2
    near = np.abs(slopes - powers) < _NEAR_HALVES + _ERRORS * errors
    sound = near & ~bent & (errors < _MOST_ERROR) & (powers != 0) & (np.abs(powers) <= _MOST_POWER)
    return {int(usable[place]): float(powers[place]) for place in np.flatnonzero(sound)}
