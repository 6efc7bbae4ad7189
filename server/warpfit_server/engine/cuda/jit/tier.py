"""The compiled tier: expressions as machine code of their own, launched as one CUDA graph.

A graph is captured for the kernels of one batch, with their buffers, and launched whenever the
batch comes again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from warpfit.errors import ResourceExhaustedError
from warpfit.request import Evaluation, Loss, Tier, Timings
from warpfit_server.engine.cuda.jit.kernel_store import (
    MAX_GRAPHS,
    MOST_BYTES,
    MOST_KERNELS,
    Kernel,
    KernelPlan,
    KernelStore,
    make_plan,
    plan_key,
)
from warpfit_server.engine.cuda.jit.renderer import (
    ARGUMENT_BYTES,
    ARGUMENT_OFFSETS,
    LINE_BYTES,
    MAX_BLOCK_ROWS,
    block_rows,
)
from warpfit_server.engine.cuda.runtime.compiler import CudaSource
from warpfit_server.engine.cuda.runtime.datasets import (
    ROW_MULTIPLE,
    ResidentDataset,
    TiledRows,
    check_cancelled,
    cut_rows,
    rows_that_fit,
    run_chunks,
)
from warpfit_server.engine.cuda.runtime.device import (
    LAUNCH_WORK,
    CudaDevice,
    StreamContext,
    wait_while_held,
)
from warpfit_server.engine.cuda.runtime.translation import NVRTC_PRECISE, sum_tree
from warpfit_server.engine.interface import Outputs, Steps
from warpfit_server.engine.sum_tree import sum_nodes

#: Most parallel branches of a graph; more take time to capture and gain nothing.
_BRANCHES: Final = 32
#: Bytes before the inputs in the block that a graph copies to the device.
_INPUTS_AT: Final = -(-ARGUMENT_BYTES // 256) * 256
#: Threads of a block that copies inputs, and bytes that each copies.
_COPY_THREADS: Final = 256
_COPY_BYTES: Final = 16
_SUM_THREADS: Final = 128
#: Most parameter vectors of one launch: the limit of a grid's second dimension.
MAX_VECTORS: Final = 65_535
#: Longest expression that is compiled; compile time grows faster than the length.
MAX_TOKENS: Final = 2_000
#: Most parameters of an expression that is compiled with its gradient, an accumulator each.
MAX_PARAMETERS: Final = 64
#: Least rows of a launch if rows are cut, so that its kernels have enough of them.
_MIN_ROWS: Final = 1 << 16
#: Most bytes of values that one launch leaves on the device.
_CHUNK_BYTES: Final = 256 << 20

# ---------------------------------------------------------------------------------------- graphs


def graph_source() -> CudaSource:
    """Return the kernel that adds up each job's partial sums, and that which copies the inputs.

    A kernel reads the inputs from the host's memory, because the device's copy engine works in
    order: there they would wait behind the rows of streamed data sets.
    """
    words = {name: offset // 8 for name, offset in ARGUMENT_OFFSETS.items()}
    source = f"""{sum_tree()}
