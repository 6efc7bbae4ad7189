"""An upload of a data set on its way into shared memory."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout, PayloadDigest, check_weights
from warpfit.errors import InvalidArgumentError
from warpfit_server.ipc.segments import Segment
from warpfit_server.tenancy.tenants import key_of

#: Most bytes of an upload that have arrived and are not hashed yet.
_UNHASHED_BYTES: Final = 4 << 20
_REMEDY: Final = "Send exactly (variables + target + weights) x rows numbers of the dtype"


@dataclass(eq=False)
class Upload:
    """A data set of which not all bytes have been checked."""

    layout: Layout
    content_id: bytes
    """SHA-256 that its content must have; empty to take what it has."""
    tenant: str
    segment: Segment
    """Shared memory into which the payload is written."""
    cost: int
    """Bytes that it will count for."""
    budget: int
    """Bytes that its tenant may hold."""
    reserved: int = 0
    """Bytes that it counts for now."""
    is_over: bool = False
    """Whether its memory has been given back, or is that of a resident data set."""
    _received: int = 0

    def __post_init__(self) -> None:
        self._digest = PayloadDigest(self.layout, _UNHASHED_BYTES)

    @property
    def key(self) -> bytes:
        """Its name in this server, once the content id is known."""
        return key_of(self.tenant, self.content_id)

    def check(self, data: memoryview) -> None:
        """Check that there is room for the next bytes of the payload.

        Raises:
            InvalidArgumentError: if there are more than the layout says.
        """
        end = self._received + len(data)
        if end > self.layout.nbytes:
            raise InvalidArgumentError(
                f"the upload has at least {end} bytes where its layout has {self.layout.nbytes}",
                "SURPLUS_UPLOAD",
                _REMEDY,
                "data",
            )

    def add(self, data: memoryview) -> None:
        """Take the next bytes of the payload, which have been checked and reserved."""
        self._digest.update(data)
        self.segment.write(data, self._received)
        self._received += len(data)

    def verify(self) -> None:
        """Check that the upload is complete, has the content of its id, and has valid weights.

        Raises:
            InvalidArgumentError: otherwise.
        """
        if self._received != self.layout.nbytes:
            raise InvalidArgumentError(
                f"the upload ended after {self._received} of {self.layout.nbytes} bytes",
                "TRUNCATED_UPLOAD",
                _REMEDY,
                "data",
            )
        digest = self._digest.finish()
        self.content_id = self.content_id or digest
        if digest != self.content_id:
            raise InvalidArgumentError(
                f"the content hashes to {digest.hex()[:16]}..., "
                f"content_id says {self.content_id.hex()[:16]}...",
                "BAD_DIGEST",
                "Compute SHA-256 over the header and payload as evaluator.proto describes",
                "content_id",
            )
        if self.layout.has_weights:
            check_weights(self._weights())

    def weighted_bytes(self) -> int:
        """Return the bytes of the rows that have a weight if others have none, else 0."""
        if not self.layout.has_weights:
            return 0
        count = int(np.count_nonzero(self._weights()))
        return 0 if count == self.layout.rows else self.layout.nbytes // self.layout.rows * count

    def _weights(self) -> NDArray[Any]:
        rows, dtype = self.layout.rows, self.layout.dtype
        return self.segment.array(dtype, (rows,), self.layout.nbytes - rows * dtype.itemsize)

    def close(self) -> None:
        """Stop hashing and give the memory back."""
        self._digest.close()
        self.segment.close()
