"""The engines of a server as the main process sees them: one process for each device.

A supervisor gives its engine the data sets and connects front ends to it. The main process never
touches CUDA. When an engine process dies, its calls in flight fail with UNAVAILABLE, a new process
starts, and it loads the data sets of the old one again from the main process's copies.
"""

from __future__ import annotations

import itertools
import logging
import socket
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Final

from warpfit.errors import (
    FailedPreconditionError,
    ResourceExhaustedError,
    UnavailableError,
    WarpfitError,
)
from warpfit.server_info import Device
from warpfit_server.config import Config
from warpfit_server.dataset_store import StoredDataset
from warpfit_server.ipc import messages
from warpfit_server.ipc.engine_connection import EngineConnection, unavailable
from warpfit_server.ipc.messages import Channel, ChannelClosedError
from warpfit_server.ipc.quarantine import Quarantine
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.machine import socket_pair
from warpfit_server.processes.engine_start import (
    UNRELATED_CAUSES,
    StartedEngine,
    cause_of_death,
    out_of_memory_kills,
    start_engine,
)
from warpfit_server.processes.supervisor import State, Supervisor

_LOG: Final = logging.getLogger("warpfit.supervisor")
#: Seconds that an engine has to end when the server stops.
_STOP_SECONDS: Final = 10.0
#: Seconds between two looks whether the server stops while its engines start.
_POLL_SECONDS: Final = 0.1
#: Most data sets that a new engine has been sent and has not loaded: with more of them, the
#: messages would fill both directions of the channel.
_LOADS_AHEAD: Final = 16


