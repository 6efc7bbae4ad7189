"""Derivatives by an engine, without a server."""

from typing import Any

import numpy as np

from support.engines.references import outputs_for
from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.losses import LossFunction
from warpfit.request import Evaluation
from warpfit_server.engine.interface import Outputs, run_to_end


def derive(
    engine, dataset, programs, parameters=None, *,
    row_loss=None, statistics=False, cancelled=False, **options,
):  # fmt: skip
    """Evaluate with all derivatives (those of the loss if there is one)."""
    options |= {"jacobian": True, "reductions": statistics}
    if row_loss is not None:
        options["custom_loss"] = LossFunction(row_loss, "sum")
        options["gradient"] = options["variable_gradient"] = True
    evaluation = Evaluation(dataset.content_id, Batch.of(programs, parameters), **options)
    return ask(engine, dataset, evaluation, cancelled=cancelled, moments=statistics)


def ask(engine: Any, dataset: Dataset, evaluation: Evaluation, **options: Any) -> Outputs:
    """Evaluate into outputs as `outputs_for` allocates them."""
    evaluation.check(dataset.layout)
    outputs = outputs_for(evaluation, dataset.layout, **options)
    engine.load(dataset)
    run_to_end(engine.evaluate(evaluation, outputs))
    return outputs


def linearise(engine, dataset, programs, parameters, row_loss, *, curvature=True, **options):
    """Linearise without a server."""
    engine.load(dataset)
    evaluation = Evaluation(dataset.content_id, Batch.of(programs, parameters), **options)
    flag = np.zeros(1, dtype=np.uint8)
    return run_to_end(engine.linearise(evaluation, row_loss, curvature=curvature, cancelled=flag))
