"""The server as a whole: assembles the main process and takes it apart again."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from warpfit_server.data.dataset_store import DatasetStore
from warpfit_server.data.files import DataFolder
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.metrics import ServerCollector
from warpfit_server.observability.calls import Observer
from warpfit_server.observability.measurements import Recorder
from warpfit_server.observability.metrics_port import MetricsPort
from warpfit_server.observability.tracing import make_tracer
from warpfit_server.processes.engine_start import Preparation
from warpfit_server.processes.engine_supervisor import EngineSupervisor
from warpfit_server.processes.engines import Engines
from warpfit_server.processes.front_end_supervisor import FrontEndSupervisor
from warpfit_server.processes.probe import Probe
from warpfit_server.processes.watchdog import Watchdog
from warpfit_server.rpc.calls import CallHandlers
from warpfit_server.rpc.health import Health, HealthPort
from warpfit_server.rpc.port import (
    check_free,
    join_address,
    listen,
    listen_locally,
    make_server,
)
from warpfit_server.rpc.servicer import SERVICE_NAME, MainServicer
from warpfit_server.rpc.tls import check_exposure
from warpfit_server.tenancy.quotas import QuotaTable

_LOG: Final = logging.getLogger("warpfit")
#: Seconds between two looks at what takes too long.
_TICK: Final = 0.1


class Server:
    """A running server; a context manager within that of `prepare`, which yields ``prepared``.

    ``port`` is the port that it listens on; `ServerCollector` reads the other fields. Once
    ``is_stopping``, the server waits for no engine to start.
    """

    def __init__(
        self, prepared: Preparation, is_stopping: Callable[[], bool] = lambda: False
    ) -> None:
        config = prepared.config
        self._is_stopping = is_stopping
        check_exposure(config)
        # Only this user can open it: the front ends forward calls to a socket in it.
        self._local_path = f"{prepared.directory}/main"
        pool, self.recorder = SegmentPool(*config.idle_pool), Recorder()
        self.config = config
        self.quotas = QuotaTable.create(config.processes, len(config.engines))
        self.engines = Engines(config, pool, self.quotas, prepared.engines)
        self.datasets = DatasetStore(config.limits(), pool, self.engines.unload)
        parts = self.engines, self.datasets, self.quotas, self.recorder
        self._front_ends = FrontEndSupervisor(config, *parts)
        labels = [device.label for device in config.engines]
        self.health = Health(SERVICE_NAME, labels, self._front_ends.announce_readiness)
        self._probes = [
            Probe(supervisor.connection, self._front_ends.seed)
            for supervisor in self.engines.supervisors
        ]
        self._probed = self._probes[0].make_resident(self.datasets, self.engines)
        self.watchdogs = [self._watchdog(s) for s in self.engines.supervisors]
        self._stopped = threading.Event()
        self._ports: dict[str, HealthPort | MetricsPort] = {}
        self._tracer = make_tracer(config.tracing)
        self._make_service()

    def _watchdog(self, supervisor: EngineSupervisor) -> Watchdog:
        """Make an engine's watchdog."""
        watchdog = Watchdog(
            self.config,
            supervisor,
            self._probes[supervisor.number],
            self.health,
            partial(self._front_ends.all_answered_by, supervisor.number),
            partial(supervisor.load, self._probed),
        )
        supervisor.on_loss = watchdog.engine_lost
        return watchdog

    def _make_service(self) -> None:
        """Make the gRPC service and bind its port."""
        config = self.config
        calls = self._calls = CallHandlers(config, self.quotas, is_main=True)
        servicer = MainServicer(
            self.datasets,
            DataFolder(config.data_root, self.datasets),
            self.engines,
            calls.admission,
            config.chunk_bytes,
            self._front_ends.announce_release,
        )
        check_free(config.host, config.port)
        observer = Observer(self.recorder, self._tracer)
        handlers = calls.handlers(servicer.methods(), observer)
        self._grpc = make_server(config, SERVICE_NAME, handlers, shared=config.processes > 1)
        self.health.add_to(self._grpc)
        self.port = listen(self._grpc, config, config.port)
        listen_locally(self._grpc, self._local_path)

    def __enter__(self) -> Server:
        """Start the engines, the port, the other front ends; return when the server is ready."""
        self._open_ports()
        self._front_ends.start(self.config.processes - 1, self.port, f"unix:{self._local_path}")
        self.engines.start(self.datasets.pinned, self._engine_ready, self._is_stopping)
        self._grpc.start()
        self._front_ends.open()
        for watchdog in self.watchdogs:
            watchdog.start()
        threading.Thread(target=self._look_forever, name="watchdog", daemon=True).start()
        for watchdog in self.watchdogs:
            watchdog.wait_ready()
        return self

    def __exit__(self, *exception: object) -> None:
        """Be not ready, then refuse new calls, let those in flight finish in time, stop."""
        self.health.drain()
        time.sleep(self.config.notice)  # load balancers take notice
        stopped = self._grpc.stop(self.config.grace)
        self._calls.drain()
        self.health.close()
        self._front_ends.stop()
        stopped.wait()
        self._stopped.set()
        for watchdog in self.watchdogs:
            watchdog.stop()
        self._probes[0].close()
        for port in self._ports.values():
            port.stop()
        if self._tracer is not None:
            self._tracer.close()
        self.engines.stop()

    def _open_ports(self) -> None:
        """Open the ports for health checks and metrics that are configured.

        Raises:
            UnavailableError: if one is taken.
        """
        config = self.config
        if config.health_port is not None:
            port = HealthPort(self.health, config.health_host, config.health_port)
            self._ports[f"health={join_address(config.health_host, port.port)}"] = port
        if config.metrics_port is not None:
            page = MetricsPort(
                ServerCollector(self).render, config.metrics_host, config.metrics_port
            )
            self._ports[f"metrics={join_address(config.metrics_host, page.port)}"] = page

    def _engine_ready(self, supervisor: EngineSupervisor) -> None:
        self._front_ends.engine_ready(supervisor.number)
        self.watchdogs[supervisor.number].engine_ready()

    def _look_forever(self) -> None:
        """Act on engines and processes that take too long, and let go of what is out of date."""
        while not self._stopped.wait(_TICK):
            for look in (*(watchdog.look for watchdog in self.watchdogs), self._look):
                try:
                    look(time.monotonic())
                except Exception:  # whatever it is, the others are looked at, and it is tried again
                    _LOG.exception("the server could not look after its processes")

    def _look(self, now: float) -> None:
        self._front_ends.repeat_readiness(now)
        self._front_ends.kill_silent([n for n, w in enumerate(self.watchdogs) if w.answers])
        self.engines.quarantine.expire()
        self.datasets.expire(self.config.lease_seconds)

    def processes(self) -> dict[str, int]:
        """Return the process ids by role."""
        engines = {
            f"engine {supervisor.device.label}": supervisor.process_id
            for supervisor in self.engines.supervisors
            if supervisor.process_id is not None
        }
        return {"main": os.getpid(), **self._front_ends.processes(), **engines}

    def describe(self) -> str:
        """Return the start-up line: addresses, devices, limits."""
        limits = self.config.limits()
        devices = ", ".join(
            f"{device.label} {device.name}"
            + (f" ({device.threads} threads)" if device.threads else "")
            + ("" if device.serving else " (not ready)")
            for device in self.engines.devices
        )
        return (
            f"warpfit listening on {self.config.host}:{self.port}"
            f" engine={self.engines.engine} [{devices}] front-ends={self.config.processes}"
            f"{''.join(f' {port}' for port in self._ports)}"
            f" resident<={limits.resident_bytes >> 20}MiB result<={limits.result_bytes >> 20}MiB"
            f" programs<={limits.programs} tokens<={limits.tokens} requests<={limits.requests}"
        )
