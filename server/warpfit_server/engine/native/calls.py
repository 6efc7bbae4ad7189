"""Calls of native functions by their addresses, from compiled code.

Each caller takes an address and a tuple of integers: ``call_c(address, (a, b))``.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types

from warpfit_server.engine.native.intrinsics import compiled_intrinsic

_WORD: Final = ir.IntType(64)
_INT: Final = ir.IntType(32)


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
