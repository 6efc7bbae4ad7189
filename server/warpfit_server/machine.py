"""Processors, memory, files, devices, processes and sockets of the machine, as a server uses them.

`shortage` makes an error for callers of an error of a system that has no more of these.

In a container, or under systemd, the kernel limits the CPU time of a group of processes in each
period, and their memory. If more threads run than the CPU time is enough for, all of them stand
still until the period is over; processes that take more memory are killed.

Asking for GPUs initialises CUDA, so a process of its own does it, which runs this module.

Processes of the server end with their parent, or because they are stuck. Long evaluations are
legitimate, so their length says nothing. But every engine polls the cancellation flag between
blocks. An evaluation that goes on for `Config.stuck_seconds` after it was cancelled occupies a step
for ever, which only the engine knows: it may still answer probes. All else is decided by
`warpfit_server.processes.watchdog`, which replaces engines without answers.

A server has a temporary directory. It holds a lock on a file there until it ends, however it ends.
So a directory whose lock is free belongs to no server any more.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import math
import os
import re
import resource
import select
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.child_processes import python_child
from warpfit.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError

#: Parameters of glibc's mallopt: free bytes at the end of a heap from which on they go back to the
#: system, bytes of a block from which on it is mapped by itself, and most heaps.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_KEPT: Final = MappingProxyType({_TRIM_THRESHOLD: 8 << 20, _MMAP_THRESHOLD: 4 << 20, _ARENA_MAX: 4})

#: Interval in seconds at which Python threads take turns: a tenth of Python's own, because a call
#: waits for several threads, and what each has to do takes less time still.
_SWITCH_SECONDS: Final = 0.0005
#: Errors of a system that has no more files, and of one that has no more memory.
_FILES: Final = (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)
_MEMORY: Final = (errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC)
#: Reason of `too_many_files`.
TOO_MANY_FILES: Final = "TOO_MANY_FILES"
#: Seconds after which a client may repeat the call: others will have ended.
_RETRY_SECONDS: Final = 1.0
_LOG: Final = logging.getLogger("warpfit.devices")
#: Most engines of a server.
MOST_ENGINES: Final = 64
#: Seconds that the driver may take to count the GPUs.
_COUNT_SECONDS: Final = 120.0
_SYNTAX: Final = re.compile(r"auto|all|cpu(:[1-9]\d?)?|\d{1,3}(,\d{1,3})*")


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
        """Yield the directories of the process's groups, and of all groups around them."""
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

    By default the library returns blocks of 128 KiB to the system, until it has seen larger ones.
    Then the blocks of the next batch take a page fault for every 4 KiB, longer than all decoding.

    The library may also have eight heaps for each core, among which threads are spread, and each
    keeps what is freed in it. Threads that run Python code hardly ever allocate at the same time.
    """
    with suppress(AttributeError):
        for parameter, size in _KEPT.items():
            ctypes.CDLL(None).mallopt(parameter, size)


def give_back_memory() -> None:
    """Return free memory of the C library to the system, if it can (glibc).

    Memory at the end of the calling thread's own heap goes only when a block there is freed while
    the threshold is low.
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
    """Descriptors in reserve, for work that must be done when the process has no others left."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._held: list[int] = []
        self._fill()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let the ``with`` block have the descriptors; afterwards the reserve is filled again."""
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


