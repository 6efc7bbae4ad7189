"""An upload of a data set on its way into shared memory; in a front end."""

from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout, PayloadDigest, check_weights
from warpfit.errors import InvalidArgumentError
from warpfit_server.ipc.messages import FoundDataset
from warpfit_server.ipc.segments import Segment, SegmentPool

#: Most bytes of an upload that have arrived and are not hashed yet.
_UNHASHED_BYTES: Final = 4 << 20
_REMEDY: Final = "Send exactly (variables + target + weights) x rows numbers of the dtype"


class UploadStore(Protocol):
    """Methods of `DatasetStore` that an upload calls."""

    def begin(self, layout: Layout, names: bytes, tenant: str, budget: int) -> int: ...
    def reserve(self, number: int, nbytes: int) -> None: ...
    def abandon(self, number: int) -> None: ...
    def commit(
        self, number: int, content_id: bytes, layout: Layout, copied: int, segment: Segment
    ) -> FoundDataset: ...


class Upload:
    """A data set of which not all bytes have been checked; a context manager.

    What is not committed inside the ``with`` block is abandoned at its end.

    Args:
        store: that counts its bytes and takes it over.
        pool: that makes its memory.
        layout: of the data set.
        content_id: SHA-256 that its content must have; empty to take what it has.
        tenant: to whom it will belong.
        budget: bytes that its tenant may hold.

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

    def __enter__(self) -> "Upload":
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
            weights = self._weights()
            check_weights(weights)
            count, rows = int(np.count_nonzero(weights)), self._layout.rows
            copied = 0 if count == rows else self._layout.nbytes // rows * count
            del weights  # a view of the segment, which the store may close
        own = digest, self._layout, copied, self._segment
        found = self._store.commit(self._number, *own)
        self._is_committed = True
        return found

    def _weights(self) -> NDArray[Any]:
        rows, dtype = self._layout.rows, self._layout.dtype
        return self._segment.array(dtype, (rows,), self._layout.nbytes - rows * dtype.itemsize)
