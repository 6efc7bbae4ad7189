"""The resident data sets: copies in shared memory, from which every engine loads them."""

import logging
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from warpfit.dataset import Layout
from warpfit.errors import DatasetNotFoundError, ResourceExhaustedError
from warpfit.server_info import Limits
from warpfit_server.data.upload import Upload
from warpfit_server.ipc.segments import Segment, SegmentPool
from warpfit_server.limits import check_limit
from warpfit_server.tenancy.tenants import ANONYMOUS, PROBE

_LOG: Final = logging.getLogger("warpfit.datasets")
#: Most data sets that are resident at a time, and descriptors of the process for each of them: a
#: data set counts for at least its part of the budget, because it takes two descriptors.
_MOST_DATASETS, _FILES_EACH = 2048, 8
#: Memory that a variable's name takes beside its characters.
_NAME_BYTES: Final = 64
#: Seconds without use after which a data set that was given back leaves the devices.
_DEVICE_SECONDS: Final = 5.0
#: Seconds after which an upload is tried again that had no room beside what is in use.
_RETRY_SECONDS: Final = 0.2


@dataclass(eq=False, slots=True)
class StoredDataset:
    """A data set that engines can use."""

    key: bytes
    """Its name in this server, see `warpfit_server.tenancy.tenants.key_of`."""
    content_id: bytes
    tenant: str
    """Owner."""
    layout: Layout
    segment: Segment
    """Holds the payload from byte 0."""
    cost: int
    """Bytes that it counts for."""
    uses: int = 0
    """Calls that use it now; it is not evicted before they end."""
    last_use: float = field(default_factory=time.monotonic)
    is_given_back: bool = False
    """Whether a caller has ended its use and no call has used it since; it is evicted first."""
    is_unloaded: bool = False
    """Whether engines have been told to forget it since it was given back."""
    is_removed: bool = False
    """Whether new calls cannot use it any more; it is removed when the last use ends."""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """The contents of a store in numbers, and how often it ran out of room."""

    datasets: int
    nbytes: int
    """Resident and reserved."""
    evictions: int
    """Data sets that had to make room for others since the start."""


