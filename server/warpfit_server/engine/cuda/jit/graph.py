"""A captured CUDA graph: the kernels of one batch, launched together, with their buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.cuda.jit.kernel_interface import ARGUMENT_BYTES, ARGUMENT_OFFSETS
from warpfit_server.engine.cuda.jit.kernel_store import Kernel, KernelKey
from warpfit_server.engine.cuda.math.prelude import NVRTC_PRECISE
from warpfit_server.engine.cuda.runtime import nvrtc
from warpfit_server.engine.cuda.runtime.command_list import COMMAND_WIDTH, wait_while_held
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.resident_data import ROW_MULTIPLE, ResidentDataset
from warpfit_server.engine.cuda.runtime.streams import StreamContext

#: Most parallel branches of a graph; more take time to capture and gain nothing.
_BRANCHES: Final = 32
#: Bytes before the inputs in the block that a graph copies to the device.
_INPUTS_AT: Final = -(-ARGUMENT_BYTES // 256) * 256
_HOST_TO_DEVICE: Final = 1
#: Jobs of a block of ``sum_partials``, a warp each.
_SUM_JOBS: Final = 4
#: Most commands that launch a graph and wait for it; see `graph_launch`.
_MAX_COMMANDS: Final = 7

#: Adds each job's partial sums in an order that depends on their number alone; a warp a job.
SUM_SOURCE: Final = """
extern "C" __global__ void sum_partials(
    const double *partials, double *sums, int jobs, int blocks) {
  int job = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (job >= jobs) return;
  double sum = 0.0;
  for (int i = threadIdx.x % 32; i < blocks; i += 32) sum += partials[(size_t)job * blocks + i];
  for (int distance = 16; distance; distance /= 2) {
    sum += __shfl_down_sync(0xffffffffu, sum, distance);
  }
  if (threadIdx.x % 32 == 0) sums[job] = sum;
}
"""

#: Identifies a graph: hash of its kernels' keys, parameter vectors, blocks of each kernel.
GraphKey = tuple[bytes, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class GraphLayout:
    """Inputs, sums and launch configuration of a graph's kernels."""

    firsts: tuple[int, ...]
    """Index of each kernel's first expression."""
    input_starts: NDArray[np.int64]
    """Index of each expression's first input, and the total; [programs + 1]."""
    sum_starts: NDArray[np.int64]
    """Index of each expression's first sum, and the total; [programs + 1]."""
    vectors: int
    dtype: np.dtype[Any]
    blocks: tuple[int, ...]
    """Blocks of each kernel."""
    threads: int
    """Threads of each block."""


class GraphBuffers(NamedTuple):
    """Host memory by which compiled code launches a graph."""

    arguments: NDArray[np.uint64]
    """Arguments of the kernels; see `kernel_interface.ARGUMENT_OFFSETS`."""
    sum_starts: NDArray[np.int64]
    """Index of each expression's first sum, and the total; [programs + 1]."""
    commands: NDArray[np.int64]
    clock: NDArray[np.int64]
    """Seconds and nanoseconds after the launch, and after the wait for it; [4]."""
    elapsed: NDArray[np.float32]
    """Milliseconds of the device; [1]."""

    @classmethod
    def allocate(cls, arguments: NDArray[np.uint64], sum_starts: NDArray[np.int64]) -> GraphBuffers:
        """Allocate the memory of commands and times."""
        return cls(
            arguments,
            sum_starts,
            np.zeros((_MAX_COMMANDS, COMMAND_WIDTH), dtype=np.int64),
            np.zeros(4, dtype=np.int64),
            np.zeros(1, dtype=np.float32),
        )


class GraphCapturer:
    """Captures graphs on a device; the streams and a kernel are used by one capture at a time."""

    def __init__(self, device: CudaDevice) -> None:
        architecture = device.architecture
        module = device.load(
            ("sum_partials", nvrtc.version(), str(architecture), SUM_SOURCE),
            lambda: nvrtc.to_cubin(SUM_SOURCE, architecture, NVRTC_PRECISE),
        )
        self.sum_partials = module.get_function("sum_partials")
        """Kernel that adds partial sums up."""
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


