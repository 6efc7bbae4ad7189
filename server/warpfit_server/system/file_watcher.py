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

    Files that cannot be used leave the old value in force, and a log line says why.

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
        self._value = read()

    def get(self) -> T:
        """Return the value, a new object after a change; cheap when nothing has changed."""
        if time.monotonic() >= self._next:
            with self._lock:
                self._next = time.monotonic() + self._seconds
                stamps = self._stamp_files()
                if stamps != self._stamps:
                    self._stamps = stamps
                    self._read_again()
        return self._value

    def _read_again(self) -> None:
        names = ", ".join(map(str, self._paths))
        try:
            self._value = self._read()
        except InvalidArgumentError as error:
            self._log.error("%s changed, the old version stays in force: %s", names, error)
        else:
            self._log.info("%s changed and was read again", names)

    def _stamp_files(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None  # between one version and the next, or gone
    return found.st_mtime_ns, found.st_ino, found.st_size
