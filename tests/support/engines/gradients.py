"""Derivatives by an engine, without a server."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from support.engines.references import outputs_for
from warpfit.dataset import Dataset
from warpfit.ir import Batch, Program
from warpfit.losses import LossFunction
from warpfit.request import Evaluation, Precision
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
    return ask(engine, dataset, evaluation, cancelled=cancelled, moments=statistics)


def ask(engine: Engine, dataset: Dataset, evaluation: Evaluation, **options: Any) -> Outputs:
    """Evaluate into outputs as `outputs_for` allocates them."""
    evaluation.check(dataset.layout)
    outputs = outputs_for(evaluation, dataset.layout, **options)
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