class EngineSupervisor(Supervisor):
    """Owns the engine process of a device, the channel to it and this process's connection to it.

    Args:
        config: the server's configuration.
        number: number of the engine in ``config.engines``.
        pool: memory of this process's own requests, which are probes.
        quarantine: is told of the engine's deaths.
        process_numbers: yields the numbers of the engine processes, of all devices.
        started: engine processes that run already, by number; the supervisor takes its own out.
    """

    def __init__(
        self,
        config: Config,
        number: int,
        pool: SegmentPool,
        quarantine: Quarantine,
        process_numbers: Iterator[int],
        started: dict[int, StartedEngine] | None = None,
    ) -> None:
        self.number = number
        self.device = config.engines[number]
        super().__init__(f"engine process of {self.device.label}", _STOP_SECONDS)
        self.quarantine = quarantine
        self.connection = EngineConnection(pool)
        self.connection.report = self.quarantine.report
        self.connection.on_loss = self._connect
        self.restarts: Counter[str] = Counter()
        """Engine processes that ended unasked, by cause; see `cause_of_death`."""
        self.counters: Mapping[str, float] = {}
        """The engine's counters when they were last asked for."""
        self.process_number = 0
        """Number of the engine process, from 1; each process of any engine has another one."""
        self.resident: Callable[[], Iterator[StoredDataset]] = lambda: iter(())
        """Yields the resident data sets, pinned."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called whenever an engine process has become ready."""
        self.on_loss: Callable[[], None] = lambda: None
        """Called whenever an engine process is gone."""
        self._config = config
        self._process_numbers = process_numbers
        self._started = {} if started is None else started
        self._device: Device | None = None  # as the last engine that was ready has described it
        self._out_of_memory = 0
        self._loads: dict[bytes, Future[None]] = {}
        # Loads without an answer, in the engine's order; some data sets may be unloaded again.
        self._unanswered: deque[tuple[bytes, Future[None]]] = deque()
        self._interrupted: list[tuple[bytes, Future[None]]] = []  # loads of the engine that is lost
        self._wanted: set[bytes] = set()  # data sets that the next engine process loads, too

    @property
    def has_been_ready(self) -> bool:
        """Whether any engine process has been ready."""
        return self._device is not None

    @property
    def description(self) -> Device:
        """The device, as the last engine process that was ready has described it."""
        if self._device is None:
            return Device(self.device.kind, label=self.device.label)
        return replace(self._device, label=self.device.label)

    @property
    def starting_since(self) -> float | None:
        """``time.monotonic()`` since when no engine process serves; None if one does."""
        return None if self.state is State.SERVING else self.since

    def ask_counters(self) -> None:
        """Ask the engine for its counters; `counters` has them soon."""
        self.tell(messages.RequestCounters())

    def connect(self) -> tuple[int, socket.socket]:
        """Make a connection to the engine; return the process's number and the front end's end.

        Raises:
            UnavailableError: if no engine is ready and has been sent its data sets.
            ResourceExhaustedError: if this process can open no more files.
        """
        with self.lock:
            channel = self.channel
            if channel is None or self.state < State.CONNECTABLE:
                raise unavailable()
            with self.reserve.lent():
                ours, theirs = socket_pair()
            with theirs:
                try:
                    channel.send(messages.ConnectFrontEnd(), theirs.fileno())
                except BaseException as error:
                    ours.close()
                    if isinstance(error, ChannelClosedError):
                        raise unavailable() from error
                    raise
            return self.process_number, ours

    def has(self, key: bytes) -> bool:
        """Return whether an engine process has loaded a data set, or loads it as it starts."""
        with self.lock:
            future = self._loads.get(key)
            return key in self._wanted if future is None else future.done()

    def load(self, dataset: StoredDataset) -> Future[None]:
        """Give a data set to the engine; without an engine the next one loads it as it starts.

        The future fails with ResourceExhaustedError if the device has no room, and with
        FailedPreconditionError if engines have died of the data set.
        """
        key, segment = dataset.key, dataset.segment
        with self.lock:
            try:
                self.quarantine.suspects.check(key)
            except FailedPreconditionError as error:
                return settled(error)
            self._wanted.add(key)
            if self.channel is None:
                return settled()
            future = self._loads.get(key)
            if future is not None:
                return future
            future = self._loads[key] = Future()
            load = messages.LoadDataset(key, dataset.layout, segment.identifier, segment.size)
            try:
                self.channel.send(load, segment.descriptor)
                self._unanswered.append((key, future))  # its answer is taken under the lock, too
            except ChannelClosedError:
                future.set_result(None)  # the next engine loads it as it starts
            except WarpfitError as error:
                del self._loads[key]
                self._wanted.discard(key)
                future.set_exception(error)
            return future

    def unload(self, key: bytes) -> None:
        """Make the engine forget a data set."""
        with self.lock:
            self._wanted.discard(key)
            if self._loads.pop(key, None) is not None:
                self.tell(messages.UnloadDataset(key))

    # ------------------------------------------------------------------- the supervisor's thread

    def spawn(self) -> tuple[subprocess.Popen[bytes], Channel]:
        """Start an engine process, or take the first one, which runs already."""
        first = self._started.pop(self.number, None)
        process, end, self._out_of_memory = first or start_engine(self._config, self.number)
        self.process_number = next(self._process_numbers)
        return process, Channel(end)

    def handle(self, channel: Channel, message: messages.Message, descriptor: int | None) -> None:
        """Act on a message of the engine."""
        match message:
            case messages.EngineReady():
                self._device = message.device
                self.ready(channel)
                for dataset in self.resident():
                    if dataset.key not in self._wanted:
                        continue
                    while len(self._unanswered) >= _LOADS_AHEAD:
                        self.handle(channel, *channel.receive())
                    self.load(dataset)
                # The engine takes connections after all earlier messages: after the data sets.
                self.state = State.CONNECTABLE
                self._connect()
                self.on_ready()
                self.serves()
            case messages.DatasetLoaded(key, error):
                with self.lock:
                    _, future = self._unanswered.popleft()  # the engine answers in their order
                    if error is not None and self._loads.get(key) is future:
                        del self._loads[key]
                        self._wanted.discard(key)
                if error is None:
                    future.set_result(None)
                else:
                    name, label = key.hex()[:16], self.device.label
                    _LOG.warning("data set %s on %s: %s", name, label, error)
                    future.set_exception(error)
            case messages.EngineCounters():
                self.counters = message.counters
            case _:
                _LOG.error("unexpected message %s with file %s", message, descriptor)

    def _connect(self) -> None:
        """Open this process's own connection to the engine, if there is an engine."""
        try:
            process, end = self.connect()
            self.connection.open(end, process)
        except UnavailableError:
            return  # the next engine brings a connection
        except ResourceExhaustedError as error:
            _LOG.error("no connection to the engine: %s", error)  # the probe asks again

    def lost(self) -> None:
        """Go on without an engine."""
        with self.lock:
            self._interrupted = list(self._unanswered)
            self._unanswered.clear()
            self._loads.clear()
        self.connection.shut()
        self.on_loss()

    def ended(self, code: int) -> None:
        """Count why an engine has ended, and tell the quarantine which data set it was loading."""
        interrupted, self._interrupted = self._interrupted, []
        if not self.stopping.is_set():
            cause = self.cause or cause_of_death(code)
            if cause == "SIGKILL" and out_of_memory_kills() > self._out_of_memory:
                cause = "out_of_memory"
            self.restarts[cause] += 1
            if cause not in UNRELATED_CAUSES:
                loading = interrupted[0][0] if interrupted else None  # it loads them in their order
                self.quarantine.engine_died(self.process_number, loading)
        for _, future in interrupted:
            future.set_result(None)  # the next engine loads it as it starts


