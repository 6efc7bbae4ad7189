"""Calls of an engine for derivatives, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from support.engines.evaluations import POISON
from warpfit.dataset import Dataset
from warpfit.ir import Batch, Program
from warpfit.losses import LossFunction
from warpfit.request import Evaluation, Precision
from warpfit_server.engine.finalize import MOMENTS
from warpfit_server.engine.interface import Engine, Linearisation, Outputs, run_to_end


def derive(
    engine: Engine,
    dataset: Dataset,
    programs: Sequence[Program],
    parameters: Sequence[Any] | None = None,
    *,
    row_loss: Program | None = None,
    cancelled: bool = False,
    statistics: bool = False,
    **options: Any,
) -> Outputs:
    """Evaluate with all derivatives (those of the loss if there is one)."""
    batch = Batch.of(programs, parameters)
    loss = None if row_loss is None else LossFunction(row_loss, "sum")
    evaluation = Evaluation(
        dataset.content_id, batch, custom_loss=loss, gradient=loss is not None, jacobian=True,
        variable_gradient=loss is not None, reductions=statistics, **options,
    )  # fmt: skip
    evaluation.check(dataset.layout)
    shape = evaluation.shape(dataset.layout)
    cells = shape[:2]
    outputs = Outputs(
        values=np.full(shape, POISON, dataset.layout.dtype),
        losses=np.full(cells, POISON) if loss else None,
        cancelled=np.full(1, cancelled, dtype=np.uint8),
        ready=lambda programs: None,
        gradients=np.full(len(batch.parameters), POISON) if loss else None,
        jacobian=np.full((len(batch.parameters), shape[2]), POISON, dataset.layout.dtype),
        variable_gradients=np.full((*cells, dataset.layout.variables), POISON) if loss else None,
        reductions=np.full((*cells, 5), POISON) if statistics else None,
        moments=np.full((*cells, MOMENTS), POISON) if statistics else None,
    )
    engine.load(dataset)
    run_to_end(engine.evaluate(evaluation, outputs))
    return outputs


def linearise(
    engine: Engine,
    dataset: Dataset,
    programs: Sequence[Program],
    parameters: Sequence[Any],
    row_loss: Program,
    *,
    rows: tuple[int, int] | None = None,
    precision: Precision = Precision.PRECISE,
    curvature: bool = True,
) -> Linearisation:
    """Linearise without a server."""
    engine.load(dataset)
    evaluation = Evaluation(
        dataset.content_id, Batch.of(programs, parameters), rows=rows, precision=precision
    )
    flag = np.zeros(1, dtype=np.uint8)
    return run_to_end(engine.linearise(evaluation, row_loss, curvature=curvature, cancelled=flag))
