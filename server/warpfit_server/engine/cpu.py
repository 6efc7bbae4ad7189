"""The CPU engine: a block interpreter in compiled code, on threads that do not share the GIL.

The simple form:

    for each program and parameter vector:
        for each block of 1,024 rows:
            for each instruction of the program: result[:] = operator(operands[:])
            store the values, add up the loss

The way through: `cpu_lower` turns the batch's tokens into instructions, `cpu_interpret` runs them
in blocks, calling the loops that `cpu_kernels` generates from the operator table with the
functions of `cpu_math`. Compiled code is kept on disk (`cpu_code`, `cpu_cache`). `cpu_work` cuts
the work into pieces, which threads choose and take in compiled code (`cpu_board`). What needs
derivatives, losses of one's own or statistics takes another way through, `cpu_derive`.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.errors import CancelledError, DatasetNotFoundError, ResourceExhaustedError
from warpfit.ir import Batch, Program
from warpfit.losses import BUILT_IN, TargetStatistics, close_losses
from warpfit.request import Evaluation, Loss, Timings
from warpfit_server.code_cache import default_cache_directory
from warpfit_server.engine import cpu_cache, cpu_derive, cpu_interpret
from warpfit_server.engine.base import Device, Linearisation, Outputs
from warpfit_server.engine.cpu_helpers import Helpers
from warpfit_server.engine.cpu_lower import Lowered
from warpfit_server.engine.cpu_work import (
    Programs,
    Work,
    differentiating,
    fill_job,
    flavour_of,
    lowering,
    sum_spans,
)
from warpfit_server.engine.differentiate import Differentiated, RowLoss
from warpfit_server.engine.recurring import Recurring
from warpfit_server.engine.sound import check_sound
from warpfit_server.engine.wanted import Wanted, room_for_curvatures, wanted_by
from warpfit_server.fairness import FairGate, Turn, current_turn
from warpfit_server.resources import available_cores

#: Bytes of one intermediate result: what keeps a few of them in the first-level cache.
_BLOCK_BYTES: Final = 4096
#: Token-rows for each thread that take it some 1 ms.
_LARGE_WORK: Final = 5_000_000
#: Passes of fits at a time: one computes while the other is prepared, which is Python's. With more
#: of them everybody would wait for Python's lock.
_PASSES: Final = 2


class CpuEngine:
    """Evaluates batches on this machine's CPU; implements `base.Engine`."""

    name = "cpu"

    def __init__(self, threads: int | None = None, cache_directory: Path | None = None) -> None:
        """Load the compiled code; the very first start on a machine compiles it.

        Args:
            threads: how many threads one evaluation may use; None for `available_cores`.
            cache_directory: where compiled code is kept; None for WARPFIT_CACHE_DIR or the user's
                cache directory. It may be read-only, shared or missing.

        """
        self.threads = threads or available_cores()
        self.concurrency = self.threads
        directory = cache_directory or default_cache_directory()
        self._compiled = cpu_cache.load(directory, processes=self.threads)
        self._datasets: dict[bytes, Dataset] = {}
        self._helpers = Helpers(self.threads, self._compiled.board)
        self._passes = FairGate(_PASSES)
        self._programs: Recurring[Programs] = Recurring()
        self._plans: Recurring[cpu_derive.Plan] = Recurring()

    def devices(self) -> list[Device]:
        """Describe the CPU."""
        name = _processor()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return [Device(name=name, threads=self.threads, memory=memory)]

    def places(self, token_rows: int, *, fit: bool) -> int:
        """None for fits: evaluations should not wait for their ends.

        A third for what occupies all threads: more of it at a time would evict each other.
        """
        if fit:
            return 0
        is_large = token_rows > _LARGE_WORK * self.threads
        return max(1, self.concurrency // 3) if is_large else 1

    def load(self, dataset: Dataset) -> None:
        """Keep a data set; its arrays are used in place."""
        self._datasets[dataset.content_id] = dataset

    def unload(self, content_id: bytes) -> None:
        """Forget a data set."""
        self._datasets.pop(content_id, None)

    def counters(self) -> Mapping[str, float]:
        """Return nothing: all code is compiled before the engine starts."""
        return {}

    def close(self) -> None:
        """Stop the threads."""
        self._helpers.close()
        self._datasets.clear()
        self._programs.clear()
        self._plans.clear()

    def evaluate(self, evaluation: Evaluation, outputs: Outputs) -> Timings:
        """Evaluate a batch into ``outputs``; see `base.Engine`."""
        dataset = self._dataset(evaluation)
        start = time.perf_counter_ns()
        with _memory_errors():
            if cpu_derive.needs_derivatives(evaluation, outputs):
                self._derive(dataset, evaluation, outputs)
            else:
                self._evaluate(dataset, evaluation, outputs)
        return Timings(compute=time.perf_counter_ns() - start)

    def linearise(
        self,
        evaluation: Evaluation,
        row_loss: Program,
        *,
        curvature: bool,
        cancelled: NDArray[np.uint8],
    ) -> Linearisation:
        """Compute losses, gradients and curvatures in one pass; see `base.Engine`."""
        dataset, batch = self._dataset(evaluation), evaluation.batch
        losses = np.empty((len(batch), batch.vectors))
        gradients = np.empty(len(batch.parameters))
        wanted = Wanted(losses=losses, gradients=gradients, row_loss=row_loss)
        if curvature:
            wanted = replace(wanted, curvatures=room_for_curvatures(batch))
        turn = current_turn()
        with self._passes.turn(turn.tenant, cancelled=cancelled), _memory_errors():
            planned = self._planned(dataset, evaluation, wanted, cancelled)
            plan = self._plans.of_arrays(batch, *planned)
            derivation = cpu_derive.prepare(
                self._compiled, plan, dataset, evaluation, wanted, cancelled
            )
            self._run(derivation.work, turn)
            derivation.finish()
        return Linearisation(losses, gradients, wanted.curvatures)

    def _dataset(self, evaluation: Evaluation) -> Dataset:
        dataset = self._datasets.get(evaluation.dataset_id)
        if dataset is None:
            raise DatasetNotFoundError(
                "the data set is not loaded", "DATASET_NOT_FOUND", "Upload it again", "dataset_id"
            )
        return dataset

    def _run(self, work: Work, turn: Turn, outputs: Outputs | None = None) -> None:
        """Do the work; tell which values are ready if there are any."""
        ready = None
        if outputs is not None and (outputs.values is not None or outputs.jacobian is not None):
            ready = outputs.ready
        self._helpers.run(work, turn, ready)
        if work.cancelled[0]:
            raise CancelledError("the evaluation was cancelled", "CANCELLED")

    def _planned(
        self,
        dataset: Dataset,
        evaluation: Evaluation,
        wanted: Wanted,
        cancelled: NDArray[np.uint8],
    ) -> tuple[tuple[Hashable, ...], Callable[[Batch], cpu_derive.Plan]]:
        """What a plan needs beside the programs, and what makes it of them."""

        def make(batch: Batch) -> cpu_derive.Plan:
            check_sound(evaluation.batch, dataset.layout.variables)
            problem = replace(evaluation, batch=batch)
            both = partial(self._differentiate, cancelled=cancelled)

            def lower(programs: Batch) -> Lowered:
                return self._lower(programs, cancelled).lowered

            return cpu_derive.make_plan(both, lower, dataset, problem, wanted)

        return cpu_derive.plan_needs(dataset, evaluation, wanted), make

    def _derive(self, dataset: Dataset, evaluation: Evaluation, outputs: Outputs) -> None:
        wanted = wanted_by(evaluation, outputs)
        planned = self._planned(dataset, evaluation, wanted, outputs.cancelled)
        plan = self._plans.of_programs(evaluation.batch, *planned)
        derivation = cpu_derive.prepare(
            self._compiled, plan, dataset, evaluation, wanted, outputs.cancelled
        )
        self._run(derivation.work, current_turn(), outputs)
        derivation.finish()
        if outputs.losses is not None and evaluation.loss is not None:
            rows = evaluation.row_range(dataset.layout)
            outputs.losses[...] = _closed(evaluation.loss, outputs.losses, dataset, rows)
        if derivation.work.reported < len(evaluation.batch):
            outputs.ready(len(evaluation.batch))

    def _lower(self, batch: Batch, cancelled: NDArray[np.uint8]) -> Programs:
        work, lowered = lowering(self._compiled.lower, batch, cancelled)
        self._run(work, current_turn())
        return Programs(lowered)

    def _differentiate(
        self, batch: Batch, row_loss: RowLoss, wishes: int, cancelled: NDArray[np.uint8]
    ) -> Differentiated:
        function = self._compiled.differentiate
        work, lowered = differentiating(function, batch, row_loss, wishes, cancelled)
        self._run(work, current_turn())
        return lowered

    def _evaluate(self, dataset: Dataset, evaluation: Evaluation, outputs: Outputs) -> None:
        layout, batch = dataset.layout, evaluation.batch

        def lower(programs: Batch) -> Programs:
            check_sound(batch, layout.variables)
            return self._lower(programs, outputs.cancelled)

        programs = self._programs.of_programs(batch, (layout.variables,), lower)
        kernels = self._compiled.kernels[flavour_of(layout, evaluation.precision)]
        rows = evaluation.row_range(layout)
        block = _BLOCK_BYTES // layout.dtype.itemsize
        spans, cells, cost = programs.cut(batch.vectors, rows, block)
        job = np.zeros(cpu_interpret.JOB_ENTRIES, dtype=np.int64)
        fill_job(job, dataset, evaluation, outputs.values, block)
        if outputs.losses is not None and evaluation.loss is not None:
            job[cpu_interpret.LOSS_KERNEL] = kernels.losses[_loss_kernel(evaluation.loss, dataset)]
        sums = np.zeros((len(spans), len(batch) * batch.vectors))
        parameters, starts = np.ascontiguousarray(batch.parameters), batch.parameter_starts
        given = (job, kernels.addresses, cells, spans, parameters, starts, outputs.cancelled)
        arrays = (*given, *programs.lowered, sums)
        function = self._compiled.interpret
        work = Work(function, arrays, cells, spans, batch.vectors, cost, outputs.cancelled)
        self._run(work, current_turn(), outputs)
        if outputs.losses is not None and evaluation.loss is not None:
            flat = outputs.losses.reshape(-1)
            flat[:] = _closed(evaluation.loss, sum_spans(sums), dataset, rows)
        if work.reported < len(batch):
            outputs.ready(len(batch))


@contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise ResourceExhaustedError(
            "the CPU engine is out of memory", "OUT_OF_MEMORY", "Send smaller batches"
        ) from error


def _processor() -> str:
    """Model of the CPU as Linux names it, else the architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _loss_kernel(loss: Loss, dataset: Dataset) -> str:
    term = "absolute" if loss is Loss.MAE else "squared"
    return term + ("_weighted" if dataset.layout.has_weights else "")


def _closed(
    loss: Loss, sums: NDArray[np.float64], dataset: Dataset, rows: tuple[int, int]
) -> NDArray[np.float64]:
    """Turn sums of terms into losses."""
    statistics = TargetStatistics.of_rows(dataset, slice(*rows))
    return close_losses(BUILT_IN[loss].closing, sums, statistics)
