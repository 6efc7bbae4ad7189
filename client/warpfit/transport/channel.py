"""The blocking and the asyncio transport, which carry out calls over a gRPC channel."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, Protocol

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc.experimental import ChannelOptions

from warpfit import codec
from warpfit.errors import InvalidArgumentError
from warpfit.transport.call import Call, Cancellation, UploadStream
from warpfit.transport.connection import Connection
from warpfit.v1 import evaluator_pb2 as pb

#: Methods whose requests reach gRPC as bytes.
_OF_BYTES: Final = frozenset({"Evaluate", "UploadVariables"})


class Transport(Protocol):
    """Carries calls to servers and answers back; `warpfit.testing` has one without a network."""

    def call(self, call: Call, cancellation: Cancellation | None = None) -> None:
        """Hand each message of the answer to its collector; raise WarpfitError on failure."""

    def forget(self, address: str) -> None:
        """Close the connection to one server."""

    def close(self) -> None:
        """Close all connections; calls in flight fail."""


class AsyncTransport(Protocol):
    """`Transport` for asyncio."""

    async def call(self, call: Call) -> None:
        """Perform one call, as `Transport.call`."""

    async def forget(self, address: str) -> None:
        """Close the connection to one server."""

    async def close(self) -> None:
        """Close all connections; calls in flight fail."""


class _Channels:
    """A channel of ``grpc`` or ``grpc.aio`` to each server; to fixed servers they open at once."""

    def __init__(
        self, module: Any, connection: Connection, options: Sequence[tuple[str, int]] = ()
    ) -> None:
        addresses, config = connection.target.addresses, connection.transport
        if len(addresses) != 1:
            config = config.for_several()
        self._options = [*config.channel_options(), *options]
        self._module, self._security = module, connection.security
        self._open: dict[str, tuple[Any, _Methods]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.metadata = connection.security.metadata()
        for address in addresses:
            self._to(address)

    def method(self, call: Call) -> Any:
        """Return gRPC's callable for a call."""
        if self._closed:
            raise InvalidArgumentError(
                "the client is closed", "CLIENT_CLOSED", "Keep it open as long as it is used"
            )
        _, methods = self._open.get(call.server) or self._to(call.server)
        return methods.of(call)

    def _to(self, address: str) -> tuple[Any, _Methods]:
        with self._lock:
            if address not in self._open:
                channel = self._security.channel(self._module, address, self._options)
                self._open[address] = channel, _Methods(channel)
            return self._open[address]

    def take(self, address: str) -> list[Any]:
        """Return the channel to a server, which the caller closes, if there is one."""
        with self._lock:
            found = self._open.pop(address, None)
        return [] if found is None else [found[0]]

    def take_all(self) -> list[Any]:
        """Return all channels, which the caller closes, and open no others."""
        self._closed = True
        return [channel for address in list(self._open) for channel in self.take(address)]


class GrpcTransport:
    """Calls over gRPC channels."""

    def __init__(self, connection: Connection) -> None:
        # The caller's thread reads the answer itself: a thread of gRPC's costs 0.1 ms a call.
        reading = (ChannelOptions.SingleThreadedUnaryStream, 1)
        self._channels = _Channels(grpc, connection, [reading])
        self._metadata = self._channels.metadata

    def call(self, call: Call, cancellation: Cancellation | None = None) -> None:
        """Perform one call; an interrupt in the caller's thread cancels it on the server too."""
        method = self._channels.method(call)
        as_future = isinstance(call.request, UploadStream) or cancellation is not None
        try:
            if call.collector.is_single and not as_future:
                # The fastest way. gRPC cancels such a call by itself when it is interrupted.
                answer = method(call.request, timeout=call.timeout, metadata=self._metadata)
                call.collector.add(answer)
            else:
                self._stream(call, method, cancellation or Cancellation())
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            if cancellation is not None:
                cancellation.check()  # so that the server is not blamed
            raise _error_of(call, error) from error

    def _stream(self, call: Call, method: Any, cancellation: Cancellation) -> None:
        # A single answer is awaited as a future: unlike a plain call it can be cancelled.
        is_future = call.collector.is_single or isinstance(call.request, UploadStream)
        start = method.future if is_future else method
        rpc = start(call.request, timeout=call.timeout, metadata=self._metadata)
        try:
            with cancellation.covering(rpc):
                if is_future:
                    call.collector.add(rpc.result())
                else:
                    for message in rpc:
                        call.collector.add(message)
        except grpc.RpcError:
            raise
        except BaseException:
            rpc.cancel()
            raise

    def forget(self, address: str) -> None:
        """Close the channel to a server."""
        for channel in self._channels.take(address):
            channel.close()

    def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.take_all():
            channel.close()


class AsyncGrpcTransport:
    """Calls over gRPC channels of the running event loop."""

    def __init__(self, connection: Connection) -> None:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise _wrong_loop("is made where no event loop runs") from None
        self._channels = _Channels(grpc.aio, connection)
        self._metadata = self._channels.metadata

    async def call(self, call: Call) -> None:
        """Perform one call; cancelling the task cancels it on the server too."""
        if asyncio.get_running_loop() is not self._loop:
            raise _wrong_loop("belongs to another event loop")
        method = self._channels.method(call)
        is_upload = isinstance(call.request, UploadStream)
        request = _read_in_threads(call.request) if is_upload else call.request
        rpc = method(request, timeout=call.timeout, metadata=self._metadata)
        try:
            if hasattr(rpc, "__aiter__"):
                async for message in rpc:
                    call.collector.add(message)
            else:
                call.collector.add(await rpc)
        except grpc.RpcError as error:
            raise _error_of(call, error) from error
        except BaseException:
            rpc.cancel()
            raise

    async def forget(self, address: str) -> None:
        """Close the channel to a server."""
        for channel in self._channels.take(address):
            await channel.close(grace=None)

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.take_all():
            await channel.close(grace=None)


async def _read_in_threads(stream: UploadStream) -> AsyncIterator[bytes]:
    """Yield messages, which may have to be read from a file and converted first."""
    while (message := await asyncio.to_thread(next, stream, None)) is not None:
        yield message


class _Methods:
    """The remote methods of a channel.

    On the wire, a stream of one message looks like a single message. Where the contract promises
    one message the method is called as a unary one, which saves 0.1 ms a call.
    """

    def __init__(self, channel: Any) -> None:
        service = pb.DESCRIPTOR.services_by_name["Evaluator"]
        self._streamed: dict[str, Any] = {}
        self._single: dict[str, Any] = {}
        for method in service.methods:
            request, answer = map(GetMessageClass, (method.input_type, method.output_type))
            serializer = None if method.name in _OF_BYTES else request.SerializeToString
            way = f"/{service.full_name}/{method.name}", serializer, answer.FromString
            unary = channel.stream_unary if method.client_streaming else channel.unary_unary
            self._single[method.name] = unary(*way)
            if method.server_streaming:
                self._streamed[method.name] = channel.unary_stream(*way)

    def of(self, call: Call) -> Any:
        """Return gRPC's callable for a call."""
        return (self._single if call.collector.is_single else self._streamed)[call.method]


def _error_of(call: Call, error: Any) -> Exception:
    """Return the exception of a failed call; that of a progress callback comes before gRPC's."""
    if isinstance(call.request, UploadStream) and call.request.failure is not None:
        return call.request.failure
    return codec.error_from_status(
        error.code().name, error.details() or "", error.trailing_metadata()
    )


def _wrong_loop(why: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the asyncio client {why}",
        "WRONG_EVENT_LOOP",
        "Call connect_async in a coroutine of the loop that uses the client",
    )
