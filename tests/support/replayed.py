"""A CUDA device that captures graphs and replays them on the host, for the compiled tier.

Its "kernels" all compute the same: each sum is the number of its place plus the sum of the slots of
its expression, so that parameters that do not arrive, or arrive elsewhere, show.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import defaultdict
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
from warpfit_server.engine.cuda.turns import DeviceTurns

from support.driver import addresses_of
from warpfit_server.engine.cuda.device import CudaDevice
from warpfit_server.engine.cuda.kernels import Kernel, KernelKey
from warpfit_server.engine.cuda.ptx import REQUEST, sum_count
from warpfit_server.engine.cuda.streams import FIRST

I64 = ctypes.c_int64
NANOSECONDS = 250_000
STREAM, FIRST_STREAM, STARTED, COMPUTED = 7, 8, 11, 12
ON_DEVICE = 1 << 40


class DriverError(Exception):
    """What CuPy makes of a status."""


class Graph:
    """What a capture has seen."""

    def __init__(self, number):
        self.graphExec = number
        self.kernels = []
        self.requests = []

    def upload(self, stream):
        """It is there."""

    def copies(self, source, size):
        self.block = (ctypes.c_uint8 * size).from_address(source)

    def adds_up(self, place, jobs):
        self.sums = np.frombuffer((ctypes.c_double * jobs).from_address(place))

    @property
    def request(self):
        """Words by name."""
        words = np.frombuffer(self.block, np.uint64, len(REQUEST)).tolist()
        return dict(zip(REQUEST, words, strict=True))

    def run(self):
        self.requests.append(self.request)
        for key, slot, number, vectors in self.kernels:
            for shape in key.shapes:
                own = self._slots(key.mode.dtype, slot, shape.slots, vectors).sum(axis=1)
                for _ in range(sum_count(key.output, shape)):
                    self.sums[number * vectors : (number + 1) * vectors] = number + own
                    number += 1
                slot += shape.slots * key.mode.dtype.itemsize

    def _slots(self, dtype, place, count, vectors):
        """Slots [K, count] of an expression, from `place` in the block on."""
        stride = self.request["slot_stride"]
        rows = [
            np.frombuffer(self.block, dtype, count, place + vector * stride) if count else []
            for vector in range(vectors)
        ]
        return np.array(rows, dtype=np.float64)


class Driver:
    """A device, and the functions of its driver that compiled code calls."""

    def __init__(self):
        self.calls = []
        self.graphs = []
        self.fail = ""
        self.may_end = threading.Event()
        self.may_end.set()
        kinds = {"record": 2, "synchronize": 1, "elapsed": 3, "launch_graph": 2}
        noted = {name: self._noting(name, count) for name, count in kinds.items()}
        system = ctypes.CDLL(None)
        self._functions = [
            *(noted[name] for name in ("record", "record", "record", "record")),  # no other steps
            *(noted["synchronize"], noted["elapsed"], system.clock_gettime, system.send),
            noted["launch_graph"],
        ]
        self.device = self._device()

    def _noting(self, name, count):
        def function(*arguments):
            self.calls.append((name, *arguments))
            getattr(self, f"_{name}", lambda *_: None)(*arguments)
            return 700 if self.fail == name else 0

        return ctypes.CFUNCTYPE(ctypes.c_int32, *(I64,) * count)(function)

    def _elapsed(self, place, start, end):
        ctypes.cast(place, ctypes.POINTER(ctypes.c_float))[0] = NANOSECONDS / 1e6

    def _launch_graph(self, graph, stream):
        self.graphs[graph].run()

    def _synchronize(self, stream):
        self.may_end.wait(10)

    def streams(self):
        """On which graphs were launched."""
        return [call[2] for call in self.calls if call[0] == "launch_graph"]

    def _device(self):
        device = CudaDevice.__new__(CudaDevice)
        device.index, device.multiprocessors, device.compute_capability = 0, 132, (9, 0)
        device._idle, device._lock = defaultdict(list), threading.Lock()
        device._thread = threading.local()
        device.turns = DeviceTurns(132)
        device.on_shortage = lambda: None
        device.allocate = lambda size: SimpleNamespace(
            ptr=ON_DEVICE, mem=SimpleNamespace(size=size)
        )
        device.load = lambda key, build: SimpleNamespace(get_function=lambda name: self._sum)
        device.cupy = SimpleNamespace(cuda=self._cuda())
        device.functions = addresses_of(self._functions)
        return device

    def _cuda(self):
        events = itertools.cycle((STARTED, COMPUTED))
        runtime = SimpleNamespace(
            CUDARuntimeError=DriverError,
            setDevice=lambda index: None,
            memsetAsync=lambda *_: None,
            memcpyAsync=lambda to, source, size, *_: self.graphs[-1].copies(source, size),
        )
        return SimpleNamespace(
            Stream=lambda *, non_blocking, priority=0: self._stream(priority),
            Event=lambda: SimpleNamespace(ptr=next(events)),
            alloc_pinned_memory=bytearray,
            runtime=runtime,
            driver=SimpleNamespace(CUDADriverError=DriverError),
        )

    def _stream(self, priority):
        def nothing(*_):
            return None

        names = ("wait_event", "record", "synchronize", "__enter__", "__exit__")
        kind = type("Stream", (), dict.fromkeys(names, nothing))
        stream = kind()
        stream.ptr = FIRST_STREAM if priority == FIRST else STREAM
        stream.begin_capture = lambda: self.graphs.append(Graph(len(self.graphs)))
        stream.end_capture = lambda: self.graphs[-1]
        return stream

    def _sum(self, grid, block, arguments, stream):
        _, place, jobs, _ = arguments
        self.graphs[-1].adds_up(int(place), int(jobs))

    def kernel(self, key):
        """A loaded kernel."""

        def launch(grid, block, arguments, stream):
            request, slots, place = map(int, arguments)
            self.graphs[-1].kernels.append((key, slots - request, place, grid[1]))

        return Kernel(launch, None, 1)


class Store:
    """Kernels that need no compiler."""

    def __init__(self, driver):
        self.driver = driver
        self.cache = set()
        self.leased = 0

    def key(self, mode, output, shapes):
        text = mode.name + "".join(shape.key.hex() for shape in shapes)
        return KernelKey(mode, output, shapes, text)

    def work(self, mode, shapes):
        return np.ones(len(shapes))

    def lease(self, keys):
        if not self.cache.issuperset(keys):
            return None
        self.leased += len(keys)
        return [self.driver.kernel(key) for key in keys]

    def release(self, keys):
        self.leased -= len(keys)

    def request(self, keys, priority=1):
        self.cache.update(keys)
        loaded = Future()
        loaded.set_result(None)
        return loaded
