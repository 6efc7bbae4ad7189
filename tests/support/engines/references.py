"""Losses by their definitions, an engine of NumPy float64 that drives fits, and evaluations."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.dataset import Dataset
from warpfit.expressions import reference
from warpfit.ir import Batch
from warpfit.request import Evaluation, Loss, Result, Timings
from warpfit_server.engine.evaluation import Finalizer
from warpfit_server.engine.interface import MOMENTS, Linearisation, Outputs, Steps, run_to_end


def reference_loss(kind, values, target, weights=None):
    """Compute a built-in loss [...] of values [..., rows] by its definition, in float64."""
    f = np.asarray(values, dtype=np.float64)
    y = np.asarray(target, dtype=np.float64)
    w = np.ones_like(y) if weights is None else np.asarray(weights, dtype=np.float64)
    with np.errstate(all="ignore"):
        if kind is Loss.MAE:
            return np.asarray(np.sum(w * np.abs(f - y), axis=-1) / np.sum(w))
        sse = np.sum(w * np.square(f - y), axis=-1)
        from_first = y - y[0]  # so that a large mean costs no digits
        mean = np.sum(w * from_first) / np.sum(w)
        total = np.sum(w * np.square(from_first - mean))
        means = {Loss.MSE: sse / np.sum(w), Loss.RMSE: np.sqrt(sse / np.sum(w))}
        relative = {Loss.R2: 1.0 - sse / total, Loss.NMSE: sse / total}
        return np.asarray(({Loss.SSE: sse} | means | relative)[kind])


def moments_of(f: ArrayLike, y: ArrayLike, w: ArrayLike) -> NDArray[np.float64]:
    """Moments in long double, by definition but for the first row as the origin of the means."""
    f, y, w = (np.asarray(column, dtype=np.longdouble) for column in (f, y, w))
    first_f, first_y = f[0], y[0]
    f, y = f - first_f, y - first_y
    mean_f, mean_y = (w * f).sum() / w.sum(), (w * y).sum() / w.sum()
    df, dy = f - mean_f, y - mean_y
    squares, products = (w * df * df).sum(), (w * df * dy).sum()
    left = (w * (dy - (products / squares if squares else 0) * df) ** 2).sum()
    means = [first_f + mean_f, first_y + mean_y]
    return np.array([w.sum(), *means, squares, (w * dy * dy).sum(), products, left], dtype=float)


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

    def linearise(self, evaluation, row_loss, *, curvature, cancelled, selection=None):
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
        found = np.array(losses).reshape(-1, 1), np.concatenate(gradients)
        return Linearisation(*found, np.concatenate(curvatures) if curvature else None)


#: What the outputs hold before an evaluation: an engine must overwrite every element.
POISON = -987654.25


def outputs_for(evaluation, layout, *, cancelled=False, moments=None, ready=lambda programs: None):
    """Allocate what an evaluation requests, full of `POISON`; by default with needed moments."""
    shape = evaluation.shape(layout)
    cells, parameters = shape[:2], len(evaluation.batch.parameters)
    moments = evaluation.needs_moments if moments is None else moments

    def array(is_wanted: bool, *shape: int, dtype: Any = np.float64) -> Any:
        return np.full(shape, POISON, dtype) if is_wanted else None

    return Outputs(
        values=array(evaluation.values, *shape, dtype=layout.dtype),
        losses=array(evaluation.loss_function is not None, *cells),
        cancelled=np.full(1, cancelled, dtype=np.uint8),
        ready=ready,
        gradients=array(evaluation.gradient, parameters),
        jacobian=array(evaluation.jacobian, parameters, shape[2], dtype=layout.dtype),
        variable_gradients=array(evaluation.variable_gradient, *cells, layout.variables),
        reductions=array(evaluation.reductions, *cells, 5),
        moments=array(moments, *cells, MOMENTS),
    )


class Evaluate:
    """Call an engine with arrays; loads each data set once and unloads them all at the end."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._loaded: dict[bytes, Dataset] = {}
        self.announced: list[int] = []

    def __call__(self, dataset, programs, parameters=None, *, cancelled=False, **options) -> Result:
        if dataset.content_id not in self._loaded:
            self.engine.load(dataset)
            self._loaded[dataset.content_id] = dataset
        evaluation = Evaluation(dataset.content_id, Batch.of(programs, parameters), **options)
        evaluation.check(dataset.layout)
        self.announced, layout = [], dataset.layout
        ready = self.announced.append
        outputs = outputs_for(evaluation, layout, cancelled=cancelled, ready=ready)
        timings = run_to_end(self.engine.evaluate(evaluation, outputs))
        run_to_end(Finalizer().finalize(evaluation, dataset, outputs))
        return Result(outputs.values, outputs.losses, timings)

    def unload(self) -> None:
        for content_id in self._loaded:
            self.engine.unload(content_id)
        self._loaded.clear()
