"""Calls of the driver by compiled code, which takes a fraction of the time that Python needs.

Compiled code takes integers from records: a tuple of them takes ten times as long to hand over.
"""

from __future__ import annotations

import ctypes
import re
import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.native.intrinsics import call_c, call_launch, inlined

#: Addresses of functions of the driver and of C; ``launches_held`` is 1 while modules are being
#: loaded, until when launches wait.
DRIVER: Final = np.dtype(
    [
        (name, np.int64)
        for name in ("upload", "launch", "record", "load_module", "sleep", "launches_held")
    ]
)
#: Microseconds between two looks at that word.
POLL_MICROSECONDS: Final = 100
#: Codes of the types in structs of arguments, as NumPy has them.
_TYPES: Final = {
    **{"int": "i4", "unsigned": "u4", "long long": "i8", "unsigned long long": "u8"},
    "double": "f8",
}


def driver_functions() -> NDArray[np.void]:
    """Return a record of `DRIVER`, [1].

    Raises:
        OSError: if there is no driver.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    found = (
        driver.cuMemcpyHtoDAsync_v2,
        driver.cuLaunchKernel,
        driver.cuEventRecord,
        driver.cuModuleLoadData,
        ctypes.CDLL(None).usleep,
    )
    addresses = [ctypes.cast(one, ctypes.c_void_p).value for one in found]
    return np.array([(*addresses, 0)], DRIVER)


def wait_while_held(functions: NDArray[np.void]) -> None:
    """Wait before a launch by Python while modules are being loaded, as `launch` does."""
    while functions["launches_held"][0]:
        time.sleep(1e-6 * POLL_MICROSECONDS)


def argument_struct(source: str, name: str) -> np.dtype[Any]:
    """Return the type of a struct by which a kernel takes its arguments, as its source has it."""
    declared = re.search(rf"^struct {name} {{(.*?)^}};", source, re.DOTALL | re.MULTILINE)
    assert declared, f"the source has no struct {name}"
    found = re.findall(r"^ *(?:const )?(\w[\w ]*?)(\*?) (\w+);", declared[1], re.MULTILINE)
    fields = [(field, "u8" if star else _TYPES[kind]) for kind, star, field in found]
    return np.dtype(fields, align=True)  # a pointer is an address


def argument_type(struct: np.dtype[Any]) -> type[ctypes.Structure]:
    """Return the class of ctypes for a struct, which Python fills in faster than a record.

    Its instances have no attributes but the fields.
    """
    kinds = [struct[name] for name in struct.names or ()]
    fields = list(zip(struct.names or (), map(np.ctypeslib.as_ctypes_type, kinds), strict=True))
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})


def as_record(numbers: Any) -> NDArray[Any]:
    """Return a named tuple of integers as a record, [1]."""
    return np.array([numbers], [(name, np.int64) for name in numbers._fields])


@inlined
def upload(functions: Any, stream: int, address: int, source: int, size: int) -> int:
    """Copy host memory to the device, given both addresses; return the driver's status.

    Memory that is page-locked is copied once the stream gets there. From other memory the driver
    itself copies first, before it returns.
    """
    places = np.int64(address), np.int64(source)
    return call_c(functions[0].upload, (*places, np.int64(size), stream))  # type: ignore[no-any-return]


@inlined
def record(functions: Any, stream: int, event: int) -> int:
    """Record an event, given the driver's handle; return the driver's status."""
    return call_c(functions[0].record, (event, stream))  # type: ignore[no-any-return]


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
    while functions[0].launches_held != 0:
        call_c(functions[0].sleep, (np.int64(POLL_MICROSECONDS),))
    sizes = (grid[0], grid[1], np.int64(1), threads[0], threads[1], np.int64(1), np.int64(shared))
    pointers = np.int64(places.ctypes.data)
    return call_launch(functions[0].launch, (kernel, *sizes, stream, pointers, np.int64(0)))  # type: ignore[no-any-return]
