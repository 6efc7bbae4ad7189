"""First evaluations on a lane, before anybody waits: compiled code is loaded, or made, by them.

Numba makes a function when it is first called with arguments of some types, which takes seconds
unless it lies in the cache, and meanwhile whoever calls another function for the first time waits.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss, Tier
from warpfit_server.engine.base import Engine, Outputs, Reply
from warpfit_server.engine.lane_end import LaneEnd
from warpfit_server.engine.roster import Roster


def rehearse(engine: Engine, tiers: Sequence[Tier] = (Tier.INTERPRETER, Tier.COMPILED)) -> None:
    """Evaluate something in each data type, on lanes that nobody is at the other end of."""
    for dtype in (np.float32, np.float64):
        dataset = Dataset.of(np.ones((1, 1)), np.ones(1), dtype=dtype)
        engine.load(dataset)
        try:
            for tier in tiers:
                _serve(engine, dataset, tier)
        finally:
            engine.unload(dataset.content_id)


def _serve(engine: Engine, dataset: Dataset, tier: Tier) -> None:
    """Have an evaluation answered, and the lane served until it turns out to be closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lane = LaneEnd(theirs)
    try:
        reply = Reply(lane.descriptor, Roster().reserve(""))
        flag = np.zeros(64, dtype=np.uint8)
        # As from a lane: arrays that may be written to.
        batch = Batch.of([parse("x1 + p1")], [np.ones(1)]).copy()
        evaluation = Evaluation(dataset.content_id, batch, loss=Loss.MSE, values=False, tier=tier)
        outputs = Outputs(None, np.zeros((1, 1)), flag, lambda _: None)
        engine.evaluate(evaluation, outputs)
        # When it comes again, it is compared with what was prepared.
        engine.evaluate(evaluation, replace(outputs, reply=reply))
        ours.close()
        if reply.standing is not None:
            reply.standing.serve(lane.line, b"", flag)
            reply.standing.close()
    finally:
        ours.close()
        lane.close()
