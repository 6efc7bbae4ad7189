"""Compilation in other processes, once for all engines that share a cache directory.

Numba and LLVM compile on one core, whatever the number of threads, and keep some 200 MiB of memory
afterwards. So several processes compile parts of the code into one directory, from which the engine
loads it. `begin` starts them: they compile the groups of parts in the order in which they are
needed, and `wait` waits for one group. A part that a process fails to compile is compiled when it
is loaded, and so is all code where there is no directory to write to.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from warpfit.child_processes import python_child
from warpfit_server.system import compile_cache
from warpfit_server.system.machine import available_cores

_LOG: Final = logging.getLogger("warpfit.engine")
#: Niceness of threads that compute, which `engine_start` passes on from the setting. Threads that
#: take and answer calls need a core for a moment only and go before them; at the same priority
#: Linux may let those wait for 3 ms.
NICE: Final = int(os.environ.get("WARPFIT_ENGINE_NICE", "10"))
#: Niceness of compilers once the group is done for which a start waits.
_BACKGROUND_NICE: Final = 10
#: Of so many cores, one may load code while the engine serves.
_CORES_A_THREAD: Final = 4
#: Loads code that nobody waits for yet, in the order in which it is first needed.
BACKGROUND: Final = ThreadPoolExecutor(max(1, available_cores() // _CORES_A_THREAD), "compile")
#: Loads code that a caller waits for, who would otherwise wait for the code above, too.
WANTED: Final = ThreadPoolExecutor(2, "compile-wanted")


def begin(
    place: Path, module: str, groups: Mapping[str, Mapping[tuple[str, ...], float]], processes: int
) -> None:
    """Start processes that compile what nobody has compiled yet, and return at once.

    Each one has the lock of every group until it has compiled its share of that group. So one
    engine at a time has a group compiled, and `wait` is over when the last process has done its
    share, which notes that the group is done, even if the engine has ended itself.

    Args:
        place: a directory, which need not exist.
        module: is run by ``python -m`` and calls `run_parts`.
        groups: seconds that parts take to compile, by group in the order of need. Parts of one key
            are compiled by one process.
        processes: how many processes there are at most.
    """
    missing = [group for group in groups if not os.access(place / f"{group}.complete", os.F_OK)]
    with contextlib.ExitStack() as stack:
        locks: dict[str, int] = {}
        for group in missing:
            try:
                locks[group] = stack.enter_context(_locked(place, group, fcntl.LOCK_NB))
            except BlockingIOError:
                continue  # others compile it
            except OSError as error:  # as on a disk that is full or read-only
                _LOG.warning("cannot compile by several processes: %s", error)
                return
        if locks:
            _LOG.info("compiling %s into %s (first start only)", ", ".join(locks), place)
        for share in _share_out([groups[group] for group in locks], processes):
            words = [
                f"{lock}:{group}:{','.join(names)}"
                for (group, lock), names in zip(locks.items(), share, strict=True)
            ]
            child = python_child("-m", module, str(place), *words)
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            # Not in the working directory, where Numba would look for a file of settings.
            started = subprocess.Popen(**child, **streams, pass_fds=list(locks.values()), cwd="/")
            threading.Thread(target=_watch, args=(started, words), daemon=True).start()


def wait(place: Path, group: str) -> None:
    """Wait until no process compiles a group any more."""
    if not os.access(place / f"{group}.complete", os.F_OK):
        _note_done(place, group)


def run_parts(parts: Mapping[str, Callable[[Path], object]], arguments: Sequence[str]) -> None:
    """Compile parts in this process, which `begin` has started with these arguments.

    These are the directory, and for each group its lock, its name and the names of parts.
    """
    gc.disable()  # almost nothing is garbage, and looking for it takes a seventh of the time
    place = Path(arguments[0])
    for index, word in enumerate(arguments[1:]):
        lock, group, names = word.split(":", 2)
        if index == 1:
            os.nice(_BACKGROUND_NICE)  # from here on evaluations have priority
        for name in names.split(",") if names else ():
            parts[name](place)
        os.close(int(lock))
        _note_done(place, group, fcntl.LOCK_NB)  # unless another process is at it: that will


def _note_done(place: Path, group: str, flag: int = 0) -> None:
    """Note that a group is compiled, once no process has its lock."""
    with contextlib.suppress(OSError), _locked(place, group, flag):
        compile_cache.write_plain(place / f"{group}.complete", b"")


def _share_out(
    groups: Sequence[Mapping[tuple[str, ...], float]], processes: int
) -> list[list[list[str]]]:
    """Return for each process its parts of each group.

    The longest part of a group comes first, and goes to the process with least to do.
    """
    count = min(processes, sum(map(len, groups)))
    found = [[list[str]() for _ in groups] for _ in range(count)]
    busy = [0.0] * count
    for group, seconds in enumerate(groups):
        for names in sorted(seconds, key=lambda names: -seconds[names]):
            least = busy.index(min(busy))
            found[least][group] += names
            busy[least] += seconds[names]
    return found


def _watch(child: subprocess.Popen[bytes], words: Sequence[str]) -> None:
    if child.wait():
        _LOG.warning("a process that compiled %s ended with %s", words, child.returncode)


@contextlib.contextmanager
def _locked(place: Path, group: str, flag: int = 0) -> Iterator[int]:
    """Lock a group and yield the descriptor of the lock.

    Raises:
        BlockingIOError: if it is locked and the flag is ``LOCK_NB``.
        OSError: if the file cannot be made.
    """
    compile_cache.make_private_directory(place)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(place / f"{group}.lock", flags, 0o600), "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | flag)
        except BlockingIOError:
            raise
        except OSError as error:  # some network file systems; then two may compile the same
            _LOG.debug("cannot lock %s: %s", group, error)
        yield file.fileno()
