"""gplearn programs to `Program`, with gplearn's own protected functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from warpfit.frontends.prefix import Node, PrefixTrees, check_operators, operator_node, other_kind
from warpfit.ir import Population, Program
from warpfit.ops import CONSTANT, VARIABLE

#: gplearn's functions that do not mean what the operator of the same name means.
FUNCTIONS: Final[Mapping[str, str]] = {
    "div": "pdiv",
    "log": "plog",
    "inv": "pinv",
    "sqrt": "sqrtabs",
    "sig": "logistic",
}


def from_gplearn(program: Any, operators: Mapping[str, str] | None = None) -> Program:
    """Convert a gplearn program.

    Args:
        program: a ``_Program``, or an estimator that holds a fitted one.
        operators: operator for each function made by ``make_function``, by the function's name;
            without an entry the name itself must be that of an operator.

    Raises:
        InvalidArgumentError: if a function is unknown, or computes something else than the operator
            of its name.
    """
    return population([program], operators)[0]


def population(programs: Sequence[Any], operators: Mapping[str, str] | None = None) -> Population:
    """Convert gplearn programs, as `from_gplearn` does; an error names the program's index."""
    functions = {**FUNCTIONS, **(operators or {})}
    check_operators(operators or {})

    def node(entry: Any) -> Node:
        if isinstance(entry, float):
            return CONSTANT, entry, 0
        if isinstance(entry, int | np.integer):
            return VARIABLE, float(entry), 0
        code = None if entry.name in (operators or {}) else getattr(entry, "function", None)
        return operator_node(entry.name, entry.arity, functions, "gplearn", code)

    trees = []
    for program in programs:
        tree = getattr(getattr(program, "_program", program), "program", None)
        if tree is None:
            raise other_kind(program, "gplearn", "a program of gplearn, or a fitted estimator")
        trees.append(tree)
    return PrefixTrees.of(trees, node).population()
