"""Building blocks of the functions that Numba compiles: inlining, pointers, atomics, calls.

Callers of native functions take an address and a tuple of integers: ``call_c(address, (a, b))``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, register_jitable

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
#: Functions that run a chunk, see `arguments`; kernels on rows; kernels that sum over rows.
call_chunk: Final = _caller(types.int64)
call_kernel: Final = _caller(types.void)
call_sum: Final = _caller(types.float64)
