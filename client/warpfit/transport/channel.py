"""The blocking and the asyncio transport, which carry out calls over a gRPC channel."""

from __future__ import annotations

from typing import Any, Protocol

import grpc
from grpc.experimental import ChannelOptions

from warpfit import codec
from warpfit.errors import InvalidArgumentError
from warpfit.transport.call import Call, UploadStream
from warpfit.transport.security import Security
from warpfit.transport.settings import TransportConfig
from warpfit.v1 import evaluator_pb2 as pb
from warpfit.v1.evaluator_pb2_grpc import EvaluatorStub


class Transport(Protocol):
    """Carries calls to a server and answers back; `warpfit.testing` has one without a network."""

    def call(self, call: Call) -> None:
        """Perform one call and hand each message of the answer to its collector.

        Raises:
            WarpfitError: if the call failed.

        """

    def close(self) -> None:
        """Close the connection; calls in flight fail."""


class AsyncTransport(Protocol):
    """`Transport` for asyncio."""

    async def call(self, call: Call) -> None:
        """Perform one call, as `Transport.call`."""

    async def close(self) -> None:
        """Close the connection; calls in flight fail."""


class GrpcTransport:
    """Calls over a gRPC channel."""

    def __init__(self, address: str, config: TransportConfig, security: Security) -> None:
        check_address(address)
        self._closed = False
        self._metadata = security.metadata()
        # The caller's thread reads the answer itself: a thread of gRPC's costs 0.1 ms a call.
        reading = (ChannelOptions.SingleThreadedUnaryStream, 1)
        self._channel = security.channel(grpc, address, [*config.channel_options(), reading])
        self._methods = _Methods(self._channel)

    def call(self, call: Call) -> None:
        """Perform one call; an interrupt in the caller's thread cancels it on the server too."""
        if self._closed:
            raise _client_closed()
        method = self._methods.of(call)
        is_upload = isinstance(call.request, UploadStream)
        try:
            if call.collector.is_single and not is_upload:
                # The fastest way. gRPC cancels such a call by itself when it is interrupted.
                answer = method(call.request, timeout=call.timeout, metadata=self._metadata)
                call.collector.add(answer)
            else:
                self._stream(call, method, is_upload=is_upload)
        except grpc.RpcError as error:
            raise _error_of(call, error) from error

    def _stream(self, call: Call, method: Any, *, is_upload: bool) -> None:
        # An upload is awaited as a future: unlike a plain call it can be cancelled.
        start = method.future if is_upload else method
        rpc = start(call.request, timeout=call.timeout, metadata=self._metadata)
        try:
            if is_upload:
                call.collector.add(rpc.result())
            else:
                for message in rpc:
                    call.collector.add(message)
        except grpc.RpcError:
            raise
        except BaseException:
            rpc.cancel()
            raise

    def close(self) -> None:
        """Close the channel."""
        self._closed = True
        self._channel.close()


class AsyncGrpcTransport:
    """Calls over a gRPC channel of the running event loop."""

    def __init__(self, address: str, config: TransportConfig, security: Security) -> None:
        check_address(address)
        self._closed = False
        self._metadata = security.metadata()
        self._channel = security.channel(grpc.aio, address, config.channel_options())
        self._methods = _Methods(self._channel)

    async def call(self, call: Call) -> None:
        """Perform one call; cancelling the task cancels it on the server too."""
        if self._closed:
            raise _client_closed()
        method = self._methods.of(call)
        rpc = method(call.request, timeout=call.timeout, metadata=self._metadata)
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

    async def close(self) -> None:
        """Close the channel."""
        self._closed = True
        await self._channel.close(grace=None)


class _Methods:
    """The remote methods of a channel.

    On the wire, a stream of one message looks like a single message. Where the contract promises
    one message the method is called as a unary one, which saves 0.1 ms a call.
    """

    def __init__(self, channel: Any) -> None:
        service = pb.DESCRIPTOR.services_by_name["Evaluator"].full_name
        stub: Any = EvaluatorStub(channel)  # type: ignore[no-untyped-call]
        # Evaluations and uploads reach gRPC as bytes, so these methods have no serializer.
        evaluate = f"/{service}/Evaluate", None, codec.answer_from_bytes
        upload = f"/{service}/UploadVariables", None, codec.dataset_info_from_bytes
        self._streamed = {"Evaluate": channel.unary_stream(*evaluate), "Optimize": stub.Optimize}
        self._single = {
            "Evaluate": channel.unary_unary(*evaluate),
            "Optimize": channel.unary_unary(
                f"/{service}/Optimize",
                pb.OptimizeRequest.SerializeToString,
                pb.OptimizeResponse.FromString,
            ),
            "UploadVariables": channel.stream_unary(*upload),
            "GetVariables": stub.GetVariables,
            "ReleaseVariables": stub.ReleaseVariables,
            "GetServerInfo": stub.GetServerInfo,
        }

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


def _client_closed() -> InvalidArgumentError:
    return InvalidArgumentError(
        "the client is closed",
        "CLIENT_CLOSED",
        "Keep it open as long as it is used, or make another",
    )


def check_address(address: str) -> None:
    """Check that an address has a port.

    Raises:
        InvalidArgumentError: if it has none.

    """
    port = address.rpartition(":")[2]
    if "://" not in address and "unix:" not in address and not port.isdigit():
        raise InvalidArgumentError(
            f"{address!r} is not an address",
            "BAD_ADDRESS",
            "Give HOST:PORT, such as 127.0.0.1:50551",
            "address",
        )
