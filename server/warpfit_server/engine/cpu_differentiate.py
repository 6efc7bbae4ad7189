"""Lowering of programs together with their derivatives, compiled by Numba.

A program has one result for each row, so one backward sweep over its nodes gives the derivative of
the result by every node (Griewank and Walther, Evaluating Derivatives, 2nd edition, chapter 3):

    slope[root] = 1
    for each node, from the root to the leaves:
        for each operand: slope[operand] += slope[node] * partial(node, operand)

The sweep runs once, here, on the nodes, not on numbers: each product becomes a node of the same
expression, beside the program's own. So the interpreter needs to know nothing of derivatives;
subexpressions that derivatives share are computed once, products with 1 and 0 never, and slots are
given out as for any program (`cpu_lower`).

The sweep stops at nodes that are the same for every row, such as a parameter or ``exp(p1)``: the
slope there is a *column*. How such a node depends on the parameters is the same for every row too:
its derivatives are *entries*, scalars by which sums over a column are multiplied at the end.

The row loss is numbered beside the program, over the program's result; a sweep of its own gives its
derivative by the result.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch, Program
from warpfit.ops import CONSTANT, OPERATORS, PARAMETER, VARIABLE
from warpfit_server.engine.cpu_lower import (
    CODE,
    GIVEN,
    INSTRUCTION_COLUMNS,
    INSTRUCTIONS_END,
    INSTRUCTIONS_START,
    LOADS,
    NEED,
    NODE_COLUMNS,
    OPERAND,
    PLACE,
    PROLOGUE_END,
    RESULT,
    SCALAR,
    SLOT,
    SLOTS,
    SUMMARY_COLUMNS,
    USES,
    emit_copy,
    find_node,
    inlined,
    number_tokens,
    place_scalars,
    power_rewrites,
    schedule,
    table_size,
)
from warpfit_server.engine.cpu_rules import (
    ALONE,
    COMPUTES,
    FIRST_READ,
    KIND,
    NEGATES,
    NOTHING,
    PASSES,
    PRODUCT_CODE,
    READS,
    SCALED,
    arities,
    rules,
)

# Columns of a program's summary, beside those of `cpu_lower`: where columns and entries start, and
# the places of the row loss and of its derivative by the result.
COLUMNS_START: Final = SUMMARY_COLUMNS
COLUMNS_END: Final = SUMMARY_COLUMNS + 1
ENTRIES_START: Final = SUMMARY_COLUMNS + 2
ENTRIES_END: Final = SUMMARY_COLUMNS + 3
LOSS_PLACE: Final = SUMMARY_COLUMNS + 4
SLOPE_PLACE: Final = SUMMARY_COLUMNS + 5
LONG_SUMMARY: Final = SUMMARY_COLUMNS + 6
#: Columns of an entry: its column; the parameter, or -1 - the variable; the scalar's place index,
#: or -1 for a factor of 1.
ENTRY_COLUMN: Final = 0
ENTRY_LEAF: Final = 1
ENTRY_FACTOR: Final = 2
#: Bits of ``wishes``.
BY_PARAMETERS: Final = 1
BY_VARIABLES: Final = 2
LOSS: Final = 4
SLOPE: Final = 8
SQUARES: Final = 16
"""The row loss given is f - y, and what is summed is its square."""
#: Nodes for each token, at most: itself; partial, product and sum for the slope of an operand, once
#: in the program's sweep and once in that of a scalar.
_NODES_A_TOKEN: Final = 7
_MORE_NODES: Final = 16
_ADD: Final = OPERATORS["add"].code
_NEGATE: Final = OPERATORS["neg"].code
# Columns of a node's marks: whether it is the same for all rows, whether the derivative by it is
# wanted, its slope, its slope in the sweep of a scalar.
_STEADY, _WANTED, _MARK_SLOPE, _INNER, _MARKS = 0, 1, 2, 3, 4
_NONE: Final = -1


class Differentiated(NamedTuple):
    """Instructions of a batch with derivatives; the first fields are those of `Lowered`."""

    instructions: NDArray[np.int64]
    """[capacity, INSTRUCTION_COLUMNS]."""
    summaries: NDArray[np.int64]
    """[programs, LONG_SUMMARY]."""
    loads: NDArray[np.int64]
    """Scalars to fill: place index and parameter index, -1 for a constant; [capacity, 2]."""
    constants: NDArray[np.float64]
    """Value of each load of a constant; [capacity]."""
    starts: NDArray[np.int64]
    """First load of each program; [programs + 1]."""
    columns: NDArray[np.int64]
    """Place of each column; [tokens]."""
    entries: NDArray[np.int64]
    """[2 tokens, 3]."""


class RowLoss(NamedTuple):
    """Tokens of a row loss, in which GIVEN is the result and variables are the data's columns."""

    codes: NDArray[np.uint8]
    values: NDArray[np.float64]


