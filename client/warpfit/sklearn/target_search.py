"""The search for the equations of one target: progress, rows, and what follows the search."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
import warnings
import zipfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client
from warpfit.dataset.layout import caller_level
from warpfit.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from warpfit.expressions import reference
from warpfit.expressions.language import to_latex, to_text
from warpfit.formulas.units import dimension, dimensions
from warpfit.ir import Program
from warpfit.losses import (
    Closing,
    Loss,
    LossFunction,
    as_function,
    as_loss,
)
from warpfit.ops import CONSTANT, OPERATORS, VARIABLE
from warpfit.sklearn.constraints import (
    Violations,
    admission,
    complexity_measure,
    consistency,
    directions,
    operator_code,
    operator_names,
    violations,
)
from warpfit.sklearn.equations import (
    SELECTIONS,
    Equation,
    build_front,
    selected,
)
from warpfit.sklearn.estimator import SearchWarning, TrainingData, loss_unit
from warpfit.sklearn.forms import Form, Shortening, seconds_until
from warpfit.sklearn.genomes import Breeder, Floats, Genomes, Indices, Mask
from warpfit.sklearn.groups import GroupedClient, balanced, freed
from warpfit.sklearn.likelihood import proposal_weights
from warpfit.sklearn.pairs import (
    FirstFormulas,
    PairSearch,
    arguments,
    library,
    relevant,
    views,
)
from warpfit.sklearn.search import (
    INTERRUPTIONS,
    Pool,
    Search,
    Settings,
    reason_of,
)
from warpfit.sklearn.selection import FEWEST_DIVIDED, Selection
from warpfit.sklearn.templates import TemplateBreeder, TemplateForm

if TYPE_CHECKING:
    from warpfit.sklearn.regressor import SymbolicRegressor

#: Seconds between lines of progress on a terminal, and elsewhere; and between checkpoints.
_LINE_SECONDS: Final = (0.3, 5.0)
_CHECKPOINT_SECONDS: Final = 20.0
#: Most characters of a line.
_LINE: Final = 160


@dataclass(slots=True)
class Progress:
    """Shows and saves a search from time to time."""

    checkpoint: Path | None
    started: float
    verbose: bool
    callback: Callable[..., Any] | None = None
    shown: float = 0.0
    saved: float = 0.0

    def report(self, target: TargetSearch, search: Search) -> bool:
        """Report a generation; return whether the callback ends the search."""
        now = time.monotonic()
        terminal = sys.stderr is not None and sys.stderr.isatty()
        if self.verbose and now - self.shown >= _LINE_SECONDS[not terminal]:
            self.shown = now
            self._show(target, search)
        if self.checkpoint is not None and now - self.saved >= _CHECKPOINT_SECONDS:
            self.saved = now
            self.save(formulas_of(search))
        if self.callback is None:
            return False
        return bool(self.callback(target.options, search.generation, target.preview(search)))

    def phase(self, text: str) -> None:
        """Say what is done before the first generation, or behind the last one."""
        if self.verbose:
            self._line(f"{time.monotonic() - self.started:.1f} s  {text}")

    def save(self, genomes: Genomes) -> None:
        """Write the checkpoint; a search does not end because its disk is full."""
        if self.checkpoint is None:
            return
        try:
            save(self.checkpoint, genomes)
        except OSError as error:
            warnings.warn(
                f"the checkpoint {self.checkpoint} cannot be written: {error.strerror}. Make room, "
                "or the folder writable, before the search ends",
                SearchWarning,
                stacklevel=caller_level(),
            )

    def _show(self, target: TargetSearch, search: Search) -> None:
        best = min(target.preview(search), key=lambda equation: equation.loss)
        self._line(
            f"{time.monotonic() - self.started:.1f} s  generation {search.generation}  "
            f"loss {best.loss:.4g}  {best.equation}"
        )

    def _line(self, line: str) -> None:
        """Show a line, on a terminal in the place of the last one, whose width it keeps to."""
        terminal = sys.stderr is not None and sys.stderr.isatty()
        most = min(_LINE, shutil.get_terminal_size().columns - 1) if terminal else _LINE
        shown = f"\r{line[:most]:<{most}}" if terminal else f"{line[:most]}\n"
        with suppress(OSError):  # a search does not end because its lines cannot be shown
            print(shown, end="", file=sys.stderr, flush=True)


def formulas_of(search: Search) -> Genomes:
    """Return all formulas of a search with their constants, best first."""
    everything = search.everything().distinct()
    return everything.best(len(everything)).genomes


def save(path: Path, genomes: Genomes) -> None:
    """Write formulas to a file, which is replaced in one step."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        np.savez_compressed(file, codes=genomes.codes, values=genomes.values, starts=genomes.starts)
    partial.replace(path)


