"""The main process's side of an engine process: starts it, gives it data sets, restarts it.

The main process never touches CUDA. When the engine process dies, its calls in flight fail with
UNAVAILABLE, a new process starts, and it loads the data sets that it had again from the main
process's copies.
"""

import logging
import socket
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Final

from warpfit.errors import (
    FailedPreconditionError,
    ResourceExhaustedError,
    UnavailableError,
    WarpfitError,
)
from warpfit.server_info import Device
from warpfit_server.config import Config
from warpfit_server.data.dataset_store import StoredDataset
from warpfit_server.ipc import messages
from warpfit_server.ipc.channel import Channel, ChannelClosedError
from warpfit_server.ipc.engine_connection import EngineConnection
from warpfit_server.ipc.in_flight_request import unavailable
from warpfit_server.ipc.quarantine import Quarantine
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.processes.engine_deaths import (
    UNRELATED_CAUSES,
    cause_of_death,
    out_of_memory_kills,
)
from warpfit_server.processes.engine_start import StartedEngine, kill_group, start_engine
from warpfit_server.system.shortages import DescriptorReserve
from warpfit_server.system.sockets import socket_pair

_LOG: Final = logging.getLogger("warpfit.supervisor")
#: Longest pause in seconds before an engine is started that failed to start before.
_LONGEST_PAUSE: Final = 30.0
#: Pause in seconds after an engine process could not even be spawned.
_SPAWN_PAUSE: Final = 1.0
#: Seconds that an engine has to log why it ends, after it has closed its channel.
_EXIT_SECONDS: Final = 2.0
#: Seconds that an engine has to end when the server stops.
_STOP_SECONDS: Final = 10.0
#: Most data sets that a new engine has been sent and has not loaded: with more of them, the
#: messages would fill both directions of the channel.
_LOADS_AHEAD: Final = 16
#: Descriptors that are kept for starting an engine process and connecting to it.
_RESERVED_FILES: Final = 12
#: Seconds between two looks whether the server stops while its engines start.
_POLL_SECONDS: Final = 0.1


