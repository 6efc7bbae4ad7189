"""Fits by the server's algorithms over the NumPy reference: what `warpfit.testing` answers with."""

from typing import Any

import numpy as np

from warpfit.dataset import Dataset
from warpfit.expressions import reference
from warpfit.ir import Program
from warpfit.request import Evaluation, FitProgress, FitRequest, FitResult, Timings
from warpfit_server.engine.fit import driver
from warpfit_server.engine.fit.driver import FitContext, optimize
from warpfit_server.engine.interface import Linearisation, run_to_end


def fit(request: FitRequest, dataset: Dataset) -> tuple[FitResult, list[FitProgress]]:
    """Return the result of a checked fit, and its progress if that is asked for."""
    driver.load()  # the same code as engines load; calls would compile another one
    reports: list[FitProgress] = []
    engine = _ReferenceEngine(dataset)
    context = FitContext(
        linearise=engine.linearise,
        evaluate=engine.evaluate,
        dataset=dataset,
        cancelled=np.zeros(1, dtype=np.uint8),
        report=reports.append if request.settings.progress else None,
    )
    return run_to_end(optimize(request, context)), reports


class _ReferenceEngine:
    """The parts of an engine that a fit needs, computed by the reference."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def evaluate(self, evaluation: Evaluation, outputs: Any) -> Any:
        yield None
        result = reference.evaluate(evaluation, self._dataset)
        outputs.values[:], outputs.jacobian[:] = result.values, result.jacobian
        return Timings()

    def linearise(
        self, evaluation: Evaluation, row_loss: Program, *, curvature: bool, **_: Any
    ) -> Any:
        yield None
        batch = evaluation.batch
        rows = reference.EvaluatedRows.of(self._dataset, evaluation).weighted()
        sums = [
            reference.linearise(
                batch.program(index), batch.program_parameters(index)[0], rows, row_loss
            )
            for index in range(len(batch))
        ]
        triangles = [s.curvature[np.tril_indices(len(s.gradient))] for s in sums]
        return Linearisation(
            losses=np.array([[s.loss] for s in sums]),
            gradients=np.concatenate([s.gradient for s in sums]),
            curvatures=np.concatenate(triangles) if curvature else None,
        )
