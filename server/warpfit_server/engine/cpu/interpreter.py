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
compiled code serves both floating types; kernels (`kernels`) differ.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, types

from warpfit_server.engine.lowering.lower import Lowered, lowered_of
from warpfit_server.engine.lowering.schedule import (
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
    inlined,
)
from warpfit_server.engine.native.intrinsics import compiled_intrinsic
from warpfit_server.engine.native.records import (
    CANCELLED,
    FAILED,
    FINISHED,
    numbers,
    octets,
    part,
    pointer32,
    pointer64,
    table,
    words,
)

#: Bytes of one stored scalar: as wide as a kernel's step.
SCALAR_WIDTH: Final = 64
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


@compiled_intrinsic
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


@compiled_intrinsic
def call_loss(typing_context: Any, address: Any, f: Any, y: Any, w: Any, rows: Any) -> Any:
    """Call the loss kernel at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.DoubleType(), [word] * 4)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.float64(*[types.int64] * 5), generate


#: Arrays of a record, in order; those of `lower.Lowered` begin with INSTRUCTION_TABLE.
JOB: Final = 0
KERNELS: Final = 1
CELLS: Final = 2
SPANS: Final = 3
PARAMETERS: Final = 4
PARAMETER_STARTS: Final = 5
CANCEL_FLAG: Final = 6
INSTRUCTION_TABLE: Final = 7
_LOSSES: Final = INSTRUCTION_TABLE + len(Lowered._fields)


def interpret_piece(record: int, piece: int) -> int:
    """Run a piece; see `records`.

    The losses of a record are float64 [spans, cells of the batch]; its other arrays are as for
    `_interpret`.
    """
    cells, rows, span = part(table(record, CELLS, 2), table(record, SPANS, 2), piece)
    losses = numbers(record, _LOSSES)
    count = len(losses) // len(table(record, SPANS, 2))
    try:
        finished = _interpret(
            words(record, JOB), words(record, KERNELS), lowered_of(record, INSTRUCTION_TABLE),
            numbers(record, PARAMETERS), words(record, PARAMETER_STARTS), cells, rows,
            octets(record, CANCEL_FLAG), losses[span * count : (span + 1) * count],
        )  # fmt: skip
    except Exception:  # compiled code tells exceptions apart no further: there is no memory
        return FAILED
    return FINISHED if finished else CANCELLED


@inlined
def _interpret(
    job: Any,
    kernels: Any,
    lowered: Any,
    parameters: Any,
    parameter_starts: Any,
    cells: Any,
    rows: Any,
    cancelled: Any,
    losses: Any,
) -> bool:
    """Run cells over rows; return whether they were finished.

    ``job`` is int64 [JOB_ENTRIES]: addresses and sizes that are the same for the whole evaluation.
    ``kernels`` are addresses by operator code, int64 [256]. Parameters and their starts are the
    batch's own. ``cells`` and ``rows`` are half-open ranges, rows absolute. ``cancelled``, uint8
    [1], is polled between blocks. ``losses``, float64 [cells of the batch], receives each cell's
    sum of loss terms.
    """
    starts, slots = measure(lowered.summaries, cells[0], cells[1], job[VECTORS])
    slot_bytes = job[BLOCK] * job[ITEMSIZE]
    memory = np.empty((starts[-1] + 1) * SCALAR_WIDTH + (slots + 1) * slot_bytes, dtype=np.uint8)
    scalars = (memory.ctypes.data + SCALAR_WIDTH - 1) // SCALAR_WIDTH * SCALAR_WIDTH
    slot_memory = scalars + starts[-1] * SCALAR_WIDTH
    places = (scalars, slot_memory, slot_memory + slots * slot_bytes)
    finished = _run_cells(
        job, kernels, lowered, parameters, parameter_starts, cells, rows, cancelled, losses,
        starts, places, slot_bytes,
    )  # fmt: skip
    # Compiled code frees an array after its last use, and addresses do not count as one.
    return finished and memory.size > 0


@inlined
def _run_cells(
    job: Any,
    kernels: Any,
    lowered: Any,
    parameters: Any,
    parameter_starts: Any,
    cells: Any,
    rows: Any,
    cancelled: Any,
    losses: Any,
    starts: Any,
    places: Any,
    slot_bytes: int,
) -> bool:
    """Run cells over rows with working memory at ``places``: scalars, slots, a spare slot."""
    scalars, slot_memory, spare = places
    for cell in range(cells[0], cells[1]):
        losses[cell] = 0.0
        base = scalars + starts[cell - cells[0]] * SCALAR_WIDTH
        prologue(job, kernels, lowered, parameters, parameter_starts, cell, base)
    for block_start in range(rows[0], rows[1], job[BLOCK]):
        count = min(job[BLOCK], rows[1] - block_start)
        offset = block_start * job[ITEMSIZE]
        for cell in range(cells[0], cells[1]):
            if cancelled[0]:
                return False
            program = cell // job[VECTORS]
            result = result_address(job, cell, block_start, spare)
            run_instructions(
                lowered.instructions,
                lowered.summaries[program, PROLOGUE_END],
                lowered.summaries[program, INSTRUCTIONS_END],
                kernels,
                (
                    job[VARIABLES] + offset,
                    slot_memory,
                    scalars + starts[cell - cells[0]] * SCALAR_WIDTH,
                    result,
                ),
                (job[VARIABLE_PITCH], slot_bytes, SCALAR_WIDTH, 0),
                count,
            )
            if job[LOSS_KERNEL]:
                y, w = job[TARGET_ROWS] + offset, job[WEIGHT_ROWS] + offset
                losses[cell] += call_loss(job[LOSS_KERNEL], result, y, w, count)
    return True


@inlined
def result_address(job: Any, cell: int, row: int, spare: int) -> int:
    """Where a block of a cell's values goes: the answer, or a spare slot if it is not wanted."""
    if not job[VALUES]:
        return spare
    index = cell * (job[ROW_STOP] - job[ROW_START]) + row - job[ROW_START]
    return int(job[VALUES] + index * job[ITEMSIZE])


