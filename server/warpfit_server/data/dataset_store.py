"""Resident data sets: the front door's host copies, in shared memory, under a byte budget."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from warpfit.dataset import Layout, PayloadDigest, check_weights
from warpfit.errors import DatasetNotFoundError, InvalidArgumentError, ResourceExhaustedError
from warpfit.server_info import Limits
from warpfit_server.ipc.segments import Segment, SegmentPool
from warpfit_server.limits import check_dataset
from warpfit_server.tenancy.tenants import ANONYMOUS, key_of

_LOG: Final = logging.getLogger("warpfit.datasets")
#: Longest pause between two looks for data sets whose lease has run out, in seconds.
_LONGEST_SWEEP: Final = 60.0
#: Most data sets that are resident at a time.
_MOST_DATASETS: Final = 2048
#: Memory that a variable's name takes beyond its characters.
_NAME_BYTES: Final = 64
#: Bytes of an upload that have arrived and are not hashed yet, at most.
_BEHIND: Final = 4 << 20


@dataclass(eq=False, slots=True)
class ResidentDataset:
    """A data set that engines can use."""

    key: bytes
    """Name in this server, see `warpfit_server.tenancy.tenants.key_of`."""
    content_id: bytes
    tenant: str
    """To whom it belongs."""
    layout: Layout
    segment: Segment
    """Holds the payload from byte 0."""
    uses: int = 0
    """Calls that use it now; it is not evicted before they end."""
    last_use: float = field(default_factory=time.monotonic)
    """Moment of the last use."""
    released: bool = False
    """No new calls; it goes when the last use ends."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a store holds, and how often it ran out of room."""

    datasets: int
    nbytes: int
    """Resident and reserved."""
    evictions: int
    """Data sets that had to make room for others since the start."""


