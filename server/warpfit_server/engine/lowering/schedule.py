"""Places and order of a program's instructions, compiled by Numba; the second half of `lower`.

Nodes come numbered, operands before what uses them. Leaves and scalars get places of their own and
are emitted in that order; everything else is emitted depth first from what is wanted, the operand
that needs most slots first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numpy as np
from numba import njit
from numba.extending import register_jitable

from warpfit.ops import CONSTANT, PARAMETER, VARIABLE

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: Kinds of place: a variable's rows, an intermediate result, a scalar, the program's result.
ROWS: Final = 0
SLOT: Final = 1
SCALAR: Final = 2
RESULT: Final = 3
#: Columns of an instruction.
CODE: Final = 0
TARGET: Final = 1
FIRST: Final = 2
BROADCAST: Final = 5
INSTRUCTION_COLUMNS: Final = 6
#: Code of a token that stands for a node that there is already.
GIVEN: Final = 0
#: Code of the instruction that copies.
COPY_CODE: Final = VARIABLE
# Columns of a node of the expression: code, three operand nodes (or a leaf's bits), slots needed,
# uses left, place, state.
OPERAND, NEED, USES, PLACE, DONE, NODE_COLUMNS = 1, 4, 5, 6, 7, 8
NO_PLACE: Final = -1
# Columns of a program's summary.
INSTRUCTIONS_START: Final = 0
PROLOGUE_END: Final = 1
INSTRUCTIONS_END: Final = 2
SCALARS: Final = 3
LOADS: Final = 4
SLOTS: Final = 5
SUMMARY_COLUMNS: Final = 6


def inlined(function: _Function) -> _Function:
    """Make a function callable from compiled code; its code becomes part of the caller's."""
    return cast(_Function, register_jitable(error_model="numpy", no_cfunc_wrapper=True)(function))


def uncounted(function: _Function) -> _Function:
    """Do as `inlined` for a function that allocates nothing.

    Such code need not count references to arrays, which takes a third of the time otherwise. It
    must not assign to slices, for which compiled code may need a copy.
    """
    return cast(_Function, njit(function, error_model="numpy", _nrt=False))


@uncounted
def place_scalars(
    nodes: Any,
    arities: Any,
    instructions: Any,
    summary: Any,
    loads: Any,
    constants: Any,
    work: Any,
) -> int:
    """Place leaves and scalars, emit the prologue, count the uses; return the prologue's end."""
    scalars = 0
    load = 0
    emitted = 0
    for number in range(len(nodes)):
        code = nodes[number, CODE]
        nodes[number, USES] = 0
        nodes[number, DONE] = 0
        nodes[number, NEED] = 0
        nodes[number, PLACE] = NO_PLACE
        if code == VARIABLE:
            nodes[number, PLACE] = nodes[number, OPERAND] << 2 | ROWS
        elif code in (PARAMETER, CONSTANT):
            nodes[number, PLACE] = scalars << 2 | SCALAR
            loads[load, 0] = scalars
            loads[load, 1] = nodes[number, OPERAND] if code == PARAMETER else -1
            constants[load] = nodes[number, OPERAND : OPERAND + 1].view(np.float64)[0]
            scalars += 1
            load += 1
        elif is_scalar(nodes, number, arities[code]):
            nodes[number, PLACE] = scalars << 2 | SCALAR
            scalars += 1
            emit(nodes, number, arities[code], instructions, emitted)
            emitted += 1
        else:
            count_uses(nodes, number, arities[code], work)
    summary[INSTRUCTIONS_START] = 0
    summary[PROLOGUE_END] = emitted
    summary[SCALARS] = scalars
    summary[LOADS] = load
    return emitted


@uncounted
def is_scalar(nodes: Any, number: int, arity: int) -> bool:
    for k in range(arity):
        place = nodes[nodes[number, OPERAND + k], PLACE]
        if place == NO_PLACE or place & 3 != SCALAR:
            return False
    return True


