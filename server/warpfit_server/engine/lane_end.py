"""The engine's end of a lane: answering and waiting for the next order in one compiled step.

Each step of Python that waits for the system gives the interpreter lock up, and with many lanes at
work it takes longer to get it back than to compute. And to wake a thread that sleeps takes 0.05 to
0.1 ms on a virtual machine whose cores are idle. So the answer is sent and the next order received
without the lock in between, and a lane that nobody else is in the way of waits awake for a while.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import socket
import time
from typing import Final

import numba
import numpy as np
from numpy.typing import NDArray

from warpfit_server.channel import Channel, ChannelClosedError, Message, unpacked
from warpfit_server.engine.calls import call_2, call_3, call_4

_PACKET_BYTES: Final = 128 << 10
_CONTROL_BYTES: Final = 64
#: Nanoseconds that a lane waits awake: longer than a client takes from an answer to its next call.
_AWAKE: Final = 3_000_000
#: A machine of fewer cores has none to spare for that.
_SPARE_CORES: Final = 8
_POLLIN: Final = 1
#: Places in a ``struct msghdr`` of 64-bit words, and its flags.
_CONTROL_SIZE, _FLAGS = 5, 6
_DAMAGED: Final = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_RECEIVING: Final = int(socket.MSG_CMSG_CLOEXEC)
_SENDING: Final = int(socket.MSG_NOSIGNAL)
_SEND, _RECEIVE, _POLL, _CLOCK = range(4)
#: What `_exchange` returns if the answer could not be sent, and nothing was received.
_UNSENT: Final = -2


class LaneEnd(Channel):
    """One end of a lane; everything but `send` is called by one thread."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        library = ctypes.CDLL(None)
        found = (library.send, library.recvmsg, library.poll, library.clock_gettime)
        self._functions = np.array(
            [ctypes.cast(one, ctypes.c_void_p).value for one in found], dtype=np.int64
        )
        self.descriptor = end.fileno()
        """Of the socket, for compiled code to send to."""
        self._awake = _AWAKE if len(os.sched_getaffinity(0)) >= _SPARE_CORES else 0
        self._received = np.zeros(_PACKET_BYTES, dtype=np.uint8)
        self._control = np.zeros(_CONTROL_BYTES // 8, dtype=np.int64)
        self._vector = np.array([self._received.ctypes.data, _PACKET_BYTES], dtype=np.int64)
        self._header = np.array(
            [0, 0, self._vector.ctypes.data, 1, self._control.ctypes.data, 0, 0], dtype=np.int64
        )

    def exchange(self, answer: Message | None, *, awake: bool) -> tuple[Message, list[int]]:
        """Send an answer, if there is one, and wait for the next message and its descriptors.

        Args:
            answer: to send first.
            awake: whether a core may be kept busy with waiting for a while.

        Raises:
            ChannelClosedError: if the other end is gone.

        """
        packed = b"" if answer is None else pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        self._header[_CONTROL_SIZE] = _CONTROL_BYTES
        size = _exchange(
            self._functions,
            self.descriptor,
            np.frombuffer(packed, np.uint8),
            self._header,
            self._awake if awake else 0,
        )
        if size == _UNSENT and answer is not None:
            self.send(answer)  # a signal may have come in between; Python tries again
        if size < 0:
            return self.receive()
        if size == 0 or self._header[_FLAGS] & _DAMAGED:
            raise ChannelClosedError("the lane was closed")
        return unpacked(self._received[:size].data), self._descriptors()

    def _descriptors(self) -> list[int]:
        """File descriptors that came along."""
        if self._header[_CONTROL_SIZE] == 0:
            return []
        size = int(self._control[0]) - socket.CMSG_LEN(0)  # of a struct cmsghdr, two words
        found: list[int] = self._control[2:].view(np.int32)[: size // 4].tolist()
        return found


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _exchange(
    functions: NDArray[np.int64],
    descriptor: int,
    answer: NDArray[np.uint8],
    header: NDArray[np.int64],
    awake: int,
) -> int:
    """Return the bytes of the message that came; `_UNSENT` or -1 if the system did not do it."""
    if len(answer) > 0:
        place = np.int64(answer.ctypes.data)
        sent = call_4(functions[_SEND], (descriptor, place, len(answer), _SENDING))
        if sent != len(answer):
            return _UNSENT
    if awake > 0:
        _look_out(functions, descriptor, awake)
    place = np.int64(header.ctypes.data)
    return int(call_3(functions[_RECEIVE], (descriptor, place, _RECEIVING)))


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _look_out(functions: NDArray[np.int64], descriptor: int, nanoseconds: int) -> None:
    """Look again and again, for some time, whether there is something to receive."""
    asked = np.array([descriptor | (_POLLIN << 32)], dtype=np.int64)  # a struct pollfd
    clock = np.zeros(2, dtype=np.int64)
    end = _now(functions, clock) + nanoseconds
    while call_3(functions[_POLL], (np.int64(asked.ctypes.data), np.int64(1), np.int64(0))) == 0:
        if _now(functions, clock) > end:
            break
    asked[0] = 0  # so that it lives until here


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _now(functions: NDArray[np.int64], clock: NDArray[np.int64]) -> int:
    call_2(functions[_CLOCK], (np.int64(time.CLOCK_MONOTONIC), np.int64(clock.ctypes.data)))
    return int(clock[0] * 1_000_000_000 + clock[1])
