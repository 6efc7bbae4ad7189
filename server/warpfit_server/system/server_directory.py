"""The temporary directory of a server, and the removal of those whose servers were killed.

A server holds a lock on a file in its directory until it ends, however it ends. So a directory
whose lock is free belongs to no server any more.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

_LOG: Final = logging.getLogger("warpfit")
_PREFIX: Final = "warpfit-server-"
_LOCK: Final = "lock"


class ServerDirectory:
    """A directory that only this user can read. ``path`` is where it is."""

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))
        self._directory = tempfile.TemporaryDirectory(prefix=_PREFIX)
        self.path = Path(self._directory.name)
        new = self.path / "new"
        self._lock = new.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.replace(self.path / _LOCK)  # other servers see it only now that it is locked

    def remove(self) -> None:
        """Remove the directory and all that is in it."""
        self._directory.cleanup()
        self._lock.close()


def sweep(parent: Path) -> None:
    """Remove the directories that this user's servers left behind when they were killed."""
    for directory in parent.glob(f"{_PREFIX}*"):
        try:
            status = directory.lstat()
            if status.st_uid == os.geteuid() and _is_abandoned(directory / _LOCK):
                shutil.rmtree(directory)
                _LOG.info("removed %s, which a server that was killed left behind", directory)
        except OSError as error:  # for example, another server is removing it
            _LOG.debug("%s was not removed: %s", directory, error)


def _is_abandoned(lock: Path) -> bool:
    """Return whether no process holds the lock on a file.

    Raises:
        OSError: if there is no such file, or it cannot be locked.
    """
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
