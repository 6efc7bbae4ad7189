"""The interpreter, compiled by Numba: it walks rows in blocks and calls one kernel an instruction.

The simple form, for one program and parameter vector:

    run the prologue once, on scalars
    for each block of rows:
        for each instruction:
            kernel[code](result, a, b, c)          # over the rows of the block
        add the block's loss

A *cell* is a program with one of its parameter vectors, numbered in wire order. One call runs a
range of cells over a range of rows, blocks outside and cells inside, so that a block's variables
are read from memory once and then stay in cache. All data is addressed by byte, so the same
compiled code serves both floating types; kernels (`cpu_kernels`) differ.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from warpfit_server.engine.cpu_lower import (
    BROADCAST,
    CODE,
    FIRST,
    INSTRUCTIONS_END,
    INSTRUCTIONS_START,
    LOADS,
    PROLOGUE_END,
    SCALARS,
    SLOTS,
    TARGET,
)

#: Bytes of one stored scalar: as wide as a kernel's step.
_WIDTH: Final = 64
#: Entries of the ``job`` array.
ITEMSIZE: Final = 0
VARIABLES: Final = 1
VARIABLE_PITCH: Final = 2
TARGET_ROWS: Final = 3
WEIGHT_ROWS: Final = 4
VALUES: Final = 5
LOSS_KERNEL: Final = 6
VECTORS: Final = 7
ROW_START: Final = 8
ROW_STOP: Final = 9
BLOCK: Final = 10
JOB_ENTRIES: Final = 11


@intrinsic
def _call_kernel(
    typing_context: Any, address: Any, r: Any, a: Any, b: Any, c: Any, broadcast: Any, rows: Any
) -> Any:
    """Call the kernel at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word] * 6)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


