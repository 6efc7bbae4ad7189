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
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_LOG: Final = logging.getLogger("warpfit.engine")
#: Exit statuses of the engine process.
EXIT_CANNOT_RUN: Final = 3
EXIT_BROKEN: Final = 4
EXIT_STUCK: Final = 5


class Overseer:
    """Ends this process when an evaluation has ignored its cancellation for too long.

    Args:
        patience: seconds that an evaluation may take to stop.
        flags: the cancellation flags of all evaluations at work, each an array of its own; other
            threads change it.

    """

    def __init__(self, patience: float, flags: Mapping[Any, NDArray[np.uint8]]) -> None:
        self._patience = patience
        self._flags = flags
        self._since: dict[int, tuple[NDArray[np.uint8], float]] = {}

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._watch, name="overseer", daemon=True).start()

    def overdue(self, now: float) -> bool:
        """Note which evaluations are cancelled; tell whether one has been for too long."""
        set_now = [flag for flag in list(self._flags.values()) if flag[0]]
        # The flags are kept, so that no other evaluation's can have the same id meanwhile.
        self._since = {id(flag): self._since.get(id(flag), (flag, now)) for flag in set_now}
        return any(now - since > self._patience for _, since in self._since.values())

    def _watch(self) -> None:
        while not self.overdue(time.monotonic()):
            time.sleep(self._patience / 10)
        _LOG.error("an evaluation does not stop; the front door starts a new process")
        os._exit(EXIT_STUCK)
