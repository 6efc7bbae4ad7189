"""How data sets come in: uploads of callers, and Parquet files that the server itself reads.

A front end receives both into shared memory of its own, which it hands over to the store of the
main process when the content has been checked.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
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
from warpfit.errors import InvalidArgumentError, UnimplementedError
from warpfit.server_info import Limits
from warpfit_server.ipc.messages import FoundDataset
from warpfit_server.ipc.segments import Segment, SegmentPool
from warpfit_server.limits import check_limits, check_names
from warpfit_server.system.machine import shortage

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