class Tables(NamedTuple):
    """What lowering reads from the operator table."""

    arities: NDArray[np.int8]
    rewrites: NDArray[np.float64]
    rules: NDArray[np.int64]


def tables() -> Tables:
    """Read the operator table."""
    return Tables(arities(), power_rewrites(), rules())


def empty(tokens: int, programs: int, loss_tokens: int) -> Differentiated:
    """Make room for a batch."""
    capacity = _NODES_A_TOKEN * (tokens + programs * loss_tokens) + _MORE_NODES * programs
    return Differentiated(
        np.empty((capacity, INSTRUCTION_COLUMNS), dtype=np.int64),
        np.empty((programs, LONG_SUMMARY), dtype=np.int64),
        np.empty((capacity, 2), dtype=np.int64),
        np.empty(capacity, dtype=np.float64),
        np.empty(programs + 1, dtype=np.int64),
        np.empty(tokens, dtype=np.int64),
        np.empty((2 * tokens, 3), dtype=np.int64),
    )


def row_loss_tokens(row_loss: Program, variables: int, *, weighted: bool) -> RowLoss:
    """Tie a row loss to the columns of a data set; its weight is 1 without weights."""
    codes, values = row_loss.codes.copy(), row_loss.values.copy()
    leaf = codes == VARIABLE
    codes[leaf & (row_loss.values == 0)] = GIVEN
    values[leaf & (row_loss.values > 0)] += variables - 1
    if not weighted:
        weight = leaf & (row_loss.values == 2)
        codes[weight], values[weight] = CONSTANT, 1.0
    return RowLoss(codes, values)


def no_row_loss() -> RowLoss:
    """Tokens for when no loss is wanted."""
    return RowLoss(np.empty(0, dtype=np.uint8), np.empty(0))


def lower_with_derivatives(
    compiled: Any, batch: Batch, row_loss: RowLoss, wishes: int
) -> Differentiated:
    """Lower a checked batch with the compiled `differentiate`."""
    lowered = empty(len(batch.codes), len(batch), len(row_loss.codes))
    codes, values = np.ascontiguousarray(batch.codes), np.ascontiguousarray(batch.values)
    compiled(codes, values, batch.starts, row_loss, tables(), wishes, lowered)
    return lowered


def differentiate(
    codes: Any, values: Any, starts: Any, row_loss: Any, given: Any, wishes: int, lowered: Any
) -> None:
    """Lower every program of a batch with its derivatives into ``lowered``."""
    longest = 1
    for program in range(len(starts) - 1):
        longest = max(longest, starts[program + 1] - starts[program])
    capacity = _NODES_A_TOKEN * (longest + len(row_loss.codes)) + _MORE_NODES
    nodes = np.empty((capacity, NODE_COLUMNS), dtype=np.int64)
    marks = np.empty((capacity, _MARKS), dtype=np.int64)
    stack = np.empty(longest + len(row_loss.codes), dtype=np.int64)
    table = np.empty(table_size(capacity), dtype=np.int64)
    work = np.empty(6 * capacity + 8, dtype=np.int64)
    bits, loss_bits = values.view(np.int64), row_loss.values.view(np.int64)
    ends = np.zeros(4, dtype=np.int64)
    for program in range(len(starts) - 1):
        start, stop = starts[program], starts[program + 1]
        needed = _NODES_A_TOKEN * (stop - start + len(row_loss.codes)) + _MORE_NODES
        mask = table_size(needed) - 1
        table[: mask + 1] = -1
        count = number_tokens(
            codes[start:stop], values[start:stop], bits[start:stop], given.arities,
            given.rewrites, nodes, stack, table, mask, 0, -1,
        )  # fmt: skip
        root = stack[0]
        loss = np.int64(_NONE)
        if wishes & LOSS:
            count = number_tokens(
                row_loss.codes, row_loss.values, loss_bits, given.arities, given.rewrites,
                nodes, stack, table, mask, count, root,
            )  # fmt: skip
            loss = stack[0]
        _lower_program(
            nodes, marks, table, mask, count, root, loss, wishes, given, lowered,
            lowered.summaries[program], ends, work,
        )  # fmt: skip
        lowered.starts[program + 1] = ends[1]
    lowered.starts[0] = 0


