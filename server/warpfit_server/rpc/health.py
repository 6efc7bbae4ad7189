"""Health checks as grpc.health.v1, on the server's own port and on a plain one beside it.

Service ``liveness`` says that the process works, ``readiness`` that the engine has just given the
right answer to a small evaluation (`processes.watchdog`). The empty name and the name of the
service itself mean readiness.

Nobody needs credentials to ask, so the calls have threads and limits of their own, on each port,
and none of them waits long for a client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from warpfit.errors import UnavailableError
from warpfit_server.rpc.port import AtOnce
from warpfit_server.rpc.receive_timeouts import ReceiveTimeouts
from warpfit_server.rpc.tls import join_address
from warpfit_server.system.worker_threads import Workers

LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
_SERVICE: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
#: Calls at a time of which the message has not come, and calls that watch.
_READING, _WATCHING = 8, 64
#: Seconds in which a call that does not watch must be over.
_SECONDS: Final = 1.0
#: On the port of their own: most bytes of a message, calls of one connection, and connections.
_MOST_BYTES, _STREAMS, _CONNECTIONS = 4096, 16, 256
#: Seconds in which a connection of that port must be made, and after which a client has to make a
#: new one: connections that nobody needs must not keep others out.
_HANDSHAKE_SECONDS, _CONNECTION_SECONDS = 5, 60
#: Seconds after which a call that watches looks whether its client has gone.
_LOOK_SECONDS: Final = 5.0

_Response = health_pb2.HealthCheckResponse
Send = Callable[[bytes | None], None]


class Health:
    """What health checks are told.

    Args:
        service: full name of the gRPC service, which is healthy when it is ready.
        on_change: called with the new readiness, in the order of the changes.

    """

    def __init__(
        self, service: str, on_change: Callable[[bool], None] = lambda ready: None
    ) -> None:
        self._names = (READINESS, "", service)
        self._on_change = on_change
        self._changed = threading.Condition()
        self._ready = False
        self._draining = False

    @property
    def ready(self) -> bool:
        """Whether calls can be answered."""
        return self._ready

    def set_ready(self, ready: bool) -> None:
        """Tell whether calls can be answered; after `drain` they no longer can."""
        with self._changed:
            ready = ready and not self._draining
            if ready is not self._ready:
                self._ready = ready
                self._changed.notify_all()
                self._on_change(ready)

    def drain(self) -> None:
        """Be not ready for good; the process stays alive."""
        with self._changed:
            self._draining = True
        self.set_ready(False)

    def status(self, name: str) -> int:
        """Return the status of a service, SERVICE_UNKNOWN if there is none of that name."""
        if name != LIVENESS and name not in self._names:
            return int(_Response.SERVICE_UNKNOWN)
        is_well = name == LIVENESS or self._ready
        return int(_Response.SERVING if is_well else _Response.NOT_SERVING)

    def wait_for_change(self, name: str, status: int, seconds: float) -> None:
        """Wait until a service has another status, or for some time."""
        with self._changed:
            self._changed.wait_for(lambda: self.status(name) != status, seconds)

    def add_to(self, server: grpc.Server) -> None:
        """Answer health checks on a server that has not started yet."""
        reading = _Calls(_READING)
        methods = {
            "Check": _Method(self._check, reading),
            "Watch": _Method(self._watch, reading, _Calls(_WATCHING)),
        }
        handlers = {n: grpc.stream_stream_rpc_method_handler(m) for n, m in methods.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))

    def _check(self, name: str, context: grpc.ServicerContext) -> Iterator[bytes]:
        status = self.status(name)
        if status == _Response.SERVICE_UNKNOWN:
            _refuse(context, grpc.StatusCode.NOT_FOUND, "there is no such service")
        else:
            yield _Response(status=status).SerializeToString()

    def _watch(self, name: str, context: grpc.ServicerContext) -> Iterator[bytes]:
        told: int | None = None
        while context.is_active():
            status = self.status(name)
            if status != told:
                yield _Response(status=status).SerializeToString()
                told = status
            else:
                self.wait_for_change(name, status, _LOOK_SECONDS)


class _Calls:
    """Calls of one kind, of which there are only so many at a time.

    Where there are too many, the address that has most of them loses its oldest one: who floods
    the port is in its own way.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._calls: dict[str, list[grpc.ServicerContext]] = {}
        self._count = 0

    def enter(self, context: grpc.ServicerContext) -> bool:
        """Take a call; False if it is its own address that has too many."""
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
        """End a call, unless it has made room for another one."""
        address = _address(context)
        with self._lock:
            calls = self._calls.get(address, [])
            if context in calls:
                calls.remove(context)
                self._count -= 1
            if not calls:
                self._calls.pop(address, None)


