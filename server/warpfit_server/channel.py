"""Messages between the server's processes, over a socket pair of two of them.

Each message is a frozen dataclass, pickled (the two ends are one program) unless compiled code has
to read or write it, in one packet of a SOCK_SEQPACKET socket, so a message arrives whole or not at
all. Bulk data never travels here: it
lies in segments, whose file descriptors travel beside the messages.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import struct
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from warpfit.dataset import Layout
from warpfit.errors import InternalError, WarpfitError
from warpfit.fitting import FitProgress
from warpfit.info import Device
from warpfit.request import Tier, Timings
from warpfit_server.measurements import Delta
from warpfit_server.orders import PLAIN, Evaluate, Order, plain_packet, read_plain
from warpfit_server.quarantine import Casualty, Survivor, SuspectList
from warpfit_server.shortages import shortage

#: Most bytes of a message. Whatever callers choose the length of is cut or lies in a segment.
PACKET_BYTES: Final = 128 << 10
#: Most descriptors that travel with a message; the kernel's own limit is 253.
MOST_DESCRIPTORS: Final = 64
_ABOUT_BYTES: Final = socket.CMSG_LEN(MOST_DESCRIPTORS * array("i").itemsize)


# ------------------------------------------------------------------------ front door -> engine


@dataclass(frozen=True, slots=True)
class Load:
    """Make the data set in a segment usable; answered by Loaded."""

    content_id: bytes
    layout: Layout
    segment: int
    size: int


@dataclass(frozen=True, slots=True)
class Unload:
    """Forget a data set."""

    content_id: bytes


@dataclass(frozen=True, slots=True)
class OpenLanes:
    """Serve the lanes whose sockets come along, once every earlier message is dealt with."""


@dataclass(frozen=True, slots=True)
class Unmap:
    """On a lane: let go of its segment."""


@dataclass(frozen=True, slots=True)
class Count:
    """Answer with Counted."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process."""


# ------------------------------------------------------------------------ engine -> front door


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine can take work."""

    engine: str
    devices: tuple[Device, ...]
    concurrency: int
    """Evaluations that gain from running at the same time."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Outcome of Load."""

    content_id: bytes
    error: WarpfitError | None


@dataclass(frozen=True, slots=True)
class Counted:
    """The engine's counters by name."""

    counters: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Progress:
    """The values of the first programs are final."""

    programs: int


@dataclass(frozen=True, slots=True)
class FitProgressed:
    """How far the searches are."""

    progress: FitProgress


@dataclass(frozen=True, slots=True)
class Alone:
    """Whether the evaluation is all that runs in the engine from now on."""

    alone: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """The engine is done with an evaluation and, unless it is kept, with the segment."""

    timings: Timings = field(default_factory=Timings)
    error: WarpfitError | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle flat, as `Evaluate`."""
        t = self.timings
        stages = (t.decode, t.queue, t.copy_in, t.compute, t.copy_out)
        return _finished, (self.error, t.tier.value, t.cache_hits, *stages)


def _finished(error: WarpfitError | None, tier: str, cache_hits: int, *stages: int) -> Finished:
    decode, queue, copy_in, compute, copy_out = stages
    timings = Timings(decode, queue, copy_in, compute, copy_out, Tier(tier), cache_hits)
    return Finished(timings, error)


class Told(NamedTuple):
    """Finished without an error, as compiled code tells it: 64-bit integers, one after the other.

    The first byte tells the packet from a pickled one.
    """

    mark: int
    queue: int
    copy_in: int
    compute: int
    copy_out: int
    compiled: int
    """1 for the compiled tier, 0 for the interpreter."""
    cache_hits: int


#: First byte of a packet that holds `Told`; a pickled one begins with another.
TOLD: Final = 1
_TOLD: Final = struct.Struct("=7q")


# -------------------------------------------------------------------- further door -> front door


@dataclass(frozen=True, slots=True)
class Serving:
    """The door has opened the port."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Lease a data set to the door; answered by Found or Missing."""

    content_id: bytes


@dataclass(frozen=True, slots=True)
class Unused:
    """The door gives a lease back."""

    content_id: bytes


@dataclass(frozen=True, slots=True)
class LanesLost:
    """A lane was lost, and the door wants new ones, if the engine lives."""


@dataclass(frozen=True, slots=True)
class Probed:
    """Result of the front end's own probe: whether calls that come to it are answered."""

    answers: bool


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Answer to Forget: no new call uses the data set."""

    content_id: bytes


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the door has measured since the last time; it also says that the door lives."""

    delta: Delta


# -------------------------------------------------------------------- front door -> further door


