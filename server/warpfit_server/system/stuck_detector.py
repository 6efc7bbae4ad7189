"""The stuck detector: ends the engine process when an evaluation ignores its cancellation.

Long evaluations are legitimate, so their length says nothing. But every engine polls the
cancellation flag between blocks. An evaluation that goes on for ``--stuck-seconds`` after it was
cancelled occupies a step for ever, and only a new process helps. The watchdog replaces engines that
do not answer probes (`warpfit_server.processes.watchdog`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

_LOG: Final = logging.getLogger("warpfit.engine")
#: Exit statuses of the engine process.
EXIT_CANNOT_RUN: Final = 3
EXIT_BROKEN: Final = 4
EXIT_STUCK: Final = 5


class StuckDetector:
    """Ends this process when an evaluation has ignored its cancellation for too long.

    Args:
        patience: seconds that an evaluation may take to stop.
        flags: returns the evaluations that are running, with their cancellation flags.
    """

    def __init__(
        self,
        patience: float,
        flags: Callable[[], Iterable[tuple[Hashable, NDArray[np.uint8]]]],
    ) -> None:
        self._patience = patience
        self._flags = flags
        self._since: dict[Hashable, float] = {}

    def start(self) -> None:
        """Start the thread that looks."""
        threading.Thread(target=self._watch, name="stuck-detector", daemon=True).start()

    def is_stuck(self, now: float) -> bool:
        """Note which evaluations are cancelled; return whether one has been for too long."""
        cancelled = [evaluation for evaluation, flag in self._flags() if flag[0]]
        self._since = {evaluation: self._since.get(evaluation, now) for evaluation in cancelled}
        return any(now - since > self._patience for since in self._since.values())

    def _watch(self) -> None:
        while not self.is_stuck(time.monotonic()):
            time.sleep(self._patience / 10)
        _LOG.error("an evaluation does not stop; the supervisor starts a new process")
        os._exit(EXIT_STUCK)
