"""A front-end process: one more process on the server's port, for more calls than one Python takes.

It answers Evaluate and Optimize itself, over a connection of its own to each engine, and forwards
all other calls to the main process, which owns the data sets. It leases a data set from the main
process when a call first needs it, and returns the lease when no call has used it for a while::

    python -m warpfit_server.processes.front_end DESCRIPTOR PORT MAIN_ADDRESS QUOTAS NUMBER CONFIG
"""

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc

from warpfit import codec
from warpfit.errors import (
    CancelledError,
    ResourceExhaustedError,
    UnavailableError,
    WarpfitError,
)
from warpfit_server.config import Config
from warpfit_server.ipc import messages
from warpfit_server.ipc.channel import Channel, ChannelClosedError
from warpfit_server.ipc.engine_connection import EngineConnection
from warpfit_server.ipc.quarantine import KnownSuspects, SuspectList
from warpfit_server.ipc.router import Leased, Router
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.observability.calls import Observer
from warpfit_server.observability.logs import configure_logging
from warpfit_server.observability.measurements import Recorder
from warpfit_server.observability.tracing import make_tracer
from warpfit_server.processes.probe import Probe
from warpfit_server.rpc.calls import Call, CallHandlers, Method
from warpfit_server.rpc.health import Health
from warpfit_server.rpc.port import listen, make_server
from warpfit_server.rpc.servicer import SERVICE_NAME, ComputeServicer
from warpfit_server.system.resources import keep_freed_memory, shorten_gil_switch_interval
from warpfit_server.tenancy.authentication import FORWARDED_METADATA_KEY
from warpfit_server.tenancy.quotas import QuotaTable

_LOG: Final = logging.getLogger("warpfit.front_end")
#: Seconds after which a lease is returned that no call uses.
_IDLE_SECONDS: Final = 1.0
#: gRPC reports this or more remaining seconds for calls without a deadline.
_NO_DEADLINE: Final = 1e8
#: Unary methods that the main process answers.
_FORWARDED: Final = ("OpenDataset", "GetVariables", "ReleaseVariables", "GetServerInfo")


@dataclass(eq=False, slots=True)
class _BorrowedLease:
    """A lease that the main process has given to this process, or was asked for."""

    answer: Future[Leased] = field(default_factory=Future)
    """The data set, once the main process has answered."""
    data: Leased | None = None
    """The same; calls need not ask the future."""
    loaded: set[int] = field(default_factory=set)
    """Engines that have loaded the data set."""
    uses: int = 0
    idle_since: float = 0.0
    is_released: bool = False
    """Released by a caller while the main process was asked for it."""
    is_returned: bool = False
    """Not for new calls; the lease is returned when the last use ends."""


class BorrowedLeases:
    """The main process's data sets as this process sees them."""

    def __init__(self, send: Callable[[messages.Message], None]) -> None:
        self._send = send
        self._leases: dict[bytes, _BorrowedLease] = {}
        self._loading: dict[tuple[int, bytes], tuple[Future[None], set[int]]] = {}
        """Loads under way, with the engines that have loaded the data set."""
        self._lock = threading.Lock()

    @contextmanager
    def lease(self, key: bytes) -> Iterator[Leased]:
        """Lease a data set, from the main process unless this process has a lease."""
        with self._lock:
            lease = self._leases.get(key)
            if lease is None:
                lease = _BorrowedLease()
                self._send(messages.LeaseDataset(key))  # fails where there is no room for messages
                self._leases[key] = lease
            lease.uses += 1
        try:
            yield lease.data or lease.answer.result()
        finally:
            with self._lock:
                lease.uses -= 1
                lease.idle_since = time.monotonic()
                if lease.is_returned and not lease.uses:
                    self._send(messages.ReturnLease(key))

    def answered(self, answer: messages.DatasetLease) -> None:
        """Take the main process's answer; after a refusal the next call asks again."""
        key, layout, loaded = answer.key, answer.layout, set(answer.engines)
        with self._lock:
            if layout is None:
                error = answer.error or UnavailableError("the data set cannot be leased")
                self._leases.pop(key).answer.set_exception(error)
                return
            lease, load = self._leases[key], partial(self._load, key, loaded)
            lease.loaded = loaded
            lease.data = Leased(layout, loaded.__contains__, load)
            lease.answer.set_result(lease.data)
            if lease.is_released:
                self._return(key)

    def _load(self, key: bytes, loaded: set[int], engine: int) -> Future[None]:
        """Ask the main process to have an engine load a data set, unless that is under way."""
        with self._lock:
            if (engine, key) not in self._loading:
                self._send(messages.RequestLoad(engine, key))
                self._loading[engine, key] = Future(), loaded
            return self._loading[engine, key][0]

    def load_ended(self, message: messages.LoadEnded) -> None:
        """Take notice that an engine has loaded a data set, or cannot."""
        with self._lock:
            future, loaded = self._loading.pop((message.engine, message.key))
        if message.error is None:
            loaded.add(message.engine)
            future.set_result(None)
        else:
            future.set_exception(message.error)

    def released(self, key: bytes) -> None:
        """Let no new call use a data set that a caller has released."""
        with self._lock:
            lease = self._leases.get(key)
            if lease is not None and lease.answer.done():
                self._return(key)
            elif lease is not None:
                lease.is_released = True  # it is returned once the main process has answered
            self._send(messages.ReleaseNoticed(key))

    def engine_started(self, engine: int) -> None:
        """Ask again whether an engine has loaded data sets: a new process may have had no room."""
        with self._lock:
            for lease in self._leases.values():
                lease.loaded.discard(engine)

    def return_idle(self) -> None:
        """Return leases that no call has used for a while."""
        limit = time.monotonic() - _IDLE_SECONDS
        with self._lock:
            idle = [
                key
                for key, lease in self._leases.items()
                if not lease.uses and lease.answer.done() and lease.idle_since < limit
            ]
            for key in idle:
                self._return(key)

    def _return(self, key: bytes) -> None:
        lease = self._leases.pop(key)
        lease.is_returned = True
        if not lease.uses:
            self._send(messages.ReturnLease(key))


