"""Evaluations that wait at the same time and differ in their batch only, run as one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit.request import Evaluation


def merge_key(evaluation: Evaluation) -> Hashable:
    """Return what evaluations must share to be merged; None if this one wants more than losses."""
    wants_more = (
        evaluation.values
        or evaluation.gradient
        or evaluation.jacobian
        or evaluation.variable_gradient
        or evaluation.reductions
        or evaluation.needs_moments
        or evaluation.custom_loss is not None
    )
    if wants_more or evaluation.loss is None:
        return None
    return (
        *(evaluation.dataset_id, evaluation.rows, evaluation.precision, evaluation.loss),
        *(evaluation.tier, evaluation.batch.vectors),
    )


def merged(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Put the programs of evaluations with the same `merge_key` one after the other."""
    batches = [evaluation.batch for evaluation in evaluations]
    batch = Batch(
        codes=np.concatenate([batch.codes for batch in batches]),
        values=np.concatenate([batch.values for batch in batches]),
        lengths=np.concatenate([batch.lengths for batch in batches]),
        parameter_counts=np.concatenate([batch.parameter_counts for batch in batches]),
        parameters=np.concatenate([batch.parameters for batch in batches]),
        vectors=batches[0].vectors,
    )
    return replace(evaluations[0], batch=batch)


def scatter(losses: NDArray[np.float64], targets: Sequence[NDArray[np.float64]]) -> None:
    """Hand the losses of a merged evaluation back.

    Args:
        losses: of all programs, [programs, K].
        targets: the losses of each evaluation in the same order, to fill; [programs, K].

    """
    first = 0
    for target in targets:
        target[...] = losses[first : first + len(target)]
        first += len(target)
