"""Conversion of trees in prefix order, which several front ends share: many trees at once.

The nodes of all trees are looked at in one pass. Trees share most of their nodes, and each object
is converted once; the rest is done with whole arrays.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, count, product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import InvalidArgumentError, ProgramError, did_you_mean
from warpfit.expressions.language import CHAINED
from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Population, subtree_starts
from warpfit.ops import ARITIES
from warpfit.parse import MACROS, function, function_names, parse

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


#: Operands at which functions of Python are tried: on both sides of the thresholds of protected
#: functions, but nowhere near an overflow of ordinary arithmetic.
_MAGNITUDES: Final = (
    *(1e-12, 1e-9, 5e-7, 5e-5, 5e-4, 0.005, 0.05, 0.5, 1.0, 2.5, 3.0, 7.0, 50.0, 1e3),
)
_PROBES: Final = (0.0, *_MAGNITUDES, *(-x for x in _MAGNITUDES))


@lru_cache(maxsize=1_024)
def disagreement(
    code: Callable[..., Any], name: str, operands: int
) -> tuple[tuple[float, ...], str, str] | None:
    """Return where a function of Python and an operator differ, and both results there.

    An error of the function, NaN, infinities and complex numbers agree with each other: Python's
    numbers raise where NumPy's give NaN. Where only they raise, arrays decide. None if there is no
    difference, or if the function takes neither numbers nor arrays, so that nothing can be seen.
    """
    probes = _PROBES if operands < 3 else (0.0, 1e-6, 0.5, -0.5, 1.0, -2.5, 50.0)
    points = list(product(probes, repeat=operands)) if operands < 5 else []
    columns = np.array(points).reshape(len(points), operands).T
    text = f"{name}({', '.join(f'x{k + 1}' for k in range(operands))})"
    wanted = evaluate_program(parse(text), columns)
    numbers: list[Any] = []
    arrays: list[Any] = []
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for point in points:
            try:
                numbers.append(complex(code(*point)))
            except Exception as error:
                numbers.append(error)
        with suppress(Exception):  # it takes no arrays
            whole = np.broadcast_to(code(*columns.copy()), columns.shape[1:])
            arrays = whole.astype(complex).tolist()
    if all(isinstance(number, Exception) for number in numbers):  # it takes no numbers
        numbers = []
    found = None
    for results in (numbers, arrays):
        if not results:
            continue
        found = None
        for point, result, right in zip(points, results, wanted.tolist(), strict=False):
            failed = isinstance(result, Exception) or result.imag != 0 or not np.isfinite(result)
            if failed and not np.isfinite(right):
                continue
            if failed or not np.isclose(result.real, right, rtol=1e-9, atol=1e-300):
                is_error = isinstance(result, Exception)
                shown = type(result).__name__ if is_error else f"{result.real:g}"
                found = point, shown, f"{right:g}"
                break
        if found is None or not isinstance(result, Exception):
            break
    return found


def postfix_order(operands: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the nodes of trees in prefix order in the order of postfix.

    Read backwards prefix is postfix. A node stands in postfix where the subtrees that end before it
    are, plus the rest of its own.
    """
    # A tree lowers the sum by one; it has all operands, and nothing behind its end.
    missing = np.cumsum(operands - 1) + np.repeat(np.arange(len(lengths)), lengths) + 1
    ends = np.cumsum(lengths)
    before = missing + 1 - operands
    if not lengths.all() or before.min(initial=1) < 1 or missing[ends - 1].any():
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
    size = len(operands)
    end = size - 1 - subtree_starts(operands[::-1], int(lengths.max(initial=0)))[::-1]
    ended = np.cumsum(np.bincount(end, minlength=size))
    ended[1:] = ended[:-1]
    ended[:1] = 0
    result = np.empty(size, dtype=np.int64)
    nodes = np.arange(size)
    result[ended + end - nodes] = nodes
    return result


def other_kind(given: object, library: str, wanted: str) -> InvalidArgumentError:
    """Return the error for what is no expression of a front end's library."""
    return InvalidArgumentError(
        f"{type(given).__name__} is no expression of {library}",
        "UNKNOWN_EXPRESSION_TYPE",
        "warpfit.parse reads texts" if isinstance(given, str) else f"Give {wanted}",
        "expressions",
    )


def check_operators(operators: Mapping[str, str]) -> None:
    """Check that functions of a library are mapped to operators that there are."""
    for name, ours in operators.items():
        if not isinstance(ours, str) or function(ours) is None:
            raise InvalidArgumentError(
                f"operators maps {name!r} to {ours!r}, which is no operator",
                "UNKNOWN_FUNCTION",
                did_you_mean(ours, function_names(), "Use one of OPERATORS.md, or warpfit.define"),
                "operators",
            )


def operator_node(
    name: str, operands: int, names: Mapping[str, str], library: str, code: Any = None
) -> Node:
    """Make the node of a function of a library by its name, own or in ``names``, and operands.

    If ``code``, the Python function, is given, it must compute what the operator does.
    """
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
    if (
        isinstance(code, Hashable)
        and callable(code)
        and (point := disagreement(code, row.name, operands))
    ):
        at, got, wanted = point
        raise InvalidArgumentError(
            f"{library} function {name!r} gives {got} at {at}, warpfit's {row.name} {wanted}",
            "OTHER_FUNCTION",
            f"Say what it means: operators={{{name!r}: '...'}} with one of OPERATORS.md (that of "
            "this name, if the difference does not matter), or a function of warpfit.define",
            "expressions",
        )
    return row.code, 0.0, operands
