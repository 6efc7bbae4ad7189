"""Genetic programming over structure, with all constants fitted by the server.

Each generation is two calls: `evaluate` scores every new formula f by the best a + b f, which has
a closed form (Keijzer 2003, "Improving symbolic regression with interval arithmetic and linear
scaling"), and `optimize` fits the constants of those that have some, starting from the values that
they inherit (Kommenda et al. 2020, "Parameter identification for symbolic regression using
nonlinear least squares"). Survivors are chosen by error and length together, in layers that do not
dominate each other (Deb et al. 2002, NSGA-II, without the crowding distance: lengths are few), and
of formulas with the same error only the shortest survives, which keeps the population diverse.
Beside the children, each generation tries everything that differs in one place from a formula that
nobody dominates. A population that makes no progress is given up for a new one; its best formulas
are kept for the end.
"""

from __future__ import annotations

import bisect
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client
from warpfit.fitting import Reason
from warpfit.sklearn.genome import (
    VARIABLES,
    Breeder,
    Genome,
    constants,
    structure,
    to_program,
    with_constants,
)

#: Part of a generation that is drawn anew.
_IMMIGRANTS: Final = 0.1
#: Most entrants of a tournament; small ones keep the population diverse.
_TOURNAMENT: Final = 6
#: A population is given up after so many generations without an error lower by a tenth.
_PATIENCE: Final = 30
_PROGRESS: Final = 0.9
#: How often a structure with constants may be fitted: each time from where its parents were.
_ATTEMPTS: Final = 3
#: Errors are compared to this many significant digits: equal formulas differ in the last bits.
_DIGITS: Final = 9
#: Iterations of the last fit, of the formulas that are returned.
_LAST_ITERATIONS: Final = 200


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula a + b f with its mean squared error on the training data."""

    genome: Genome
    loss: float
    slope: float
    intercept: float
    settled: bool = True
    """Whether further iterations would not change its numbers."""

    @property
    def size(self) -> int:
        """Number of genes of f."""
        return len(self.genome)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a genetic search."""

    population: int
    generations: int
    fit_iterations: int
    stop_loss: float
    """The search ends when a formula is at least this good."""
    max_seconds: float | None
    report: Callable[[int, Formula], None]
    """Called after each generation with its number and the best formula."""


