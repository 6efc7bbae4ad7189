"""A captured launch: the kernels of one batch as one CUDA graph with its buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.cuda.jit.kernel_store import Kernel, KernelKey
from warpfit_server.engine.cuda.jit.ptx import REQUEST, REQUEST_BYTES
from warpfit_server.engine.cuda.math.prelude import NVRTC_PRECISE
from warpfit_server.engine.cuda.runtime import nvrtc
from warpfit_server.engine.cuda.runtime.device import CudaDevice
from warpfit_server.engine.cuda.runtime.resident_data import ROW_MULTIPLE, ResidentDataset
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.cuda.runtime.submission import WIDTH

#: Most kernels side by side; more branches cost capture time and gain nothing.
_BRANCHES: Final = 32
#: Bytes before the slots in the block that a launch copies to the device.
_SLOTS_AT: Final = -(-REQUEST_BYTES // 256) * 256
_HOST_TO_DEVICE: Final = 1
_SUM_JOBS: Final = 4

#: Adds each job's partial sums in an order that depends on their number alone: a warp a job.
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

#: Steps of a launch by compiled code.
_MOST_STEPS: Final = 7

#: Hash of the kernels' keys, number of parameter vectors, blocks of each kernel.
Identity = tuple[bytes, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What the kernels of a graph work on."""

    firsts: tuple[int, ...]
    """Index of each kernel's first expression."""
    slot_starts: NDArray[np.int64]
    """Index of each expression's first slot, and the total; [programs + 1]."""
    sum_starts: NDArray[np.int64]
    """Index of each expression's first sum, and the total; [programs + 1]."""
    vectors: int
    dtype: np.dtype[Any]
    blocks: tuple[int, ...]
    """Blocks of each kernel."""
    threads: int
    """Threads of each block."""


class Desk(NamedTuple):
    """Memory of compiled code that launches a graph, used again and again."""

    words: NDArray[np.uint64]
    """What the graph is told; see `ptx.REQUEST`."""
    sum_starts: NDArray[np.int64]
    """Index of each expression's first sum, and the total; [programs + 1]."""
    steps: NDArray[np.int64]
    clock: NDArray[np.int64]
    """Seconds and nanoseconds, when all was launched and when all was done; [4]."""
    elapsed: NDArray[np.float32]
    """Milliseconds of the device; [1]."""

    @classmethod
    def fresh(cls, words: NDArray[np.uint64], sum_starts: NDArray[np.int64]) -> Desk:
        """Allocate the memory."""
        return cls(
            words,
            sum_starts,
            np.zeros((_MOST_STEPS, WIDTH), dtype=np.int64),
            np.zeros(4, dtype=np.int64),
            np.zeros(1, dtype=np.float32),
        )


class Capturer:
    """What all captures on a device share; one capture at a time makes use of it."""

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
        """Lend the streams of a capture: the one that begins and ends it, and `_BRANCHES` others.

        Their priorities do not matter: a graph takes that of the stream on which it is launched.
        """
        with self._lock:
            stream = self._device.cupy.cuda.Stream
            streams = self._streams or [stream(non_blocking=True) for _ in range(1 + _BRANCHES)]
            self._streams = []  # of a capture that fails they may be unusable
            yield streams
            self._streams = streams


def request(resident: ResidentDataset, first: int, last: int) -> dict[str, int]:
    """Words of a request for the rows ``first`` to ``last``; `ptx.REQUEST` lists them all."""
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


class Replay:
    """One captured graph. The buffers are its own: one launch at a time.

    The graph copies request and slots to the device, runs the kernels on parallel branches, and
    adds up the partial sums straight into page-locked memory. Row ranges, data sets and parameters
    may change from launch to launch.
    """

    def __init__(
        self,
        device: CudaDevice,
        identity: Identity,
        keys: Sequence[KernelKey],
        kernels: Sequence[Kernel],
        capturer: Capturer,
        work: Work,
    ) -> None:
        device.use()
        self.identity = identity
        self.keys = keys
        """Of the kernels, which are in use as long as this lives."""
        self._device = device
        self._work = work
        self._kernels = tuple(kernels)
        self._jobs = int(work.sum_starts[-1]) * work.vectors
        cuda = device.cupy.cuda
        size = _SLOTS_AT + work.vectors * int(work.slot_starts[-1]) * work.dtype.itemsize
        self._device_block = device.allocate(size)
        pinned = cuda.alloc_pinned_memory(size)
        self._block = np.frombuffer(pinned, np.uint8, size)
        self._words = self._block[:REQUEST_BYTES].view(np.uint64)
        slots = self._block[_SLOTS_AT:].view(work.dtype)
        self.slots = slots.reshape(work.vectors, int(work.slot_starts[-1]))
        """Values that the next launch reads; [K, slots]."""
        self._pitch = max(work.blocks)
        self._partials = device.allocate(8 * self._jobs * self._pitch) if self._jobs else None
        sums = cuda.alloc_pinned_memory(8 * max(1, self._jobs))
        self.sums = np.frombuffer(sums, np.float64, self._jobs)
        """Sums of the last launch, once the stream has passed it; [sums * K]."""
        self.sums[:] = 0.0
        self._capturer = capturer
        self.desk = Desk.fresh(self._words, work.sum_starts)
        """For launches by compiled code."""
        with capturer.streams() as (main, *branches):
            self._graph = self._capture(main, branches[: len(kernels)])
        self.tell(
            {
                "slot_stride": self.slots.shape[1] * work.dtype.itemsize,
                "partials": self._partials.ptr if self._partials else 0,
                "partial_pitch": self._pitch,
            }
        )

    @property
    def graph(self) -> int:
        """What the driver knows the graph by."""
        return int(self._graph.graphExec)

    def tell(self, request: Mapping[str, int]) -> None:
        """Write what the next launch reads; the launch before must have ended.

        Args:
            request: words by name, see `ptx.REQUEST`; those of this object's buffers are there.

        """
        for name, value in request.items():
            self._words[REQUEST[name] // 8] = value

    def launch(self, context: StreamContext) -> None:
        """Start the graph, for the request and the slots, on the context's stream."""
        self._device.await_modules()
        self._graph.launch(context.stream)

    def _capture(self, main: Any, branches: Sequence[Any]) -> Any:
        cuda = self._device.cupy.cuda
        if self._partials is not None:
            # A kernel of fewer blocks than the most leaves the rest of its sums as they are.
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
        for number, first in enumerate(self._work.firsts):
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
        slot = int(self._work.slot_starts[first])
        place = int(self._work.sum_starts[first]) if self._jobs else first
        self._kernels[number].function(
            (self._work.blocks[number], self._work.vectors, 1),
            (self._work.threads, 1, 1),
            (
                np.uint64(self._device_block.ptr),
                np.uint64(self._device_block.ptr + _SLOTS_AT + slot * self._work.dtype.itemsize),
                np.uint32(place),
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
