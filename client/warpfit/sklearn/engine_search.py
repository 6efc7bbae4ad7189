"""The search of an estimator: the engine's, as far as that does what is asked for.

The engine searches for formulas a + b f, or for the functions of a template, by least squares. For
other losses it does so in rounds, whose rows are weighted around the best formula so far
(`selection.proposal_weights`), and what a round finds is fitted by the loss itself. Of groups each
round has the rows of one, the largest first, and what it finds is fitted to each of them.

A search is one call: `TargetSearch` prepares a `SearchTask`, calls `search`, and works with the
`Candidates` that come back; it knows nothing of populations, libraries or pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.calls.search import SearchOptions, SearchResult, unscaled
from warpfit.client import Client
from warpfit.errors import DeadlineExceededError, UnavailableError
from warpfit.expressions import reference
from warpfit.formulas.units import BASES
from warpfit.ir import Batch, Program
from warpfit.losses import Loss, LossFunction, TargetStatistics, as_function, close_losses
from warpfit.ops import CONSTANT, OPERATORS, VARIABLE, Operator
from warpfit.parse import MACROS, Macro
from warpfit.searching import FIRST_DEFINITION, SearchReason
from warpfit.sklearn.constraints import FormulaRules, operator_name
from warpfit.sklearn.estimator import TrainingData
from warpfit.sklearn.genomes import Floats, Genomes, Indices, joined
from warpfit.sklearn.groups import GroupedClient
from warpfit.sklearn.selection import proposal_weights
from warpfit.sklearn.templates import Form, TemplateForm, seconds_until

#: A slope this close to 1 is 1, and an intercept below this part of the target's spread is 0.
NO_INTERCEPT: Final = 1e-10


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
class SearchTask:
    """A search to run: its target, its rows and its budget."""

    client: Client
    training: TrainingData
    """All rows."""
    seen: Indices
    """Rows that may be looked at."""
    sample: Indices
    """Those on which formulas are compared."""
    compared: DatasetHandle
    """The latter, uploaded."""
    rng: np.random.Generator
    form: Form
    rules: FormulaRules
    operators: tuple[str, ...]
    """Names of what formulas are made of."""
    start: Genomes
    """Formulas to begin with, beside those that are drawn."""
    loss: Loss | LossFunction
    floor: float
    """Least loss on the sample that any prediction could have; losses are counted from it."""
    stop_loss: float
    """The search ends when a formula is at least this good."""
    amount: float
    """Amount of data in the sample."""
    population: int | None
    """Formulas of a population; None for as many as suit the search."""
    generations: int
    fit_iterations: int
    early_stopping: int | None
    ends: float
    """Time of `time.monotonic` at which the search ends; infinite for any."""
    report: Callable[[Found], bool]
    """Called after each generation; True ends the search."""
    phase: Callable[[str], None]
    """Called with what the search does next, before the first generation."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Formulas of a search as they are computed."""

    programs: list[Program]
    losses: Floats
    """Losses on the sample above the least possible, [programs]."""


class Found(Protocol):
    """The formulas that a search has found so far; they stay readable after its end."""

    @property
    def generation(self) -> int:
        """Generations until now."""

    @property
    def tried(self) -> int:
        """Formulas that were scored."""

    @property
    def distinct(self) -> int:
        """Different structures among them, constants not counted."""

    @property
    def reason(self) -> str:
        """Why the search has ended, as `SymbolicRegressor.reason_`."""

    def front(self) -> Candidates:
        """Return the formulas that nothing dominates, simplest first."""

    def promising(self) -> Candidates:
        """Return the formulas that are worth a fit to all rows, the most likely first."""

    def formulas(self) -> Genomes:
        """Return formulas with their constants, from which a search can go on, best first."""


