"""Sockets between two processes of the server, its ports, and the file that tells its address."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from warpfit.errors import InvalidArgumentError, UnavailableError
from warpfit_server.system.machine import shortage

#: Size of the kernel's buffer for what the other process has not read yet.
_SOCKET_BYTES: Final = 1 << 20
#: Addresses to listen on that stand for all of the machine's.
_ANY = ("0.0.0.0", "::", "[::]")


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
            share its connections; if the host is no address of this machine; or if the port is not
            for this user. Its text names ``flag``, which chooses another one.
    """
    options: Any = {"type": socket.SOCK_STREAM, "flags": socket.AI_PASSIVE}
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, **options)[0]
    except (OSError, UnicodeError) as error:
        raise cannot_listen(host, port, flag, error) from error
    reserved = socket.socket(family, kind, protocol)
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(address)
    except OSError as error:
        reserved.close()
        raise cannot_listen(host, port, flag, error) from error
    return reserved


def join_address(host: str, port: int) -> str:
    """Write an address as ``HOST:PORT``; an IPv6 host gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of an address that `join_address` wrote."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def cannot_listen(
    host: str, port: int, flag: str, error: Exception | None = None
) -> UnavailableError:
    """Explain why a port cannot be had; ``flag`` is what chooses another one.

    Without the error of the system, it is taken since it was reserved.
    """
    number = errno.EADDRINUSE if error is None else getattr(error, "errno", None)
    remedy = f"Choose another {flag}"
    if number == errno.EADDRINUSE:
        reason, why = "PORT_IN_USE", "another program listens there"
    elif number in (errno.EACCES, errno.EPERM):
        reason, why = "PORT_FORBIDDEN", "this user may not use that port"
        remedy += "; ports from 1024 on are for all users"
    else:
        reason, why = "NO_SUCH_HOST", getattr(error, "strerror", None) or str(error)
        remedy += "; give an address of this machine, such as 127.0.0.1 or 0.0.0.0"
    return UnavailableError(f"cannot listen on {join_address(host, port)}: {why}", reason, remedy)


@contextmanager
def address_file(path: str, host: str, port: int) -> Iterator[None]:
    """Keep a file PATH.HOST-PORT that holds HOST:PORT; none if the path is empty.

    Many servers may be given the same path, such as by one ``srun``: clients of ``file://PATH``
    read all files that begin so (`warpfit.transport.connection.file_target`).

    Raises:
        InvalidArgumentError: if the file cannot be written.
    """
    if not path:
        yield
        return
    host = socket.gethostname() if host in _ANY else host.strip("[]")
    file = Path(f"{Path(path).absolute()}.{host.replace(':', '_')}-{port}")
    half = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        half.unlink(missing_ok=True)
        with half.open("x") as new:  # follows no link that another user has put there
            new.write(f"{join_address(host, port)}\n")
        half.replace(file)  # so that no client reads a part of it
    except OSError as error:
        raise InvalidArgumentError(
            f"the address file {file} cannot be written: {error.strerror or error}",
            "ADDRESS_FILE",
            "Give --address-file in a folder that exists and that the server may write to",
        ) from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