class DatasetStore:
    """Owns the resident data sets: leases, budgets, eviction of the least recently used.

    Callers that upload the same content share one data set. Nobody counts them: a caller that
    gives a data set back merely says that it does not need it, and the next use takes that back.
    What was given back stays resident like anything else, leaves the devices after some seconds,
    and is evicted before all else. So a caller takes nothing from another one, and one that dies
    without a word keeps nothing.

    An upload takes memory as its bytes arrive, and evicts others for bytes that have arrived, not
    for those that its header announces: those count against its own tenant's budget only.

    An upload that needs room evicts, in this order: data sets of its own tenant while that is over
    its own budget; those of tenants that hold more than an equal share of the server's budget; any
    others, unless its own tenant holds more than such a share. Among these the one used least
    recently goes first, and what was given back before the rest. Data sets in use stay. ``unload``
    is called with the key of each data set that the engines are to forget.
    """

    def __init__(self, limits: Limits, pool: SegmentPool, unload: Callable[[bytes], None]) -> None:
        self._limits = limits
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._least_cost = limits.resident_bytes // min(_MOST_DATASETS, files // _FILES_EACH)
        self._pool = pool
        self._unload = unload
        self._lock = threading.Lock()
        self._resident: dict[bytes, StoredDataset] = {}
        self._held: Counter[str] = Counter()  # bytes of each tenant, resident and arrived
        self._announced: Counter[str] = Counter()  # bytes of each that have not arrived yet
        self._evictions = 0

    def usage(self) -> StoreUsage:
        """Return what the store holds now."""
        with self._lock:
            return StoreUsage(len(self._resident), self._held.total(), self._evictions)

    def count(self, tenant: str) -> int:
        """Return the number of a tenant's resident data sets.

        Those that were given back do not count.
        """
        with self._lock:
            own = [d for d in self._resident.values() if d.tenant == tenant]
            return sum(not (d.is_given_back or d.is_removed) for d in own)

    def pinned(self) -> Iterator[StoredDataset]:
        """Yield every resident data set, each pinned while the caller has it; not a use."""
        with self._lock:
            keys = list(self._resident)
        for key in keys:
            with suppress(DatasetNotFoundError), self._pin(key) as dataset:
                yield dataset

    @contextmanager
    def lease(self, key: bytes) -> Iterator[StoredDataset]:
        """Use a data set, which stays resident inside the ``with`` block.

        Raises:
            DatasetNotFoundError: if it is not resident.
        """
        with self._pin(key) as dataset:
            _mark_used(dataset)
            try:
                yield dataset
            finally:
                _mark_used(dataset)  # also if it was given back meanwhile: another caller needs it

    def give_back(self, key: bytes) -> None:
        """Take note that a caller does not need a data set any more; others may still use it.

        Raises:
            DatasetNotFoundError: if it is not resident.
        """
        with self._lock:
            self._find(key).is_given_back = True

    def remove(self, key: bytes) -> None:
        """Remove a data set, whoever uses it: as soon as the calls that use it now have ended.

        Raises:
            DatasetNotFoundError: if it is not resident.
        """
        with self._lock:
            self._remove_soon(self._find(key))

    def expire(self, seconds: float) -> None:
        """Remove data sets that have not been used for some time.

        Those that were given back leave the devices much earlier.
        """
        now = time.monotonic()
        with self._lock:
            idle = [dataset for dataset in self._resident.values() if not dataset.uses]
            old = [dataset for dataset in idle if dataset.last_use < now - seconds]
            for dataset in old:
                self._remove(dataset)
            for dataset in idle:
                if (
                    dataset.is_given_back
                    and not dataset.is_unloaded
                    and dataset.last_use < now - _DEVICE_SECONDS
                ):
                    dataset.is_unloaded = True
                    self._unload(dataset.key)
        if old:
            _LOG.info("%d data sets were removed after %g s without use", len(old), seconds)

    def begin(
        self,
        layout: Layout,
        content_id: bytes,
        tenant: str = ANONYMOUS,
        limits: Limits | None = None,
    ) -> Upload:
        """Begin a tenant's upload if there is or can be room for it; nothing is evicted yet.

        An empty ``content_id`` takes the content as it is; the server's limits are the default.

        Raises:
            ResourceExhaustedError: if the data set is over a limit, or the budget is in use; with a
                time to retry after if there would be room with no call and no upload in flight.
        """
        limits = limits or self._limits
        check_limit(limits, "dataset_bytes", layout.nbytes)
        check_limit(limits, "rows", layout.rows)
        cost, budget = self._cost(layout), limits.resident_bytes
        segment = self._pool.create(layout.nbytes)  # takes memory when it is written
        with self._lock:
            try:
                self._victims(cost + self._announced[tenant], tenant, budget)
            except BaseException as error:
                segment.close()
                self._advise(error, cost, tenant, budget)
                raise
            self._announced[tenant] += cost
        return Upload(layout, content_id, tenant, segment, cost, budget)

    def add(self, upload: Upload, data: memoryview) -> None:
        """Take the next bytes of an upload, evicting idle data sets where that is needed.

        Raises:
            InvalidArgumentError: if there are more than the layout says.
            ResourceExhaustedError: if the budget is in use.
        """
        upload.check(data)
        self._reserve(upload, len(data))
        upload.add(data)

    def abandon(self, upload: Upload) -> None:
        """Give the memory of an upload back, unless that is over."""
        if upload.is_over:
            return
        upload.is_over = True
        upload.close()
        with self._lock:
            self._held[upload.tenant] -= upload.reserved
            self._announced[upload.tenant] -= upload.cost - upload.reserved

    @contextmanager
    def commit(self, upload: Upload) -> Iterator[StoredDataset]:
        """Make a finished upload resident; if its content already is, the older copy stays.

        It is in use inside the ``with`` block. An error there removes it, unless it is older.

        Raises:
            InvalidArgumentError: if bytes are missing or the digest does not match.
            ResourceExhaustedError: if there is no room for what it counts for beside its bytes: a
                small data set's least part of the budget, or the rows that have a weight where
                others have none, which engines copy.
        """
        upload.verify()
        copied = upload.weighted_bytes()
        with self._lock:
            upload.cost += copied
            self._announced[upload.tenant] += copied
        self._reserve(upload, upload.cost - upload.reserved)
        own = upload.key, upload.content_id, upload.tenant, upload.layout, upload.segment
        fresh = StoredDataset(*own, upload.cost)
        with self._lock:
            dataset = self._resident.setdefault(upload.key, fresh)
            dataset.is_removed = False
            dataset.uses += 1
        upload.is_over = dataset is fresh
        self.abandon(upload)
        _mark_used(dataset)
        try:
            yield dataset
        except BaseException:
            with self._lock:
                if dataset is fresh:
                    self._remove_soon(dataset)
            raise
        finally:
            self._end_use(dataset)

    def evict_for_device(self, tenant: str) -> int:
        """Evict one data set, because a tenant's upload has no room on any device.

        Returns:
            Bytes of the data set; 0 if there is none that may be evicted for this tenant.
        """
        with self._lock:
            for dataset in self._by_share(self._idle(), tenant, 0):
                if not dataset.is_unloaded:
                    self._remove(dataset)
                    self._evictions += 1
                    return dataset.layout.nbytes
        return 0

    @contextmanager
    def _pin(self, key: bytes) -> Iterator[StoredDataset]:
        with self._lock:
            dataset = self._find(key)
            dataset.uses += 1
        try:
            yield dataset
        finally:
            self._end_use(dataset)

    def _end_use(self, dataset: StoredDataset) -> None:
        with self._lock:
            dataset.uses -= 1
            if dataset.is_removed and not dataset.uses:
                self._remove(dataset)

    def _reserve(self, upload: Upload, size: int) -> None:
        with self._lock:
            try:
                victims = self._victims(size, upload.tenant, upload.budget)
            except BaseException as error:
                self._advise(error, upload.cost, upload.tenant, upload.budget)
                raise
            for dataset in victims:
                self._remove(dataset)
                self._evictions += 1
            self._held[upload.tenant] += size
            self._announced[upload.tenant] -= size
            upload.reserved += size

    # ------------------------------------------------------------------- under self._lock

    def _find(self, key: bytes) -> StoredDataset:
        dataset = self._resident.get(key)
        if dataset is None or dataset.is_removed:
            raise DatasetNotFoundError
        return dataset

    def _remove_soon(self, dataset: StoredDataset) -> None:
        dataset.is_removed = True
        if not dataset.uses:
            self._remove(dataset)

    def _remove(self, dataset: StoredDataset) -> None:
        del self._resident[dataset.key]
        self._held[dataset.tenant] -= dataset.cost
        dataset.segment.close()
        self._unload(dataset.key)

    def _cost(self, layout: Layout) -> int:
        names = sum(_NAME_BYTES + len(name) for name in layout.names)
        return max(layout.nbytes + names, self._least_cost)

    def _victims(self, needed: int, tenant: str, own_budget: int) -> list[StoredDataset]:
        """Choose what must be evicted for a tenant's next bytes.

        Raises:
            ResourceExhaustedError: if all that may be evicted is not enough.
        """
        over_own = self._held[tenant] + needed - own_budget
        over = self._held.total() + needed - self._limits.resident_bytes
        if over_own <= 0 and over <= 0:
            return []
        idle = self._idle()
        own = [dataset for dataset in idle if dataset.tenant == tenant]
        victims = self._first(own, over_own, needed, tells_available=True)
        freed = sum(dataset.cost for dataset in victims)
        rest = [dataset for dataset in idle if dataset not in victims]
        candidates = self._by_share(rest, tenant, needed)
        is_alone = all(name in (tenant, "") for name, held in self._held.items() if held)
        return victims + self._first(candidates, over - freed, needed, tells_available=is_alone)

    def _first(
        self, candidates: list[StoredDataset], over: int, needed: int, *, tells_available: bool
    ) -> list[StoredDataset]:
        """Choose the first candidates that free the bytes ``over`` a budget.

        Raises:
            ResourceExhaustedError: if all of them are not enough. It says what is available only
                if it ``tells_available``, because that tells what others hold.
        """
        chosen: list[StoredDataset] = []
        for dataset in candidates:
            if over <= 0:
                break
            chosen.append(dataset)
            over -= dataset.cost
        if over > 0:
            available = max(0, needed - over)
            known = f"{available} are available" if tells_available else "fewer are available"
            raise ResourceExhaustedError(
                f"{needed} more bytes of data sets are needed, {known}",
                "MEMORY",
                "Release data sets, or start the server with a higher --max-resident-bytes",
                needed=needed,
                available=available if tells_available else None,
            )
        return chosen

    def _idle(self) -> list[StoredDataset]:
        """Return the data sets that no call uses, in the order in which they are evicted."""
        idle = [dataset for dataset in self._resident.values() if not dataset.uses]
        return sorted(idle, key=lambda dataset: (not dataset.is_given_back, dataset.last_use))

    def _advise(self, error: BaseException, cost: int, tenant: str, own_budget: int) -> None:
        """Have an upload tried again that would have room if nothing were in use or arriving."""
        resident = list(self._resident.values())
        callers = [dataset for dataset in resident if dataset.tenant != PROBE]
        evictable = self._by_share(callers, tenant, cost)
        resident_bytes, evictable_bytes = (
            sum(dataset.cost for dataset in some) for some in (resident, evictable)
        )
        room = self._limits.resident_bytes - resident_bytes + evictable_bytes
        if isinstance(error, ResourceExhaustedError) and cost <= min(room, own_budget):
            error.retry_after = _RETRY_SECONDS

    def _by_share(self, idle: list[StoredDataset], tenant: str, needed: int) -> list[StoredDataset]:
        """Put data sets of tenants that hold more than an equal share first.

        Those of others are left out if the tenant itself holds more than its share. What was given
        back comes first, whoever holds it.
        """
        held = self._held + Counter({tenant: needed})  # tenants that hold anything
        share = self._limits.resident_bytes / len(held)
        if held[tenant] > share:
            idle = [d for d in idle if d.is_given_back or held[d.tenant] > share]
        return sorted(idle, key=lambda d: not d.is_given_back and held[d.tenant] <= share)


def _mark_used(dataset: StoredDataset) -> None:
    """Take note that somebody needs a data set that is in use."""
    dataset.last_use = time.monotonic()
    dataset.is_given_back = dataset.is_unloaded = False
