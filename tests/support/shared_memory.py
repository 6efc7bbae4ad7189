"""A server with windows, and clients that put everything in them."""

from __future__ import annotations

import time

import grpc
import numpy as np
import pytest

import warpfit
from support.rpcs import OWN_CONNECTION, Caller, explained
from support.windows import open_windows
from warpfit import codec
from warpfit.v1 import evaluator_pb2 as pb

#: Everything in windows, and each client at a door of its own.
X = np.random.default_rng(5).normal(size=(20_000, 3))
DOORS = (1, 2)
CLIENTS = 6


class EverythingInWindows(warpfit.TransportConfig):
    """Small matrices, too; and each client has a connection of its own, to one of the doors."""

    def __init__(self) -> None:
        super().__init__(window_bytes=1)

    def channel_options(self) -> list[tuple[str, int]]:
        return [*super().channel_options(), *OWN_CONNECTION]


def served_windows(server) -> int:
    """Descriptors of windows in all processes of the server."""
    return sum(open_windows(process.pid) for process in server.family().values())


def eventually(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def into(request: pb.EvaluateRequest, piece: codec.Piece) -> bytes:
    """Ask for the matrices in a piece of a window."""
    return codec.evaluation_into(request.SerializeToString(), piece)


def refused(caller: Caller, method: str, request) -> tuple[str, str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        caller.send(method, request)
    return explained(caught.value)
