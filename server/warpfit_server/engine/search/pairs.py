"""Pairs and sums of short formulas: what a search finds without evolution.

The simple form, with a library of short formulas (`library`):

    for each view of the target (`colony.View`), in turns:
        for each pair u, v of the library, the best of the view so far and those of the islands:
            fit t = a + b v, a + b u v, a + b u (v + c), a + b u + c v
        keep the best; they join the library of the view's next turn (a beam search)

All pairs are weighed by matrix products (`Weigher`); the best of a block of u are fitted again in
float64 and written out. The library also has 1/f of each f. In some turns pairs are added to one of
the view's best formulas, or to a short one (matching pursuit); in others v is a function of a
scaled argument, f(c u), whose scale is sharpened by a golden section. The library doubles
after some steps: the first pairs are found soon, and a long search has the whole library.
`PairSearch.sums` builds sums of more terms, one term after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Population, subtree_starts
from warpfit.ops import ARITIES, BY_CODE, CONSTANT, OPERATORS, VARIABLE
from warpfit.searching import Form, structure_length
from warpfit_server.engine.interface import Steps
from warpfit_server.engine.search.colony import ROUND, View, views
from warpfit_server.engine.search.library import (
    ADD,
    DIV,
    LEAST_VARIATION,
    MUL,
    SUB,
    Fit,
    Floats,
    Indices,
    Singles,
    Weigher,
    arguments,
    formulas_of,
    joined,
    library,
    packed,
    relevant,
    tokens,
)
from warpfit_server.limits import LIBRARY_SIZE, PAIRS_EVALUATED

Mask: TypeAlias = NDArray[np.bool_]
#: Values with root mean square 1, [formulas, rows], and their scales.
Term: TypeAlias = tuple[Floats, Floats]

#: Most variables of the library, those that say most about the target.
_MOST_VARIABLES: Final = 30
#: Formulas of the first library, and steps after which it has twice as many.
_FIRST_SIZE: Final = 1_000
_DOUBLING: Final = 6
#: Formulas of the library for each argument of functions that are scaled.
_ARGUMENTS: Final = 30
#: Decimals to which values are compared.
_DIGITS: Final = 4
#: Formulas of each view that are returned, and that are paired again in the next round.
_BEAM: Final = 200
#: Steps of five of a view that are of a kind of their own.
_ADDING, _SCALING, _KINDS = 1, 3, 5
#: Pairs whose scales are sharpened.
_SHARPENED: Final = 40
#: Formulas of a beam that pairs are added to; and of the library in one step, to pairs with so many
#: of its shortest.
_BASES: Final = 6
_SHORT_BASES: Final = 4
_SHORT: Final = 256
_SHORT_LEFT: Final = 128
#: Functions whose arguments are scaled, and standard deviations that these then have.
_SCALED: Final = {"exp": (1, -1), "sin": (1,), "cos": (1,), "tanh": (1,)}
_RATIO: Final = 1.5
_SPREADS: Final = 0.2 * _RATIO ** np.arange(10)
#: Steps of the golden section by which scales are sharpened.
_SECTIONS: Final = 16
_GOLDEN: Final = 0.5 * (math.sqrt(5.0) - 1.0)
#: Numbers of terms and rows of pairs that are fitted in one step, which takes a millisecond.
_FITTED_NUMBERS: Final = 1 << 16
#: Errors below this are rounding.
_LEAST_ERROR: Final = 1e-12
#: Most tokens of a term of a sum that comes from the library, and most terms.
_TERM_SIZE: Final = 6
_MOST_SUMMED: Final = 10
#: Terms of the least error that are tried, and leverage of a row that decides alone.
_TRIED: Final = 8
_ALONE: Final = 0.99


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Formulas with finite values that differ."""

    formulas: Population
    values: Singles
    """Values of f or 1/f, each formula's with root mean square 1; [formulas, rows]."""
    scales: Floats
    """Root mean squares of the values themselves; [formulas]."""
    inverted: Mask
    """Whether the values are those of 1/f; [formulas]."""
    argument: Indices
    """Number of the argument u of a function f(c u), -1 for other formulas; [formulas]."""

    def __len__(self) -> int:
        """Count the formulas."""
        return len(self.formulas)

    def __getitem__(self, index: Any) -> Self:
        """Select formulas by a slice, a mask or indices."""
        return type(self)(*(getattr(self, entry.name)[index] for entry in fields(self)))

    @classmethod
    def of(cls, formulas: Population, values: Floats, argument: Indices | None = None) -> Table:
        """Scale values, float64 [formulas, rows], and leave out those that are not finite."""
        with np.errstate(all="ignore"):
            scales = np.sqrt(np.mean(np.square(values), axis=1))
            singles = (values / scales[:, None]).astype(np.float32)
        sound = np.isfinite(scales) & (scales > 0) & np.isfinite(singles).all(axis=1)
        count = np.zeros(len(formulas), np.int64)
        numbers = count - 1 if argument is None else argument
        table = cls(formulas, singles, scales, count > 0, numbers)
        return table if sound.all() else table[sound]

    @classmethod
    def merged(cls, tables: Sequence[Table]) -> Table:
        """Return the formulas of several tables, one table after the other."""
        columns = [
            np.concatenate([getattr(table, entry.name) for table in tables])
            for entry in fields(cls)[1:]
        ]
        return cls(joined([table.formulas for table in tables]), *columns)

    @classmethod
    def picked(cls, tables: Sequence[Table], places: Indices) -> Table:
        """Return formulas by their places in several tables that follow one another."""
        ends = np.cumsum([len(table) for table in tables])
        owners = np.searchsorted(ends, places, side="right")
        parts = [
            table[places[owners == number] - end + len(table)]
            for number, (table, end) in enumerate(zip(tables, ends, strict=True))
        ]
        return cls.merged(parts)[np.argsort(np.argsort(owners, kind="stable"), kind="stable")]

    @property
    def sizes(self) -> Indices:
        """Tokens of each formula."""
        return self.formulas.lengths.astype(np.int64)

    def with_reciprocals(self) -> Steps[Table]:
        """Return the formulas f that differ, with 1/f of each f that is not too close to 0."""
        parts = [self]
        for start in range(0, len(self), PAIRS_EVALUATED):
            some = self[start : start + PAIRS_EVALUATED]
            some = some[np.abs(some.values).min(axis=1) > ROUND]
            part = Table.of(some.formulas, 1.0 / some.values.astype(float))
            scales = part.scales / some.scales
            parts.append(Table(part.formulas, part.values, scales, ~part.inverted, part.argument))
            yield None
        return Table.merged(parts).distinct()

    def distinct(self) -> Table:
        """Order by size, and leave out what has the values, to a factor, of one before."""
        ordered = np.argsort(self.sizes + self.inverted, kind="stable")
        # Scalar products with three vectors tell formulas apart.
        squares = np.arange(self.values.shape[1])[:, None] ** 2.0
        probes = np.cos(squares * np.array([1.0, 2.0, 3.0])).astype(np.float32)
        keys = (self.values @ probes) * np.sign(self.values[:, :1])
        whole = np.round(keys * 10.0**_DIGITS).astype(np.int64)
        mixed = (whole * np.array([1, 0x9E3779B97F4A7C1, 0x2545F4914F6CDD1])).sum(axis=1)
        _, first = np.unique(mixed[ordered], return_index=True)
        return self[ordered[np.sort(first)]]

    def written(self) -> Population:
        """Return the formulas, 1/f where the values are those."""
        one = tokens(np.where(self.inverted, CONSTANT, 0), 1.0)
        return packed([one, self.formulas, tokens(np.where(self.inverted, DIV, 0))])

    def term(self) -> Term:
        """Return values and scales."""
        return self.values.astype(float), self.scales


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """A formula a + b t1 + c t2 + ... without slope and intercept."""

    kind: str
    """``"variables"`` or ``"terms"``."""
    terms: int
    score: float
    """Its length in nats, the less the better: half the rows times the logarithm of the error of
    each row by a fit to the others (PRESS; Allen 1974), and `structure_length`."""
    formula: Population


