"""A further door: one more process on the server's port, for more calls than one Python can take.

It takes Evaluate and Optimize calls itself, with a connection of its own to the engine, and passes
all others on to the front door, which owns the data sets. It leases a data set from the front door
when a call first needs it, and gives the lease back when no call has used it for a while::

    python -m warpfit_server.processes.front_end DESCRIPTOR PORT FRONT_DOOR LEDGER NUMBER CONFIG
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc

from warpfit.dataset import Layout
from warpfit.errors import ResourceExhaustedError, UnavailableError, WarpfitError
from warpfit_server.config import Config
from warpfit_server.ipc import messages
from warpfit_server.ipc.channel import Channel, ChannelClosedError
from warpfit_server.ipc.engine_connection import EngineConnection
from warpfit_server.ipc.quarantine import SuspectList, Suspects
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.observability.calls import Observer, passed_on
from warpfit_server.observability.logs import configure_logging
from warpfit_server.observability.measurements import Recorder
from warpfit_server.observability.tracing import make_tracer
from warpfit_server.processes.probe import Probe
from warpfit_server.rpc.health import Health
from warpfit_server.rpc.interceptor import make_guard
from warpfit_server.rpc.port import listen, make_server
from warpfit_server.rpc.servicer import SERVICE_NAME, EvaluateService
from warpfit_server.system.worker_threads import take_short_turns
from warpfit_server.tenancy.authentication import FORWARDED_METADATA_KEY
from warpfit_server.tenancy.quotas import Ledger
from warpfit_server.tenancy.tenants import tenant_of

_LOG: Final = logging.getLogger("warpfit.door")
#: A lease that no call uses goes back after this many seconds.
_IDLE_SECONDS: Final = 1.0
#: Seconds that only a call without a deadline has left.
_NO_DEADLINE: Final = 1e8
#: Methods that the front door answers.
_UNARY: Final = ("GetVariables", "ReleaseVariables", "GetServerInfo")


@dataclass(slots=True)
class _Leased:
    """A data set that the front door has leased to this door."""

    layout: Future[Layout]
    uses: int = 0
    idle_since: float = 0.0
    forgotten: bool = False
    """Released while the front door was asked for it."""
    given_back: bool = False
    """Not for new calls; the lease goes back when the last use ends."""


class BorrowedLeases:
    """The front door's data sets as this door sees them.

    Args:
        send: sends a message to the front door.

    """

    def __init__(self, send: Callable[[messages.Message], None]) -> None:
        self._send = send
        self._leased: dict[bytes, _Leased] = {}
        self._lock = threading.Lock()

    @contextmanager
    def lease(self, content_id: bytes) -> Iterator[Layout]:
        """Lease a data set, from the front door unless this door has it."""
        with self._lock:
            entry = self._leased.get(content_id)
            if entry is None:
                entry = self._leased[content_id] = _Leased(Future())
                self._send(messages.Lookup(content_id))
            entry.uses += 1
        try:
            yield entry.layout.result()
        finally:
            with self._lock:
                entry.uses -= 1
                entry.idle_since = time.monotonic()
                if entry.given_back and not entry.uses:
                    self._send(messages.Unused(content_id))

    def found(self, message: messages.Found) -> None:
        """Take the front door's answer."""
        with self._lock:
            entry = self._leased[message.content_id]
            entry.layout.set_result(message.layout)
            if entry.forgotten:
                self._give_back(message.content_id)

    def missing(self, message: messages.Missing) -> None:
        """Take the front door's refusal; the next call asks again."""
        with self._lock:
            self._leased.pop(message.content_id).layout.set_exception(message.error)

    def forget(self, content_id: bytes) -> None:
        """Use a data set no more: it was released."""
        with self._lock:
            entry = self._leased.get(content_id)
            if entry is not None and entry.layout.done():
                self._give_back(content_id)
            elif entry is not None:
                entry.forgotten = True  # to be given back once it is found
            self._send(messages.Forgotten(content_id))

    def give_idle_back(self) -> None:
        """Give back what no call has used for a while."""
        limit = time.monotonic() - _IDLE_SECONDS
        with self._lock:
            idle = [
                content_id
                for content_id, entry in self._leased.items()
                if not entry.uses and entry.layout.done() and entry.idle_since < limit
            ]
            for content_id in idle:
                self._give_back(content_id)

    def _give_back(self, content_id: bytes) -> None:
        entry = self._leased.pop(content_id)
        entry.given_back = True
        if not entry.uses:
            self._send(messages.Unused(content_id))


class Forwarder:
    """Passes calls on to the front door as they are."""

    def __init__(self, address: str) -> None:
        unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        self._channel = grpc.insecure_channel(address, unlimited)

    def handlers(self) -> dict[str, Any]:
        """Handlers by method name."""
        upload = self._channel.stream_unary(f"/{SERVICE_NAME}/UploadVariables", None, None)
        handlers = {"UploadVariables": grpc.stream_unary_rpc_method_handler(_passing_on(upload))}
        for name in _UNARY:
            method = self._channel.unary_unary(f"/{SERVICE_NAME}/{name}", None, None)
            handlers[name] = grpc.unary_unary_rpc_method_handler(_passing_on(method))
        return handlers


