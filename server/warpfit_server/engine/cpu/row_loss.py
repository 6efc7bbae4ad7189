"""Losses of a block of rows in float64, whatever the data's type; compiled by Numba.

The simple form, for one block:

    if the row loss is (f - y)^2 or |f - y|:
        loss += loss kernel of the data's type(f, y, w)      # as without derivatives: the same bits
    else:
        f, y, w = float64 copies of the block's values, target and weights
        run the row loss's instructions with the float64 kernels
        loss += sum(w l)

Values are rounded to the data's type before, as they are when they are returned.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray
from numpy.typing import NDArray

from warpfit_server.engine.cpu.interpreter import (
    CONTEXT,
    INVARIANT_WIDTH,
    Inputs,
    run_instructions,
    run_prologue,
)
from warpfit_server.engine.cpu.statistics import copy
from warpfit_server.engine.lowering.lowered import Lowered
from warpfit_server.engine.native.arguments import pointer32, pointer64
from warpfit_server.engine.native.intrinsics import call_sum, inlined

#: Columns that a row loss reads: values, target and weights; then comes its result.
_COLUMNS: Final = 3
_DOUBLE: Final = 8


def row_loss_inputs(kernels: NDArray[np.int64], sum_kernel: int, lowered: Lowered) -> Inputs:
    """Return the inputs of the interpreter for a custom row loss.

    Args:
        kernels: addresses of the float64 kernels by code of instruction.
        sum_kernel: address of the float64 loss kernel that adds its first operand up; 0 if the
            loss kernel of the evaluation's own context does it all.
        lowered: the row loss, a batch of one program over values, target and weights.
    """
    context = np.zeros(1, dtype=CONTEXT)
    context["item_bytes"], context["vectors"], context["loss_kernel"] = _DOUBLE, 1, sum_kernel
    return Inputs(context, kernels, np.empty(0), np.zeros(2, dtype=np.int64), lowered)


@inlined
def row_loss_bytes(context: Any, row_loss: Inputs) -> int:
    """Return the bytes of memory that a thread needs for a row loss."""
    if not row_loss.context[0].loss_kernel:
        return 0
    header = row_loss.lowered.headers[0]
    columns = _COLUMNS + 1 + header.slots
    return int(columns * context.block_rows * _DOUBLE + header.invariants * INVARIANT_WIDTH)


@inlined
def begin_row_loss(context: Any, row_loss: Inputs, memory: int) -> None:
    """Compute the invariants of a row loss, and a weight of 1 for each row where there is none."""
    if not row_loss.context[0].loss_kernel:
        return
    run_prologue(row_loss, 0, _bases(context, row_loss, memory)[2])
    carray(pointer64(memory + 2 * context.block_rows * _DOUBLE), context.block_rows)[:] = 1.0


@inlined
def begin_block(context: Any, row_loss: Inputs, memory: int, offset: int, count: int) -> None:
    """Widen target and weights of a block of rows that begins ``offset`` bytes into a column."""
    if not row_loss.context[0].loss_kernel:
        return
    pitch = context.block_rows * _DOUBLE
    _widen(context.target + offset, context.item_bytes, memory + pitch, count)
    if context.weights:
        _widen(context.weights + offset, context.item_bytes, memory + 2 * pitch, count)


@inlined
def block_loss(
    context: Any, row_loss: Inputs, memory: int, result: int, offset: int, count: int
) -> float:
    """Sum the row losses of an instance's values at address ``result``."""
    sum_kernel = row_loss.context[0].loss_kernel
    if not sum_kernel:
        operands = result, context.target + offset, context.weights + offset, count
        return float(call_sum(context.loss_kernel, operands))
    _widen(result, context.item_bytes, memory, count)
    pitch = context.block_rows * _DOUBLE
    bases = _bases(context, row_loss, memory)
    header = row_loss.lowered.headers[0]
    pitches = (pitch, pitch, INVARIANT_WIDTH, 0)
    run_instructions(row_loss, header.prologue_end, header.end, bases, pitches, count)
    return float(call_sum(sum_kernel, (bases[3], bases[3], memory + 2 * pitch, count)))


@inlined
def _bases(context: Any, row_loss: Inputs, memory: int) -> Any:
    """Return the bases of locations: columns, slots, invariants, result."""
    pitch = context.block_rows * _DOUBLE
    result = memory + _COLUMNS * pitch
    slots = result + pitch
    return memory, slots, slots + row_loss.lowered.headers[0].slots * pitch, result


@inlined
def _widen(source: int, item_bytes: int, target: int, count: int) -> None:
    """Copy numbers as float64."""
    wide = carray(pointer64(target), count)
    if item_bytes == 4:
        copy(carray(pointer32(source), count), wide)
    else:
        copy(carray(pointer64(source), count), wide)
