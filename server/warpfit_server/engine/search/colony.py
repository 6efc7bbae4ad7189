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
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Population
from warpfit_server.engine.interface import Steps

Floats = NDArray[np.float64]
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
