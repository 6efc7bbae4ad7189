"""Messages between the server's processes, by sender and receiver, and the channels they go over.

Messages are pickled, because both ends are one program; the two of every call are named tuples of
plain values, which `marshal` writes and reads in a fraction of the time. Bulk data never travels in
a message: it lies in segments of shared memory, whose file descriptors travel beside the message.

A channel is a stream socket. A message is sent as the number of its bytes, 32 bits, the number of
its file descriptors, which is 0 or 1, and its kind, 16 bits each, then what `pack` makes of it. A
message over the limit, which is far above what messages need, fails alone: nothing of it is sent.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import pickle
import socket
import struct
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from warpfit.dataset import Layout
from warpfit.errors import InternalError, WarpfitError
from warpfit.ir import Batch
from warpfit.losses import Closing
from warpfit.request import Evaluation, FitProgress, FitSettings, Loss, Precision, Tier, Timings
from warpfit.searching import SearchProgress, SearchRequest
from warpfit.server_info import Device
from warpfit_server.ipc.quarantine import BatchOutcome, Suspects
from warpfit_server.ipc.segments import Segment, SegmentLayout
from warpfit_server.logs import MetricsDelta
from warpfit_server.machine import shortage, socket_pair


@dataclass(frozen=True, slots=True)
class _AboutDataset:
    key: bytes
    """See `warpfit_server.tenants.key_of`, as in all messages."""


class FoundDataset(NamedTuple):
    """A resident data set, as front ends are told of it."""

    key: bytes
    content_id: bytes
    layout: Layout
    """Without names: the data sets of a server have these encoded, for callers alone."""
    slot: int
    """Number of its entry in the table of uses, see `warpfit_server.tenants`."""
    engines: tuple[int, ...] = ()
    """Numbers of the engines that hold it."""
    is_fresh: bool = False
    """Whether it has just become resident."""
    names: bytes = b""
    """Names of the variables, see `warpfit.codec.encode_names`; only in answers to a question."""


# ------------------------------------------------------------------------ supervisor -> engine


@dataclass(frozen=True, slots=True)
class LoadDataset:
    """Make the data set in a segment usable; answered by DatasetLoaded."""

    key: bytes
    layout: Layout
    segment: int
    size: int


class UnloadDataset(_AboutDataset):
    """Forget a data set."""


class ConnectFrontEnd:
    """Serve the front end whose socket comes along, once all earlier messages are dealt with."""


class RequestCounters:
    """Answer with EngineCounters."""


# ------------------------------------------------------------------------ engine -> supervisor


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine can take requests."""

    device: Device


@dataclass(frozen=True, slots=True)
class DatasetLoaded:
    """Outcome of LoadDataset."""

    key: bytes
    error: WarpfitError | None


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """The engine's counters by name."""

    counters: Mapping[str, float]


# ---------------------------------------------- front end -> engine


class SubmitEvaluation(NamedTuple):
    """Evaluate or fit the batch in a segment, or search with it.

    Answered by messages of progress, ValuesReady, FitProgressed or SearchProgressed, then
    RequestFinished.
    """

    request: int
    """Number of the request, which its replies carry."""
    segment: int
    """Identifier of the segment; its descriptor comes along the first time."""
    size: int
    """Bytes of the segment."""
    segment_layout: SegmentLayout
    dataset_id: bytes
    rows: tuple[int, int]
    precision: str
    """Name in the enum, as of loss, tier and closing: much faster than the member itself."""
    loss: str | None
    tier: str
    submitted: int
    """``time.monotonic_ns()`` of the front end."""
    closing: str | None = None
    """Closing of a custom loss, whose tokens are in the segment; None without one."""
    outputs: tuple[str, ...] = ()
    """Names of the requested ones of values and `warpfit.request.FURTHER_OUTPUTS`."""
    tenant: str = ""
    """The caller's tenant; the engine shares its time fairly among tenants."""
    request_id: str = ""
    """Id of the call, for the engine's log lines."""
    alone: float = 0.0
    """Seconds for which nothing may run beside it, as it may have crashed an engine; 0: no."""
    fit: tuple[FitSettings, float | None] | None = None
    """Set if the batch is to be fitted: the settings without their arrays, which are in the
    segment, and ``time.monotonic()`` at which to stop and return what there is, if ever."""
    search: tuple[SearchRequest, float | None] | None = None
    """Set for a search, whose segment has nothing but flags that matters: the request, and when to
    stop, as of a fit."""

    def evaluation(self, batch: Batch, segment: Segment) -> Evaluation:
        """Return the evaluation of a batch; a custom loss is copied from the segment."""
        custom = None
        if self.closing is not None:
            custom = self.segment_layout.custom_loss(segment, Closing[self.closing])
        requested = {"values": False, **dict.fromkeys(self.outputs, True)}
        return Evaluation(
            dataset_id=self.dataset_id,
            batch=batch,
            rows=self.rows,
            precision=Precision[self.precision],
            loss=None if self.loss is None else Loss[self.loss],
            tier=Tier[self.tier],
            custom_loss=custom,
            **requested,
        )


@dataclass(frozen=True, slots=True)
class UnmapSegment:
    """Forget a segment, which no request will name again."""

    segment: int


# ------------------------------------------------------------------------ engine -> front end


@dataclass(frozen=True, slots=True)
class ValuesReady:
    """The values of the first programs are final."""

    request: int
    programs: int


@dataclass(frozen=True, slots=True)
class FitProgressed:
    """Progress of the searches of a fit."""

    request: int
    progress: FitProgress


