"""Losses of a repeated batch in one compiled step: slots filled, graph launched, awaited, closed.

As in `interpreter.launch`, Python's lock is given up once, before the
slots are filled, and taken back when the losses are there. Three parts: `prepare` collects, in
Python, all that the step needs; `replay_losses` needs no Python; `finish` takes notice, in Python,
of what came out. Between them the step may be carried out by any thread whose device it is.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.request import Evaluation, Tier, Timings
from warpfit_server.engine.cuda.jit.graph import Desk, Replay, request
from warpfit_server.engine.cuda.jit.ptx import REQUEST
from warpfit_server.engine.cuda.jit.shapes import SlotSources, fill_slots
from warpfit_server.engine.cuda.runtime.resident_data import ResidentDataset
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.cuda.runtime.submission import (
    ELAPSED,
    LAUNCH_GRAPH,
    NOW,
    RECORD,
    SYNCHRONIZE,
    add_step,
    carry_out,
    stage_times,
)
from warpfit_server.engine.cuda.runtime.tokens import Tokens
from warpfit_server.engine.interface import Outputs
from warpfit_server.engine.native import numba_cache

#: Places in what a graph is told.
_COLUMNS: Final = tuple(REQUEST[name] // 8 for name in ("variables", "target", "weights"))
_HEAD: Final = REQUEST["head"] // 8
_STOP: Final = REQUEST["stop"] // 8


class Handles(NamedTuple):
    """What the driver knows the graph, the streams and the events by; integers."""

    graph: int
    stream: int
    started: int
    computed: int

    @classmethod
    def of(cls, context: StreamContext, replay: Replay) -> Handles:
        """Find the handles."""
        started, computed = context.event("started"), context.event("computed")
        return cls(replay.graph, context.handle, started.ptr, computed.ptr)


class Step(NamedTuple):
    """What `replay_losses` is told."""

    functions: NDArray[np.int64]
    """From `driver_functions`."""
    handles: Handles
    desk: Desk
    """Of the graph."""
    at_once: int
    """Rows of one launch; a multiple of `resident_data.ROW_MULTIPLE`."""
    tokens: Tokens
    sources: SlotSources
    slots: NDArray[Any]
    """To fill, in the block that the graph copies to the device; [K, slots]."""
    sums: NDArray[np.float64]
    """Where the graph leaves the sums; [sums * K]."""
    losses: NDArray[np.float64]
    """Sums of row losses to fill; [programs * K]."""


def prepare(
    context: StreamContext,
    replay: Replay,
    sources: SlotSources,
    resident: ResidentDataset,
    evaluation: Evaluation,
    at_once: int,
    outputs: Outputs,
) -> Step:
    """Collect what `replay_losses` needs.

    Args:
        context: a stream that nobody else uses.
        replay: a graph that nobody else uses, of the batch's kernels.
        sources: of the batch's slots.
        resident: the data set.
        evaluation: that asks for a loss, and not for values.
        at_once: rows of one launch.
        outputs: whose losses to fill.

    """
    assert outputs.losses is not None
    assert evaluation.loss is not None
    rows = evaluation.row_range(resident.dataset.layout)
    replay.tell(request(resident, *rows))
    return Step(
        context.functions,
        Handles.of(context, replay),
        replay.desk,
        at_once,
        Tokens.of(evaluation.batch),
        sources,
        replay.slots,
        replay.sums,
        outputs.losses.reshape(-1),
    )


def finish(
    context: StreamContext, replay: Replay, status: int, started: int, cache_hits: int
) -> Timings:
    """Take notice of what the step has done.

    Args:
        context: that it was prepared with.
        replay: likewise.
        status: that it returned.
        started: ``time.perf_counter_ns()`` of its beginning.
        cache_hits: expressions whose kernels were there.

    Raises:
        CUDADriverError: if the device reports an error.

    """
    context.settled(status)
    copy_in, compute, copy_out = stage_times(started, replay.desk.clock, replay.desk.elapsed)
    return Timings(
        copy_in=copy_in,
        compute=compute,
        copy_out=copy_out,
        tier=Tier.COMPILED,
        cache_hits=cache_hits,
    )


# ------------------------------------------------------------------------------ compiled by Numba


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def replay_losses(
    functions: NDArray[np.int64],
    handles: Handles,
    desk: Desk,
    at_once: int,
    tokens: Tokens,
    sources: SlotSources,
    slots: NDArray[Any],
    sums: NDArray[np.float64],
    losses: NDArray[np.float64],
) -> int:
    """Carry a `Step` out; return the driver's status."""
    fill_slots(tokens.values, tokens.parameter_counts, tokens.parameters, sources, slots)
    status = _launch(functions, handles, desk, at_once, slots.itemsize, sums)
    if status != 0:
        return int(status)
    for program in range(len(desk.sum_starts) - 1):
        for vector in range(tokens.vectors):
            place = desk.sum_starts[program] * tokens.vectors + vector
            losses[program * tokens.vectors + vector] = sums[place]
    return int(status)


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def _launch(
    functions: NDArray[np.int64],
    handles: Handles,
    desk: Desk,
    at_once: int,
    itemsize: int,
    sums: NDArray[np.float64],
) -> int:
    """Launch for one range of rows after the other; return the driver's status."""
    words, steps = desk.words, desk.steps[: _write_steps(handles, desk)]
    stop = np.int64(words[_STOP])
    if stop <= at_once:
        return int(carry_out(functions, steps))
    told, totals = words.copy(), np.zeros(len(sums))
    began, milliseconds, status = desk.clock[:2].copy(), np.float32(0), 0
    for first in range(0, stop, at_once):
        for column in _COLUMNS:
            if told[column] != 0:
                words[column] = told[column] + np.uint64(first * itemsize)
        words[_HEAD] = told[_HEAD] if first == 0 else np.uint64(0)
        words[_STOP] = np.uint64(min(at_once, int(stop) - first))
        status = carry_out(functions, steps)
        if status != 0:
            break
        if first == 0:
            began[:] = desk.clock[:2]
        totals += sums
        milliseconds += desk.elapsed[0]
    words[:] = told
    sums[:] = totals
    desk.clock[:2] = began
    desk.elapsed[0] = milliseconds
    return int(status)


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def _write_steps(handles: Handles, desk: Desk) -> int:
    """Write the steps of a launch, and of the wait for its end; return how many there are."""
    steps, clock, stream = desk.steps, np.int64(desk.clock.ctypes.data), handles.stream
    events = (handles.started, handles.computed)
    count = add_step(steps, 0, (RECORD, handles.started, stream))
    count = add_step(steps, count, (LAUNCH_GRAPH, handles.graph, stream))
    count = add_step(steps, count, (RECORD, handles.computed, stream))
    count = add_step(steps, count, (NOW, clock))
    count = add_step(steps, count, (SYNCHRONIZE, stream))
    count = add_step(steps, count, (ELAPSED, np.int64(desk.elapsed.ctypes.data), *events))
    return int(add_step(steps, count, (NOW, clock + 16)))
