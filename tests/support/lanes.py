"""What front doors and engines exchange, without processes: an evaluation, and a lane's ends."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np

from warpfit.dataset import Dataset
from warpfit.ir import Batch
from warpfit.request import Evaluation
from warpfit.workload import thesis_mix
from warpfit_server.channel import Channel
from warpfit_server.lanes import Lanes

DATA = Dataset.of(np.arange(40.0).reshape(10, 4), np.arange(10.0))


def an_evaluation(**changes: Any) -> Evaluation:
    """Seven programs on `DATA`, with some fields changed."""
    programs, parameters = thesis_mix(3, 7, variables=4)
    fields = {"dataset_id": DATA.content_id, "batch": Batch.of(programs, parameters)}
    return Evaluation(**{**fields, **changes})


def engine_ends(lanes: Lanes, count: int = 1) -> list[Channel]:
    """Open lanes; return the engine's ends."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
    lanes.open([ours for ours, _ in pairs])
    return [Channel(theirs) for _, theirs in pairs]
