"""The compile cache: where compiled code is kept from one start of an engine to the next.

Compiled code, and the pickles in which Numba describes it, are executed. So the cache directory
must be this user's alone at every level, and a file counts only if it is whole, if it belongs to
this user or to root, and if neither its group nor others may write to it; that is checked on the
open file, which nobody can exchange any more. An unsafe directory is refused, because only an
operator can tell what happened. Everything else is replaced: a server also starts without a cache,
and a disk that is full or read-only costs one line in the log.

Numba's own cache takes code for current as long as the function's own file has not changed,
whatever became of the functions that it calls. So Numba gets a directory for exactly these sources.
"""

import functools
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final

import warpfit
from warpfit.errors import InvalidArgumentError

_LOG: Final = logging.getLogger("warpfit.cache")
_FINGERPRINT_DIGITS: Final = 32
#: Least free space of a disk on which code is kept: about three times what an engine needs.
_LEAST_FREE_BYTES: Final = 32 << 20
_PROBE_BYTES: Final = 1 << 16
#: What is not copied from a directory that cannot be written: it may be a gigabyte, and kernels are
#: compiled again one by one.
_NOT_COPIED: Final = shutil.ignore_patterns("kernels", "cupy", ".*", "*.lock")
_MAGIC: Final = b"warpfit.code.1\n"
_DIGEST_BYTES: Final = 32
_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
#: What compiled code takes functions, constants or types from; types also from CUDA C++.
_SERVER_SOURCES: Final = (
    *(f"engine/{name}" for name in ("native", "fit", "cpu", "cuda", "search")),
    *(f"engine/{name}.py" for name in ("sum_tree", "lowering", "autodiff", "interface")),
    *("limits.py", "shared_batch.py", "compile_cache.py"),
)
_CLIENT_SOURCES: Final = ("ir.py", "ops.py", "losses.py", "request.py", "searching.py")
_SUFFIXES: Final = (".py", ".cu")
#: Share of its bound to which a directory shrinks, so that not every write removes files.
_LOW_WATER: Final = 0.8


# ------------------------------------------------------------------------------- the directory


def default_cache_directory() -> Path:
    """``$WARPFIT_CACHE_DIR``, else ``warpfit`` in the user's cache directory; always absolute."""
    named = os.environ.get("WARPFIT_CACHE_DIR")
    if named:
        return Path(named).absolute()
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():  # the XDG Base Directory Specification has such paths ignored
        try:
            caches = Path.home() / ".cache"
        except RuntimeError:  # neither HOME nor an account: nowhere that this user could write
            caches = Path("/.cache")
    return caches / "warpfit"


@contextmanager
def usable_cache_directory(directory: Path | None, within: str | None = None) -> Iterator[Path]:
    """Yield a directory of this user's alone in which compiled code can be kept.

    The default is `default_cache_directory`. If the wanted one cannot be written, it is a temporary
    one ``within`` another directory, by default the system's.

    Raises:
        InvalidArgumentError: if others could have written to the wanted one, or to what is in it.
    """
    place = (directory or default_cache_directory()).absolute()
    problem = _unwritable(place)
    check_private(place)
    if problem is None:
        yield place
        return
    if _unwritable(Path(within or tempfile.gettempdir())) is not None:
        _LOG.warning("compiled code is not kept: %s: %s", place, problem)
        yield place
        return
    _LOG.warning(
        "compiled code is kept in a temporary directory and compiled again at the next start, "
        "because %s cannot be used: %s; --cache-dir names another one",
        place,
        problem,
    )
    with tempfile.TemporaryDirectory(prefix="warpfit-cache-", dir=within) as temporary:
        with suppress(shutil.Error, OSError):  # a file that is not whole is found when it is read
            shutil.copytree(place, temporary, ignore=_NOT_COPIED, dirs_exist_ok=True)
        yield Path(temporary)


def check_private(directory: Path) -> None:
    """Check that nobody but this user and root can have written what is in a directory.

    Raises:
        InvalidArgumentError: names the first path that others own or may write to.
    """
    try:
        top = str(directory.resolve(strict=True))
    except OSError:
        return  # there is no such directory
    # Text, because thousands of paths as objects take longer than all else that a start checks. A
    # folder that cannot be listed is not walked, and so is checked where its parent names it.
    within = (
        f"{folder}/{name}" for folder, folders, names in os.walk(top) for name in (*folders, *names)
    )
    for path in chain([top], within):
        try:
            problem = _insecurity(os.lstat(path))
        except FileNotFoundError:  # another server has just replaced it
            continue
        if problem is not None:
            raise InvalidArgumentError(
                f"the cache of compiled code is not safe to use: {path} {problem}",
                "UNSAFE_CACHE",
                f"Delete {directory}, make it this user's alone (chown -R, chmod -R go-w), or "
                "name another directory with --cache-dir",
            )


def make_private_directory(directory: Path) -> None:
    """Make a directory, and those above it that are missing, for this user alone.

    Raises:
        OSError: if that is refused.
    """
    if not directory.is_dir():
        if directory != directory.parent:
            make_private_directory(directory.parent)
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)


