"""Command lists: driver calls for one stream that compiled code makes without Python's lock.

Each call of the driver releases Python's lock, and under load another thread takes it, so a
sequence of copies and launches would wait for the lock after each of them. A command list is
written first; then compiled code executes all of it and takes the lock back once, when the stream
has passed the last command.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.calls import call_c, call_launch

#: Driver functions in the order of the kinds of command.
_FUNCTIONS: Final = (
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuLaunchKernel",
    "cuEventRecord",
    "cuStreamSynchronize",
    "cuEventElapsedTime",
)
#: Kinds of command: the driver's functions, then reading the clock of ``time.perf_counter``.
UPLOAD, DOWNLOAD, LAUNCH, RECORD, SYNCHRONIZE, ELAPSED, NOW = range(len(_FUNCTIONS) + 1)
#: Kind of command that launches a graph; its arguments are the graph and the stream.
LAUNCH_GRAPH: Final = NOW + 1
#: Indices of two functions that are no commands: load a module; sleep for microseconds.
LOAD_MODULE: Final = LAUNCH_GRAPH + 1
SLEEP: Final = LOAD_MODULE + 1
#: Index of a word that is 1 while launches are held back because modules are being loaded.
LAUNCHES_HELD: Final = SLEEP + 1
#: Microseconds between two looks at that word.
POLL_MICROSECONDS: Final = 100
#: Numbers of a command: its kind, then the function's arguments.
COMMAND_WIDTH: Final = 12


def driver_functions() -> NDArray[np.int64]:
    """Return the addresses of all functions by their indices, then `LAUNCHES_HELD`.

    Raises:
        OSError: if there is no driver.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    found = [getattr(driver, name) for name in _FUNCTIONS]
    system = ctypes.CDLL(None)
    found += [system.clock_gettime, driver.cuGraphLaunch, driver.cuModuleLoadData]
    found += [system.usleep]
    addresses = [ctypes.cast(one, ctypes.c_void_p).value for one in found]
    return np.array([*addresses, 0], dtype=np.int64)


def wait_while_held(functions: NDArray[np.int64]) -> None:
    """Wait before a launch by Python while modules are being loaded, as `execute` does."""
    while functions[LAUNCHES_HELD]:
        time.sleep(1e-6 * POLL_MICROSECONDS)


class CommandList:
    """Commands for one stream, in order.

    Args:
        functions: from `driver_functions`.
        stream: handle of the stream.
    """

    def __init__(self, functions: NDArray[np.int64], stream: int) -> None:
        self._functions = functions
        self._stream = stream
        self._commands: list[tuple[int, ...]] = []
        self._kept_alive: list[Any] = []
        self._elapsed = np.zeros(1, dtype=np.float32)

    def upload(self, address: int, source: NDArray[Any]) -> None:
        """Copy page-locked host memory to the device."""
        self._kept_alive.append(source)
        self._add(UPLOAD, address, source.ctypes.data, source.nbytes, self._stream)

    def download(self, target: NDArray[Any], address: int) -> None:
        """Copy device memory to page-locked host memory."""
        self._kept_alive.append(target)
        self._add(DOWNLOAD, target.ctypes.data, address, target.nbytes, self._stream)

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[NDArray[Any]],
        shared: int = 0,
    ) -> None:
        """Launch a CuPy function; each argument is an array of one value, passed by value."""
        pointers = np.array([argument.ctypes.data for argument in arguments], dtype=np.int64)
        self._kept_alive += [pointers, *arguments]
        self._add(LAUNCH, function.ptr, *grid, *block, shared, self._stream, pointers.ctypes.data)

    def record(self, event: Any) -> None:
        """Record a CuPy event."""
        self._add(RECORD, event.ptr, self._stream)

    def run(self, start: Any, end: Any) -> tuple[int, int]:
        """Execute the commands and wait for their end.

        Returns the driver's status, 0 for success, and the nanoseconds between two recorded events.
        """
        self._add(SYNCHRONIZE, self._stream)
        self._add(ELAPSED, self._elapsed.ctypes.data, start.ptr, end.ptr)
        status = int(execute(self._functions, np.array(self._commands, dtype=np.int64)))
        self._commands.clear()
        self._kept_alive.clear()
        return status, int(self._elapsed[0] * 1e6)

    def _add(self, *numbers: int) -> None:
        self._commands.append((*numbers, *(0,) * (COMMAND_WIDTH - len(numbers))))


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def execute(functions: Any, commands: Any) -> int:
    """Execute commands [commands, COMMAND_WIDTH] in order; return the first status but 0, else 0.

    Each is its kind and the arguments of its function in `driver_functions`.
    """
    for number in range(len(commands)):
        c = commands[number]
        address = functions[c[0]]
        if c[0] == LAUNCH or c[0] == LAUNCH_GRAPH:
            while functions[LAUNCHES_HELD] != 0:
                call_c(functions[SLEEP], (np.int64(POLL_MICROSECONDS),))
        if c[0] == LAUNCH:
            status = call_launch(
                address, (c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9], c[10], c[11])
            )
        elif c[0] == RECORD or c[0] == LAUNCH_GRAPH:
            status = call_c(address, (c[1], c[2]))
        elif c[0] == NOW:
            status = call_c(address, (time.CLOCK_MONOTONIC, c[1]))
        elif c[0] == SYNCHRONIZE:
            status = call_c(address, (c[1],))
        elif c[0] == ELAPSED:
            status = call_c(address, (c[1], c[2], c[3]))
        else:
            status = call_c(address, (c[1], c[2], c[3], c[4]))
        if status != 0:
            return int(status)
    return 0


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def append_command(commands: NDArray[np.int64], count: int, numbers: tuple[int, ...]) -> int:
    """Write a command after ``count`` others; return how many there are now."""
    for index in range(len(numbers)):
        commands[count, index] = numbers[index]
    return count + 1


def stage_times(
    started: int, clock: NDArray[np.int64], elapsed: NDArray[np.float32]
) -> tuple[int, int, int]:
    """Return the nanoseconds of the copy in, of the device, and of the copy out.

    ``clock`` are seconds and nanoseconds after the last launch and after the wait for it, [4];
    ``elapsed`` are milliseconds of the device, [1].
    """
    launched, done = (int(clock[at]) * 1_000_000_000 + int(clock[at + 1]) for at in (0, 2))
    computed = int(float(elapsed[0]) * 1e6)
    return launched - started, computed, max(0, done - launched - computed)
