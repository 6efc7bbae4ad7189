"""A client that speaks HTTP/2 by hand, to do what gRPC's own clients never do.

It begins calls without sending a message, sends a part of one and stops, and takes calls back as
soon as they are made. Frames and header encoding are those of RFC 9113 and RFC 7541.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Final

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW: Final = 4
_CANCEL: Final = 8
_FRAME: Final = 16384
_BURST: Final = 64 * _FRAME
#: First index of HPACK's dynamic table, where the header stands that was indexed last.
_NEWEST_INDEXED: Final = 62


class RawConnection:
    """One connection; a context manager. A thread reads what the server sends.

    It comes from the address ``source``; its windows stay closed unless it ``reads``.
    """

    def __init__(
        self, address: str, token: str = "", *, source: str = "127.0.0.1", reads: bool = True
    ) -> None:
        host, _, port = address.rpartition(":")
        self._token = token
        self._socket = socket.create_connection((host, int(port)), source_address=(source, 0))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._initial = 65535
        self._window = 65535
        self._windows: dict[int, int] = {}
        self._ended: dict[int, float] = {}
        self._next = 1
        self._is_open = True
        settings = b"" if reads else struct.pack(">HI", _INITIAL_WINDOW, 0)
        self._write(_PREFACE + _frame(_SETTINGS, 0, 0, settings))
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):  # the server may have closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def is_open(self) -> bool:
        """Whether the server has not closed the connection."""
        return self._is_open

    def begin(self, method: str, *extra: tuple[str, str]) -> int:
        """Begin a call of ``/service/method`` without a message; return its stream's number."""
        stream, block = self._stream(), self._header_block(method, extra)
        self._write(_frame(_HEADERS, _END_HEADERS, stream, block))
        return stream

    def begin_with_headers(self, method: str, name: str, value: bytes, count: int) -> int:
        """Begin a call with a header of any bytes ``count`` times, of a byte each after the first.

        The header is the first one of the connection that is indexed.
        """
        block = self._header_block(method, ())
        block += b"\x40" + _text(name) + bytes((len(value),)) + value  # indexed
        block += bytes((0x80 | _NEWEST_INDEXED,)) * (count - 1)
        stream = self._stream()
        self._write(_frame(_HEADERS, _END_HEADERS | _END_STREAM, stream, block))
        return stream

    def flood(self, kind: str) -> None:
        """Send as many frames of a `FLOODS` as fit in one write."""
        self._write(FLOODS[kind])

    def begin_and_reset(self, method: str, count: int) -> None:
        """Begin a number of calls and take each back at once."""
        block = self._header_block(method, ())
        reset = struct.pack(">I", _CANCEL)
        frames = []
        for _ in range(count):
            stream = self._stream()
            frames.append(_frame(_HEADERS, _END_HEADERS, stream, block))
            frames.append(_frame(_RST_STREAM, 0, stream, reset))
        self._write(b"".join(frames))

    def send(self, stream: int, data: bytes, timeout: float) -> int:
        """Send bytes of a call as far as the server lets them come; return how many."""
        deadline, sent = time.monotonic() + timeout, 0
        while sent < len(data) and stream not in self._ended and self._is_open:
            size = self._reserve(stream, min(_BURST, len(data) - sent), deadline)
            if not size:
                break
            piece = data[sent : sent + size]
            parts = [piece[at : at + _FRAME] for at in range(0, size, _FRAME)]
            try:
                self._write(b"".join(_frame(_DATA, 0, stream, part) for part in parts))
            except OSError:
                break
            sent += size
        return sent

    def finish(self, stream: int) -> None:
        """Say that a call has no further messages."""
        self._write(_frame(_DATA, _END_STREAM, stream, b""))

    def has_ended(self, stream: int, timeout: float = 0.0) -> bool:
        """Tell whether the server ends a call within a time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: stream in self._ended or not self._is_open, timeout
            )

    def _write(self, frames: bytes) -> None:
        with self._sending:  # the thread that reads acknowledges what it reads
            self._socket.sendall(frames)

    def _stream(self) -> int:
        stream, self._next = self._next, self._next + 2
        self._windows[stream] = 0
        return stream

    def _header_block(self, method: str, extra: tuple[tuple[str, str], ...]) -> bytes:
        fields = [(":method", "POST"), (":scheme", "http"), (":path", method)]
        fields += [(":authority", "localhost"), ("content-type", "application/grpc")]
        fields += [("te", "trailers"), *extra]
        if self._token:
            fields.append(("authorization", f"Bearer {self._token}"))
        return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)

    def _reserve(self, stream: int, size: int, deadline: float) -> int:
        def room() -> int:
            return min(self._window, self._initial + self._windows[stream], size)

        with self._changed:
            self._changed.wait_for(
                lambda: room() > 0 or stream in self._ended or not self._is_open,
                max(0.0, deadline - time.monotonic()),
            )
            found = max(0, room()) if stream not in self._ended else 0
            self._window -= found
            self._windows[stream] -= found
            return found

    def _read(self) -> None:
        file = self._socket.makefile("rb")
        try:
            while len(head := file.read(9)) == 9:
                size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
                self._take(kind, flags, int.from_bytes(head[5:]) & 0x7FFFFFFF, file.read(size))
        except (OSError, ValueError):
            pass  # closed
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        with self._changed:
            if kind == _SETTINGS and not flags & _ACK:
                for at in range(0, len(payload), 6):
                    name, value = struct.unpack_from(">HI", payload, at)
                    if name == _INITIAL_WINDOW:
                        self._initial = value
                self._write(_frame(_SETTINGS, _ACK, 0, b""))
            elif kind == _PING and not flags & _ACK:
                self._write(_frame(_PING, _ACK, 0, payload))
            elif kind == _WINDOW_UPDATE:
                more = int.from_bytes(payload) & 0x7FFFFFFF
                if stream:
                    self._windows[stream] = self._windows.get(stream, 0) + more
                else:
                    self._window += more
            elif kind == _RST_STREAM or (kind in (_HEADERS, _DATA) and flags & _END_STREAM):
                self._ended.setdefault(stream, time.monotonic())
            self._changed.notify_all()


def part_of_message(size: int, sent: int) -> bytes:
    """Return the first ``sent`` bytes of a gRPC message of ``size`` zeros, with its prefix."""
    return b"\0" + struct.pack(">I", size) + bytes(sent)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes((kind, flags))
        + struct.pack(">I", stream)
        + payload
    )


#: Frames that a server must take without a call, 4,096 of each kind.
FLOODS: Final = {
    "WINDOW_UPDATE": _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)) * 4096,
    "SETTINGS": _frame(_SETTINGS, 0, 0, struct.pack(">HI", 3, 100)) * 4096,
    "GOAWAY": _frame(_GOAWAY, 0, 0, struct.pack(">II", 0, 0)) * 4096,
    "PING": _frame(_PING, 0, 0, bytes(8)) * 4096,
    "PRIORITY": _frame(2, 0, 1, bytes(5)) * 4096,
}


def _text(value: str) -> bytes:
    data = value.encode()
    if len(data) < 127:
        return bytes((len(data),)) + data
    rest, encoded = len(data) - 127, [127]
    while rest >= 128:
        encoded.append(rest % 128 + 128)
        rest //= 128
    return bytes((*encoded, rest)) + data
