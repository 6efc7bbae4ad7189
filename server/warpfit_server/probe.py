"""A small evaluation with a known answer, through the engine's ordinary path."""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from typing import Final

import numpy as np

from warpfit.dataset import Dataset
from warpfit.info import Limits
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.reference import evaluate_program
from warpfit.request import Evaluation, Tier
from warpfit_server import messages
from warpfit_server.datasets import DatasetStore
from warpfit_server.supervisor import EngineSupervisor

#: To whom the data set of the question belongs: no caller's tenant has this name.
_TENANT: Final = ""
_ROWS: Final = 64
_PARAMETER: Final = 1.5
#: Largest difference of a right answer; float32 is exact to 1e-7.
_TOLERANCE: Final = 1e-5


class Probe:
    """Asks the engine a question whose answer is known.

    The question has a data set of its own, which is resident like any other, and goes the way that
    calls go: over this front end's connection and through the engine's queue.

    Args:
        supervisor: of the engine.
        datasets: where the data set of the question is kept.

    """

    def __init__(self, supervisor: EngineSupervisor, datasets: DatasetStore) -> None:
        self._supervisor = supervisor
        # Random, so that no client can name it by its content.
        numbers = np.random.default_rng(secrets.randbits(64)).uniform(0.5, 2.0, (_ROWS, 2))
        dataset = Dataset.of(numbers.astype(np.float32))
        program = parse("p1*x1 + sin(x2)")
        self._layout = dataset.layout
        # Limits for callers are not for the probe.
        upload = datasets.begin(dataset.layout, dataset.content_id, _TENANT, Limits())
        self._evaluation = Evaluation(
            upload.key, Batch.of([program], [[_PARAMETER]]), tier=Tier.INTERPRETER
        )
        self._expected = evaluate_program(program, dataset.variables, [_PARAMETER])
        self._held = ExitStack()
        upload.add(dataset.matrix.data.cast("B"))
        datasets.commit(upload)
        resident = self._held.enter_context(datasets.lease(upload.key))
        supervisor.load(resident).result()

    def ask(self) -> bool:
        """Ask and wait, as long as it takes; return whether the answer is right.

        Raises:
            WarpfitError: if the engine is gone, or refuses.

        """
        run = self._supervisor.connection.start(self._evaluation, self._layout, _TENANT)
        try:
            while not isinstance(run.next_event(), messages.Finished):
                pass
            values = run.frame.values_view(run.segment)
            assert values is not None  # they were asked for
            return bool(np.abs(values[0, 0] - self._expected).max() <= _TOLERANCE)
        finally:
            run.close()

    def close(self) -> None:
        """Let go of the data set."""
        self._held.close()
