"""The socket at which clients on this machine open windows (see evaluator.proto, SHARED MEMORY).

Each window has a connection of its own, which lasts as long as the window: when the client closes
it or ends, however it ends, the kernel says so, and the window goes. Memory files have no names, so
that nothing is left over when the server ends, either.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from warpfit import codec
from warpfit.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    UnavailableError,
    WarpfitError,
)
from warpfit.info import LocalTransport
from warpfit_server.config import Config
from warpfit_server.windows import WindowTable

_LOG: Final = logging.getLogger("warpfit.local")
#: A connection that has opened no window after this many seconds is closed.
_SILENT_SECONDS: Final = 5.0
#: Connections beyond the windows that there may be, to say no at.
_SPARE_CONNECTIONS: Final = 16
#: Pause when the system lets no more connections in, in seconds.
_CROWDED_SECONDS: Final = 0.1
#: Descriptors taken from a packet at most; the kernel closes those beyond.
_MOST_DESCRIPTORS: Final = 8
_CREDENTIALS: Final = struct.Struct("3i")
_SHA256_BYTES: Final = 32


class Tickets:
    """Tickets say on whose behalf a window is opened: who has one got it from GetServerInfo."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(_SHA256_BYTES)

    def issue(self, tenant: str) -> bytes:
        """Make a tenant's ticket."""
        name = tenant.encode()
        return hmac.digest(self._secret, name, "sha256") + name

    def tenant(self, ticket: bytes) -> str:
        """Return whose ticket it is.

        Raises:
            PermissionDeniedError: if it was not issued here.

        """
        mark, name = ticket[:_SHA256_BYTES], ticket[_SHA256_BYTES:]
        if not hmac.compare_digest(mark, hmac.digest(self._secret, name, "sha256")):
            raise PermissionDeniedError(
                "the ticket is not of this server",
                "TICKET_UNKNOWN",
                "Ask GetServerInfo for one",
                "ticket",
            )
        return name.decode()


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process that made a connection, as the kernel vouches for it."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(packed)[1]
    return user


@dataclass(slots=True)
class _Connection:
    """A connection, and the window that was opened at it."""

    end: socket.socket
    since: float
    window: bytes | None = None


class LocalSocket:
    """Accepts connections, and opens and closes windows, in a thread of its own.

    Args:
        path: of the socket; a socket there that nobody listens at is replaced.
        table: of the windows.
        most: connections at a time.
        user_of: tells the user id at the other end of a connection.

    """

    def __init__(
        self,
        path: str,
        table: WindowTable,
        most: int,
        user_of: Callable[[socket.socket], int] = peer_user,
    ) -> None:
        self.path = path
        self._table = table
        self._most = most + _SPARE_CONNECTIONS
        self._user_of = user_of
        self._tickets = Tickets()
        self._connections: dict[socket.socket, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="local", daemon=True)

    @classmethod
    def of(cls, config: Config, directory: str, table: WindowTable) -> LocalSocket | None:
        """Make the socket that the configuration asks for; ``auto`` is one in ``directory``."""
        if not config.local_socket:
            return None
        path = f"{directory}/local" if config.local_socket == "auto" else config.local_socket
        return cls(path, table, config.max_windows)

    def start(self) -> None:
        """Begin to serve.

        Raises:
            UnavailableError: if another server listens there.
            InvalidArgumentError: if there can be no socket.

        """
        self._listener = _listen(self.path)
        self._wake, self._woken = socket.socketpair()
        for end in (self._listener, self._woken):
            self._selector.register(end, selectors.EVENT_READ)
        self._thread.start()

    def stop(self) -> None:
        """Close all windows and remove the socket."""
        self._wake.close()
        self._thread.join()
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        self._woken.close()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            Path(self.path).unlink()

    def introduction(self, tenant: str) -> LocalTransport:
        """Return what a tenant's clients need to open windows."""
        return LocalTransport(self.path, self._tickets.issue(tenant))

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(_SILENT_SECONDS):
                if key.fileobj is self._woken:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._hear(key.data)
            self._drop_silent()

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError as error:  # the client has gone again, or there are too many files
            _LOG.warning("a connection was lost: %s", error)
            time.sleep(_CROWDED_SECONDS)
            return
        if len(self._connections) >= self._most:
            _LOG.warning("more than %d connections at %s", self._most, self.path)
            end.close()
            return
        end.setblocking(False)
        connection = _Connection(end, time.monotonic())
        self._connections[end] = connection
        self._selector.register(end, selectors.EVENT_READ, connection)

    def _hear(self, connection: _Connection) -> None:
        """Take the packet that opens a window; anything after it, and the end, closes it."""
        if connection.window is not None:
            self._drop(connection)
            return
        try:
            connection.window = self._open(connection.end)
            connection.end.send(codec.window_opened(connection.window))
        except WarpfitError as error:
            _LOG.info("a window was refused: %s", error)
            with contextlib.suppress(OSError):
                connection.end.send(codec.window_refused(error))
            self._drop(connection)
        except OSError as error:
            _LOG.debug("the client has gone: %s", error)
            self._drop(connection)

    def _open(self, end: socket.socket) -> bytes:
        packet, descriptors, flags, _ = socket.recv_fds(
            end, codec.WINDOW_PACKET_BYTES, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        try:
            if not packet:
                raise ConnectionResetError("it sent nothing")
            self._check_user(end)
            tenant = self._tickets.tenant(codec.ticket_of(packet))
            if len(descriptors) != 1 or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise InvalidArgumentError(
                    f"the packet came with {len(descriptors)} descriptors",
                    "BAD_PACKET",
                    "Send one OpenWindow with one descriptor",
                    "descriptor",
                )
            window = self._table.add(descriptors[0], tenant)
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return window

    def _check_user(self, end: socket.socket) -> None:
        user = self._user_of(end)
        if user != os.geteuid():
            raise PermissionDeniedError(
                f"user {user} is not the server's",
                "OTHER_USER",
                "Run worker and server as the same user, or use the network",
            )

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.end)
        del self._connections[connection.end]
        connection.end.close()
        if connection.window is not None:
            self._table.remove(connection.window)

    def _drop_silent(self) -> None:
        limit = time.monotonic() - _SILENT_SECONDS
        for connection in list(self._connections.values()):
            if connection.window is None and connection.since < limit:
                self._drop(connection)


def _listen(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _remove_abandoned(path)
        listener.bind(path)
        Path(path).chmod(stat.S_IRUSR | stat.S_IWUSR)
        listener.listen()
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise InvalidArgumentError(
            f"there can be no socket at {path}: {error.strerror or error}",
            "BAD_SOCKET_PATH",
            "Name a short path in a directory that the server may write to",
            "--local-socket",
        ) from error
    except WarpfitError:
        listener.close()
        raise
    return listener


def _remove_abandoned(path: str) -> None:
    """Remove the socket of a server that was killed; leave everything else alone."""
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
    raise UnavailableError(
        f"another server listens at {path}", "SOCKET_IN_USE", "Choose another --local-socket"
    )
