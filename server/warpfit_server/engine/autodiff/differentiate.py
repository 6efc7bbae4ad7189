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
given out as for any program (`lower`).

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
from warpfit_server.engine.autodiff.backward_sweep import (
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
from warpfit_server.engine.autodiff.rules import RULE_COLUMNS
from warpfit_server.engine.lowering.lower import find_node, number_tokens, table_size
from warpfit_server.engine.lowering.schedule import (
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
    uncounted,
)
from warpfit_server.engine.native.calls import add_atomically
from warpfit_server.engine.native.records import (
    FAILED,
    FINISHED,
    numbers,
    octets,
    part,
    table,
    words,
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


def room_for_nodes(tokens: int, programs: int, loss_tokens: int) -> int:
    """Return how many nodes, instructions or loads there are at most."""
    return _NODES_A_TOKEN * (tokens + programs * loss_tokens) + _MORE_NODES * programs


class RowLoss(NamedTuple):
    """Tokens of a row loss, in which GIVEN is the result and variables are the data's columns."""

    codes: NDArray[np.uint8]
    values: NDArray[np.float64]


def empty(tokens: int, programs: int, loss_tokens: int) -> Differentiated:
    """Make room for a batch."""
    capacity = room_for_nodes(tokens, programs, loss_tokens)
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


def arrays_of(
    batch: Batch,
    row_loss: RowLoss,
    wishes: int,
    cells: NDArray[np.int64],
    lowered: Differentiated,
) -> tuple[NDArray[Any], ...]:
    """Arrays of a record for `differentiate_piece`; ``cells`` are ranges of programs."""
    return (cells, _ONE_SPAN, *given_arrays(batch, row_loss, wishes), *lowered)


def given_arrays(batch: Batch, row_loss: RowLoss, wishes: int) -> tuple[NDArray[Any], ...]:
    """Arrays of a record from GIVEN_ARRAYS on, for `given_of`."""
    tokens = np.ascontiguousarray(batch.codes), np.ascontiguousarray(batch.values), batch.starts
    return (*tokens, *row_loss, *tables(), np.array([wishes, 0, 0, 0, 0]))


#: Arrays of a record, in order; those of `Differentiated` begin with _LOWERED. Behind the wishes
#: are the ends of instructions, loads, columns and entries so far.
_CELLS, _SPANS, _CODES, _VALUES, _STARTS, _LOSS_CODES, _LOSS_VALUES = range(7)
_ARITIES, _REWRITES, _RULES, _WISHES, _LOWERED = range(7, 12)
GIVEN_ARRAYS: Final = _CODES
AFTER_GIVEN: Final = _LOWERED
_ONE_SPAN: Final = np.array([[0, 1]])
_ONE_BITS: Final = int(np.ones(1).view(np.int64)[0])


class Given(NamedTuple):
    """The programs to lower, as arrays for compiled code; ``bits`` are the bits of the values."""

    codes: Any
    values: Any
    bits: Any
    starts: Any
    loss_codes: Any
    loss_values: Any
    loss_bits: Any
    tables: Tables
    wishes: Any
    """See _WISHES."""


class Scratch(NamedTuple):
    """Memory of a thread for one program at a time, in compiled code."""

    nodes: Any
    marks: Any
    stack: Any
    known: Any
    work: Any
    ends: Any
    """Instructions, loads, columns and entries of the program, int64 [4]."""
    made: Differentiated
    """Of the program alone."""


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


@inlined
def given_of(record: int) -> Given:
    """Arrays of a record that `given_arrays` has listed."""
    return Given(
        octets(record, _CODES), numbers(record, _VALUES), words(record, _VALUES),
        words(record, _STARTS),
        octets(record, _LOSS_CODES), numbers(record, _LOSS_VALUES), words(record, _LOSS_VALUES),
        Tables(
            words(record, _ARITIES),
            numbers(record, _REWRITES).reshape((-1, 2)),
            table(record, _RULES, RULE_COLUMNS),
        ),
        words(record, _WISHES),
    )  # fmt: skip


@inlined
def scratch_for(given: Given, first: int, stop: int) -> Scratch:
    """Allocate the memory to lower each program of a range."""
    longest = 1
    for program in range(first, stop):
        longest = max(longest, given.starts[program + 1] - given.starts[program])
    longest_both = longest + len(given.loss_codes)
    capacity = _NODES_A_TOKEN * longest_both + _MORE_NODES
    return Scratch(
        np.empty((capacity, NODE_COLUMNS), dtype=np.int64),
        np.empty((capacity, MARKS), dtype=np.int64),
        np.empty(longest_both, dtype=np.int64),
        np.empty(table_size(capacity), dtype=np.int64),
        np.empty(6 * capacity + 8, dtype=np.int64),
        np.empty(4, dtype=np.int64),
        Differentiated(
            np.empty((capacity, INSTRUCTION_COLUMNS), dtype=np.int64),
            np.empty((1, LONG_SUMMARY), dtype=np.int64),
            np.empty((capacity, 2), dtype=np.int64), np.empty(capacity),
            np.empty(0, dtype=np.int64), np.empty(longest, dtype=np.int64),
            np.empty((2 * longest, ENTRY_COLUMNS), dtype=np.int64),
        ),
    )  # fmt: skip


def differentiate_piece(record: int, piece: int) -> int:
    """Lower a range of programs with their derivatives; see `records` and `arrays_of`."""
    programs, _, _ = part(table(record, _CELLS, 2), table(record, _SPANS, 2), piece)
    given, lowered = given_of(record), differentiated_of(record, _LOWERED)
    try:
        scratch = scratch_for(given, programs[0], programs[1])
        for program in range(programs[0], programs[1]):
            differentiate_program(given, scratch, program)
            _append(given, scratch.made, scratch.ends, lowered, program)
    except Exception:  # compiled code tells exceptions apart no further: there is no memory
        return FAILED
    return FINISHED


@uncounted
def differentiate_program(given: Given, scratch: Scratch, program: int) -> None:
    """Lower one program into ``scratch.made``, from the beginning of each of its arrays."""
    start, stop = given.starts[program], given.starts[program + 1]
    needed = _NODES_A_TOKEN * (stop - start + len(given.loss_codes)) + _MORE_NODES
    mask = table_size(needed) - 1
    nodes, stack, known = scratch.nodes, scratch.stack, scratch.known
    for index in range(mask + 1):
        known[index] = -1
    count = number_tokens(
        given.codes[start:stop], given.values[start:stop], given.bits[start:stop],
        given.tables.arities, given.tables.rewrites, nodes, stack, known, mask,
        np.int64(0), np.int64(-1),
    )  # fmt: skip
    root = stack[0]
    loss = np.int64(NONE)
    if given.wishes[0] & (LOSS | SLOPE):
        count = number_tokens(
            given.loss_codes, given.loss_values, given.loss_bits, given.tables.arities,
            given.tables.rewrites, nodes, stack, known, mask, count, root,
        )  # fmt: skip
        loss = stack[0]
    for kind in range(4):
        scratch.ends[kind] = 0
    _lower_program(
        nodes, scratch.marks, known, mask, count, root, loss, given.wishes[0], given.tables,
        scratch.made, scratch.made.summaries[0], scratch.ends, scratch.work,
    )  # fmt: skip


@uncounted
def room_behind(given: Given, kind: int, count: int) -> Any:
    """Take room behind what all threads have made of a kind, see `Scratch.ends`."""
    return add_atomically(np.int64(given.wishes.ctypes.data + 8 * (1 + kind)), np.int64(count))


@uncounted
def _append(
    given: Given, made: Differentiated, ends: Any, lowered: Differentiated, program: int
) -> None:
    """Put what was made of a program behind all that is there."""
    first, load = room_behind(given, 0, ends[0]), room_behind(given, 1, ends[1])
    column, entry = room_behind(given, 2, ends[2]), room_behind(given, 3, ends[3])
    for index in range(ends[0]):
        for k in range(INSTRUCTION_COLUMNS):
            lowered.instructions[first + index, k] = made.instructions[index, k]
    for index in range(ends[1]):
        lowered.loads[load + index, 0] = made.loads[index, 0]
        lowered.loads[load + index, 1] = made.loads[index, 1]
        lowered.constants[load + index] = made.constants[index]
    for index in range(ends[2]):
        lowered.columns[column + index] = made.columns[index]
    for index in range(ends[3]):
        for k in range(ENTRY_COLUMNS):
            lowered.entries[entry + index, k] = made.entries[index, k]
    lowered.starts[program] = load
    if program + 1 == len(lowered.summaries):
        lowered.starts[program + 1] = load + ends[1]
    summary = lowered.summaries[program]
    for k in range(LONG_SUMMARY):
        summary[k] = made.summaries[0, k]
    for k in (INSTRUCTIONS_START, PROLOGUE_END, INSTRUCTIONS_END):
        summary[k] += first
    for k in (COLUMNS_START, COLUMNS_END):
        summary[k] += column
    for k in (ENTRIES_START, ENTRIES_END):
        summary[k] += entry


@uncounted
def _lower_program(
    nodes: Any, marks: Any, table: Any, mask: int, count: int, root: Any, loss: Any, wishes: int,
    given: Any, lowered: Any, summary: Any, ends: Any, work: Any,
) -> None:  # fmt: skip
    """Add the nodes of the derivatives, then place and emit all nodes; ``ends`` are ends so far."""
    one = find_node(
        np.int64(CONSTANT), (np.int64(_ONE_BITS), np.int64(-1), np.int64(-1)),
        nodes, table, mask, count,
    )  # fmt: skip
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


@uncounted
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


@uncounted
def _spread(place: Any, instructions: Any, emitted: Any, slots: Any) -> Any:
    """Copy a scalar to rows of its own, for sums that read rows; return ends and the place."""
    if place & 3 != SCALAR:
        return emitted, slots, place
    target = slots << 2 | SLOT
    emit_copy(place, target, instructions, emitted)
    return emitted + 1, slots + 1, target


@uncounted
def _name_factors(nodes: Any, one: Any, entries: Any) -> None:
    """Replace the node of each entry's factor by its scalar's index, or -1 for the node 1."""
    for index in range(len(entries)):
        factor = entries[index, ENTRY_FACTOR]
        entries[index, ENTRY_FACTOR] = -1 if factor == one else nodes[factor, PLACE] >> 2
