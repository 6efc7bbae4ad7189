"""The interface between the engine process and an engine: steps, arithmetics, results, `Engine`."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.ir import Batch, Program
from warpfit.request import Evaluation, Precision, Timings
from warpfit.searching import SearchProgress, SearchRequest
from warpfit.server_info import Device
from warpfit_server.ipc.segments import Segment

if TYPE_CHECKING:
    from warpfit_server.engine.fit.searches import Searches, SearchLimits

Result = TypeVar("Result")
#: Bytes of which copying would delay other callers, by about 2 ms. Fewer are copied at once: two
#: threads wait for Python's lock, and the device for both. With 64 workers and all merged batches
#: above 1 MiB copied by other threads, an H200 answered 0.7 to 0.8 of the calls.
_MANY_BYTES: Final = 1 << 23
_THREADS: Final = ThreadPoolExecutor(2, "offload")


class DeviceWork(Protocol):
    """Work of a device, or of other threads, which is looked at until it is done.

    The loop closes no step that waits for it, so that nobody else uses its memory meanwhile.
    """

    def done(self) -> bool:
        """Return whether the device is done, or has failed; never block."""

    def result(self) -> Any:
        """Wait until the device is done."""


#: Work of an engine: each ``next`` runs a part of a step, and the result is returned at the end. It
#: yields the `DeviceWork` that it waits for in the middle of a step, which takes some milliseconds;
#: and after a step None if the next one can begin at once, or a future to wait for.
Steps = Generator[Future[Any] | DeviceWork | None, None, Result]


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
    """Run steps; return the result and the nanoseconds inside of the steps, without pauses."""
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


def offload(size: int, work: Callable[[], Result]) -> Steps[Result]:
    """Run work on some bytes of memory; above 8 MiB on a helper thread, so that the loop goes on.

    The thread is waited for like a device: no other step uses the memory meanwhile.
    """
    if size < _MANY_BYTES:
        return work()
    future = _THREADS.submit(work)
    running = _ThreadWork(future.done, future.result)
    try:
        yield running
    finally:
        running.result()
    result: Result = running.result()
    return result


def edges_of(sizes: NDArray[np.int64], most: int) -> list[int]:
    """Cut consecutive things into ranges of at most some size, or of one; return their edges."""
    ends, edges = np.cumsum(sizes), [0]
    while edges[-1] < len(sizes):
        first = edges[-1]
        before = int(ends[first - 1]) if first else 0
        stop = int(np.searchsorted(ends, before + most, side="right"))
        edges.append(max(stop, first + 1))
    return edges


class _ThreadWork(NamedTuple):
    """Work of another thread; implements `DeviceWork`."""

    done: Callable[[], bool]
    result: Callable[[], Any]


class Arithmetic(Enum):
    """Data type and precision with which a kernel computes."""

    PRECISE = ("f32", Precision.PRECISE, np.dtype(np.float32))
    FAST = ("f32", Precision.FAST, np.dtype(np.float32))
    """Approximate functions."""
    DOUBLE = ("f64", Precision.PRECISE, np.dtype(np.float64))

    def __init__(self, type_name: str, precision: Precision, dtype: np.dtype[np.floating]) -> None:
        self.type_name = type_name
        """PTX type of the values."""
        self.precision = precision
        self.dtype = dtype

    @classmethod
    def of(cls, dtype: np.dtype[np.floating], precision: Precision) -> Arithmetic:
        """Return the arithmetic for data of ``dtype``; float64 is always precise."""
        if dtype == np.float64:
            return cls.DOUBLE
        return cls.FAST if precision is Precision.FAST else cls.PRECISE

    @property
    def is_fast(self) -> bool:
        """Return whether approximate operators are used."""
        return self is Arithmetic.FAST

    @property
    def is_single(self) -> bool:
        """Return whether the data is float32."""
        return self is not Arithmetic.DOUBLE

    @property
    def real(self) -> str:
        """C++ name of the data type."""
        return "float" if self.is_single else "double"

    @property
    def label(self) -> str:
        """Name in files, and in the tier chooser."""
        return self.name.lower() if self.is_single else "float64"


class Moments(NamedTuple):
    """Weighted moments of values f and the target y, for linear scaling and correlations.

    Each is an array [...], and an engine fills one array [..., MOMENTS], in this order.
    """

    weights: NDArray[np.float64]
    """Sum of w."""
    mean_f: NDArray[np.float64]
    """Weighted mean of f."""
    mean_y: NDArray[np.float64]
    squares_f: NDArray[np.float64]
    """Sum of w (f - mean_f)^2."""
    squares_y: NDArray[np.float64]
    products: NDArray[np.float64]
    """Sum of w (f - mean_f) (y - mean_y)."""
    residual: NDArray[np.float64]
    """Sum of w (y - a - b f)^2 for the best a and b, added up from residuals, so that it keeps its
    digits where it is small."""

    @classmethod
    def of(cls, numbers: NDArray[np.float64]) -> Moments:
        """Name the numbers of an array [..., MOMENTS]."""
        return cls(*np.moveaxis(numbers, -1, 0))


MOMENTS: Final = len(Moments._fields)


@dataclass(frozen=True, slots=True, eq=False)
class Outputs:
    """Preallocated arrays that an evaluation fills, in the memory order of the wire."""

    values: NDArray[Any] | None
    """[programs, K, rows], C order, the data set's dtype; None if not requested."""
    losses: NDArray[np.float64] | None
    """Sums of the row losses, [programs, K], C order; None if not requested. The caller turns them
    into losses (`Finalizer`)."""
    cancelled: NDArray[np.uint8]
    """[1]; another process sets it to 1 to cancel the evaluation; engines poll it."""
    ready: Callable[[int], None]
    """Engines call it with n when the values of programs 0 to n - 1 are final and can be sent."""
    gradients: NDArray[np.float64] | None = None
    """Derivatives of the sum of row losses by the parameters, laid out as `Batch.parameters`;
    flat [K * sum(parameter_counts)]; None if not requested."""
    jacobian: NDArray[Any] | None = None
    """Derivatives of the values: row i is the derivative by number i of `Batch.parameters`,
    [K * sum(parameter_counts), rows], the data set's dtype; None if not requested."""
    variable_gradients: NDArray[np.float64] | None = None
    """Derivatives of the sum of row losses by a shift of each variable,
    [programs, K, variables]; None if not requested."""
    reductions: NDArray[np.float64] | None = None
    """Sum, mean, least, greatest and number of non-finite values, [programs, K, 5]; not weighted;
    NaN in any row makes the first four NaN. None if not requested."""
    moments: NDArray[np.float64] | None = None
    """`Moments` of each program and vector, [programs, K, MOMENTS]; None if not requested."""