def settled(error: WarpfitError | None = None) -> Future[None]:
    """Return a future that has failed with an error, or succeeded."""
    future: Future[None] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future


class Engines:
    """Owns the supervisors of all engines; an engine loads a data set when it is needed there.

    Args:
        config: the server's configuration.
        pool: memory of probes.
        started: engine processes that run already, by number; supervisors take them out.
    """

    def __init__(
        self,
        config: Config,
        pool: SegmentPool,
        started: dict[int, StartedEngine] | None = None,
    ) -> None:
        self.quarantine = Quarantine()
        """Suspects and quarantined batches and data sets, the same for all engines."""
        self._start_seconds = config.start_seconds
        numbers = itertools.count(1)
        self.supervisors = [
            EngineSupervisor(config, number, pool, self.quarantine, numbers, started)
            for number in range(len(config.engines))
        ]

    def start(
        self,
        resident: Callable[[], Iterator[StoredDataset]],
        on_ready: Callable[[EngineSupervisor], None] = lambda supervisor: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start all engines, and wait until each is ready or is too late or has failed.

        Engines that are not ready are tried again. ``resident`` yields the resident data sets,
        pinned; ``on_ready`` is called with its supervisor whenever an engine process has become
        ready. If the server ``is_stopping``, none is waited for.

        Raises:
            UnavailableError: if none can run on this machine; the log says why.
        """
        for supervisor in self.supervisors:
            supervisor.resident, supervisor.on_ready = resident, partial(on_ready, supervisor)
            supervisor.start()
        end = time.monotonic() + self._start_seconds
        for supervisor in self.supervisors:
            while not supervisor.settled.wait(_POLL_SECONDS):
                if is_stopping() or time.monotonic() > end:
                    break
        has_any = any(supervisor.has_been_ready for supervisor in self.supervisors)
        if not has_any and not is_stopping():
            self.stop()
            raise UnavailableError(
                "no engine has started",
                "ENGINE_FAILED",
                "The log lines above say why"
                + ("" if self.engine == "cpu" else "; --devices cpu runs everywhere"),
            )

    @property
    def engine(self) -> str:
        """Kind of the engines, ``"cpu"`` or ``"cuda"``."""
        return self.supervisors[0].device.kind

    def devices(self, serving: frozenset[str]) -> tuple[Device, ...]:
        """Return every device, and whether its label is among those that serve."""
        described = [supervisor.description for supervisor in self.supervisors]
        return tuple(replace(device, serving=device.label in serving) for device in described)

    @property
    def restarts(self) -> Counter[tuple[str, str]]:
        """Number of engine processes that ended unasked, by device and cause."""
        return Counter(
            {
                (supervisor.device.label, cause): count
                for supervisor in self.supervisors
                for cause, count in dict(supervisor.restarts).items()
            }
        )

    def holders(self, key: bytes) -> tuple[int, ...]:
        """Return the numbers of the engines that have loaded a data set."""
        return tuple(s.number for s in self.supervisors if s.has(key))

    def unload(self, key: bytes) -> None:
        """Make every engine forget a data set."""
        for supervisor in self.supervisors:
            supervisor.unload(key)

    def stop(self) -> None:
        """End the engine processes; requests in flight fail."""
        for supervisor in self.supervisors:
            supervisor.begin_stop()
        for supervisor in self.supervisors:
            supervisor.stop()

    def load(self, number: int, dataset: StoredDataset) -> Future[None]:
        """Have an engine load a data set, unless the data set may have crashed another engine.

        The other engine tries the data set first, as its next process starts.
        """
        holders, suspects = self.holders(dataset.key), self.quarantine.suspects
        if holders and number not in holders and suspects.check(dataset.key):
            return settled(unavailable())
        return self.supervisors[number].load(dataset)
