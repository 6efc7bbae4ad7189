"""A colony: the formulas of all islands of a search, which live beside the data.

The simple form of a generation:

    for each formula of the colony:
        breed a child of two formulas of its island that has not been tried
    evaluate all children on the screening rows
    for each child:
        score it by its best a + b f; it takes the formula's place if it is better

So an island keeps its best, and good formulas spread in it slowly (a cellular genetic algorithm;
Alba and Dorronsoro 2008, "Cellular Genetic Algorithms"). Islands exchange few formulas, and each
weighs size against loss in its own measure, so that together they hold formulas of all sizes.

`CpuColony` and `CudaColony` implement `Colony`. What happens to one formula is in `genome`, once
for both. Numbers are drawn by seed, generation and formula, and children are compared with the
generation before alone, so that a seed gives the same search whatever threads and blocks there are.

Pairs of short formulas are searched beside the colony for some `views` of the target: y = m g(t),
with an outer function g and a product m of powers of variables. A search for t has fewer variables
or a smaller formula than one for y. Rows are weighted by (m g'(t))^2, which makes the error of t
that of y to first order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Population
from warpfit.ops import CONSTANT, OPERATORS
from warpfit_server.engine.interface import Steps
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

#: Least and greatest weight of a token, relative to the loss, by which islands compare formulas.
_PARSIMONY: Final = (5e-4, 1e-2)
#: Part of the target's variance below which losses differ by rounding alone, by bytes of a number.
LOSS_FLOOR: Final = {4: 1e-10, 8: 1e-20}
#: Spread of the values relative to their mean below which it is rounding, by bytes of a number.
LEAST_SPREAD: Final = {4: 1e-4, 8: 1e-9}
#: Change of a column by which directions are looked at, as part of its range, and part of a value
#: below which its changes are rounding, by bytes of a number.
STEP: Final = {4: 1e-3, 8: 1e-6}
ROUNDING: Final = {4: 1e-6, 8: 1e-12}
#: Values between which their spread is a number in float32.
SPREADS: Final = (1e-15, 1e15)
#: Screening rows from which on the first ones stand for all, what part of them these are, and the
#: least part of the target's variance that they have to have.
_MANY_ROWS: Final = 256
_FIRST_PART: Final = 4
_FIRST_SPREAD: Final = 0.25
#: Times as large as that of the formula in its place the score of a child on the first rows may be,
#: so that it is evaluated on the others. What is equal there is most often equal everywhere.
CLOSE: Final = 1.0 - 1e-6
#: Most constants of a formula that a quick fit changes; iterations, and steps that are tried in
#: each; the first damping; and the step of a difference, relative to the size of a constant and at
#: least of this one.
MOST_CONSTANTS: Final = 12
FIT_ITERATIONS: Final = 6
FIT_TRIALS: Final = 3
FIRST_DAMPING: Final = 1e-2
DIFFERENCE: Final = 1e-3
LEAST_SIZE: Final = 0.1
#: Registers of the estimate of how many structures have been tried; a power of 2.
REGISTERS: Final = 1 << 12
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


class Genomes(NamedTuple):
    """Formulas of a colony as rows of fixed width, without parameters."""

    codes: NDArray[np.uint8]
    """[formulas, width]; what is behind a formula's length means nothing."""
    values: NDArray[np.floating]
    """Of a colony float32; of formulas that have been fitted float64."""
    lengths: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, index: Any) -> Genomes:
        """Return some of the formulas; a slice shares their memory."""
        return Genomes(self.codes[index], self.values[index], self.lengths[index])

    def widened(self, width: int) -> Genomes:
        """Return the same formulas in rows of at least their width."""
        room = ((0, 0), (0, width - self.codes.shape[1]))
        return Genomes(np.pad(self.codes, room), np.pad(self.values, room), self.lengths)

    def population(self) -> Population:
        """Return the formulas one after the other."""
        inside = np.arange(self.codes.shape[1]) < self.lengths[:, None]
        lengths = self.lengths.astype(np.uint32)
        return Population(self.codes[inside], self.values[inside].astype(np.float64), lengths)

    @classmethod
    def of(cls, population: Population, width: int) -> Genomes:
        """Lay out formulas of at most ``width`` tokens, with values in float64."""
        lengths = population.lengths.astype(np.int32)
        inside = np.arange(width) < lengths[:, None]
        codes, values = np.zeros(inside.shape, np.uint8), np.zeros(inside.shape)
        codes[inside], values[inside] = population.codes, population.values
        return cls(codes, values, lengths)


class Scored(NamedTuple):
    """Formulas with their losses, relative to that of the best constant."""

    genomes: Genomes
    losses: NDArray[np.floating]
    places: NDArray[np.int64]
    """Where each is in the colony."""


