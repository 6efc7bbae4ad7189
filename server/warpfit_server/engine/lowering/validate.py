"""Validation of a batch's tokens, before an engine runs its programs.

Front ends pass tokens on unseen, because looking at each one takes time of Python's, of which they
have least. Engines check them in compiled code without Python's lock; only for a bad token the
client's own check runs, which names it.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from warpfit.errors import InternalError
from warpfit.ir import INDEX_LIMIT, Batch
from warpfit.ops import ARITIES, PARAMETER, VARIABLE
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import inlined


def check_tokens(batch: Batch, variables: int) -> None:
    """Check every token against the operator table and the data set.

    Args:
        batch: whose arrays fit together, see `Batch.check_shapes`.
        variables: of the data set.

    Raises:
        ProgramError: for the first bad token.
    """
    if are_valid(batch, variables):
        return
    batch.check(variables)
    raise InternalError("two checks of a batch disagree", "ENGINE_FAILURE", "Report it as a bug")


def are_valid(batch: Batch, variables: int) -> bool:
    """Return whether `Batch.check` would pass, for a batch whose arrays fit together."""
    return bool(
        tokens_are_valid(
            batch.codes,
            batch.values,
            batch.lengths,
            batch.parameter_counts,
            float(min(variables, INDEX_LIMIT)),
        )
    )


def load() -> None:
    """Load the compiled check, or compile it, for the arrays of requests."""
    counts = types.Array(types.uint32, 1, "C")
    codes, values = types.Array(types.uint8, 1, "C"), types.Array(types.float64, 1, "C")
    tokens_are_valid.compile((codes, values, counts, counts, types.float64))


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def tokens_are_valid(
    codes: NDArray[np.uint8],
    values: NDArray[np.float64],
    lengths: NDArray[np.uint32],
    counts: NDArray[np.uint32],
    variables: float,
) -> bool:
    """Do the work of `are_valid` in compiled code."""
    start = 0
    for program in range(len(lengths)):
        stop = start + int(lengths[program])
        if not program_is_valid(codes, values, start, stop, counts[program], variables):
            return False
        start = stop
    return True


@inlined
def program_is_valid(
    codes: NDArray[np.uint8],
    values: NDArray[np.float64],
    start: int,
    stop: int,
    count: np.uint32,
    variables: float,
) -> bool:
    """Check the tokens of one program with ``count`` parameters, in compiled code."""
    parameters = min(float(count), float(INDEX_LIMIT))
    height, lowest, valid, needed = 0, 1, True, 0.0
    for token in range(start, stop):  # without branches, which are slow on random tokens
        code, value = codes[token], values[token]
        arity = ARITIES[code]
        height += 1 - arity
        lowest = min(lowest, height)
        is_variable, is_parameter = code == VARIABLE, code == PARAMETER
        bound = variables if is_variable else parameters
        fits = (value >= 0.0) & (value < bound) & (np.floor(value) == value)
        valid &= (arity >= 0) & (fits | ~(is_variable | is_parameter))
        needed = max(needed, value + 1.0 if is_parameter else 0.0)
    valid &= needed == count
    return not (stop == start or height != 1 or lowest < 1 or not valid)
