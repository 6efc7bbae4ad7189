"""Sums of the loss terms of one evaluation in one compiled step: lowered, launched, awaited.

The device needs some 0.1 ms for a batch of usual size. In Python its way there and back would take
several times that, under the interpreter lock that all evaluations share. Here the lock is given up
once, before the batch is lowered, and taken back when the sums are there.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit_server.engine.cuda.device import StreamContext
from warpfit_server.engine.cuda.launch import (
    ARGUMENTS,
    SLOT_ARGUMENTS,
    SLOT_THREADS,
    SUM_THREADS,
    Addresses,
    Kernels,
    Work,
    tell_interpreter,
    tell_slots,
)
from warpfit_server.engine.cuda.lower import Tokens, check_length, check_levels
from warpfit_server.engine.cuda.staging import Extent, Parts, most_slots, stage_into
from warpfit_server.engine.cuda.submission import (
    ELAPSED,
    LAUNCH,
    NOW,
    RECORD,
    SYNCHRONIZE,
    UPLOAD,
    WIDTH,
    carry_out,
)

_MOST_STEPS: Final = 9


class Handles(NamedTuple):
    """What the driver knows the kernels, the stream and its events by; integers."""

    interpret: int
    evaluate_slots: int
    sum_partials: int
    stream: int
    started: int
    computed: int


class Desk(NamedTuple):
    """Memory for what the driver is told and answers, used again and again by one stream."""

    arguments: NDArray[np.void]
    slot_arguments: NDArray[np.void]
    sum_arguments: NDArray[np.int64]
    """Partial sums, sums, tiles."""
    places: NDArray[np.int64]
    """Addresses of all arguments, as the driver wants them."""
    steps: NDArray[np.int64]
    clock: NDArray[np.int64]
    """Seconds and nanoseconds."""
    elapsed: NDArray[np.float32]
    """Milliseconds."""

    @classmethod
    def fresh(cls) -> Desk:
        """Allocate the memory."""
        arguments = np.zeros(1, dtype=ARGUMENTS)
        slot_arguments = np.zeros(1, dtype=SLOT_ARGUMENTS)
        sums = np.zeros(3, dtype=np.int64)
        places = [arguments.ctypes.data, slot_arguments.ctypes.data]
        places += [sums[index:].ctypes.data for index in range(3)]
        return cls(
            arguments,
            slot_arguments,
            sums,
            np.array(places, dtype=np.int64),
            np.zeros((_MOST_STEPS, WIDTH), dtype=np.int64),
            np.zeros(2, dtype=np.int64),
            np.zeros(1, dtype=np.float32),
        )


class Outcome(NamedTuple):
    """What a launch has brought."""

    sums: NDArray[np.float64]
    """Sum of the loss terms of each job, [jobs]; valid until the stream is used again."""
    launched: int
    """``time.perf_counter_ns()`` when all had been launched."""
    computed: int
    """Nanoseconds of the device."""


def sums_in_one_launch(
    context: StreamContext, kernels: Kernels, work: Work, batch: Batch, variables: int
) -> Outcome:
    """Compute the sums of the loss terms of a batch.

    Args:
        context: a stream that nobody else uses.
        kernels: of the variant that ``work`` was made for.
        work: rows and layout.
        batch: whose arrays fit together.
        variables: of the data set.

    Raises:
        ProgramError: for the first bad token.
        ResourceExhaustedError: if the batch is too large to encode, or the device has no room.
        CUDADriverError: if the device reports an error.

    """
    longest, parts, jobs = check_length(batch), Parts.of(batch), len(batch) * batch.vectors
    itemsize = kernels.variant.dtype.itemsize
    staging = context.pinned("batch", parts.end)
    sums = context.pinned("sums", 8 * jobs).view(np.float64)
    addresses = Addresses(
        batch=context.buffer("batch", parts.end),
        slots=context.buffer("slots", most_slots(batch) * batch.vectors * itemsize),
        values=0,
        partials=context.buffer("partials", 8 * jobs * work.tiles),
    )
    handles = Handles(
        interpret=kernels.interpret.ptr,
        evaluate_slots=kernels.evaluate_slots.ptr,
        sum_partials=kernels.sum_partials.ptr,
        stream=context.handle,
        started=context.event("started").ptr,
        computed=context.event("computed").ptr,
    )
    desk, tokens = context.keep(Desk.fresh), Tokens.of(batch)
    status, levels = _compute(
        context.functions,
        handles,
        work,
        addresses,
        parts,
        desk,
        tokens,
        variables,
        longest,
        kernels.costly,
        staging,
        sums,
    )
    check_levels(levels, batch, variables)
    context.settled(status)
    seconds, nanoseconds = desk.clock.tolist()
    return Outcome(sums, seconds * 1_000_000_000 + nanoseconds, int(desk.elapsed[0] * 1e6))


# ------------------------------------------------------------------------------ compiled by Numba


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _compute(
    functions: NDArray[np.int64],
    handles: Handles,
    work: Work,
    addresses: Addresses,
    parts: Parts,
    desk: Desk,
    tokens: Tokens,
    variables: int,
    longest: int,
    costly: NDArray[np.bool_],
    staging: NDArray[np.uint8],
    sums: NDArray[np.float64],
) -> tuple[int, int]:
    """Return the driver's status, and levels that are negative if nothing could be launched."""
    extent = Extent(*stage_into(tokens, variables, longest, costly, len(sums), parts, staging))
    if extent.levels < 0:
        return 0, extent.levels
    grid = tell_slots(desk.slot_arguments, addresses, parts, extent.slots, tokens.vectors)
    blocks = tell_interpreter(
        desk.arguments, work, addresses, parts, extent, tokens.vectors, (0, len(sums))
    )
    told = desk.sum_arguments
    told[0], told[1], told[2] = addresses.partials, sums.ctypes.data, work.tiles

    steps, stream = desk.steps, handles.stream
    places, source = np.int64(desk.places.ctypes.data), np.int64(staging.ctypes.data)
    used = parts.slots + 16 * extent.slots
    count = _add(steps, 0, (UPLOAD, addresses.batch, source, used, stream))
    count = _add(steps, count, (RECORD, handles.started, stream))
    if extent.slots > 0:
        block = (SLOT_THREADS[0], SLOT_THREADS[1], 1, 0, stream, places + 8)
        count = _add(steps, count, (LAUNCH, handles.evaluate_slots, *grid, 1, *block))
    block = (32 * blocks[1], 1, 1, blocks[2], stream, places)
    count = _add(steps, count, (LAUNCH, handles.interpret, work.tiles, blocks[0], 1, *block))
    block = (SUM_THREADS, 1, 1, 0, stream, places + 16)
    count = _add(steps, count, (LAUNCH, handles.sum_partials, len(sums), 1, 1, *block))
    count = _add(steps, count, (RECORD, handles.computed, stream))
    count = _add(steps, count, (NOW, np.int64(desk.clock.ctypes.data)))
    count = _add(steps, count, (SYNCHRONIZE, stream))
    events = (handles.started, handles.computed)
    count = _add(steps, count, (ELAPSED, np.int64(desk.elapsed.ctypes.data), *events))
    return carry_out(functions, steps[:count]), extent.levels


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _add(steps: NDArray[np.int64], count: int, numbers: tuple[int, ...]) -> int:
    """Write a step; return how many there are now."""
    for index in range(len(numbers)):
        steps[count, index] = numbers[index]
    return count + 1
