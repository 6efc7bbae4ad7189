"""The server as a whole: assembles the main process and takes it apart again.

The main process supervises engines and front ends and owns the memory of the data sets. It answers
no calls.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final

from warpfit_server.dataset_store import DatasetStore
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.logs import Recorder
from warpfit_server.machine import join_address, reserve_port, split_address
from warpfit_server.processes.engine_start import Preparation
from warpfit_server.processes.engines import Engines, EngineSupervisor
from warpfit_server.processes.front_ends import FrontEnds
from warpfit_server.processes.watchdog import TICK, Probe, Watchdog
from warpfit_server.tenants import QuotaTable

_LOG: Final = logging.getLogger("warpfit")


class Server:
    """A running server; a context manager within that of `prepare`, which yields ``prepared``.

    ``port`` is the port that it listens on; `warpfit_server.metrics.Measured` names the fields that
    metrics read. Once ``is_stopping``, the server waits for no engine to start; once it
    ``is_hurried``, for no call to finish.

    Raises:
        InvalidArgumentError: if the settings would expose what they should not, or allow more
            memory than there is.
        UnavailableError: if a port is taken.
    """

    def __init__(
        self,
        prepared: Preparation,
        is_stopping: Callable[[], bool] = lambda: False,
        is_hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        config = self.config = prepared.config
        config.check_exposure()
        config.check_memory()
        self._is_stopping, self._is_hurried = is_stopping, is_hurried
        self._stack = ExitStack()
        self.port = self._reserve(config.host, config.port, "--host or --port")
        self._ports: dict[str, str] = {}
        health_port = -1
        if config.health_port is not None:
            host, port = split_address(config.health_port)
            health_port = self._reserve(host, port, "--health-port")
            self._ports["health"] = join_address(host, health_port)
        pool, self.recorder = SegmentPool(*config.idle_pool), Recorder()
        self.quotas = QuotaTable.create(config.processes, len(config.engines))
        self.engines = Engines(config, pool, prepared.engines)
        self._front_ends = FrontEnds(
            config,
            self.engines,
            self.quotas,
            self.recorder,
            lambda: self.watchdog.readiness.serving,
            self.port,
            health_port,
        )
        self.datasets = DatasetStore(
            config.limits(),
            self.quotas,
            self._front_ends.unload_dataset,
            self._front_ends.announce_dataset,
            self._front_ends.withdraw_dataset,
        )
        seed, supervisors = self._front_ends.seed, self.engines.supervisors
        probes = [Probe(supervisor.connection, seed) for supervisor in supervisors]
        key = probes[0].make_resident(self.datasets, pool)
        probed = self._stack.enter_context(self.datasets.pin(key))
        for supervisor in supervisors:
            supervisor.load(probed).result()
        chores = (
            self.engines.quarantine.count,
            partial(self.datasets.expire, config.lease_seconds),
        )
        self.watchdog = Watchdog(config, self.engines, probes, probed, self._front_ends, chores)

    def _reserve(self, host: str, port: int, flag: str) -> int:
        """Reserve a port for the front ends; return its number."""
        reserved = self._stack.enter_context(reserve_port(host, port, flag))
        number: int = reserved.getsockname()[1]
        return number

    def __enter__(self) -> Server:
        """Start all processes; return when the server is ready."""

        def engine_ready(supervisor: EngineSupervisor) -> None:
            self._front_ends.engine_ready(supervisor.number)
            self.watchdog.engines[supervisor.number].engine_ready()

        try:
            config = self.config
            if config.metrics_port is not None:  # imported only then, because that takes a while
                from warpfit_server.metrics import MetricsPort, ServerCollector

                host, port = split_address(config.metrics_port)
                page = MetricsPort(ServerCollector(self), host, port)
                self._stack.callback(page.stop)
                self._ports["metrics"] = join_address(host, page.port)
            self._front_ends.start(self.datasets)
            self.engines.start(
                self.datasets.pinned,
                engine_ready,
                lambda: self._is_stopping() or self._front_ends.failure is not None,
            )
            self._front_ends.open(self._is_stopping)
            self.watchdog.start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """End readiness, refuse new calls, let calls in flight finish in time, and stop."""
        self.watchdog.readiness.drain()
        self._front_ends.announce_readiness(is_draining=True)
        self._wait(self.config.notice, lambda: False)  # load balancers take notice
        calls, grace = self.quotas.calls_in_flight(), self.config.grace
        if calls:
            text = "stopping: %d calls in flight may take %g s; a second signal cuts them off"
            _LOG.info(text, calls, grace)
        self._front_ends.begin_stop()
        self._wait(grace, lambda: not self.quotas.calls_in_flight())
        if calls := self.quotas.calls_in_flight():
            why = "by a second signal" if self._is_hurried() else f"after {grace:g} s"
            _LOG.warning("stopping: %d calls are cut off %s", calls, why)
        if self._is_hurried():
            self._front_ends.begin_stop()  # the second time means at once
        self._stop()

    def _wait(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Wait until a time or what is waited for has come, or somebody is in a hurry."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not is_over() and not self._is_hurried():
            time.sleep(TICK)

    def _stop(self) -> None:
        self._front_ends.stop()
        self.watchdog.stop()
        self._stack.close()
        self.engines.stop()

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
            for device in self.engines.devices(self.watchdog.readiness.serving)
        )
        return (
            f"warpfit listening on {join_address(self.config.host, self.port)}"
            f" engine={self.engines.engine} [{devices}] front-ends={self.config.processes}"
            f"{''.join(f' {name}={address}' for name, address in self._ports.items())}"
            f" resident<={limits.resident_bytes >> 20}MiB result<={limits.result_bytes >> 20}MiB"
            f" programs<={limits.programs} tokens<={limits.tokens} requests<={limits.requests}"
        )
