"""A first evaluation on a lane, before anybody waits: compiled code is loaded, or made, by it."""

from __future__ import annotations

import socket

import numpy as np

from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.parse import parse
from warpfit.request import Evaluation, Loss, Tier
from warpfit_server.engine.base import Engine, Outputs, Reply
from warpfit_server.engine.lane_end import LaneEnd
from warpfit_server.engine.roster import Roster


def rehearse(engine: Engine) -> None:
    """Evaluate something on a lane that nobody is at the other end of."""
    dataset = Dataset.of(np.ones((1, 1)), np.ones(1))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lane = LaneEnd(theirs)
    try:
        engine.load(dataset)
        _evaluate(engine, dataset, lane, ours)
    finally:
        engine.unload(dataset.content_id)
        lane.close()


def _evaluate(engine: Engine, dataset: Dataset, lane: LaneEnd, other: socket.socket) -> None:
    batch = Batch.of([parse("x1")], [np.empty(0)])
    evaluation = Evaluation(
        dataset.content_id, batch, loss=Loss.MSE, values=False, tier=Tier.INTERPRETER
    )
    reply = Reply(lane.descriptor, Roster().reserve(""))
    flag = np.zeros(64, dtype=np.uint8)
    engine.evaluate(evaluation, Outputs(None, np.zeros((1, 1)), flag, lambda _: None, reply=reply))
    other.close()
    if reply.standing is not None:
        reply.standing.serve(lane.line, b"", flag)
        reply.standing.close()
