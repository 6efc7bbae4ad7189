"""Lowering: postfix tokens to the instructions that the interpreter runs, compiled by Numba.

The simple form turns each operator token into one instruction that pops its operands from a stack
and pushes its result. The clever parts, all in one pass over the tokens:

* A node of the expression is numbered by what it computes, so a subexpression that occurs again is
  the same node and is computed once.
* A node made of parameters and constants alone is a scalar: its instruction goes to the prologue,
  which runs once for each parameter vector instead of once for each block of rows.
* Variables, scalars and results are named in place: operands cost no instruction.
* The operand that needs most slots is computed first (Sethi and Ullman, JACM 17, 1970), and a slot
  is free again after its last use, so few slots are needed and intermediates stay in cache.
* A power with the constant exponent 2, 3 or -1 becomes a product or a quotient.

A place is an int64: ``index << 2 | kind``. An instruction is a row of ``instructions``: the
operator's code, the places of its result and its three operands, and a bit set of the operands
that are scalars.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit.ops import ARITIES, CONSTANT, OPERATORS, PARAMETER, VARIABLE

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
#: Code of the instruction that copies.
COPY_CODE: Final = VARIABLE
# Columns of a node of the expression: code, three operand nodes (or a leaf's bits), slots needed,
# uses left, place, state.
_OPERAND, _NEED, _USES, _PLACE, _DONE, _NODE_COLUMNS = 1, 4, 5, 6, 7, 8
_NO_PLACE: Final = -1
# Columns of a program's summary.
INSTRUCTIONS_START: Final = 0
PROLOGUE_END: Final = 1
INSTRUCTIONS_END: Final = 2
SCALARS: Final = 3
LOADS: Final = 4
SLOTS: Final = 5
SUMMARY_COLUMNS: Final = 6


@dataclass(frozen=True, slots=True, eq=False)
class Lowered:
    """Instructions of a batch."""

    instructions: NDArray[np.int64]
    """[tokens + programs, INSTRUCTION_COLUMNS]; each program's from its INSTRUCTIONS_START."""
    summaries: NDArray[np.int64]
    """[programs, SUMMARY_COLUMNS]."""
    loads: NDArray[np.int64]
    """Scalars to fill: place index and parameter index, -1 for a constant; [tokens, 2]."""
    constants: NDArray[np.float64]
    """Value of each load of a constant; [tokens]."""
    starts: NDArray[np.int64]
    """First token, and first load, of each program; [programs + 1]."""


def lower_batch(lower: Any, batch: Batch) -> Lowered:
    """Lower a checked batch with the compiled `lower`."""
    tokens, programs = len(batch.codes), len(batch)
    lowered = Lowered(
        np.empty((tokens + programs, INSTRUCTION_COLUMNS), dtype=np.int64),
        np.empty((programs, SUMMARY_COLUMNS), dtype=np.int64),
        np.empty((tokens, 2), dtype=np.int64),
        np.empty(tokens, dtype=np.float64),
        batch.starts,
    )
    lower(
        np.ascontiguousarray(batch.codes),
        np.ascontiguousarray(batch.values),
        lowered.starts,
        ARITIES,
        _power_rewrites(),
        lowered.instructions,
        lowered.summaries,
        lowered.loads,
        lowered.constants,
    )
    return lowered


def _power_rewrites() -> NDArray[np.float64]:
    """Operators that equal a power with a constant exponent: rows (exponent, code)."""
    rows = [(2.0, "square"), (3.0, "cube"), (-1.0, "inv")]
    return np.array([(exponent, OPERATORS[name].code) for exponent, name in rows])


_POWER_CODE: Final = OPERATORS["pow"].code


def lower(
    codes: Any,
    values: Any,
    starts: Any,
    arities: Any,
    rewrites: Any,
    instructions: Any,
    summaries: Any,
    loads: Any,
    constants: Any,
) -> None:
    """Lower every program of a batch; the arguments are `lower_batch`'s."""
    longest = 1
    for program in range(len(starts) - 1):
        longest = max(longest, starts[program + 1] - starts[program])
    nodes = np.empty((longest, _NODE_COLUMNS), dtype=np.int64)
    stack = np.empty(longest, dtype=np.int64)
    table = np.empty(_table_size(longest), dtype=np.int64)
    work = np.empty(6 * longest + 8, dtype=np.int64)
    bits = values.view(np.int64)
    for program in range(len(starts) - 1):
        start, stop = starts[program], starts[program + 1]
        count = _number(
            codes[start:stop], values[start:stop], bits[start:stop], arities, rewrites,
            nodes, stack, table,
        )  # fmt: skip
        first = start + program
        _place(
            nodes[:count],
            arities,
            stack[0],
            instructions[first : stop + program + 1],
            summaries[program],
            loads[start:stop],
            constants[start:stop],
            work,
        )
        for column in (INSTRUCTIONS_START, PROLOGUE_END, INSTRUCTIONS_END):
            summaries[program, column] += first


