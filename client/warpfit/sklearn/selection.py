"""Description lengths and predictive lengths, by which a search chooses among its formulas.

A search that tries many formulas finds one that fits noise, so that losses alone do not choose:

1. The description length adds what a formula's tokens and constants count. It suits laws, whose
   losses are far below those of all other formulas.
2. Of data with noise a cross-validation says how well a formula predicts rows that its constants
   have not seen. The structure was found on nearly all of them, so that its length is added.
3. Nothing has chosen the linear regression of all variables. So its structure counts nothing, and
   a formula has to predict better by what its own structure counts, or to predict better both in
   the cross-validation and on the rows that no fit has seen: it is the null model.
4. No row tells of a formula that explodes on the next one, which is a surprise. Rows that are made
   up do.
5. Of noise with heavy tails a formula with a pole explains the few rows that are farthest out. So
   it has to explain the others, too, or to predict rows that no fit has seen.

`warpfit.sklearn.equations` chooses by these numbers.

Searches compare losses by ratios, which takes numbers that are not negative. So they subtract the
least value that any prediction could reach: for Poisson's negative log likelihood that leaves half
of the deviance (McCullagh and Nelder 1989, section 2.3), for Gauss's the squares, and squares stay
as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from typing import Any, Final, TypeAlias

import numpy as np

from warpfit.errors import InvalidArgumentError
from warpfit.evidence import ROUNDING, description_length, price_of
from warpfit.expressions import reference
from warpfit.expressions.reference import evaluate_program
from warpfit.formulas.intervals import DefinedRegion
from warpfit.ir import Program
from warpfit.losses import (
    ABSOLUTE,
    Closing,
    LossFunction,
    TargetStatistics,
    close_losses,
    coefficients_of_determination,
)
from warpfit.ops import CONSTANT, VARIABLE, Operator
from warpfit.searching import structure_length
from warpfit.sklearn.estimator import TrainingData
from warpfit.sklearn.genomes import Floats, Indices
from warpfit.sklearn.groups import values_of
from warpfit.sklearn.templates import Form

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
            "Give targets that the loss is for, such as counts for poisson, or a loss that is "
            "bounded below, such as log(abs(d) + 0.01) instead of log(abs(d))",
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


# --------------------------------------------------------------- description and predictive lengths

#: Fewer rows are not divided, neither to hold some out nor for a cross-validation, and parts of
#: the latter.
FEWEST_DIVIDED: Final = 40
_PARTS: Final = 5
#: Part of the variance below which an error of prediction is that of a law, and none predicts
#: better, and part of the loss of the best constant below which no cross-validation is needed.
_LEAST_NOISE: Final = 0.01
_EXACT: Final = 1e-4
#: Most variables of a linear regression, fewest rows for each of its constants, and about the most
#: rows that it is fitted to.
_MOST_COLUMNS: Final = 30
_ROWS_A_CONSTANT: Final = 2
_MOST_ROWS: Final = 100_000
#: Most rows of a cross-validation, number of those that are made up, and about that of those on
#: which outliers are told from the bulk of the others; and the part of the latter.
_JUDGED: Final = 2000
_BULK: Final = 0.8
#: Part of the loss of the bulk below which outliers decide it, and residuals, as part of the
#: target's spread, that then say nothing.
_FEW: Final = 0.1
_BIAS: Final = 5e-3
#: Part of the rows, those with targets farthest out, without which a formula has to explain the
#: others; part of all it explains, below which these rows alone make it; and R^2 on rows that no
#: fit has seen from which on they may.
_FARTHEST: Final = 0.03
_OF_OTHERS: Final = 0.5
_PREDICTED: Final = 0.25
#: How much less likely a formula is, in nats, that leaves the range of the target and of a linear
#: model, widened by part of the former, on rows unlike all others; and most part of a distance by
#: which these are farther out.
_STRAYING: Final = 15.0
_ROOM: Final = 0.25
_BEYOND: Final = 0.5
#: Part of a number, or of its variable's range, that nobody measures.
_UNMEASURED: Final = 1e-7
#: Boxes of the variables' ranges in which poles are looked for.
_BOXES: Final = 512


def linear_regression(X: Floats, y: Floats, weights: Floats) -> tuple[Floats, float]:
    """Return the slopes, [variables], and the intercept of weighted least squares.

    Columns have one size in the fit, so that none is taken for a rounding error of another, and
    those without variation have a slope of 0.
    """
    middle, size = np.average(X, axis=0, weights=weights), np.ptp(X, axis=0)
    mean, roots = float(np.average(y, weights=weights)), np.sqrt(weights)
    design = (X - middle) / np.where(size > 0.0, size, 1.0)
    slopes = np.linalg.lstsq(design * roots[:, None], (y - mean) * roots)[0]
    slopes = np.where(size > 0.0, slopes / np.where(size > 0.0, size, 1.0), 0.0)
    return np.asarray(slopes, np.float64), float(mean - middle @ slopes)


@dataclass
class Selection:
    """Weighs the formulas of one target, here and without a server."""

    training: TrainingData
    loss: LossFunction
    form: Form
    complexity: Callable[[Program], int]
    symbols: int
    """Number of operators and variables, and one for numbers."""
    frequency_weights: bool = False
    most_linear: float = 0.0
    """Greatest complexity of a linear regression; 0 for none."""
    scale: float = math.nan
    """Loss of the best constant above the least that any prediction could have."""
    held_out: Indices = field(default_factory=lambda: np.empty(0, np.int64))
    """Rows on which formulas are measured, and never fitted."""
    tables: dict[Program, Floats] = field(default_factory=dict)
    """Constants without a short form by group, [groups, constants]."""
    lengths: dict[Program, float] = field(default_factory=dict)
    """Predictive lengths, as `Equation.predictive_length`."""
    _least_error: float = math.inf
    """Least mean squared error of a formula in a cross-validation."""
    _straying: dict[Program, bool] = field(default_factory=dict)
    _bulks: dict[Program, tuple[float, float]] = field(default_factory=dict)

    def hold_out(self, rows: Indices) -> None:
        """Hold some rows out, whatever others were before."""
        self.held_out = rows
        for name in ("seen", "folds", "null", "null_r2", "_linear_of_seen"):
            vars(self).pop(name, None)

    # Losses, here.

    def values(self, program: Program, rows: Any = slice(None)) -> Floats:
        """Return the values of a formula on some rows, with the constants of their groups."""
        X, groups = self.training.rows[rows].T, self.training.groups
        table = self.tables.get(program)
        if groups is None or table is None:
            return reference.evaluate_program(program, X)
        return values_of(self.form.lifted(program, free=True)[0], table, X, groups[rows])

    def level(self, values: Floats) -> float:
        """Return the loss of predictions for all rows above the least possible."""
        _, y, weights = self.training[:3]
        rows = reference.evaluate_program(self.loss.row, np.stack([values, y, weights]))
        total = float((rows if self.loss.mentions_weight else rows * weights).sum())
        return float(close_losses(self.loss.closing, np.array(total), self.statistics)) - (
            self.floor()
        )

    def floor(self, rows: Indices | None = None) -> float:
        """Return the least loss that any prediction could have, on all or some rows."""
        chosen: Any = slice(None) if rows is None else rows
        target, weights = self.training.target[chosen], self.training.weights[chosen]
        return floor(self.loss, self._least_row_losses[chosen], target, weights)

    def r2(self, program: Program, rows: Any = None) -> float:
        """Return R^2 on some rows, by default those held out.

        It is NaN where it says nothing, and minus infinity for a formula without a value there.
        """
        rows = self.held_out if rows is None else rows
        _, y, weights = (part[rows] for part in self.training[:3])
        if len(y) < 2 or np.all(y == y[0]):
            return math.nan
        with np.errstate(all="ignore"):
            errors = np.square(self.values(program, rows) - y)
            spread = np.average(np.square(y - np.average(y, weights=weights)), weights=weights)
            found = float(1.0 - np.average(errors, weights=weights) / spread)
        return found if math.isfinite(found) else -math.inf

    def r2_of_loss(self, loss: float) -> float:
        """Return R^2 on all rows of a formula with a loss of squares; NaN for other losses."""
        if not self.loss.is_squares:
            return math.nan
        found = coefficients_of_determination(self.loss.closing, np.array(loss), self.statistics)
        return float(found) if np.isfinite(found) else math.nan

    def amount(self, rows: Any = slice(None)) -> float:
        """Return the amount of data: different rows, whatever the scale of their weights."""
        weights = self.training.weights[rows]
        return float(weights.sum() if self.frequency_weights else len(weights))

    def limit(self, part: float) -> float:
        """Return the loss of squares that leaves a part of the variance."""
        return self.scale * (math.sqrt(part) if self.loss.closing is Closing.ROOT else part)

    # Description lengths.

    def description_length(self, program: Program, loss: float) -> float:
        """Return `Equation.description_length` of a formula with a loss above the least one."""
        level = max(loss, ROUNDING * self.scale, math.ulp(0.0))
        own = self.deviance(program, level) + self._deviance_of_scale
        return description_length(own, self.complexity(program), self.price(program), self.amount())

    def choice_length(self, program: Program, loss: float) -> float:
        """Return `Equation.choice_length` of a formula with a loss above the least one."""
        length = self.description_length(program, loss) + self.surprise(program, loss)
        return length + self.taken_by_constants(program, loss)

    def surprise(self, program: Program, loss: float) -> float:
        """Return `Equation.surprise` of a formula with a loss above the least one."""
        is_noisy = loss > self.limit(_LEAST_NOISE)
        return _STRAYING if is_noisy and self.strays(program) else 0.0

    @cached_property
    def _deviance_of_scale(self) -> float:
        """Return the part of -2 log L that `deviance` leaves out for losses of squares; else 0."""
        divisor, rows = self.statistics.divisor(self.loss.closing), self.amount()
        if not (self.loss.is_squares and divisor > 0.0):
            return 0.0
        weights = self.training.weights
        left_out = rows * (math.log(2.0 * math.pi * divisor / rows) + 1.0)
        return left_out - float(np.log(weights[weights > 0.0]).sum())

    def price(self, program: Program) -> float:
        """Return what the constants count; those of groups once for each group."""
        own = sum(map(price_of, self.form.parts_of(program)))
        if self.training.groups is None:
            return own
        others = int(self.training.groups.max())
        return own + others * len(self.form.lifted(program, free=True)[1])

    def deviance(self, program: Program, level: float) -> float:
        """Return -2 log L, but for a constant, of a formula with a loss above the least possible.

        Of losses that resist outliers it is that of Gauss's likelihood whose standard deviation is
        the median residual: in the loss itself a few outliers would hide a law.
        """
        bulk = self.bulk(program)
        if bulk is None:
            weight = float(self.training.weights.sum())
            return deviance(self.loss, self.amount(), weight)(level)
        # Where outliers make most of the loss they move constants by about this much.
        least = _BIAS if bulk[1] < _FEW else ROUNDING
        return 2.0 * self.amount() * math.log(max(bulk[0], least * self._spread))

    def bulk(self, program: Program) -> tuple[float, float] | None:
        """Return the median residual, and the part of the loss that all but outliers have.

        They are of some of the rows; None for a loss that does not resist outliers.
        """
        if not resists_outliers(self.loss, self._spread):
            return None
        if program not in self._bulks:
            step = -(-len(self.training.target) // _JUDGED)
            _, y, weights = (part[::step] for part in self.training[:3])
            values = self.values(program, slice(None, None, step))
            each = reference.evaluate_program(self.loss.row, np.stack([values, y, weights]))
            each = np.sort(each - self._least_row_losses[::step] / weights)
            total = float(each.sum())
            part = float(each[: int(_BULK * len(each))].sum()) / total if total > 0.0 else 1.0
            # Outliers on one side move a whole law by a constant, which says nothing against it.
            left = values - y
            middle = float(np.median(np.abs(left - np.median(left))))
            middle = middle if math.isfinite(middle) else math.inf
            self._bulks[program] = middle, part if math.isfinite(part) else 0.0
        return self._bulks[program]

    # Predictive lengths.

    @property
    def predictive(self) -> dict[Program, float]:
        """Predictive lengths; none where a formula leaves hardly anything of new rows' variance."""
        is_noisy = self._least_error > _LEAST_NOISE * self._variance
        return self.lengths if is_noisy else {}

    @cached_property
    def folds(self) -> list[tuple[Indices, Indices]]:
        """Rows of a cross-validation that are fitted, and those that are left out; of many some."""
        if len(self.seen) < FEWEST_DIVIDED:
            return []
        shuffled = np.random.default_rng(0).permutation(self.seen)[:_JUDGED]
        return [(np.setdiff1d(shuffled, part), part) for part in np.array_split(shuffled, _PARTS)]

    def not_validated(self, programs: Iterable[Program], least: float) -> list[Program]:
        """Return the formulas that a cross-validation should judge; none where there is no noise.

        Args:
            programs: all formulas.
            least: the least of their losses, above the least possible.

        """
        is_exact = least <= self.limit(_EXACT)
        grouped = self.training.groups is not None
        if not self.loss.is_squares or is_exact or grouped or not self.folds:
            return []
        return [each for each in programs if each not in self.lengths and each != self.null]

    def validate(self, programs: Sequence[Program], fits: Sequence[Sequence[Program]] = ()) -> None:
        """Find the predictive lengths of formulas, and of the linear regression.

        Rows that are held out are predicted by the formulas as they are. Where there was no time
        for fits all rows are, and each constant counts a nat instead (Stone, "An asymptotic
        equivalence of choice of model by cross-validation and Akaike's criterion", 1977).

        Args:
            programs: the formulas.
            fits: the same with constants that are fitted to the rows of each of `folds`; or empty.

        """
        X, y, weights = self.training[:3]
        held_out = self.held_out[:: max(1, -(-len(self.held_out) // _JUDGED))]
        folds = [(self.seen, held_out), *self.folds]
        judged = np.concatenate([left for _, left in folds])
        by_fold = [programs, *(fits or [programs] * len(self.folds))]
        constants = [0 if fits else np.count_nonzero(own.codes == CONSTANT) for own in programs]
        if self.null is not None and self.null not in self.lengths:
            programs, constants = [*programs, self.null], [*constants, 0]
            linear = [self._linear_of_seen, *(self._linear(rows) for rows, _ in self.folds)]
            by_fold = [[*fit, null] for fit, null in zip(by_fold, linear, strict=True)]
        total = np.zeros(len(programs))
        for fit, (_, left) in zip(by_fold, folds, strict=True):
            for place, program in enumerate(fit):
                errors = np.square(reference.evaluate_program(program, X[left].T) - y[left])
                total[place] += weights[left] @ errors
        means = (total / weights[judged].sum()).tolist()
        for program, error, count in zip(programs, means, constants, strict=True):
            level = max(error, ROUNDING * self.scale, math.ulp(0.0))
            self._least_error = min(self._least_error, level)
            length = 0.5 * self.amount() * math.log(level) if level < math.inf else math.inf
            length += self.structure_length(program) + _STRAYING * self.strays(program)
            self.lengths[program] = length + count

    def structure_length(self, program: Program) -> float:
        """Return what the structure of a formula counts in its predictive length, in nats."""
        if program == self.null:
            return 0.0
        parts = self.form.parts_of(program)
        return sum(structure_length(terms_of(own), self.symbols) for own in parts)

    def is_unpaid(self, program: Program, excess: float) -> bool:
        """Tell whether a formula gains less than its own description takes.

        Of few rows, of which none are held out, all are asked: a search that tries many formulas
        finds one for any ten numbers. Each constant takes a row's worth of what the rows say, as in
        the restricted likelihood (Patterson and Thompson 1971). Of more rows, those are asked that
        are not farthest out, see `hangs_on_few_rows`.

        Args:
            program: the formula.
            excess: its loss above the least possible.

        """
        if not program.variables:
            return False
        if len(self.training.target) >= FEWEST_DIVIDED:
            return self.hangs_on_few_rows(program)
        constants = self._constants(program)
        taken = 0.5 * constants * math.log(max(self.amount(), 2.0))
        gain = self._gain(program, excess) * max(0.0, 1.0 - constants / self.amount())
        return 0.5 * gain < self.structure_length(program) + taken

    def hangs_on_few_rows(self, program: Program) -> bool:
        """Tell whether a formula of squares explains the rows with the farthest targets alone.

        It is asked of the rows that are not held out. In those that are not farthest out the
        formula gains less than its structure takes, and less than half of what it gains in all,
        beside the best constant of each.
        """
        if not self.loss.is_squares:
            return False
        rows = self.seen[:: -(-len(self.seen) // _JUDGED)]
        _, y, weights = (part[rows] for part in self.training[:3])
        values = self.values(program, rows)
        order = np.argsort(np.abs(y - np.median(y)), kind="stable")
        others = order[: len(order) - math.ceil(_FARTHEST * len(order))]

        def gain(some: Indices) -> float:
            """Return the nats by which the formula is more likely than the best constant."""
            target, share = y[some], weights[some] / weights[some].sum()
            least = max(ROUNDING * self._variance, math.ulp(0.0))
            constant = share @ np.square(target - share @ target)
            own = share @ np.square(target - values[some])
            ratio = max(float(constant), least) / max(float(own), least)
            return 0.5 * self.amount() * math.log(ratio) if math.isfinite(ratio) else -math.inf

        of_others = gain(others)
        hangs = of_others < min(self.structure_length(program), _OF_OTHERS * gain(order))
        return hangs and not self.r2(program) > _PREDICTED

    def taken_by_constants(self, program: Program, excess: float) -> float:
        """Return `Equation.taken_by_constants` of a formula with a loss above the least one.

        Each constant makes one residual vanish, so that n rows and k constants say as much as n - k
        rows would, as in the restricted likelihood (Patterson and Thompson 1971): eight planets fit
        any formula of eight constants.
        """
        if len(self.training.target) >= FEWEST_DIVIDED or not program.variables:
            return 0.0
        taken = min(1.0, self._constants(program) / self.amount())
        return 0.5 * taken * max(0.0, self._gain(program, excess))

    def _constants(self, program: Program) -> int:
        """Count the constants of a formula, those with a short form, too."""
        parts = self.form.parts_of(program)
        return sum(int(np.count_nonzero(own.codes == CONSTANT)) for own in parts)

    def _gain(self, program: Program, excess: float) -> float:
        """Return twice the nats by which a formula is more likely than the median target."""
        least = max(ROUNDING * self.scale, math.ulp(0.0))
        middle = Program.constant(float(np.median(self.training.target)))
        own = self.deviance(program, max(excess, least))
        return self.deviance(middle, max(self.scale, least)) - own

    # The null model.

    @cached_property
    def null(self) -> Program | None:
        """The linear regression of all variables, fitted to all rows; None if it takes no part."""
        rows, columns = self.training.rows.shape
        if self.most_linear <= 0.0 or not self.folds or columns > _MOST_COLUMNS:
            return None
        if len(self.seen) < _ROWS_A_CONSTANT * (columns + 1):
            return None
        program = self._linear(np.arange(rows))
        is_short = self.complexity(program) <= self.most_linear
        return program if program.variables and is_short else None

    @cached_property
    def null_r2(self) -> float:
        """R^2 on the rows held out of the linear regression that is fitted to the others."""
        return self.r2(self._linear_of_seen)

    @cached_property
    def _linear_of_seen(self) -> Program:
        return self._linear(self.seen)

    def _linear(self, rows: Indices) -> Program:
        """Return the linear regression of all variables, fitted to some rows; of many, to less."""
        taken = rows[:: -(-len(rows) // _MOST_ROWS)]
        slopes, intercept = linear_regression(*(part[taken] for part in self.training[:3]))
        terms = [
            Program.apply("mul", Program.constant(slope), Program.variable(place))
            for place, slope in enumerate(slopes.tolist())
            if slope != 0.0
        ]
        return reduce(partial(Program.apply, "add"), [*terms, Program.constant(intercept)])

    def repeats_null(self, program: Program) -> bool:
        """Tell whether a formula combines variables linearly, and is no shorter than the null.

        The null is fitted to all rows, and such a formula to those that are not held out.
        """
        null = self.null
        if null is None or program == null or self.complexity(program) < self.complexity(null):
            return False
        rows = self.seen[:: -(-len(self.seen) // _JUDGED)]
        X, _, weights = (part[rows] for part in self.training[:3])
        values = self.values(program, rows)
        if not np.isfinite(values).all():
            return False
        slopes, intercept = linear_regression(X, values, weights)
        left = values - X @ slopes - intercept
        return bool(np.abs(left).max() <= math.sqrt(ROUNDING) * np.ptp(values))

    # Rows that are made up.

    def hangs_on_rounding(self, program: Program) -> bool:
        """Tell whether digits of the data that nobody measures decide a formula's values.

        The sine of a huge number is such a formula: it has any value, as a random number.
        """
        step = -(-len(self.training.target) // _JUDGED)
        X = self.training.rows[::step].T
        signs = np.random.default_rng(0).choice((-1.0, 1.0), size=X.shape)
        size = np.minimum(np.abs(X), np.ptp(X, axis=1, keepdims=True))
        moved = X + signs * _UNMEASURED * size
        with np.errstate(all="ignore"):
            change = reference.evaluate_program(program, moved)
            change = change - reference.evaluate_program(program, X)
            return bool(np.mean(np.square(change)) > _LEAST_NOISE * self._variance)

    def strays(self, program: Program) -> bool:
        """Tell whether a formula has values on rows unlike all others that are a surprise."""
        grouped = self.training.groups is not None  # each group has a range of its own
        if not self.loss.is_squares or program.variables == 0 or grouped:
            return False
        if program not in self._straying:
            stays = self._stays(program, self._unlike)
            if stays:  # also next to poles: a narrow one may be between all rows, made up or not
                low, high = self.training.rows.min(axis=0), self.training.rows.max(axis=0)
                region = DefinedRegion(program, low, high, np.empty((len(low), 0)), _BOXES)
                stays = self._stays(program, region.open_points)
            self._straying[program] = not stays
        return self._straying[program]

    def _stays(self, program: Program, rows: Floats) -> bool:
        values, (low, high) = reference.evaluate_program(program, rows), self._range
        return bool(((values >= low) & (values <= high)).all())

    @cached_property
    def _unlike(self) -> Floats:
        """Rows unlike all others, as the next ones of a table may be, [variables, n].

        Their variables come from different rows, and each is moved away from that of another row by
        up to half of their distance, which may be out of the variable's range. What has one sign
        keeps it, and comes as much closer to 0 at most as a factor of 1.5.
        """
        first, rng = np.random.default_rng(0), np.random.default_rng(1)
        moved = []
        for column in self.training.rows.T:
            own = column[first.integers(len(column), size=_JUDGED)]
            other = column[rng.integers(len(column), size=_JUDGED)]
            step = rng.uniform(0.0, _BEYOND, _JUDGED)
            further = own + step * (own - other)
            has_sign = column.min() >= 0.0 or column.max() <= 0.0
            nearer = own / (1.0 + step)
            turned = has_sign & (further * np.sign(own) <= np.abs(nearer))
            moved.append(np.where(turned, nearer, further))
        return np.stack(moved)

    @cached_property
    def _range(self) -> tuple[float, float]:
        """Values that are no surprise on rows unlike all others, the least and the greatest.

        They are those of the target and those of a linear model, with some room.
        """
        step = -(-len(self.training.target) // _JUDGED)
        slopes, intercept = linear_regression(*(part[::step] for part in self.training[:3]))
        linear = slopes @ self._unlike + intercept
        low, high = float(self.training.target.min()), float(self.training.target.max())
        room = _ROOM * (high - low)
        return min(low, float(linear.min())) - room, max(high, float(linear.max())) + room

    # Figures of the rows.

    @cached_property
    def seen(self) -> Indices:
        """Rows that are not held out."""
        return np.delete(np.arange(len(self.training.target)), self.held_out)

    @cached_property
    def statistics(self) -> TargetStatistics:
        """Sums over the target that losses are made of."""
        return TargetStatistics(self.training.target, self.training.weights)

    @cached_property
    def _least_row_losses(self) -> Floats:
        return least_row_losses(self.loss, self.training.target, self.training.weights)

    @cached_property
    def _variance(self) -> float:
        """Weighted variance of the target."""
        _, y, weights = self.training[:3]
        return float(np.average(np.square(y - np.average(y, weights=weights)), weights=weights))

    @cached_property
    def _spread(self) -> float:
        target = self.training.target
        return float(np.median(np.abs(target - np.median(target)))) or float(np.std(target)) or 1.0


#: Tokens of a part of a formula, those without a factor, and those of its terms.
_Part: TypeAlias = tuple[int, int, tuple[int, ...]]


def terms_of(program: Program) -> tuple[int, ...]:
    """Return the tokens of each term of a sum, without its factor; of a constant none."""

    def leaf(code: int, value: float) -> _Part:
        return 1, 1, () if code == CONSTANT else (1,)

    def join(operator: Operator, parts: list[_Part]) -> _Part:
        size = 1 + sum(tokens for tokens, _, _ in parts)
        together = tuple(size for _, _, terms in parts for size in terms)
        factors = [own for _, own, terms in parts if terms]
        scaled = operator.name == "mul" and len(factors) < 2
        scaled |= operator.name == "div" and not parts[1][2]
        if scaled or operator.name == "neg":
            return size, sum(factors), together
        if operator.name in ("add", "sub"):
            return size, size, together
        own = 1 + sum(factors) if operator.name in ("mul", "div") and len(factors) == 2 else size
        return size, own, (own,) if factors else ()

    return program.fold(leaf, join)[2]
