"""Genetic programming over structure, with all constants fitted by the server.

Each generation is two calls: `evaluate` scores every new formula f by the best a + b f, which has
a closed form (Keijzer 2003, "Improving symbolic regression with interval arithmetic and linear
scaling"), and `optimize` fits the constants of the most promising, starting from the values that
they inherit (Kommenda et al. 2020, "Parameter identification for symbolic regression using
nonlinear least squares"). Survivors are chosen by loss and complexity together, in layers that do
not dominate each other (Deb et al. 2002, NSGA-II, without the crowding distance: complexities are
few), and of formulas with the same loss only the simplest survives, which keeps the population
diverse. A population begins with the best sums and pairs of a library of short formulas, and its
best are combined with the library from time to time (`pairs`). One that makes no progress is given
up for a new one; its best formulas are kept for the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client
from warpfit.errors import DeadlineExceededError, UnavailableError
from warpfit.fitting import Reason
from warpfit.ir import Program
from warpfit.losses import Loss, LossFunction, as_function
from warpfit.sklearn.forms import Form, seconds_until
from warpfit.sklearn.genomes import (
    Breeder,
    Floats,
    FormulaTable,
    Genomes,
    Indices,
    Mask,
    hashes,
    joined,
    simplified,
)
from warpfit.sklearn.pairs import FirstFormulas, PairSearch

#: Errors are compared to this many binary digits: equal formulas differ in the last bits.
_DIGITS: Final = 30


@dataclass(frozen=True, slots=True, eq=False)
class Pool(FormulaTable):
    """Formulas a + b f with their losses."""

    losses: Floats
    slopes: Floats
    intercepts: Floats
    complexities: Indices
    settled: Mask
    """Whether further iterations would not change a formula's numbers."""

    @property
    def layers(self) -> Indices:
        """Layer of each formula by complexity and loss; nothing dominates those of layer 0."""
        return pareto_layers(self.complexities, self.losses)

    def front(self) -> Pool:
        """Return the formulas that nothing dominates, simplest first."""
        undominated = self[self.layers == 0]
        return undominated[np.argsort(undominated.complexities, kind="stable")]

    def distinct(self) -> Pool:
        """Leave out non-finite losses, and formulas as good as a simpler one."""
        mantissas, exponents = np.frexp(self.losses)
        keys = np.ldexp(np.round(np.ldexp(mantissas, _DIGITS)), exponents - _DIGITS)
        order = np.lexsort((self.complexities, keys))
        ordered = keys[order]
        first = np.concatenate([[True], ordered[1:] != ordered[:-1]]) & np.isfinite(ordered)
        return self[order[first]]

    def best(self, count: int) -> Pool:
        """Return the survivors by layer, then by loss, in this order."""
        return self[np.lexsort((self.complexities, self.losses, self.layers))[:count]]


def empty_pool(genomes: Genomes) -> Pool:
    """Return a pool of no formulas; ``genomes`` has none."""
    numbers = np.empty(0)
    return Pool(genomes, numbers, numbers, numbers, np.empty(0, np.int64), np.empty(0, np.bool_))


def pareto_layers(complexities: Indices, losses: Floats) -> Indices:
    """Return the layer of each formula (Deb et al. 2002, without the crowding distance)."""
    layers = np.zeros(len(losses), np.int64)
    # Among formulas at most as complex, the best loss of each layer; it grows with the layer.
    best = np.full(len(losses), np.nan)
    order = np.lexsort((losses, complexities))
    for group in np.split(order, np.flatnonzero(np.diff(complexities[order])) + 1):
        # Each formula is in a layer behind that of the one before it, and behind what is better.
        places = np.arange(len(group))
        behind = np.searchsorted(best, losses[group], side="right")
        layers[group] = places + np.maximum.accumulate(behind - places)
        best[layers[group]] = losses[group]
    return layers


#: Offspring of a generation for each member of the population, and part that is drawn anew.
_OFFSPRING: Final = 2.0
_IMMIGRANTS: Final = 0.1
#: Fits of a generation for each member of the population.
_FITS: Final = 0.2
#: Most entrants of a tournament; small ones keep the population diverse.
_TOURNAMENT: Final = 6
#: A population is given up after so many generations without a loss lower by a tenth.
_PATIENCE: Final = 40
_PROGRESS: Final = 0.9
#: Populations that evolve side by side.
_ISLANDS: Final = 2
#: Fewest and most generations of the first island between steps of the search for pairs: twice as
#: many after each step without progress. And members of the population that take part.
_PAIR_EVERY: Final = (2, 8)
_PAIRED: Final = 50
#: Most part of the time that goes to pairs before the first generation.
_FIRST_PAIRS: Final = 0.25
#: Formulas of the library that are scored before the others.
_FIRST: Final = 500
#: Formulas of a start whose constants are fitted before they are compared with others.
_FITTED_FIRST: Final = 50
#: How often a structure with constants may be tried, about: each time from other numbers.
_ATTEMPTS: Final = 4
#: Slots of the filter of structures that have been tried, a power of 2.
_FILTER: Final = 1 << 21
#: Formulas that are returned beside those that nothing dominates.
_PROMISING: Final = 40


