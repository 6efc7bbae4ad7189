"""Health checks as grpc.health.v1, on the server's own port and on a plain port beside it.

Service ``liveness`` says that the process works, ``readiness`` that an engine has just given the
right answer to a small evaluation (`warpfit_server.processes.watchdog`). The empty name and the
name of the gRPC service mean readiness; the label of a device, such as ``cuda:1``, that of its
engine.

Health checks need no credentials, so each port limits them separately, with threads of their own
among those of the port. The methods themselves are those of the package grpcio-health-checking.
"""

import resource
import threading
import time
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import HealthServicer

from warpfit_server.machine import cannot_listen, join_address
from warpfit_server.rpc.calls import CallTimeouts
from warpfit_server.rpc.servicer import HEALTH_THREADS, CallThreads

LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
_SERVICE: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
#: Most calls at a time that wait for their message, and that watch: half of the threads, because a
#: call that has made room for another one leaves its thread a moment later.
_MOST_READING: Final = 8
_MOST_WATCHING: Final = HEALTH_THREADS // 2 - _MOST_READING
#: Seconds in which the message of a call must arrive.
_CALL_SECONDS: Final = 1.0
#: Seconds in which calls that watch are told that the server stops.
_TELL_SECONDS: Final = 1.0
#: A name that no service has.
_NO_SERVICE: Final = health_pb2.HealthCheckRequest(service="-")
#: Milliseconds that TLS and the first frames of a connection to the plain port may take, without a
#: call and in all: so connections that nobody needs do not keep others out.
_HANDSHAKE_MS, _IDLE_MS, _AGE_MS = 1000, 2000, 60_000
#: Most connections of the plain port: this part of the process's file descriptors, but no more than
#: this. Whoever wants to shut it has to make all of them again every two seconds.
_CONNECTIONS_PART, _MOST_CONNECTIONS = 1 / 8, 4096

_Response = health_pb2.HealthCheckResponse


class Health:
    """Readiness of a gRPC service and of its devices, and the health service that reports it."""

    def __init__(self, service: str, devices: Collection[str] = ()) -> None:
        self._names = (READINESS, "", service)
        self._devices = frozenset(devices)
        self._lock = threading.RLock()
        self.serving: frozenset[str] = frozenset()
        """Labels of the devices that answer calls."""
        self.is_draining = False
        """Whether it is never ready again, so that calls that watch end once they are told."""
        self._servicer = HealthServicer()
        self._servicer.set(LIVENESS, _Response.SERVING)
        self._methods: list[_HealthMethods] = []
        self._tell()

    @property
    def ready(self) -> bool:
        """Whether calls can be answered: by one device at least."""
        return bool(self.serving)

    def set_serving(self, serving: frozenset[str]) -> None:
        """Set which devices serve; after `drain` none does."""
        with self._lock:
            serving = frozenset() if self.is_draining else serving
            if serving != self.serving:
                self.serving = serving
                self._tell()

    def _tell(self) -> None:
        """Let the health service know, which tells those that watch."""
        statuses = dict.fromkeys(self._names, self.ready)
        statuses |= {label: label in self.serving for label in self._devices}
        for name, serves in statuses.items():
            status = _Response.SERVING if serves else _Response.NOT_SERVING
            self._servicer.set(name, status)

    def drain(self) -> None:
        """Be not ready for good; the process stays alive."""
        with self._lock:
            self.is_draining = True
            self.set_serving(frozenset())
            self._tell()  # also those who know it, for whom that is the end

    def close(self) -> None:
        """End the calls that still watch, for which a server that stops would wait."""
        for methods in self._methods:
            methods.close()

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
        methods = _HealthMethods(self, self._servicer)
        self._methods.append(methods)
        handlers = methods.handlers()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))


