"""Data sets that the server itself reads from Parquet files below one folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from warpfit.dataset import RoundingCheck, ServerFile, Table, blocks_of, open_table
from warpfit.errors import InvalidArgumentError, UnimplementedError
from warpfit.server_info import Limits
from warpfit_server.data.dataset_store import DatasetStore, StoredDataset
from warpfit_server.limits import check_names

#: Files and columns of them whose content ids are remembered.
_REMEMBERED: Final = 1024


class DataFolder:
    """Reads data sets from files below a folder into a store.

    The content id of a file's columns is remembered while the file stays what it is, so that a file
    whose columns are resident is not read again.

    Args:
        root: the folder; empty if this server reads no files.
        store: where the data sets go.

    Raises:
        InvalidArgumentError: if there is no such folder, or pyarrow is not installed.

    """

    def __init__(self, root: str, store: DatasetStore) -> None:
        self._root = Path(root).resolve() if root else None
        self._store = store
        self._known: dict[Any, tuple[bytes, str]] = {}
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
        """Return what `read` found for a file that has not changed since: content id, warning."""
        return self._known.get(self._identity(self._path(file.name), file))

    def read(
        self, file: ServerFile, tenant: str, limits: Limits, check_wanted: Callable[[], None]
    ) -> tuple[StoredDataset, str]:
        """Read columns of a file and make them resident.

        Args:
            file: the file and its columns.
            tenant: to whom the data set will belong.
            limits: of the tenant; they are checked before numbers are read.
            check_wanted: called between blocks; raises an error if the call has ended.

        Returns:
            The data set, and what is said of columns that float32 rounds too coarsely, or "".

        Raises:
            InvalidArgumentError: if there is no such file below the folder, or it has not these
                columns of numbers.
            ResourceExhaustedError: if the data set is over a limit.
            UnimplementedError: if this server reads no files.

        """
        path = self._path(file.name)
        identity = self._identity(path, file)
        try:
            table = open_table(path, file.y or None, file.weights or None, file.x or None)
            stored, lost_digits = self._store_table(table, file, tenant, limits, check_wanted)
        except InvalidArgumentError as error:
            if error.reason != "BAD_FILE":
                raise
            raise _no_file(file.name) from error  # without the path and what the system says
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[identity] = stored.content_id, lost_digits
        return stored, lost_digits

    def _store_table(
        self,
        table: Table,
        file: ServerFile,
        tenant: str,
        limits: Limits,
        check_wanted: Callable[[], None],
    ) -> tuple[StoredDataset, str]:
        layout = table.layout(None, file.dtype)
        check_names(layout.names, limits)
        rounding = RoundingCheck(layout)
        upload = self._store.begin(layout, b"", tenant, limits)
        try:
            for block in blocks_of(layout, table.sources):
                check_wanted()
                rounding.check(block.numbers, block.given, block.first, block.start)
                self._store.add(upload, block.numbers.reshape(-1).data.cast("B"))
            return self._store.commit(upload), rounding.lost_digits()
        except BaseException:
            self._store.abandon(upload)
            raise

    def _path(self, name: str) -> Path:
        """Return the path of a file below the folder, through no link that leads out of it."""
        if self._root is None:
            raise UnimplementedError(
                "this server reads no files",
                "NO_DATA_ROOT",
                "Start it with --data-root, or upload the data: client.upload(...)",
            )
        try:
            path = (self._root / name).resolve(strict=True)
            if path.is_relative_to(self._root) and path.is_file() and path.suffix == ".parquet":
                return path
        except (OSError, ValueError, RuntimeError):  # none, not readable, a loop of links, a NUL
            pass
        raise _no_file(name)

    def _identity(self, path: Path, file: ServerFile) -> Any:
        status = path.stat()
        return file, path, status.st_ino, status.st_size, status.st_mtime_ns


def _no_file(name: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{name!r} is no Parquet file that can be read below the server's --data-root",
        "NO_SUCH_FILE",
        "Give the path from that folder, with / between names, to a whole .parquet file",
        "name",
    )
