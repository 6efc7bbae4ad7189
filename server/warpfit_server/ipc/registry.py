"""The registry: what a front end knows of the resident data sets, which the main process owns.

The main process announces and withdraws data sets, and tells which engines hold them. A front end
asks it for a data set that it does not know, so that NOT_FOUND is only said where the main process
says so. That it knows one does not keep it resident: what keeps it are the calls that use it, which
stand in the shared table of `warpfit_server.tenancy.quotas`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Self

from warpfit_server.ipc.messages import FoundDataset
from warpfit_server.tenancy.quotas import QuotaTable


class KnownDataset:
    """A data set as a front end knows it; as a context manager it stays resident inside the block.

    Args:
        table: of uses.
        found: what the main process says of it.
        load: asks the main process to have an engine, by its number, load a data set.
    """

    __slots__ = (
        *("_load", "_loading", "_lock", "_on_withdrawal", "_table"),
        *("engines", "is_withdrawn", "key", "layout", "slot"),
    )

    def __init__(
        self, table: QuotaTable, found: FoundDataset, load: Callable[[int, bytes], Future[None]]
    ) -> None:
        self._table = table
        self.key, self.slot = found.key, found.slot
        self.layout = found.layout
        self.engines = frozenset(found.engines)
        """Numbers of the engines that hold it, as far as this process knows."""
        self._load = load
        self._loading: dict[int, Future[None]] = {}
        self._lock = threading.Lock()
        self._on_withdrawal: set[Callable[[], None]] = set()
        self.is_withdrawn = False
        """Whether it was removed for all callers, so that what may last long has to end."""

    def __enter__(self) -> Self:
        self._table.use_dataset(self.slot, 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._table.use_dataset(self.slot, -1)

    def call_on_withdrawal(self, callback: Callable[[], None]) -> None:
        """Have a function called, by any thread, when the data set is removed for all callers."""
        with self._lock:
            self._on_withdrawal.add(callback)
        if self.is_withdrawn:
            callback()

    def call_no_more(self, callback: Callable[[], None]) -> None:
        """Forget what `call_on_withdrawal` was given."""
        with self._lock:
            self._on_withdrawal.discard(callback)

    def withdraw(self) -> None:
        """Take note that no new call may use it."""
        self.is_withdrawn = True
        with self._lock:
            callbacks = list(self._on_withdrawal)
        for callback in callbacks:
            callback()

    def load(self, engine: int) -> Future[None]:
        """Have an engine load it, unless that is under way.

        The future fails with ResourceExhaustedError if the device has no room, with
        FailedPreconditionError if engines have died of the data set, and with UnavailableError if
        one may have.
        """
        with self._lock:
            future = self._loading.get(engine)
            if future is None:
                future = self._loading[engine] = self._load(engine, self.key)
                future.add_done_callback(lambda ended: self._loaded(engine, ended))
        return future

    def _loaded(self, engine: int, ended: Future[None]) -> None:
        """Take note of the end of a load; the next call asks again if it failed."""
        self._loading.pop(engine, None)
        if ended.exception() is None:
            self.engines |= {engine}


class Registry:
    """The data sets that this front end knows.

    Args:
        table: of uses.
        find: asks the main process for a data set; raises DatasetNotFoundError.
        load: see `KnownDataset`.
    """

    def __init__(
        self,
        table: QuotaTable,
        find: Callable[[bytes], FoundDataset],
        load: Callable[[int, bytes], Future[None]],
    ) -> None:
        self._table = table
        self._find = find
        self._load = load
        self._known: dict[bytes, KnownDataset] = {}

    def use(self, key: bytes) -> KnownDataset:
        """Return a data set, to use it in a ``with`` block.

        Raises:
            DatasetNotFoundError: if it is not resident.
        """
        return self._known.get(key) or self.add(self._find(key))

    def add(self, found: FoundDataset) -> KnownDataset:
        """Know a data set that the main process has found or announced."""
        known = self._known.get(found.key)
        if known is None or known.slot != found.slot:
            known = self._known[found.key] = KnownDataset(self._table, found, self._load)
        return known

    def forget(self, key: bytes) -> None:
        """Ask again for a data set that an engine does not know."""
        self._known.pop(key, None)

    def withdrawn(self, key: bytes) -> None:
        """Take note that the main process removes a data set."""
        if (known := self._known.pop(key, None)) is not None:
            known.withdraw()

    def held(self, key: bytes, engine: int) -> None:
        """Take note that an engine holds a data set."""
        if (known := self._known.get(key)) is not None:
            known.engines |= {engine}

    def unloaded(self, key: bytes) -> None:
        """Take note that no engine holds a data set any more."""
        if (known := self._known.get(key)) is not None:
            known.engines = frozenset()

    def engine_started(self, engine: int) -> None:
        """Ask again whether an engine holds data sets: a new process may have had no room."""
        for known in list(self._known.values()):
            known.engines -= {engine}

    def loads(self, engine: int) -> int:
        """Return the number of data sets that an engine holds, as far as this process knows."""
        return sum(engine in known.engines for known in list(self._known.values()))
