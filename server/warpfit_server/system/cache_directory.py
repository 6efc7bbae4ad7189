"""Where compiled code is kept from one start of an engine to the next.

Compiled code, and the pickles in which Numba describes it, are executed. So the directory must be
this user's alone, at every level. One that is unsafe is refused; one that is read-only, full or
missing is replaced by a temporary directory, because a server starts without a cache, too.

Numba, asked to keep what it compiles, takes it for current as long as the function's own file has
not changed, whatever became of the functions that it calls. So it gets a directory for exactly
these sources.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import warpfit
from warpfit.errors import InvalidArgumentError
from warpfit_server.system.cache_files import insecurity, make_private

_LOG: Final = logging.getLogger("warpfit.cache")
_DIGITS: Final = 32
#: Room that the code of an engine needs, about three times over.
_LEAST_BYTES: Final = 32 << 20
_PROBE_BYTES: Final = 1 << 16
#: What is not copied from a directory that cannot be written: it may be a gigabyte, and kernels are
#: made again one by one.
_NOT_COPIED: Final = shutil.ignore_patterns("kernels", "cupy", ".*", "*.lock")


def default_cache_directory() -> Path:
    """``$WARPFIT_CACHE_DIR``, else ``warpfit`` in the user's cache directory; always absolute."""
    named = os.environ.get("WARPFIT_CACHE_DIR")
    if named:
        return Path(named).absolute()
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG Base Directory Specification has relative paths ignored.
    return (caches if caches.is_absolute() else _home() / ".cache") / "warpfit"


@contextmanager
def usable(directory: Path | None, within: str | None = None) -> Iterator[Path]:
    """Give a directory of this user's alone in which compiled code can be kept, inside a block.

    Args:
        directory: the wanted one; None for `default_cache_directory`.
        within: where a temporary one is made in its place, if it cannot be written; None for the
            system's place.

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
        _copy(place, Path(temporary))
        yield Path(temporary)


def check_private(directory: Path) -> None:
    """Check that nobody but this user and root can have written what is in a directory.

    Raises:
        InvalidArgumentError: names the first path that others own or may write to.

    """
    try:
        top = directory.resolve()
        statuses = [(top, top.stat())]
    except OSError:
        return  # there is nothing
    for folder, _, names in os.walk(top):
        for path in (Path(folder), *(Path(folder, name) for name in names)):
            with suppress(FileNotFoundError):  # another server has just replaced it
                statuses.append((path, path.lstat()))
    for path, status in statuses:
        problem = insecurity(status)
        if problem is not None:
            raise InvalidArgumentError(
                f"the cache of compiled code is not safe to use: {path} {problem}",
                "UNSAFE_CACHE",
                f"Delete {directory}, make it this user's alone (chown -R, chmod -R go-w), or "
                "name another directory with --cache-dir",
            )


def engine_environment(cache_directory: Path | None) -> dict[str, str]:
    """Environment of an engine process: this one's, and where Numba and CuPy keep code."""
    place = cache_directory or default_cache_directory()
    return {
        **os.environ,
        "NUMBA_CACHE_DIR": str(numba_directory(place)),
        "CUPY_CACHE_DIR": str(place / "cupy"),
    }


def numba_directory(cache_directory: Path) -> Path:
    """Where Numba keeps what it compiles of exactly these sources."""
    return cache_directory / f"numba-{fingerprint(_sources())}"


def fingerprint(sources: Iterable[Path]) -> str:
    """Hash of Python files, and of all below directories, by name and content."""
    found = hashlib.sha256()
    for source in sources:
        for path in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            content = path.read_bytes()
            found.update(f"{path.relative_to(source.parent)} {len(content)} ".encode())
            found.update(content)
    return found.hexdigest()[:_DIGITS]


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # neither HOME nor an account: nowhere that this user could write
        return Path("/")


def _unwritable(directory: Path) -> str | None:
    """Make a directory if it is missing; say why code cannot be kept there, None if it can."""
    try:
        make_private(directory)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return error.strerror or str(error)
    return None if free >= _LEAST_BYTES else f"only {free >> 20} MiB of its disk are free"


def _copy(source: Path, target: Path) -> None:
    """Copy what can be copied; a file that is not whole is found when it is read."""
    with suppress(shutil.Error, OSError):
        shutil.copytree(source, target, ignore=_NOT_COPIED, dirs_exist_ok=True)


def _sources() -> Iterator[Path]:
    """Everything that compiled code takes functions, constants or types from."""
    server, client = Path(__file__).parents[1], Path(warpfit.__file__).parent
    yield server / "engine"
    yield server / "system" / "cache_files.py"
    yield from (client / name for name in ("ir.py", "ops.py", "expressions/token_checks.py"))
