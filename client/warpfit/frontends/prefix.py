"""Conversion of trees in prefix order, which several front ends share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from warpfit.errors import InvalidArgumentError
from warpfit.expressions.grammar import ALIASES, CHAINED
from warpfit.ir import Program
from warpfit.ops import BY_CODE, OPERATORS

#: Code, value and number of operands of one node; a leaf has no operands.
Node = tuple[int, float, int]


def from_prefix(nodes: Iterable[Node]) -> Program:
    """Turn a tree in prefix order into a program.

    A node of an operator may have more operands than the operator's arity: a chain from the left.

    Raises:
        ProgramError: if the nodes are not one whole tree.

    """
    codes: list[int] = []
    values: list[float] = []
    unfinished: list[list[int]] = []
    for code, value, operands in nodes:
        if operands:
            unfinished.append([code, operands, 0])
            continue
        codes.append(code)
        values.append(value)
        while unfinished:
            parent = unfinished[-1]
            parent[2] += 1
            if parent[2] >= BY_CODE[parent[0]].arity:
                codes.append(parent[0])
                values.append(0.0)
            if parent[2] < parent[1]:
                break
            unfinished.pop()
    for code, *_ in reversed(unfinished):
        codes.append(code)
        values.append(0.0)
    return Program(codes, values)


def operator_node(name: str, operands: int, names: Mapping[str, str], library: str) -> Node:
    """Make the node of a function by its name.

    Args:
        name: the function's name in the library.
        operands: number of its operands.
        names: operators by the library's names; their own names and aliases are known.
        library: for the error message.

    Raises:
        InvalidArgumentError: if the name or the number of operands is unknown.

    """
    row = OPERATORS.get(names.get(name, ALIASES.get(name, name)))
    if row is None:
        raise InvalidArgumentError(
            f"{library} function {name!r} is no operator of warpfit",
            "UNKNOWN_FUNCTION",
            f"Pass operators={{{name!r}: '...'}} with one of {', '.join(OPERATORS)}",
            "expressions",
        )
    if operands != row.arity and not (row.name in CHAINED and operands > row.arity):
        raise InvalidArgumentError(
            f"{library} function {name!r} has {operands} operands, {row.name} takes {row.arity}",
            "WRONG_ARITY",
            "Map it to another operator with operators={...}",
            "expressions",
        )
    return row.code, 0.0, operands
