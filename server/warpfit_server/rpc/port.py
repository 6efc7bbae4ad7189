"""The gRPC port: its options, threads and addresses, and the certificates that it shows."""

import logging
import ssl
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

import grpc

from warpfit.errors import InvalidArgumentError
from warpfit.transport.connection import check_secret
from warpfit_server.config import Config
from warpfit_server.rpc.calls import HELD_REFUSALS
from warpfit_server.system.file_watcher import WatchedFiles
from warpfit_server.system.sockets import cannot_listen, join_address

_LOG: Final = logging.getLogger("warpfit.port")
_TLS_LOG: Final = logging.getLogger("warpfit.tls")
_KEEPALIVE_MS: Final = 20_000
#: Shortest time between the pings of a client, half of what `warpfit.TransportConfig` does.
_PING_MS: Final = 500
#: Calls of one connection at a time. gRPC also refuses new ones while as many cancelled calls wait
#: to be noticed, so that one connection's resets do not fill its queue of new calls.
_STREAMS: Final = 128
#: Time that TLS and the first frames of a connection may take.
_HANDSHAKE_MS: Final = 10_000
#: Seconds without a call after which a thread ends.
_IDLE_SECONDS: Final = 60.0
#: Threads beside those of open calls, which refuse the calls that are too many.
_REFUSING_THREADS: Final = 8 + HELD_REFUSALS
#: Threads of a port for health checks.
HEALTH_THREADS: Final = 144


class CallThreads(ThreadPoolExecutor):
    """The threads that serve the calls of a port, at most as many as calls have come at a time.

    A task goes to the thread that has had the last one, if that is idle, and threads that have had
    none for a minute end. Python's own executor counts a thread as busy for ever if another thread
    takes its task, and so goes on starting threads, which end with the process. Each of them keeps
    some 100 KiB.
    """

    def __init__(self, most: int, name: str) -> None:
        super().__init__(most, name)
        self._most, self._name, self._count = most, name, 0
        self._lock = threading.Lock()
        """Guards the number of threads, and what follows."""
        self._idle: list[SimpleQueue[Callable[[], None]]] = []
        """Where each idle thread waits for its next task; the last one has waited shortest."""
        self._waiting: deque[Callable[[], None]] = deque()
        """Tasks that no idle thread was there for."""

    def submit(self, task: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        """Have a task done; where the system has no more threads, one of those there does it.

        The error would otherwise end the thread of gRPC that serves the port.
        """
        future: Future[Any] = Future()

        def do() -> None:
            try:
                result = task(*given, **named)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._idle:
                self._idle.pop().put(do)
                return future
            self._waiting.append(do)
            is_new = self._count < self._most
            self._count += is_new
        if is_new:
            try:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            except RuntimeError as error:
                _LOG.error("no new thread for calls: %s", error)
                with self._lock:
                    self._count -= 1
        return future

    def _work(self) -> None:
        """Do one task after the other; the body of a thread."""
        own: SimpleQueue[Callable[[], None]] = SimpleQueue()
        while True:
            with self._lock:
                do = self._waiting.popleft() if self._waiting else None
                if do is None:
                    self._idle.append(own)
            while do is None:
                try:
                    do = own.get(timeout=_IDLE_SECONDS)
                except Empty:
                    with self._lock:
                        if own in self._idle:  # else a task is about to come
                            self._idle.remove(own)
                            self._count -= 1
                            return
            do()
            del do  # with all that the call refers to


def make_server(config: Config, service: str, handlers: Mapping[str, Any]) -> grpc.Server:
    """Make a gRPC server for one service, with threads for its open calls and for health checks.

    All front ends listen on the port, among which the kernel distributes the connections.
    """
    threads = config.open_calls + _REFUSING_THREADS + HEALTH_THREADS
    return grpc.server(
        CallThreads(threads, "call"),
        handlers=[grpc.method_handlers_generic_handler(service, dict(handlers))],
        maximum_concurrent_rpcs=threads,
        options=[
            ("grpc.max_receive_message_length", config.message_bytes),
            # gRPC would decompress messages, a thousandfold, on the thread that serves the port,
            # before anybody could refuse the call.
            ("grpc.per_message_decompression", 0),
            ("grpc.max_concurrent_streams", _STREAMS),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 1),
            ("grpc.max_allowed_incoming_connections", config.connections),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            # A client that vanishes must not keep its thread for ever. A client with several
            # servers sends a ping every second, which gRPC would otherwise treat as an attack.
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
            ("grpc.http2.ping_timeout_ms", _KEEPALIVE_MS),
            ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS),
        ],
    )


def listen(server: grpc.Server, config: Config, port: int, credentials: Any) -> None:
    """Bind a server to a port that the main process has reserved, with TLS if configured.

    Raises:
        UnavailableError: if the port is taken.
    """
    address = join_address(config.host, port)
    try:
        if credentials is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise cannot_listen(config.host, port, "--host or --port") from error


def server_credentials(config: Config) -> grpc.ServerCredentials | None:
    """Make credentials that follow the configured files, or None without TLS.

    gRPC asks for the certificates at each handshake, so a renewed one serves new connections, a
    moment after it was written, without a restart. Files that cannot be used, such as a certificate
    whose key has not been replaced yet, leave the old ones in force.

    Raises:
        InvalidArgumentError: if the files cannot be used.
    """
    if not config.tls_cert:
        return None
    paths = [Path(p) for p in (config.tls_cert, config.tls_key, config.tls_client_ca) if p]
    files = WatchedFiles(paths, lambda: _read_certificates(paths), _TLS_LOG, seconds=0.1)
    current = files.get()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Return the certificates for the next handshake, or None for no change."""
        nonlocal current
        known, current = current, files.get()
        return None if current is known else current

    fetch: Any = renewed  # gRPC's documentation allows None, its stubs do not
    return grpc.dynamic_ssl_server_credentials(
        current, fetch, require_client_authentication=bool(config.tls_client_ca)
    )


def _read_certificates(paths: Sequence[Path]) -> grpc.ServerCertificateConfiguration:
    """Read certificate, key and, for mutual TLS, the authorities of clients.

    Raises:
        InvalidArgumentError: if the files cannot be read, do not belong together, or others can
            read the key.
    """
    certificate, key, *authorities = paths
    try:
        check_secret(key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        for authority in authorities:
            context.load_verify_locations(authority)
        chain, private, *roots = [path.read_bytes() for path in paths]
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgumentError(
            f"the files {', '.join(map(str, paths))} cannot be used for TLS: {error}",
            "BAD_CERTIFICATE",
            "Give PEM files: a certificate chain, its key without a password, authorities",
        ) from error
    return grpc.ssl_server_certificate_configuration([(private, chain)], *roots)
