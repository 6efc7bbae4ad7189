"""The interpreter tier: any number of fresh expressions in one launch, without compiling them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit.request import Evaluation, Timings
from warpfit_server.engine.cuda.interpreter.launches import (
    ALL_VALID,
    PART,
    BatchBounds,
    LaunchLimits,
    Variant,
    as_jobs,
    configure_launch,
    costly_operators,
    cut_tiles,
    interpreter_source,
    lay_out,
    lower,
    lowering_source,
    max_slots,
    new_batch,
    raise_invalid_program,
    run_jobs,
)
from warpfit_server.engine.cuda.runtime.datasets import (
    ALIGNED_ROWS,
    ResidentDataset,
    check_cancelled,
    cut_rows,
    longest,
    rows_that_fit,
    run_chunks,
)
from warpfit_server.engine.cuda.runtime.device import (
    LAUNCH_WORK,
    CudaDevice,
    StreamContext,
    as_record,
)
from warpfit_server.engine.interface import Arithmetic, Outputs, Steps
from warpfit_server.engine.native.intrinsics import array_address
from warpfit_server.engine.sum_tree import sum_nodes
from warpfit_server.shared_batch import SharedBatch

#: Variants of the kernels by arithmetic: for little work, with few rows a thread, and for much.
_VARIANTS_OF: Final = {
    arithmetic: (Variant.of(arithmetic, 16), Variant.of(arithmetic, most))
    for arithmetic, most in (
        (Arithmetic.FAST, 64),
        (Arithmetic.PRECISE, 32),
        (Arithmetic.DOUBLE, 32),
    )
}
VARIANTS: Final = tuple(chain(*_VARIANTS_OF.values()))
_KERNELS: Final = ("interpret", "evaluate_slots", "sum_partials")
_LOWERING_KERNELS: Final = ("join_parts", "lower_programs", "order_programs")
#: Warps that a multiprocessor runs at a time, and threads that fill it.
_RESIDENT_WARPS: Final = 32
_FULL_THREADS: Final = 32 * _RESIDENT_WARPS
#: Most jobs of one launch.
_MAX_JOBS: Final = 1 << 18
#: Most bytes of values, or of partial sums, that one launch leaves on the device.
_CHUNK_BYTES: Final = 32 << 20
#: Ranges of rows of a data set for which tiles are kept.
_KEPT_TILES: Final = 256
#: First job of a launch, and the number of its jobs.
Jobs = tuple[int, int]
#: Where the results of a launch arrive: sums of losses, [jobs], and values, [jobs, rows]; None for
#: results that are not wanted.
Staging = tuple[NDArray[np.float64] | None, NDArray[Any] | None]


@dataclass(frozen=True, slots=True)
class InterpreterKernels:
    """The loaded kernels of one variant."""

    variant: Variant
    record: NDArray[Any]
    """Record of `LaunchLimits`."""
    costly: int
    """See `costly_operators`."""
    functions: Mapping[str, Any]
    """CuPy's functions, without which the kernels would be unloaded."""


