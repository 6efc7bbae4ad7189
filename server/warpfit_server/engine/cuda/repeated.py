"""One batch with other parameters each time, answered on a lane by its compiled kernels.

See `warpfit_server.engine.cuda.standing`. Python comes in when another batch comes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.request import Evaluation
from warpfit_server.engine import numba_cache
from warpfit_server.engine.cuda.announce import Report
from warpfit_server.engine.cuda.one_replay import Handles, replay_losses
from warpfit_server.engine.cuda.prepared import differ
from warpfit_server.engine.cuda.replay import Desk, Replay, request
from warpfit_server.engine.cuda.resident import Closing, ResidentDataset
from warpfit_server.engine.cuda.shapes import SlotSources
from warpfit_server.engine.cuda.standing import (
    AT_A_TIME,
    BETWEEN,
    Memory,
    begin,
    end,
    read_numbers,
    view_tokens,
)
from warpfit_server.engine.cuda.streams import StreamContext
from warpfit_server.engine.lane_end import Line
from warpfit_server.engine.roster import has_nothing_else
from warpfit_server.orders import Numbers

_compiled = numba_cache.njit(nogil=True)


class Own(NamedTuple):
    """The batch that comes again."""

    codes: NDArray[np.uint8]
    values: NDArray[np.uint64]
    """Their bits."""
    lengths: NDArray[np.uint32]
    parameter_counts: NDArray[np.uint32]
    parameters: int
    """Numbers in all parameter vectors."""
    vectors: int


class Means(NamedTuple):
    """What is needed to answer, beside the parameters."""

    functions: NDArray[np.int64]
    """From `warpfit_server.engine.cuda.submission.driver_functions`."""
    handles: Handles
    desk: Desk
    at_once: int
    """Rows of one launch."""
    own: Own
    sources: SlotSources
    slots: NDArray[Any]
    """See `warpfit_server.engine.cuda.one_replay.Step`, likewise the next two."""
    sums: NDArray[np.float64]
    closing: Closing
    rows: int
    """Of an evaluation."""
    cost: float
    """Nanoseconds of the device for one token with one parameter vector."""


def means_of(
    context: StreamContext,
    replay: Replay,
    sources: SlotSources,
    resident: ResidentDataset,
    evaluation: Evaluation,
    at_once: int,
    cost: float,
) -> Means:
    """Collect what `serve` needs.

    Args:
        context: a stream that nobody else uses.
        replay: a graph that nobody else uses, of the batch's kernels.
        sources: of the batch's slots.
        resident: the data set.
        evaluation: that asks for a loss alone; its batch is copied.
        at_once: rows of one launch.
        cost: see `Means`.

    """
    assert evaluation.loss is not None
    start, stop = evaluation.row_range(resident.dataset.layout)
    replay.tell(request(resident, start, stop))
    batch = evaluation.batch
    return Means(
        context.functions,
        Handles.of(context, replay),
        replay.desk,
        at_once,
        Own(
            batch.codes.copy(),
            batch.values.view(np.uint64).copy(),
            batch.lengths.copy(),
            batch.parameter_counts.copy(),
            len(batch.parameters),
            batch.vectors,
        ),
        sources,
        replay.slots,
        replay.sums,
        resident.closing(evaluation.loss, start, stop),
        stop - start,
        cost,
    )


# ------------------------------------------------------------------------------ compiled by Numba


@_compiled  # type: ignore[untyped-decorator]
def serve(
    means: Means,
    line: Line,
    kind: NDArray[np.uint8],
    memory: Memory,
    board: NDArray[np.int64],
    place: int,
) -> int:
    """See `warpfit_server.engine.cuda.standing.Duty`."""
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
    numbers = read_numbers(line)
    jobs = numbers.programs * numbers.vectors
    stop = numbers.losses_at + 8 * jobs
    if stop > len(memory.bytes) or not _is_same(memory, numbers, means.own):
        return 0
    status, is_told = replay_losses(
        means.functions,
        means.handles,
        means.desk,
        means.at_once,
        view_tokens(memory, numbers),
        means.sources,
        means.slots,
        means.sums,
        means.closing,
        # Every expression's kernel is there.
        Report(line.descriptor, began - numbers.submitted, began, 1, numbers.programs),
        memory.bytes[numbers.losses_at : stop].view(np.float64),
        is_first,
    )
    return int(numbers.tokens * numbers.vectors) if status == 0 and is_told else 0


@_compiled  # type: ignore[untyped-decorator]
def _is_same(memory: Memory, numbers: Numbers, own: Own) -> bool:
    """Whether the batch in a lane's memory is the one that comes again, parameters aside."""
    if numbers.tokens != len(own.codes) or numbers.programs != len(own.lengths):
        return False
    if numbers.vectors != own.vectors or numbers.parameters != own.parameters:
        return False
    tokens = view_tokens(memory, numbers)
    return not (
        differ(own.lengths, tokens.lengths)
        or differ(own.parameter_counts, tokens.parameter_counts)
        or differ(own.codes, tokens.codes)
        or differ(own.values, tokens.values.view(np.uint64))
    )
