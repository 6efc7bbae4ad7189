"""The front ends of a server as the main process sees them: equal processes that answer all calls.

The main process owns the data sets and the engines. It announces data sets to the front ends,
connects them to engines, and answers what they ask (`messages.Question`) at once.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from warpfit.child_processes import python_child
from warpfit.errors import InternalError, ResourceExhaustedError, UnavailableError, WarpfitError
from warpfit_server.config import Config
from warpfit_server.dataset_store import DatasetStore
from warpfit_server.ipc import messages
from warpfit_server.ipc.messages import Channel, FoundDataset
from warpfit_server.ipc.quarantine import BatchOutcome
from warpfit_server.ipc.segments import Segment
from warpfit_server.logs import Recorder
from warpfit_server.machine import shortage, too_many_files
from warpfit_server.processes.engines import Engines
from warpfit_server.processes.supervisor import State, Supervisor
from warpfit_server.tenants import QuotaTable

_LOG: Final = logging.getLogger("warpfit.front_ends")
#: Seconds that a front end has to end when the server stops, after the grace period.
_STOP_SECONDS: Final = 5.0
#: Seconds after which a process is given up that has not read thousands of messages: all uploads
#: wait for the sending of the next one.
_SEND_SECONDS: Final = 1.0
#: Seconds between two looks whether front ends have started.
_POLL_SECONDS: Final = 0.1


@dataclass(eq=False, slots=True)
class _ProbeRecord:
    """The outcomes of a front end's probes of one engine."""

    answers: bool = False
    """Whether the last one was answered rightly."""
    ended: float = 0.0
    """Moment at which the last one ended, or at which a new process began to serve."""
    answered: float = 0.0
    """Moment of the last right answer, or at which a new process began to serve."""


class FrontEndSupervisor(Supervisor):
    """Owns one front-end process.

    Args:
        owner: the owner of all front ends, which answers this one's messages.
        number: number of the process, from 0, and of its column in the table of quotas.
    """

    def __init__(self, owner: FrontEnds, number: int) -> None:
        super().__init__(f"front end {number + 1}", owner.config.grace + _STOP_SECONDS)
        self.number = number
        self.last_message = 0.0
        """Moment of the last message, on the monotonic clock, as all moments here."""
        self.probes = [_ProbeRecord() for _ in owner.config.engines]
        """Its probes of each engine, by number."""
        self.uploads: set[int] = set()
        """Numbers of the uploads that it receives."""
        self._owner = owner

    def spawn(self) -> tuple[subprocess.Popen[bytes], Channel]:
        """Start a process."""
        owner = self._owner
        control, theirs = Channel.pair()
        control.give_up_after(_SEND_SECONDS)
        table = owner.quotas.descriptor
        arguments = (theirs.fileno(), table, self.number, owner.port, owner.health_port)
        words = (*map(str, arguments), owner.config.to_json())
        with theirs:
            process = subprocess.Popen(
                **python_child("-m", "warpfit_server.processes.front_end", *words),
                pass_fds=[theirs.fileno(), table],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C is for the main process, which drains first
            )
        return process, control

    def handle(self, channel: Channel, message: messages.Message, descriptor: int | None) -> None:
        """Act on a message of the process."""
        owner, self.last_message = self._owner, time.monotonic()
        match message:
            case messages.FrontEndPrepared():
                owner.may_serve.wait()
                channel.send(messages.StartServing(owner.seed))
            case messages.FrontEndFailed():
                self.failure = message.error
            case messages.FrontEndReady():
                self.ready(channel)
                owner.welcome(self)
                for probe in self.probes:  # until it has its own, it has those of the one before
                    probe.ended = probe.answered = self.last_message
                self.serves()
                if self.stopping.is_set():  # `begin_stop` may have come before it was ready
                    self.tell(messages.Stop())
            case messages.Question():
                owner.answer(self, message, descriptor)
            case messages.RequestConnection():
                owner.connect(self, message.engine)
            case messages.ProbeResult():
                probe = self.probes[message.engine]
                probe.answers, probe.ended = message.answers, self.last_message
                if message.answers:
                    probe.answered = self.last_message
            case messages.MetricsRecorded():
                owner.recorder.add(self.number, message.delta)
            case BatchOutcome():
                owner.engines.quarantine.report(message)
            case _:
                _LOG.error("unexpected message %s", message)

    def lost(self) -> None:
        """Forget what the process had in flight."""
        owner = self._owner
        owner.recorder.forget(self.number)
        for number in self.uploads:
            owner.datasets.abandon(number)
        self.uploads.clear()

    def ended(self, code: int) -> None:
        """Count nothing any more for a process that is gone."""
        self._owner.quotas.clear_process(self.number)


