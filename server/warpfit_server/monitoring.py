"""Monitoring of the main process: assembles health, watchdog, metrics and traces."""

from __future__ import annotations

import os
import time
from functools import partial

from warpfit_server.config import Config
from warpfit_server.data.dataset_store import DatasetStore
from warpfit_server.metrics import ServerCollector
from warpfit_server.observability.calls import Observer
from warpfit_server.observability.gpu_monitor import GpuMonitor
from warpfit_server.observability.measurements import Recorder
from warpfit_server.observability.metrics_port import MetricsPort
from warpfit_server.observability.tracing import make_tracer
from warpfit_server.processes.engine_supervisor import EngineSupervisor
from warpfit_server.processes.engines import Engines
from warpfit_server.processes.front_end_supervisor import FrontEndSupervisor
from warpfit_server.processes.probe import Probe
from warpfit_server.processes.watchdog import Watchdog
from warpfit_server.rpc.health import Health, HealthPort
from warpfit_server.rpc.port import join_address
from warpfit_server.rpc.servicer import SERVICE_NAME
from warpfit_server.tenancy.quotas import QuotaTable


class Monitoring:
    """Health, watchdog, metrics and traces of the main process.

    Raises:
        UnavailableError: if traces are asked for and OpenTelemetry is not installed.

    """

    def __init__(
        self,
        config: Config,
        engines: Engines,
        datasets: DatasetStore,
        front_ends: FrontEndSupervisor,
        recorder: Recorder,
        quotas: QuotaTable,
    ) -> None:
        self._config = config
        self._engines = engines
        self._datasets = datasets
        self._front_ends = front_ends
        self._tracer = make_tracer(config.tracing)
        self.observer = Observer(recorder, self._tracer)
        labels = [device.label for device in config.engines]
        self.health = Health(SERVICE_NAME, labels, front_ends.announce_readiness)
        self._probes = [Probe(s.connection, front_ends.seed) for s in engines.supervisors]
        self._probes[0].make_resident(datasets, engines)
        self.watchdogs = [
            self._watchdog(supervisor, probe)
            for supervisor, probe in zip(engines.supervisors, self._probes, strict=True)
        ]
        self._collector = ServerCollector(
            recorder,
            engines,
            datasets,
            self.health,
            config.limits().resident_bytes,
            self._processes,
            lambda: {watchdog.label: watchdog.probe_seconds for watchdog in self.watchdogs},
            quotas.work,
            GpuMonitor(),
        )
        self._health_port: HealthPort | None = None
        self._metrics_port: MetricsPort | None = None

    def _watchdog(self, supervisor: EngineSupervisor, probe: Probe) -> Watchdog:
        """Make an engine's watchdog; that of the first one also looks after everything else."""
        watchdog = Watchdog(
            self._config,
            supervisor,
            probe,
            self.health,
            partial(self._front_ends.all_answered_by, supervisor.number),
            self._tick if supervisor.number == 0 else lambda: None,
        )
        supervisor.on_loss = watchdog.engine_lost
        return watchdog

    def start_watchdogs(self) -> None:
        """Probe all engines, and wait until those that have started answer."""
        for watchdog in self.watchdogs:
            watchdog.start()
        for watchdog in self.watchdogs:
            watchdog.wait_ready()

    def open_ports(self) -> None:
        """Open the ports for health checks and metrics that are configured.

        Raises:
            UnavailableError: if one is taken.

        """
        config = self._config
        if config.health_port is not None:
            self._health_port = HealthPort(self.health, config.health_host, config.health_port)
        if config.metrics_port is not None:
            self._metrics_port = MetricsPort(
                self._collector.render, config.metrics_host, config.metrics_port
            )

    def drain(self) -> None:
        """Be not ready for good, and give load balancers some time to notice."""
        self.health.drain()
        time.sleep(self._config.notice)

    def stop(self) -> None:
        """Close the ports and send the last traces."""
        for watchdog in self.watchdogs:
            watchdog.stop()
        self._probes[0].close()
        for port in (self._health_port, self._metrics_port):
            if port is not None:
                port.stop()
        if self._tracer is not None:
            self._tracer.close()

    def describe(self) -> str:
        """Return the open ports for the start-up line."""
        config = self._config
        ports = (
            ("health", config.health_host, self._health_port),
            ("metrics", config.metrics_host, self._metrics_port),
        )
        return "".join(
            f" {name}={join_address(host, port.port)}" for name, host, port in ports if port
        )

    def _tick(self) -> None:
        self._front_ends.kill_silent([n for n, w in enumerate(self.watchdogs) if w.answers])
        self._engines.quarantine.expire()
        self._datasets.expire(self._config.lease_seconds)

    def _processes(self) -> dict[str, int]:
        processes = {"main": os.getpid(), **self._front_ends.processes()}
        for supervisor in self._engines.supervisors:
            if supervisor.process_id is not None:
                processes[f"engine {supervisor.device.label}"] = supervisor.process_id
        return processes
