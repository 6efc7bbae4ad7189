"""A client without a server, for tests of code that uses warpfit.

::

    with warpfit.testing.client() as client:
        data = client.upload(X, y)
        losses = client.evaluate(data, ["x1 + p1"], [[0.5]], loss="mse")

The calls are encoded and decoded as over the network, and answered by the NumPy reference in this
process. Make an `InProcessServer` to inject faults::

    server = warpfit.testing.InProcessServer()
    with warpfit.testing.client(server) as client:
        server.fail(calls=2)   # the next two calls fail with UNAVAILABLE, the client repeats them
        server.forget()        # all data sets are lost, the client uploads again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import warpfit
from warpfit import codec, reference
from warpfit.aio import AsyncClient
from warpfit.client import Client
from warpfit.config import ClientConfig, RetryPolicy
from warpfit.core import Call, Outgoing
from warpfit.dataset import Dataset, Layout
from warpfit.errors import (
    DatasetNotFoundError,
    InvalidArgumentError,
    UnavailableError,
    WarpfitError,
)
from warpfit.info import Device, Limits, ServerInfo
from warpfit.request import Evaluation, Timings

#: Repeats at once: a test should not wait.
FAST_RETRIES = RetryPolicy(total_seconds=5.0, initial_backoff=0.001, maximum_backoff=0.01)


class InProcessServer:
    """Answers the calls of the contract from the NumPy reference; can be told to fail.

    ``calls`` holds the name of every method called, in order, failed calls included.
    """

    def __init__(self, chunk_bytes: int = 1 << 20) -> None:
        """Make a server that sends values in pieces of ``chunk_bytes``."""
        self.calls: list[str] = []
        self._chunk_bytes = chunk_bytes
        self._datasets: dict[bytes, Dataset] = {}
        self._failures: list[WarpfitError] = []
        self._methods: dict[str, Callable[[Any], Iterator[Any]]] = {
            "UploadVariables": self._upload,
            "GetVariables": self._get,
            "ReleaseVariables": self._release,
            "Evaluate": self._evaluate,
            "GetServerInfo": self._info,
        }

    def fail(self, calls: int = 1, error: WarpfitError | None = None) -> None:
        """Let the next calls fail with ``error``, by default UNAVAILABLE."""
        fault = error or UnavailableError("the engine is restarting", "ENGINE_RESTARTING")
        self._failures += [fault] * calls

    def forget(self) -> None:
        """Lose all data sets, as after a restart."""
        self._datasets.clear()

    def holds(self, content_id: bytes) -> bool:
        """Tell whether a data set is resident."""
        return content_id in self._datasets

    def answer(self, call: Call) -> None:
        """Answer one call.

        Raises:
            WarpfitError: as a server's error arrives at a client.

        """
        self.calls.append(call.method)
        try:
            if self._failures:
                raise self._failures.pop(0)
            for message in self._methods[call.method](call.request):
                call.collector.add(message)
        except WarpfitError as error:
            raise _arrived(call, error) from error

    def _upload(self, messages: Iterable[Any]) -> Iterator[Any]:
        stream = iter(messages)
        layout, content_id = codec.upload_start(next(stream, b""))
        payload = b"".join(map(codec.upload_data, stream))
        self._datasets[content_id] = _received(layout, content_id, payload)
        yield codec.dataset_info(content_id, layout)

    def _get(self, message: Any) -> Iterator[Any]:
        dataset = self._dataset(message.content_id)
        yield codec.dataset_info(dataset.content_id, dataset.layout)

    def _release(self, message: Any) -> Iterator[Any]:
        del self._datasets[self._dataset(message.content_id).content_id]
        yield codec.release_response()

    def _info(self, _: Any) -> Iterator[Any]:
        device = Device("NumPy reference", threads=1)
        yield codec.info_to_message(
            ServerInfo(
                warpfit.__version__, "reference", (device,), Limits(), codec.operator_infos()
            )
        )

    def _evaluate(self, message: Any) -> Iterator[Any]:
        evaluation = codec.evaluation_from_message(message)
        dataset = self._dataset(evaluation.dataset_id)
        evaluation.check(dataset.layout)
        values = _values(evaluation, dataset)
        start = codec.result_start(dataset.layout, evaluation.shape(dataset.layout))
        yield codec.answer_from_bytes(start)
        if evaluation.values:
            payload = values.reshape(-1).data.cast("B")
            pieces = codec.value_pieces(payload, 0, self._chunk_bytes)
            yield from map(codec.answer_from_bytes, pieces)
        losses = _losses(evaluation, dataset, values)
        yield codec.answer_from_bytes(codec.result_end(losses, Timings()))

    def _dataset(self, content_id: bytes) -> Dataset:
        dataset = self._datasets.get(codec.check_content_id(content_id))
        if dataset is None:
            raise DatasetNotFoundError(
                f"data set {content_id.hex()[:12]} is not resident",
                "DATASET_NOT_FOUND",
                "Upload it again",
                "content_id",
            )
        return dataset


class _Transport:
    """Hands each call of a `Client` to a server object."""

    def __init__(self, server: InProcessServer) -> None:
        self._server = server

    def call(self, call: Call) -> None:
        self._server.answer(call)

    def close(self) -> None:
        """Nothing is open."""


class _AsyncTransport:
    """Hands each call of an `AsyncClient` to a server object."""

    def __init__(self, server: InProcessServer) -> None:
        self._server = server

    async def call(self, call: Call) -> None:
        self._server.answer(call)

    async def close(self) -> None:
        """Nothing is open."""


def client(server: InProcessServer | None = None, *, retry: RetryPolicy = FAST_RETRIES) -> Client:
    """Make a client of an in-process server, by default of a new one."""
    return Client(_Transport(server or InProcessServer()), ClientConfig(retry=retry))


def async_client(
    server: InProcessServer | None = None, *, retry: RetryPolicy = FAST_RETRIES
) -> AsyncClient:
    """Make an asyncio client of an in-process server, by default of a new one."""
    return AsyncClient(_AsyncTransport(server or InProcessServer()), ClientConfig(retry=retry))


def _received(layout: Layout, content_id: bytes, payload: bytes) -> Dataset:
    if len(payload) != layout.nbytes:
        raise InvalidArgumentError(
            f"the upload has {len(payload)} bytes, its layout needs {layout.nbytes}",
            "TRUNCATED_UPLOAD" if len(payload) < layout.nbytes else "SURPLUS_UPLOAD",
            "Send exactly the payload that the layout describes",
            "data",
        )
    matrix = np.frombuffer(payload, dtype=layout.dtype).reshape(layout.columns, layout.rows)
    dataset = Dataset(layout, matrix)
    if dataset.content_id != content_id:
        raise InvalidArgumentError(
            "content_id does not match the content",
            "BAD_DIGEST",
            "Hash header and payload as evaluator.proto says",
            "content_id",
        )
    return dataset


def _values(evaluation: Evaluation, dataset: Dataset) -> NDArray[Any]:
    """Values in wire order, [programs, K, rows], in the data set's dtype."""
    start, stop = evaluation.row_range(dataset.layout)
    variables = dataset.variables[:, start:stop]
    batch = evaluation.batch
    values = np.empty(evaluation.shape(dataset.layout), dtype=dataset.layout.dtype)
    for index in range(len(batch)):
        program = batch.program(index)
        for vector, parameters in enumerate(batch.program_parameters(index)):
            with np.errstate(over="ignore", invalid="ignore"):
                values[index, vector] = reference.evaluate_program(program, variables, parameters)
    return values


def _losses(
    evaluation: Evaluation, dataset: Dataset, values: NDArray[Any]
) -> NDArray[np.float64] | None:
    if evaluation.loss is None or dataset.target is None:
        return None
    rows = slice(*evaluation.row_range(dataset.layout))
    weights = None if dataset.weights is None else dataset.weights[rows]
    return reference.loss(evaluation.loss, values, dataset.target[rows], weights)


def _arrived(call: Call, error: WarpfitError) -> Exception:
    """Turn a server's error into what the client's transport would raise for it."""
    if isinstance(call.request, Outgoing) and call.request.failure is not None:
        return call.request.failure
    detail = codec.error_to_detail(error)
    return codec.error_from_status(
        error.status, error.message, [(codec.ERROR_METADATA_KEY, detail)]
    )
