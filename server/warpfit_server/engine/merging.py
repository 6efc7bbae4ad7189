"""Merging: requests for losses that wait at the same time are evaluated as one batch.

The simple form:

    join the programs of the requests to one batch, evaluate it, and hand each its losses

This is worth it for batches that an engine has nothing for, which is what a search mostly sends.
Then each request costs a few copies, so that many small ones are served by one thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from ctypes import memmove
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.request import Evaluation, Tier
from warpfit_server.engine.interface import Engine
from warpfit_server.engine.native.arguments import array_address
from warpfit_server.engine.request import Request
from warpfit_server.ipc.messages import SubmitEvaluation
from warpfit_server.joined_batch import JoinedBatch

#: Most sketches in a set. When it is full, another one is begun, and the one before is kept.
_REMEMBERED: Final = 8192
#: Most tokens and losses of a request that is merged: more of them would be a long step.
_MOST_NUMBERS: Final = 1 << 17
#: Arrays of a batch that its sketch depends on, the bytes of an element, and most bytes of each.
_SKETCHED: Final = (("batch_lengths", 4), ("batch_codes", 1), ("batch_values", 8))
_MOST_BYTES: Final = 512


class Merger:
    """Tells which requests may be merged; safe to use from threads.

    An engine compiles what comes again, or keeps it lowered; to it the batches of merged requests
    are all new. So a batch that has come before runs by itself, unless it is to be interpreted in
    any case. That is told by a sketch, which depends on its first programs, so that nobody has to
    read a new batch twice.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sketches: set[int] = set()
        self._older: set[int] = set()

    def key(self, request: Request) -> Hashable:
        """Return the key that all requests of a step share; None if this one runs by itself."""
        problem = request.problem
        if not _is_for_losses(problem):
            return None
        layout = problem.segment_layout
        numbers = layout.tokens + layout.programs * layout.vectors
        is_short = layout.token_rows <= self._engine.step_size and numbers <= _MOST_NUMBERS
        if not is_short or not self._engine.merges(problem.dataset_id):
            return None
        asked = problem.dataset_id, problem.rows, problem.precision, problem.loss, problem.tier
        key = (*asked, layout.vectors)
        if problem.tier == Tier.AUTO.name and self._has_come(request, key):
            return None
        return key

    def _has_come(self, request: Request, key: Hashable) -> bool:
        """Note the sketch of a batch; return whether there was an equal one before.

        Two threads that do so at the same time may forget a sketch early, which does no harm.
        """
        layout, parts = request.problem.segment_layout, []
        for name, size in _SKETCHED:
            _, (count,), offset = layout.arrays[name]
            parts.append(request.segment.map[offset : offset + min(count * size, _MOST_BYTES)])
        sketch = hash((key, layout.programs, layout.tokens, *parts))
        if sketch in self._sketches:
            return True
        if len(self._sketches) >= _REMEMBERED:
            self._older, self._sketches = self._sketches, set()
        self._sketches.add(sketch)
        return sketch in self._older


def _is_for_losses(problem: SubmitEvaluation) -> bool:
    """Return whether it asks for named losses and nothing else, of any tier that takes new ones."""
    return (
        problem.loss is not None
        and problem.closing is None
        and not problem.outputs
        and not problem.alone
        and problem.fit is None
        and problem.tier != Tier.COMPILED.name
    )


def join(requests: Sequence[Request]) -> Evaluation:
    """Return one evaluation of the programs of requests with the same `Merger.key`, in turn.

    They are new to the engine, so that nothing is compiled for them: no engine needs to look.
    """
    first, segments = requests[0], [request.segment for request in requests]
    parts = [request.problem.segment_layout.batch_places(request.segment) for request in requests]
    problem = first.problem._replace(tier=Tier.INTERPRETER.name)
    batch = JoinedBatch(parts, problem.segment_layout.vectors, segments)
    return problem.evaluation(batch, first.segment)


def hand_out(losses: NDArray[np.float64], requests: Sequence[Request]) -> None:
    """Copy the losses of a joined evaluation, [programs, K], to the requests."""
    source = array_address(losses)
    for request in requests:
        target, size = request.problem.segment_layout.losses_place(request.segment)
        memmove(target, source, size)
        source += size
