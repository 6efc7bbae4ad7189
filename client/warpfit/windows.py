"""Windows of shared memory to a server on this machine: the client's side.

A window is an anonymous memory file of this process. A call that moves a large matrix borrows one;
the server writes the answer into it (or reads the upload from it), and the matrix is copied out
into an array of the caller's own. So arrays outlive calls as ever, and a window is free again as
soon as its call has ended. One whose call failed is given up: the server may still write to it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from warpfit import codec
from warpfit.config import TransportConfig
from warpfit.dataset import Dataset
from warpfit.errors import ResourceExhaustedError, WarpfitError
from warpfit.info import LocalTransport

_LOG: Final = logging.getLogger("warpfit.windows")
#: Name of the memory files, which the system shows among the open files of a process.
NAME: Final = "warpfit-window"
#: After a failure the network is used for so many seconds before another attempt.
_PAUSE: Final = 30.0
#: Longest wait for the server to open a window, in seconds.
_PATIENCE: Final = 5.0
#: Sizes are rounded up to one of so many steps from each power of two to the next.
_STEPS: Final = 8


class Window:
    """A memory file that the server has open, too; `close` ends that."""

    _descriptor = -1
    step: Final = 4 << 20
    """Bytes of an upload that the server is told about at a time."""

    def __init__(self, size: int, path: str, ticket: bytes) -> None:
        """Make the file and pass it to the server.

        Args:
            size: bytes.
            path: of the server's socket.
            ticket: from GetServerInfo.

        Raises:
            OSError: if there is no memory, or no server at the socket.
            PermissionDeniedError: if the server refuses.

        """
        if sys.platform != "linux":
            raise OSError("only Linux has memory files that can be passed on")
        import fcntl  # only there, too

        self.size = size
        self._map: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._lock = threading.Lock()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.truncate(self._descriptor, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
            self._connection.settimeout(_PATIENCE)
            self._connection.connect(path)
            socket.send_fds(self._connection, [codec.open_window(ticket)], [self._descriptor])
            answer = self._connection.recv(codec.WINDOW_PACKET_BYTES)
            if not answer:
                raise ConnectionResetError("the server has closed the connection")
            self.identifier = codec.opened_window(answer)
            self._connection.setblocking(False)
        except BaseException:
            self.close()
            raise

    def map(self) -> None:
        """Reserve the memory, on this process's account, and map it, to `view` it.

        Raises:
            OSError: if there is none.

        """
        if self._map is None:
            os.posix_fallocate(self._descriptor, 0, self.size)
            self._map = mmap.mmap(self._descriptor, self.size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self._view = memoryview(self._map)

    def view(self) -> memoryview:
        """View what the server has written; after `map`, until `close`."""
        return self._view

    def write(self, data: memoryview, offset: int) -> None:
        """Copy bytes into the file, which takes memory as it comes.

        Raises:
            ResourceExhaustedError: if there is none.

        """
        try:
            with self._lock:  # gRPC's thread may be here when the call is over and `close` comes
                while data:
                    written = os.pwrite(self._descriptor, data, offset)
                    data, offset = data[written:], offset + written
        except OSError as error:
            raise ResourceExhaustedError(
                f"there is no shared memory here: {error}", "MEMORY", "Upload fewer rows at once"
            ) from error

    def upload(self, dataset: Dataset) -> Iterator[bytes]:
        """Fill the window with a payload; yield the messages of its upload, one each `step`."""
        yield codec.upload_from(dataset, self.piece(dataset.layout.nbytes))
        filled = 0
        for chunk in dataset.chunks(self.step):
            self.write(chunk, filled)
            filled += len(chunk)
            yield codec.filled_to_bytes(filled)

    def piece(self, size: int) -> codec.Piece:
        """Describe its first ``size`` bytes for a request."""
        return codec.Piece(self.identifier, 0, size)

    @property
    def is_open(self) -> bool:
        """Whether the server still has it, as far as is known here."""
        try:
            self._connection.recv(1)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # its end

    def close(self) -> None:
        """Let the server forget it; the memory goes when nobody uses it any more."""
        self._connection.close()
        with contextlib.suppress(BufferError):  # the mapping goes with the last part of the view
            self._view.release()
            if self._map is not None:
                self._map.close()
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def __del__(self) -> None:
        """Close a window that nobody closed: the task that borrowed it was cancelled."""
        if self._descriptor >= 0:
            self.close()


class Loan:
    """A window for one call, used by its first attempt alone; a context manager.

    After an attempt that failed the server may still write to it, so it is closed then.
    """

    def __init__(self, windows: Windows, window: Window) -> None:
        self._windows = windows
        self._window: Window | None = window
        self._is_used = False

    def take(self) -> Window | None:
        """Return the window for the first attempt, None for any later one."""
        if self._is_used:
            self._close()
        self._is_used = True
        return self._window

    def is_refused(self, error: WarpfitError) -> bool:
        """Tell whether a call failed because of the window; later ones open others."""
        if self._window is None or not error.reason.startswith("WINDOW_"):
            return False
        self._close()
        self._windows.fail(str(error))
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._close()
        if self._window is not None:
            self._windows.give_back(self._window)
            self._window = None

    def _close(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None


class Windows:
    """The windows of one client; any number of threads may share it.

    Args:
        path: of the server's socket; None for the path that the server tells.
        least_bytes: matrices below this size go over the network.
        idle_bytes: most bytes of windows that are kept for further calls.

    """

    def __init__(self, path: str | Path | None, least_bytes: int, idle_bytes: int) -> None:
        self._path = None if path is None else str(path)
        self._least_bytes = least_bytes
        self._idle_bytes = idle_bytes
        self._lock = threading.Lock()
        self._idle: list[Window] = []
        self._local: LocalTransport | None = None
        self._not_before = 0.0

    def wants(self, size: int) -> bool:
        """Whether a matrix should cross in a window: it is large, and nothing failed just now."""
        return size >= max(1, self._least_bytes) and time.monotonic() >= self._not_before

    @property
    def is_introduced(self) -> bool:
        """Whether `introduce` has told where the socket is."""
        return self._local is not None

    def introduce(self, local: LocalTransport | None) -> None:
        """Take what the server says about its socket."""
        if local is None:
            self.fail("the server offers none; it is started with --local-socket")
        else:
            self._local = local

    def borrow(self, size: int, *, mapped: bool) -> Loan | None:
        """Lend a window for a call; None if there can be none.

        Args:
            size: bytes that it must have.
            mapped: whether it will be viewed.

        """
        window = self._take(size)
        try:
            window = window or self._open(size)
            if window is not None and mapped:
                window.map()
        except (OSError, WarpfitError) as error:
            if window is not None:
                window.close()
            self.fail(str(error))
            return None
        return None if window is None else Loan(self, window)

    def give_back(self, window: Window) -> None:
        """Take a window back whose call has ended well."""
        with self._lock:
            self._idle.append(window)
            while sum(idle.size for idle in self._idle) > self._idle_bytes:
                self._idle.pop(0).close()

    def fail(self, why: str) -> None:
        """Use the network for a while, then ask the server again: it may be another one by then."""
        _LOG.warning("no shared memory for now, the network is used: %s", why)
        self._not_before = time.monotonic() + _PAUSE
        self.close()

    def close(self) -> None:
        """Close the idle windows."""
        with self._lock:
            idle, self._idle = self._idle, []
            self._local = None
        for window in idle:
            window.close()

    def _take(self, size: int) -> Window | None:
        """Take the smallest idle window that is large enough."""
        with self._lock:
            fitting = [window for window in self._idle if window.size >= size]
            if not fitting:
                return None
            window = min(fitting, key=lambda window: window.size)
            self._idle.remove(window)
        if window.is_open:
            return window
        window.close()
        self.close()  # the server has gone; the next call asks the next one
        return None

    def _open(self, size: int) -> Window | None:
        local = self._local
        if local is None:
            return None  # forgotten meanwhile
        return Window(_rounded(size), self._path or local.socket, local.ticket)


def open_windows(shared_memory: bool | str | Path, config: TransportConfig) -> Windows | None:
    """Make the windows of a client that asks for shared memory; see `warpfit.connect`."""
    if not shared_memory:
        return None
    path = None if shared_memory is True else shared_memory
    return Windows(path, config.window_bytes, config.idle_window_bytes)


def _rounded(size: int) -> int:
    """Round up, by an eighth at most, so that calls of similar size share windows."""
    step = max(mmap.PAGESIZE, (1 << (size - 1).bit_length()) // (2 * _STEPS))
    return -(-size // step) * step
