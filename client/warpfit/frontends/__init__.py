"""Expressions of other libraries to `Program`; no library is imported before one is used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from warpfit.errors import InvalidArgumentError
from warpfit.ir import Program
from warpfit.parse import parser


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
    if isinstance(expression, str):
        return parser(tuple(names)).parse(expression)
    libraries = {cls.__module__.partition(".")[0] for cls in type(expression).__mro__}
    if "sympy" in libraries:
        from warpfit.frontends.sympy import from_sympy

        return from_sympy(expression, names)
    if "deap" in libraries:
        from warpfit.frontends.deap import from_deap

        return from_deap(expression, names=names)
    if "gplearn" in libraries:
        from warpfit.frontends.gplearn import from_gplearn

        return from_gplearn(expression)
    raise InvalidArgumentError(
        f"{type(expression).__name__} is no expression",
        "UNKNOWN_EXPRESSION_TYPE",
        "Give text, a Program, a SymPy expression, a DEAP PrimitiveTree or a gplearn program; "
        "for pyoperon, PySR and Kozax warpfit.frontends has converters",
        "expressions",
    )


def as_programs(expressions: Iterable[object], names: Sequence[str] = ()) -> list[Program]:
    """Convert expressions as `as_program` does; an error names the expression's index.

    Raises:
        InvalidArgumentError: if an expression cannot be converted, or if the argument is one text.

    """
    if isinstance(expressions, str | Program):
        raise InvalidArgumentError(
            "one expression stands where a list of expressions is wanted",
            "NOT_A_LIST",
            "Put it in a list",
            "expressions",
        )
    names = tuple(names)
    programs = []
    for index, expression in enumerate(expressions):
        try:
            programs.append(as_program(expression, names))
        except InvalidArgumentError as error:
            error.expression = index
            raise
    return programs
