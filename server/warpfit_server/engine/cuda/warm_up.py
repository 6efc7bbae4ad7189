"""First evaluations, before anybody waits: code of Numba's is loaded, or compiled, by them.

Numba compiles a function when it is first called with arguments of some types, which takes seconds
unless the code is in its cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss, Tier
from warpfit_server.engine.interface import Engine, Outputs, run_to_end


def warm_up(engine: Engine, tiers: Sequence[Tier] = (Tier.INTERPRETER, Tier.COMPILED)) -> None:
    """Evaluate a program in each data type and tier, twice: a repeated batch takes another path."""
    for dtype in (np.float32, np.float64):
        dataset = Dataset.of(np.ones((1, 1)), np.ones(1), dtype=dtype)
        engine.load(dataset)
        # The arrays of a request may be written to.
        batch = Batch.of([parse("x1 + p1")], [np.ones(1)]).copy()
        for tier in tiers:
            evaluation = Evaluation(
                dataset.content_id, batch, loss=Loss.MSE, values=False, tier=tier
            )
            outputs = Outputs(None, np.zeros((1, 1)), np.zeros(1, np.uint8), lambda _: None)
            for _ in range(2):
                run_to_end(engine.evaluate(evaluation, outputs))
        engine.unload(dataset.content_id)
