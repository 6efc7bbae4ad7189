"""The gRPC port: options, threads, and sharing it between processes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import grpc

from warpfit.errors import UnavailableError
from warpfit_server.config import Config
from warpfit_server.rpc.tls import add_port

_KEEPALIVE_MS: Final = 20_000
#: Calls of one connection at a time. gRPC also refuses new ones while as many that were taken back
#: wait to be noticed, so that one connection's resets do not fill its queue of new calls.
_STREAMS: Final = 128
#: Time that TLS and the first frames of a connection may take.
_HANDSHAKE_MS: Final = 10_000


class AtOnce(ThreadPoolExecutor):
    """Runs what it is given where it is given it, on the thread that serves the port.

    gRPC asks for a pool of this type; this one has no threads.
    """

    def __init__(self) -> None:
        super().__init__(1)

    def submit(self, task: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        """Run a task that waits for nothing."""
        done: Future[Any] = Future()
        done.set_result(task(*args, **named))
        return done


def make_server(
    config: Config, service: str, handlers: Mapping[str, Any], *, shared: bool
) -> grpc.Server:
    """Make a gRPC server.

    Args:
        config: limits and sizes.
        service: full name of the service.
        handlers: its methods by name; they have threads of their own.
        shared: whether several processes of this user listen on the port, among which the kernel
            deals the connections out.

    """
    return grpc.server(
        AtOnce(),
        handlers=[grpc.method_handlers_generic_handler(service, dict(handlers))],
        options=[
            ("grpc.max_receive_message_length", config.message_bytes),
            ("grpc.max_concurrent_streams", _STREAMS),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(shared)),
            ("grpc.max_allowed_incoming_connections", config.connections),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            # A client that vanishes without a word must not keep its place for ever; and clients
            # may ask the same of the server, which gRPC would take for an attack.
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
            ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 4),
        ],
    )


def listen(server: grpc.Server, config: Config, port: int) -> int:
    """Bind a server to a port, 0 for a free one; return the port.

    Raises:
        UnavailableError: if it is taken.
        InvalidArgumentError: if the files of TLS cannot be used.

    """
    try:
        return add_port(server, config, port)
    except RuntimeError as error:
        raise _taken(config.host, port) from error


def check_free(host: str, port: int) -> None:
    """Check that no server listens on a port that is about to be shared.

    Raises:
        UnavailableError: if one does; with SO_REUSEPORT the two would share its connections.

    """
    if not port:
        return
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise _taken(host, port) from error


def _taken(host: str, port: int) -> UnavailableError:
    return UnavailableError(
        f"cannot listen on {host}:{port}", "PORT_IN_USE", "Choose another --host or --port"
    )
