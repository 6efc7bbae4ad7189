"""What the system has run out of, as errors that say so."""

from __future__ import annotations

import errno
from typing import Final

from warpfit.errors import ResourceExhaustedError

_FILES: Final = (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)
_MEMORY: Final = (errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC)
#: Reason of the error for a process that can open no more files.
TOO_MANY_FILES: Final = "TOO_MANY_FILES"
#: Seconds after which a call may come again: others have ended by then.
_WAIT: Final = 1.0


def too_many_files() -> ResourceExhaustedError:
    """Explain that a process of the server can open no more files."""
    return ResourceExhaustedError(
        "the server can open no more files",
        TOO_MANY_FILES,
        "Retry with back-off, or raise the server's limit of open files (ulimit -n)",
        retry_after=_WAIT,
    )


def shortage(error: BaseException) -> ResourceExhaustedError | None:
    """Explain an error of the system, if it says that there is no more of something."""
    if isinstance(error, OSError) and error.errno in _FILES:
        return too_many_files()
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _MEMORY):
        return ResourceExhaustedError(
            "the server has no more memory",
            "MEMORY",
            "Send smaller batches, or give the server more memory",
            retry_after=_WAIT,
        )
    return None