@uncounted
def count_uses(nodes: Any, number: int, arity: int, order: Any) -> None:
    """Count the uses of the operands, and the slots that the node needs."""
    for k in range(arity):
        nodes[nodes[number, OPERAND + k], USES] += 1
    pending = _sorted_operands(nodes, number, arity, order)
    need = 1
    for k in range(pending):
        need = max(need, nodes[order[k], NEED] + pending - 1 - k)
    nodes[number, NEED] = need


@uncounted
def _sorted_operands(nodes: Any, number: int, arity: int, order: Any) -> int:
    """List the operands that are results, the one that needs fewest slots first."""
    count = 0
    for k in range(arity):
        operand = nodes[number, OPERAND + k]
        need = nodes[operand, NEED]
        if need == 0:
            continue
        position = count
        while position > 0 and nodes[order[position - 1], NEED] > need:
            order[position] = order[position - 1]
            position -= 1
        order[position] = operand
        count += 1
    return count


@uncounted
def emit(nodes: Any, number: int, arity: int, instructions: Any, index: int) -> None:
    instructions[index, CODE] = nodes[number, CODE]
    instructions[index, TARGET] = nodes[number, PLACE]
    broadcast = 0
    for k in range(3):
        place = nodes[nodes[number, OPERAND + k], PLACE] if k < arity else 0
        instructions[index, FIRST + k] = place
        if k < arity and place & 3 == SCALAR:
            broadcast |= 1 << k
    instructions[index, BROADCAST] = broadcast


@uncounted
def schedule(
    nodes: Any,
    arities: Any,
    top: int,
    root: int,
    instructions: Any,
    emitted: int,
    work: Any,
    freed: Any,
    slots: Any,
) -> Any:
    """Emit the instructions of the node ``top`` and all it depends on that is not emitted yet.

    The ``freed`` first entries of ``work`` are free slots of ``slots``. Return the end of the
    instructions and these two.
    """
    # A node is visited twice: even entries of the agenda ask for its operands, odd ones emit it.
    free, agenda, order = work[: len(nodes)], work[len(nodes) : -3], work[-3:]
    agenda[0] = top << 1
    pending = 1
    while pending:
        pending -= 1
        number, ready = agenda[pending] >> 1, agenda[pending] & 1
        arity = arities[nodes[number, CODE]]
        if nodes[number, DONE]:
            continue
        if not ready:
            agenda[pending] = number << 1 | 1
            pending += 1
            for k in range(_sorted_operands(nodes, number, arity, order)):
                agenda[pending] = order[k] << 1
                pending += 1
            continue
        freed = _release(nodes, number, arity, free, freed)
        freed, slots = _assign(nodes, number, root, free, freed, slots)
        emit(nodes, number, arity, instructions, emitted)
        nodes[number, DONE] = 1
        emitted += 1
    return emitted, freed, slots


@uncounted
def emit_copy(place: Any, target: Any, instructions: Any, index: int) -> None:
    """Emit the copy of a leaf or a scalar to the place ``target``."""
    instructions[index, CODE] = COPY_CODE
    instructions[index, TARGET] = target
    for k in range(3):
        instructions[index, FIRST + k] = place
    instructions[index, BROADCAST] = 1 if place & 3 == SCALAR else 0


@uncounted
def _assign(nodes: Any, number: int, root: int, free: Any, freed: int, slots: int) -> Any:
    """Give a result its place; return how many slots are free, and how many there are."""
    if number == root:
        nodes[number, PLACE] = RESULT
    elif freed:
        freed -= 1
        nodes[number, PLACE] = free[freed] << 2 | SLOT
    else:
        nodes[number, PLACE] = slots << 2 | SLOT
        slots += 1
    return freed, slots


@uncounted
def _release(nodes: Any, number: int, arity: int, free: Any, freed: int) -> int:
    """Free the slots of the operands that are used for the last time."""
    for k in range(arity):
        operand = nodes[number, OPERAND + k]
        nodes[operand, USES] -= 1
        place = nodes[operand, PLACE]
        if nodes[operand, USES] == 0 and place & 3 == SLOT:
            free[freed] = place >> 2
            freed += 1
    return freed