@inlined
def _lower_program(
    nodes: Any, marks: Any, table: Any, mask: int, count: int, root: Any, loss: Any, wishes: int,
    given: Any, lowered: Any, summary: Any, ends: Any, work: Any,
) -> None:  # fmt: skip
    """Add the nodes of the derivatives, then place and emit all nodes; ``ends`` are ends so far."""
    one_bits = np.ones(1).view(np.int64)[0]
    one = find_node(CONSTANT, (one_bits, np.int64(-1), np.int64(-1)), nodes, table, mask, count)
    count = max(count, one + 1)
    forward = count
    slope = loss
    if wishes & SLOPE and not wishes & SQUARES:
        count, slope = _loss_slope(nodes, marks, table, mask, count, root, loss, one, given)
    summary[COLUMNS_START], summary[ENTRIES_START] = ends[2], ends[3]
    if wishes & (BY_PARAMETERS | BY_VARIABLES):
        _mark(nodes, marks, forward, given.arities, wishes)
        count = _sweep(
            nodes, marks, table, mask, count, root, one, given, lowered.columns, lowered.entries,
            ends, summary,
        )  # fmt: skip
    summary[COLUMNS_END], summary[ENTRIES_END] = ends[2], ends[3]
    emitted = _emit_program(
        nodes[:count], given.arities, root, loss, slope, wishes, lowered, summary, ends, work
    )
    _name_factors(nodes, one, lowered.entries[summary[ENTRIES_START] : ends[3]])
    ends[0] += emitted


@inlined
def _loss_slope(
    nodes: Any, marks: Any, table: Any, mask: int, count: int, root: Any, loss: Any, one: Any,
    given: Any,
) -> Any:  # fmt: skip
    """Differentiate the row loss by the result; return the number of nodes and the slope."""
    for number in range(loss + 1):
        code = nodes[number, CODE]
        wanted = number == root
        for k in range(given.arities[code]):
            wanted = wanted or marks[nodes[number, OPERAND + k], _WANTED] == 1
        marks[number, _WANTED] = 1 if wanted and number >= root else 0
        marks[number, _INNER] = _NONE
    marks[loss, _INNER] = one
    for reverse in range(loss - root):
        number = loss - reverse
        if marks[number, _INNER] != _NONE and marks[number, _WANTED]:
            count = _pass_on(nodes, marks, _INNER, number, table, mask, count, one, given)
    slope = marks[root, _INNER]
    if slope == _NONE:
        slope = find_node(
            CONSTANT, (np.int64(0), np.int64(-1), np.int64(-1)), nodes, table, mask, count
        )
        count = max(count, slope + 1)
    return count, slope


@inlined
def _mark(nodes: Any, marks: Any, count: int, arities: Any, wishes: int) -> None:
    """Mark what is the same for all rows, and what the derivative is wanted by."""
    for number in range(count):
        code = nodes[number, CODE]
        steady = code != VARIABLE
        wanted = (code == PARAMETER and wishes & BY_PARAMETERS != 0) or (
            code == VARIABLE and wishes & BY_VARIABLES != 0
        )
        for k in range(arities[code]):
            operand = nodes[number, OPERAND + k]
            steady = steady and marks[operand, _STEADY] == 1
            wanted = wanted or marks[operand, _WANTED] == 1
        marks[number, _STEADY] = 1 if steady else 0
        marks[number, _WANTED] = 1 if wanted else 0
        marks[number, _MARK_SLOPE] = _NONE
        marks[number, _INNER] = _NONE


