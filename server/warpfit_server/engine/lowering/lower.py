"""Lowering: postfix tokens to the instructions that the interpreter runs, compiled by Numba.

Each program has its own part of the results, so threads take ranges of programs.

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

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ops import ARITIES, CONSTANT, OPERATORS
from warpfit_server.engine.lowering.schedule import (
    CODE,
    GIVEN,
    INSTRUCTION_COLUMNS,
    INSTRUCTIONS_END,
    INSTRUCTIONS_START,
    NEED,
    NODE_COLUMNS,
    OPERAND,
    PLACE,
    PROLOGUE_END,
    RESULT,
    SLOTS,
    SUMMARY_COLUMNS,
    emit_copy,
    inlined,
    place_scalars,
    schedule,
    uncounted,
)
from warpfit_server.engine.native.records import (
    FAILED,
    FINISHED,
    numbers,
    octets,
    part,
    table,
    words,
)


class Lowered(NamedTuple):
    """Instructions of a batch; compiled code reads it by name, too."""

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


def empty(tokens: int, starts: NDArray[np.int64]) -> Lowered:
    """Make room for a batch with this many tokens."""
    return Lowered(
        np.empty((tokens + len(starts) - 1, INSTRUCTION_COLUMNS), dtype=np.int64),
        np.empty((len(starts) - 1, SUMMARY_COLUMNS), dtype=np.int64),
        np.empty((tokens, 2), dtype=np.int64),
        np.empty(tokens, dtype=np.float64),
        starts,
    )


def power_rewrites() -> NDArray[np.float64]:
    """Operators that equal a power with a constant exponent: rows (exponent, code)."""
    rows = [(2.0, "square"), (3.0, "cube"), (-1.0, "inv")]
    return np.array([(exponent, OPERATORS[name].code) for exponent, name in rows])


#: Arrays of a record that are the same for all batches.
TABLES: Final = ARITIES.astype(np.int64), power_rewrites()
#: Arrays of a record, in order; those of `Lowered` begin with _LOWERED.
_CELLS, _SPANS, _CODES, _VALUES, _ARITIES, _REWRITES, _LOWERED = range(7)


@inlined
def lowered_of(record: int, index: int) -> Lowered:
    """Arrays of a record from number ``index``."""
    return Lowered(
        table(record, index, INSTRUCTION_COLUMNS),
        table(record, index + 1, SUMMARY_COLUMNS),
        table(record, index + 2, 2),
        numbers(record, index + 3),
        words(record, index + 4),
    )


def lower_piece(record: int, piece: int) -> int:
    """Lower a range of programs; see `records`.

    The cells of a record are programs, and there is one span; codes and values are those of the
    batch, then come TABLES, and `Lowered`, of which the starts are given.
    """
    programs, _, _ = part(table(record, _CELLS, 2), table(record, _SPANS, 2), piece)
    try:
        _lower(
            octets(record, _CODES), numbers(record, _VALUES), words(record, _VALUES),
            words(record, _ARITIES), numbers(record, _REWRITES).reshape((-1, 2)),
            programs, lowered_of(record, _LOWERED),
        )  # fmt: skip
    except Exception:  # compiled code tells exceptions apart no further: there is no memory
        return FAILED
    return FINISHED


_POWER_CODE: Final = OPERATORS["pow"].code


@inlined
def _lower(
    codes: Any, values: Any, bits: Any, arities: Any, rewrites: Any, programs: Any, lowered: Any
) -> None:
    """Lower programs, a half-open range; ``bits`` are those of the values."""
    starts, summaries = lowered.starts, lowered.summaries
    longest = 1
    for program in range(programs[0], programs[1]):
        longest = max(longest, starts[program + 1] - starts[program])
    nodes = np.empty((longest, NODE_COLUMNS), dtype=np.int64)
    stack = np.empty(longest, dtype=np.int64)
    known = np.empty(table_size(longest), dtype=np.int64)
    work = np.empty(6 * longest + 8, dtype=np.int64)
    for program in range(programs[0], programs[1]):
        start, stop = starts[program], starts[program + 1]
        mask = table_size(stop - start) - 1
        known[: mask + 1] = -1
        count = number_tokens(
            codes[start:stop], values[start:stop], bits[start:stop], arities, rewrites,
            nodes, stack, known, mask, 0, -1,
        )  # fmt: skip
        first = start + program
        _place(
            nodes[:count],
            arities,
            stack[0],
            lowered.instructions[first : stop + program + 1],
            summaries[program],
            lowered.loads[start:stop],
            lowered.constants[start:stop],
            work,
        )
        for column in (INSTRUCTIONS_START, PROLOGUE_END, INSTRUCTIONS_END):
            summaries[program, column] += first


@uncounted
def table_size(tokens: int) -> int:
    size = 4
    while size < 2 * tokens:
        size *= 2
    return size


@uncounted
def number_tokens(
    codes: Any,
    values: Any,
    bits: Any,
    arities: Any,
    rewrites: Any,
    nodes: Any,
    stack: Any,
    table: Any,
    mask: int,
    count: Any,
    given: Any,
) -> Any:
    """Turn tokens into distinct nodes, beside ``count`` that there are; return the new number.

    stack[0] is then the root's number. A token GIVEN stands for the node number ``given``.
    """
    height = 0
    for token in range(len(codes)):
        code = np.int64(codes[token])
        if code == GIVEN:
            stack[height] = given
            height += 1
            continue
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
        number = find_node(code, operands, nodes, table, mask, count)
        count = max(count, number + 1)
        stack[height] = number
        height += 1
    return count


@uncounted
def _rewrite(code: Any, operands: Any, nodes: Any, rewrites: Any) -> Any:
    """Replace a power whose exponent is one of the constants of ``rewrites``."""
    exponent = operands[1]
    if nodes[exponent, CODE] == CONSTANT:
        value = nodes[exponent, OPERAND : OPERAND + 1].view(np.float64)[0]
        for row in range(len(rewrites)):
            if rewrites[row, 0] == value:
                return np.int64(rewrites[row, 1]), (operands[0], np.int64(-1), np.int64(-1))
    return code, operands


@uncounted
def find_node(code: Any, operands: Any, nodes: Any, table: Any, mask: int, count: int) -> Any:
    """Find the node with this code and these operands, or make it as number ``count``."""
    a, b, c = operands
    key = np.uint64(code) * np.uint64(0x9E3779B97F4A7C15)
    for operand in (a, b, c):
        key = (key ^ np.uint64(operand)) * np.uint64(0xFF51AFD7ED558CCD)
        key ^= key >> np.uint64(32)
    index = np.int64(key & np.uint64(mask))
    while table[index] >= 0:
        known = table[index]
        if (
            nodes[known, CODE] == code
            and nodes[known, OPERAND] == a
            and nodes[known, OPERAND + 1] == b
            and nodes[known, OPERAND + 2] == c
        ):
            return known
        index = (index + 1) & mask
    table[index] = count
    nodes[count, CODE] = code
    for k, operand in enumerate(operands):
        nodes[count, OPERAND + k] = operand
    return count


@uncounted
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
    emitted = place_scalars(nodes, arities, instructions, summary, loads, constants, work)
    if nodes[root, NEED]:
        emitted, _, summary[SLOTS] = schedule(
            nodes, arities, root, root, instructions, emitted, work, 0, 0
        )
    else:
        emit_copy(nodes[root, PLACE], RESULT, instructions, emitted)
        emitted += 1
        summary[SLOTS] = 0
    summary[INSTRUCTIONS_END] = emitted
