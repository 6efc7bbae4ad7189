"""The engines of a server, one process for each device, as the main process sees them."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from warpfit.errors import UnavailableError
from warpfit.server_info import Device
from warpfit_server.config import Config
from warpfit_server.data.dataset_store import StoredDataset
from warpfit_server.ipc.in_flight_request import unavailable
from warpfit_server.ipc.quarantine import Quarantine
from warpfit_server.ipc.segments import SegmentPool
from warpfit_server.processes.engine_start import StartedEngine
from warpfit_server.processes.engine_supervisor import EngineSupervisor, settled

#: Seconds between two looks whether the server stops while its engines start.
_POLL_SECONDS = 0.1


class Engines:
    """Owns the supervisors of all engines; an engine loads a data set when it is needed there.

    They take the processes that have been ``started`` out of that dictionary. ``pool`` has the
    memory of probes.
    """

    def __init__(
        self,
        config: Config,
        pool: SegmentPool,
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

    def start(
        self,
        resident: Callable[[], Iterator[StoredDataset]],
        on_ready: Callable[[EngineSupervisor], None] = lambda supervisor: None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start all engines, and wait until each is ready or is too late or has failed.

        Engines that are not ready are tried again. ``resident`` yields the resident data sets,
        pinned; ``on_ready`` is called with its supervisor whenever an engine process has become
        ready. If the server ``is_stopping``, none is waited for.

        Raises:
            UnavailableError: if none can run on this machine; the log says why.
        """
        for supervisor in self.supervisors:
            supervisor.resident, supervisor.on_ready = resident, partial(on_ready, supervisor)
            supervisor.start()
        end = time.monotonic() + self._start_seconds
        for supervisor in self.supervisors:
            while not supervisor.settled.wait(_POLL_SECONDS):
                if is_stopping() or time.monotonic() > end:
                    break
        has_any = any(supervisor.has_been_ready for supervisor in self.supervisors)
        if not has_any and not is_stopping():
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

    def devices(self, serving: frozenset[str]) -> tuple[Device, ...]:
        """Return every device, and whether its label is among those that serve."""
        described = [supervisor.description for supervisor in self.supervisors]
        return tuple(replace(device, serving=device.label in serving) for device in described)

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

    def load(self, number: int, dataset: StoredDataset) -> Future[None]:
        """Have an engine load a data set, unless the data set may have crashed another one.

        That one finds out as it starts.
        """
        holders, suspects = self.holders(dataset.key), self.quarantine.suspects
        if holders and number not in holders and suspects.is_suspect(dataset.key):
            return settled(unavailable())
        return self.supervisors[number].load(dataset)
