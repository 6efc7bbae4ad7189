"""The search for pairs: libraries, views and beams."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

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
    joined,
    packed,
    tokens,
)
from warpfit.sklearn.pairs.tables import BLOCK, LEAST_VARIATION, Scores, Table, stacked, top
from warpfit.sklearn.pairs.views import ROUND, View

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
#: Improves the scales in the formulas of a table, by the errors of what is fitted with it.
Sharpen: TypeAlias = Callable[[Table, Callable[[Table], Floats]], Table]


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
        left = stacked([self._known[start : start + BLOCK], best])
        base = self._known[:0]
        if kind == _ADDING and len(beam):
            base = self._table(beam[[rounds // 2 % min(_BASES, len(beam))]])
        right = stacked([self._functions if kind == _SCALING else self._known, best])
        sharpen = self._sharpened if kind == _SCALING else lambda v, _: v
        count = _SHARPENED if kind == _SCALING else _KEPT
        return self._best(
            place, _Fitter(view, base, self.operators, sharpen, count).found(left, right)
        )

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
        self._extend(place, inner, errors)
        whole = self.views[place].whole(inner, a[order], b[order], self.operators)
        return whole[whole.sizes <= self.width]

    def _extend(self, place: int, genomes: Genomes, errors: Floats) -> None:
        """Add to a beam, of equal errors the shortest formula."""
        growing = genomes.sizes < self.width - 1
        beam, known = self._beams[place]
        beam, errors = joined([beam, genomes[growing]]), np.concatenate([known, errors[growing]])
        rounded = np.round(np.log(errors + _LEAST_ERROR), 6)
        order = np.lexsort((beam.sizes, rounded))
        fresh = np.diff(rounded[order], prepend=-np.inf) > 0
        order = order[fresh][:_BEAM]
        self._beams[place] = beam[order], errors[order]

    def _next_view(self) -> int:
        """Give each view a turn, then the first one or one of the others.

        These are the one with the least error and the one with the fewest steps, in turn.
        """
        step, places = sum(self._turns), range(len(self.views))
        others = places[1:] or places
        if min(self._turns) > 0 and step % 2 == 0:
            return 0
        if min(self._turns) > 0 and step % 4 == 1:
            return min(others, key=self._error)
        return min(places, key=lambda place: self._turns[place])

    def _error(self, place: int) -> float:
        """Return the least error of a view, as one of y."""
        return float(min(self._beams[place][1], default=np.inf) * self.views[place].error_scale)

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
    return stacked(tables).distinct()


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
