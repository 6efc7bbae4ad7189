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
    BLOCK,
    ITEMSIZE,
    JOB_ENTRIES,
    LOSS_KERNEL,
    SCALAR_WIDTH,
    TARGET_ROWS,
    VECTORS,
    WEIGHT_ROWS,
    call_loss,
    prologue,
    run_instructions,
)
from warpfit_server.engine.lowering.lower import Lowered, lowered_of
from warpfit_server.engine.lowering.schedule import (
    INSTRUCTIONS_END,
    PROLOGUE_END,
    SCALARS,
    SLOTS,
    inlined,
)
from warpfit_server.engine.native.records import numbers, pointer32, pointer64, words

#: Arrays of a row loss in a record: those of `row_loss_arrays`.
ROW_LOSS_ARRAYS: Final = 4 + len(Lowered._fields)
#: Columns that a row loss reads: values, target and weights; then comes its result.
_COLUMNS: Final = 3
_DOUBLE: Final = 8


def row_loss_arrays(
    kernels: NDArray[np.int64], sum_kernel: int, lowered: Lowered
) -> tuple[NDArray[Any], ...]:
    """Arrays of a record for a row loss of one's own.

    Args:
        kernels: addresses of the float64 kernels by code of instruction.
        sum_kernel: address of the float64 loss kernel that adds its first operand up; 0 if there is
            no row loss, or the loss kernel of the evaluation's own job does it all.
        lowered: the row loss, a batch of one program over values, target and weights.

    """
    job = np.zeros(JOB_ENTRIES, dtype=np.int64)
    job[ITEMSIZE], job[VECTORS], job[LOSS_KERNEL] = _DOUBLE, 1, sum_kernel
    return job, kernels, np.empty(0), np.zeros(2, dtype=np.int64), *lowered


def no_row_loss() -> Lowered:
    """Stand in for the lowered row loss where there is none."""
    nothing = np.empty((0, 0), dtype=np.int64)
    return Lowered(nothing, nothing, nothing, np.empty(0), np.empty(0, dtype=np.int64))


@inlined
def row_loss_of(record: int, index: int) -> Any:
    """Arrays of a record from number ``index``: job, kernels, parameters, their starts, code."""
    return (
        words(record, index), words(record, index + 1), numbers(record, index + 2),
        words(record, index + 3), lowered_of(record, index + 4),
    )  # fmt: skip


@inlined
def row_loss_bytes(job: Any, row_loss: Any) -> int:
    """Count the bytes that a thread needs for a row loss, beside alignment."""
    own, _, _, _, lowered = row_loss
    if not own[LOSS_KERNEL]:
        return 0
    summary = lowered.summaries[0]
    columns = _COLUMNS + 1 + summary[SLOTS]
    return int(columns * job[BLOCK] * _DOUBLE + summary[SCALARS] * SCALAR_WIDTH)


@inlined
def begin_row_loss(job: Any, row_loss: Any, memory: int) -> None:
    """Compute the scalars of a row loss, and a weight of 1 for each row where there is none."""
    own, kernels, parameters, starts, lowered = row_loss
    if not own[LOSS_KERNEL]:
        return
    bases = _bases(job, lowered, memory)
    prologue(own, kernels, lowered, parameters, starts, 0, bases[2])
    carray(pointer64(memory + 2 * job[BLOCK] * _DOUBLE), job[BLOCK])[:] = 1.0


@inlined
def begin_block(job: Any, row_loss: Any, memory: int, offset: int, count: int) -> None:
    """Widen target and weights of a block of rows that begins ``offset`` bytes into a column."""
    own = row_loss[0]
    if not own[LOSS_KERNEL]:
        return
    pitch = job[BLOCK] * _DOUBLE
    _widen(job[TARGET_ROWS] + offset, job[ITEMSIZE], memory + pitch, count)
    if job[WEIGHT_ROWS]:
        _widen(job[WEIGHT_ROWS] + offset, job[ITEMSIZE], memory + 2 * pitch, count)


@inlined
def block_loss(job: Any, row_loss: Any, memory: int, result: int, offset: int, count: int) -> float:
    """Sum the row losses of a cell's values at address ``result``."""
    own, kernels, _, _, lowered = row_loss
    if not own[LOSS_KERNEL]:
        y, w = job[TARGET_ROWS] + offset, job[WEIGHT_ROWS] + offset
        return float(call_loss(job[LOSS_KERNEL], result, y, w, count))
    _widen(result, job[ITEMSIZE], memory, count)
    pitch = job[BLOCK] * _DOUBLE
    bases = _bases(job, lowered, memory)
    summary = lowered.summaries[0]
    run_instructions(
        lowered.instructions, summary[PROLOGUE_END], summary[INSTRUCTIONS_END], kernels, bases,
        (pitch, pitch, SCALAR_WIDTH, 0), count,
    )  # fmt: skip
    out = bases[3]
    return float(call_loss(own[LOSS_KERNEL], out, out, memory + 2 * pitch, count))


@inlined
def _bases(job: Any, lowered: Any, memory: int) -> Any:
    """Addresses of the kinds of place: columns, slots, scalars, result."""
    pitch = job[BLOCK] * _DOUBLE
    result = memory + _COLUMNS * pitch
    slots = result + pitch
    return memory, slots, slots + lowered.summaries[0, SLOTS] * pitch, result


@inlined
def _widen(source: int, itemsize: int, target: int, count: int) -> None:
    wide = carray(pointer64(target), count)
    if itemsize == 4:
        _copy(carray(pointer32(source), count), wide)
    else:
        _copy(carray(pointer64(source), count), wide)


@inlined
def _copy(source: Any, target: Any) -> None:
    for row in range(len(source)):
        target[row] = np.float64(source[row])
