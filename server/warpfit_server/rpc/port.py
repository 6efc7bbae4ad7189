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
#: What `Exchange` needs of gRPC: were one of them missing, no server would start.
_RECEIVE_MESSAGE_TOKEN, _status = _server._RECEIVE_MESSAGE_TOKEN, _server._status
_possibly_finish_call = _server._possibly_finish_call
_is_rpc_state_active = _server._is_rpc_state_active


class InlineExecutor(ThreadPoolExecutor):
    """Runs each task on the thread that submits it, which is the one that serves the port.

    gRPC demands a `ThreadPoolExecutor`; this one never makes a thread.
    """

    def __init__(self) -> None:
        super().__init__(1)

    def submit(self, task: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        """Run a task, which must not block."""
        done: Future[Any] = Future()
        done.set_result(task(*args, **named))
        return done


class Exchange:
    """The messages of one call, in both directions.

    gRPC's own handlers have a thread wait for each message that comes or goes, and send the status
    after the last one. Here a thread is needed only once the request is there, and the last message
    of the answer goes with the status: a call of one message each way costs one hand-over between
    threads instead of three. It uses gRPC's inner functions, which its own handlers consist of.

    Args:
        messages: what the caller sends.
        context: of the call.
        send: sends a message of the answer and waits until it is on its way.
    """

    def __init__(
        self, messages: Iterator[bytes], context: grpc.ServicerContext, send: Callable[..., None]
    ) -> None:
        self.messages = messages
        """Iterator of the caller's messages; calls that use `receive` must not use it."""
        self.context: Any = context
        self.send = send

    def receive(self, deliver: Callable[[bytes | None], None]) -> None:
        """Have the port's own thread call ``deliver``, which must not block, with the next message.

        It gets None if there is no message, or the call has ended.
        """
        state, call = self.context._state, self.context._rpc_event.call

        def received(event: Any) -> Any:
            message = event.batch_operations[0].message()
            with state.condition:
                finished = _possibly_finish_call(state, _RECEIVE_MESSAGE_TOKEN)
            deliver(message)
            return finished

        with state.condition:
            is_active = _is_rpc_state_active(state)
            if is_active:
                call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), received)
                state.due.add(_RECEIVE_MESSAGE_TOKEN)
        if not is_active:
            deliver(None)

    def end(self, message: bytes | None = None) -> None:
        """End the call with the status in its context, and with a last message if there is one."""
        _status(self.context._rpc_event, self.context._state, message)


class ReceiveTimeouts:
    """Ends calls whose next message does not arrive in time, from a thread of its own.

    gRPC waits for a message as long as the client likes. What receives it and the thread that ends
    calls both remove the call from a dictionary, which only one of them succeeds in.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[float, Callable[[], None]]] = {}
        self._lock = threading.Lock()
        self._runs = False

    def begin(self, call: Hashable, seconds: float, end: Callable[[], None]) -> None:
        """Call ``end`` after some seconds, unless `stop` comes first.

        ``end`` must not block, and must let the waiting thread go on.
        """
        self._waiting[call] = time.monotonic() + seconds, end
        if not self._runs:
            self._start()

    def stop(self, call: Hashable) -> bool:
        """Stop waiting for a call; return False if its time was up and it has been ended."""
        return self._waiting.pop(call, None) is not None

    def _start(self) -> None:
        with self._lock:
            if self._runs:
                return
            self._runs = True
        threading.Thread(target=self._watch, name="receive-timeouts", daemon=True).start()

    def _watch(self) -> None:
        """End late calls; the thread ends when no call waits, and the next call starts it again."""
        while True:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            for call, (limit, end) in self._waiting.copy().items():
                if limit <= now and self.stop(call):
                    try:
                        end()
                    except Exception:
                        _LOG.exception("a call could not be ended")
            with self._lock:
                if not self._waiting:
                    self._runs = False
                    return


class NonBlockingMethod:
    """Base of method handlers that gRPC calls on the port's own thread, and that must not block.

    Such a handler implements ``take``, and answers then or later.
    """

    experimental_non_blocking: Final = True
    experimental_thread_pool: Final = InlineExecutor()

    def __call__(
        self, messages: Iterator[bytes], context: grpc.ServicerContext, send: Callable[..., None]
    ) -> None:
        self.take(Exchange(messages, context, send))

    def take(self, call: Exchange) -> None:
        """Refuse a call, or have it answered."""
        raise NotImplementedError


def make_server(
    config: Config, service: str, handlers: Mapping[str, Any], *, shared: bool
) -> grpc.Server:
    """Make a gRPC server for one service, whose method handlers bring their own threads.

    If ``shared``, several processes of this user may listen on the port, among which the kernel
    distributes the connections.
    """
    return grpc.server(
        InlineExecutor(),
        handlers=[grpc.method_handlers_generic_handler(service, dict(handlers))],
        options=[
            ("grpc.max_receive_message_length", config.message_bytes),
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
