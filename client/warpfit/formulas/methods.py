"""Methods of `warpfit.Program` for formulas.

The modules that do the work build on `warpfit.ir`, so they are loaded by name, on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from warpfit.errors import InvalidArgumentError
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
    vector = np.asarray(parameters, dtype=np.float64)
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

    Raises:
        InvalidArgumentError: if ``parameters`` are too few.
        ResourceExhaustedError: if the program has more than 5,000 tokens.

    """
    bound = program if parameters is None else bind(program, parameters)
    rules = import_module("warpfit.formulas.rules")
    simplified: Program = rules.simplified(bound, assume_defined)
    return simplified
