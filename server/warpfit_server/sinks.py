"""Where the matrices of an answer go: into its messages, or into a window of the client's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from warpfit import codec
from warpfit_server.windows import Region

#: Bytes that are written to a window before the client is told, which may then take them while
#: the next ones are written: sending a message takes as long as copying about a megabyte.
_TOLD: Final = 8 << 20


class Sink(Protocol):
    """Takes the matrices of one answer, in order."""

    def values(self, part: memoryview, offset: int) -> Iterator[bytes]:
        """Take a part of the value matrix, which begins at ``offset``; yield messages."""

    def jacobian(self, matrix: memoryview) -> Iterator[bytes]:
        """Take the Jacobian matrix; yield messages."""


class MessageSink:
    """Sends matrices in messages of ``chunk_bytes``."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes

    def values(self, part: memoryview, offset: int) -> Iterator[bytes]:
        """Take a part of the value matrix."""
        return codec.value_pieces(part, offset, self._chunk_bytes)

    def jacobian(self, matrix: memoryview) -> Iterator[bytes]:
        """Take the Jacobian matrix."""
        return codec.value_pieces(matrix, 0, self._chunk_bytes, jacobian=True)


class WindowSink:
    """Writes matrices into a client's window; sends how far it is.

    Args:
        region: of the window, as large as the matrices.

    """

    def __init__(self, region: Region) -> None:
        self._region = region
        self._written = 0
        self._told = 0

    def values(self, part: memoryview, offset: int) -> Iterator[bytes]:
        """Take a part of the value matrix."""
        return self._write(part)

    def jacobian(self, matrix: memoryview) -> Iterator[bytes]:
        """Take the Jacobian matrix."""
        return self._write(matrix)

    def _write(self, data: memoryview) -> Iterator[bytes]:
        for begin in range(0, len(data), _TOLD):
            piece = data[begin : begin + _TOLD]
            self._region.write(piece, self._written)
            self._written += len(piece)
            if self._written - self._told >= _TOLD:
                self._told = self._written
                yield codec.written_to_bytes(self._told)
