"""Resident data sets: the front door's host copies, in shared memory, under a byte budget."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from warpfit.dataset import Layout
from warpfit.errors import DatasetNotFoundError, InvalidArgumentError, ResourceExhaustedError
from warpfit.info import Limits
from warpfit_server.limits import check_dataset
from warpfit_server.segments import Segment, SegmentPool


@dataclass(eq=False, slots=True)
class ResidentDataset:
    """A data set that engines can use."""

    content_id: bytes
    layout: Layout
    segment: Segment
    """Holds the payload from byte 0."""
    uses: int = 0
    """Calls that use it now; it is not evicted before they end."""
    last_use: int = 0
    """Tick of the store's clock."""
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
    """Owns the resident data sets: leases, budget, eviction by least recent use."""

    def __init__(
        self, limits: Limits, pool: SegmentPool, on_removal: Callable[[bytes], None]
    ) -> None:
        self._limits = limits
        self._pool = pool
        self._on_removal = on_removal
        self._lock = threading.Lock()
        self._resident: dict[bytes, ResidentDataset] = {}
        self._bytes = 0  # resident and reserved
        self._evictions = 0
        self._clock = itertools.count(1)

    def usage(self) -> Usage:
        """Return what the store holds now."""
        with self._lock:
            return Usage(len(self._resident), self._bytes, self._evictions)

    def leased(self) -> Iterator[ResidentDataset]:
        """Yield every resident data set, each with a lease while the caller has it."""
        with self._lock:
            content_ids = list(self._resident)
        for content_id in content_ids:
            try:
                with self.lease(content_id) as dataset:
                    yield dataset
            except DatasetNotFoundError:
                continue  # removed since the list was made

    @contextmanager
    def lease(self, content_id: bytes) -> Iterator[ResidentDataset]:
        """Use a data set; it stays resident inside the ``with`` block.

        Raises:
            DatasetNotFoundError: if it is not resident.

        """
        with self._lock:
            dataset = self._find(content_id)
            dataset.uses += 1
            dataset.last_use = next(self._clock)
        try:
            yield dataset
        finally:
            with self._lock:
                dataset.uses -= 1
                if dataset.released and not dataset.uses:
                    self._remove(dataset)

    def release(self, content_id: bytes) -> None:
        """Forget a data set as soon as no call uses it.

        Raises:
            DatasetNotFoundError: if it is not resident.

        """
        with self._lock:
            dataset = self._find(content_id)
            dataset.released = True
            if not dataset.uses:
                self._remove(dataset)

    def begin(self, layout: Layout, content_id: bytes) -> Upload:
        """Reserve memory for an upload, evicting idle data sets where that is needed.

        Raises:
            ResourceExhaustedError: if the data set is over a limit, or the budget is in use.

        """
        check_dataset(layout, self._limits)
        self._reserve(layout.nbytes)
        try:
            return Upload(layout, content_id, self._pool.create(layout.nbytes))
        except BaseException:
            self._unreserve(layout.nbytes)
            raise

    def abandon(self, upload: Upload) -> None:
        """Give the memory of an unfinished upload back."""
        upload.segment.close()
        self._unreserve(upload.layout.nbytes)

    def commit(self, upload: Upload) -> ResidentDataset:
        """Make a finished upload resident; if its content is already, the older copy stays.

        Raises:
            InvalidArgumentError: if bytes are missing or the digest does not match.

        """
        upload.verify()
        fresh = ResidentDataset(upload.content_id, upload.layout, upload.segment)
        with self._lock:
            dataset = self._resident.setdefault(upload.content_id, fresh)
            dataset.released = False
            dataset.last_use = next(self._clock)
        if dataset is not fresh:
            self.abandon(upload)
        return dataset

    def _find(self, content_id: bytes) -> ResidentDataset:
        dataset = self._resident.get(content_id)
        if dataset is None or dataset.released:
            raise DatasetNotFoundError(
                f"data set {content_id.hex()[:16]}... is not resident",
                "DATASET_NOT_FOUND",
                "Upload it (again) with UploadVariables, then repeat the call",
                "content_id",
            )
        return dataset

    def _remove(self, dataset: ResidentDataset) -> None:
        del self._resident[dataset.content_id]
        self._bytes -= dataset.layout.nbytes
        dataset.segment.close()
        self._on_removal(dataset.content_id)

    def _reserve(self, needed: int) -> None:
        budget = self._limits.resident_bytes
        with self._lock:
            idle = sorted(
                (d for d in self._resident.values() if not d.uses), key=lambda d: d.last_use
            )
            evictable = sum(d.layout.nbytes for d in idle)
            if self._bytes - evictable + needed > budget:
                raise ResourceExhaustedError(
                    f"the data set needs {needed} bytes, "
                    f"{max(0, budget - self._bytes + evictable)} are available",
                    "MEMORY",
                    "Release data sets, or start the server with a higher --max-resident-bytes",
                    needed=needed,
                    available=max(0, budget - self._bytes + evictable),
                )
            for dataset in idle:
                if self._bytes + needed <= budget:
                    break
                self._remove(dataset)
                self._evictions += 1
            self._bytes += needed

    def _unreserve(self, size: int) -> None:
        with self._lock:
            self._bytes -= size


class Upload:
    """One upload on its way into shared memory."""

    def __init__(self, layout: Layout, content_id: bytes, segment: Segment) -> None:
        self.layout = layout
        self.content_id = content_id
        self.segment = segment
        self._digest = hashlib.sha256(layout.header())
        self._received = 0

    def add(self, data: memoryview) -> None:
        """Take the next bytes of the payload.

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
        self.segment.write(data, self._received)
        self._digest.update(data)
        self._received = end

    def verify(self) -> None:
        """Check that the upload is complete and is what its id says.

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
        if self._digest.digest() != self.content_id:
            raise InvalidArgumentError(
                f"the content hashes to {self._digest.hexdigest()[:16]}..., "
                f"content_id says {self.content_id.hex()[:16]}...",
                "BAD_DIGEST",
                "Compute SHA-256 over the header and payload as evaluator.proto describes",
                "content_id",
            )
