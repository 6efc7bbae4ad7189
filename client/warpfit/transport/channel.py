"""The transport that carries out calls over gRPC channels."""

from __future__ import annotations

import os
import threading
from typing import Any, Final

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc.experimental import ChannelOptions

from warpfit import codec
from warpfit.errors import InvalidArgumentError, WarpfitError
from warpfit.transport.call import Call, Cancellation, UploadStream, only
from warpfit.transport.connection import Connection
from warpfit.transport.forks import (
    CALLS,
    PATIENCE_SECONDS,
    QUIET_BEFORE_FORK,
    RENEWED_IN_CHILD,
)
from warpfit.transport.open_calls import OpenCalls
from warpfit.transport.security import is_local
from warpfit.transport.servers import NOBODY_THERE
from warpfit.v1 import evaluator_pb2 as pb

#: The method whose calls carry several requests, and the one whose request has several messages.
_OPEN: Final = "Evaluate"
_UPLOAD: Final = "UploadVariables"
#: Longest request that follows another one in a call. The server ends a call whose next request
#: is not there in half a second, so that a long one would be sent twice over a slow network; beside
#: what it takes itself the cost of a call does not matter.
_OPEN_BYTES: Final = 256 << 10
#: Methods whose requests reach gRPC as bytes.
_OF_BYTES: Final = frozenset({_OPEN, _UPLOAD})
#: Channels of the parent in a child that was forked. They are kept, because closing them there
#: could wait for a lock that a thread of the parent had.
_PARENTS_CHANNELS: Final[list[Any]] = []


class GrpcTransport:
    """Calls over a gRPC channel to each server; those to fixed servers are opened at once."""

    def __init__(self, connection: Connection) -> None:
        addresses, config = connection.target.addresses, connection.transport
        if len(addresses) != 1:
            config = config.for_several()
        # The caller's thread reads the answer itself: a thread of gRPC's costs 0.1 ms a call.
        reading = (ChannelOptions.SingleThreadedUnaryStream, 1)
        self._options = [*config.channel_options(), reading]
        self._proxy = config.proxy
        self._security = connection.security
        self._metadata = connection.security.metadata()
        self._open: dict[str, _Channel] = {}
        self._lock = threading.Lock()
        self._closed = False
        RENEWED_IN_CHILD.add(self)
        QUIET_BEFORE_FORK.add(self)
        for address in addresses:
            self._to(address)

    def call(
        self, call: Call, server: str, seconds: float | None, cancellation: Cancellation | None
    ) -> Any:
        """Make a call; an interrupt in the caller's thread cancels it on the server too."""
        if self._closed:
            raise InvalidArgumentError(
                "the client is closed", "CLIENT_CLOSED", "Keep it open as long as it is used"
            )
        with CALLS:
            return self._call(call, server, seconds, cancellation)

    def _call(
        self, call: Call, server: str, seconds: float | None, cancellation: Cancellation | None
    ) -> Any:
        channel = self._open.get(server) or self._to(server)
        single, streamed = channel.single[call.method], channel.streamed.get(call.method)
        options = {"timeout": seconds, "metadata": self._metadata}
        try:
            if call.method == _OPEN and seconds is None and len(call.request) <= _OPEN_BYTES:
                asked = channel.open_calls.ask(call.request, cancellation or Cancellation())
                return call.read(asked)
            if call.is_single and cancellation is None and not _is_upload(call):
                # gRPC cancels such a call by itself when it is interrupted.
                return call.read((only((single(call.request, **options),)),))
            # This thread reads a stream itself, while a future has to wait for one of gRPC's.
            rpc = (streamed or single.future)(call.request, **options)
            try:
                with (cancellation or Cancellation()).covering(rpc):
                    return call.read(rpc if streamed else (only((rpc.result(),)),))
            except grpc.RpcError:
                raise
            except BaseException:
                rpc.cancel()
                raise
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            if cancellation is not None:
                cancellation.check()  # so that the server is not blamed
            found = _error_of(call, error)
            if (
                isinstance(found, WarpfitError)
                and found.reason in NOBODY_THERE
                and self._proxy is not None
                and not is_local(server)
            ):
                proxy = str(self._proxy).removeprefix("http://").rpartition("@")[2]
                found.message = f"{server}, asked for by the proxy {proxy}: {found.message}"
            raise found from error

    def _to(self, address: str) -> _Channel:
        with CALLS, self._lock:
            if address not in self._open:
                channel = self._security.channel(address, self._options, self._proxy)
                CALLS.watch_forks()
                self._open[address] = _Channel(channel, self._metadata)
            return self._open[address]

    def forget(self, address: str) -> None:
        """Close the channel to a server."""
        with self._lock:
            found = self._open.pop(address, None)
        if found is not None:
            with CALLS:
                found.close()

    def close(self) -> None:
        """Close the channels, and open no others."""
        self._closed = True
        for address in list(self._open):
            self.forget(address)

    def before_fork(self, is_quiet: bool) -> None:
        """End the calls that are open, for whose threads gRPC would wait for a second.

        Unless it ``is_quiet``, calls are in flight, too: they fail as if the server were gone.
        """
        for address, channel in list(self._open.items()):
            if is_quiet:
                channel.open_calls.end_idle(PATIENCE_SECONDS)
            elif self._open.pop(address, None) is not None:
                channel.close()

    def after_fork(self) -> None:
        """Begin anew in a child, whose channels must not share the connections of the parent."""
        _PARENTS_CHANNELS.append(self._open)
        self._open, self._lock = {}, threading.Lock()
        own = "warpfit.process"  # channels whose arguments are the same share a connection
        self._options = [option for option in self._options if option[0] != own]
        self._options.append((own, os.getpid()))


class _Channel:
    """A channel to a server with the remote methods.

    On the wire, a stream of one message looks like a single message. Where the contract promises
    one message the method is called as a unary one, which saves 0.1 ms a call.
    """

    def __init__(self, channel: Any, metadata: Any) -> None:
        service = pb.DESCRIPTOR.services_by_name["Evaluator"]
        self._channel = channel
        self.streamed: dict[str, Any] = {}
        self.single: dict[str, Any] = {}
        for method in service.methods:
            request, answer = map(GetMessageClass, (method.input_type, method.output_type))
            serializer = None if method.name in _OF_BYTES else request.SerializeToString
            way = f"/{service.full_name}/{method.name}", serializer, answer.FromString
            unary = channel.stream_unary if method.name == _UPLOAD else channel.unary_unary
            self.single[method.name] = unary(*way)
            if method.server_streaming:
                self.streamed[method.name] = channel.unary_stream(*way)
            if method.name == _OPEN:
                self.open_calls = OpenCalls(channel.stream_stream(way[0]), metadata)

    def close(self) -> None:
        """Close the channel; calls in flight fail."""
        self.open_calls.close()  # before: gRPC waits until nobody has an open call
        self._channel.close()


def _is_upload(call: Call) -> bool:
    return isinstance(call.request, UploadStream)


def _error_of(call: Call, error: Any) -> Exception:
    """Return the exception of a failed call; that of a progress callback comes before gRPC's."""
    if isinstance(call.request, UploadStream) and call.request.failure is not None:
        return call.request.failure
    return codec.error_from_status(
        error.code().name, error.details() or "", error.trailing_metadata()
    )
