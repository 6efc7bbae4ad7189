"""The front door's side of the further doors: starts them, leases data sets to them."""

from __future__ import annotations

import logging
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from warpfit.errors import ResourceExhaustedError, UnavailableError, WarpfitError
from warpfit_server.config import Config
from warpfit_server.ipc import messages
from warpfit_server.ipc.channel import Channel, ChannelClosedError
from warpfit_server.ipc.quarantine import Casualty, Survivor, SuspectList
from warpfit_server.observability.measurements import Recorder
from warpfit_server.processes.supervisor import EngineSupervisor
from warpfit_server.rpc.servicer import ResidentLeases
from warpfit_server.tenancy.quotas import Ledger

_LOG: Final = logging.getLogger("warpfit.doors")
#: A door that dies is started again after this many seconds.
_PAUSE: Final = 0.5
#: Longest wait for a door to take notice of a release.
_FORGET_SECONDS: Final = 2.0


class _Door:
    """One door process, its control channel and what is leased to it."""

    def __init__(self, process: subprocess.Popen[bytes], control: Channel) -> None:
        self.process = process
        self.control = control
        self.serving = threading.Event()
        self.heard = time.monotonic()
        """When the last message came."""
        self.answers = False
        """What its last probe has found."""
        self.answered = time.monotonic()
        """When a probe has found that it answers, or it got a connection to a new engine."""
        self.probed = 0.0
        """When its last probe ended."""
        self.leases: dict[bytes, list[ExitStack]] = {}
        self.forgetting: dict[bytes, threading.Event] = {}

    def end_lease(self, content_id: bytes) -> None:
        """End one lease on a data set."""
        leases = self.leases[content_id]
        leases.pop().close()
        if not leases:
            del self.leases[content_id]