class DatasetStore:
    """Owns the resident data sets: leases, budgets, eviction by least recent use.

    An upload takes memory as its bytes arrive, and pushes others out for bytes that are there, not
    for those that its header announces: those count against its own tenant's budget alone.

    Under pressure a tenant's upload first pushes out its own data sets beyond its own budget, then
    those of tenants that hold more than an equal share of the server's, then any others, unless its
    tenant holds more than such a share itself; among them the one used least recently, and never
    one in use.

    Each data set also takes a descriptor in two processes, so that it counts for at least its part
    of the budget.
    """

    def __init__(
        self, limits: Limits, pool: SegmentPool, on_removal: Callable[[bytes], None]
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._on_removal = on_removal
        self._lock = threading.Lock()
        self._resident: dict[bytes, ResidentDataset] = {}
        self._held: Counter[str] = Counter()  # bytes of each tenant, resident and arrived
        self._announced: Counter[str] = Counter()  # bytes of each that have not arrived yet
        self._evictions = 0

    def usage(self) -> Usage:
        """Return what the store holds now."""
        with self._lock:
            return Usage(len(self._resident), self._held.total(), self._evictions)

    def leased(self) -> Iterator[ResidentDataset]:
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
    def lease(self, key: bytes) -> Iterator[ResidentDataset]:
        """Use a data set; it stays resident inside the ``with`` block.

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

    def expire(self, seconds: float) -> int:
        """Remove what has not been used for some time; return how many data sets that were."""
        with self._lock:
            limit = time.monotonic() - seconds
            old = [d for d in self._resident.values() if not d.uses and d.last_use < limit]
            for dataset in old:
                self._remove(dataset)
            return len(old)

    def release(self, key: bytes) -> None:
        """Forget a data set as soon as no call uses it.

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
        """Begin an upload, if there is or can be made room for it; nothing is evicted yet.

        Args:
            layout: of the data set.
            content_id: SHA-256 that the content must have.
            tenant: to whom it will belong.
            limits: the tenant's, by default the server's.

        Raises:
            ResourceExhaustedError: if the data set is over a limit, or the budget is in use.

        """
        limits = limits or self._limits
        check_dataset(layout, limits)
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

    def commit(self, upload: Upload) -> ResidentDataset:
        """Make a finished upload resident; if its content is already, the older copy stays.

        Raises:
            InvalidArgumentError: if bytes are missing or the digest does not match.
            ResourceExhaustedError: if a small data set's least part of the budget is in use.

        """
        upload.verify()
        self._reserve(upload, upload.cost - upload.reserved)
        fresh = ResidentDataset(
            upload.key, upload.content_id, upload.tenant, upload.layout, upload.segment
        )
        with self._lock:
            dataset = self._resident.setdefault(upload.key, fresh)
            dataset.released = False
            dataset.last_use = time.monotonic()
        if dataset is not fresh:
            self.abandon(upload)
        return dataset

    def _find(self, key: bytes) -> ResidentDataset:
        dataset = self._resident.get(key)
        if dataset is None or dataset.released:
            raise DatasetNotFoundError
        return dataset

    def _remove(self, dataset: ResidentDataset) -> None:
        del self._resident[dataset.key]
        self._held[dataset.tenant] -= self._cost(dataset.layout)
        dataset.segment.close()
        self._on_removal(dataset.key)

    def _cost(self, layout: Layout) -> int:
        names = sum(_NAME_BYTES + len(name) for name in layout.names)
        return max(layout.nbytes + names, self._limits.resident_bytes // _MOST_DATASETS)

    def _reserve(self, upload: Upload, size: int) -> None:
        with self._lock:
            for dataset in self._victims(size, upload.tenant, upload.budget):
                self._remove(dataset)
                self._evictions += 1
            self._held[upload.tenant] += size
            self._announced[upload.tenant] -= size
            upload.reserved += size

    def _victims(self, needed: int, tenant: str, own_budget: int) -> list[ResidentDataset]:
        """Choose what must go for a tenant's next bytes; under the lock.

        Raises:
            ResourceExhaustedError: if all that may go is not enough.

        """
        over_own = self._held[tenant] + needed - own_budget
        over = self._held.total() + needed - self._limits.resident_bytes
        if over_own <= 0 and over <= 0:
            return []
        idle = sorted((d for d in self._resident.values() if not d.uses), key=lambda d: d.last_use)
        own = [dataset for dataset in idle if dataset.tenant == tenant]
        victims = self._enough(own, over_own, needed, tells=True)
        freed = sum(self._cost(dataset.layout) for dataset in victims)
        rest = [dataset for dataset in idle if dataset not in victims]
        candidates = self._in_order(rest, tenant, needed)
        is_alone = all(name in (tenant, "") for name, held in self._held.items() if held)
        return victims + self._enough(candidates, over - freed, needed, tells=is_alone)

    def _enough(
        self, candidates: list[ResidentDataset], over: int, needed: int, *, tells: bool
    ) -> list[ResidentDataset]:
        """Choose the first candidates whose memory covers what is over a budget.

        Args:
            candidates: data sets, those that go first in front.
            over: bytes over the budget.
            needed: bytes that the caller needs.
            tells: whether an error may say what is available, which tells what others hold.

        Raises:
            ResourceExhaustedError: if all of them do not.

        """
        chosen: list[ResidentDataset] = []
        for dataset in candidates:
            if over <= 0:
                break
            chosen.append(dataset)
            over -= self._cost(dataset.layout)
        if over > 0:
            available = max(0, needed - over)
            known = f"{available} are available" if tells else "fewer are available"
            raise ResourceExhaustedError(
                f"{needed} more bytes of data sets are needed, {known}",
                "MEMORY",
                "Release data sets, or start the server with a higher --max-resident-bytes",
                needed=needed,
                available=available if tells else None,
            )
        return chosen

    def _in_order(
        self, idle: list[ResidentDataset], tenant: str, needed: int
    ) -> list[ResidentDataset]:
        """Put data sets of tenants that hold more than their share first.

        The others' stay out of it where the tenant itself holds more than its share.
        """
        held = self._held + Counter({tenant: needed})  # of tenants that hold anything
        share = self._limits.resident_bytes / len(held)
        if held[tenant] > share:
            return [d for d in idle if held[d.tenant] > share]
        return sorted(idle, key=lambda d: held[d.tenant] <= share)


class Upload:
    """One upload on its way into shared memory."""

    def __init__(
        self,
        layout: Layout,
        content_id: bytes,
        tenant: str,
        segment: Segment,
        cost: int,
        budget: int,
    ) -> None:
        self.layout = layout
        self.content_id = content_id
        self.tenant = tenant
        self.cost = cost
        """Bytes that it will count for."""
        self.reserved = 0
        """Bytes that it counts for now."""
        self.budget = budget
        """Bytes that its tenant may hold."""
        self.key = key_of(tenant, content_id)
        self.segment = segment
        self._digest = PayloadDigest(layout, _BEHIND)
        self._received = 0

    def check(self, data: memoryview) -> None:
        """Check that the next bytes of the payload belong to it.

        Raises:
            InvalidArgumentError: if there are more than the layout says.

        """
        end = self._received + len(data)
        if end > self.layout.nbytes:
            raise InvalidArgumentError(
                f"the upload has at least {end} bytes where its layout has {self.layout.nbytes}",
                "SURPLUS_UPLOAD",
                "Send exactly (variables + target + weights) x rows numbers of the dtype",
                "data",
            )

    def add(self, data: memoryview) -> None:
        """Take the next bytes of the payload, which have been checked and reserved."""
        self._digest.update(data)
        self.segment.write(data, self._received)
        self._received += len(data)

    def verify(self) -> None:
        """Check that the upload is complete and is what its id says, and its weights.

        Raises:
            InvalidArgumentError: otherwise.

        """
        if self._received != self.layout.nbytes:
            raise InvalidArgumentError(
                f"the upload ended after {self._received} of {self.layout.nbytes} bytes",
                "TRUNCATED_UPLOAD",
                "Send exactly (variables + target + weights) x rows numbers of the dtype",
                "data",
            )
        digest = self._digest.finish()
        if digest != self.content_id:
            raise InvalidArgumentError(
                f"the content hashes to {digest.hex()[:16]}..., "
                f"content_id says {self.content_id.hex()[:16]}...",
                "BAD_DIGEST",
                "Compute SHA-256 over the header and payload as evaluator.proto describes",
                "content_id",
            )
        if self.layout.has_weights:
            rows, dtype = self.layout.rows, self.layout.dtype
            offset = self.layout.nbytes - rows * dtype.itemsize
            check_weights(self.segment.array(dtype, (rows,), offset))

    def close(self) -> None:
        """Stop hashing and give the memory back."""
        self._digest.close()
        self.segment.close()


class Sweeper:
    """Removes data sets whose lease has run out, from a thread of its own."""

    def __init__(self, store: DatasetStore, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._sweep, name="sweeper", daemon=True)

    def start(self) -> None:
        """Begin to look for them."""
        self._thread.start()

    def stop(self) -> None:
        """Stop looking."""
        self._stopping.set()

    def _sweep(self) -> None:
        while not self._stopping.wait(min(_LONGEST_SWEEP, self._seconds / 4)):
            count = self._store.expire(self._seconds)
            if count:
                _LOG.info("%d data sets went after %g s without use", count, self._seconds)
