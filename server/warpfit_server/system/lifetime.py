"""How processes end: with their parent, or because they are stuck; and what is left of them.

Long evaluations are legitimate, so their length says nothing. But every engine polls the
cancellation flag between blocks. An evaluation that goes on for `Config.stuck_seconds` after it was
cancelled occupies a step for ever, which only the engine knows: it may still answer probes.
All else is decided by `warpfit_server.processes.watchdog`, which replaces engines without answers.

A server has a temporary directory. It holds a lock on a file there until it ends, however it ends.
So a directory whose lock is free belongs to no server any more.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

_LOG: Final = logging.getLogger("warpfit")
#: Exit statuses of the engine process.
EXIT_CANNOT_RUN: Final = 3
EXIT_BROKEN: Final = 4
EXIT_STUCK: Final = 5
_PREFIX: Final = "warpfit-server-"
_LOCK: Final = "lock"


class Parent:
    """The process that this one must not outlive, by its process id; 0 for none.

    Two signs tell its end, because each misses a case. When it dies, however that comes, this
    process gets another parent. When it becomes another program, which keeps its process id, it
    closes the pipe that is this process's standard input; where that is no pipe, only the first
    sign counts. (The signal PR_SET_PDEATHSIG would come when the thread ends that has started this
    process, while the others of its process still use it.)
    """

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id
        self._poll = None
        if process_id and stat.S_ISFIFO(os.fstat(0).st_mode):
            self._poll = select.poll()
            self._poll.register(0, 0)

    def is_gone(self) -> bool:
        """Return whether this process has to end."""
        if not self._process_id:
            return False
        if os.getppid() != self._process_id:
            return True
        events = self._poll.poll(0) if self._poll is not None else []
        return any(event & (select.POLLHUP | select.POLLERR) for _, event in events)


class StuckDetector:
    """Ends this process when an evaluation has ignored its cancellation for too long.

    Args:
        patience: seconds that an evaluation may take to stop.
        flags: returns the evaluations that are running, with their cancellation flags.
    """

    def __init__(
        self,
        patience: float,
        flags: Callable[[], Iterable[tuple[Hashable, NDArray[np.uint8]]]],
    ) -> None:
        self._patience = patience
        self._flags = flags
        self._since: dict[Hashable, float] = {}

    def start(self) -> None:
        """Start the thread that looks."""
        threading.Thread(target=self._watch, name="stuck-detector", daemon=True).start()

    def is_stuck(self, now: float) -> bool:
        """Note which evaluations are cancelled; return whether one has been for too long."""
        cancelled = [evaluation for evaluation, flag in self._flags() if flag[0]]
        self._since = {evaluation: self._since.get(evaluation, now) for evaluation in cancelled}
        return any(now - since > self._patience for since in self._since.values())

    def _watch(self) -> None:
        while not self.is_stuck(time.monotonic()):
            time.sleep(self._patience / 10)
        _LOG.error("an evaluation does not stop; the supervisor starts a new process")
        os._exit(EXIT_STUCK)


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
            if status.st_uid != os.geteuid():
                continue
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # its server holds the lock
            finally:
                os.close(lock)
            shutil.rmtree(directory)
            _LOG.info("removed %s, which a server that was killed left behind", directory)
        except OSError as error:  # for example, another server is removing it
            _LOG.debug("%s was not removed: %s", directory, error)
