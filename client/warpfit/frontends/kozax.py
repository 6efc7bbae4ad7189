"""Kozax trees to `Program`.

A tree is an array with one row for each node, operands before their operator and the root last: the
index of the node's function, the rows of its operands (-1 where there is none), and the value of a
constant. What an index means depends on the strategy that made the tree.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import InvalidArgumentError
from warpfit.expressions.grammar import INFIX
from warpfit.frontends.prefix import Node, PrefixTrees, operator_node
from warpfit.ir import Program
from warpfit.ops import CONSTANT, VARIABLE

_CONSTANT: Final = 1
#: Operators by their symbols; other strings are names of functions.
SYMBOLS: Final[Mapping[str, str]] = {symbol: row.name for symbol, row in INFIX.items()}


def from_kozax(
    candidate: Any,
    strategy: Any,
    names: Sequence[str] = (),
    operators: Mapping[str, str] | None = None,
) -> Program:
    """Convert a Kozax candidate of one tree.

    Args:
        candidate: array [1, nodes, 4] or [nodes, 4], on any device.
        strategy: the ``GeneticProgramming`` that made it, which names functions and variables.
        names: names of the variables in order; by default those of the strategy, in its order.
        operators: operator for each function that is not known by its name.

    Raises:
        InvalidArgumentError: for a function or a variable that is not known, or several trees.
    """
    tree = np.asarray(candidate)
    tree = tree[0] if tree.ndim == 3 and len(tree) == 1 else tree
    if tree.ndim != 2:
        raise InvalidArgumentError(
            f"a Kozax candidate of shape {tree.shape} is not one tree",
            "ADF_UNSUPPORTED",
            "Convert the trees of a candidate one by one",
            "expressions",
        )
    strings: Mapping[int, str] = strategy.node_to_string
    leaves = [strings[index] for index in sorted(strings) if not strategy.slots[index]]
    indices = {name: index for index, name in enumerate(names or leaves)}
    functions = {**SYMBOLS, **(operators or {})}
    nodes = _nodes(tree, strings, indices, functions)
    return PrefixTrees.of([nodes], tuple).population()[0]


def _nodes(
    tree: NDArray[Any],
    strings: Mapping[int, str],
    indices: Mapping[str, int],
    functions: Mapping[str, str],
) -> list[Node]:
    nodes: list[Node] = []
    waiting = [len(tree) - 1]
    while waiting:
        row = tree[waiting.pop()]
        kind = int(row[0])
        operands = [int(place) for place in row[1:-1] if place >= 0]
        waiting.extend(reversed(operands))
        if operands:
            nodes.append(operator_node(strings[kind], len(operands), functions, "Kozax"))
        elif kind == _CONSTANT:
            nodes.append((CONSTANT, float(row[-1]), 0))
        else:
            nodes.append((VARIABLE, float(_index(strings[kind], indices)), 0))
    return nodes


def _index(name: str, indices: Mapping[str, int]) -> int:
    if name not in indices:
        raise InvalidArgumentError(
            f"Kozax variable {name!r} is unknown",
            "UNKNOWN_NAME",
            f"Variables are {', '.join(indices)}",
            "names",
        )
    return indices[name]
