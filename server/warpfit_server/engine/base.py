"""The interface between the engine process and an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.info import Device
from warpfit.request import Evaluation, Timings


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """Preallocated arrays that an evaluation fills, in the memory order of the wire."""

    values: NDArray[Any] | None
    """[programs, K, rows], C order, the data set's dtype; None if not wanted."""
    losses: NDArray[np.float64] | None
    """[programs, K], C order; None if not wanted."""
    cancelled: NDArray[np.uint8]
    """[1]; another process sets it to 1 to stop the evaluation. Poll it between blocks."""
    ready: Callable[[int], None]
    """Call with n when the values of programs 0 to n - 1 are final, so that they can be sent."""


class EngineBrokenError(Exception):
    """The engine's process can compute no more and must be replaced.

    After an illegal memory access, for example, every call of a CUDA process fails.
    """


class Engine(Protocol):
    """Evaluates batches on the data sets that it has been given.

    ``evaluate`` may be called from ``concurrency`` threads at once; ``load`` and ``unload`` may be
    called from one more.
    """

    name: str
    """``"cpu"`` or ``"cuda"``."""
    concurrency: int
    """How many evaluations gain from running at the same time."""

    def devices(self) -> list[Device]:
        """Describe what the engine computes on."""

    def load(self, dataset: Dataset) -> None:
        """Make a data set usable under its ``content_id``; its arrays stay valid until unload.

        Raises:
            ResourceExhaustedError: if the device has no room for it.

        """

    def unload(self, content_id: bytes) -> None:
        """Forget a data set once the evaluations that use it have ended."""

    def evaluate(self, evaluation: Evaluation, outputs: Outputs) -> Timings:
        """Evaluate a checked batch into ``outputs``.

        The batch has passed `Batch.check`, the row range is inside the data set, and a loss is
        asked for only when there is a target.

        Raises:
            CancelledError: if ``outputs.cancelled`` became 1; the outputs are then undefined.
            DatasetNotFoundError: if the data set is not loaded.
            ResourceExhaustedError: if memory is short.
            EngineBrokenError: if this process can compute no more.

        """

    def close(self) -> None:
        """Stop threads and free memory."""


__all__ = ["Device", "Engine", "EngineBrokenError", "Outputs"]
