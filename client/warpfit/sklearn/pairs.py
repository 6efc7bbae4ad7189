"""All pairs: the best products and sums of two formulas from a library, by matrix products.

With values U [p, rows] and V [m, rows], the errors of the best a + b u v of all p x m pairs take
three matrix products, and those of the best a + b u + c v take one, so a second of one core weighs
tens of millions of formulas. The same is done for outer functions g: y = g(t) is looked for as
t = g^-1(y), with rows weighted by g'(t)^2, which makes the error that of y to first order. What is
best in a round joins the library of the next (a beam search).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ops import CONSTANT, OPERATORS
from warpfit.sklearn.genomes import (
    ADD,
    DIV,
    MUL,
    SUB,
    Floats,
    Genomes,
    Indices,
    joined,
    packed,
    tokens,
)

#: Rows of a block of pairs, and pairs of it that are weighed again in float64.
_BLOCK: Final = 256
_KEPT: Final = 60
#: Formulas of each view that are returned, and that are paired again in the next round.
_BEAM: Final = 200
#: Pairs that vary by less than this part of what they are made of are not resolved in float32.
_LEAST_VARIATION: Final = 1e-2
#: A number this close to 0, 1 or -1 is that, relative to what it belongs to.
_ROUND: Final = 1e-3

_Row = Callable[[Floats], Any]
#: Outer functions, the innermost operator first: where y has an inverse t, t, and dy/dt.
_OUTER: Final[dict[tuple[str, ...], tuple[_Row, _Row, _Row]]] = {
    (): (np.isfinite, lambda y: y, np.ones_like),
    ("inv",): (lambda y: y != 0, lambda y: 1 / y, np.square),
    ("sqrt",): (lambda y: y > 0, np.square, lambda y: 0.5 / y),
    ("sqrt", "inv"): (lambda y: y > 0, lambda y: y**-2.0, lambda y: 0.5 * y**3),
    ("square",): (lambda y: y >= 0, np.sqrt, lambda y: 2 * np.sqrt(y)),
    ("exp",): (lambda y: y > 0, np.log, lambda y: y),
    ("log",): (lambda y: np.abs(y) < 30, np.exp, lambda y: np.exp(-y)),
    ("sin",): (lambda y: np.abs(y) < 1, np.arcsin, lambda y: np.sqrt(1 - y * y)),
    ("asin",): (lambda y: np.abs(y) < 1.57, np.sin, lambda y: 1 / np.cos(y)),
    ("acos",): (lambda y: np.abs(y - 1.57) < 1.57, np.cos, lambda y: 1 / np.sin(y)),
    ("tanh",): (lambda y: np.abs(y) < 1, np.arctanh, lambda y: 1 - y * y),
}
#: Outer functions that make a factor of t a factor of y.
_HOMOGENEOUS: Final = frozenset({(), ("inv",), ("sqrt",), ("sqrt", "inv"), ("square",)})


@dataclass(frozen=True, slots=True)
class View:
    """The target seen through the inverse of an outer function."""

    outer: tuple[str, ...]
    """Operators applied to t, the innermost first."""
    target: Floats
    """t of each row, with weighted mean 0 and variance 1."""
    mean: float
    spread: float
    """Weighted mean and standard deviation of t before that."""
    weights: Floats
    """Weight of each row, sum 1."""


def views(operators: Collection[str], target: Floats, weights: Floats) -> Iterator[View]:
    """Yield the view of the target itself and those of the outer functions that fit it."""
    for outer, (inside, inverse, slope) in _OUTER.items():
        needed = {"div" if name == "inv" else name for name in outer}
        with np.errstate(all="ignore"):
            if not needed <= set(operators) or not np.all(inside(target)):
                continue
            seen, scale = inverse(target), np.square(slope(target)) * weights
            scale = scale / scale.sum()
            mean = float(scale @ seen)
            spread = float(np.sqrt(scale @ np.square(seen - mean)))
        if np.isfinite(spread) and spread > 0.0:
            yield View(outer, (seen - mean) / spread, mean, spread, scale)


class _Table(NamedTuple):
    """Formulas with finite values that differ."""

    genomes: Genomes
    values: NDArray[np.float32]
    """Values, each formula's with root mean square 1; [formulas, rows]."""
    scales: Floats
    """Root mean squares of the values themselves; [formulas]."""


