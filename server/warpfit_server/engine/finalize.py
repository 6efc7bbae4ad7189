"""Loss finalisation: engines return sums over the rows, which become losses here.

That goes for the named losses, custom losses, gradients, linear scaling and correlations of all
engines. `warpfit.losses` says what each loss makes of a sum.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.losses import (
    Closing,
    LossFunction,
    TargetStatistics,
    close_gradients,
    close_losses,
)
from warpfit.request import Evaluation
from warpfit_server.engine.interface import Outputs, Steps, offload

Floats = NDArray[np.float64]
#: Moments of a program and parameter vector, see `Outputs.moments`.
MOMENTS: Final = 7
#: Bytes of a row of a target as its statistics are computed.
_ROW_BYTES: Final = 8
#: Row ranges of a data set whose statistics are kept.
_KEPT_RANGES: Final = 256


def reduce_to_sums(evaluation: Evaluation, outputs: Outputs) -> tuple[Evaluation, Outputs]:
    """Return the evaluation and the outputs to hand to the engine.

    Linear scaling and correlations need moments; a linearly scaled loss needs nothing else.
    """
    if not evaluation.needs_moments:
        return evaluation, outputs
    moments = np.empty((len(evaluation.batch), evaluation.batch.vectors, MOMENTS))
    outputs = replace(outputs, moments=moments)
    if not evaluation.linear_scaling:
        return evaluation, outputs
    return replace(evaluation, loss=None, custom_loss=None), replace(outputs, losses=None)


class Finalizer:
    """Turns what engines have summed into what was asked for; safe to use from threads.

    It keeps the statistics of each data set's target, which take a pass over the rows, as long as
    the data set lives.
    """

    def __init__(self) -> None:
        self._statistics: WeakKeyDictionary[Dataset, dict[tuple[int, int], TargetStatistics]] = (
            WeakKeyDictionary()
        )

    def finalize(
        self,
        evaluation: Evaluation,
        dataset: Dataset,
        outputs: Outputs,
        moments: Floats | None = None,
        scaling: Floats | None = None,
        correlations: Floats | None = None,
    ) -> Steps[None]:
        """Finalise an evaluation in place.

        Args:
            evaluation: as the caller asked for it.
            dataset: that the evaluation names.
            outputs: the caller's, filled by the engine; losses and gradients are overwritten.
            moments: from the engine, see `Outputs.moments`.
            scaling: receives slopes and intercepts, [programs, K, 2].
            correlations: receives the correlations, [programs, K].
        """
        if correlations is not None and moments is not None:
            correlations[...] = correlation(moments)
        loss = evaluation.loss_function
        if loss is None or outputs.losses is None:
            return
        if scaling is not None and moments is not None:
            scaling[...], outputs.losses[...] = scale_linearly(moments)
        rows = evaluation.row_range(dataset.layout)
        statistics = self._of_rows(dataset, rows)
        if not statistics.has_divisor(loss.closing):
            pass_over_rows = partial(statistics.divisor, loss.closing)
            yield from offload((rows[1] - rows[0]) * _ROW_BYTES, pass_over_rows)
        outputs.losses[...] = close_losses(loss.closing, outputs.losses, statistics)
        _finalize_gradients(evaluation, loss, outputs, statistics)

    def _of_rows(self, dataset: Dataset, rows: tuple[int, int]) -> TargetStatistics:
        known = self._statistics.setdefault(dataset, {})
        statistics = known.get(rows)
        if statistics is None:
            if len(known) >= _KEPT_RANGES:
                known.clear()
            statistics = known[rows] = TargetStatistics.of_rows(dataset, slice(*rows))
        return statistics


def _finalize_gradients(
    evaluation: Evaluation, loss: LossFunction, outputs: Outputs, statistics: TargetStatistics
) -> None:
    assert outputs.losses is not None
    if outputs.variable_gradients is not None:
        losses = outputs.losses[:, :, None]
        gradients = outputs.variable_gradients
        gradients[...] = close_gradients(loss.closing, gradients, losses, statistics)
    if outputs.gradients is not None:
        batch, losses = evaluation.batch, outputs.losses
        if loss.closing is Closing.ROOT:  # the only one whose derivative depends on the loss
            counts = np.repeat(batch.parameter_counts, batch.vectors)
            losses = np.repeat(losses.reshape(-1), counts)
        gradients = outputs.gradients
        gradients[...] = close_gradients(loss.closing, gradients, losses, statistics)


def scale_linearly(moments: Floats) -> tuple[Floats, Floats]:
    """Fit slope and intercept in closed form (Keijzer 2003, "Improving symbolic regression").

    Args:
        moments: see `Outputs.moments`, [..., MOMENTS].

    Returns:
        Slope and intercept, [..., 2], and the remaining sum of squares, [...]. A constant program
        has slope 0.
    """
    mean_f, mean_y, squares_f, _, products, residual = np.moveaxis(moments[..., 1:], -1, 0)
    with np.errstate(all="ignore"):
        slope = np.where(squares_f == 0.0, 0.0, products / squares_f)
        intercept = mean_y - slope * mean_f
    return np.stack([slope, intercept], axis=-1), residual


def correlation(moments: Floats) -> Floats:
    """Return Pearson's correlation, [...]; NaN where the values or the target do not vary."""
    with np.errstate(all="ignore"):
        scaled = moments[..., 5] / np.sqrt(moments[..., 3]) / np.sqrt(moments[..., 4])
        return np.clip(scaled, -1.0, 1.0)