@inlined
def prologue(
    job: Any,
    kernels: Any,
    lowered: Any,
    parameters: Any,
    parameter_starts: Any,
    cell: int,
    base: int,
) -> None:
    """Compute a cell's scalars at address ``base``."""
    program, vector = cell // job[VECTORS], cell % job[VECTORS]
    start = parameter_starts[program]
    count = (parameter_starts[program + 1] - start) // job[VECTORS]
    first, loads = lowered.starts[program], lowered.summaries[program, LOADS]
    _fill(
        base,
        job[ITEMSIZE],
        lowered.loads[first : first + loads],
        lowered.constants[first : first + loads],
        parameters[start + vector * count : start + (vector + 1) * count],
    )
    run_instructions(
        lowered.instructions,
        lowered.summaries[program, INSTRUCTIONS_START],
        lowered.summaries[program, PROLOGUE_END],
        kernels,
        (base, base, base, base),
        (SCALAR_WIDTH, SCALAR_WIDTH, SCALAR_WIDTH, SCALAR_WIDTH),
        SCALAR_WIDTH // job[ITEMSIZE],
    )


@inlined
def measure(summaries: Any, cell_start: int, cell_stop: int, vectors: int) -> Any:
    """Give each cell its first scalar, and the slots that any of them needs."""
    starts = np.empty(cell_stop - cell_start + 1, dtype=np.int64)
    starts[0] = 0
    slots = 0
    for cell in range(cell_start, cell_stop):
        program = cell // vectors
        starts[cell - cell_start + 1] = starts[cell - cell_start] + summaries[program, SCALARS]
        slots = max(slots, summaries[program, SLOTS])
    return starts, slots


@inlined
def _fill(base: int, itemsize: int, loads: Any, constants: Any, parameters: Any) -> None:
    """Store the leaves of a cell's scalars, each as wide as a kernel's step."""
    lanes = SCALAR_WIDTH // itemsize
    for load in range(len(loads)):
        index, parameter = loads[load, 0], loads[load, 1]
        value = constants[load] if parameter < 0 else parameters[parameter]
        address = base + index * SCALAR_WIDTH
        if itemsize == 4:
            carray(pointer32(address), lanes)[:] = np.float32(value)
        else:
            carray(pointer64(address), lanes)[:] = value


@inlined
def run_instructions(
    instructions: Any, start: int, stop: int, kernels: Any, bases: Any, pitches: Any, rows: int
) -> None:
    """Run instructions; ``bases`` and ``pitches`` turn a place into an address."""
    for index in range(start, stop):
        target, a = instructions[index, TARGET], instructions[index, FIRST]
        b, c = instructions[index, FIRST + 1], instructions[index, FIRST + 2]
        _call_kernel(
            kernels[instructions[index, CODE]],
            bases[target & 3] + (target >> 2) * pitches[target & 3],
            bases[a & 3] + (a >> 2) * pitches[a & 3],
            bases[b & 3] + (b >> 2) * pitches[b & 3],
            bases[c & 3] + (c >> 2) * pitches[c & 3],
            instructions[index, BROADCAST],
            rows,
        )
