"""Argument blocks: how compiled code finds the arrays and the chunks of a piece of parallel work.

Work is cut into chunks. Whatever runs a chunk is a function of two integers: the address of an
argument block, which lists addresses and sizes of arrays, and the number of the chunk. So a thread
that serves evaluations of different kinds calls all of them alike, without Python in between.

Every block begins with ranges of instances (or of programs), spans of rows, and a flag of one byte
that is set once nobody wants the results any more.
"""

from __future__ import annotations

from ctypes import addressof, c_char
from typing import Any, Final, NamedTuple

import numpy as np
from numba import carray, from_dtype, types
from numpy.typing import NDArray

from warpfit_server.engine.native.intrinsics import inlined, pointer_to

#: What a function that runs a chunk returns: the chunk is finished, nobody wants the results any
#: more, or memory was short.
FINISHED: Final = 0
CANCELLED: Final = 1
FAILED: Final = 2
#: Arrays that every block begins with, and the first one that depends on the kind of work.
RANGES, SPANS, CANCEL_FLAG, OWN_ARRAYS = range(4)
#: A half-open range.
RANGE: Final = np.dtype([("start", np.int64), ("stop", np.int64)])


class Range(NamedTuple):
    """RANGE as compiled code returns it."""

    start: int
    stop: int


#: Words of a block for each array: address, and number of elements.
_ENTRY: Final = 2

pointer32: Final = pointer_to(types.float32)
pointer64: Final = pointer_to(types.float64)
_pointer_to_words: Final = pointer_to(types.int64)
_character_at: Final = c_char.from_buffer


def argument_block(arrays: tuple[NDArray[Any], ...]) -> NDArray[np.int64]:
    """List contiguous arrays, which must outlive the block."""
    entries: list[int] = []
    for array in arrays:  # mostly much faster than ``array.ctypes``, but for buffers of records
        plain: Any = array.view(np.uint8) if array.dtype.names else array
        try:
            address = addressof(_character_at(plain))
        except (TypeError, ValueError):  # it is read-only or empty, or has gaps
            assert array.flags.c_contiguous, "compiled code takes arrays for contiguous"
            address = array.ctypes.data
        entries += (address, array.size)
    return np.array(entries, dtype=np.int64)


def array_address(array: NDArray[Any]) -> int:
    """Return the address of a contiguous array."""
    return int(argument_block((array,))[0])


def reader(kind: Any) -> Any:
    """Return a function that gives array number ``index`` of a block, flat, in compiled code.

    Args:
        kind: Numba's type of the elements, or a structured NumPy type.
    """
    pointer = pointer_to(from_dtype(kind) if isinstance(kind, np.dtype) else kind)

    @inlined
    def read(block: int, index: int) -> Any:
        entry = carray(_pointer_to_words(block + 8 * _ENTRY * index), _ENTRY)
        return carray(pointer(entry[0]), entry[1])

    return read


words: Final = reader(types.int64)
floats: Final = reader(types.float64)
octets: Final = reader(types.uint8)
ranges: Final = reader(RANGE)


@inlined
def chunk_ranges(block: int, chunk: int) -> Any:
    """Return the instances of a chunk, its rows, and the number of its span.

    Chunk i is the range of instances i // spans over the span i % spans.
    """
    spans = ranges(block, SPANS)
    span = chunk % len(spans)
    instances, rows = ranges(block, RANGES)[chunk // len(spans)], spans[span]
    return Range(instances.start, instances.stop), Range(rows.start, rows.stop), span