@intrinsic
def _call_loss(typing_context: Any, address: Any, f: Any, y: Any, w: Any, rows: Any) -> Any:
    """Call the loss kernel at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.DoubleType(), [word] * 4)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.float64(*[types.int64] * 5), generate


def interpret(
    job: Any,
    kernels: Any,
    instructions: Any,
    summaries: Any,
    loads: Any,
    constants: Any,
    load_starts: Any,
    parameters: Any,
    parameter_starts: Any,
    cell_start: int,
    cell_stop: int,
    row_start: int,
    row_stop: int,
    cancelled: Any,
    losses: Any,
) -> bool:
    """Run cells over rows; return whether they were finished.

    Args:
        job: int64 [JOB_ENTRIES]: addresses and sizes that are the same for the whole evaluation.
        kernels: addresses by operator code, int64 [256].
        instructions, summaries, loads, constants, load_starts: the lowered batch.
        parameters, parameter_starts: those of the batch.
        cell_start, cell_stop: cells to run.
        row_start, row_stop: rows to run, absolute.
        cancelled: uint8 [1], polled between blocks.
        losses: float64 [cells of the batch], receives each cell's sum of loss terms.

    """
    scalar_starts, slots = _measure(summaries, cell_start, cell_stop, job[VECTORS])
    block = job[BLOCK]
    slot_bytes = block * job[ITEMSIZE]
    memory = np.empty((scalar_starts[-1] + 1) * _WIDTH + (slots + 1) * slot_bytes, dtype=np.uint8)
    scalars = (memory.ctypes.data + _WIDTH - 1) // _WIDTH * _WIDTH
    slot_memory = scalars + scalar_starts[-1] * _WIDTH
    for cell in range(cell_start, cell_stop):
        losses[cell] = 0.0
        base = scalars + scalar_starts[cell - cell_start] * _WIDTH
        program, vector = cell // job[VECTORS], cell % job[VECTORS]
        summary = summaries[program]
        start, stop = parameter_starts[program], parameter_starts[program + 1]
        count = (stop - start) // job[VECTORS]
        first = load_starts[program]
        _fill(
            base, job[ITEMSIZE],
            loads[first : first + summary[LOADS]], constants[first : first + summary[LOADS]],
            parameters[start + vector * count : start + (vector + 1) * count],
        )  # fmt: skip
        _run(
            instructions[summary[INSTRUCTIONS_START] : summary[PROLOGUE_END]],
            kernels, (base, base, base, base), (_WIDTH, _WIDTH, _WIDTH, _WIDTH), _WIDTH // job[ITEMSIZE],
        )  # fmt: skip
    for block_start in range(row_start, row_stop, block):
        rows = min(block, row_stop - block_start)
        offset = block_start * job[ITEMSIZE]
        for cell in range(cell_start, cell_stop):
            if cancelled[0]:
                return False
            result = slot_memory + slots * slot_bytes
            if job[VALUES]:
                row = cell * (job[ROW_STOP] - job[ROW_START]) + block_start - job[ROW_START]
                result = job[VALUES] + row * job[ITEMSIZE]
            summary = summaries[cell // job[VECTORS]]
            base = scalars + scalar_starts[cell - cell_start] * _WIDTH
            _run(
                instructions[summary[PROLOGUE_END] : summary[INSTRUCTIONS_END]],
                kernels, (job[VARIABLES] + offset, slot_memory, base, result),
                (job[VARIABLE_PITCH], slot_bytes, _WIDTH, 0), rows,
            )  # fmt: skip
            if job[LOSS_KERNEL]:
                y, w = job[TARGET_ROWS] + offset, job[WEIGHT_ROWS] + offset
                losses[cell] += _call_loss(job[LOSS_KERNEL], result, y, w, rows)
    return True


@njit
def _measure(summaries: Any, cell_start: int, cell_stop: int, vectors: int) -> Any:
    """Give each cell its first scalar, and the slots that any of them needs."""
    starts = np.empty(cell_stop - cell_start + 1, dtype=np.int64)
    starts[0] = 0
    slots = 0
    for cell in range(cell_start, cell_stop):
        summary = summaries[cell // vectors]
        starts[cell - cell_start + 1] = starts[cell - cell_start] + summary[SCALARS]
        slots = max(slots, summary[SLOTS])
    return starts, slots


@njit
def _fill(base: int, itemsize: int, loads: Any, constants: Any, parameters: Any) -> None:
    """Store the leaves of a cell's scalars, each as wide as a kernel's step."""
    lanes = _WIDTH // itemsize
    for load in range(len(loads)):
        index, parameter = loads[load, 0], loads[load, 1]
        value = constants[load] if parameter < 0 else parameters[parameter]
        address = base + index * _WIDTH
        if itemsize == 4:
            carray(_pointer32(address), lanes)[:] = np.float32(value)
        else:
            carray(_pointer64(address), lanes)[:] = value


@njit
def _run(instructions: Any, kernels: Any, bases: Any, pitches: Any, rows: int) -> None:
    """Run instructions; ``bases`` and ``pitches`` turn a place into an address."""
    for index in range(len(instructions)):
        one = instructions[index]
        target, a, b, c = one[TARGET], one[FIRST], one[FIRST + 1], one[FIRST + 2]
        _call_kernel(
            kernels[one[CODE]],
            bases[target & 3] + (target >> 2) * pitches[target & 3],
            bases[a & 3] + (a >> 2) * pitches[a & 3],
            bases[b & 3] + (b >> 2) * pitches[b & 3],
            bases[c & 3] + (c >> 2) * pitches[c & 3],
            one[BROADCAST],
            rows,
        )


def _as_pointer(kind: Any) -> Any:
    @intrinsic
    def convert(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            target = context.get_value_type(signature.return_type)
            return builder.inttoptr(arguments[0], target)

        return types.CPointer(kind)(types.int64), generate

    return convert


_pointer32: Final = _as_pointer(types.float32)
_pointer64: Final = _as_pointer(types.float64)
