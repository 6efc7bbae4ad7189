"""Evaluations by data set: which rows count, which sums are needed, and losses made of sums.

Engines return sums over rows. `reduce_to_sums` says which sums a result needs, `LoadedDatasets` has
the engine compute them over the rows that count, and `Finalizer` makes losses, gradients, linear
scaling and correlations of them. `warpfit.losses` says what each loss makes of a sum.

A weight of 0 leaves a row out of losses, their derivatives, scaling, correlations and fits,
whatever number, NaN or pole is there. Multiplying by 0 cannot do that, because 0 times NaN is NaN.
So an engine gets such a data set twice: as it is, for values, and with the rows alone that have a
weight, for sums. A sum over rows has the same bits as on a data set that was uploaded without the
other rows, on every engine, and no kernel has to look at a weight. The copy takes at most as much
memory as the data set. Data sets without a weight of 0 have none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.errors import DatasetNotFoundError
from warpfit.ir import Program
from warpfit.losses import Closing, TargetStatistics, close_gradients, close_losses
from warpfit.request import OUTPUTS, STAGES, Evaluation, Timings
from warpfit_server.engine.interface import (
    MOMENTS,
    Engine,
    Linearisation,
    Moments,
    Outputs,
    Selection,
    SmallFits,
    Steps,
)

Floats = NDArray[np.float64]
#: Outputs with a number for each row, or statistics of the values of all rows.
_OF_ALL_ROWS: Final = tuple([output.name for output in OUTPUTS if output.rows == "all"])
#: Outputs of engines that are sums over the rows that have a weight.
_OF_WEIGHTED_ROWS: Final = (
    *[each.name for each in OUTPUTS if each.rows == "weighted" and each.made_of == "engine"],
    "moments",
)
#: Options of the outputs over rows that have a weight, when none is asked for, and of the others.
_NO_SUMS: Final[Mapping[str, Any]] = {
    **{e.asked_by: False for e in OUTPUTS if e.rows == "weighted" and e.name != "losses"},
    **dict.fromkeys(("loss", "custom_loss")),
}
_NO_ROWS: Final[Mapping[str, Any]] = {e.asked_by: False for e in OUTPUTS if e.rows == "all"}
#: Row ranges of a data set whose statistics are kept.
_KEPT_RANGES: Final = 256
#: Mean square below which squares of float64 have lost digits, because they are multiples of
#: 2^-1074: a quotient of such sums has fewer than eleven. Targets and values are below 1e-155 then.
_LEAST_SQUARE: Final = 2.0**-1035


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


@dataclass(frozen=True, slots=True, eq=False)
class _WeightedRows:
    """The rows of a data set that have a weight."""

    indices: NDArray[np.int64]
    """Ascending."""
    dataset: Dataset | None
    """The rows as a data set of their own; None if there is none."""

    @classmethod
    def of(cls, dataset: Dataset) -> _WeightedRows | None:
        """Copy the rows that have a weight; return None if all have one."""
        if dataset.weights is None or dataset.weights.all():
            return None
        indices = np.flatnonzero(dataset.weights)
        if not len(indices):
            return cls(indices, None)
        layout = replace(dataset.layout, rows=len(indices))
        matrix = np.empty((layout.columns, layout.rows), layout.dtype)
        for column, taken in zip(dataset.matrix, matrix, strict=True):
            np.take(column, indices, out=taken, mode="clip")  # which needs no buffer
        key = hashlib.sha256(dataset.content_id + b" rows with a weight").digest()
        return cls(indices, Dataset.resident(layout, matrix, key))

    def restrict(self, evaluation: Evaluation, whole: Dataset) -> Evaluation | None:
        """Name these rows in an evaluation of the whole; return None if no row of it is here."""
        edges = np.searchsorted(self.indices, evaluation.row_range(whole.layout))
        start, stop = edges.tolist()
        if self.dataset is None or start == stop:
            return None
        return replace(evaluation, dataset_id=self.dataset.content_id, rows=(start, stop))


class LoadedDatasets:
    """The data sets of an engine process, and the passes of its engine over their rows.

    Args:
        engine: the engine, which computes.
        loaded: data sets that the engine has already, by `Evaluation.dataset_id`.
    """

    def __init__(self, engine: Engine, loaded: Mapping[bytes, Dataset] | None = None) -> None:
        self._engine = engine
        self._whole: dict[bytes, Dataset] = dict(loaded or {})
        self._weighted: dict[bytes, _WeightedRows] = {}

    def load(self, dataset: Dataset) -> None:
        """Load a data set, and its rows that have a weight if others have none.

        Raises:
            ResourceExhaustedError: if the device has no room for it.
            MemoryError: if this process has none.
        """
        key, weighted = dataset.content_id, _WeightedRows.of(dataset)
        self._engine.load(dataset)
        if weighted is not None:
            try:
                if weighted.dataset is not None:
                    self._engine.load(weighted.dataset)
            except Exception:
                self._engine.unload(key)
                raise
            self._weighted[key] = weighted
        self._whole[key] = dataset

    def unload(self, key: bytes) -> None:
        """Forget a data set once the evaluations that use it have ended."""
        self._whole.pop(key, None)
        weighted = self._weighted.pop(key, None)
        if weighted is not None and weighted.dataset is not None:
            self._engine.unload(weighted.dataset.content_id)
        self._engine.unload(key)

    def whole(self, key: bytes) -> Dataset:
        """Return a data set with all rows; raise DatasetNotFoundError if it is not loaded."""
        dataset = self._whole.get(key)
        if dataset is None:
            raise DatasetNotFoundError
        return dataset

    def evaluate(self, evaluation: Evaluation, outputs: Outputs) -> Steps[Timings]:
        """Evaluate a batch as `Engine.evaluate`; rows of weight 0 count in no sum.

        Sums over no row are 0, and so are moments.
        """
        whole = self.whole(evaluation.dataset_id)
        weighted = self._weighted.get(evaluation.dataset_id)
        if weighted is None:
            return (yield from self._engine.evaluate(evaluation, outputs))
        timings = Timings()
        if any(getattr(outputs, name) is not None for name in _OF_ALL_ROWS):
            of_rows = replace(evaluation, **_NO_SUMS)
            nothing: dict[str, Any] = dict.fromkeys(_OF_WEIGHTED_ROWS)
            given = replace(outputs, **nothing)
            timings = yield from self._engine.evaluate(of_rows, given)
        sums = {name: getattr(outputs, name) for name in _OF_WEIGHTED_ROWS}
        if all(array is None for array in sums.values()):
            return timings
        of_sums = replace(evaluation, **_NO_ROWS)
        restricted = weighted.restrict(of_sums, whole)
        if restricted is None:
            for array in sums.values():
                if array is not None:
                    array[...] = 0.0
            return timings
        nothing = dict.fromkeys(_OF_ALL_ROWS)
        given = replace(outputs, ready=lambda programs: None, **nothing)
        found = yield from self._engine.evaluate(restricted, given)
        both = {name: getattr(timings, name) + getattr(found, name) for name in STAGES}
        return replace(found, **both)

    def linearise(
        self,
        evaluation: Evaluation,
        row_loss: Program,
        *,
        curvature: bool,
        cancelled: NDArray[np.uint8],
        selection: Selection | None = None,
    ) -> Steps[Linearisation]:
        """Linearise a batch as `Engine.linearise`; rows of weight 0 count in no sum.

        Where no row has a weight the whole data set is taken; its sums are 0 or NaN.
        """
        return (
            yield from self._engine.linearise(
                self._restricted(evaluation),
                row_loss,
                curvature=curvature,
                cancelled=cancelled,
                selection=selection,
            )
        )

    def small_fits(
        self,
        evaluation: Evaluation,
        row_loss: Program,
        *,
        cancelled: NDArray[np.uint8],
        selection: Selection,
    ) -> Steps[SmallFits | None]:
        """Prepare a fit as `Engine.small_fits`; rows of weight 0 count in no sum."""
        return (
            yield from self._engine.small_fits(
                self._restricted(evaluation), row_loss, cancelled=cancelled, selection=selection
            )
        )

    def _restricted(self, evaluation: Evaluation) -> Evaluation:
        """Return the evaluation of sums on the rows that have a weight, if there are any."""
        whole = self.whole(evaluation.dataset_id)
        weighted = self._weighted.get(evaluation.dataset_id)
        restricted = None if weighted is None else weighted.restrict(evaluation, whole)
        return restricted or evaluation


class Finalizer:
    """Makes losses, gradients, scaling and correlations of an engine's sums; safe for threads.

    The statistics of a target take a pass over the rows, so they are kept as long as the data set
    lives.
    """

    def __init__(self) -> None:
        self._statistics: WeakKeyDictionary[Dataset, dict[tuple[int, int], TargetStatistics]] = (
            WeakKeyDictionary()
        )

    def statistics(self, dataset: Dataset, rows: tuple[int, int]) -> TargetStatistics:
        """Return the statistics of a range of rows, computed as far as they have been needed."""
        known = self._statistics.setdefault(dataset, {})
        statistics = known.get(rows)
        if statistics is None:
            if len(known) >= _KEPT_RANGES:
                known.clear()
            statistics = known[rows] = TargetStatistics.of_rows(dataset, slice(*rows))
        return statistics

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
            evaluation: the evaluation as the caller asked for it.
            dataset: the data set that the evaluation names.
            outputs: the caller's outputs with the engine's sums, which are overwritten.
            moments: the engine's moments, see `Outputs.moments`.
            scaling: receives slopes and intercepts, [programs, K, 2].
            correlations: receives the correlations, [programs, K].
        """
        rows = evaluation.row_range(dataset.layout)
        least = (rows[1] - rows[0]) * _LEAST_SQUARE
        if correlations is not None and moments is not None:
            correlations[...] = correlation(moments, least)
        loss = evaluation.loss_function
        if loss is None or outputs.losses is None:
            return
        if scaling is not None and moments is not None:
            scaling[...], outputs.losses[...] = scale_linearly(moments, least)
        statistics = self.statistics(dataset, rows)
        yield from statistics.divisor_steps(loss.closing)
        losses = outputs.losses
        losses[...] = close_losses(loss.closing, losses, statistics)
        is_relative = loss.closing in (Closing.RELATIVE, Closing.SCORE)
        if is_relative and 0.0 < statistics.variation < least:
            losses[...] = np.nan
        if (gradients := outputs.variable_gradients) is not None:
            losses_of = losses[:, :, None]
            gradients[...] = close_gradients(loss.closing, gradients, losses_of, statistics)
        if (gradients := outputs.gradients) is not None:
            losses_of = losses
            if loss.closing is Closing.ROOT:  # the only one whose derivative depends on the loss
                counts = np.repeat(evaluation.batch.parameter_counts, evaluation.batch.vectors)
                losses_of = np.repeat(losses.reshape(-1), counts)
            gradients[...] = close_gradients(loss.closing, gradients, losses_of, statistics)


