"""The server as a whole: store, supervisor and gRPC port, put together and taken apart."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final

import grpc

from warpfit.errors import UnavailableError
from warpfit_server.config import Config
from warpfit_server.datasets import DatasetStore
from warpfit_server.segments import SegmentPool
from warpfit_server.service import EvaluatorService
from warpfit_server.supervisor import EngineSupervisor

#: Threads beyond --max-requests, for short calls and for refusing what is over the limit.
_SPARE_THREADS: Final = 16


class Server:
    """A running server; a context manager. ``port`` is the port that it listens on."""

    def __init__(self, config: Config) -> None:
        limits = config.limits()
        pool = SegmentPool(config.idle_bytes)
        self._config = config
        self.supervisor = EngineSupervisor(config, pool)
        self._datasets = DatasetStore(limits, pool, self.supervisor.unload)
        service = EvaluatorService(self._datasets, self.supervisor, limits, config.chunk_bytes)
        threads = 2 * limits.requests + _SPARE_THREADS
        self._grpc = grpc.server(
            ThreadPoolExecutor(threads, "call"),
            handlers=[service.handlers()],
            maximum_concurrent_rpcs=threads,
            options=[
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ],
        )
        self.port = self._bind()

    def __enter__(self) -> Server:
        """Start engine and port; returns when the server is ready."""
        self.supervisor.start(self._datasets.leased)
        self._grpc.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Refuse new calls, let those in flight finish within the grace period, stop."""
        self._grpc.stop(self._config.grace).wait()
        self.supervisor.stop()

    def describe(self) -> str:
        """Start-up line: address, engine, limits."""
        limits = self._config.limits()
        devices = ", ".join(
            f"{device.name} ({device.threads} threads)" if device.threads else device.name
            for device in self.supervisor.devices
        )
        return (
            f"warpfit listening on {self._config.host}:{self.port}"
            f" engine={self.supervisor.engine} [{devices}]"
            f" resident<={limits.resident_bytes >> 20}MiB result<={limits.result_bytes >> 20}MiB"
            f" programs<={limits.programs} tokens<={limits.tokens} requests<={limits.requests}"
        )

    def _bind(self) -> int:
        address = f"{self._config.host}:{self._config.port}"
        try:
            return self._grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise UnavailableError(
                f"cannot listen on {address}", "PORT_IN_USE", "Choose another --host or --port"
            ) from error
