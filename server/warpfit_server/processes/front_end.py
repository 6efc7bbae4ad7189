"""A front-end process: one of several equal ones on the server's port, which answer all calls.

It has a connection of its own to each engine, and a registry of the resident data sets, which the
main process owns. It receives uploads into memory that it hands over to the main process::

    python -m warpfit_server.processes.front_end CONTROL QUOTAS NUMBER PORT HEALTH_PORT CONFIG

CONTROL is the descriptor of a socket to the main process, QUOTAS that of the table of quotas.
"""

import itertools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn

from warpfit.dataset import Layout
from warpfit.errors import ResourceExhaustedError, UnavailableError, WarpfitError
from warpfit.server_info import Device
from warpfit_server.config import Config
from warpfit_server.ipc import messages
from warpfit_server.ipc.engine_connection import EngineConnection
from warpfit_server.ipc.messages import Channel, ChannelClosedError, FoundDataset
from warpfit_server.ipc.quarantine import Suspects
from warpfit_server.ipc.router import Registry, Router
from warpfit_server.ipc.segments import Segment, SegmentPool
from warpfit_server.logs import REPORT_SECONDS, Observer, Recorder, configure_logging, make_tracer
from warpfit_server.machine import keep_freed_memory, shorten_gil_switch_interval, split_address
from warpfit_server.processes.watchdog import Probe
from warpfit_server.rpc.calls import CallHandlers
from warpfit_server.rpc.health import Health, HealthPort
from warpfit_server.rpc.servicer import (
    SERVICE_NAME,
    Servicer,
    listen,
    make_server,
    server_credentials,
)
from warpfit_server.tenants import QuotaTable

_LOG: Final = logging.getLogger("warpfit.front_end")


class MainProcess:
    """The main process, which owns the data sets, as a front end sees it.

    Each method has the name, the meaning and the errors of a method of
    `warpfit_server.dataset_store.DatasetStore`; any thread may call it.
    """

    def __init__(self, control: Channel) -> None:
        self._control = control
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}

    def _ask(self, function: str, *arguments: Any, descriptor: int | None = None) -> Future[Any]:
        number, answer = next(self._numbers), Future[Any]()
        self._asked[number] = answer
        try:
            self._control.send(messages.Question(number, function, arguments), descriptor)
        except BaseException as error:
            del self._asked[number]
            if isinstance(error, ChannelClosedError):
                raise UnavailableError("the server stops", "STOPPING") from error
            raise
        return answer

    def answered(self, answer: messages.Answer) -> None:
        """Take an answer."""
        future = self._asked.pop(answer.number)
        if answer.error is None:
            future.set_result(answer.result)
        else:
            future.set_exception(answer.error)

    def find(self, key: bytes) -> FoundDataset:
        """Return a resident data set, with the engines that hold it."""
        found: FoundDataset = self._ask("find", key).result()
        return found

    def begin(self, layout: Layout, names: bytes, tenant: str, budget: int) -> int:
        """Begin an upload."""
        number: int = self._ask("begin", layout, names, tenant, budget).result()
        return number

    def reserve(self, number: int, nbytes: int) -> None:
        """Count the next bytes of an upload."""
        self._ask("reserve", number, nbytes).result()

    def abandon(self, number: int) -> None:
        """Count an upload no more."""
        self._ask("abandon", number).result()

    def commit(
        self, number: int, content_id: bytes, layout: Layout, copied: int, segment: Segment
    ) -> FoundDataset:
        """Hand a complete upload over; the segment is closed here."""
        own = number, content_id, layout, copied
        found: FoundDataset = self._ask("commit", *own, descriptor=segment.descriptor).result()
        segment.close()
        return found

    def load(self, engine: int, key: bytes) -> Future[None]:
        """Have an engine load a data set; see `KnownDataset.load`."""
        return self._ask("load", engine, key)

    def give_back(self, key: bytes) -> None:
        """Take note that a caller does not need a data set any more."""
        self._ask("give_back", key).result()

    def remove(self, key: bytes) -> None:
        """Remove a data set for all."""
        self._ask("remove", key).result()

    def evict_for_device(self, tenant: str) -> int:
        """Evict a data set for an upload; return its bytes."""
        nbytes: int = self._ask("evict_for_device", tenant).result()
        return nbytes

    def known_file(self, columns: bytes) -> tuple[bytes, str] | None:
        """Return the content id and the warning that belong to columns of a file, if known."""
        known: tuple[bytes, str] | None = self._ask("known_file", columns).result()
        return known

    def remember_file(self, columns: bytes, content_id: bytes, lost_digits: str) -> None:
        """Remember the content id and the warning of columns of a file."""
        self._ask("remember_file", columns, content_id, lost_digits).result()

    def describe(self, tenant: str) -> tuple[tuple[Device, ...], int]:
        """Return all devices, and the number of a tenant's data sets."""
        described: tuple[tuple[Device, ...], int] = self._ask("describe", tenant).result()
        return described


