"""DEAP primitive trees to `Program`.

A primitive is taken at its name: ``add``, ``protectedDiv`` and so on mean the operators of these
names, whatever the function behind them does. With the primitive set at hand a function of the
modules ``operator``, ``math`` or ``numpy`` is recognised whatever the primitive is called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from warpfit.errors import InvalidArgumentError
from warpfit.frontends.prefix import Node, from_prefix, operator_node
from warpfit.ir import Program
from warpfit.ops import CONSTANT, VARIABLE

#: Names of primitives beside the operators' own names and aliases.
PRIMITIVES: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("protected_div", "protected_division", "safe_div", "safeDiv"), "zdiv"),
        **{"and_": "and", "or_": "or", "not_": "not", "if_then_else": "where"},
        **{"float_power": "pow", "fmin": "min", "fmax": "max", "true_divide": "div"},
    }
)
_MODULES: Final = frozenset({"operator", "_operator", "math", "numpy"})
_ARGUMENT: Final = re.compile(r"ARG([0-9]+)")


def from_deap(
    tree: Any,
    pset: Any = None,
    operators: Mapping[str, str] | None = None,
    names: Sequence[str] = (),
) -> Program:
    """Convert a DEAP tree.

    Args:
        tree: a ``PrimitiveTree`` or a subclass of it.
        pset: its primitive set; needed for named terminals, and for arguments whose names are
            neither ``ARG0``... nor in ``names``.
        operators: operator for each primitive that is not known by its name.
        names: names of the data set's variables. An argument that has one of these names is that
            variable; any other is the variable of the argument's position.

    Raises:
        InvalidArgumentError: if a primitive, an argument or a terminal is unknown, or if the tree
            calls an automatically defined function (ADF).

    """
    converter = _Converter(pset, operators or {}, tuple(names))
    return from_prefix(converter.node(entry) for entry in tree)


class _Converter:
    """Nodes of one tree, one after the other."""

    def __init__(self, pset: Any, operators: Mapping[str, str], names: Sequence[str]) -> None:
        self.context: Mapping[str, Any] | None = None if pset is None else pset.context
        self.rows = {**PRIMITIVES, **operators}
        self.operators = operators
        self.arguments = _indices(() if pset is None else pset.arguments)
        self.variables = _indices(names)

    def node(self, entry: Any) -> Node:
        if not hasattr(entry, "arity"):
            raise _adf("an individual of several trees")
        if entry.arity:
            return self._primitive(entry)
        if isinstance(entry.value, str):
            return self._named(entry)
        return CONSTANT, _number(entry.value, entry.name), 0

    def _primitive(self, entry: Any) -> Node:
        name = entry.name
        if name not in self.operators:
            if name.startswith("ADF") or (self.context is not None and name not in self.context):
                raise _adf(name)
            function: Any = (self.context or {}).get(name)
            if isinstance(function, np.ufunc) or getattr(function, "__module__", "") in _MODULES:
                name = function.__name__
        return operator_node(name, entry.arity, self.rows, "DEAP")

    def _named(self, entry: Any) -> Node:
        """A symbolic terminal: an argument of the function, or a terminal with a name."""
        name = entry.value
        argument = _ARGUMENT.fullmatch(entry.name)
        for indices in (self.variables, self.arguments):
            if name in indices:
                return VARIABLE, float(indices[name]), 0
        if self.context is not None and name in self.context:
            return CONSTANT, _number(self.context[name], name), 0
        if argument:
            return VARIABLE, float(argument[1]), 0
        raise InvalidArgumentError(
            f"DEAP terminal {name!r} is unknown",
            "UNKNOWN_TERMINAL",
            "Pass pset, or names with the data set's variables",
            "expressions",
        )


def _indices(names: Sequence[str]) -> dict[str, int]:
    return {name: index for index, name in enumerate(names)}


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"DEAP terminal {name!r} is no number",
            "UNKNOWN_TERMINAL",
            "Terminals are arguments and numbers",
            "expressions",
        ) from error


def _adf(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"DEAP's automatically defined functions are not supported: {what}",
        "ADF_UNSUPPORTED",
        "Put the function's tree in place of each call before the conversion",
        "expressions",
    )
