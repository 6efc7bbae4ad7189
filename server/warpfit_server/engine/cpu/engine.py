"""The CPU engine: a block interpreter in compiled code, on threads that do not share the GIL.

The simple form:

    for each program and parameter vector:
        for each block of 2,048 rows:
            for each instruction of the program: result[:] = operator(operands[:])
            store the values, add up the loss

`engine.lowering` turns the tokens of a batch into instructions. `interpreter` cuts the work into
chunks, and runs the instructions in blocks, calling the loops that `codegen.parts` makes of the
operator table with the functions of `codegen.elementary_functions`. Compiled code is kept on disk
(`codegen.parts`). A step is a parallel loop over some chunks (`engine.native.intrinsics`).
`derivatives` has the evaluations with derivatives, custom losses or statistics.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset, Layout
from warpfit.errors import CancelledError, DatasetNotFoundError, ResourceExhaustedError
from warpfit.ir import Batch, Program
from warpfit.request import Evaluation, Loss, Precision, Timings
from warpfit.searching import SearchProgress, SearchRequest
from warpfit.server_info import Device
from warpfit_server.engine import interface
from warpfit_server.engine.autodiff import (
    RequestedOutputs,
    linearisation_outputs,
    requested_outputs,
)
from warpfit_server.engine.cpu import derivatives
from warpfit_server.engine.cpu.codegen import parts
from warpfit_server.engine.cpu.codegen.kernels import Kernels, KernelSet
from warpfit_server.engine.cpu.interpreter import (
    ChunkedWork,
    Cut,
    Inputs,
    cut_instances,
    first_node,
    interpret_chunk,
    lowering_work,
    new_context,
    span_level,
    weights_of,
)
from warpfit_server.engine.interface import Arithmetic, Passes
from warpfit_server.engine.lowering import (
    Lowered,
    LoweringCache,
    are_valid,
    check_tokens,
    lower_chunk,
)
from warpfit_server.engine.native.intrinsics import ParallelLoop
from warpfit_server.engine.native.numba_cache import BACKGROUND, NICE, WANTED, address_of
from warpfit_server.engine.sum_tree import add_nodes
from warpfit_server.ipc.segments import Segment
from warpfit_server.machine import available_cores

if TYPE_CHECKING:
    from warpfit_server.engine.search.colony import ColonySettings, Screening
    from warpfit_server.engine.search.composition import Composer

#: Seconds of all threads together that a step should take if a request arrives meanwhile, which
#: waits for it: where few threads compute, requests take longer, and ending a step as long as ever.
_THREAD_SECONDS: Final = 0.024
#: Least and most seconds of such a step.
_STEP_SECONDS: Final = (0.0015, 0.008)
#: Times as long that a step takes if none arrives. Threads that end a step wait for each other.
_LONG_STEP: Final = 8
#: Token-rows a second of a thread, until steps have been measured.
_EXPECTED_RATE: Final = 4e9
#: Weight of a step in the measured rate of its function, which depends on the machine, on what else
#: it does and on the requests.
_RATE_WEIGHT: Final = 0.2
#: Tokens that are checked without a pause, which takes less than a millisecond.
_CHECKED_AT_ONCE: Final = 1 << 17
#: Tokens of a batch that repeats from which on its lowered form is worth more than merging it:
#: lowering a token takes 0.1 us, and a step of its own 0.3 ms, beside what it computes.
_TOKENS_TO_KEEP: Final = 4_000
#: Outputs beside values and losses.
_FURTHER: Final = attrgetter("gradients", "jacobian", "variable_gradients", "reductions", "moments")


class CpuEngine:
    """Evaluates batches on this machine's CPU; implements `interface.Engine`."""

    steps_share_cores = True

    def __init__(self, threads: int | None = None) -> None:
        """Load the compiled code; the very first start on a machine compiles it.

        All code is compiled in the order of need, and that of derivatives is loaded, while the
        engine serves.

        Args:
            threads: how many threads one evaluation may use; None for `available_cores`.
        """
        self.threads = threads or available_cores()
        least, most = _STEP_SECONDS
        self._step_seconds = min(max(_THREAD_SECONDS / self.threads, least), most)
        self._rates: dict[int, float] = {}
        """Token-rows a second of recent steps, by the function that runs their chunks."""
        # One computes while Python prepares another, unless they had the same core.
        self.steps_in_flight = self.step_threads = min(2, self.threads)
        parts.begin_compiling(self.threads)
        self._kernels = parts.load(self.threads)
        self._interpret, self._lower = address_of(interpret_chunk), address_of(lower_chunk)
        self._derivatives = [self._load_derivatives(single=False)]
        """Kernels of derivatives in float64, with all other code for them, and in float32."""
        self._derivatives.append(self._load_derivatives(single=True))
        self._datasets: dict[bytes, Dataset] = {}
        self._loop = ParallelLoop(self.threads, NICE)
        self.others_wait = self._loop.others_wait
        self._programs: LoweringCache[_LoweredPrograms] = LoweringCache()
        self._derived: LoweringCache[derivatives.LoweredDerivatives] = LoweringCache()

    @property
    def step_size(self) -> int:
        """Token-rows of values that recent steps would have computed in the time of a step."""
        return self._step_size_of(self._interpret)

    def _step_size_of(self, function: int) -> int:
        rate = self._rates.get(function, _EXPECTED_RATE * self.threads)
        return int(rate * self._step_seconds)

    def device(self) -> Device:
        """Describe the CPU."""
        name = platform.machine()
        with suppress(OSError):  # Linux knows the model
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    name = line.partition(":")[2].strip()
                    break
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device(name=name, threads=self.threads, memory=memory)

    def load(self, dataset: Dataset) -> None:
        """Keep a data set; its arrays are used in place."""
        self._datasets[dataset.content_id] = dataset

    def unload(self, dataset_id: bytes) -> None:
        """Forget a data set."""
        self._datasets.pop(dataset_id, None)

    def counters(self) -> Mapping[str, float]:
        """Return nothing: no code is compiled for a batch."""
        return {}

    def map_segment(self, segment: Segment) -> None:
        """Do nothing: programs are read where they lie."""

    def close(self) -> None:
        """Stop the threads."""
        self._loop.close()
        self._datasets.clear()
        self._programs.clear()
        self._derived.clear()

    def should_merge(self, dataset_id: bytes) -> bool:
        """Return whether a data set is loaded."""
        return dataset_id in self._datasets

    def merge_from(
        self,
        dataset_id: bytes,
        precision: Precision,
        *,
        tokens: int,
        token_rows: int,
        gradient: bool,
    ) -> int:
        """Return 0 for a batch that takes longer to lower than a step of its own does."""
        return 0 if tokens > _TOKENS_TO_KEEP else 1

    def evaluate(
        self, evaluation: Evaluation, outputs: interface.Outputs
    ) -> interface.Steps[Timings]:
        """Evaluate a batch into ``outputs``; see `interface.Engine`."""
        dataset = self._dataset(evaluation.dataset_id)
        is_custom = outputs.losses is not None and evaluation.loss is None
        if is_custom or [array for array in _FURTHER(outputs) if array is not None]:
            requested = requested_outputs(evaluation, outputs)
            steps = self._differentiate(dataset, evaluation, requested)
        else:
            steps = self._evaluate(dataset, evaluation, outputs)
        with _memory_errors():
            _, compute = yield from interface.timed(steps)
        return Timings(compute=compute)

    def linearise(
        self,
        evaluation: Evaluation,
        row_loss: Program,
        *,
        curvature: bool,
        cancelled: NDArray[np.uint8],
        selection: interface.Selection | None = None,
    ) -> interface.Steps[interface.Linearisation]:
        """Compute losses, gradients and curvatures in one pass; see `interface.Engine`."""
        dataset = self._dataset(evaluation.dataset_id)
        found, requested = linearisation_outputs(
            evaluation.batch, row_loss, curvature=curvature, cancelled=cancelled
        )
        with _memory_errors():
            yield from self._differentiate(dataset, evaluation, requested, selection)
        return found

    def small_fits(
        self,
        evaluation: Evaluation,
        row_loss: Program,
        *,
        cancelled: NDArray[np.uint8],
        selection: interface.Selection,
    ) -> interface.Steps[None]:
        """Return None: what the host computes needs no way to it."""
        return None
        yield

    def search(
        self,
        request: SearchRequest,
        datasets: Passes,
        *,
        cancelled: NDArray[np.uint8],
        report: Callable[[SearchProgress], None],
    ) -> interface.Steps[SearchProgress]:
        """Search for formulas; see `interface.Engine`."""
        yield WANTED.submit(parts.load_search, self.threads)
        # Imported by then, on another thread: importing it delays the start of the server.
        from warpfit_server.engine.cpu.colony import CpuColony, colony_settings
        from warpfit_server.engine.cpu.pairs import CpuWeigher
        from warpfit_server.engine.search.driver import search

        def new_colony(
            grammar: NDArray[np.int32],
            units: NDArray[np.int32],
            screening: Screening,
            settings: ColonySettings,
            composer: Composer,
        ) -> interface.Steps[CpuColony]:
            yield None
            matrix = self._dataset(screening.dataset_id).matrix
            kernels = self._kernels[Arithmetic.of(matrix.dtype, Precision.FAST)].addresses
            given = grammar, units, screening, settings, composer
            signs = request.monotonic
            return CpuColony(matrix, kernels, self.run_in_steps, cancelled, *given, signs)

        def new_weigher() -> CpuWeigher:
            return CpuWeigher(self.threads)

        settings = colony_settings(request)
        with _memory_errors():
            return (
                yield from search(
                    self, datasets, request, new_colony, new_weigher, settings=settings,
                    cancelled=cancelled, report=report,
                )
            )  # fmt: skip

    def _dataset(self, dataset_id: bytes) -> Dataset:
        dataset = self._datasets.get(dataset_id)
        if dataset is None:
            raise DatasetNotFoundError
        return dataset

    def _evaluate_in_steps(
        self, work: ChunkedWork, outputs: interface.Outputs, vectors: int
    ) -> interface.Steps[None]:
        """Run all chunks, and announce the values that are final after each step."""
        announced = 0

        def announce(chunks: int) -> None:
            nonlocal announced
            finished = work.instances_finished(chunks) // vectors
            if finished > announced:
                announced = finished
                outputs.ready(finished)

        has_values = outputs.values is not None or outputs.jacobian is not None
        yield from self.run_in_steps(work, announce if has_values else None)

    def run_in_steps(
        self, work: ChunkedWork, on_step: Callable[[int], None] | None = None
    ) -> interface.Steps[None]:
        """Run all chunks; after each step ``on_step`` gets the number of those that have run.

        Work of several steps begins with a new one: preparing it has taken some time of this one.
        """
        # Another thread must receive meanwhile, and nobody wait for the values of a step.
        longest = _LONG_STEP if self.step_threads > 1 and on_step is None else 1
        size = self._step_size_of(work.function)
        if work.cut.cost > size:
            yield None
        stop = 0
        while stop < work.chunks:
            first, started = stop, time.monotonic_ns()
            step = int(1e9 * self._step_seconds)
            ends = started + step, started + longest * step
            helpers = work.helpers(first, work.chunks)
            task = self._loop.begin(work.function, work.block, first, work.chunks, helpers, ends)
            stop = task.result()
            if work.cancelled[0]:
                raise CancelledError("the evaluation was cancelled", "CANCELLED")
            done = work.cut.cost * (stop - first) / work.chunks
            # Work that ends before its time is over, and is no long one, says little.
            if stop < work.chunks or 2 * done >= size:
                rate = 1e9 * done / max(1, time.monotonic_ns() - started)
                known = self._rates.setdefault(work.function, rate)
                self._rates[work.function] = known + _RATE_WEIGHT * (rate - known)
            if on_step is not None:
                on_step(stop)
            if stop < work.chunks:
                yield None

    def _load_derivatives(self, *, single: bool) -> Future[Kernels]:
        load = parts.load_single_derivatives if single else parts.load_derivatives
        return BACKGROUND.submit(load, self._kernels, self.threads)

    def _differentiate(
        self,
        dataset: Dataset,
        evaluation: Evaluation,
        requested: RequestedOutputs,
        selection: interface.Selection | None = None,
    ) -> interface.Steps[None]:
        """Evaluate with derivatives, custom losses or statistics."""
        layout, kernels = dataset.layout, dict[Arithmetic, KernelSet]()
        for single in (False, True) if layout.dtype == np.float32 else (False,):
            loading = self._derivatives[single]  # which ends after the engine began to serve
            if loading.done() and loading.exception() is not None:  # memory may have been short
                loading = self._derivatives[single] = self._load_derivatives(single=single)
            if not loading.done():
                yield loading
            kernels |= loading.result()
        whole = evaluation.batch if selection is None else selection.batch

        def lower(batch: Batch) -> interface.Steps[derivatives.LoweredDerivatives]:
            yield from _check(whole, layout.variables)
            given = self.run_in_steps, layout, batch, requested
            return (yield from derivatives.lower_derivatives(*given))

        key = derivatives.lowering_key(dataset, evaluation, requested)
        find = self._derived.by_programs if selection is None else self._derived.by_batch
        programs = None if selection is None else selection.programs
        lowered = yield from find(whole, key, lower)
        plan = lowered.plan(dataset, evaluation, requested, programs)
        run = derivatives.DerivativeRun(kernels, plan, dataset, evaluation, requested)
        yield from self._evaluate_in_steps(run.summing(), requested, evaluation.batch.vectors)
        is_long = plan.cut.cost > self.step_size
        if is_long:  # so that the last rows, what follows them and the outputs are steps apart
            yield None
        yield from run.add_up()
        yield from self.run_in_steps(run.combining())
        if is_long:
            yield None
        yield from run.finish()

    def _evaluate(
        self, dataset: Dataset, evaluation: Evaluation, outputs: interface.Outputs
    ) -> interface.Steps[None]:
        layout, batch = dataset.layout, evaluation.batch

        def lower(programs: Batch) -> interface.Steps[_LoweredPrograms]:
            yield from _check(batch, layout.variables)
            work, lowered = lowering_work(self._lower, programs, outputs.cancelled)
            yield from self.run_in_steps(work)
            return _LoweredPrograms(programs, lowered)

        programs = yield from self._programs.by_programs(batch, (layout.variables,), lower)
        kernels = self._kernels[Arithmetic.of(layout.dtype, evaluation.precision)]
        rows = evaluation.row_range(layout)
        cells = len(batch) * batch.vectors
        level = span_level(rows, layout, cells, int(batch.lengths.max()))
        cut = programs.cut(batch.vectors, rows, layout, level)
        context = new_context(dataset, evaluation, outputs.values, cut.level)
        if outputs.losses is not None and evaluation.loss is not None:
            term = "absolute" if evaluation.loss is Loss.MAE else "squared"
            suffix = "_weighted" if layout.has_weights else ""
            context["loss_kernel"] = kernels.losses[term + suffix]
        sums = np.zeros((len(cut.spans), cells))
        parameters = np.ascontiguousarray(batch.parameters), batch.parameter_starts
        inputs = Inputs(context, kernels.addresses, *parameters, programs.lowered)
        arrays = (*inputs.arrays(), sums)
        work = ChunkedWork(self._interpret, arrays, cut, outputs.cancelled)
        yield from self._evaluate_in_steps(work, outputs, batch.vectors)
        if outputs.losses is not None:
            yield from add_nodes(sums, first_node(rows, layout, level), outputs.losses.reshape(-1))


