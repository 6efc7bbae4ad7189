"""The backward pass over the nodes of a program, compiled by Numba; see `differentiate`."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from warpfit.ops import OPERATORS, PARAMETER, VARIABLE
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
)
from warpfit_server.engine.lowering.graph import Graph, constant_node, find_node
from warpfit_server.engine.lowering.lowered import NONE, Lowered
from warpfit_server.engine.native.intrinsics import uncounted

#: Bits of what is requested: derivatives by parameters, and by variables; the row loss, in the
#: data's type; the derivative of the row loss by the result. SQUARES says that the row loss given
#: is f - y, and that what is summed is its square.
BY_PARAMETERS, BY_VARIABLES, LOSS, LOSS_DERIVATIVE, SQUARES = 1, 2, 4, 8, 16
_ADD: Final = OPERATORS["add"].code
_NEGATE: Final = OPERATORS["neg"].code


class Pass(NamedTuple):
    """A graph with what backward passes note for each of its nodes, int64 [nodes]."""

    graph: Graph
    rules: Any
    """See `rules.rules`."""
    one: Any
    """The node of the constant 1, int64 [1]."""
    uniform: Any
    """Whether the node is the same for all rows."""
    active: Any
    """Whether derivatives by the node are needed."""
    adjoints: Any
    """Node of the derivative of the result by the node; NONE where nothing has come yet."""
    inner: Any
    """The same in the passes over the row loss, and over what is the same for all rows."""
    waiting: Any
    """Nodes that wait in the latter pass, in ascending order."""


@uncounted
def differentiate_loss(state: Pass, loss: Any, root: Any) -> Any:
    """Return the node of the derivative of the row loss by the program's result.

    A loss that is a part of the program, such as a constant, comes before the result.
    """
    graph = state.graph
    for number in range(max(loss, root) + 1):
        depends = number == root or _has_active_operand(state, number)
        state.active[number] = 1 if depends and number >= root else 0
        state.inner[number] = NONE
    state.inner[loss] = state.one[0]
    for number in range(loss, root, -1):
        if state.inner[number] != NONE and state.active[number]:
            _propagate(state, state.inner, number)
    if state.inner[root] == NONE:
        return constant_node(graph, 0.0)
    return state.inner[root]


@uncounted
def mark_nodes(state: Pass, count: int, requested: int) -> None:
    """Mark the nodes that are the same for all rows, and those that derivatives pass through.

    ``count`` nodes come before those of derivatives.
    """
    graph = state.graph
    for number in range(count):
        node = graph.nodes[number]
        uniform = node.code != VARIABLE
        for k in range(graph.arities[node.code]):
            uniform = uniform and state.uniform[node.operands[k]] == 1
        is_leaf = (node.code == PARAMETER and requested & BY_PARAMETERS != 0) or (
            node.code == VARIABLE and requested & BY_VARIABLES != 0
        )
        state.uniform[number] = 1 if uniform else 0
        state.active[number] = 1 if is_leaf or _has_active_operand(state, number) else 0
        state.adjoints[number] = state.inner[number] = NONE


@uncounted
def _has_active_operand(state: Pass, number: int) -> bool:
    found = False
    node = state.graph.nodes[number]
    for k in range(state.graph.arities[node.code]):
        found = found or state.active[node.operands[k]] == 1
    return found


@uncounted
def run_backward(state: Pass, root: Any, out: Lowered, header: Any) -> None:
    """Run the backward pass from the result; list columns, as nodes, and entries."""
    graph = state.graph
    state.adjoints[root] = state.one[0]
    for number in range(root, -1, -1):
        adjoint = state.adjoints[number]
        if adjoint == NONE or not state.active[number]:
            continue
        node = graph.nodes[number]
        if not state.uniform[number] and node.code != VARIABLE:
            _propagate(state, state.adjoints, number)
            continue
        out.columns[header.first_column + header.columns] = adjoint
        header.columns += 1
        if node.code == VARIABLE:
            _add_entry(out, header, -1 - node.operands[0], state.one[0])
        else:
            _differentiate_scalar(state, number, out, header)


@uncounted
def _differentiate_scalar(state: Pass, top: Any, out: Lowered, header: Any) -> None:
    """List the derivatives of a scalar as entries of the last column; ``inner`` ends as it was."""
    graph, waiting = state.graph, state.waiting
    state.inner[top] = state.one[0]
    waiting[0] = top
    count = 1
    while count:
        count -= 1
        number = waiting[count]
        node = graph.nodes[number]
        if node.code == PARAMETER:
            _add_entry(out, header, node.operands[0], state.inner[number])
        for k in range(graph.arities[node.code]):
            operand = node.operands[k]
            if state.active[operand]:
                is_new = state.inner[operand] == NONE
                _propagate_to(state, state.inner, number, k)
                if is_new and state.inner[operand] != NONE:
                    count = _insert(waiting, count, operand)
        state.inner[number] = NONE


@uncounted
def _insert(waiting: Any, count: int, number: Any) -> int:
    """Insert a node into the ascending list; return its new length."""
    position = count
    while position > 0 and waiting[position - 1] > number:
        waiting[position] = waiting[position - 1]
        position -= 1
    waiting[position] = number
    return count + 1


@uncounted
def _add_entry(out: Lowered, header: Any, leaf: int, factor: Any) -> None:
    """Add an entry of the last column."""
    entry = out.entries[header.first_entry + header.entries]
    entry.column, entry.leaf, entry.factor = header.columns - 1, leaf, factor
    header.entries += 1


@uncounted
def _propagate(state: Pass, adjoints: Any, number: int) -> None:
    """Propagate the adjoint of a node to all its active operands."""
    node = state.graph.nodes[number]
    for k in range(state.graph.arities[node.code]):
        if state.active[node.operands[k]]:
            _propagate_to(state, adjoints, number, k)


@uncounted
def _propagate_to(state: Pass, adjoints: Any, number: int, k: int) -> None:
    """Add adjoint times partial derivative to the adjoint of operand k."""
    graph, none = state.graph, np.int64(NONE)
    node = graph.nodes[number]
    rule = state.rules[3 * node.code + k]
    if rule[KIND] == NOTHING:
        return
    term = adjoints[number]
    if rule[KIND] == NEGATES:
        term = find_node(graph, np.int64(_NEGATE), term, none, none)
    elif rule[KIND] != PASSES:
        term = _multiply_partial(state, number, term, rule)
    operand = node.operands[k]
    if adjoints[operand] != NONE:
        term = find_node(graph, np.int64(_ADD), adjoints[operand], term, none)
    adjoints[operand] = term


@uncounted
def _multiply_partial(state: Pass, number: int, adjoint: Any, rule: Any) -> Any:
    """Return the node of adjoint times partial derivative."""
    graph, one = state.graph, state.one[0]
    first, second = _read(graph, number, rule, 0), _read(graph, number, rule, 1)
    partial = first
    if rule[KIND] == COMPUTES:
        if adjoint != one and rule[SCALED]:
            return find_node(graph, rule[SCALED], adjoint, first, second)
        partial = find_node(graph, rule[ALONE], first, second, _read(graph, number, rule, 2))
    if adjoint == one:
        return partial
    return find_node(graph, np.int64(PRODUCT_CODE), adjoint, partial, np.int64(NONE))


@uncounted
def _read(graph: Graph, number: int, rule: Any, index: int) -> Any:
    """Return the node that a partial derivative reads as its operand ``index``, or NONE."""
    if index >= rule[READS]:
        return np.int64(NONE)
    which = rule[FIRST_READ + index]
    return np.int64(number) if which == 3 else graph.nodes[number].operands[which]
