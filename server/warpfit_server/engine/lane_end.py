"""The engine's end of a lane: answering and waiting for the next order in one compiled step.

Each step of Python that waits for the system gives the interpreter lock up, and with many lanes at
work it takes longer to get it back than to compute. And to wake a thread that sleeps takes 0.05 to
0.1 ms on a virtual machine whose cores are idle. So the answer is sent and the next order received
without the lock in between, and a lane that nobody else is in the way of waits awake for a while.
"""

from __future__ import annotations

import ctypes
import socket
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import InternalError
from warpfit_server.channel import (
    PACKET_BYTES,
    Channel,
    ChannelClosedError,
    Finished,
    Message,
    packed,
    unpacked,
)
from warpfit_server.engine import numba_cache
from warpfit_server.engine.calls import call_1, call_3, call_4, nanoseconds
from warpfit_server.orders import NUMBERS_BYTES, PLAIN
from warpfit_server.resources import available_cores

_CONTROL_BYTES: Final = 64
#: Nanoseconds that a lane waits awake: longer than a client takes from an answer to its next call.
_AWAKE: Final = 3_000_000
#: A machine of fewer cores has none to spare for that.
_SPARE_CORES: Final = 8
_POLLIN: Final = 1
#: Places in a ``struct msghdr`` of 64-bit words, and its flags.
_CONTROL_SIZE, _FLAGS = 5, 6
_CUT: Final = int(socket.MSG_TRUNC)
#: Descriptors are missing, because this process can open no more files.
_BARE: Final = int(socket.MSG_CTRUNC)
_RECEIVING: Final = int(socket.MSG_CMSG_CLOEXEC)
_SENDING: Final = int(socket.MSG_NOSIGNAL)
_SEND, _RECEIVE, _POLL, _CLOCK, _SLEEP = range(5)
#: What `_exchange` returns if the answer could not be sent, and nothing was received.
_UNSENT: Final = -2
_compiled = numba_cache.njit(nogil=True)


class Line(NamedTuple):
    """What compiled code needs of a lane's end."""

    functions: NDArray[np.int64]
    """Addresses of the system's functions."""
    descriptor: int
    """Of the socket."""
    packet: NDArray[np.uint8]
    """What was received last."""
    header: NDArray[np.int64]
    """The ``struct msghdr`` of receiving."""
    awake: int
    """Nanoseconds that it may wait awake."""


class LaneEnd(Channel):
    """One end of a lane; everything but `send` is called by one thread."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        library = ctypes.CDLL(None)
        found = (library.send, library.recvmsg, library.poll, library.clock_gettime, library.usleep)
        functions = [ctypes.cast(one, ctypes.c_void_p).value for one in found]
        received = np.zeros(PACKET_BYTES, dtype=np.uint8)
        self._control = np.zeros(_CONTROL_BYTES // 8, dtype=np.int64)
        self._vector = np.array([received.ctypes.data, PACKET_BYTES], dtype=np.int64)
        header = [0, 0, self._vector.ctypes.data, 1, self._control.ctypes.data, 0, 0]
        self.line = Line(
            np.array(functions, dtype=np.int64),
            end.fileno(),
            received,
            np.array(header, dtype=np.int64),
            _AWAKE if available_cores() >= _SPARE_CORES else 0,
        )

    @property
    def descriptor(self) -> int:
        """Of the socket, for compiled code to send to."""
        return self.line.descriptor

    def exchange(self, answer: Message | None, *, awake: bool) -> tuple[Message, list[int]]:
        """Send an answer, if there is one, and wait for the next message and its descriptors.

        Args:
            answer: to send first.
            awake: whether a core may be kept busy with waiting for a while.

        Raises:
            ChannelClosedError: if the other end is gone.

        """
        data = b"" if answer is None else _packed(answer)
        size = _exchange(self.line, np.frombuffer(data, np.uint8), awake)
        if size == _UNSENT and answer is not None:
            self._transmit(data)  # a signal may have come in between; Python tries again
        return self.received(size)

    def received(self, size: int) -> tuple[Message, list[int]]:
        """Read what compiled code has received.

        Args:
            size: in bytes, as `receive_message` returned it; if that failed, it is tried again.

        Raises:
            ChannelClosedError: if the other end is gone.

        """
        if size < 0:
            self.line.packet[0] = 0
            return self.receive()
        if size == 0 or self.line.header[_FLAGS] & _CUT:
            raise ChannelClosedError("the lane was closed")
        return unpacked(self.line.packet[:size].data), self._descriptors()

    def kind(self) -> bytes:
        """Kind of the plain evaluation that was received last; empty if it was not plain."""
        packet = self.line.packet
        size = int(packet[8:16].view(np.int64)[0]) if packet[0] == PLAIN else 0
        return packet[NUMBERS_BYTES : NUMBERS_BYTES + size].tobytes()

    def _descriptors(self) -> list[int]:
        """File descriptors that came along; none if this process can open no more files."""
        if self.line.header[_CONTROL_SIZE] == 0:
            return []
        if self.line.header[_FLAGS] & _BARE:  # a message has one, of its segment
            return []
        size = int(self._control[0]) - socket.CMSG_LEN(0)  # of a struct cmsghdr, two words
        found: list[int] = self._control[2:].view(np.int32)[: size // 4].tolist()
        return found


def _packed(answer: Message) -> bytes:
    """Write an answer down; if it is too long, an error that says so, for its call alone."""
    try:
        return packed(answer)
    except InternalError as error:
        return packed(Finished(error=error))


def rehearse() -> None:
    """Exchange something, so that what Numba makes of it is there before anybody waits for it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lane = LaneEnd(theirs)
    ours.close()
    with suppress(ChannelClosedError):
        lane.exchange(None, awake=False)
    lane.close()


