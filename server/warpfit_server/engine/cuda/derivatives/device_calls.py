"""Uploads and launches of an evaluation with derivatives, by compiled code.

A call from Python to the driver takes several times as long as one from compiled code, so Python
only lists what is to be uploaded and launched.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from warpfit_server.engine.cuda.runtime.driver_calls import launch, record, upload
from warpfit_server.engine.cuda.runtime.streams import StreamContext
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.arguments import array_address
from warpfit_server.engine.native.intrinsics import pointer_to

_ALIGNMENT: Final = 256
_compiled = numba_cache.njit(nogil=True)
_octets: Final = pointer_to(types.uint8)


class Inputs(NamedTuple):
    """Arrays that are uploaded together, one after the other."""

    arrays: dict[str, NDArray[Any]]
    pieces: NDArray[np.int64]
    """Address, number of bytes, and offset in the upload of each array."""
    size: int
    """Bytes of the upload."""

    @classmethod
    def of(cls, arrays: dict[str, NDArray[Any]]) -> Inputs:
        """Lay out arrays, which must be contiguous."""
        pieces, size = [], 0
        for array in arrays.values():
            pieces.append((array_address(array), array.nbytes, size))
            size += -(-max(array.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        return cls(arrays, np.array(pieces, dtype=np.int64), size)

    def upload(self, context: StreamContext, address: int) -> dict[str, int]:
        """Copy the arrays to an address on the device; return that of each of them."""
        staging = context.pinned("inputs", self.size)
        given = context.functions, context.handle, address, self.pieces, staging
        context.check_executed(upload_pieces(*given))
        return dict(zip(self.arrays, (self.pieces[:, 2] + address).tolist(), strict=True))


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


def run(context: StreamContext, *launches: KernelLaunch, event: str | None = None) -> None:
    """Launch kernels one after the other, and record an event behind them.

    Raises:
        CUDADriverError: if the device reports an error.
    """
    recorded = 0 if event is None else context.event(event).ptr
    given = context.handle, np.array(launches, dtype=np.int64), recorded
    context.check_executed(run_launches(context.functions, *given))


def load() -> None:
    """Load the compiled functions below, or compile them."""
    word, words, table = types.int64, types.int64[::1], types.int64[:, ::1]
    upload_pieces.compile((words, word, word, table, types.uint8[::1]))
    run_launches.compile((words, word, table, word))


# ------------------------------------------------------------------------------ compiled by Numba


@_compiled  # type: ignore[untyped-decorator]
def upload_pieces(
    driver: NDArray[np.int64],
    stream: int,
    address: int,
    pieces: NDArray[np.int64],
    staging: NDArray[np.uint8],
) -> int:
    """Pack the pieces of `Inputs` in page-locked memory and upload it; return the status."""
    for index in range(len(pieces)):
        size, offset = pieces[index, 1], pieces[index, 2]
        source, target = carray(_octets(pieces[index, 0]), size), staging[offset:]
        for octet in range(size):
            target[octet] = source[octet]
    return int(upload(driver, stream, address, staging, len(staging)))


@_compiled  # type: ignore[untyped-decorator]
def run_launches(
    driver: NDArray[np.int64], stream: int, launches: NDArray[np.int64], event: int
) -> int:
    """Launch kernels, rows of `KernelLaunch`, and record an event if it is not 0.

    Returns the driver's first status but 0, else 0.
    """
    for index in range(len(launches)):
        kernel, columns, rows, threads, arguments, shared = launches[index]
        struct = carray(_octets(arguments), 1)
        status = launch(driver, stream, kernel, (columns, rows), (threads, 1), shared, struct)
        if status != 0:
            return int(status)
    return 0 if event == 0 else int(record(driver, stream, event))