@dataclass(slots=True)
class Search:
    """One search: the population, and how often each structure has been tried."""

    client: Client
    data: DatasetHandle
    breeder: Breeder
    settings: Settings
    tried: Counter[Genome] = field(default_factory=Counter)
    explored: set[Genome] = field(default_factory=set)
    """Structures whose neighbours have been tried."""
    population: list[Formula] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    """Layer of each member of the population, 0 for those that nobody dominates."""
    archive: list[Formula] = field(default_factory=list)
    """The best of the populations that have been given up."""
    milestone: float = math.inf
    """Error from which progress is counted."""
    patience: int = _PATIENCE
    """Generations that may still pass without progress."""
    generation: int = 0

    def run(self) -> list[Formula]:
        """Evolve, and return the formulas that nobody dominates, shortest first, fitted well."""
        started = time.monotonic()
        limit = math.inf if self.settings.max_seconds is None else self.settings.max_seconds
        self._begin()
        while self.generation < self.settings.generations:
            best = self._best()
            if best.loss <= self.settings.stop_loss or time.monotonic() - started >= limit:
                break
            if best.loss < _PROGRESS * self.milestone:
                self.milestone, self.patience = best.loss, _PATIENCE
            elif self.patience == 0:
                self._begin()
            self.patience -= 1
            self.generation += 1
            self._admit(self._children())
            self.settings.report(self.generation, self._best())
        refitted = self._fit(_undominated([*self.archive, *self.population]), _LAST_ITERATIONS)
        return sorted(_undominated(refitted), key=_by_size)

    def _begin(self) -> None:
        """Draw a new population, and archive the best of the old one."""
        self.archive = _undominated([*self.archive, *self.population])
        self.tried.clear()
        self.explored.clear()
        self.population, self.layers = [], []
        self.milestone, self.patience = math.inf, _PATIENCE
        # The bare variable is finite on finite data, so the population is never empty.
        drawn = [self.breeder.first() for _ in range(self.settings.population)]
        self._admit([(VARIABLES,), *drawn])

    def _best(self) -> Formula:
        return min(self.population, key=lambda formula: formula.loss)

    def _admit(self, genomes: Sequence[Genome]) -> None:
        """Score what is new, and let the best of old and new survive."""
        fresh: dict[Genome, Genome] = {}
        for genome in genomes:
            shape = structure(genome)
            attempts = _ATTEMPTS if any(isinstance(gene, float) for gene in genome) else 1
            if self.tried[shape] < attempts:
                fresh[shape] = genome
        self.tried.update(fresh.keys())
        pool = _distinct([*self._refined(), *self._score(list(fresh.values()))])
        layers = pareto_layers(pool)
        order = sorted(range(len(pool)), key=lambda i: (layers[i], pool[i].loss, pool[i].size))
        chosen = order[: self.settings.population]
        self.population = [pool[index] for index in chosen]
        self.layers = [layers[index] for index in chosen]

    def _refined(self) -> list[Formula]:
        """Continue the fits of the best formulas that have not converged."""
        members = zip(self.population, self.layers, strict=True)
        waiting = {f for f, layer in members if layer == 0 and not f.settled}
        others = [f for f in self.population if f not in waiting]
        return others + self._fit(sorted(waiting, key=_by_size), self.settings.fit_iterations)

    def _score(self, genomes: list[Genome]) -> list[Formula]:
        """Fit slope and intercept of every formula, then all numbers of those with constants."""
        if not genomes:
            return []
        losses, slopes, intercepts = self.client.evaluate(
            self.data,
            [to_program(genome) for genome in genomes],
            [constants(genome) for genome in genomes],
            loss="mse",
            linear_scaling=True,
        )
        numbers = zip(genomes, losses.tolist(), slopes.tolist(), intercepts.tolist(), strict=True)
        scored = [Formula(*number) for number in numbers]
        return self._fit(scored, self.settings.fit_iterations)

    def _fit(self, formulas: list[Formula], iterations: int) -> list[Formula]:
        """Fit the constants of the formulas that have some."""
        finite = [f for f in formulas if math.isfinite(f.loss)]
        exact = [f for f in finite if not constants(f.genome)]
        open_ended = [f for f in finite if constants(f.genome)]
        if not open_ended:
            return finite
        fit = self.client.optimize(
            self.data,
            [to_program(f.genome, scaled=True) for f in open_ended],
            [[*constants(f.genome), f.slope, f.intercept] for f in open_ended],
            loss="mse",
            max_iterations=iterations,
        )
        return exact + [
            Formula(with_constants(f.genome, values[:-2]), loss, values[-2], values[-1], settled)
            for f, values, loss, settled in zip(
                open_ended,
                [values.tolist() for values in fit.parameters],
                fit.loss.tolist(),
                [reason != Reason.ITERATIONS for reason in fit.reason.tolist()],
                strict=True,
            )
            if math.isfinite(loss)
        ]

    def _children(self) -> list[Genome]:
        size = self.settings.population
        immigrants = [self.breeder.first() for _ in range(int(_IMMIGRANTS * size))]
        bred = [self.breeder.child(self._parent(), self._parent()) for _ in range(size)]
        return [*immigrants, *self._neighbours(), *bred]

    def _neighbours(self) -> list[Genome]:
        """Return all neighbours of the shortest undominated formula that was not explored."""
        for formula in sorted(_undominated(self.population), key=_by_size):
            shape = structure(formula.genome)
            if shape not in self.explored:
                self.explored.add(shape)
                return self.breeder.neighbours(formula.genome)
        return []

    def _parent(self) -> Genome:
        """Return the winner of a tournament by layer, then by error."""
        rng: random.Random = self.breeder.rng
        size = rng.randint(1, _TOURNAMENT)
        entrants = [rng.randrange(len(self.population)) for _ in range(size)]
        # The population is sorted, so the winner is the first of them.
        return self.population[min(entrants)].genome


def pareto_layers(formulas: Sequence[Formula]) -> list[int]:
    """Return the layer of each formula by error and size; nothing dominates those of layer 0."""
    order = sorted(range(len(formulas)), key=lambda i: (formulas[i].size, formulas[i].loss))
    layers = [0] * len(formulas)
    # Among formulas at most as long, the best error of each layer; it grows with the layer.
    best: list[float] = []
    for index in order:
        loss = formulas[index].loss
        layer = bisect.bisect_right(best, loss)
        layers[index] = layer
        if layer == len(best):
            best.append(loss)
        else:
            best[layer] = loss
    return layers


def _by_size(formula: Formula) -> tuple[int, float]:
    return formula.size, formula.loss


def _undominated(formulas: Sequence[Formula]) -> list[Formula]:
    layers = pareto_layers(formulas)
    return [formula for formula, layer in zip(formulas, layers, strict=True) if layer == 0]


def _distinct(formulas: Sequence[Formula]) -> list[Formula]:
    """Return the formulas without longer ones that have the same error."""
    kept: dict[float, Formula] = {}
    for formula in formulas:
        error = float(f"{formula.loss:.{_DIGITS}g}")
        if error not in kept or formula.size < kept[error].size:
            kept[error] = formula
    return list(kept.values())
