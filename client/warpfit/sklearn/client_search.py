"""The client's own search, for what the engine's search does not do; see `engine_search`."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.expressions import reference
from warpfit.ir import Program
from warpfit.losses import as_function
from warpfit.ops import OPERATORS, VARIABLE
from warpfit.sklearn.constraints import operator_code
from warpfit.sklearn.forms import seconds_until
from warpfit.sklearn.genomes import Breeder, Floats, Genomes
from warpfit.sklearn.groups import GroupedClient
from warpfit.sklearn.likelihood import proposal_weights
from warpfit.sklearn.pairs import (
    FirstFormulas,
    PairSearch,
    arguments,
    library,
    relevant,
    views,
)
from warpfit.sklearn.search import Pool, Search, Settings
from warpfit.sklearn.search_task import NO_INTERCEPT, Candidates, SearchTask
from warpfit.sklearn.templates import TemplateBreeder, TemplateForm

#: Formulas of a population, where a user names no number.
_POPULATION: Final = 500
#: Most rows on which pairs of formulas are compared.
_PAIR_ROWS: Final = 512
#: Most variables of the library, those that say most about the target.
_MOST_VARIABLES: Final = 30
#: Formulas of the library for each member of the population.
_LIBRARY: Final = 12
#: The same of combinations of short formulas in a template.
_TEMPLATES: Final = 4
#: The same of arguments of functions for which many factors are tried.
_ARGUMENTS: Final = 0.4


@dataclass(slots=True)
class ClientFound:
    """What the client's own search has found; see `warpfit.sklearn.search_task.Found`."""

    search: Search
    task: SearchTask

    @property
    def generation(self) -> int:
        """Generations until now."""
        return self.search.generation

    @property
    def tried(self) -> int:
        """Formulas that were scored."""
        return self.search.tried

    @property
    def distinct(self) -> int:
        """Different structures among them, at most."""
        return self.search.tried

    @property
    def reason(self) -> str:
        """Why the search has ended, as `SymbolicRegressor.reason_`."""
        return self.search.reason

    def front(self) -> Candidates:
        """Return the formulas that nothing dominates, simplest first."""
        return self._written(self.search.front())

    def promising(self) -> Candidates:
        """Return the formulas that are worth a fit to all rows, the most likely first."""
        return self._written(self.search.promising())

    def formulas(self) -> Genomes:
        """Return all formulas with their constants, from which a search can go on, best first."""
        everything = self.search.everything().distinct()
        return everything.best(len(everything)).genomes

    def _written(self, pool: Pool) -> Candidates:
        spread = float(np.std(self.task.training.target))
        programs = [self._whole(pool, row, spread) for row in range(len(pool))]
        return Candidates(programs, pool.losses)

    def _whole(self, pool: Pool, row: int, spread: float) -> Program:
        """Build a + b f, without an a whose unit does not fit; the last fit sets b right."""
        form = self.task.form
        if isinstance(form, TemplateForm):
            return form.program(pool.genomes, row)
        whole = _whole(pool, row, spread)
        if self.task.rules.fits_unit(whole):
            return whole
        return _whole(replace(pool, intercepts=np.zeros(len(pool))), row, spread)


def _whole(pool: Pool, row: int, spread: float) -> Program:
    """Build a + b f with its numbers, without an a or b that changes nothing."""
    program = pool.genomes.program(row)
    slope, intercept = float(pool.slopes[row]), float(pool.intercepts[row])
    if abs(slope - 1.0) > NO_INTERCEPT:
        program = Program.apply("mul", Program.constant(slope), program)
    if abs(intercept) > NO_INTERCEPT * spread:
        program = Program.apply("add", program, Program.constant(intercept))
    return program


