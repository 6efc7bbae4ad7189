"""Calls of functions of C libraries by compiled code, and what threads need that share memory."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from warpfit_server.engine.native.intrinsics import compiled_intrinsic


def _calling(*widths: int) -> Any:
    """Make a function that calls the one at an address with integers of these widths in bits."""

    @compiled_intrinsic
    def call(typing_context: Any, address: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            kind = ir.FunctionType(ir.IntType(32), [ir.IntType(width) for width in widths])
            numbers = [builder.extract_value(given[1], index) for index in range(len(widths))]
            numbers = [
                builder.trunc(number, ir.IntType(32)) if width == 32 else number
                for number, width in zip(numbers, widths, strict=True)
            ]
            return builder.call(builder.inttoptr(given[0], kind.as_pointer()), numbers)

        return types.int32(types.int64, types.UniTuple(types.int64, len(widths))), generate

    return call


call_1 = _calling(64)
call_2 = _calling(64, 64)
call_3 = _calling(64, 64, 64)
call_4 = _calling(64, 64, 64, 64)
call_5 = _calling(64, 64, 64, 64, 64)
call_launch = _calling(64, 32, 32, 32, 32, 32, 32, 32, 64, 64, 64)


@compiled_intrinsic
def fence(typing_context: Any) -> Any:
    """Let other threads see what was written before anything is read after it."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), generate


@compiled_intrinsic
def add_atomically(typing_context: Any, address: Any, number: Any) -> Any:
    """Add to the 64-bit integer at an address; return what it was before."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        place = builder.inttoptr(given[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, given[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@njit  # type: ignore[untyped-decorator]
def nanoseconds(clock: int) -> int:
    """``time.monotonic_ns()``, by ``clock_gettime`` at an address."""
    now = np.zeros(2, dtype=np.int64)
    call_2(clock, (np.int64(time.CLOCK_MONOTONIC), np.int64(now.ctypes.data)))
    return int(now[0] * 1_000_000_000 + now[1])
