"""The pieces of one evaluation on the CPU, and how compiled code finds what they are about.

Whatever runs pieces is a function of two integers: the address of a record, which lists addresses
and sizes of arrays, and the number of the piece. So a thread that serves many evaluations of
different kinds calls them all alike, and never comes back to Python in between.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types
from numpy.typing import NDArray

from warpfit_server.engine.lowering.schedule import inlined
from warpfit_server.engine.native.intrinsics import compiled_intrinsic

#: What a function that runs a piece returns: it is finished, nobody wants the results any more, or
#: there was no memory.
FINISHED: Final = 0
CANCELLED: Final = 1
FAILED: Final = 2
#: Words of an entry of a record: address, and number of elements.
_ENTRY: Final = 2


def record_of(arrays: tuple[NDArray[Any], ...]) -> NDArray[np.int64]:
    """Make a record of arrays, which must outlive it."""
    record = np.empty(_ENTRY * len(arrays), dtype=np.int64)
    for index, array in enumerate(arrays):
        assert array.flags.c_contiguous, "compiled code takes arrays for contiguous"
        record[_ENTRY * index] = array.ctypes.data
        record[_ENTRY * index + 1] = array.size
    return record


def pointer_to(kind: Any) -> Any:
    """Make a function that turns an address into a pointer, in compiled code."""

    @compiled_intrinsic
    def convert(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            target = context.get_value_type(signature.return_type)
            return builder.inttoptr(arguments[0], target)

        return types.CPointer(kind)(types.int64), generate

    return convert


pointer32: Final = pointer_to(types.float32)
pointer64: Final = pointer_to(types.float64)
pointer_to_words: Final = pointer_to(types.int64)
pointer_to_bytes: Final = pointer_to(types.uint8)


@compiled_intrinsic
def run_piece(typing_context: Any, function: Any, record: Any, piece: Any) -> Any:
    """Call the function at an address that runs a piece."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word, word])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int64(types.int64, types.int64, types.int64), generate


@inlined
def words(record: int, index: int) -> Any:
    """Array number ``index`` of a record: int64, flat."""
    entry = carray(pointer_to_words(record + 8 * _ENTRY * index), _ENTRY)
    return carray(pointer_to_words(entry[0]), entry[1])


@inlined
def table(record: int, index: int, columns: int) -> Any:
    """Array number ``index`` of a record: int64 [rows, columns]."""
    entry = carray(pointer_to_words(record + 8 * _ENTRY * index), _ENTRY)
    return carray(pointer_to_words(entry[0]), (entry[1] // columns, columns))


@inlined
def numbers(record: int, index: int) -> Any:
    """Array number ``index`` of a record: float64, flat."""
    entry = carray(pointer_to_words(record + 8 * _ENTRY * index), _ENTRY)
    return carray(pointer64(entry[0]), entry[1])


@inlined
def octets(record: int, index: int) -> Any:
    """Array number ``index`` of a record: uint8, flat."""
    entry = carray(pointer_to_words(record + 8 * _ENTRY * index), _ENTRY)
    return carray(pointer_to_bytes(entry[0]), entry[1])


@inlined
def part(cells: Any, spans: Any, piece: int) -> Any:
    """Cells and rows of a piece, half-open ranges, and the index of its span.

    Piece i is the range of ``cells`` i // spans over the span i % spans; both are [ranges, 2].
    """
    group, span = piece // len(spans), piece % len(spans)
    return (cells[group, 0], cells[group, 1]), (spans[span, 0], spans[span, 1]), span
