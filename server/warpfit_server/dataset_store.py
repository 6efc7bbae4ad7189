"""The resident data sets: copies in shared memory, from which every engine loads them.

The main process owns the data sets. Front ends receive uploads into memory that they hand over, and
look data sets up in their own registries (`warpfit_server.ipc.router`). The shared table of
`warpfit_server.tenants` says which calls use a data set.

Uploads of callers, and Parquet files that the server itself reads, come in by a front end. It
receives both into shared memory of its own, which it hands over to the store of the
main process when the content has been checked.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import resource
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from warpfit.dataset import (
    Layout,
    ParquetColumns,
    PayloadDigest,
    RoundingCheck,
    ServerFile,
    Table,
    blocks_of,
    changed_data,
    check_weights,
    open_table,
)
from warpfit.errors import (
    DatasetNotFoundError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnimplementedError,
)
from warpfit.server_info import Limits
from warpfit_server.ipc.messages import FoundDataset
from warpfit_server.ipc.segments import Segment, SegmentPool
from warpfit_server.limits import check_limits, check_names
from warpfit_server.machine import shortage
from warpfit_server.tenants import DATASET_SLOTS, PROBE, DatasetUses, QuotaTable, key_of

_LOG: Final = logging.getLogger("warpfit.datasets")
#: Most data sets that are resident at a time, and descriptors of the process for each of them: a
#: data set counts for at least its part of the budget, because it takes two descriptors.
_MOST_DATASETS, _FILES_EACH = DATASET_SLOTS // 2, 8
#: Seconds without use after which a data set that was given back leaves the devices.
_DEVICE_SECONDS: Final = 5.0
#: Seconds after which an upload is tried again that had no room beside what is in use.
_RETRY_SECONDS: Final = 0.2
#: Files of the server whose columns are remembered.
_MOST_FILES: Final = 1024


@dataclass(eq=False, slots=True)
class StoredDataset:
    """A data set that engines can use."""

    key: bytes
    """Its name in this server, see `warpfit_server.tenants.key_of`."""
    content_id: bytes
    tenant: str
    """Owner."""
    layout: Layout
    """Without names."""
    names: bytes
    """Names of the variables, as `warpfit.codec.encode_names` encodes them."""
    segment: Segment
    """Holds the payload from byte 0."""
    cost: int
    """Bytes that it counts for."""
    slot: int
    """Number of its entry in the table of uses."""
    pins: int = 0
    """Reasons of this process to keep it."""
    touched: float = field(default_factory=time.monotonic)
    """Moment at which a caller has last asked for it without using it."""
    given_back: float = 0.0
    """Moment at which a caller has last said that it does not need it; the next use takes that
    back."""
    unloaded: float = 0.0
    """Moment at which engines were last told to forget it."""
    is_removed: bool = False
    """Whether new calls cannot use it any more; it is removed when the last use ends."""


@dataclass(eq=False, slots=True)
class _Upload:
    """The memory that an upload counts for."""

    tenant: str
    cost: int
    """Bytes that it will count for."""
    budget: int
    """Bytes that its tenant may hold."""
    names: bytes
    """Names of the variables."""
    reserved: int = 0
    """Bytes that it counts for now."""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """The contents of a store in numbers, and how often it ran out of room."""

    datasets: int
    nbytes: int
    """Resident and reserved."""
    evictions: int
    """Data sets that had to make room for others since the start."""


class DatasetStore:
    """Owns the resident data sets: budgets, and eviction of the least recently used.

    Callers that upload the same content share one data set. The store does not count the callers: a
    caller that gives a data set back merely says that it does not need the data set, and the next
    use takes that word back. A data set that was given back stays resident, leaves the devices
    after some seconds, and is evicted before all others. So no caller takes a data set from another
    one, and a caller that dies keeps none.

    An upload takes memory as its bytes arrive, and evicts other data sets for bytes that have
    arrived. Bytes that its header announces count against the budget of its own tenant only.

    An upload that needs room evicts, in this order: data sets of its own tenant while the tenant is
    over its budget; data sets of tenants that hold more than an equal share of the server's budget;
    any others, unless its own tenant holds more than such a share. Within each of these groups data
    sets that were given back go first, and then the one used least recently. Data sets in use stay,
    as far as the table of uses says so: a call that begins in the moment of an eviction gets
    NOT_FOUND.

    Args:
        limits: the limits of the server.
        table: the table of uses, which front ends write.
        unload: called with the key of each data set that the engines have to forget.
        announce: called with each data set that has become resident.
        withdraw: called with the key of each data set that no new call may use.
    """

    def __init__(
        self,
        limits: Limits,
        table: QuotaTable,
        unload: Callable[[bytes], None] = lambda key: None,
        announce: Callable[[FoundDataset], None] = lambda found: None,
        withdraw: Callable[[bytes], None] = lambda key: None,
    ) -> None:
        self._limits = limits
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._least_cost = limits.resident_bytes // min(_MOST_DATASETS, files // _FILES_EACH)
        self._table = table
        self._unload, self._announce, self._withdraw = unload, announce, withdraw
        self._lock = threading.Lock()
        self._resident: dict[bytes, StoredDataset] = {}
        self._slots = list(range(DATASET_SLOTS))
        """Entries of the table that no data set has."""
        self._uploads: dict[int, _Upload] = {}
        self._numbers = itertools.count()
        self._held: Counter[str] = Counter()  # bytes of each tenant, resident and arrived
        self._announced: Counter[str] = Counter()  # bytes of each that have not arrived yet
        self._evictions = 0
        self._files: dict[bytes, tuple[bytes, str]] = {}

    def usage(self) -> StoreUsage:
        """Return the number and bytes of the resident data sets, and the number of evictions."""
        with self._lock:
            return StoreUsage(len(self._resident), self._held.total(), self._evictions)

    def count(self, tenant: str) -> int:
        """Return the number of a tenant's resident data sets.

        Data sets that were given back do not count.
        """
        with self._lock:
            uses = self._table.dataset_uses()
            own = [d for d in self._resident.values() if d.tenant == tenant]
            return sum(not (d.is_removed or self._is_given_back(d, uses)) for d in own)

    def pinned(self) -> Iterator[StoredDataset]:
        """Yield every resident data set, each pinned while the caller has it; not a use."""
        with self._lock:
            keys = list(self._resident)
        for key in keys:
            with suppress(DatasetNotFoundError), self.pin(key) as dataset:
                yield dataset

    @contextmanager
    def pin(self, key: bytes) -> Iterator[StoredDataset]:
        """Keep a data set resident inside the ``with`` block.

        Raises:
            DatasetNotFoundError: if it is not resident.
        """
        with self._lock:
            dataset = self._find(key)
            dataset.pins += 1
        try:
            yield dataset
        finally:
            with self._lock:
                dataset.pins -= 1

    # ------------------------------------------------------------------- for front ends

    def find(self, key: bytes) -> FoundDataset:
        """Return a data set, which a caller asks for; that takes back that it was given back.

        Raises:
            DatasetNotFoundError: if it is not resident.
        """
        with self._lock:
            dataset = self._find(key)
            dataset.touched = time.monotonic()
            own = key, dataset.content_id, dataset.layout, dataset.slot
            return FoundDataset(*own, names=dataset.names)

    def give_back(self, key: bytes) -> None:
        """Take note that a caller does not need a data set any more; others may still use it.

        Raises:
            DatasetNotFoundError: if it is not resident.
        """
        with self._lock:
            self._find(key).given_back = time.monotonic()

    def remove(self, key: bytes) -> None:
        """Remove a data set, whoever uses it: as soon as the calls that use it now have ended.

        Raises:
            DatasetNotFoundError: if it is not resident.
        """
        with self._lock:
            dataset = self._find(key)
            dataset.is_removed = True
            if self._is_used(dataset, self._table.dataset_uses()):
                self._withdraw(key)
            else:
                self._remove(dataset)

    def begin(self, layout: Layout, names: bytes, tenant: str, budget: int) -> int:
        """Begin a tenant's upload if there is or can be room for it; nothing is evicted yet.

        The ``layout`` is without ``names``, which are encoded.

        Returns:
            The upload's number, for `reserve`, `commit` and `abandon`.

        Raises:
            ResourceExhaustedError: if the tenant's ``budget`` of bytes or the server's is in use;
                with a time to retry after if there would be room with no call and no upload in
                flight.
        """
        cost = max(layout.nbytes + len(names), self._least_cost)
        upload = _Upload(tenant, cost, budget, names)
        with self._lock:
            try:
                self._victims(upload.cost + self._announced[tenant], tenant, budget)
            except BaseException as error:
                self._advise(error, upload)
                raise
            self._announced[tenant] += upload.cost
            number = next(self._numbers)
            self._uploads[number] = upload
        return number

    def reserve(self, number: int, nbytes: int) -> None:
        """Count the next bytes of an upload, evicting idle data sets where that is needed.

        Raises:
            ResourceExhaustedError: if the budget is in use.
        """
        self._reserve(self._uploads[number], nbytes)

    def abandon(self, number: int) -> None:
        """Count an upload no more."""
        with self._lock:
            self._forget(self._uploads.pop(number))

    def commit(
        self, number: int, content_id: bytes, layout: Layout, copied: int, segment: Segment
    ) -> FoundDataset:
        """Make a complete upload resident; if its content already is, the older copy stays.

        Args:
            number: number of the upload, which is over then, unless this fails.
            content_id: SHA-256 of the content.
            layout: layout of the content.
            copied: bytes that engines copy of it: the rows with a weight, if others have none.
            segment: memory with the content; it belongs to the store then, unless this fails.

        Raises:
            ResourceExhaustedError: if there is no room for what it counts for beside its bytes: a
                small data set's least part of the budget, or what engines copy.
        """
        upload = self._uploads[number]
        with self._lock:
            upload.cost += copied
            self._announced[upload.tenant] += copied
        self._reserve(upload, upload.cost - upload.reserved)
        key = key_of(upload.tenant, content_id)
        with self._lock:
            self._uploads.pop(number)
            dataset = self._resident.get(key)
            is_fresh = dataset is None
            if dataset is None:
                dataset = self._resident[key] = StoredDataset(
                    key,
                    content_id,
                    upload.tenant,
                    layout,
                    upload.names,
                    segment,
                    upload.cost,
                    self._slots.pop(),
                )
            else:
                self._forget(upload)
                segment.close()
                dataset.is_removed = False
                dataset.touched = time.monotonic()
            own = key, content_id, dataset.layout, dataset.slot
            found = FoundDataset(*own, is_fresh=is_fresh)
            self._announce(found)  # under the lock, so that a withdrawal comes later
        return found._replace(names=dataset.names)

    def evict_for_device(self, tenant: str) -> int:
        """Evict one data set, because a tenant's upload has no room on any device.

        Returns:
            Bytes of the data set; 0 if there is none that may be evicted for this tenant.
        """
        with self._lock:
            uses = self._table.dataset_uses()
            for dataset in self._by_share(self._idle(uses), tenant, 0, uses):
                if dataset.unloaded <= self._last_use(dataset, uses):
                    self._remove(dataset)
                    self._evictions += 1
                    return dataset.layout.nbytes
        return 0

    def known_file(self, columns: bytes) -> tuple[bytes, str] | None:
        """Return content id and warning of columns of a file, by their digest, if remembered."""
        return self._files.get(columns)

    def remember_file(self, columns: bytes, content_id: bytes, lost_digits: str) -> None:
        """Remember the content id of columns of a file, and the warning that belongs to it."""
        if len(self._files) >= _MOST_FILES:
            self._files.clear()
        self._files[columns] = content_id, lost_digits

    # ------------------------------------------------------------------- for the main process

    def expire(self, seconds: float) -> None:
        """Remove data sets that were withdrawn, or have not been used for some time.

        Data sets that were given back leave the devices much earlier.
        """
        now = time.monotonic()
        with self._lock:
            uses = self._table.dataset_uses()
            idle = [d for d in self._resident.values() if not self._is_used(d, uses)]
            old = [d for d in idle if not d.is_removed and self._last_use(d, uses) < now - seconds]
            for dataset in idle:
                if dataset.is_removed or dataset in old:
                    self._remove(dataset)
                elif (
                    dataset.given_back
                    and self._is_given_back(dataset, uses)
                    and dataset.unloaded < dataset.given_back < now - _DEVICE_SECONDS
                ):
                    dataset.unloaded = now
                    self._unload(dataset.key)
        if old:
            _LOG.info("%d data sets were removed after %g s without use", len(old), seconds)

    def _reserve(self, upload: _Upload, size: int) -> None:
        with self._lock:
            try:
                victims = self._victims(size, upload.tenant, upload.budget)
            except BaseException as error:
                self._advise(error, upload)
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

    def _last_use(self, dataset: StoredDataset, uses: DatasetUses) -> float:
        return max(dataset.touched, uses.moments[dataset.slot])

    def _is_used(self, dataset: StoredDataset, uses: DatasetUses) -> bool:
        return bool(dataset.pins or uses.calls[dataset.slot])

    def _is_given_back(self, dataset: StoredDataset, uses: DatasetUses) -> bool:
        is_later = dataset.given_back > self._last_use(dataset, uses)
        return is_later and not self._is_used(dataset, uses)

    def _forget(self, upload: _Upload) -> None:
        """Count an upload no more, which does not become a data set."""
        self._held[upload.tenant] -= upload.reserved
        self._announced[upload.tenant] -= upload.cost - upload.reserved

    def _remove(self, dataset: StoredDataset) -> None:
        del self._resident[dataset.key]
        self._held[dataset.tenant] -= dataset.cost
        self._slots.append(dataset.slot)
        dataset.segment.close()
        self._withdraw(dataset.key)
        self._unload(dataset.key)

    def _victims(self, needed: int, tenant: str, own_budget: int) -> list[StoredDataset]:
        """Choose what must be evicted for a tenant's next bytes.

        Raises:
            ResourceExhaustedError: if all that may be evicted is not enough.
        """
        over_own = self._held[tenant] + needed - own_budget
        over = self._held.total() + needed - self._limits.resident_bytes
        if over_own <= 0 and over <= 0:
            return []
        uses = self._table.dataset_uses()
        idle = self._idle(uses)
        own = [dataset for dataset in idle if dataset.tenant == tenant]
        victims = self._first(own, over_own, needed, tells_available=True)
        freed = sum(dataset.cost for dataset in victims)
        rest = [dataset for dataset in idle if dataset not in victims]
        candidates = self._by_share(rest, tenant, needed, uses)
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

    def _idle(self, uses: DatasetUses) -> list[StoredDataset]:
        """Return the data sets that no call uses, in the order in which they are evicted."""
        idle = [d for d in self._resident.values() if not self._is_used(d, uses)]
        return sorted(
            idle, key=lambda d: (not self._is_given_back(d, uses), self._last_use(d, uses))
        )

    def _advise(self, error: BaseException, upload: _Upload) -> None:
        """Have an upload tried again that would have room if nothing were in use or arriving."""
        cost, tenant = upload.cost, upload.tenant
        resident = list(self._resident.values())
        callers = [dataset for dataset in resident if dataset.tenant != PROBE]
        evictable = self._by_share(callers, tenant, cost, self._table.dataset_uses())
        resident_bytes, evictable_bytes = (
            sum(dataset.cost for dataset in some) for some in (resident, evictable)
        )
        room = self._limits.resident_bytes - resident_bytes + evictable_bytes
        if isinstance(error, ResourceExhaustedError) and cost <= min(room, upload.budget):
            error.retry_after = _RETRY_SECONDS

    def _by_share(
        self, idle: list[StoredDataset], tenant: str, needed: int, uses: DatasetUses
    ) -> list[StoredDataset]:
        """Put data sets of tenants that hold more than an equal share first.

        If the tenant itself holds more than its share, data sets of other tenants are left out,
        unless they were given back. Data sets that were given back come first in any case.
        """
        held = self._held + Counter({tenant: needed})  # tenants that hold anything
        share = self._limits.resident_bytes / len(held)
        if held[tenant] > share:
            idle = [d for d in idle if held[d.tenant] > share or self._is_given_back(d, uses)]
        return sorted(
            idle, key=lambda d: held[d.tenant] <= share and not self._is_given_back(d, uses)
        )


# -------------------------------------------------------------------------------- uploads and files

#: Most bytes of an upload that have arrived and are not hashed yet.
_UNHASHED_BYTES: Final = 4 << 20
_REMEDY: Final = "Send exactly (variables + target + weights) x rows numbers of the dtype"
#: Longest footer of a file, one of a hundred thousand columns; reading it takes some fifteen times
#: as much memory.
_MOST_FOOTER_BYTES: Final = 32 << 20
#: Most bytes that a part of a file can have when it is decompressed, by Parquet's own format.
_MOST_PAGE_BYTES: Final = 2**31


class UploadStore(Protocol):
    """Methods of `DatasetStore` that an upload and a folder of files call."""

    def begin(self, layout: Layout, names: bytes, tenant: str, budget: int) -> int: ...
    def reserve(self, number: int, nbytes: int) -> None: ...
    def abandon(self, number: int) -> None: ...
    def commit(
        self, number: int, content_id: bytes, layout: Layout, copied: int, segment: Segment
    ) -> FoundDataset: ...
    def known_file(self, columns: bytes) -> tuple[bytes, str] | None: ...
    def remember_file(self, columns: bytes, content_id: bytes, lost_digits: str) -> None: ...


class Upload:
    """A data set of which not all bytes have been checked; a context manager.

    What is not committed inside the ``with`` block is abandoned at its end.

    Args:
        store: counts the bytes of the upload, and takes the data set over.
        pool: makes the memory.
        layout: layout of the data set.
        content_id: SHA-256 that the content must have; empty to accept any.
        tenant: owner of the data set.
        budget: bytes that the tenant may hold.

    Raises:
        ResourceExhaustedError: if the budget is in use, or the machine has no memory.
    """

    def __init__(
        self,
        store: UploadStore,
        pool: SegmentPool,
        layout: Layout,
        content_id: bytes,
        tenant: str,
        budget: int,
    ) -> None:
        self._store = store
        self._layout = plain = replace(layout, names=())
        self._content_id = content_id
        self._received = 0
        self._is_committed = False
        self._segment = pool.create(layout.nbytes)  # takes memory when it is written
        try:
            names = b""
            if layout.names:
                from warpfit.codec import encode_names  # late, because it loads gRPC

                names = encode_names(layout.names)
            self._number = store.begin(plain, names, tenant, budget)
        except BaseException:
            self._segment.close()
            raise
        self._digest = PayloadDigest(layout, _UNHASHED_BYTES)

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop hashing, and give the memory back unless the store has it."""
        self._digest.close()
        if not self._is_committed:
            self._store.abandon(self._number)
            self._segment.close()

    def add(self, data: memoryview) -> None:
        """Take the next bytes of the payload, evicting idle data sets where that is needed.

        Raises:
            InvalidArgumentError: if there are more than the layout says.
            ResourceExhaustedError: if the budget is in use.
        """
        end = self._received + len(data)
        if end > self._layout.nbytes:
            raise InvalidArgumentError(
                f"the upload has at least {end} bytes where its layout has {self._layout.nbytes}",
                "SURPLUS_UPLOAD",
                _REMEDY,
                "data",
            )
        self._store.reserve(self._number, len(data))
        self._digest.update(data)
        self._segment.write(data, self._received)
        self._received = end

    def commit(self) -> FoundDataset:
        """Make the data set resident; if its content already is, the older copy stays.

        Raises:
            InvalidArgumentError: if bytes are missing, the digest does not match, or weights are
                not valid.
            ResourceExhaustedError: as `DatasetStore.commit`.
        """
        if self._received != self._layout.nbytes:
            raise InvalidArgumentError(
                f"the upload ended after {self._received} of {self._layout.nbytes} bytes",
                "TRUNCATED_UPLOAD",
                _REMEDY,
                "data",
            )
        digest = self._digest.finish()
        if digest != (self._content_id or digest):
            raise InvalidArgumentError(
                f"the content hashes to {digest.hex()[:16]}..., "
                f"content_id says {self._content_id.hex()[:16]}...",
                "BAD_DIGEST",
                "Compute SHA-256 over the header and payload as evaluator.proto describes",
                "content_id",
            )
        copied = 0
        if self._layout.has_weights:
            rows, dtype = self._layout.rows, self._layout.dtype
            first = self._layout.nbytes - rows * dtype.itemsize
            weights = self._segment.array(dtype, (rows,), first)
            check_weights(weights)
            count = int(np.count_nonzero(weights))
            copied = 0 if count == rows else self._layout.nbytes // rows * count
            del weights  # a view of the segment, which the store may close
        own = digest, self._layout, copied, self._segment
        found = self._store.commit(self._number, *own)
        self._is_committed = True
        return found


