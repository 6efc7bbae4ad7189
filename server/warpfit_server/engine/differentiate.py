"""Lowering of programs together with their derivatives, compiled by Numba.

Threads take ranges of programs, and add what they have made of each behind all that is there.

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
from warpfit.ops import CONSTANT, VARIABLE
from warpfit_server.engine.calls import add_atomically
from warpfit_server.engine.cpu_lower import find_node, number_tokens, table_size
from warpfit_server.engine.cpu_pieces import (
    FAILED,
    FINISHED,
    numbers,
    octets,
    part,
    record_of,
    table,
    words,
)
from warpfit_server.engine.rules import RULE_COLUMNS
from warpfit_server.engine.schedule import (
    GIVEN,
    INSTRUCTION_COLUMNS,
    INSTRUCTIONS_END,
    INSTRUCTIONS_START,
    LOADS,
    NEED,
    NODE_COLUMNS,
    PLACE,
    PROLOGUE_END,
    RESULT,
    SCALAR,
    SLOT,
    SLOTS,
    SUMMARY_COLUMNS,
    USES,
    emit_copy,
    inlined,
    place_scalars,
    schedule,
)
from warpfit_server.engine.sweep import (
    BY_PARAMETERS,
    BY_VARIABLES,
    COLUMNS_START,
    ENTRY_COLUMNS,
    ENTRY_FACTOR,
    LOSS,
    MARKS,
    NONE,
    SLOPE,
    SQUARES,
    Tables,
    loss_slope,
    mark_nodes,
    sweep,
    tables,
)

# Columns of a program's summary, after COLUMNS_START: where columns and entries end, and the places
# of the row loss and of its derivative by the result, NONE for what is not wanted.
COLUMNS_END: Final = SUMMARY_COLUMNS + 1
ENTRIES_START: Final = SUMMARY_COLUMNS + 2
ENTRIES_END: Final = SUMMARY_COLUMNS + 3
LOSS_PLACE: Final = SUMMARY_COLUMNS + 4
SLOPE_PLACE: Final = SUMMARY_COLUMNS + 5
LONG_SUMMARY: Final = SUMMARY_COLUMNS + 6
#: Nodes for each token, at most: itself; partial, product and sum for the slope of an operand, once
#: in the program's sweep and once in that of a scalar.
_NODES_A_TOKEN: Final = 7
_MORE_NODES: Final = 16


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
    """First load of each program, and the end of the last one's; [programs + 1]."""
    columns: NDArray[np.int64]
    """Place of each column; [tokens]."""
    entries: NDArray[np.int64]
    """[2 tokens, ENTRY_COLUMNS]."""


class RowLoss(NamedTuple):
    """Tokens of a row loss, in which GIVEN is the result and variables are the data's columns."""

    codes: NDArray[np.uint8]
    values: NDArray[np.float64]


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
        np.empty((2 * tokens, ENTRY_COLUMNS), dtype=np.int64),
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
    function: Any, batch: Batch, row_loss: RowLoss, wishes: int
) -> Differentiated:
    """Lower a checked batch in one piece, with the compiled `differentiate_piece`.

    What is made of the programs lies in their order then.

    Raises:
        MemoryError: if there was none.

    """
    lowered = empty(len(batch.codes), len(batch), len(row_loss.codes))
    cells = np.array([[0, len(batch)]])
    arrays = arrays_of(batch, row_loss, wishes, cells, lowered)
    if function(record_of(arrays).ctypes.data, 0) == FAILED:
        raise MemoryError("no memory to lower a batch with its derivatives")
    return lowered


def arrays_of(
    batch: Batch,
    row_loss: RowLoss,
    wishes: int,
    cells: NDArray[np.int64],
    lowered: Differentiated,
) -> tuple[NDArray[Any], ...]:
    """Arrays of a record for `differentiate_piece`; ``cells`` are ranges of programs."""
    given = np.ascontiguousarray(batch.codes), np.ascontiguousarray(batch.values), batch.starts
    wishes_and_ends = np.array([wishes, 0, 0, 0, 0])
    return (cells, _ONE_SPAN, *given, *row_loss, *tables(), wishes_and_ends, *lowered)