@dataclass(frozen=True, slots=True)
class Found:
    """The data set is leased to the door until Unused."""

    content_id: bytes
    layout: Layout


@dataclass(frozen=True, slots=True)
class Missing:
    """The data set cannot be leased."""

    content_id: bytes
    error: WarpfitError


@dataclass(frozen=True, slots=True)
class Lanes:
    """The door's lanes to an engine come along as sockets; the first is the spare one."""

    engine: int
    """Number of the engine process, from 1."""


@dataclass(frozen=True, slots=True)
class Forget:
    """The data set was released."""

    content_id: bytes


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether calls can be answered, for health checks on the port."""

    ready: bool


@dataclass(frozen=True, slots=True)
class Begin:
    """Take calls: the engine is ready."""

    seed: int
    """Of the question that the door's probe asks."""


@dataclass(frozen=True, slots=True)
class Quit:
    """Refuse new calls, let those in flight finish within the grace period, end."""


# --------------------------------------------------------------------------------- the channel

Event = Progress | FitProgressed | Finished
Message = (
    Load | Unload | OpenLanes | Order | Unmap | Count | Stop | Ready | Loaded | Counted | Event
    | Alone | Lookup | Unused | Forgotten | Serving | Recorded
    | Casualty | Survivor | LanesLost | Probed
    | Found | Missing | Lanes | Forget | Readiness | SuspectList | Begin | Quit
)  # fmt: skip


class ChannelClosedError(Exception):
    """The other end is gone."""


class Channel:
    """One end of the socket pair; `send` may be called from any thread, `receive` from one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()
        self._packet = bytearray(PACKET_BYTES)
        self._space = memoryview(self._packet)

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return this process's end and the socket to give to the other process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def wake_every(self, microseconds: int) -> None:
        """Let `receive` return to its caller after some time, by the kernel's own timer."""
        timer = struct.pack("ll", 0, microseconds)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timer)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message and file descriptors.

        Raises:
            ChannelClosedError: if the other end is gone.
            InternalError: if the message is too long; nothing was sent.
            ResourceExhaustedError: if the system has no room for it; nothing was sent.

        """
        self._transmit(packed(message), descriptors)

    def _transmit(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        try:
            with self._lock:
                if descriptors:
                    socket.send_fds(self._socket, [data], list(descriptors))
                else:
                    self._socket.send(data)
        except OSError as error:
            raise shortage(error) or ChannelClosedError(str(error)) from error

    def receive(self) -> tuple[Message, list[int]]:
        """Wait for the next message and its file descriptors.

        Raises:
            ChannelClosedError: if the other end is gone.
            BlockingIOError: if nothing came in the time of `wake_every`.

        """
        try:
            size, about, flags, _ = self._socket.recvmsg_into(
                [self._space], _ABOUT_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            raise
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        descriptors = _descriptors(about) if about else []
        if not size:
            raise ChannelClosedError("end of stream")
        if flags & socket.MSG_TRUNC:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ChannelClosedError("a message is longer than a packet")
        message = unpacked(self._space[:size])
        return message, descriptors

    def is_abandoned(self) -> bool:
        """Tell whether the other end is gone, without waiting."""
        poll = select.poll()
        poll.register(self._socket, 0)  # hang-ups are always told
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close this end, which wakes a thread that waits in `receive`."""
        with contextlib.suppress(OSError):  # the other end may have closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _descriptors(about: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """File descriptors that came with a packet."""
    found = array("i")
    for level, kind, data in about:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def packed(message: Message) -> bytes:
    """Write a message down.

    Raises:
        InternalError: if it is longer than a packet.

    """
    if isinstance(message, Evaluate) and message.is_plain:
        packet = plain_packet(message)
    else:
        packet = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    if len(packet) > PACKET_BYTES:
        raise InternalError(
            f"a message between processes has {len(packet)} bytes, the limit is {PACKET_BYTES}",
            "MESSAGE_TOO_LONG",
            "Report it as a bug",
        )
    return packet


def unpacked(packet: memoryview) -> Message:
    """Read a message."""
    if packet[0] == PLAIN:
        return read_plain(packet)
    if packet[0] != TOLD:
        message: Message = pickle.loads(packet)
        return message
    told = Told(*_TOLD.unpack(packet))
    return Finished(
        Timings(
            queue=told.queue,
            copy_in=told.copy_in,
            compute=told.compute,
            copy_out=told.copy_out,
            tier=Tier.COMPILED if told.compiled else Tier.INTERPRETER,
            cache_hits=told.cache_hits,
        )
    )