class _Method:
    """A method of grpc.health.v1, taken in where it arrives, as `rpc.interceptor` says.

    Args:
        answer: makes the messages of the answer for the name of a service.
        reading: the calls whose message has not come.
        watching: the calls that last, None where the answer is one message.

    """

    experimental_non_blocking: Final = True
    experimental_thread_pool: Final = AtOnce()

    def __init__(
        self,
        answer: Callable[[str, grpc.ServicerContext], Iterator[bytes]],
        reading: _Calls,
        watching: _Calls | None = None,
    ) -> None:
        self._answer = answer
        self._reading = reading
        self._watching = watching
        # A call that has made room for another one leaves its thread a moment later.
        self._workers = Workers(2 * (_READING if watching is None else _READING + _WATCHING))
        self._timeouts = ReceiveTimeouts()

    def __call__(
        self, messages: Iterator[bytes], context: grpc.ServicerContext, send: Send
    ) -> None:
        if self._workers.has_room("") and self._reading.enter(context):
            self._workers.start("", self._serve, messages, context, send)
        else:
            _refuse_crowd(context)
            send(None)

    def _serve(self, messages: Iterator[bytes], context: grpc.ServicerContext, send: Send) -> None:
        self._timeouts.begin(context, _SECONDS, context.cancel)
        try:
            name = _name(next(messages, b""), context)
            if name is not None and self._stays(context):
                for message in self._answer(name, context):
                    send(message)
            send(None)
        except grpc.RpcError:
            return  # the client has gone, or was too slow
        finally:
            self._timeouts.stop(context)
            self._reading.leave(context)
            if self._watching is not None:
                self._watching.leave(context)

    def _stays(self, context: grpc.ServicerContext) -> bool:
        """Let a call last that may."""
        if self._watching is None:
            return True
        self._timeouts.stop(context)
        self._reading.leave(context)
        if not self._watching.enter(context):
            _refuse_crowd(context)
            return False
        return True


def _name(message: bytes, context: grpc.ServicerContext) -> str | None:
    """Read the name of a service; None if the call is refused."""
    try:
        return str(health_pb2.HealthCheckRequest.FromString(message).service)
    except DecodeError:
        _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "this is no HealthCheckRequest")
        return None


def _refuse_crowd(context: grpc.ServicerContext) -> None:
    _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many health checks at a time")


def _refuse(context: grpc.ServicerContext, code: grpc.StatusCode, details: str) -> None:
    context.set_code(code)
    context.set_details(details)


def _address(context: grpc.ServicerContext) -> str:
    """Return the caller's address without its port."""
    return str(context.peer()).rpartition(":")[0]


class HealthPort:
    """A plain port that answers health checks and nothing else, with threads of its own.

    Raises:
        UnavailableError: if the port is taken.

    """

    def __init__(self, health: Health, host: str, port: int) -> None:
        options = [
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", _MOST_BYTES),
            ("grpc.max_concurrent_streams", _STREAMS),
            ("grpc.max_allowed_incoming_connections", _CONNECTIONS),
            ("grpc.server_handshake_timeout_ms", 1000 * _HANDSHAKE_SECONDS),
            ("grpc.max_connection_age_ms", 1000 * _CONNECTION_SECONDS),
        ]
        self._server = grpc.server(AtOnce(), options=options)
        health.add_to(self._server)
        try:
            self.port = self._server.add_insecure_port(join_address(host, port))
        except RuntimeError as error:
            raise UnavailableError(
                f"cannot listen on {host}:{port}", "PORT_IN_USE", "Choose another --health-port"
            ) from error
        self._server.start()

    def stop(self) -> None:
        """Close the port."""
        self._server.stop(None)
