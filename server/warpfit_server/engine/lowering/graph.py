"""Value numbering: postfix tokens as the nodes of an expression graph, compiled by Numba.

Nodes are numbered in the order in which they are made, operands before what uses them. What is
computed twice is one node: nodes are found by code and operands in a hash table.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from warpfit.ops import CONSTANT, OPERATORS
from warpfit_server.engine.lowering.lowered import NONE
from warpfit_server.engine.native import intrinsics

#: Code of a token in a row loss that is the result of the program before it.
PREDICTION: Final = 0
_POWER_CODE, _SQUARE_CODE, _CUBE_CODE, _INVERSE_CODE = (
    OPERATORS[name].code for name in ("pow", "square", "cube", "inv")
)
#: Code; numbers of the operands (of a leaf, the index, or the bits of the constant, comes first);
#: slots that the node needs (0 for leaves and scalars); uses that are left; location; whether the
#: instruction is there.
NODE: Final = np.dtype(
    [
        ("code", np.int64),
        ("operands", np.int64, 3),
        *((name, np.int64) for name in ("slots", "uses", "location", "emitted")),
    ]
)


class Graph(NamedTuple):
    """Nodes of one program at a time, in compiled code."""

    nodes: Any
    size: Any
    """Number of nodes, int64 [1]."""
    table: Any
    """Numbers of nodes by the hash of what they are; NONE where there is none."""
    mask: Any
    """Entries of the table that are used, less 1, int64 [1]."""
    stack: Any
    arities: Any
    """Number of operands by code, int64."""


@intrinsics.inlined
def new_graph(nodes: int, tokens: int, arities: Any) -> Graph:
    """Allocate a graph for programs of so many nodes and tokens at most."""
    return Graph(
        np.empty(nodes, dtype=NODE),
        np.zeros(1, dtype=np.int64),
        np.empty(_table_size(nodes), dtype=np.int64),
        np.zeros(1, dtype=np.int64),
        np.empty(tokens, dtype=np.int64),
        arities,
    )


@intrinsics.uncounted
def clear(graph: Graph, nodes: int) -> None:
    """Empty a graph for a program of at most so many nodes."""
    size = _table_size(nodes)
    for index in range(size):
        graph.table[index] = NONE
    graph.mask[0] = size - 1
    graph.size[0] = 0


@intrinsics.uncounted
def _table_size(nodes: int) -> int:
    size = 4
    while size < 2 * nodes:
        size *= 2
    return size


@intrinsics.uncounted
def number_tokens(graph: Graph, codes: Any, values: Any, prediction: Any) -> Any:
    """Add the nodes of postfix tokens; return the root.

    A token PREDICTION stands for the node ``prediction``.
    """
    stack, height = graph.stack, 0
    for token in range(len(codes)):
        code = np.int64(codes[token])
        if code == PREDICTION:
            stack[height] = prediction
            height += 1
            continue
        arity = graph.arities[code]
        first, second, third = np.int64(NONE), np.int64(NONE), np.int64(NONE)
        if arity > 0:
            height -= arity
            first = stack[height]
            second = stack[height + 1] if arity > 1 else second
            third = stack[height + 2] if arity > 2 else third
        else:
            value = values[token]
            first = np.float64(value).view(np.int64) if code == CONSTANT else np.int64(value)
        if code == _POWER_CODE:
            stack[height] = _power_node(graph, first, second)
        else:
            stack[height] = find_node(graph, code, first, second, third)
        height += 1
    return stack[0]


@intrinsics.uncounted
def _power_node(graph: Graph, base: Any, exponent: Any) -> Any:
    """Return the node of a power, or of products or a quotient that equal it."""
    none = np.int64(NONE)
    if graph.nodes[exponent].code == CONSTANT:
        value = np.int64(graph.nodes[exponent].operands[0]).view(np.float64)
        if value == 1.0:
            return base
        if value == 3.0:
            return find_node(graph, np.int64(_CUBE_CODE), base, none, none)
        if value in (-1.0, -2.0):
            base = find_node(graph, np.int64(_INVERSE_CODE), base, none, none)
        if value == 4.0:
            base = find_node(graph, np.int64(_SQUARE_CODE), base, none, none)
        if value in (2.0, -2.0, 4.0):
            return find_node(graph, np.int64(_SQUARE_CODE), base, none, none)
        if value == -1.0:
            return base
    return find_node(graph, np.int64(_POWER_CODE), base, exponent, none)


@intrinsics.uncounted
def constant_node(graph: Graph, value: float) -> Any:
    """Return the node of a constant."""
    bits, none = np.float64(value).view(np.int64), np.int64(NONE)
    return find_node(graph, np.int64(CONSTANT), bits, none, none)


@intrinsics.uncounted
def find_node(graph: Graph, code: Any, a: Any, b: Any, c: Any) -> Any:
    """Return the node with this code and these operands, which is made if it is new."""
    key = np.uint64(code) * np.uint64(0x9E3779B97F4A7C15)
    for operand in (a, b, c):
        key = (key ^ np.uint64(operand)) * np.uint64(0xFF51AFD7ED558CCD)
        key ^= key >> np.uint64(32)
    index = np.int64(key & np.uint64(graph.mask[0]))
    while graph.table[index] >= 0:
        known = graph.nodes[graph.table[index]]
        if (
            known.code == code
            and known.operands[0] == a
            and known.operands[1] == b
            and known.operands[2] == c
        ):
            return graph.table[index]
        index = (index + 1) & graph.mask[0]
    number = graph.size[0]
    graph.size[0] = number + 1
    graph.table[index] = number
    node = graph.nodes[number]
    node.code = code
    node.operands[0], node.operands[1], node.operands[2] = a, b, c
    return number
