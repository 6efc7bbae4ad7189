"""Processors and memory that this process may use.

In a container, or under systemd, the kernel limits the CPU time of a group of processes in each
period, and their memory. If more threads run than the CPU time is enough for, all of them stand
still until the period is over; processes that take more memory are killed.
"""

import ctypes
import math
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

#: Parameters of glibc's mallopt: free bytes at the end of a heap from which on they go back to the
#: system, and bytes of a block from which on it is mapped by itself.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT: Final = MappingProxyType({_TRIM_THRESHOLD: 8 << 20, _MMAP_THRESHOLD: 4 << 20})

#: Interval in seconds at which Python threads take turns: a tenth of Python's own, because a call
#: waits for several threads, and what each has to do takes less time still.
_SWITCH_SECONDS: Final = 0.0005


def shorten_gil_switch_interval() -> None:
    """Let the Python threads of this process take shorter turns than usual."""
    sys.setswitchinterval(_SWITCH_SECONDS)


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The control groups of a process; https://docs.kernel.org/admin-guide/cgroup-v2.html."""

    groups: Path = Path("/proc/self/cgroup")
    """File that names them."""
    mount: Path = Path("/sys/fs/cgroup")
    """File system with their directories, version 1 or 2."""

    def cores(self) -> Iterator[float]:
        """Yield the CPU time in each period, in cores, of each group that has a limit."""
        for group in self._directories("cpu"):
            limit = _words(group / "cpu.max")
            limit = limit or _words(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
            if len(limit) == 2 and limit[0] not in ("max", "-1"):
                yield int(limit[0]) / int(limit[1])

    def memory(self) -> Iterator[int]:
        """Yield the bytes of each group that has a limit."""
        for group in self._directories("memory"):
            limit = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
            if limit and limit[0] != "max":
                yield int(limit[0])

    def _directories(self, controller: str) -> Iterator[Path]:
        """Yield the directories of the process's groups and of those that contain them."""
        for line in _text(self.groups).splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            base = self.mount / controller if controllers else self.mount
            own = base / path.lstrip("/")
            # In a container the path may be the host's, of which only the base exists.
            yield from (group for group in (own, *own.parents) if group.is_relative_to(base))


def available_cores(groups: ControlGroups | None = None) -> int:
    """Return how many cores this process may run on, or fewer if its groups' quotas are less."""
    quotas = (groups or ControlGroups()).cores()
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, quotas)]))


def available_memory(groups: ControlGroups | None = None) -> int:
    """Return the bytes of the machine's memory that this process's groups may use."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(groups or ControlGroups()).memory()])


def _words(*paths: Path) -> list[str]:
    return [word for path in paths for word in _text(path).split()]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no such group, or no such version
        return ""


def keep_freed_memory() -> None:
    """Have the C library (glibc) use freed blocks of up to 4 MiB again.

    By default it returns blocks of 128 KiB to the system, until it has seen larger ones; those of
    the next batch then take a page fault for every 4 KiB, longer than all decoding.
    """
    with suppress(AttributeError):
        for parameter, size in _KEPT.items():
            ctypes.CDLL(None).mallopt(parameter, size)


def give_back_memory() -> None:
    """Return free memory of the C library to the system, if it can (glibc).

    That at the end of the calling thread's own heap goes only when a block there is freed while the
    threshold is low.
    """
    with suppress(AttributeError):
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        library.malloc.restype = ctypes.c_void_p
        library.mallopt(_TRIM_THRESHOLD, 0)
        library.free(ctypes.c_void_p(library.malloc(1 << 17)))
        library.mallopt(_TRIM_THRESHOLD, _KEPT[_TRIM_THRESHOLD])


def raise_descriptor_limit() -> None:
    """Let this process and its children open as many files as the system allows.

    Each data set and each call in flight holds some. The usual limit of 1,024 is for programs that
    use ``select``.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