@njit
def _table_size(tokens: int) -> int:
    size = 4
    while size < 2 * tokens:
        size *= 2
    return size


@njit
def _number(
    codes: Any,
    values: Any,
    bits: Any,
    arities: Any,
    rewrites: Any,
    nodes: Any,
    stack: Any,
    table: Any,
) -> int:
    """Turn tokens into distinct nodes; stack[0] is the root's number. Return how many there are."""
    mask = _table_size(len(codes)) - 1
    table[: mask + 1] = -1
    height = 0
    count = 0
    for token in range(len(codes)):
        code = np.int64(codes[token])
        arity = arities[code]
        operands = (np.int64(-1), np.int64(-1), np.int64(-1))
        if arity == 0:
            leaf = np.int64(values[token]) if code != CONSTANT else bits[token]
            operands = (leaf, operands[1], operands[2])
        else:
            height -= arity
            second = stack[height + 1] if arity > 1 else np.int64(-1)
            third = stack[height + 2] if arity > 2 else np.int64(-1)
            operands = (stack[height], second, third)
        if code == _POWER_CODE:
            code, operands = _rewrite(code, operands, nodes, rewrites)
        number = _find(code, operands, nodes, table, mask, count)
        count = max(count, number + 1)
        stack[height] = number
        height += 1
    return count


@njit
def _rewrite(code: int, operands: Any, nodes: Any, rewrites: Any) -> Any:
    """Replace a power whose exponent is one of the constants of ``rewrites``."""
    exponent = nodes[operands[1]]
    if exponent[CODE] == CONSTANT:
        value = exponent[_OPERAND : _OPERAND + 1].view(np.float64)[0]
        for row in range(len(rewrites)):
            if rewrites[row, 0] == value:
                return np.int64(rewrites[row, 1]), (operands[0], np.int64(-1), np.int64(-1))
    return code, operands


@njit
def _find(code: int, operands: Any, nodes: Any, table: Any, mask: int, count: int) -> int:
    """Find the node with this code and these operands, or make it as number ``count``."""
    a, b, c = operands
    key = np.uint64(code) * np.uint64(0x9E3779B97F4A7C15)
    for part in (a, b, c):
        key = (key ^ np.uint64(part)) * np.uint64(0xFF51AFD7ED558CCD)
        key ^= key >> np.uint64(32)
    index = np.int64(key & np.uint64(mask))
    while table[index] >= 0:
        node = nodes[table[index]]
        if node[CODE] == code and node[1] == a and node[2] == b and node[3] == c:
            return table[index]
        index = (index + 1) & mask
    table[index] = count
    node = nodes[count]
    node[CODE], node[1], node[2], node[3] = code, a, b, c
    return count


@njit
def _place(
    nodes: Any,
    arities: Any,
    root: int,
    instructions: Any,
    summary: Any,
    loads: Any,
    constants: Any,
    work: Any,
) -> None:
    """Give every node a place and emit its instruction: scalars in order, then the others."""
    scalars = 0
    load = 0
    emitted = 0
    for number in range(len(nodes)):
        node = nodes[number]
        code = node[CODE]
        node[_USES] = 0
        node[_DONE] = 0
        node[_NEED] = 0
        node[_PLACE] = _NO_PLACE
        if code == VARIABLE:
            node[_PLACE] = node[_OPERAND] << 2 | ROWS
        elif code in (PARAMETER, CONSTANT):
            node[_PLACE] = scalars << 2 | SCALAR
            loads[load, 0] = scalars
            loads[load, 1] = node[_OPERAND] if code == PARAMETER else -1
            constants[load] = node[_OPERAND : _OPERAND + 1].view(np.float64)[0]
            scalars += 1
            load += 1
        elif _is_scalar(nodes, node, arities[code]):
            node[_PLACE] = scalars << 2 | SCALAR
            scalars += 1
            _emit(nodes, node, arities[code], instructions[emitted])
            emitted += 1
        else:
            _count(nodes, node, arities[code], work)
    summary[INSTRUCTIONS_START] = 0
    summary[PROLOGUE_END] = emitted
    summary[SCALARS] = scalars
    summary[LOADS] = load
    emitted, summary[SLOTS] = _schedule(nodes, arities, root, instructions, emitted, work)
    summary[INSTRUCTIONS_END] = emitted