def search(stack: ExitStack, task: SearchTask) -> ClientFound:
    """Search for formulas until there is a reason to end.

    Args:
        stack: keeps data sets that the search uploads.
        task: what to look for.

    Raises:
        DeadlineExceededError: if the time is over before anything has been found.
        KeyboardInterrupt: for an interrupt before that.
        UnavailableError: if the server is lost before that.

    """
    task.phase("library of short formulas")
    width = task.rules.most_searched
    codes = tuple(map(operator_code, task.operators))
    of_the_table = tuple(name for name in task.operators if name in OPERATORS)
    drawing = task.rng, codes, task.training.rows.shape[1], width
    breeder: Breeder
    pairs: PairSearch | FirstFormulas
    if isinstance(task.form, TemplateForm):
        breeder = TemplateBreeder(*drawing, task.form)
        pairs = FirstFormulas(breeder.library(of_the_table, _TEMPLATES * _population(task)))
    else:
        breeder, pairs = Breeder(*drawing), _pairs(stack, task, of_the_table, width)
    running = Search(
        task.client,
        task.compared,
        task.form,
        breeder,
        pairs,
        _settings(task),
        task.start,
        _reweighing(stack, task),
    )
    running.run()
    return ClientFound(running, task)


def _population(task: SearchTask) -> int:
    return _POPULATION if task.population is None else task.population


def _settings(task: SearchTask) -> Settings:
    form, rules = task.form, task.rules

    def penalty(genomes: Genomes, slopes: Floats, data: DatasetHandle) -> Floats:
        return task.penalty * task.violations(form.whole(genomes), slopes, data)

    return Settings(
        population=_population(task),
        generations=task.generations,
        fit_iterations=task.fit_iterations,
        stop_loss=task.stop_loss,
        ends=task.ends,
        early_stopping=task.early_stopping,
        rows=task.amount,
        loss=task.loss,
        middle=Program.constant(float(np.median(task.training.target[task.sample]))),
        floor=task.floor,
        complexity=lambda genomes: rules.measure(genomes) - form.overhead,
        admissible=rules.admissible,
        penalty=penalty,
        report=lambda running: task.report(ClientFound(running, task)),
        phase=task.phase,
    )


def _reweighing(stack: ExitStack, task: SearchTask) -> Callable[[Program], DatasetHandle] | None:
    """Return a function that uploads the sample again, weighted for least squares around a formula.

    It is None where that is not needed.
    """
    is_plain = task.training.groups is None and not isinstance(task.form, TemplateForm)
    if as_function(task.loss).is_squares or not is_plain:
        return None

    def reweigh(best: Program) -> DatasetHandle:
        X, y, weights = (part[task.sample] for part in task.training[:3])
        predictions = reference.evaluate_program(best, X.T)
        fresh = proposal_weights(as_function(task.loss), predictions, y, weights)
        return stack.enter_context(task.client.upload(X, y, fresh, dtype="float64"))

    return reweigh


def _pairs(
    stack: ExitStack, task: SearchTask, operators: tuple[str, ...], width: int
) -> PairSearch | FirstFormulas:
    groups, client, rows = task.training.groups, task.client, task.sample
    if groups is not None:  # Their constants differ: the largest group has all of a law.
        assert isinstance(client, GroupedClient)
        rows = task.seen[groups[task.seen] == np.bincount(groups).argmax()]
        client = client.client
    chosen = np.sort(task.rng.permutation(rows)[:_PAIR_ROWS])
    X, y, weights = (part[chosen] for part in task.training[:3])
    data = stack.enter_context(client.upload(X, y, weights, dtype="float64"))
    middle = np.full(len(y), np.median(y))
    weights = proposal_weights(as_function(task.loss), middle, y, weights)

    def values(genomes: Genomes) -> Floats:
        left = seconds_until(task.ends)
        return np.asarray(client.evaluate(data, genomes.population(), timeout=left).T)

    variables = relevant(X, y, _MOST_VARIABLES)
    count = len(variables)
    short = library(operators, count, width, _LIBRARY * _population(task))
    targets = list(views(operators, X, y, weights / weights.sum(), width))
    inner = arguments(operators, count, width, math.ceil(_ARGUMENTS * _population(task)))
    parts = [genomes[task.rules.admissible(genomes)] for genomes in (short, inner)]
    if not targets:  # of numbers whose squares overflow
        return FirstFormulas(parts[0])
    if count < X.shape[1]:
        for part in parts:
            places = part.codes == VARIABLE
            part.values[places] = variables[part.values[places].astype(np.int64)]
            part.known = ()
    symbols = X.shape[1] + len(task.operators) + 1
    return PairSearch(operators, values, targets, width, parts[0], parts[1], symbols)
