"""The engines of a server, one process for each device, as the main process sees them."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from warpfit.dataset import Layout
from warpfit.errors import ResourceExhaustedError, UnavailableError
from warpfit.server_info import Device
from warpfit_server.config import Config
from warpfit_server.data.dataset_store import DatasetStore, StoredDataset
from warpfit_server.ipc.in_flight_request import unavailable
from warpfit_server.ipc.quarantine import Quarantine
from warpfit_server.ipc.router import Router
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.processes.engine_supervisor import EngineSupervisor
from warpfit_server.tenancy.quotas import QuotaTable


class Engines:
    """Owns the supervisors of all engines; an engine loads a data set when it is needed there.

    Args:
        config: the server's configuration.
        pool: provides segments for this process's calls.
        table: of the outstanding work.

    """

    def __init__(self, config: Config, pool: SegmentPool, table: QuotaTable) -> None:
        self.quarantine = Quarantine()
        """Suspects and quarantined batches and data sets, the same for all engines."""
        self._start_seconds = config.start_seconds
        numbers = itertools.count(1)
        self.supervisors = [
            EngineSupervisor(config, number, pool, self.quarantine, numbers)
            for number in range(len(config.engines))
        ]
        labels = [device.label for device in config.engines]
        self.router = Router([s.connection for s in self.supervisors], labels, table)
        """Routes the calls of this process."""

    def start(
        self,
        resident: Callable[[], Iterator[StoredDataset]],
        on_ready: Callable[[EngineSupervisor], None] = lambda supervisor: None,
    ) -> None:
        """Start all engines, and wait until each is ready or is too late or has failed.

        Engines that are not ready are tried again.

        Args:
            resident: yields the resident data sets, leased.
            on_ready: called with its supervisor whenever an engine process has become ready.

        Raises:
            UnavailableError: if none can run on this machine; the log says why.

        """
        for supervisor in self.supervisors:
            supervisor.start(resident, partial(on_ready, supervisor))
        end = time.monotonic() + self._start_seconds
        started = [s.wait_started(max(0.0, end - time.monotonic())) for s in self.supervisors]
        if not any(started):
            self.stop()
            raise UnavailableError(
                "no engine has started",
                "ENGINE_FAILED",
                "The log lines above say why"
                + ("" if self.engine == "cpu" else "; --devices cpu runs everywhere"),
            )

    @property
    def engine(self) -> str:
        """Kind of the engines, ``"cpu"`` or ``"cuda"``."""
        return self.supervisors[0].device.kind

    @property
    def devices(self) -> tuple[Device, ...]:
        """Every device, and whether it serves."""
        described = [supervisor.description for supervisor in self.supervisors]
        return tuple(replace(d, serving=d.label in self.router.serving) for d in described)

    @property
    def restarts(self) -> Counter[tuple[str, str]]:
        """Number of engine processes that ended unasked, by device and cause."""
        return Counter(
            {
                (supervisor.device.label, cause): count
                for supervisor in self.supervisors
                for cause, count in dict(supervisor.restarts).items()
            }
        )

    def holders(self, key: bytes) -> tuple[int, ...]:
        """Return the numbers of the engines that have loaded a data set."""
        return tuple(s.number for s in self.supervisors if s.has(key))

    def place(self, dataset: StoredDataset) -> None:
        """Load a new data set into one engine, which tells whether any device has room for it.

        Raises:
            ResourceExhaustedError: if none has.
            FailedPreconditionError: if engines have died of the data set.

        """
        if self.holders(dataset.key):
            return
        refusal: ResourceExhaustedError | None = None
        serving = self.router.serving

        def rank(supervisor: EngineSupervisor) -> tuple[bool, bool, int]:
            serves = supervisor.device.label in serving
            return not serves, not supervisor.is_ready, supervisor.loads

        for supervisor in sorted(self.supervisors, key=rank):
            try:
                supervisor.load(dataset).result()
            except ResourceExhaustedError as error:
                refusal = refusal or error
            else:
                return
        assert refusal is not None  # there is an engine at least
        raise refusal

    def unload(self, key: bytes) -> None:
        """Make every engine forget a data set."""
        for supervisor in self.supervisors:
            supervisor.unload(key)

    def stop(self) -> None:
        """End the engine processes; requests in flight fail."""
        for supervisor in self.supervisors:
            supervisor.begin_stop()
        for supervisor in self.supervisors:
            supervisor.stop()

    @contextmanager
    def lease(self, datasets: DatasetStore, key: bytes) -> Iterator[HostLease]:
        """Lease a data set of the main process; see `warpfit_server.rpc.servicer.Lease`."""
        with datasets.lease(key) as dataset:
            yield HostLease(dataset, self)


class HostLease:
    """A leased data set of the main process; implements `warpfit_server.ipc.router.Leased`."""

    def __init__(self, dataset: StoredDataset, engines: Engines) -> None:
        self._dataset = dataset
        self._engines = engines

    @property
    def layout(self) -> Layout:
        """Layout of the data set."""
        return self._dataset.layout

    def has(self, engine: int) -> bool:
        """Return whether an engine has loaded the data set."""
        return self._engines.supervisors[engine].has(self._dataset.key)

    def load(self, engine: int) -> Future[None]:
        """Have an engine load the data set, unless it has.

        The future fails with UnavailableError if the data set may have crashed another engine,
        which finds out as it starts.
        """
        holders, key = self._engines.holders(self._dataset.key), self._dataset.key
        if holders and engine not in holders and self._engines.quarantine.suspects.is_suspect(key):
            refused: Future[None] = Future()
            refused.set_exception(unavailable())
            return refused
        return self._engines.supervisors[engine].load(self._dataset)
