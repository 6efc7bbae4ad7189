"""The front door's side of the engine process: starts it, talks to it, restarts it.

The front door never touches CUDA. When the engine process dies, the calls in flight fail with
UNAVAILABLE, a new process starts and the data sets are loaded again from the host copies.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

from warpfit.errors import UnavailableError
from warpfit.info import Device
from warpfit_server import messages
from warpfit_server.channel import Channel, ChannelClosedError, socket_pair
from warpfit_server.code_cache import engine_environment
from warpfit_server.config import Config
from warpfit_server.datasets import ResidentDataset
from warpfit_server.engine.stuck import EXIT_BROKEN, EXIT_CANNOT_RUN, EXIT_STUCK
from warpfit_server.engine_connection import EngineConnection, unavailable
from warpfit_server.segments import SegmentPool

_LOG: Final = logging.getLogger("warpfit.supervisor")
_LONGEST_PAUSE: Final = 30.0
#: What exit statuses of the engine process mean.
_CAUSES: Final = {EXIT_CANNOT_RUN: "cannot_run", EXIT_BROKEN: "broken", EXIT_STUCK: "stuck"}


class EngineSupervisor:
    """Owns the engine process, the channel to it and this process's connection for calls."""

    def __init__(self, config: Config, pool: SegmentPool) -> None:
        self.connection = EngineConnection(pool, self._reconnect)
        self._config = config
        self._lock = threading.Lock()
        self._channel: Channel | None = None  # None while no engine is ready
        self._loads: dict[bytes, Future[None]] = {}
        self._ready: messages.Ready | None = None
        self._started = threading.Event()
        self._stopping = threading.Event()
        self._resident: Callable[[], Iterator[ResidentDataset]] = lambda: iter(())
        self._on_ready: Callable[[], None] = lambda: None
        self._process: subprocess.Popen[bytes] | None = None
        self._spawned = 0.0
        self._cause = ""
        self._was_ready = False
        self.restarts: Counter[str] = Counter()
        """Engine processes that ended unasked, by cause; see `cause_of_death`."""
        self.counters: Mapping[str, float] = {}
        """The engine's counters when they were last asked for."""
        self.on_loss: Callable[[], None] = lambda: None
        """Called whenever an engine process is gone."""
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def start(
        self,
        resident: Callable[[], Iterator[ResidentDataset]],
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the engine process and wait until it is ready.

        Args:
            resident: yields the data sets, leased, that every new engine process must load.
            on_ready: called whenever an engine process has become ready.

        Raises:
            UnavailableError: if the engine cannot run on this machine; its log says why.

        """
        self._resident = resident
        self._on_ready = on_ready
        self._thread.start()
        self._started.wait()
        if self._ready is None:
            raise UnavailableError(
                f"the {self._config.engine} engine did not start",
                "ENGINE_FAILED",
                "See the log lines above; --engine cpu runs everywhere",
            )

    @property
    def engine(self) -> str:
        """Name of the engine."""
        return self._ready.engine if self._ready else self._config.engine

    @property
    def devices(self) -> tuple[Device, ...]:
        """What the engine computes on."""
        return self._ready.devices if self._ready else ()

    @property
    def starting_since(self) -> float | None:
        """``time.monotonic()`` since when an engine process starts; None if one is ready."""
        return None if self._channel is not None else self._spawned

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
            self._tell(messages.Count())

    def connect(self) -> socket.socket:
        """Make a connection to the engine; return this side's end.

        Raises:
            UnavailableError: if no engine is ready.

        """
        with self._lock:
            if self._channel is None:
                raise unavailable()
            ours, theirs = socket_pair()
            with theirs:
                try:
                    self._channel.send(messages.Connect(), [theirs.fileno()])
                except ChannelClosedError as error:
                    ours.close()
                    raise unavailable() from error
            return ours

    def _reconnect(self) -> None:
        """Connect again to an engine that has closed the connection and goes on."""
        with suppress(UnavailableError):  # it is gone; the next one brings a connection
            self.connection.open(self.connect())

    def settled(self, dataset: ResidentDataset) -> None:
        """Wait until the engine has a data set that is on its way to it.

        Raises:
            ResourceExhaustedError: if the device has no room for it.

        """
        self.load(dataset).result()

    def load(self, dataset: ResidentDataset) -> Future[None]:
        """Give a data set to the engine; without an engine the next one loads it as it starts.

        The future fails with ResourceExhaustedError if the device has no room.
        """
        with self._lock:
            if self._channel is None:
                done: Future[None] = Future()
                done.set_result(None)
                return done
            return self._load(self._channel, dataset)

    def unload(self, content_id: bytes) -> None:
        """Make the engine forget a data set."""
        with self._lock:
            if self._loads.pop(content_id, None) is not None:
                self._tell(messages.Unload(content_id))

    def stop(self) -> None:
        """End the engine process; jobs in flight fail."""
        self._stopping.set()
        with self._lock:
            self._tell(messages.Stop())
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    # ------------------------------------------------------------------- under self._lock

    def _load(self, channel: Channel, dataset: ResidentDataset) -> Future[None]:
        future = self._loads.get(dataset.key)
        if future is not None:
            return future
        future = self._loads[dataset.key] = Future()
        segment = dataset.segment
        load = messages.Load(dataset.key, dataset.layout, segment.identifier, segment.size)
        try:
            channel.send(load, [segment.descriptor])
        except ChannelClosedError:
            future.set_result(None)  # the next engine loads it as it starts
        return future

    def _tell(self, message: messages.Message) -> None:
        """Send to the engine if there is one; a dying engine need not hear it."""
        if self._channel is not None:
            try:
                self._channel.send(message)
            except ChannelClosedError:
                _LOG.debug("the engine is gone, %s not sent", type(message).__name__)

    # ------------------------------------------------------------------- the watching thread

    def _watch(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            code = self._run_engine()
            if self._stopping.is_set():
                return
            self.restarts[self._cause or cause_of_death(code)] += 1
            # One that was ready died of its work, and its clients wait: the next starts at once.
            failures = 0 if self._was_ready else failures + 1
            if not self._started.is_set():
                _LOG.error("the engine process ended with code %s as it started", code)
                self._started.set()
                return
            pause = 0.0 if failures <= 2 else min(_LONGEST_PAUSE, 0.25 * 2**failures)
            _LOG.error("the engine process ended with code %s; a new one starts", code)
            self._stopping.wait(pause)

    def _run_engine(self) -> int:
        channel, theirs = Channel.pair()
        with theirs:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "warpfit_server.engine.process"),
                    *(str(theirs.fileno()), self._config.to_json()),
                ],
                env=engine_environment(self._config.cache_path),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for the front door, which drains first
            )
        with self._lock:
            self._process, self._cause, self._spawned = process, "", time.monotonic()
            self._was_ready = False
        try:
            while True:
                self._handle(channel, *channel.receive())
        except (ChannelClosedError, UnavailableError):
            self._forget_engine()
        finally:
            channel.close()
            process.kill()
        return process.wait()

    def _handle(self, channel: Channel, message: messages.Message, descriptors: list[int]) -> None:
        match message:
            case messages.Ready():
                self._welcome(channel, message)
            case messages.Loaded():
                self._settle_load(message)
            case messages.Counted():
                self.counters = message.counters
            case _:
                _LOG.error("unexpected message %s with %d files", message, len(descriptors))

    def _welcome(self, channel: Channel, ready: messages.Ready) -> None:
        with self._lock:
            self._ready = ready
            self._was_ready = True
            self._channel = channel
        for dataset in self._resident():
            self.load(dataset)
        # The engine serves it after it has dealt with what was sent before: the data sets.
        self.connection.open(self.connect())
        self._on_ready()
        self._started.set()

    def _settle_load(self, message: messages.Loaded) -> None:
        with self._lock:
            future = self._loads.get(message.content_id)
            if message.error is not None:
                self._loads.pop(message.content_id, None)
        if future is None:
            return
        if message.error is None:
            future.set_result(None)
        else:
            _LOG.warning("data set %s: %s", message.content_id.hex()[:16], message.error)
            future.set_exception(message.error)

    def _forget_engine(self) -> None:
        with self._lock:
            self._channel = None
            loads, self._loads = list(self._loads.values()), {}
        self.connection.shut()
        self.on_loss()
        for future in loads:
            if not future.done():
                future.set_result(None)


def cause_of_death(code: int) -> str:
    """Name why a process ended, from its exit status: a signal, or what it says itself."""
    if code < 0:
        return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return _CAUSES.get(code, f"exit {code}")
