"""Methods of `warpfit.Program` for formulas.

The modules that do the work build on `warpfit.ir`, so they are loaded by name, on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.errors import InvalidArgumentError, require
from warpfit.expressions.parameter_vectors import float_array
from warpfit.expressions.printing import to_latex
from warpfit.ops import CONSTANT, PARAMETER

if TYPE_CHECKING:
    from warpfit.ir import Program


def bind(program: Program, parameters: ArrayLike) -> Program:
    """Return the program with its parameters replaced by constants.

    Args:
        program: the program.
        parameters: one number for each parameter, or more, [n].

    Raises:
        InvalidArgumentError: for fewer numbers than parameters, or another shape.

    """
    vector = float_array(parameters)
    if vector.ndim != 1 or len(vector) < program.parameters:
        raise InvalidArgumentError(
            f"{program.parameters} parameters, and numbers of shape {vector.shape}",
            "BAD_PARAMETERS",
            "Give one number for each parameter",
            "parameters",
        )
    is_parameter = program.codes == PARAMETER
    values = program.values.copy()
    values[is_parameter] = vector[values[is_parameter].astype(np.int64)]
    return type(program)(np.where(is_parameter, np.uint8(CONSTANT), program.codes), values)


def simplify(
    program: Program,
    parameters: ArrayLike | None = None,
    *,
    assume_defined: bool = False,
    algebra: bool = False,
) -> Program:
    """Return an equal program in canonical order that is not longer.

    Equal formulas get equal programs as far as the rules go: constants are computed, like terms
    and powers combined, sums and products sorted. See `warpfit.formulas.rules` for what stays
    as it is to the last bit and what is rounded elsewhere. `warpfit.Client.simplify` goes
    further, with data.

    Args:
        program: the program.
        parameters: numbers that replace the parameters, [n]; None leaves them as they are. The
            simplified program may have fewer parameters.
        assume_defined: also apply rules that hold only where the formula is defined, such as
            x/x = 1 and exp(log(x)) = x, as for a publication. By default NaN and infinities
            stay where they are for finite variables.
        algebra: also ask SymPy, for at most ten seconds; what it finds is taken if it is shorter
            and agrees with the program on random rows.

    Raises:
        InvalidArgumentError: if ``parameters`` are too few, or SymPy is asked for and missing.
        ResourceExhaustedError: if the program has more than 1,000 tokens.

    """
    bound = program if parameters is None else bind(program, parameters)
    if algebra:
        function = import_module("warpfit.formulas.algebra").algebraic
    else:
        function = import_module("warpfit.formulas.rules").simplified
    simplified: Program = function(bound, assume_defined)
    return simplified


def to_numpy(program: Program, names: Sequence[str] = ()) -> Callable[..., NDArray[np.float64]]:
    """Return a function of X [rows, variables] that needs NumPy alone, and gives values [rows].

    A program with parameters gives a function of X and p [parameters]. The attribute ``source`` of
    the function is its text, which a project can keep instead of warpfit.

    Args:
        program: the program.
        names: names of the variables, for the text.

    """
    code = import_module("warpfit.formulas.code")
    function: Callable[..., NDArray[np.float64]] = code.to_numpy(program, names)
    return function


def code(program: Program, language: str, names: Sequence[str] = ()) -> str:
    """Return the program as source text in another language.

    Args:
        program: the program.
        language: ``"numpy"``, ``"jax"`` or ``"torch"`` for a function of X [rows, variables];
            ``"c"`` for a function of one row; ``"fortran"``, ``"javascript"``, ``"julia"``,
            ``"mathematica"``, ``"matlab"``, ``"octave"``, ``"r"`` or ``"rust"`` for an expression,
            by SymPy.
        names: names of the variables; those that are no identifiers become x1, x2, ....

    Raises:
        InvalidArgumentError: for another language, an operator that SymPy does not print in it, or
            if SymPy is needed and missing.
        ResourceExhaustedError: if the program has more than 10,000 tokens.

    """
    source: str = import_module("warpfit.formulas.code").to_code(program, language, names)
    return source


def latex(program: Program, names: Sequence[str] = ()) -> str:
    """Return the program as LaTeX for mathematical mode.

    Args:
        program: the program.
        names: names of the variables; those beyond them become x_{1}, x_{2}, ....

    """
    return to_latex(program, names)


def sympy(program: Program, names: Sequence[str] = ()) -> Any:
    """Return the program as a SymPy expression, which SymPy simplifies by its own rules.

    Args:
        program: the program.
        names: names of the variables; those beyond them become x1, x2, ....

    Raises:
        InvalidArgumentError: if SymPy is not installed.

    """
    require("sympy", "warpfit[sympy]")
    return import_module("warpfit.frontends.sympy").to_sympy(program, names)
