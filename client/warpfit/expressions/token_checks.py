"""Checks that programs are well-formed: a fast test, and checks that name the first error.

Programs are given as in a `warpfit.ir.Batch`: ``codes`` uint8 [tokens] and ``values`` float64
[tokens] of all programs one after the other, ``starts`` int64 [programs + 1] with the index of each
program's first token and the total, ``counts`` [programs] with the length of each program's
parameter vector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import ProgramError
from warpfit.ops import ARITIES, BY_CODE, PARAMETER, VARIABLE

Codes = NDArray[np.uint8]
Values = NDArray[np.float64]
Starts = NDArray[np.int64]
#: Indices of variables and parameters are below this.
INDEX_LIMIT: Final = 2**31
_INDEX_LIMIT_BITS: Final = np.float64(INDEX_LIMIT).view(np.uint64)


#: Change of the height of the stack by each code, int64 [256]. A code that is no token code removes
#: more than any program can have put there.
_HEIGHT_CHANGES: Final = np.where(
    ARITIES < 0, np.iinfo(np.int64).min // 2, 1 - ARITIES.astype(np.int64)
)
_HEIGHT_CHANGES.setflags(write=False)


def are_well_formed(
    codes: Codes,
    values: Values,
    starts: Starts,
    lengths: NDArray[Any],
    variables: int = INDEX_LIMIT,
    counts: NDArray[Any] | None = None,
) -> bool:
    """Test in few passes whether `check_structure` and `check_indices` would pass.

    The result is False, too, where an index is -0.0, which the checks accept. Without ``counts``
    parameters may have any index.
    """
    if not lengths.all() or not _stacks_balance(codes, starts):
        return False
    # The bits of floats from 0 on, read as integers, are ordered as the floats are, and lie below
    # those of all negative floats and NaN.
    bits, bound = values.view(np.uint64), np.float64(min(variables, INDEX_LIMIT)).view(np.uint64)
    bounds: Any = _INDEX_LIMIT_BITS
    if counts is not None:
        limits = np.minimum(counts, INDEX_LIMIT, dtype=np.float64)
        bounds = np.repeat(limits.view(np.uint64), lengths)
    is_variable, is_parameter = codes == VARIABLE, codes == PARAMETER
    fits = is_variable & (bits < bound)
    fits |= is_parameter & (bits < bounds)
    with np.errstate(invalid="ignore"):  # a constant may be a signaling NaN
        fits &= np.floor(values) == values
    if counts is not None and (needed_parameters(codes, values, starts) != counts).any():
        return False
    return bool((fits == (is_variable | is_parameter)).all())


def needed_parameters(codes: Codes, values: Values, starts: Starts) -> NDArray[np.float64]:
    """Return the length of the parameter vector that each program needs, float64 [programs]."""
    highest = np.where(codes == PARAMETER, values, -1.0)
    with np.errstate(invalid="ignore"):  # a constant may be a signaling NaN
        return np.asarray(np.maximum.reduceat(highest, starts[:-1]) + 1.0)


def _stacks_balance(codes: Codes, starts: Starts) -> bool:
    """Return whether every operator finds its operands and each program leaves one value."""
    height = _HEIGHT_CHANGES.take(codes)
    # Each program but the first begins by removing the value of the one before, so that heights
    # are its own, up to the first program that leaves another number of values.
    height[starts[1:-1]] -= 1
    np.add.accumulate(height, out=height)
    return bool(height.min() >= 1 and (height[starts[1:] - 1] == 1).all())


def check_structure(codes: Codes, values: Values, starts: Starts) -> None:
    """Check codes, indices and stacks; raise ProgramError for the first bad token."""
    lengths = np.diff(starts)
    if not lengths.all():
        raise ProgramError(
            "the program is empty",
            "EMPTY_PROGRAM",
            "Send at least one token for each expression",
            "lengths",
            int(np.argmin(lengths)),
        )
    check = _TokenCheck(values, starts)
    check(
        ARITIES[codes] < 0,
        "UNKNOWN_OPERATOR",
        lambda _, token: f"code {codes[token]} is no token code",
        "GetServerInfo lists the operators that this server knows",
    )
    with np.errstate(invalid="ignore"):
        index = (values >= 0) & (values < INDEX_LIMIT) & (values == np.floor(values))
    check(
        ((codes == VARIABLE) | (codes == PARAMETER)) & ~index,
        "BAD_INDEX",
        lambda value, _: f"{value} is not an index",
        "Variables and parameters carry a whole number from 0",
    )
    _check_stacks(codes, starts, check)


def _check_stacks(codes: Codes, starts: Starts, check: _TokenCheck) -> None:
    change = _HEIGHT_CHANGES[codes]
    height = np.cumsum(change)
    first, last = starts[:-1], starts[1:] - 1
    height -= np.repeat(height[first] - change[first], np.diff(starts))
    check(
        height < 1,
        "STACK_UNDERFLOW",
        lambda _, token: f"operator {BY_CODE[int(codes[token])].name} lacks operands",
        "In postfix, operands stand before their operator",
    )
    left = np.zeros(len(height), dtype=bool)
    left[last] = height[last] != 1
    check(
        left,
        "STACK_LEFTOVERS",
        lambda _, token: f"{height[token]} values are left at the end, not one",
        "Combine them with operators, or send them as separate programs",
    )


def check_indices(
    codes: Codes, values: Values, starts: Starts, variables: int, counts: NDArray[Any]
) -> None:
    """Check the indices of variables and parameters against the numbers that exist.

    A ProgramError names the first token whose index is out of range, or the first program that does
    not use its last parameter.
    """
    check = _TokenCheck(values, starts)
    check(
        (codes == VARIABLE) & (values >= variables),
        "VARIABLE_OUT_OF_RANGE",
        lambda value, _: (
            f"variable index {value:.0f} is out of range: the data set has {variables} variables"
        ),
        f"Use indices 0 to {variables - 1}",
    )
    bounds = np.repeat(counts, np.diff(starts))
    check(
        (codes == PARAMETER) & (values >= bounds),
        "PARAMETER_OUT_OF_RANGE",
        lambda value, token: f"p{value + 1:.0f} is used, and {_parameters(bounds[token])} given",
        "Give a longer parameter vector for this expression",
    )
    needed = needed_parameters(codes, values, starts)
    if (needed != counts).any():
        program = int(np.argmax(needed != counts))
        used = (
            f"p{needed[program]:.0f} is the last that is used"
            if needed[program]
            else "none is used"
        )
        raise ProgramError(
            f"{_parameters(counts[program])} given, and {used}",
            "TOO_MANY_PARAMETERS",
            "Give as many parameters as the expression has, [] where it has none",
            "parameters",
            program,
        )


def _parameters(count: int) -> str:
    return f"{count} parameter{' was' if count == 1 else 's were'}"


class _TokenCheck:
    """Raises a ProgramError for the first bad token, if there is one."""

    def __init__(self, values: Values, starts: Starts) -> None:
        self._values = values
        self._starts = starts

    def __call__(
        self, bad: NDArray[np.bool_], reason: str, message: Callable[[float, int], str], remedy: str
    ) -> None:
        token = int(bad.argmax())
        if not bad[token]:
            return
        expression = int(np.searchsorted(self._starts, token, side="right")) - 1
        raise ProgramError(
            message(float(self._values[token]), token),
            reason,
            remedy,
            "programs",
            expression,
            token - int(self._starts[expression]),
        )
