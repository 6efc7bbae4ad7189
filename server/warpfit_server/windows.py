"""Windows: memory of clients on this machine, in which matrices cross without the network.

A window is a memory file of the client's; this side only reads and writes it through its descriptor
(``pread``, ``pwrite``) and never maps it. Whatever the client does to the file meanwhile, a call of
ours fails or copies other bytes: no page fault of the server can depend on it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from warpfit import codec
from warpfit.errors import InvalidArgumentError, ResourceExhaustedError
from warpfit_server.config import Config
from warpfit_server.tenants import SHARE

#: Length of a window's id.
ID_BYTES: Final = 16
#: Seals that a window must have: the size that was counted is the size that it keeps.
_NEEDED_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
#: Bytes that are read from a window at a time.
_STEP: Final = 1 << 20


class Window:
    """A client's memory file; owns the descriptor."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        """Bytes, when it was opened."""

    def close(self) -> None:
        """Close the descriptor."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Windows(Protocol):
    """The windows of all clients, as one door sees them."""

    def borrow(self, window: bytes, tenant: str) -> AbstractContextManager[Window]:
        """Use a window inside the ``with`` block, also if its client ends meanwhile.

        Args:
            window: its id.
            tenant: on whose behalf.

        Raises:
            InvalidArgumentError: if there is none, or it is another tenant's.

        """


class Region:
    """A piece of a window that one call uses."""

    def __init__(self, window: Window, piece: codec.Piece, needed: int, field: str) -> None:
        """Check where it lies.

        Args:
            window: the window.
            piece: of it.
            needed: bytes that the call will read or write.
            field: of the request.

        Raises:
            InvalidArgumentError: if it does not lie in the window, or is too small.

        """
        if piece.offset + piece.size > window.size:  # Python's numbers do not overflow
            raise InvalidArgumentError(
                f"bytes {piece.offset} to {piece.offset + piece.size} do not lie in the window, "
                f"which has {window.size}",
                "WINDOW_RANGE",
                "Name a piece of the window, or open a larger one",
                field,
            )
        if needed > piece.size:
            raise InvalidArgumentError(
                f"the piece of the window has {piece.size} bytes, {needed} are needed",
                "WINDOW_TOO_SMALL",
                "Name a piece as large as the matrices, or open a larger window",
                field,
                needed=needed,
                available=piece.size,
            )
        self._descriptor = window.descriptor
        self._offset = piece.offset
        self._size = piece.size
        self._field = field

    def write(self, data: memoryview, offset: int) -> None:
        """Copy bytes into the piece."""
        self._check(offset, len(data))
        while data:
            with self._explained():
                written = os.pwrite(self._descriptor, data, self._offset + offset)
            data, offset = data[written:], offset + written

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield copies of the bytes from ``start`` to ``stop``.

        Raises:
            InvalidArgumentError: if they do not all lie in the piece.

        """
        self._check(start, stop - start)
        while start < stop:
            with self._explained():
                data = os.pread(self._descriptor, min(_STEP, stop - start), self._offset + start)
                if not data:
                    raise OSError("the file ends before")
            yield memoryview(data)
            start += len(data)

    def read_as_filled(self, marks: Iterator[int]) -> Iterator[memoryview]:
        """Yield copies of the bytes up to each mark, from where the one before it was."""
        done = 0
        for mark in marks:
            yield from self.read(done, mark)
            done = max(done, mark)

    def _check(self, offset: int, size: int) -> None:
        if offset + size > self._size:
            raise InvalidArgumentError(
                f"byte {offset + size} does not lie in the piece, which has {self._size}",
                "WINDOW_RANGE",
                "Count no more bytes than the piece has",
                self._field,
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InvalidArgumentError(
                f"the window cannot be used: {error}",
                "WINDOW_UNUSABLE",
                "Open another, of a memory file that nobody seals against writing or shrinks",
                self._field,
            ) from error


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """How many windows there may be at a time, and how many bytes they may have."""

    windows: int
    nbytes: int
    tenant_windows: int
    tenant_nbytes: int

    @classmethod
    def of(cls, config: Config) -> WindowLimits:
        """Take them from the configuration; where there are tenants, each may have its share."""
        windows, nbytes = config.max_windows, config.window_bytes
        share = SHARE if config.has_tenants else 1.0
        return cls(windows, nbytes, max(1, int(share * windows)), int(share * nbytes))


@dataclass(frozen=True, slots=True)
class _Entry:
    window: Window
    tenant: str


class WindowTable:
    """The windows that are open; in the front door."""

    def __init__(self, limits: WindowLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._counts: Counter[str] = Counter()
        self._sizes: Counter[str] = Counter()

    def usage(self) -> tuple[int, int]:
        """Return how many windows are open, and their bytes."""
        with self._lock:
            return len(self._entries), self._sizes.total()

    def add(self, descriptor: int, tenant: str) -> bytes:
        """Open a window; owns the descriptor if that succeeds.

        Returns:
            Its id.

        Raises:
            InvalidArgumentError: if the descriptor is not that of a memory file as it must be.
            ResourceExhaustedError: if there are too many windows, or too large ones.

        """
        size = check_memory_file(descriptor)
        identifier = secrets.token_bytes(ID_BYTES)
        with self._lock:
            self._check_room(tenant, size)
            self._entries[identifier] = _Entry(Window(descriptor, size), tenant)
            self._counts[tenant] += 1
            self._sizes[tenant] += size
        return identifier

    def remove(self, identifier: bytes) -> None:
        """Close a window; calls that use it finish with it."""
        with self._lock:
            entry = self._entries.pop(identifier)
            self._counts[entry.tenant] -= 1
            self._sizes[entry.tenant] -= entry.window.size
            entry.window.close()

    @contextmanager
    def borrow(self, window: bytes, tenant: str) -> Iterator[Window]:
        """Use a window; see `Windows`."""
        with self._lock:
            entry = self._entries.get(window)
            if entry is None or entry.tenant != tenant:
                raise unknown_window()
            borrowed = Window(os.dup(entry.window.descriptor), entry.window.size)
        try:
            yield borrowed
        finally:
            borrowed.close()

    def _check_room(self, tenant: str, size: int) -> None:
        limits = self._limits
        for used, amount, limit, what, flag in (
            (len(self._entries), 1, limits.windows, "windows", "windows"),
            (self._counts[tenant], 1, limits.tenant_windows, "windows", "windows"),
            (self._sizes.total(), size, limits.nbytes, "bytes of windows", "window-bytes"),
            (self._sizes[tenant], size, limits.tenant_nbytes, "bytes of windows", "window-bytes"),
        ):
            if used + amount > limit:
                raise ResourceExhaustedError(
                    f"{used} {what} are open and the limit is {limit}",
                    "TOO_MANY_WINDOWS",
                    f"Use the network, or start the server with a higher --max-{flag}",
                    needed=used + amount,
                    available=limit,
                )


def check_memory_file(descriptor: int) -> int:
    """Return the size of a memory file that can be a window.

    Raises:
        InvalidArgumentError: if it is another kind of file, empty, closed to reading or writing, or
            not sealed as it must be.

    """
    found = os.fstat(descriptor)
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)  # memory files alone have seals
    except OSError:
        seals = 0
    is_open = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    is_sealed = seals & _NEEDED_SEALS == _NEEDED_SEALS and not seals & fcntl.F_SEAL_WRITE
    if not (stat.S_ISREG(found.st_mode) and is_open and is_sealed and found.st_size):
        raise InvalidArgumentError(
            "the descriptor is not that of a memory file sealed against shrinking and growing",
            "WINDOW_UNSEALED",
            "Make it with memfd_create and F_SEAL_SHRINK | F_SEAL_GROW, open to read and write",
            "descriptor",
        )
    return found.st_size


def unknown_window() -> InvalidArgumentError:
    """Say that there is no such window; the same whether it is another tenant's or nobody's."""
    return InvalidArgumentError(
        "there is no such window",
        codec.WINDOW_UNKNOWN,
        "Open one (again), or send the request without a window",
        "window",
    )
