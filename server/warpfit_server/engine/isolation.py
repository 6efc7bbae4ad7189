"""Lets what is suspected of having crashed an engine run alone, one suspect after the other.

If the engine dies then, it is clear what of; see `warpfit_server.quarantine`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.base import Standing

#: Seconds between two looks whether somebody still waits, and whether compiled code is still busy.
_LOOK: Final = 0.02


class Isolation:
    """Work that runs beside other work, and suspects, that run alone.

    Args:
        compiled_works: tells whether compiled code is at work on a lane; it is not counted here.

    """

    def __init__(self, compiled_works: Callable[[], bool]) -> None:
        self._compiled_works = compiled_works
        self._changed = threading.Condition()
        self._running = 0  # pieces of work beside each other
        self._trial: object | None = None  # the suspect that runs alone, or is about to
        self._standings: set[Standing] = set()

    @contextmanager
    def beside_others(self, cancelled: NDArray[np.uint8]) -> Iterator[None]:
        """Hold this while work runs; waits while a suspect runs alone.

        Args:
            cancelled: flag that ends the waiting.

        """
        with self._changed:
            while self._trial is not None and not cancelled[0]:
                self._changed.wait(_LOOK)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(
        self, seconds: float, cancelled: NDArray[np.uint8], tell: Callable[[bool], None]
    ) -> Iterator[None]:
        """Hold this while a suspect runs.

        Others are kept from starting for at most ``seconds`` until all that runs has ended, and for
        as long again. A suspect that they do not make room for, or that takes longer, runs beside
        them.

        Args:
            seconds: see above.
            cancelled: flag that ends the waiting.
            tell: told True when the suspect is all that runs, and False when it no longer is.

        """
        trial = object()
        with self._changed:
            while self._trial is not None and not cancelled[0]:
                self._changed.wait(_LOOK)
            if self._trial is None:
                self._trial = trial
                self._clear_the_way(seconds, cancelled)
                if self._is_quiet:
                    tell(True)
                else:
                    self._trial = None
            self._running += 1
        timer = threading.Timer(seconds, self._end, (trial, tell))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with self._changed:
                self._running -= 1
            self._end(trial, lambda alone: None)

    def enter(self, standing: Standing) -> bool:
        """Let compiled code serve a lane, unless a suspect runs alone; `leave` must follow."""
        with self._changed:
            if self._trial is not None:
                return False
            self._standings.add(standing)
            return True

    def leave(self, standing: Standing) -> None:
        """Compiled code serves a lane no more."""
        with self._changed:
            self._standings.discard(standing)
            self._changed.notify_all()

    @property
    def _is_quiet(self) -> bool:
        return not self._running and not self._compiled_works()

    def _clear_the_way(self, seconds: float, cancelled: NDArray[np.uint8]) -> None:
        """Wait until nothing runs; the lock is held but while waiting."""
        for standing in self._standings:
            standing.revoke()
        end = time.monotonic() + seconds
        while not self._is_quiet and time.monotonic() < end and not cancelled[0]:
            self._changed.wait(_LOOK)

    def _end(self, trial: object, tell: Callable[[bool], None]) -> None:
        """Let others in, if a suspect keeps them out."""
        with self._changed:
            if self._trial is trial:
                self._trial = None
                self._changed.notify_all()
                tell(False)
