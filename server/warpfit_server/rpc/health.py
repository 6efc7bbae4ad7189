"""Health checks as grpc.health.v1, on the server's own port and on a plain port beside it.

Service ``liveness`` says that the process works, ``readiness`` that an engine has just given the
right answer to a small evaluation (`warpfit_server.processes.watchdog`). The empty name and the
name of the gRPC service mean readiness; the label of a device, such as ``cuda:1``, that of its
engine.

Health checks need no credentials, so each port limits them separately. Each watching call has a
thread of its own.
"""

import resource
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from warpfit_server.rpc.port import (
    Call,
    CallStarter,
    ReceiveTimeouts,
    join_address,
    port_in_use,
)
from warpfit_server.system.worker_threads import Workers

LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
_SERVICE: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
#: Most calls at a time that wait for their message, and that watch.
_MOST_READING, _MOST_WATCHING = 8, 64
#: Seconds in which the message of a call must arrive.
_CALL_SECONDS: Final = 1.0
#: Seconds after which a watching call looks whether its client has gone.
_WATCH_SECONDS: Final = 5.0
#: Milliseconds that TLS and the first frames of a connection to the plain port may take, without a
#: call and in all: so connections that nobody needs do not keep others out.
_HANDSHAKE_MS, _IDLE_MS, _AGE_MS = 1000, 2000, 60_000
#: Most connections of the plain port: this part of the process's file descriptors, but no more than
#: this. Whoever wants to shut it has to make all of them again every two seconds.
_CONNECTIONS_PART, _MOST_CONNECTIONS = 1 / 8, 4096

_Response = health_pb2.HealthCheckResponse


class Health:
    """Readiness of a gRPC service and of its devices, and the health service that reports it.

    ``on_change`` is called with the labels of the devices that serve, in the order of the changes.
    """

    def __init__(
        self,
        service: str,
        devices: Collection[str] = (),
        on_change: Callable[[frozenset[str]], None] = lambda serving: None,
    ) -> None:
        self._names = (READINESS, "", service)
        self._devices = frozenset(devices)
        self._on_change = on_change
        self._changed = threading.Condition()
        self.serving: frozenset[str] = frozenset()
        """Labels of the devices that answer calls."""
        self._draining = False
        self.is_closed = False
        """Whether calls that watch are ended."""

    @property
    def ready(self) -> bool:
        """Whether calls can be answered: by one device at least."""
        return bool(self.serving)

    def set_device(self, label: str, serves: bool) -> None:
        """Set whether a device serves; after `drain` none does."""
        with self._changed:
            self.set_serving(self.serving | {label} if serves else self.serving - {label})

    def set_serving(self, serving: frozenset[str]) -> None:
        """Set which devices serve; after `drain` none does."""
        with self._changed:
            serving = frozenset() if self._draining else serving
            if serving != self.serving:
                self.serving = serving
                self._changed.notify_all()
                self._on_change(serving)

    def drain(self) -> None:
        """Be not ready for good; the process stays alive."""
        with self._changed:
            self._draining = True
            self.set_serving(frozenset())

    def close(self) -> None:
        """End the calls that watch, for which a server that stops would wait."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def status(self, name: str) -> int:
        """Return the status of a service, SERVICE_UNKNOWN if there is none of that name."""
        if name in self._devices:
            is_well = name in self.serving
        elif name == LIVENESS or name in self._names:
            is_well = name == LIVENESS or self.ready
        else:
            return int(_Response.SERVICE_UNKNOWN)
        return int(_Response.SERVING if is_well else _Response.NOT_SERVING)

    def add_to(self, server: grpc.Server) -> None:
        """Answer health checks on a server that has not started yet."""
        handlers = _HealthMethods(self).handlers()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))

    def wait_for_change(self, name: str, status: int) -> None:
        """Wait until a service has another status than this one, or for some seconds."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.is_closed or self.status(name) != status, _WATCH_SECONDS
            )


