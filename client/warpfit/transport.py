"""The blocking transport: gRPC calls, and gRPC's errors as warpfit's."""

from __future__ import annotations

from typing import Any, Protocol

import grpc
from grpc.experimental import ChannelOptions

from warpfit import codec
from warpfit.config import TransportConfig
from warpfit.core import Call, Outgoing
from warpfit.errors import InvalidArgumentError, WarpfitError
from warpfit.security import Security
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
        self._stub = make_stub(self._channel)

    def call(self, call: Call) -> None:
        """Perform one call; an interrupt in the caller's thread cancels it on the server too."""
        if self._closed:
            raise client_closed()
        method = getattr(self._stub, call.method)
        # A unary answer is awaited as a future: unlike a plain call it can be interrupted.
        unary = hasattr(method, "future")
        start = method.future if unary else method
        rpc = start(call.request, timeout=call.timeout, metadata=self._metadata)
        try:
            for message in (rpc.result() for _ in range(1)) if unary else rpc:
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


def make_stub(channel: Any) -> Any:
    """Make the generated stub, but let pass what is serialized already: uploads, evaluations."""
    stub: Any = EvaluatorStub(channel)  # type: ignore[no-untyped-call]
    stub.Evaluate = channel.unary_stream(
        "/warpfit.v1.Evaluator/Evaluate", response_deserializer=codec.answer_from_bytes
    )
    stub.UploadVariables = channel.stream_unary(
        "/warpfit.v1.Evaluator/UploadVariables", response_deserializer=codec.dataset_info_from_bytes
    )
    return stub


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
