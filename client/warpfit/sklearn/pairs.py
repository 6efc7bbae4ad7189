"""All pairs: the best products and sums of two formulas from a library, by matrix products.

The library has small trees, products of powers, sums of two of these, and functions of both. With
values U [p, rows] and V [m, rows], the errors of the best a + b u v + c u of all p x m pairs
take four matrix products, and those of the best a + b u + c v take one, so a second of one core
weighs tens of millions of formulas; V also holds the reciprocals of the library. The same is done
for all views of the target, and beside the best formulas of a view (matching pursuit). What is best
in a round joins the library of the next (a beam search). Sums of more terms are built one term
after the other (`PairSearch.sums`).

A view of a target y is y = m g(t), with an outer function g and a product m of powers. A search for
t has fewer variables or a smaller formula. Rows are weighted by (m g'(t))^2, which makes the error
of t that of y to first order.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Program
from warpfit.ops import BY_CODE, CONSTANT, OPERATORS, Operator
from warpfit.sklearn.genomes import (
    ADD,
    DIV,
    MUL,
    SUB,
    Floats,
    FormulaTable,
    Genomes,
    Indices,
    Mask,
    hashes,
    joined,
    packed,
    tokens,
)

#: Most tokens of a small tree.
_TREE_SIZE: Final = 6
#: Exponents of products of powers, as they can be written.
_EXPONENTS: Final = (-3, -2, -1, 1, 2, 3)
_MOST_FACTORS: Final = 4
#: Operators of one operand that are roots and powers. One of the others inside of another of them,
#: and these inside of each other, are left out of small trees.
_ALGEBRAIC: Final = frozenset({"square", "cube", "sqrt", "cbrt", "inv", "neg", "abs"})
#: Most products of powers whose sums are taken.
_MOST_TERMS: Final = 120
_ONE: Final = Program.constant(1.0)
#: Operators whose operands may swap.
_COMMUTATIVE: Final = frozenset({"add", "mul", "min", "max"})


@lru_cache(8)
def library(operators: tuple[str, ...], variables: int, width: int, most: int) -> Genomes:
    """Return different short formulas, shortest first, about a seventh of ``most`` of each kind.

    The kinds are small trees, products of powers, sums, functions of products (twice), and roots,
    powers and functions of sums. Whoever calls this shares them, and changes nothing in them.
    """
    rng = np.random.default_rng(1)
    share = most // 7
    trees = _small_trees(operators, variables, share, rng)
    powers = list(itertools.islice(_products(operators, variables), share))
    plain = list(itertools.islice(_products(operators, variables, (-1, 1)), share))
    sums = sorted(_sums(operators, powers, share, rng), key=len)
    unary = [name for name in operators if OPERATORS[name].arity == 1]
    algebraic = [name for name in unary if name in _ALGEBRAIC]
    others = [name for name in unary if name not in _ALGEBRAIC]
    rooted = [name for name in unary if name not in _ALGEBRAIC or name == "sqrt"]
    functions = [
        [Program.apply(name, part) for part in parts for name in names][:most]
        for names, parts, most in (
            (rooted, [*plain, *powers], 2 * share),
            (algebraic, sums, share),
            (others, sums, share),
        )
    ]
    return _different([*trees, *powers, *sums, *itertools.chain(*functions)], width)


@lru_cache(8)
def arguments(operators: tuple[str, ...], variables: int, width: int, most: int) -> Genomes:
    """Return products of powers, and sums of two variables; shortest first. They are shared."""
    plain = list(itertools.islice(_products(operators, variables, (-1, 1)), most // 2))
    single = [*map(_variable, range(variables))]
    powers = itertools.islice(_products(operators, variables), most)
    sums = _sums(operators, single, most, np.random.default_rng(0))
    return _different([*plain, *sums, *powers][:most], width)


def relevant(X: Floats, target: Floats, most: int) -> Indices:
    """Return the variables that say most about a target alone, at most so many; ascending.

    Spearman's correlation is taken of the target with each variable, and with its square, and of
    the square of the target with the latter, which a product of two variables makes.
    """
    if X.shape[1] <= most:
        return np.arange(X.shape[1])

    def ranked(columns: Floats) -> Floats:
        ranks = columns.argsort(axis=0).argsort(axis=0) + 0.0
        ranks[:, np.ptp(columns, axis=0) == 0.0] = 0.0
        ranks -= ranks.mean(axis=0)
        return np.asarray(ranks / np.maximum(np.linalg.norm(ranks, axis=0), 1e-300))

    middle = np.median(X, axis=0)
    sides = ranked(X), ranked(np.abs(X - middle))
    own = ranked(target[:, None])[:, 0], ranked(np.abs(target - np.median(target))[:, None])[:, 0]
    found = np.abs([own[0] @ sides[0], own[0] @ sides[1], own[1] @ sides[1]]).max(axis=0)
    return np.sort(np.argsort(-found, kind="stable")[:most])


def _different(programs: Sequence[Program], width: int) -> Genomes:
    genomes = Genomes.of([program for program in programs if len(program) <= width])
    _, first = np.unique(hashes(genomes), return_index=True)
    return genomes[first[np.argsort(genomes.sizes[first], kind="stable")]]


def _sums(
    operators: Collection[str], powers: Sequence[Program], most: int, rng: np.random.Generator
) -> list[Program]:
    """Return 1 + u and 1 - u of products of powers, then the shortest u + v and u - v."""
    names = [name for name in ("add", "sub") if name in operators]
    pairs = list(itertools.combinations(powers[:_MOST_TERMS], 2))
    pairs = [pairs[place] for place in rng.permutation(len(pairs)).tolist()]
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    chosen = [*((_ONE, term) for term in powers[: most // 4]), *pairs][: most // max(len(names), 1)]
    return [Program.apply(name, *pair) for pair in chosen for name in names]


def _small_trees(
    operators: Sequence[str], variables: int, most: int, rng: np.random.Generator
) -> list[Program]:
    """Return all trees over the variables and 1 by size, and a sample of the last size."""
    sizes = {1: [*map(_variable, range(variables)), _ONE]}
    found = sizes[1][:-1][:most]
    for size in range(2, _TREE_SIZE + 1):
        if len(found) >= most:
            break
        made = [(name, parts) for name in operators for parts in _operands(name, size - 1, sizes)]
        if len(made) > most - len(found):
            chosen = rng.choice(len(made), most - len(found), replace=False)
            made = [made[index] for index in np.sort(chosen).tolist()]
        made = [(name, parts) for name, parts in made if any(part is not _ONE for part in parts)]
        sizes[size] = [Program.apply(name, *parts) for name, parts in made]
        found += sizes[size]
    return found


def _operands(
    name: str, tokens: int, sizes: dict[int, list[Program]]
) -> Iterator[tuple[Program, ...]]:
    """Yield operands of one operator with this number of tokens in all."""
    arity = OPERATORS[name].arity
    if arity == 1:
        for part in sizes[tokens]:
            inner = BY_CODE.get(int(part.codes[-1]))
            both = (name in _ALGEBRAIC, inner is not None and inner.name in _ALGEBRAIC)
            if inner is None or inner.arity != 1 or sum(both) == 1:
                yield (part,)
    elif arity == 2:
        for left in range(1, tokens):
            if name in _COMMUTATIVE and left > tokens - left:
                return
            yield from itertools.product(sizes[left], sizes[tokens - left])


def _products(
    operators: Collection[str], variables: int, allowed: Sequence[int] = _EXPONENTS
) -> Iterator[Program]:
    """Yield products of powers of variables by ascending sum of the exponents' sizes."""
    if not {"mul", "div"} <= set(operators):
        return
    for total in range(1, 3 * _MOST_FACTORS):
        for factors in range(1, min(_MOST_FACTORS, variables) + 1):
            exponents = [
                e for e in itertools.product(allowed, repeat=factors) if sum(map(abs, e)) == total
            ]
            chosen_factors = itertools.combinations(range(variables), factors) if exponents else ()
            for chosen in chosen_factors:
                for powers in exponents:
                    yield product(dict(zip(chosen, powers, strict=True)), operators)


