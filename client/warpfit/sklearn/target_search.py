"""The search for the equations of one target: losses, progress, rows, and what follows the search.

Searches compare losses by ratios, which takes numbers that are not negative. So they subtract the
least value that any prediction could reach: for Poisson's negative log likelihood that leaves half
of the deviance (McCullagh and Nelder 1989, section 2.3), for Gauss's the squares, and squares stay
as they are.
"""

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
from warpfit.expressions.reference import evaluate_program
from warpfit.formulas.units import dimension, dimensions
from warpfit.ir import Program
from warpfit.losses import (
    ABSOLUTE,
    Closing,
    Loss,
    LossFunction,
    TargetStatistics,
    as_function,
    as_loss,
    close_losses,
    coefficients_of_determination,
)
from warpfit.ops import CONSTANT, OPERATORS, VARIABLE, Operator
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
    ROUNDING,
    SELECTIONS,
    Equation,
    build_front,
    information,
    price_of,
    selected,
)
from warpfit.sklearn.estimator import SearchWarning, TrainingData, loss_unit
from warpfit.sklearn.forms import Form, Shortening, seconds_until
from warpfit.sklearn.genomes import Breeder, Floats, Genomes, Indices, Mask
from warpfit.sklearn.groups import GroupedClient, balanced, freed, values_of
from warpfit.sklearn.pairs import (
    FirstFormulas,
    PairSearch,
    arguments,
    library,
    relevant,
    structure_length,
    terms_of,
    views,
)
from warpfit.sklearn.search import (
    INTERRUPTIONS,
    Pool,
    Search,
    Settings,
    reason_of,
)
from warpfit.sklearn.templates import TemplateBreeder, TemplateForm

if TYPE_CHECKING:
    from warpfit.sklearn.regressor import SymbolicRegressor

#: Predictions among which the best of a row is looked for: 0, and powers of 2 of both signs, those
#: far out in larger steps.
_SIZES: Final = np.exp2(np.concatenate([np.arange(-40.0, 41.0), np.arange(60.0, 401.0, 20.0)]))
_PREDICTIONS: Final = np.concatenate([-_SIZES[::-1], [0.0], _SIZES])
#: Step of the derivative of a row loss, as part of the median residual, and least factor by which a
#: loss grows with residuals a hundred times larger unless it resists outliers: squares grow by 1e4.
_STEP: Final = 1e-3
_GROWS_LESS: Final = 1e3
#: A loss that can be lower than this has no least value.
_UNBOUNDED: Final = -1e100
#: Most different targets whose least losses are looked for; those between are interpolated.
_MOST_TARGETS: Final = 20_000
#: Steps of the golden section, and rows that are looked at together.
_STEPS: Final = 80
_ROWS: Final = 2000
_GOLDEN: Final = (math.sqrt(5.0) - 1.0) / 2.0


def least_row_losses(loss: LossFunction, target: Floats, weights: Floats) -> Floats:
    """Return the least loss that any prediction has in each row, [rows].

    A scan of predictions of all sizes, the target, its logarithm and its exponential among them,
    is followed by a golden section around the best (Kiefer 1953). It is done once for rows that
    cannot differ: a loss of f - y alone has one least value. Of many different targets so many as
    `_MOST_TARGETS` are looked at, and the least losses of the others are interpolated.

    Raises:
        InvalidArgumentError: if a row's loss has no least value.

    """
    if loss.is_squares or loss.row == ABSOLUTE:
        return np.zeros(len(target))
    targets = np.zeros(1) if is_of_difference(loss.row) else np.unique(target)
    if loss.mentions_weight:
        own = np.broadcast_to(0.0, target.shape) if len(targets) == 1 else target
        pairs, place = np.unique(np.stack([own, weights]), axis=1, return_inverse=True)
    else:
        chosen = np.linspace(0, len(targets) - 1, min(len(targets), _MOST_TARGETS)).astype(int)
        pairs = np.stack([targets[chosen], np.ones(len(chosen))])
    least = np.concatenate(
        [_least(loss, *pairs[:, start : start + _ROWS]) for start in range(0, len(pairs.T), _ROWS)]
    )
    if not np.all(least > _UNBOUNDED):
        bad = int(np.flatnonzero(~(least > _UNBOUNDED))[0])
        raise InvalidArgumentError(
            f"the loss has no least value for a target of {float(pairs[0, bad]):g}",
            "BAD_LOSS",
            "Write a loss that is bounded below, such as log(abs(d) + 0.01) instead of log(abs(d))",
            "loss",
        )
    if loss.mentions_weight:
        return least[place.ravel()]
    return np.asarray(weights * np.interp(target, pairs[0], least))


