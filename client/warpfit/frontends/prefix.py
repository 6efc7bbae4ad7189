"""Conversion of trees in prefix order, which several front ends share: many trees at once.

The nodes of all trees are looked at in one pass. Trees share most of their nodes, and each object
is converted once; the rest is done with whole arrays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import InvalidArgumentError, ProgramError
from warpfit.expressions.grammar import CHAINED
from warpfit.expressions.subtrees import subtree_starts
from warpfit.ir import Population
from warpfit.ops import ARITIES
from warpfit.parse import MACROS, function

#: Code, value and number of operands of one node; a leaf has no operands.
Node = tuple[int, float, int]


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTrees:
    """Trees in prefix order as flat arrays.

    A node of an operator may have more operands than the operator's arity: a chain from the left.
    """

    lengths: NDArray[np.int64]
    """Nodes of each tree; [trees]."""
    objects: Sequence[Any]
    """The different objects among the nodes."""
    kinds: NDArray[np.intp]
    """Index of each node's object in ``objects``; [nodes]."""
    codes: NDArray[np.uint8]
    """Token code of each object; [objects]."""
    values: NDArray[np.float64]
    """Value of each object; [objects]."""
    operands: NDArray[np.int64]
    """Number of operands of each object; [objects]."""

    @classmethod
    def of(cls, trees: Sequence[Sequence[Any]], node: Callable[[Any], Node]) -> PrefixTrees:
        """Read trees of objects in prefix order; errors of ``node`` get the index of the tree."""
        entries = list(chain.from_iterable(trees))
        numbers: defaultdict[int, int] = defaultdict(count().__next__)
        kinds = np.fromiter(map(numbers.__getitem__, map(id, entries)), np.intp, len(entries))
        first = np.empty(len(numbers), dtype=np.int64)
        first[kinds[::-1]] = np.arange(len(entries))[::-1]
        objects = [entries[place] for place in first.tolist()]
        lengths = np.fromiter(map(len, trees), np.int64, len(trees))
        nodes: list[Node] = []
        try:
            nodes.extend(map(node, objects))
        except InvalidArgumentError as error:
            place = first[len(nodes)]
            error.expression = int(np.searchsorted(np.cumsum(lengths), place, side="right"))
            raise
        return cls(
            lengths,
            objects,
            kinds,
            np.array([code for code, _, _ in nodes], dtype=np.uint8),
            np.array([value for _, value, _ in nodes], dtype=np.float64),
            np.array([operands for _, _, operands in nodes], dtype=np.int64),
        )

    def population(self) -> Population:
        """Return the programs; raise ProgramError if the nodes of a tree are not one whole tree."""
        operands, kinds, lengths = self.operands, self.kinds, self.lengths
        arities = np.where(ARITIES[self.codes] < 0, operands, ARITIES[self.codes])
        # A chain of k operands is k - 1 operators of two, one below the other.
        repeats = np.where(operands > arities, operands - arities + 1, 1)
        if (repeats > 1).any():
            operands = np.where(repeats > 1, arities, operands)
            trees = np.repeat(np.arange(len(lengths)), lengths)
            lengths = np.bincount(trees, repeats[kinds], len(lengths)).astype(np.int64)
            kinds = np.repeat(kinds, repeats[kinds])
        operands = operands[kinds]
        order = postfix_order(operands, lengths)
        kinds = kinds[order]
        return Population(*MACROS.written_out(self.codes[kinds], self.values[kinds], lengths))


def postfix_order(operands: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the nodes of trees in prefix order in the order of postfix.

    Read backwards prefix is postfix. A node stands in postfix where the subtrees that end before it
    are, plus the rest of its own.
    """
    _check_whole(operands, lengths)
    size = len(operands)
    end = size - 1 - subtree_starts(operands[::-1], int(lengths.max(initial=0)))[::-1]
    ended = np.cumsum(np.bincount(end, minlength=size))
    ended[1:] = ended[:-1]
    ended[:1] = 0
    result = np.empty(size, dtype=np.int64)
    nodes = np.arange(size)
    result[ended + end - nodes] = nodes
    return result


def _check_whole(operands: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
    """Check that each tree has all operands and nothing behind its end."""
    # Each tree lowers the sum by one.
    missing = np.cumsum(operands - 1) + np.repeat(np.arange(len(lengths)), lengths) + 1
    ends = np.cumsum(lengths)
    before = missing + 1 - operands
    if lengths.all() and before.min(initial=1) >= 1 and not missing[ends - 1].any():
        return
    bad = lengths == 0
    bad[lengths > 0] = missing[ends[lengths > 0] - 1] != 0
    bad[np.repeat(np.arange(len(lengths)), lengths)[before < 1]] = True
    raise ProgramError(
        "the nodes are not one whole tree",
        "STACK_LEFTOVERS",
        "Give every operator its operands, and nothing behind them",
        "expressions",
        int(bad.argmax()),
    )


def operator_node(name: str, operands: int, names: Mapping[str, str], library: str) -> Node:
    """Make the node of a function of a library by its name, own or in ``names``, and operands."""
    row = function(names.get(name, name))
    if row is None:
        raise InvalidArgumentError(
            f"{library} function {name!r} is no operator of warpfit",
            "UNKNOWN_FUNCTION",
            f"Pass operators={{{name!r}: '...'}} with one of OPERATORS.md, or write it with them: "
            f"warpfit.define({name!r}, '...')",
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
