"""Fresh batches of one kind, answered on a lane by the interpreter without Python.

See `warpfit_server.engine.cuda.standing`. Python comes in when a batch does not fit, is not sound,
or has been seen before and may be worth compiling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.request import Evaluation
from warpfit_server.engine import numba_cache
from warpfit_server.engine.cuda.announce import Report
from warpfit_server.engine.cuda.batch_memory import Parts, lay_out, slots_at_most
from warpfit_server.engine.cuda.device import CudaDevice
from warpfit_server.engine.cuda.launch import Addresses, Kernels, Work
from warpfit_server.engine.cuda.lowering import LONGEST
from warpfit_server.engine.cuda.one_launch import Desk, Handles, compute_losses
from warpfit_server.engine.cuda.plan import mixed_tokens
from warpfit_server.engine.cuda.resident import Closing, ResidentDataset
from warpfit_server.engine.cuda.standing import (
    AT_A_TIME,
    BETWEEN,
    Duty,
    Memory,
    begin,
    end,
    read_numbers,
    view_tokens,
)
from warpfit_server.engine.cuda.streams import StreamContext
from warpfit_server.engine.cuda.tokens import Tokens
from warpfit_server.engine.lane_end import Line
from warpfit_server.engine.roster import has_nothing_else

#: Room for larger batches than the one that was seen.
_HEADROOM: Final = 1.5
#: Batches that are remembered, to tell those that come again; a power of two.
_REMEMBERED: Final = 1 << 16
_compiled = numba_cache.njit(nogil=True)


class Room(NamedTuple):
    """What fits; integers."""

    least_jobs: int
    """Programs x parameter vectors, from which on the kernel is the right one."""
    most_jobs: int
    batch_bytes: int
    """Of the device, for a batch and what is made of it."""
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
    cost: float
    """Nanoseconds of the device for one token with one parameter vector."""
    flags: NDArray[np.uint8]
    """See `Kernels`."""
    staging: NDArray[np.uint8]
    """Page-locked memory for batches."""
    unsound: NDArray[np.uint32]
    """The same for what `compute_losses` finds; [most programs]."""
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
    cost: float
    """Nanoseconds of the device for one token with one parameter vector."""


class FreshBatches:
    """Duties to answer fresh batches.

    Args:
        device: to compute on.

    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._seen = np.zeros(_REMEMBERED, dtype=np.uint64)

    def duty(self, kind: Kind, observe: Callable[[int, float], None], *, alone: bool) -> Duty:
        """Prepare for more evaluations of a kind.

        Args:
            kind: of evaluations.
            observe: see `Duty`.
            alone: whether batches that come again are Python's.

        Raises:
            ResourceExhaustedError: if the device has no room for that.

        """
        context = self._device.take()
        try:
            means = _means(context, kind, self._seen if alone else self._seen[:0])
        except BaseException:
            self._device.give(context)
            raise
        serve = partial(_serve, means)
        content_id = kind.evaluation.dataset_id
        return Duty(content_id, serve, observe, partial(self._device.give, context))


def _means(context: StreamContext, kind: Kind, seen: NDArray[np.uint64]) -> Means:
    """Allocate buffers for somewhat larger batches than the one that is known."""
    batch, layout = kind.evaluation.batch, kind.resident.dataset.layout
    itemsize, rows = kind.kernels.variant.dtype.itemsize, kind.evaluation.row_range(layout)
    least, most = kind.jobs
    jobs = min(most, int(len(batch) * batch.vectors * _HEADROOM))
    parts = Parts.of(batch)
    size, uploaded = int(parts.end * _HEADROOM), int(parts.uploaded * _HEADROOM)
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
        cost=kind.cost,
        flags=kind.kernels.flags,
        staging=context.pinned("batch", uploaded),
        unsound=context.pinned("unsound", 4 * jobs).view(np.uint32),
        sums=context.pinned("sums", 8 * jobs).view(np.float64),
        closing=kind.resident.closing(kind.evaluation.loss, *rows),
        room=Room(least, jobs, size, slot_bytes, itemsize),
        seen=seen,
        seed=hash((kind.evaluation.dataset_id, rows, kind.evaluation.precision)) >> 1,
    )


# ------------------------------------------------------------------------------ compiled by Numba


@_compiled  # type: ignore[untyped-decorator]
def _serve(
    means: Means,
    line: Line,
    kind: NDArray[np.uint8],
    memory: Memory,
    board: NDArray[np.int64],
    place: int,
) -> int:
    for _ in range(AT_A_TIME):
        size, began = begin(line, kind, memory, board, place, means.cost)
        if began == 0:
            return int(size)
        is_first = has_nothing_else(board, place)
        tokens = _answer(line, memory, means, began, is_first)
        is_over = end(line, board, place, began, tokens * means.rows)
        if tokens == 0:
            return int(size)
        if is_over:
            break
    return BETWEEN


@_compiled  # type: ignore[untyped-decorator]
def _answer(line: Line, memory: Memory, means: Means, began: int, is_first: bool) -> int:
    """Return tokens x parameter vectors of the evaluation; 0 if Python must answer.

    The first evaluation of a tenant goes before further ones of others.
    """
    numbers, room = read_numbers(line), means.room
    jobs = numbers.programs * numbers.vectors
    parts = lay_out(numbers.tokens, numbers.programs, numbers.parameters)
    slots = slots_at_most(numbers.tokens, numbers.programs) * numbers.vectors
    if jobs < room.least_jobs or jobs > room.most_jobs or slots * room.slot_size > room.slot_bytes:
        return 0
    if parts.uploaded > len(means.staging) or parts.end > room.batch_bytes:
        return 0
    if numbers.losses_at + 8 * jobs > len(memory.bytes):
        return 0
    tokens = view_tokens(memory, numbers)
    longest = np.int64(np.max(tokens.lengths))  # as Python counts
    if longest > LONGEST or _has_been_seen(means.seen, means.seed, tokens):
        return 0
    status, bad, is_told = compute_losses(
        means.functions,
        means.handles,
        means.work,
        means.addresses,
        parts,
        means.desk,
        tokens,
        means.variables,
        longest,
        means.flags,
        is_first,
        means.staging,
        means.unsound,
        means.sums[:jobs],
        means.closing,
        Report(line.descriptor, began - numbers.submitted, began, 0, 0),
        memory.bytes[numbers.losses_at : numbers.losses_at + 8 * jobs].view(np.float64),
    )
    is_done = status == 0 and bad < 0 and is_told
    return int(numbers.tokens * numbers.vectors) if is_done else 0


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
