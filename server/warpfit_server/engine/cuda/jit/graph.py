"""A captured CUDA graph: the kernels of one batch, launched together, with their buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from warpfit_server.engine.cuda.jit.kernel_plan import KernelPlan
from warpfit_server.engine.cuda.jit.kernel_store import Kernel
from warpfit_server.engine.cuda.jit.renderer import ARGUMENT_BYTES, ARGUMENT_OFFSETS, LINE_BYTES
from warpfit_server.engine.cuda.math.prelude import NVRTC_PRECISE, sum_tree
from warpfit_server.engine.cuda.runtime.compiler import CudaSource
from warpfit_server.engine.cuda.runtime.datasets import ResidentDataset, TiledRows
from warpfit_server.engine.cuda.runtime.device import CudaDevice, StreamContext
from warpfit_server.engine.cuda.runtime.driver_calls import wait_while_held

#: Most parallel branches of a graph; more take time to capture and gain nothing.
_BRANCHES: Final = 32
#: Bytes before the inputs in the block that a graph copies to the device.
_INPUTS_AT: Final = -(-ARGUMENT_BYTES // 256) * 256
#: Threads of a block that copies inputs, and bytes that each copies.
_COPY_THREADS: Final = 256
_COPY_BYTES: Final = 16
_SUM_THREADS: Final = 128


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
