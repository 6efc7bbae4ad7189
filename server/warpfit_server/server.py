"""The server as a whole: store, supervisor, port and doors, put together and taken apart."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

from warpfit_server.config import Config
from warpfit_server.data.dataset_store import DatasetStore, Sweeper
from warpfit_server.ipc.segments import SegmentPool, raise_descriptor_limit
from warpfit_server.observability.measurements import Recorder
from warpfit_server.operations import Operations
from warpfit_server.processes.engine_supervisor import EngineSupervisor
from warpfit_server.processes.front_end_supervisor import FrontEndSupervisor
from warpfit_server.rpc.interceptor import make_guard
from warpfit_server.rpc.port import check_free, listen, make_server
from warpfit_server.rpc.servicer import SERVICE_NAME, EvaluatorService, ResidentLeases
from warpfit_server.rpc.tls import check_exposure
from warpfit_server.system.compile_cache import usable_cache_directory
from warpfit_server.system.server_directory import ServerDirectory
from warpfit_server.tenancy.quotas import Ledger


class Server:
    """A running server; a context manager. ``port`` is the port that it listens on."""

    def __init__(self, config: Config) -> None:
        check_exposure(config)
        raise_descriptor_limit()
        # Readable by this user alone: what the doors pass on comes in here.
        self._directory = ServerDirectory()
        self._places = ExitStack()
        self._places.callback(self._directory.remove)
        try:
            cache = self._places.enter_context(
                usable_cache_directory(config.cache_path, within=str(self._directory.path))
            )
            self._assemble(replace(config, cache_dir=str(cache)))
        except BaseException:
            self._places.close()
            raise

    def _assemble(self, config: Config) -> None:
        limits = config.limits()
        pool = SegmentPool(config.idle_bytes)
        self._config = config
        self.supervisor = EngineSupervisor(config, pool)
        self._datasets = DatasetStore(limits, pool, self.supervisor.unload)
        leases = ResidentLeases(self._datasets, self.supervisor)
        self.ledger = Ledger.create(config.doors)
        recorder = Recorder()
        self._doors = FrontEndSupervisor(config, self.supervisor, leases, self.ledger, recorder)
        admission, guard = make_guard(config, self.ledger, trusts_doors=True)
        service = EvaluatorService(
            self._datasets, self.supervisor, admission, config.chunk_bytes, self._doors.forget
        )
        self._operations = Operations(
            config, self.supervisor, self._datasets, self._doors, recorder, SERVICE_NAME
        )
        check_free(config.host, config.port)
        handlers = guard.protect(service.handlers(), self._operations.observer)
        self._workers = guard.workers
        self._grpc = make_server(config, SERVICE_NAME, handlers, shared=config.doors > 1)
        self._operations.health.add_to(self._grpc)
        self.port = listen(self._grpc, config, config.port)
        self._front_door = f"unix:{self._directory.path}/front-door"
        self._grpc.add_insecure_port(self._front_door)
        self._sweeper = Sweeper(self._datasets, config.lease_seconds)

    def __enter__(self) -> Server:
        """Start engine, port and doors; returns when the server is ready."""
        self._operations.open_ports()
        self._doors.start(self._config.doors - 1, self.port, self._front_door)
        self.supervisor.start(self._datasets.leased, self._engine_ready)
        self._grpc.start()
        self._doors.open()
        self._sweeper.start()
        self._operations.watch()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Be not ready, then refuse new calls, let those in flight finish in time, stop."""
        self._operations.drain()
        self._sweeper.stop()
        stopped = self._grpc.stop(self._config.grace)
        self._doors.stop()
        stopped.wait()
        self._workers.close()
        self._operations.stop()
        self.supervisor.stop()
        self._places.close()

    def _engine_ready(self) -> None:
        self._doors.engine_ready()
        self._operations.engine_ready()

    def describe(self) -> str:
        """Start-up line: address, engine, limits."""
        limits = self._config.limits()
        devices = ", ".join(
            f"{device.name} ({device.threads} threads)" if device.threads else device.name
            for device in self.supervisor.devices
        )
        return (
            f"warpfit listening on {self._config.host}:{self.port}"
            f" engine={self.supervisor.engine} [{devices}] doors={self._config.doors}"
            f"{self._operations.describe()}"
            f" resident<={limits.resident_bytes >> 20}MiB result<={limits.result_bytes >> 20}MiB"
            f" programs<={limits.programs} tokens<={limits.tokens} requests<={limits.requests}"
        )
