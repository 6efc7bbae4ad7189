"""The resident data sets: copies in shared memory, from which every engine loads them."""

import logging
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from warpfit.dataset import Layout
from warpfit.errors import DatasetNotFoundError, ResourceExhaustedError
from warpfit.server_info import Limits
from warpfit_server.data.upload import Upload
from warpfit_server.ipc.segments import Segment, SegmentPool
from warpfit_server.limits import check_limit
from warpfit_server.row_blocks import Shards
from warpfit_server.tenancy.tenants import ANONYMOUS

_LOG: Final = logging.getLogger("warpfit.datasets")
#: Most data sets that are resident at a time, and descriptors of the process for each of them: a
#: data set counts for at least its part of the budget, because it takes two descriptors.
_MOST_DATASETS, _FILES_EACH = 2048, 8
#: Memory that a variable's name takes beside its characters.
_NAME_BYTES: Final = 64


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
    uses: int = 0
    """Calls that use it now; it is not evicted before they end."""
    last_use: float = field(default_factory=time.monotonic)
    released: bool = False
    """Whether new calls cannot use it any more; it is removed when the last use ends."""
    shards: Shards | None = None
    """Set if each of several engines computes on some of the rows."""

    @property
    def shard_count(self) -> int:
        """Number of its shards; 0 if it is not sharded."""
        return 0 if self.shards is None else len(self.shards.engines)


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

    An upload takes memory as its bytes arrive, and evicts others for bytes that have arrived, not
    for those that its header announces: those count against its own tenant's budget only.

    An upload that needs room evicts, in this order: data sets of its own tenant while that is over
    its own budget; those of tenants that hold more than an equal share of the server's budget; any
    others, unless its own tenant holds more than such a share. Among these the one used least
    recently goes first. Data sets in use stay. ``on_removal`` is called with the key of each data
    set that is removed.
    """

    def __init__(
        self, limits: Limits, pool: SegmentPool, on_removal: Callable[[bytes], None]
    ) -> None:
        self._limits = limits
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._least_cost = limits.resident_bytes // min(_MOST_DATASETS, files // _FILES_EACH)
        self._pool = pool
        self._on_removal = on_removal
        self._lock = threading.Lock()
        self._resident: dict[bytes, StoredDataset] = {}
        self._held: Counter[str] = Counter()  # bytes of each tenant, resident and arrived
        self._announced: Counter[str] = Counter()  # bytes of each that have not arrived yet
        self._evictions = 0

    def usage(self) -> StoreUsage:
        """Return what the store holds now."""
        with self._lock:
            return StoreUsage(len(self._resident), self._held.total(), self._evictions)

    def shard_counts(self, tenant: str) -> list[int]:
        """Return the number of shards of each resident data set of a tenant, 0 for whole ones."""
        with self._lock:
            own = [d for d in self._resident.values() if d.tenant == tenant and not d.released]
            return [dataset.shard_count for dataset in own]

    def leased(self) -> Iterator[StoredDataset]:
        """Yield every resident data set, each with a lease while the caller has it."""
        with self._lock:
            keys = list(self._resident)
        for key in keys:
            try:
                with self.lease(key) as dataset:
                    yield dataset
            except DatasetNotFoundError:
                continue  # removed since the list was made

    @contextmanager
    def lease(self, key: bytes) -> Iterator[StoredDataset]:
        """Keep a data set resident inside the ``with`` block.

        Raises:
            DatasetNotFoundError: if it is not resident.
        """
        with self._lock:
            dataset = self._find(key)
            dataset.uses += 1
            dataset.last_use = time.monotonic()
        try:
            yield dataset
        finally:
            with self._lock:
                dataset.uses -= 1
                dataset.last_use = time.monotonic()
                if dataset.released and not dataset.uses:
                    self._remove(dataset)

    def expire(self, seconds: float) -> None:
        """Remove data sets that have not been used for some time."""
        limit = time.monotonic() - seconds
        with self._lock:
            old = [d for d in self._resident.values() if not d.uses and d.last_use < limit]
            for dataset in old:
                self._remove(dataset)
        if old:
            _LOG.info("%d data sets were removed after %g s without use", len(old), seconds)

    def release(self, key: bytes) -> None:
        """Remove a data set as soon as no call uses it.

        Raises:
            DatasetNotFoundError: if it is not resident.
        """
        with self._lock:
            dataset = self._find(key)
            dataset.released = True
            if not dataset.uses:
                self._remove(dataset)

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
            ResourceExhaustedError: if the data set is over a limit, or the budget is in use.
        """
        limits = limits or self._limits
        check_limit(limits, "dataset_bytes", layout.nbytes)
        check_limit(limits, "rows", layout.rows)
        cost, budget = self._cost(layout), limits.resident_bytes
        segment = self._pool.create(layout.nbytes)  # takes memory when it is written
        with self._lock:
            try:
                self._victims(cost + self._announced[tenant], tenant, budget)
            except BaseException:
                segment.close()
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
        """Give the memory of an unfinished upload back."""
        upload.close()
        with self._lock:
            self._held[upload.tenant] -= upload.reserved
            self._announced[upload.tenant] -= upload.cost - upload.reserved

    def commit(self, upload: Upload, shards: Shards | None = None) -> StoredDataset:
        """Make a finished upload resident; if its content already is, the older copy stays.

        Raises:
            InvalidArgumentError: if bytes are missing or the digest does not match.
            ResourceExhaustedError: if a small data set's least part of the budget is in use.
        """
        upload.verify()
        self._reserve(upload, upload.cost - upload.reserved)
        own = upload.key, upload.content_id, upload.tenant, upload.layout, upload.segment
        fresh = StoredDataset(*own, shards=shards)
        with self._lock:
            dataset = self._resident.setdefault(upload.key, fresh)
            dataset.released = False
            dataset.last_use = time.monotonic()
        if dataset is not fresh:
            self.abandon(upload)
        return dataset

    def _reserve(self, upload: Upload, size: int) -> None:
        with self._lock:
            for dataset in self._victims(size, upload.tenant, upload.budget):
                self._remove(dataset)
                self._evictions += 1
            self._held[upload.tenant] += size
            self._announced[upload.tenant] -= size
            upload.reserved += size

    # ------------------------------------------------------------------- under self._lock

    def _find(self, key: bytes) -> StoredDataset:
        dataset = self._resident.get(key)
        if dataset is None or dataset.released:
            raise DatasetNotFoundError
        return dataset

    def _remove(self, dataset: StoredDataset) -> None:
        del self._resident[dataset.key]
        self._held[dataset.tenant] -= self._cost(dataset.layout)
        dataset.segment.close()
        self._on_removal(dataset.key)

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
        idle = sorted((d for d in self._resident.values() if not d.uses), key=lambda d: d.last_use)
        own = [dataset for dataset in idle if dataset.tenant == tenant]
        victims = self._first(own, over_own, needed, tells_available=True)
        freed = sum(self._cost(dataset.layout) for dataset in victims)
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
            over -= self._cost(dataset.layout)
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

    def _by_share(self, idle: list[StoredDataset], tenant: str, needed: int) -> list[StoredDataset]:
        """Put data sets of tenants that hold more than an equal share first.

        Those of others are left out if the tenant itself holds more than its share.
        """
        held = self._held + Counter({tenant: needed})  # tenants that hold anything
        share = self._limits.resident_bytes / len(held)
        if held[tenant] > share:
            return [dataset for dataset in idle if held[dataset.tenant] > share]
        return sorted(idle, key=lambda dataset: held[dataset.tenant] <= share)
