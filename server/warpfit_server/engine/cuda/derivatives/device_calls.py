"""Uploads and launches of an evaluation with derivatives, by compiled code.

A call from Python to the driver takes several times as long as one from compiled code, so Python
only lists what is to be uploaded and launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from warpfit_server.engine.cuda.runtime.driver_calls import launch, record, upload
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.arguments import array_address
from warpfit_server.engine.native.intrinsics import aligned, pointer_to

_ALIGNMENT: Final = 256
_compiled = numba_cache.njit(nogil=True)
_octets: Final = pointer_to(types.uint8)
_words: Final = pointer_to(types.int64)


def upload_inputs(
    context: StreamContext,
    address: int,
    size: int,
    pieces: NDArray[np.int64],
    fields: NDArray[np.int64],
) -> None:
    """Copy pieces to device memory of their `upload_size`, and write their addresses to fields.

    Args:
        context: whose stream copies.
        address: of the device memory.
        size: of the device memory.
        pieces: to copy.
        fields: a word for each of `encoding.INPUTS`; those of empty pieces stay as they are.

    Raises:
        CUDADriverError: if the device reports an error.
    """
    staging = context.pinned("inputs", size)
    given = context.handle, address, pieces, staging, array_address(fields)
    context.check_executed(upload_pieces(context.functions, *given))


class KernelLaunch(NamedTuple):
    """A kernel to launch, in integers."""

    kernel: int
    """The driver's handle."""
    columns: int
    """Blocks in the first dimension of the grid."""
    rows: int
    threads: int
    """Threads of a block."""
    arguments: int
    """Address of the struct that is the kernel's argument."""
    shared: int = 0
    """Bytes of shared memory of a block."""


def run(context: StreamContext, *launches: KernelLaunch, events: Sequence[str] = ()) -> None:
    """Launch kernels one after the other, with an event before and one behind them.

    Raises:
        CUDADriverError: if the device reports an error.
    """
    begun, computed = [context.event(name).ptr for name in events] or (0, 0)
    given = context.handle, np.array(launches, dtype=np.int64), begun, computed
    context.check_executed(run_launches(context.functions, *given))


def load() -> None:
    """Load the compiled functions below, or compile them."""
    word, words, table = types.int64, types.int64[::1], types.int64[:, ::1]
    upload_size.compile((table,))
    upload_pieces.compile((words, word, word, table, types.uint8[::1], word))
    run_launches.compile((words, word, table, word, word))


# ------------------------------------------------------------------------------ compiled by Numba


@_compiled  # type: ignore[untyped-decorator]
def upload_size(pieces: NDArray[np.int64]) -> int:
    """Return how many bytes `upload_pieces` uploads."""
    size = np.int64(0)
    for index in range(len(pieces)):
        size += aligned(pieces[index, 1], _ALIGNMENT)
    return int(size)


@_compiled  # type: ignore[untyped-decorator]
def upload_pieces(
    driver: NDArray[np.int64],
    stream: int,
    address: int,
    pieces: NDArray[np.int64],
    staging: NDArray[np.uint8],
    fields: int,
) -> int:
    """Do what `upload_inputs` does, given page-locked memory and the address of the fields.

    Returns the driver's status.
    """
    places, offset = carray(_words(fields), len(pieces)), np.int64(0)
    for index in range(len(pieces)):
        size = pieces[index, 1]
        if size == 0:
            continue
        source, target = carray(_octets(pieces[index, 0]), size), staging[offset:]
        for octet in range(size):
            target[octet] = source[octet]
        places[index] = address + offset
        offset += aligned(size, _ALIGNMENT)
    return int(upload(driver, stream, address, staging.ctypes.data, len(staging)))


@_compiled  # type: ignore[untyped-decorator]
def run_launches(
    driver: NDArray[np.int64], stream: int, launches: NDArray[np.int64], begun: int, computed: int
) -> int:
    """Launch kernels, rows of `KernelLaunch`, between the records of events that are not 0.

    Returns the driver's first status but 0, else 0.
    """
    if begun != 0:
        status = record(driver, stream, begun)
        if status != 0:
            return int(status)
    for index in range(len(launches)):
        kernel, columns, rows, threads, arguments, shared = launches[index]
        struct = carray(_octets(arguments), 1)
        status = launch(driver, stream, kernel, (columns, rows), (threads, 1), shared, struct)
        if status != 0:
            return int(status)
    return 0 if computed == 0 else int(record(driver, stream, computed))
