"""The check that stands before every engine: that the tokens of a batch are programs.

A front door passes tokens on as they come, because looking at each one takes Python's time, of
which it has least. Compiled code looks at them here, without the interpreter lock; only if it finds
something wrong, the exact check says what.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numpy.typing import NDArray

from warpfit.errors import InternalError
from warpfit.expressions.token_checks import INDEX_LIMIT
from warpfit.ir import Batch
from warpfit.ops import ARITIES, PARAMETER, VARIABLE
from warpfit_server.engine.native import numba_cache


def check_sound(batch: Batch, variables: int) -> None:
    """Check every token against the operator table and the data set.

    Args:
        batch: whose arrays fit together, see `Batch.check_shapes`.
        variables: of the data set.

    Raises:
        ProgramError: for the first bad token.

    """
    if is_sound(batch, variables):
        return
    batch.check(variables)
    raise InternalError("two checks of a batch disagree", "ENGINE_FAILURE", "Report it as a bug")


def is_sound(batch: Batch, variables: int) -> bool:
    """Tell whether `Batch.check` would pass, for a batch whose arrays fit together."""
    return bool(
        sound_tokens(
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
    sound_tokens.compile((codes, values, counts, counts, types.float64))


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def sound_tokens(
    codes: NDArray[np.uint8],
    values: NDArray[np.float64],
    lengths: NDArray[np.uint32],
    counts: NDArray[np.uint32],
    variables: float,
) -> bool:
    """`is_sound` for compiled code."""
    start = 0
    for program in range(len(lengths)):
        stop = start + int(lengths[program])
        parameters = min(float(counts[program]), float(INDEX_LIMIT))
        height, lowest, sound, needed = 0, 1, True, 0.0
        for token in range(start, stop):  # without branches, which random tokens make dear
            code, value = codes[token], values[token]
            arity = ARITIES[code]
            height += 1 - arity
            lowest = min(lowest, height)
            is_variable, is_parameter = code == VARIABLE, code == PARAMETER
            bound = variables if is_variable else parameters
            fits = (value >= 0.0) & (value < bound) & (np.floor(value) == value)
            sound &= (arity >= 0) & (fits | ~(is_variable | is_parameter))
            needed = max(needed, value + 1.0 if is_parameter else 0.0)
        sound &= needed == counts[program]
        if stop == start or height != 1 or lowest < 1 or not sound:
            return False
        start = stop
    return True
