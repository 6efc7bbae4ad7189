"""Building blocks of the functions that Numba compiles: inlining, pointers, atomics, calls, blocks.

Callers of native functions take an address and a tuple of integers: ``call_c(address, (a, b))``.

Work is cut into chunks. Whatever runs a chunk is a function of two integers: the address of an
argument block, which lists addresses and sizes of arrays, and the number of the chunk. So a thread
that serves evaluations of different kinds calls all of them alike, without Python in between. Every
block begins with ranges of instances (or of programs), spans of rows, and a flag of one byte that
is set once nobody wants the results any more.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import addressof, c_char
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import carray, from_dtype, njit, types
from numba.extending import intrinsic, register_jitable
from numpy.typing import NDArray

_Function = TypeVar("_Function", bound=Callable[..., Any])
_WORD: Final = ir.IntType(64)
_INT: Final = ir.IntType(32)


def inlined(function: _Function) -> _Function:
    """Make a function callable from compiled code, which it becomes a part of."""
    return cast(_Function, register_jitable(error_model="numpy", no_cfunc_wrapper=True)(function))


@inlined
def aligned(size: int, unit: int) -> int:
    """Round a size up to a multiple of a unit."""
    return -(-size // unit) * unit


def uncounted(function: _Function) -> _Function:
    """Make a function that allocates nothing callable from compiled code.

    It does not count references to arrays, which takes a third of the time otherwise, and it
    becomes a part of its callers: passing the arrays of a workspace, of seven words each, would
    take longer than most of these functions. It must not assign to slices, for which compiled code
    may need a copy.
    """
    options = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(_Function, njit(function, _nrt=False, forceinline=True, **options))


def compiled_intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that generates LLVM instructions callable from compiled code."""
    return cast(Callable[..., Any], intrinsic(function))


def pointer_to(kind: Any) -> Any:
    """Return a function that turns an address into a pointer to a Numba type, in compiled code."""

    @compiled_intrinsic
    def convert(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return convert


@compiled_intrinsic
def fence(typing_context: Any) -> Any:
    """Order earlier writes before later reads, as other threads see them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), generate


@compiled_intrinsic
def add_atomically(typing_context: Any, address: Any, number: Any) -> Any:
    """Add to the 64-bit integer at an address; return its value before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@compiled_intrinsic
def replace_atomically(typing_context: Any, address: Any, expected: Any, number: Any) -> Any:
    """Replace the 64-bit integer at an address if it is the expected one; return whether it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        found = builder.cmpxchg(pointer, arguments[1], arguments[2], "seq_cst")
        return builder.zext(builder.extract_value(found, 1), ir.IntType(64))

    return types.int64(types.int64, types.int64, types.int64), generate


def _caller(returned: Any, kinds: list[Any] | None = None) -> Any:
    """Return a function that calls what is at an address, with integers.

    ``kinds`` are LLVM's types of the parameters; None if all have 64 bits.
    """

    @compiled_intrinsic
    def call(typing_context: Any, address: Any, arguments: Any) -> Any:
        parameters = kinds or [_WORD] * len(arguments)

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            is_void = returned == types.void
            result = ir.VoidType() if is_void else context.get_value_type(returned)
            function = builder.inttoptr(values[0], ir.FunctionType(result, parameters).as_pointer())
            numbers = [builder.extract_value(values[1], k) for k in range(len(parameters))]
            numbers = [
                builder.trunc(number, kind) if kind == _INT else number
                for number, kind in zip(numbers, parameters, strict=True)
            ]
            found = builder.call(function, numbers)
            return context.get_dummy_value() if is_void else found

        return returned(types.int64, types.UniTuple(types.int64, len(parameters))), generate

    return call


#: Functions of C libraries that return an int.
call_c: Final = _caller(types.int32)
#: ``cuLaunchKernel``.
call_launch: Final = _caller(types.int32, [_WORD, *[_INT] * 7, *[_WORD] * 3])
#: Functions that run a chunk, see `argument_block`; kernels on rows; kernels that sum over rows.
call_chunk: Final = _caller(types.int64)
call_kernel: Final = _caller(types.void)
call_sum: Final = _caller(types.float64)


# ---------------------------------------------------------------------------------- argument blocks

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
