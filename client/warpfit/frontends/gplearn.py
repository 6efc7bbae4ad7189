"""gplearn programs to `Program`, with gplearn's own protected functions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from warpfit.frontends.prefix import Node, from_prefix, operator_node
from warpfit.ir import Program
from warpfit.ops import CONSTANT, VARIABLE

#: gplearn's functions that do not mean what the operator of the same name means.
FUNCTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {"div": "pdiv", "log": "plog", "inv": "pinv", "sqrt": "sqrtabs", "sig": "logistic"}
)


def from_gplearn(program: Any, operators: Mapping[str, str] | None = None) -> Program:
    """Convert a gplearn program.

    Args:
        program: a ``_Program``, or an estimator that holds a fitted one.
        operators: operator for each function made by ``make_function``, by the function's name;
            without an entry the name itself must be that of an operator.

    Raises:
        InvalidArgumentError: if a function is unknown.

    """
    functions = {**FUNCTIONS, **(operators or {})}
    tree = getattr(program, "_program", program).program
    return from_prefix(_node(entry, functions) for entry in tree)


def _node(entry: Any, functions: Mapping[str, str]) -> Node:
    if hasattr(entry, "arity"):
        return operator_node(entry.name, entry.arity, functions, "gplearn")
    if isinstance(entry, float):
        return CONSTANT, float(entry), 0
    return VARIABLE, float(entry), 0
