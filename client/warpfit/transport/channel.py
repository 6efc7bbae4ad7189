"""The blocking transport: gRPC calls, and gRPC's errors as warpfit's."""

from __future__ import annotations

from typing import Any, Final, Protocol

import grpc
from grpc.experimental import ChannelOptions

from warpfit import codec
from warpfit.calls.core import Call, Outgoing
from warpfit.errors import InvalidArgumentError, WarpfitError
from warpfit.transport.security import Security
from warpfit.transport.settings import TransportConfig
from warpfit.v1 import evaluator_pb2 as pb
from warpfit.v1.evaluator_pb2_grpc import EvaluatorStub

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["Evaluator"].full_name


class Transport(Protocol):
    """Carries calls to a server and answers back; `warpfit.testing` has one without a network."""

    def call(self, call: Call) -> None:
        """Perform one call and hand each message of the answer to its collector.

        Raises:
            WarpfitError: if the call failed.

        """

    def close(self) -> None:
        """Close the connection; calls in flight fail."""


class GrpcTransport:
    """Calls over a gRPC channel."""

    def __init__(
        self, address: str, config: TransportConfig, security: Security | None = None
    ) -> None:
        check_address(address)
        security = security or Security()
        self._closed = False
        self._metadata = security.metadata()
        # The caller's thread reads the answer itself: a thread of gRPC's a call costs 0.1 ms.
        reading = (ChannelOptions.SingleThreadedUnaryStream, 1)
        options = [*config.channel_options(), reading]
        self._channel = security.channel(grpc, address, options)
        self._methods = Methods(self._channel)

    def call(self, call: Call) -> None:
        """Perform one call; an interrupt in the caller's thread cancels it on the server too."""
        if self._closed:
            raise client_closed()
        if call.collector.is_single and not isinstance(call.request, Outgoing):
            self._exchange(call)
        else:
            self._stream(call)

    def _exchange(self, call: Call) -> None:
        """Send one message and wait for one: the shortest way, which an interrupt ends too."""
        method = self._methods.of(call)
        try:
            answer = method(call.request, timeout=call.timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise failure(call, error) from error
        call.collector.add(answer)

    def _stream(self, call: Call) -> None:
        method = self._methods.of(call)
        # An upload is awaited as a future: unlike a plain call it can be cancelled.
        start = getattr(method, "future", method)
        rpc = start(call.request, timeout=call.timeout, metadata=self._metadata)
        try:
            for message in (rpc.result() for _ in range(1)) if start is not method else rpc:
                call.collector.add(message)
        except grpc.RpcError as error:
            raise failure(call, error) from error
        except BaseException:
            rpc.cancel()
            raise

    def close(self) -> None:
        """Close the channel."""
        self._closed = True
        self._channel.close()


class Methods:
    """The remote methods of a channel.

    On the wire, a stream of one message is no other than a single message. Where the contract
    promises one, gRPC is told so, which saves 0.1 ms a call.
    """

    def __init__(self, channel: Any) -> None:
        stub: Any = EvaluatorStub(channel)  # type: ignore[no-untyped-call]
        evaluate, optimize = (f"/{SERVICE_NAME}/{name}" for name in ("Evaluate", "Optimize"))
        # Evaluations and uploads are serialized already.
        self._streamed = {
            "Evaluate": channel.unary_stream(
                evaluate, response_deserializer=codec.answer_from_bytes
            ),
            "Optimize": stub.Optimize,
        }
        self._single = {
            "Evaluate": channel.unary_unary(
                evaluate, response_deserializer=codec.answer_from_bytes
            ),
            "Optimize": channel.unary_unary(
                optimize,
                request_serializer=pb.OptimizeRequest.SerializeToString,
                response_deserializer=pb.OptimizeResponse.FromString,
            ),
            "UploadVariables": channel.stream_unary(
                f"/{SERVICE_NAME}/UploadVariables",
                response_deserializer=codec.dataset_info_from_bytes,
            ),
            "GetVariables": stub.GetVariables,
            "ReleaseVariables": stub.ReleaseVariables,
            "GetServerInfo": stub.GetServerInfo,
        }

    def of(self, call: Call) -> Any:
        """Callable of gRPC that performs a call."""
        return (self._single if call.collector.is_single else self._streamed)[call.method]


def failure(call: Call, error: grpc.RpcError) -> Exception:
    """Choose what to raise for a failed call: the user's own failure before gRPC's."""
    if isinstance(call.request, Outgoing) and call.request.failure is not None:
        return call.request.failure
    return from_rpc_error(error)


def from_rpc_error(error: Any) -> WarpfitError:
    """Rebuild the server's error, or explain gRPC's own."""
    return codec.error_from_status(
        error.code().name, error.details() or "", error.trailing_metadata()
    )


def client_closed() -> WarpfitError:
    """Explain a call after ``close``."""
    return InvalidArgumentError(
        "the client is closed",
        "CLIENT_CLOSED",
        "Keep it open as long as it is used, or make another",
    )


def check_address(address: str) -> None:
    """Refuse what cannot be an address before gRPC searches for it.

    Raises:
        InvalidArgumentError: if there is no port.

    """
    port = address.rpartition(":")[2]
    if "://" not in address and "unix:" not in address and not port.isdigit():
        raise InvalidArgumentError(
            f"{address!r} is not an address",
            "BAD_ADDRESS",
            "Give HOST:PORT, such as 127.0.0.1:50551",
            "address",
        )
