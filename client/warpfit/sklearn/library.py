"""Short formulas that a search starts from: small trees, and products of powers."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import numpy as np

from warpfit.ir import Program
from warpfit.ops import BY_CODE, OPERATORS
from warpfit.sklearn.genomes import Genomes, hashes

#: Most tokens of a small tree.
_TREE_SIZE: Final = 6
#: Exponents of products of powers, as they can be written.
_EXPONENTS: Final = (-3, -2, -1, 1, 2, 3)
_MOST_FACTORS: Final = 4
#: Operators of one operand that are roots and powers. One of the others inside of another of them,
#: and these inside of each other, are left out of small trees.
_ALGEBRAIC: Final = frozenset({"square", "cube", "sqrt", "cbrt", "inv", "neg", "abs"})
#: Operators whose operands may swap.
_COMMUTATIVE: Final = frozenset({"add", "mul", "min", "max"})


def library(
    operators: Sequence[str], variables: int, width: int, most: int, rng: np.random.Generator
) -> Genomes:
    """Return different short formulas, half of ``most`` of each kind, shortest first."""
    trees = _small_trees(operators, variables, most // 2, rng)
    powers = list(itertools.islice(_products(operators, variables), most - len(trees)))
    fitting = [program for program in (*trees, *powers) if len(program) <= width]
    genomes = Genomes.of(fitting, width)
    _, first = np.unique(hashes(genomes), return_index=True)
    return genomes[first[np.argsort(genomes.sizes[first], kind="stable")]]


def _small_trees(
    operators: Sequence[str], variables: int, most: int, rng: np.random.Generator
) -> list[Program]:
    """Return all trees over the variables and 1 by size, and a sample of the last size."""
    one = Program.constant(1.0)
    sizes = {1: [*map(Program.variable, range(variables)), one]}
    found = sizes[1][:-1][:most]
    for size in range(2, _TREE_SIZE + 1):
        if len(found) >= most:
            break
        made = [(name, parts) for name in operators for parts in _operands(name, size - 1, sizes)]
        if len(made) > most - len(found):
            chosen = rng.choice(len(made), most - len(found), replace=False)
            made = [made[index] for index in np.sort(chosen).tolist()]
        made = [(name, parts) for name, parts in made if any(part is not one for part in parts)]
        sizes[size] = [Program.apply(name, *parts) for name, parts in made]
        found += sizes[size]
    return found


def _operands(
    name: str, tokens: int, sizes: dict[int, list[Program]]
) -> Iterator[tuple[Program, ...]]:
    """Yield operands of one operator with this number of tokens in all."""
    arity = OPERATORS[name].arity
    if arity == 1:
        for part in sizes[tokens]:
            inner = BY_CODE.get(int(part.codes[-1]))
            both = (name in _ALGEBRAIC, inner is not None and inner.name in _ALGEBRAIC)
            if inner is None or inner.arity != 1 or sum(both) == 1:
                yield (part,)
    elif arity == 2:
        for left in range(1, tokens):
            if name in _COMMUTATIVE and left > tokens - left:
                return
            yield from itertools.product(sizes[left], sizes[tokens - left])


def _products(operators: Collection[str], variables: int) -> Iterator[Program]:
    """Yield products of powers of variables by ascending sum of the exponents' sizes."""
    if not {"mul", "div"} <= set(operators):
        return
    for total in range(2, 3 * _MOST_FACTORS):
        for factors in range(1, min(_MOST_FACTORS, variables) + 1):
            exponents = [
                e
                for e in itertools.product(_EXPONENTS, repeat=factors)
                if sum(map(abs, e)) == total
            ]
            for chosen in itertools.combinations(range(variables), factors):
                for powers in exponents:
                    yield _product(dict(zip(chosen, powers, strict=True)), operators)


def _product(powers: dict[int, int], operators: Collection[str]) -> Program:
    above = [_power(index, power, operators) for index, power in powers.items() if power > 0]
    below = [_power(index, -power, operators) for index, power in powers.items() if power < 0]
    sides = [
        side[0]
        if len(side) == 1
        else Program.apply("mul", *side)
        if side
        else Program.constant(1.0)
        for side in (above, below)
    ]
    return Program.apply("div", *sides) if below else sides[0]


def _power(index: int, power: int, operators: Collection[str]) -> Program:
    variable = Program.variable(index)
    name = {2: "square", 3: "cube"}.get(power, "")
    if name in operators:
        return Program.apply(name, variable)
    if power == 3 and "square" in operators:
        return Program.apply("mul", Program.apply("square", variable), variable)
    return variable if power == 1 else Program.apply("mul", *[variable] * power)
