"""Compilation in other processes, once for all engines that share a cache directory.

Numba and LLVM compile on one core, whatever the number of threads, and keep some 200 MiB of memory
afterwards. So several processes compile parts of the code into one directory, from which the engine
loads it. A part that a process fails to compile is compiled when it is loaded, and so is all code
where there is no directory to write to.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from warpfit.child_processes import python_child
from warpfit_server.system import compile_cache
from warpfit_server.system.machine import available_cores

_Name = TypeVar("_Name")
_LOG: Final = logging.getLogger("warpfit.engine")
#: Niceness of threads that compute, which `engine_start` passes on from the setting. Threads that
#: take and answer calls need a core for a moment only and go before them; at the same priority
#: Linux may let those wait for 3 ms.
NICE: Final = int(os.environ.get("WARPFIT_ENGINE_NICE", "10"))
#: Niceness of compilers for which nobody waits.
_BACKGROUND_NICE: Final = 10
#: Of so many cores, one may load code while the engine serves.
_CORES_A_THREAD: Final = 4
#: Loads code that nobody waits for yet, in the order in which it is first needed.
BACKGROUND: Final = ThreadPoolExecutor(max(1, available_cores() // _CORES_A_THREAD), "compile")
#: Loads code that a caller waits for, who would otherwise wait for the code above, too.
WANTED: Final = ThreadPoolExecutor(2, "compile-wanted")


def compile_once(
    place: Path, group: str, module: str, shares: Sequence[Sequence[str]], *, urgent: bool = True
) -> None:
    """Compile a group of parts in several processes, unless that has been done.

    One engine at a time does so, and others wait until all of its processes have ended, even if it
    has ended itself.

    Args:
        place: a directory, which need not exist.
        group: name of the parts that are compiled together.
        module: is run by ``python -m`` and calls `run_parts`.
        shares: names of the parts that each process compiles.
        urgent: whether a caller waits; if not, evaluations have priority.
    """
    done = place / f"{group}.complete"
    if os.access(done, os.F_OK):
        return
    with _locked(place / f"{group}.lock") as lock:
        if lock is None or done.exists():
            return
        _LOG.info("compiling %s into %s (first start only)", group, place)
        children = [_start(place, module, names, lock, urgent=urgent) for names in shares]
        for child, names in zip(children, shares, strict=True):
            if child.wait():
                parts = ", ".join(names)
                _LOG.warning("a process that compiled %s ended with %s", parts, child.returncode)
        compile_cache.write_plain(done, b"")


def share_out(seconds: Mapping[_Name, float], count: int) -> list[list[_Name]]:
    """Share parts out to processes: the longest one first, to the process with least to do."""
    found: list[list[_Name]] = [[] for _ in range(min(count, len(seconds)))]
    for name in sorted(seconds, key=lambda name: -seconds[name]):
        min(found, key=lambda names: sum(seconds[other] for other in names)).append(name)
    return found


def run_parts(parts: Mapping[str, Callable[[Path], object]], arguments: Sequence[str]) -> None:
    """Compile parts in this process, which `compile_once` has started with these arguments."""
    place, urgent, *names = arguments
    if not int(urgent):
        os.nice(_BACKGROUND_NICE)
    gc.disable()  # almost nothing is garbage, and looking for it takes a seventh of the time
    for name in names:
        parts[name](Path(place))


def _start(
    place: Path, module: str, names: Sequence[str], lock: int, *, urgent: bool
) -> subprocess.Popen[bytes]:
    child = python_child("-m", module, str(place), str(int(urgent)), *names)
    streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    # Not in the working directory, where Numba would look for a file of settings.
    return subprocess.Popen(**child, **streams, pass_fds=[lock], cwd="/")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """Lock a file; yield None if it cannot be made, as on a disk that is full or read-only."""
    try:
        compile_cache.make_private_directory(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        _LOG.warning("cannot compile by several processes: %s", error)
        yield None
        return
    with os.fdopen(descriptor, "wb"):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems; then two may compile the same
            _LOG.debug("cannot lock %s: %s", path, error)
        yield descriptor
