"""The backward sweep over a program's nodes, compiled by Numba; see `differentiate`."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ops import CONSTANT, OPERATORS, PARAMETER, VARIABLE
from warpfit_server.engine.autodiff.rules import (
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
from warpfit_server.engine.lowering.lower import find_node, power_rewrites
from warpfit_server.engine.lowering.schedule import CODE, OPERAND, SUMMARY_COLUMNS, uncounted

#: Column of a program's summary: the first of its columns.
COLUMNS_START: Final = SUMMARY_COLUMNS
#: Columns of an entry: its column; the parameter, or -1 - the variable; the scalar's place index,
#: or -1 for a factor of 1.
ENTRY_COLUMN: Final = 0
ENTRY_LEAF: Final = 1
ENTRY_FACTOR: Final = 2
ENTRY_COLUMNS: Final = 3
#: Bits of ``wishes``.
BY_PARAMETERS: Final = 1
BY_VARIABLES: Final = 2
LOSS: Final = 4
"""The row loss itself is wanted, in the data's type."""
SLOPE: Final = 8
SQUARES: Final = 16
"""The row loss given is f - y, and what is summed is its square."""
_ADD: Final = OPERATORS["add"].code
_NEGATE: Final = OPERATORS["neg"].code
# Columns of a node's marks: whether it is the same for all rows, whether the derivative by it is
# wanted, its slope, its slope in the sweep of a scalar; a list of the nodes that wait in that one.
_STEADY, _WANTED, _MARK_SLOPE, _INNER, _WAITING, MARKS = 0, 1, 2, 3, 4, 5
NONE: Final = -1


class Tables(NamedTuple):
    """What lowering reads from the operator table."""

    arities: NDArray[np.int64]
    rewrites: NDArray[np.float64]
    rules: NDArray[np.int64]


@cache
def tables() -> Tables:
    """Read the operator table, once."""
    return Tables(arities().astype(np.int64), power_rewrites(), rules())


@uncounted
def loss_slope(
    nodes: Any, marks: Any, table: Any, mask: int, count: int, root: Any, loss: Any, one: Any,
    given: Any,
) -> Any:  # fmt: skip
    """Differentiate the row loss by the result; return the number of nodes and the slope.

    A loss that is a part of the program, such as a constant, comes before the result.
    """
    for number in range(max(loss, root) + 1):
        code = nodes[number, CODE]
        wanted = number == root
        for k in range(given.arities[code]):
            wanted = wanted or marks[nodes[number, OPERAND + k], _WANTED] == 1
        marks[number, _WANTED] = 1 if wanted and number >= root else 0
        marks[number, _INNER] = NONE
    marks[loss, _INNER] = one
    for reverse in range(loss - root):
        number = loss - reverse
        if marks[number, _INNER] != NONE and marks[number, _WANTED]:
            count = _pass_on(nodes, marks, np.int64(_INNER), number, table, mask, count, one, given)
    slope = marks[root, _INNER]
    if slope == NONE:
        slope = find_node(
            np.int64(CONSTANT), (np.int64(0), np.int64(-1), np.int64(-1)), nodes, table, mask, count
        )
        count = max(count, slope + 1)
    return count, slope


@uncounted
def mark_nodes(nodes: Any, marks: Any, count: int, arities: Any, wishes: int) -> None:
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
        marks[number, _MARK_SLOPE] = NONE
        marks[number, _INNER] = NONE


@uncounted
def sweep(
    nodes: Any, marks: Any, table: Any, mask: int, count: int, root: Any, one: Any, given: Any,
    columns: Any, entries: Any, ends: Any, summary: Any,
) -> int:  # fmt: skip
    """Sweep backward from the result; list columns and entries. Return the number of nodes."""
    marks[root, _MARK_SLOPE] = one
    for reverse in range(root + 1):
        number = root - reverse
        slope = marks[number, _MARK_SLOPE]
        if slope == NONE or marks[number, _WANTED] == 0:
            continue
        code = nodes[number, CODE]
        if marks[number, _STEADY] == 0 and code != VARIABLE:
            count = _pass_on(
                nodes, marks, np.int64(_MARK_SLOPE), number, table, mask, count, one, given
            )
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


@uncounted
def _sweep_scalar(
    nodes: Any, marks: Any, table: Any, mask: int, count: int, top: int, one: Any, given: Any,
    entries: Any, ends: Any, column: int,
) -> int:  # fmt: skip
    """Differentiate a scalar by its parameters; ``marks`` is left as it was found."""
    marks[top, _INNER] = one
    marks[0, _WAITING] = top
    waiting = 1
    while waiting:
        waiting -= 1
        number = marks[waiting, _WAITING]
        code = nodes[number, CODE]
        if code == PARAMETER:
            _add_entry(entries, ends, column, nodes[number, OPERAND], marks[number, _INNER])
        for k in range(given.arities[code]):
            operand = nodes[number, OPERAND + k]
            if marks[operand, _WANTED]:
                is_new = marks[operand, _INNER] == NONE
                count = _pass_to(
                    nodes, marks, np.int64(_INNER), number, k, table, mask, count, one, given
                )
                if is_new and marks[operand, _INNER] != NONE:
                    waiting = _wait(marks, waiting, operand)
        marks[number, _INNER] = NONE
    return count


@uncounted
def _wait(marks: Any, waiting: int, number: Any) -> int:
    """Insert a node into the ascending list of those that wait; return how many there are."""
    position = waiting
    while position > 0 and marks[position - 1, _WAITING] > number:
        marks[position, _WAITING] = marks[position - 1, _WAITING]
        position -= 1
    marks[position, _WAITING] = number
    return waiting + 1


@uncounted
def _add_entry(entries: Any, ends: Any, column: int, leaf: int, factor: Any) -> None:
    entries[ends[3], ENTRY_COLUMN] = column
    entries[ends[3], ENTRY_LEAF] = leaf
    entries[ends[3], ENTRY_FACTOR] = factor
    ends[3] += 1


@uncounted
def _pass_on(
    nodes: Any, marks: Any, which: Any, number: int, table: Any, mask: int, count: int, one: Any,
    given: Any,
) -> int:  # fmt: skip
    """Pass the slope of a node on to all its operands that it is wanted for."""
    for k in range(given.arities[nodes[number, CODE]]):
        if marks[nodes[number, OPERAND + k], _WANTED]:
            count = _pass_to(nodes, marks, which, number, k, table, mask, count, one, given)
    return count


@uncounted
def _pass_to(
    nodes: Any, marks: Any, which: Any, number: int, k: int, table: Any, mask: int, count: int,
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
        term = find_node(np.int64(_NEGATE), (slope, none, none), nodes, table, mask, count)
    elif rule[KIND] != PASSES:
        term, count = _product(nodes, number, slope, rule, table, mask, count, one)
    count = max(count, term + 1)
    operand = nodes[number, OPERAND + k]
    known = marks[operand, which]
    if known != NONE:
        term = find_node(np.int64(_ADD), (known, term, none), nodes, table, mask, count)
        count = max(count, term + 1)
    marks[operand, which] = term
    return count


@uncounted
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
    return find_node(
        np.int64(PRODUCT_CODE), (slope, partial, none), nodes, table, mask, count
    ), count


@uncounted
def _read(nodes: Any, number: int, rule: Any, index: int) -> Any:
    """Node that the partial of a node reads as its operand ``index``; -1 if it reads fewer."""
    if index >= rule[READS]:
        return np.int64(-1)
    which = rule[FIRST_READ + index]
    return np.int64(number) if which == 3 else nodes[number, OPERAND + which]
