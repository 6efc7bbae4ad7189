"""The compiled tier: expressions as machine code of their own, launched as one CUDA graph."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from warpfit.errors import ResourceExhaustedError
from warpfit.request import Evaluation, Loss, Tier, Timings
from warpfit_server.engine.cuda.jit.graph import (
    CapturedGraph,
    GraphCapturer,
    GraphKey,
    GraphLayout,
    row_arguments,
)
from warpfit_server.engine.cuda.jit.graph_launch import replay_losses
from warpfit_server.engine.cuda.jit.kernel_interface import MAX_BLOCK_ROWS, block_rows
from warpfit_server.engine.cuda.jit.kernel_plan import (
    CompiledTuning,
    KernelPlan,
    KernelPlanner,
    fingerprint,
)
from warpfit_server.engine.cuda.jit.kernel_store import Kernel, KernelKey, KernelStore
from warpfit_server.engine.cuda.math.modes import max_token_rows
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.resident_data import (
    RESULTS_SHARE,
    ROW_MULTIPLE,
    ResidentDataset,
    check_cancelled,
    cut_rows,
)
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.interface import Outputs, Steps
from warpfit_server.engine.sum_tree import sum_nodes

#: Most parameter vectors of one launch: the limit of a grid's second dimension.
MAX_VECTORS: Final = 65_535
#: Longest expression that is compiled; compile time grows faster than the length.
MAX_TOKENS: Final = 2_000
#: Most parameters of an expression that is compiled with its gradient, an accumulator each.
MAX_PARAMETERS: Final = 64
#: Least rows of a launch if rows are cut, so that its kernels have enough of them.
_MIN_ROWS: Final = 1 << 16
#: Attempts to load all kernels of a batch before the cache is reported as too small.
_ATTEMPTS: Final = 3


class CompiledTier:
    """Evaluates batches by kernels compiled for their expressions.

    `loaded` returns whether all kernels of an evaluation are loaded; `request_compile` has missing
    ones compiled in the background; `evaluate` compiles them first if it must.

    Args:
        device: the device.
        kernels: where kernels come from.
        tuning: layout of the work.
    """

    def __init__(
        self, device: CudaDevice, kernels: KernelStore, tuning: CompiledTuning | None = None
    ) -> None:
        self._device = device
        self._kernels = kernels
        self._tuning = tuning or CompiledTuning()
        self._capturer = GraphCapturer(device)
        self._lock = threading.Lock()
        self._idle_graphs: LRUCache[GraphKey, list[CapturedGraph]] = LRUCache(self._tuning.graphs)
        self._planner = KernelPlanner(kernels, self._tuning)

    def supports(self, evaluation: Evaluation) -> bool:
        """Return whether this tier can take the evaluation at all."""
        batch = evaluation.batch
        if evaluation.gradient and int(batch.parameter_counts.max()) > MAX_PARAMETERS:
            return False
        return batch.vectors <= MAX_VECTORS and int(batch.lengths.max()) <= MAX_TOKENS

    def loaded(
        self, resident: ResidentDataset, evaluation: Evaluation, token_hash: int
    ) -> KernelPlan | None:
        """Return the plan of an evaluation if all its kernels are loaded, else None.

        ``token_hash`` is the `fingerprint` of its batch.
        """
        plan = self._planner.find(resident, evaluation, token_hash)
        if plan is None:
            return None
        key = self._graph_key(plan, resident, evaluation)
        with self._lock:
            if self._idle_graphs.get(key):  # a graph keeps its kernels loaded
                return plan
        return plan if all(kernel in self._kernels.cache for kernel in plan.keys) else None

    def request_compile(self, resident: ResidentDataset, evaluation: Evaluation) -> None:
        """Have the missing kernels compiled in the background; return at once."""
        self._kernels.request(self.plan(resident, evaluation).keys)

    def evaluate(
        self,
        resident: ResidentDataset,
        evaluation: Evaluation,
        outputs: Outputs,
        plan: KernelPlan | None = None,
    ) -> Steps[Timings]:
        """Evaluate as `warpfit_server.engine.interface.Engine.evaluate` does.

        Args:
            resident: the data set.
            evaluation: what is wanted.
            outputs: to fill.
            plan: from `loaded`, if that was called.

        Raises:
            ProgramError: for the first bad token.
            CancelledError: if ``outputs.cancelled`` became 1.
            ResourceExhaustedError: if this tier does not support the evaluation, or the cache of
                kernels or device memory is short.
        """
        started = time.perf_counter_ns()
        check_cancelled(outputs.cancelled)
        if plan is None:
            self._check_supported(evaluation)
            plan = self.plan(resident, evaluation)
        key = self._graph_key(plan, resident, evaluation)
        graph = self._take_idle(key)
        is_hit = graph is not None or all(kernel in self._kernels.cache for kernel in plan.keys)
        hits = len(evaluation.batch) * is_hit
        graph = graph or (yield from self._capture(key, plan))
        work = (graph, plan, resident, evaluation, outputs, started, hits)
        try:
            start, stop = evaluation.row_range(resident.dataset.layout)
            most = self._rows_per_launch(plan, resident, evaluation)
            is_whole = stop - start <= most and not resident.is_streamed
            if evaluation.loss is not None and not evaluation.values and is_whole:
                return self._run_at_once(*work)
            return (yield from self._run_chunks(*work))
        finally:
            self._keep_idle(graph)

    def counters(self) -> Mapping[str, float]:
        """Return the figures of the caches; see `interface.COUNTERS`."""
        return self._kernels.counters()

    def close(self) -> None:
        """Free the captured graphs and unload the kernels."""
        self._drop_idle()
        self._kernels.close()

    def plan(self, resident: ResidentDataset, evaluation: Evaluation) -> KernelPlan:
        """Return the plan of an evaluation, from the cache if it is there."""
        token_hash = fingerprint(evaluation.batch)
        found = self._planner.find(resident, evaluation, token_hash)
        return found or self._planner.plan(resident, evaluation, token_hash)

    def _check_supported(self, evaluation: Evaluation) -> None:
        if not self.supports(evaluation):
            raise ResourceExhaustedError(
                f"the compiled tier takes at most {MAX_VECTORS} parameter vectors and expressions "
                f"of at most {MAX_TOKENS} tokens, for gradients with {MAX_PARAMETERS} parameters",
                "NOT_COMPILABLE",
                "Ask for the interpreter",
                "tier",
            )

    def _graph_key(
        self, plan: KernelPlan, resident: ResidentDataset, evaluation: Evaluation
    ) -> GraphKey:
        start, stop = evaluation.row_range(resident.dataset.layout)
        rows = min(self._rows_per_launch(plan, resident, evaluation), stop - start)
        # A kernel has at most one block of threads for each block of rows.
        block = _block_rows(plan, resident, evaluation)
        most = -(-(start % block + rows) // block)
        total = plan.layout.blocks * self._device.multiprocessors
        vectors = evaluation.batch.vectors
        with self._lock:
            blocks = plan.blocks(vectors, most, total)
        return plan.name, vectors, blocks

    def _take_idle(self, key: GraphKey) -> CapturedGraph | None:
        with self._lock:
            idle = self._idle_graphs.get(key)
            return idle.pop() if idle else None

    def _capture(self, key: GraphKey, plan: KernelPlan) -> Steps[CapturedGraph]:
        """Capture a graph; its kernels are compiled first if they are missing."""
        _, vectors, blocks = key
        kernels = yield from self._lease(plan.keys)
        self._device.use()
        layout = GraphLayout(
            firsts=plan.firsts,
            input_starts=plan.shapes.input_starts,
            sum_starts=plan.sum_starts,
            vectors=vectors,
            dtype=plan.mode.dtype,
            blocks=blocks,
            threads=plan.output.threads,
        )
        try:
            return CapturedGraph(self._device, key, plan.keys, kernels, self._capturer, layout)
        except BaseException:
            self._kernels.release(plan.keys)
            raise

    def _lease(self, keys: Sequence[KernelKey]) -> Steps[list[Kernel]]:
        """Take all kernels into use; missing ones are compiled first.

        Raises:
            ResourceExhaustedError: if they do not fit in the cache next to those of other graphs.
        """
        for _ in range(_ATTEMPTS):
            kernels = self._kernels.lease(keys)
            if kernels is not None:
                return kernels
            made = self._kernels.request(keys, priority=0)
            yield made
            made.result()
            # Kernels in use count against the cache's bounds: idle graphs must make room for these.
            if not all(kernel in self._kernels.cache for kernel in keys):
                self._drop_idle()
        raise ResourceExhaustedError(
            f"{len(keys)} kernels do not fit into the cache of compiled kernels",
            "KERNEL_CACHE_FULL",
            "Ask for the interpreter, or send smaller batches",
            "tier",
            needed=len(keys),
        )

    def _drop_idle(self) -> None:
        with self._lock:
            graphs = [graph for idle in self._idle_graphs.values() for graph in idle]
            self._idle_graphs.clear()
        for graph in graphs:
            self._kernels.release(graph.kernel_keys)

    def _keep_idle(self, graph: CapturedGraph) -> None:
        """Keep a graph for the next evaluation with the same key."""
        dropped: list[CapturedGraph] = []
        with self._lock:
            idle = self._idle_graphs.get(graph.key)
            if idle is None:
                while len(self._idle_graphs) >= self._tuning.graphs:
                    dropped += self._idle_graphs.popitem()[1]
                idle = self._idle_graphs[graph.key] = []
            idle.append(graph)
        for old in dropped:
            self._kernels.release(old.kernel_keys)

    def _run_at_once(
        self,
        graph: CapturedGraph,
        plan: KernelPlan,
        resident: ResidentDataset,
        evaluation: Evaluation,
        outputs: Outputs,
        started: int,
        cache_hits: int,
    ) -> Timings:
        """Compute losses, and gradients if they are wanted, by one command list."""
        with self._device.stream() as context:
            timings = replay_losses(
                *(context, graph, plan.shapes.sources, resident, evaluation),
                *(_block_rows(plan, resident, evaluation), outputs, started, cache_hits),
            )
        if outputs.gradients is not None:
            sums = graph.sums.reshape(-1, evaluation.batch.vectors)
            _fill_gradients(plan, evaluation, sums, outputs.gradients)
        outputs.ready(len(evaluation.batch))
        return timings

    def _run_chunks(
        self,
        graph: CapturedGraph,
        plan: KernelPlan,
        resident: ResidentDataset,
        evaluation: Evaluation,
        outputs: Outputs,
        started: int,
        cache_hits: int,
    ) -> Steps[Timings]:
        """Launch the graph for each chunk of rows, and copy its results before the next."""
        programs, vectors, _ = evaluation.shape(resident.dataset.layout)
        start, stop = evaluation.row_range(resident.dataset.layout)
        chunk = self._rows_per_launch(plan, resident, evaluation)
        spans = cut_rows((start, stop), chunk)
        block, nodes = _block_rows(plan, resident, evaluation), []
        plan.shapes.fill(evaluation.batch, graph.inputs)
        launched, computed = time.perf_counter_ns(), 0
        with (
            self._device.stream() as context,
            resident.windows(spans, context, outputs.cancelled) as next_window,
        ):
            graph.place_partials(context, min(stop - start, chunk) // block + 2)
            for first, last in spans:
                window = yield from next_window()
                check_cancelled(outputs.cancelled)
                arguments = row_arguments(window, first, last, block)
                pitch = _pitch(first, last, plan.mode.dtype.itemsize)
                if evaluation.values:
                    arguments["pitch"] = pitch
                    arguments["values"] = (
                        context.buffer("compiled values", programs * vectors * pitch)
                        + first % ROW_MULTIPLE * plan.mode.dtype.itemsize
                    )
                graph.set_arguments(arguments)
                context.mark("start")
                graph.launch(context)
                context.mark("computed")
                if outputs.values is not None:
                    part = outputs.values.reshape(programs * vectors, -1)
                    _copy_values(context, arguments, part[:, first - start : last - start])
                context.stream.synchronize()
                computed += context.nanoseconds("start", "computed")
                nodes.append(graph.sums.copy())
                if last < stop:
                    yield None
                    self._device.use()
        if outputs.losses is not None and evaluation.loss is not None:
            shaped = sum_nodes(np.stack(nodes), start // chunk).reshape(-1, vectors)
            outputs.losses[...] = shaped[plan.sum_starts[:-1]]
            if outputs.gradients is not None:
                _fill_gradients(plan, evaluation, shaped, outputs.gradients)
        outputs.ready(programs)
        return Timings(
            copy_in=launched - started,
            compute=computed,
            copy_out=max(0, time.perf_counter_ns() - launched - computed),
            tier=Tier.COMPILED,
            cache_hits=cache_hits,
        )

    def _rows_per_launch(
        self, plan: KernelPlan, resident: ResidentDataset, evaluation: Evaluation
    ) -> int:
        """Return the rows of one launch: a power of two, not less than those of a block."""
        batch, mode = evaluation.batch, plan.mode
        if evaluation.values:
            size = min(self._tuning.chunk_bytes, int(self._device.memory_limit * RESULTS_SHARE))
            rows = size // (len(batch) * batch.vectors * mode.dtype.itemsize)
            most = 1 << (max(rows, MAX_BLOCK_ROWS).bit_length() - 1)
            return int(min(most, resident.window_rows))
        start, stop = evaluation.row_range(resident.dataset.layout)
        token_rows = evaluation.token_rows(resident.dataset.layout)
        launches = token_rows // max_token_rows(mode, self._device.multiprocessors)
        most = max(1, (stop - start) // _MIN_ROWS)
        rows = -(-(stop - start) // min(max(1, launches), most))
        return int(min(1 << (max(rows, MAX_BLOCK_ROWS) - 1).bit_length(), resident.window_rows))


def _block_rows(plan: KernelPlan, resident: ResidentDataset, evaluation: Evaluation) -> int:
    start, stop = evaluation.row_range(resident.dataset.layout)
    return block_rows(plan.output, stop - start)


def _fill_gradients(
    plan: KernelPlan,
    evaluation: Evaluation,
    sums: NDArray[np.float64],
    gradients: NDArray[np.float64],
) -> None:
    """Copy sums of derivatives, [sums, K], to the order of `Batch.parameters`."""
    batch = evaluation.batch
    programs, parameters = plan.shapes.parameter_places(batch)
    counts = batch.parameter_counts.astype(np.int64)[programs]
    firsts = batch.parameter_starts[:-1][programs] + parameters
    places = firsts[:, np.newaxis] + counts[:, np.newaxis] * np.arange(batch.vectors)
    gradients[:] = 0.0  # for parameters that the expression does not contain
    scale = 1.0 if evaluation.loss is Loss.MAE else 2.0
    gradients[places] = scale * np.delete(sums, plan.sum_starts[:-1], axis=0)


def _pitch(first: int, last: int, itemsize: int) -> int:
    """Return the bytes of a program's values: whole memory lines, from an aligned row on."""
    rows = first % ROW_MULTIPLE + last - first
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE * itemsize


def _copy_values(
    context: StreamContext, arguments: Mapping[str, int], target: NDArray[Any]
) -> None:
    """Wait for the values [programs * K, rows] and copy them to the outputs."""
    memory = context.pinned("compiled values", target.size * target.itemsize)
    staging = memory.view(target.dtype).reshape(target.shape)
    context.download_rows(staging, arguments["values"], arguments["pitch"])
    context.stream.synchronize()
    target[...] = staging