class _CallLimit:
    """Limits the calls of one kind that run at a time.

    Where there are too many, the address with most calls loses its oldest one, so that a client
    that floods the port harms itself.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._calls: dict[str, list[Any]] = {}
        self._count = 0

    def enter(self, context: Any) -> bool:
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
            victim.cancel()
        return True

    @property
    def has_any(self) -> bool:
        """Whether there is a call."""
        return self._count > 0

    def cancel_all(self) -> None:
        """Cancel all calls."""
        with self._lock:
            contexts = [context for calls in self._calls.values() for context in calls]
        for context in contexts:
            context.cancel()

    def leave(self, context: Any) -> None:
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
    """The methods of grpc.health.v1 on one port, with limits before those of gRPC's own package.

    Both are streams in both directions to gRPC, so that a time limit holds before the message is
    there. On the wire, a stream of one message looks like a single message.
    """

    def __init__(self, health: Health, servicer: HealthServicer) -> None:
        self._health = health
        self._servicer = servicer
        self._reading, self._watching = _CallLimit(_MOST_READING), _CallLimit(_MOST_WATCHING)
        self._timeouts = CallTimeouts()

    def handlers(self) -> dict[str, Any]:
        """Return gRPC's handlers by the name of the method."""
        return {
            "Check": grpc.stream_stream_rpc_method_handler(partial(self._serve, watches=False)),
            "Watch": grpc.stream_stream_rpc_method_handler(partial(self._serve, watches=True)),
        }

    def close(self) -> None:
        """End the calls that watch, when those that are being told have had a moment."""
        until = time.monotonic() + _TELL_SECONDS
        while self._watching.has_any and time.monotonic() < until:
            time.sleep(_TELL_SECONDS / 20)
        self._watching.cancel_all()

    def _serve(self, messages: Iterator[bytes], context: Any, *, watches: bool) -> Iterator[bytes]:
        if not self._reading.enter(context):
            _refuse_excess(context)
            return
        self._timeouts.begin(context, _CALL_SECONDS)
        try:
            request = health_pb2.HealthCheckRequest.FromString(next(messages, b""))
        except grpc.RpcError:  # the client has gone, or its time was up
            return
        except DecodeError:
            _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "this is no HealthCheckRequest")
            return
        finally:
            self._timeouts.end(context)
            self._reading.leave(context)
        if not watches:
            answer = self._servicer.Check(request, context)
            if context.code() is None:
                yield answer.SerializeToString()
            return
        if not self._watching.enter(context):
            _refuse_excess(context)
            return
        try:
            # The package would remember every name that was ever asked for.
            is_known = self._health.status(request.service) != _Response.SERVICE_UNKNOWN
            for answer in self._servicer.Watch(request if is_known else _NO_SERVICE, context):
                yield answer.SerializeToString()
                if self._health.is_draining and answer.status == _Response.NOT_SERVING:
                    return
        finally:
            self._watching.leave(context)


class HealthPort:
    """A plain port that answers health checks and nothing else, with threads of its own.

    All front ends listen on it, so that it answers as long as one of them is there.

    Raises:
        UnavailableError: if the port is taken.
    """

    def __init__(self, health: Health, host: str, port: int) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        connections = min(_MOST_CONNECTIONS, int(files * _CONNECTIONS_PART))
        options = [
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", 4096),
            ("grpc.max_concurrent_streams", 16),
            ("grpc.max_allowed_incoming_connections", connections),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
            ("grpc.max_connection_age_ms", _AGE_MS),
        ]
        threads = CallThreads(HEALTH_THREADS, "health")
        limits: Any = {"maximum_concurrent_rpcs": HEALTH_THREADS, "options": options}
        self._server = grpc.server(threads, **limits)
        health.add_to(self._server)
        try:
            self._server.add_insecure_port(join_address(host, port))
        except RuntimeError as error:
            raise cannot_listen(host, port, "--health-port") from error
        self._server.start()

    def stop(self) -> None:
        """Close the port."""
        self._server.stop(None)


def _refuse_excess(context: Any) -> None:
    _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "too many health checks at a time")


def _refuse(context: Any, code: grpc.StatusCode, details: str) -> None:
    context.set_code(code)
    context.set_details(details)


def _address(context: Any) -> str:
    """Return the caller's address without its port."""
    return str(context.peer()).rpartition(":")[0]
