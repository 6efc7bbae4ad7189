"""A small engine in NumPy float64: enough of one to drive fits without compiled code."""

import numpy as np

from warpfit.dataset import Dataset
from warpfit.expressions import reference
from warpfit.request import Timings
from warpfit_server.engine.interface import Linearisation, Steps


class NumpyEngine:
    """Implements what fits need of `Engine`; counts linearisations and the programs in each."""

    def __init__(self, *datasets: Dataset) -> None:
        self.datasets = {dataset.content_id: dataset for dataset in datasets}
        self.sizes: list[int] = []

    def load(self, dataset: Dataset) -> None:
        """Keep a data set."""
        self.datasets[dataset.content_id] = dataset

    def evaluate(self, evaluation, outputs) -> Steps[Timings]:
        yield None
        result = reference.evaluate(evaluation, self.datasets[evaluation.dataset_id])
        outputs.values[:], outputs.jacobian[:] = result.values, result.jacobian
        return Timings()

    def linearise(
        self, evaluation, row_loss, *, curvature, cancelled, selection=None
    ) -> Steps[Linearisation]:
        yield None
        dataset = self.datasets[evaluation.dataset_id]
        batch = evaluation.batch
        self.sizes.append(len(batch))
        assert batch.vectors == 1
        rows = reference.EvaluatedRows.of(dataset, evaluation).weighted()
        single = dataset.layout.dtype.itemsize == 4
        losses, gradients, curvatures = [], [], []
        for index in range(len(batch)):
            (parameters,) = batch.program_parameters(index)
            if single:
                with np.errstate(over="ignore"):
                    parameters = parameters.astype(np.float32)
            sums = reference.linearise(batch.program(index), parameters, rows, row_loss)
            losses.append(sums.loss)
            gradients.append(sums.gradient)
            curvatures.append(sums.curvature[np.tril_indices(len(sums.gradient))])
        return Linearisation(
            np.array(losses).reshape(-1, 1),
            np.concatenate(gradients),
            np.concatenate(curvatures) if curvature else None,
        )
