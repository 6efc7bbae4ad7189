"""Random programs from a seed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Program
from warpfit.ops import CONSTANT, OPERATORS, PARAMETER, VARIABLE

#: Operators of the random mix, `thesis_mix`.
THESIS_OPERATORS: Final = ("add", "sub", "mul", "div", "pow", "abs", "log", "exp", "sqrt")
#: How often an operator is drawn, where not once. With these the random mix has 0.29 special
#: functions a token (division, logarithm, exponential and root count 1, power 2), the density for
#: which the hardware's limits were counted.
WEIGHTS: Final[Mapping[str, float]] = {"add": 3.0, "sub": 3.0, "mul": 3.0}
_LARGEST_ARITY: Final = max(row.arity for row in OPERATORS.values())


def _shares(chances: NDArray[np.float64]) -> list[float]:
    """Return the sums of chances, as NumPy's `choice` has them."""
    sums = chances.cumsum()
    return (sums / sums[-1]).tolist()


_LEAVES: Final = (VARIABLE, PARAMETER, CONSTANT)
_LEAF_SHARES: Final = _shares(np.array([0.6, 0.25, 0.15]))


def random_program(
    rng: np.random.Generator,
    tokens: int,
    *,
    variables: int = 10,
    operators: Sequence[str] = THESIS_OPERATORS,
) -> Program:
    """Draw one program with exactly ``tokens`` tokens where the arities allow it.

    Leaves are variables (60%), parameters (each its own; 25%) and constants (15%, in [-5, 5]);
    operators are drawn by `WEIGHTS`.
    """
    codes: list[int] = []
    values: list[float] = []
    parameters = 0

    def leaf() -> None:
        nonlocal parameters
        kind = _LEAVES[bisect_right(_LEAF_SHARES, rng.random())]
        variable, constant = int(rng.integers(variables)), -5.0 + 10.0 * rng.random()
        codes.append(kind)
        if kind == PARAMETER:
            values.append(float(parameters))
            parameters += 1
        else:
            values.append(float(variable) if kind == VARIABLE else round(constant, 3))

    def grow(size: int) -> None:
        fitting, shares = _fitting(tuple(operators), min(size, _LARGEST_ARITY + 1))
        if not fitting:
            leaf()
            return
        code, arity = fitting[bisect_right(shares, rng.random())]
        if arity == 2:
            cuts = [1 + int(rng.integers(size - 2))]
        else:
            cuts = sorted((rng.choice(size - 2, arity - 1, replace=False) + 1).tolist())
        for start, stop in pairwise([0, *cuts, size - 1]):
            grow(stop - start)
        codes.append(code)
        values.append(0.0)

    grow(tokens)
    return Program(codes, values)


@cache
def _fitting(
    operators: tuple[str, ...], size: int
) -> tuple[list[tuple[int, int]], Sequence[float]]:
    """Operators that fit in so many tokens, as code and arity, and the sums of their shares.

    NumPy's `choice` takes fifty times as long for one of few.
    """
    rows = [OPERATORS[name] for name in operators if OPERATORS[name].arity < size]
    if not rows:
        return [], []
    weights = np.array([WEIGHTS.get(row.name, 1.0) for row in rows])
    return [(row.code, row.arity) for row in rows], _shares(weights / weights.sum())


def thesis_mix(
    seed: int,
    programs: int = 300,
    *,
    variables: int = 10,
    tokens: tuple[int, int] = (10, 50),
    operators: Sequence[str] = THESIS_OPERATORS,
) -> tuple[list[Program], list[NDArray[np.float64]]]:
    """Draw programs of ``tokens[0]`` to ``tokens[1]`` tokens, and parameters from [0.5, 2)."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(tokens[0], tokens[1] + 1, size=programs).tolist()
    drawn = [random_program(rng, size, variables=variables, operators=operators) for size in sizes]
    return drawn, [rng.uniform(0.5, 2.0, size=program.parameters) for program in drawn]
