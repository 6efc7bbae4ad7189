"""The gRPC port: its options and addresses, and how the messages of its calls come and go."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import grpc
from grpc import _server
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from warpfit.errors import UnavailableError
from warpfit_server.config import Config
from warpfit_server.observability.measurements import CallRecord
from warpfit_server.rpc.tls import server_credentials

_LOG: Final = logging.getLogger("warpfit.workers")
_KEEPALIVE_MS: Final = 20_000
#: Shortest time between the pings of a client, half of what `warpfit.TransportConfig` does.
_PING_MS: Final = 500
#: Calls of one connection at a time. gRPC also refuses new ones while as many cancelled calls wait
#: to be noticed, so that one connection's resets do not fill its queue of new calls.
_STREAMS: Final = 128
#: Time that TLS and the first frames of a connection may take.
_HANDSHAKE_MS: Final = 10_000
#: Seconds between two looks for calls whose message is late.
_LOOK_SECONDS: Final = 0.25
#: What `Call` needs of gRPC: were one of them missing, no server would start.
_RECEIVE_MESSAGE_TOKEN = _server._RECEIVE_MESSAGE_TOKEN
_SEND_STATUS_TOKEN, _CANCELLED = _server._SEND_STATUS_FROM_SERVER_TOKEN, _server._CANCELLED
_completion_code, _possibly_finish_call = _server._completion_code, _server._possibly_finish_call
_send_status_from_server = _server._send_status_from_server


class Call(_server._Context):
    """One call: gRPC's context of it, and its messages in both directions.

    gRPC's own handlers have a thread wait for each message that comes or goes, and send the status
    after the last one. Here a thread is needed only once the request is there, and the last message
    of the answer goes with the status, or with the wait for the next request: a call of one message
    each way costs one hand-over between threads instead of three. It uses gRPC's inner functions,
    which its own handlers consist of, and its lock only where two fields must agree.
    """

    record: CallRecord
    """Record of the request that is served, with its tenant; the interceptor sets it."""
    awaits_more = False
    """Whether the caller may send another request; the method sets it."""

    @property
    def messages(self) -> Iterator[bytes]:
        """Iterator of the caller's messages; calls that use `receive` must not use it."""
        found: Iterator[bytes] = _server._RequestIterator(self._state, self._rpc_event.call, None)
        return found

    def receive(self, deliver: Callable[[bytes | None], None], answer: bytes | None = None) -> bool:
        """Have the port's own thread call ``deliver``, which must not block, with the next message.

        It gets None if there is no message, or the call has ended. An ``answer`` is sent before, as
        the last message for the one that came before; what `add_callback` was told is then void.

        Returns:
            False if the call has ended already. Then nothing is sent or delivered.
        """
        state: Any = self._state
        operations: list[Any] = [cygrpc.ReceiveMessageOperation(0)]

        def received(event: Any) -> Any:
            message = event.batch_operations[0].message()
            with state.condition:
                finished = _possibly_finish_call(state, _RECEIVE_MESSAGE_TOKEN)
            try:
                deliver(message)
            except Exception:  # which would end the port's own thread
                _LOG.exception("a message could not be delivered")
            return finished

        with state.condition:
            if not self.is_active():
                return False
            if answer is not None:
                state.callbacks.clear()
                if state.initial_metadata_allowed:
                    state.initial_metadata_allowed = False
                    operations.append(cygrpc.SendInitialMetadataOperation(None, 0))
                operations.append(cygrpc.SendMessageOperation(answer, 0))
            self._rpc_event.call.start_server_batch(operations, received)
            state.due.add(_RECEIVE_MESSAGE_TOKEN)
        return True

    def send(self, message: bytes) -> None:
        """Send a message of the answer and wait until it is on its way."""
        _server._send_response(self._rpc_event, self._state, message)

    def end(self, message: bytes | None = None) -> None:
        """End the call with the status in it, and with a last message if there is one."""
        state: Any = self._state
        code, details = _completion_code(state), state.details or b""
        operations = [
            cygrpc.SendStatusFromServerOperation(state.trailing_metadata, code, details, 0)
        ]
        if message is not None:
            operations.append(cygrpc.SendMessageOperation(message, 0))
        with state.condition:
            if state.client is _CANCELLED:
                return
            if state.initial_metadata_allowed:
                operations.append(cygrpc.SendInitialMetadataOperation(None, 0))
            sent = _send_status_from_server(state, _SEND_STATUS_TOKEN)
            self._rpc_event.call.start_server_batch(operations, sent)
            state.statused = True
            state.due.add(_SEND_STATUS_TOKEN)

    def is_active(self) -> bool:
        """Return whether the call has not ended."""
        state = self._state
        return state.client is not _CANCELLED and not state.statused

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have ``callback`` called when the call ends; return False if it has.

        In that case it may have been called all the same.
        """
        callbacks = self._state.callbacks
        if callbacks is not None:
            callbacks.append(callback)
        return self._state.callbacks is not None

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """Set what is sent with the status."""
        self._state.trailing_metadata = trailing_metadata


class CallStarter(ThreadPoolExecutor):
    """Has methods take their calls on the thread that serves the port; it never makes a thread.

    A method is a function of a `Call`, declared to gRPC as one with streams in both directions. It
    must not block, and answers then or later. gRPC demands a `ThreadPoolExecutor`.
    """

    def __init__(self) -> None:
        super().__init__(1)

    def submit(  # type: ignore[override]
        self, run: Any, serve: Any, event: Any, state: Any, method: Callable[[Call], None], *_: Any
    ) -> Any:
        """Have a method take a call, which gRPC would have it ``serve``."""
        call = Call(event, state, None)
        try:
            method(call)
        except Exception:
            _LOG.exception("a call could not be taken")
            call.set_code(grpc.StatusCode.UNKNOWN)
            call.end()
        return _TAKEN


#: What gRPC gets for each call that it hands over: a future that is done.
_TAKEN: Final[Future[None]] = Future()
_TAKEN.set_result(None)


class ReceiveTimeouts:
    """Ends calls whose next message does not arrive in time, from a thread of its own.

    gRPC waits for a message as long as the client likes. What receives it and the thread that ends
    calls both remove the call from a dictionary, which only one of them succeeds in.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        threading.Thread(target=self._watch, name="receive-timeouts", daemon=True).start()

    def begin(self, call: Hashable, seconds: float, end: Callable[[], None]) -> None:
        """Call ``end`` after some seconds, unless `stop` comes first.

        ``end`` must not block, and must let the waiting thread go on.
        """
        self._waiting[call] = time.monotonic() + seconds, end

    def stop(self, call: Hashable) -> bool:
        """Stop waiting for a call; return False if its time was up and it has been ended."""
        return self._waiting.pop(call, None) is not None

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            for call, (limit, end) in self._waiting.copy().items():
                if limit <= now and self.stop(call):
                    try:
                        end()
                    except Exception:
                        _LOG.exception("a call could not be ended")


