"""Channels: messages and file descriptors over a stream socket between two processes of the server.

A message is sent as the number of its bytes, 32 bits, the number of its file descriptors and its
kind, 16 bits each, then what `warpfit_server.ipc.messages.pack` makes of it. A message over the
limit, which is far above what messages need, fails alone: nothing of it is sent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from warpfit.errors import InternalError
from warpfit_server.ipc.messages import Message, pack, unpack
from warpfit_server.system.shortages import shortage
from warpfit_server.system.sockets import socket_pair

#: Longest message in bytes.
MOST_BYTES: Final = 16 << 20
#: Most descriptors that travel with a message; the kernel's own limit is 253.
MOST_DESCRIPTORS: Final = 16
_HEADER: Final = struct.Struct("=IHH")
_READ_BYTES: Final = 64 << 10
#: Flags of recvmsg as plain numbers, because those of the enum take ten times as long.
_DONT_WAIT, _CLOSE_ON_EXEC = int(socket.MSG_DONTWAIT), int(socket.MSG_CMSG_CLOEXEC)
_TRUNCATED: Final = int(socket.MSG_CTRUNC)
_ANCILLARY_BYTES: Final = socket.CMSG_LEN(253 * array("i").itemsize)


class ChannelClosedError(Exception):
    """The other end is gone, or has not read for too long."""


class Channel:
    """One end of a socket pair; any thread may send, one thread at a time may receive."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._received = bytearray()
        self._descriptors: deque[list[int]] = deque()
        """Received descriptors, one list for each message that has some."""

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return a channel for this process and the socket for the other one."""
        ours, theirs = socket_pair()
        return cls(ours), theirs

    def fileno(self) -> int:
        """Return the socket's descriptor, to poll for messages."""
        return self._socket.fileno()

    def give_up_after(self, seconds: float) -> None:
        """Let `send` fail when the other end has not read for some seconds."""
        timer = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timer)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message and file descriptors.

        Raises:
            ChannelClosedError: if the other end is gone, or has not read for too long.
            InternalError: if the message is too long; nothing was sent.
            ResourceExhaustedError: if the system has no room for it; nothing was sent.
        """
        self._send(_framed(message, len(descriptors)), descriptors)

    def send_all(self, messages: Iterable[Message]) -> None:
        """Send messages in one go, as `send` does."""
        self._send(b"".join([_framed(message) for message in messages]))

    def receive(self) -> tuple[Message, list[int]]:
        """Wait for the next message; return it with its file descriptors.

        Descriptors are left out if this process can open no more files.

        Raises:
            ChannelClosedError: if the other end is gone.
        """
        while (found := self._next()) is None:
            self._read(0)
        return found

    def receive_waiting(self) -> list[tuple[Message, list[int]]]:
        """Return the messages that have arrived, without waiting.

        Raises:
            ChannelClosedError: if the other end is gone.
        """
        try:
            while self._read(_DONT_WAIT):
                pass
        except BlockingIOError:
            pass
        found = []
        while (message := self._next()) is not None:
            found.append(message)
        return found

    def shut(self) -> None:
        """End the connection, which wakes a thread that waits in `receive`."""
        with contextlib.suppress(OSError):  # the other end may have closed first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self.shut()
        self._socket.close()
        while self._descriptors:
            _close(self._descriptors.popleft())

    def _send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        with self._sending:
            sent = 0
            try:
                sent = self._send_first(data, descriptors)
                while sent < len(data):
                    sent += self._socket.send(memoryview(data)[sent:])
            except OSError as error:
                lacking = None if sent else shortage(error)
                if lacking is None:
                    self.shut()  # part of the data may have been sent
                raise lacking or ChannelClosedError(str(error)) from error

    def _send_first(self, data: bytes, descriptors: Sequence[int]) -> int:
        if descriptors:
            return socket.send_fds(self._socket, [data], list(descriptors))
        return self._socket.send(data)

    def _read(self, flags: int) -> bool:
        """Receive into the buffer; return whether there may be more."""
        try:
            data, ancillary, flagged, _ = self._socket.recvmsg(
                _READ_BYTES, _ANCILLARY_BYTES, flags | _CLOSE_ON_EXEC
            )
        except BlockingIOError:
            raise
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        if not data:
            raise ChannelClosedError("end of stream")
        # The kernel ends a read after bytes that came with descriptors, which are one message's.
        was_cut = bool(ancillary or flagged & _TRUNCATED)
        if was_cut:
            self._descriptors.append(_descriptors(ancillary))
        self._received += data
        return was_cut or len(data) == _READ_BYTES

    def _next(self) -> tuple[Message, list[int]] | None:
        """Take a whole message out of the buffer; its descriptors have come with its first byte."""
        received = self._received
        if len(received) < _HEADER.size:
            return None
        size, count, kind = _HEADER.unpack_from(received)
        end = _HEADER.size + size
        if len(received) < end:
            return None
        with memoryview(received) as view:
            message = unpack(kind, view[_HEADER.size : end])
        del received[:end]
        descriptors = self._descriptors.popleft() if count else []
        if len(descriptors) < count:  # this process can open no more files
            _close(descriptors)
            descriptors = []
        return message, descriptors


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    found = array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    return list(found)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _framed(message: Message, descriptors: int = 0) -> bytes:
    kind, data = pack(message)
    if len(data) > MOST_BYTES or descriptors > MOST_DESCRIPTORS:
        raise InternalError(
            f"a message of {len(data)} bytes and {descriptors} descriptors is too long",
            "MESSAGE_TOO_LONG",
            "Report it as a bug",
        )
    return _HEADER.pack(len(data), descriptors, kind) + data