class _Pairs(NamedTuple):
    """Pairs of one kind: t = a + b u ("one"), a + b u v ("mul") or a + b u + c v ("add")."""

    kind: str
    left: Indices
    right: Indices
    errors: Floats
    """Part of t's variance that is not explained."""
    a: Floats
    b: Floats
    c: Floats


@dataclass(slots=True)
class PairSearch:
    """A library and the views of the target."""

    operators: Collection[str]
    """Names of the operators that formulas may have."""
    evaluate: Callable[[Genomes], Floats]
    """Returns values of formulas on the rows of the target, [formulas, rows]."""
    views: list[View]
    library: Genomes
    _table_of_library: _Table = field(init=False)
    _beams: dict[tuple[str, ...], tuple[Genomes, Floats]] = field(default_factory=dict)
    """Best formulas of t that can still grow, with their errors in ascending order, by view."""
    _turns: dict[tuple[str, ...], int] = field(default_factory=dict)
    """Steps of each view."""

    def __post_init__(self) -> None:
        self._table_of_library = self._table(self.library)

    # Values that are too large and formulas that explain nothing are sorted out by their errors.
    @np.errstate(all="ignore")
    def step(self, others: Genomes) -> Genomes:
        """Pair some formulas with the library and return the best pairs.

        Each view has its turn at first; then every second step is the first view's, and the others
        are in turn those of the others and the one of them with the least error.
        The formulas are the view's best so far, the next part of the library, and ``others``.
        """
        view = self._next_view()
        turn = self._turns.get(view.outer, 0)
        self._turns[view.outer] = turn + 1
        beam, _ = self._beam(view)
        start = turn * _BLOCK % len(self.library)
        left = self._table(joined([beam, others, self.library[start : start + _BLOCK]]))
        known = self._table_of_library
        right = _Table(
            joined([known.genomes, left.genomes]),
            np.concatenate([known.values, left.values]),
            np.concatenate([known.scales, left.scales]),
        )
        inner, errors, whole = self._best(view, left, right)
        self._extend(view, inner, errors)
        return whole

    def _beam(self, view: View) -> tuple[Genomes, Floats]:
        return self._beams.get(view.outer, (self.library[:0], np.empty(0)))

    def _extend(self, view: View, genomes: Genomes, errors: Floats) -> None:
        """Add to a beam, of equal errors the shortest formula."""
        growing = genomes.sizes < self.library.width - 1
        beam, known = self._beam(view)
        beam, errors = joined([beam, genomes[growing]]), np.concatenate([known, errors[growing]])
        rounded = np.round(np.log(errors + 1e-30), 6)
        order = np.lexsort((beam.sizes, rounded))
        fresh = np.diff(rounded[order], prepend=-np.inf) > 0
        order = order[fresh][:_BEAM]
        self._beams[view.outer] = beam[order], errors[order]

    def _next_view(self) -> View:
        step = sum(self._turns.values())
        others = self.views[1:]
        if step < len(self.views):
            return self.views[step]
        if step % 2 == 0 or not others:
            return self.views[0]
        if step % 4 == 1:
            return min(others, key=lambda view: min(self._beam(view)[1], default=np.inf))
        return min(others, key=lambda view: self._turns[view.outer])

    def _table(self, genomes: Genomes) -> _Table:
        with np.errstate(all="ignore"):
            table = self.evaluate(genomes)
            scales = np.sqrt(np.mean(np.square(table), axis=1))
            table = table / scales[:, None]
            sound = np.isfinite(table).all(axis=1) & (scales > 0) & np.isfinite(scales)
            keys = np.round((table * np.sign(table[:, :1]))[sound] @ _probe(table.shape[1]), 7)
        _, first = np.unique(keys, return_index=True)
        chosen = np.flatnonzero(sound)[np.sort(first)]
        return _Table(genomes[chosen], table[chosen].astype(np.float32), scales[chosen])

    def _best(self, view: View, left: _Table, right: _Table) -> tuple[Genomes, Floats, Genomes]:
        """Return the best formulas of t, their errors, and those of y around them."""
        kinds = ["one", *(kind for kind in ("mul", "add") if kind in self.operators)]
        found = [_weigh(kind, view, left, right) for kind in kinds]
        made = [(pairs, _inner(pairs, left, right, self.operators)) for pairs in found]
        inner = joined([self.library[:0], *(formulas for _, formulas in made)])
        # A formula that would be too long is empty.
        errors = np.concatenate([np.empty(0), *(pairs.errors for pairs in found)])
        errors[inner.sizes == 0] = np.inf
        order = np.argsort(errors)[: min(_BEAM, np.count_nonzero(inner.sizes))]
        if not len(order):
            return inner[order], errors[order], inner[order]
        a, b = (np.concatenate([getattr(p, name) for p in found])[order] for name in "ab")
        whole = _whole(view, inner[order], a, b, self.operators)
        return inner[order], errors[order], whole[whole.sizes > 0]


