"""The search of an estimator: the engine's, as far as that does what is asked for.

The engine searches for plain formulas a + b f by least squares. Templates, groups, constraints of
monotonicity, functions of `warpfit.define` and losses that are no squares, which need weights that
follow the best formula, are searched by the client (`client_search`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from warpfit.calls.search import SearchOptions, SearchResult, unscaled
from warpfit.errors import UnavailableError
from warpfit.formulas.units import BASES
from warpfit.ir import Batch, Program, subtree_starts
from warpfit.losses import as_function
from warpfit.ops import ARITIES, BY_CODE, CONSTANT, FIRST_OPERATOR, OPERATORS
from warpfit.searching import SearchReason
from warpfit.sklearn import client_search
from warpfit.sklearn.constraints import operator_name
from warpfit.sklearn.forms import Form, seconds_until
from warpfit.sklearn.genomes import Floats, Genomes
from warpfit.sklearn.search import reason_of
from warpfit.sklearn.search_task import NO_INTERCEPT, Candidates, Found, SearchTask

#: Part of the time that the engine is given; the rest is for the call and for its last fits.
_SHARE: Final = 0.9
#: Greatest size of a formula in the engine.
_MOST_SIZE: Final = 256
#: Most formulas that a search begins with.
_MOST_GUESSES: Final = 2_000
#: Formulas that are returned beside those of the front.
_PROMISING: Final = 40
_MUL, _ADD = OPERATORS["mul"].code, OPERATORS["add"].code
_REASONS: Final = {
    SearchReason.TIME: "max_seconds",
    SearchReason.GENERATIONS: "generations",
    SearchReason.FORMULAS: "generations",
    SearchReason.TARGET_LOSS: "tolerance",
    SearchReason.IDLE: "early_stopping",
    SearchReason.CANCELLED: "callback",
}


def search(stack: ExitStack, task: SearchTask) -> Found:
    """Search for formulas until there is a reason to end.

    Args:
        stack: keeps data sets that the search uploads.
        task: what to look for.

    Raises:
        DeadlineExceededError: if the time is over before anything has been found.
        KeyboardInterrupt: for an interrupt before that.
        UnavailableError: if the server is lost before that.

    """
    if not _is_for_engine(task):
        return client_search.search(stack, task)
    task.phase("library of short formulas, their pairs, and generations in the engine")
    found = EngineFound(task)

    def progress(result: SearchResult) -> bool:
        found.add(result)
        return task.report(found)

    try:
        options = _options(task)
        options["progress"] = progress
        found.add(task.client.search(task.compared, **options))
    except (KeyboardInterrupt, UnavailableError) as error:
        if found.result is None:
            raise
        found.interruption = reason_of(error)
    return found


def _is_for_engine(task: SearchTask) -> bool:
    """Tell whether the engine knows all that a task asks for."""
    rules, constraints = task.rules, task.rules.constraints
    names = {*rules.operators, *rules.complexities, *map(operator_name, _named(constraints))}
    is_plain = type(task.form) is Form and task.training.groups is None and not rules.signs
    return is_plain and names <= OPERATORS.keys() and as_function(task.loss).is_squares


def _named(constraints: Any) -> set[str]:
    nesting = constraints.get("nesting", {})
    inner = (name for inside in nesting.values() for name in inside)
    return {*constraints.get("count", {}), *nesting, *inner}


def _options(task: SearchTask) -> SearchOptions:
    """Return the keywords of the engine's search."""
    rules, constraints = task.rules, task.rules.constraints
    left = seconds_until(task.ends)
    options = SearchOptions(
        # One generation is the least that the engine does.
        generations=max(1, task.generations),
        idle_generations=task.early_stopping,
        seconds=None if left is None else _SHARE * left,
        timeout=left,
        operators=task.operators,
        max_size=min(rules.most_searched, _MOST_SIZE),
        complexities=rules.complexities,
        max_depth=constraints.get("depth"),
        counts={operator_name(name): most for name, most in constraints.get("count", {}).items()},
        nesting={
            operator_name(outer): {operator_name(name): most for name, most in inside.items()}
            for outer, inside in constraints.get("nesting", {}).items()
        },
        loss=task.loss,
        guesses=_guesses(task),
        population=task.population,
        fit_iterations=task.fit_iterations,
        screening_rows=len(task.sample),
        seed=int(task.rng.integers(2**62)),
    )
    if rules.units is not None:
        units = rules.units
        options["units"] = [*map(_written, units.variables)]
        options["dimensionless_constants"] = units.dimensionless_constants
        if units.target is not None and units.dimensionless_constants:
            options["target_unit"] = _written(units.target)
    if task.stop_loss > -math.inf:
        options["target_loss"] = task.floor + task.stop_loss
    return options


def _written(exponents: Floats) -> dict[str, float]:
    """Write a unit as a mapping of base units to exponents."""
    return dict(zip(BASES, exponents.tolist(), strict=True))


