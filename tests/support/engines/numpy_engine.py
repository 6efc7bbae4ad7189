"""A small engine in NumPy float64: enough of one to drive fits without compiled code."""

import numpy as np

from warpfit.dataset import Dataset
from warpfit.expressions.reference import differentiate
from warpfit.losses import PREDICTION, mentions_weight
from warpfit.ops import VARIABLE
from warpfit_server.engine.interface import Linearisation, Steps


class NumpyEngine:
    """Implements `Engine.linearise`; counts its passes and the programs in each."""

    def __init__(self, *datasets: Dataset) -> None:
        self.datasets = {dataset.content_id: dataset for dataset in datasets}
        self.sizes: list[int] = []

    def load(self, dataset: Dataset) -> None:
        """Keep a data set."""
        self.datasets[dataset.content_id] = dataset

    def linearise(
        self, evaluation, row_loss, *, curvature, cancelled, selection=None
    ) -> Steps[Linearisation]:
        yield None
        dataset = self.datasets[evaluation.dataset_id]
        batch = evaluation.batch
        self.sizes.append(len(batch))
        assert batch.vectors == 1
        rows = slice(*evaluation.row_range(dataset.layout))
        single = dataset.layout.dtype.itemsize == 4
        losses, gradients, curvatures = [], [], []
        for index in range(len(batch)):
            (parameters,) = batch.program_parameters(index)
            if single:
                with np.errstate(over="ignore"):
                    parameters = parameters.astype(np.float32)
            loss, gradient, matrix = linearise(
                batch.program(index), dataset, rows, parameters, row_loss
            )
            losses.append(loss)
            gradients.append(gradient)
            curvatures.append(matrix[np.tril_indices(len(gradient))])
        return Linearisation(
            np.array(losses).reshape(-1, 1),
            np.concatenate(gradients),
            np.concatenate(curvatures) if curvature else None,
        )


def linearise(program, dataset, rows, parameters, row_loss):
    """Sum of row losses, gradient [n] and curvature [n, n] of one program."""
    values, jacobian = differentiate(program, dataset.variables[:, rows], parameters)
    target = dataset.target[rows].astype(float)
    weights = np.ones_like(target) if dataset.weights is None else dataset.weights[rows]
    inputs = np.stack([values, target, weights.astype(float)])
    terms, slopes = differentiate(row_loss, inputs, by=VARIABLE)
    factor = 1.0 if mentions_weight(row_loss) else inputs[2]
    with np.errstate(all="ignore"):
        gradient = jacobian @ (factor * slopes[PREDICTION])
        return np.sum(factor * terms), gradient, (jacobian * inputs[2]) @ jacobian.T
