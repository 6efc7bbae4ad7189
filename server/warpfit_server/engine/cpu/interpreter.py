"""The interpreter, compiled by Numba: it walks rows in blocks and calls one kernel an instruction.

The simple form, for one program and parameter vector:

    run the prologue once, on invariants
    for each block of rows:
        for each instruction:
            kernel[code](result, a, b, c)          # over the rows of the block
        add the block's loss to the tree of sums (`sum_tree`)

An *instance* is a program with one of its parameter vectors, numbered in wire order. One call runs
a range of instances over a span of rows, blocks outside and instances inside, so that a block's
variables are read from memory once and then stay in cache. All data is addressed by byte, so the
same compiled code serves both floating types; kernels (`kernels`) differ.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import carray
from numpy.typing import NDArray

from warpfit_server.engine.lowering.lowered import NONE, Lowered, lowered_of
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.arguments import (
    CANCEL_FLAG,
    CANCELLED,
    FAILED,
    FINISHED,
    OWN_ARRAYS,
    SPANS,
    chunk_ranges,
    floats,
    octets,
    pointer32,
    pointer64,
    ranges,
    reader,
    words,
)
from warpfit_server.engine.native.intrinsics import call_kernel, call_sum, inlined
from warpfit_server.engine.sum_tree import carry, node_sums

#: Bytes of one stored invariant: as wide as a kernel's step.
INVARIANT_WIDTH: Final = 64
#: What is the same for all instances of an evaluation: int64 numbers and addresses, 0 for None.
CONTEXT: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("item_bytes", "variables", "variable_pitch", "target", "weights", "values"),
            *(
                "loss_kernel",
                "instances",
                "vectors",
                "row_start",
                "row_stop",
                "block_rows",
                "levels",
            ),
            # for `derivative_interpreter` alone:
            *("wants_losses", "wants_gradients", "wants_curvatures", "jacobian"),
            *("wants_reductions", "wants_moments", "is_squares", "weighs_loss"),
        )
    ]
)


class Inputs(NamedTuple):
    """Arrays of an evaluation that the interpreter reads."""

    context: Any
    """CONTEXT, [1]."""
    kernels: NDArray[np.int64]
    """Addresses by code of instruction."""
    parameters: NDArray[np.float64]
    parameter_starts: NDArray[np.int64]
    lowered: Lowered

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Return the arrays of an argument block for `inputs_of`."""
        return (*self[:-1], *self.lowered)


INPUT_ARRAYS: Final = len(Inputs._fields) - 1 + len(Lowered._fields)
#: Array of an argument block after the inputs: sums of losses, [spans, instances of the batch].
_LOSSES: Final = OWN_ARRAYS + INPUT_ARRAYS
_contexts: Final = reader(CONTEXT)


@inlined
def inputs_of(block: int, index: int) -> Any:
    """Return the inputs in an argument block, from array number ``index``."""
    return Inputs(
        _contexts(block, index), words(block, index + 1), floats(block, index + 2),
        words(block, index + 3), lowered_of(block, index + 4),
    )  # fmt: skip


class Memory(NamedTuple):
    """Working memory for a range of instances, in compiled code: an array, and addresses in it.

    Compiled code frees an array after its last use, and addresses do not count as one: they are
    valid as long as a caller has the tuple.
    """

    array: Any
    first: int
    """The first instance."""
    invariants: int
    invariant_starts: Any
    """First invariant of each instance, and the end of the last one's, int64."""
    slots: int
    slot_bytes: int
    spare: int
    """A slot for results that nobody wants; then comes memory of the caller's own."""


@numba_cache.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def interpret_chunk(block: int, chunk: int) -> int:
    """Run a range of instances over a span of rows; see `arguments`."""
    instances, rows, span = chunk_ranges(block, chunk)
    losses = floats(block, _LOSSES)
    count = len(losses) // len(ranges(block, SPANS))
    try:
        inputs = inputs_of(block, OWN_ARRAYS)
        finished = _run(
            inputs, new_memory(inputs, instances, 0), instances, rows, octets(block, CANCEL_FLAG),
            losses[span * count : (span + 1) * count],
        )  # fmt: skip
    except Exception:  # compiled code tells exceptions apart no further: memory is short
        return FAILED
    return FINISHED if finished else CANCELLED


@inlined
def _run(
    inputs: Inputs, memory: Memory, instances: Any, rows: Any, cancelled: Any, losses: Any
) -> bool:
    """Run a range of instances over a range of rows; return whether they were finished.

    ``cancelled``, uint8 [1], is polled between blocks; ``losses`` gets each instance's sum of loss
    terms, float64 [instances of the batch].
    """
    context = inputs.context[0]
    first = instances.start
    sums = np.zeros((context.levels, instances.stop - first))
    for instance in range(first, instances.stop):
        run_prologue(inputs, instance, invariants_of(memory, instance))
    row = rows.start
    while row < rows.stop:
        block = row // context.block_rows
        count = min((block + 1) * context.block_rows, rows.stop) - row
        offset = row * context.item_bytes
        for instance in range(instances.start, instances.stop):
            if cancelled[0]:
                return False
            bases, _ = run_body(inputs, memory, instance, row, count)
            if context.loss_kernel:
                operands = bases[3], context.target + offset, context.weights + offset, count
                sums[0, instance - first] += call_sum(context.loss_kernel, operands)
        carry(sums, block + 1)
        row += count
    losses[first : instances.stop] = node_sums(sums)
    return True


