"""DEAP primitive trees to `Program`, and an evaluator that scores whole generations on a server.

A primitive is taken at its name: ``add``, ``protectedDiv`` and so on mean the operators of these
names. With the primitive set at hand a function of the modules ``operator``, ``math`` or ``numpy``
is recognised whatever the primitive is called, and each function is tried at a few hundred points:
one that computes something else than its operator is refused.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from warpfit.errors import (
    InvalidArgumentError,
    bad_setting,
    did_you_mean,
    explains_keywords,
    list_of_texts,
)
from warpfit.expressions.language import AMBIGUOUS_DIVISIONS
from warpfit.expressions.real_numbers import real_numbers
from warpfit.frontends.prefix import Node, PrefixTrees, check_operators, operator_node, other_kind
from warpfit.ir import Population, Program
from warpfit.losses import as_function, as_loss
from warpfit.ops import CONSTANT, VARIABLE
from warpfit.parse import function

if TYPE_CHECKING:
    from warpfit.calls.dataset_handle import DatasetHandle
    from warpfit.losses import Loss, LossFunction

#: Names of primitives beside the operators' own names and aliases.
PRIMITIVES: Final[Mapping[str, str]] = {
    **{"and_": "and", "or_": "or", "not_": "not", "if_then_else": "where"},
    **{"float_power": "pow", "fmin": "min", "fmax": "max", "true_divide": "div"},
}
_MODULES: Final = frozenset({"operator", "_operator", "math", "numpy"})
_ARGUMENT: Final = re.compile(r"ARG([0-9]+)")


class Evaluating(Protocol):
    """A client that evaluates, such as `warpfit.Client`."""

    @property
    def evaluate(self) -> Callable[..., Any]:
        """Return the losses of expressions."""

    @property
    def optimize(self) -> Callable[..., Any]:
        """Fit expressions."""


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
        InvalidArgumentError: if a primitive, an argument or a terminal is unknown, if a function
            computes something else than the operator of its name, or if the tree calls an
            automatically defined function (ADF).
    """
    return population([tree], pset, operators, names)[0]


def population(
    trees: Sequence[Any],
    pset: Any = None,
    operators: Mapping[str, str] | None = None,
    names: Sequence[str] = (),
) -> Population:
    """Convert DEAP trees, as `from_deap` does; an error names the tree's index."""
    return _Converter(pset, operators or {}, list_of_texts(names)).read(trees).population()


class Evaluator:
    """Scores DEAP trees on a server, a whole generation in one call.

    Register it as DEAP's ``evaluate`` and its `map` as DEAP's ``map``: DEAP's algorithms call
    ``toolbox.map(toolbox.evaluate, individuals)``::

        evaluate = Evaluator(client, data, pset)
        toolbox.register("evaluate", evaluate)
        toolbox.register("map", evaluate.map)

    A fitness is the tuple of one loss; a tree whose loss is not a finite number gets the worst.
    """

    @explains_keywords()
    def __init__(
        self,
        client: Evaluating,
        data: DatasetHandle,
        pset: Any = None,
        *,
        loss: Loss | LossFunction | str = "mse",
        fit_iterations: int = 0,
        rows: slice | tuple[int, int] | None = None,
        operators: Mapping[str, str] | None = None,
    ) -> None:
        """Score on ``data``.

        Args:
            client: a connected client.
            data: what ``client.upload`` returned, with a target.
            pset: the primitive set, see `from_deap`.
            loss: as for `warpfit.Client.evaluate`.
            fit_iterations: if positive, the server fits the ephemeral constants of each tree with
                so many iterations, and the tree keeps the fitted numbers (Lamarckian evolution).
            rows: slice or (start, stop) of the rows to score on; None for all.
            operators: operator for each primitive that is not known by its name.
        """
        if not hasattr(client, "evaluate"):
            raise bad_setting("client", client, "what warpfit.connect returned")
        self.client = client
        if not hasattr(data, "content_id"):
            raise bad_setting("data", type(data), "what client.upload(X, y) returned")
        self.data = data
        self.pset = pset
        self.loss = as_loss(loss)
        self.fit_iterations = fit_iterations
        self.rows = rows
        self.operators = operators
        self._worst = -np.inf if as_function(self.loss).is_score else np.inf
        _Converter(pset, operators or {}, data.names)  # what is wrong is said before a generation

    def __repr__(self) -> str:
        """Show what is scored, and how."""
        fits = f", {self.fit_iterations} iterations of fits" * bool(self.fit_iterations)
        return f"<Evaluator of {self.loss} on {self.data!r}{fits}>"

    def __call__(self, individual: Any) -> tuple[float]:
        """Score one tree."""
        return self.score([individual])[0]

    def map(self, function: Callable[..., Any], *iterables: Iterable[Any]) -> Iterable[Any]:
        """Score all trees at once if ``function`` is this evaluator, else do as Python's map."""
        inner = function.func if isinstance(function, functools.partial) else function
        if inner is self and len(iterables) == 1:
            return self.score(list(iterables[0]))
        return map(function, *iterables)

    def score(self, individuals: Sequence[Any]) -> list[tuple[float]]:
        """Score trees in one call; an InvalidArgumentError has the index of a bad one."""
        if not individuals:
            return []
        converter = _Converter(self.pset, self.operators or {}, self.data.names)
        prefix = converter.read(individuals)
        programs = prefix.population()
        if self.fit_iterations:
            from deap.gp import MetaEphemeral

            lifted, starts = programs.lift_constants()
            # Leaves have the same order in prefix and in postfix.
            constants = np.flatnonzero(prefix.codes[prefix.kinds] == CONSTANT)
            kinds = (isinstance(type(entry), MetaEphemeral) for entry in prefix.objects)
            is_ephemeral = np.fromiter(kinds, bool, len(prefix.objects))
            ephemeral = is_ephemeral[prefix.kinds[constants]]
            fit = self.client.optimize(
                self.data,
                lifted,
                starts,
                loss=self.loss,
                rows=self.rows,
                max_iterations=self.fit_iterations,
                fixed=np.split(~ephemeral, np.cumsum(list(map(len, starts)))[:-1]),
            )
            ends = np.cumsum(prefix.lengths)
            owners = np.searchsorted(ends, constants, side="right")
            places = constants - (ends - prefix.lengths)[owners]
            values = np.concatenate(fit.parameters)
            chosen = (array[ephemeral].tolist() for array in (owners, places, values))
            for owner, place, value in zip(*chosen, strict=True):
                tree = individuals[owner]
                # Parents and children share their nodes.
                tree[place] = copy.copy(tree[place])
                tree[place].value = value
            losses = fit.loss
        else:
            losses = self.client.evaluate(self.data, programs, loss=self.loss, rows=self.rows)
        return [(loss,) for loss in np.where(np.isfinite(losses), losses, self._worst).tolist()]


