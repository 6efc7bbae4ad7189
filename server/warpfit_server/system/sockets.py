"""Sockets between two processes of the server."""

import socket
from typing import Final

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