# ------------------------------------------------------------------------- the search in the engine

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
#: Most rounds of a search by another loss than squares, or of groups.
_ROUNDS: Final = 4
_REASONS: Final = {
    SearchReason.TIME: "max_seconds",
    SearchReason.GENERATIONS: "generations",
    SearchReason.FORMULAS: "generations",
    SearchReason.TARGET_LOSS: "tolerance",
    SearchReason.IDLE: "early_stopping",
    SearchReason.CANCELLED: "callback",
}
#: Rounding errors of a sum, as part of its largest term.
_ROUNDED: Final = 1e-12
#: Reasons for which a round is the last one.
_ENDS: Final = ("tolerance", "callback")
#: Generations that do not limit a search that has a time.
_NO_LIMIT: Final = 500_000


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
    """Search by squares in one round, by another loss or of groups in several."""
    number, rounds = 0, max(1, min(_ROUNDS, task.generations))
    groups: list[Indices] = []  # the rows of each in the sample, the largest one first
    if task.training.groups is not None:
        numbers = task.training.groups[task.sample]
        own = [task.sample[numbers == group] for group in np.unique(numbers)]
        groups = sorted(own, key=len, reverse=True)
    if groups:
        rounds = min(rounds, len(groups))
    elif as_function(task.loss).is_squares:
        rounds = 1
    while number < rounds and found.reason not in _ENDS:
        data, is_part, is_weighted = task.compared, False, False
        if groups:
            X, y, weights = (part[groups[number]] for part in task.training[:3])
            data, is_part = _uploaded(stack, task, X, y, weights), True
        else:
            X, y, weights = (part[task.sample] for part in task.training[:3])
            fresh = proposal_weights(as_function(task.loss), found.predictions(), y, weights)
            is_part = is_weighted = fresh is not weights
            if is_weighted:
                data = _uploaded(stack, task, X, y, fresh)
            else:  # the engine compares formulas by the loss
                rounds = number + 1
        options = _options(task, found, rounds - number)
        if is_weighted:
            options["loss"] = Loss.MSE
        if is_part:
            options["target_loss"] = None

        def progress(result: SearchResult, number: int = number, own: bool = is_part) -> bool:
            found.add(result, number, is_part=own)
            return task.report(found)

        options["progress"] = progress
        found.add(_client(task).search(data, **options), number, is_part=is_part)
        if is_part:
            found.fit()
            if found.least <= task.stop_loss:
                found.interruption = "tolerance"
        number += 1


def _client(task: SearchTask) -> Client:
    """Return the client that searches, which knows nothing of groups."""
    return task.client.client if isinstance(task.client, GroupedClient) else task.client


def _uploaded(
    stack: ExitStack, task: SearchTask, X: Floats, y: Floats, weights: Floats
) -> DatasetHandle:
    return stack.enter_context(_client(task).upload(X, y, weights, dtype="float64"))


