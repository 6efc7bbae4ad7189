"""The interpreter tier: any number of fresh expressions in one launch, without compiling them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.request import Evaluation, Loss, Tier, Timings
from warpfit_server.engine.cuda.interpreter import source
from warpfit_server.engine.cuda.interpreter.batch_launch import (
    BatchLaunch,
    InterpreterKernels,
    Jobs,
    Staging,
)
from warpfit_server.engine.cuda.interpreter.device_lowering import load_lowering
from warpfit_server.engine.cuda.interpreter.launches import LaunchLimits, cut_tiles
from warpfit_server.engine.cuda.runtime.device import CudaDevice, max_interpreted_token_rows
from warpfit_server.engine.cuda.runtime.driver_calls import as_record
from warpfit_server.engine.cuda.runtime.resident_data import (
    ALIGNED_ROWS,
    RESULTS_SHARE,
    ResidentDataset,
    Span,
    check_cancelled,
    cut_rows,
    longest,
    run_chunks,
)
from warpfit_server.engine.interface import Arithmetic, Outputs, Steps
from warpfit_server.engine.sum_tree import sum_nodes

#: Variants of the kernels by arithmetic: for little work, with few rows a thread, and for much.
_VARIANTS_OF: Final = {
    arithmetic: (source.Variant.of(arithmetic, 16), source.Variant.of(arithmetic, most))
    for arithmetic, most in (
        (Arithmetic.FAST, 64),
        (Arithmetic.PRECISE, 32),
        (Arithmetic.DOUBLE, 32),
    )
}
VARIANTS: Final = tuple(chain(*_VARIANTS_OF.values()))
#: Warps that a multiprocessor runs at a time, and threads that fill it.
_RESIDENT_WARPS: Final = 32
_FULL_THREADS: Final = 32 * _RESIDENT_WARPS
#: Most jobs of one launch.
_MAX_JOBS: Final = 1 << 18
#: Most bytes of values, or of partial sums, that one launch leaves on the device.
_CHUNK_BYTES: Final = 32 << 20
#: Ranges of rows of a data set for which tiles are kept.
_KEPT_TILES: Final = 256


class InterpreterTier:
    """Evaluates batches by one kernel that interprets instructions.

    A job is one program with one parameter vector; jobs are numbered in wire order,
    ``program * K + vector``. There is a compiled variant of the kernel for each data type,
    precision and number of rows a thread.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._kernels: dict[source.Variant, InterpreterKernels] = {}
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
        rows = evaluation.row_range(layout)
        length = self._rows_at_a_time(resident, evaluation)
        spans = cut_rows(rows, length)
        most = rows if len(spans) == 1 else longest(spans)
        rows_of_most = most[1] - most[0]
        kernels = self.prepare(self.variant(resident, evaluation, rows_of_most))
        all_jobs = len(batch) * batch.vectors
        jobs = self._most_jobs(evaluation, kernels.variant, rows_of_most)
        is_whole = jobs == all_jobs and len(spans) == 1 and not resident.is_streamed
        with self._device.stream() as context:
            given = context, kernels, batch, layout.variables, jobs
            lowered = BatchLaunch.begin(*given)
            if is_whole and outputs.losses is not None and not evaluation.values:
                tiles = self._tiles(resident, rows, evaluation.loss, kernels.variant)
                return (yield from lowered.compute_losses(tiles, outputs.losses, started))
            launched = time.perf_counter_ns()
            sums: list[Any] = [[] for _ in spans]
            results = ChunkResults(lowered, outputs, spans, length, sums)

            def launch(
                window: ResidentDataset, number: int, jobs: Jobs, side: int
            ) -> Callable[[], None]:
                tiles = cut_tiles(window, spans[number], evaluation.loss, kernels.variant)
                staging = lowered.launch_chunk(tiles, evaluation, jobs, f" {side}")
                return partial(results.copy, number, jobs, staging)

            size = 0 if outputs.values is None else outputs.values.nbytes
            chunks = [(n, min(jobs, all_jobs - n)) for n in range(0, all_jobs, jobs)]
            work = resident, spans, chunks, outputs.cancelled, launch, size
            computed = yield from run_chunks(self._device, context, *work)
            copy_out = max(0, time.perf_counter_ns() - launched - computed)
        results.sum_up()
        return Timings(
            copy_in=launched - started, compute=computed, copy_out=copy_out, tier=Tier.INTERPRETER
        )

    def variant(
        self, resident: ResidentDataset, evaluation: Evaluation, rows: int
    ) -> source.Variant:
        """Choose the variant of the kernels for an evaluation, of which a launch has some rows."""
        arithmetic = Arithmetic.of(resident.dataset.layout.dtype, evaluation.precision)
        few, most = _VARIANTS_OF[arithmetic]
        # More rows a thread share the decoding of an instruction, but leave fewer warps.
        threads = _FULL_THREADS * self._device.multiprocessors
        is_much = len(evaluation.batch) * evaluation.batch.vectors * rows >= most.rows * threads
        return most if is_much else few

    def prepare(self, variant: source.Variant) -> InterpreterKernels:
        """Return the kernels of a variant, which are loaded on the first call."""
        kernels = self._kernels.get(variant)
        if kernels is None:
            module = source.interpreter_source(variant).load(self._device)
            names = "interpret", "evaluate_slots", "sum_partials"
            functions = {name: module.get_function(name) for name in names} | self._lowering
            limits = as_record(self._limits(variant, functions))
            costly = source.costly_operators(variant)
            kernels = InterpreterKernels(variant, limits, costly, functions)
            self._kernels[variant] = kernels
        return kernels

    def _limits(self, variant: source.Variant, functions: Mapping[str, Any]) -> LaunchLimits:
        return LaunchLimits(
            level_bytes=variant.tile * variant.dtype.itemsize,
            # Each has a program of its own on the block's rows, whose variables the first one to
            # read them brings closer for the others. Precise functions are long, and two programs
            # use more of them at a time than the instruction cache holds.
            max_warps=3 if variant.arithmetic.is_fast else 1,
            resident_warps=_RESIDENT_WARPS * self._device.multiprocessors,
            **{name: function.ptr for name, function in functions.items()},
        )

    def _tiles(
        self, resident: ResidentDataset, rows: Span, loss: Loss | None, variant: source.Variant
    ) -> NDArray[Any]:
        """Return what `cut_tiles` does, which is kept for the next launch on the same rows."""
        key = rows, loss, variant
        tiles = resident.row_tiles.get(key)
        if tiles is None:
            if len(resident.row_tiles) >= _KEPT_TILES:
                resident.row_tiles.clear()
            tiles = resident.row_tiles[key] = cut_tiles(resident, rows, loss, variant)
        return tiles

    @property
    def _chunk_bytes(self) -> int:
        return min(_CHUNK_BYTES, int(self._device.memory_limit * RESULTS_SHARE))

    def _rows_at_a_time(self, resident: ResidentDataset, evaluation: Evaluation) -> int:
        """Return the most rows of a launch, a power of two: a job's values must fit the device."""
        if not evaluation.values:
            return resident.window_rows
        rows = max(self._chunk_bytes // resident.dataset.layout.dtype.itemsize, ALIGNED_ROWS)
        return min(resident.window_rows, 1 << (rows.bit_length() - 1))

    def _most_jobs(self, evaluation: Evaluation, variant: source.Variant, rows: int) -> int:
        """Return how many jobs of an evaluation a launch has on so many rows.

        Their results fit in `_CHUNK_BYTES`. No launch of several jobs has more token-rows than
        others should wait for.
        """
        batch = evaluation.batch
        programs, vectors = len(batch), batch.vectors
        tiles = -(-rows // variant.tile) + 1
        job_bytes = 8 * tiles
        if evaluation.values:
            job_bytes = tiles * variant.tile * variant.dtype.itemsize
        jobs = min(programs * vectors, max(1, self._chunk_bytes // job_bytes), _MAX_JOBS)
        most = max_interpreted_token_rows(variant.arithmetic, self._device.multiprocessors)
        jobs = min(jobs, max(1, most * programs // (batch.token_count * rows)))
        return jobs - jobs % vectors if jobs > vectors else jobs


@dataclass(frozen=True, slots=True, eq=False)
class ChunkResults:
    """Collects the results of chunks from staging memory for the outputs of an evaluation."""

    launch: BatchLaunch
    outputs: Outputs
    spans: Sequence[Span]
    """Rows of the chunks, in turn."""
    length: int
    """Rows of a node of the tree of sums; a span is one."""
    sums: list[list[NDArray[np.float64]]]
    """Sums of the loss terms of some jobs in turn, [nodes, jobs], for each span."""

    def copy(self, number: int, jobs: Jobs, staging: Staging) -> None:
        """Copy the results of some jobs on the span with a number.

        Raises:
            ProgramError: for the first bad token.
        """
        self.launch.check()
        (sums, values), outputs, batch = staging, self.outputs, self.launch.batch
        if sums is not None:
            self.sums[number].append(sums.copy())
        if values is not None and outputs.values is not None:
            first, end = jobs[0], sum(jobs)
            start, stop = (row - self.spans[0][0] for row in self.spans[number])
            whole = outputs.values.reshape(len(batch) * batch.vectors, -1)
            whole[first:end, start:stop] = values
            if number == len(self.spans) - 1:
                outputs.ready(end // batch.vectors)

    def sum_up(self) -> None:
        """Fill in the losses, if they are wanted, once all chunks have been copied."""
        losses, first = self.outputs.losses, self.spans[0][0]
        if losses is not None:
            sums = sum_nodes(np.block(self.sums), first // self.length)
            losses[...] = sums.reshape(losses.shape)