def _probe(rows: int) -> Floats:
    """Return numbers whose scalar product with values tells formulas apart."""
    return np.asarray(np.cos(np.arange(rows) ** 2.0))


def _weigh(kind: str, view: View, left: _Table, right: _Table) -> _Pairs:
    """Find the pairs with the least errors, block by block, and solve them in float64."""
    if kind == "one":
        alone = np.arange(len(left.values))
        return _solved(kind, view, left, right, alone, np.zeros_like(alone))
    score = _Products.of(view, right.values) if kind == "mul" else _Sums.of(view, right.values)
    ones, others = [], []
    for start in range(0, len(left.values), _BLOCK):
        scores = score(left.values[start : start + _BLOCK])
        count = min(_KEPT, scores.size)
        top = np.argpartition(scores, -count, axis=None)[-count:]
        one, other = np.unravel_index(top, scores.shape)
        ones.append(one + start)
        others.append(other)
    one, other = np.concatenate(ones), np.concatenate(others)
    return _solved(kind, view, left, right, one, other)


class _Products(NamedTuple):
    """Scores R^2 of a + b u v."""

    weights: NDArray[np.float32]
    target: NDArray[np.float32]
    right: NDArray[np.float32]
    squares: NDArray[np.float32]

    @classmethod
    def of(cls, view: View, right: NDArray[np.float32]) -> _Products:
        weights, target = view.weights.astype(np.float32), view.target.astype(np.float32)
        return cls(weights, target, np.ascontiguousarray(right.T), np.square(right).T)

    def __call__(self, left: NDArray[np.float32]) -> NDArray[np.float32]:
        weighted = left * self.weights
        mean = weighted @ self.right
        product = (weighted * self.target) @ self.right
        square = (left * weighted) @ self.squares
        variance = square - np.square(mean)
        return _ratio(np.square(product), variance, variance > _LEAST_VARIATION * square)


class _Sums(NamedTuple):
    """Scores R^2 of a + b u + c v."""

    roots: NDArray[np.float32]
    weights: NDArray[np.float32]
    target: NDArray[np.float32]
    right: NDArray[np.float32]
    correlations: NDArray[np.float32]

    @classmethod
    def of(cls, view: View, right: NDArray[np.float32]) -> _Sums:
        weights = view.weights.astype(np.float32)
        roots = np.sqrt(weights)
        target = view.target.astype(np.float32) * roots
        centred = _centred(right, weights, roots)
        return cls(roots, weights, target, np.ascontiguousarray(centred.T), centred @ target)

    def __call__(self, left: NDArray[np.float32]) -> NDArray[np.float32]:
        centred = _centred(left, self.weights, self.roots)
        own = (centred @ self.target)[:, None]
        both = centred @ self.right
        rest = 1 - both * both
        explained = own * own + self.correlations**2 - 2 * own * self.correlations * both
        return _ratio(explained, rest, rest > _LEAST_VARIATION)


