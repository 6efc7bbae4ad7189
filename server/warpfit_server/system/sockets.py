"""Sockets between two processes of the server, and the addresses of its ports."""

import socket
from typing import Any, Final

from warpfit.errors import UnavailableError
from warpfit_server.system.shortages import shortage

#: Size of the kernel's buffer for what the other process has not read yet.
_SOCKET_BYTES: Final = 1 << 20


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets for channels.

    Raises:
        ResourceExhaustedError: if this process can open no more files.
    """
    try:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise shortage(error) or error from error
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    return pair


def reserve_port(host: str, port: int, flag: str) -> socket.socket:
    """Reserve a port, 0 for a free one, that several processes of this user will listen on.

    The socket that is returned is bound and does not listen, so that it gets no connections.

    Raises:
        UnavailableError: if a server listens on the port, because with SO_REUSEPORT the two would
            share its connections; or if the host is no address of this machine. Its text names
            ``flag``, which chooses another one.
    """
    options: Any = {"type": socket.SOCK_STREAM, "flags": socket.AI_PASSIVE}
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, **options)[0]
    except (OSError, UnicodeError) as error:
        raise UnavailableError(
            f"cannot listen on {host}:{port}: {error}",
            "NO_SUCH_HOST",
            f"Choose another {flag}; give an address of this machine, such as 127.0.0.1 or 0.0.0.0",
        ) from error
    reserved = socket.socket(family, kind, protocol)
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(address)
    except OSError as error:
        reserved.close()
        raise port_in_use(host, port, flag) from error
    return reserved


def join_address(host: str, port: int) -> str:
    """Write an address as ``HOST:PORT``; an IPv6 host gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def port_in_use(host: str, port: int, flag: str) -> UnavailableError:
    """Explain that a port is taken; ``flag`` is what chooses another one."""
    return UnavailableError(
        f"cannot listen on {host}:{port}", "PORT_IN_USE", f"Choose another {flag}"
    )