def row_arguments(resident: ResidentDataset, first: int, last: int) -> dict[str, int]:
    """Return the arguments that depend on the data set and the rows ``first`` to ``last``."""
    layout = resident.dataset.layout
    aligned = first // ROW_MULTIPLE * ROW_MULTIPLE
    return {
        "variables": resident.address(0, aligned),
        "stride": resident.stride * layout.dtype.itemsize,
        "target": resident.target_address(aligned) if layout.has_target else 0,
        "weights": resident.weights_address(aligned),
        "head": first - aligned,
        "stop": last - aligned,
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
        kernel_keys: Sequence[KernelKey],
        kernels: Sequence[Kernel],
        capturer: GraphCapturer,
        layout: GraphLayout,
    ) -> None:
        device.use()
        self.key = key
        self.kernel_keys = kernel_keys
        """Leases of the kernels, which are in use as long as this graph is kept."""
        self._device = device
        self._layout = layout
        self._kernels = tuple(kernels)
        self._jobs = int(layout.sum_starts[-1]) * layout.vectors
        cuda = device.cupy.cuda
        inputs = int(layout.input_starts[-1])
        size = _INPUTS_AT + layout.vectors * inputs * layout.dtype.itemsize
        self._device_block = device.allocate(size)
        pinned = cuda.alloc_pinned_memory(size)
        self._block = np.frombuffer(pinned, np.uint8, size)
        self._arguments = self._block[:ARGUMENT_BYTES].view(np.uint64)
        self.inputs = self._block[_INPUTS_AT:].view(layout.dtype).reshape(layout.vectors, inputs)
        """Numbers that the next launch reads; [K, inputs]."""
        self._pitch = max(layout.blocks)
        self._partials = device.allocate(8 * self._jobs * self._pitch) if self._jobs else None
        sums = cuda.alloc_pinned_memory(8 * max(1, self._jobs))
        self.sums = np.frombuffer(sums, np.float64, self._jobs)
        """Sums of the last launch, once the stream has passed it; [sums * K]."""
        self.sums[:] = 0.0
        self._capturer = capturer
        self.buffers = GraphBuffers.allocate(self._arguments, layout.sum_starts)
        """Buffers and driver handles for launches by compiled code."""
        with capturer.streams() as (main, *branches):
            self._graph = self._capture(main, branches[: len(kernels)])
        self.set_arguments(
            {
                "input_stride": inputs * layout.dtype.itemsize,
                "partials": self._partials.ptr if self._partials else 0,
                "partial_pitch": self._pitch,
            }
        )

    @property
    def handle(self) -> int:
        """The driver's handle of the graph."""
        return int(self._graph.graphExec)

    def set_arguments(self, arguments: Mapping[str, int]) -> None:
        """Set arguments of the next launch, by name; the launch before must have ended."""
        for name, value in arguments.items():
            self._arguments[ARGUMENT_OFFSETS[name] // 8] = value

    def launch(self, context: StreamContext) -> None:
        """Launch the graph on the context's stream."""
        wait_while_held(context.functions)
        self._graph.launch(context.stream)

    def _capture(self, main: Any, branches: Sequence[Any]) -> Any:
        cuda = self._device.cupy.cuda
        if self._partials is not None:
            # A kernel with fewer than the most blocks leaves the rest of its partial sums 0.
            cuda.runtime.memsetAsync(self._partials.ptr, 0, self._partials.mem.size, main.ptr)
        main.begin_capture()
        cuda.runtime.memcpyAsync(
            self._device_block.ptr,
            self._block.ctypes.data,
            self._block.nbytes,
            _HOST_TO_DEVICE,
            main.ptr,
        )
        fork = main.record()
        for branch in branches:
            branch.wait_event(fork)
        for number, first in enumerate(self._layout.firsts):
            self._launch_kernel(number, first, branches[number % len(branches)])
        for branch in branches:
            main.wait_event(branch.record())
        if self._partials is not None:
            self._launch_sum(main, self._partials.ptr)
        graph = main.end_capture()
        graph.upload(main)
        main.synchronize()
        return graph

    def _launch_kernel(self, number: int, first: int, stream: Any) -> None:
        layout = self._layout
        offset = _INPUTS_AT + int(layout.input_starts[first]) * layout.dtype.itemsize
        output = int(layout.sum_starts[first]) if self._jobs else first
        self._kernels[number].function(
            (layout.blocks[number], layout.vectors, 1),
            (layout.threads, 1, 1),
            (
                np.uint64(self._device_block.ptr),
                np.uint64(self._device_block.ptr + offset),
                np.uint32(output),
            ),
            stream=stream,
        )

    def _launch_sum(self, stream: Any, partials: int) -> None:
        self._capturer.sum_partials(
            (-(-self._jobs // _SUM_JOBS), 1, 1),
            (32 * _SUM_JOBS, 1, 1),
            (
                np.uint64(partials),
                np.uint64(self.sums.ctypes.data),
                np.int32(self._jobs),
                np.int32(self._pitch),
            ),
            stream=stream,
        )
