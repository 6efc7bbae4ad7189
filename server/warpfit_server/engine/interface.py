"""The interface between the engine process and an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.ir import Program
from warpfit.request import Evaluation, Timings
from warpfit.server_info import Device

Result = TypeVar("Result")
#: Work of an engine, one step of a few milliseconds for each ``next``; it returns the result. It
#: yields None when it can go on at once, or a future that it waits for meanwhile.
Steps = Generator[Future[Any] | None, None, Result]


def run_to_end(steps: Steps[Result]) -> Result:
    """Run all steps on the calling thread and return the result."""
    while True:
        try:
            waits_for = next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
        if waits_for is not None:
            waits_for.result()


def timed(steps: Steps[Result]) -> Steps[tuple[Result, int]]:
    """Run steps; return the result and the nanoseconds that they took, without those in between."""
    taken = 0
    try:
        while True:
            started = time.perf_counter_ns()
            try:
                waits_for = next(steps)
            except StopIteration as end:
                return end.value, taken + time.perf_counter_ns() - started
            taken += time.perf_counter_ns() - started
            yield waits_for
    finally:
        steps.close()


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """Preallocated arrays that an evaluation fills, in the memory order of the wire."""

    values: NDArray[Any] | None
    """[programs, K, rows], C order, the data set's dtype; None if not wanted."""
    losses: NDArray[np.float64] | None
    """Sums of the row losses, [programs, K], C order; None if not wanted. The caller makes losses
    of them (`finalize`)."""
    cancelled: NDArray[np.uint8]
    """[1]; another process sets it to 1 to stop the evaluation. Poll it between blocks."""
    ready: Callable[[int], None]
    """Call with n when the values of programs 0 to n - 1 are final, so that they can be sent."""
    gradients: NDArray[np.float64] | None = None
    """Derivatives of the sum of row losses by the parameters, laid out as `Batch.parameters`;
    flat [K * sum(parameter_counts)]; None if not wanted."""
    jacobian: NDArray[Any] | None = None
    """Derivatives of the values: row i is the derivative by number i of `Batch.parameters`,
    [K * sum(parameter_counts), rows], the data set's dtype; None if not wanted."""
    variable_gradients: NDArray[np.float64] | None = None
    """Derivatives of the sum of row losses by a shift of each variable,
    [programs, K, variables]; None if not wanted."""
    reductions: NDArray[np.float64] | None = None
    """Sum, mean, least, greatest and number of non-finite values, [programs, K, 5]; not weighted;
    NaN in any row makes the first four NaN. None if not wanted."""
    moments: NDArray[np.float64] | None = None
    """[programs, K, 7]: sum w; weighted means of the values f and the target y; sums of w (f-mf)^2,
    w (y-my)^2 and w (f-mf)(y-my); what the best a + b f leaves of the sum of w (y-my)^2, added up
    from residuals, so that it keeps its digits where it is small. None if not wanted."""


@dataclass(frozen=True, slots=True, eq=False)
class Linearisation:
    """Loss, gradient and curvature of every program and parameter vector, from one pass."""

    losses: NDArray[np.float64]
    """Sums of the row loss, [programs, K]."""
    gradients: NDArray[np.float64]
    """Derivatives of the sums, laid out as `Batch.parameters`; flat."""
    curvatures: NDArray[np.float64] | None
    """Sum over the rows of w (df/dp_i) (df/dp_j), accumulated in float64: for each program and
    vector in turn its lower triangle, row by row, n (n + 1) / 2 numbers. None if not asked for."""


#: Names that `Engine.counters` may use. For each cache ("module": loaded kernels; "disk": machine
#: code on disk) what it has seen since the engine started, and what is in it now.
CACHES: Final = ("module", "disk")
CACHE_EVENTS: Final = ("hits", "misses", "evictions", "damaged")
CACHE_SIZES: Final = ("bytes", "entries")
COUNTERS: Final = tuple(
    f"{cache}_cache_{figure}" for cache in CACHES for figure in (*CACHE_EVENTS, *CACHE_SIZES)
)


class EngineBrokenError(Exception):
    """The engine's process can compute no more and must be replaced.

    After an illegal memory access, for example, every call of a CUDA process fails.
    """


class Engine(Protocol):
    """Evaluates batches on the data sets that it has been given.

    Several pieces of work may be under way; `steps_in_flight` of their steps gain from running at
    the same time, each on a thread of its own, and one piece of work may go on in another thread
    than it began in. ``load`` and ``unload`` may be called from one more thread.
    """

    name: str
    """``"cpu"`` or ``"cuda"``."""
    steps_in_flight: int
    """Steps that gain from running at the same time."""
    step_size: int
    """Token-rows of losses that take about as long as a step should."""

    def devices(self) -> list[Device]:
        """Describe what the engine computes on."""

    def load(self, dataset: Dataset) -> None:
        """Make a data set usable under its ``content_id``; its arrays stay valid until unload.

        Raises:
            ResourceExhaustedError: if the device has no room for it.

        """

    def unload(self, content_id: bytes) -> None:
        """Forget a data set once the evaluations that use it have ended."""

    def gains_from_merging(self, evaluation: Evaluation) -> bool:
        """Tell whether an evaluation for losses may run in one step with others of its kind.

        An engine says no to a batch for which it has something that fits no other batch, such as
        compiled kernels.
        """

    def evaluate(self, evaluation: Evaluation, outputs: Outputs) -> Steps[Timings]:
        """Evaluate a batch into ``outputs``, step by step.

        The batch has passed `Batch.check_shapes`, the row range is inside the data set, and a loss
        is asked for only when there is a target. An engine looks at the tokens itself, in compiled
        code: in Python that would take a front end more time than all the rest.

        Returns:
            How long it took; ``queue`` is what it has waited in the engine.

        Raises:
            ProgramError: for the first bad token, see `warpfit_server.engine.validate`.
            CancelledError: if ``outputs.cancelled`` became 1; the outputs are then undefined.
            DatasetNotFoundError: if the data set is not loaded.
            ResourceExhaustedError: if memory is short.
            EngineBrokenError: if this process can compute no more.

        """

    def linearise(
        self,
        evaluation: Evaluation,
        row_loss: Program,
        *,
        curvature: bool,
        cancelled: NDArray[np.uint8],
    ) -> Steps[Linearisation]:
        """Compute sums of a row loss, their gradients and, if asked for, curvatures in one pass.

        The driver of fits calls it again and again with one vector for each program: the arrays of
        tokens are the same objects until programs drop out, only the parameters are others.

        Args:
            evaluation: names a checked batch, data set, rows, precision and tier; its requested
                outputs are ignored.
            row_loss: a program over prediction (0), target (1) and weight (2). If it does not
                mention the weight, each row counts w times.
            curvature: whether curvatures are wanted.
            cancelled: as in `Outputs`.

        Raises:
            As `evaluate`.

        """

    def counters(self) -> Mapping[str, float]:
        """Return the engine's own figures for the metrics, by name; see `COUNTERS`."""

    def close(self) -> None:
        """Stop threads and free memory."""


__all__ = [
    "Device",
    "Engine",
    "EngineBrokenError",
    "Linearisation",
    "Outputs",
    "Steps",
    "run_to_end",
    "timed",
]