class InterpreterTier:
    """Evaluates batches by one kernel that interprets instructions.

    A job is one program with one parameter vector; jobs are numbered in wire order,
    ``program * K + vector``. There is a compiled variant of the kernel for each data type,
    precision and number of rows a thread.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._kernels: dict[Variant, InterpreterKernels] = {}
        self._lowering = load_lowering(device)
        for variant in VARIANTS:
            self.prepare(variant)

    def evaluate(
        self, resident: ResidentDataset, evaluation: Evaluation, outputs: Outputs
    ) -> Steps[Timings]:
        """Evaluate as `warpfit_server.engine.interface.Engine.evaluate` does."""
        started = time.perf_counter_ns()
        check_cancelled(outputs.cancelled)
        layout, batch = resident.dataset.layout, evaluation.batch
        rows, length = evaluation.row_range(layout), resident.window_rows
        if evaluation.values:  # the values of a job must fit the device
            size = self._device.result_bytes(_CHUNK_BYTES)
            length = min(length, rows_that_fit(size, layout.dtype.itemsize, ALIGNED_ROWS))
        spans = cut_rows(rows, length)
        first, stop = longest(spans)
        rows_of_most = stop - first
        kernels = self.prepare(self.variant(resident, evaluation, rows_of_most))
        all_jobs = len(batch) * batch.vectors
        jobs = self._most_jobs(evaluation, kernels.variant, rows_of_most)
        is_whole = jobs == all_jobs and len(spans) == 1 and not resident.is_streamed
        with self._device.stream() as context:
            lowered = BatchLaunch.begin(context, kernels, batch, layout.variables, jobs)
            if is_whole and outputs.losses is not None and not evaluation.values:
                key = rows, evaluation.loss, kernels.variant
                tiles = resident.row_tiles.get(key)  # kept for the next launch on the same rows
                if tiles is None:
                    if len(resident.row_tiles) >= _KEPT_TILES:
                        resident.row_tiles.clear()
                    tiles = resident.row_tiles[key] = cut_tiles(resident, *key)
                return (yield from lowered.compute_losses(tiles, outputs.losses, started))
            launched = time.perf_counter_ns()
            sums = np.empty((len(spans), all_jobs))

            def launch(
                window: ResidentDataset, number: int, jobs: Jobs, side: int
            ) -> Callable[[], None]:
                tiles = cut_tiles(window, spans[number], evaluation.loss, kernels.variant)
                own_sums, own_values = lowered.launch_chunk(tiles, evaluation, jobs, f" {side}")
                own = slice(jobs[0], sum(jobs))

                def copy_results() -> None:
                    lowered.check()
                    if own_sums is not None:
                        sums[number, own] = own_sums
                    if own_values is not None and outputs.values is not None:
                        columns = slice(*(row - rows[0] for row in spans[number]))
                        outputs.values.reshape(all_jobs, -1)[own, columns] = own_values
                        if number == len(spans) - 1:
                            outputs.ready(own.stop // batch.vectors)

                return copy_results

            size = 0 if outputs.values is None else outputs.values.nbytes
            chunks = [(n, min(jobs, all_jobs - n)) for n in range(0, all_jobs, jobs)]
            work = resident, spans, chunks, outputs.cancelled, launch, size
            computed = yield from run_chunks(self._device, context, *work)
            copy_out = max(0, time.perf_counter_ns() - launched - computed)
        if outputs.losses is not None:
            total = sum_nodes(sums, rows[0] // length)
            outputs.losses[...] = total.reshape(outputs.losses.shape)
        return Timings(copy_in=launched - started, compute=computed, copy_out=copy_out)

    def variant(self, resident: ResidentDataset, evaluation: Evaluation, rows: int) -> Variant:
        """Choose the variant of the kernels for an evaluation, of which a launch has some rows."""
        arithmetic = Arithmetic.of(resident.dataset.layout.dtype, evaluation.precision)
        few, most = _VARIANTS_OF[arithmetic]
        # More rows a thread share the decoding of an instruction, but leave fewer warps.
        threads = _FULL_THREADS * self._device.multiprocessors
        is_much = len(evaluation.batch) * evaluation.batch.vectors * rows >= most.rows * threads
        return most if is_much else few

    def prepare(self, variant: Variant) -> InterpreterKernels:
        """Return the kernels of a variant, which are loaded on the first call."""
        kernels = self._kernels.get(variant)
        if kernels is None:
            module = interpreter_source(variant).load(self._device)
            functions = {name: module.get_function(name) for name in _KERNELS} | self._lowering
            limits = LaunchLimits(
                level_bytes=variant.tile * variant.dtype.itemsize,
                # Each has a program of its own on the block's rows, whose variables the first one
                # to read them brings closer for the others. Precise functions are long, and two
                # programs use more of them at a time than the instruction cache holds.
                max_warps=3 if variant.arithmetic.is_fast else 1,
                resident_warps=_RESIDENT_WARPS * self._device.multiprocessors,
                **{name: function.ptr for name, function in functions.items()},
            )
            costly = costly_operators(variant)
            kernels = InterpreterKernels(variant, as_record(limits), costly, functions)
            self._kernels[variant] = kernels
        return kernels

    def _most_jobs(self, evaluation: Evaluation, variant: Variant, rows: int) -> int:
        """Return the number of jobs of a launch on some rows.

        Their results fit in `_CHUNK_BYTES`. A launch of several jobs has no more token-rows than
        `LAUNCH_WORK` says.
        """
        batch = evaluation.batch
        programs, vectors = len(batch), batch.vectors
        tiles = -(-rows // variant.tile) + 1
        job_bytes = 8 * tiles
        if evaluation.values:
            job_bytes = tiles * variant.tile * variant.dtype.itemsize
        fitting = self._device.result_bytes(_CHUNK_BYTES) // job_bytes
        jobs = min(programs * vectors, max(1, fitting), _MAX_JOBS)
        most = LAUNCH_WORK[variant.arithmetic].interpreted * self._device.multiprocessors
        jobs = min(jobs, max(1, most * programs // (batch.token_count * rows)))
        return jobs - jobs % vectors if jobs > vectors else jobs


def load_lowering(device: CudaDevice) -> dict[str, Any]:
    """Load the kernels that lower batches, by name; the first start on a machine compiles them."""
    module = lowering_source().load(device)
    return {name: module.get_function(name) for name in _LOWERING_KERNELS}


@dataclass(frozen=True, slots=True, eq=False)
class BatchLaunch:
    """A batch on its way through the device, and what all its launches share."""

    context: StreamContext
    kernels: InterpreterKernels
    batch: Batch
    variables: int
    """Variables of the data set."""
    record: NDArray[Any]
    """Record of `BATCH`."""
    first_invalid: NDArray[np.uint32]
    """First invalid program of each group, or `ALL_VALID`; known once the batch is lowered."""

    @classmethod
    def begin(
        cls,
        context: StreamContext,
        kernels: InterpreterKernels,
        batch: Batch,
        variables: int,
        max_jobs: int,
    ) -> BatchLaunch:
        """Copy a batch to the device from where it lies and lower it; record ``started``.

        ``max_jobs`` are the most jobs of a launch.

        Raises:
            ResourceExhaustedError: if a program is too long, or the device has no room.
        """
        shared = SharedBatch.viewing(batch)
        summary, count = shared.summary, len(shared.parts)
        bounds = BatchBounds.of(summary, kernels.costly)
        counts = shared.token_count, len(shared), shared.parameter_total, shared.vectors
        address = context.buffer("batch", lay_out(*counts[:3]).end)
        apart = context.buffer("parts", shared.room) if shared.is_apart else 0
        size = max_slots(*counts[:2]) * shared.vectors * kernels.variant.dtype.itemsize
        slots = context.buffer("slots", max(1, size))
        first_invalid = context.pinned("first invalid", 4 * counts[1]).view(np.uint32)
        record = new_batch(counts, variables, address, slots, array_address(first_invalid))
        configure_launch(record, kernels.record, summary.longest, *bounds, max_jobs)
        parts = context.pinned("part records", count * PART.itemsize).view(PART)
        given = shared.places, apart, parts, kernels.record, record, context.event("started").ptr
        context.check_executed(lower(context.functions, context.handle, *given))
        return cls(context, kernels, shared, variables, record, first_invalid)

    def check(self) -> None:
        """Check that all programs could be lowered, once the stream has passed that.

        Raises:
            ProgramError: for the first bad token.
            ResourceExhaustedError: if a variable's index is too large to encode.
        """
        groups = -(-len(self.batch) // int(self.record["group"][0]))
        program = min(self.first_invalid[:groups].tolist())
        if program != ALL_VALID:
            raise_invalid_program(self.batch, program, self.variables)

    def launch(
        self, tiles: NDArray[Any], jobs: Jobs, sums: NDArray[Any] | None, values: int, side: str
    ) -> None:
        """Launch some jobs, and record the event ``computed`` of a side; see `run_jobs`.

        Raises:
            CUDADriverError: if the device reports an error.
        """
        context, partials, target = self.context, 0, 0
        if sums is not None:
            size = 8 * jobs[1] * int(tiles["count"][0])
            partials, target = context.buffer("partials" + side, size), array_address(sums)
        device = context.functions, context.handle
        given = self.kernels.record, self.record, tiles, as_jobs(jobs, values, partials)
        computed = context.event("computed" + side).ptr
        context.check_executed(run_jobs(*device, *given, target, computed))

    def launch_chunk(
        self, tiles: NDArray[Any], evaluation: Evaluation, jobs: Jobs, side: str
    ) -> Staging:
        """Launch some jobs and the copies of their results; see `datasets.run_chunks`."""
        context, variant, count, one = self.context, self.kernels.variant, jobs[1], tiles[0]
        pitch = int(one["count"]) * variant.tile * variant.dtype.itemsize
        values, sums, staging = 0, None, None
        if evaluation.loss is not None:
            sums = context.pinned("sums" + side, 8 * count).view(np.float64)
        if evaluation.values:
            values = context.buffer("values" + side, count * pitch)
        context.mark("begun" + side)
        self.launch(tiles, jobs, sums, values, side)
        if values:
            first, end = int(one["first_row"]), int(one["end_row"])
            memory = context.pinned("values" + side, count * (end - first) * variant.dtype.itemsize)
            staging = memory.view(variant.dtype).reshape(count, -1)
            context.download_rows(staging, values + first * variant.dtype.itemsize, pitch)
        return sums, staging

    def compute_losses(
        self, tiles: NDArray[Any], losses: NDArray[np.float64], started: int
    ) -> Steps[Timings]:
        """Launch all jobs on all rows after the lowering, and fill in the sums of row losses.

        ``started`` is ``time.perf_counter_ns()`` of the evaluation's beginning.

        Raises:
            ProgramError: for the first bad token.
        """
        context = self.context
        sums = context.pinned("sums", 8 * losses.size).view(np.float64)
        self.launch(tiles, (0, losses.size), sums, 0, "")
        launched = time.perf_counter_ns()
        yield from context.reach("computed")
        self.check()
        losses.reshape(-1)[:] = sums
        compute = context.nanoseconds("started", "computed")
        copy_out = max(0, time.perf_counter_ns() - launched - compute)
        return Timings(copy_in=launched - started, compute=compute, copy_out=copy_out)
