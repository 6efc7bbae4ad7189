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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

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

    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._flags: dict[int, NDArray[np.uint8]] = {}
        self._since: dict[int, float] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="overseer", daemon=True).start()

    @contextmanager
    def oversees(self, cancelled: NDArray[np.uint8]) -> Iterator[None]:
        """Watch the flag of the evaluation inside the ``with`` block."""
        key = id(cancelled)
        with self._lock:
            self._flags[key] = cancelled
        try:
            yield
        finally:
            with self._lock:
                del self._flags[key]
                self._since.pop(key, None)

    def overdue(self, now: float) -> bool:
        """Note which evaluations are cancelled; tell whether one has been for too long."""
        with self._lock:
            for key, flag in self._flags.items():
                if flag[0]:
                    self._since.setdefault(key, now)
            return any(now - since > self._patience for since in self._since.values())

    def _watch(self) -> None:
        while not self.overdue(time.monotonic()):
            time.sleep(self._patience / 10)
        _LOG.error("an evaluation does not stop; the front door starts a new process")
        os._exit(EXIT_STUCK)
