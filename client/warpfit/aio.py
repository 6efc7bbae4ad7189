"""The asyncio client: the same methods as `warpfit.Client`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Self, TypeVar, Unpack, overload

from numpy.typing import NDArray

from warpfit.calls.arguments import EvaluateOptions, OpenOptions, SharedOptions, UploadOptions
from warpfit.calls.attempts import Action, Forget, Gather, Operation, Sleep
from warpfit.calls.batches import Parameters
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.calls.fit_arguments import FitOptions
from warpfit.calls.operations import ClientOperations
from warpfit.calls.results import Answer, Fit
from warpfit.calls.simplification import Simplification, SimplifyOptions
from warpfit.errors import WarpfitError
from warpfit.server_info import ServerInfo
from warpfit.transport.addresses import Address
from warpfit.transport.call import Call
from warpfit.transport.channel import AsyncGrpcTransport, AsyncTransport
from warpfit.transport.connection import Connection
from warpfit.transport.security import TlsConfig
from warpfit.transport.settings import RetryPolicy, TransportConfig

T = TypeVar("T")


class AsyncUploadedDataset(DatasetHandle):
    """Handle that releases the data set when its ``async with`` block ends."""

    _client: AsyncClient

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.release(self)


class AsyncClient:
    """`warpfit.Client` for asyncio; any number of tasks of one event loop may share it.

    Arguments, results and errors of each method are those of the method of the same name there.
    """

    def __init__(self, transport: AsyncTransport, connection: Connection) -> None:
        """Use `warpfit.connect_async`, or `warpfit.testing.async_client` without a server."""
        self._transport = transport
        self._connection = connection
        self._operations = ClientOperations.of(connection)

    @classmethod
    def of(cls, connection: Connection) -> Self:
        """Make a client over gRPC."""
        return cls(AsyncGrpcTransport(connection), connection)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the arguments of the connection, a token among them; a copy connects anew."""
        return type(self).of, (self._connection,)

    async def upload(
        self, X: Any, y: Any = None, weights: Any = None, **options: Unpack[UploadOptions]
    ) -> AsyncUploadedDataset:
        """Make a data set resident on the server."""
        dataset = await self._run(self._operations.upload(X, y, weights, options))
        return AsyncUploadedDataset(dataset, self)

    async def open(self, name: str, **options: Unpack[OpenOptions]) -> AsyncUploadedDataset:
        """Have the server read a data set from a Parquet file of its own."""
        return AsyncUploadedDataset(await self._run(self._operations.open(name, options)), self)

    @overload
    async def evaluate(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[SharedOptions],
    ) -> NDArray[Any]: ...

    @overload
    async def evaluate(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[EvaluateOptions],
    ) -> Any: ...

    async def evaluate(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[EvaluateOptions],
    ) -> Any:
        """Evaluate expressions: their values, or a loss of each if ``loss=`` is given."""
        return (await self.run(data, expressions, parameters, **options)).array

    async def run(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        *,
        values: bool | None = None,
        **options: Unpack[EvaluateOptions],
    ) -> Answer:
        """Evaluate expressions and return an `Answer` with the server's timings."""
        operation = self._operations.run(data, expressions, parameters, values, options)
        return await self._run(operation)

    async def optimize(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[FitOptions],
    ) -> Fit:
        """Fit the parameters of expressions on the server, all of them at once."""
        operation = self._operations.optimize(data, expressions, parameters, options)
        return await self._run(operation)

    async def simplify(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[SimplifyOptions],
    ) -> Simplification:
        """Shorten formulas as far as they fit the data hardly worse."""
        return await self._run(self._operations.simplify(data, expressions, parameters, options))

    async def release(self, data: DatasetHandle) -> None:
        """Release a data set; the handle stays usable."""
        await self._run(self._operations.release(data))

    async def info(self, timeout: float | None = None) -> ServerInfo:
        """Return the server's version, engine, devices, limits and operator table."""
        return await self._run(self._operations.info(timeout))

    async def wait_ready(self, timeout: float = 30.0) -> ServerInfo:
        """Wait until the server answers."""
        return await self._run(self._operations.wait_ready(timeout))

    async def close(self) -> None:
        """Close the connection."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self, operation: Operation[T]) -> T:
        try:
            action = next(operation)
            while True:
                try:
                    outcome = await self._perform(action)
                except WarpfitError as error:
                    action = operation.throw(error)
                else:
                    action = operation.send(outcome)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            operation.close()

    async def _perform(self, action: Action) -> Any:
        if isinstance(action, Call):
            return await self._transport.call(action)
        if isinstance(action, Sleep):
            return await asyncio.sleep(action.seconds)
        if isinstance(action, Gather):
            return await self._gather(action.operations)
        if isinstance(action, Forget):
            return await self._transport.forget(action.address)
        return await asyncio.to_thread(action.function)

    async def _gather(self, operations: Sequence[Operation[Any]]) -> list[Any]:
        tasks = [asyncio.ensure_future(self._run(operation)) for operation in operations]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


def connect_async(
    address: Address = None,
    *,
    token: str | None = None,
    tls: TlsConfig | bool | None = None,
    retry: RetryPolicy | None = None,
    transport: TransportConfig | None = None,
    wait: float | None = None,
    replicas: int = 2,
) -> AsyncClient:
    """Make an asyncio client inside a running event loop; arguments as for `warpfit.connect`."""
    return AsyncClient.of(Connection.of(address, token, tls, retry, transport, wait, replicas))
