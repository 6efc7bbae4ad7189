"""The CPU engine: a block interpreter in compiled code, on threads that do not share the GIL.

The simple form:

    for each program and parameter vector:
        for each block of 1,024 rows:
            for each instruction of the program: result[:] = operator(operands[:])
            store the values, add up the loss

The way through: `cpu_lower` turns the batch's tokens into instructions, `cpu_interpret` runs them
in blocks, calling the loops that `cpu_kernels` generates from the operator table with the
functions of `cpu_math`; `cpu_cache` keeps all compiled code on disk. This module cuts the work into
pieces and hands them to threads.

A piece is a range of cells (program and parameter vector) over a span of rows. Spans depend on the
number of rows alone, and each cell's loss is added up over its spans in their order, so the losses
do not depend on the number of threads.
"""

from __future__ import annotations

import itertools
import os
import platform
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.errors import CancelledError, DatasetNotFoundError, ResourceExhaustedError
from warpfit.request import Evaluation, Loss, Precision, Timings
from warpfit_server.engine import cpu_cache, cpu_interpret
from warpfit_server.engine.base import Device, Outputs
from warpfit_server.engine.cpu_kernels import Flavour
from warpfit_server.engine.cpu_lower import SCALARS, Lowered, lower_batch

#: Bytes of one intermediate result: what keeps a few of them in the first-level cache.
_BLOCK_BYTES: Final = 4096
#: Blocks in a span of rows, and how many spans there are at most.
_SPAN_BLOCKS: Final = 16
_MOST_SPANS: Final = 64
#: Token-rows of a piece: about a millisecond, so that cutting costs little and balances well.
_PIECE_WORK: Final = 1_000_000
#: Token-rows below which waking another thread costs more than it gains.
_WORK_WORTH_A_THREAD: Final = 300_000
#: Scalars of the cells of a piece (64 bytes each): they share the second-level cache with the rows.
_PIECE_SCALARS: Final = 4096


