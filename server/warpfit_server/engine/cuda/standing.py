"""Losses of evaluations of one kind, answered on a lane without Python.

Genetic programming sends batch after batch against one data set. Once Python has answered one of
them, all is known that the next one needs but the batch itself: kernels, rows, buffers, how sums
become losses. So compiled code takes the next packet from the lane, computes as
`warpfit_server.engine.cuda.one_launch` does, and tells the door. Python, and with it the
interpreter lock that all lanes share, comes in again when something unusual happens: another kind
of message, a batch that does not fit or is not sound, a batch that has been seen before and may be
worth compiling, an error, or another evaluation that waits for its turn.

The buffers may be wanted back at any time: for another data set, or because device memory is short.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from warpfit.errors import ResourceExhaustedError
from warpfit.request import Evaluation
from warpfit_server.engine.calls import fence
from warpfit_server.engine.cuda.announce import Report
from warpfit_server.engine.cuda.bytecode import INDEX_LIMIT
from warpfit_server.engine.cuda.device import CudaDevice, StreamContext
from warpfit_server.engine.cuda.launch import Addresses, Kernels, Work
from warpfit_server.engine.cuda.lower import Tokens
from warpfit_server.engine.cuda.one_launch import Desk, Handles, compute_losses
from warpfit_server.engine.cuda.plan import mixed_tokens
from warpfit_server.engine.cuda.resident import Closing, ResidentDataset
from warpfit_server.engine.cuda.staging import Parts, lay_out, slots_at_most
from warpfit_server.engine.lane_end import Line, is_of_kind, now, receive_message, sleep
from warpfit_server.engine.roster import (
    ANSWERED,
    AT_WORK,
    NANOSECONDS,
    REVOKED,
    TOKEN_ROWS,
    Place,
    may_start,
    nobody_works,
)
from warpfit_server.orders import Numbers

_LOG: Final = logging.getLogger("warpfit.engine")
#: Evaluations after which Python takes notice of them.
_AT_A_TIME: Final = 256
#: Room for larger batches than the one that was seen.
_HEADROOM: Final = 1.5
#: Batches that are remembered, to tell those that come again; a power of two.
_REMEMBERED: Final = 1 << 16
#: Microseconds after which a lane that waits for others looks again: a usual kernel's time.
_PAUSE: Final = 100
#: What `_serve` returns if it stopped between two messages.
_BETWEEN: Final = -3
_NUMBERS: Final = len(Numbers._fields)
_compiled = numba.njit(cache=True, nogil=True)


class Room(NamedTuple):
    """What fits; integers."""

    least_jobs: int
    """Programs x parameter vectors, from which on the kernel is the right one."""
    most_jobs: int
    slot_bytes: int
    """For values of row-invariant subtrees."""
    slot_size: int
    """Of one value, in bytes."""


class Means(NamedTuple):
    """What is needed to answer, beside the batch."""

    functions: NDArray[np.int64]
    """From `warpfit_server.engine.cuda.submission.driver_functions`."""
    handles: Handles
    work: Work
    addresses: Addresses
    desk: Desk
    variables: int
    """Of the data set."""
    rows: int
    """Of an evaluation."""
    costly: NDArray[np.bool_]
    """See `Kernels`."""
    staging: NDArray[np.uint8]
    """Page-locked memory for batches."""
    sums: NDArray[np.float64]
    """Page-locked memory for sums."""
    closing: Closing
    room: Room
    seen: NDArray[np.uint64]
    """Fingerprints of batches, by their low bits; empty if it does not matter."""
    seed: int
    """Changes the fingerprints of this kind of evaluation."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """What evaluations of a kind share, and what was found out about them."""

    resident: ResidentDataset
    evaluation: Evaluation
    """One of them."""
    kernels: Kernels
    work: Work
    jobs: tuple[int, int]
    """Least and most that the kernel is right for."""
    observe: Callable[[int, float], None]
    """Told the token-rows and seconds of an average evaluation, now and then."""


class Standings:
    """All lanes that compiled code serves.

    Args:
        device: to compute on.

    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._members: set[Standing] = set()
        self._lock = threading.Lock()
        self._seen = np.zeros(_REMEMBERED, dtype=np.uint64)

    def join(self, kind: Kind, place: Place, *, fresh_alone: bool) -> Standing | None:
        """Prepare for more evaluations of a kind; None if the device has no room for that.

        Args:
            kind: of evaluations.
            place: of the lane.
            fresh_alone: whether batches that come again are Python's business.

        """
        context = self._device.take()
        try:
            means = _means(context, kind, self._seen if fresh_alone else self._seen[:0])
        except ResourceExhaustedError as error:
            _LOG.debug("compiled code does not serve a lane: %s", error)
            self._device.give(context)
            return None
        standing = Standing(self, kind, place, context, means)
        with self._lock:
            self._members.add(standing)
        return standing

    def revoke(self, content_id: bytes | None = None) -> None:
        """Want the memory back, of those that use a data set or of all.

        Those that are just at work give it back in a moment.
        """
        with self._lock:
            members = list(self._members)
        for standing in members:
            if content_id in (None, standing.content_id):
                standing.revoke()

    def part(self, standing: Standing, context: StreamContext) -> None:
        """Take back what a lane held; for `Standing`."""
        with self._lock:
            self._members.discard(standing)
        self._device.give(context)


