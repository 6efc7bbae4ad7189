"""The asyncio client: the same methods as `warpfit.Client`, awaited."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol, Self, TypeVar, Unpack

import grpc

from warpfit.calls.arguments import EvaluateOptions, Parameters, UploadOptions
from warpfit.calls.core import Call, Operation, Operations, Sleep, Step
from warpfit.calls.data import Answer, Data, Fit
from warpfit.calls.fit_arguments import FitOptions
from warpfit.calls.info import ServerInfo
from warpfit.dataset import Dataset
from warpfit.errors import WarpfitError
from warpfit.transport.channel import Methods, check_address, client_closed, failure
from warpfit.transport.security import Security, TlsConfig
from warpfit.transport.settings import ClientConfig, RetryPolicy, TransportConfig

T = TypeVar("T")


class AsyncTransport(Protocol):
    """Carries calls to a server and answers back."""

    async def call(self, call: Call) -> None:
        """Perform one call and hand each message of the answer to its collector.

        Raises:
            WarpfitError: if the call failed.

        """

    async def close(self) -> None:
        """Close the connection; calls in flight fail."""


class AsyncGrpcTransport:
    """Calls over a gRPC channel of the running event loop."""

    def __init__(
        self, address: str, config: TransportConfig, security: Security | None = None
    ) -> None:
        check_address(address)
        security = security or Security()
        self._closed = False
        self._metadata = security.metadata()
        self._channel = security.channel(grpc.aio, address, config.channel_options())
        self._methods = Methods(self._channel)

    async def call(self, call: Call) -> None:
        """Perform one call; cancelling the task cancels it on the server too."""
        if self._closed:
            raise client_closed()
        method = self._methods.of(call)
        rpc = method(call.request, timeout=call.timeout, metadata=self._metadata)
        try:
            if hasattr(rpc, "__aiter__"):
                async for message in rpc:
                    call.collector.add(message)
            else:
                call.collector.add(await rpc)
        except grpc.RpcError as error:
            raise failure(call, error) from error
        except BaseException:
            rpc.cancel()
            raise

    async def close(self) -> None:
        """Close the channel."""
        self._closed = True
        await self._channel.close(grace=None)


class AsyncUploadedData(Data):
    """Data handle that gives the data set back when its ``async with`` block ends."""

    def __init__(self, dataset: Dataset, client: AsyncClient) -> None:
        super().__init__(dataset)
        self._client = client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.release(self)


class AsyncClient:
    """`warpfit.Client` for asyncio; any number of tasks of one event loop may share it.

    Arguments, results and errors of each method are those of the same method there.
    """

    def __init__(self, transport: AsyncTransport, config: ClientConfig) -> None:
        """Use `warpfit.connect_async`, or `warpfit.testing.async_client` without a server."""
        self._transport = transport
        self._operations = Operations(config)

    async def upload(
        self,
        X: Any,
        y: Any = None,
        weights: Any = None,
        **options: Unpack[UploadOptions],
    ) -> AsyncUploadedData:
        """Make a data set resident on the server."""
        dataset = await self._drive(self._operations.upload(X, y, weights, options))
        return AsyncUploadedData(dataset, self)

    async def evaluate(
        self,
        data: Data,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[EvaluateOptions],
    ) -> Any:
        """Evaluate expressions: their values, or a loss of each if ``loss=`` is given."""
        return (await self.run(data, expressions, parameters, **options)).array

    async def run(
        self,
        data: Data,
        expressions: Any,
        parameters: Parameters = None,
        *,
        values: bool | None = None,
        **options: Unpack[EvaluateOptions],
    ) -> Answer:
        """Evaluate expressions and return everything: values, losses and timings."""
        operation = self._operations.run(data, expressions, parameters, values, options)
        return await self._drive(operation)

    async def optimize(
        self,
        data: Data,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[FitOptions],
    ) -> Fit:
        """Fit the parameters of expressions on the server, all of them at once."""
        operation = self._operations.optimize(data, expressions, parameters, options)
        return await self._drive(operation)

    async def release(self, data: Data) -> None:
        """Give a data set back; the handle stays usable."""
        await self._drive(self._operations.release(data))

    async def info(self, timeout: float | None = None) -> ServerInfo:
        """Ask for version, engine, devices, limits and the operator table."""
        return await self._drive(self._operations.info(timeout))

    async def wait_ready(self, timeout: float = 30.0) -> ServerInfo:
        """Wait until the server answers."""
        return await self._drive(self._operations.wait_ready(timeout))

    async def close(self) -> None:
        """Close the connection."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _drive(self, operation: Operation[T]) -> T:
        try:
            step = next(operation)
            while True:
                try:
                    outcome = await self._perform(step)
                except WarpfitError as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(outcome)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        finally:
            operation.close()

    async def _perform(self, step: Step) -> Any:
        if isinstance(step, Call):
            return await self._transport.call(step)
        if isinstance(step, Sleep):
            return await asyncio.sleep(step.seconds)
        return await asyncio.to_thread(step.function)


def connect_async(
    address: str,
    *,
    token: str | None = None,
    tls: TlsConfig | bool | None = None,
    retry: RetryPolicy | None = None,
    transport: TransportConfig | None = None,
) -> AsyncClient:
    """Make an asyncio client, inside a running event loop; the rest is as for `warpfit.connect`."""
    config = ClientConfig(retry=retry or RetryPolicy(), transport=transport or TransportConfig())
    security = Security.of(address, token, tls)
    return AsyncClient(AsyncGrpcTransport(address, config.transport, security), config)
