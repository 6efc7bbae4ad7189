"""What operators of a server look at: health, metrics and traces, put together."""

from __future__ import annotations

import os
import time

from warpfit_server.config import Config
from warpfit_server.data.dataset_store import DatasetStore
from warpfit_server.metrics import MetricsPage, Sources
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
from warpfit_server.rpc.tls import join_address


class Operations:
    """Health, watchdog, metrics and traces of the front door.

    Args:
        config: ports and intervals.
        supervisor: of the engine.
        datasets: the resident data sets.
        doors: the further doors, which are told about readiness.
        recorder: of the front door.
        service: full name of the gRPC service.

    Raises:
        UnavailableError: if traces are asked for and OpenTelemetry is not installed.

    """

    def __init__(
        self,
        config: Config,
        supervisor: EngineSupervisor,
        datasets: DatasetStore,
        doors: FrontEndSupervisor,
        recorder: Recorder,
        service: str,
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._doors = doors
        self._tracer = make_tracer(config.tracing)
        self.observer = Observer(recorder, self._tracer)
        self.health = Health(service, doors.tell_readiness)
        self._probe = Probe(supervisor.connection, doors.seed)
        self._probe.make_resident(datasets, supervisor)
        self._watchdog = Watchdog(
            *(config, supervisor, self._probe, self.health, doors.answer, self._tick)
        )
        supervisor.on_loss = self._watchdog.engine_lost
        self._sources = Sources(
            recorder,
            supervisor,
            datasets,
            self.health,
            config.limits().resident_bytes,
            self._processes,
            lambda: self._watchdog.probe_seconds,
            GpuMonitor(),
        )
        self._health_port: HealthPort | None = None
        self._metrics_port: MetricsPort | None = None

    def open_ports(self) -> None:
        """Open the ports for health checks and metrics, those that are asked for.

        Raises:
            UnavailableError: if one is taken.

        """
        config = self._config
        if config.health_port is not None:
            self._health_port = HealthPort(self.health, config.health_host, config.health_port)
        if config.metrics_port is not None:
            page = MetricsPage(self._sources)
            self._metrics_port = MetricsPort(page, config.metrics_host, config.metrics_port)

    def watch(self) -> None:
        """Begin to probe the engine; return when it has answered."""
        self._watchdog.start()

    def engine_ready(self) -> None:
        """Probe a new engine at once."""
        self._watchdog.engine_ready()

    def drain(self) -> None:
        """Be not ready, and give those who look some time to notice."""
        self.health.drain()
        time.sleep(self._config.notice)

    def stop(self) -> None:
        """Close the ports, send the last traces."""
        self._watchdog.stop()
        self._probe.close()
        for port in (self._health_port, self._metrics_port):
            if port is not None:
                port.stop()
        if self._tracer is not None:
            self._tracer.close()

    def describe(self) -> str:
        """Describe the open ports for the start-up line."""
        config = self._config
        ports = (
            ("health", config.health_host, self._health_port),
            ("metrics", config.metrics_host, self._metrics_port),
        )
        return "".join(
            f" {name}={join_address(host, port.port)}" for name, host, port in ports if port
        )

    def _tick(self) -> None:
        self._doors.kill_silent(engine_answers=self._watchdog.answers)
        self._supervisor.quarantine.expire()

    def _processes(self) -> dict[str, int]:
        processes = {"front door": os.getpid(), **self._doors.processes()}
        engine = self._supervisor.process_id
        return processes if engine is None else {**processes, "engine": engine}