class _CallLimit:
    """Limits the calls of one kind that run at a time.

    Where there are too many, the address with most calls loses its oldest one, so that a client
    that floods the port harms itself.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._calls: dict[str, list[grpc.ServicerContext]] = {}
        self._count = 0

    def enter(self, context: grpc.ServicerContext) -> bool:
        """Count a call; return False if its own address has too many."""
        address = _address(context)
        victim = None
        with self._lock:
            if self._count >= self._most:
                largest = max(self._calls, key=lambda name: len(self._calls[name]))
                if len(self._calls.get(address, ())) >= len(self._calls[largest]):
                    return False
                victim = self._calls[largest].pop(0)
                self._count -= 1
            self._calls.setdefault(address, []).append(context)
            self._count += 1
        if victim is not None:
            victim.cancel()  # type: ignore[no-untyped-call]
        return True

    def leave(self, context: grpc.ServicerContext) -> None:
        """Count a call no more, unless it has made room for another one."""
        address = _address(context)
        with self._lock:
            calls = self._calls.get(address, [])
            if context in calls:
                calls.remove(context)
                self._count -= 1
            if not calls:
                self._calls.pop(address, None)


class _HealthMethods:
    """The methods of grpc.health.v1 on one port."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._reading, self._watching = _CallLimit(_MOST_READING), _CallLimit(_MOST_WATCHING)
        # Twice as many: a call that has made room for another one leaves its thread a moment later.
        self._watchers = Workers(2 * _MOST_WATCHING)
        self._timeouts = ReceiveTimeouts()

    def handlers(self) -> dict[str, Any]:
        """Return gRPC's handlers by the name of the method."""
        methods = {"Check": self._check, "Watch": self._watch}
        return {
            name: grpc.stream_stream_rpc_method_handler(partial(self._receive, method))
            for name, method in methods.items()
        }

    def _receive(self, method: Callable[[Call, str], None], call: Call) -> None:
        """Have a call answered once its message is there, unless too many wait for theirs."""
        if self._reading.enter(call):
            self._timeouts.begin(call, _CALL_SECONDS, call.cancel)
            call.receive(partial(self._arrived, method, call))
        else:
            _refuse_excess(call)

    def _arrived(
        self, method: Callable[[Call, str], None], call: Call, message: bytes | None
    ) -> None:
        self._timeouts.stop(call)
        self._reading.leave(call)
        try:
            name = str(health_pb2.HealthCheckRequest.FromString(message or b"").service)
        except DecodeError:
            _refuse(call, grpc.StatusCode.INVALID_ARGUMENT, "this is no HealthCheckRequest")
        else:
            method(call, name)

    def _check(self, call: Call, name: str) -> None:
        status = self._health.status(name)
        if status == _Response.SERVICE_UNKNOWN:
            _refuse(call, grpc.StatusCode.NOT_FOUND, "there is no such service")
        else:
            call.end(_Response(status=status).SerializeToString())

    def _watch(self, call: Call, name: str) -> None:
        if self._watchers.has_room("") and self._watching.enter(call):
            self._watchers.start("", self._tell_changes, call, name)
        else:
            _refuse_excess(call)

    def _tell_changes(self, call: Call, name: str) -> None:
        told: int | None = None
        try:
            while call.is_active():
                status = self._health.status(name)
                if status != told:
                    call.send(_Response(status=status).SerializeToString())
                    told = status
                elif self._health.is_closed:
                    break
                else:
                    self._health.wait_for_change(name, status)
            call.end()
        finally:
            self._watching.leave(call)


class HealthPort:
    """A plain port that answers health checks and nothing else, with threads of its own.

    Raises:
        UnavailableError: if the port is taken.
    """

    def __init__(self, health: Health, host: str, port: int) -> None:
        self._server = grpc.server(CallStarter(), options=_port_options())
        health.add_to(self._server)
        try:
            self.port = self._server.add_insecure_port(join_address(host, port))
        except RuntimeError as error:
            raise port_in_use(host, port, "--health-port") from error
        self._server.start()

    def stop(self) -> None:
        """Close the port."""
        self._server.stop(None)


def _port_options() -> list[tuple[str, int]]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    connections = min(_MOST_CONNECTIONS, int(files * _CONNECTIONS_PART))
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", 4096),
        ("grpc.max_concurrent_streams", 16),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        ("grpc.max_connection_age_ms", _AGE_MS),
    ]


def _refuse_excess(call: Call) -> None:
    _refuse(call, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many health checks at a time")


def _refuse(call: Call, code: grpc.StatusCode, details: str) -> None:
    call.set_code(code)
    call.set_details(details)
    call.end()


def _address(context: grpc.ServicerContext) -> str:
    """Return the caller's address without its port."""
    return str(context.peer()).rpartition(":")[0]