def product(powers: Mapping[int, float], operators: Collection[str]) -> Program:
    """Return a product of powers of variables, with exponents that are multiples of 1/2."""
    above = [_power(index, power, operators) for index, power in powers.items() if power > 0]
    below = [_power(index, -power, operators) for index, power in powers.items() if power < 0]
    sides = [
        side[0] if len(side) == 1 else Program.apply("mul", *side) if side else _ONE
        for side in (above, below)
    ]
    return Program.apply("div", *sides) if below else sides[0]


@lru_cache(4096)
def _variable(index: int) -> Program:
    return Program.variable(index)


def _power(index: int, power: float, operators: Collection[str]) -> Program:
    variable = _variable(index)
    if power % 1:
        root = Program.apply("sqrt", variable)
        return (
            root if power < 1 else Program.apply("mul", _power(index, power // 1, operators), root)
        )
    if power == 1:
        return variable
    if power == 3 and "cube" in operators:
        return Program.apply("cube", variable)
    if "square" not in operators:
        return Program.apply("mul", *[variable] * int(power))
    even = Program.apply("square", _power(index, power // 2, operators))
    return Program.apply("mul", even, variable) if power % 2 else even


#: Left formulas that are scored at a time.
BLOCK: Final = 256
#: Pairs that vary by less than this part of what they are made of are not resolved in float32.
LEAST_VARIATION: Final = 1e-3
#: Decimals to which values are compared.
_DIGITS: Final = 4

Singles = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Table(FormulaTable):
    """Formulas f with finite values that differ."""

    values: Singles
    """Values of f or 1/f, each formula's with root mean square 1; [formulas, rows]."""
    scales: Floats
    """Root mean squares of the values themselves; [formulas]."""
    inverted: Mask
    """Whether the values are those of 1/f; [formulas]."""

    def with_reciprocals(self) -> Table:
        """Add 1/f of each f that is not too close to 0; shortest first."""
        far = np.abs(self.values).min(axis=1) > LEAST_VARIATION
        values = 1.0 / self.values[far].astype(float)
        sizes = np.sqrt(np.mean(np.square(values), axis=1))
        singles = (values / sizes[:, None]).astype(np.float32)
        inverted = np.ones(len(sizes), bool)
        part = Table(self.genomes[far], singles, sizes / self.scales[far], inverted)
        both = Table.merged([self, part])
        return both[np.argsort(both.genomes.sizes + both.inverted, kind="stable")].distinct()

    def distinct(self) -> Table:
        """Leave out what has the same values, to a factor, as a formula before."""
        # Scalar products with three vectors tell formulas apart.
        squares = np.arange(self.values.shape[1])[:, None] ** 2.0
        probes = np.cos(squares * np.array([1.0, 2.0, 3.0]))
        keys = (self.values * np.sign(self.values[:, :1])) @ probes
        _, first = np.unique(np.round(keys, _DIGITS), axis=0, return_index=True)
        return self[np.sort(first)]

    @property
    def spreads(self) -> Floats:
        """Standard deviations of the values, with root mean square 1."""
        return np.asarray(np.std(self.values, axis=1, dtype=float))

    def written(self) -> Genomes:
        """Return the formulas, 1/f where the values are those."""
        one = tokens(np.where(self.inverted, CONSTANT, 0), 1.0)
        return packed([one, self.genomes, tokens(np.where(self.inverted, DIV, 0))])


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The parts R^2 of t's variance that pairs explain, in single precision."""

    roots: Singles
    """Square roots of the weights, which all rows below are multiplied with."""
    known: Singles
    """Orthonormal rows that are fitted beside each pair: the constant, and a base."""
    target: Singles
    """Residual of the target after a fit of the known rows alone; [rows]."""
    right: Singles
    squares: Singles
    """Values of the right formulas, and their squares; [rows, formulas]."""
    centred: Singles
    """The right formulas' orthonormal parts, [rows, formulas]."""

    @classmethod
    def of(cls, view: View, base: Singles, right: Singles) -> Scores:
        roots = np.sqrt(view.weights).astype(np.float32)
        known = roots[None]
        target = (view.target * np.sqrt(view.weights)).astype(np.float32)
        if len(base):
            known = np.concatenate([known, _orthonormal(base, roots, known)])
        target = np.asarray(target - (known @ target) @ known, np.float32)
        centred = np.ascontiguousarray(_orthonormal(right, roots, known).T)
        return cls(roots, known, target, np.ascontiguousarray(right.T), np.square(right).T, centred)

    def products(self, left: Singles) -> Singles:
        """Score a + b u v + c u, [left, right]."""
        weighted, own = left * self.roots, _orthonormal(left, self.roots, self.known)
        alone = own @ self.target
        scores: Singles = (weighted * (self.target - alone[:, None] * own)) @ self.right
        squares = np.square(weighted) @ self.squares
        projections = [(weighted * row) @ self.right for row in (own, *self.known)]
        # One formula after the other: its numbers stay in the caches.
        for score, square, part, *others in zip(scores, squares, alone, *projections, strict=True):
            variance = square - sum(map(np.square, others))
            sound = variance > LEAST_VARIATION * square
            score[:] = part**2 + _ratio(np.square(score), variance, sound)
        return scores

    def sums(self, left: Singles) -> Singles:
        """Score a + b u + c v, [left, right]."""
        own = _orthonormal(left, self.roots, self.known)
        other, scores = self.target @ self.centred, own @ self.centred
        for both, part in zip(scores, own @ self.target, strict=True):
            rest = 1 - both * both
            explained = part**2 + other**2 - 2 * part * other * both
            both[:] = _ratio(explained, rest, rest > LEAST_VARIATION)
        return scores


def _ratio(above: Singles, below: Singles, sound: Mask) -> Singles:
    quotient: Singles = np.divide(above, below, out=np.zeros_like(above), where=sound)
    return quotient


def _orthonormal(values: Singles, roots: Singles, known: Singles) -> NDArray[Any]:
    """Return rows times the roots of the weights, without what is known, of length 1 or 0."""
    weighted = values * roots
    before = np.sqrt(np.square(weighted).sum(axis=1, keepdims=True))
    for row in known:
        weighted = weighted - (weighted @ row)[:, None] * row
    length = np.sqrt(np.square(weighted).sum(axis=1, keepdims=True))
    return np.where(length > LEAST_VARIATION * before, weighted / length, 0)


def top(score: Callable[[Singles], Singles], left: Singles, count: int) -> tuple[Indices, Indices]:
    """Return the places of the best pairs of each block."""
    ones, others = [], []
    for start in range(0, len(left), BLOCK):
        scores = score(left[start : start + BLOCK])
        # At least as many are above the bound as are kept, and hardly more.
        bests = np.sort(scores.max(axis=1))
        places = np.flatnonzero(scores >= bests[-min(count, len(bests))])
        one, other = np.divmod(places, scores.shape[1])
        order = np.argsort(-scores[one, other])[:count]
        ones.append(one[order] + start)
        others.append(other[order])
    return np.concatenate(ones), np.concatenate(others)


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


#: Formulas of each view that are returned, and that are paired again in the next round.
_BEAM: Final = 200
#: Steps of five of a view that are of a kind of their own.
_ADDING, _SCALING, _KINDS = 1, 3, 5
#: Rows on which all pairs are weighed, about; the best ones are weighed again on all of them.
_SCORED_ROWS: Final = 128
#: Pairs of a block that are weighed again in float64, and those whose scales are sharpened.
_KEPT: Final = 150
_SHARPENED: Final = 40
#: Formulas of a beam that pairs are added to; and of the library in one step, to pairs with so many
#: of its shortest.
_BASES: Final = 6
_SHORT_BASES: Final = 4
_SHORT_LEFT: Final = 128
#: Functions whose arguments are scaled, and standard deviations that these then have.
_SCALED: Final = {"exp": (1, -1), "sin": (1,), "cos": (1,), "tanh": (1,)}
_RATIO: Final = 1.5
_SPREADS: Final = 0.2 * _RATIO ** np.arange(10)
#: Steps of the golden section by which scales are sharpened.
_SECTIONS: Final = 16
_GOLDEN: Final = 0.5 * (np.sqrt(5.0) - 1.0)
#: Errors below this are rounding.
_LEAST_ERROR: Final = 1e-12

#: Values with root mean square 1, [formulas, rows], and their scales.
Term: TypeAlias = tuple[NDArray[np.float64], Floats]
#: Tokens of a part of a formula, those without its factor, and those of each of its terms.
_Part: TypeAlias = tuple[int, int, tuple[int, ...]]
#: Improves the scales in the formulas of a table, by the errors of what is fitted with it.
Sharpen: TypeAlias = Callable[[Table, Callable[[Table], Floats]], Table]


#: Most tokens of a term of a sum that comes from the library, and most terms.
_TERM_SIZE: Final = 6
_MOST_SUMMED: Final = 10
#: Terms of the least error that are tried, and leverage of a row that decides alone.
_TRIED: Final = 8
_ALONE: Final = 0.99


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """A formula a + b t1 + c t2 + ... without slope and intercept."""

    kind: str
    """``"variables"`` or ``"terms"``."""
    terms: int
    score: float
    """Its length in nats, the less the better: half the rows times the logarithm of the error of
    each row by a fit to the others (PRESS; Allen 1974), and `structure_length`."""
    genomes: Genomes


def structure_length(sizes: Sequence[int], symbols: int) -> float:
    """Return the length, in nats, of a description of a sum's structure.

    A token is one of so many symbols, and the order of the terms says nothing. What makes a sum of
    them, signs and factors, says nothing either: a fit finds it.

    Args:
        sizes: tokens of each term.
        symbols: number of operators and variables, and one for numbers.

    """
    return sum(sizes) * math.log(symbols) - math.lgamma(len(sizes) + 1)


def terms_of(program: Program) -> tuple[int, ...]:
    """Return the tokens of each term of a sum, without its factor; of a constant none."""

    def leaf(code: int, value: float) -> _Part:
        return 1, 1, () if code == CONSTANT else (1,)

    def join(operator: Operator, parts: list[_Part]) -> _Part:
        size = 1 + sum(tokens for tokens, _, _ in parts)
        together = tuple(itertools.chain(*(terms for _, _, terms in parts)))
        factors = [own for _, own, terms in parts if terms]
        scaled = operator.name == "mul" and len(factors) < 2
        scaled |= operator.name == "div" and not parts[1][2]
        if scaled or operator.name == "neg":
            return size, sum(factors), together
        if operator.name in ("add", "sub"):
            return size, size, together
        own = 1 + sum(factors) if operator.name in ("mul", "div") and len(factors) == 2 else size
        return size, own, (own,) if factors else ()

    return program.fold(leaf, join)[2]


def _selected(
    view: View,
    terms: Table,
    symbols: int,
    width: int,
    known: Sequence[list[int]],
    ends: float,
) -> list[tuple[float, list[int]]]:
    """Return the scores of the best sums and the places of their terms, by their number.

    Args:
        view: of the target.
        terms: what sums are made of.
        symbols: see `structure_length`.
        width: most tokens of a sum.
        known: terms of sums that are improved, too.
        ends: time of `time.monotonic` at which this should end.

    """
    roots = np.sqrt(view.weights)
    single = _orthonormal(terms.values, roots.astype(np.float32), roots[None].astype(np.float32))
    columns = np.asarray(single, np.float32)
    # Constants explain nothing, and would be taken again and again.
    varies = columns.any(axis=1)
    target = view.target * roots
    sizes = terms.genomes.sizes + 2 * terms.inverted
    rows = len(target)

    def residual(places: list[int]) -> tuple[Floats, Floats]:
        """Return an orthonormal basis of terms, [rows, terms], and what they do not explain."""
        basis, _ = np.linalg.qr(columns[places].T.astype(float))
        return basis, target - basis @ (basis.T @ target)

    def score(places: list[int]) -> float:
        basis, left = residual(places)
        leverage = np.square(basis).sum(axis=1) + view.weights
        if leverage.max() > _ALONE:
            return math.inf
        error = float(np.square(left / (1.0 - leverage)).sum())
        length = structure_length(sizes[places].tolist(), symbols)
        return 0.5 * rows * math.log(error + _LEAST_ERROR) + length

    def extended(places: list[int]) -> tuple[float, list[int]]:
        """Add the best term of those that explain most for their length."""
        basis, left = residual(places)
        along = columns @ np.column_stack([basis, left]).astype(np.float32)
        rest = 1.0 - np.square(along[:, :-1]).sum(axis=1)
        gains = _ratio(np.square(along[:, -1]), rest, rest > LEAST_VARIATION)
        errors = np.maximum(left @ left - gains, _LEAST_ERROR)
        lengths = 0.5 * rows * np.log(errors) + sizes * math.log(symbols)
        room = width - int(sizes[places].sum()) - 3 * len(places)
        lengths[(sizes > room) | (rest <= LEAST_VARIATION) | ~varies] = np.inf
        best = lengths.argsort()[:_TRIED]
        tried = [[*places, int(place)] for place in best if np.isfinite(lengths[place])]
        return min(((score(each), each) for each in tried), default=(math.inf, places))

    found: list[tuple[float, list[int]]] = []
    beam: list[tuple[float, list[int]]] = [(math.inf, [])]
    for count in range(1, min(_MOST_SUMMED, len(terms)) + 1):
        longer = [extended(places) for _, places in beam]
        longer += [(score(places), places) for places in known if len(places) == count]
        beam = []
        for best, places in longer:
            for place in places[:-1] if best < math.inf else ():
                if time.monotonic() > ends:
                    break
                other = extended([each for each in places if each != place])
                best, places = min((best, places), other)
            beam.append((best, places))
        beam = [entry for entry in beam if entry[0] < math.inf]
        if not beam or time.monotonic() > ends:
            break
        found.append(min(beam))
    for count in range(len(found) - 1, 0, -1):
        _, more = found[count]
        fewer = [[each for each in more if each != place] for place in more]
        found[count - 1] = min(found[count - 1], *((score(each), each) for each in fewer))
    return found


@dataclass
class FirstFormulas:
    """Formulas that populations begin with, in the place of a search for pairs."""

    library: Genomes
    views: tuple[()] = ()

    def step(self, others: Genomes) -> Genomes:
        """Return no formulas."""
        return others[:0]

    def sums(self, others: Genomes, ends: float = math.inf) -> list[Sum]:
        """Return no sums."""
        return []


@dataclass(slots=True)
class PairSearch:
    """A library and the views of the target."""

    operators: Collection[str]
    """Names of the operators that formulas may have."""
    evaluate: Callable[[Genomes], Floats]
    """Returns values of formulas on the rows of the target, [formulas, rows]."""
    views: list[View]
    width: int
    """Most tokens of a formula."""
    library: Genomes
    arguments: Genomes
    """Formulas u of which functions f(c u) are made, for many c."""
    symbols: int
    """Number of operators and variables, and one for numbers."""
    _known: Table = field(init=False)
    """The library, with reciprocals if they are allowed."""
    _functions: Table = field(init=False)
    _beams: list[tuple[Genomes, Floats]] = field(init=False)
    """Best formulas of t that can still grow, with their errors in ascending order, by view."""
    _turns: list[int] = field(init=False)
    """Steps of each view."""

    def __post_init__(self) -> None:
        self._known = self._table(self.library)
        if "div" in self.operators:
            self._known = self._known.with_reciprocals()
        self._functions = _scaled(self._table(self.arguments), self.operators, self.width)
        self._beams = [(self.library[:0], np.empty(0)) for _ in self.views]
        self._turns = [0 for _ in self.views]

    # Values that are too large and formulas that explain nothing are sorted out by their errors.
    @np.errstate(all="ignore")
    def step(self, others: Genomes) -> Genomes:
        """Pair some formulas with the library and return the best pairs.

        The formulas are the best of a view so far, the next part of the library, and ``others``.
        In some steps of a view they are paired with functions of scaled arguments instead, and in
        others the pairs are added to one of the view's best formulas, or to short ones.
        """
        place = self._next_view()
        view, (beam, _), turn = self.views[place], self._beams[place], self._turns[place]
        self._turns[place] += 1
        rounds, kind = divmod(turn, _KINDS)
        if kind == _ADDING and rounds % 2:
            return self._best(place, self._beside_short(view, rounds // 2))
        block = rounds if kind in (_SCALING, _ADDING) else 3 * rounds + kind // 2
        start = block * BLOCK % max(1, len(self._known))
        best = self._table(joined([beam, others]))
        # The part of the library is a block of its own, that the best do not outdo.
        left = Table.merged([self._known[start : start + BLOCK], best])
        base = self._known[:0]
        if kind == _ADDING and len(beam):
            base = self._table(beam[[rounds // 2 % min(_BASES, len(beam))]])
        right = Table.merged([self._functions if kind == _SCALING else self._known, best])
        sharpen = self._sharpened if kind == _SCALING else lambda v, _: v
        count = _SHARPENED if kind == _SCALING else _KEPT
        return self._best(
            place, _Fitter(view, base, self.operators, sharpen, count).found(left, right)
        )

    @np.errstate(all="ignore")
    def sums(self, others: Genomes, ends: float = math.inf) -> list[Sum]:
        """Return sums a + b t1 + c t2 + ... of each number of terms.

        One is of variables alone, another of any terms: those of the library, and all parts of
        ``others``. One after the other is added, and exchanged or left out where that helps
        (stepwise regression; Efroymson 1960), as a sum is judged by `Sum.score`. The sums of
        variables are where exchanges begin, too. At the time ``ends`` of `time.monotonic` they
        are those so far.
        """
        if "add" not in self.operators or "mul" not in self.operators:
            return []
        spans = others.spans
        parts = others.assembled((np.arange(1, len(spans) + 1) - spans)[:, None], spans[:, None])
        parts = parts[np.argsort(parts.sizes, kind="stable")]
        known = self._known[self._known.genomes.sizes <= _TERM_SIZE]
        any_terms = Table.merged([known, self._table(parts)]).distinct()
        single = any_terms.genomes.sizes + any_terms.inverted == 1
        fitter = _Fitter(self.views[0], self._known[:0], self.operators, lambda v, _: v, 1)
        found: list[Sum] = []
        begun: list[list[int]] = []
        for kind, places in (
            ("variables", np.flatnonzero(single)),
            ("terms", np.arange(len(single))),
        ):
            terms = any_terms[places]
            chosen = _selected(self.views[0], terms, self.symbols, self.width, begun, ends)
            for score, own in chosen:
                inner = fitter.sum_of([terms[[place]] for place in own])
                if inner.sizes[0] <= self.width:
                    found.append(Sum(kind, len(own), score, inner))
            begun = [places[own].tolist() for _, own in chosen]
        return found

    def _beside_short(self, view: View, turn: int) -> Iterator[_Found]:
        """Find pairs beside some of the short formulas, those that explain most of a view first."""
        short = self._known[:BLOCK]
        short = short[~short.inverted]
        scores = Scores.of(view, short.values[:0], short.values)
        order = np.argsort(-np.square(scores.target @ scores.centred))
        for one in np.roll(order, -turn * _SHORT_BASES)[:_SHORT_BASES]:
            fitter = _Fitter(view, short[[one]], self.operators, lambda v, _: v, _SHARPENED)
            yield from fitter.found(short[:_SHORT_LEFT], self._known)

    def _best(self, place: int, candidates: Iterable[_Found]) -> Genomes:
        """Extend a view's beam by the best pairs, and return formulas of y around them."""
        found = list(candidates)
        inner = joined([self.library[:0], *(one.inner for one in found)])
        errors, a, b = (
            np.concatenate([np.empty(0), *(getattr(one, name) for one in found)])
            for name in ("errors", "a", "b")
        )
        errors[(inner.sizes > self.width) | np.isnan(errors)] = np.inf
        order = np.argsort(errors)[: min(_BEAM, np.count_nonzero(np.isfinite(errors)))]
        inner, errors = inner[order], errors[order]
        growing = inner.sizes < self.width - 1
        beam, known = self._beams[place]
        beam, known = joined([beam, inner[growing]]), np.concatenate([known, errors[growing]])
        rounded = np.round(np.log(known + _LEAST_ERROR), 6)
        shortest = np.lexsort((beam.sizes, rounded))  # of equal errors
        fresh = np.diff(rounded[shortest], prepend=-np.inf) > 0
        kept = shortest[fresh][:_BEAM]
        self._beams[place] = beam[kept], known[kept]
        whole = self.views[place].whole(inner, a[order], b[order], self.operators)
        return whole[whole.sizes <= self.width]

    def _next_view(self) -> int:
        """Give each view a turn, then the first one or one of the others.

        These are the one with the least error and the one with the fewest steps, in turn.
        """
        step, places = sum(self._turns), range(len(self.views))
        others = places[1:] or places
        if min(self._turns) > 0 and step % 2 == 0:
            return 0
        if min(self._turns) > 0 and step % 4 == 1:
            scales = [view.error_scale for view in self.views]  # errors as those of y
            least = [min(errors, default=np.inf) for _, errors in self._beams]
            return min(others, key=lambda place: float(least[place] * scales[place]))
        return min(places, key=lambda place: self._turns[place])

    def _table(self, genomes: Genomes) -> Table:
        table = self._valued(genomes)
        return table[np.isfinite(table.values).all(axis=1) & (table.scales > 0)].distinct()

    @np.errstate(all="ignore")
    def _valued(self, genomes: Genomes) -> Table:
        rows = len(self.views[0].target)
        values = self.evaluate(genomes) if len(genomes) else np.empty((0, rows))
        scales = np.sqrt(np.mean(np.square(values), axis=1))
        singles = (values / scales[:, None]).astype(np.float32)
        return Table(genomes, singles, scales, np.zeros(len(genomes), bool))

    def _sharpened(self, table: Table, errors: Callable[[Table], Floats]) -> Table:
        """Find better scales of functions f(c u) by a golden section; others stay."""
        genomes, first = table.genomes, table.genomes.starts[:-1]
        scaled, start = genomes.codes[first] == CONSTANT, genomes.values[first]
        middle = np.log(np.abs(start))

        def at(places: Floats) -> Table:
            values = genomes.values.copy()
            values[first] = np.where(scaled, np.copysign(np.exp(places), start), start)
            return self._valued(Genomes(genomes.codes, values, genomes.starts))

        low, high = (middle + side * np.log(_RATIO) for side in (-1, 1))
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        of_left, of_right = errors(at(left)), errors(at(right))
        for _ in range(_SECTIONS):
            rises = of_left <= of_right
            low, high = np.where(rises, (low, right), (left, high))
            fresh = low + high - np.where(rises, left, right)
            of_fresh = errors(at(fresh))
            left, right = np.where(rises, (fresh, left), (right, fresh))
            of_left, of_right = np.where(rises, (of_fresh, of_left), (of_right, of_fresh))
        return at(0.5 * (low + high))


def _scaled(arguments: Table, operators: Collection[str], width: int) -> Table:
    """Return f(c u) for functions f and many c."""
    arguments = arguments[arguments.spreads > LEAST_VARIATION]
    units = arguments.values / arguments.spreads[:, None]
    tables = [arguments[:0]]
    for name in sorted(_SCALED.keys() & set(operators)):
        for spread in (sign * size for sign in _SCALED[name] for size in _SPREADS):
            factors = spread / (arguments.spreads * arguments.scales)
            with np.errstate(all="ignore"):
                values = OPERATORS[name].numpy(spread * units)
                scales = np.sqrt(np.mean(np.square(values), axis=1))
            ends = [tokens(np.full(len(units), c)) for c in (MUL, OPERATORS[name].code)]
            first = tokens(np.full(len(units), CONSTANT), factors)
            genomes = packed([first, arguments.genomes, *ends])
            sound = np.isfinite(scales) & (scales > 0) & (genomes.sizes <= width)
            singles = (values[sound] / scales[sound, None]).astype(np.float32)
            made = Table(genomes[sound], singles, scales[sound], arguments.inverted[sound])
            tables.append(made)
    return Table.merged(tables).distinct()


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Formulas t = a + b inner."""

    inner: Genomes
    errors: Floats
    """Part of t's variance that is not explained."""
    a: Floats
    b: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Fitter:
    """Finds the pairs with the least errors, and solves them in float64."""

    view: View
    base: Table
    """A formula that others are added to, or none."""
    operators: Collection[str]
    sharpen: Sharpen
    kept: int
    """Pairs of a block that are solved."""

    def found(self, left: Table, right: Table) -> Iterator[_Found]:
        """Yield the best formulas of each kind: v, u v, u (v + c), and u + c v."""
        step = max(1, len(self.view.target) // _SCORED_ROWS)
        near, far = left.values[:, ::step], right.values[:, ::step]
        scores = Scores.of(self.view.thinned(step), self.base.values[:, ::step], far)
        adds = "add" in self.operators
        if adds or not len(self.base):
            v = right[np.argsort(-np.square(scores.target @ scores.centred))[: self.kept]]
            v = self.sharpen(v, lambda v: self._fit([_plain(v)])[0])
            yield self._solved([(v.written(), _plain(v))])
        if "mul" in self.operators and (adds or not len(self.base)):
            one, other = top(scores.products, near, self.kept)
            u, v = left[one], right[other]
            v = self.sharpen(v, lambda v: self._fit([_times(u, v), _plain(u)])[0])
            yield self._solved([(_product(u, v), _times(u, v))])
            if adds:
                yield self._shifted(u, v)
        if adds:
            one, other = top(scores.sums, near, self.kept)
            u, v = left[one], right[other]
            v = self.sharpen(v, lambda v: self._fit([_plain(u), _plain(v)])[0])
            yield self._solved([(w.written(), _plain(w)) for w in (u, v)])

    def sum_of(self, terms: Sequence[Table]) -> Genomes:
        """Return the best sum of some terms, one formula in each table."""
        return self._solved([(term.written(), _plain(term)) for term in terms]).inner

    def _solved(self, terms: Sequence[tuple[Genomes, Term]]) -> _Found:
        """Fit t = a + b (base + c term + ...)."""
        errors, a, slopes = self._fit([term for _, term in terms])
        written = [*self._bases(len(a)), *(genomes for genomes, _ in terms)]
        inner = written[0]
        for genomes, slope in zip(written[1:], slopes[1:], strict=True):
            inner = self._sum(inner, genomes, slope / slopes[0])
        return _Found(inner, errors, a, slopes[0])

    def _shifted(self, u: Table, v: Table) -> _Found:
        """Fit t = a + b (base + d u (v + c))."""
        errors, a, slopes = self._fit([_times(u, v), _plain(u)])
        shift = slopes[-1] / slopes[-2]
        errors[np.abs(shift) < ROUND * v.scales] = np.inf  # The product alone is as good.
        ends = [tokens(np.full(len(a), code)) for code in (ADD, MUL)]
        blocks = [u.written(), v.written(), tokens(np.full(len(a), CONSTANT), shift), *ends]
        inner = packed(blocks)
        for base in self._bases(len(a)):
            inner = self._sum(base, inner, slopes[1] / slopes[0])
        return _Found(inner, errors, a, slopes[0])

    def _bases(self, count: int) -> list[Genomes]:
        return [self.base.genomes[np.zeros(count, np.int64)]] if len(self.base) else []

    def _fit(self, terms: Sequence[Term]) -> tuple[Floats, Floats, Floats]:
        """Solve for t = a + b1 base + ...: return errors and a [pairs], and b [terms, pairs]."""
        count = len(terms[0][1])
        bases = [_plain(self.base[np.zeros(count, np.int64)])] if len(self.base) else []
        terms, view = [*bases, *terms], self.view
        roots = np.sqrt(view.weights)
        columns = np.stack([values for values, _ in terms], axis=2)
        means = np.einsum("prk,r->pk", columns, view.weights)
        design = (columns - means[:, None]) * roots[:, None]
        target = view.target * roots
        gram = design.transpose(0, 2, 1) @ design
        # Columns that are equal or constant make it singular, values that overflow no number.
        gram += (1e-12 * np.trace(gram, axis1=1, axis2=2) + 1e-30)[:, None, None] * np.eye(
            len(terms)
        )
        gram = np.where(np.isfinite(gram), gram, np.eye(len(terms)))
        right = (design.transpose(0, 2, 1) @ target)[:, :, None]
        slopes = np.linalg.solve(gram, right)[:, :, 0]
        errors = np.square(np.einsum("prk,pk->pr", design, slopes) - target).sum(axis=1)
        slopes = slopes * view.spread
        a = view.mean - (slopes * means).sum(axis=1)
        return errors, a, slopes.T / np.stack([scales for _, scales in terms])

    def _sum(self, u: Genomes, v: Genomes, ratio: Floats) -> Genomes:
        """Build u + ratio v."""
        minus = (np.abs(ratio + 1) < ROUND) & ("sub" in self.operators)
        scaled = ~minus & (np.abs(ratio - 1) >= ROUND)
        factor = (tokens(np.where(scaled, CONSTANT, 0), ratio), tokens(np.where(scaled, MUL, 0)))
        return packed([u, v, *factor, tokens(np.where(minus, SUB, ADD))])


def _plain(table: Table) -> Term:
    return table.values.astype(float), table.scales


def _times(u: Table, v: Table) -> Term:
    return u.values.astype(float) * v.values, u.scales * v.scales


def _product(u: Table, v: Table) -> Genomes:
    """Write u v with as few reciprocals as possible."""
    swapped, everybody = u.inverted & ~v.inverted, np.arange(len(u))
    both_sides = joined([u.genomes, v.genomes])
    first, second = (both_sides[everybody + len(u) * turned] for turned in (swapped, ~swapped))
    both, either = u.inverted & v.inverted, u.inverted | v.inverted
    one = tokens(np.where(both, CONSTANT, 0), 1.0)
    below = tokens(np.where(both, DIV, 0))
    return packed([one, first, below, second, tokens(np.where(either, DIV, MUL))])