@njit
def _is_scalar(nodes: Any, node: Any, arity: int) -> bool:
    for k in range(arity):
        place = nodes[node[_OPERAND + k], _PLACE]
        if place == _NO_PLACE or place & 3 != SCALAR:
            return False
    return True


@njit
def _count(nodes: Any, node: Any, arity: int, order: Any) -> None:
    """Count the uses of the operands, and the slots that the node needs."""
    for k in range(arity):
        nodes[node[_OPERAND + k], _USES] += 1
    pending = _sorted_operands(nodes, node, arity, order)
    need = 1
    for k in range(pending):
        need = max(need, nodes[order[k], _NEED] + pending - 1 - k)
    node[_NEED] = need


@njit
def _sorted_operands(nodes: Any, node: Any, arity: int, order: Any) -> int:
    """List the operands that are results, the one that needs fewest slots first."""
    count = 0
    for k in range(arity):
        operand = node[_OPERAND + k]
        need = nodes[operand, _NEED]
        if need == 0:
            continue
        position = count
        while position > 0 and nodes[order[position - 1], _NEED] > need:
            order[position] = order[position - 1]
            position -= 1
        order[position] = operand
        count += 1
    return count


@njit
def _emit(nodes: Any, node: Any, arity: int, instruction: Any) -> None:
    instruction[CODE] = node[CODE]
    instruction[TARGET] = node[_PLACE]
    broadcast = 0
    for k in range(3):
        place = nodes[node[_OPERAND + k], _PLACE] if k < arity else 0
        instruction[FIRST + k] = place
        if k < arity and place & 3 == SCALAR:
            broadcast |= 1 << k
    instruction[BROADCAST] = broadcast


@njit
def _schedule(
    nodes: Any, arities: Any, root: int, instructions: Any, emitted: int, work: Any
) -> Any:
    """Emit the instructions of the root and all it depends on; return their end and the slots."""
    top = nodes[root]
    if top[_NEED] == 0:
        instruction = instructions[emitted]
        instruction[CODE] = COPY_CODE
        instruction[TARGET] = RESULT
        instruction[FIRST : FIRST + 3] = top[_PLACE]
        instruction[BROADCAST] = 1 if top[_PLACE] & 3 == SCALAR else 0
        return emitted + 1, 0
    # A node is visited twice: even entries of the agenda ask for its operands, odd ones emit it.
    free, agenda, order = work[: len(nodes)], work[len(nodes) : -3], work[-3:]
    slots = 0
    freed = 0
    agenda[0] = root << 1
    pending = 1
    while pending:
        pending -= 1
        number, ready = agenda[pending] >> 1, agenda[pending] & 1
        node = nodes[number]
        arity = arities[node[CODE]]
        if node[_DONE]:
            continue
        if not ready:
            agenda[pending] = number << 1 | 1
            pending += 1
            for k in range(_sorted_operands(nodes, node, arity, order)):
                agenda[pending] = order[k] << 1
                pending += 1
            continue
        freed = _release(nodes, node, arity, free, freed)
        if number == root:
            node[_PLACE] = RESULT
        elif freed:
            freed -= 1
            node[_PLACE] = free[freed] << 2 | SLOT
        else:
            node[_PLACE] = slots << 2 | SLOT
            slots += 1
        _emit(nodes, node, arity, instructions[emitted])
        node[_DONE] = 1
        emitted += 1
    return emitted, slots


@njit
def _release(nodes: Any, node: Any, arity: int, free: Any, freed: int) -> int:
    """Free the slots of the operands that are used for the last time."""
    for k in range(arity):
        operand = nodes[node[_OPERAND + k]]
        operand[_USES] -= 1
        if operand[_USES] == 0 and operand[_PLACE] & 3 == SLOT and operand[_NEED]:
            free[freed] = operand[_PLACE] >> 2
            freed += 1
    return freed