@inlined
def new_memory(inputs: Inputs, instances: Any, more: int) -> Memory:
    """Allocate memory for a range of instances, and ``more`` bytes of the caller's own."""
    context, first = inputs.context[0], instances.start
    starts = np.zeros(instances.stop - first + 1, dtype=np.int64)
    most_slots = 0
    for index in range(instances.stop - first):
        header = inputs.lowered.headers[(first + index) // context.vectors]
        starts[index + 1] = starts[index] + header.invariants
        most_slots = max(most_slots, header.slots)
    invariant_bytes, slot_bytes = (
        starts[-1] * INVARIANT_WIDTH,
        context.block_rows * context.item_bytes,
    )
    size = INVARIANT_WIDTH + invariant_bytes + (most_slots + 1) * slot_bytes + more
    array = np.empty(size, dtype=np.uint8)
    invariants = aligned(array)
    slots = invariants + invariant_bytes
    spare = slots + most_slots * slot_bytes
    return Memory(array, first, invariants, starts, slots, slot_bytes, spare)


@inlined
def aligned(array: Any) -> int:
    """Return the first address in an array at which invariants may lie."""
    return int((array.ctypes.data + INVARIANT_WIDTH - 1) // INVARIANT_WIDTH * INVARIANT_WIDTH)


@inlined
def invariants_of(memory: Memory, instance: int) -> int:
    """Return the address of an instance's invariants."""
    return int(
        memory.invariants + memory.invariant_starts[instance - memory.first] * INVARIANT_WIDTH
    )


@inlined
def run_prologue(inputs: Inputs, instance: int, invariants: int) -> None:
    """Compute an instance's invariants at an address."""
    context, lowered = inputs.context[0], inputs.lowered
    program, vector = instance // context.vectors, instance % context.vectors
    start = inputs.parameter_starts[program]
    count = (inputs.parameter_starts[program + 1] - start) // context.vectors
    header = lowered.headers[program]
    for index in range(header.first_load, header.first_load + header.loads):
        load = lowered.loads[index]
        value = load.value
        if load.parameter != NONE:
            value = inputs.parameters[start + vector * count + load.parameter]
        _store_invariant(invariants + load.invariant * INVARIANT_WIDTH, context.item_bytes, value)
    bases = (invariants, invariants, invariants, invariants)
    pitches = (INVARIANT_WIDTH, INVARIANT_WIDTH, INVARIANT_WIDTH, INVARIANT_WIDTH)
    width = INVARIANT_WIDTH // context.item_bytes
    run_instructions(inputs, header.start, header.prologue_end, bases, pitches, width)


@inlined
def _store_invariant(address: int, item_bytes: int, value: float) -> None:
    """Store an invariant as wide as a kernel's step."""
    if item_bytes == 4:
        carray(pointer32(address), INVARIANT_WIDTH // 4)[:] = np.float32(value)
    else:
        carray(pointer64(address), INVARIANT_WIDTH // 8)[:] = value


@inlined
def run_body(inputs: Inputs, memory: Memory, instance: int, row: int, count: int) -> Any:
    """Run an instance's instructions on a block of rows.

    Returns:
        Bases and pitches, for `address_of`. The base of RESULT is the address of the result.
    """
    context = inputs.context[0]
    header = inputs.lowered.headers[instance // context.vectors]
    result = memory.spare
    if context.values:
        index = instance * (context.row_stop - context.row_start) + row - context.row_start
        result = context.values + index * context.item_bytes
    rows = context.variables + row * context.item_bytes
    bases = (rows, memory.slots, invariants_of(memory, instance), result)
    pitches = (context.variable_pitch, memory.slot_bytes, INVARIANT_WIDTH, 0)
    run_instructions(inputs, header.prologue_end, header.end, bases, pitches, count)
    return bases, pitches


@inlined
def run_instructions(
    inputs: Inputs, start: int, stop: int, bases: Any, pitches: Any, rows: int
) -> None:
    """Run a range of instructions on rows."""
    for index in range(start, stop):
        instruction = inputs.lowered.instructions[index]
        operands = instruction.operands
        arguments = (
            address_of(instruction.target, bases, pitches),
            address_of(operands[0], bases, pitches),
            address_of(operands[1], bases, pitches),
            address_of(operands[2], bases, pitches),
            instruction.broadcast,
            rows,
        )
        call_kernel(inputs.kernels[instruction.code], arguments)


@inlined
def address_of(location: int, bases: Any, pitches: Any) -> int:
    """Return the address of a location; bases and pitches are by its kind."""
    return int(bases[location & 3] + (location >> 2) * pitches[location & 3])
