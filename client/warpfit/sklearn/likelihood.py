"""Losses as searches take them: above the least that a prediction can have, and as likelihoods.

Searches compare losses by ratios, which takes numbers that are not negative. So they subtract the
least value that any prediction could reach: for Poisson's negative log likelihood that leaves half
of the deviance (McCullagh and Nelder 1989, section 2.3), for Gauss's the squares, and squares stay
as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from warpfit.errors import InvalidArgumentError
from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Program
from warpfit.losses import ABSOLUTE, Closing, LossFunction, TargetStatistics, close_losses
from warpfit.ops import VARIABLE, Operator
from warpfit.sklearn.genomes import Floats

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
