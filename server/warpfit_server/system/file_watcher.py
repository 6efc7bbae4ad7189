"""Files that may be replaced while the server runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path


class Watch:
    """Tells when one of several files was replaced or changed.

    Args:
        paths: the files; symbolic links are followed, as those of mounted secrets must be.
        seconds: look at most this often.

    """

    def __init__(self, paths: Sequence[str | Path], seconds: float = 1.0) -> None:
        self._paths = [Path(path) for path in paths]
        self._seconds = seconds
        self._next = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._state = self._look()

    def changed(self) -> bool:
        """Tell, once for each change, whether a file differs from what it was; cheap to ask."""
        if time.monotonic() < self._next:
            return False
        with self._lock:
            self._next = time.monotonic() + self._seconds
            state = self._look()
            if state == self._state:
                return False
            self._state = state
            return True

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None  # on its way from one version to the next, or gone
    return found.st_mtime_ns, found.st_ino, found.st_size
