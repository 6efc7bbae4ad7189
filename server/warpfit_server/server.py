"""The server as a whole: assembles the main process and takes it apart again."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType

from warpfit_server.config import Config
from warpfit_server.data.dataset_store import DatasetStore
from warpfit_server.data.files import DataFolder
from warpfit_server.ipc.segments import SegmentPool, raise_descriptor_limit
from warpfit_server.monitoring import Monitoring
from warpfit_server.observability.measurements import Recorder
from warpfit_server.processes.engine_supervisor import EngineSupervisor
from warpfit_server.processes.engines import Engines
from warpfit_server.processes.front_end_supervisor import FrontEndSupervisor
from warpfit_server.rpc.interceptor import Interceptor
from warpfit_server.rpc.port import check_free, listen, make_server
from warpfit_server.rpc.servicer import SERVICE_NAME, MainServicer
from warpfit_server.rpc.tls import check_exposure
from warpfit_server.system.compile_cache import usable_cache_directory
from warpfit_server.system.devices import check_device_memory, resolve_devices
from warpfit_server.system.server_directory import ServerDirectory
from warpfit_server.tenancy.quotas import QuotaTable


class Server:
    """A running server; a context manager. ``port`` is the port that it listens on."""

    def __init__(self, config: Config) -> None:
        check_exposure(config)
        raise_descriptor_limit()
        # Only this user can open it: the front ends forward calls to a socket in it.
        self._directory = ServerDirectory()
        self._directories = ExitStack()
        self._directories.callback(self._directory.remove)
        try:
            cache = self._directories.enter_context(
                usable_cache_directory(config.cache_path, within=str(self._directory.path))
            )
            devices = resolve_devices(config.devices)
            check_device_memory(devices, config.device_memory)
            self._assemble(replace(config, cache_dir=str(cache), devices=devices))
        except BaseException:
            self._directories.close()
            raise

    def _assemble(self, config: Config) -> None:
        pool = SegmentPool(config.idle_bytes)
        self._config = config
        self.quotas = QuotaTable.create(config.processes, len(config.engines))
        self.engines = engines = Engines(config, pool, self.quotas)
        self._datasets = datasets = DatasetStore(config.limits(), pool, engines.unload)
        recorder = Recorder()
        self._front_ends = FrontEndSupervisor(config, engines, datasets, self.quotas, recorder)
        interceptor = Interceptor(config, self.quotas, is_main=True)
        servicer = MainServicer(
            datasets,
            DataFolder(config.data_root, datasets),
            engines,
            partial(engines.lease, datasets),
            engines.router,
            interceptor.admission,
            config.chunk_bytes,
            self._front_ends.announce_release,
        )
        self._monitoring = Monitoring(
            *(config, engines, datasets, self._front_ends, recorder, self.quotas)
        )
        check_free(config.host, config.port)
        handlers = interceptor.intercept(servicer.handlers(), self._monitoring.observer)
        self._workers = interceptor.workers
        self._grpc = make_server(config, SERVICE_NAME, handlers, shared=config.processes > 1)
        self._monitoring.health.add_to(self._grpc)
        self.port = listen(self._grpc, config, config.port)
        self._local_address = f"unix:{self._directory.path}/main"
        self._grpc.add_insecure_port(self._local_address)

    def __enter__(self) -> Server:
        """Start the engines, the port, the other front ends; return when the server is ready."""
        self._monitoring.open_ports()
        self._front_ends.start(self._config.processes - 1, self.port, self._local_address)
        self.engines.start(self._datasets.leased, self._engine_ready)
        self._grpc.start()
        self._front_ends.open()
        self._monitoring.start_watchdogs()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Be not ready, then refuse new calls, let those in flight finish in time, stop."""
        self._monitoring.drain()
        stopped = self._grpc.stop(self._config.grace)
        self._front_ends.stop()
        stopped.wait()
        self._workers.close()
        self._monitoring.stop()
        self.engines.stop()
        self._directories.close()

    def _engine_ready(self, supervisor: EngineSupervisor) -> None:
        self._front_ends.engine_ready(supervisor.number)
        self._monitoring.watchdogs[supervisor.number].engine_ready()

    def describe(self) -> str:
        """Return the start-up line: addresses, devices, limits."""
        limits = self._config.limits()
        devices = ", ".join(
            f"{device.label} {device.name}"
            + (f" ({device.threads} threads)" if device.threads else "")
            + ("" if device.serving else " (not ready)")
            for device in self.engines.devices
        )
        return (
            f"warpfit listening on {self._config.host}:{self.port}"
            f" engine={self.engines.engine} [{devices}] front-ends={self._config.processes}"
            f"{self._monitoring.describe()}"
            f" resident<={limits.resident_bytes >> 20}MiB result<={limits.result_bytes >> 20}MiB"
            f" programs<={limits.programs} tokens<={limits.tokens} requests<={limits.requests}"
        )