def make_server(
    config: Config, service: str, handlers: Mapping[str, Any], *, shared: bool
) -> grpc.Server:
    """Make a gRPC server for one service, whose method handlers bring their own threads.

    If ``shared``, several processes of this user may listen on the port, among which the kernel
    distributes the connections.
    """
    return grpc.server(
        CallStarter(),
        handlers=[grpc.method_handlers_generic_handler(service, dict(handlers))],
        options=[
            ("grpc.max_receive_message_length", config.message_bytes),
            # gRPC would decompress messages, a thousandfold, on the thread that serves the port,
            # before anybody could refuse the call.
            ("grpc.per_message_decompression", 0),
            ("grpc.max_concurrent_streams", _STREAMS),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", int(shared)),
            ("grpc.max_allowed_incoming_connections", config.connections),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            # A client that vanishes must not keep its slot for ever. A client with several servers
            # sends a ping every second, which gRPC would otherwise treat as an attack.
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
            ("grpc.http2.ping_timeout_ms", _KEEPALIVE_MS),
            ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS),
        ],
    )


def join_address(host: str, port: int) -> str:
    """Write an address as ``HOST:PORT``; an IPv6 host gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(server: grpc.Server, config: Config, port: int) -> int:
    """Bind a server to a port, 0 for a free one, with TLS if configured; return the port.

    Raises:
        UnavailableError: if the port is taken.
        InvalidArgumentError: if the certificate files cannot be used.
    """
    address, credentials = join_address(config.host, port), server_credentials(config)
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, credentials))
    except RuntimeError as error:
        raise port_in_use(config.host, port, "--host or --port") from error


def listen_locally(server: grpc.Server, path: str) -> None:
    """Bind a server to a Unix socket as well.

    Raises:
        UnavailableError: if there can be none of that name.
    """
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError as error:
        raise UnavailableError(
            f"no socket can be made at {path}",
            "NO_LOCAL_SOCKET",
            "Set TMPDIR to a folder with a shorter path: a socket's may have some 100 bytes",
        ) from error


def check_free(host: str, port: int) -> None:
    """Check that no server listens on a port that is about to be shared.

    Raises:
        UnavailableError: if one does; with SO_REUSEPORT the two would share its connections.
    """
    if not port:
        return
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise port_in_use(host, port, "--host or --port") from error


def port_in_use(host: str, port: int, flag: str) -> UnavailableError:
    """Explain that a port is taken; ``flag`` is what chooses another one."""
    return UnavailableError(
        f"cannot listen on {host}:{port}", "PORT_IN_USE", f"Choose another {flag}"
    )