@dataclass(slots=True, kw_only=True)
class PairSearch:
    """A library and the views of the target; `step` and `sums` search them."""

    operators: Mapping[str, float]
    """Names of the operators that formulas may have, with weights; those of weight 0 are not."""
    columns: Sequence[int]
    """Variables that formulas may have."""
    X: Floats
    """All variables, [variables, rows]; the rows are in random order."""
    target: Floats
    """[rows]."""
    weights: Floats | None
    """Weight of each row, [rows]; None for equal ones."""
    values: Callable[[Population], Steps[Floats]]
    """Evaluates formulas on the rows, float64 [formulas, rows]."""
    admissible: Callable[[Population], Mask]
    """Says which formulas keep to the rules."""
    weigher: Weigher
    width: int
    """Most tokens of a formula."""
    form: Form = Form.SCALED
    size: int = LIBRARY_SIZE
    """Most formulas of the library, about."""
    pairs: int = 0
    """Pairs that have been weighed."""
    views: list[View] = field(default_factory=list)
    """Views of the target, the target itself first; there are none before the first step."""
    known: Table = field(init=False)
    """The library, with reciprocals if they are allowed."""
    _size: int = 0
    """Formulas of the library now, about."""
    _used: list[int] = field(default_factory=list)
    """Variables of the library."""
    _names: tuple[str, ...] = ()
    _screened: int = 0
    """First rows on which pairs are weighed; those that are best are fitted on all rows."""
    _functions: Table | None = None
    """Functions of scaled arguments, which the first step that takes them makes."""
    _inner: Floats = field(init=False)
    """Values of the arguments of scaled functions, with standard deviation 1; [arguments, rows]."""
    _inner_scales: Floats = field(init=False)
    """Standard deviations of the arguments themselves; [arguments]."""
    _prepared: dict[str, Any] = field(default_factory=dict)
    _beams: list[tuple[Population, Floats]] = field(init=False)
    """Best formulas of t that can still grow, with their errors in ascending order, by view."""
    _turns: list[int] = field(init=False)
    """Steps of each view."""

    def prepare(self) -> Steps[None]:
        """Make views and library, or a larger library, as `step` and `sums` do, too."""
        if not self.views:
            rows = len(self.target)
            self._names = tuple(name for name, weight in self.operators.items() if weight > 0)
            step = max(1, rows // self.weigher.rows)
            self._screened = -(-rows // step)
            weights = np.ones(rows) if self.weights is None else self.weights
            columns, target = np.asarray(self.columns), self.target
            used = yield from relevant(self.X[columns], target, _MOST_VARIABLES)
            self._used = columns[used].tolist()
            given = self._names, self._used, self.X, target, weights / weights.sum(), self.width
            for view in views(*given):
                self.views.append(view)
                yield None
            self._beams = [(formulas_of([]), np.empty(0)) for _ in self.views]
            self._turns = [0 for _ in self.views]
        size = min(self.size, _FIRST_SIZE << min(sum(self._turns) // _DOUBLING, 16))
        if size == self._size:
            return
        self._size, self._functions = size, None
        known = yield from self._table((yield from library(self._names, self._used, size)))
        if "div" in self._names:
            known = yield from known.with_reciprocals()
        self.known, self._prepared = known, {"known": self._prepare(known)}
        yield None

    @property
    def library(self) -> Population:
        """The formulas of the library, shortest first; `prepare` makes them."""
        return self.known.formulas[~self.known.inverted]

    def step(self, others: Population) -> Steps[Population]:
        """Pair some formulas with the library and return the best pairs, best first.

        The formulas are the best of a view so far, the next part of the library, and ``others``.
        In some turns of a view they are paired with functions of scaled arguments instead, and in
        others the pairs are added to one of the view's best formulas, or to short ones.
        """
        yield from self.prepare()
        place = self._next_view()
        view, beam, turn = self.views[place], self._beams[place][0], self._turns[place]
        self._turns[place] += 1
        rounds, kind = divmod(turn, _KINDS)
        if kind == _ADDING and rounds % 2:
            # Pairs beside some of the short formulas, those that explain most of the view first.
            short = self.known[:_SHORT]
            short = short[~short.inverted]
            given = [self._prepare(short)], len(short)
            _, order = yield from self.weighed(view, short[:0], None, *given, is_product=False)
            found: list[_Found] = []
            for one in np.roll(order, -(rounds // 2) * _SHORT_BASES)[:_SHORT_BASES]:
                prepared = [self._prepared["known"]]
                base, right = short[[one]], [self.known]
                fitter = _Fitter(self, view, base, right, prepared, _SHARPENED, False)
                found += yield from fitter.found([short[:_SHORT_LEFT]])
            return (yield from self._best(place, found))
        block = rounds if kind in (_SCALING, _ADDING) else 3 * rounds + kind // 2
        start = block * self.weigher.block % max(1, len(self.known))
        best = yield from self._table(joined([beam, others]))
        base = self.known[:0]
        if kind == _ADDING and len(beam):
            base = yield from self._table(beam[[rounds // 2 % min(_BASES, len(beam))]])
        # The part of the library is a block of its own, that the best do not outdo.
        lefts = [self.known[start : start + self.weigher.block]]
        firsts = range(0, len(best), self.weigher.block)
        lefts += [best[first : first + self.weigher.block] for first in firsts]
        scaled, right = kind == _SCALING, [self.known, best]
        if scaled:
            if self._functions is None:
                inner = arguments(self._names, self._used, self._size // _ARGUMENTS)
                self._functions = yield from self._scaled((yield from self._table(inner)))
                self._prepared["functions"] = self._prepare(self._functions)
            right[0] = self._functions
        prepared = [self._prepared["functions" if scaled else "known"], self._prepare(best)]
        count = _SHARPENED if scaled else self.weigher.kept
        fitter = _Fitter(self, view, base, right, prepared, count, scaled)
        found = yield from fitter.found(lefts)
        return (yield from self._best(place, found))

    def sums(self, others: Population) -> Steps[list[Sum]]:
        """Return sums a + b t1 + c t2 + ... of each number of terms.

        One is of variables alone, another of any terms: those of the library, and all parts of
        ``others``. One after the other is added, and exchanged or left out where that helps
        (stepwise regression; Efroymson 1960), as a sum is judged by `Sum.score`. The sums of
        variables are where exchanges begin, too.
        """
        yield from self.prepare()
        if not {"add", "mul"} <= set(self._names):
            return []
        parts = others
        if len(others):
            trees = subtree_starts(ARITIES[others.codes].astype(np.int64))
            spans = np.arange(1, len(trees) + 1) - trees
            ends = np.cumsum(spans)
            every = np.arange(ends[-1]) + np.repeat(trees - ends + spans, spans)
            parts = Population(others.codes[every], others.values[every], spans.astype(np.uint32))
        known = self.known[self.known.sizes <= _TERM_SIZE]
        terms = Table.merged([known, (yield from self._table(parts))]).distinct()
        single = terms.sizes + terms.inverted == 1
        fitter = _Fitter(self, self.views[0], self.known[:0], [terms], [], 1, False)
        found: list[Sum] = []
        begun: list[list[int]] = []
        symbols = len(self.columns) + len(self._names) + 1
        for kind, places in (
            ("variables", np.flatnonzero(single)),
            ("terms", np.arange(len(single))),
        ):
            own = terms[places]
            sums = _Selection(self.views[0], own, self._screened, symbols, self.width)
            yield from sums.prepare()
            chosen = yield from sums.selected(begun)
            for score, members in chosen:
                inner = yield from fitter.sum_of([own[[place]] for place in members])
                if inner.lengths[0] <= self.width:
                    found.append(Sum(kind, len(members), score, inner))
            begun = [places[members].tolist() for _, members in chosen]
        return found

    def weighed(
        self,
        view: View,
        base: Table,
        left: Table | None,
        right: Sequence[Any],
        count: int,
        *,
        is_product: bool,
    ) -> Steps[tuple[Indices, Indices]]:
        """Return the places of the pairs with the least errors, and count all that are weighed.

        Args:
            view: of the target.
            base: a formula that pairs are added to, or none.
            left: the formulas u; None for v alone.
            right: the formulas v, prepared.
            count: of pairs to return.
            is_product: whether pairs are products or sums.
        """
        rows = self._screened
        weights = view.weights[:rows] / view.weights[:rows].sum()
        beside = "add" in self._names
        own = base.values[:, :rows].astype(float)
        fit = Fit.of(view.target[:rows], weights, own, is_product, beside)
        values = np.ones((1, rows), np.float32) if left is None else left.values[:, :rows]
        _, one, other = yield from self.weigher.best(fit, values, right, count)
        self.pairs += len(values) * sum(map(len, right))
        return one, other

    def _best(self, place: int, found: Sequence[_Found]) -> Steps[Population]:
        """Extend a view's beam by the best pairs, and return formulas of y around them."""
        inner = joined([formulas_of([]), *(one.inner for one in found)])
        errors, a, b = (
            np.concatenate([np.empty(0), *(getattr(one, name) for one in found)])
            for name in ("errors", "a", "b")
        )
        errors[(inner.lengths > self.width) | np.isnan(errors)] = np.inf
        order = np.argsort(errors, kind="stable")[: np.count_nonzero(np.isfinite(errors))]
        inner, errors, a, b = inner[order], errors[order], a[order], b[order]
        yield None
        whole = self.views[place].whole(inner, a, b, self._names, self.form is Form.SCALED)
        yield None
        sound = (whole.lengths <= self.width) & self.admissible(whole)
        yield None
        is_known = np.isin(
            whole.codes, [VARIABLE, CONSTANT, *(OPERATORS[n].code for n in self._names)]
        )
        tokens_of = np.repeat(np.arange(len(whole)), whole.lengths)
        sound[tokens_of[~(is_known & np.isfinite(whole.values))]] = False
        allowed = np.flatnonzero(sound)[:_BEAM]
        growing = allowed[inner.lengths[allowed] < self.width - 1]
        beam, known = self._beams[place]
        beam, known = joined([beam, inner[growing]]), np.concatenate([known, errors[growing]])
        rounded = np.round(np.log(known + _LEAST_ERROR), 6)
        shortest = np.lexsort((beam.lengths, rounded))  # of equal errors
        fresh = np.diff(rounded[shortest], prepend=-np.inf) > 0
        kept = shortest[fresh][:_BEAM]
        self._beams[place] = beam[kept], known[kept]
        return whole[allowed]

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

    def _prepare(self, table: Table) -> Any:
        return self.weigher.prepared(table.values[:, : self._screened])

    def _table(self, formulas: Population) -> Steps[Table]:
        """Evaluate formulas that keep to the rules."""
        tables = [Table.of(formulas_of([]), np.empty((0, len(self.target))))]
        for start in range(0, len(formulas), PAIRS_EVALUATED):
            part = formulas[start : start + PAIRS_EVALUATED]
            part = part[self.admissible(part)]
            if len(part):
                values = yield from self.values(part)
                tables.append(Table.of(part, values))
            yield None
        return Table.merged(tables).distinct()

    def _scaled(self, inner: Table) -> Steps[Table]:
        """Return f(c u) for functions f and many c."""
        spreads = np.std(inner.values, axis=1, dtype=float)
        varies = np.square(spreads) > LEAST_VARIATION
        inner, spreads = inner[varies], spreads[varies]
        self._inner, self._inner_scales = inner.values / spreads[:, None], spreads * inner.scales
        tables = [inner[:0]]
        for name in sorted(_SCALED.keys() & set(self._names)):
            for spread in (sign * size for sign in _SCALED[name] for size in _SPREADS):
                with np.errstate(all="ignore"):
                    values = OPERATORS[name].numpy(spread * self._inner)
                ends = [tokens(np.full(len(inner), c)) for c in (MUL, OPERATORS[name].code)]
                first = tokens(np.full(len(inner), CONSTANT), spread / self._inner_scales)
                formulas = packed([first, inner.formulas, *ends])
                fits = (formulas.lengths <= self.width) & self.admissible(formulas)
                tables.append(Table.of(formulas[fits], values[fits], np.flatnonzero(fits)))
                yield None
        return Table.merged(tables).distinct()

    def sharpened(self, table: Table, errors: Callable[[Table], Steps[Floats]]) -> Steps[Table]:
        """Find better scales of functions f(c u) by a golden section; others stay."""
        scaled, formulas = np.flatnonzero(table.argument >= 0), table.formulas
        first = formulas.starts[:-1][scaled]
        codes = formulas.codes[formulas.starts[1:][scaled] - 1]
        arguments = table.argument[scaled]
        inner, spreads = self._inner[arguments], self._inner_scales[arguments]

        def at(factors: Floats) -> Table:
            numbers, values = formulas.values.copy(), table.values.astype(float)
            numbers[first] *= factors
            for code in set(codes.tolist()):
                rows = codes == code
                scale = (spreads * numbers[first])[rows, None]
                values[scaled[rows]] = BY_CODE[code].numpy(scale * inner[rows])
            scales = np.sqrt(np.mean(np.square(values), axis=1))
            singles = (values / scales[:, None]).astype(np.float32)
            scales[table.argument < 0] = table.scales[table.argument < 0]
            own = Population(formulas.codes, numbers, formulas.lengths)
            return Table(own, singles, scales, table.inverted, table.argument)

        def error(places: Floats) -> Steps[Floats]:
            with np.errstate(all="ignore"):
                moved = at(np.exp(places))
            return (yield from errors(moved))[scaled]

        low, high = (np.full(len(scaled), side * math.log(_RATIO)) for side in (-1, 1))
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        of_left, of_right = (yield from error(left)), (yield from error(right))
        for _ in range(_SECTIONS):
            rises = of_left <= of_right
            low, high = np.where(rises, (low, right), (left, high))
            fresh = low + high - np.where(rises, left, right)
            of_fresh = yield from error(fresh)
            left, right = np.where(rises, (fresh, left), (right, fresh))
            of_left, of_right = np.where(rises, (of_fresh, of_left), (of_right, of_fresh))
        return at(np.exp(0.5 * (low + high)))


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """Formulas t = a + b inner."""

    inner: Population
    errors: Floats
    """Part of t's variance that is not explained."""
    a: Floats
    b: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Fitter:
    """Finds the pairs with the least errors, and solves them in float64."""

    search: PairSearch
    view: View
    base: Table
    """A formula that others are added to, or none."""
    right: Sequence[Table]
    prepared: Sequence[Any]
    """The values of ``right`` as the weigher takes them."""
    kept: int
    """Pairs of a block that are solved."""
    sharpens: bool
    """Whether the scales of functions among them are sharpened."""

    def found(self, lefts: Sequence[Table]) -> Steps[list[_Found]]:
        """Return the best formulas of each kind: v, u v, u (v + c), and u + c v."""
        found: list[_Found] = []
        adds, multiplies = (name in self.search.operators for name in ("add", "mul"))
        if len(self.base) and not adds:
            return found
        _, places = yield from self._best(None, is_product=False)
        v = yield from self._sharpened(places, None, is_product=False)
        found.append((yield from self._solved([(v.written(), v.term())])))
        for left in lefts:
            if multiplies and len(left):
                one, places = yield from self._best(left, is_product=True)
                u = left[one]
                v = yield from self._sharpened(places, u, is_product=True)
                found.append((yield from self._solved([(_product(u, v), _times(u, v))])))
                if adds:  # t = a + b (base + d u (v + c))
                    errors, a, slopes = yield from self._fit([_times(u, v), u.term()])
                    with np.errstate(all="ignore"):
                        shift, ratio = slopes[-1] / slopes[-2], slopes[1] / slopes[0]
                    # With a smaller shift the product alone is as good.
                    errors[~(np.abs(shift) >= ROUND * v.scales)] = np.inf
                    ends = [tokens(np.full(len(a), code)) for code in (ADD, MUL)]
                    summand = tokens(np.full(len(a), CONSTANT), shift)
                    inner = packed([u.written(), v.written(), summand, *ends])
                    for base in self._bases(len(a)):
                        inner = self._sum(base, inner, ratio)
                    found.append(_Found(inner, errors, a, slopes[0]))
            if adds and len(left):
                one, places = yield from self._best(left, is_product=False)
                u = left[one]
                v = yield from self._sharpened(places, u, is_product=False)
                both = [(w.written(), w.term()) for w in (u, v)]
                found.append((yield from self._solved(both)))
        return found

    def sum_of(self, terms: Sequence[Table]) -> Steps[Population]:
        """Return the best sum of some terms, one formula in each table."""
        return (yield from self._solved([(term.written(), term.term()) for term in terms])).inner

    def _best(self, left: Table | None, *, is_product: bool) -> Steps[tuple[Indices, Indices]]:
        right, kept = self.prepared, self.kept
        return (
            yield from self.search.weighed(
                self.view, self.base, left, right, kept, is_product=is_product
            )
        )

    def _sharpened(self, places: Indices, u: Table | None, *, is_product: bool) -> Steps[Table]:
        """Return the right formulas of pairs, with better scales of functions among them."""
        yield None
        v = Table.picked(self.right, places)
        if not self.sharpens:
            return v

        def errors(v: Table) -> Steps[Floats]:
            term = _times(u, v) if u is not None and is_product else v.term()
            return (yield from self._fit([term, *([] if u is None else [u.term()])]))[0]

        return (yield from self.search.sharpened(v, errors))

    def _solved(self, terms: Sequence[tuple[Population, Term]]) -> Steps[_Found]:
        """Fit t = a + b (base + c term + ...)."""
        errors, a, slopes = yield from self._fit([term for _, term in terms])
        written = [*self._bases(len(a)), *(formulas for formulas, _ in terms)]
        inner = written[0]
        with np.errstate(all="ignore"):
            ratios = slopes[1:] / slopes[0]
        for formulas, ratio in zip(written[1:], ratios, strict=True):
            inner = self._sum(inner, formulas, ratio)
        return _Found(inner, errors, a, slopes[0])

    def _bases(self, count: int) -> list[Population]:
        return [self.base.written()[np.zeros(count, np.int64)]] if len(self.base) else []

    def _fit(self, terms: Sequence[Term]) -> Steps[tuple[Floats, Floats, Floats]]:
        """Solve for t = a + b1 base + ...: return errors and a [pairs], and b [terms, pairs]."""
        yield None
        count, view = len(terms[0][1]), self.view
        bases = [self.base[np.zeros(count, np.int64)].term()] if len(self.base) else []
        terms, roots = [*bases, *terms], np.sqrt(view.weights)
        target, errors, slopes = view.target * roots, np.empty(count), np.empty((count, len(terms)))
        means = np.empty((count, len(terms)))
        some = max(1, _FITTED_NUMBERS // (len(terms) * len(target)))
        for part in (slice(first, first + some) for first in range(0, count, some)):
            with np.errstate(all="ignore"):
                design = np.stack([values[part] for values, _ in terms], axis=1)
                means[part] = design @ view.weights
                design -= means[part, :, None]
                design *= roots
                gram = design @ design.transpose(0, 2, 1)
                # Columns that are equal or constant make it singular, values that overflow no
                # number.
                ridge = 1e-12 * np.trace(gram, axis1=1, axis2=2) + 1e-30
                gram += ridge[:, None, None] * np.eye(len(terms))
                gram = np.where(np.isfinite(gram), gram, np.eye(len(terms)))
                slopes[part] = np.linalg.solve(gram, (design @ target)[:, :, None])[:, :, 0]
                left = (slopes[part, None] @ design)[:, 0] - target
                errors[part] = np.square(left).sum(axis=1)
            yield None
        with np.errstate(all="ignore"):
            slopes *= view.spread
            a = view.mean - (slopes * means).sum(axis=1)
            return errors, a, slopes.T / np.stack([scales for _, scales in terms])

    def _sum(self, u: Population, v: Population, ratio: Floats) -> Population:
        """Build u + ratio v."""
        minus = (np.abs(ratio + 1) < ROUND) & ("sub" in self.search.operators)
        scaled = ~minus & (np.abs(ratio - 1) >= ROUND)
        factor = (tokens(np.where(scaled, CONSTANT, 0), ratio), tokens(np.where(scaled, MUL, 0)))
        return packed([u, v, *factor, tokens(np.where(minus, SUB, ADD))])


def _times(u: Table, v: Table) -> Term:
    return u.values.astype(float) * v.values, u.scales * v.scales


def _product(u: Table, v: Table) -> Population:
    """Write u v with as few reciprocals as possible."""
    swapped, everybody = u.inverted & ~v.inverted, np.arange(len(u))
    both_sides = joined([u.formulas, v.formulas])
    first, second = (both_sides[everybody + len(u) * turned] for turned in (swapped, ~swapped))
    both, either = u.inverted & v.inverted, u.inverted | v.inverted
    one = tokens(np.where(both, CONSTANT, 0), 1.0)
    below = tokens(np.where(both, DIV, 0))
    return packed([one, first, below, second, tokens(np.where(either, DIV, MUL))])


# ------------------------------------------------------------------------------------------- sums


class _Selection:
    """Sums of some terms and their scores.

    What a term explains beside others follows from its products with these and with the target. All
    products with a term are computed once, on the rows on which pairs are weighed; the best terms
    of a sum are scored on all rows.

    Args:
        view: of the target.
        terms: what sums are made of.
        rows: first rows of the view on which terms are compared.
        symbols: see `structure_length`.
        width: most tokens of a sum.
    """

    def __init__(self, view: View, terms: Table, rows: int, symbols: int, width: int) -> None:
        some = slice(0, rows)
        weights = view.weights[some] / view.weights[some].sum()
        self._fit = Fit.of(view.target[some], weights, np.empty((0, rows)), False)
        self._columns = np.empty((len(terms), rows), np.float32)
        """Unit rows of the terms without the constant, or 0; `prepare` computes them."""
        self._vary = np.zeros(len(terms), bool)
        self._target = np.zeros(len(terms), np.float32)
        """Their products with the target."""
        self._square = float(self._fit.target @ self._fit.target)
        none = np.empty((0, len(view.target)))
        self._whole, self._values = Fit.of(view.target, view.weights, none, False), terms.values
        self._sizes = terms.sizes + 2 * terms.inverted
        self._symbols, self._width, self._rows = symbols, width, len(view.target)
        self._products: dict[int, Singles] = {}
        """Products of a term with all terms."""
        self._bases: dict[tuple[int, ...], tuple[Floats, Floats, Floats]] = {}

    def prepare(self) -> Steps[None]:
        """Compute what all sums need, before the first one."""
        for start in range(0, len(self._columns), PAIRS_EVALUATED):
            some = slice(start, start + PAIRS_EVALUATED)
            columns = self._fit.sides(self._values[some, : self._columns.shape[1]]).own
            self._columns[some] = columns
            self._vary[some] = columns.any(axis=1)
            self._target[some] = self._columns[some] @ self._fit.target.astype(np.float32)
            yield None

    def selected(self, known: Sequence[list[int]]) -> Steps[list[tuple[float, list[int]]]]:
        """Return the scores of the best sums and the places of their terms, by their number.

        Args:
            known: terms of sums that are improved, too.
        """
        found: list[tuple[float, list[int]]] = []
        beam: list[tuple[float, list[int]]] = [(math.inf, [])]
        for count in range(1, min(_MOST_SUMMED, len(self._sizes)) + 1):
            longer = [(self._score(places), places) for places in known if len(places) == count]
            for _, places in beam:
                longer.append(self._extended(places))
                yield None
            beam = []
            for score, places in {
                frozenset(places): (score, places) for score, places in longer
            }.values():
                if score == math.inf:
                    continue
                best = score, places
                for place in places[:-1]:
                    yield None
                    best = min(best, self._extended([each for each in places if each != place]))
                beam.append(best)
            if not beam:
                break
            found.append(min(beam))
        for count in range(len(found) - 1, 0, -1):
            _, more = found[count]
            for place in more:
                fewer = [each for each in more if each != place]
                found[count - 1] = min(found[count - 1], (self._score(fewer), fewer))
                yield None
        return found

    def _score(self, places: Sequence[int]) -> float:
        """Return `Sum.score`."""
        return float(self._scores(places[:-1], np.array(places[-1:]))[0])

    def _scores(self, places: Sequence[int], added: Indices) -> Floats:
        """Return `Sum.score` of sums with each of some terms beside the same ones."""
        basis, left, leverage = self._explained(tuple(places))
        own = self._orthogonal(basis, added)
        with np.errstate(all="ignore"):
            leverages = leverage + np.square(own)
            lefts = left - (own @ left)[:, None] * own
            errors = np.square(lefts / (1.0 - leverages)).sum(axis=1)
            lengths = 0.5 * len(left) * np.log(errors + _LEAST_ERROR)
        sizes = self._sizes[list(places)].tolist()
        for row, place in enumerate(added.tolist()):
            lengths[row] += structure_length([*sizes, int(self._sizes[place])], self._symbols)
        lengths[~(leverages.max(axis=1) <= _ALONE)] = np.inf
        return np.asarray(lengths, np.float64)

    def _explained(self, places: tuple[int, ...]) -> tuple[Floats, Floats, Floats]:
        """Return orthonormal rows of terms, what they leave of the target, and the leverages."""
        if not places:
            whole = self._whole
            return whole.known, whole.target, np.square(whole.known).sum(axis=0)
        if places not in self._bases:
            basis, left, leverage = self._explained(places[:-1])
            (own,) = self._orthogonal(basis, np.array(places[-1:]))
            left, leverage = left - (own @ left) * own, leverage + np.square(own)
            self._bases[places] = np.vstack([basis, own]), left, leverage
        return self._bases[places]

    def _orthogonal(self, basis: Floats, places: Indices) -> Floats:
        """Return unit rows of what terms have beside orthonormal rows, or 0; [places, rows]."""
        rows = self._values[places] * self._whole.roots
        lengths = np.linalg.norm(rows, axis=1)
        for _ in range(2):
            rows = rows - (rows @ basis.T) @ basis
        rests = np.linalg.norm(rows, axis=1)
        sound = rests > math.sqrt(LEAST_VARIATION) * lengths
        return np.where(sound, 1.0, 0.0)[:, None] * rows / np.where(sound, rests, 1.0)[:, None]

    def _extended(self, places: list[int]) -> tuple[float, list[int]]:
        """Add the best term of those that explain most for their length."""
        along, square, rest = self._target, self._square, np.ones(len(self._sizes))
        if places:
            for place in places:
                if place not in self._products:
                    self._products[place] = self._columns @ self._columns[place]
            products = np.stack([self._products[place] for place in places])
            gram = products[:, places] + 1e-6 * np.eye(len(places), dtype=np.float32)
            basis = np.linalg.inv(np.linalg.cholesky(gram.astype(float)))
            parts = basis.astype(np.float32) @ products
            explained = basis @ self._target[places]
            along = along - explained.astype(np.float32) @ parts
            rest = 1.0 - np.square(parts).sum(axis=0)
            square -= float(explained @ explained)
        sound = self._vary & (rest > ROUND)
        gains = np.square(along) / np.where(sound, rest, 1.0)
        errors = np.maximum(square - gains, _LEAST_ERROR)
        lengths = 0.5 * self._rows * np.log(errors) + self._sizes * math.log(self._symbols)
        room = self._width - int(self._sizes[places].sum()) - 3 * len(places)
        lengths[(self._sizes > room) | ~sound] = np.inf
        best = np.argpartition(lengths, min(_TRIED, len(lengths) - 1))[:_TRIED]
        best = best[np.lexsort((best, lengths[best]))]
        best = best[np.isfinite(lengths[best])]
        if not len(best):
            return math.inf, places
        scores = self._scores(places, best)
        return float(scores.min()), [*places, int(best[scores.argmin()])]
