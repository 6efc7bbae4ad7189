"""Starts, watches and restarts the front-end processes, and leases data sets to them."""

import logging
import secrets
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Final

from warpfit.errors import ResourceExhaustedError, UnavailableError, WarpfitError
from warpfit_server.config import Config
from warpfit_server.data.dataset_store import DatasetStore
from warpfit_server.ipc import messages
from warpfit_server.ipc.channel import Channel, ChannelClosedError
from warpfit_server.ipc.quarantine import ClearedSuspect, InterruptedBatch
from warpfit_server.ipc.router import Leased
from warpfit_server.observability.measurements import Recorder
from warpfit_server.processes.engines import Engines
from warpfit_server.system.shortages import DescriptorReserve
from warpfit_server.tenancy.quotas import QuotaTable

_LOG: Final = logging.getLogger("warpfit.front_ends")
#: Descriptors that are kept for starting a front-end process.
_RESERVED_FILES: Final = 12
#: Seconds after which a process that has ended is started again.
_RESTART_SECONDS: Final = 0.5
#: Longest wait in seconds until a front end takes notice of a release.
_RELEASE_SECONDS: Final = 2.0
#: Seconds after which front ends are told again which devices serve.
_REPEAT_SECONDS: Final = 1.0
#: Seconds after which a process that reads no messages is given up.
_SEND_SECONDS: Final = 5.0


@dataclass(eq=False, slots=True)
class _ProbeRecord:
    """The outcomes of a front end's probes of one engine."""

    answers: bool = False
    """Whether the last one was answered rightly."""
    ended: float = 0.0
    """Moment at which the last one ended."""
    answered: float = field(default_factory=time.monotonic)
    """Moment of the last right answer, or of a new connection to the engine."""


@dataclass(eq=False, slots=True)
class _FrontEnd:
    """A front-end process, its control channel and what is leased to it."""

    process: subprocess.Popen[bytes]
    control: Channel
    serving: threading.Event = field(default_factory=threading.Event)
    last_message: float = field(default_factory=time.monotonic)
    """Moment of the last message, on the monotonic clock, as all moments here."""
    probes: dict[int, _ProbeRecord] = field(default_factory=lambda: defaultdict(_ProbeRecord))
    """Its probes of each engine, by number."""
    leases: dict[bytes, list[tuple[ExitStack, Leased]]] = field(default_factory=dict)
    """More than one if it asks again while calls still use a data set that was released."""
    releases: dict[bytes, threading.Event] = field(default_factory=dict)
    """Released data sets; each event is set once the process has taken notice."""

    def end_lease(self, key: bytes) -> None:
        """End one lease on a data set."""
        leases = self.leases[key]
        leases.pop()[0].close()
        if not leases:
            del self.leases[key]


