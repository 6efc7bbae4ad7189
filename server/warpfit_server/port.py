"""The gRPC port: options, threads, and sharing it between processes."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc

from warpfit.errors import UnavailableError
from warpfit_server.config import Config

#: Threads beyond --max-requests, for short calls and for refusing what is over the limit.
_SPARE_THREADS: Final = 16


def make_server(
    config: Config, service: str, handlers: Mapping[str, Any], *, shared: bool
) -> grpc.Server:
    """Make a gRPC server.

    Args:
        config: limits and sizes.
        service: full name of the service.
        handlers: its methods by name.
        shared: whether several processes of this user listen on the port, among which the kernel
            deals the connections out.

    """
    threads = 2 * config.max_requests + _SPARE_THREADS
    return grpc.server(
        ThreadPoolExecutor(threads, "call"),
        handlers=[grpc.method_handlers_generic_handler(service, dict(handlers))],
        maximum_concurrent_rpcs=threads,
        options=[
            ("grpc.max_receive_message_length", config.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(shared)),
        ],
    )


def listen(server: grpc.Server, host: str, port: int) -> int:
    """Bind a server to a port, 0 for a free one; return the port.

    Raises:
        UnavailableError: if it is taken.

    """
    try:
        return server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise _taken(host, port) from error


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
