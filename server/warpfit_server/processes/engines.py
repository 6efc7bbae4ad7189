"""The engines of a server, one process for each device, as the main process sees them."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from warpfit.errors import (
    ResourceExhaustedError,
    UnavailableError,
)
from warpfit.server_info import Device
from warpfit_server.config import Config
from warpfit_server.data.dataset_store import DatasetStore, StoredDataset
from warpfit_server.ipc.in_flight_request import unavailable
from warpfit_server.ipc.quarantine import Quarantine
from warpfit_server.ipc.router import Leased, Router
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.processes.engine_start import StartedEngine
from warpfit_server.processes.engine_supervisor import EngineSupervisor, settled
from warpfit_server.tenancy.quotas import QuotaTable

_LOG: Final = logging.getLogger("warpfit.engines")


class Engines:
    """Owns the supervisors of all engines; an engine loads a data set when it is needed there.

    They take the processes that have been ``started`` out of that dictionary.
    """

    def __init__(
        self,
        config: Config,
        pool: SegmentPool,
        table: QuotaTable,
        started: dict[int, StartedEngine] | None = None,
    ) -> None:
        self.quarantine = Quarantine()
        """Suspects and quarantined batches and data sets, the same for all engines."""
        self._start_seconds = config.start_seconds
        numbers = itertools.count(1)
        self.supervisors = [
            EngineSupervisor(config, number, pool, self.quarantine, numbers, started)
            for number in range(len(config.engines))
        ]
        labels = [device.label for device in config.engines]
        self.router = Router(
            [s.connection for s in self.supervisors], labels, table, self.quarantine.suspects
        )
        """Routes the calls of this process."""

    def start(
        self,
        resident: Callable[[], Iterator[StoredDataset]],
        on_ready: Callable[[EngineSupervisor], None] = lambda supervisor: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start all engines, and wait until each is ready or is too late or has failed.

        Engines that are not ready are tried again. ``on_ready`` is called with its supervisor
        whenever an engine process has become ready; see `EngineSupervisor.start`. If the server
        ``is_stopping``, none is waited for.

        Raises:
            UnavailableError: if none can run on this machine; the log says why.
        """
        for supervisor in self.supervisors:
            supervisor.start(resident, partial(on_ready, supervisor))
        end = time.monotonic() + self._start_seconds
        started = [supervisor.wait_started(end, is_stopping) for supervisor in self.supervisors]
        if not any(started) and not is_stopping():
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
        """Load a new data set into one engine that has room for it.

        Raises:
            ResourceExhaustedError: if none has.
            FailedPreconditionError: if engines have died of the data set.
        """
        if self.holders(dataset.key):
            return
        refusal: ResourceExhaustedError | None = None
        for supervisor in self._by_load():
            try:
                supervisor.load(dataset).result()
            except ResourceExhaustedError as error:
                refusal = refusal or error
            else:
                return
        assert refusal is not None  # there is an engine at least
        raise refusal

    def _by_load(self) -> list[EngineSupervisor]:
        """Return the engines, those first that serve and have few data sets."""
        serving = self.router.serving

        def rank(supervisor: EngineSupervisor) -> tuple[bool, bool, int]:
            serves = supervisor.device.label in serving
            return not serves, not supervisor.is_ready, supervisor.loads

        return sorted(self.supervisors, key=rank)

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
    def lease(self, datasets: DatasetStore, key: bytes) -> Iterator[Leased]:
        """Lease a data set of the main process; see `warpfit_server.rpc.servicer.Lease`."""
        with datasets.lease(key) as dataset:
            yield Leased(
                dataset.layout,
                lambda number: self.supervisors[number].has(key),
                partial(self._load, dataset),
            )

    def _load(self, dataset: StoredDataset, number: int) -> Future[None]:
        """Have an engine load a data set, unless the data set may have crashed another one.

        That one finds out as it starts.
        """
        holders, suspects = self.holders(dataset.key), self.quarantine.suspects
        if holders and number not in holders and suspects.is_suspect(dataset.key):
            return settled(unavailable())
        return self.supervisors[number].load(dataset)
