"""Settings read from files that may be replaced while the server runs."""

import logging
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Generic, TypeVar

from warpfit.errors import InvalidArgumentError

T = TypeVar("T")
#: Seconds without a change after which a file is complete.
_SETTLE_SECONDS: Final = 0.5


class WatchedFiles(Generic[T]):
    """A value that is read again when one of its files has changed.

    Files that cannot be used leave the old value in force, and a log line says why. They are read
    again at each look until they can be used, because not all that matters is a property of the
    files themselves: a folder above them may be closed, or a disk full. A file that has changed a
    moment ago may be half of one that is being written, so that it is read a moment later.

    Args:
        paths: the files; symbolic links are followed, because mounted secrets are such links.
        read: reads the value; raises InvalidArgumentError if the files cannot be used.
        log: where changes are logged.
        seconds: shortest time between two looks at the files.

    Raises:
        InvalidArgumentError: if one of them is a pipe or the like, or as ``read``.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[], T],
        log: logging.Logger,
        seconds: float = 1.0,
    ) -> None:
        self._paths = paths
        self._read_files = read
        self._log = log
        self._seconds = seconds
        self._next = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._stamps = self._stamp_files()
        self._failed = ""
        """Why the files could not be used when they were read last; "" if they could."""
        self._value = self._read()

    def get(self) -> T:
        """Return the value, a new object after a change; cheap when nothing has changed."""
        if time.monotonic() >= self._next:
            with self._lock:
                stamps = self._stamp_files()
                is_same = stamps == self._stamps
                # A file that has changed in the last moment may not be whole. A clock that was set
                # back counts as a change long ago.
                wall, moment = time.time_ns(), _SETTLE_SECONDS * 1e9
                is_new = any(stamp and 0 <= wall - stamp[0] < moment for stamp in stamps)
                is_settled = is_same or not is_new
                pause = self._seconds if is_settled else min(self._seconds, _SETTLE_SECONDS)
                self._next = time.monotonic() + pause
                if not is_settled or (is_same and not self._failed):
                    return self._value
                names = ", ".join(map(str, self._paths))
                try:
                    value = self._read()
                    if self._stamp_files() != stamps:  # while it was read
                        return self._value
                    self._stamps, self._value = stamps, value
                except InvalidArgumentError as error:
                    self._stamps = stamps
                    if str(error) != self._failed:
                        text = "%s changed, the old version stays in force: %s"
                        self._log.error(text, names, error)
                    self._failed = str(error)
                else:
                    self._failed = ""
                    self._log.info("%s changed and was read again", names)
        return self._value

    def _read(self) -> T:
        """Read the value, but of no pipe, for whose other end all calls would wait."""
        for path in self._paths:
            with suppress(OSError):  # `read` says what is wrong
                if not stat.S_ISREG(path.stat().st_mode):
                    raise InvalidArgumentError(
                        f"{path} is not a regular file",
                        "NO_REGULAR_FILE",
                        "Give the path of a file, which is read again when it changes",
                    )
        return self._read_files()

    def _stamp_files(self) -> list[tuple[int, ...]]:
        """Return a stamp of each file, which is other after every change; () of a missing one.

        The time of change (ctime) follows every change, of mode and owner, too. The time of
        modification can be set by all who may write.
        """
        stamps: list[tuple[int, ...]] = []
        for path in self._paths:
            try:
                found = path.stat()
            except OSError:  # between one version and the next, or gone
                stamps.append(())
                continue
            times = found.st_ctime_ns, found.st_mtime_ns
            place = found.st_dev, found.st_ino, found.st_size, found.st_mode
            stamps.append((*times, *place))
        return stamps
