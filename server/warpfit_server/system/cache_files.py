"""Files of compiled code, with checksums, which nobody else could have written.

What is in them gets executed. So a file counts only if it is whole and belongs to this user or to
root, and if neither its group nor others may write to it; that is checked on the open file, which
nobody can exchange any more. Everything else is made again. The cache saves time and is never
needed: a disk that is full or read-only costs one line in the log.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

_LOG: Final = logging.getLogger("warpfit.cache")
_MAGIC: Final = b"warpfit.code.1\n"
_DIGEST_BYTES: Final = 32
_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


class DamagedFileError(Exception):
    """A file is not whole, or others could have written it."""


def read(path: Path) -> bytes:
    """Return the content that `write` stored.

    Raises:
        OSError: if the file cannot be read.
        DamagedFileError: if it is not whole, or if others could have written it.

    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        problem = insecurity(status) or (None if stat.S_ISREG(status.st_mode) else "is no file")
        if problem is not None:
            raise DamagedFileError(f"{path} {problem}")
        stored = file.read()
    content = stored[len(_MAGIC) + _DIGEST_BYTES :]
    if stored != _sealed(content):
        raise DamagedFileError(f"{path} is damaged")
    return content


def find(path: Path) -> bytes | None:
    """Return the content that `write` stored, or None, with a warning if it cannot be used."""
    try:
        return read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, DamagedFileError) as error:
        _LOG.warning("compiled code is made again: %s", error)
        return None


def write(path: Path, content: bytes) -> int:
    """Store content with a checksum, as `write_plain` does; return the bytes that it takes."""
    sealed = _sealed(content)
    write_plain(path, sealed)
    return len(sealed)


def write_plain(path: Path, content: bytes) -> None:
    """Write a file so that readers see all of it or nothing, for this user alone.

    Where that fails, nothing is left behind, and the first failure of its kind is logged.
    """
    try:
        make_private(path.parent)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            try:
                file.write(content)
                file.flush()
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink()
                raise
    except OSError as error:
        _report(f"{error.strerror or error} in {path.parent.parent}")


def make_private(directory: Path) -> None:
    """Make a directory and those above it that are missing, for this user alone.

    Raises:
        OSError: if that is refused.

    """
    if not directory.is_dir():
        if directory != directory.parent:
            make_private(directory.parent)
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)


def insecurity(status: os.stat_result) -> str | None:
    """Say why something could have been written by others, or None if it could not."""
    user = os.geteuid()
    if status.st_uid not in (user, 0):
        return f"belongs to user {status.st_uid}, and the server runs as user {user}"
    if status.st_mode & _WRITABLE_BY_OTHERS and not stat.S_ISLNK(status.st_mode):
        return f"can be written by its group or by others (mode {status.st_mode & 0o7777:o})"
    return None


@functools.lru_cache(16)
def _report(reason: str) -> None:
    """Log a reason once in this process: the next hundred files fail for the same one."""
    _LOG.warning("compiled code is not kept: %s", reason)


def _sealed(content: bytes) -> bytes:
    return _MAGIC + hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() + content