#: Reasons of the end of a search that leave no time for anything else.
INTERRUPTIONS: Final = ("interrupt", "terminate", "server")


class Terminated(KeyboardInterrupt):
    """SIGTERM came while a search ran."""


def reason_of(error: BaseException) -> str:
    """Return the word for what has interrupted a search."""
    if isinstance(error, Terminated):
        return "terminate"
    return "interrupt" if isinstance(error, KeyboardInterrupt) else "server"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a genetic search."""

    population: int
    generations: int
    fit_iterations: int
    stop_loss: float
    """The search ends when a formula is at least this good."""
    ends: float
    """Time of `time.monotonic` at which the search ends."""
    early_stopping: int | None
    """Generations without progress after which the search ends."""
    rows: float
    """Amount of data in the sample."""
    loss: Loss | LossFunction
    middle: Program
    """Median of the target."""
    floor: float
    """Least loss on the sample that any prediction could have; losses are counted from it."""
    complexity: Callable[[Genomes], Indices]
    admissible: Callable[[Genomes], Mask]
    penalty: Callable[[Genomes, Floats, DatasetHandle], Floats]
    """Returns numbers to add to the losses of formulas; takes them, their slopes and the rows."""
    report: Callable[[Search], bool]
    """Called after each generation; True ends the search."""
    phase: Callable[[str], None]
    """Called with what the search does next, before the first generation."""


@dataclass(slots=True)
class Island:
    """A population, and what it has tried."""

    population: Pool
    """Survivors, best first."""
    tried: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(_FILTER, np.uint64))
    """Filter of the structures that have been tried: each in the slot of its hash."""
    milestone: float = math.inf
    """Loss from which progress is counted."""
    patience: int = _PATIENCE

    @property
    def best(self) -> float:
        """Least loss."""
        return float(self.population.losses.min(initial=math.inf))

    def stagnates(self) -> bool:
        """Count a generation, and return whether there was no progress for too long."""
        self.patience -= 1
        if self.best < _PROGRESS * self.milestone:
            self.milestone, self.patience = self.best, _PATIENCE
        return self.patience <= 0


@dataclass(slots=True)
class Search:
    """One search: its islands, and the best of those that have been given up."""

    client: Client
    sample: DatasetHandle
    """Rows on which formulas are compared during the search."""
    form: Form
    breeder: Breeder
    pairs: PairSearch | FirstFormulas
    settings: Settings
    start: Genomes
    """Formulas that the first island begins with, beside those that are drawn."""
    reweigh: Callable[[Program], DatasetHandle] | None = None
    """Uploads the sample with weights for which least squares propose formulas for another loss;
    called with the best formula. None for squares, which need no others."""
    islands: list[Island] = field(default_factory=list)
    """The first one takes in the best pairs; others would be overrun by them, too."""
    archive: list[Pool] = field(default_factory=list)
    generation: int = 0
    tried: int = 0
    """Formulas that were scored."""
    reason: str = ""
    """Why the search ended: `generations`, `tolerance`, `max_seconds`, `early_stopping`,
    `callback`, `interrupt`, `terminate` or `server`."""
    sums: dict[tuple[str, int], tuple[float, Pool]] = field(default_factory=dict)
    """The best sum of each kind and number of terms, with its score; see `pairs.Sum`."""
    _pause: int = _PAIR_EVERY[0]
    """Generations of the first island from one step of the search for pairs to the next, and those
    that are left until then."""
    _waits: int = _PAIR_EVERY[0]
    _milestone: float = math.inf
    """Least loss of which progress was counted, and its generation."""
    _progressed: int = 0
    proposals: DatasetHandle | None = None
    """The sample with the weights of the last call of ``reweigh``, and the best loss then."""
    _reweighed: float = math.inf

    def run(self) -> None:
        """Evolve until there is a reason to end; what has been found until then stays.

        Raises:
            KeyboardInterrupt: if nothing has been found before an interrupt.
            UnavailableError: if nothing has been found before the server is lost.

        """
        try:
            self._evolve()
        except DeadlineExceededError:
            self.reason = "max_seconds"
        except (KeyboardInterrupt, UnavailableError) as error:
            if not self.islands or not len(self.everything()):
                raise
            self.reason = reason_of(error)

    def _evolve(self) -> None:
        self._reweigh()
        self._settle(0)
        if len(self.start):
            self._admit(self.islands[0], simplified(self.start), fits=_FITTED_FIRST)
        self._sum()
        ends, longest = self.settings.ends, 0.0
        if ends < math.inf:
            ends -= (1.0 - _FIRST_PAIRS) * (ends - time.monotonic())
        for number in range(len(self.pairs.views)):
            # A step that would not end in time is not begun.
            if self._over() or time.monotonic() + longest > ends:
                break
            self.settings.phase(f"pairs, view {number + 1} of {len(self.pairs.views)}")
            begun = time.monotonic()
            self._pair()
            longest = max(longest, time.monotonic() - begun)
        self._sum()
        while not self._over():
            self._advance()
            if self.settings.report(self):
                self.reason = "callback"

    def front(self) -> Pool:
        """Return all formulas that nothing dominates, simplest first."""
        return self.everything().front()

    def promising(self) -> Pool:
        """Return what nothing dominates, what is hardly worse, and sums; the most likely first.

        Of many formulas of one complexity noise makes any the best.
        """
        pool, rows = self.everything().distinct(), max(self.settings.rows, 2.0)
        sizes = pool.complexities + pool.genomes.constants
        with np.errstate(divide="ignore"):
            information = rows * np.log(pool.losses) + sizes * np.log(rows)
        order = information.argsort()
        chosen = pool[order[(pool.layers[order] == 0) | (np.arange(len(order)) < _PROMISING)]]
        return Pool.merged([chosen, *(pool for _, pool in self.sums.values())])

    def everything(self) -> Pool:
        """Return the formulas of all islands, and of those that have been given up."""
        pools = [*self.archive, *(island.population for island in self.islands)]
        return Pool.merged(pools) if pools else empty_pool(Genomes.of([]))

    def _over(self) -> bool:
        best = min(island.best for island in self.islands)
        if best < _PROGRESS * self._milestone:
            self._milestone, self._progressed = best, self.generation
        idle = self.generation - self._progressed
        reasons = {
            "tolerance": best <= self.settings.stop_loss,
            "generations": self.generation >= self.settings.generations,
            "max_seconds": time.monotonic() >= self.settings.ends,
            "early_stopping": idle >= (self.settings.early_stopping or math.inf),
        }
        self.reason = self.reason or next((name for name in reasons if reasons[name]), "")
        return bool(self.reason)

    def _advance(self) -> None:
        """Breed one generation of one island; each has its turn."""
        place = self.generation % _ISLANDS
        self.generation += 1
        self._reweigh()
        if place == len(self.islands):
            self._settle(place)
        island = self.islands[place]
        if island.stagnates():
            everything = Pool.merged([*self.archive, island.population]).distinct()
            self.archive = [everything.best(self.settings.population)]
            island = self._settle(place)
        immigrants = self.breeder.first(int(_IMMIGRANTS * self.settings.population))
        born = [immigrants]
        if size := len(island.population):
            count = int(_OFFSPRING * self.settings.population)
            sides = (self._parents(size, count) for _ in range(2))
            born.insert(0, self.breeder.offspring(island.population.genomes, *sides))
        self._admit(island, joined(born))
        self._waits -= place == 0
        if self._waits <= 0:
            best = self.islands[0].best
            self._pair()
            if self.islands[0].best < _PROGRESS * best:
                self._pause = _PAIR_EVERY[0]
            else:
                self._pause = min(2 * self._pause, _PAIR_EVERY[1])
                self._sum()
            self._waits = self._pause

    def _reweigh(self) -> None:
        """Weigh the rows of the proposals by the best formula if it is new, at first the median."""
        if self.reweigh is None:
            return
        pool = self.everything()
        if not len(pool):
            self.proposals = self.reweigh(self.settings.middle)
        elif pool.losses.min() < _PROGRESS * self._reweighed:
            best = int(np.argmin(pool.losses))
            self._reweighed = float(pool.losses[best])
            ends = (Program.constant(float(part[best])) for part in (pool.slopes, pool.intercepts))
            slope, intercept = ends
            scaled = Program.apply("mul", pool.genomes.program(best), slope)
            self.proposals = self.reweigh(Program.apply("add", scaled, intercept))

    def _pair(self) -> None:
        """Let the best pairs into the first island, with their constants fitted."""
        first = self.islands[0]
        if not len(first.population):
            return
        found = self.pairs.step(first.population.genomes[:_PAIRED])
        self._admit(first, simplified(found), fits=len(found))

    def _sum(self) -> None:
        """Let the best sums of the library's terms, and those of the front, into the first island.

        They are kept, too: by their own length, longer formulas of noise would outdo them.
        """
        first = self.islands[0]
        fresh = []
        for found in self.pairs.sums(first.population.front().genomes, self.settings.ends):
            key = found.kind, found.terms
            known, _ = self.sums.get(key, (math.inf, None))
            if found.score < known and self.settings.admissible(found.genomes)[0]:
                self.sums[key] = found.score, self._scored(found.genomes)
                fresh.append(found.genomes)
        if fresh:
            self._admit(first, joined(fresh), fits=len(fresh))

    def _settle(self, place: int) -> Island:
        """Put an island with a new population into a place, which is replaced or behind the end."""
        if not self.generation:
            self.settings.phase("the first population")
        # The shortest come first, so that something is found where there is time for nothing else.
        library = self.pairs.library
        island = Island(self._scored(library[:_FIRST]).distinct())
        self.islands[place : place + 1] = [island]
        rest = self._scored(library[_FIRST:])
        island.population = Pool.merged([island.population, rest]).distinct()
        self._admit(island, self.breeder.first(2 * self.settings.population))
        return island

    def _parents(self, size: int, count: int) -> Indices:
        """Return the winners of tournaments of different sizes; the population is sorted."""
        rng = self.breeder.rng
        entrants = rng.integers(size, size=(_TOURNAMENT, count))
        absent = np.arange(_TOURNAMENT)[:, None] >= rng.integers(1, _TOURNAMENT + 1, size=count)
        return np.asarray(np.where(absent, size, entrants).min(axis=0))

    def _admit(self, island: Island, genomes: Genomes, fits: int = 0) -> None:
        """Score what is new, fit what promises most, and let the best of old and new survive.

        With ``fits`` so many of the new ones are fitted before they are compared with the old.
        """
        fresh = self._scored(self._fresh(island, genomes))
        chosen = np.flatnonzero(~fresh.settled & np.isfinite(fresh.losses))[:fits]
        if len(chosen):
            fitted = self._fitted(fresh[chosen], self.sample, self.settings.fit_iterations)
            fresh = Pool.merged([fresh[np.setdiff1d(np.arange(len(fresh)), chosen)], fitted])
        pool = Pool.merged([island.population, fresh]).distinct()
        waiting = ~pool.settled
        ranks = np.lexsort((pool.losses, pool.layers))
        squares = as_function(self.settings.loss).is_squares
        # Least squares say little about other losses before the fit.
        most = math.ceil((_FITS if squares else 1.0) * self.settings.population)
        chosen = ranks[waiting[ranks]][:most]
        if len(chosen):
            fitted = self._fitted(pool[chosen], self.sample, self.settings.fit_iterations)
            pool = Pool.merged(
                [pool[np.setdiff1d(np.arange(len(pool)), chosen)], fitted]
            ).distinct()
        island.population = pool.best(self.settings.population)

    def _fresh(self, island: Island, genomes: Genomes) -> Genomes:
        """Leave out what is not allowed, and structures that have been tried already."""
        genomes = genomes[self.settings.admissible(genomes)]
        keys = hashes(genomes)
        tries = self.breeder.rng.integers(_ATTEMPTS, size=len(keys)).astype(np.uint64)
        keys += np.where(genomes.constants > 0, tries, np.uint64(0))
        keys, first = np.unique(keys, return_index=True)
        slots = (keys % np.uint64(_FILTER)).astype(np.int64)
        new = island.tried[slots] != keys
        island.tried[slots] = keys
        return genomes[first[new]]

    def _scored(self, genomes: Genomes) -> Pool:
        """Fit slope and intercept of every formula, or what else its form has."""
        count = len(genomes)
        if not count:
            return empty_pool(genomes)
        self.tried += count
        made, losses, slopes, intercepts, settled = self.form.scored(self, genomes)
        complexities = self.settings.complexity(genomes)
        return self._penalised(
            Pool(made, losses, slopes, intercepts, complexities, settled), self.sample
        )

    def timeout(self) -> float | None:
        """Return the time that a call may take, None for any.

        Raises:
            DeadlineExceededError: if the time of the search is over.

        """
        return seconds_until(self.settings.ends)

    def _penalised(self, pool: Pool, data: DatasetHandle) -> Pool:
        added = self.settings.penalty(pool.genomes, pool.slopes, data)
        above = np.maximum(pool.losses - self.settings.floor, 0.0)
        return replace(pool, losses=above + added)

    def _fitted(self, pool: Pool, data: DatasetHandle, iterations: int) -> Pool:
        """Fit all numbers of the formulas."""
        left = self.timeout()
        fit = self.client.optimize(
            data,
            self.form.fit_batch(pool.genomes, pool.slopes, pool.intercepts),
            loss=self.settings.loss,
            max_iterations=iterations,
            timeout=left,
            partial=left is not None,
        )
        genomes, slopes, intercepts = self.form.fitted(pool.genomes, fit.parameters)
        fitted = Pool(
            genomes,
            fit.loss,
            slopes,
            intercepts,
            pool.complexities,
            ~np.isin(fit.reason, (Reason.ITERATIONS, Reason.DEADLINE)),
        )
        return self._penalised(fitted, data)
