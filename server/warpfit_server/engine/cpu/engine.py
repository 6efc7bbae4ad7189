"""The CPU engine: a block interpreter in compiled code, on threads that do not share the GIL.

The simple form:

    for each program and parameter vector:
        for each block of 1,024 rows:
            for each instruction of the program: result[:] = operator(operands[:])
            store the values, add up the loss

The way through: `lower` turns the batch's tokens into instructions, `interpreter` runs them
in blocks, calling the loops that `kernels` generates from the operator table with the
functions of `elementary_functions`. Compiled code is kept on disk (`parts`, `kernel_cache`).
`evaluation` cuts the work into pieces, and a step is a parallel loop over some of them
(`parallel_loop`). Derivatives, custom losses and statistics take another way through,
`derivatives`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Dataset
from warpfit.errors import CancelledError, DatasetNotFoundError, ResourceExhaustedError
from warpfit.ir import Batch, Program
from warpfit.request import Evaluation, Loss, Timings
from warpfit_server.engine.autodiff.differentiate import Differentiated, RowLoss
from warpfit_server.engine.autodiff.requested_outputs import Wanted, room_for_curvatures, wanted_by
from warpfit_server.engine.cpu import derivatives, interpreter
from warpfit_server.engine.cpu.codegen import kernel_cache
from warpfit_server.engine.cpu.evaluation import (
    Programs,
    Work,
    differentiating,
    fill_job,
    flavour_of,
    lowering,
    sum_spans,
)
from warpfit_server.engine.cpu.threads import ParallelLoop
from warpfit_server.engine.interface import Device, Linearisation, Outputs, Steps, timed
from warpfit_server.engine.lowering.lower import Lowered
from warpfit_server.engine.lowering_cache import Recurring
from warpfit_server.engine.native.compile_processes import BACKGROUND
from warpfit_server.engine.validate import check_sound
from warpfit_server.system.compile_cache import default_cache_directory
from warpfit_server.system.resources import available_cores

#: Bytes of one intermediate result: what keeps a few of them in the first-level cache.
_BLOCK_BYTES: Final = 4096
#: Token-rows of a step for each thread, which take it about 4 ms.
_STEP_SIZE: Final = 20_000_000


class CpuEngine:
    """Evaluates batches on this machine's CPU; implements `interface.Engine`."""

    name = "cpu"
    steps_in_flight = 2

    def __init__(self, threads: int | None = None, cache_directory: Path | None = None) -> None:
        """Load the compiled code; the very first start on a machine compiles it.

        The code of derivatives is loaded, or compiled, while the engine serves.

        Args:
            threads: how many threads one evaluation may use; None for `available_cores`.
            cache_directory: where compiled code is kept; None for WARPFIT_CACHE_DIR or the user's
                cache directory. It may be read-only, shared or missing.

        """
        self.threads = threads or available_cores()
        self.step_size = _STEP_SIZE * self.threads
        directory = cache_directory or default_cache_directory()
        self._compiled = kernel_cache.load(directory, processes=self.threads)
        self._directory = directory
        self._derivatives = self._load_derivatives()
        self._datasets: dict[bytes, Dataset] = {}
        self._loop = ParallelLoop(self.threads, self._compiled.parallel)
        self._programs: Recurring[Programs] = Recurring()
        self._plans: Recurring[derivatives.Plan] = Recurring()

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

    def counters(self) -> Mapping[str, float]:
        """Return nothing: no code is compiled for a batch."""
        return {}

    def close(self) -> None:
        """Stop the threads."""
        self._loop.close()
        self._datasets.clear()
        self._programs.clear()
        self._plans.clear()

    def gains_from_merging(self, evaluation: Evaluation) -> bool:
        """Programs that come again alone are not lowered again, unless they are merged."""
        dataset = self._dataset(evaluation)
        return not self._programs.is_kept(evaluation.batch, (dataset.layout.variables,))

    def evaluate(self, evaluation: Evaluation, outputs: Outputs) -> Steps[Timings]:
        """Evaluate a batch into ``outputs``; see `interface.Engine`."""
        dataset = self._dataset(evaluation)
        derives = derivatives.needs_derivatives(evaluation, outputs)
        way = self._derive if derives else self._evaluate
        with _memory_errors():
            _, compute = yield from timed(way(dataset, evaluation, outputs))
        return Timings(compute=compute)

    def linearise(
        self,
        evaluation: Evaluation,
        row_loss: Program,
        *,
        curvature: bool,
        cancelled: NDArray[np.uint8],
    ) -> Steps[Linearisation]:
        """Compute losses, gradients and curvatures in one pass; see `interface.Engine`."""
        dataset, batch = self._dataset(evaluation), evaluation.batch
        losses = np.empty((len(batch), batch.vectors))
        gradients = np.empty(len(batch.parameters))
        wanted = Wanted(losses=losses, gradients=gradients, row_loss=row_loss)
        if curvature:
            wanted = replace(wanted, curvatures=room_for_curvatures(batch))
        with _memory_errors():
            compiled = yield from self._for_derivatives()
            planned = self._planned(compiled, dataset, evaluation, wanted, cancelled)
            plan = self._plans.of_arrays(batch, *planned)
            derivation = derivatives.prepare(compiled, plan, dataset, evaluation, wanted, cancelled)
            yield from self._run(derivation.work)
            derivation.finish()
        return Linearisation(losses, gradients, wanted.curvatures)

    def _dataset(self, evaluation: Evaluation) -> Dataset:
        dataset = self._datasets.get(evaluation.dataset_id)
        if dataset is None:
            raise DatasetNotFoundError
        return dataset

    def _run(self, work: Work, outputs: Outputs | None = None) -> Steps[None]:
        """Run all pieces of the work, and tell which values are final after each step."""
        has_values = outputs is not None and (
            outputs.values is not None or outputs.jacobian is not None
        )
        size = max(1, work.pieces * self.step_size // max(1, work.cost))
        reported = 0
        for first in range(0, work.pieces, size):
            if first:
                yield None
            stop = min(first + size, work.pieces)
            self._loop.run(work, first, stop)
            if work.cancelled[0]:
                raise CancelledError("the evaluation was cancelled", "CANCELLED")
            if outputs is not None and has_values and work.programs_finished(stop) > reported:
                reported = work.programs_finished(stop)
                outputs.ready(reported)

    def _run_at_once(self, work: Work) -> None:
        """Run all pieces of the work in one step."""
        self._loop.run(work, 0, work.pieces)
        if work.cancelled[0]:
            raise CancelledError("the evaluation was cancelled", "CANCELLED")

    def _for_derivatives(self) -> Steps[kernel_cache.Derivatives]:
        """Wait for the code of derivatives, which is loaded after the engine has begun to serve."""
        loading = self._derivatives
        if loading.done() and loading.exception() is not None:  # what was lacking may be there now
            loading = self._derivatives = self._load_derivatives()
        if not loading.done():
            yield loading
        return loading.result()

    def _load_derivatives(self) -> Future[kernel_cache.Derivatives]:
        return BACKGROUND.submit(
            kernel_cache.load_derivatives, self._directory, self._compiled, self.threads
        )

    def _planned(
        self,
        compiled: kernel_cache.Derivatives,
        dataset: Dataset,
        evaluation: Evaluation,
        wanted: Wanted,
        cancelled: NDArray[np.uint8],
    ) -> tuple[tuple[Hashable, ...], Callable[[Batch], derivatives.Plan]]:
        """What a plan needs beside the programs, and what makes it of them."""

        def make(batch: Batch) -> derivatives.Plan:
            check_sound(evaluation.batch, dataset.layout.variables)
            problem = replace(evaluation, batch=batch)

            def both(programs: Batch, row_loss: RowLoss, wishes: int) -> Differentiated:
                work, lowered = differentiating(
                    compiled.differentiate, programs, row_loss, wishes, cancelled
                )
                self._run_at_once(work)
                return lowered

            def lower(programs: Batch) -> Lowered:
                return self._lower(programs, cancelled).lowered

            return derivatives.make_plan(both, lower, dataset, problem, wanted)

        return derivatives.plan_needs(dataset, evaluation, wanted), make

    def _derive(self, dataset: Dataset, evaluation: Evaluation, outputs: Outputs) -> Steps[None]:
        compiled, cancelled = (yield from self._for_derivatives()), outputs.cancelled
        wanted = wanted_by(evaluation, outputs)
        planned = self._planned(compiled, dataset, evaluation, wanted, cancelled)
        plan = self._plans.of_programs(evaluation.batch, *planned)
        derivation = derivatives.prepare(compiled, plan, dataset, evaluation, wanted, cancelled)
        yield from self._run(derivation.work, outputs)
        derivation.finish()

    def _lower(self, programs: Batch, cancelled: NDArray[np.uint8]) -> Programs:
        work, lowered = lowering(self._compiled.lower, programs, cancelled)
        self._run_at_once(work)
        return Programs(lowered)

    def _evaluate(self, dataset: Dataset, evaluation: Evaluation, outputs: Outputs) -> Steps[None]:
        layout, batch = dataset.layout, evaluation.batch

        def lower(programs: Batch) -> Programs:
            check_sound(batch, layout.variables)
            return self._lower(programs, outputs.cancelled)

        programs = self._programs.of_programs(batch, (layout.variables,), lower)
        kernels = self._compiled.kernels[flavour_of(layout, evaluation.precision)]
        rows = evaluation.row_range(layout)
        block = _BLOCK_BYTES // layout.dtype.itemsize
        spans, cells, cost = programs.cut(batch.vectors, rows, block)
        job = np.zeros(interpreter.JOB_ENTRIES, dtype=np.int64)
        fill_job(job, dataset, evaluation, outputs.values, block)
        if outputs.losses is not None and evaluation.loss is not None:
            job[interpreter.LOSS_KERNEL] = kernels.losses[_loss_kernel(evaluation.loss, dataset)]
        sums = np.zeros((len(spans), len(batch) * batch.vectors))
        parameters, starts = np.ascontiguousarray(batch.parameters), batch.parameter_starts
        given = (job, kernels.addresses, cells, spans, parameters, starts, outputs.cancelled)
        arrays = (*given, *programs.lowered, sums)
        function = self._compiled.interpret
        work = Work(function, arrays, cells, spans, batch.vectors, cost, outputs.cancelled)
        yield from self._run(work, outputs)
        if outputs.losses is not None and evaluation.loss is not None:
            outputs.losses.reshape(-1)[:] = sum_spans(sums)


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
