"""The asyncio client: the same methods as `warpfit.Client`, awaited."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    NoReturn,
    ParamSpec,
    Self,
    TypeVar,
    Unpack,
    overload,
)

import numpy as np
from numpy.typing import NDArray

from warpfit.calls.arguments import (
    CommonOptions,
    EvaluateOptions,
    GradientOptions,
    LossOptions,
    OpenOptions,
    Parameters,
    ScalingOptions,
    UploadOptions,
    shows_keywords,
)
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.calls.results import Output, Values
from warpfit.client import OF_OTHER_CLIENTS, Client, connect, not_made_so
from warpfit.errors import DeadlineExceededError, no_attribute
from warpfit.transport.call import RENEWED_IN_CHILD, Cancellation

#: Most calls of one client that are under way at a time; others wait for a thread.
_MOST_CALLS: Final = 128
P = ParamSpec("P")
T = TypeVar("T")


def _awaited(
    method: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Return a method of the blocking client as one to be awaited, which calls it in a thread."""

    @wraps(method)
    async def awaited(self: AsyncClient, /, *args: P.args, **options: P.kwargs) -> T:
        cancellation = Cancellation()
        client = self._client.with_cancellation(cancellation)
        asked = time.monotonic()

        def call() -> T:
            timeout = options.get("timeout")
            # The wait for a thread counts, too. What is no timeout is refused by the method.
            if isinstance(timeout, int | float) and timeout > 0:
                left = timeout - (time.monotonic() - asked)
                if left <= 0:
                    raise DeadlineExceededError(
                        f"no thread was free for the call within {timeout:g} s",
                        "DEADLINE_EXCEEDED",
                        f"Raise timeout=, or have at most {_MOST_CALLS} calls under way",
                    )
                options["timeout"] = left
            return method(client, *args, **options)

        try:
            # A current span of OpenTelemetry belongs to the task's context.
            own = partial(contextvars.copy_context().run, call)
            return await asyncio.get_running_loop().run_in_executor(self._threads, own)
        finally:
            cancellation.cancel()

    return awaited


class AsyncUploadedDataset(DatasetHandle):
    """Handle that gives the data set back when its ``async with`` block ends."""

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
        if not isinstance(client, Client):
            raise not_made_so(client, "AsyncClient", "connect_async")
        self._client = client
        self.after_fork()
        RENEWED_IN_CHILD.add(self)

    def after_fork(self) -> None:
        """Make new threads, because a child that is forked has none of its parent's."""
        self._threads = ThreadPoolExecutor(_MOST_CALLS, "warpfit")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the blocking client; a copy connects anew."""
        return type(self), (self._client,)

    if not TYPE_CHECKING:  # checkers are to refuse attributes that there are not

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError with the method that is meant."""
            raise no_attribute(type(self).__name__, name, dir(type(self)), OF_OTHER_CLIENTS)

    def __repr__(self) -> str:
        """Show the address, and neither a token nor files."""
        return repr(self._client).replace("<Client", f"<{type(self).__name__}", 1)

    @shows_keywords(UploadOptions, dtype="auto")
    async def upload(
        self, X: Any, y: Any = None, weights: Any = None, **options: Unpack[UploadOptions]
    ) -> AsyncUploadedDataset:
        """Make a data set resident on the server."""
        found = await self._upload(X, y, weights, **options)
        return AsyncUploadedDataset(found.dataset, self)

    @shows_keywords(OpenOptions, dtype="auto")
    async def open(self, name: str, **options: Unpack[OpenOptions]) -> AsyncUploadedDataset:
        """Have the server read a data set from a Parquet file of its own."""
        return AsyncUploadedDataset((await self._open(name, **options)).dataset, self)

    @overload
    async def evaluate(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[CommonOptions],
    ) -> Values: ...

    @overload
    async def evaluate(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[LossOptions],
    ) -> NDArray[np.float64]: ...

    @overload
    async def evaluate(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[GradientOptions],
    ) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]: ...

    @overload
    async def evaluate(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[ScalingOptions],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]: ...

    @overload
    async def evaluate(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[EvaluateOptions],
    ) -> Output | tuple[Output, ...]: ...

    @shows_keywords(EvaluateOptions, precision="precise", tier="auto")
    async def evaluate(
        self,
        data: DatasetHandle,
        expressions: Any,
        parameters: Parameters = None,
        **options: Unpack[EvaluateOptions],
    ) -> Any:
        """Evaluate expressions: their values, or a loss of each if ``loss=`` is given."""
        return (await self.run(data, expressions, parameters, **options)).array

    run = _awaited(Client.run)
    optimize = _awaited(Client.optimize)
    simplify = _awaited(Client.simplify)
    propose = _awaited(Client.propose)
    search = _awaited(Client.search)
    release = _awaited(Client.release)
    info = _awaited(Client.info)
    wait_ready = _awaited(Client.wait_ready)
    _upload = _awaited(Client.upload)
    _open = _awaited(Client.open)

    async def close(self) -> None:
        """Close the connection."""
        await asyncio.to_thread(self._client.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _made(connect: Callable[P, Client]) -> Callable[P, AsyncClient]:
    @wraps(connect, assigned=("__doc__",))
    def connect_async(*args: P.args, **options: P.kwargs) -> AsyncClient:
        return AsyncClient(connect(*args, **options))

    return connect_async


connect_async = _made(connect)