def forwarding_methods(address: str) -> dict[str, Method]:
    """Return methods by name that forward calls to the main process as they are."""
    names = ("grpc.max_send_message_length", "grpc.max_receive_message_length")
    unlimited = [*((name, -1) for name in names), ("grpc.enable_http_proxy", 0)]
    channel = grpc.insecure_channel(address, unlimited)
    upload = channel.stream_unary(f"/{SERVICE_NAME}/UploadVariables", None, None)
    methods = {"UploadVariables": Method(_forwarding(upload), uploads=True)}
    for name in _FORWARDED:
        method = channel.unary_unary(f"/{SERVICE_NAME}/{name}", None, None)
        methods[name] = Method(_forwarding(method))
    return methods


def _forwarding(method: Any) -> Callable[[Any, Call], bytes]:
    def forward(request: Any, context: Call) -> bytes:
        remaining = context.time_remaining()
        timeout = remaining if remaining is not None and remaining < _NO_DEADLINE else None
        record = context.record
        tenant = (FORWARDED_METADATA_KEY, record.tenant.encode())
        metadata = (*record.trailing, *record.trace.items(), tenant)
        failed: list[Exception] = []
        is_made = threading.Event()

        def messages_of_upload() -> Iterator[bytes]:
            try:
                yield from request
            except Exception as error:  # gRPC would log it, and answer UNKNOWN
                failed.append(error)
                is_made.wait()
                call.cancel()

        sent = request if isinstance(request, bytes) else messages_of_upload()
        call = method.future(sent, timeout=timeout, metadata=metadata)
        is_made.set()
        context.on_end(call.cancel)
        try:
            answer: bytes = call.result()
        except (grpc.RpcError, grpc.FutureCancelledError):
            if failed:
                raise failed[0] from None
            if call.code() is grpc.StatusCode.CANCELLED:
                raise CancelledError("the call has ended", "CANCELLED") from None
            status = call.code().name, call.details() or "", call.trailing_metadata()
            raise codec.error_from_status(*status) from None
        return answer

    return forward


