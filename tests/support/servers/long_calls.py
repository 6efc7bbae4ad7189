"""Evaluations that would keep a small server busy for many seconds, unless they are cancelled."""

from __future__ import annotations

from typing import Any, Final

import grpc
import numpy as np

import warpfit
from support.servers.rpcs import SERVICE
from warpfit import codec
from warpfit.calls.arguments import build_evaluation

WIDE: Final = np.random.default_rng(2).normal(size=(100_000, 2))
#: Parsed once: to parse it for each program of a batch takes longer than a test should.
LONG: Final = warpfit.parse("+".join(f"sin(x1*{k})" for k in range(1, 300)))


def long_request(data: warpfit.Data, programs: int = 400) -> bytes:
    """Serialize the losses of as many long programs, on data such as `WIDE`."""
    return request(data, [LONG] * programs, loss="mse")


def request(data: warpfit.Data, programs: Any, **options: Any) -> bytes:
    """Serialize any evaluation; ``options`` are those of `warpfit.Client.run`."""
    evaluation, _ = build_evaluation(data, programs, None, None, options)
    return codec.evaluation_to_message(evaluation).SerializeToString()


def start(channel: grpc.Channel, message: bytes, method: str = "Evaluate", **options: Any) -> Any:
    """Start a call and return it; nothing waits for the answer."""
    return channel.unary_stream(SERVICE + method)(message, **{"timeout": 60.0} | options)
