"""Every RPC of the contract as a raw call, so that tests can try each with any credentials."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import pytest

from warpfit import codec
from warpfit.dataset import Dataset
from warpfit.v1 import evaluator_pb2 as pb

SERVICE = "/warpfit.v1.Evaluator/"
X = np.random.default_rng(3).normal(size=(50, 2))
DATA = Dataset.of(X, X[:, 0], dtype="float64")
#: A connection of its own: several front ends then get some of them.
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def programs() -> pb.Programs:
    """One program: variable 0 times parameter 0."""
    return pb.Programs(
        codes=bytes([1, 2, 18]),
        values=np.zeros(3).tobytes(),
        lengths=np.array([3], "<u4").tobytes(),
        parameter_counts=np.array([1], "<u4").tobytes(),
        parameters=np.array([0.5]).tobytes(),
    )


def evaluate_request(content_id: bytes) -> pb.EvaluateRequest:
    """Ask for values."""
    return pb.EvaluateRequest(content_id=content_id, programs=programs(), values=True)


def optimize_request(content_id: bytes) -> pb.OptimizeRequest:
    """Ask for a short fit."""
    problem = pb.EvaluateRequest(content_id=content_id, programs=programs(), loss=pb.LOSS_MSE)
    return pb.OptimizeRequest(problem=problem, max_iterations=3)


#: Of each method: whether requests and answers are streams, and a request for a data set.
METHODS: dict[str, tuple[bool, bool, Callable[[Dataset], Any]]] = {
    "UploadVariables": (True, False, lambda d: codec.upload_messages(d, 64)),
    "OpenDataset": (False, False, lambda d: pb.OpenDatasetRequest(name="a.parquet")),
    "GetVariables": (False, False, codec.get_message),
    "Evaluate": (False, True, lambda d: evaluate_request(d.content_id)),
    "Optimize": (False, True, lambda d: optimize_request(d.content_id)),
    "ReleaseVariables": (False, False, codec.release_message),
    "GetServerInfo": (False, False, lambda d: pb.GetServerInfoRequest()),
}


@dataclass
class Caller:
    """Makes raw calls over one channel."""

    channel: grpc.Channel
    metadata: tuple[tuple[str, str], ...] = field(default=())

    def call(self, method: str, dataset: Dataset = DATA, timeout: float = 20.0) -> list[bytes]:
        """Call a method about a data set; return the messages of the answer."""
        return self.send(method, METHODS[method][2](dataset), timeout)

    def send(self, method: str, request: Any, timeout: float = 20.0) -> list[bytes]:
        """Call a method with a message, or messages, of one's own."""
        streams_in, streams_out, _ = METHODS[method]
        kind = "stream" if streams_in else "unary"
        make = getattr(self.channel, f"{kind}_{'stream' if streams_out else 'unary'}")
        request = map(_bytes, request) if streams_in else _bytes(request)
        answer = make(SERVICE + method)(request, timeout=timeout, metadata=self.metadata)
        return list(answer) if streams_out else [answer]

    def refused(self, method: str, *arguments: Any) -> tuple[str, str, str]:
        """Call a method that must fail; return status, reason and message."""
        with pytest.raises(grpc.RpcError) as caught:
            self.call(method, *arguments)
        return explained(caught.value)


def detail_of(error: Any) -> pb.ErrorDetail:
    """Return the server's details of a failed call; empty if the error is gRPC's own."""
    found = dict(error.trailing_metadata() or ()).get(codec.ERROR_METADATA_KEY)
    detail = None if found is None else codec.detail_of_status(found)
    return pb.ErrorDetail(message=error.details() or "") if detail is None else detail


def explained(error: Any) -> tuple[str, str, str]:
    """Status, reason and message of a failed call."""
    detail = detail_of(error)
    return error.code().name, detail.reason, detail.message


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata with a token."""
    return (("authorization", f"Bearer {token}"),)


def _bytes(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