#: Arrays of a record, in order; those of `Differentiated` begin with _LOWERED. Behind the wishes
#: are the ends of instructions, loads, columns and entries so far.
_CELLS, _SPANS, _CODES, _VALUES, _STARTS, _LOSS_CODES, _LOSS_VALUES = range(7)
_ARITIES, _REWRITES, _RULES, _WISHES, _LOWERED = range(7, 12)
_ONE_SPAN: Final = np.array([[0, 1]])


@inlined
def differentiated_of(record: int, index: int) -> Differentiated:
    """Arrays of a record from number ``index``."""
    return Differentiated(
        table(record, index, INSTRUCTION_COLUMNS),
        table(record, index + 1, LONG_SUMMARY),
        table(record, index + 2, 2),
        numbers(record, index + 3),
        words(record, index + 4),
        words(record, index + 5),
        table(record, index + 6, ENTRY_COLUMNS),
    )


def differentiate_piece(record: int, piece: int) -> int:
    """Lower a range of programs with their derivatives; see `cpu_pieces` and `arrays_of`."""
    programs, _, _ = part(table(record, _CELLS, 2), table(record, _SPANS, 2), piece)
    given = Tables(
        words(record, _ARITIES),
        numbers(record, _REWRITES).reshape((-1, 2)),
        table(record, _RULES, RULE_COLUMNS),
    )
    try:
        _differentiate(
            (octets(record, _CODES), numbers(record, _VALUES), words(record, _VALUES)),
            (
                octets(record, _LOSS_CODES), numbers(record, _LOSS_VALUES),
                words(record, _LOSS_VALUES),
            ),
            words(record, _STARTS), programs, given, words(record, _WISHES),
            differentiated_of(record, _LOWERED),
        )  # fmt: skip
    except Exception:  # compiled code tells exceptions apart no further: there is no memory
        return FAILED
    return FINISHED


@inlined
def _differentiate(
    tokens: Any, row_loss: Any, starts: Any, programs: Any, given: Any, wishes: Any, lowered: Any
) -> None:
    """Lower programs, a half-open range, one after the other.

    ``tokens`` and ``row_loss`` are codes, values, and the bits of the values; ``wishes`` is as in a
    record.
    """
    codes, values, bits = tokens
    loss_codes, loss_values, loss_bits = row_loss
    longest = 1
    for program in range(programs[0], programs[1]):
        longest = max(longest, starts[program + 1] - starts[program])
    capacity = _NODES_A_TOKEN * (longest + len(loss_codes)) + _MORE_NODES
    nodes = np.empty((capacity, NODE_COLUMNS), dtype=np.int64)
    marks = np.empty((capacity, MARKS), dtype=np.int64)
    stack = np.empty(longest + len(loss_codes), dtype=np.int64)
    known = np.empty(table_size(capacity), dtype=np.int64)
    work = np.empty(6 * capacity + 8, dtype=np.int64)
    own = Differentiated(
        np.empty((capacity, INSTRUCTION_COLUMNS), dtype=np.int64), lowered.summaries,
        np.empty((capacity, 2), dtype=np.int64), np.empty(capacity), lowered.starts,
        np.empty(longest, dtype=np.int64), np.empty((2 * longest, ENTRY_COLUMNS), dtype=np.int64),
    )  # fmt: skip
    ends = np.empty(4, dtype=np.int64)
    for program in range(programs[0], programs[1]):
        start, stop = starts[program], starts[program + 1]
        needed = _NODES_A_TOKEN * (stop - start + len(loss_codes)) + _MORE_NODES
        mask = table_size(needed) - 1
        known[: mask + 1] = -1
        count = number_tokens(
            codes[start:stop], values[start:stop], bits[start:stop], given.arities,
            given.rewrites, nodes, stack, known, mask, np.int64(0), np.int64(-1),
        )  # fmt: skip
        root = stack[0]
        loss = np.int64(NONE)
        if wishes[0] & (LOSS | SLOPE):
            count = number_tokens(
                loss_codes, loss_values, loss_bits, given.arities, given.rewrites,
                nodes, stack, known, mask, count, root,
            )  # fmt: skip
            loss = stack[0]
        ends[:] = 0
        _lower_program(
            nodes, marks, known, mask, count, root, loss, wishes[0], given, own,
            own.summaries[program], ends, work,
        )  # fmt: skip
        _append(own, ends, lowered, program, wishes)