def engine_environment(cache_directory: Path | None) -> dict[str, str]:
    """Return this process's environment, with the places where Numba and CuPy keep code.

    BLAS starts no threads: an engine calls it on threads of its own.
    """
    place = cache_directory or default_cache_directory()
    return {
        **os.environ,
        "NUMBA_CACHE_DIR": str(numba_directory(place)),
        "CUPY_CACHE_DIR": str(place / "cupy"),
        **dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1"),
    }


def numba_directory(cache_directory: Path) -> Path:
    """Return Numba's folder for exactly these sources."""
    return cache_directory / f"numba-{source_fingerprint()}"


def source_fingerprint() -> str:
    """Hash everything that compiled code takes functions, constants or types from."""
    server, client = Path(__file__).parent, Path(warpfit.__file__).parent
    return fingerprint(
        [*map(server.joinpath, _SERVER_SOURCES), *map(client.joinpath, _CLIENT_SOURCES)]
    )


def fingerprint(sources: Iterable[Path]) -> str:
    """Hash files, and all sources in Python and CUDA C++ below directories, by name and content."""
    found = hashlib.sha256()
    for source in sources:
        below = (path for path in source.rglob("*") if path.suffix in _SUFFIXES)
        for path in sorted(below) if source.is_dir() else [source]:
            content = path.read_bytes()
            found.update(f"{path.relative_to(source.parent)} {len(content)} ".encode())
            found.update(content)
    return found.hexdigest()[:_FINGERPRINT_DIGITS]


def _unwritable(directory: Path) -> str | None:
    """Make a directory if it is missing; return why code cannot be kept there, or None."""
    try:
        make_private_directory(directory)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return error.strerror or str(error)
    return None if free >= _LEAST_FREE_BYTES else f"only {free >> 20} MiB of its disk are free"


# ------------------------------------------------------------------------------------ its files


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
        problem = _insecurity(status) or (None if stat.S_ISREG(status.st_mode) else "is no file")
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
        _LOG.warning("code is compiled again: %s", error)
        return None


def find_or_make(path: Path, make: Callable[[], bytes]) -> bytes:
    """Return the content of a file; where there is none that can be used, make and store it."""
    content = find(path)
    if content is None:
        content = make()
        write(path, content)
    return content


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
        make_private_directory(path.parent)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            try:
                file.write(content)
                file.flush()
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink()
                raise
    except OSError as error:
        _log_once(f"{error.strerror or error} in {path.parent.parent}")


def _insecurity(status: os.stat_result) -> str | None:
    """Return why something could have been written by others, or None if it could not."""
    user = os.geteuid()
    if status.st_uid not in (user, 0):
        return f"belongs to user {status.st_uid}, and the server runs as user {user}"
    if status.st_mode & _WRITABLE_BY_OTHERS and not stat.S_ISLNK(status.st_mode):
        return f"can be written by its group or by others (mode {status.st_mode & 0o7777:o})"
    return None


@functools.lru_cache(16)
def _log_once(reason: str) -> None:
    """Log a reason once in this process: the next hundred files fail for the same one."""
    _LOG.warning("compiled code is not kept: %s", reason)


def _sealed(content: bytes) -> bytes:
    return _MAGIC + hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest() + content


# --------------------------------------------------------------------- a bounded directory


@dataclass(slots=True)
class CacheCounters:
    """Figures of a cache since it was made."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    damaged: int = 0
    """Entries that were unreadable or altered, and were dropped."""


@dataclass
class DiskCache:
    """Files named by key, shared by any number of processes, bounded in bytes.

    A damaged file is removed and counted. Without a usable directory every look-up is a miss.
    """

    directory: Path
    max_bytes: int = 1 << 30
    counters: CacheCounters = field(default_factory=CacheCounters)
    _bytes: int | None = None
    """Bytes in the directory, as far as this process knows."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, key: str) -> bytes | None:
        """Read an entry and make it the most recently used; None if there is none."""
        path = self._path(key)
        try:
            content = read(path)
        except OSError:
            self._missed()
            return None
        except DamagedFileError:
            with suppress(OSError):
                path.unlink()
            self._missed(damaged=1)
            return None
        with suppress(OSError):
            os.utime(path)
        with self._lock:
            self.counters.hits += 1
        return content

    def put(self, key: str, content: bytes) -> None:
        """Write an entry, and remove the least recently used ones if the directory is too large."""
        written = write(self._path(key), content)
        with self._lock:
            if self._bytes is not None:
                self._bytes += written
                if self._bytes <= self.max_bytes:
                    return
            files = []
            for path in self.directory.glob("*/*"):
                with suppress(OSError):
                    status = path.stat()
                    files.append((status.st_mtime_ns, status.st_size, path))
            total = sum(size for _, size, _ in files)
            for _, size, path in sorted(files) if total > self.max_bytes else ():
                if total <= self.max_bytes * _LOW_WATER:
                    break
                with suppress(OSError):
                    path.unlink()
                total -= size
                self.counters.evictions += 1
            self._bytes = total

    def _path(self, key: str) -> Path:
        return self.directory / key[:2] / key

    def _missed(self, damaged: int = 0) -> None:
        with self._lock:
            self.counters.misses += 1
            self.counters.damaged += damaged