class FrontEndProcess:
    """State of a front-end process; `run` it.

    Args:
        control: channel to the main process.
        config: the server's configuration.
        quotas: the table that all processes share.

    Raises:
        WarpfitError: if it cannot serve with this configuration.
    """

    def __init__(self, control: Channel, config: Config, quotas: QuotaTable) -> None:
        self._control = control
        self._config = config
        self._readiness_at = time.monotonic()
        """Moment at which the main process last said which devices serve."""
        self._readiness = messages.SetReadiness(frozenset(), False)
        suspects = self._suspects = Suspects()
        pool = SegmentPool(*config.idle_pool)
        self._engines = [EngineConnection(pool) for _ in config.engines]
        for number, engine in enumerate(self._engines):
            engine.report = self._tell
            engine.on_loss = partial(self._tell, messages.RequestConnection(number))
        self._labels = [device.label for device in config.engines]
        self._router = Router(self._engines, self._labels, quotas, suspects)
        self._probe_now = [threading.Event() for _ in self._engines]
        main = self._main = MainProcess(control)
        registry = self._registry = Registry(quotas, main.find, main.load)
        calls = self._calls = CallHandlers(config, quotas)
        for engine in self._engines:
            engine.may_poll = calls.may_poll
        servicer = Servicer(main, registry, self._router, suspects, calls.admission, pool, config)
        self._recorder = Recorder()
        self._tracer = make_tracer(os.environ)
        self._credentials = server_credentials(config)
        observer = Observer(self._recorder, self._tracer)
        handlers = calls.handlers(servicer.methods(), observer)
        self._grpc = make_server(config, SERVICE_NAME, handlers)
        self._health = Health(SERVICE_NAME, self._labels)
        self._health.add_to(self._grpc)
        self._health_port: HealthPort | None = None
        self._is_stopping = False

    def open(self, port: int, health_port: int) -> None:
        """Listen on the port, and on that for health checks unless it is -1.

        Raises:
            UnavailableError: if a port is taken.
        """
        listen(self._grpc, self._config, port, self._credentials)
        if self._config.health_port is not None:
            host, _ = split_address(self._config.health_port)
            self._health_port = HealthPort(self._health, host, health_port)
        self._grpc.start()

    def run(self, seed: int) -> None:
        """Serve until the main process is gone, or the process ends because it says Stop.

        ``seed`` is that of the probe's numbers.
        """
        threading.Thread(target=self._report_forever, daemon=True).start()
        for number, engine in enumerate(self._engines):
            probing = number, Probe(engine, seed)
            threading.Thread(
                target=self._probe_forever, args=probing, name="probe", daemon=True
            ).start()
        self._control.send(messages.FrontEndReady())
        while True:
            message, descriptor = self._control.receive()
            match message:
                case messages.Answer():
                    self._main.answered(message)
                case messages.DatasetAnnounced():
                    self._registry.add(message.found)
                case messages.DatasetWithdrawn():
                    self._registry.withdrawn(message.key)
                case messages.DatasetHeld():
                    self._registry.held(message.key, message.engine)
                case messages.DatasetUnloaded():
                    self._registry.unloaded(message.key)
                case messages.ConnectEngine(renewed, process) if descriptor is not None:
                    self._registry.engine_started(renewed)
                    try:
                        self._engines[renewed].open(socket.socket(fileno=descriptor), process)
                        self._probe_now[renewed].set()
                    except ResourceExhaustedError as error:
                        _LOG.error("no connection to the engine: %s", error)
                case messages.ConnectEngine():  # the probe asks again
                    _LOG.error("the engine's connection was lost: too many open files")
                case Suspects():
                    self._suspects.update(message)
                case messages.SetReadiness():
                    self._readiness_at, self._readiness = time.monotonic(), message
                    self._router.serving = message.serving
                    self._set_readiness()
                case messages.Stop() if self._is_stopping:
                    self._grpc.stop(None)  # in a hurry
                case messages.Stop():
                    self._is_stopping = True
                    # Beside this loop: calls in flight may need more answers of the main process.
                    threading.Thread(target=self._stop, name="stop", daemon=True).start()
                case _:
                    raise UnavailableError(f"unexpected message {message}", "BAD_MESSAGE")

    def _stop(self) -> None:
        stopped = self._grpc.stop(self._config.grace)
        self._calls.drain()
        self._health.close()
        stopped.wait()
        if self._health_port is not None:
            self._health_port.stop()
        self._tell(messages.MetricsRecorded(self._recorder.take()))
        if self._tracer is not None:
            self._tracer.close()
        _end()

    def _tell(self, message: messages.Message) -> None:
        with suppress(ChannelClosedError):  # `run` finds out that the main process is gone
            self._control.send(message)

    def _probe_forever(self, engine: int, probe: Probe) -> None:
        """Probe an engine again and again, as the calls of this process use it."""
        with suppress(ChannelClosedError):  # `run` finds out that the main process is gone
            while True:
                self._probe_now[engine].wait(self._config.probe_seconds)
                self._probe_now[engine].clear()
                try:
                    answers = probe.ask()
                except Exception as error:
                    level = logging.DEBUG if isinstance(error, WarpfitError) else logging.ERROR
                    _LOG.log(level, "the probe of the engine failed: %s", error)
                    answers = False
                self._control.send(messages.ProbeResult(engine, answers))

    def _set_readiness(self) -> None:
        """Be ready if a device serves, and the main process, which has the data sets, is there."""
        if self._readiness.is_draining:
            self._health.drain()
            return
        patience = self._config.probe_seconds + self._config.probe_timeout
        is_heard = time.monotonic() - self._readiness_at <= patience
        self._health.set_serving(self._readiness.serving if is_heard else frozenset())

    def _report_forever(self) -> None:
        """Send measurements periodically."""
        with suppress(ChannelClosedError):  # `run` finds out that the main process is gone
            while True:
                time.sleep(REPORT_SECONDS)
                self._set_readiness()
                self._control.send(messages.MetricsRecorded(self._recorder.take()))


def main(arguments: Sequence[str]) -> None:
    """Run a front-end process; `FrontEndSupervisor` starts it."""
    descriptor, table, number, port, health_port = map(int, arguments[:-1])
    config = Config.from_json(arguments[-1])
    configure_logging(config.log_level, config.log_format)
    shorten_gil_switch_interval()
    keep_freed_memory()
    control = Channel(socket.socket(fileno=descriptor))
    try:
        try:
            quotas = QuotaTable(table, config.processes, number, len(config.engines))
            process = FrontEndProcess(control, config, quotas)
            control.send(messages.FrontEndPrepared())
            start, _ = control.receive()
            assert isinstance(start, messages.StartServing)  # nothing else is sent before
            process.open(port, health_port)
        except WarpfitError as error:
            control.send(messages.FrontEndFailed(error))
            _end(1)
        process.run(start.seed)
    except ChannelClosedError:
        _LOG.info("the main process is gone")
        _end()


def _end(status: int = 0) -> NoReturn:
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