def _passing_on(method: Any) -> Callable[[Any, grpc.ServicerContext], bytes]:
    def handler(request: Any, context: grpc.ServicerContext) -> bytes:
        remaining = context.time_remaining()  # centuries for a call without a deadline
        timeout = remaining if remaining is not None and remaining < _NO_DEADLINE else None
        about = (*passed_on(context), (FORWARDED_METADATA_KEY, tenant_of(context).encode()))
        call = method.future(request, timeout=timeout, metadata=about)
        if not context.add_callback(call.cancel):
            call.cancel()
        try:
            answer: bytes = call.result()
        except (grpc.RpcError, grpc.FutureCancelledError):
            context.set_trailing_metadata(tuple(call.trailing_metadata() or ()))
            context.abort(call.code(), call.details() or "")
        return answer

    return handler


class Door:
    """State of the process."""

    def __init__(
        self,
        control: Channel,
        config: Config,
        port: int,
        front_door: str,
        ledger: Ledger,
        seed: int,
    ) -> None:
        self._control = control
        self._config = config
        self._suspects = Suspects()
        self._engine = EngineConnection(SegmentPool(config.idle_bytes), self._suspects)
        self._engine.report = self._tell
        self._engine.on_loss = lambda: self._tell(messages.Reconnect())
        self._probe = Probe(self._engine, seed)
        self._probe_now = threading.Event()
        self._leases = BorrowedLeases(control.send)
        admission, guard = make_guard(config, ledger)
        service = EvaluateService(self._leases, self._engine, admission, config.chunk_bytes)
        self._recorder = Recorder()
        self._tracer = make_tracer(config.tracing)
        observer = Observer(self._recorder, self._tracer)
        forwarded = Forwarder(front_door).handlers()
        handlers = {
            **guard.protect(forwarded, observer, passes_on=True),
            **guard.protect(service.handlers(), observer),
        }
        self._grpc = make_server(config, SERVICE_NAME, handlers, shared=True)
        self._health = Health(SERVICE_NAME)
        self._health.add_to(self._grpc)
        listen(self._grpc, config, port)

    def run(self) -> None:
        """Serve until the front door says Quit or is gone."""
        threading.Thread(target=self._sweep, daemon=True).start()
        threading.Thread(target=self._ask_forever, name="probe", daemon=True).start()
        self._grpc.start()
        self._control.send(messages.Serving())
        while True:
            message, descriptors = self._control.receive()
            match message:
                case messages.EngineSocket():
                    self._connect(message, descriptors)
                case messages.Found():
                    self._leases.found(message)
                case messages.Missing():
                    self._leases.missing(message)
                case messages.Forget():
                    self._leases.forget(message.content_id)
                case SuspectList():
                    self._suspects.update(message)
                case messages.Readiness():
                    self._health.set_ready(message.ready)
                case messages.Quit():
                    self._quit()
                    return
                case _:
                    raise UnavailableError(f"unexpected message {message}", "BAD_MESSAGE")

    def _quit(self) -> None:
        self._grpc.stop(self._config.grace).wait()
        self._control.send(messages.Recorded(self._recorder.take()))
        if self._tracer is not None:
            self._tracer.close()

    def _connect(self, message: messages.EngineSocket, descriptors: Sequence[int]) -> None:
        if not descriptors:  # this process can open no more files; the probe asks again
            _LOG.error("the engine's connection was lost: too many open files")
            return
        try:
            self._engine.open(socket.socket(fileno=descriptors[0]), message.engine)
        except ResourceExhaustedError as error:
            _LOG.error("no connection to the engine: %s", error)
            return
        self._probe_now.set()

    def _tell(self, message: messages.Message) -> None:
        with suppress(ChannelClosedError):  # the front door is gone, as `run` finds out
            self._control.send(message)

    def _ask_forever(self) -> None:
        """Ask the engine again and again, as the calls of this process do."""
        with suppress(ChannelClosedError):  # the front door is gone, as `run` finds out
            while True:
                self._probe_now.wait(self._config.probe_seconds)
                self._probe_now.clear()
                try:
                    answers = self._probe.ask()
                except Exception as error:
                    level = logging.DEBUG if isinstance(error, WarpfitError) else logging.ERROR
                    _LOG.log(level, "no answer to the probe: %s", error)
                    answers = False
                self._control.send(messages.Probed(answers))

    def _sweep(self) -> None:
        with suppress(ChannelClosedError):  # the front door is gone, as `run` finds out
            while True:
                time.sleep(_IDLE_SECONDS / 2)
                self._leases.give_idle_back()
                self._control.send(messages.Recorded(self._recorder.take()))


def main(arguments: Sequence[str]) -> None:
    """Run a door; the front door starts it."""
    descriptor, port, front_door, table, number, text = arguments
    config = Config.from_json(text)
    configure_logging(config.log_level, config.log_format)
    take_short_turns()
    control = Channel(socket.socket(fileno=int(descriptor)))
    try:
        begin, _ = control.receive()
        assert isinstance(begin, messages.Begin)  # nothing else is sent before
        ledger = Ledger(int(table), config.doors, int(number))
        Door(control, config, int(port), front_door, ledger, begin.seed).run()
    except ChannelClosedError:
        _LOG.info("the front door is gone")
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
