"""The search for the equations of one target: rows, settings, and what follows the search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client
from warpfit.errors import DeadlineExceededError
from warpfit.expressions import reference
from warpfit.expressions.printing import to_text
from warpfit.ir import Program
from warpfit.losses import Closing, Loss, LossFunction, as_function, as_loss
from warpfit.ops import CONSTANT, OPERATORS, VARIABLE
from warpfit.sklearn.constraints import (
    admission,
    complexity_measure,
    operator_code,
    operator_names,
)
from warpfit.sklearn.equations import (
    ROUNDING,
    SELECTIONS,
    Equation,
    build_front,
    information,
    selected,
)
from warpfit.sklearn.estimator import Floats, TrainingData, loss_unit
from warpfit.sklearn.genomes import Genomes, Indices, Mask
from warpfit.sklearn.loss_measures import deviance, floor, least_row_losses
from warpfit.sklearn.monotonicity import Violations, violations
from warpfit.sklearn.pairs.library import arguments, library
from warpfit.sklearn.pairs.search import PairSearch
from warpfit.sklearn.pairs.views import views
from warpfit.sklearn.pool import Pool
from warpfit.sklearn.progress import Progress
from warpfit.sklearn.search import Search, Settings
from warpfit.sklearn.units import consistency, dimensions
from warpfit.sklearn.variation import Breeder

if TYPE_CHECKING:
    from warpfit.sklearn.regressor import SymbolicRegressor

#: A slope this close to 1 is 1, and an intercept below this part of the target's spread is 0.
_NO_INTERCEPT: Final = 1e-10
#: Most rows on which pairs of formulas are compared.
_PAIR_ROWS: Final = 512
#: Formulas of the library for each member of the population.
_LIBRARY: Final = 12
#: The same of arguments of functions for which many factors are tried.
_ARGUMENTS: Final = 0.4
#: Iterations of the last fit.
_LAST_ITERATIONS: Final = 200
#: Most constants of a formula that are fitted then. Long ones of functions that are written with
#: operators have thousands, which are those functions' own.
_MOST_FITTED: Final = 200
#: Part of the time that is kept for what follows the search, and least time of it in seconds.
_RESERVE: Final = 0.1
_LEAST_SECONDS: Final = 0.3
#: Formulas of the least BIC whose numbers are shortened, and most part of its loss that one loses.
_SHORTENED: Final = 5
_MOST_TOLERANCE: Final = 0.1
#: Multiple of the tolerance with which they are shortened again.
_FAR: Final = 4.0
#: Fewer rows are not divided to hold some out.
_FEWEST_DIVIDED: Final = 40

#: Loss of formulas above the least possible, and R^2 on the rows held out.
_Found: TypeAlias = dict[Program, list[float]]


@dataclass
class TargetSearch:
    """The search for the equations of one target."""

    options: SymbolicRegressor
    client: Client
    data: DatasetHandle
    """All rows."""
    training: TrainingData
    """The same rows here."""
    rng: np.random.Generator
    start: Genomes | None
    """Formulas to go on from."""
    names: tuple[str, ...]
    deadline: float = math.inf
    """Time of `time.monotonic` at which everything should have ended."""
    scale: float = math.nan
    """Loss of the best constant above the least that any prediction could have."""
    seen: DatasetHandle = field(init=False)
    """The rows that are not held out."""
    constant: Program = field(init=False)
    """The best constant, which is among the equations."""
    held_out: Indices = field(init=False)
    """The others: formulas are measured on them, and never fitted."""

    def run(self, progress: Progress) -> tuple[list[Equation], Search]:
        """Search; return the front, its constants fitted to the rows that are not held out."""
        if self.options.max_seconds is not None:
            self.deadline = time.monotonic() + self.options.max_seconds
        seen, self.held_out = self._divided()
        with ExitStack() as stack:
            self.seen = self._part(stack, seen)
            self.constant, self.scale = self._best_constant()
            search = self._search(stack, seen, progress)
            pool = search.run()
            spread = float(np.std(self.training.target))
            programs = [_whole(pool, row, spread) for row in range(len(pool))]
            programs = list(dict.fromkeys([*self._fitted(programs), self.constant]))
            if self.options.simplify:
                return self._in_given_units(self._shortened(programs)), search
            losses, r2 = zip(*self._measured(programs).values(), strict=True)
            front = self.front(programs, np.array(losses), list(r2))
            return self._in_given_units(front), search

    def front(self, programs: list[Program], losses: Floats, r2: list[float]) -> list[Equation]:
        """Rank programs by the estimator's complexity."""
        return build_front(
            list(zip(programs, losses.tolist(), r2, strict=True)),
            self._complexity,
            lambda program: to_text(program, self.names),
            self._rows,
            self.scale,
            self._floor(),
            self._deviance,
            as_function(self.loss).is_squares,
        )

    def _complexity(self, program: Program) -> int:
        measure = complexity_measure(self.options.complexity_of_operators)
        return int(measure(Genomes.of([program]))[0])

    def preview(self, search: Search) -> list[Equation]:
        """Return the front as it is now, with the losses on the sample."""
        pool = search.front()
        spread = float(np.std(self.training.target))
        programs = [_whole(pool, row, spread) for row in range(len(pool))]
        programs, losses = [*programs, self.constant], np.append(pool.losses, self.scale)
        return self._in_given_units(self.front(programs, losses, [np.nan] * len(programs)))

    def _in_given_units(self, front: list[Equation]) -> list[Equation]:
        """Return equations for the target and the variables as they were given.

        The search sees them divided by powers of two where their squares overflow or vanish.
        """
        unit, units = self.training.unit, self.training.variable_units
        if not units:
            return front
        factor = loss_unit(self.loss, unit)
        shift = 0.0 if factor == 1.0 else self._rows * 2.0 * math.log(unit)

        def leaf(code: int, value: float) -> Program:
            own = Program([code], [value])
            if code != VARIABLE or units[int(value)] == 1.0:
                return own
            return Program.apply("div", own, Program.constant(units[int(value)]))

        found = []
        for equation in front:
            program = equation.program.fold(leaf, lambda row, parts: Program.apply(row, *parts))
            program = Program.apply("mul", Program.constant(unit), program)
            program = program.simplify() if self.options.simplify else program
            found.append(
                replace(
                    equation,
                    complexity=self._complexity(program),
                    loss=equation.loss * factor,
                    bic=equation.bic + shift,
                    program=program,
                    equation=to_text(program, self.names),
                )
            )
        return found

    @property
    def loss(self) -> Loss | LossFunction:
        """The loss, or what is left to 1 of a score."""
        given = as_loss(self.options.loss)
        function = as_function(given)
        return LossFunction(function.row, Closing.RELATIVE) if function.is_score else given

    def _best_constant(self) -> tuple[Program, float]:
        """Return the constant of the least loss, and its loss above the least possible."""
        middle = float(np.average(self.training.target, weights=self.training.weights))
        start = Program.parameter(0)
        fit = self.client.optimize(self.seen, start, [middle], loss=self.loss)
        return start.bind(fit.parameters[0]), max(float(fit.loss[0]) - self._floor(), 0.0)

    @cached_property
    def _least_row_losses(self) -> Floats:
        return least_row_losses(as_function(self.loss), self.training.target, self.training.weights)

    def _floor(self, rows: Indices | None = None) -> float:
        """Return the least loss that any prediction could have, on all or some rows."""
        chosen: Any = slice(None) if rows is None else rows
        target, weights = self.training.target[chosen], self.training.weights[chosen]
        return floor(as_function(self.loss), self._least_row_losses[chosen], target, weights)

    @property
    def _deviance(self) -> Callable[[float], float]:
        weight = float(self.training.weights.sum())
        return deviance(as_function(self.loss), self._rows, weight)

    def _divided(self) -> tuple[Indices, Indices]:
        """Return the rows that the search sees, and those that are held out."""
        rows = len(self.training.target)
        count = int(self.options.held_out * rows) if rows >= _FEWEST_DIVIDED else 0
        shuffled = self.rng.permutation(rows)
        return np.sort(shuffled[count:]), np.sort(shuffled[:count])

    def _part(self, stack: ExitStack, rows: Indices) -> DatasetHandle:
        """Upload some of the rows."""
        if len(rows) == len(self.training.target):
            return self.data
        X, y, weights = self.training[:3]
        return stack.enter_context(
            self.client.upload(X[rows], y[rows], weights[rows], dtype="float64")
        )

    def _search(self, stack: ExitStack, seen: Indices, progress: Progress) -> Search:
        options = self.options
        operators = operator_names(options.operators)
        codes = tuple(map(operator_code, operators))
        of_the_table = tuple(name for name in operators if name in OPERATORS)
        breeder = Breeder(self.rng, codes, self.training.rows.shape[1], options.max_size)
        chosen = np.sort(self.rng.permutation(seen)[: options.sample_rows])
        settings = self._settings(progress, chosen)
        return Search(
            self.client,
            self.seen,
            self._part(stack, chosen),
            breeder,
            self._pairs(stack, chosen, of_the_table, settings),
            settings,
            self.start,
        )

    def _pairs(
        self, stack: ExitStack, rows: Indices, operators: tuple[str, ...], settings: Settings
    ) -> PairSearch:
        chosen = np.sort(self.rng.permutation(rows)[:_PAIR_ROWS])
        data = self._part(stack, chosen)
        X, y, weights = (part[chosen] for part in self.training[:3])

        def values(genomes: Genomes) -> Floats:
            return np.asarray(self.client.evaluate(data, genomes.population()).T)

        options = self.options
        width, most = options.max_size, _LIBRARY * options.population
        short = library(operators, X.shape[1], width, most, self.rng)
        targets = views(operators, X, y, weights / weights.sum(), width)
        inner = arguments(operators, X.shape[1], width, math.ceil(_ARGUMENTS * options.population))
        return PairSearch(
            operators,
            values,
            list(targets),
            width,
            short[settings.admissible(short)],
            inner[settings.admissible(inner)],
        )

    def _settings(self, progress: Progress, sample: Indices) -> Settings:
        options = self.options
        complexity = complexity_measure(options.complexity_of_operators)
        return Settings(
            population=options.population,
            generations=options.generations,
            fit_iterations=options.fit_iterations,
            stop_loss=options.tolerance * self.scale,
            ends=self.deadline - _RESERVE * (options.max_seconds or 0.0),
            early_stopping=options.early_stopping,
            rows=self._amount(sample),
            loss=self.loss,
            floor=self._floor(sample),
            complexity=complexity,
            admissible=self._admission(complexity),
            penalty=lambda *formulas: self.scale * self._violations(*formulas),
            report=lambda search: progress.report(self, search),
        )

    @cached_property
    def _violations(self) -> Violations:
        given = (self.options.constraints or {}).get("monotonic", {})
        return violations(given, self.names, self.training.rows.shape[1], self.client)

    def _violating(self, programs: list[Program]) -> Mask:
        """Return which formulas violate a constraint of monotonicity."""
        genomes = Genomes.of(programs)
        return np.asarray(self._violations(genomes, np.ones(len(programs)), self.data) > 0.0)

    def _admission(self, complexity: Callable[[Genomes], Indices]) -> Callable[[Genomes], Mask]:
        options = self.options
        admit = admission(options.constraints, complexity, options.max_size)
        if options.units is None:
            return admit
        variables = self.training.rows.shape[1]
        consistent = consistency(dimensions(options.units, self.names, variables))
        return lambda genomes: admit(genomes) & consistent(genomes)

    def _fitted(self, programs: list[Program]) -> list[Program]:
        """Fit all constants to the rows not held out, but of formulas that have too many."""
        if not programs:
            return []
        most = min(_MOST_FITTED, len(self.training.target) - len(self.held_out))
        lifted = [
            program.lift_constants()
            if np.count_nonzero(program.codes == CONSTANT) <= most
            else (program, np.empty(0))
            for program in programs
        ]
        fit = self.client.optimize(
            self.seen,
            [program for program, _ in lifted],
            [constants for _, constants in lifted],
            loss=self.loss,
            max_iterations=_LAST_ITERATIONS,
        )
        bound = zip((program for program, _ in lifted), fit.parameters, strict=True)
        return [program.bind(numbers) for program, numbers in bound]

    def _measured(self, programs: list[Program]) -> _Found:
        """Measure formulas: their losses on all rows, infinite for what violates a constraint."""
        losses = self.client.evaluate(self.data, programs, loss=self.loss) - self._floor()
        losses = np.where(self._violating(programs), np.inf, losses)
        return {
            program: [loss, self._r2(program, self.held_out)]
            for program, loss in zip(programs, losses.tolist(), strict=True)
        }

    def _shortened(self, programs: list[Program]) -> list[Equation]:
        """Simplify all formulas, and shorten the numbers of those that a criterion may choose."""
        found = self._measured(list(dict.fromkeys(program.simplify() for program in programs)))
        front = self._front_of(found)
        criteria = [self.options.model_selection, *SELECTIONS]
        wanted = [front[selected(front, criterion)].program for criterion in criteria]
        wanted = [wanted[0], *self._likely(found), *wanted[1:]]
        try:
            for program in dict.fromkeys(wanted):
                self._shorten(program, found, 1.0)
            for program in self._likely(found):
                self._shorten(program, found, _FAR)
        except DeadlineExceededError:
            pass  # Long numbers are the price of a short time.
        return self._front_of(found)

    @property
    def _rows(self) -> float:
        """Amount of data for the BIC: different rows, whatever the scale of their weights."""
        return self._amount(np.arange(len(self.training.target)))

    def _amount(self, rows: Indices) -> float:
        weights = self.training.weights[rows]
        return float(weights.sum() if self.options.frequency_weights else len(weights))

    def _front_of(self, found: _Found) -> list[Equation]:
        losses, r2 = zip(*found.values(), strict=True)
        return self.front(list(found), np.array(losses), list(r2))

    def _likely(self, found: _Found) -> list[Program]:
        """Return the formulas of the least BIC."""

        def bic(program: Program) -> float:
            level = max(found[program][0], ROUNDING * self.scale, math.ulp(0.0))
            return information(
                self._complexity(program), self._deviance(level), program, self._rows
            )

        return sorted(found, key=bic)[:_SHORTENED]

    def _shorten(self, program: Program, found: _Found, factor: float) -> None:
        """Add a shorter formula; one parameter less may cost what it is worth to the BIC."""
        left = max(_LEAST_SECONDS, self.deadline - time.monotonic())
        short = self.client.simplify(
            self.seen,
            [program],
            loss=self.loss,
            tolerance=min(_MOST_TOLERANCE, factor * math.log(max(self._rows, 2.0)) / self._rows),
            assume_defined=True,
            timeout=None if left == math.inf else left,
        )
        found.update(self._measured(list(short.programs)))

    def _r2(self, program: Program, rows: Indices) -> float:
        """Return R^2 on some rows; NaN where it says nothing, minus infinity without a value."""
        X, y, weights = (part[rows] for part in self.training[:3])
        if len(rows) < 2 or np.all(y == y[0]):
            return math.nan
        with np.errstate(all="ignore"):
            errors = np.square(reference.evaluate_program(program, X.T) - y)
            spread = np.average(np.square(y - np.average(y, weights=weights)), weights=weights)
            found = float(1.0 - np.average(errors, weights=weights) / spread)
        return found if math.isfinite(found) else -math.inf


def _whole(pool: Pool, row: int, spread: float) -> Program:
    """Build a + b f with its numbers, without an a or b that changes nothing."""
    program = pool.genomes.program(row)
    slope, intercept = float(pool.slopes[row]), float(pool.intercepts[row])
    if abs(slope - 1.0) > _NO_INTERCEPT:
        program = Program.apply("mul", Program.constant(slope), program)
    if abs(intercept) > _NO_INTERCEPT * spread:
        program = Program.apply("add", program, Program.constant(intercept))
    return program