@dataclass(frozen=True, slots=True)
class EngineDevice:
    """Device that one engine process computes on."""

    kind: str
    """``"cpu"`` or ``"cuda"``."""
    ordinal: int
    """CUDA's number of the GPU; for CPU engines 0, 1, ..."""
    label: str
    """Names the engine in metrics, timings and logs: ``"cuda:0"``, ``"cpu:1"``; the second engine
    on the same GPU is ``"cuda:0#1"``."""
    share: float = 1.0
    """Part of the device's memory that is for this engine."""

    def environment(self, given: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return the variables that let an engine process see its own GPU and no other."""
        if self.kind == "cpu":
            return {}
        visible = given.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return {"CUDA_VISIBLE_DEVICES": str(self.ordinal)}
        names = [name.strip() for name in visible.split(",")]
        name = names[self.ordinal] if self.ordinal < len(names) else ""
        return {"CUDA_VISIBLE_DEVICES": name}


def check_devices(text: str) -> str:
    """Return the setting ``--devices`` in lower case; raise ValueError if it means nothing."""
    text = re.sub(r"\s", "", text.lower())
    if _SYNTAX.fullmatch(text) is None or len(engine_devices(text)) > MOST_ENGINES:
        raise ValueError(
            f"{text!r} names no devices; write auto, all, numbers like 0,1,3, cpu, or cpu:2 for "
            f"two CPU engines; there are at most {MOST_ENGINES} engines"
        )
    return text


def engine_devices(text: str) -> tuple[EngineDevice, ...]:
    """Return the device of each engine that a resolved setting names; none for auto and all."""
    if text in ("auto", "all"):
        return ()
    kind, _, count = text.partition(":")
    if kind == "cpu":
        return tuple(EngineDevice("cpu", n, f"cpu:{n}") for n in range(int(count or 1)))
    ordinals = [int(ordinal) for ordinal in text.split(",")]
    counts, seen, found = Counter(ordinals), Counter[int](), []
    for ordinal in ordinals:
        again = f"#{seen[ordinal]}" if seen[ordinal] else ""
        label = f"cuda:{ordinal}{again}"
        found.append(EngineDevice("cuda", ordinal, label, 1.0 / counts[ordinal]))
        seen[ordinal] += 1
    return tuple(found)


def resolve_devices(text: str) -> str:
    """Return the setting with the numbers of the GPUs for ``all``, and for ``auto`` if there are.

    Without a GPU ``auto`` means ``cpu``.

    Raises:
        UnavailableError: if all GPUs are asked for and there is none.
    """
    if text not in ("auto", "all"):
        return text
    try:
        count = min(MOST_ENGINES, len(_gpu_memories()))
    except UnavailableError as error:
        if text == "all":
            raise
        _LOG.info("%s; the CPU engine serves", error)
        return "cpu"
    return ",".join(map(str, range(count)))


def check_device_memory(devices: str, memory: int | None) -> None:
    """Check that resolved devices are GPUs that have the memory to which theirs is limited.

    Raises:
        InvalidArgumentError: if they are not, or have less.
    """
    if memory is None:
        return
    engines = engine_devices(devices)
    if any(device.kind == "cpu" for device in engines):
        raise InvalidArgumentError(
            "--device-memory limits the memory of GPUs, and the CPU engine serves",
            "BAD_OPTION",
            "Leave it out, or limit data sets by --max-resident-bytes",
            "device_memory",
        )
    sizes: list[int] = []
    with suppress(UnavailableError):  # the engines say what is wrong with their devices
        sizes = _gpu_memories()
    for device in engines:
        if device.ordinal < len(sizes) and sizes[device.ordinal] < memory:
            raise InvalidArgumentError(
                f"--device-memory allows {memory / 2**30:.1f} GiB, and {device.label} has "
                f"{sizes[device.ordinal] / 2**30:.1f} GiB",
                "OVER_MEMORY",
                "Give less, or leave it out for 90 percent of each GPU",
                "device_memory",
            )


def _gpu_memories() -> list[int]:
    """Return the bytes of each GPU, at least one, without initialising CUDA in this process."""
    reason = "CuPy is not installed (pip install 'warpfit[cuda13]' or 'warpfit[cuda12]')"
    if find_spec("cupy") is not None:
        child = python_child("-m", __name__)
        try:
            run = subprocess.run(**child, capture_output=True, text=True, timeout=_COUNT_SECONDS)
        except subprocess.TimeoutExpired:
            reason = f"the CUDA driver has not answered for {_COUNT_SECONDS:g} s"
        else:
            if run.returncode == 0 and run.stdout.split():
                return [int(size) for size in run.stdout.split()]
            reason = (run.stderr.strip().splitlines() or ["the driver reports none"])[-1]
    raise UnavailableError(
        f"no CUDA device: {reason}", "NO_CUDA_DEVICE", "Check nvidia-smi, or run with --devices cpu"
    )


def _ask_driver() -> list[int]:
    """Return the bytes of each GPU that the driver shows this process."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise SystemExit(str(error)) from error
    count, device, size = ctypes.c_int(0), ctypes.c_int(0), ctypes.c_size_t(0)
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    found: list[int] = []
    while not status and len(found) < count.value:
        status = driver.cuDeviceGet(ctypes.byref(device), len(found))
        status = status or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        found.append(size.value)
    if status:
        raise SystemExit(f"the CUDA driver reports error {status}")
    return found


# ---------------------------------------------------------------------------- processes of a server

_PROCESSES_LOG: Final = logging.getLogger("warpfit")
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


class StuckDetector(threading.Thread):
    """Ends this process when an evaluation has ignored its cancellation for too long; a thread.

    Args:
        patience: seconds that an evaluation may take to stop.
        flags: returns the evaluations that are running, with their cancellation flags.
    """

    def __init__(
        self,
        patience: float,
        flags: Callable[[], Iterable[tuple[Hashable, NDArray[np.uint8]]]],
    ) -> None:
        super().__init__(name="stuck-detector", daemon=True)
        self._patience = patience
        self._flags = flags
        self._since: dict[Hashable, float] = {}

    def is_stuck(self, now: float) -> bool:
        """Note which evaluations are cancelled; return whether one has been for too long."""
        cancelled = [evaluation for evaluation, flag in self._flags() if flag[0]]
        self._since = {evaluation: self._since.get(evaluation, now) for evaluation in cancelled}
        return any(now - since > self._patience for since in self._since.values())

    def run(self) -> None:
        """Look until an evaluation is stuck, then end this process."""
        while not self.is_stuck(time.monotonic()):
            time.sleep(self._patience / 10)
        _PROCESSES_LOG.error("an evaluation does not stop; the supervisor starts a new process")
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
            _PROCESSES_LOG.info("removed %s, which a server that was killed left behind", directory)
        except OSError as error:  # for example, another server is removing it
            _PROCESSES_LOG.debug("%s was not removed: %s", directory, error)


# -------------------------------------------------------------------------------- sockets and ports

#: Size of the kernel's buffer for what the other process has not read yet.
_SOCKET_BYTES: Final = 1 << 20
#: Addresses to listen on that stand for all of the machine's.
_ANY = ("0.0.0.0", "::", "[::]")


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets for channels.

    Raises:
        ResourceExhaustedError: if this process can open no more files.
    """
    try:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise shortage(error) or error from error
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    return pair


def reserve_port(host: str, port: int, flag: str) -> socket.socket:
    """Reserve a port, 0 for a free one, that several processes of this user will listen on.

    The socket that is returned is bound and does not listen, so that it gets no connections.

    Raises:
        UnavailableError: if a server listens on the port, because with SO_REUSEPORT the two would
            share its connections; if the host is no address of this machine; or if the port is not
            for this user. Its text names ``flag``, which chooses another one.
    """
    options: Any = {"type": socket.SOCK_STREAM, "flags": socket.AI_PASSIVE}
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, **options)[0]
    except (OSError, UnicodeError) as error:
        raise cannot_listen(host, port, flag, error) from error
    reserved = socket.socket(family, kind, protocol)
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(address)
    except OSError as error:
        reserved.close()
        raise cannot_listen(host, port, flag, error) from error
    return reserved


def join_address(host: str, port: int) -> str:
    """Write an address as ``HOST:PORT``; an IPv6 host gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of an address that `join_address` wrote."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def cannot_listen(
    host: str, port: int, flag: str, error: Exception | None = None
) -> UnavailableError:
    """Explain why a port cannot be had; ``flag`` is what chooses another one.

    Without the error of the system, it is taken since it was reserved.
    """
    number = errno.EADDRINUSE if error is None else getattr(error, "errno", None)
    remedy = f"Choose another {flag}"
    if number == errno.EADDRINUSE:
        reason, why = "PORT_IN_USE", "another program listens there"
    elif number in (errno.EACCES, errno.EPERM):
        reason, why = "PORT_FORBIDDEN", "this user may not use that port"
        remedy += "; ports from 1024 on are for all users"
    else:
        reason, why = "NO_SUCH_HOST", getattr(error, "strerror", None) or str(error)
        remedy += "; give an address of this machine, such as 127.0.0.1 or 0.0.0.0"
    return UnavailableError(f"cannot listen on {join_address(host, port)}: {why}", reason, remedy)


@contextmanager
def address_file(path: str, host: str, port: int) -> Iterator[None]:
    """Keep a file PATH.HOST-PORT that holds HOST:PORT; none if the path is empty.

    Many servers may be given the same path, such as by one ``srun``: clients of ``file://PATH``
    read all files that begin so (`warpfit.transport.connection.file_target`).

    Raises:
        InvalidArgumentError: if the file cannot be written.
    """
    if not path:
        yield
        return
    host = socket.gethostname() if host in _ANY else host.strip("[]")
    file = Path(f"{Path(path).absolute()}.{host.replace(':', '_')}-{port}")
    half = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        half.unlink(missing_ok=True)
        with half.open("x") as new:  # follows no link that another user has put there
            new.write(f"{join_address(host, port)}\n")
        half.replace(file)  # so that no client reads a part of it
    except OSError as error:
        raise InvalidArgumentError(
            f"the address file {file} cannot be written: {error.strerror or error}",
            "ADDRESS_FILE",
            "Give --address-file in a folder that exists and that the server may write to",
        ) from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    print(*_ask_driver())
