"""Settings read from files that may be replaced while the server runs."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from warpfit.errors import InvalidArgumentError

T = TypeVar("T")


class WatchedFiles(Generic[T]):
    """A value that is read again when one of its files has changed.

    Files that cannot be used leave the old value in force, and a log line says why. They are read
    again at each look until they can be used, because not all that matters is a property of the
    files themselves: a folder above them may be closed, or a disk full.

    Args:
        paths: the files; symbolic links are followed, as those of mounted secrets must be.
        read: reads the value; raises InvalidArgumentError if the files cannot be used.
        log: where changes are logged.
        seconds: shortest time between two looks at the files.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], T],
        log: logging.Logger,
        seconds: float = 1.0,
    ) -> None:
        self._paths = paths
        self._read = read
        self._log = log
        self._seconds = seconds
        self._next = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._stamps = self._stamp_files()
        self._failed = ""
        """Why the files could not be used when they were read last; "" if they could."""
        self._value = read()

    def get(self) -> T:
        """Return the value, a new object after a change; cheap when nothing has changed."""
        if time.monotonic() >= self._next:
            with self._lock:
                self._next = time.monotonic() + self._seconds
                stamps = self._stamp_files()
                if stamps != self._stamps or self._failed:
                    self._stamps = stamps
                    self._read_again()
        return self._value

    def _read_again(self) -> None:
        names = ", ".join(map(str, self._paths))
        try:
            self._value = self._read()
        except InvalidArgumentError as error:
            if str(error) != self._failed:
                self._log.error("%s changed, the old version stays in force: %s", names, error)
            self._failed = str(error)
        else:
            self._failed = ""
            self._log.info("%s changed and was read again", names)

    def _stamp_files(self) -> list[tuple[int, ...] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None  # between one version and the next, or gone
    # The time of change (ctime) follows every change, of mode and owner, too; that of modification
    # can be set by anybody who may write.
    times = found.st_ctime_ns, found.st_mtime_ns
    return *times, found.st_dev, found.st_ino, found.st_size, found.st_mode