def scale_linearly(moments: Floats, least: float = 0.0) -> tuple[Floats, Floats]:
    """Fit slope and intercept in closed form (Keijzer 2003, "Improving symbolic regression").

    Args:
        moments: `Moments`, [..., MOMENTS].
        least: sums of squares between 0 and this have lost digits, see `_LEAST_SQUARE`.

    Returns:
        Slope and intercept, [..., 2], and the remaining sum of squares, [...]. A constant program
        has slope 0; what has lost its digits is NaN.
    """
    named = Moments.of(moments)
    is_lost = (named.squares_f > 0.0) & (named.squares_f < least)
    with np.errstate(all="ignore"):
        slope = np.where(named.squares_f == 0.0, 0.0, named.products / named.squares_f)
        slope = np.where(is_lost, np.nan, slope)
        intercept = named.mean_y - slope * named.mean_f
    residual = np.where(is_lost, np.nan, named.residual)
    return np.stack([slope, intercept], axis=-1), residual


def correlation(moments: Floats, least: float = 0.0) -> Floats:
    """Return Pearson's correlation, [...]; NaN where the values or the target do not vary.

    It is NaN, too, where a sum of squares is below ``least``, and has lost its digits.
    """
    named = Moments.of(moments)
    with np.errstate(all="ignore"):
        scaled = named.products / np.sqrt(named.squares_f) / np.sqrt(named.squares_y)
        is_lost = np.minimum(named.squares_f, named.squares_y) < least
        return np.where(is_lost, np.nan, np.clip(scaled, -1.0, 1.0))
