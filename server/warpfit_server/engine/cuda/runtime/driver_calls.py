"""Calls of the driver by compiled code, which takes a fraction of the time that Python needs.

Compiled code takes integers from records: a tuple of them takes ten times as long to hand over.
"""

from __future__ import annotations

import ctypes
import functools
import re
import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.native.intrinsics import call_c, call_launch, inlined

#: Driver functions by their indices.
_FUNCTIONS: Final = (
    "cuMemcpyHtoDAsync_v2",
    "cuLaunchKernel",
    "cuEventRecord",
    "cuModuleLoadData",
)
UPLOAD, LAUNCH, RECORD, LOAD_MODULE = range(len(_FUNCTIONS))
#: Index of the function that sleeps for microseconds.
SLEEP: Final = LOAD_MODULE + 1
#: Index of a word that is 1 while launches are held back because modules are being loaded.
LAUNCHES_HELD: Final = SLEEP + 1
#: Microseconds between two looks at that word.
POLL_MICROSECONDS: Final = 100
#: Codes of the types in structs of arguments, as NumPy has them.
_TYPES: Final = {"int": "i4", "unsigned": "u4", "long long": "i8", "unsigned long long": "u8"}


def driver_functions() -> NDArray[np.int64]:
    """Return the addresses of all functions by their indices, then `LAUNCHES_HELD`.

    Raises:
        OSError: if there is no driver.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    found = [*(getattr(driver, name) for name in _FUNCTIONS), ctypes.CDLL(None).usleep]
    addresses = [ctypes.cast(one, ctypes.c_void_p).value for one in found]
    return np.array([*addresses, 0], dtype=np.int64)


def wait_while_held(functions: NDArray[np.int64]) -> None:
    """Wait before a launch by Python while modules are being loaded, as `launch` does."""
    while functions[LAUNCHES_HELD]:
        time.sleep(1e-6 * POLL_MICROSECONDS)


def argument_struct(source: str, name: str) -> np.dtype[Any]:
    """Return the type of a struct by which a kernel takes its arguments, as its source has it."""
    declared = re.search(rf"^struct {name} {{(.*?)^}};", source, re.DOTALL | re.MULTILINE)
    assert declared, f"the source has no struct {name}"
    found = re.findall(r"^ *(?:const )?(\w[\w ]*?)(\*?) (\w+);", declared[1], re.MULTILINE)
    fields = [(field, "u8" if star else _TYPES[kind]) for kind, star, field in found]
    return np.dtype(fields, align=True)  # a pointer is an address


def as_record(numbers: Any) -> NDArray[Any]:
    """Return a named tuple of integers as a record, [1]."""
    return np.array([numbers], _record_type(numbers._fields))


@functools.cache
def _record_type(names: tuple[str, ...]) -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in names])


@inlined
def upload(functions: Any, stream: int, address: int, source: int, size: int) -> int:
    """Copy host memory to the device, given both addresses; return the driver's status.

    Memory that is page-locked is copied once the stream gets there. From other memory the driver
    itself copies first, before it returns.
    """
    places = np.int64(address), np.int64(source)
    return call_c(functions[UPLOAD], (*places, np.int64(size), stream))  # type: ignore[no-any-return]


@inlined
def record(functions: Any, stream: int, event: int) -> int:
    """Record an event, given the driver's handle; return the driver's status."""
    return call_c(functions[RECORD], (event, stream))  # type: ignore[no-any-return]


@inlined
def launch(
    functions: Any, stream: int, kernel: int, grid: Any, threads: Any, shared: int, arguments: Any
) -> int:
    """Launch a kernel, given its handle; return the driver's status.

    ``arguments`` are records, each of which is an argument by value.
    """
    places = np.int64(arguments.ctypes.data) + arguments.itemsize * np.arange(len(arguments))
    return launch_at(functions, stream, kernel, grid, threads, shared, places)


@inlined
def launch_at(
    functions: Any, stream: int, kernel: int, grid: Any, threads: Any, shared: int, places: Any
) -> int:
    """Launch a kernel as `launch` does, given the address of each argument."""
    while functions[LAUNCHES_HELD] != 0:
        call_c(functions[SLEEP], (np.int64(POLL_MICROSECONDS),))
    sizes = (grid[0], grid[1], np.int64(1), threads[0], threads[1], np.int64(1), np.int64(shared))
    pointers = np.int64(places.ctypes.data)
    return call_launch(functions[LAUNCH], (kernel, *sizes, stream, pointers, np.int64(0)))  # type: ignore[no-any-return]
