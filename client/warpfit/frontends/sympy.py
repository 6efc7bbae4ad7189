"""SymPy expressions to `Program` and back.

Only real values exist here: symbols are real whatever SymPy assumes, ``I`` and unevaluated
integrals, sums or derivatives are refused, complex infinity is NaN, and a constant whose value is
not real becomes what NumPy computes, NaN as a rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
import sympy
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import BooleanFalse, BooleanTrue

from warpfit.errors import InvalidArgumentError, ResourceExhaustedError, list_of_texts
from warpfit.expressions.language import ALIASES, COMPARISONS, INDEXED, free_name
from warpfit.frontends.prefix import other_kind
from warpfit.ir import Program
from warpfit.ops import CONSTANT, OPERATORS, PARAMETER, VARIABLE, Operator
from warpfit.parse import MACROS, Macro, function

#: Operator for each class of SymPy nodes; Min, Max, And and Or are chains.
CLASSES: Final[Mapping[str, str]] = {
    **{"Abs": "abs", "sign": "sign", "floor": "floor", "ceiling": "ceil"},
    **{name: name for name in ("exp", "log", "erf", "erfc", "atan2", "sin", "cos", "tan")},
    **{name: name for name in ("asin", "acos", "atan", "sinh", "cosh", "tanh", "gamma")},
    **{"Min": "min", "Max": "max", "And": "and", "Or": "or", "Not": "not", "ITE": "where"},
    **{"StrictLessThan": "lt", "LessThan": "le", "Equality": "eq", "Unequality": "ne"},
    **{"StrictGreaterThan": "gt", "GreaterThan": "ge", "loggamma": "lgamma"},
    "Mod": "mod",
}
#: Operators for powers with these exponents.
POWERS: Final[Mapping[Any, str]] = {sympy.Rational(1, 2): "sqrt"} | {
    sympy.Integer(power): name for power, name in ((-1, "inv"), (2, "square"), (3, "cube"))
}
#: Operators that SymPy does not apply to NaN.
_ORDERING: Final = COMPARISONS | {"min", "max", "relu"}
#: Larger whole numbers become floats: SymPy multiplies integer powers of integers out.
_LARGEST_INTEGER: Final = 10
#: Larger whole numbers may not be float64.
_LARGEST_EXACT: Final = 2**53
#: What numbers that float64 cannot hold become in it.
_BEYOND: Final = frozenset({0.0, math.inf, -math.inf})
#: Deepest nesting of what is returned: SymPy's own functions call themselves at each level.
_DEEPEST: Final = 100

#: The operands of a node and the names of its operators, in postfix order.
_Pieces = list[Any]


def from_sympy(expression: Any, names: Sequence[str] = ()) -> Program:
    """Convert a SymPy expression.

    Args:
        expression: any expression or condition over the operators of `warpfit.ops`.
        names: names of the data set's variables; other symbols are x1, x2, ... and p1, p2, ....

    Raises:
        InvalidArgumentError: if a symbol or a function is unknown, or a number is not real or too
            large or small for float64.
    """
    if not isinstance(expression, sympy.Basic):
        raise other_kind(expression, "SymPy", "one such as sympy.sympify('x1 + 1')")
    indices = {name: index for index, name in enumerate(names)}
    codes: list[int] = []
    values: list[float] = []
    waiting: _Pieces = [expression]
    while waiting:
        piece = waiting.pop()
        if isinstance(piece, str):
            row = function(piece)
            if isinstance(row, Macro):
                row.apply(codes, values)
                continue
            assert row is not None
            code, value = row.code, 0.0
        elif not isinstance(piece, sympy.Basic) or getattr(piece, "is_Matrix", False):
            raise _unknown(piece)
        elif piece.is_Symbol:
            indexed = INDEXED.fullmatch(piece.name)
            if piece.name in indices:
                code, value = VARIABLE, float(indices[piece.name])
            elif indexed:
                code = VARIABLE if indexed[1] == "x" else PARAMETER
                value = float(indexed[2]) - 1
            else:
                raise InvalidArgumentError(
                    f"SymPy symbol {piece.name!r} is no variable or parameter",
                    "UNKNOWN_NAME",
                    "Symbols are the names of the data set, or x1, x2, ... and p1, p2, ...",
                    "expressions",
                )
        elif isinstance(piece, BooleanTrue | BooleanFalse):
            code, value = CONSTANT, float(bool(piece))
        elif piece in (sympy.nan, sympy.zoo):
            code, value = CONSTANT, math.nan
        elif piece.is_Number or piece.is_NumberSymbol:
            code = CONSTANT
            try:
                value = float(piece)
            except OverflowError:
                value = math.inf
            if (math.isinf(value) and piece.is_finite) or (value == 0.0 and piece != 0):
                raise InvalidArgumentError(
                    f"float64 cannot hold the number {sympy.Float(piece, 6)} of a SymPy expression",
                    "OVERFLOW",
                    f"Write {'oo' if value else '0'} if that is meant, or choose other units",
                    "expressions",
                )
        else:
            waiting.extend(reversed(_pieces(piece)))
            continue
        codes.append(code)
        values.append(value)
    return Program(codes, values)


def _pieces(node: Any) -> _Pieces:
    if node.is_Add:
        # The terms with a positive sign first, from which the others are subtracted.
        positive = [term for term in node.args if not term.could_extract_minus_sign()]
        negative = [-term for term in node.args if term.could_extract_minus_sign()]
        if not positive:
            return [*_chain(negative, "add"), "neg"]
        pieces = _chain(positive, "add")
        for term in negative:
            pieces += [term, "sub"]
        return pieces
    if node.is_Mul:
        return _product(node)
    if node.is_Pow:
        base, exponent = node.args
        if exponent in POWERS:
            return [base, POWERS[exponent]]
        if -exponent in POWERS:
            return [base, POWERS[-exponent], "inv"]
        return [exponent, "exp"] if base == sympy.S.Exp1 else [base, exponent, "pow"]
    if isinstance(node, sympy.Piecewise):
        # ``where`` in ``where``; NaN where no condition holds.
        one, zero = sympy.S.One, sympy.S.Zero
        if len(node.args) == 2 and node.args[0].expr == one and node.args[1].args == (zero, True):
            return [node.args[0].cond]
        conditional = [pair for pair in node.args if pair.cond != sympy.true]
        otherwise = [pair.expr for pair in node.args if pair.cond == sympy.true]
        pieces = []
        for pair in conditional:
            pieces += [pair.cond, pair.expr]
        return [*pieces, *(otherwise or [sympy.nan])[:1], *["where"] * len(conditional)]
    if isinstance(node, sympy.re | sympy.conjugate):
        return [node.args[0]]
    if isinstance(node, sympy.im):
        return [sympy.S.Zero]
    if isinstance(node, sympy.Heaviside):
        return [node.rewrite(sympy.Piecewise)]
    if isinstance(node, sympy.log) and len(node.args) == 1 and isinstance(node.args[0], sympy.Abs):
        inner = node.args[0].args[0]
        if isinstance(inner, sympy.gamma):
            return [inner.args[0], "lgamma"]
    kind = type(node).__name__
    row = None if isinstance(node, AppliedUndef) else function(CLASSES.get(kind, ""))
    if row is None:
        row = MACROS.find(ALIASES.get(kind, kind))
        if row is None or len(node.args) != row.arity:
            raise _unknown(node)
        return [*node.args, row.name]
    return _chain(list(node.args), row.name) if row.arity == 2 else [*node.args, row.name]


def _chain(operands: _Pieces, name: str) -> _Pieces:
    pieces = operands[:1]
    for operand in operands[1:]:
        pieces += [operand, name]
    return pieces


def _product(node: Any) -> _Pieces:
    """Divide the factors by those with a negative constant exponent.

    A rational number is divided, not rounded to a factor first, unless division would round more.
    """
    factors, divisors = [], []
    for factor in node.args:
        exponent = factor.args[1] if factor.is_Pow else None
        if exponent is not None and exponent.is_Number and exponent.is_negative:
            divisors.append(sympy.Pow(factor.args[0], -exponent))
        elif (
            factor.is_Rational
            and not factor.is_Integer
            and max(abs(factor.p), factor.q) <= _LARGEST_EXACT
        ):
            factors.append(sympy.Integer(factor.p))
            divisors.append(sympy.Integer(factor.q))
        else:
            factors.append(factor)
    minus = sympy.S.NegativeOne in factors
    factors = [factor for factor in factors if factor not in (sympy.S.One, sympy.S.NegativeOne)]
    pieces = _chain(factors, "mul") or [sympy.S.One]
    if divisors:
        pieces += [*_chain(divisors, "mul"), "div"]
    return [*pieces, "neg"] if minus else pieces


def _unknown(node: Any) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"SymPy's {type(node).__name__} is no operator of warpfit",
        "UNKNOWN_FUNCTION",
        "Rewrite the expression with functions of the operator table, or add it by warpfit.define",
        "expressions",
    )


def to_sympy(program: Program, names: Sequence[str] = ()) -> Any:
    """Convert a program to a SymPy expression, which SymPy simplifies by its own rules.

    Args:
        program: the program.
        names: names of the data set's variables; those beyond them become x1, x2, .... Where a name
            has taken x1 or p1, the first variable or parameter is x01 or p01.

    Raises:
        ResourceExhaustedError: if SymPy's recursive functions cannot do it.
    """
    taken = frozenset(list_of_texts(names))

    def leaf(code: int, value: float) -> Any:
        if code == CONSTANT:
            return _number(value)
        if code == VARIABLE and value < len(names):
            return sympy.Symbol(names[int(value)])
        return sympy.Symbol(free_name("x" if code == VARIABLE else "p", int(value), taken))

    try:
        expression = program.fold(leaf, _apply)
        level, depth = [expression], 0
        while level and depth <= _DEEPEST:
            depth += 1
            level = list({argument for node in level for argument in node.args})
        if depth <= _DEEPEST:
            return expression
        cause = None
    except RecursionError as error:
        cause = error
    raise ResourceExhaustedError(
        f"a program of {len(program)} tokens is nested too deeply for SymPy",
        "TOO_DEEP",
        "Convert its parts",
        "programs",
    ) from cause


def _apply(row: Operator, operands: list[Any]) -> Any:
    if sympy.nan in operands and row.name in _ORDERING:
        return _number(float(row.numpy(*[np.nan] * row.arity)))
    if all(operand.is_number for operand in operands):
        with np.errstate(all="ignore"):
            value = float(row.numpy(*(np.float64(operand) for operand in operands)))
        # Exact arithmetic would give complex numbers, or integers of any length, and jumps of its
        # decimal numbers are elsewhere.
        if row.name in ("mod", "round") or not 1e-15 <= abs(value) <= 1e15:
            return _number(value)
    try:
        result = _function(row.name)(*operands)
    except Exception:
        # SymPy refuses to order branches that are NaN, infinite or complex; its rules for
        # remainders of conditions divide by zero, or do not end.
        with sympy.evaluate(False):
            result = _function(row.name)(*operands)
    if any(number and float(number) in _BEYOND for number in result.atoms(sympy.Float)):
        # SymPy has multiplied out numbers to one that float64 cannot hold.
        with sympy.evaluate(False):
            result = _function(row.name)(*operands)
    # What is divided by is +0 in the branch of a comparison that is false; of what cancels to zero
    # nobody knows the sign.
    branches = {
        each: each.xreplace({sympy.zoo: sympy.oo})
        for each in result.atoms(sympy.Piecewise)
        if each.has(sympy.zoo)
    }
    return result.xreplace(branches).xreplace({sympy.zoo: sympy.nan})


def _number(value: float) -> Any:
    exact = value.is_integer() and abs(value) <= _LARGEST_INTEGER
    return sympy.Integer(int(value)) if exact else sympy.Float(value)


@lru_cache(maxsize=len(OPERATORS))
def _function(name: str) -> Callable[..., Any]:
    row = OPERATORS[name]
    if row.sympy is None:
        raise _unknown(row)
    # The text is a constant of the operator table, never input.
    source = f"lambda {', '.join(row.operands)}: {row.sympy}"
    function: Callable[..., Any] = eval(source, dict(vars(sympy)))
    return function
