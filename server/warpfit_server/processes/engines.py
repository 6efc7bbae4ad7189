"""The engines of a server, one process for each device, as the main process sees them."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

from warpfit.dataset import Layout
from warpfit.errors import (
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    WarpfitError,
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
from warpfit_server.row_blocks import Shards
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
        self._introduced: set[tuple[int, int]] | None = None  # None before any data set is sharded
        self._introducing = threading.Lock()

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

        def ready(supervisor: EngineSupervisor) -> None:
            if self._introduced is not None:
                self._introduce_all()
            on_ready(supervisor)

        for supervisor in self.supervisors:
            supervisor.on_request_connection = partial(self._introduce_again, supervisor)
            supervisor.start(resident, partial(ready, supervisor))
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

    def shards(self, layout: Layout, count: int) -> Shards | None:
        """Divide a data set into shards among the engines that have least data.

        There are fewer of them if there are few rows, and none if the count is 0 or 1.

        Raises:
            InvalidArgumentError: if there are fewer devices.
        """
        if count > len(self.supervisors):
            raise InvalidArgumentError(
                f"{count} shards for {len(self.supervisors)} devices",
                "TOO_MANY_SHARDS",
                "Ask for at most as many shards as the server has devices (warpfit info)",
                "shards",
            )
        return Shards.of(layout, tuple(s.number for s in self._by_load()[: max(1, count)]))

    def place(self, dataset: StoredDataset, *, whole: bool = False) -> None:
        """Load a new data set into its engines, or into one, and if none has room into all.

        What cannot be divided, and shards that no device has room for, may be streamed.

        Args:
            dataset: the data set.
            whole: whether it is not to be sharded where no device has room for it.

        Raises:
            ResourceExhaustedError: if they have no room either.
            FailedPreconditionError: if engines have died of the data set.
        """
        if self.holders(dataset.key):
            return
        if dataset.shards is not None:
            self._place_shards(dataset, dataset.shards)
            return
        shards = None if whole else self.shards(dataset.layout, len(self.supervisors))
        try:
            self._place_whole(dataset, streams=shards is None)
        except ResourceExhaustedError as refusal:
            if shards is None:
                raise
            _LOG.info("a data set is sharded, because no device has room for it: %s", refusal)
            dataset.shards = shards
            self._place_shards(dataset, shards)

    def _place_shards(self, dataset: StoredDataset, shards: Shards) -> None:
        with self._introducing:
            self._introduced = self._introduced or set()
        self._introduce_all()
        try:
            for load in [self.supervisors[number].load(dataset) for number in shards.engines]:
                load.result()
        except WarpfitError:
            self.unload(dataset.key)
            raise

    def _place_whole(self, dataset: StoredDataset, *, streams: bool) -> None:
        refusal: ResourceExhaustedError | None = None
        for supervisor in self._by_load():
            try:
                supervisor.load(dataset, streams=streams).result()
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

    def _introduce_all(self) -> None:
        """Give each engine a connection to every other one that it has none to."""
        for one, other in itertools.permutations(self.supervisors, 2):
            self._introduce(one, other)

    def _introduce_again(self, one: EngineSupervisor, number: int) -> None:
        """Give an engine a connection in place of one that it has lost."""
        other = self.supervisors[number]
        with self._introducing:
            if self._introduced is not None:
                self._introduced.discard((one.process_number, other.process_number))
        self._introduce(one, other)

    def _introduce(self, one: EngineSupervisor, other: EngineSupervisor) -> None:
        with self._introducing:
            pair = one.process_number, other.process_number
            is_new = self._introduced is not None and pair not in self._introduced
            if not (is_new and one.is_ready and other.is_ready):
                return  # the next engine process is introduced when it is ready
            try:
                process, end = other.connect()
            except WarpfitError as error:
                labels = one.device.label, other.device.label
                _LOG.error("no connection of %s to %s: %s", *labels, error)
                return
            one.introduce(other.number, process, end)
            assert self._introduced is not None
            self._introduced.add(pair)

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
                dataset.shards,
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
