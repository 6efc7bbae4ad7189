"""A TCP proxy that slows down and cuts the connections between a client and a server."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spoil:
    """What happens to the bytes of one direction; by default nothing."""

    piece: int = 1 << 16
    """Bytes forwarded at a time."""
    pause: float = 0.0
    """Seconds after each piece."""
    cut_after: int | None = None
    """Close the connection, with a reset, after this many bytes."""


class Proxy:
    """Forwards connections to a server; a context manager. ``address`` is where clients connect."""

    def __init__(self, target: str, up: Spoil | None = None, down: Spoil | None = None) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.up = up or Spoil()
        self.down = down or Spoil()
        self.connections = 0
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Close every connection."""
        for end in self._sockets:
            _reset(end)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            self.connections += 1
            self._sockets += [client, server]
            for source, sink, spoil in ((client, server, self.up), (server, client, self.down)):
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=_forward, args=(source, sink, spoil), daemon=True).start()


def _forward(source: socket.socket, sink: socket.socket, spoil: Spoil) -> None:
    left = spoil.cut_after
    with contextlib.suppress(OSError):
        while data := source.recv(spoil.piece):
            if left is not None and len(data) > left:
                sink.sendall(data[:left])
                break
            left = None if left is None else left - len(data)
            sink.sendall(data)
            if spoil.pause:
                time.sleep(spoil.pause)
    _reset(source)
    _reset(sink)


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
