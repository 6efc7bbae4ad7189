"""Clients without a server, for tests of code that uses warpfit.

::

    with warpfit.testing.client() as client:
        data = client.upload(X, y)
        losses = client.evaluate(data, ["x1 + p1"], [[0.5]], loss="mse")

Calls are encoded and decoded as over the network, and answered by the NumPy reference in this
process; fits need the server's package, whose algorithms they use. An `InProcessServer` can fail on
request::

    server = warpfit.testing.InProcessServer()
    with warpfit.testing.client(server) as client:
        server.fail(calls=2)   # the next two calls fail with UNAVAILABLE; the client retries
        server.forget()        # all data sets are lost; the client uploads again
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np

import warpfit
from warpfit import codec, search_codec
from warpfit.aio import AsyncClient
from warpfit.client import Client
from warpfit.dataset import Dataset
from warpfit.embedded import require_server
from warpfit.errors import (
    DatasetNotFoundError,
    InvalidArgumentError,
    UnavailableError,
    UnimplementedError,
    WarpfitError,
)
from warpfit.expressions import reference
from warpfit.ir import Batch, Program
from warpfit.request import OUTPUTS, Timings
from warpfit.searching import Front, SearchProgress, SearchReason
from warpfit.server_info import Device, Limits, ServerInfo
from warpfit.transport.call import Request, UploadStream
from warpfit.transport.connection import Connection, RetryPolicy, Target
from warpfit.transport.failover import Failover
from warpfit.v1 import evaluator_pb2 as pb

#: Retries with short pauses, for tests.
FAST_RETRIES = RetryPolicy(total_seconds=5.0, initial_backoff=0.001, maximum_backoff=0.01)


class InProcessServer:
    """Answers calls with the NumPy reference; `fail` and `forget` inject faults.

    ``calls`` lists the method of each call in order, failed calls included.
    """

    def __init__(self, chunk_bytes: int = 1 << 20) -> None:
        """Make a server that sends values in pieces of ``chunk_bytes``."""
        self.calls: list[str] = []
        self._chunk_bytes = chunk_bytes
        self._datasets: dict[bytes, Dataset] = {}
        self._failures: list[WarpfitError] = []

    def fail(self, calls: int = 1, error: WarpfitError | None = None) -> None:
        """Make the next calls fail with ``error``, by default UNAVAILABLE."""
        fault = error or UnavailableError("the engine is restarting", "ENGINE_RESTARTING")
        self._failures += [fault] * calls

    def forget(self) -> None:
        """Lose all data sets, as after a restart."""
        self._datasets.clear()

    def holds(self, content_id: bytes) -> bool:
        """Tell whether a data set is resident."""
        return content_id in self._datasets

    def answer(self, request: Request) -> Any:
        """Answer one request; return the result of ``request.read``.

        Raises:
            WarpfitError: the error as a client receives it.
        """
        self.calls.append(request.method)
        try:
            if self._failures:
                raise self._failures.pop(0)
            return request.read(self._messages(request.method, request.message))
        except WarpfitError as error:  # as a client's transport would raise it
            failure = request.message.failure if isinstance(request.message, UploadStream) else None
            if failure is None:
                metadata = [(codec.ERROR_METADATA_KEY, codec.error_to_status(error))]
                failure = codec.error_from_status(error.status, error.message, metadata)
        raise failure

    def _messages(self, method: str, message: Any) -> Iterator[Any]:
        """Yield the messages of an answer."""
        match method:
            case "UploadVariables":
                stream = iter(message)
                layout, content_id = codec.upload_start(next(stream, b""))
                payload = b"".join(map(codec.upload_data, stream))
                if hashlib.sha256(layout.header() + payload).digest() != content_id:
                    raise InvalidArgumentError(
                        "content_id does not match the content",
                        "BAD_DIGEST",
                        "Hash header and payload as evaluator.proto says",
                        "content_id",
                    )
                shape = layout.columns, layout.rows
                matrix = np.frombuffer(payload, dtype=layout.dtype).reshape(shape)
                self._datasets[content_id] = Dataset.resident(layout, matrix, content_id)
                yield pb.DatasetInfo.FromString(codec.dataset_info(content_id, layout))
            case "OpenDataset":
                what = "this server reads no files"
                raise UnimplementedError(what, "NO_DATA_ROOT", "Upload the data")
            case "GetVariables":
                dataset = self._dataset(message.content_id)
                described = codec.dataset_info(dataset.content_id, dataset.layout)
                yield pb.DatasetInfo.FromString(described)
            case "ReleaseVariables":
                dataset = self._dataset(message.content_id)
                if message.everywhere:  # otherwise others may use it, and there is room
                    del self._datasets[dataset.content_id]
                yield codec.release_response()
            case "GetServerInfo":
                yield codec.info_to_message(
                    ServerInfo(
                        warpfit.__version__,
                        "reference",
                        (Device("NumPy reference", threads=1),),
                        Limits(),
                        codec.operator_infos(),
                        contract=codec.CONTRACT,
                    )
                )
            case "Evaluate":
                yield from self._evaluate(message)
            case "Optimize":
                yield from self._optimize(message)
            case "Search":
                yield from self._search(message)

    def _evaluate(self, message: bytes) -> Iterator[Any]:
        evaluation = codec.evaluation_from_bytes(message)
        dataset = self._dataset(evaluation.dataset_id)
        evaluation.check(dataset.layout)
        result = reference.evaluate(evaluation, dataset)
        message = codec.result_start(dataset.layout, evaluation.shape(dataset.layout))
        for name, matrix in (("values", result.values), ("jacobian", result.jacobian)):
            if matrix is not None and matrix.size:
                payload = matrix.reshape(-1).data.cast("B")
                for piece in codec.array_pieces(name, payload, 0, self._chunk_bytes):
                    yield codec.answer_from_bytes(message)
                    message = piece
        others = {each.name: getattr(result, each.name) for each in OUTPUTS if not each.is_of_data}
        present = {name: array for name, array in others.items() if array is not None}
        message += codec.result_end(Timings(), present)
        yield codec.answer_from_bytes(message)

    def _optimize(self, message: bytes) -> Iterator[Any]:
        require_server()
        request = codec.fit_from_bytes(message)
        dataset = self._dataset(request.problem.dataset_id)
        request.check(dataset.layout)
        # Named by a text: the client imports nothing of the server, which imports the client.
        fits = import_module("warpfit_server.reference_fits")
        result, reports = fits.fit(request, dataset)
        for progress in reports:
            yield codec.fit_answer_from_bytes(codec.progress_to_bytes(progress))
        yield codec.fit_answer_from_bytes(codec.fit_to_bytes(result))

    def _search(self, message: pb.SearchRequest) -> Iterator[Any]:
        """Try the constant and a + b x of each variable; say so once, and end."""
        request = search_codec.search_from_message(message)
        dataset = self._dataset(request.dataset_id)
        request.check(dataset.layout)
        assert dataset.target is not None
        rows = slice(*request.row_range(dataset.layout))
        target = dataset.target[rows].astype(np.float64)
        p, columns = Program.parameter, request.columns(dataset.layout)
        found = [(float(target.var()), p(0), [float(target.mean())])]
        for column in columns:
            values = dataset.variables[column][rows].astype(np.float64)
            pairs = np.stack([values, np.ones(len(values))], axis=1)
            fitted, *_ = np.linalg.lstsq(pairs, target, rcond=None)
            loss = float(np.square(target - pairs @ fitted).mean())
            scaled = Program.apply("mul", Program.variable(column), p(0))
            found.append((loss, Program.apply("add", scaled, p(1)), fitted.tolist()))
        best = min(found[1:], key=lambda one: one[0])
        kept = found[:1] if best[0] >= found[0][0] else [found[0], best]
        batch = Batch.of([one[1] for one in kept], [one[2] for one in kept])
        sizes = np.arange(1, 1 + len(kept))
        front = Front(batch, sizes, np.array([one[0] for one in kept]))
        progress = SearchProgress(front, formulas=len(found), distinct=len(found))
        reasons = {
            SearchReason.GENERATIONS: request.max_generations,
            SearchReason.FORMULAS: request.max_formulas,
            SearchReason.TIME: request.max_seconds,
        }
        last = replace(
            progress,
            seconds=request.max_seconds,
            generations=request.max_generations,
            reason=next(reason for reason, limit in reasons.items() if limit),
        )
        end = search_codec.search_end(Timings())
        for data in (
            search_codec.progress_to_bytes(progress),
            search_codec.progress_to_bytes(last) + end,
        ):
            yield pb.SearchResponse.FromString(data)

    def _dataset(self, content_id: bytes) -> Dataset:
        dataset = self._datasets.get(codec.check_content_id(content_id))
        if dataset is None:
            raise DatasetNotFoundError
        return dataset


class _InProcessTransport:
    """Transport of a `Client` to servers in this process."""

    def __init__(self, servers: Mapping[str, InProcessServer]) -> None:
        self._servers = servers

    def call(self, request: Request) -> Any:
        return self._servers[request.server].answer(request)

    def forget(self, address: str) -> None:
        """Nothing is open."""

    def close(self) -> None:
        """Nothing is open."""


#: A server, or several by their addresses.
InProcess: TypeAlias = InProcessServer | Mapping[str, InProcessServer]


def client(server: InProcess | None = None, *, retry: RetryPolicy = FAST_RETRIES) -> Client:
    """Make a client of an in-process server, by default of a new one, or of several."""
    servers = server if isinstance(server, Mapping) else {"here:1": server or InProcessServer()}
    target = Target(lambda: tuple(servers), tuple(servers), ", ".join(servers))
    connection = Connection(target, retry)
    return Client(Failover.of(_InProcessTransport(servers), connection))


def async_client(
    server: InProcess | None = None, *, retry: RetryPolicy = FAST_RETRIES
) -> AsyncClient:
    """Make an asyncio client of an in-process server, by default of a new one, or of several."""
    return AsyncClient(client(server, retry=retry))