@dataclass(frozen=True, slots=True, eq=False)
class Screening:
    """The rows on which new formulas are scored, as a data set that the engine has loaded."""

    dataset_id: bytes
    target: Floats
    """[rows]."""
    weights: Floats
    """[rows], positive; they add up to 1."""
    itemsize: int
    """Bytes of a value: 4 or 8."""
    fitted: int
    """Numbers around f that are fitted: 2 for slope and intercept, 1 for a slope, 0 for none."""

    @property
    def mean(self) -> float:
        """Mean of the target; that of a constant one is exact."""
        return float(self.target[0] + self.weights @ (self.target - self.target[0]))

    @property
    def spread(self) -> float:
        """Variance of the target; 0 of a constant one."""
        return float(self.weights @ np.square(self.target - self.mean))

    @property
    def first_rows(self) -> int:
        """Number of first rows that stand for all where a rough answer is enough.

        All rows do if they are few, or if the first ones miss what the target does in few rows.
        """
        rows = len(self.target)
        if rows < _MANY_ROWS:
            return rows
        first = rows // _FIRST_PART
        target, weights = self.target[:first], self.weights[:first] / self.weights[:first].sum()
        with np.errstate(over="ignore", under="ignore"):
            spread = float(weights @ np.square(target - weights @ target))
        return first if spread >= _FIRST_SPREAD * self.spread else rows


@dataclass(frozen=True, slots=True)
class ColonySettings:
    """Size and seed of a colony, and what is done when."""

    islands: int
    island: int
    """Formulas of an island."""
    seed: int
    iterations: int
    """Iterations of a fit, at most."""
    tries: int
    """Times that a structure with constants is tried, as far as it is remembered."""
    fit_every: int
    """Generations between two rounds of fits of promising children."""
    fits: int
    """Formulas of each island that are fitted then, at most."""
    round_every: int
    """Generations between two rounds of all else: pairs, islands that begin anew, the archive."""
    pairs_per_formula: int
    """Pairs that are weighed for each formula that is scored, so that pairs have a share of the
    time."""
    pair_step: int
    """Pairs that take about as long as all else of a step for pairs."""

    @property
    def formulas(self) -> int:
        """Formulas of the whole colony."""
        return self.islands * self.island

    def parsimony(self) -> NDArray[np.float32]:
        """Return the weight of a token in each island, from the least to the greatest."""
        return np.geomspace(*_PARSIMONY, max(2, self.islands))[: self.islands].astype(np.float32)


class Colony(Protocol):
    """The formulas of a search on one device."""

    width: int
    formulas: int
    """New formulas that have been scored, fitted ones included."""
    fits: int
    """Formulas that the colony has fitted."""
    island_scores: NDArray[np.float32]
    """Best score of each island when `improve` was called last, [islands]; less is better."""

    def populate(self) -> Steps[None]:
        """Fill all islands with random formulas."""

    def advance(self) -> Steps[None]:
        """Run a generation."""

    def insert(self, genomes: Genomes, places: NDArray[np.int64]) -> Steps[NDArray[np.float32]]:
        """Score formulas, which take the given places where they are better; return losses.

        Loss and score of a formula with a value that is not finite are infinite.
        """

    def restart(self, island: int) -> Steps[None]:
        """Fill an island with random formulas; the best of each size is kept apart."""

    def improve(self, count: int) -> Steps[None]:
        """Fit the constants of children that came close to their places, and let them compete.

        The fits are quick ones, on the first rows. The children are those of the last generation
        or of all since the last call.

        Args:
            count: of formulas of an island, at most.
        """

    def best(self) -> Steps[Scored]:
        """Return the best formula of each size since the search began, simplest first."""

    def distinct(self) -> int:
        """Estimate how many different structures have been tried."""

    def close(self) -> None:
        """Free the memory."""


def moved(matrix: NDArray[Any], column: int, itemsize: int) -> NDArray[Any]:
    """Return a table of rows, [columns, rows], in which a column is somewhat greater."""
    found = matrix.copy()
    found[column] += STEP[itemsize] * np.ptp(matrix[column])
    return found


def estimate_distinct(registers: NDArray[Any]) -> int:
    """Estimate how many different hashes were noted, by HyperLogLog.

    Flajolet, Fusy, Gandouet and Meunier 2007, "HyperLogLog: the analysis of a near-optimal
    cardinality estimation algorithm". The standard error is 1.6% with `REGISTERS` registers, each
    of which holds the most leading zeros + 1 of its hashes' other bits, 0 without any.
    """
    count = len(registers)
    total = float(np.exp2(-registers.astype(float)).sum())
    raw = 0.7213 / (1 + 1.079 / count) * count**2 / total
    empty = int((registers == 0).sum())
    if raw <= 2.5 * count and empty:
        return round(count * math.log(count / empty))
    return round(raw)


# -------------------------------------------------------------------------------- views of a target


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