@inlined
def _sweep(
    nodes: Any, marks: Any, table: Any, mask: int, count: int, root: Any, one: Any, given: Any,
    columns: Any, entries: Any, ends: Any, summary: Any,
) -> int:  # fmt: skip
    """Sweep backward from the result; list columns and entries. Return the number of nodes."""
    marks[root, _MARK_SLOPE] = one
    for reverse in range(root + 1):
        number = root - reverse
        slope = marks[number, _MARK_SLOPE]
        if slope == _NONE or marks[number, _WANTED] == 0:
            continue
        code = nodes[number, CODE]
        if marks[number, _STEADY] == 0 and code != VARIABLE:
            count = _pass_on(nodes, marks, _MARK_SLOPE, number, table, mask, count, one, given)
            continue
        column = ends[2] - summary[COLUMNS_START]
        columns[ends[2]] = slope
        ends[2] += 1
        if code == VARIABLE:
            _add_entry(entries, ends, column, -1 - nodes[number, OPERAND], one)
        else:
            count = _sweep_scalar(
                nodes, marks, table, mask, count, number, one, given, entries, ends, column
            )
    return count


@inlined
def _sweep_scalar(
    nodes: Any, marks: Any, table: Any, mask: int, count: int, top: int, one: Any, given: Any,
    entries: Any, ends: Any, column: int,
) -> int:  # fmt: skip
    """Differentiate a scalar by its parameters; ``marks`` is left as it was found."""
    marks[top, _INNER] = one
    number = top
    waiting = 1
    while waiting:
        slope = marks[number, _INNER]
        if slope != _NONE:
            waiting -= 1
            code = nodes[number, CODE]
            if code == PARAMETER:
                _add_entry(entries, ends, column, nodes[number, OPERAND], slope)
            else:
                for k in range(given.arities[code]):
                    operand = nodes[number, OPERAND + k]
                    before = marks[operand, _INNER] == _NONE
                    if marks[operand, _WANTED]:
                        count = _pass_to(
                            nodes, marks, _INNER, number, k, table, mask, count, one, given
                        )
                    if before and marks[operand, _INNER] != _NONE:
                        waiting += 1
            marks[number, _INNER] = _NONE
        number -= 1
    return count


@inlined
def _add_entry(entries: Any, ends: Any, column: int, leaf: int, factor: Any) -> None:
    entries[ends[3], ENTRY_COLUMN] = column
    entries[ends[3], ENTRY_LEAF] = leaf
    entries[ends[3], ENTRY_FACTOR] = factor
    ends[3] += 1


@inlined
def _pass_on(
    nodes: Any, marks: Any, which: int, number: int, table: Any, mask: int, count: int, one: Any,
    given: Any,
) -> int:  # fmt: skip
    """Pass the slope of a node on to all its operands that it is wanted for."""
    for k in range(given.arities[nodes[number, CODE]]):
        if marks[nodes[number, OPERAND + k], _WANTED]:
            count = _pass_to(nodes, marks, which, number, k, table, mask, count, one, given)
    return count


@inlined
def _pass_to(
    nodes: Any, marks: Any, which: int, number: int, k: int, table: Any, mask: int, count: int,
    one: Any, given: Any,
) -> int:  # fmt: skip
    """Add slope times partial to the slope of operand k."""
    slope = marks[number, which]
    rule = given.rules[3 * nodes[number, CODE] + k]
    if rule[KIND] == NOTHING:
        return count
    none = np.int64(-1)
    term = slope
    if rule[KIND] == NEGATES:
        term = find_node(_NEGATE, (slope, none, none), nodes, table, mask, count)
    elif rule[KIND] != PASSES:
        term, count = _product(nodes, number, slope, rule, table, mask, count, one)
    count = max(count, term + 1)
    operand = nodes[number, OPERAND + k]
    known = marks[operand, which]
    if known != _NONE:
        term = find_node(_ADD, (known, term, none), nodes, table, mask, count)
        count = max(count, term + 1)
    marks[operand, which] = term
    return count


