"""Command lists: driver calls for one stream that compiled code makes without Python's lock.

Compiled code writes a command list and executes it, which takes a fraction of the time that Python
needs for as many launches.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.calls import call_c, call_launch

#: Driver functions in the order of the kinds of command.
_FUNCTIONS: Final = (
    "cuMemcpyHtoDAsync_v2",
    "cuLaunchKernel",
    "cuEventRecord",
)
#: Kinds of command, with the arguments of the driver's functions.
UPLOAD, LAUNCH, RECORD = range(len(_FUNCTIONS))
#: Indices of two functions that are no commands: load a module; sleep for microseconds.
LOAD_MODULE: Final = RECORD + 1
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
    found += [driver.cuModuleLoadData, ctypes.CDLL(None).usleep]
    addresses = [ctypes.cast(one, ctypes.c_void_p).value for one in found]
    return np.array([*addresses, 0], dtype=np.int64)


def wait_while_held(functions: NDArray[np.int64]) -> None:
    """Wait before a launch by Python while modules are being loaded, as `execute` does."""
    while functions[LAUNCHES_HELD]:
        time.sleep(1e-6 * POLL_MICROSECONDS)


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def execute(functions: Any, commands: Any) -> int:
    """Execute commands [commands, COMMAND_WIDTH] in order; return the first status but 0, else 0.

    Each is its kind and the arguments of its function in `driver_functions`.
    """
    for number in range(len(commands)):
        c = commands[number]
        address = functions[c[0]]
        if c[0] == LAUNCH:
            while functions[LAUNCHES_HELD] != 0:
                call_c(functions[SLEEP], (np.int64(POLL_MICROSECONDS),))
            status = call_launch(
                address, (c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9], c[10], c[11])
            )
        elif c[0] == RECORD:
            status = call_c(address, (c[1], c[2]))
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