extern "C" __global__ void sum_partials(const long long *request, double *sums, int warps) {{
  const long long count = request[{words["block_count"]}] * warps;
  double *own = (double *)request[{words["partials"]}] + blockIdx.x * count;
  sum_nodes(own, request[{words["first_block"]}] * warps, count, 1, 1, ALL_LEVELS);
  if (threadIdx.x == 0) sums[blockIdx.x] = one_nan(own[0]);
}}
extern "C" __global__ void copy_inputs(const int4 *source, int4 *target, int count) {{
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index < count) target[index] = source[index];
}}
"""
    return CudaSource(source, NVRTC_PRECISE)


#: Identifies a graph: hash of its kernels' keys, parameter vectors, blocks of each kernel.
GraphKey = tuple[bytes, int, tuple[int, ...]]


class GraphCapturer:
    """Captures graphs on a device; the streams and a kernel are used by one capture at a time."""

    def __init__(self, device: CudaDevice) -> None:
        module = graph_source().load(device)
        self.sum_partials = module.get_function("sum_partials")
        """Kernel that adds partial sums up."""
        self.copy_inputs = module.get_function("copy_inputs")
        """Kernel that copies arguments and inputs to the device."""
        self._device = device
        self._lock = threading.Lock()
        self._streams: list[Any] = []

    @contextmanager
    def streams(self) -> Iterator[list[Any]]:
        """Lend the stream that begins and ends a capture, and `_BRANCHES` others.

        Their priorities do not matter: a graph has that of the stream on which it is launched.
        """
        with self._lock:
            stream = self._device.cupy.cuda.Stream
            streams = self._streams or [stream(non_blocking=True) for _ in range(1 + _BRANCHES)]
            self._streams = []  # a capture that fails may leave them unusable
            yield streams
            self._streams = streams


def row_arguments(
    resident: ResidentDataset, first: int, last: int, block_rows: int
) -> dict[str, int]:
    """Return the arguments that depend on the data set and the rows ``first`` to ``last``."""
    layout, rows = resident.dataset.layout, TiledRows.cut((first, last), block_rows)
    return {
        "variables": resident.address(0, rows.aligned),
        "stride": resident.stride * layout.dtype.itemsize // LINE_BYTES,
        "target": resident.target_address(rows.aligned) if layout.has_target else 0,
        "weights": resident.weights_address(rows.aligned),
        "head": rows.first_row,
        "stop": rows.end_row,
        "block_rows": block_rows,
        "first_block": rows.first_tile,
        "block_count": rows.tiles,
    }


class CapturedGraph:
    """A captured graph with its own buffers, for one launch at a time.

    The graph copies arguments and inputs to the device, runs the kernels in parallel branches, and
    writes the sums of the partial sums to page-locked memory. Row ranges, data sets and parameters
    may change from launch to launch.
    """

    def __init__(
        self,
        device: CudaDevice,
        key: GraphKey,
        plan: KernelPlan,
        kernels: Sequence[Kernel],
        capturer: GraphCapturer,
    ) -> None:
        device.use()
        self.key = key
        self.plan = plan
        _, self._vectors, self._blocks = key
        self._threads = plan.output.threads
        self._kernels = tuple(kernels)
        self.code_bytes = sum(kernel.size for kernel in kernels)
        """Bytes of its kernels, which stay loaded as long as it is kept."""
        self._jobs = int(plan.sum_starts[-1]) * self._vectors
        cuda, dtype = device.cupy.cuda, plan.arithmetic.dtype
        inputs = int(plan.inputs.starts[-1])
        end = _INPUTS_AT + self._vectors * inputs * dtype.itemsize
        size = -(-end // _COPY_BYTES) * _COPY_BYTES
        self._device_block = device.allocate(size)
        pinned = cuda.alloc_pinned_memory(size)
        self._block = np.frombuffer(pinned, np.uint8, size)
        self._arguments = self._block[:ARGUMENT_BYTES].view(np.uint64)
        self.inputs = self._block[_INPUTS_AT:end].view(dtype).reshape(self._vectors, inputs)
        """Numbers that the next launch reads; [K, inputs]."""
        sums = cuda.alloc_pinned_memory(8 * max(1, self._jobs))
        self.sums = np.frombuffer(sums, np.float64, self._jobs)
        """Sums of the last launch, once the stream has passed it; [sums * K]."""
        self.sums[:] = 0.0
        self._capturer = capturer
        with capturer.streams() as (main, *branches):
            self._graph = self._capture(main, branches[: len(kernels)])
        self.set_arguments({"input_stride": inputs * dtype.itemsize})

    def set_arguments(self, arguments: Mapping[str, int]) -> None:
        """Set arguments of the next launch, by name; the launch before must have ended."""
        for name, value in arguments.items():
            self._arguments[ARGUMENT_OFFSETS[name] // 8] = value

    def place_partials(self, context: StreamContext, blocks: int) -> None:
        """Allocate the partial sums of launches over at most ``blocks`` blocks of rows."""
        if self._jobs:
            size = 8 * self._jobs * blocks * (self._threads // 32)
            self.set_arguments({"partials": context.buffer("compiled partials", size)})

    def launch(self, context: StreamContext) -> None:
        """Launch the graph on the context's stream."""
        wait_while_held(context.functions)
        self._graph.launch(context.stream)

    def _capture(self, main: Any, branches: Sequence[Any]) -> Any:
        main.begin_capture()
        count = self._block.nbytes // _COPY_BYTES
        self._capturer.copy_inputs(
            (-(-count // _COPY_THREADS), 1, 1),
            (_COPY_THREADS, 1, 1),
            (
                np.uint64(self._block.ctypes.data),
                np.uint64(self._device_block.ptr),
                np.int32(count),
            ),
            stream=main,
        )
        fork = main.record()
        for branch in branches:
            branch.wait_event(fork)
        plan, block = self.plan, self._device_block.ptr
        for number, first in enumerate(plan.firsts):
            inputs = int(plan.inputs.starts[first]) * plan.arithmetic.dtype.itemsize
            output = int(plan.sum_starts[first]) if self._jobs else first
            self._kernels[number].function(
                (self._blocks[number], self._vectors, 1),
                (self._threads, 1, 1),
                (np.uint64(block), np.uint64(block + _INPUTS_AT + inputs), np.uint32(output)),
                stream=branches[number % len(branches)],
            )
        for branch in branches:
            main.wait_event(branch.record())
        if self._jobs:
            self._capturer.sum_partials(
                (self._jobs, 1, 1),
                (_SUM_THREADS, 1, 1),
                (
                    np.uint64(self._device_block.ptr),
                    np.uint64(self.sums.ctypes.data),
                    np.int32(self._threads // 32),
                ),
                stream=main,
            )
        graph = main.end_capture()
        graph.upload(main)
        main.synchronize()
        return graph


# -------------------------------------------------------------------------------------- the tier


class IdleGraphs(LRUCache[GraphKey, list[CapturedGraph]]):
    """Graphs that nobody launches, by key; so few that their kernels take `MOST_BYTES` at most."""

    def __init__(self) -> None:
        least = MOST_BYTES // MAX_GRAPHS
        super().__init__(
            MOST_BYTES, lambda graphs: max(least, sum(graph.code_bytes for graph in graphs))
        )

    def take(self, key: GraphKey) -> CapturedGraph | None:
        """Take a graph of a key out, if there is one."""
        graphs = self.pop(key, [])
        if len(graphs) > 1:
            self[key] = graphs[:-1]
        return graphs[-1] if graphs else None

    def keep(self, graph: CapturedGraph) -> None:
        """Keep a graph that has been launched, unless its code alone would be too much."""
        with suppress(ValueError):
            self[graph.key] = [*self.get(graph.key, []), graph]


class CompiledTier:
    """Evaluates batches by kernels compiled for their expressions.

    `loaded` returns whether all kernels of an evaluation are loaded; `request_compile` has missing
    ones compiled in the background; `evaluate` compiles them first if it must.

    Args:
        device: to evaluate on.
        kernels: keeps the compiled kernels.
        planner: plans kernels, which takes Python time for each expression.
    """

    def __init__(self, device: CudaDevice, kernels: KernelStore, planner: Executor) -> None:
        self._device = device
        self._kernels = kernels
        self._planner = planner
        self._capturer = GraphCapturer(device)
        self._lock = threading.Lock()
        self._idle_graphs = IdleGraphs()
        self._plans: LRUCache[Hashable, KernelPlan] = LRUCache(MAX_GRAPHS)

    def supports(self, evaluation: Evaluation) -> bool:
        """Return whether this tier can take the evaluation at all."""
        batch = evaluation.batch
        if evaluation.gradient and int(batch.parameter_counts.max()) > MAX_PARAMETERS:
            return False
        return batch.vectors <= MAX_VECTORS and int(batch.lengths.max()) <= MAX_TOKENS

    def loaded(self, resident: ResidentDataset, evaluation: Evaluation) -> CompiledWork | None:
        """Return the work of an evaluation if all its kernels are loaded, else None."""
        plan = self._known_plan(resident, evaluation)
        if plan is None:
            return None
        work = self._cut(plan, resident, evaluation)
        with self._lock:
            if work.key in self._idle_graphs:  # a graph keeps its kernels loaded
                return work
        return work if self._kernels.are_loaded(plan.keys) else None

    def request_compile(self, resident: ResidentDataset, evaluation: Evaluation) -> None:
        """Have the missing kernels compiled in the background; return at once."""
        self._kernels.request(self.plan(resident, evaluation).keys)

    def evaluate(
        self,
        resident: ResidentDataset,
        evaluation: Evaluation,
        outputs: Outputs,
        work: CompiledWork | None = None,
    ) -> Steps[Timings]:
        """Evaluate as `interface.Engine.evaluate` does, by the work from `loaded` if there is some.

        Raises:
            ResourceExhaustedError: if this tier does not support the evaluation, or the cache of
                kernels or device memory is short.
        """
        started = time.perf_counter_ns()
        check_cancelled(outputs.cancelled)
        if work is None:
            if not self.supports(evaluation):
                raise ResourceExhaustedError(
                    f"the compiled tier takes at most {MAX_VECTORS} parameter vectors and "
                    f"expressions of at most {MAX_TOKENS} tokens, for gradients with "
                    f"{MAX_PARAMETERS} parameters",
                    "NOT_COMPILABLE",
                    "Ask for the interpreter",
                    "tier",
                )
            plan = self._known_plan(resident, evaluation)
            if plan is None:
                planning = self._planner.submit(self.plan, resident, evaluation)
                yield planning
                self._device.use()
                plan = planning.result()
            work = self._cut(plan, resident, evaluation)
        with self._lock:
            graph = self._idle_graphs.take(work.key)
        is_hit = graph is not None or self._kernels.are_loaded(work.plan.keys)
        if graph is None:
            graph = yield from self._capture(work.key, work.plan)
        else:
            self._kernels.count_hits(len(work.plan.keys))
        try:
            times = yield from self._run_chunks(work, graph, outputs, started)
        finally:
            with self._lock:
                self._idle_graphs.keep(graph)
        outputs.ready(len(evaluation.batch))
        copy_in, compute, copy_out = times
        return Timings(
            copy_in=copy_in,
            compute=compute,
            copy_out=copy_out,
            tier=Tier.COMPILED,
            cache_hits=len(evaluation.batch) * is_hit,
        )

    def counters(self) -> Mapping[str, float]:
        """Return the figures of the caches; see `interface.COUNTERS`."""
        return self._kernels.counters()

    def close(self) -> None:
        """Free the captured graphs and unload the kernels."""
        with self._lock:
            self._idle_graphs.clear()
        self._kernels.close()

    def plan(self, resident: ResidentDataset, evaluation: Evaluation) -> KernelPlan:
        """Return the plan of an evaluation, from the cache if it is there."""
        plan = self._known_plan(resident, evaluation)
        if plan is None:
            plan = make_plan(self._kernels, resident, evaluation)
            with self._lock:
                self._plans[plan_key(resident, evaluation)] = plan
        return plan

    def _known_plan(self, resident: ResidentDataset, evaluation: Evaluation) -> KernelPlan | None:
        with self._lock:
            plan = self._plans.get(plan_key(resident, evaluation))
        return plan if plan is not None and plan.is_for(evaluation.batch) else None

    def _cut(
        self, plan: KernelPlan, resident: ResidentDataset, evaluation: Evaluation
    ) -> CompiledWork:
        """Cut the rows of an evaluation into launches and blocks, and its blocks among kernels.

        Rows of a launch are a power of two, not less than those of a block.
        """
        layout, arithmetic = resident.dataset.layout, plan.arithmetic
        (start, stop), vectors = evaluation.row_range(layout), evaluation.batch.vectors
        if evaluation.values:
            row_bytes = len(evaluation.batch) * vectors * arithmetic.dtype.itemsize
            room = self._device.result_bytes(_CHUNK_BYTES)
            chunk = rows_that_fit(room, row_bytes, MAX_BLOCK_ROWS)
        else:
            each = LAUNCH_WORK[arithmetic].compiled * self._device.multiprocessors
            launches = evaluation.token_rows(layout) // each
            most = max(1, (stop - start) // _MIN_ROWS)
            rows = -(-(stop - start) // min(max(1, launches), most))
            chunk = 1 << (max(rows, MAX_BLOCK_ROWS) - 1).bit_length()
        chunk = min(chunk, resident.window_rows)
        block = block_rows(plan.output, stop - start)
        # A kernel has at most one block of threads for each block of rows.
        most = -(-(start % block + min(chunk, stop - start)) // block)
        total = plan.layout.blocks * self._device.multiprocessors
        key = plan.name, vectors, plan.blocks(vectors, most, total)
        return CompiledWork(plan, resident, evaluation, start, stop, chunk, block, key)

    def _capture(self, key: GraphKey, plan: KernelPlan) -> Steps[CapturedGraph]:
        """Capture a graph; its kernels are compiled first if they are missing.

        Raises:
            ResourceExhaustedError: if there are too many.
        """
        if len(plan.keys) > MOST_KERNELS:
            raise ResourceExhaustedError(
                f"{len(plan.keys)} kernels do not fit into the cache of compiled kernels",
                "KERNEL_CACHE_FULL",
                "Ask for the interpreter, or send smaller batches",
                "tier",
                needed=len(plan.keys),
                available=MOST_KERNELS,
            )
        kernels = self._kernels.find(plan.keys)
        if kernels is None:
            made = self._kernels.request(plan.keys, urgent=True)
            yield made
            kernels = [made.result()[key] for key in plan.keys]
        self._device.use()
        return CapturedGraph(self._device, key, plan, kernels, self._capturer)

    def _run_chunks(
        self, work: CompiledWork, graph: CapturedGraph, outputs: Outputs, started: int
    ) -> Steps[tuple[int, int, int]]:
        """Launch the graph for each chunk of rows, and copy its results before the next."""
        evaluation, plan, (start, stop) = work.evaluation, work.plan, (work.start, work.stop)
        jobs, dtype = len(evaluation.batch) * evaluation.batch.vectors, plan.arithmetic.dtype
        spans = cut_rows((start, stop), work.chunk)
        sums = np.empty((len(spans), len(graph.sums)))
        plan.inputs.fill(evaluation.batch, graph.inputs)
        launched, size = time.perf_counter_ns(), 0
        if outputs.values is not None:
            size, values = outputs.values.nbytes, outputs.values.reshape(jobs, -1)
        with self._device.stream() as context:
            graph.place_partials(context, min(stop - start, work.chunk) // work.block + 2)

            def launch(
                window: ResidentDataset, number: int, _: None, side: int
            ) -> Callable[[], None]:
                first, last = spans[number]
                arguments = row_arguments(window, first, last, work.block)
                if evaluation.values:  # whole memory lines, from an aligned row on
                    lines = -(-(first % ROW_MULTIPLE + last - first) // ROW_MULTIPLE)
                    arguments["pitch"] = lines * ROW_MULTIPLE * dtype.itemsize
                    place = context.buffer("compiled values", jobs * arguments["pitch"])
                    arguments["values"] = place + first % ROW_MULTIPLE * dtype.itemsize
                graph.set_arguments(arguments)
                context.mark(f"begun {side}")
                graph.launch(context)
                context.mark(f"computed {side}")
                if size:
                    memory = context.pinned(
                        "compiled values", jobs * (last - first) * dtype.itemsize
                    )
                    staging = memory.view(dtype).reshape(jobs, -1)
                    context.download_rows(staging, arguments["values"], arguments["pitch"])

                def copy_results() -> None:
                    sums[number] = graph.sums
                    if size:
                        values[:, first - start : last - start] = staging

                return copy_results

            given = work.resident, spans, [None], outputs.cancelled, launch, size
            # A graph has one launch at a time.
            computed = yield from run_chunks(self._device, context, *given, overlap=False)
        if outputs.losses is not None and evaluation.loss is not None:
            total = sum_nodes(sums, start // work.chunk)
            shaped = total.reshape(-1, evaluation.batch.vectors)
            outputs.losses[...] = shaped[plan.sum_starts[:-1]]
            work.fill_gradients(shaped, outputs)
        return launched - started, computed, max(0, time.perf_counter_ns() - launched - computed)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledWork:
    """An evaluation by a plan, and how its rows are cut."""

    plan: KernelPlan
    resident: ResidentDataset
    evaluation: Evaluation
    start: int
    stop: int
    chunk: int
    """Rows of one launch."""
    block: int
    """Rows of a block."""
    key: GraphKey

    def fill_gradients(self, sums: NDArray[np.float64], outputs: Outputs) -> None:
        """Copy sums of derivatives, [sums, K], to the order of `Batch.parameters` if wanted."""
        batch, gradients = self.evaluation.batch, outputs.gradients
        if gradients is None:
            return
        programs, parameters = self.plan.derivatives.T
        counts = batch.parameter_counts.astype(np.int64)[programs]
        firsts = batch.parameter_starts[programs] + parameters
        places = firsts[:, np.newaxis] + counts[:, np.newaxis] * np.arange(batch.vectors)
        gradients[:] = 0.0  # for parameters that the expression does not contain
        scale = 1.0 if self.evaluation.loss is Loss.MAE else 2.0
        gradients[places] = scale * np.delete(sums, self.plan.sum_starts[:-1], axis=0)