def is_of_difference(row: Program) -> bool:
    """Tell whether prediction and target occur in a row loss as f - y or y - f alone."""

    def leaf(code: int, value: float) -> str:
        return "fyw"[int(value)] if code == VARIABLE else ""

    def join(operator: Operator, parts: list[str]) -> str:
        if operator.name == "sub" and {*parts} == {"f", "y"}:
            return ""
        return "other" if {"f", "y", "other"} & {*parts} else ""

    return row.fold(leaf, join) == ""


def _least(loss: LossFunction, target: Floats, weights: Floats) -> Floats:
    def losses(predictions: Floats) -> Floats:
        shape = predictions.shape
        rows = [np.broadcast_to(each, shape).ravel() for each in (target, weights)]
        found = evaluate_program(loss.row, np.stack([predictions.ravel(), *rows])).reshape(shape)
        found = found if loss.mentions_weight else found * weights
        return np.asarray(np.where(np.isnan(found), np.inf, found))

    with np.errstate(all="ignore"):
        own = np.stack([target, np.log(target), np.exp(target)])
        own = np.where(np.isfinite(own), own, 0.0)
        everywhere = np.broadcast_to(_PREDICTIONS[:, None], (len(_PREDICTIONS), len(target)))
        tried = np.sort(np.concatenate([everywhere, own]), axis=0)
        found = losses(tried)
        best = found.argmin(axis=0)
        columns = np.arange(len(target))
        low = tried[np.maximum(best - 1, 0), columns]
        high = tried[np.minimum(best + 1, len(tried) - 1), columns]
        least = found.min(axis=0)
        for _ in range(_STEPS):
            width = _GOLDEN * (high - low)
            left, right = high - width, low + width
            at_left, at_right = losses(left), losses(right)
            least = np.minimum(least, np.minimum(at_left, at_right))
            low, high = (
                np.where(at_left <= at_right, low, left),
                np.where(at_left <= at_right, right, high),
            )
        return np.asarray(least)


def proposal_weights(
    loss: LossFunction, predictions: Floats, target: Floats, weights: Floats
) -> Floats:
    """Return weights with which least squares propose formulas for another loss, [rows].

    These are the weights of iteratively reweighted least squares, L'(f) / (f - y) (Holland and
    Welsch 1977). Of losses of f - y that grow less than squares, such as Huber's, they are squared:
    gross outliers then weigh as much in a sum of squares as any other row, and not more, whatever
    the formula. They are those given where the least loss is not at f = y.

    Args:
        loss: that is minimised.
        predictions: of the best formula so far, [rows].
        target: [rows].
        weights: that were given, [rows].

    """
    if loss.is_squares:
        return weights
    distance = predictions - target
    scale = float(np.median(np.abs(distance))) or float(np.mean(np.abs(distance))) or 1.0
    step = _STEP * scale
    distance = np.where(np.abs(distance) < 0.1 * scale, 0.1 * scale, distance)

    def at(predictions: Floats) -> Floats:
        return evaluate_program(loss.row, np.stack([predictions, target, weights]))

    with np.errstate(all="ignore"):
        slopes = (at(target + distance + step) - at(target + distance - step)) / (2.0 * step)
        found = slopes / distance
        found = np.square(found) if resists_outliers(loss, scale) else found
        found = found if loss.mentions_weight else found * weights
    return found if np.isfinite(found).all() and (found > 0.0).all() else weights


def resists_outliers(loss: LossFunction, scale: float) -> bool:
    """Tell whether a loss is one of f - y that grows much less than squares, such as Huber's."""
    if loss.is_squares or not is_of_difference(loss.row):
        return False
    rows = np.stack([scale * np.array([0.0, 1e2, 1e4]), np.zeros(3), np.ones(3)])
    with np.errstate(all="ignore"):
        least, near, far = evaluate_program(loss.row, rows)
        return bool(far - least < _GROWS_LESS * (near - least))