class Passes(Protocol):
    """The passes over loaded data sets that a search makes; see `LoadedDatasets`."""

    def whole(self, key: bytes) -> Dataset:
        """Return a data set with all rows; raise DatasetNotFoundError if it is not loaded."""

    def load(self, dataset: Dataset) -> None:
        """Load a data set."""

    def unload(self, key: bytes) -> None:
        """Forget a data set."""

    @property
    def evaluate(self) -> Callable[[Evaluation, Outputs], Steps[Timings]]:
        """Evaluate a batch."""

    @property
    def linearise(self) -> Callable[..., Steps[Linearisation]]:
        """Linearise a batch."""

    @property
    def small_fits(self) -> Callable[..., Steps[SmallFits | None]]:
        """Prepare to run searches of a fit."""


class Selection(NamedTuple):
    """Some programs of a batch, of which an engine may still have the lowered form."""

    batch: Batch
    """The whole batch, in memory of its own."""
    programs: NDArray[np.int64]
    """Indices of the programs, ascending; one that is there twice is evaluated twice."""


@dataclass(frozen=True, slots=True, eq=False)
class Linearisation:
    """Loss, gradient and curvature of every program and parameter vector, from one pass."""

    losses: NDArray[np.float64]
    """Sums of the row loss, [programs, K]."""
    gradients: NDArray[np.float64]
    """Derivatives of the sums, laid out as `Batch.parameters`; flat."""
    curvatures: NDArray[np.float64] | None
    """Sum over the rows of w (df/dp_i) (df/dp_j), accumulated in float64: for each program and
    vector in turn its lower triangle, row by row, n (n + 1) / 2 numbers. None if not requested."""


#: Called between steps of a fit with the most iterations of a running search and the number of
#: those that run; returns whether the time is up, or raises CancelledError.
FitTurn = Callable[[int, int], bool]


class SmallFits(Protocol):
    """Searches of one fit that an engine can run without the host from pass to pass."""

    @property
    def runs(self) -> NDArray[np.bool_]:
        """Which of the searches that it was asked for it can run, [searches]."""

    def run(
        self, searches: Searches, limits: SearchLimits, small: float, turn: FitTurn
    ) -> Steps[None]:
        """Run searches that begin until each of them has ended or wants an orthogonal factor.

        Where the time is up, all of them have been evaluated at their starts at least. The reason
        of those that leave the range of float32 is `searches.LEAVES_FLOAT32`.

        Args:
            searches: those that it can run, which it changes.
            limits: what ends a search.
            small: squares less than this leave the range of float32; 0: nothing does.
            turn: see `FitTurn`.
        """


#: Names that `Engine.counters` may use: for each cache ("module": loaded kernels; "disk": machine
#: code on disk) its events since the engine started, and its content now.
CACHES: Final = ("module", "disk")
CACHE_EVENTS: Final = ("hits", "misses", "evictions", "damaged")
CACHE_SIZES: Final = ("bytes", "entries")
COUNTERS: Final = tuple(
    f"{cache}_cache_{figure}" for cache in CACHES for figure in (*CACHE_EVENTS, *CACHE_SIZES)
)


class EngineBrokenError(Exception):
    """The engine process can compute no more and must be replaced.

    After an illegal memory access, for example, every CUDA call of the process fails.
    """


