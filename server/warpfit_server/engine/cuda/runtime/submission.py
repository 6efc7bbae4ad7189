"""Work for a stream, handed to the driver in one go.

Each call into the driver gives the interpreter lock up, and under load another thread takes it: a
launch of several steps would wait for the lock after each of them. Here the steps are written down
first and then carried out by compiled code, which takes the lock back once, when the stream has
passed them all.
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

#: Driver functions in the order of the kinds of step.
_FUNCTIONS: Final = (
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuLaunchKernel",
    "cuEventRecord",
    "cuStreamSynchronize",
    "cuEventElapsedTime",
)
#: Kinds of step: the driver's functions, then reading the clock of ``time.perf_counter``.
UPLOAD, DOWNLOAD, LAUNCH, RECORD, SYNCHRONIZE, ELAPSED, NOW = range(len(_FUNCTIONS) + 1)
#: Place of the function that launches a graph: a step of that kind names graph and stream.
LAUNCH_GRAPH: Final = NOW + 1
#: Places of what loads a module and of what sleeps for microseconds, which are no steps.
LOAD_MODULE: Final = LAUNCH_GRAPH + 1
SLEEP: Final = LOAD_MODULE + 1
#: Place of a word that is 1 while launches wait for modules to be loaded, otherwise 0.
HELD: Final = SLEEP + 1
#: Microseconds after which a launch that waits looks again.
PAUSE: Final = 100
#: Numbers of a step: its kind, then the function's arguments.
WIDTH: Final = 12


def driver_functions() -> NDArray[np.int64]:
    """Addresses of all functions by their places, and `HELD`.

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


class Submission:
    """Steps for one stream, in order.

    Args:
        functions: from `driver_functions`.
        stream: handle of the stream.

    """

    def __init__(self, functions: NDArray[np.int64], stream: int) -> None:
        self._functions = functions
        self._stream = stream
        self._steps: list[tuple[int, ...]] = []
        self._kept: list[Any] = []
        self._elapsed = np.zeros(1, dtype=np.float32)

    def upload(self, address: int, source: NDArray[Any]) -> None:
        """Copy page-locked host memory to the device."""
        self._kept.append(source)
        self._add(UPLOAD, address, source.ctypes.data, source.nbytes, self._stream)

    def download(self, target: NDArray[Any], address: int) -> None:
        """Copy device memory to page-locked host memory."""
        self._kept.append(target)
        self._add(DOWNLOAD, target.ctypes.data, address, target.nbytes, self._stream)

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[NDArray[Any]],
        shared: int = 0,
    ) -> None:
        """Launch a kernel.

        Args:
            function: CuPy function.
            grid: blocks.
            block: threads.
            arguments: each an array of one value, passed as it is.
            shared: bytes of dynamic shared memory.

        """
        places = np.array([argument.ctypes.data for argument in arguments], dtype=np.int64)
        self._kept += [places, *arguments]
        self._add(LAUNCH, function.ptr, *grid, *block, shared, self._stream, places.ctypes.data)

    def record(self, event: Any) -> None:
        """Record a CuPy event."""
        self._add(RECORD, event.ptr, self._stream)

    def run(self, start: Any, end: Any) -> tuple[int, int]:
        """Carry the steps out and wait for their end.

        Args:
            start: event that was recorded.
            end: event that was recorded later.

        Returns:
            The driver's status, 0 for success, and the nanoseconds between the two events.

        """
        self._add(SYNCHRONIZE, self._stream)
        self._add(ELAPSED, self._elapsed.ctypes.data, start.ptr, end.ptr)
        status = int(carry_out(self._functions, np.array(self._steps, dtype=np.int64)))
        self._steps.clear()
        self._kept.clear()
        return status, int(self._elapsed[0] * 1e6)

    def _add(self, *numbers: int) -> None:
        self._steps.append((*numbers, *(0,) * (WIDTH - len(numbers))))


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def carry_out(functions: Any, steps: Any) -> int:
    """Do one step after the other; return the first status that is not 0.

    Args:
        functions: from `driver_functions`.
        steps: to do, each its kind and the arguments of its function; [steps, WIDTH].

    """
    for number in range(len(steps)):
        s = steps[number]
        address = functions[s[0]]
        if s[0] == LAUNCH or s[0] == LAUNCH_GRAPH:
            while functions[HELD] != 0:
                call_c(functions[SLEEP], (np.int64(PAUSE),))
        if s[0] == LAUNCH:
            status = call_launch(
                address, (s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11])
            )
        elif s[0] == RECORD or s[0] == LAUNCH_GRAPH:
            status = call_c(address, (s[1], s[2]))
        elif s[0] == NOW:
            status = call_c(address, (time.CLOCK_MONOTONIC, s[1]))
        elif s[0] == SYNCHRONIZE:
            status = call_c(address, (s[1],))
        elif s[0] == ELAPSED:
            status = call_c(address, (s[1], s[2], s[3]))
        else:
            status = call_c(address, (s[1], s[2], s[3], s[4]))
        if status != 0:
            return int(status)
    return 0


def stage_times(
    started: int, clock: NDArray[np.int64], elapsed: NDArray[np.float32]
) -> tuple[int, int, int]:
    """Return nanoseconds of the copy in, of the device, and of the way back.

    Args:
        started: ``time.perf_counter_ns()`` of the beginning.
        clock: seconds and nanoseconds, when all was launched and when all was done; [4].
        elapsed: milliseconds of the device; [1].

    """
    launched, done = (int(clock[at]) * 1_000_000_000 + int(clock[at + 1]) for at in (0, 2))
    computed = int(float(elapsed[0]) * 1e6)
    return launched - started, computed, max(0, done - launched - computed)


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def add_step(steps: NDArray[np.int64], count: int, numbers: tuple[int, ...]) -> int:
    """Write a step behind ``count`` others; return how many there are now."""
    for index in range(len(numbers)):
        steps[count, index] = numbers[index]
    return count + 1
