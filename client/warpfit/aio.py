"""The asyncio client: the same methods as `warpfit.Client`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar, Unpack, overload

from numpy.typing import NDArray

from warpfit.calls.arguments import EvaluateOptions, OpenOptions, SharedOptions, UploadOptions
from warpfit.calls.batches import Parameters
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.calls.fit_arguments import FitOptions
from warpfit.calls.operations import ClientOperations
from warpfit.calls.results import Answer, Fit
from warpfit.calls.simplification import Simplification, SimplifyOptions
from warpfit.client import Client
from warpfit.server_info import ServerInfo
from warpfit.transport.addresses import Address
from warpfit.transport.call import Cancellation
from warpfit.transport.connection import Connection
from warpfit.transport.security import TlsConfig
from warpfit.transport.settings import RetryPolicy, TransportConfig

#: Most calls of one client that are under way at a time; others wait for a thread.
_MOST_CALLS: Final = 128
P = ParamSpec("P")
T = TypeVar("T")


class AsyncUploadedDataset(DatasetHandle):
    """Handle that releases the data set when its ``async with`` block ends."""

    _client: AsyncClient

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.release(self)


class AsyncClient:
    """`warpfit.Client` for asyncio; any number of tasks may share it.

    Arguments, results and errors of each method are those of the method of the same name there. The
    calls run in threads, at most 128 at a time: so do the callbacks of ``progress``. Cancelling a
    task cancels its call on the server, too.
    """

    def __init__(self, client: Client) -> None:
        """Use `warpfit.connect_async`, or `warpfit.testing.async_client` without a server."""
        self._client = client
        self._threads = ThreadPoolExecutor(_MOST_CALLS, "warpfit")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the blocking client; a copy connects anew."""
        return type(self), (self._client,)

    async def upload(
        self, X: Any, y: Any = None, weights: Any = None, **options: Unpack[UploadOptions]
    ) -> AsyncUploadedDataset:
        """Make a data set resident on the server."""
        dataset = await self._run(ClientOperations.upload, X, y, weights, options)
        return AsyncUploadedDataset(dataset, self)

    async def open(self, name: str, **options: Unpack[OpenOptions]) -> AsyncUploadedDataset:
        """Have the server read a data set from a Parquet file of its own."""
        return AsyncUploadedDataset(await self._run(ClientOperations.open, name, options), self)

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
        return await self._run(ClientOperations.run, data, expressions, parameters, values, options)

    async def optimize(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[FitOptions],
    ) -> Fit:
        """Fit the parameters of expressions on the server, all of them at once."""
        return await self._run(ClientOperations.optimize, data, expressions, parameters, options)

    async def simplify(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[SimplifyOptions],
    ) -> Simplification:
        """Shorten formulas as far as they fit the data hardly worse."""
        return await self._run(ClientOperations.simplify, data, expressions, parameters, options)

    async def release(self, data: DatasetHandle) -> None:
        """Release a data set; the handle stays usable."""
        await self._run(ClientOperations.release, data)

    async def info(self, timeout: float | None = None) -> ServerInfo:
        """Return the server's version, engine, devices, limits and operator table."""
        return await self._run(ClientOperations.info, timeout)

    async def wait_ready(self, timeout: float = 30.0) -> ServerInfo:
        """Wait until the server answers."""
        return await self._run(ClientOperations.wait_ready, timeout)

    async def close(self) -> None:
        """Close the connection."""
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(
        self, operation: Callable[Concatenate[ClientOperations, P], T], *args: P.args, **_: P.kwargs
    ) -> T:
        cancellation = Cancellation()
        call = partial(operation, self._client._operations.under(cancellation), *args)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        finally:
            cancellation.cancel()


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
    """Make an asyncio client; arguments and errors as for `warpfit.connect`."""
    return AsyncClient(
        Client.of(Connection.of(address, token, tls, retry, transport, wait, replicas))
    )