def _options(task: SearchTask, found: EngineFound, rounds: int) -> SearchOptions:
    """Return the keywords of the engine's search, with a part of what is left for some rounds."""
    rules, constraints = task.rules, task.rules.constraints
    left = seconds_until(task.ends)
    # One generation is the least that the engine does.
    generations = max(1, (task.generations - found.generation) // rounds)
    options = SearchOptions(
        # A search that time alone ends runs on all devices of a server.
        generations=None if left is not None and generations >= _NO_LIMIT else generations,
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
        guesses=found.guesses(joined([found.formulas(), task.start])),
        population=task.population,
        fit_iterations=task.fit_iterations,
        screening_rows=min(len(task.sample), _MOST_ROWS),
        seed=int(task.rng.integers(2**62)),
        monotonic={
            column: "increasing" if sign > 0 else "decreasing"
            for column, sign in rules.signs.items()
        },
        definitions={
            name: Program(macro.codes, macro.values) for name, macro in found.definitions.items()
        },
    )
    if isinstance(task.form, TemplateForm):
        options["template"] = task.form.contract(found.codes)
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


class _Known(NamedTuple):
    """A formula that a search has found, with its numbers."""

    whole: Program
    """a + b f, without an a or b that changes nothing."""
    inner: Genomes
    """The formula f, or the individual of a template."""
    size: int
    loss: float
    """Loss on the sample above the least possible."""


def _without_rounding(formula: Genomes, columns: Floats) -> Genomes:
    """Leave out terms that are rounding errors of a sum, and what varies by no more than these."""

    def leaf(code: int, value: float) -> tuple[Program, Floats]:
        own = Program([code], [value])
        return own, reference.evaluate_program(own, columns)

    def join(operator: Operator, parts: list[tuple[Program, Floats]]) -> tuple[Program, Floats]:
        if operator.name in ("add", "sub"):
            first, second = (np.abs(values).max() for _, values in parts)
            if second <= _ROUNDED * first:
                return parts[0]
            if first <= _ROUNDED * second and operator.name == "add":
                return parts[1]
        own = Program.apply(operator, *(program for program, _ in parts))
        values = reference.evaluate_program(own, columns)
        if own.variables and np.ptp(values) <= _ROUNDED * np.abs(values).max():
            own = Program.constant(float(values.mean()))
        return own, values

    program = formula.program(0)
    with np.errstate(all="ignore"):
        found = program.fold(leaf, join)[0]
    return formula if found == program else Genomes.of([found])


@dataclass(slots=True)
class EngineFound:
    """The formulas that the engine's search has found; implements `Found`."""

    task: SearchTask
    rounds: list[SearchResult] = field(default_factory=list)
    """The last result of each round."""
    interruption: str = ""
    """What has ended the search, if it was not the engine."""
    known: dict[Program, _Known] = field(default_factory=dict)
    """All formulas that were in a front, by the whole formula."""
    definitions: dict[str, Macro] = field(init=False)
    """Functions of `warpfit.define`, in the order of their codes in the engine."""

    def __post_init__(self) -> None:
        """Find the functions of `warpfit.define`."""
        task = self.task
        rules, constraints = task.rules, task.rules.constraints
        nesting = constraints.get("nesting", {})
        inner = {name for inside in nesting.values() for name in inside}
        limited = {*constraints.get("count", {}), *nesting, *inner}
        names = [*task.operators, *rules.complexities, *map(operator_name, limited)]
        if isinstance(task.form, TemplateForm):
            macros = (MACROS.with_code(code) for code, _ in task.form.template.program)
            names += [macro.name for macro in macros if macro is not None]
        found = {name: MACROS.find(name) for name in names if name not in OPERATORS}
        self.definitions = {name: macro for name, macro in found.items() if macro is not None}

    @property
    def codes(self) -> NDArray[np.uint8]:
        """The engine's code of each code here, that of functions of `warpfit.define` too."""
        codes = np.arange(256, dtype=np.uint8)
        for place, macro in enumerate(self.definitions.values()):
            codes[macro.code] = FIRST_DEFINITION + place
        return codes

    def add(self, result: SearchResult, number: int, *, is_part: bool) -> None:
        """Take in the front of a round, by its number from 0.

        Losses on a part of the rows, or on others' weights, are not those that were asked for,
        which are then computed here.
        """
        self.rounds[number:] = [result]
        for row in range(len(result)):
            numbers = result.batch.program_parameters(row)[0]
            loss = None if is_part else float(result.losses[row])
            self._know(result, row, numbers, loss)

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
            self._know(last, row, numbers, float(loss))

    def _know(self, result: SearchResult, row: int, numbers: Floats, loss: float | None) -> None:
        """Keep a whole formula, by its loss or, where that is not known, by that of the sample."""
        program, form, size = result.batch.program(row), self.task.form, int(result.sizes[row])
        if isinstance(form, TemplateForm):
            parts, around = self._parts(result, row, form.engine_parts, numbers)
            inner = form.found(parts, around)
            if not np.isfinite(inner.values).all():
                return
            whole = form.program(inner, 0)
        else:
            # a + b f without an a or b that changes nothing.
            whole, spread = program.bind(numbers), float(np.std(self.task.training.target))
            codes, values, behind = whole.codes, whole.values, 0
            if len(codes) > 2 and codes[-1] == _ADD and codes[-2] == CONSTANT:
                behind = 2
            end = len(codes) - behind
            if end > 2 and codes[end - 1] == _MUL and codes[end - 2] == CONSTANT:
                end -= 2 * (abs(values[end - 2] - 1.0) <= NO_INTERCEPT)
            if behind and abs(values[-2]) <= NO_INTERCEPT * spread:
                behind = 0
            kept = [*range(end), *range(len(codes) - behind, len(codes))]
            whole = Program(codes[kept], values[kept])
            if result.parts is None:
                f = unscaled(program)
                # Parameters of the inner formula are the first ones.
                inner = Genomes.of([f.bind(numbers[: f.parameters])])
            else:
                (inner,), _ = self._parts(result, row, 1, numbers)
        if loss is None:  # that of the sample, without the server
            function = as_function(self.task.loss)
            X, y, weights = (part[self.task.sample] for part in self.task.training[:3])
            with np.errstate(all="ignore"):
                values = np.broadcast_to(reference.evaluate_program(whole, X.T), y.shape)
                rows = reference.evaluate_program(function.row, np.stack([values, y, weights]))
                total = np.array((rows if function.mentions_weight else rows * weights).sum())
                loss = float(close_losses(function.closing, total, TargetStatistics(y, weights)))
        excess = max(loss - self.task.floor, 0.0) if not math.isnan(loss) else math.inf
        self.known[whole] = _Known(whole, inner, size, excess)

    def _parts(
        self, result: SearchResult, row: int, count: int, numbers: Floats
    ) -> tuple[list[Genomes], Floats]:
        """Return the parts of a formula with some numbers, and the numbers around them."""
        batch, own = result.parts, np.arange(256, dtype=np.uint8)
        assert batch is not None
        own[self.codes] = np.arange(256)
        starts = batch.starts[row * count : (row + 1) * count + 1]
        place = slice(int(starts[0]), int(starts[-1]))
        codes, values = own[batch.codes[place]], batch.values[place].copy()
        is_number = codes == CONSTANT
        inner = int(np.count_nonzero(is_number))
        values[is_number] = numbers[:inner]
        every = Genomes(codes, values, starts - starts[0])
        return [every[k : k + 1] for k in range(count)], numbers[inner:]

    def guesses(self, start: Genomes) -> Batch | None:
        """Return formulas to begin with: their parts, or with their constants as parameters."""
        form, known = self.task.form, {*self.definitions}
        allowed = np.ones(256, bool)
        for code in {*start.codes.tolist()}:
            macro = MACROS.with_code(code)
            allowed[code] = macro is None or macro.name in known
        start = start[start.totals(~allowed[start.codes]) == 0][:_MOST_GUESSES]
        if not isinstance(form, TemplateForm):
            start = start[start.totals(start.codes == VARIABLE) > 0]
        if not len(start):
            return None
        if not isinstance(form, TemplateForm) and not known:
            programs = [start.program(row).lift_constants() for row in range(len(start))]
            return Batch.of([one for one, _ in programs], [numbers for _, numbers in programs])
        parts = [start]
        if isinstance(form, TemplateForm):
            parts = [part for own in form.guesses(start) for part in own]
        if not parts:
            return None
        every = joined(parts)
        return Batch(
            self.codes[every.codes], every.values, every.sizes.astype(np.uint32),
            parameter_counts=np.zeros(len(every), np.uint32), parameters=np.empty(0),
        )  # fmt: skip

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

        They are those of the front and, behind them, their parts; of a template those of the front.
        """
        found = [known.inner for known in self._front()[::-1]]
        if not found:
            return Genomes.of([])
        if isinstance(self.task.form, TemplateForm):
            return joined(found)
        columns = self.task.training.rows[self.task.sample].T
        every = joined([_without_rounding(own, columns) for own in found])
        parts: list[Genomes] = []
        for row in range(len(every)):
            ends = np.arange(every.starts[row], every.starts[row + 1] - 1)[::-1]
            spans = every.spans[ends]
            parts.append(every.assembled((ends + 1 - spans)[:, None], spans[:, None]))
        every = joined([every, *parts])
        different = {
            (own.codes.tobytes(), own.values.tobytes()): row
            for row in range(len(every))[::-1]
            if VARIABLE in (own := every[row : row + 1]).codes
        }
        return every[np.sort(np.array([*different.values()], np.int64))]

    def _front(self) -> list[_Known]:
        front: list[_Known] = []
        for known in sorted(self.known.values(), key=lambda known: (known.size, known.loss)):
            if not front or known.loss < front[-1].loss:
                front.append(known)
        return front
