"""Whose work goes to the device next, of the work that Python hands to it.

A device runs what it was given in the order in which it came: whatever waits there goes before
everybody who comes later. So of the evaluations, and of the passes of fits, that keep the whole
device busy for a while, two are there at a time, one to compute and one so that the device does not
wait for the host. Of the others the tenant that has been charged least goes first, and one that has
nothing there need not wait (`warpfit_server.fairness`). What brings matrices along takes no turn:
the device does little of it at a time, and then waits for the host. Compiled code that serves lanes
has a rule of its own: `warpfit_server.engine.roster.may_start`.

What a device has been given and has not begun can still be overtaken, block by block, by streams of
a higher priority: whose tenant is ahead of others works on one of the lowest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.errors import CancelledError
from warpfit.request import Evaluation
from warpfit_server.engine.cuda.layout import token_rows_at_once
from warpfit_server.engine.cuda.library import Mode
from warpfit_server.fairness import FairGate, current_turn

#: What a token-row costs, relative to one of compiled kernels that sum up a loss.
MATRICES: Final = 0
COMPILED: Final = 1
COMPILED_GRADIENT: Final = 3
INTERPRETED: Final = 2
DIFFERENTIATED: Final = 6
_AT_A_TIME: Final = 2
#: Share of `token_rows_at_once` from which on work is large: some 0.5 ms of an H200.
_LARGE: Final = 0.25


class Admission(NamedTuple):
    """How work has come to its turn."""

    behind: bool = False
    """Whether it should go behind that of others on the device."""
    waited: int = 0
    """Nanoseconds."""


class DeviceTurns:
    """Turns on one device; safe to use from several threads.

    Args:
        multiprocessors: of the device.

    """

    def __init__(self, multiprocessors: int) -> None:
        self._multiprocessors = multiprocessors
        self._gate = FairGate(_AT_A_TIME)

    @contextmanager
    def turn(
        self, evaluation: Evaluation, layout: Layout, cost: int, cancelled: NDArray[np.uint8]
    ) -> Iterator[Admission]:
        """Wait until the work may go to the device, and let others wait while it is there.

        Args:
            evaluation: that is to go there.
            layout: of its data set.
            cost: one of the figures above.
            cancelled: flag of the evaluation.

        Raises:
            CancelledError: if it was cancelled meanwhile.

        """
        mode = Mode.of(layout.dtype, evaluation.precision)
        at_once = token_rows_at_once(mode, self._multiprocessors)
        if evaluation.token_rows(layout) * cost < _LARGE * at_once:
            yield Admission()
            return
        turn, came = current_turn(), time.perf_counter_ns()
        with self._gate.turn(turn.tenant, cancelled=cancelled):
            if cancelled[0]:
                raise CancelledError("the evaluation was cancelled", "CANCELLED")
            began = time.perf_counter_ns()
            yield Admission(turn.goes_behind(), began - came)
            turn.charge(1e-9 * (time.perf_counter_ns() - began))  # a fit has many of these
