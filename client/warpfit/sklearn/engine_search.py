"""The search of an estimator: the engine's, as far as that does what is asked for.

The engine searches for plain formulas a + b f by least squares. For other losses it does so in
rounds, whose rows are weighted around the best formula so far (`likelihood.proposal_weights`), and
what a round finds is fitted by the loss itself. Templates, groups, constraints of monotonicity and
functions of `warpfit.define` are searched by the client (`client_search`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from warpfit.calls.search import SearchOptions, SearchResult, unscaled
from warpfit.errors import DeadlineExceededError, UnavailableError
from warpfit.expressions import reference
from warpfit.formulas.units import BASES
from warpfit.ir import Batch, Program, subtree_starts
from warpfit.losses import Loss, TargetStatistics, as_function, close_losses
from warpfit.ops import ARITIES, BY_CODE, CONSTANT, FIRST_OPERATOR, OPERATORS
from warpfit.searching import SearchReason
from warpfit.sklearn import client_search
from warpfit.sklearn.constraints import operator_name
from warpfit.sklearn.forms import Form, seconds_until
from warpfit.sklearn.genomes import Floats, Genomes, joined
from warpfit.sklearn.likelihood import proposal_weights
from warpfit.sklearn.search import reason_of
from warpfit.sklearn.search_task import NO_INTERCEPT, Candidates, Found, SearchTask

#: Part of the time that the engine is given; the rest is for the call and for its last fits.
_SHARE: Final = 0.9
#: Greatest size of a formula in the engine.
_MOST_SIZE: Final = 256
#: Most rows on which the engine scores formulas; of more it draws so many.
_MOST_ROWS: Final = 1 << 20
#: Most formulas that a search begins with.
_MOST_GUESSES: Final = 2_000
#: Formulas that are returned beside those of the front.
_PROMISING: Final = 40
_MUL, _ADD = OPERATORS["mul"].code, OPERATORS["add"].code
#: Rounds of a search by another loss than squares.
_ROUNDS: Final = 4
_REASONS: Final = {
    SearchReason.TIME: "max_seconds",
    SearchReason.GENERATIONS: "generations",
    SearchReason.FORMULAS: "generations",
    SearchReason.TARGET_LOSS: "tolerance",
    SearchReason.IDLE: "early_stopping",
    SearchReason.CANCELLED: "callback",
}
#: Reasons for which a round is the last one.
_ENDS: Final = ("tolerance", "callback")


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
    try:
        _run_rounds(stack, task, found)
    except (KeyboardInterrupt, UnavailableError) as error:
        if not found.known:
            raise
        found.interruption = reason_of(error)
    except DeadlineExceededError:
        if not found.known:
            raise
        found.interruption = "max_seconds"
    return found


def _run_rounds(stack: ExitStack, task: SearchTask, found: EngineFound) -> None:
    """Search by squares in one round, by another loss in several."""
    function, number = as_function(task.loss), 0
    rounds = 1 if function.is_squares else max(1, min(_ROUNDS, task.generations))
    X, y, weights = (part[task.sample] for part in task.training[:3])
    while number < rounds and found.reason not in _ENDS:
        fresh = proposal_weights(function, found.predictions(), y, weights)
        is_weighted, data = fresh is not weights, task.compared
        if is_weighted:
            data = stack.enter_context(task.client.upload(X, y, fresh, dtype="float64"))
        else:  # the engine compares formulas by the loss
            rounds = number + 1
        options = _options(task, found, rounds - number)
        if is_weighted:
            options["loss"], options["target_loss"] = Loss.MSE, None

        def progress(result: SearchResult, number: int = number, own: bool = is_weighted) -> bool:
            found.add(result, number, is_weighted=own)
            return task.report(found)

        options["progress"] = progress
        found.add(task.client.search(data, **options), number, is_weighted=is_weighted)
        if is_weighted:
            found.fit()
            if found.least <= task.stop_loss:
                found.interruption = "tolerance"
        number += 1


def _is_for_engine(task: SearchTask) -> bool:
    """Tell whether the engine knows all that a task asks for."""
    rules, constraints = task.rules, task.rules.constraints
    names = {*rules.operators, *rules.complexities, *map(operator_name, _named(constraints))}
    is_plain = type(task.form) is Form and task.training.groups is None and not rules.signs
    return is_plain and names <= OPERATORS.keys()


def _named(constraints: Any) -> set[str]:
    nesting = constraints.get("nesting", {})
    inner = (name for inside in nesting.values() for name in inside)
    return {*constraints.get("count", {}), *nesting, *inner}


def _options(task: SearchTask, found: EngineFound, rounds: int) -> SearchOptions:
    """Return the keywords of the engine's search, with a part of what is left for some rounds."""
    rules, constraints = task.rules, task.rules.constraints
    left = seconds_until(task.ends)
    options = SearchOptions(
        # One generation is the least that the engine does.
        generations=max(1, (task.generations - found.generation) // rounds),
        idle_generations=task.early_stopping,
        seconds=None if left is None else _SHARE * left / rounds,
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
        guesses=_guesses(joined([found.formulas(), task.start])),
        population=task.population,
        fit_iterations=task.fit_iterations,
        screening_rows=min(len(task.sample), _MOST_ROWS),
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


def _guesses(start: Genomes) -> Batch | None:
    """Return the formulas to begin with, their constants as starts of parameters."""
    programs, starts = [], []
    for row in range(min(len(start), _MOST_GUESSES)):
        program = start.program(row)
        known = all(code in BY_CODE for code in program.codes if code >= FIRST_OPERATOR)
        if program.variables and known:
            lifted, constants = program.lift_constants()
            programs.append(lifted)
            starts.append(constants)
    return Batch.of(programs, starts) if programs else None


class _Known(NamedTuple):
    """A formula that a search has found, with its numbers."""

    whole: Program
    """a + b f, without an a or b that changes nothing."""
    inner: Program
    """The formula f."""
    size: int
    loss: float
    """Loss on the sample above the least possible."""


@dataclass(slots=True)
class EngineFound:
    """What the engine's search has found; see `warpfit.sklearn.search_task.Found`."""

    task: SearchTask
    rounds: list[SearchResult] = field(default_factory=list)
    """The last result of each round."""
    interruption: str = ""
    """What has ended the search, if it was not the engine."""
    known: dict[Program, _Known] = field(default_factory=dict)
    """All formulas that were in a front, by the whole formula."""

    def add(self, result: SearchResult, number: int, *, is_weighted: bool) -> None:
        """Take in the front of a round, by its number from 0.

        Losses on weighted rows are not those that were asked for, which are then computed here.
        """
        self.rounds[number:] = [result]
        for row in range(len(result)):
            numbers = result.batch.program_parameters(row)[0]
            loss = None if is_weighted else float(result.losses[row])
            self._know(result.batch.program(row), numbers, int(result.sizes[row]), loss)

    def fit(self) -> None:
        """Fit the front of the last round by the loss that was asked for."""
        last, left = self.rounds[-1], seconds_until(self.task.ends)
        programs = [last.batch.program(row) for row in range(len(last))]
        fit = self.task.client.optimize(
            self.task.compared,
            programs,
            [last.batch.program_parameters(row)[0] for row in range(len(last))],
            loss=self.task.loss,
            max_iterations=self.task.fit_iterations,
            timeout=left,
            partial=left is not None,
        )
        for row, (numbers, loss) in enumerate(zip(fit.parameters, fit.loss, strict=True)):
            self._know(programs[row], numbers, int(last.sizes[row]), float(loss))

    def _know(self, program: Program, numbers: Floats, size: int, loss: float | None) -> None:
        """Keep a whole formula, by its loss or, where that is not known, by that of the sample."""
        inner = unscaled(program)
        whole = _shortest(program.bind(numbers), float(np.std(self.task.training.target)))
        loss = self._loss(whole) if loss is None else loss
        excess = max(loss - self.task.floor, 0.0) if not math.isnan(loss) else math.inf
        # Parameters of the inner formula are the first ones.
        self.known[whole] = _Known(whole, inner.bind(numbers[: inner.parameters]), size, excess)

    def _loss(self, program: Program) -> float:
        """Return the loss of a formula on the sample, without the server."""
        function = as_function(self.task.loss)
        X, y, weights = (part[self.task.sample] for part in self.task.training[:3])
        with np.errstate(all="ignore"):
            values = np.broadcast_to(reference.evaluate_program(program, X.T), y.shape)
            rows = reference.evaluate_program(function.row, np.stack([values, y, weights]))
            total = np.array((rows if function.mentions_weight else rows * weights).sum())
            return float(close_losses(function.closing, total, TargetStatistics(y, weights)))

    def predictions(self) -> Floats:
        """Return predictions of the best formula for the sample, or the target's median."""
        target = self.task.training.target[self.task.sample]
        if not self.known:
            return np.full(len(target), np.median(target))
        best = min(self.known.values(), key=lambda known: known.loss).whole
        with np.errstate(all="ignore"):
            values = reference.evaluate_program(best, self.task.training.rows[self.task.sample].T)
        return np.broadcast_to(values, target.shape)

    @property
    def least(self) -> float:
        """Least loss above the least possible."""
        return min((known.loss for known in self.known.values()), default=math.inf)

    @property
    def generation(self) -> int:
        """Generations until now."""
        return min(sum(each.generations for each in self.rounds), self.task.generations)

    @property
    def tried(self) -> int:
        """Formulas that were scored."""
        return sum(each.tried for each in self.rounds)

    @property
    def distinct(self) -> int:
        """Different structures among them in each round, constants not counted."""
        return sum(each.distinct for each in self.rounds)

    @property
    def reason(self) -> str:
        """Why the search has ended, as `SymbolicRegressor.reason_`."""
        reason = self.rounds[-1].reason if self.rounds else None
        return self.interruption or ("server" if reason is None else _REASONS[reason])

    def front(self) -> Candidates:
        """Return the formulas that nothing dominates, simplest first."""
        front = self._front()
        return Candidates([each.whole for each in front], np.array([each.loss for each in front]))

    def promising(self) -> Candidates:
        """Return the formulas that are worth a fit to all rows, the most likely first.

        They are the front, and those of fronts before it that are the most likely.
        """
        front, rows = {each.whole for each in self._front()}, max(self.task.amount, 2.0)

        def length(known: _Known) -> float:
            numbers = int(np.count_nonzero(known.whole.codes == CONSTANT))
            information = rows * math.log(known.loss) if known.loss > 0.0 else -math.inf
            return information + (known.size + numbers) * math.log(rows)

        ordered = enumerate(sorted(self.known.values(), key=length))
        chosen = [each for place, each in ordered if place < _PROMISING or each.whole in front]
        return Candidates([each.whole for each in chosen], np.array([each.loss for each in chosen]))

    def formulas(self) -> Genomes:
        """Return formulas with their constants, from which a search can go on, best first.

        They are those of the front and, behind them, their parts.
        """
        found = [known.inner for known in self._front()[::-1] if known.inner.variables]
        parts = (part for program in found for part in _parts(program) if part.variables)
        return Genomes.of([*dict.fromkeys([*found, *parts])])

    def _front(self) -> list[_Known]:
        front: list[_Known] = []
        for known in sorted(self.known.values(), key=lambda known: (known.size, known.loss)):
            if not front or known.loss < front[-1].loss:
                front.append(known)
        return front


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