@dataclass(frozen=True, slots=True)
class SearchProgressed:
    """Progress of a search, and at its end the last one."""

    request: int
    progress: SearchProgress


class RequestFinished(NamedTuple):
    """The engine is done with a request and does not touch its segment any more."""

    request: int
    error: WarpfitError | None = None
    stages: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    """Nanoseconds of each stage, in the order of `Timings`."""
    tier: str = Tier.INTERPRETER.name
    cache_hits: int = 0

    @classmethod
    def of(cls, request: int, timings: Timings, waited: int) -> RequestFinished:
        """Make the message for a request that has succeeded.

        ``waited`` are the nanoseconds from the front end to its first step.
        """
        t = timings
        # Numbers of NumPy would arrive as bytes.
        first = int(t.decode), waited + int(t.queue), int(t.copy_in)
        stages = (*first, int(t.compute), int(t.copy_out))
        return cls(request, None, stages, t.tier.name, int(t.cache_hits))

    @property
    def timings(self) -> Timings:
        """Return the engine's timings."""
        return Timings(*self.stages, Tier[self.tier], self.cache_hits)


# ------------------------------------------------------ front-end process -> main process


class FrontEndPrepared:
    """The front end has read its settings, and waits for StartServing to open the port."""


@dataclass(frozen=True, slots=True)
class FrontEndFailed:
    """The front end cannot serve with its settings, and ends."""

    error: WarpfitError


class FrontEndReady:
    """The front end has opened the port."""


@dataclass(frozen=True, slots=True)
class _AboutEngine:
    engine: int
    """Number of the engine in ``Config.engines``, from 0."""


class RequestConnection(_AboutEngine):
    """Answer with ConnectEngine if there is an engine: the front end has lost its connection."""


@dataclass(frozen=True, slots=True)
class Question:
    """Call a function of the main process that front ends may call; answered by Answer.

    The segment of a committed upload comes along.
    """

    number: int
    function: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ProbeResult(_AboutEngine):
    """The result of the front end's own probe of an engine."""

    answers: bool


@dataclass(frozen=True, slots=True)
class MetricsRecorded:
    """Measurements of the front end since its last message, which also shows that it lives."""

    delta: MetricsDelta


# -------------------------------------- main process -> front-end process, or engine


@dataclass(frozen=True, slots=True)
class StartServing:
    """Take calls: the engines have started."""

    seed: int
    """Seed of the front end's probe."""


@dataclass(frozen=True, slots=True)
class ConnectEngine(_AboutEngine):
    """Use the socket that comes along for calls of this engine from now on."""

    process: int
    """Number of the engine process, from 1; each process of any engine has another one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a Question, or the error that it has ended with."""

    number: int
    result: Any
    error: WarpfitError | None = None


@dataclass(frozen=True, slots=True)
class DatasetAnnounced:
    """A data set has become resident."""

    found: FoundDataset


class DatasetWithdrawn(_AboutDataset):
    """No new call may use the data set."""


@dataclass(frozen=True, slots=True)
class DatasetHeld(_AboutEngine):
    """An engine has loaded a data set."""

    key: bytes


class DatasetUnloaded(_AboutDataset):
    """No engine holds the data set any more."""


@dataclass(frozen=True, slots=True)
class SetReadiness:
    """Set what health checks on the port answer, and which engines calls go to."""

    serving: frozenset[str]
    """Labels of the devices that serve."""
    is_draining: bool
    """Whether the server stops, so that none ever serves again."""


class Stop:
    """End the process; a front end lets calls in flight finish within the grace period first.

    The engine gets it from the supervisor, too.
    """


Reply = ValuesReady | FitProgressed | SearchProgressed | RequestFinished
Message = (
    LoadDataset | UnloadDataset | ConnectFrontEnd | RequestCounters | Stop
    | EngineReady | DatasetLoaded | EngineCounters
    | SubmitEvaluation | UnmapSegment | Reply
    | FrontEndPrepared | FrontEndFailed | FrontEndReady | RequestConnection | Question
    | ProbeResult | MetricsRecorded | BatchOutcome
    | StartServing | ConnectEngine | Answer | SetReadiness | Suspects
    | DatasetAnnounced | DatasetWithdrawn | DatasetHeld | DatasetUnloaded
)  # fmt: skip
#: Kinds of packed messages.
_PICKLED, _EVALUATION, _FINISHED = range(3)
_LAYOUT: Final = SubmitEvaluation._fields.index("segment_layout")


def pack(message: Message) -> tuple[int, bytes]:
    """Return the kind of a message and its bytes, for `unpack`."""
    if type(message) is SubmitEvaluation and message.fit is None and message.search is None:
        plain: Any = list(message)
        plain[_LAYOUT] = tuple(message.segment_layout)
        return _EVALUATION, marshal.dumps(plain)
    if type(message) is RequestFinished and message.error is None:
        plain = tuple(message)
        return _FINISHED, marshal.dumps(plain)
    return _PICKLED, pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def unpack(kind: int, data: memoryview) -> Message:
    """Return a message that another process of the server has packed."""
    if kind == _EVALUATION:
        plain = marshal.loads(data)
        plain[_LAYOUT] = SegmentLayout(*plain[_LAYOUT])
        return SubmitEvaluation(*plain)
    if kind == _FINISHED:
        return RequestFinished(*marshal.loads(data))
    message: Message = pickle.loads(data)
    return message


# ----------------------------------------------------------------------------------------- channels

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
        while self._received and (message := self._next()) is not None:
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