class CpuEngine:
    """Evaluates batches on this machine's CPU; implements `base.Engine`."""

    name = "cpu"

    def __init__(self, threads: int | None = None, cache_directory: Path | None = None) -> None:
        """Load the compiled code; the very first start on a machine compiles it.

        Args:
            threads: how many threads one evaluation may use; None for the CPUs of this process.
            cache_directory: where compiled code is kept; None for WARPFIT_CACHE_DIR or the user's
                cache directory. It may be read-only, shared or missing.

        """
        self.threads = threads or len(os.sched_getaffinity(0))
        self.concurrency = self.threads
        self._compiled = cpu_cache.load(cache_directory or cpu_cache.default_directory())
        self._datasets: dict[bytes, Dataset] = {}
        self._pool = ThreadPoolExecutor(max(self.threads - 1, 1), "warpfit-cpu")

    def devices(self) -> list[Device]:
        """Describe the CPU."""
        name = _processor()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return [Device(name=name, threads=self.threads, memory=memory)]

    def load(self, dataset: Dataset) -> None:
        """Keep a data set; its arrays are used in place."""
        self._datasets[dataset.content_id] = dataset

    def unload(self, content_id: bytes) -> None:
        """Forget a data set."""
        self._datasets.pop(content_id, None)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()
        self._datasets.clear()

    def evaluate(self, evaluation: Evaluation, outputs: Outputs) -> Timings:
        """Evaluate a checked batch into ``outputs``; see `base.Engine`."""
        dataset = self._datasets.get(evaluation.dataset_id)
        if dataset is None:
            raise DatasetNotFoundError(
                "the data set is not loaded", "DATASET_NOT_FOUND", "Upload it again", "dataset_id"
            )
        start = time.perf_counter_ns()
        try:
            self._evaluate(dataset, evaluation, outputs)
        except MemoryError as error:
            raise ResourceExhaustedError(
                "the CPU engine is out of memory", "OUT_OF_MEMORY", "Send smaller batches"
            ) from error
        return Timings(compute=time.perf_counter_ns() - start)

    def _evaluate(self, dataset: Dataset, evaluation: Evaluation, outputs: Outputs) -> None:
        lowered = lower_batch(self._compiled.lower, evaluation.batch)
        work = self._work(dataset, evaluation, outputs, lowered)
        helpers = min(self.threads, len(work.pieces), work.cost // _WORK_WORTH_A_THREAD + 1) - 1
        futures: list[Future[None]] = [self._pool.submit(work.run) for _ in range(helpers)]
        try:
            work.run(outputs.ready)
        finally:
            work.stop()
            failures = [future.exception() for future in futures if not future.cancel()]
        for failure in failures:
            if failure is not None:
                raise failure
        if outputs.cancelled[0]:
            raise CancelledError("the evaluation was cancelled", "CANCELLED")
        if outputs.losses is not None and evaluation.loss is not None:
            flat = outputs.losses.reshape(-1)
            flat[:] = _finish(evaluation.loss, work.partial.sum(axis=0), dataset, work.rows)
        if work.reported < len(evaluation.batch):
            outputs.ready(len(evaluation.batch))

    def _work(
        self, dataset: Dataset, evaluation: Evaluation, outputs: Outputs, lowered: Lowered
    ) -> _Work:
        layout, batch = dataset.layout, evaluation.batch
        single = layout.dtype.itemsize == 4
        flavour = Flavour(single, single and evaluation.precision is Precision.FAST)
        kernels = self._compiled.kernels[flavour]
        rows = evaluation.row_range(layout)
        block = _BLOCK_BYTES // layout.dtype.itemsize
        spans = _spans(rows, block)
        pieces, cost = _pieces(lowered, batch.vectors, rows, spans)
        job = np.zeros(cpu_interpret.JOB_ENTRIES, dtype=np.int64)
        job[cpu_interpret.ITEMSIZE] = layout.dtype.itemsize
        job[cpu_interpret.VARIABLES] = dataset.matrix.ctypes.data
        job[cpu_interpret.VARIABLE_PITCH] = layout.rows * layout.dtype.itemsize
        job[cpu_interpret.VECTORS] = batch.vectors
        job[cpu_interpret.ROW_START], job[cpu_interpret.ROW_STOP] = rows
        job[cpu_interpret.BLOCK] = block
        if outputs.values is not None:
            job[cpu_interpret.VALUES] = outputs.values.ctypes.data
        if outputs.losses is not None and evaluation.loss is not None:
            job[cpu_interpret.LOSS_KERNEL] = kernels.losses[_loss_kernel(evaluation.loss, dataset)]
            for entry, column in (
                (cpu_interpret.TARGET_ROWS, dataset.target),
                (cpu_interpret.WEIGHT_ROWS, dataset.weights),
            ):
                job[entry] = 0 if column is None else column.ctypes.data
        return _Work(
            interpret=self._compiled.interpret,
            arguments=(
                job,
                kernels.addresses,
                lowered,
                np.ascontiguousarray(batch.parameters),
                batch.parameter_starts,
            ),
            pieces=pieces,
            spans=spans,
            vectors=batch.vectors,
            cost=cost,
            rows=rows,
            cancelled=outputs.cancelled,
            partial=np.zeros((len(spans), len(batch) * batch.vectors)),
        )


@dataclass(slots=True, eq=False)
class _Work:
    """One evaluation cut into pieces, which threads take one after the other."""

    interpret: Any
    arguments: tuple[Any, ...]
    pieces: list[tuple[int, int]]
    """Cell ranges; piece i is cell range i // spans over span i % spans."""
    spans: list[tuple[int, int]]
    vectors: int
    cost: int
    rows: tuple[int, int]
    cancelled: NDArray[np.uint8]
    partial: NDArray[np.float64]
    """Loss sums, [spans, cells]."""
    reported: int = 0
    """Programs that were announced as ready, by the calling thread alone."""
    _next: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _done: set[int] = field(default_factory=set)
    _finished: int = 0

    def run(self, ready: Any = None) -> None:
        """Take pieces until none is left; the caller's thread reports what is ready."""
        while (piece := self._take()) is not None:
            group, span = divmod(piece, len(self.spans))
            finished = self.interpret(
                *self.arguments,
                self.pieces[group],
                self.spans[span],
                self.cancelled,
                self.partial[span],
            )
            if not finished:
                self.stop()
                return
            programs = self._finish(piece)
            if ready is not None and programs > self.reported:
                self.reported = programs
                ready(programs)

    def stop(self) -> None:
        """Give out no more pieces."""
        with self._lock:
            self._next = len(self.pieces) * len(self.spans)

    def _take(self) -> int | None:
        with self._lock:
            if self._next >= len(self.pieces) * len(self.spans):
                return None
            self._next += 1
            return self._next - 1

    def _finish(self, piece: int) -> int:
        """Note that a piece is finished; return how many programs are, from the first."""
        with self._lock:
            self._done.add(piece)
            while self._finished in self._done:
                self._done.remove(self._finished)
                self._finished += 1
            groups = self._finished // len(self.spans)
            return self.pieces[groups - 1][1] // self.vectors if groups else 0


def _processor() -> str:
    """Model of the CPU as Linux names it, else the architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _spans(rows: tuple[int, int], block: int) -> list[tuple[int, int]]:
    """Cut the rows into spans of whole blocks, in a way that depends on the rows alone."""
    start, stop = rows
    blocks = -(-(stop - start) // block)
    length = max(_SPAN_BLOCKS, -(-blocks // _MOST_SPANS)) * block
    return [(first, min(first + length, stop)) for first in range(start, stop, length)]


def _pieces(
    lowered: Lowered, vectors: int, rows: tuple[int, int], spans: list[tuple[int, int]]
) -> tuple[list[tuple[int, int]], int]:
    """Cut the cells into ranges of about equal work; return them and the total of token-rows."""
    tokens = np.repeat(np.diff(lowered.starts), vectors)
    scalars = np.repeat(lowered.summaries[:, SCALARS], vectors)
    share = tokens * ((spans[0][1] - spans[0][0]) / _PIECE_WORK) + scalars / _PIECE_SCALARS
    group = np.cumsum(share).astype(np.int64)
    edges = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(tokens)]
    return list(itertools.pairwise(edges)), int(tokens.sum()) * (rows[1] - rows[0])


def _loss_kernel(loss: Loss, dataset: Dataset) -> str:
    term = "absolute" if loss is Loss.MAE else "squared"
    return term + ("_weighted" if dataset.layout.has_weights else "")


def _finish(
    loss: Loss, sums: NDArray[np.float64], dataset: Dataset, rows: tuple[int, int]
) -> NDArray[np.float64]:
    """Turn sums of terms into losses."""
    if loss is Loss.SSE:
        return sums
    used = slice(*rows)
    weights = None if dataset.weights is None else dataset.weights[used].astype(np.float64)
    total = float(rows[1] - rows[0]) if weights is None else weights.sum()
    with np.errstate(all="ignore"):
        if loss in (Loss.MSE, Loss.MAE):
            return np.asarray(sums / total)
        if loss is Loss.RMSE:
            return np.asarray(np.sqrt(sums / total))
        assert dataset.target is not None  # `Evaluation.check` saw to it
        target = dataset.target[used].astype(np.float64)
        mean = (target if weights is None else weights * target).sum() / total
        squares = np.square(target - mean)
        ratio = sums / (squares if weights is None else weights * squares).sum()
        return np.asarray(1.0 - ratio if loss is Loss.R2 else ratio)
