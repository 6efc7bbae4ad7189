"""The gRPC port: its options, threads and addresses."""

import logging
import socket
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import grpc

from warpfit.errors import UnavailableError
from warpfit_server.config import Config
from warpfit_server.rpc.tls import server_credentials

_LOG: Final = logging.getLogger("warpfit.port")
_KEEPALIVE_MS: Final = 20_000
#: Shortest time between the pings of a client, half of what `warpfit.TransportConfig` does.
_PING_MS: Final = 500
#: Calls of one connection at a time. gRPC also refuses new ones while as many cancelled calls wait
#: to be noticed, so that one connection's resets do not fill its queue of new calls.
_STREAMS: Final = 128
#: Time that TLS and the first frames of a connection may take.
_HANDSHAKE_MS: Final = 10_000
#: Threads beside those of open calls, which refuse the calls that are too many.
_REFUSING_THREADS: Final = 8
#: Threads of a port for health checks.
HEALTH_THREADS: Final = 144


class CallThreads(ThreadPoolExecutor):
    """The threads that serve the calls of a port, started when they are first needed."""

    def submit(self, task: Any, /, *arguments: Any, **keywords: Any) -> Future[Any]:
        """Have a task done; where the system has no more threads, one of those there does it.

        The error would otherwise end the thread of gRPC that serves the port.
        """
        try:
            return super().submit(task, *arguments, **keywords)
        except RuntimeError as error:
            _LOG.error("no new thread for calls: %s", error)
            counted: Future[Any] = Future()
            counted.set_result(None)
            return counted


def make_server(
    config: Config, service: str, handlers: Mapping[str, Any], *, shared: bool
) -> grpc.Server:
    """Make a gRPC server for one service, with threads for its open calls and for health checks.

    If ``shared``, several processes of this user may listen on the port, among which the kernel
    distributes the connections.
    """
    threads = config.open_calls + _REFUSING_THREADS + HEALTH_THREADS
    return grpc.server(
        CallThreads(threads, "call"),
        handlers=[grpc.method_handlers_generic_handler(service, dict(handlers))],
        maximum_concurrent_rpcs=threads,
        options=[
            ("grpc.max_receive_message_length", config.message_bytes),
            # gRPC would decompress messages, a thousandfold, on the thread that serves the port,
            # before anybody could refuse the call.
            ("grpc.per_message_decompression", 0),
            ("grpc.max_concurrent_streams", _STREAMS),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(shared)),
            ("grpc.max_allowed_incoming_connections", config.connections),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            # A client that vanishes must not keep its slot for ever. A client with several servers
            # sends a ping every second, which gRPC would otherwise treat as an attack.
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
            ("grpc.http2.ping_timeout_ms", _KEEPALIVE_MS),
            ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS),
        ],
    )


def join_address(host: str, port: int) -> str:
    """Write an address as ``HOST:PORT``; an IPv6 host gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(server: grpc.Server, config: Config, port: int) -> int:
    """Bind a server to a port, 0 for a free one, with TLS if configured; return the port.

    Raises:
        UnavailableError: if the port is taken.
        InvalidArgumentError: if the certificate files cannot be used.
    """
    address, credentials = join_address(config.host, port), server_credentials(config)
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise port_in_use(config.host, port, "--host or --port") from error


def listen_locally(server: grpc.Server, path: str) -> None:
    """Bind a server to a Unix socket as well.

    Raises:
        UnavailableError: if there can be none of that name.
    """
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise UnavailableError(
            f"no socket can be made at {path}",
            "NO_LOCAL_SOCKET",
            "Set TMPDIR to a folder with a shorter path: a socket's may have some 100 bytes",
        ) from error


def check_free(host: str, port: int) -> None:
    """Check that no server listens on a port that is about to be shared.

    Raises:
        UnavailableError: if one does, because with SO_REUSEPORT the two would share its
            connections; or if the host is no address of this machine.
    """
    if not port:
        return
    options: Any = {"type": socket.SOCK_STREAM, "flags": socket.AI_PASSIVE}
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, **options)[0]
    except (OSError, UnicodeError) as error:
        raise UnavailableError(
            f"cannot listen on {host}:{port}: {error}",
            "NO_SUCH_HOST",
            "Give an address of this machine as --host, such as 127.0.0.1 or 0.0.0.0",
        ) from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise port_in_use(host, port, "--host or --port") from error


def port_in_use(host: str, port: int, flag: str) -> UnavailableError:
    """Explain that a port is taken; ``flag`` is what chooses another one."""
    return UnavailableError(
        f"cannot listen on {host}:{port}", "PORT_IN_USE", f"Choose another {flag}"
    )
