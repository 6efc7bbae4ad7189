"""Command lists: driver calls for one stream that are made at once, without Python's lock.

That takes a fraction of the time that Python needs for as many launches.
"""

from __future__ import annotations

import ctypes
import re
import struct
import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import call_c, call_launch

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
COMMAND_WIDTH: Final = 11


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


#: Codes of the types in structs of arguments, as the module ``struct`` has them.
_TYPES: Final = {"int": "i", "unsigned": "I", "long long": "q", "unsigned long long": "Q"}


class ArgumentStruct:
    """A struct by which a kernel takes its arguments, laid out as its CUDA source declares it."""

    def __init__(self, source: str, name: str) -> None:
        declared = re.search(rf"^struct {name} {{(.*?)^}};", source, re.DOTALL | re.MULTILINE)
        assert declared, f"the source has no struct {name}"
        found = re.findall(r"^ *(?:const )?(\w[\w ]*?)(\*?) (\w+);", declared[1], re.MULTILINE)
        self.fields = {field: "Q" if star else _TYPES[kind] for kind, star, field in found}
        """Codes of the fields' types in the order of the fields; a pointer is an address."""
        self._names = tuple(self.fields)
        self._struct = struct.Struct("".join(self.fields.values()) + "0Q")

    def pack(self, **values: int) -> bytes:
        """Return the struct with a value for each field, in the order of the fields."""
        assert tuple(values) == self._names
        return self._struct.pack(*values.values())


def address_of(memory: NDArray[Any]) -> int:
    """Return the address of writable memory, in a third of the time of ``memory.ctypes``."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # type: ignore[arg-type]


class CommandList:
    """Driver calls for one stream, which are written down first and then made at once.

    Args:
        functions: from `driver_functions`.
        stream: the driver's handle.
    """

    def __init__(self, functions: NDArray[np.int64], stream: int) -> None:
        self._functions = functions
        self._stream = stream
        self._commands: list[tuple[int, ...]] = []
        self._arguments: list[bytes] = []
        self._places = [0]
        """Where each argument begins among the bytes of all, and the end."""

    def upload(self, address: int, source: NDArray[Any]) -> None:
        """Copy page-locked host memory to the device."""
        self._add(UPLOAD, address, address_of(source), source.nbytes, self._stream)

    def record(self, event: Any) -> None:
        """Record a CuPy event."""
        self._add(RECORD, event.ptr, self._stream)

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        threads: tuple[int, int, int],
        *arguments: bytes | int,
        shared: int = 0,
    ) -> None:
        """Launch a CuPy function, with structs or 64-bit integers for arguments."""
        first = len(self._arguments)
        self._add(LAUNCH, kernel.ptr, *grid, *threads, shared, self._stream, first)
        for argument in arguments:
            whole = argument if isinstance(argument, bytes) else struct.pack("q", argument)
            self._arguments.append(whole)
            self._places.append(self._places[-1] + len(whole))

    def execute(self) -> int:
        """Make the calls in order; return the driver's first status but 0, else 0."""
        commands = np.array(self._commands, dtype=np.int64).reshape(-1, COMMAND_WIDTH)
        arguments = np.frombuffer(b"".join(self._arguments) or bytes(1), dtype=np.uint8)
        return int(execute(self._functions, commands, np.array(self._places), arguments))

    def _add(self, *numbers: int) -> None:
        self._commands.append(numbers + (0,) * (COMMAND_WIDTH - len(numbers)))


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def execute(functions: Any, commands: Any, places: Any, arguments: Any) -> int:
    """Execute commands [commands, COMMAND_WIDTH] in order; return the first status but 0, else 0.

    Each is its kind and the arguments of its function in `driver_functions`; for a launch, the last
    one is the number of the first of its kernel's arguments, which begin at ``places`` among the
    bytes of all.
    """
    for index in range(len(places)):
        places[index] += np.int64(arguments.ctypes.data)
    for number in range(len(commands)):
        c = commands[number]
        address = functions[c[0]]
        if c[0] == LAUNCH:
            while functions[LAUNCHES_HELD] != 0:
                call_c(functions[SLEEP], (np.int64(POLL_MICROSECONDS),))
            pointers = np.int64(places.ctypes.data) + 8 * c[10]
            status = call_launch(
                address,
                (c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9], pointers, np.int64(0)),
            )
        elif c[0] == RECORD:
            status = call_c(address, (c[1], c[2]))
        else:
            status = call_c(address, (c[1], c[2], c[3], c[4]))
        if status != 0:
            return int(status)
    return 0