@_compiled  # type: ignore[untyped-decorator]
def _exchange(line: Line, answer: NDArray[np.uint8], awake: bool) -> int:
    """Return the bytes of the message that came; `_UNSENT` or -1 if the system did not do it."""
    if len(answer) > 0 and not send_message(line, answer):
        return _UNSENT
    return int(receive_message(line, awake))


@_compiled  # type: ignore[untyped-decorator]
def send_message(line: Line, message: NDArray[np.uint8]) -> bool:
    """Send bytes; return whether all of them were sent."""
    place = np.int64(message.ctypes.data)
    arguments = (line.descriptor, place, len(message), _SENDING)
    return bool(call_4(line.functions[_SEND], arguments) == len(message))


@_compiled  # type: ignore[untyped-decorator]
def receive_message(line: Line, awake: bool) -> int:
    """Wait for a message; return its bytes, 0 at the end, -1 if the system did not do it."""
    if awake and line.awake > 0:
        _look_out(line)
    line.header[_CONTROL_SIZE] = _CONTROL_BYTES
    place = np.int64(line.header.ctypes.data)
    return int(call_3(line.functions[_RECEIVE], (line.descriptor, place, _RECEIVING)))


@_compiled  # type: ignore[untyped-decorator]
def is_of_kind(line: Line, size: int, kind: NDArray[np.uint8]) -> bool:
    """Tell whether a message of ``size`` bytes is plain, of this kind, and came alone."""
    end = NUMBERS_BYTES + len(kind)
    if size < end or line.packet[0] != PLAIN:
        return False
    if line.header[_CONTROL_SIZE] != 0 or line.header[_FLAGS] & (_CUT | _BARE):
        return False
    if line.packet[8:16].view(np.int64)[0] != len(kind):
        return False
    return bool(np.all(line.packet[NUMBERS_BYTES:end] == kind))


@_compiled  # type: ignore[untyped-decorator]
def _look_out(line: Line) -> None:
    """Look again and again, for some time, whether there is something to receive."""
    asked = np.array([line.descriptor | (_POLLIN << 32)], dtype=np.int64)  # a struct pollfd
    place = np.int64(asked.ctypes.data)
    end = now(line) + line.awake
    while call_3(line.functions[_POLL], (place, np.int64(1), np.int64(0))) == 0:
        if now(line) > end:
            break
    asked[0] = 0  # so that it lives until here


@_compiled  # type: ignore[untyped-decorator]
def now(line: Line) -> int:
    """``time.monotonic_ns()``."""
    return int(nanoseconds(line.functions[_CLOCK]))


@_compiled  # type: ignore[untyped-decorator]
def sleep(line: Line, microseconds: int) -> None:
    """Give the processor away for some time."""
    call_1(line.functions[_SLEEP], (np.int64(microseconds),))