@inlined
def _append(own: Any, ends: Any, lowered: Any, program: int, wishes: Any) -> None:
    """Put what was made of a program behind all that is there."""
    at = np.empty(4, dtype=np.int64)
    for kind in range(4):
        at[kind] = add_atomically(np.int64(wishes.ctypes.data + 8 * (1 + kind)), ends[kind])
    lowered.instructions[at[0] : at[0] + ends[0]] = own.instructions[: ends[0]]
    lowered.loads[at[1] : at[1] + ends[1]] = own.loads[: ends[1]]
    lowered.constants[at[1] : at[1] + ends[1]] = own.constants[: ends[1]]
    lowered.columns[at[2] : at[2] + ends[2]] = own.columns[: ends[2]]
    lowered.entries[at[3] : at[3] + ends[3]] = own.entries[: ends[3]]
    lowered.starts[program] = at[1]
    if program + 1 == len(lowered.summaries):
        lowered.starts[program + 1] = at[1] + ends[1]
    summary = lowered.summaries[program]
    for column in (INSTRUCTIONS_START, PROLOGUE_END, INSTRUCTIONS_END):
        summary[column] += at[0]
    for column in (COLUMNS_START, COLUMNS_END):
        summary[column] += at[2]
    for column in (ENTRIES_START, ENTRIES_END):
        summary[column] += at[3]


@inlined
def _lower_program(
    nodes: Any, marks: Any, table: Any, mask: int, count: int, root: Any, loss: Any, wishes: int,
    given: Any, lowered: Any, summary: Any, ends: Any, work: Any,
) -> None:  # fmt: skip
    """Add the nodes of the derivatives, then place and emit all nodes; ``ends`` are ends so far."""
    one_bits = np.ones(1).view(np.int64)[0]
    one = find_node(
        np.int64(CONSTANT), (one_bits, np.int64(-1), np.int64(-1)), nodes, table, mask, count
    )
    count = max(count, one + 1)
    forward = count
    slope = loss
    if wishes & SLOPE and not wishes & SQUARES:
        count, slope = loss_slope(nodes, marks, table, mask, count, root, loss, one, given)
    summary[COLUMNS_START], summary[ENTRIES_START] = ends[2], ends[3]
    if wishes & (BY_PARAMETERS | BY_VARIABLES):
        mark_nodes(nodes, marks, forward, given.arities, wishes)
        count = sweep(
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
    loss = loss if wishes & LOSS else np.int64(NONE)
    slope = slope if wishes & SLOPE else np.int64(NONE)
    for kept in (loss, slope):
        if kept != NONE:
            nodes[kept, USES] += 1
    freed = slots = np.int64(0)
    if nodes[root, NEED]:
        emitted, freed, slots = schedule(
            nodes, arities, root, root, instructions, emitted, work, freed, slots
        )
    else:
        emit_copy(nodes[root, PLACE], np.int64(RESULT), instructions, emitted)
        emitted += 1
    for kept in (loss, slope):
        if kept != NONE and nodes[kept, NEED]:
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
        summary[column] = NONE
        if kept != NONE:
            emitted, slots, summary[column] = _spread(
                nodes[kept, PLACE], instructions, emitted, slots
            )
    summary[SLOTS] = slots
    summary[INSTRUCTIONS_START] = ends[0]
    summary[PROLOGUE_END] += ends[0]
    summary[INSTRUCTIONS_END] = ends[0] + emitted
    return emitted


@inlined
def _spread(place: Any, instructions: Any, emitted: Any, slots: Any) -> Any:
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