class FrontEnds:
    """Owns the supervisors of all front ends, and answers for the main process.

    Args:
        config: the server's configuration.
        engines: the engines, to which front ends are connected.
        quotas: the table that all processes share.
        recorder: adds up the measurements of front ends.
        serving: returns the labels of the devices that serve.
        port: port of the front ends, which this process has reserved.
        health_port: port for health checks only; -1 for none.
    """

    def __init__(
        self,
        config: Config,
        engines: Engines,
        quotas: QuotaTable,
        recorder: Recorder,
        serving: Callable[[], frozenset[str]],
        port: int,
        health_port: int,
    ) -> None:
        self.seed = secrets.randbits(64)
        """Seed of the probe, which is the same in all processes."""
        self.config, self.engines, self.quotas, self.recorder = config, engines, quotas, recorder
        self.port, self.health_port = port, health_port
        self.datasets: DatasetStore
        """The store, which announces its data sets here."""
        self.may_serve = threading.Event()
        """Open once the processes may take calls."""
        self.supervisors = [FrontEndSupervisor(self, n) for n in range(config.processes)]
        self.told_at = 0.0
        """Moment at which they were last told which devices serve."""
        self._serving = serving
        self._is_draining = False
        engines.quarantine.on_change = self.tell_all

    def start(self, datasets: DatasetStore) -> None:
        """Start the processes, which takes a second; this returns at once."""
        self.datasets = datasets
        for supervisor in self.supervisors:
            supervisor.start()

    @property
    def failure(self) -> WarpfitError | None:
        """Why processes cannot serve with these settings, if one has said so."""
        return next((s.failure for s in self.supervisors if s.failure is not None), None)

    def open(self, is_stopping: Callable[[], bool]) -> None:
        """Let the processes take calls and wait until they do, unless the server ``is_stopping``.

        Raises:
            WarpfitError: if one cannot serve.
        """
        self.may_serve.set()
        end = time.monotonic() + self.config.start_seconds
        for supervisor in self.supervisors:
            while not supervisor.settled.wait(_POLL_SECONDS):
                if is_stopping() or time.monotonic() > end:
                    break
        if self.failure is not None:
            raise self.failure
        if not is_stopping() and any(s.state < State.SERVING for s in self.supervisors):
            raise UnavailableError(
                "a front-end process did not start", "FRONT_END_FAILED", "See the log lines above"
            )

    def begin_stop(self) -> None:
        """Have the processes finish their calls in the grace period, the second time at once."""
        self.may_serve.set()
        for supervisor in self.supervisors:
            supervisor.begin_stop()

    def stop(self) -> None:
        """Let the processes finish their calls within the grace period, and end them."""
        if not all(supervisor.stopping.is_set() for supervisor in self.supervisors):
            self.begin_stop()
        for supervisor in self.supervisors:
            supervisor.stop()

    def processes(self) -> dict[str, int]:
        """Return the process ids by role."""
        return {s.name: s.process.pid for s in self.present() if s.process is not None}

    def present(self) -> list[FrontEndSupervisor]:
        """Return the front ends that serve."""
        return [s for s in self.supervisors if s.state is State.SERVING]

    # ------------------------------------------------------------------- what they are told

    def tell_all(self, message: messages.Message) -> None:
        """Send a message to every front end that is ready."""
        for supervisor in self.supervisors:
            supervisor.tell(message)

    def welcome(self, front_end: FrontEndSupervisor) -> None:
        """Tell a new process what the others know, and connect it to the engines."""
        front_end.tell(self.engines.quarantine.suspects)
        for engine in self.engines.supervisors:
            self.connect(front_end, engine.number)
        front_end.tell(messages.SetReadiness(self._serving(), self._is_draining))

    def engine_ready(self, engine: int) -> None:
        """Give every process a connection to the new process of an engine."""
        for front_end in self.present():
            self.connect(front_end, engine)

    def connect(self, front_end: FrontEndSupervisor, engine: int) -> None:
        """Give a process a connection to an engine, if there is one."""
        try:
            process, end = self.engines.supervisors[engine].connect()
        except UnavailableError:
            return  # the next engine brings a connection
        except ResourceExhaustedError as error:
            _LOG.error("no connection of %s to the engine: %s", front_end.name, error)
            return  # the front end asks again
        with end:
            front_end.tell(messages.ConnectEngine(engine, process), end.fileno())

    def announce_readiness(self, is_draining: bool = False) -> None:
        """Tell every process which devices serve, and whether the server stops."""
        self._is_draining = self._is_draining or is_draining
        self.told_at = time.monotonic()
        self.tell_all(messages.SetReadiness(self._serving(), self._is_draining))

    def announce_dataset(self, found: FoundDataset) -> None:
        """Tell every process that a data set has become resident."""
        self.tell_all(messages.DatasetAnnounced(found))

    def withdraw_dataset(self, key: bytes) -> None:
        """Tell every process that no new call may use a data set."""
        self.tell_all(messages.DatasetWithdrawn(key))

    def unload_dataset(self, key: bytes) -> None:
        """Have every engine forget a data set, and tell every process so."""
        self.engines.unload(key)
        self.tell_all(messages.DatasetUnloaded(key))

    # ------------------------------------------------------------------- what they ask

    def answer(
        self, front_end: FrontEndSupervisor, question: messages.Question, descriptor: int | None
    ) -> None:
        """Answer a question, at once unless the answer is that an engine has loaded a data set."""

        def send(result: Any = None, error: BaseException | None = None) -> None:
            if error is not None and not isinstance(error, WarpfitError):
                _LOG.error("a question of %s failed", front_end.name, exc_info=error)
                error = shortage(error) or InternalError(
                    "the server's main process failed", "MAIN_PROCESS_FAILURE"
                )
            is_sent = front_end.tell(messages.Answer(question.number, result, error))
            if not is_sent and error is None:  # else the call would wait for it for ever
                failed = InternalError("the answer was not sent", "MAIN_PROCESS_FAILURE")
                front_end.tell(messages.Answer(question.number, None, failed))

        try:
            function = self._functions(front_end, descriptor)[question.function]
            result = function(*question.arguments)
        except Exception as failure:
            send(error=failure)
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda ended: send(error=ended.exception()))
        else:
            send(result)

    def _functions(
        self, front_end: FrontEndSupervisor, descriptor: int | None
    ) -> Mapping[str, Callable[..., Any]]:
        """Return the functions that a front end may call, by name."""
        datasets = self.datasets

        def find(key: bytes) -> FoundDataset:
            return datasets.find(key)._replace(engines=self.engines.holders(key))

        def begin(*arguments: Any) -> int:
            number = datasets.begin(*arguments)
            front_end.uploads.add(number)
            return number

        def abandon(number: int) -> None:
            front_end.uploads.discard(number)
            datasets.abandon(number)

        def commit(number: int, content_id: bytes, layout: Any, copied: int) -> FoundDataset:
            if descriptor is None:
                raise too_many_files()
            try:
                segment = Segment(0, descriptor, layout.nbytes)
            except BaseException:
                os.close(descriptor)
                raise
            try:
                found = datasets.commit(number, content_id, layout, copied, segment)
            except BaseException:
                segment.close()
                raise
            front_end.uploads.discard(number)
            return found

        def load(engine: int, key: bytes) -> Future[None]:
            with datasets.pin(key) as dataset:
                loading = self.engines.load(engine, dataset)

            def tell(ended: Future[None]) -> None:
                if ended.exception() is None:
                    self.tell_all(messages.DatasetHeld(engine, key))

            loading.add_done_callback(tell)
            return loading

        def describe(tenant: str) -> tuple[Sequence[Any], int]:
            return self.engines.devices(self._serving()), datasets.count(tenant)

        return {
            "find": find,
            "begin": begin,
            "reserve": datasets.reserve,
            "abandon": abandon,
            "commit": commit,
            "load": load,
            "give_back": datasets.give_back,
            "remove": datasets.remove,
            "evict_for_device": datasets.evict_for_device,
            "known_file": datasets.known_file,
            "remember_file": datasets.remember_file,
            "describe": describe,
        }