def _ratio(
    above: NDArray[Any], below: NDArray[Any], sound: NDArray[np.bool_]
) -> NDArray[np.float32]:
    quotient: NDArray[np.float32] = np.divide(above, below, out=np.zeros_like(above), where=sound)
    return quotient


def _centred(
    values: NDArray[np.float32], weights: NDArray[np.float32], roots: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return rows with weighted mean 0 and variance 1, times the roots of the weights."""
    shifted = (values - (values @ weights)[:, None]) * roots
    length = np.sqrt(np.square(shifted).sum(axis=1, keepdims=True))
    return np.where(length > _LEAST_VARIATION, shifted / np.where(length > 0, length, 1), 0)


def _solved(
    kind: str, view: View, left: _Table, right: _Table, one: Indices, other: Indices
) -> _Pairs:
    u, v = left.values[one].astype(float), right.values[other].astype(float)
    columns = {"one": [u], "mul": [u * v], "add": [u, v]}[kind]
    roots = np.sqrt(view.weights)
    means = [column @ view.weights for column in columns]
    design = np.stack(
        [(c - m[:, None]) * roots for c, m in zip(columns, means, strict=True)], axis=2
    )
    target = view.target * roots
    gram = design.transpose(0, 2, 1) @ design
    # Columns that are equal or constant make it singular.
    gram += (1e-12 * np.trace(gram, axis1=1, axis2=2) + 1e-30)[:, None, None] * np.eye(len(columns))
    slopes = np.linalg.solve(gram, (design.transpose(0, 2, 1) @ target)[:, :, None])[:, :, 0]
    errors = np.square(np.einsum("prk,pk->pr", design, slopes) - target).sum(axis=1)
    slopes *= view.spread
    a = view.mean - sum(slopes[:, k] * mean for k, mean in enumerate(means))
    b, c = slopes[:, 0] / left.scales[one], slopes[:, -1] / right.scales[other]
    if kind == "mul":
        b = b / right.scales[other]
    return _Pairs(kind, one, other, errors, np.asarray(a), b, c)


def _inner(pairs: _Pairs, left: _Table, right: _Table, operators: Collection[str]) -> Genomes:
    """Build u, u v, or u + (c / b) v."""
    u, v = left.genomes[pairs.left], right.genomes[pairs.right]
    if pairs.kind == "one":
        return u
    if pairs.kind == "mul":
        return packed([u, v, tokens(np.full(len(u), MUL))], u.width)
    ratio = pairs.c / pairs.b
    minus = (np.abs(ratio + 1) < _ROUND) & ("sub" in operators)
    scaled = ~minus & (np.abs(ratio - 1) >= _ROUND)
    factor = (tokens(np.where(scaled, CONSTANT, 0), ratio), tokens(np.where(scaled, MUL, 0)))
    return packed([u, v, *factor, tokens(np.where(minus, SUB, ADD))], u.width)


def _whole(view: View, inner: Genomes, a: Floats, b: Floats, operators: Collection[str]) -> Genomes:
    """Build g(a + b inner) as far as slope and intercept do not absorb a and b."""
    if not view.outer:
        return inner
    nothing = np.zeros(len(inner), np.uint8)
    scaled, negative = nothing > 0, nothing > 0
    size: Any = max(abs(view.mean), view.spread)
    if view.outer in _HOMOGENEOUS:
        a, negative = a / np.abs(b), b < 0
        size = size / np.abs(b)
    else:
        scaled = np.abs(b - 1) >= _ROUND
    # A factor inside of exp stays, a summand becomes a factor outside.
    shifted = (np.abs(a) >= _ROUND * size) & (view.outer != ("exp",))
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
    for name in view.outer:
        if name == "inv":
            blocks = [tokens(nothing + CONSTANT, 1.0), *blocks, tokens(nothing + DIV)]
        else:
            blocks.append(tokens(nothing + OPERATORS[name].code))
    return packed(blocks, inner.width)
