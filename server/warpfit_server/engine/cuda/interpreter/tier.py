"""The interpreter tier: any number of fresh expressions in one launch, without compiling them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.request import Evaluation, Tier, Timings
from warpfit_server.engine.cuda.interpreter import source
from warpfit_server.engine.cuda.interpreter.bytecode import CASES
from warpfit_server.engine.cuda.interpreter.compile import CudaSource
from warpfit_server.engine.cuda.interpreter.device_lowering import (
    BLOCKS_A_MULTIPROCESSOR,
    load_lowering,
)
from warpfit_server.engine.cuda.interpreter.launches import (
    BatchLaunch,
    InterpreterKernels,
    Jobs,
    LaunchLimits,
    RowTiles,
    Staging,
)
from warpfit_server.engine.cuda.math.modes import Mode, max_interpreted_token_rows
from warpfit_server.engine.cuda.runtime.device import CudaDevice
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
from warpfit_server.engine.interface import Outputs, Steps
from warpfit_server.engine.sum_tree import parent_nodes, sum_nodes
from warpfit_server.row_blocks import levels_between, node_rows, nodes_of

#: Bytes of rows that a thread works on at a time: few for little work, more for much.
_LEAST_BYTES: Final = 16
_MOST_BYTES: Final = {Mode.FAST: 64, Mode.PRECISE: 32, Mode.DOUBLE: 32}
#: Variants of the kernels that `InterpreterTier.variant` chooses from.
VARIANTS: Final = tuple(
    source.Variant.of(mode, row_bytes)
    for mode, most in _MOST_BYTES.items()
    for row_bytes in (_LEAST_BYTES, most)
)
#: Warps that a multiprocessor runs at a time, and threads that fill it.
_RESIDENT_WARPS: Final = 32
_FULL_THREADS: Final = 32 * _RESIDENT_WARPS
#: Most jobs of one launch.
_MAX_JOBS: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class InterpreterTuning:
    """Launch parameters of the interpreter; the defaults are the measured best."""

    rows: int | None = None
    """Rows a thread; None chooses by the size of the evaluation."""
    warps: int | None = None
    """Warps a block, at most 8, each with a program of its own on the block's rows. None for 2 in
    fast mode and 1 otherwise: precise functions are long, and two programs use more of them at a
    time than the instruction cache holds."""
    jobs_per_warp: int = 2
    """Most programs that a warp runs one after the other."""
    chunk_bytes: int = 32 << 20
    """Most bytes of values, or of partial sums, that one launch leaves on the device."""


class InterpreterTier:
    """Evaluates batches by one kernel that interprets instructions.

    A job is one program with one parameter vector; jobs are numbered in wire order,
    ``program * K + vector``. There is a compiled variant of the kernel for each data type,
    precision and number of rows a thread.
    """

    def __init__(self, device: CudaDevice, tuning: InterpreterTuning | None = None) -> None:
        self._device = device
        self._tuning = tuning or InterpreterTuning()
        self._kernels: dict[source.Variant, InterpreterKernels] = {}
        self._lowering = load_lowering(device)
        self._lock = threading.Lock()

    def evaluate(
        self, resident: ResidentDataset, evaluation: Evaluation, outputs: Outputs
    ) -> Steps[Timings]:
        """Evaluate as `warpfit_server.engine.interface.Engine.evaluate` does."""
        started = time.perf_counter_ns()
        check_cancelled(outputs.cancelled)
        layout, shard = resident.dataset.layout, outputs.shard
        length = self._rows_at_a_time(resident, evaluation)
        spans = cut_rows(evaluation.row_range(layout), length)
        most = evaluation if len(spans) == 1 else replace(evaluation, rows=longest(spans))
        kernels = self.prepare(self.variant(resident, most))
        chunks = list(self._chunks(resident, most, kernels.variant))
        is_whole = len(chunks) == len(spans) == 1 and not resident.is_streamed and shard is None
        losses = outputs.losses if is_whole and not evaluation.values else None
        batch, jobs = evaluation.batch, chunks[0][1]
        level = None if shard is None else shard.level
        if shard is not None:
            length = min(length, node_rows(layout, shard.level))
            shard.begin(0 if outputs.losses is None else outputs.losses.size)
        with self._device.stream() as context:
            given = context, kernels, batch, layout.variables, jobs
            lowered, commands = yield from BatchLaunch.begin(*given)
            if losses is not None:
                tiles = RowTiles.of(resident, evaluation, kernels.variant)
                return (yield from lowered.run(commands, tiles, losses, started))
            lowered.execute(commands)
            launched = time.perf_counter_ns()
            sums: list[Any] = [[] for _ in spans]
            results = ChunkResults(lowered, outputs, spans, length, sums)

            def launch(
                window: ResidentDataset, number: int, jobs: Jobs, side: int
            ) -> Callable[[], None]:
                rows = replace(evaluation, rows=spans[number])
                place = RowTiles.of(window, rows, kernels.variant, level)
                staging = lowered.launch_chunk(place, rows, jobs, side)
                return partial(results.copy, number, jobs, staging)

            size = 0 if outputs.values is None else outputs.values.nbytes
            work = resident, spans, chunks, outputs.cancelled, launch, size
            computed = yield from run_chunks(self._device, context, *work)
            copy_out = max(0, time.perf_counter_ns() - launched - computed)
        yield from results.sum_up(layout)
        return Timings(
            copy_in=launched - started, compute=computed, copy_out=copy_out, tier=Tier.INTERPRETER
        )

    def variant(self, resident: ResidentDataset, evaluation: Evaluation) -> source.Variant:
        """Choose the variant of the kernels for an evaluation."""
        mode = Mode.of(resident.dataset.layout.dtype, evaluation.precision)
        most = source.Variant.of(mode, _MOST_BYTES[mode])
        if self._tuning.rows:
            return replace(most, rows=max(self._tuning.rows, _LEAST_BYTES // mode.dtype.itemsize))
        programs, vectors, rows = evaluation.shape(resident.dataset.layout)
        # More rows a thread share the decoding of an instruction, but leave fewer warps.
        threads = _FULL_THREADS * self._device.multiprocessors
        is_much = programs * vectors * rows >= most.rows * threads
        return most if is_much else source.Variant.of(mode, _LEAST_BYTES)

    def prepare_all(self) -> None:
        """Load every variant that `variant` chooses."""
        for variant in VARIANTS:
            self.prepare(variant)

    def prepare(self, variant: source.Variant) -> InterpreterKernels:
        """Return the kernels of a variant, which are loaded on the first call."""
        with self._lock:
            if variant not in self._kernels:
                module = interpreter_switch(variant).load(self._device)
                self._kernels[variant] = InterpreterKernels(
                    variant=variant,
                    limits=self._limits(variant),
                    interpret=module.get_function("interpret"),
                    evaluate_slots=module.get_function("evaluate_slots"),
                    sum_partials=module.get_function("sum_partials"),
                    lowering=self._lowering,
                    flags=source.operator_flags(variant),
                )
            return self._kernels[variant]

    def _limits(self, variant: source.Variant) -> LaunchLimits:
        count = self._device.multiprocessors
        return LaunchLimits(
            level_bytes=variant.tile * variant.dtype.itemsize,
            max_warps=self._tuning.warps or (2 if variant.mode.is_fast else 1),
            programs_per_warp=self._tuning.jobs_per_warp,
            resident_warps=_RESIDENT_WARPS * count,
            max_token_rows=max_interpreted_token_rows(variant.mode, count),
            lowering_blocks=BLOCKS_A_MULTIPROCESSOR * count,
        )

    def _rows_at_a_time(self, resident: ResidentDataset, evaluation: Evaluation) -> int:
        """Return the most rows of a launch, a power of two: a job's values must fit the device."""
        if not evaluation.values:
            return resident.window_rows
        rows = max(self._chunk_bytes // resident.dataset.layout.dtype.itemsize, ALIGNED_ROWS)
        return min(resident.window_rows, 1 << (rows.bit_length() - 1))

    @property
    def _chunk_bytes(self) -> int:
        most = int(self._device.memory_limit * RESULTS_SHARE)
        return min(self._tuning.chunk_bytes, most)

    def _chunks(
        self, resident: ResidentDataset, evaluation: Evaluation, variant: source.Variant
    ) -> Iterator[Jobs]:
        """Cut the jobs so that the results of each launch fit in ``chunk_bytes``.

        No launch of several jobs has more token-rows than `LaunchLimits` allow, so that other
        evaluations get their turns.
        """
        programs, vectors, rows = evaluation.shape(resident.dataset.layout)
        tiles = -(-rows // variant.tile) + 1
        job_bytes = 8 * tiles
        if evaluation.values:
            job_bytes = tiles * variant.tile * variant.dtype.itemsize
        jobs = min(programs * vectors, max(1, self._chunk_bytes // job_bytes), _MAX_JOBS)
        most, token_rows = self._limits(variant).max_token_rows, len(evaluation.batch.codes) * rows
        jobs = min(jobs, max(1, most * programs // token_rows))
        jobs -= jobs % vectors if jobs > vectors else 0
        for first in range(0, programs * vectors, jobs):
            yield first, min(jobs, programs * vectors - first)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkResults:
    """Collects the results of chunks from staging memory for the outputs of an evaluation."""

    launch: BatchLaunch
    outputs: Outputs
    spans: Sequence[Span]
    """Rows of the chunks, in turn."""
    length: int
    """Rows of a node of the tree of sums; a span is one, or several nodes of a shard."""
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

    def sum_up(self, layout: Layout) -> Steps[None]:
        """Fill in the losses, if they are wanted, once all chunks have been copied."""
        losses, shard, first = self.outputs.losses, self.outputs.shard, self.spans[0][0]
        nodes = None if losses is None else np.block(self.sums)
        length = self.length
        if shard is not None:
            length = node_rows(layout, shard.level)
            count = len(nodes_of((first, self.spans[-1][1]), length))
            mine = np.empty((count, 0))
            if nodes is not None:
                levels = levels_between(self.length, length)
                mine = parent_nodes(nodes, first // self.length, levels)
            nodes, first = (yield from shard.join(mine)), shard.rows[0]
        if losses is not None and nodes is not None:
            losses[...] = sum_nodes(nodes, first // length).reshape(losses.shape)


def interpreter_switch(variant: source.Variant) -> CudaSource:
    """Return the source of the kernels of one variant, with its options."""
    return CudaSource(source.interpreter_source(variant), variant.options, CASES)
