"""The search for the equations of one target: progress, rows, and what follows the search."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client
from warpfit.dataset.tables import caller_level
from warpfit.errors import DeadlineExceededError, InvalidArgumentError, UnavailableError
from warpfit.expressions.language import to_latex, to_text
from warpfit.ir import Program
from warpfit.losses import (
    Closing,
    Loss,
    LossFunction,
    as_function,
    as_loss,
)
from warpfit.ops import CONSTANT, VARIABLE
from warpfit.sklearn.constraints import FormulaRules, operator_names
from warpfit.sklearn.engine_search import INTERRUPTIONS, Found, SearchTask, reason_of, search
from warpfit.sklearn.equations import (
    SELECTIONS,
    Equation,
    EquationTable,
    ModelSelection,
    build_front,
    selected,
)
from warpfit.sklearn.estimator import SearchWarning, TrainingData, loss_unit
from warpfit.sklearn.genomes import Floats, Genomes, Indices, macros_of, recoded
from warpfit.sklearn.groups import balanced, freed
from warpfit.sklearn.selection import FEWEST_DIVIDED, Selection
from warpfit.sklearn.templates import Form, Shortening, TemplateForm, seconds_until

#: Seconds between lines of progress on a terminal, and elsewhere; and between checkpoints.
_LINE_SECONDS: Final = (0.3, 5.0)
_CHECKPOINT_SECONDS: Final = 20.0
#: The same between two tables of the equations.
_TABLE_SECONDS: Final = 5.0
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
    table: Path | None = None
    """File to which the equations are written."""
    tabled: float = 0.0

    def report(self, target: TargetSearch, found: Found) -> bool:
        """Report a generation; return whether the callback ends the search."""
        now = time.monotonic()
        terminal = sys.stderr is not None and sys.stderr.isatty()
        if self.verbose and now - self.shown >= _LINE_SECONDS[not terminal]:
            self.shown = now
            if front := target.preview(found):
                best = min(front, key=lambda equation: equation.loss)
                self._line(
                    f"{time.monotonic() - self.started:.1f} s  generation "
                    f"{target.generation + found.generation}  "
                    f"loss {best.loss:.4g}  {best.equation}"
                )
        if self.checkpoint is not None and now - self.saved >= _CHECKPOINT_SECONDS:
            self.saved = now
            self.save(found.formulas())
        if self.table is not None and now - self.tabled >= _TABLE_SECONDS:
            save_table(self.table, target.preview(found))
            self.tabled = time.monotonic()  # a preview takes a while
        if self.callback is None:
            return False
        generation = target.generation + found.generation
        return bool(self.callback(target.options, generation, target.preview(found)))

    def phase(self, text: str) -> None:
        """Say what is done before the first generation, or behind the last one."""
        if self.verbose:
            self._line(f"{time.monotonic() - self.started:.1f} s  {text}")

    def save(self, genomes: Genomes) -> None:
        """Write the checkpoint; a search does not end because its disk is full."""
        if self.checkpoint is None:
            return
        with _no_end_by_a_file(f"the checkpoint {self.checkpoint}"):
            save(self.checkpoint, genomes)

    def _line(self, line: str) -> None:
        """Show a line, on a terminal in the place of the last one, whose width it keeps to."""
        terminal = sys.stderr is not None and sys.stderr.isatty()
        most = min(_LINE, shutil.get_terminal_size().columns - 1) if terminal else _LINE
        shown = f"\r{line[:most]:<{most}}" if terminal else f"{line[:most]}\n"
        with suppress(OSError):  # a search does not end because its lines cannot be shown
            print(shown, end="", file=sys.stderr, flush=True)


def save(path: Path, genomes: Genomes) -> None:
    """Write formulas to a file, which is replaced in one step."""
    with replaced(path) as partial, partial.open("wb") as file:
        macros = macros_of(genomes)
        np.savez_compressed(
            file,
            codes=genomes.codes,
            values=genomes.values,
            starts=genomes.starts,
            macro_codes=np.array([*macros], np.uint8),
            macro_names=np.array([*macros.values()], np.str_),
        )


def save_table(path: Path, front: Sequence[Equation]) -> None:
    """Write equations as CSV to a file, which is replaced in one step."""
    with _no_end_by_a_file(f"the table {path}"), replaced(path) as partial:
        partial.write_text(EquationTable(tuple(front)).to_csv(), "utf-8", newline="")


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a file beside another one, which it replaces in one step where all went well."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    yield partial
    partial.replace(path)


@contextmanager
def _no_end_by_a_file(what: str) -> Iterator[None]:
    """Warn of a file that cannot be written: a search does not end because a disk is full."""
    try:
        yield
    except OSError as error:
        warnings.warn(
            f"{what} cannot be written: {error.strerror}. Make room, or the folder writable, "
            "before the search ends",
            SearchWarning,
            stacklevel=caller_level(),
        )


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
            names = content["macro_names"].tolist() if "macro_names" in content else []
            if names:
                macros = dict(zip(content["macro_codes"].tolist(), names, strict=True))
                genomes = recoded(genomes, macros)
        suits = form.fits(genomes)
        whole = form.whole(genomes) if suits else genomes[:0]
        programs = [whole.program(row) for row in range(len(whole))]
    except (EOFError, OSError, LookupError, TypeError, ValueError, zipfile.BadZipFile) as error:
        is_known = isinstance(error, OSError) or type(error) is LookupError
        why = str(error) if is_known else "no search has written it"
        raise _bad_checkpoint(path, why) from error
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
#: What is said of groups.
_NOT_FITTED: Final = "the constants of groups were not fitted: all groups have the same"
#: Most rows that join the sample because they refute an exact formula, and multiple of its loss
#: that what replaces a formula may have.
_REFUTING: Final = 50
_SAME_LOSS: Final = 1.05
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


class SearchOptions(Protocol):
    """The settings that a search reads; see `warpfit.sklearn.SymbolicRegressor`."""

    loss: Any
    model_selection: ModelSelection
    population: int | None
    generations: int
    max_size: int | None
    operators: Sequence[str]
    constraints: Mapping[str, Any] | None
    dimensionless_constants: bool
    fit_iterations: int
    sample_rows: int
    held_out: float
    frequency_weights: bool
    simplify: bool
    snap: Any
    digits: int | None
    tolerance: float
    early_stopping: int | None

    def rules(
        self, form: Form, training: TrainingData, names: Sequence[str], guesses: Sequence[Program]
    ) -> FormulaRules:
        """Return the rules for each formula."""


@dataclass
class TargetSearch:
    """The search for the equations of one target."""

    options: SearchOptions
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
    guesses: Sequence[Program] = ()
    """Formulas of the user, which are among the equations unless better ones take their place."""
    rules: FormulaRules = field(init=False)
    """The rules for each formula."""
    selection: Selection = field(init=False)
    """Computes description lengths and predictive lengths of the formulas."""
    constant: Program = field(init=False)
    """The best constant, which is among the equations."""
    data: DatasetHandle = field(init=False)
    """All rows."""
    seen: DatasetHandle = field(init=False)
    """Rows that are not held out, if they are in groups."""
    sample: Indices = field(init=False)
    """Rows on which the search compares formulas."""
    generation: int = 0
    tried: int = 0
    """Formulas that were scored, and different structures among them."""
    distinct: int = 0
    reason: str = ""
    """Why the search ended, as `SymbolicRegressor.reason_`."""
    undone: list[str] = field(default_factory=list)
    """Sentences that say for what there was no time."""
    formulas: Genomes = field(default_factory=lambda: Genomes.of([]))
    """All formulas of the search, best first."""
    parts: list[DatasetHandle] = field(default_factory=list)
    """Rows that are fitted in a cross-validation."""
    kept: _Found = field(default_factory=dict)
    """Formulas that are measured before the search: the linear regression, if it takes part, and
    guesses; and behind it those that have ended it by their loss."""
    replaced: dict[Program, Program] = field(default_factory=dict)
    """What a fit or a simplification has made of a formula."""
    _allowed: dict[Program, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Prepare the choice, and keep some time for what is computed behind the last answer."""
        if self.deadline < math.inf and len(self.training.target) > _MANY_ROWS:
            part, most = _CLOSING
            self.deadline -= min(part * (self.deadline - self.begun), most)
        options = self.options
        operators = operator_names(options.operators)
        self.rules = options.rules(self.form, self.training, self.names, self.guesses)
        may_be_linear = (
            as_function(self.loss).is_squares
            and self.training.groups is None
            and not self.form.is_template
            and not options.constraints
            and not options.dimensionless_constants
            and {"add", "mul"} <= {*operators}
        )
        longest = math.inf if options.max_size is None else float(options.max_size)
        self.selection = Selection(
            self.training,
            as_function(self.loss),
            self.form,
            self.rules.size,
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
        rows, groups = len(self.training.target), self.training.groups
        count = int(self.options.held_out * rows) if rows >= FEWEST_DIVIDED else 0
        shuffled = self._shuffled(np.arange(rows))
        self.selection.hold_out(np.sort(shuffled[:count]))
        few = self.options.sample_rows
        if groups is not None:
            few = max(few, _GROUP_ROWS * (int(groups.max()) + 1))
        self.sample = np.sort(self._shuffled(np.sort(shuffled[count:]))[:few])
        with ExitStack() as stack:
            progress.phase(f"upload of {rows:,} rows")
            begun = time.monotonic()
            try:
                if (null := self.selection.null) is not None:  # which needs no server
                    level = self.selection.level(self.selection.values(null))
                    self.kept[null] = [level, self.selection.null_r2]
                self.data = self._part(stack, np.arange(rows))
                uploading = time.monotonic() - begun
                found = self._searched(stack, progress)
            except DeadlineExceededError:
                self.reason = "max_seconds"
                return self.nothing()
            self.formulas = found.formulas()
            if self.reason not in INTERRUPTIONS:
                try:
                    return self._ended(self._finished(stack, found, progress, uploading))
                except (KeyboardInterrupt, UnavailableError) as error:
                    self.reason = reason_of(error)
            # Measured here; a server that is there is asked for the constants of groups.
            programs = self._with_constant(found.front().programs)
            if groups is not None and self.reason != "server":
                with suppress(UnavailableError, DeadlineExceededError):
                    self._losses(programs, _LAST_SECONDS)
            measured = self._measured_here(programs) | self.kept
            shown = self._shown(measured)
            least = min(level for level, _ in shown.values())
            if left := self.selection.not_validated(shown, least):
                self.selection.validate(left)
            return self._ended(self._front_of(measured))

    def _searched(self, stack: ExitStack, progress: Progress) -> Found:
        """Search until there is a reason to end that holds for all rows.

        A formula that is exact on the sample alone, or has no value on another row, ends no search:
        the rows that say so join the sample, from the rows held out, too, and the search goes on.

        Raises:
            DeadlineExceededError: if the time is over before anything has been found.

        """
        start, ends_by_loss = self.start, True
        while True:
            compared = self._part(stack, self.sample)
            if self.training.groups is not None:
                self.seen = self._part(stack, self.selection.seen)
            progress.phase("fit of a constant")
            seen = self.selection.seen
            target, weights = self.training.target[seen], self.training.weights[seen]
            middle = float(np.average(target, weights=weights))
            fit = self.client.optimize(
                compared,
                Program.parameter(0),
                [middle],
                loss=self.loss,
                timeout=seconds_until(self.deadline),
                partial=self.deadline < math.inf,
            )
            best = middle if as_function(self.loss).is_squares else float(fit.parameters[0][0])
            if self.training.groups is not None:
                best = float(freed(np.array([best]))[0])
            self.constant = Program.constant(best)
            excess = float(fit.loss[0]) - self.selection.floor(self.sample)
            self.selection.scale = max(excess, 0.0)
            if self.guesses and not self.generation:
                # As they are, and with numbers that are fitted to the sample: they are among the
                # formulas whatever there is no time for.
                self.kept |= self._measured_here(self.guesses)
                fitted = dict.fromkeys(self._fitted(compared, [*self.guesses]))
                self.kept |= self._measured_here([each for each in fitted if each not in self.kept])
            task = self._task(compared, progress, start, ends_by_loss)
            found = search(stack, task)
            self.generation += found.generation
            self.tried, self.distinct = self.tried + found.tried, self.distinct + found.distinct
            self.reason = found.reason
            if self.reason != "tolerance":
                return found
            front = found.front()
            exact = [
                program
                for program, loss in zip(front.programs, front.losses.tolist(), strict=True)
                if loss <= task.stop_loss
            ]
            wrong = self._rows_that_refute(exact)
            if wrong is None:
                return found
            start, ends_by_loss = found.formulas(), len(wrong) > 0
            self.sample = np.union1d(self.sample, wrong)
            self.selection.hold_out(np.setdiff1d(self.selection.held_out, wrong))

    def _rows_that_refute(self, exact: Sequence[Program]) -> Indices | None:
        """Return rows outside the sample on which formulas fail that are exact on the sample.

        It is None if one of the formulas is exact on all rows and may be shown, and is kept.
        """
        with np.errstate(all="ignore"):
            for program in exact:
                for own in (program, self.form.simplified(program)):
                    measured = self._measured_here([own])
                    if self._may_be_shown(own) and self._is_exact(measured[own][0]):
                        self.kept |= measured
                        return None
            outside = np.setdiff1d(np.arange(len(self.training.target)), self.sample)
            errors = [
                np.abs(self.selection.values(own, outside) - self.training.target[outside])
                for own in exact
            ]
        if not errors or not len(outside):
            return np.empty(0, np.int64)
        errors = [np.where(np.isnan(each), np.inf, each) for each in errors]
        least = np.min(errors, axis=0)
        if np.isinf(least).any():
            rows = outside[np.isinf(least)]
            X = self.training.rows[rows[0]] * (self.training.variable_units or 1.0)
            names = self.names or tuple(f"x{place + 1}" for place in range(len(X)))
            where = ", ".join(f"{name} = {value:g}" for name, value in zip(names, X, strict=True))
            warnings.warn(
                f"{self._texts(exact[0])[0][:200]} fits the rows exactly, but {len(rows):,} where "
                f"it has no value, such as {where[:200]}: it is no equation of all rows. Leave "
                "these rows out if it is the law",
                SearchWarning,
                stacklevel=caller_level(),
            )
        worst = outside[np.argsort(-least, kind="stable")[:_REFUTING]]
        return np.asarray(worst[-np.sort(-least)[: len(worst)] < 0.0])

    def _is_exact(self, excess: float) -> bool:
        """Tell whether a loss on all rows ends a search, as ``tolerance`` says."""
        return excess <= self.options.tolerance * self.selection.scale

    def _ended(self, front: list[Equation]) -> list[Equation]:
        """Return the equations as they are shown, and make sure of the reason of the end."""
        if self.reason == "tolerance" and not any(self._is_exact(each.excess) for each in front):
            self.reason = "max_seconds" if time.monotonic() > self.deadline else "generations"
        return self._in_given_units(front)

    def _finished(
        self, stack: ExitStack, search: Found, progress: Progress, uploading: float
    ) -> list[Equation]:
        """Fit the formulas of a search to more rows than its sample, and shorten them.

        Args:
            stack: keeps data sets.
            search: what has been found.
            progress: is told what is done.
            uploading: seconds of an upload of all rows.

        """
        progress.phase("last fits")
        kept = [each for each in self.kept if each != self.selection.null]
        programs = self._with_constant([*search.promising().programs, *kept])
        begun = time.monotonic()
        found = self._measured(programs)
        seconds = (time.monotonic() - begun) * len(programs) / max(1, len(found) - 1)
        data: DatasetHandle | None = None
        with suppress(DeadlineExceededError):
            # The rows that are not held out, or so many that a fit to them ends in time.
            left = _FIT_SHARE * (seconds_until(self.deadline) or math.inf)
            seen, wanted = self.selection.seen, _FIT_TIME * seconds + uploading
            count = len(seen)
            if wanted > left and count > self.options.sample_rows:
                count = max(self.options.sample_rows, int(count * left / wanted))
            data = self._part(stack, np.sort(self._shuffled(seen)[:count]))
            fitted = self._fitted(data, programs)
            self._replace(programs, fitted)
            progress.phase("simplification")
            if self.options.simplify:
                simple = [self.form.simplified(program) for program in fitted]
                self._replace(fitted, simple)
            fresh = dict.fromkeys([*fitted, *(simple if self.options.simplify else [])])
            found |= self._measured([each for each in fresh if each not in found])
        if data is None:
            self.undone.append("no formula was fitted to more rows than those of the search")
        found |= self.kept
        self._cross_validate(stack, found)
        if self.options.simplify and data is not None:
            try:
                seconds_until(self.deadline)
                self._shorten(data, found)
            except DeadlineExceededError:
                self.undone.append("constants and terms were not shortened")
            self._cross_validate(stack, found)
        return self._front_of(found)

    def _replace(self, old: Sequence[Program], new: Sequence[Program]) -> None:
        pairs = zip(old, new, strict=True)
        self.replaced |= {before: behind for before, behind in pairs if before != behind}

    def _with_constant(self, programs: Sequence[Program]) -> list[Program]:
        """Add the best constant, which comes first; a template excludes it."""
        if programs and self.form.is_template:
            return list(dict.fromkeys(programs))
        return list(dict.fromkeys([self.constant, *programs]))

    # ------------------------------------------------------------------- what may be shown

    def _may_be_shown(self, program: Program) -> bool:
        if program not in self._allowed:
            self._allowed[program] = program == self.selection.null or (
                self.rules.allows(program)
                and not self.selection.hangs_on_rounding(program)
                and not self.selection.repeats_null(program)
            )
        return self._allowed[program]

    def _shown(self, found: _Found) -> _Found:
        """Return the formulas that may be shown, without those that others have replaced.

        A formula stays if what has replaced it breaks a rule or fits worse.
        """
        shown = {program: entry for program, entry in found.items() if self._may_be_shown(program)}

        def is_replaced(program: Program) -> bool:
            most = _SAME_LOSS * shown[program][0]
            most = max(most, self.options.tolerance * self.selection.scale)
            known, other = {program}, self.replaced.get(program)
            while other is not None and other not in known:
                if other in shown and shown[other][0] <= most:
                    return True
                known.add(other)
                other = self.replaced.get(other)
            return False

        kept = {program: shown[program] for program in shown if not is_replaced(program)}
        if any(math.isfinite(loss) for loss, _ in kept.values()):
            return kept
        return {self.constant: [self.selection.scale, self.selection.r2(self.constant)]}

    def _cross_validate(self, stack: ExitStack, found: _Found) -> None:
        """Find the predictive lengths of formulas, where there may be noise."""
        shown = self._shown(found)
        least = min(loss for loss, _ in shown.values())
        programs = self.selection.not_validated(shown, least)
        if not programs:
            return
        fits: list[list[Program]] = []
        try:
            seconds_until(self.deadline)
            folds = self.selection.folds
            self.parts = self.parts or [self._part(stack, rows) for rows, _ in folds]
            fits = [self._fitted(data, programs) for data in self.parts]
        except DeadlineExceededError:
            fits = []
            self.undone.append("the cross-validation has fitted no constants")
        self.selection.validate(programs, fits)

    def _shuffled(self, rows: Indices) -> Indices:
        """Shuffle rows, those of groups so that each has its share of the first ones."""
        groups = self.training.groups
        return self.rng.permutation(rows) if groups is None else balanced(self.rng, rows, groups)

    def _measured_here(self, programs: Sequence[Program]) -> _Found:
        """Measure formulas on all rows without a server."""
        found: _Found = {}
        for program in programs:
            level = self.selection.level(self.selection.values(program))
            level = level if math.isfinite(level) else math.inf
            found[program] = [level, self.selection.r2(program)]
        return found

    def nothing(self) -> list[Equation]:
        """Return the front of a search that could not begin.

        It has the best of some constants, the linear regression, and the guesses as they are.
        """
        self.undone.append("no formula was searched")
        if self.training.groups is not None:
            self.undone.append(_NOT_FITTED)
        count = 11 if len(self.training.target) > _MANY_ROWS else 101
        places = np.quantile(self.training.target, np.linspace(0.0, 1.0, count))
        mean = float(np.average(self.training.target, weights=self.training.weights))
        constants = [Program.constant(value) for value in {mean, *places.tolist()}]
        levels = [
            self.selection.level(np.full(len(self.training.target), each.values[0]))
            for each in constants
        ]
        best = int(np.nanargmin(np.where(np.isfinite(levels), levels, np.inf)))
        self.constant, self.selection.scale = constants[best], levels[best]
        found = {self.constant: [levels[best], math.nan]}
        found |= self._measured_here(self.guesses) | self.kept
        if left := self.selection.not_validated(found, min(level for level, _ in found.values())):
            self.selection.validate(left)
        return self._in_given_units(self._front_of(found))

    def _front_of(self, found: _Found) -> list[Equation]:
        """Rank the formulas that may be shown by their size."""
        shown = [(program, *entry) for program, entry in self._shown(found).items()]
        front = build_front(
            shown,  # type: ignore[arg-type]  # an entry has two numbers
            self.rules.size,
            self._texts,
            self.selection.description_length,
            self.selection.scale,
            self.selection.floor(),
            as_function(self.loss).is_squares,
            self.selection.r2_of_loss,
            self.selection.predictive,
            self.selection.null,
            self.selection.surprise,
            self.selection.is_unpaid,
            self.selection.structure_length,
            self.selection.taken_by_constants,
        )
        if not isinstance(self.form, TemplateForm):
            return front
        texts, digits = self.form.texts, self.options.digits
        return [replace(each, subformulas=texts(each.program, digits)) for each in front]

    def _texts(self, program: Program) -> tuple[str, str]:
        digits = self.options.digits
        return to_text(program, self.names, digits), to_latex(program, self.names, digits)

    def preview(self, search: Found) -> list[Equation]:
        """Return the front as it is now, with the losses on the sample."""
        front = search.front()
        losses = dict(zip(front.programs, front.losses.tolist(), strict=True))
        if not self.form.is_template:
            losses[self.constant] = self.selection.scale
        found = {program: [loss, math.nan] for program, loss in losses.items()}
        return self._in_given_units(self._front_of(found))

    def _in_given_units(self, front: list[Equation]) -> list[Equation]:
        """Return equations for the target and the variables as they were given.

        The search sees them divided by powers of two where their squares overflow or vanish.
        """
        if not as_function(self.loss).is_squares:
            rows = slice(None)
            front = [replace(each, r2=self.selection.r2(each.program, rows)) for each in front]
        unit, units = self.training.unit, self.training.variable_units
        if self.training.groups is not None:
            tables, found = self.selection.tables, []
            for equation in front:
                if (table := tables.get(equation.program)) is not None:
                    # Parameters take the place of the constants of groups.
                    program = self.form.lifted(equation.program, free=True)[0]
                    text, latex = self._texts(program)
                    equation = replace(
                        equation,
                        program=program,
                        equation=text,
                        latex=latex,
                        constants=tuple(map(tuple, table.tolist())),
                    )
                found.append(equation)
            return found
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
            if len(program) == 1 and not program.variables:
                program = Program.constant(unit * float(program.values[0]))
            else:
                program = Program.apply("mul", Program.constant(unit), program)
            most = self.options.max_size
            is_long = most is not None and self.rules.size(program) > most
            shorter = program.simplify() if self.options.simplify or is_long else program
            # A quotient by a unit that becomes a product may be one too many for a rule.
            program = shorter if self.rules.allows(shorter) else program
            if most is not None and self.rules.size(program) > most and program.variables:
                continue  # with its units it is longer than a formula may be
            more = self.rules.size(program) - equation.complexity
            dearer = self.selection.price(program) - self.selection.price(equation.program)
            longer = 0.5 * (more + dearer) * math.log(max(amount, 2.0))
            found.append(
                replace(
                    equation,
                    complexity=self.rules.size(program),
                    # The factor may be infinite.
                    loss=equation.loss and equation.loss * factor,
                    excess=equation.excess and equation.excess * factor,
                    description_length=equation.description_length + of_length + longer,
                    predictive_length=equation.predictive_length + shift,
                    program=program,
                    equation=self._texts(program)[0],
                    latex=self._texts(program)[1],
                )
            )
        if not found:
            raise InvalidArgumentError(
                f"no formula of at most max_size={self.options.max_size} has room for the factors "
                "that bring numbers as large or small as these to the range of the search",
                "UNSATISFIABLE",
                "Raise max_size by 4, or give the target and the variables in units near 1",
                "max_size",
            )
        return found

    @property
    def loss(self) -> Loss | LossFunction:
        """The loss, or what is left to 1 of a score."""
        given = as_loss(self.options.loss)
        function = as_function(given)
        return LossFunction(function.row, Closing.RELATIVE) if function.is_score else given

    def _part(self, stack: ExitStack, rows: Indices) -> DatasetHandle:
        """Upload some of the rows."""
        if len(rows) == len(self.training.target) and hasattr(self, "data"):
            return self.data
        X, y, weights = (part[rows] for part in self.training[:3])
        groups = self.training.groups
        grouped: dict[str, Any] = {} if groups is None else {"groups": groups[rows]}
        return stack.enter_context(self.client.upload(X, y, weights, **grouped, dtype="float64"))

    def _task(
        self, compared: DatasetHandle, progress: Progress, start: Genomes, ends_by_loss: bool
    ) -> SearchTask:
        """Say what the search looks for."""
        options = self.options
        tolerance = options.tolerance * self.selection.scale
        ends = self.deadline
        if ends < math.inf:
            seconds = self.deadline - self.begun
            least, most = (part * seconds for part in _RESERVE)
            many = len(self.training.target) > _MANY_ROWS
            reserve = most if many else max(least, min(most, _LEAST_RESERVE))
            ends -= reserve * (1 if self.training.groups is None else 2)
        return SearchTask(
            client=self.client,
            training=self.training,
            seen=self.selection.seen,
            sample=self.sample,
            compared=compared,
            rng=self.rng,
            form=self.form,
            rules=self.rules,
            operators=operator_names(options.operators),
            start=start,
            loss=self.loss,
            floor=self.selection.floor(self.sample),
            stop_loss=tolerance if ends_by_loss else -math.inf,
            amount=self.selection.amount(self.sample),
            population=options.population,
            generations=options.generations - self.generation,
            fit_iterations=options.fit_iterations,
            early_stopping=options.early_stopping,
            ends=ends,
            report=lambda found: progress.report(self, found),
            phase=progress.phase,
        )

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
        """Measure formulas on all rows, so many as there is time for, those that come first."""
        found: _Found = {}
        for start in range(0, len(programs), _MEASURED):
            part = programs[start : start + _MEASURED]
            try:
                losses = self._losses(part, seconds_until(self.deadline)) - self.selection.floor()
            except DeadlineExceededError:
                break
            losses = np.where(np.isnan(losses), np.inf, losses)
            for program, loss in zip(part, losses.tolist(), strict=True):
                found[program] = [loss, self.selection.r2(program)]
        if len(found) < len(programs):
            self.undone.append(f"{len(programs) - len(found)} formulas were not measured")
        if not found and self.training.groups is not None:
            self.undone.append(_NOT_FITTED)
        return found or self._measured_here(programs[:_MEASURED])

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

        One parameter less may cost what it is worth to the description length. Where one meets the
        tolerance no longer one is shortened that does not: it could not be among the equations.
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
        size = self.rules.size
        exact = [program for program in finite if self._is_exact(found[program][0])]
        least = min(map(size, exact), default=math.inf)
        first = {
            each: None for each in [chosen, *likely, *others] if each in exact or size(each) < least
        }
        # The front has the best constant, too, which nobody may have searched for.
        steps = [(program, 1.0) for program in first if program in found]
        # Each group is fitted, so that a second round takes long there.
        far = [program for program in likely if program in first]
        far = far if self.training.groups is None else []
        for program, factor in [*steps, *((program, _FAR) for program in far)]:
            excess, floor = max(found[program][0], 0.0), self.selection.floor()
            # The tolerance is part of the loss above the least possible, simplify's of the loss.
            part = excess / abs(excess + floor) if excess + floor else 1.0
            bulk = self.selection.bulk(program)
            part *= 1.0 if bulk is None else bulk[1]
            snap: Any = self.options.snap
            if snap == "constants" and found[program][0] > _NOISE * self.selection.scale:
                snap = "numbers"  # multiples of pi and e are for laws, not for noise
            how = Shortening(
                self.client,
                data,
                self.loss,
                part * min(_MOST_TOLERANCE, factor * math.log(max(amount, 2.0)) / amount),
                snap,
                self.deadline,
                self._may_be_shown,
            )
            short = self.form.shortened(program, how)
            found.update(self._measured([short]))