class _Converter:
    """Converts trees of one primitive set."""

    def __init__(self, pset: Any, operators: Mapping[str, str], names: Sequence[str]) -> None:
        check_operators(operators)
        self.context: Mapping[str, Any] | None = None if pset is None else pset.context
        for name in operators.keys() - (self.context or operators).keys():
            unknown = [n for n in self.context or () if n not in operators and function(n) is None]
            if remedy := did_you_mean(name, unknown, ""):  # others may be of another primitive set
                what = f"operators names {name!r}, which is no primitive of pset"
                raise InvalidArgumentError(what, "UNKNOWN_PRIMITIVE", remedy, "operators")
        self.functions = {**PRIMITIVES, **operators}
        self.operators = operators
        self.arguments = _indices(() if pset is None else pset.arguments)
        self.variables = _indices(names)

    def read(self, trees: Sequence[Any]) -> PrefixTrees:
        """Read trees, whose nodes in common are converted once."""
        for tree in trees:
            if not isinstance(tree, list):
                raise other_kind(tree, "DEAP", "a PrimitiveTree")
        return PrefixTrees.of(trees, self._node)

    def _node(self, entry: Any) -> Node:
        arity = getattr(entry, "arity", None)
        if arity is None:
            raise _adf("an individual of several trees")
        if arity == 0 and not isinstance(entry.value, str):
            return CONSTANT, _number(entry.value, entry.name), 0
        if arity:
            name: str = entry.name
            function: Any = None
            if name not in self.operators:
                is_unknown = self.context is not None and name not in self.context
                if name.startswith("ADF") or is_unknown:
                    raise _adf(name)
                function = (self.context or {}).get(name)
                module = getattr(function, "__module__", "")
                if isinstance(function, np.ufunc) or module in _MODULES:
                    name = function.__name__
                # With the primitive set the function itself is tried.
                if name in AMBIGUOUS_DIVISIONS and function is None:
                    raise InvalidArgumentError(
                        f"DEAP primitive {name!r} means different things in different programs",
                        "UNKNOWN_PRIMITIVE",
                        "Pass pset, so that the function can be tried, or "
                        f"operators={{{name!r}: 'zdiv'}} if it returns 1 where the divisor is 0",
                        "expressions",
                    )
                if name in AMBIGUOUS_DIVISIONS:
                    name = "zdiv"
            names = {entry.name: self.functions.get(name, name)}
            return operator_node(entry.name, entry.arity, names, "DEAP", function)
        # A symbolic terminal: an argument of the function, or a constant with a name.
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
    if type(value) is float:
        return value
    try:
        return float(real_numbers(value, f"DEAP terminal {name!r}", place="position").item())
    except (InvalidArgumentError, ValueError) as error:  # ValueError of several numbers
        is_large = getattr(error, "reason", "") == "OVERFLOW"
        raise InvalidArgumentError(
            f"DEAP terminal {name[:40]!r} is no number{' that float64 can hold' * is_large}",
            "OVERFLOW" if is_large else "UNKNOWN_TERMINAL",
            "Terminals are arguments and numbers" + " of float64" * is_large,
            "expressions",
        ) from error


def _adf(what: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"DEAP's automatically defined functions are not supported: {what}",
        "ADF_UNSUPPORTED",
        "Put the function's tree in place of each call before the conversion",
        "expressions",
    )