class FrontEndProcess:
    """State of a front-end process."""

    def __init__(
        self,
        control: Channel,
        config: Config,
        port: int,
        main_address: str,
        quotas: QuotaTable,
        seed: int,
    ) -> None:
        self._control = control
        self._config = config
        self._main_path = Path(main_address.removeprefix("unix:"))
        self._readiness_at = time.monotonic()
        """Moment at which the main process last said which devices serve."""
        self._suspects = KnownSuspects()
        pool = SegmentPool(*config.idle_pool)
        self._engines = [EngineConnection(pool) for _ in config.engines]
        for number, engine in enumerate(self._engines):
            engine.report = self._tell
            engine.on_loss = partial(self._tell, messages.RequestConnection(number))
        labels = [device.label for device in config.engines]
        self._router = Router(self._engines, labels, quotas, self._suspects)
        self._probes = [Probe(engine, seed) for engine in self._engines]
        self._probe_now = [threading.Event() for _ in self._engines]
        self._leases = BorrowedLeases(control.send)
        calls = self._calls = CallHandlers(config, quotas)
        servicer = ComputeServicer(
            self._leases.lease, self._router, calls.admission, config.chunk_bytes
        )
        self._recorder = Recorder()
        self._tracer = make_tracer(config.tracing)
        observer = Observer(self._recorder, self._tracer)
        forwarding = forwarding_methods(main_address)
        handlers = {
            **calls.handlers(forwarding, observer, forwards=True),
            **calls.handlers(servicer.methods(), observer),
        }
        self._grpc = make_server(config, SERVICE_NAME, handlers, shared=True)
        self._health = Health(SERVICE_NAME, labels)
        self._health.add_to(self._grpc)
        listen(self._grpc, config, port)

    def run(self) -> None:
        """Serve until the main process is gone, or the process ends because it says Stop."""
        threading.Thread(target=self._report_forever, daemon=True).start()
        for number in range(len(self._engines)):
            threading.Thread(
                target=self._probe_forever, args=(number,), name="probe", daemon=True
            ).start()
        self._grpc.start()
        self._control.send(messages.FrontEndReady())
        while True:
            message, descriptor = self._control.receive()
            match message:
                case messages.ConnectEngine():
                    self._connect(message, descriptor)
                case messages.DatasetLease():
                    self._leases.answered(message)
                case messages.LoadEnded():
                    self._leases.load_ended(message)
                case messages.DatasetReleased():
                    self._leases.released(message.key)
                case SuspectList():
                    self._suspects.update(message)
                case messages.SetReadiness():
                    self._readiness_at = time.monotonic()
                    self._router.serving = message.serving
                    self._set_readiness()
                case messages.Stop():
                    # Beside this loop: calls in flight may need more answers of the main process.
                    threading.Thread(target=self._stop, name="stop", daemon=True).start()
                case _:
                    raise UnavailableError(f"unexpected message {message}", "BAD_MESSAGE")

    def _stop(self) -> None:
        stopped = self._grpc.stop(self._config.grace)
        self._calls.drain()
        self._health.close()
        stopped.wait()
        self._tell(messages.MetricsRecorded(self._recorder.take()))
        if self._tracer is not None:
            self._tracer.close()
        _end()

    def _connect(self, message: messages.ConnectEngine, descriptor: int | None) -> None:
        if descriptor is None:  # this process can open no more files; the probe asks again
            _LOG.error("the engine's connection was lost: too many open files")
            return
        self._leases.engine_started(message.engine)
        try:
            end = socket.socket(fileno=descriptor)
            self._engines[message.engine].open(end, message.process)
        except ResourceExhaustedError as error:
            _LOG.error("no connection to the engine: %s", error)
            return
        self._probe_now[message.engine].set()

    def _tell(self, message: messages.Message) -> None:
        with suppress(ChannelClosedError):  # `run` finds out that the main process is gone
            self._control.send(message)

    def _probe_forever(self, engine: int) -> None:
        """Probe an engine again and again, as the calls of this process use it."""
        with suppress(ChannelClosedError):  # `run` finds out that the main process is gone
            while True:
                self._probe_now[engine].wait(self._config.probe_seconds)
                self._probe_now[engine].clear()
                try:
                    answers = self._probes[engine].ask()
                except Exception as error:
                    level = logging.DEBUG if isinstance(error, WarpfitError) else logging.ERROR
                    _LOG.log(level, "the probe of the engine failed: %s", error)
                    answers = False
                self._control.send(messages.ProbeResult(engine, answers))

    def _set_readiness(self) -> None:
        """Be ready if a device serves, and the main process, which has the data sets, is there."""
        patience = self._config.probe_seconds + self._config.probe_timeout
        is_heard = time.monotonic() - self._readiness_at <= patience
        is_there = is_heard and self._main_path.exists()
        self._health.set_serving(self._router.serving if is_there else frozenset())

    def _report_forever(self) -> None:
        """Return idle leases, and send what was measured, again and again."""
        with suppress(ChannelClosedError):  # `run` finds out that the main process is gone
            while True:
                time.sleep(_IDLE_SECONDS / 2)
                self._set_readiness()
                self._leases.return_idle()
                self._control.send(messages.MetricsRecorded(self._recorder.take()))


def main(arguments: Sequence[str]) -> None:
    """Run a front-end process; `FrontEndSupervisor` starts it."""
    descriptor, port, main_address, table, number, text = arguments
    config = Config.from_json(text)
    configure_logging(config.log_level, config.log_format)
    shorten_gil_switch_interval()
    keep_freed_memory()
    control = Channel(socket.socket(fileno=int(descriptor)))
    try:
        start, _ = control.receive()
        assert isinstance(start, messages.StartServing)  # nothing else is sent before
        quotas = QuotaTable(int(table), config.processes, int(number), len(config.engines))
        FrontEndProcess(control, config, int(port), main_address, quotas, start.seed).run()
    except ChannelClosedError:
        _LOG.info("the main process is gone")
        _end()


def _end() -> None:
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
