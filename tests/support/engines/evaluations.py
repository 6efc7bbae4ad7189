"""Evaluations on an engine, without a server."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from warpfit.dataset import Dataset
from warpfit.ir import Batch, Program
from warpfit.request import Evaluation, Loss, Result
from warpfit_server.engine.finalize import Finalizer
from warpfit_server.engine.interface import Engine, Outputs, run_to_end

#: What the outputs hold before an evaluation: an engine must overwrite every element.
POISON = -987654.25


class Evaluate:
    """Call an engine with arrays; loads each data set once and unloads them all at the end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loaded: dict[bytes, Dataset] = {}
        self.announced: list[int] = []

    def __call__(
        self,
        dataset: Dataset,
        programs: Sequence[Program],
        parameters: Sequence[Any] | None = None,
        *,
        values: bool = True,
        loss: Loss | None = None,
        cancelled: bool = False,
        **options: Any,
    ) -> Result:
        if dataset.content_id not in self._loaded:
            self.engine.load(dataset)
            self._loaded[dataset.content_id] = dataset
        batch = Batch.of(programs, parameters)
        evaluation = Evaluation(dataset.content_id, batch, values=values, loss=loss, **options)
        evaluation.check(dataset.layout)
        shape = evaluation.shape(dataset.layout)
        self.announced = []
        outputs = Outputs(
            values=np.full(shape, POISON, dataset.layout.dtype) if values else None,
            losses=np.full(shape[:2], POISON) if loss else None,
            cancelled=np.full(1, cancelled, dtype=np.uint8),
            ready=self.announced.append,
        )
        timings = run_to_end(self.engine.evaluate(evaluation, outputs))
        run_to_end(Finalizer().finalize(evaluation, dataset, outputs))
        return Result(outputs.values, outputs.losses, timings)

    def unload(self) -> None:
        for content_id in self._loaded:
            self.engine.unload(content_id)
        self._loaded.clear()
