"""Health checks as grpc.health.v1, on the server's own port and on a plain one beside it.

Service ``liveness`` says that the process works, ``readiness`` that the engine has just given the
right answer to a small evaluation (`warpfit_server.watchdog`). The empty name and the name of the
service itself mean readiness.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from warpfit.errors import UnavailableError

LIVENESS: Final = "liveness"
READINESS: Final = "readiness"
#: Threads for health checks: a caller that watches needs none of its own.
_THREADS: Final = 4


class Health:
    """What health checks are told.

    Args:
        service: full name of the gRPC service, which is healthy when it is ready.
        on_change: called with the new readiness, in the order of the changes.

    """

    def __init__(
        self, service: str, on_change: Callable[[bool], None] = lambda ready: None
    ) -> None:
        self._servicer = HealthServicer(
            experimental_non_blocking=True,
            experimental_thread_pool=ThreadPoolExecutor(_THREADS, "health"),
        )
        self._names = (READINESS, "", service)
        self._on_change = on_change
        self._lock = threading.Lock()
        self._ready = False
        self._draining = False
        self._servicer.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        self._publish()

    @property
    def ready(self) -> bool:
        """Whether calls can be answered."""
        return self._ready

    def set_ready(self, ready: bool) -> None:
        """Tell whether calls can be answered; after `drain` they no longer can."""
        with self._lock:
            ready = ready and not self._draining
            if ready is not self._ready:
                self._ready = ready
                self._publish()
                self._on_change(ready)

    def drain(self) -> None:
        """Be not ready for good; the process stays alive."""
        with self._lock:
            self._draining = True
        self.set_ready(False)

    def add_to(self, server: grpc.Server) -> None:
        """Answer health checks on a server that has not started yet."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def _publish(self) -> None:
        response = health_pb2.HealthCheckResponse
        for name in self._names:
            self._servicer.set(name, response.SERVING if self._ready else response.NOT_SERVING)


class HealthPort:
    """A plain port that answers health checks and nothing else, with threads of its own.

    Raises:
        UnavailableError: if the port is taken.

    """

    def __init__(self, health: Health, host: str, port: int) -> None:
        self._server = grpc.server(
            ThreadPoolExecutor(_THREADS, "health-port"), options=[("grpc.so_reuseport", 0)]
        )
        health.add_to(self._server)
        try:
            self.port = self._server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise UnavailableError(
                f"cannot listen on {host}:{port}", "PORT_IN_USE", "Choose another --health-port"
            ) from error
        self._server.start()

    def stop(self) -> None:
        """Close the port."""
        self._server.stop(None)
