"""Batches to evaluate: fresh random expressions, and samples of recorded populations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.expressions.workload import THESIS_OPERATORS, WEIGHTS, thesis_mix
from warpfit.ir import Program
from warpfit.ops import CONSTANT, OPERATORS, VARIABLE, Operator

VARIABLES: Final = 10
#: Name of the random expressions: 10 to 50 tokens over all variables.
THESIS: Final = "thesis"
GENERATIONS: Final = (0, 5, 25)
#: Names of the recorded populations, 1,000 expressions each.
RECORDED: Final = tuple(
    f"{library} generation {number}" for library in ("DEAP", "pyoperon") for number in GENERATIONS
)
#: Trees that are drawn at most; larger batches have several expressions of each shape.
_TREES: Final = 1_000
Vectors = list[NDArray[np.float64]]
Batch = tuple[list[Program], Vectors]


class Table(NamedTuple):
    """Variables X [rows, variables] and target y [rows]."""

    X: NDArray[Any]
    y: NDArray[Any]


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

    Drawing a random tree takes 0.7 ms, so trees are drawn once, and what stands at their nodes anew
    for every batch: batches share shapes and lengths, but no expression.
    """

    seed: int
    stream: tuple[int, ...] = ()
    """Others with the same seed draw other expressions from the same trees if this differs."""
    _trees: dict[int, list[Program]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def draw(self, count: int, workload: str = THESIS) -> Batch:
        """Draw expressions and a parameter vector for each.

        Those of the random mix were never drawn before; of a recorded population it is another
        sample without repetition.
        """
        rng = np.random.default_rng([self.seed, *self.stream, next(self._numbers)])
        if workload == THESIS:
            programs = redrawn(self._shapes(count), rng)
            return programs, [rng.uniform(0.5, 2.0, program.parameters) for program in programs]
        population, parameters = recorded(workload)
        chosen = rng.permutation(len(population))[:count].tolist()
        return [population[index] for index in chosen], [parameters[index] for index in chosen]

    def _shapes(self, count: int) -> list[Program]:
        if count not in self._trees:
            drawn, _ = thesis_mix(self.seed, min(count, _TREES), variables=VARIABLES)
            self._trees[count] = list(itertools.islice(itertools.cycle(drawn), count))
        return self._trees[count]


@cache
def recorded(name: str) -> Batch:
    """Read one of the `RECORDED` populations and its parameters.

    ``tests/bench/client/record_populations.py`` has recorded them.
    """
    with np.load(Path(__file__).with_name("populations.npz")) as file:
        parts = ("lengths", "codes", "values", "parameters")
        lengths, codes, values, parameters = (file[f"{name}/{part}"] for part in parts)
    ends = np.cumsum(lengths)[:-1]
    pairs = zip(np.split(codes, ends), np.split(values, ends), strict=True)
    programs = [Program(*pair) for pair in pairs]
    counts = np.cumsum([program.parameters for program in programs])[:-1]
    return programs, np.split(parameters.astype(np.float64), counts)


def near(parameters: Vectors, rng: np.random.Generator, *count: int) -> Vectors:
    """Change each parameter by up to a tenth, as a local search would: vectors [*count, n]."""
    return [vector * rng.uniform(0.9, 1.1, (*count, len(vector))) for vector in parameters]


def redrawn(programs: Sequence[Program], rng: np.random.Generator) -> list[Program]:
    """Draw operators (with the weights of the mix), variables and constants of trees anew."""
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


def operations(programs: Sequence[Program]) -> tuple[int, int, int]:
    """Count tokens, operators that depend on a variable, and how many of these are different.

    An interpreter executes the operators that depend on a variable for each row, because what is
    the same for all rows is computed once before. Compiled code computes a value that occurs again
    once, too; constants and parameters are each expression's own there, because it reads them at
    run time. The last number is a lower bound: a kernel holds a part of a large batch.
    """
    known: dict[tuple[object, ...], tuple[int, bool]] = {}
    varying: list[bool] = []
    for number, program in enumerate(programs):

        def leaf(code: int, value: float, number: int = number) -> tuple[int, bool]:
            owner = -1 if code == VARIABLE else number
            return known.setdefault((code, value, owner), (len(known), code == VARIABLE))

        def operator(op: Operator, operands: list[tuple[int, bool]]) -> tuple[int, bool]:
            varying.append(any(varies for _, varies in operands))
            return known.setdefault((op.code, *operands), (len(known), varying[-1]))

        program.fold(leaf, operator)
    # The second entry of an operation's key is an operand, that of a leaf's key a number.
    different = sum(varies for key, (_, varies) in known.items() if isinstance(key[1], tuple))
    return sum(map(len, programs)), sum(varying), different
