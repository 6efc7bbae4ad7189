"""Values and derivatives of programs in NumPy float64, against which every engine is tested.

Derivatives are those of forward differentiation. The module `warpfit.ops` has the derivatives of
the operators and the conventions where they do not exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.expressions import special
from warpfit.expressions.program import Program
from warpfit.ops import CONSTANT, PARAMETER, VARIABLE, Operator

Floats = NDArray[np.float64]


def evaluate_program(program: Program, variables: ArrayLike, parameters: ArrayLike = ()) -> Floats:
    """Evaluate one program on [variables, rows] and [parameters]; return float64 [rows]."""
    columns = np.asarray(variables, dtype=np.float64)
    vector = np.asarray(parameters, dtype=np.float64)

    def leaf(code: int, value: float) -> Floats:
        if code == VARIABLE:
            return np.asarray(columns[int(value)])
        return np.asarray(value if code == CONSTANT else vector[int(value)], dtype=np.float64)

    def operator(op: Operator, operands: list[Floats]) -> Floats:
        return np.asarray(op.numpy(*operands), dtype=np.float64)

    with np.errstate(all="ignore"):
        result = program.fold(leaf, operator)
    return np.broadcast_to(result, columns.shape[1:]).copy()


def evaluate(
    programs: Sequence[Program], variables: ArrayLike, parameters: Sequence[ArrayLike] | None = None
) -> Floats:
    """Evaluate programs with one parameter vector each; return float64 [programs, rows]."""
    vectors = [()] * len(programs) if parameters is None else parameters
    return np.stack(
        [evaluate_program(p, variables, v) for p, v in zip(programs, vectors, strict=True)]
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Dual:
    """A value [rows] and its derivatives [rows] by the index of the parameter or variable."""

    value: Floats
    slopes: dict[int, Floats]


def differentiate(
    program: Program, variables: ArrayLike, parameters: ArrayLike = (), *, by: int = PARAMETER
) -> tuple[Floats, Floats]:
    """Compute the values of a program, [rows], and their derivatives, [leaves, rows], in float64.

    Variables are [variables, rows], parameters [parameters]; ``by`` is PARAMETER or VARIABLE.
    """
    columns = np.asarray(variables, dtype=np.float64)
    vector = np.asarray(parameters, dtype=np.float64)
    rows = columns.shape[1:]

    def leaf(code: int, value: float) -> _Dual:
        if code == CONSTANT:
            return _Dual(np.full(rows, value), {})
        index = int(value)
        number = columns[index] if code == VARIABLE else np.full(rows, vector[index])
        return _Dual(number, {index: np.ones(rows)} if code == by else {})

    with np.errstate(all="ignore"):
        result = program.fold(leaf, _apply)
    slopes = np.zeros((len(vector) if by == PARAMETER else len(columns), *rows))
    for index, slope in result.slopes.items():
        slopes[index] = slope
    return result.value, slopes


def _apply(operator: Operator, operands: list[_Dual]) -> _Dual:
    values = [operand.value for operand in operands]
    result = np.asarray(operator.numpy(*values), dtype=np.float64)
    names = dict(zip(operator.operands, values, strict=True)) | {"r": result}
    slopes: dict[int, Floats] = {}
    for operand, code in zip(operands, _partials(operator.derivative), strict=True):
        if operand.slopes:
            partial = eval(code, {"__builtins__": {}, **FUNCTIONS}, names)
            for index, slope in operand.slopes.items():
                passes = (partial != 0) & (slope != 0)
                slopes[index] = slopes.get(index, 0.0) + np.where(passes, partial * slope, 0.0)
    return _Dual(result, slopes)


@cache
def _partials(texts: tuple[str, ...]) -> tuple[CodeType, ...]:
    return tuple(compile(text, "derivative", "eval") for text in texts)


#: Functions of the kernel language of `warpfit.ops` in NumPy.
FUNCTIONS: Final[Mapping[str, Any]] = {
    **{name: getattr(np, name) for name in ("sqrt", "cbrt", "exp", "expm1", "log", "log1p")},
    **{name: getattr(np, name) for name in ("log2", "log10", "hypot", "sin", "cos", "tan")},
    **{name: getattr(np, name) for name in ("sinh", "cosh", "tanh", "floor", "ceil", "abs")},
    **{"rint": np.rint, "mod": np.mod},
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "pow": np.power,
    **{name: getattr(special, name) for name in ("erf", "erfc", "tgamma", "lgamma", "digamma")},
    "select": np.where,
}