class Standing:
    """One lane that compiled code serves; see `warpfit_server.engine.base.Standing`."""

    def __init__(
        self,
        standings: Standings,
        kind: Kind,
        place: Place,
        context: StreamContext,
        means: Means,
    ) -> None:
        self.content_id = kind.evaluation.dataset_id
        """Of the data set."""
        self._standings = standings
        self._place = place
        self._observe = kind.observe
        self._lock = threading.Lock()
        self._held: tuple[StreamContext, ResidentDataset, Means] | None = (
            context,
            kind.resident,
            means,
        )

    def serve(self, line: Line, kind: bytes, segment: NDArray[np.uint8]) -> int | None:
        """Answer until that is over, or until something comes that it cannot answer."""
        held = self._held
        if held is None:
            return None
        text = np.frombuffer(kind, np.uint8)
        roster = self._place.roster
        self._place.occupy(segment)
        size = int(_serve(line, text, segment, roster.board, self._place.number, held[2]))
        return None if size == _BETWEEN else size

    @property
    def is_over(self) -> bool:
        """Whether the memory was wanted back."""
        return bool(self._place.words[REVOKED])

    def seconds(self) -> float:
        """Time that evaluations have taken since this was asked last; the planner is told, too."""
        words = self._place.words
        answered, token_rows = int(words[ANSWERED]), int(words[TOKEN_ROWS])
        seconds = float(words[NANOSECONDS]) * 1e-9
        words[ANSWERED] = words[TOKEN_ROWS] = words[NANOSECONDS] = 0
        if answered:
            self._observe(token_rows // answered, seconds / answered)
        return seconds

    def revoke(self) -> None:
        """Want the memory back: at once if nothing is at work, else the lane's thread gives it."""
        if not _ask_back(self._place.words):
            self._drop()

    def close(self) -> None:
        """Give everything back; the lane's thread alone calls this."""
        self._drop()
        self._place.leave()

    def _drop(self) -> None:
        with self._lock:
            held, self._held = self._held, None
        if held is not None:
            self._standings.part(self, held[0])


def _means(context: StreamContext, kind: Kind, seen: NDArray[np.uint64]) -> Means:
    """Allocate buffers for somewhat larger batches than the one that is known."""
    batch, layout = kind.evaluation.batch, kind.resident.dataset.layout
    itemsize, rows = kind.kernels.variant.dtype.itemsize, kind.evaluation.row_range(layout)
    least, most = kind.jobs
    jobs = min(most, int(len(batch) * batch.vectors * _HEADROOM))
    size = int(Parts.of(batch).end * _HEADROOM)
    slots = slots_at_most(len(batch.codes), len(batch)) * batch.vectors
    slot_bytes = int(slots * itemsize * _HEADROOM)
    assert kind.evaluation.loss is not None
    return Means(
        functions=context.functions,
        handles=Handles.of(context, kind.kernels),
        work=kind.work,
        addresses=Addresses(
            batch=context.buffer("batch", size),
            slots=context.buffer("slots", slot_bytes),
            values=0,
            partials=context.buffer("partials", 8 * jobs * kind.work.tiles),
        ),
        desk=context.keep(Desk.fresh),
        variables=layout.variables,
        rows=rows[1] - rows[0],
        costly=kind.kernels.costly,
        staging=context.pinned("batch", size),
        sums=context.pinned("sums", 8 * jobs).view(np.float64),
        closing=kind.resident.closing(kind.evaluation.loss, *rows),
        room=Room(least, jobs, slot_bytes, itemsize),
        seen=seen,
        seed=hash((kind.evaluation.dataset_id, rows, kind.evaluation.precision)) >> 1,
    )


# ------------------------------------------------------------------------------ compiled by Numba


@_compiled  # type: ignore[untyped-decorator]
def _ask_back(words: NDArray[np.int64]) -> bool:
    """Write down that memory is wanted back; return whether it is in use."""
    words[REVOKED] = 1
    fence()
    return bool(words[AT_WORK] != 0)


@_compiled  # type: ignore[untyped-decorator]
def _serve(
    line: Line,
    kind: NDArray[np.uint8],
    segment: NDArray[np.uint8],
    board: NDArray[np.int64],
    number: int,
    means: Means,
) -> int:
    words = board[number]
    for _ in range(_AT_A_TIME):
        size = receive_message(line, nobody_works(board))
        if not is_of_kind(line, size, kind):
            return int(size)
        while not may_start(board, number) and segment[0] == 0:
            sleep(line, _PAUSE)
        began = now(line)
        words[AT_WORK] = began
        fence()
        is_free = words[REVOKED] == 0 and segment[0] == 0
        tokens = _answer(line, segment, means, began) if is_free else 0
        words[AT_WORK] = 0
        fence()
        if tokens == 0:
            return int(size)
        words[ANSWERED] += 1
        words[TOKEN_ROWS] += tokens * means.rows
        words[NANOSECONDS] += now(line) - began
        if words[REVOKED] != 0:
            break
    return _BETWEEN


@_compiled  # type: ignore[untyped-decorator]
def _answer(line: Line, segment: NDArray[np.uint8], means: Means, began: int) -> int:
    """Return tokens x parameter vectors of the evaluation; 0 if Python must answer."""
    numbers = line.packet[: 8 * _NUMBERS].view(np.int64)
    _, _, submitted, count, programs, parameters, vectors = numbers[:7]
    jobs, room = programs * vectors, means.room
    parts = lay_out(count, programs, parameters, vectors)
    slot_bytes = slots_at_most(count, programs) * vectors * room.slot_size
    if jobs < room.least_jobs or jobs > room.most_jobs or slot_bytes > room.slot_bytes:
        return 0
    if parts.end > len(means.staging) or numbers[12] + 8 * jobs > len(segment):
        return 0
    tokens = Tokens(
        codes=_part(segment, numbers[11], count),
        values=_part(segment, numbers[7], 8 * count).view(np.float64),
        lengths=_part(segment, numbers[9], 4 * programs).view(np.uint32),
        parameter_counts=_part(segment, numbers[10], 4 * programs).view(np.uint32),
        parameters=_part(segment, numbers[8], 8 * parameters).view(np.float64),
        vectors=vectors,
    )
    longest = int(np.max(tokens.lengths))
    if longest >= INDEX_LIMIT or _has_been_seen(means.seen, means.seed, tokens):
        return 0
    status, levels, is_told = compute_losses(
        means.functions,
        means.handles,
        means.work,
        means.addresses,
        parts,
        means.desk,
        tokens,
        means.variables,
        longest,
        means.costly,
        means.staging,
        means.sums[:jobs],
        means.closing,
        Report(line.descriptor, began - submitted, began, 0, 0),
        _part(segment, numbers[12], 8 * jobs).view(np.float64),
    )
    return int(count * vectors) if status == 0 and levels >= 0 and is_told else 0


@_compiled  # type: ignore[untyped-decorator]
def _part(segment: NDArray[np.uint8], start: int, size: int) -> NDArray[np.uint8]:
    return segment[start : start + size]


@_compiled  # type: ignore[untyped-decorator]
def _has_been_seen(seen: NDArray[np.uint64], seed: int, tokens: Tokens) -> bool:
    """Tell whether a batch is remembered, and remember it."""
    if len(seen) == 0:
        return False
    number = mixed_tokens(tokens.codes, tokens.values.view(np.uint64)) ^ np.uint64(seed)
    place = number & np.uint64(len(seen) - 1)
    is_known = seen[place] == number
    seen[place] = number
    return bool(is_known)