def load(path: Path, form: Form, width: int, variables: int) -> Genomes | None:
    """Read formulas that `save` has written; None if there is no such file.

    Raises:
        InvalidArgumentError: if the file is another, or does not fit the data or the template.

    """
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as content:
            genomes = Genomes(content["codes"], content["values"], content["starts"])
        suits = form.fits(genomes)
        whole = form.whole(genomes) if suits else genomes[:0]
        programs = [whole.program(row) for row in range(len(whole))]
    except (OSError, LookupError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise _bad_checkpoint(path, str(error)) from error
    if not suits:
        raise _bad_checkpoint(path, "its formulas have another template")
    if max((program.variables for program in programs), default=0) > variables:
        raise _bad_checkpoint(path, "its formulas have more variables than the data")
    return genomes[genomes.sizes <= width]


def _bad_checkpoint(path: Path, why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{path} is no checkpoint of this search: {why}",
        "BAD_CHECKPOINT",
        "Name another file, or delete this one",
        "checkpoint",
    )


#: A slope this close to 1 is 1, and an intercept below this part of the target's spread is 0.
_NO_INTERCEPT: Final = 1e-10
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
#: Iterations of the last fit.
_LAST_ITERATIONS: Final = 200
#: Most constants of a formula that are fitted then. Long ones of functions that are written with
#: operators have thousands, which are those functions' own.
_MOST_FITTED: Final = 200
#: Part of the time that is kept for what follows the search, of few rows and of many, or where the
#: smaller part is less than so many seconds.
_RESERVE: Final = (0.1, 0.2)
_LEAST_RESERVE: Final = 2.0
_MANY_ROWS: Final = 20_000
#: Part of the time, and most seconds, that are kept for what is computed here behind the server's
#: last answer, of many rows.
_CLOSING: Final = (0.05, 0.5)
#: Formulas that are measured in one call, after which the clock is looked at.
_MEASURED: Final = 16
#: Time of a fit as a multiple of that of one evaluation of the same formulas on the same rows, and
#: the part of the time left that the last fit may take.
_FIT_TIME: Final = 60.0
_FIT_SHARE: Final = 0.5
#: Formulas of the least description length whose numbers are shortened, and most part of its loss
#: that one loses.
_SHORTENED: Final = 5
_MOST_TOLERANCE: Final = 0.1
#: A formula with a larger part of the loss of the best constant describes data with much noise.
_NOISE: Final = 0.1
#: Multiple of the tolerance with which they are shortened again.
_FAR: Final = 4.0
#: Time for the constants of groups when a search has been interrupted.
_LAST_SECONDS: Final = 10.0
#: Least number of rows of each group on which structures are compared, about.
_GROUP_ROWS: Final = 10

#: Loss of formulas above the least possible, and R^2 on the rows held out.
_Found: TypeAlias = dict[Program, list[float]]


@dataclass
class TargetSearch:
    """The search for the equations of one target."""

    options: SymbolicRegressor
    client: Client
    training: TrainingData
    rng: np.random.Generator
    start: Genomes
    """Formulas to go on from."""
    names: tuple[str, ...]
    begun: float
    """Time of `time.monotonic` from which the time of this target counts."""
    deadline: float
    """Time of `time.monotonic` at which calls should have ended; infinite for any time."""
    form: Form = field(default_factory=Form)
    selection: Selection = field(init=False)
    """Computes description lengths and predictive lengths of the formulas."""
    constant: Program = field(init=False)
    """The best constant, which is among the equations."""
    data: DatasetHandle = field(init=False)
    """All rows."""
    seen: DatasetHandle = field(init=False)
    """Rows that are not held out, if they are in groups."""
    answered: float = math.inf
    """Time of `time.monotonic` of the first fit's answer."""
    generation: int = 0
    reason: str = ""
    """Why the search ended, as `SymbolicRegressor.reason_`."""
    formulas: Genomes = field(default_factory=lambda: Genomes.of([]))
    """All formulas of the search, best first."""
    parts: list[DatasetHandle] = field(default_factory=list)
    """Rows that are fitted in a cross-validation."""
    linear: _Found = field(default_factory=dict)
    """The linear regression, if it takes part. It is measured before the search, which has a time
    that takes that into account."""

    def __post_init__(self) -> None:
        """Prepare the choice, and keep some time for what is computed behind the last answer."""
        if self.deadline < math.inf and len(self.training.target) > _MANY_ROWS:
            part, most = _CLOSING
            self.deadline -= min(part * (self.deadline - self.begun), most)
        options = self.options
        operators = operator_names(options.operators)
        may_be_linear = (
            as_function(self.loss).is_squares
            and self.training.groups is None
            and not isinstance(self.form, TemplateForm)
            and not options.constraints
            and not options.dimensionless_constants
            and {"add", "mul"} <= {*operators}
        )
        longest = math.inf if options.max_size is None else float(options.max_size)
        self.selection = Selection(
            self.training,
            as_function(self.loss),
            self.form,
            self._complexity,
            self.training.rows.shape[1] + len(operators) + 1,
            options.frequency_weights,
            longest if may_be_linear else 0.0,
        )

    def run(self, progress: Progress) -> list[Equation]:
        """Search; return the front, its constants fitted to the rows that are not held out.

        What interrupts the search, or what follows it, becomes the reason of its end; the front is
        then that of the formulas so far.

        Raises:
            KeyboardInterrupt: for an interrupt before anything has been found.
            UnavailableError: if the server is lost before that.

        """
        rows = len(self.training.target)
        seen, self.selection.held_out = self._divided()
        few = max(self.options.sample_rows, _GROUP_ROWS * self._group_count)
        sample = np.sort(self._shuffled(seen)[:few])
        with ExitStack() as stack:
            progress.phase(f"upload of {rows:,} rows")
            begun = time.monotonic()
            self.data = self._part(stack, np.arange(rows))
            uploading = time.monotonic() - begun
            if self.training.groups is not None:
                self.seen = self._part(stack, seen)
            try:
                compared = self._part(stack, sample)
                progress.phase("fit of a constant, once the server has compiled its fits")
                self.constant, self.selection.scale = self._best_constant(seen, sample, compared)
                self.answered = time.monotonic()
                if (null := self.selection.null) is not None:
                    level = self.selection.level(self.selection.values(null))
                    self.linear[null] = [level, self.selection.null_r2]
                search = self._search(stack, compared, sample, progress)
            except DeadlineExceededError:
                self.reason = "max_seconds"
                return self.nothing()
            search.run()
            self.generation, self.reason = search.generation, search.reason
            self.formulas = formulas_of(search)
            if search.reason not in INTERRUPTIONS:
                try:
                    return self._in_given_units(self._finished(stack, search, progress, uploading))
                except (KeyboardInterrupt, UnavailableError) as error:
                    self.reason = reason_of(error)
            return self._in_given_units(self._as_found(search))

    def _finished(
        self, stack: ExitStack, search: Search, progress: Progress, uploading: float
    ) -> list[Equation]:
        """Fit the formulas of a search to more rows than its sample, and shorten them.

        Args:
            stack: keeps data sets.
            search: what has been found.
            progress: is told what is done.
            uploading: seconds of an upload of all rows.

        """
        progress.phase("last fits")
        programs = self._programs(search.promising())
        begun = time.monotonic()
        found = self._measured(programs)
        seconds = (time.monotonic() - begun) * len(programs) / max(1, len(found) - 1)
        with suppress(DeadlineExceededError):
            data = self._rows_to_fit(stack, _FIT_TIME * seconds + uploading)
            fitted = self._fitted(data, programs)
            progress.phase("simplification")
            if self.options.simplify:
                fitted = [self.form.simplified(program) for program in fitted]
            refitted = self._measured(list(dict.fromkeys(fitted)))
            # Formulas that there was no time to measure again stay as they were.
            left = [old for old, new in zip(programs, fitted, strict=True) if new not in refitted]
            found = {
                **{program: found[program] for program in left if program in found},
                **refitted,
            }
        found |= self.linear
        self._cross_validate(stack, found)
        if self.options.simplify:
            with suppress(DeadlineExceededError):
                seconds_until(self.deadline)
                self._shorten(data, found)
            self._cross_validate(stack, found)
        return self._front_of(found)

    def _cross_validate(self, stack: ExitStack, found: _Found) -> None:
        """Find the predictive lengths of formulas, where there may be noise."""
        least = min(loss for loss, _ in found.values())
        programs = self.selection.not_validated(found, least)
        if not programs:
            return
        fits: list[list[Program]] = []
        with suppress(DeadlineExceededError):
            seconds_until(self.deadline)
            folds = self.selection.folds
            self.parts = self.parts or [self._part(stack, rows) for rows, _ in folds]
            fits = [self._fitted(data, programs) for data in self.parts]
        self.selection.validate(programs, fits)

    def _rows_to_fit(self, stack: ExitStack, seconds: float) -> DatasetHandle:
        """Upload the rows that are not held out, or so many that a fit to them ends in time.

        Args:
            stack: keeps the data set.
            seconds: time of an upload of all rows and a fit to them.

        Raises:
            DeadlineExceededError: if the time of the search is over.

        """
        left = _FIT_SHARE * (seconds_until(self.deadline) or math.inf)
        seen = self.selection.seen
        count = len(seen)
        if seconds > left and count > self.options.sample_rows:
            count = max(self.options.sample_rows, int(count * left / seconds))
        return self._part(stack, np.sort(self._shuffled(seen)[:count]))

    def _shuffled(self, rows: Indices) -> Indices:
        """Shuffle rows, those of groups so that each has its share of the first ones."""
        groups = self.training.groups
        return self.rng.permutation(rows) if groups is None else balanced(self.rng, rows, groups)

    @property
    def _group_count(self) -> int:
        groups = self.training.groups
        return 0 if groups is None else int(groups.max()) + 1

    def _as_found(self, search: Search) -> list[Equation]:
        """Measure the front of a search that was interrupted, here and without a server.

        A server that is there is asked for the constants of groups.
        """
        programs = self._programs(search.front())
        if self.training.groups is not None and self.reason != "server":
            with suppress(UnavailableError, DeadlineExceededError):
                self._losses(programs, _LAST_SECONDS)
        X = self.training.rows
        given = (self.options.constraints or {}).get("monotonic", {})
        signs = directions(given, self.names, X.shape[1])
        found: _Found = {}
        for program in programs:
            values = self.selection.values(program)
            level = self.selection.level(values)
            for place, sign in signs.items():
                step = np.zeros(X.shape[1])
                step[place] = 1e-6 * np.ptp(X[:, place])
                ahead = reference.evaluate_program(program, (X + step).T)
                if not (sign * (ahead - values) >= -1e-12 * np.abs(values)).all():
                    level = math.inf
            level = level if self._sound([program])[0] else math.inf
            found[program] = [level, self.selection.r2(program)]
        found |= self.linear
        least = min(level for level, _ in found.values())
        if left := self.selection.not_validated(found, least):
            self.selection.validate(left)
        return self._front_of(found)

    def nothing(self) -> list[Equation]:
        """Return the front of a search that could not begin: the best of some constants."""
        count = 11 if len(self.training.target) > _MANY_ROWS else 101
        places = np.quantile(self.training.target, np.linspace(0.0, 1.0, count))
        mean = float(np.average(self.training.target, weights=self.training.weights))
        found: _Found = {}
        for value in {mean, *places.tolist()}:
            level = self.selection.level(np.full(len(self.training.target), value))
            found[Program.constant(value)] = [level, math.nan]
        self.selection.scale = min(level for level, _ in found.values())
        return self._in_given_units(self._front_of(found))

    def _whole(self, pool: Pool, row: int, spread: float) -> Program:
        """Build a + b f, without an a whose unit does not fit; the last fit sets b right."""
        if isinstance(self.form, TemplateForm):
            return self.form.program(pool.genomes, row)
        whole = _whole(pool, row, spread)
        if self._sound([whole])[0]:
            return whole
        return _whole(replace(pool, intercepts=np.zeros(len(pool))), row, spread)

    def _programs(self, pool: Pool) -> list[Program]:
        """Return the formulas of a pool as they are computed, and the best constant.

        A template that there are formulas of excludes the constant.
        """
        spread = float(np.std(self.training.target))
        programs = [self._whole(pool, row, spread) for row in range(len(pool))]
        if not programs or not isinstance(self.form, TemplateForm):
            programs = [self.constant, *programs]
        return list(dict.fromkeys(programs))

    def front(self, programs: list[Program], losses: Floats, r2: list[float]) -> list[Equation]:
        """Rank programs by the estimator's complexity."""
        found = build_front(
            list(zip(programs, losses.tolist(), r2, strict=True)),
            self._complexity,
            self._texts,
            self.selection.description_length,
            self.selection.scale,
            self.selection.floor(),
            as_function(self.loss).is_squares,
            self.selection.r2_of_loss,
            self.selection.predictive,
            self.selection.null,
            self.selection.surprise,
        )
        if not isinstance(self.form, TemplateForm):
            return found
        texts, digits = self.form.texts, self.options.digits
        return [replace(each, subformulas=texts(each.program, digits)) for each in found]

    def _texts(self, program: Program) -> tuple[str, str]:
        digits = self.options.digits
        return to_text(program, self.names, digits), to_latex(program, self.names, digits)

    def _complexity(self, program: Program) -> int:
        measure = complexity_measure(self.options.complexity_of_operators)
        return int(measure(Genomes.of(self.form.parts_of(program))).sum())

    def preview(self, search: Search) -> list[Equation]:
        """Return the front as it is now, with the losses on the sample."""
        pool, spread = search.front(), float(np.std(self.training.target))
        programs = [self._whole(pool, row, spread) for row in range(len(pool))]
        losses = pool.losses
        if not isinstance(self.form, TemplateForm):
            programs, losses = [*programs, self.constant], np.append(losses, self.selection.scale)
        return self._in_given_units(self.front(programs, losses, [np.nan] * len(programs)))

    def _in_given_units(self, front: list[Equation]) -> list[Equation]:
        """Return equations for the target and the variables as they were given.

        The search sees them divided by powers of two where their squares overflow or vanish.
        """
        if not as_function(self.loss).is_squares:
            rows = slice(None)
            front = [replace(each, r2=self.selection.r2(each.program, rows)) for each in front]
        unit, units = self.training.unit, self.training.variable_units
        if self.training.groups is not None:
            return [self._by_group(equation) for equation in front]
        if not units:
            return front
        factor = loss_unit(self.loss, unit)
        amount = self.selection.amount()
        log_unit = amount * math.log(unit)
        shift = 0.0 if factor == 1.0 else log_unit
        of_length = log_unit if as_function(self.loss).is_squares else shift

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
            more = self._complexity(program) - equation.complexity
            dearer = self.selection.price(program) - self.selection.price(equation.program)
            longer = 0.5 * (more + dearer) * math.log(max(amount, 2.0))
            found.append(
                replace(
                    equation,
                    complexity=self._complexity(program),
                    loss=equation.loss * factor,
                    excess=equation.excess * factor,
                    description_length=equation.description_length + of_length + longer,
                    predictive_length=equation.predictive_length + shift,
                    program=program,
                    equation=self._texts(program)[0],
                    latex=self._texts(program)[1],
                )
            )
        return found

    def _by_group(self, equation: Equation) -> Equation:
        """Return an equation with parameters in the place of the constants of groups."""
        table = self.selection.tables.get(equation.program)
        if table is None:
            return equation
        program = self.form.lifted(equation.program, free=True)[0]
        text, latex = self._texts(program)
        constants = tuple(map(tuple, table.tolist()))
        return replace(equation, program=program, equation=text, latex=latex, constants=constants)

    @property
    def loss(self) -> Loss | LossFunction:
        """The loss, or what is left to 1 of a score."""
        given = as_loss(self.options.loss)
        function = as_function(given)
        return LossFunction(function.row, Closing.RELATIVE) if function.is_score else given

    def _best_constant(
        self, seen: Indices, sample: Indices, compared: DatasetHandle
    ) -> tuple[Program, float]:
        """Return the constant of the least loss, and its loss above the least possible."""
        target, weights = self.training.target[seen], self.training.weights[seen]
        middle = float(np.average(target, weights=weights))
        start = Program.parameter(0)
        fit = self.client.optimize(
            compared,
            start,
            [middle],
            loss=self.loss,
            timeout=seconds_until(self.deadline),
            partial=self.deadline < math.inf,
        )
        best = middle if as_function(self.loss).is_squares else float(fit.parameters[0][0])
        if self.training.groups is not None:
            best = float(freed(np.array([best]))[0])
        return Program.constant(best), max(float(fit.loss[0]) - self.selection.floor(sample), 0.0)

    def _divided(self) -> tuple[Indices, Indices]:
        """Return the rows that the search sees, and those that are held out."""
        rows = len(self.training.target)
        count = int(self.options.held_out * rows) if rows >= FEWEST_DIVIDED else 0
        shuffled = self._shuffled(np.arange(rows))
        return np.sort(shuffled[count:]), np.sort(shuffled[:count])

    def _part(self, stack: ExitStack, rows: Indices) -> DatasetHandle:
        """Upload some of the rows."""
        if len(rows) == len(self.training.target) and hasattr(self, "data"):
            return self.data
        X, y, weights = (part[rows] for part in self.training[:3])
        groups = self.training.groups
        grouped: dict[str, Any] = {} if groups is None else {"groups": groups[rows]}
        return stack.enter_context(self.client.upload(X, y, weights, **grouped, dtype="float64"))

    def _search(
        self, stack: ExitStack, compared: DatasetHandle, sample: Indices, progress: Progress
    ) -> Search:
        options = self.options
        operators = operator_names(options.operators)
        codes = tuple(map(operator_code, operators))
        of_the_table = tuple(name for name in operators if name in OPERATORS)
        drawing = self.rng, codes, self.training.rows.shape[1], options.size_limit
        settings = self._settings(progress, sample)
        progress.phase("library of short formulas")
        breeder: Breeder
        pairs: PairSearch | FirstFormulas
        if isinstance(self.form, TemplateForm):
            breeder = TemplateBreeder(*drawing, self.form)
            pairs = FirstFormulas(breeder.library(of_the_table, _TEMPLATES * options.population))
        else:
            breeder, pairs = Breeder(*drawing), self._pairs(stack, sample, of_the_table, settings)
        return Search(
            self.client,
            compared,
            self.form,
            breeder,
            pairs,
            settings,
            self.start,
            self._reweighing(stack, sample),
        )

    def _reweighing(
        self, stack: ExitStack, sample: Indices
    ) -> Callable[[Program], DatasetHandle] | None:
        """Return what uploads the sample with weights for least squares, by the best formula."""
        is_plain = self.training.groups is None and not isinstance(self.form, TemplateForm)
        if as_function(self.loss).is_squares or not is_plain:
            return None

        def reweigh(best: Program) -> DatasetHandle:
            X, y, weights = (part[sample] for part in self.training[:3])
            predictions = reference.evaluate_program(best, X.T)
            fresh = proposal_weights(as_function(self.loss), predictions, y, weights)
            return stack.enter_context(self.client.upload(X, y, fresh, dtype="float64"))

        return reweigh

    def _pairs(
        self, stack: ExitStack, rows: Indices, operators: tuple[str, ...], settings: Settings
    ) -> PairSearch:
        groups, client = self.training.groups, self.client
        if groups is not None:  # Their constants differ: the largest group has all of a law.
            assert isinstance(client, GroupedClient)
            largest = np.bincount(groups).argmax()
            rows = self.selection.seen
            rows = rows[groups[rows] == largest]
            client = client.client
        chosen = np.sort(self.rng.permutation(rows)[:_PAIR_ROWS])
        given = (part[chosen] for part in self.training[:3])
        data = stack.enter_context(client.upload(*given, dtype="float64"))
        X, y, weights = (part[chosen] for part in self.training[:3])
        middle = np.full(len(y), np.median(y))
        weights = proposal_weights(as_function(self.loss), middle, y, weights)

        def values(genomes: Genomes) -> Floats:
            left = seconds_until(settings.ends)
            return np.asarray(client.evaluate(data, genomes.population(), timeout=left).T)

        options = self.options
        width, most = options.size_limit, _LIBRARY * options.population
        variables = relevant(X, y, _MOST_VARIABLES)
        count = len(variables)
        short = library(operators, count, width, most)
        targets = views(operators, X, y, weights / weights.sum(), width)
        inner = arguments(operators, count, width, math.ceil(_ARGUMENTS * options.population))
        parts = [genomes[settings.admissible(genomes)] for genomes in (short, inner)]
        symbols = X.shape[1] + len(operators) + 1
        if count < X.shape[1]:
            for part in parts:
                places = part.codes == VARIABLE
                part.values[places] = variables[part.values[places].astype(np.int64)]
                part.known = ()
        return PairSearch(operators, values, list(targets), width, parts[0], parts[1], symbols)

    def _settings(self, progress: Progress, sample: Indices) -> Settings:
        options = self.options
        complexity = complexity_measure(options.complexity_of_operators)
        return Settings(
            population=options.population,
            generations=options.generations,
            fit_iterations=options.fit_iterations,
            stop_loss=options.tolerance * self.selection.scale,
            ends=self._end_of_search(),
            early_stopping=options.early_stopping,
            rows=self.selection.amount(sample),
            loss=self.loss,
            middle=Program.constant(float(np.median(self.training.target[sample]))),
            floor=self.selection.floor(sample),
            complexity=lambda genomes: complexity(genomes) - self.form.overhead,
            admissible=self._admission(complexity),
            penalty=lambda genomes, *others: (
                self.selection.scale * self._violations(self.form.whole(genomes), *others)
            ),
            report=lambda search: progress.report(self, search),
            phase=progress.phase,
        )

    def _end_of_search(self) -> float:
        if self.deadline == math.inf:
            return self.deadline
        seconds = self.deadline - self.begun
        least, most = (part * seconds for part in _RESERVE)
        many = len(self.training.target) > _MANY_ROWS
        reserve = most if many else max(least, min(most, _LEAST_RESERVE))
        return self.deadline - reserve * (1 if self.training.groups is None else 2)

    @cached_property
    def _violations(self) -> Violations:
        given = (self.options.constraints or {}).get("monotonic", {})
        return violations(given, self.names, self.training.rows.shape[1], self.client)

    def _sound(self, programs: list[Program]) -> Mask:
        """Return which formulas, slope and intercept included, have units that fit."""
        constant = np.array([program.variables == 0 for program in programs])
        return np.asarray(self._consistent(Genomes.of(programs)) | constant)

    def _violating(self, programs: list[Program]) -> Mask:
        """Return which formulas violate a constraint of monotonicity."""
        genomes = Genomes.of(programs)
        return np.asarray(self._violations(genomes, np.ones(len(programs)), self.data) > 0.0)

    def _admission(self, complexity: Callable[[Genomes], Indices]) -> Callable[[Genomes], Mask]:
        options = self.options
        admit = admission(options.constraints, complexity, options.size_limit)
        form, consistent = self.form, self._consistent

        def admissible(genomes: Genomes) -> Mask:
            kept = complexity(genomes) - form.overhead <= options.size_limit
            for core in form.cores(genomes):
                kept &= admit(core)
            return np.asarray(kept & consistent(form.whole(genomes)))

        return admissible

    @cached_property
    def _consistent(self) -> Callable[[Genomes], Mask]:
        """Return which formulas have consistent units, all if there are none."""
        options = self.options
        if options.units is None:
            return lambda genomes: np.ones(len(genomes), np.bool_)
        of_variables = dimensions(options.units, self.names, self.training.rows.shape[1])
        if not options.dimensionless_constants:
            return consistency(of_variables)
        unit = options.target_unit
        target = None if unit is None else dimension(unit, "target_unit")
        return consistency(of_variables, 0.0, target)

    def _fitted(self, data: DatasetHandle, programs: list[Program]) -> list[Program]:
        """Fit all constants, but of formulas that have too many; as well as the time allows."""
        most = min(_MOST_FITTED, len(self.training.target) - len(self.selection.held_out))
        lifted = [
            self.form.lifted(program)
            if np.count_nonzero(program.codes == CONSTANT) <= most
            else (program, np.empty(0))
            for program in programs
        ]
        left = seconds_until(self.deadline)
        fit = self.client.optimize(
            data,
            [program for program, _ in lifted],
            [constants for _, constants in lifted],
            loss=self.loss,
            max_iterations=_LAST_ITERATIONS,
            timeout=None if left is None else _FIT_SHARE * left,
            partial=left is not None,
        )
        found = zip(programs, lifted, fit.parameters, strict=True)
        return [
            self.form.bound(program, numbers) if len(starts) else program
            for program, (_, starts), numbers in found
        ]

    def _measured(self, programs: list[Program]) -> _Found:
        """Measure formulas: their losses on all rows, infinite for what violates a constraint.

        The best constant is always measured; of the others so many as there is time for, and those
        that come first.
        """
        found: _Found = {}
        for start in range(0, len(programs), _MEASURED):
            part = programs[start : start + _MEASURED]
            try:
                left = seconds_until(self.deadline)
                losses = self._losses(part, left)
                wrong = self._violating(part) | ~self._sound(part)
                losses = np.where(wrong | np.isnan(losses), np.inf, losses - self.selection.floor())
            except DeadlineExceededError:
                break
            for program, loss in zip(part, losses.tolist(), strict=True):
                found[program] = [loss, self.selection.r2(program)]
        return found or {
            self.constant: [
                self.selection.scale,
                self.selection.r2(self.constant),
            ]
        }

    def _losses(self, programs: list[Program], timeout: float | None) -> Floats:
        """Return losses on all rows, of groups by constants that are fitted to the rows seen."""
        if self.training.groups is None:
            found = self.client.evaluate(self.data, programs, loss=self.loss, timeout=timeout)
            return np.asarray(found)
        lifted, starts = zip(*(self.form.lifted(p, free=True) for p in programs), strict=True)
        fit: Any = self.client.optimize(
            self.seen,
            list(lifted),
            list(starts),
            loss=self.loss,
            max_iterations=_LAST_ITERATIONS,
            timeout=None if timeout is None else _FIT_SHARE * timeout,
            partial=timeout is not None,
        )
        self.selection.tables.update(zip(programs, fit.tables, strict=True))
        levels = [self.selection.level(self.selection.values(program)) for program in programs]
        return np.asarray(np.array(levels) + self.selection.floor())

    def _shorten(self, data: DatasetHandle, found: _Found) -> None:
        """Add shorter forms of the formulas that a criterion may choose, while there is time.

        One parameter less may cost what it is worth to the description length.
        """
        amount = self.selection.amount()
        front = [each for each in self._front_of(found) if not each.is_linear_regression]
        criteria = [self.options.model_selection, *SELECTIONS]
        chosen, *others = (front[selected(front, criterion)].program for criterion in criteria)
        finite = [program for program, (loss, _) in found.items() if math.isfinite(loss)]
        likely = sorted(
            {*finite} - {self.selection.null},
            key=lambda program: self.selection.choice_length(program, found[program][0]),
        )[:_SHORTENED]
        steps = [(program, 1.0) for program in dict.fromkeys([chosen, *likely, *others])]
        # Each group is fitted, so that a second round takes long there.
        far = likely if self.training.groups is None else []
        for program, factor in [*steps, *((program, _FAR) for program in far)]:
            excess, floor = max(found[program][0], 0.0), self.selection.floor()
            # The tolerance is part of the loss above the least possible, simplify's of the loss.
            part = excess / abs(excess + floor) if excess + floor else 1.0
            bulk = self.selection.bulk(program)
            part *= 1.0 if bulk is None else bulk[1]
            how = Shortening(
                self.client,
                data,
                self.loss,
                part * min(_MOST_TOLERANCE, factor * math.log(max(amount, 2.0)) / amount),
                self._snap(found[program][0]),
                self.deadline,
            )
            short = self.form.shortened(program, how)
            found.update(self._measured([short]))

    def _snap(self, excess: float) -> Any:
        """Return what constants may become: multiples of pi and e only in laws, not in noise."""
        noisy = excess > _NOISE * self.selection.scale
        return "numbers" if noisy and self.options.snap == "constants" else self.options.snap

    def _front_of(self, found: _Found) -> list[Equation]:
        losses, r2 = zip(*found.values(), strict=True)
        return self.front(list(found), np.array(losses), list(r2))


def _whole(pool: Pool, row: int, spread: float) -> Program:
    """Build a + b f with its numbers, without an a or b that changes nothing."""
    program = pool.genomes.program(row)
    slope, intercept = float(pool.slopes[row]), float(pool.intercepts[row])
    if abs(slope - 1.0) > _NO_INTERCEPT:
        program = Program.apply("mul", Program.constant(slope), program)
    if abs(intercept) > _NO_INTERCEPT * spread:
        program = Program.apply("add", program, Program.constant(intercept))
    return program