@inlined
def _product(
    nodes: Any, number: int, slope: Any, rule: Any, table: Any, mask: int, count: int, one: Any
) -> Any:
    """Find or make the node of slope times partial; return it and the number of nodes before it."""
    none = np.int64(-1)
    first = _read(nodes, number, rule, 0)
    second = _read(nodes, number, rule, 1)
    partial = first
    if rule[KIND] == COMPUTES:
        if slope != one and rule[SCALED]:
            operands = (slope, first, second)
            return find_node(rule[SCALED], operands, nodes, table, mask, count), count
        operands = (first, second, _read(nodes, number, rule, 2))
        partial = find_node(rule[ALONE], operands, nodes, table, mask, count)
        count = max(count, partial + 1)
    if slope == one:
        return partial, count
    return find_node(PRODUCT_CODE, (slope, partial, none), nodes, table, mask, count), count


@inlined
def _read(nodes: Any, number: int, rule: Any, index: int) -> Any:
    """Node that the partial of a node reads as its operand ``index``; -1 if it reads fewer."""
    if index >= rule[READS]:
        return np.int64(-1)
    which = rule[FIRST_READ + index]
    return np.int64(number) if which == 3 else nodes[number, OPERAND + which]


@inlined
def _emit_program(
    nodes: Any, arities: Any, root: Any, loss: Any, slope: Any, wishes: int, lowered: Any,
    summary: Any, ends: Any, work: Any,
) -> int:  # fmt: skip
    """Place and emit all nodes; return how many instructions there are."""
    instructions = lowered.instructions[ends[0] :]
    emitted = place_scalars(
        nodes, arities, instructions, summary, lowered.loads[ends[1] :],
        lowered.constants[ends[1] :], work,
    )  # fmt: skip
    ends[1] += summary[LOADS]
    columns = lowered.columns[summary[COLUMNS_START] : ends[2]]
    for column in columns:
        nodes[column, USES] += 1
    for kept in (loss, slope):
        if kept != _NONE:
            nodes[kept, USES] += 1
    freed = slots = 0
    if nodes[root, NEED]:
        emitted, freed, slots = schedule(
            nodes, arities, root, root, instructions, emitted, work, freed, slots
        )
    else:
        emit_copy(nodes[root, PLACE], RESULT, instructions, emitted)
        emitted += 1
    for kept in (loss, slope):
        if kept != _NONE and nodes[kept, NEED]:
            emitted, freed, slots = schedule(
                nodes, arities, kept, root, instructions, emitted, work, freed, slots
            )
    for column in columns:
        if nodes[column, NEED]:
            emitted, freed, slots = schedule(
                nodes, arities, column, root, instructions, emitted, work, freed, slots
            )
    for index in range(len(columns)):
        emitted, slots, columns[index] = _spread(
            nodes[columns[index], PLACE], instructions, emitted, slots
        )
    for column, kept in ((LOSS_PLACE, loss), (SLOPE_PLACE, slope)):
        if kept != _NONE:
            emitted, slots, summary[column] = _spread(
                nodes[kept, PLACE], instructions, emitted, slots
            )
    summary[SLOTS] = slots
    summary[INSTRUCTIONS_START] = ends[0]
    summary[PROLOGUE_END] += ends[0]
    summary[INSTRUCTIONS_END] = ends[0] + emitted
    return emitted


@inlined
def _spread(place: Any, instructions: Any, emitted: int, slots: int) -> Any:
    """Copy a scalar to rows of its own, for sums that read rows; return ends and the place."""
    if place & 3 != SCALAR:
        return emitted, slots, place
    target = slots << 2 | SLOT
    emit_copy(place, target, instructions, emitted)
    return emitted + 1, slots + 1, target


@inlined
def _name_factors(nodes: Any, one: Any, entries: Any) -> None:
    """Replace the node of each entry's factor by its scalar's index, or -1 for the node 1."""
    for index in range(len(entries)):
        factor = entries[index, ENTRY_FACTOR]
        entries[index, ENTRY_FACTOR] = -1 if factor == one else nodes[factor, PLACE] >> 2
