"""What stands between a client and a server: certificates, a bad network, HTTP/2 by hand.

The client of HTTP/2 begins calls without sending a message, sends a part of one and stops, and
takes calls back as soon as they are made, which gRPC's own clients never do. Frames and header
encoding are those of RFC 9113 and RFC 7541.
"""

import contextlib
import ipaddress
import socket
import struct
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from support.servers.server import write_secret


class Pair(NamedTuple):
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority of its own."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = _builder(self._name, self._name, self._key.public_key(), (-1, 30))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        certificate = builder.sign(self._key, hashes.SHA256())
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(certificate.public_bytes(Encoding.PEM))

    def issue(self, name: str, days: tuple[float, float] = (-1, 30), file: str = "") -> Pair:
        """Write a certificate for a common name and 127.0.0.1, valid from and until these days."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)] if name else [])
        builder = _builder(subject, self._name, key.public_key(), days)
        names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), not name)
        certificate = builder.sign(self._key, hashes.SHA256())
        stem = file or f"{self.file.stem}-{name or 'nameless'}"
        pair = Pair(self._directory / f"{stem}.crt", self._directory / f"{stem}.key")
        write_secret(pair.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        pair.certificate.write_bytes(certificate.public_bytes(Encoding.PEM))
        return pair


def _builder(subject, issuer, key, days):
    begin, end = (datetime.now(UTC) + timedelta(days=day) for day in days)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(begin).not_valid_after(end)


@dataclass(frozen=True, slots=True)
class Spoil:
    """What happens to the bytes of one direction; by default nothing.

    They are forwarded in pieces of so many bytes, with a pause in seconds after each. The
    connection is closed, with a reset, after so many bytes.
    """

    piece: int = 1 << 16
    pause: float = 0.0
    cut_after: int | None = None


class Proxy:
    """Forwards connections to a server; a context manager. ``address`` is where clients connect."""

    def __init__(self, target: str, up: Spoil | None = None, down: Spoil | None = None) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.up = up or Spoil()
        self.down = down or Spoil()
        self.connections = 0
        self._sockets: list[socket.socket] = []
        self._swallowed: set[socket.socket] = set()
        self._swallows = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        for end in self._sockets:
            _reset(end)

    def swallow(self, *, ever: bool = False) -> None:
        """Drop what the present connections, or ``ever`` later ones, carry, and leave them open."""
        self._swallows = ever
        self._swallowed.update(self._sockets)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                return
            self.connections += 1
            self._sockets += [client, server]
            self._swallowed.update([client, server] if self._swallows else [])
            for given in ((client, server, self.up), (server, client, self.down)):
                given[1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._forward, args=given, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, spoil: Spoil) -> None:
        left = spoil.cut_after
        with contextlib.suppress(OSError):
            while data := source.recv(spoil.piece):
                if left is not None and len(data) > left:
                    sink.sendall(data[:left])
                    break
                left = None if left is None else left - len(data)
                if source not in self._swallowed:
                    sink.sendall(data)
                    time.sleep(spoil.pause)
        _reset(source)
        _reset(sink)


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW, _CANCEL, _FRAME = 4, 8, 16384
#: First index of HPACK's dynamic table, where the header stands that was indexed last.
_NEWEST_INDEXED: Final = 62


class RawConnection:
    """A connection from an address; a thread reads. Its windows stay closed unless it ``reads``."""

    def __init__(self, address: str, token: str = "", *, source="127.0.0.1", reads: bool = True):
        host, _, port = address.rpartition(":")
        self._token = token
        self._socket = socket.create_connection((host, int(port)), source_address=(source, 0))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending, self._changed = threading.Lock(), threading.Condition()
        self._initial, self._window, self._next = 65535, 65535, 1
        self._windows: dict[int, int] = {}
        self._ended = set[int]()
        self.is_open = True  # the server has not closed the connection
        settings = b"" if reads else struct.pack(">HI", _INITIAL_WINDOW, 0)
        self._write(_PREFACE + _frame(_SETTINGS, 0, 0, settings))
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the server may have closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def begin(self, method: str, *extra: tuple[str, str]) -> int:
        """Begin a call of ``/service/method`` without a message; return its stream's number."""
        stream, block = self._stream(), self._header_block(method, extra)
        self._write(_frame(_HEADERS, _END_HEADERS, stream, block))
        return stream

    def begin_with_headers(self, method: str, name: str, value: bytes, count: int) -> int:
        """Begin a call with a header so many times, the connection's first that is indexed."""
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
        block, frames = self._header_block(method, ()), b""
        for _ in range(count):
            stream = self._stream()
            frames += _frame(_HEADERS, _END_HEADERS, stream, block)
            frames += _frame(_RST_STREAM, 0, stream, struct.pack(">I", _CANCEL))
        self._write(frames)

    def send(self, stream: int, data: bytes, timeout: float) -> int:
        """Send bytes of a call as far as the server lets them come; return how many."""
        deadline, sent = time.monotonic() + timeout, 0
        while sent < len(data) and not self._is_over(stream):
            size = self._reserve(stream, min(64 * _FRAME, len(data) - sent), deadline)
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
        self._write(_frame(_DATA, _END_STREAM, stream, b""))

    def has_ended(self, stream: int, timeout: float = 0.0) -> bool:
        """Tell whether the server ends a call within a time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_over(stream), timeout)

    def _is_over(self, stream: int) -> bool:
        return stream in self._ended or not self.is_open

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
            left = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: room() > 0 or self._is_over(stream), left)
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
            self.is_open = False
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
                self._ended.add(stream)
            self._changed.notify_all()


def part_of_message(size: int, sent: int) -> bytes:
    """Return the first ``sent`` bytes of a gRPC message of ``size`` zeros, with its prefix."""
    return b"\0" + struct.pack(">I", size) + bytes(sent)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


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
