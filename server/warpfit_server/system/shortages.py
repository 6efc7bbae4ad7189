"""Errors for what the operating system has run out of: file descriptors and memory."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from warpfit.errors import ResourceExhaustedError

_FILES: Final = (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)
_MEMORY: Final = (errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC)
#: Reason of `too_many_files`.
TOO_MANY_FILES: Final = "TOO_MANY_FILES"
#: Seconds after which a client may repeat the call: others will have ended.
_RETRY_SECONDS: Final = 1.0


def too_many_files() -> ResourceExhaustedError:
    """Return the error for a process of the server that can open no more files."""
    return ResourceExhaustedError(
        "the server can open no more files",
        TOO_MANY_FILES,
        "Retry with back-off, or raise the server's limit of open files (ulimit -n)",
        retry_after=_RETRY_SECONDS,
    )


def shortage(error: BaseException) -> ResourceExhaustedError | None:
    """Return an error of the system as an error for callers if it reports a shortage, else None."""
    if isinstance(error, OSError) and error.errno in _FILES:
        return too_many_files()
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _MEMORY):
        return ResourceExhaustedError(
            "the server has no more memory",
            "MEMORY",
            "Send smaller batches, or give the server more memory",
            retry_after=_RETRY_SECONDS,
        )
    return None


class DescriptorReserve:
    """Descriptors that are kept for what must be done also when the process has no others left."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: list[int] = []
        self._fill()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let the ``with`` block have them; those that it leaves are kept again."""
        with suppress(IndexError):  # another thread has lent some
            while True:
                os.close(self._held.pop())
        try:
            yield
        finally:
            self._fill()

    def close(self) -> None:
        """Keep none any longer."""
        self._count = 0
        with self.lent():
            pass

    def _fill(self) -> None:
        with suppress(OSError):  # there are none; next time perhaps
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