class Doors:
    """Owns the further doors. Each has a thread here that starts it, answers it, restarts it.

    Args:
        config: the server's configuration.
        supervisor: of the engine.
        leases: the front door's data sets.
        ledger: of what is in use, which the doors share.
        recorder: takes in what the doors measure.

    """

    def __init__(
        self,
        config: Config,
        supervisor: EngineSupervisor,
        leases: ResidentLeases,
        ledger: Ledger,
        recorder: Recorder,
    ) -> None:
        self.seed = secrets.randbits(64)
        """Of the question that all processes ask the engine."""
        self._config = config
        supervisor.quarantine.on_change = self._tell_suspects
        self._recorder = recorder
        self._ready = False
        self._supervisor = supervisor
        self._leases = leases
        self._ledger = ledger
        self._lock = threading.Lock()
        self._doors: list[_Door] = []
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._started: list[threading.Event] = []
        self._open = threading.Event()

    def start(self, count: int, port: int, front_door: str) -> None:
        """Start the processes of ``count`` doors, which takes a second; returns at once.

        Args:
            count: how many.
            port: the port that they share with the front door.
            front_door: address at which the front door answers what they pass on.

        """
        self._started = [threading.Event() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._keep, args=(port, front_door, number, event), daemon=True)
            for number, event in enumerate(self._started, 1)
        ]
        for thread in self._threads:
            thread.start()

    def open(self) -> None:
        """Let the doors take calls and wait until they do.

        Raises:
            UnavailableError: if one ends as it starts.

        """
        self._open.set()
        for event in self._started:
            event.wait()
        if len(self._serving()) < len(self._started):
            raise UnavailableError(
                "a further front-door process did not start",
                "DOOR_FAILED",
                "See the log lines above; --front-doors 1 needs none",
            )

    def engine_ready(self) -> None:
        """Give every door a connection to the new engine."""
        for door in self._serving():
            door.answered = time.monotonic()
            self._connect(door)

    def tell_readiness(self, ready: bool) -> None:
        """Tell every door whether calls can be answered."""
        self._ready = ready
        for door in self._serving():
            self._tell(door, messages.Readiness(ready))

    def answer(self) -> bool:
        """Tell whether the last probe of every door was answered, and not too long ago."""
        limit = time.monotonic() - self._config.probe_seconds - self._config.probe_timeout
        return all(door.answers and door.probed >= limit for door in self._serving())

    def kill_silent(self, *, engine_answers: bool) -> None:
        """Kill doors that hang, so that new ones start.

        Args:
            engine_answers: whether the engine answers this process, so that a door to which it has
                given no answer for long is broken, too.

        """
        limit = time.monotonic() - self._config.hang_seconds
        for door in self._serving():
            if door.heard < limit or (engine_answers and door.answered < limit):
                _LOG.error("door %d hangs", door.process.pid)
                door.process.kill()

    def processes(self) -> dict[str, int]:
        """Return the process ids of the doors by role."""
        return {f"door {n}": door.process.pid for n, door in enumerate(self._serving(), 1)}

    def forget(self, content_id: bytes) -> None:
        """Tell every door that a data set was released; return when no new call uses it."""
        told = []
        for door in self._serving():
            event = door.forgetting.setdefault(content_id, threading.Event())
            try:
                door.control.send(messages.Forget(content_id))
            except ChannelClosedError:
                continue
            told.append((door, event))
        for door, event in told:
            if not event.wait(_FORGET_SECONDS):
                _LOG.warning("door %d does not answer", door.process.pid)

    def stop(self) -> None:
        """Let the doors finish their calls within the grace period, and end them."""
        self._stopping.set()
        for door in self._serving():
            try:
                door.control.send(messages.Quit())
            except ChannelClosedError:
                _LOG.debug("door %d is gone", door.process.pid)
        for thread in self._threads:
            thread.join(self._config.grace + 5)

    def _serving(self) -> list[_Door]:
        with self._lock:
            return [door for door in self._doors if door.serving.is_set()]

    def _keep(self, port: int, front_door: str, number: int, started: threading.Event) -> None:
        """Run one door after the other until the server stops."""
        while not self._stopping.is_set():
            try:
                door = self._spawn(port, front_door, number)
            except OSError as error:
                _LOG.error("no new door process: %s", error)
                if not started.is_set():
                    started.set()
                    return
                self._stopping.wait(_PAUSE)
                continue
            with self._lock:
                self._doors.append(door)
            try:
                self._attend(door, started)
            except ChannelClosedError:
                _LOG.debug("door %d has closed its channel", door.process.pid)
            except Exception:
                _LOG.exception("door %d is replaced", door.process.pid)
                door.process.kill()
            finally:
                self._bury(door)
                self._ledger.bury(number)
            if not started.is_set():  # it has never served
                started.set()
                return
            if not self._stopping.is_set():
                _LOG.error("door %d ended; a new one starts", door.process.pid)
                self._stopping.wait(_PAUSE)

    def _spawn(self, port: int, front_door: str, number: int) -> _Door:
        control, theirs = Channel.pair()
        with theirs:
            process = subprocess.Popen(
                [
                    *(
                        sys.executable,
                        "-m",
                        "warpfit_server.processes.front_end",
                        str(theirs.fileno()),
                    ),
                    *(str(port), front_door, str(self._ledger.descriptor), str(number)),
                    self._config.to_json(),
                ],
                pass_fds=[theirs.fileno(), self._ledger.descriptor],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for the front door, which drains first
            )
        return _Door(process, control)

    def _attend(self, door: _Door, started: threading.Event) -> None:
        self._open.wait()
        door.control.send(messages.Begin(self.seed))
        while True:
            message, _ = door.control.receive()
            door.heard = time.monotonic()
            match message:
                case messages.Recorded():
                    self._recorder.add(door.process.pid, message.delta)
                case messages.Serving():
                    door.serving.set()
                    self._tell(door, self._supervisor.quarantine.current)
                    self._connect(door)
                    self._tell(door, messages.Readiness(self._ready))
                    started.set()
                case messages.Reconnect():
                    self._connect(door)
                case messages.Probed():
                    door.answers, door.probed = message.answers, door.heard
                    door.answered = door.heard if message.answers else door.answered
                case Casualty() | Survivor():
                    self._supervisor.quarantine.report(message)
                case messages.Lookup():
                    door.control.send(self._lease(door, message.content_id))
                case messages.Unused():
                    door.end_lease(message.content_id)
                case messages.Forgotten():
                    event = door.forgetting.pop(message.content_id, None)
                    if event is not None:
                        event.set()
                case _:
                    _LOG.error("unexpected message %s", message)

    def _lease(self, door: _Door, content_id: bytes) -> messages.Found | messages.Missing:
        lease = ExitStack()
        try:
            layout = lease.enter_context(self._leases.lease(content_id))
        except WarpfitError as error:
            return messages.Missing(content_id, error)
        # More than one if a door asks again while calls still use what it was told to forget.
        door.leases.setdefault(content_id, []).append(lease)
        return messages.Found(content_id, replace(layout, names=()))  # names may be very long

    def _connect(self, door: _Door) -> None:
        try:
            engine, end = self._supervisor.connect()
        except UnavailableError:
            return  # the next engine brings a connection
        except ResourceExhaustedError as error:
            _LOG.error("no connection of door %d to the engine: %s", door.process.pid, error)
            return  # the door asks again
        with end:
            self._tell(door, messages.EngineSocket(engine), [end.fileno()])

    def _tell_suspects(self, known: SuspectList) -> None:
        for door in self._serving():
            self._tell(door, known)

    def _tell(
        self, door: _Door, message: messages.Message, descriptors: Sequence[int] = ()
    ) -> None:
        try:
            door.control.send(message, descriptors)
        except ChannelClosedError:
            _LOG.debug("door %d is gone", door.process.pid)
        except WarpfitError as error:
            _LOG.error("door %d was not told: %s", door.process.pid, error)

    def _bury(self, door: _Door) -> None:
        with self._lock:
            self._doors.remove(door)
        self._recorder.forget(door.process.pid)
        door.serving.clear()
        for leases in door.leases.values():
            for lease in leases:
                lease.close()
        for event in list(door.forgetting.values()):
            event.set()
        door.control.close()
        try:
            door.process.wait(self._config.grace if self._stopping.is_set() else 0.1)
        except subprocess.TimeoutExpired:
            door.process.kill()
            door.process.wait()