class DataFolder:
    """Reads data sets from files below a folder into a store, over memory of a pool.

    The content id of a file's columns is remembered while the file stays what it is, so that a file
    whose columns are resident is not read again. An empty ``root`` means that no files are read.

    Raises:
        InvalidArgumentError: if there is no such folder, or pyarrow is not installed.
    """

    def __init__(self, root: str, store: UploadStore, pool: SegmentPool) -> None:
        self._root = Path(root).resolve() if root else None
        self._store = store
        self._pool = pool
        if self._root is None:
            return
        if not self._root.is_dir():
            raise InvalidArgumentError(
                f"--data-root {root} is no folder", "BAD_FILE", "Name a folder of Parquet files"
            )
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise InvalidArgumentError(
                "--data-root needs pyarrow, which is not installed",
                "MISSING_PACKAGE",
                "Install it (pip install 'warpfit[arrow]')",
            ) from error

    def known(self, file: ServerFile) -> tuple[bytes, str] | None:
        """Return content id and warning that `read` found, if the file has not changed since."""
        with self._open(file.name) as descriptor:
            return self._store.known_file(_identity(file, descriptor))

    def read(
        self,
        file: ServerFile,
        tenant: str,
        limits: Limits,
        check_wanted: Callable[[], None],
        reserve: Callable[[int], AbstractContextManager[None]],
    ) -> tuple[FoundDataset, str]:
        """Read columns of a file and make them resident.

        Args:
            file: the file and its columns.
            tenant: owner of the data set.
            limits: limits of the tenant, which are checked before numbers are read.
            check_wanted: called between blocks; raises an error if the call has ended.
            reserve: counts bytes of memory while the file is decompressed.

        Returns:
            The data set, and what is said of columns that float32 rounds too coarsely, or "".

        Raises:
            InvalidArgumentError: if there is no such file below the folder, it has not these
                columns of numbers, or it changes meanwhile.
            ResourceExhaustedError: if the data set is over a limit.
            UnimplementedError: if this server reads no files.
        """
        with self._open(file.name) as descriptor:
            identity = _identity(file, descriptor)

            def check() -> None:
                check_wanted()
                if _identity(file, descriptor) != identity:
                    raise changed_data()

            try:
                columns = ParquetColumns(_path_of(descriptor))
                table = open_table(columns, file.y or None, file.weights or None, file.x or None)
                with reserve(min(max(0, columns.group_bytes), _MOST_PAGE_BYTES)):
                    found = self._store_table(table, file, tenant, limits, check)
            except InvalidArgumentError as error:
                if error.reason != "BAD_FILE":
                    raise
                raise _no_file(file.name) from error  # without the path and what the system says
        self._store.remember_file(identity, found[0].content_id, found[1])
        return found

    def _store_table(
        self,
        table: Table,
        file: ServerFile,
        tenant: str,
        limits: Limits,
        check: Callable[[], None],
    ) -> tuple[FoundDataset, str]:
        is_auto = file.dtype is None
        layout = table.layout(None, np.float32 if file.dtype is None else file.dtype)
        check_names(layout.names, limits)
        check_limits(limits, dataset_bytes=layout.nbytes, rows=layout.rows)
        rounding = RoundingCheck(layout, measures=is_auto)
        own = layout, b"", tenant, limits.resident_bytes
        try:
            with Upload(self._store, self._pool, *own) as upload:
                for block in blocks_of(layout, table.sources):
                    check()
                    rounding.check(block.numbers, block.given, block.first, block.start)
                    upload.add(block.numbers.reshape(-1).data.cast("B"))
                check()
                if not (is_auto and rounding.wants_float64):
                    return upload.commit(), rounding.lost_digits()
        except InvalidArgumentError as error:
            if not (is_auto and error.reason == "OVERFLOW"):
                raise
        wide = replace(file, dtype=np.dtype("<f8"))
        return self._store_table(table, wide, tenant, limits, check)

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        """Open a file below the folder once, so that its name may stand for another one later."""
        if self._root is None:
            raise UnimplementedError(
                "this server reads no files",
                "NO_DATA_ROOT",
                "Start it with --data-root, or upload the data: client.upload(...)",
            )
        with ExitStack() as opened:
            try:
                # A name that leads out of the folder and in again would tell what is on its way:
                # folders above, and in /proc who runs what.
                if name.startswith("/") or ".." in name.split("/"):
                    raise FileNotFoundError
                # O_PATH finds a file without opening it: a FIFO would wait, and a device may act.
                place = os.open(self._root / name, os.O_PATH | os.O_CLOEXEC)
                opened.callback(os.close, place)
                path = Path(_path_of(place)).readlink()
                is_below = path.is_relative_to(self._root) and path.suffix == ".parquet"
                if not (is_below and stat.S_ISREG(os.fstat(place).st_mode)):
                    raise FileNotFoundError
                descriptor = os.open(_path_of(place), os.O_RDONLY | os.O_CLOEXEC)
                opened.callback(os.close, descriptor)
                end = os.fstat(descriptor).st_size - 8
                footer_bytes = int.from_bytes(os.pread(descriptor, 4, max(0, end)), "little")
                if footer_bytes > _MOST_FOOTER_BYTES:
                    raise ValueError
            except (OSError, ValueError) as error:  # none, not readable, a NUL in its name
                raise shortage(error) or _no_file(name) from error
            yield descriptor


def _path_of(descriptor: int) -> str:
    """Return a path by which the file of a descriptor can be opened again."""
    return f"/proc/self/fd/{descriptor}"


def _identity(file: ServerFile, descriptor: int) -> bytes:
    """Return a digest that tells columns of a file from others, and from earlier contents.

    The names of the columns may be as long as a caller likes, and the digest is kept.
    """
    status = os.fstat(descriptor)
    place = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    return hashlib.sha256(repr((replace(file, name=""), place)).encode()).digest()


def _no_file(name: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{name!r} is no Parquet file that can be read below the server's --data-root",
        "NO_SUCH_FILE",
        "Give the path from that folder, with / between names, to a whole .parquet file",
        "name",
    )
