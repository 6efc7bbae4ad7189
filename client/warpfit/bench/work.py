"""What is computed: tables of random numbers, and expressions that no server has seen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.expressions.workload import THESIS_OPERATORS, WEIGHTS, thesis_mix
from warpfit.ir import Program
from warpfit.ops import CONSTANT, OPERATORS, VARIABLE

VARIABLES: Final = 10
#: Trees that are drawn at most; larger batches have several expressions of each shape.
_TREES: Final = 1_000
Vectors = list[NDArray[np.float64]]
Batch = tuple[list[Program], Vectors]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Data on which expressions are evaluated."""

    X: NDArray[Any]
    """[rows, variables]."""
    y: NDArray[Any]
    """[rows]."""


def table(rows: int, seed: int, dtype: str = "float32") -> Table:
    """Draw variables uniformly from [0.5, 2) and a noisy law of them as the target."""
    rng = np.random.default_rng([seed, rows])
    columns = rng.uniform(0.5, 2.0, (VARIABLES, rows))
    law = 2 * columns[0] * np.exp(-0.5 * columns[1]) + np.sqrt(columns[2]) - columns[3]
    y = law + rng.normal(0, 0.1, rows)
    return Table(columns.T.astype(dtype), y.astype(dtype))


@dataclass
class Expressions:
    """Draws batches from one seed.

    Drawing trees takes 0.7 ms each, so trees are drawn once and what stands at their nodes is drawn
    anew for every batch: no two batches share expressions, but shapes and lengths.
    """

    seed: int
    stream: tuple[int, ...] = ()
    """Others with the same seed draw other expressions from the same trees if this differs."""
    _trees: dict[tuple[int, tuple[int, int]], list[Program]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def fresh(self, count: int, tokens: tuple[int, int]) -> Batch:
        """Draw expressions that were never drawn before, and a parameter vector for each."""
        rng = np.random.default_rng([self.seed, *self.stream, next(self._numbers)])
        programs = redrawn(self._shapes(count, tokens), rng)
        return programs, [rng.uniform(0.5, 2.0, program.parameters) for program in programs]

    def _shapes(self, count: int, tokens: tuple[int, int]) -> list[Program]:
        known = self._trees.get((count, tokens))
        if known is None:
            drawn = min(count, _TREES)
            known, _ = thesis_mix(self.seed, drawn, variables=VARIABLES, tokens=tokens)
            known = list(itertools.islice(itertools.cycle(known), count))
            self._trees[count, tokens] = known
        return known


def moved(parameters: Vectors, rng: np.random.Generator) -> Vectors:
    """Parameters as a local search would try them next: each changed by up to a tenth."""
    sizes = [len(vector) for vector in parameters]
    flat = np.concatenate(parameters) if sizes else np.empty(0)
    flat = flat * rng.uniform(0.9, 1.1, len(flat))
    return np.split(flat, np.cumsum(sizes)[:-1])


def several(parameters: Vectors, count: int, rng: np.random.Generator) -> Vectors:
    """For each expression ``count`` vectors near the one given, [count, n]; one stays as it is."""
    if count == 1:
        return parameters
    return [vector * rng.uniform(0.9, 1.1, (count, len(vector))) for vector in parameters]


def redrawn(programs: Sequence[Program], rng: np.random.Generator) -> list[Program]:
    """Draw operators, variables and constants anew; shapes and parameters stay.

    Operators are drawn from the thesis mix by the workload's weights, among those with as many
    operands.
    """
    codes = np.concatenate([program.codes for program in programs])
    values = np.concatenate([program.values for program in programs])
    for arity in (1, 2):
        names = [name for name in THESIS_OPERATORS if OPERATORS[name].arity == arity]
        known = np.array([OPERATORS[name].code for name in names], np.uint8)
        weights = np.array([WEIGHTS.get(name, 1.0) for name in names])
        places = np.flatnonzero(np.isin(codes, known))
        codes[places] = rng.choice(known, len(places), p=weights / weights.sum())
    variable, constant = codes == VARIABLE, codes == CONSTANT
    values[variable] = rng.integers(VARIABLES, size=int(variable.sum()))
    values[constant] = np.round(rng.uniform(-5, 5, int(constant.sum())), 3)
    ends = np.cumsum([len(program) for program in programs]).tolist()
    # Each token was replaced by one of its kind, so that the programs are as well-formed as before.
    return [Program._unchecked(codes[a:b], values[a:b]) for a, b in itertools.pairwise([0, *ends])]


def token_count(programs: Sequence[Program]) -> int:
    """Tokens of all programs."""
    return sum(map(len, programs))