def _guesses(task: SearchTask) -> Batch | None:
    """Return the formulas to begin with, their constants as starts of parameters."""
    programs, starts = [], []
    for row in range(min(len(task.start), _MOST_GUESSES)):
        program = task.start.program(row)
        known = all(code in BY_CODE for code in program.codes if code >= FIRST_OPERATOR)
        if program.variables and known:
            lifted, constants = program.lift_constants()
            programs.append(lifted)
            starts.append(constants)
    return Batch.of(programs, starts) if programs else None


@dataclass(slots=True)
class EngineFound:
    """What the engine's search has found; see `warpfit.sklearn.search_task.Found`."""

    task: SearchTask
    result: SearchResult | None = None
    """The last one."""
    interruption: str = ""
    """What has interrupted the search."""
    known: dict[Program, tuple[float, int]] = field(default_factory=dict)
    """Loss and size of all formulas that were in a front."""

    def add(self, result: SearchResult) -> None:
        """Take in the front of a search, which is at least as good as those before."""
        self.result = result
        for row in range(len(result)):
            program = _shortest(result.formula(row), self._spread)
            self.known[program] = self._excess(float(result.losses[row])), int(result.sizes[row])

    @property
    def generation(self) -> int:
        """Generations until now."""
        ran = 0 if self.result is None else self.result.generations
        return min(ran, self.task.generations)

    @property
    def tried(self) -> int:
        """Formulas that were scored."""
        return 0 if self.result is None else self.result.tried

    @property
    def distinct(self) -> int:
        """Different structures among them, constants not counted."""
        return 0 if self.result is None else self.result.distinct

    @property
    def reason(self) -> str:
        """Why the search has ended, as `SymbolicRegressor.reason_`."""
        reason = None if self.result is None else self.result.reason
        return self.interruption or ("server" if reason is None else _REASONS[reason])

    def front(self) -> Candidates:
        """Return the formulas that nothing dominates, simplest first."""
        result = self.result
        if result is None:
            return Candidates([], np.empty(0))
        rows = range(len(result))
        programs = [_shortest(result.formula(row), self._spread) for row in rows]
        return Candidates(programs, np.array([*map(self._excess, result.losses.tolist())]))

    def promising(self) -> Candidates:
        """Return the formulas that are worth a fit to all rows, the most likely first.

        They are the front, and those of fronts before it that are the most likely.
        """
        front, rows = {*self.front().programs}, max(self.task.amount, 2.0)

        def length(program: Program) -> float:
            loss, size = self.known[program]
            numbers = int(np.count_nonzero(program.codes == CONSTANT))
            information = rows * math.log(loss) if loss > 0.0 else -math.inf
            return information + (size + numbers) * math.log(rows)

        ordered = sorted(self.known, key=length)
        chosen = [each for place, each in enumerate(ordered) if place < _PROMISING or each in front]
        return Candidates(chosen, np.array([self.known[each][0] for each in chosen]))

    def formulas(self) -> Genomes:
        """Return formulas with their constants, from which a search can go on, best first.

        They are those of the front and, behind them, their parts.
        """
        result = self.result
        if result is None:
            return Genomes.of([])
        found: dict[Program, None] = {}
        for row in range(len(result))[::-1]:
            program, numbers = result.batch.program(row), result.batch.program_parameters(row)[0]
            inner = unscaled(program)
            if inner.variables:
                found[inner.bind(numbers[: inner.parameters])] = None
        parts = (part for program in [*found] for part in _parts(program) if part.variables)
        return Genomes.of([*dict.fromkeys([*found, *parts])])

    def _excess(self, loss: float) -> float:
        return max(loss - self.task.floor, 0.0)

    @property
    def _spread(self) -> float:
        return float(np.std(self.task.training.target))


def _parts(program: Program) -> Iterator[Program]:
    """Return the operands of all operators, larger ones first."""
    starts = subtree_starts(np.maximum(ARITIES[program.codes].astype(np.int64), 0))
    for end in range(len(program) - 1)[::-1]:
        part = slice(int(starts[end]), end + 1)
        yield Program(program.codes[part], program.values[part])


def _shortest(program: Program, spread: float) -> Program:
    """Return a + b f without an a or b that changes nothing."""
    codes, values, behind = program.codes, program.values, 0
    if len(codes) > 2 and codes[-1] == _ADD and codes[-2] == CONSTANT:
        behind = 2
    inner = len(codes) - behind
    if inner > 2 and codes[inner - 1] == _MUL and codes[inner - 2] == CONSTANT:
        inner -= 2 * (abs(values[inner - 2] - 1.0) <= NO_INTERCEPT)
    if behind and abs(values[-2]) <= NO_INTERCEPT * spread:
        behind = 0
    kept = [*range(inner), *range(len(codes) - behind, len(codes))]
    return Program(codes[kept], values[kept])