class _LoweredPrograms:
    """Lowered programs, and the last cut of their work, which is mostly the next one, too."""

    def __init__(self, programs: Batch, lowered: Lowered) -> None:
        self.lowered = lowered
        self._lengths = programs.lengths.astype(np.int64)
        self._weights = weights_of(programs)
        self._last: tuple[Hashable, Cut] | None = None

    def cut(self, vectors: int, rows: tuple[int, int], layout: Layout, level: int) -> Cut:
        """Cut the work of ``vectors`` parameter vectors of each program over a range of rows."""
        key, last = (vectors, rows, layout.dtype, level), self._last
        if last is None or last[0] != key:
            invariants = self.lowered.headers["invariants"]
            given = vectors, rows, layout, level
            last = key, cut_instances(self._lengths, self._weights, invariants, *given)
            self._last = last
        return last[1]


def _check(batch: Batch, variables: int) -> interface.Steps[None]:
    """Check every token as `check_tokens`, some at a time."""
    tokens = range(_CHECKED_AT_ONCE, len(batch.codes), _CHECKED_AT_ONCE)
    edges = np.searchsorted(batch.starts, tokens).tolist()
    for first, stop in pairwise([0, *edges, len(batch)]):
        if first:
            yield None
        if not are_valid(batch[first:stop], variables):
            check_tokens(batch, variables)


@contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise ResourceExhaustedError(
            "the CPU engine is out of memory", "OUT_OF_MEMORY", "Send smaller batches"
        ) from error
