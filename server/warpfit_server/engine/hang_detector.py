"""Finds evaluations that do not stop when they are told to.

Long evaluations are legitimate, so their length says nothing. But every engine looks at the
cancellation flag between blocks: one that goes on long after its call has ended is stuck, holds a
place for ever, and only a new process gets rid of it.
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
#: What tells an evaluation from all others, and its cancellation flag.
_Flag = tuple[Hashable, NDArray[np.uint8]]


class Overseer:
    """Ends this process when an evaluation has ignored its cancellation for too long.

    Args:
        patience: seconds that an evaluation may take to stop.
        flags: gives the cancellation flags of all evaluations at work, each with what tells it from
            all others.

    """

    def __init__(self, patience: float, flags: Callable[[], Iterable[_Flag]]) -> None:
        self._patience = patience
        self._flags = flags
        self._since: dict[Hashable, float] = {}

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._watch, name="overseer", daemon=True).start()

    def overdue(self, now: float) -> bool:
        """Note which evaluations are cancelled; tell whether one has been for too long."""
        cancelled = [evaluation for evaluation, flag in self._flags() if flag[0]]
        self._since = {evaluation: self._since.get(evaluation, now) for evaluation in cancelled}
        return any(now - since > self._patience for since in self._since.values())

    def _watch(self) -> None:
        while not self.overdue(time.monotonic()):
            time.sleep(self._patience / 10)
        _LOG.error("an evaluation does not stop; the front door starts a new process")
        os._exit(EXIT_STUCK)