class FrontEndSupervisor:
    """Owns the front-end processes beside this one, the main process.

    Each has a thread here that starts it, answers its messages and restarts it.
    """

    def __init__(
        self,
        config: Config,
        engines: Engines,
        datasets: DatasetStore,
        quotas: QuotaTable,
        recorder: Recorder,
    ) -> None:
        self.seed = secrets.randbits(64)
        """Seed of the probe, which is the same in all processes."""
        self._config = config
        self._reserve = DescriptorReserve(_RESERVED_FILES)
        self._engines = engines
        engines.quarantine.on_change = self._tell_all
        self._datasets = datasets
        self._quotas = quotas
        self._recorder = recorder
        self._lock = threading.Lock()
        self._front_ends: list[_FrontEnd] = []
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._started: list[threading.Event] = []
        self._open = threading.Event()
        self._told_at = 0.0

    def start(self, count: int, port: int, main_address: str) -> None:
        """Start processes, which share the port and forward calls to the main one's own address.

        That takes a second; this returns at once.
        """
        self._started = [threading.Event() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._keep, args=(port, main_address, *numbered), daemon=True)
            for numbered in enumerate(self._started, 1)
        ]
        for thread in self._threads:
            thread.start()

    def open(self) -> None:
        """Let the processes take calls and wait until they do.

        Raises:
            UnavailableError: if one ends as it starts.
        """
        self._open.set()
        for event in self._started:
            event.wait()
        if len(self._serving()) < len(self._started):
            raise UnavailableError(
                "a front-end process did not start",
                "FRONT_END_FAILED",
                "See the log lines above; --front-ends 1 needs none",
            )

    def engine_ready(self, engine: int) -> None:
        """Give every process a connection to the new process of an engine."""
        for front_end in self._serving():
            front_end.probes[engine].answered = time.monotonic()
            self._connect(front_end, engine)

    def announce_readiness(self, serving: frozenset[str]) -> None:
        """Tell every process which devices serve."""
        self._engines.router.serving = serving
        self._told_at = time.monotonic()
        self._tell_all(messages.SetReadiness(serving))

    def repeat_readiness(self, now: float) -> None:
        """Tell it again now and then: a front end whose main process is silent is not ready."""
        if now - self._told_at >= _REPEAT_SECONDS:
            self.announce_readiness(self._engines.router.serving)

    def all_answered_by(self, engine: int) -> bool:
        """Return whether an engine answered the last probe of every process, not too long ago."""
        limit = time.monotonic() - self._config.probe_seconds - self._config.probe_timeout
        probes = [front.probes[engine] for front in self._serving()]
        return all(probe.answers and probe.ended >= limit for probe in probes)

    def kill_silent(self, answering: Collection[int]) -> None:
        """Kill processes that hang, so that new ones start.

        The engines of these numbers answer the main process. So a process to which one of them has
        given no answer for long is broken, too.
        """
        limit = time.monotonic() - self._config.hang_seconds
        for front_end in self._serving():
            has_no_answer = any(front_end.probes[n].answered < limit for n in answering)
            if front_end.last_message < limit or has_no_answer:
                _LOG.error("front end %d hangs", front_end.process.pid)
                front_end.process.kill()

    def processes(self) -> dict[str, int]:
        """Return the process ids by role."""
        return {f"front end {n}": front.process.pid for n, front in enumerate(self._serving(), 1)}

    def announce_release(self, key: bytes) -> None:
        """Tell every process that a data set was released; return when no new call uses it."""
        told = []
        for front_end in self._serving():
            event = front_end.releases.setdefault(key, threading.Event())
            if self._tell(front_end, messages.DatasetReleased(key)):
                told.append((front_end, event))
        for front_end, event in told:
            if not event.wait(_RELEASE_SECONDS):
                _LOG.warning("front end %d does not answer", front_end.process.pid)

    def stop(self) -> None:
        """Let the processes finish their calls within the grace period, and end them."""
        self._stopping.set()
        self._tell_all(messages.Stop())
        for thread in self._threads:
            thread.join(self._config.grace + 5)
        with self._lock:
            hanging = list(self._front_ends)
        for front_end in hanging:
            front_end.process.kill()

    def _serving(self) -> list[_FrontEnd]:
        with self._lock:
            return [front_end for front_end in self._front_ends if front_end.serving.is_set()]

    def _keep(self, port: int, main_address: str, number: int, started: threading.Event) -> None:
        """Run one process after the other until the server stops or one has never served."""
        while not self._stopping.is_set():
            try:
                front_end = self._spawn(port, main_address, number)
            except OSError as error:
                _LOG.error("no new front-end process: %s", error)
            else:
                self._run(front_end, started)
                self._quotas.clear_process(number)
                if started.is_set() and not self._stopping.is_set():
                    _LOG.error("front end %d ended; a new one starts", front_end.process.pid)
            if not started.is_set():
                started.set()
                return
            self._stopping.wait(_RESTART_SECONDS)

    def _spawn(self, port: int, main_address: str, number: int) -> _FrontEnd:
        command = (sys.executable, "-m", "warpfit_server.processes.front_end")
        with self._reserve.lent():
            control, theirs = Channel.pair()
            control.give_up_after(_SEND_SECONDS)
            arguments = (theirs.fileno(), port, main_address, self._quotas.descriptor, number)
            with theirs:
                process = subprocess.Popen(
                    [*command, *map(str, arguments), self._config.to_json()],
                    pass_fds=[theirs.fileno(), self._quotas.descriptor],
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C is for the main process, which drains first
                )
        return _FrontEnd(process, control)

    def _run(self, front_end: _FrontEnd, started: threading.Event) -> None:
        """Answer a process's messages until it ends."""
        with self._lock:
            self._front_ends.append(front_end)
        try:
            self._open.wait()
            front_end.control.send(messages.StartServing(self.seed))
            while True:
                message, _ = front_end.control.receive()
                front_end.last_message = time.monotonic()
                self._handle(front_end, message)
                if front_end.serving.is_set():
                    started.set()
        except ChannelClosedError:
            _LOG.debug("front end %d has closed its channel", front_end.process.pid)
        except Exception:
            _LOG.exception("front end %d is replaced", front_end.process.pid)
            front_end.process.kill()
        finally:
            self._clean_up(front_end)

    def _handle(self, front_end: _FrontEnd, message: messages.Message) -> None:
        match message:
            case messages.MetricsRecorded():
                self._recorder.add(front_end.process.pid, message.delta)
            case messages.FrontEndReady():
                front_end.serving.set()
                self._tell(front_end, self._engines.quarantine.current)
                for supervisor in self._engines.supervisors:
                    self._connect(front_end, supervisor.number)
                self._tell(front_end, messages.SetReadiness(self._engines.router.serving))
                if self._stopping.is_set():  # which `stop` tells those that serve
                    self._tell(front_end, messages.Stop())
            case messages.RequestConnection():
                self._connect(front_end, message.engine)
            case messages.RequestLoad():
                self._load(front_end, message.engine, message.key)
            case messages.ProbeResult():
                probe, now = front_end.probes[message.engine], front_end.last_message
                probe.answers, probe.ended = message.answers, now
                if message.answers:
                    probe.answered = now
            case InterruptedBatch() | ClearedSuspect():
                self._engines.quarantine.report(message)
            case messages.LeaseDataset():
                front_end.control.send(self._lease(front_end, message.key))
            case messages.ReturnLease():
                front_end.end_lease(message.key)
            case messages.ReleaseNoticed():
                event = front_end.releases.pop(message.key, None)
                if event is not None:
                    event.set()
            case _:
                _LOG.error("unexpected message %s", message)

    def _lease(self, front_end: _FrontEnd, key: bytes) -> messages.DatasetLease:
        lease = ExitStack()
        try:
            data = lease.enter_context(self._engines.lease(self._datasets, key))
        except WarpfitError as error:
            return messages.DatasetLease(key, error=error)
        front_end.leases.setdefault(key, []).append((lease, data))
        layout = replace(data.layout, names=())  # which may be long
        return messages.DatasetLease(key, layout, self._engines.holders(key))

    def _load(self, front_end: _FrontEnd, engine: int, key: bytes) -> None:
        """Have an engine load a leased data set; the front end is told the end, not waited for."""

        def tell(load: Future[None]) -> None:
            error = load.exception()
            assert error is None or isinstance(error, WarpfitError)  # see `EngineSupervisor.load`
            self._tell(front_end, messages.LoadEnded(engine, key, error))

        front_end.leases[key][-1][1].load(engine).add_done_callback(tell)

    def _connect(self, front_end: _FrontEnd, engine: int) -> None:
        try:
            process, end = self._engines.supervisors[engine].connect()
        except UnavailableError:
            return  # the next engine brings a connection
        except ResourceExhaustedError as error:
            pid = front_end.process.pid
            _LOG.error("no connection of front end %d to the engine: %s", pid, error)
            return  # the front end asks again
        with end:
            message = messages.ConnectEngine(engine, process)
            self._tell(front_end, message, end.fileno())

    def _tell_all(self, message: messages.Message) -> None:
        for front_end in self._serving():
            self._tell(front_end, message)

    def _tell(
        self, front_end: _FrontEnd, message: messages.Message, descriptor: int | None = None
    ) -> bool:
        """Send a message; return False if that failed, which no caller can help."""
        try:
            front_end.control.send(message, descriptor)
            return True
        except ChannelClosedError:
            _LOG.debug("front end %d is gone", front_end.process.pid)
        except WarpfitError as error:
            _LOG.error("a message to front end %d failed: %s", front_end.process.pid, error)
        return False

    def _clean_up(self, front_end: _FrontEnd) -> None:
        """Forget a process that has closed its channel, and make sure that it ends."""
        with self._lock:
            self._front_ends.remove(front_end)
        self._recorder.forget(front_end.process.pid)
        front_end.serving.clear()
        for leases in front_end.leases.values():
            for lease, _ in leases:
                lease.close()
        for event in list(front_end.releases.values()):
            event.set()
        front_end.control.close()
        try:
            front_end.process.wait(self._config.grace if self._stopping.is_set() else 0.1)
        except subprocess.TimeoutExpired:
            front_end.process.kill()
            front_end.process.wait()