class Engine(Protocol):
    """Evaluates batches on loaded data sets.

    Several evaluations may be under way. The caller runs up to `steps_in_flight` of their steps at
    the same time, on `step_threads` threads, and the parts of an evaluation on different ones.
    ``load`` and ``unload`` may be called from one more thread.
    """

    threads: int
    """Threads of the host that may compute for one request."""
    steps_in_flight: int
    """Steps that gain from running at the same time."""
    step_threads: int
    """Threads that gain from running steps: one, if steps wait for a device without blocking it."""
    steps_share_cores: bool
    """Whether steps that run at the same time slow each other down, as on the cores of a CPU."""

    @property
    def step_size(self) -> int:
        """Token-rows of losses that take as long as a step should, some milliseconds."""

    def others_wait(self, wait: bool) -> None:
        """Take note whether requests wait; any thread may call this.

        While none does, steps may take longer than a request should wait.
        """

    def map_segment(self, segment: Segment) -> None:
        """Take note of a segment with batches, which lives as long as requests in it may come."""

    def device(self) -> Device:
        """Describe what the engine computes on."""

    def load(self, dataset: Dataset) -> None:
        """Make a data set usable under its id, `Evaluation.dataset_id`; its arrays stay valid.

        Args:
            dataset: the data set, whose ``content_id`` is that id.

        Raises:
            ResourceExhaustedError: if the device has no room for it.
        """

    def unload(self, dataset_id: bytes) -> None:
        """Forget a data set once the evaluations that use it have ended."""

    def should_merge(self, dataset_id: bytes) -> bool:
        """Return whether small requests on a data set are merged into one step.

        They are not if the data set is not loaded, or takes long to pass over.
        """

    def merge_from(
        self,
        dataset_id: bytes,
        precision: Precision,
        *,
        tokens: int,
        token_rows: int,
        gradient: bool,
    ) -> int:
        """Return how many requests must wait or run for a batch that repeats to be merged.

        Args:
            dataset_id: of a data set on which requests are merged.
            precision: of the request.
            tokens: of its programs.
            token_rows: tokens x parameter vectors x rows.
            gradient: whether the gradient of the loss is requested, beside the loss.

        Returns:
            Their number, this request included: 1 if it is merged in any case; 0 if it always runs
            alone.
        """

    def evaluate(self, evaluation: Evaluation, outputs: Outputs) -> Steps[Timings]:
        """Evaluate a batch into ``outputs``, step by step.

        The batch has passed `Batch.check_shapes`, the row range is inside the data set, and a loss
        is requested only if there is a target. The engine checks the tokens itself, which no front
        end does: by `warpfit_server.engine.lowering`, or on a GPU as it lowers them.

        Returns:
            How long the stages took; ``queue`` is the time that it has waited in the engine.

        Raises:
            ProgramError: for the first bad token.
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
        selection: Selection | None = None,
    ) -> Steps[Linearisation]:
        """Compute sums of a row loss, their gradients and, if requested, curvatures in one pass.

        The driver of fits calls it for every pass with one vector for each program. Programs drop
        out when their searches end, and nothing else changes but the parameters. Once a pass has
        ended, the compiled code of the fit methods is loaded, too.

        Args:
            evaluation: names a checked batch, data set, rows, precision and tier; its requested
                outputs are ignored.
            row_loss: a program over prediction (0), target (1) and weight (2). If it does not
                mention the weight, each row counts w times.
            curvature: whether curvatures are requested.
            cancelled: as in `Outputs`.
            selection: the programs as a selection of a batch that comes again and is lowered once.
                Both are the same objects with every pass, the batch until the fit ends, the
                indices until programs drop out. None if the programs do not come again.

        Raises:
            As `evaluate`.
        """

    def small_fits(
        self,
        evaluation: Evaluation,
        row_loss: Program,
        *,
        cancelled: NDArray[np.uint8],
        selection: Selection,
    ) -> Steps[SmallFits | None]:
        """Prepare to run searches of a fit by Levenberg-Marquardt without the host, if possible.

        The programs are checked.

        Args:
            evaluation: as for `linearise`, with one vector for each search.
            row_loss: the squared difference.
            cancelled: as in `Outputs`.
            selection: as for `linearise`; the program of each search.

        Returns:
            None if the engine cannot do that, for these rows or at all.

        Raises:
            As `evaluate`.
        """

    def search(
        self,
        request: SearchRequest,
        datasets: Passes,
        *,
        cancelled: NDArray[np.uint8],
        report: Callable[[SearchProgress], None],
    ) -> Steps[SearchProgress]:
        """Search for formulas until a limit of the request is reached; see `engine.search`.

        Args:
            request: a checked request on a loaded data set.
            datasets: has it, and gets the screening rows as data sets of their own.
            cancelled: as in `Outputs`; the search then ends with the reason `CANCELLED`.
            report: called with the progress about once a second.

        Returns:
            The last progress, with the reason of the end.

        Raises:
            DatasetNotFoundError: if the data set is not loaded.
            InvalidArgumentError: if nothing fulfils the rules.
            ResourceExhaustedError: if memory is short.
            EngineBrokenError: if this process can compute no more.
        """

    def counters(self) -> Mapping[str, float]:
        """Return figures for the metrics by name, see `COUNTERS`."""

    def close(self) -> None:
        """Stop threads and free memory."""
