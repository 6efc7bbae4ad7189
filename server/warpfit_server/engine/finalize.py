"""What is left to do when an engine has summed: closings of losses, scaling, correlation.

Engines return the six losses of `warpfit.Loss` finished, everything else as sums; see `base`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.losses import (
    LossFunction,
    TargetStatistics,
    close_gradients,
    close_losses,
)
from warpfit.request import Evaluation
from warpfit_server.engine.interface import Outputs

Floats = NDArray[np.float64]
#: Numbers of a cell's moments, see `Outputs.moments`.
MOMENTS: Final = 7


def engine_share(evaluation: Evaluation, outputs: Outputs) -> tuple[Evaluation, Outputs]:
    """Reduce an evaluation to what the engine computes of it.

    A linearly scaled loss comes from the moments, not from the engine's losses.
    """
    if not evaluation.needs_moments:
        return evaluation, outputs
    moments = np.empty((len(evaluation.batch), evaluation.batch.vectors, MOMENTS))
    outputs = replace(outputs, moments=moments)
    if not evaluation.linear_scaling:
        return evaluation, outputs
    return replace(evaluation, loss=None, custom_loss=None), replace(outputs, losses=None)


def finish(
    evaluation: Evaluation,
    dataset: Dataset,
    outputs: Outputs,
    moments: Floats | None,
    scaling: Floats | None,
    correlations: Floats | None,
) -> None:
    """Turn the engine's sums into what was asked for, in place.

    Args:
        evaluation: as it was asked for.
        dataset: that it names.
        outputs: filled by the engine; ``losses`` and gradients are overwritten.
        moments: see `Outputs.moments`.
        scaling: to fill with slope and intercept, [programs, K, 2].
        correlations: to fill, [programs, K].

    """
    if correlations is not None and moments is not None:
        correlations[...] = correlation(moments)
    loss = evaluation.loss_function
    if loss is None or outputs.losses is None:
        return
    open_losses = evaluation.custom_loss is not None or evaluation.linear_scaling
    if not (open_losses or evaluation.gradient or evaluation.variable_gradient):
        return
    rows = slice(*evaluation.row_range(dataset.layout))
    statistics = TargetStatistics.of_rows(dataset, rows)
    if scaling is not None and moments is not None:
        scaling[...], outputs.losses[...] = scale_linearly(moments)
    if open_losses:
        outputs.losses[...] = close_losses(loss.closing, outputs.losses, statistics)
    _finish_gradients(evaluation, loss, outputs, statistics)


def _finish_gradients(
    evaluation: Evaluation, loss: LossFunction, outputs: Outputs, statistics: TargetStatistics
) -> None:
    assert outputs.losses is not None
    if outputs.variable_gradients is not None:
        losses = outputs.losses[:, :, None]
        gradients = outputs.variable_gradients
        gradients[...] = close_gradients(loss.closing, gradients, losses, statistics)
    if outputs.gradients is not None:
        batch = evaluation.batch
        counts = np.repeat(batch.parameter_counts, batch.vectors)
        losses = np.repeat(outputs.losses.reshape(-1), counts)
        gradients = outputs.gradients
        gradients[...] = close_gradients(loss.closing, gradients, losses, statistics)


def scale_linearly(moments: Floats) -> tuple[Floats, Floats]:
    """Fit slope and intercept in closed form (Keijzer 2003, "Improving symbolic regression").

    Args:
        moments: see `Outputs.moments`, [..., MOMENTS].

    Returns:
        Slope and intercept, [..., 2], and the sum of squares of what they leave, [...]. A constant
        program has slope 0.

    """
    mean_f, mean_y, squares_f, _, products, residual = np.moveaxis(moments[..., 1:], -1, 0)
    with np.errstate(all="ignore"):
        slope = np.where(squares_f == 0.0, 0.0, products / squares_f)
        intercept = mean_y - slope * mean_f
    return np.stack([slope, intercept], axis=-1), residual


def correlation(moments: Floats) -> Floats:
    """Pearson's correlation from `Outputs.moments`; NaN where values or target do not vary."""
    with np.errstate(all="ignore"):
        scaled = moments[..., 5] / np.sqrt(moments[..., 3]) / np.sqrt(moments[..., 4])
        return np.clip(scaled, -1.0, 1.0)
