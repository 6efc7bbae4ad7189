"""A health probe: a small evaluation with a known result, sent over the connection of the calls.

Every front-end process has one of its own.
"""

from typing import Final

import numpy as np

from warpfit.dataset import Dataset
from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation, Tier
from warpfit.server_info import Limits
from warpfit_server.data.dataset_store import DatasetStore
from warpfit_server.data.upload import Upload
from warpfit_server.ipc import messages
from warpfit_server.ipc.engine_connection import EngineConnection
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.tenancy.tenants import PROBE, key_of

_ROWS: Final = 64
_PARAMETER: Final = 1.5
#: Largest difference of a right answer; float32 is exact to 1e-7.
_TOLERANCE: Final = 1e-5


class Probe:
    """Asks the engine for the values of one expression on a small data set of its own.

    The seed of its numbers is the same in all processes, and a secret, so that no client can name
    the data set by its content.
    """

    def __init__(self, engine: EngineConnection, seed: int) -> None:
        self._engine = engine
        numbers = np.random.default_rng(seed).uniform(0.5, 2.0, (_ROWS, 2))
        self._dataset = dataset = Dataset.of(numbers.astype(np.float32))
        program = parse("p1*x1 + sin(x2)")
        self._evaluation = Evaluation(
            key_of(PROBE, dataset.content_id),
            Batch.of([program], [[_PARAMETER]]),
            tier=Tier.INTERPRETER,
        )
        self._expected = evaluate_program(program, dataset.variables, [_PARAMETER])

    def make_resident(self, datasets: DatasetStore, pool: SegmentPool) -> bytes:
        """Upload the data set, once for all processes; return its key.

        Raises:
            ResourceExhaustedError: if there is no memory for it.
        """
        dataset = self._dataset
        # The limits of callers do not hold for the probe.
        own = dataset.layout, dataset.content_id, PROBE, Limits().resident_bytes
        with Upload(datasets, pool, *own) as upload:
            upload.add(dataset.matrix.data.cast("B"))
            return upload.commit().key

    def ask(self) -> bool:
        """Evaluate, however long it takes; return whether the values are right.

        Raises:
            WarpfitError: if the engine is gone, or refuses.
        """
        self._engine.renew()
        request = self._engine.start(self._evaluation, self._dataset.layout, PROBE)
        try:
            while not isinstance(request.next_reply(), messages.RequestFinished):
                pass
            values = request.array("values")
            assert values is not None  # they were requested
            return bool(np.abs(values[0, 0] - self._expected).max() <= _TOLERANCE)
        finally:
            request.close()
