"""Losses of one evaluation in one compiled step: packed, launched, awaited, closed.

The device needs some 0.1 ms for a batch of usual size. In Python its way there and back would take
several times that, under Python's lock that all threads share. Here the lock is given up once,
before the batch is packed, and taken back when the losses are there.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit.request import Evaluation, Timings
from warpfit_server.engine.cuda.interpreter.launch_arguments import (
    ARGUMENTS,
    MOST_LAUNCHES,
    SLOT_ARGUMENTS,
    SLOT_THREADS,
    SUM_THREADS,
    Addresses,
    Kernels,
    Shares,
    Work,
    jobs_at_once,
    share_out,
    tell_interpreter,
    tell_slots,
)
from warpfit_server.engine.cuda.interpreter.lowering import (
    LOWER_ARGUMENTS,
    LOWER_THREADS,
    NONE,
    ORDER_ARGUMENTS,
    ORDER_BYTES,
    ORDER_THREADS,
    check_length,
    refuse,
    tell_lower,
    tell_order,
)
from warpfit_server.engine.cuda.runtime.batch_layout import (
    Extent,
    Parts,
    pack,
    slots_at_most,
    survey,
)
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.cuda.runtime.submission import (
    ELAPSED,
    LAUNCH,
    NOW,
    RECORD,
    SYNCHRONIZE,
    UPLOAD,
    WIDTH,
    carry_out,
    stage_times,
)
from warpfit_server.engine.cuda.runtime.submission import (
    add_step as _add,
)
from warpfit_server.engine.cuda.runtime.tokens import Tokens
from warpfit_server.engine.interface import Outputs
from warpfit_server.engine.native import numba_cache

_MOST_STEPS: Final = 11 + MOST_LAUNCHES

#: Where the arguments' addresses begin in `Desk.places`.
_LOWER, _ORDER, _SLOTS, _SUMS, _INTERPRETER = 0, 1, 2, 3, 6


class Handles(NamedTuple):
    """What the driver knows the kernels, the stream and its events by; integers."""

    lower_programs: int
    order_programs: int
    interpret: int
    evaluate_slots: int
    sum_partials: int
    stream: int
    started: int
    computed: int

    @classmethod
    def of(cls, context: StreamContext, kernels: Kernels) -> Handles:
        """Find the handles."""
        return cls(
            lower_programs=kernels.lowering.lower_programs.ptr,
            order_programs=kernels.lowering.order_programs.ptr,
            interpret=kernels.interpret.ptr,
            evaluate_slots=kernels.evaluate_slots.ptr,
            sum_partials=kernels.sum_partials.ptr,
            stream=context.handle,
            started=context.event("started").ptr,
            computed=context.event("computed").ptr,
        )


class Desk(NamedTuple):
    """Memory for what the driver is told and answers, used again and again by one stream."""

    arguments: NDArray[np.void]
    """Of each launch of the interpreter."""
    lower_arguments: NDArray[np.void]
    order_arguments: NDArray[np.void]
    slot_arguments: NDArray[np.void]
    sum_arguments: NDArray[np.int64]
    """Partial sums, sums, tiles."""
    places: NDArray[np.int64]
    """Addresses of the arguments of the lowering's kernels, of the slots', of the sums' and of each
    launch of the interpreter, as the driver wants them."""
    steps: NDArray[np.int64]
    clock: NDArray[np.int64]
    """Seconds and nanoseconds, when all was launched and when all was done; [4]."""
    elapsed: NDArray[np.float32]
    """Milliseconds."""

    @classmethod
    def fresh(cls) -> Desk:
        """Allocate the memory."""
        arguments = np.zeros(MOST_LAUNCHES, dtype=ARGUMENTS)
        lower, order = np.zeros(1, dtype=LOWER_ARGUMENTS), np.zeros(1, dtype=ORDER_ARGUMENTS)
        slots = np.zeros(1, dtype=SLOT_ARGUMENTS)
        sums = np.zeros(3, dtype=np.int64)
        parts = [lower, order, slots, *(sums[index:] for index in range(3))]
        parts += [arguments[index:] for index in range(MOST_LAUNCHES)]
        places = [part.ctypes.data for part in parts]
        return cls(
            arguments,
            lower,
            order,
            slots,
            sums,
            np.array(places, dtype=np.int64),
            np.zeros((_MOST_STEPS, WIDTH), dtype=np.int64),
            np.zeros(4, dtype=np.int64),
            np.zeros(1, dtype=np.float32),
        )


def losses_in_one_launch(
    context: StreamContext,
    kernels: Kernels,
    work: Work,
    evaluation: Evaluation,
    resident: ResidentDataset,
    outputs: Outputs,
    started: int,
) -> Timings:
    """Compute the losses of a batch.

    Args:
        context: a stream that nobody else uses.
        kernels: of the variant that ``work`` was made for.
        work: rows and layout.
        evaluation: that asks for a loss; the arrays of its batch fit together.
        resident: the data set.
        outputs: whose losses to fill.
        started: ``time.perf_counter_ns()`` of its beginning.

    Raises:
        ProgramError: for the first bad token.
        ResourceExhaustedError: if the batch is too large to encode, or the device has no room.
        CUDADriverError: if the device reports an error.

    """
    assert outputs.losses is not None
    assert evaluation.loss is not None
    batch, layout = evaluation.batch, resident.dataset.layout
    longest, parts, jobs = check_length(batch), Parts.of(batch), len(batch) * batch.vectors
    staging = context.pinned("batch", parts.uploaded)
    unsound = context.pinned("unsound", 4 * len(batch)).view(np.uint32)
    sums = context.pinned("sums", 8 * jobs).view(np.float64)
    desk = context.keep(Desk.fresh)
    status, bad = compute_losses(
        context.functions,
        Handles.of(context, kernels),
        work,
        _addresses(context, kernels, work, batch, parts.end),
        parts,
        desk,
        Tokens.of(batch),
        layout.variables,
        longest,
        kernels.flags,
        staging,
        unsound,
        sums,
        outputs.losses.reshape(-1),
    )
    context.settled(status)
    if bad >= 0:
        refuse(batch, bad, layout.variables)
    copy_in, compute, copy_out = stage_times(started, desk.clock, desk.elapsed)
    return Timings(copy_in=copy_in, compute=compute, copy_out=copy_out)


def _addresses(
    context: StreamContext, kernels: Kernels, work: Work, batch: Batch, size: int
) -> Addresses:
    itemsize = kernels.variant.dtype.itemsize
    slots = slots_at_most(len(batch.codes), len(batch))
    return Addresses(
        batch=context.buffer("batch", size),
        slots=context.buffer("slots", slots * batch.vectors * itemsize),
        values=0,
        partials=context.buffer("partials", 8 * len(batch) * batch.vectors * work.tiles),
    )


# ------------------------------------------------------------------------------ compiled by Numba


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def compute_losses(
    functions: NDArray[np.int64],
    handles: Handles,
    work: Work,
    addresses: Addresses,
    parts: Parts,
    desk: Desk,
    tokens: Tokens,
    variables: int,
    longest: int,
    flags: NDArray[np.uint8],
    staging: NDArray[np.uint8],
    unsound: NDArray[np.uint32],
    sums: NDArray[np.float64],
    losses: NDArray[np.float64],
) -> tuple[int, int]:
    """Return the driver's status and the index of the first invalid program, or -1."""
    jobs, programs, vectors = len(sums), len(tokens.lengths), tokens.vectors
    extent = survey(tokens, flags)
    chunk = jobs_at_once(work, len(tokens.codes) * vectors, jobs, vectors)
    shares = share_out(work, extent, chunk, programs, vectors)
    pack(tokens, parts, staging)
    told = desk.sum_arguments
    told[0], told[1], told[2] = addresses.partials, sums.ctypes.data, work.tiles

    steps = desk.steps
    stream = handles.stream
    places, source = np.int64(desk.places.ctypes.data), np.int64(staging.ctypes.data)
    count = _add(steps, 0, (UPLOAD, addresses.batch, source, parts.uploaded, stream))
    count = _add(steps, count, (RECORD, handles.started, stream))
    count, groups = _add_lowering(
        *(desk, count, handles, stream, addresses.batch, parts, programs, vectors),
        *(variables, longest, work, shares, unsound),
    )
    grid = tell_slots(desk.slot_arguments, addresses, parts, extent, programs, vectors)
    block = (SLOT_THREADS[0], SLOT_THREADS[1], 1, 0, stream, places + 8 * _SLOTS)
    count = _add(steps, count, (LAUNCH, handles.evaluate_slots, *grid, 1, *block))
    for number, first in enumerate(range(0, jobs, shares.chunk)):
        piece = (first, min(shares.chunk, jobs - first))
        launch = _tell_piece(
            *(desk, number, piece, work, addresses, parts, extent, shares, vectors)
        )
        place = places + 8 * (_INTERPRETER + number)
        count = _add(steps, count, (LAUNCH, handles.interpret, *launch, stream, place))
    block = (SUM_THREADS, 1, 1, 0, stream, places + 8 * _SUMS)
    count = _add(steps, count, (LAUNCH, handles.sum_partials, jobs, 1, 1, *block))
    count = _add(steps, count, (RECORD, handles.computed, stream))
    clock = np.int64(desk.clock.ctypes.data)
    count = _add(steps, count, (NOW, clock))
    count = _add(steps, count, (SYNCHRONIZE, stream))
    events = (handles.started, handles.computed)
    count = _add(steps, count, (ELAPSED, np.int64(desk.elapsed.ctypes.data), *events))
    count = _add(steps, count, (NOW, clock + 16))
    status = carry_out(functions, steps[:count])
    if status != 0:
        return status, -1
    bad = int(np.min(unsound[:groups]))
    if bad != NONE:
        return status, bad
    losses[:] = sums
    return status, -1


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def _add_lowering(
    desk: Desk,
    count: int,
    handles: Handles,
    stream: int,
    batch: int,
    parts: Parts,
    programs: int,
    vectors: int,
    variables: int,
    longest: int,
    work: Work,
    shares: Shares,
    unsound: NDArray[np.uint32],
) -> tuple[int, int]:
    """Write the steps that lower a batch behind ``count`` others; return their number, groups."""
    places = np.int64(desk.places.ctypes.data)
    launch = tell_lower(
        *(desk.lower_arguments, batch, parts, programs, vectors, variables, longest),
        work.lowering_blocks,
    )
    block = (LOWER_THREADS, 1, 1, launch.shared, stream, places + 8 * _LOWER)
    count = _add(desk.steps, count, (LAUNCH, handles.lower_programs, launch.blocks, 1, 1, *block))
    levels, told = shares.levels - shares.scratch, np.int64(unsound.ctypes.data)
    groups = tell_order(*(desk.order_arguments, batch, parts, programs, shares.group, levels, told))
    block = (ORDER_THREADS, 1, 1, ORDER_BYTES, stream, places + 8 * _ORDER)
    count = _add(desk.steps, count, (LAUNCH, handles.order_programs, groups, 1, 1, *block))
    return count, groups


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def _tell_piece(
    desk: Desk,
    number: int,
    piece: tuple[int, int],
    work: Work,
    addresses: Addresses,
    parts: Parts,
    extent: Extent,
    shares: Shares,
    vectors: int,
) -> tuple[int, int, int, int, int, int, int]:
    """Write the arguments of one launch of the interpreter; return grid, block, shared memory."""
    partials = addresses.partials + 8 * piece[0] * work.tiles
    own = Addresses(addresses.batch, addresses.slots, 0, partials)
    groups, shared = tell_interpreter(
        desk.arguments[number:], work, own, parts, extent, shares, vectors, piece
    )
    return work.tiles, groups, 1, 32 * shares.warps, 1, 1, shared
