"""Monitoring of the main process: assembles health, watchdog, metrics and traces."""

from __future__ import annotations

import os
import time

from warpfit_server.config import Config
from warpfit_server.data.dataset_store import DatasetStore
from warpfit_server.metrics import ServerCollector
from warpfit_server.observability.calls import Observer
from warpfit_server.observability.gpu_monitor import GpuMonitor
from warpfit_server.observability.measurements import Recorder
from warpfit_server.observability.metrics_port import MetricsPort
from warpfit_server.observability.tracing import make_tracer
from warpfit_server.processes.engine_supervisor import EngineSupervisor
from warpfit_server.processes.front_end_supervisor import FrontEndSupervisor
from warpfit_server.processes.probe import Probe
from warpfit_server.processes.watchdog import Watchdog
from warpfit_server.rpc.health import Health, HealthPort
from warpfit_server.rpc.port import join_address
from warpfit_server.rpc.servicer import SERVICE_NAME


class Monitoring:
    """Health, watchdog, metrics and traces of the main process.

    Raises:
        UnavailableError: if traces are asked for and OpenTelemetry is not installed.

    """

    def __init__(
        self,
        config: Config,
        supervisor: EngineSupervisor,
        datasets: DatasetStore,
        front_ends: FrontEndSupervisor,
        recorder: Recorder,
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._datasets = datasets
        self._front_ends = front_ends
        self._tracer = make_tracer(config.tracing)
        self.observer = Observer(recorder, self._tracer)
        self.health = Health(SERVICE_NAME, front_ends.announce_readiness)
        self._probe = Probe(supervisor.connection, front_ends.seed)
        self._probe.make_resident(datasets, supervisor)
        self.watchdog = Watchdog(
            *(config, supervisor, self._probe, self.health, front_ends.all_answer, self._tick)
        )
        supervisor.on_loss = self.watchdog.engine_lost
        self._collector = ServerCollector(
            recorder,
            supervisor,
            datasets,
            self.health,
            config.limits().resident_bytes,
            self._processes,
            lambda: self.watchdog.probe_seconds,
            GpuMonitor(),
        )
        self._health_port: HealthPort | None = None
        self._metrics_port: MetricsPort | None = None

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
        self.watchdog.stop()
        self._probe.close()
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
        self._front_ends.kill_silent(engine_answers=self.watchdog.answers)
        self._supervisor.quarantine.expire()
        self._datasets.expire(self._config.lease_seconds)

    def _processes(self) -> dict[str, int]:
        processes = {"main": os.getpid(), **self._front_ends.processes()}
        engine = self._supervisor.process_id
        return processes if engine is None else {**processes, "engine": engine}
