"""Expressions of other libraries to `Population`; no library is imported before one is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from warpfit.errors import InvalidArgumentError, list_of_texts
from warpfit.expressions.language import INFIX
from warpfit.expressions.real_numbers import float_array
from warpfit.ir import Population, Program
from warpfit.ops import CONSTANT
from warpfit.parse import parser

#: Converts expressions of one kind, with the names of the variables.
Converter = Callable[[Sequence[object], Sequence[str]], Population]


def as_program(expression: object, names: Sequence[str] = ()) -> Program:
    """Convert an expression of any supported kind.

    Args:
        expression: text, a `Program`, a SymPy expression, a DEAP ``PrimitiveTree``, or a gplearn
            program or fitted ``SymbolicRegressor``.
        names: names of the data set's variables in order, or empty.

    Raises:
        ParseError: if a text cannot be parsed.
        InvalidArgumentError: if the object is none of these, or uses something that warpfit does
            not know.
    """
    if isinstance(expression, Program):
        return expression
    return _converter(type(expression))([expression], names)[0]


def as_population(expressions: Iterable[object], names: Sequence[str] = ()) -> Population:
    """Convert expressions as `as_program` does; an error names the expression's index.

    Expressions of one kind are converted together, which takes much less time than one by one.

    Raises:
        InvalidArgumentError: if an expression cannot be converted, or as `expression_list` does.
    """
    if isinstance(expressions, Population):
        return expressions
    listed, names = expression_list(expressions), tuple(names)
    kinds = set(map(type, listed))
    if len(kinds) == 1:
        return _converter(kinds.pop())(listed, names)
    return _one_by_one(as_program)(listed, names)


def from_prefix(trees: Sequence[Sequence[object]], names: Sequence[str] = ()) -> Population:
    """Convert trees of a program of one's own, each as the list of its nodes in prefix order.

    ::

        from_prefix([["add", "x1", "mul", 2.5, "p1"], ["sin", "x2"]])

    A node is a number, the name of a variable or a parameter, or that of an operator, as texts have
    them, or its symbol, such as ``"+"``. It takes a tenth of the time of `warpfit.Program.apply`.

    Args:
        trees: one list for each expression.
        names: names of the data set's variables in order, or empty.

    Raises:
        InvalidArgumentError: for a node that is none of these, with the index of its tree.
        ProgramError: if the nodes of a tree are not one whole tree.
    """
    from warpfit.frontends.prefix import PrefixTrees, operator_node

    known = parser(list_of_texts(names))

    def node(entry: object) -> tuple[int, float, int]:
        if type(entry) in (float, int):  # most numbers are
            return CONSTANT, float(entry), 0  # type: ignore[arg-type]
        if not isinstance(entry, str):
            return CONSTANT, float(float_array(cast(Any, [entry]))[0]), 0
        name = INFIX[entry].name if entry in INFIX else entry
        row = None if name in known.variables else known.function(name)
        if row is not None:
            return operator_node(name, row.arity, {}, "prefix")
        program = known.parse(f"`{name}`" if name in known.variables else name)
        if len(program) > 1:
            raise InvalidArgumentError(
                f"the node {name[:80]!r} is no name and no number",
                "UNKNOWN_NODE",
                "Give one node for each operator, variable and number",
                "trees",
            )
        return int(program.codes[0]), float(program.values[0]), 0

    if any(isinstance(tree, str) or not isinstance(tree, Iterable) for tree in trees):
        raise InvalidArgumentError(
            "a tree is one list of nodes, and these are nodes",
            "UNKNOWN_NODE",
            "Give a list of trees, such as [['add', 'x1', 'p1']]",
            "trees",
        )
    return PrefixTrees.of([list(tree) for tree in trees], node).population()


def expression_list(expressions: Iterable[Any]) -> list[Any]:
    """Return expressions as a list.

    Raises:
        InvalidArgumentError: for one expression, and for a set or dict.
    """
    if isinstance(expressions, str | Program):
        raise InvalidArgumentError(
            "one expression stands where a list of expressions is wanted",
            "NOT_A_LIST",
            "Put it in a list",
            "expressions",
        )
    if isinstance(expressions, set | frozenset | Mapping):
        raise InvalidArgumentError(
            f"expressions is a {type(expressions).__name__}",
            "NOT_A_LIST",
            "Give a list of expressions, whose order the answers have",
            "expressions",
        )
    return list(expressions)


def _one_by_one(convert: Callable[[Any, Sequence[str]], Program]) -> Converter:
    """Return the converter of many expressions from that of one."""

    def converter(expressions: Sequence[object], names: Sequence[str]) -> Population:
        programs: list[Program] = []
        try:
            for expression in expressions:
                programs.append(convert(expression, names))  # noqa: PERF401 (counts for the error)
        except InvalidArgumentError as error:
            error.expression = len(programs)
            raise
        return Population.of(programs)

    return converter


def _converter(kind: type) -> Converter:
    """Return the converter of a type of expressions."""
    if issubclass(kind, Program):
        return lambda programs, _: Population.of(programs)  # type: ignore[arg-type]
    if issubclass(kind, str):
        return _one_by_one(lambda text, names: parser(tuple(names)).parse(text))
    libraries = {str(cls.__module__).partition(".")[0] for cls in kind.__mro__}
    if "sympy" in libraries:
        from warpfit.frontends.sympy import from_sympy

        return _one_by_one(from_sympy)
    if "deap" in libraries:
        from warpfit.frontends import deap

        return lambda trees, names: deap.population(trees, names=names)
    if "gplearn" in libraries:
        from warpfit.frontends import gplearn

        return lambda programs, _: gplearn.population(programs)
    if issubclass(kind, np.generic | np.ndarray | int | float):
        raise InvalidArgumentError(
            "numbers stand where expressions are wanted",
            "UNKNOWN_EXPRESSION_TYPE",
            "Give texts such as 'x1 + p1'; data are uploaded first: client.upload(X, y)",
            "expressions",
        )
    raise InvalidArgumentError(
        f"{kind.__name__} is no expression",
        "UNKNOWN_EXPRESSION_TYPE",
        "Give text, a Program, a SymPy expression, a DEAP PrimitiveTree or a gplearn program; "
        "for pyoperon and PySR warpfit.frontends has converters",
        "expressions",
    )
