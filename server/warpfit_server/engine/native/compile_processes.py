"""Compilation in other processes, once for all engines that share a cache directory.

Numba and LLVM compile on one core, whatever the number of threads, and keep some 200 MiB of memory
afterwards. So several processes compile parts of the code into one directory, from which the engine
loads it. A part that a process fails to compile is compiled when it is loaded, and so is all code
where there is no directory to write to.

Code that no caller waits for yet is compiled at a low priority, beside evaluations
(`BackgroundCode`). The first caller that waits for it leaves a file, which all engines see that
share the directory. Only root may raise the priority of a running process. So a process that gets
too little of a core from then on is started anew at normal priority, which costs the part that it
has been compiling.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from warpfit_server.system import compile_cache
from warpfit_server.system.machine import available_cores

_LOG: Final = logging.getLogger("warpfit.engine")
#: Niceness of threads that compute, which `engine_start` passes on from the setting. Threads that
#: take and answer calls need a core for a moment only and go before them; at the same priority
#: Linux may let those wait for 3 ms.
NICE: Final = int(os.environ.get("WARPFIT_ENGINE_NICE", "10"))
#: Of so many cores, one may load code while the engine serves.
_CORES_A_THREAD: Final = 4
#: Loads code that nobody waits for yet, in the order in which it is first needed.
BACKGROUND: Final = ThreadPoolExecutor(max(1, available_cores() // _CORES_A_THREAD), "compile")
#: Seconds between two looks at a process of low priority, and the share of a core with which it is
#: left alone when a caller waits.
_LOOK_SECONDS, _FAIR_SHARE = 1.0, 0.75
Code = TypeVar("Code")


class BackgroundCode(Generic[Code]):
    """Code that is loaded while an engine serves.

    Args:
        load: loads the code, and has it compiled first if it is not cached. It is called again if
            it fails, because memory may have been short.
        hurry: called when the first request waits, so that compiling has priority from then on.
    """

    def __init__(self, load: Callable[[], Code], hurry: Callable[[], None]) -> None:
        self._load, self._hurry = load, hurry
        self._is_hurried = False
        self.loading: Future[Code] = BACKGROUND.submit(load)
        """The code, or what loads it at the moment."""

    def wait(self) -> Generator[Future[Any], None, Code]:
        """Wait for the code, as a step of an evaluation does; return it."""
        loading = self.loading
        if loading.done() and loading.exception() is not None:
            loading = self.loading = BACKGROUND.submit(self._load)
        if not loading.done():
            if not self._is_hurried:
                self._is_hurried = True
                self._hurry()
            yield loading
        return loading.result()


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
        urgent: whether a caller waits; if not, evaluations have priority until `hurry` is called.
    """
    done = place / f"{group}.complete"
    if os.access(done, os.F_OK):
        return
    with _locked(place / f"{group}.lock") as lock:
        if lock is None or done.exists():
            return
        _LOG.info("compiling %s into %s (first start only)", group, place)
        awaited = _awaited(place, group)
        run = partial(_run, place, module, lock=lock, urgent=urgent, awaited=awaited)
        with ThreadPoolExecutor(len(shares)) as threads:
            codes = list(threads.map(run, shares))
        for code, names in zip(codes, shares, strict=True):
            if code:
                _LOG.warning("a process that compiled %s ended with %s", ", ".join(names), code)
        compile_cache.write_plain(done, b"")
        with contextlib.suppress(OSError):
            awaited.unlink()


def hurry(place: Path, group: str) -> None:
    """Take note that a caller waits for a group: whichever engine compiles it, it has priority."""
    if not (place / f"{group}.complete").exists():
        compile_cache.write_plain(_awaited(place, group), b"")


def share_out(seconds: Mapping[str, float], count: int) -> list[list[str]]:
    """Share parts out to processes: the longest one first, to the process with least to do."""
    found: list[list[str]] = [[] for _ in range(min(count, len(seconds)))]
    for name in sorted(seconds, key=lambda name: -seconds[name]):
        min(found, key=lambda names: sum(seconds[other] for other in names)).append(name)
    return found


def run_parts(parts: Mapping[str, Callable[[Path], object]], arguments: Sequence[str]) -> None:
    """Compile parts in this process, which `compile_once` has started with these arguments."""
    place, urgent, *names = arguments
    if not int(urgent):
        os.nice(NICE)
    gc.disable()  # almost nothing is garbage, and looking for it takes a seventh of the time
    for name in names:
        parts[name](Path(place))


def _awaited(place: Path, group: str) -> Path:
    return place / f"{group}.awaited"


def _run(
    place: Path, module: str, names: Sequence[str], *, lock: int, urgent: bool, awaited: Path
) -> int:
    """Compile parts by a process, and by another one if that is too slow; return its status."""
    urgent = urgent or awaited.exists()
    child = _start(place, module, names, lock, urgent=urgent)
    while True:
        used = _processor_time(child.pid)
        try:
            return child.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            used = _processor_time(child.pid) - used
        if not urgent and used < _FAIR_SHARE * _LOOK_SECONDS and awaited.exists():
            child.kill()
            child.wait()
            urgent = True
            child = _start(place, module, names, lock, urgent=urgent)


def _start(
    place: Path, module: str, names: Sequence[str], lock: int, *, urgent: bool
) -> subprocess.Popen[bytes]:
    command = (sys.executable, "-m", module, str(place), str(int(urgent)), *names)
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[lock]
    )


def _processor_time(process: int) -> float:
    """Return the seconds of processor time that a process has used; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return time.clock_gettime((~process << 3) | 2)  # as clock_getcpuclockid(3) has it on Linux
    return 0.0


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