class EngineSupervisor:
    """Owns the engine process of a device, the channel to it and this process's connection to it.

    ``number`` is that of the engine in ``config.engines``; ``process_numbers`` yields those of the
    engine processes, of all devices. The first process is taken out of ``started``, if it is there.
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
        self.quarantine = quarantine
        self.connection = EngineConnection(pool)
        self.connection.report = self.quarantine.report
        self.connection.on_loss = self._connect
        self.restarts: Counter[str] = Counter()
        """Engine processes that ended unasked, by cause; see `cause_of_death`."""
        self.counters: Mapping[str, float] = {}
        """The engine's counters when they were last asked for."""
        self.on_loss: Callable[[], None] = lambda: None
        """Called whenever an engine process is gone."""
        self._config = config
        self._reserve = DescriptorReserve(_RESERVED_FILES)
        self._lock = threading.Lock()
        self._process_numbers = process_numbers
        self._first = {} if started is None else started
        self._process_number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None  # None while no engine is ready
        self._ready: messages.EngineReady | None = None  # of the last engine that was ready
        self._was_ready = False  # the current one
        self._spawned = 0.0
        self._has_data = False  # it has been sent all data sets
        self._serves = False  # with its data sets
        self._cause = ""  # why this process has killed the engine
        self._out_of_memory = 0
        self._loads: dict[bytes, Future[None]] = {}
        # Those that the engine has not answered, in its order; some may be unloaded again.
        self._unanswered: deque[tuple[bytes, Future[None]]] = deque()
        self._wanted: set[bytes] = set()  # data sets that the next engine process loads, too
        self._loads_at_start: set[bytes] = set()
        self._started = threading.Event()
        self._stopping = threading.Event()
        self._resident: Callable[[], Iterator[StoredDataset]] = lambda: iter(())
        self._on_ready: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run_engines, name="supervisor", daemon=True)

    def start(
        self,
        resident: Callable[[], Iterator[StoredDataset]],
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the engine process; returns at once.

        ``resident`` yields the resident data sets, pinned; ``on_ready`` is called whenever an
        engine process has become ready.
        """
        self._resident = resident
        self._on_ready = on_ready
        self._thread.start()

    def wait_started(self, end: float, is_stopping: Callable[[], bool]) -> bool:
        """Wait until the first engine process is ready or has ended; return whether it is ready.

        The wait ends at the moment ``end`` of ``time.monotonic()``, or when the server stops.
        """
        while not (self._started.wait(_POLL_SECONDS) or is_stopping() or time.monotonic() > end):
            pass
        return self._ready is not None

    @property
    def description(self) -> Device:
        """The device, as the last engine process that was ready has described it."""
        if self._ready is None:
            return Device(self.device.kind, label=self.device.label)
        return replace(self._ready.device, label=self.device.label)

    @property
    def is_ready(self) -> bool:
        """Whether an engine process takes requests."""
        return self._channel is not None

    @property
    def loads(self) -> int:
        """Number of data sets that the engine has."""
        return len(self._wanted)

    @property
    def starting_since(self) -> float | None:
        """``time.monotonic()`` since when no engine process serves; None if one does."""
        return None if self._serves else self._spawned

    @property
    def process_id(self) -> int | None:
        """Process id of the engine."""
        return None if self._process is None else self._process.pid

    def replace(self, cause: str) -> None:
        """Kill the engine process, because it does not do its work; a new one starts.

        Takes no lock: a thread that holds it may be the one that waits for the engine.
        """
        process, self._cause = self._process, cause
        if process is not None:
            _LOG.error("the engine process %d is replaced: %s", process.pid, cause)
            process.kill()

    def ask_counters(self) -> None:
        """Ask the engine for its counters; `counters` has them soon."""
        with self._lock:
            self._tell(messages.RequestCounters())

    def connect(self) -> tuple[int, socket.socket]:
        """Make a connection to the engine; return the process's number and the front end's end.

        Raises:
            UnavailableError: if no engine is ready and has been sent its data sets.
            ResourceExhaustedError: if this process can open no more files.
        """
        with self._lock:
            if self._channel is None or not self._has_data:
                raise unavailable()
            with self._reserve.lent():
                ours, theirs = socket_pair()
            with theirs:
                try:
                    self._channel.send(messages.ConnectFrontEnd(), theirs.fileno())
                except BaseException as error:
                    ours.close()
                    if isinstance(error, ChannelClosedError):
                        raise unavailable() from error
                    raise
            return self._process_number, ours

    @property
    def process_number(self) -> int:
        """Number of the engine process, from 1; each process of any engine has another one."""
        return self._process_number

    def has(self, key: bytes) -> bool:
        """Return whether an engine process has loaded a data set, or loads it as it starts."""
        with self._lock:
            future = self._loads.get(key)
            return key in self._wanted if future is None else future.done()

    def load(self, dataset: StoredDataset) -> Future[None]:
        """Give a data set to the engine; without an engine the next one loads it as it starts.

        The future fails with ResourceExhaustedError if the device has no room, and with
        FailedPreconditionError if engines have died of the data set.
        """
        with self._lock:
            try:
                self.quarantine.suspects.check_dataset(dataset.key)
            except FailedPreconditionError as error:
                return settled(error)
            self._wanted.add(dataset.key)
            if self._channel is None:
                return settled()
            return self._load(self._channel, dataset)

    def unload(self, key: bytes) -> None:
        """Make the engine forget a data set."""
        with self._lock:
            self._wanted.discard(key)
            if self._loads.pop(key, None) is not None:
                self._tell(messages.UnloadDataset(key))

    def begin_stop(self) -> None:
        """Tell the engine process to end, or kill it if it is not ready; requests fail."""
        self._stopping.set()
        with self._lock:
            self._tell(messages.Stop())
            if self._channel is None and self._process is not None:
                kill_group(self._process)

    def stop(self) -> None:
        """End the engine process and wait until it has."""
        self.begin_stop()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive() and self._process is not None:  # it hangs
            kill_group(self._process)
            self._thread.join(_STOP_SECONDS)

    def _connect(self) -> None:
        """Open this process's connection, if there is an engine."""
        try:
            process, end = self.connect()
            self.connection.open(end, process)
        except UnavailableError:
            return  # the next engine brings a connection
        except ResourceExhaustedError as error:
            _LOG.error("no connection to the engine: %s", error)  # the probe asks again

    # ------------------------------------------------------------------- under self._lock

    def _load(self, channel: Channel, dataset: StoredDataset) -> Future[None]:
        future = self._loads.get(dataset.key)
        if future is not None:
            return future
        future = self._loads[dataset.key] = Future()
        segment = dataset.segment
        layout = replace(dataset.layout, names=())  # as long as a caller likes, and not needed
        load = messages.LoadDataset(dataset.key, layout, segment.identifier, segment.size)
        try:
            channel.send(load, segment.descriptor)
            self._unanswered.append((dataset.key, future))  # `_settle_load` waits for the lock
        except ChannelClosedError:
            future.set_result(None)  # the next engine loads it as it starts
        except WarpfitError as error:
            del self._loads[dataset.key]
            self._wanted.discard(dataset.key)
            future.set_exception(error)
        return future

    def _tell(self, message: messages.Message, descriptor: int | None = None) -> None:
        """Send to the engine if there is one; a dying engine need not get it."""
        if self._channel is not None:
            try:
                self._channel.send(message, descriptor)
            except (ChannelClosedError, WarpfitError) as error:
                _LOG.warning("the engine was not sent %s: %s", type(message).__name__, error)

    # ------------------------------------------------------------------- the supervisor's thread

    def _run_engines(self) -> None:
        """Run one engine process after the other until the server stops."""
        failures = 0
        while not self._stopping.is_set():
            try:
                code = self._run_engine()
            except Exception:  # whatever it is, another engine must come
                _LOG.exception("the engine process of %s could not be run", self.device.label)
                self._started.set()
                self._stopping.wait(_SPAWN_PAUSE)
                continue
            if self._stopping.is_set():
                return
            if not self._started.is_set():
                failures = 2  # it is not likely to start the next time
                self._started.set()
            _LOG.error("engine process of %s: exit code %s", self.device.label, code)
            # After an engine that was ready, the next one starts at once: its clients wait.
            failures = 0 if self._was_ready else failures + 1
            pause = 0.0 if failures <= 2 else min(_LONGEST_PAUSE, 0.25 * 2**failures)
            self._stopping.wait(pause)

    def _run_engine(self) -> int:
        """Run one engine process to its end; return its exit status."""
        first = self._first.pop(self.number, None)
        with self._reserve.lent():  # also a server whose descriptors are all in use replaces it
            process, end, kills = first or start_engine(self._config, self.number)
        channel = Channel(end)
        with self._lock:
            self._process, self._cause, self._spawned = process, "", time.monotonic()
            self._was_ready = False
            self._process_number = next(self._process_numbers)
            self._loads_at_start = set()
            self._out_of_memory = kills
            if self._stopping.is_set():  # `begin_stop` has seen another process, or none
                kill_group(process)
        lost: list[tuple[bytes, Future[None]]] = []
        try:
            while True:
                self._handle(channel, *channel.receive())
        except ChannelClosedError:
            lost = self._lose_engine()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_SECONDS)
        except BaseException:
            for _, future in self._lose_engine():
                future.set_result(None)
            raise
        finally:
            channel.close()
            if self._stopping.is_set():  # else the next engine waits for what is being compiled
                kill_group(process)
            process.kill()
        code = process.wait()
        if not self._stopping.is_set():
            self._record_death(code, lost[0][0] if lost else None)  # it loads them in their order
        for _, future in lost:
            future.set_result(None)  # the next engine loads it as it starts
        return code

    def _handle(self, channel: Channel, message: messages.Message, descriptor: int | None) -> None:
        match message:
            case messages.EngineReady():
                self._serve(channel, message)
            case messages.DatasetLoaded():
                self._settle_load(message)
            case messages.EngineCounters():
                self.counters = message.counters
            case _:
                _LOG.error("unexpected message %s with file %s", message, descriptor)

    def _serve(self, channel: Channel, ready: messages.EngineReady) -> None:
        """Give its data sets and this process's connection to a new engine."""
        with self._lock:
            self._ready = ready
            self._was_ready = True
            self._channel = channel
        for dataset in self._resident():
            if dataset.key not in self._wanted:
                continue
            while self._loads_ahead() >= _LOADS_AHEAD:
                self._handle(channel, *channel.receive())
            self._loads_at_start.add(dataset.key)
            self.load(dataset)
        # The engine serves the connection after all earlier messages: after the data sets.
        self._has_data = True
        self._connect()
        self._on_ready()
        self._serves = True
        self._started.set()

    def _loads_ahead(self) -> int:
        """Return how many data sets the engine has been sent and has not loaded."""
        with self._lock:
            return len(self._unanswered)

    def _settle_load(self, message: messages.DatasetLoaded) -> None:
        with self._lock:
            _, future = self._unanswered.popleft()  # the engine answers each, in their order
            if message.error is not None and self._loads.get(message.key) is future:
                del self._loads[message.key]
                self._wanted.discard(message.key)
        if message.error is None:
            future.set_result(None)
        else:
            name = message.key.hex()[:16]
            _LOG.warning("data set %s on %s: %s", name, self.device.label, message.error)
            future.set_exception(message.error)

    def _lose_engine(self) -> list[tuple[bytes, Future[None]]]:
        """Go on without an engine; return the data sets that it had not loaded yet, in order."""
        with self._lock:
            self._channel, self._spawned = None, time.monotonic()
            self._has_data = self._serves = False
            lost = list(self._unanswered)
            self._unanswered.clear()
            self._loads.clear()
        self.connection.shut()
        self.on_loss()
        return lost

    def _record_death(self, code: int, loading: bytes | None) -> None:
        """Count why an engine has ended, and let the quarantine know what it was loading."""
        cause = self._cause or cause_of_death(code)
        if cause == "SIGKILL" and out_of_memory_kills() > self._out_of_memory:
            cause = "out_of_memory"
        self.restarts[cause] += 1
        self.quarantine.engine_died(
            self._process_number,
            is_blamed=cause not in UNRELATED_CAUSES,
            loading=loading,
            at_start=loading in self._loads_at_start,
        )


def settled(error: WarpfitError | None = None) -> Future[None]:
    """Return a future that has failed with an error, or succeeded."""
    future: Future[None] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    return future
