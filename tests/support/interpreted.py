"""A CUDA engine whose device is the host, and a lane to it, for what happens beside the kernels."""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import numpy as np

from support.driver import INTERPRET, LOWER, ORDER, SLOTS, SUM
from warpfit.dataset import Dataset
from warpfit_server.channel import Channel
from warpfit_server.engine.cuda.device import CudaDevice
from warpfit_server.engine.cuda.engine import CudaEngine
from warpfit_server.engine.cuda.fresh import FreshBatches
from warpfit_server.engine.cuda.interpreter import Interpreter
from warpfit_server.engine.cuda.launch import Kernels
from warpfit_server.engine.cuda.lowering import LoweringKernels
from warpfit_server.engine.cuda.plan import Planner
from warpfit_server.engine.cuda.resident import ROW_MULTIPLE, ResidentDataset
from warpfit_server.engine.cuda.source import operator_flags
from warpfit_server.engine.cuda.standing import Standings
from warpfit_server.engine.cuda.streams import BEHIND, FIRST, USUAL
from warpfit_server.engine.cuda.turns import DeviceTurns
from warpfit_server.engine.lane_end import LaneEnd
from warpfit_server.engine.process import EngineProcess
from warpfit_server.lanes import Lanes
from warpfit_server.segments import SegmentPool

ON_DEVICE = 1 << 41
#: Handles of streams by their priority.
STREAMS = {FIRST: 5, USUAL: 6, BEHIND: 7}


def host_kernels(variant):
    """Kernels that are names."""
    functions = (SimpleNamespace(ptr=number) for number in (INTERPRET, SLOTS, SUM, LOWER, ORDER))
    interpret, slots, sums, lower, order = functions
    lowering = LoweringKernels(lower, order)
    return Kernels(variant, interpret, slots, sums, lowering, operator_flags(variant))


class HostResident(ResidentDataset):
    """A data set with addresses that nobody reads."""

    @property
    def stride(self):
        return -(-self.dataset.layout.rows // ROW_MULTIPLE) * ROW_MULTIPLE

    def address(self, column, row):
        return ON_DEVICE + (column * self.stride + row) * self.dataset.layout.dtype.itemsize


class HostInterpreter(Interpreter):
    """Whose kernels are names."""

    def prepare(self, variant):
        return host_kernels(variant)


class HostEngine(CudaEngine):
    """A CUDA engine over functions in the driver's place, which counts what Python evaluates.

    Args:
        device: with such functions.
        compiled: the compiled tier, if there is one.

    """

    def __init__(self, device, compiled=None):
        self._device = device
        self._interpreter = HostInterpreter(self._device)
        self._compiled = compiled or SimpleNamespace(
            supports=lambda _: True, loaded=lambda *_: None, request_compile=lambda *_: None
        )
        self._background = SimpleNamespace(submit=lambda *_: None)
        self._planner = Planner(16)
        self._fresh = FreshBatches(self._device)
        self._standings = Standings()
        self._residents = {}
        self._lock = threading.Lock()
        self._device.on_shortage = self._standings.revoke
        self.evaluated = 0
        self.observed = []
        self._planner.observe = lambda *observation: self.observed.append(observation)

    def load(self, dataset):
        with self._lock:
            self._residents[dataset.content_id] = HostResident(dataset, None)

    def evaluate(self, evaluation, outputs):
        self.evaluated += 1
        return super().evaluate(evaluation, outputs)

    @property
    def idle_contexts(self):
        """Streams that nobody holds."""
        return sum(map(len, self._device._idle.values()))


def host_device(driver):
    """A device whose memory is numbers."""
    device = CudaDevice.__new__(CudaDevice)
    device.index, device.multiprocessors = 0, 132
    device._idle, device._lock = defaultdict(list), threading.Lock()
    device._thread = threading.local()
    device.turns = DeviceTurns(132)
    device.functions = driver.addresses
    device.cupy = SimpleNamespace(cuda=_cuda())
    device.allocate = lambda size: SimpleNamespace(ptr=1 << 40, mem=SimpleNamespace(size=size))
    return device


def _cuda():
    def stream(*, non_blocking, priority):
        assert non_blocking
        names = ("synchronize", "__enter__", "__exit__")
        members = dict.fromkeys(names, lambda *_: None)
        return type("Stream", (), {**members, "ptr": STREAMS[priority]})()

    return SimpleNamespace(
        Stream=stream,
        Event=lambda: SimpleNamespace(ptr=11),
        alloc_pinned_memory=bytearray,
        runtime=SimpleNamespace(setDevice=lambda _: None, CUDARuntimeError=DriverError),
        driver=SimpleNamespace(CUDADriverError=DriverError),
    )


class DriverError(Exception):
    """What CuPy makes of a status."""


class EngineOnLanes:
    """An engine process's lanes, served by threads of this process; a context manager."""

    def __init__(self, engine, dataset: Dataset, lanes: int = 1):
        self.engine = engine
        self.process = EngineProcess(engine, Channel(socket.socketpair()[0]), 1 << 20)
        engine.load(dataset)
        self.process._datasets[dataset.content_id] = dataset
        self.lanes = Lanes(SegmentPool(1 << 28))
        self._dataset = dataset
        self.threads = []
        ends = []
        for _ in range(lanes):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ends.append(ours)
            thread = threading.Thread(target=self.process._serve, args=(LaneEnd(theirs),))
            thread.start()
            self.threads.append(thread)
        self.lanes.open(ends)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lanes.shut()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()

    def start(self, evaluation, tenant=""):
        """Hand an evaluation over."""
        return self.lanes.start(evaluation, self._dataset.layout, lambda: True, tenant)

    def losses(self, evaluation, tenant="") -> np.ndarray:
        """Losses [programs, K]."""
        run = self.start(evaluation, tenant)
        try:
            run.next_event()
        finally:
            run.close()
        return run.losses


def wait_until(condition):
    """Wait for what another thread does in a moment."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