def floor(loss: LossFunction, least: Floats, target: Floats, weights: Floats) -> float:
    """Return the loss of the best predictions, from what `least_row_losses` returned."""
    if not least.any():
        return 0.0
    statistics = TargetStatistics(target, weights)
    return float(close_losses(loss.closing, np.array(least.sum()), statistics))


def deviance(loss: LossFunction, rows: float, weight: float) -> Callable[[float], float]:
    """Return -2 log L, but for a constant, as a function of the loss above its least value.

    A sum that is not one of squares is taken for a negative log likelihood. Other losses are taken
    for the variance of Gauss's likelihood, roots for its standard deviation, and the mean absolute
    error for the scale of Laplace's.

    Args:
        loss: that was minimised.
        rows: amount of data.
        weight: sum of the weights. Their scale changes nothing.

    """
    if loss.closing is Closing.SUM and not loss.is_squares:
        scale = 2.0 if loss.mentions_weight else 2.0 * rows / weight
        return lambda excess: scale * excess
    power = 2.0 if loss.closing is Closing.ROOT or loss.row == ABSOLUTE else 1.0
    return lambda excess: power * rows * math.log(excess)


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
    shown: float = 0.0
    saved: float = 0.0

    def report(self, target: TargetSearch, search: Search) -> bool:
        """Report a generation; return whether the callback ends the search."""
        now = time.monotonic()
        options = target.options
        terminal = sys.stderr is not None and sys.stderr.isatty()
        if self.verbose and now - self.shown >= _LINE_SECONDS[not terminal]:
            self.shown = now
            self._show(target, search)
        if self.checkpoint is not None and now - self.saved >= _CHECKPOINT_SECONDS:
            self.saved = now
            self.save(formulas_of(search))
        if options.callback is None:
            return False
        return bool(options.callback(options, search.generation, target.preview(search)))

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
#: Parts of a cross-validation.
_PARTS: Final = 5
#: Part of the variance below which an error of prediction is that of a law, and none predicts
#: better, and part of the loss of the best constant below which no cross-validation is needed.
_LEAST_NOISE: Final = 0.01
_EXACT: Final = 1e-4
#: A formula with a larger part of the loss of the best constant describes data with much noise.
_NOISE: Final = 0.1
#: Rows on which outliers are told from the bulk of the others, about, and the part of the latter.
_JUDGED: Final = 2000
_BULK: Final = 0.8
#: Part of the loss of the bulk below which outliers decide it, and residuals, as part of the
#: target's spread, that then say nothing.
_FEW: Final = 0.1
_BIAS: Final = 5e-3
#: How much less likely a formula is, in nats, that leaves the range of the target and of a linear
#: model, widened by part of the former, on rows unlike all others; and most part of a distance by
#: which these are farther out.
_STRAYING: Final = 15.0
_ROOM: Final = 0.25
_BEYOND: Final = 0.5
#: Most part by which an error of prediction grows where a formula leaves the target's range on
#: mixed rows: so a law does not lose to a line because of a pole.
_MOST_OVERSHOOT: Final = 1.0 / 3.0
#: Multiple of the tolerance with which they are shortened again.
_FAR: Final = 4.0
#: Time for the constants of groups when a search has been interrupted.
_LAST_SECONDS: Final = 10.0
#: Least number of rows of each group on which structures are compared, about.
_GROUP_ROWS: Final = 10
#: Fewer rows are not divided to hold some out.
_FEWEST_DIVIDED: Final = 40

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
    """Time of `time.monotonic` at which everything should have ended; infinite for any time."""
    form: Form = field(default_factory=Form)
    scale: float = math.nan
    """Loss of the best constant above the least that any prediction could have."""
    constant: Program = field(init=False)
    """The best constant, which is among the equations."""
    held_out: Indices = field(init=False)
    """Rows on which formulas are measured, and never fitted."""
    data: DatasetHandle = field(init=False)
    """All rows."""
    seen: DatasetHandle = field(init=False)
    """Rows that are not held out, if they are in groups."""
    tables: dict[Program, Floats] = field(default_factory=dict)
    """Constants without a short form by group, [groups, constants]."""
    answered: float = math.inf
    """Time of `time.monotonic` of the first fit's answer."""
    generation: int = 0
    reason: str = ""
    """Why the search ended, as `SymbolicRegressor.reason_`."""
    formulas: Genomes = field(default_factory=lambda: Genomes.of([]))
    """All formulas of the search, best first."""
    predictive: dict[Program, float] = field(default_factory=dict)
    """Predictive lengths, as `Equation.predictive_length`."""
    expected: dict[Program, float] = field(default_factory=dict)
    """The same of shortened formulas, as those of the long ones and their losses let expect: they
    count where no time is left for another cross-validation."""
    least_error: float = math.inf
    """Least mean squared error of a formula in a cross-validation."""
    parts: list[tuple[DatasetHandle, Indices]] = field(default_factory=list)
    """Rows of a cross-validation: those that are fitted, and those that are left out."""

    def run(self, progress: Progress) -> list[Equation]:
        """Search; return the front, its constants fitted to the rows that are not held out.

        What interrupts the search, or what follows it, becomes the reason of its end; the front is
        then that of the formulas so far.

        Raises:
            KeyboardInterrupt: for an interrupt before anything has been found.
            UnavailableError: if the server is lost before that.

        """
        rows = len(self.training.target)
        seen, self.held_out = self._divided()
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
                self.constant, self.scale = self._best_constant(seen, sample, compared)
                self.answered = time.monotonic()
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
        data = self._rows_to_fit(stack, _FIT_TIME * seconds + uploading)
        with suppress(DeadlineExceededError):
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
            self._cross_validate(stack, found)
            if self.options.simplify:
                self._shorten(data, found)
                self._cross_validate(stack, found)
        self.predictive = self.expected | self.predictive
        return self._front_of(found)

    def _cross_validate(self, stack: ExitStack, found: _Found) -> None:
        """Find the predictive lengths of formulas, where there may be noise.

        Constants are fitted to four fifths of the rows, and errors are those of the others. Rows
        that are held out are predicted by the formulas as they are. Of many rows some are taken.
        The structures were found on nearly all of these, so that none tells of a formula that
        explodes on the next row. Rows that are made up do.
        """
        least = min(loss for loss, _ in found.values())
        function = as_function(self.loss)
        grouped = self.training.groups is not None
        if not function.is_squares or least <= self._limit(_EXACT) or grouped:
            return
        programs = [program for program in found if program not in self.predictive]
        X, y, weights = self.training[:3]
        seen = np.setdiff1d(np.arange(len(y)), self.held_out)
        if len(seen) < _FEWEST_DIVIDED:
            return
        if not self.parts:
            shuffled = np.random.default_rng(0).permutation(seen)[:_JUDGED]
            self.parts = [
                (self._part(stack, np.setdiff1d(shuffled, part)), part)
                for part in np.array_split(shuffled, _PARTS)
            ]
        judged = np.concatenate([self.held_out, *(part for _, part in self.parts)])
        total = np.zeros(len(programs))
        predictions = [(programs, self.held_out)]
        predictions += [(self._fitted(data, programs), part) for data, part in self.parts]
        for fitted, part in predictions:
            for place, program in enumerate(fitted):
                errors = np.square(reference.evaluate_program(program, X[part].T) - y[part])
                total[place] += weights[part] @ errors
        for program, error in zip(programs, (total / weights[judged].sum()).tolist(), strict=True):
            level = max(error, ROUNDING * self.scale, math.ulp(0.0))
            self.least_error = min(self.least_error, level)
            level += min(self._overshoot(program), _MOST_OVERSHOOT * level)
            length = 0.5 * self._rows * math.log(level) if level < math.inf else math.inf
            length += self._structure_length(program)
            self.predictive[program] = length + _STRAYING * self._strays(program)

    def _structure_length(self, program: Program) -> float:
        """Return what the structure of a formula counts in its predictive length, in nats."""
        symbols = self.training.rows.shape[1] + len(self.options.operators) + 1
        parts = self.form.parts_of(program)
        return sum(structure_length(terms_of(own), symbols) for own in parts)

    def _rows_to_fit(self, stack: ExitStack, seconds: float) -> DatasetHandle:
        """Upload the rows that are not held out, or so many that a fit to them ends in time.

        Args:
            stack: keeps the data set.
            seconds: time of an upload of all rows and a fit to them.

        """
        seen = np.setdiff1d(np.arange(len(self.training.target)), self.held_out)
        left = _FIT_SHARE * max(self.deadline - time.monotonic(), 1e-3)
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

    def _values(self, program: Program, rows: Any = slice(None)) -> Floats:
        """Return the values of a formula on some rows, with the constants of their groups."""
        X, groups, table = (
            self.training.rows[rows].T,
            self.training.groups,
            self.tables.get(program),
        )
        if groups is None or table is None:
            return reference.evaluate_program(program, X)
        return values_of(self.form.lifted(program, free=True)[0], table, X, groups[rows])

    def _level(self, values: Floats) -> float:
        """Return the loss of predictions for all rows above the least possible."""
        loss, (_, y, weights) = as_function(self.loss), self.training[:3]
        rows = reference.evaluate_program(loss.row, np.stack([values, y, weights]))
        total = float((rows if loss.mentions_weight else rows * weights).sum())
        return float(close_losses(loss.closing, np.array(total), self._statistics)) - self._floor()

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
            values = self._values(program)
            level = self._level(values)
            for place, sign in signs.items():
                step = np.zeros(X.shape[1])
                step[place] = 1e-6 * np.ptp(X[:, place])
                ahead = reference.evaluate_program(program, (X + step).T)
                if not (sign * (ahead - values) >= -1e-12 * np.abs(values)).all():
                    level = math.inf
            level = level if self._sound([program])[0] else math.inf
            found[program] = [level, self._r2(program, self.held_out)]
        return self._front_of(found)

    def nothing(self) -> list[Equation]:
        """Return the front of a search that could not begin: the best of some constants."""
        self.held_out = np.empty(0, np.int64)
        places = np.quantile(self.training.target, np.linspace(0.0, 1.0, 101))
        mean = float(np.average(self.training.target, weights=self.training.weights))
        found: _Found = {}
        for value in {mean, *places.tolist()}:
            level = self._level(np.full(len(self.training.target), value))
            found[Program.constant(value)] = [level, math.nan]
        self.scale = min(level for level, _ in found.values())
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
            self._rows,
            self.scale,
            self._floor(),
            self._deviance_of,
            as_function(self.loss).is_squares,
            self._r2_of_loss,
            self.predictive if self.least_error > _LEAST_NOISE * self._variance else {},
            self._price,
        )
        if not isinstance(self.form, TemplateForm):
            return found
        texts, digits = self.form.texts, self.options.digits
        return [replace(each, subformulas=texts(each.program, digits)) for each in found]

    def _price(self, program: Program) -> float:
        """Return what the constants count; those of groups once for each group."""
        own = sum(map(price_of, self.form.parts_of(program)))
        if self.training.groups is None:
            return own
        return own + (self._group_count - 1) * len(self.form.lifted(program, free=True)[1])

    def _texts(self, program: Program) -> tuple[str, str]:
        digits = self.options.digits
        return to_text(program, self.names, digits), to_latex(program, self.names, digits)

    def _r2_of_loss(self, loss: float) -> float:
        """Return R^2 on all rows of a formula with a loss of squares; NaN for other losses."""
        function = as_function(self.loss)
        if not function.is_squares:
            return math.nan
        found = coefficients_of_determination(function.closing, np.array(loss), self._statistics)
        return float(found) if np.isfinite(found) else math.nan

    def _complexity(self, program: Program) -> int:
        measure = complexity_measure(self.options.complexity_of_operators)
        return int(measure(Genomes.of(self.form.parts_of(program))).sum())

    def preview(self, search: Search) -> list[Equation]:
        """Return the front as it is now, with the losses on the sample."""
        pool, spread = search.front(), float(np.std(self.training.target))
        programs = [self._whole(pool, row, spread) for row in range(len(pool))]
        losses = pool.losses
        if not isinstance(self.form, TemplateForm):
            programs, losses = [*programs, self.constant], np.append(losses, self.scale)
        return self._in_given_units(self.front(programs, losses, [np.nan] * len(programs)))

    def _in_given_units(self, front: list[Equation]) -> list[Equation]:
        """Return equations for the target and the variables as they were given.

        The search sees them divided by powers of two where their squares overflow or vanish.
        """
        if not as_function(self.loss).is_squares:
            everywhere = np.arange(len(self.training.target))
            front = [replace(each, r2=self._r2(each.program, everywhere)) for each in front]
        unit, units = self.training.unit, self.training.variable_units
        if self.training.groups is not None:
            return [self._by_group(equation) for equation in front]
        if not units:
            return front
        factor = loss_unit(self.loss, unit)
        shift = 0.0 if factor == 1.0 else self._rows * math.log(unit)

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
                    excess=equation.excess * factor,
                    description_length=equation.description_length + shift,
                    predictive_length=equation.predictive_length + shift,
                    program=program,
                    equation=self._texts(program)[0],
                    latex=self._texts(program)[1],
                )
            )
        return found

    def _by_group(self, equation: Equation) -> Equation:
        """Return an equation with parameters in the place of the constants of groups."""
        table = self.tables.get(equation.program)
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
        return Program.constant(best), max(float(fit.loss[0]) - self._floor(sample), 0.0)

    @cached_property
    def _least_row_losses(self) -> Floats:
        return least_row_losses(as_function(self.loss), self.training.target, self.training.weights)

    def _floor(self, rows: Indices | None = None) -> float:
        """Return the least loss that any prediction could have, on all or some rows."""
        chosen: Any = slice(None) if rows is None else rows
        target, weights = self.training.target[chosen], self.training.weights[chosen]
        return floor(as_function(self.loss), self._least_row_losses[chosen], target, weights)

    def _deviance_of(self, program: Program, level: float) -> float:
        """Return -2 log L, but for a constant, of a formula with a loss above the least possible.

        A formula of noise that has values on rows unlike all others that no row makes expect, as
        one with a pole or an exponential has, counts as less likely by `_STRAYING`.
        Of losses that resist outliers it is that of Gauss's likelihood whose standard deviation is
        the median residual: in the loss itself a few outliers would hide a law.
        """
        is_noisy = level > self._limit(_LEAST_NOISE)
        extra = 2.0 * _STRAYING if is_noisy and self._strays(program) else 0.0
        bulk = self._bulk(program)
        if bulk is None:
            return self._deviance(level) + extra
        # Where outliers make most of the loss they move constants by about this much.
        least = _BIAS if bulk[1] < _FEW else ROUNDING
        return 2.0 * self._rows * math.log(max(bulk[0], least * self._spread)) + extra

    def _limit(self, part: float) -> float:
        """Return the loss of squares that leaves a part of the variance."""
        is_root = as_function(self.loss).closing is Closing.ROOT
        return self.scale * (math.sqrt(part) if is_root else part)

    def _strays(self, program: Program) -> bool:
        """Tell whether a formula has values on rows unlike all others that are a surprise."""
        grouped = self.training.groups is not None  # Their ranges are not one.
        if not as_function(self.loss).is_squares or program.variables == 0 or grouped:
            return False
        if program not in self._straying:
            values = reference.evaluate_program(program, self._unlike)
            low, high = self._range
            self._straying[program] = not ((values >= low) & (values <= high)).all()
        return self._straying[program]

    def _overshoot(self, program: Program) -> float:
        """Return the mean square of how far a formula leaves the target's range on mixed rows.

        Of each it is at most the range's width, and that where there is no value.
        """
        low, high = float(self.training.target.min()), float(self.training.target.max())
        values = reference.evaluate_program(program, self._mixed)
        over = np.clip(np.maximum(low - values, values - high), 0.0, high - low)
        return float(np.mean(np.square(np.where(np.isnan(over), high - low, over))))

    @cached_property
    def _straying(self) -> dict[Program, bool]:
        return {}

    @cached_property
    def _mixed(self) -> Floats:
        """Rows whose variables come from different rows, [variables, n].

        The importance of a variable by permutation is measured on such rows (Breiman 2001).
        """
        rng = np.random.default_rng(0)
        columns = self.training.rows.T
        return np.stack([column[rng.integers(len(column), size=_JUDGED)] for column in columns])

    @cached_property
    def _unlike(self) -> Floats:
        """Rows unlike all others, as the next ones of a table may be, [variables, n].

        They are mixed, and each variable is moved away from that of another row by up to half of
        their distance, which may be out of the variable's range. What has one sign keeps it.
        """
        rng = np.random.default_rng(1)
        moved = []
        for column, own in zip(self.training.rows.T, self._mixed, strict=True):
            other = column[rng.integers(len(column), size=_JUDGED)]
            step = rng.uniform(0.0, _BEYOND, _JUDGED)
            further = own + step * (own - other)
            has_sign = column.min() >= 0.0 or column.max() <= 0.0
            turned = has_sign & (further * own <= 0.0)
            moved.append(np.where(turned, own / (1.0 + step), further))
        return np.stack(moved)

    @cached_property
    def _range(self) -> tuple[float, float]:
        """Values that are no surprise on rows unlike all others, the least and the greatest.

        They are those of the target and those of a linear model, with some room.
        """
        step = -(-len(self.training.target) // _JUDGED)
        X, y, weights = (part[::step] for part in self.training[:3])
        # Columns of one size, so that none is taken for a rounding error of another.
        middle, size = X.mean(axis=0), np.maximum(np.ptp(X, axis=0), np.finfo(float).tiny)
        design, beyond = (
            np.column_stack([np.ones(len(rows)), (rows - middle) / size])
            for rows in (X, self._unlike.T)
        )
        roots = np.sqrt(weights)
        linear = beyond @ np.linalg.lstsq(design * roots[:, None], y * roots)[0]
        low, high = float(self.training.target.min()), float(self.training.target.max())
        room = _ROOM * (high - low)
        return min(low, float(linear.min())) - room, max(high, float(linear.max())) + room

    @cached_property
    def _variance(self) -> float:
        """Weighted variance of the target."""
        _, y, weights = self.training[:3]
        return float(np.average(np.square(y - np.average(y, weights=weights)), weights=weights))

    @cached_property
    def _spread(self) -> float:
        target = self.training.target
        return float(np.median(np.abs(target - np.median(target)))) or float(np.std(target)) or 1.0

    @cached_property
    def _bulks(self) -> dict[Program, tuple[float, float]]:
        return {}

    def _bulk(self, program: Program) -> tuple[float, float] | None:
        """Return the median residual, and the part of the loss that all but outliers have.

        They are of some of the rows; None for a loss that does not resist outliers.
        """
        loss = as_function(self.loss)
        if not resists_outliers(loss, self._spread):
            return None
        if program not in self._bulks:
            step = -(-len(self.training.target) // _JUDGED)
            _, y, weights = (part[::step] for part in self.training[:3])
            values = self._values(program, slice(None, None, step))
            each = evaluate_program(loss.row, np.stack([values, y, weights]))
            each = np.sort(each - self._least_row_losses[::step] / weights)
            total = float(each.sum())
            part = float(each[: int(_BULK * len(each))].sum()) / total if total > 0.0 else 1.0
            # Outliers on one side move a whole law by a constant, which says nothing against it.
            left = values - y
            middle = float(np.median(np.abs(left - np.median(left))))
            middle = middle if math.isfinite(middle) else math.inf
            self._bulks[program] = middle, part if math.isfinite(part) else 0.0
        return self._bulks[program]

    @property
    def _deviance(self) -> Callable[[float], float]:
        weight = float(self.training.weights.sum())
        return deviance(as_function(self.loss), self._rows, weight)

    def _divided(self) -> tuple[Indices, Indices]:
        """Return the rows that the search sees, and those that are held out."""
        rows = len(self.training.target)
        count = int(self.options.held_out * rows) if rows >= _FEWEST_DIVIDED else 0
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
        drawing = self.rng, codes, self.training.rows.shape[1], options.max_size
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
            rows = np.setdiff1d(np.flatnonzero(groups == largest), self.held_out)
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
        width, most = options.max_size, _LIBRARY * options.population
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
            stop_loss=options.tolerance * self.scale,
            ends=self._end_of_search(),
            early_stopping=options.early_stopping,
            rows=self._amount(sample),
            loss=self.loss,
            middle=Program.constant(float(np.median(self.training.target[sample]))),
            floor=self._floor(sample),
            complexity=lambda genomes: complexity(genomes) - self.form.overhead,
            admissible=self._admission(complexity),
            penalty=lambda genomes, *others: (
                self.scale * self._violations(self.form.whole(genomes), *others)
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
    def _statistics(self) -> TargetStatistics:
        return TargetStatistics(self.training.target, self.training.weights)

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
        admit = admission(options.constraints, complexity, options.max_size)
        form, consistent = self.form, self._consistent

        def admissible(genomes: Genomes) -> Mask:
            kept = complexity(genomes) - form.overhead <= options.max_size
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
        most = min(_MOST_FITTED, len(self.training.target) - len(self.held_out))
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
                losses = np.where(wrong, np.inf, losses - self._floor())
            except DeadlineExceededError:
                break
            for program, loss in zip(part, losses.tolist(), strict=True):
                found[program] = [loss, self._r2(program, self.held_out)]
        return found or {self.constant: [self.scale, self._r2(self.constant, self.held_out)]}

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
        self.tables.update(zip(programs, fit.tables, strict=True))
        return np.array([self._level(self._values(p)) for p in programs]) + self._floor()

    def _shorten(self, data: DatasetHandle, found: _Found) -> None:
        """Add shorter forms of the formulas that a criterion may choose, while there is time.

        One parameter less may cost what it is worth to the description length.
        """
        front = self._front_of(found)
        criteria = [self.options.model_selection, *SELECTIONS]
        wanted = [front[selected(front, criterion)].program for criterion in criteria]
        wanted = [wanted[0], *self._likely(found), *wanted[1:]]
        steps = [(program, 1.0) for program in dict.fromkeys(wanted)]
        # Each group is fitted, so that a second round takes long there.
        far = self._likely(found) if self.training.groups is None else []
        for program, factor in [*steps, *((program, _FAR) for program in far)]:
            excess, floor = max(found[program][0], 0.0), self._floor()
            # The tolerance is part of the loss above the least possible, simplify's of the loss.
            part = excess / abs(excess + floor) if excess + floor else 1.0
            bulk = self._bulk(program)
            part *= 1.0 if bulk is None else bulk[1]
            rows = max(self._rows, 2.0)
            how = Shortening(
                self.client,
                data,
                self.loss,
                part * min(_MOST_TOLERANCE, factor * math.log(rows) / self._rows),
                self._snap(found[program][0]),
                self.deadline,
            )
            short = self.form.shortened(program, how)
            found.update(self._measured([short]))
            if program in self.predictive and short in found:
                after, before = (
                    max(found[one][0], ROUNDING * self.scale, math.ulp(0.0))
                    for one in (short, program)
                )
                is_root = as_function(self.loss).closing is Closing.ROOT
                growth = (1.0 if is_root else 0.5) * self._rows * math.log(after / before)
                change = self._structure_length(short) - self._structure_length(program)
                self.expected[short] = self.predictive[program] + growth + change

    def _snap(self, excess: float) -> Any:
        """Return what constants may become: multiples of pi and e only in laws, not in noise."""
        noisy = excess > _NOISE * self.scale
        return "numbers" if noisy and self.options.snap == "constants" else self.options.snap

    @property
    def _rows(self) -> float:
        """Amount of data: different rows, whatever the scale of their weights."""
        return self._amount(np.arange(len(self.training.target)))

    def _amount(self, rows: Indices) -> float:
        weights = self.training.weights[rows]
        return float(weights.sum() if self.options.frequency_weights else len(weights))

    def _front_of(self, found: _Found) -> list[Equation]:
        losses, r2 = zip(*found.values(), strict=True)
        return self.front(list(found), np.array(losses), list(r2))

    def _likely(self, found: _Found) -> list[Program]:
        """Return the formulas of the least description length."""

        def length(program: Program) -> float:
            level = max(found[program][0], ROUNDING * self.scale, math.ulp(0.0))
            return information(
                self._complexity(program),
                self._deviance_of(program, level),
                self._price(program),
                self._rows,
            )

        return sorted(found, key=length)[:_SHORTENED]

    def _r2(self, program: Program, rows: Indices) -> float:
        """Return R^2 on some rows; NaN where it says nothing, minus infinity without a value."""
        _, y, weights = (part[rows] for part in self.training[:3])
        if len(rows) < 2 or np.all(y == y[0]):
            return math.nan
        with np.errstate(all="ignore"):
            errors = np.square(self._values(program, rows) - y)
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
