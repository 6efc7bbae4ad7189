"""Calls of every kind: raw RPCs with any credentials, whose answers are compared, and long ones."""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Final

import grpc
import numpy as np
import pytest

import warpfit
from support.random_programs import thesis_mix
from warpfit import codec
from warpfit.calls.arguments import build_evaluation
from warpfit.dataset import Dataset
from warpfit.v1 import evaluator_pb2 as pb

SERVICE = "/warpfit.v1.Evaluator/"
X = np.random.default_rng(3).normal(size=(50, 2))
DATA = Dataset.of(X, X[:, 0], dtype="float64")
#: A connection of its own: several front ends then get some of them.
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


def programs() -> pb.Programs:
    """One program: variable 0 times parameter 0."""
    one, three = (np.array([number], "<u4").tobytes() for number in (1, 3))
    made = pb.Programs(codes=bytes([1, 2, 18]), values=bytes(24), lengths=three)
    made.parameter_counts, made.parameters = one, np.array([0.5]).tobytes()
    return made


def evaluate_request(content_id: bytes, **wishes: Any) -> pb.EvaluateRequest:
    """Ask for values, unless it is told otherwise."""
    wishes = wishes or {"values": True}
    return pb.EvaluateRequest(content_id=content_id, programs=programs(), **wishes)


def optimize_request(content_id: bytes) -> pb.OptimizeRequest:
    """Ask for a short fit."""
    problem = evaluate_request(content_id, loss=pb.LOSS_MSE)
    return pb.OptimizeRequest(problem=problem, max_iterations=3)


def search_request(content_id: bytes, **given: Any) -> pb.SearchRequest:
    """Ask for a small search, of one generation unless it is told otherwise."""
    budget = {} if given else {"max_generations": 1}
    small = {"population": 64, "islands": 1, "no_pairs": True}
    return pb.SearchRequest(content_id=content_id, **{**small, **budget, **given})


