"""Channels: messages and file descriptors over a stream socket between two processes of the server.

A message is sent as the number of its bytes, 32 bits, the number of its file descriptors, which is
0 or 1, and its kind, 16 bits each, then what `warpfit_server.ipc.messages.pack` makes of it. A
message over the limit, which is far above what messages need, fails alone: nothing of it is sent.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from array import array
from collections import deque
from collections.abc import Iterable
from typing import Final

from warpfit.errors import InternalError
from warpfit_server.ipc.messages import Message, pack, unpack
from warpfit_server.system.machine import shortage
from warpfit_server.system.sockets import socket_pair

#: Longest message in bytes.
MOST_BYTES: Final = 16 << 20
_HEADER: Final = struct.Struct("=IHH")
_READ_BYTES: Final = 64 << 10
#: Flags of recvmsg as plain numbers, because those of the enum take ten times as long.
_DONT_WAIT, _CLOSE_ON_EXEC = int(socket.MSG_DONTWAIT), int(socket.MSG_CMSG_CLOEXEC)
_TRUNCATED: Final = int(socket.MSG_CTRUNC)
_ANCILLARY_BYTES: Final = socket.CMSG_LEN(array("i").itemsize)


class ChannelClosedError(Exception):
    """The other end is gone, or has not read for too long."""


class Channel:
    """One end of a socket pair; any thread may send, one thread at a time may receive."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._received = bytearray()
        self._descriptors: deque[int | None] = deque()
        """Received descriptors, for each message that has one; None if none could be opened."""

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

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Send a message, and perhaps a file descriptor.

        Raises:
            ChannelClosedError: if the other end is gone, or has not read for too long.
            InternalError: if the message is too long; nothing was sent.
            ResourceExhaustedError: if the system has no room for it; nothing was sent.
        """
        self._send(_framed(message, int(descriptor is not None)), descriptor)

    def send_all(self, messages: Iterable[Message]) -> None:
        """Send messages in one go, as `send` does."""
        self._send(b"".join([_framed(message) for message in messages]))

    def receive(self) -> tuple[Message, int | None]:
        """Wait for the next message; return it with its file descriptor if it has one.

        The descriptor is left out if this process can open no more files.

        Raises:
            ChannelClosedError: if the other end is gone.
        """
        while (found := self._next()) is None:
            self._read(0)
        return found

    def receive_waiting(self) -> list[tuple[Message, int | None]]:
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
            if (descriptor := self._descriptors.popleft()) is not None:
                os.close(descriptor)

    def _send(self, data: bytes, descriptor: int | None = None) -> None:
        with self._sending:
            sent = 0
            try:
                if descriptor is not None:
                    sent = socket.send_fds(self._socket, [data], [descriptor])
                while sent < len(data):
                    sent += self._socket.send(memoryview(data)[sent:])
            except OSError as error:
                lacking = None if sent else shortage(error)
                if lacking is None:
                    self.shut()  # part of the data may have been sent
                raise lacking or ChannelClosedError(str(error)) from error

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
        # The kernel ends a read after bytes that came with a descriptor, which are one message's.
        was_cut = bool(ancillary or flagged & _TRUNCATED)
        if was_cut:
            self._descriptors.append(array("i", ancillary[0][2])[0] if ancillary else None)
        self._received += data
        return was_cut or len(data) == _READ_BYTES

    def _next(self) -> tuple[Message, int | None] | None:
        """Take a whole message out of the buffer; its descriptor has come with its first byte."""
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
        return message, self._descriptors.popleft() if count else None


def _framed(message: Message, descriptors: int = 0) -> bytes:
    kind, data = pack(message)
    if len(data) > MOST_BYTES:
        raise InternalError(
            f"a message of {len(data)} bytes is too long",
            "MESSAGE_TOO_LONG",
            "Report it as a bug",
        )
    return _HEADER.pack(len(data), descriptors, kind) + data
