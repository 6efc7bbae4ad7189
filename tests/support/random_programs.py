"""Random programs from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    arities = {name: OPERATORS[name].arity for name in operators}
    codes: list[int] = []
    values: list[float] = []

    def leaf() -> None:
        kind = rng.choice([VARIABLE, PARAMETER, CONSTANT], p=[0.6, 0.25, 0.15])
        value = {
            VARIABLE: float(rng.integers(variables)),
            PARAMETER: float(codes.count(PARAMETER)),
            CONSTANT: round(float(rng.uniform(-5, 5)), 3),
        }[int(kind)]
        codes.append(int(kind))
        values.append(value)

    def grow(size: int) -> None:
        fitting = [name for name in operators if arities[name] < size]
        if not fitting:
            leaf()
            return
        weights = np.array([WEIGHTS.get(name, 1.0) for name in fitting])
        name = fitting[int(rng.choice(len(fitting), p=weights / weights.sum()))]
        cuts = np.sort(rng.choice(size - 2, arities[name] - 1, replace=False)) + 1
        for part in np.diff([0, *cuts, size - 1]).tolist():
            grow(part)
        codes.append(OPERATORS[name].code)
        values.append(0.0)

    grow(tokens)
    return Program(codes, values)


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