#: Of each method: whether requests and answers are streams, and a request for a data set.
METHODS: dict[str, tuple[bool, bool, Callable[[Dataset], Any]]] = {
    "UploadVariables": (True, False, lambda d: codec.upload_messages(d, 64)),
    "OpenDataset": (False, False, lambda d: pb.OpenDatasetRequest(name="a.parquet")),
    "GetVariables": (False, False, codec.get_message),
    "Evaluate": (False, True, lambda d: evaluate_request(d.content_id)),
    "Optimize": (False, True, lambda d: optimize_request(d.content_id)),
    "Search": (False, True, lambda d: search_request(d.content_id)),
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

    def begin(self, method: str, message: Any) -> Any:
        """Begin a call, and wait for the first message of its answer; return gRPC's call."""
        call = start(self.channel, _bytes(message), method, metadata=self.metadata, timeout=None)
        next(call)
        return call

    def refusal(self, method: str, about: Any = DATA) -> tuple[str, pb.ErrorDetail]:
        """Call a method that must fail about a data set, or with a message; return what it says."""
        with pytest.raises(grpc.RpcError) as caught:
            self.call(method, about) if isinstance(about, Dataset) else self.send(method, about)
        return caught.value.code().name, detail_of(caught.value)

    def refused(self, method: str, about: Any = DATA) -> tuple[str, str, str]:
        """Call a method that must fail, likewise; return status, reason and message."""
        status, detail = self.refusal(method, about)
        return status, detail.reason, detail.message


def detail_of(error: Any) -> pb.ErrorDetail:
    """Return the server's details of a failed call; empty if the error is gRPC's own."""
    found = dict(error.trailing_metadata() or ()).get(codec.ERROR_METADATA_KEY)
    detail = None if found is None else codec.detail_of_status(found, error.code().name)
    return pb.ErrorDetail(message=error.details() or "") if detail is None else detail


def explained(error: Any) -> tuple[str, str, str]:
    """Status, reason and message of a failed call."""
    detail = detail_of(error)
    return error.code().name, detail.reason, detail.message


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def async_rows(address: str, **options: Any) -> int:
    """Rows of values that the asyncio client gets for a table of 50."""

    async def rows() -> int:
        async with warpfit.connect_async(address, **options) as client:
            return len(await client.evaluate(await client.upload(X), ["x1"]))

    return asyncio.run(rows())


def _bytes(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


_SEED = 5
#: Expressions to fit, and how many parameters each has.
_FITTED = {"p1*x1 + p2": 2, "p1*exp(p2*x2) + p3": 3, "sin(p1*x1) * p2": 2}
_FITTED["p1*x1^2 + p2*x3 + p3"] = 3


def table(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Four variables and a target that the fits can describe in part."""
    X = np.random.default_rng(_SEED).uniform(0.5, 2.0, (rows, 4)).astype(np.float32)
    return X, np.sin(X[:, 0]) + 0.1 * X[:, 1]


def answers(
    client: warpfit.Client, rows: int, programs: int, fits: int, **upload: Any
) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Ask for every kind of output; return hashes of all bits of the answers, and their devices.

    A tenth of the programs are asked for outputs with a number for each row.
    """
    data = client.upload(*table(rows), **upload)
    expressions, parameters = thesis_mix(_SEED, programs, variables=4)
    few = expressions[: programs // 10], parameters[: programs // 10]
    calls: dict[str, dict[str, Any]] = {
        "losses": {"loss": "mse"},
        "fast": {"loss": "rmse", "precision": "fast"},
        "gradients": {"loss": "mae", "gradient": True},
        "variables": {"loss": "mse", "variable_gradient": True},
        "statistics": {"loss": "mse", "linear_scaling": True, "reductions": True},
        "some rows": {"loss": "huber", "correlation": True, "rows": (rows // 5, rows - 7)},
        "values": {"values": True},
        "jacobian": {"jacobian": True, "values": True},
    }
    found, devices = {}, {}
    for name, options in calls.items():
        batch = few if "values" in options else (expressions, parameters)
        answer = client.run(data, *batch, tier="interpreter", **options)
        found[name], devices[name] = _digest(answer), set(answer.timings.device.split(","))
    starts = np.random.default_rng(_SEED).uniform(0.5, 1.5, (2, 3))
    texts = [text for text, _ in zip(cycle(_FITTED), range(fits), strict=False)]
    given = [starts[:, : _FITTED[text]] for text in texts]
    asked = {"max_iterations": 8, "covariance": True, "standard_errors": True}
    for method in ("lm", "bfgs"):
        fit = client.optimize(data, texts, given, method=method, **asked)
        found[method], devices[method] = _digest(fit), set(fit.timings.device.split(","))
    client.release(data, everywhere=True)
    return found, devices


def _digest(answer: Any) -> str:
    """Hash every array of an answer."""
    found = hashlib.sha256()
    for name in type(answer).__slots__:
        field = getattr(answer, name)
        for array in field if isinstance(field, list | tuple) else [field]:
            if isinstance(array, np.ndarray):
                text = array.astype(str) if array.dtype == object else array
                found.update(np.ascontiguousarray(text).tobytes())
    return found.hexdigest()


WIDE: Final = np.random.default_rng(2).normal(size=(100_000, 2))
#: Parsed once: to parse it for each program of a batch takes longer than a test should.
LONG: Final = warpfit.parse("+".join(f"sin(x1*{k})" for k in range(1, 300)))


def long_request(data: Any, programs: int = 400) -> bytes:
    """Serialize the losses of as many long programs, on data such as `WIDE`."""
    return request(data, [LONG] * programs, loss="mse")


def request(data: Any, programs: Any, **options: Any) -> bytes:
    """Serialize any evaluation; ``options`` are those of `warpfit.Client.run`."""
    evaluation, _ = build_evaluation(data, programs, None, None, options)
    return codec.evaluation_to_bytes(evaluation, pieces=True)


def start(channel: grpc.Channel, message: bytes, method: str = "Evaluate", **options: Any) -> Any:
    """Start a call and return it; nothing waits for the answer."""
    return channel.unary_stream(SERVICE + method)(message, **{"timeout": 60.0} | options)
