"""Short formulas that a search starts from.

They are small trees, products of powers, sums of two of these, and functions of both.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
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
#: Most products of powers whose sums are taken.
_MOST_TERMS: Final = 120
#: Operators whose operands may swap.
_COMMUTATIVE: Final = frozenset({"add", "mul", "min", "max"})


def library(
    operators: Sequence[str], variables: int, width: int, most: int, rng: np.random.Generator
) -> Genomes:
    """Return different short formulas, shortest first, about a seventh of ``most`` of each kind.

    The kinds are small trees, products of powers, sums, functions of products (twice), and roots,
    powers and functions of sums.
    """
    share = most // 7
    trees = _small_trees(operators, variables, share, rng)
    powers = list(itertools.islice(_products(operators, variables), share))
    plain = list(itertools.islice(_products(operators, variables, (-1, 1)), share))
    sums = sorted(_sums(operators, powers, share, rng), key=len)
    unary = [name for name in operators if OPERATORS[name].arity == 1]
    algebraic = [name for name in unary if name in _ALGEBRAIC]
    others = [name for name in unary if name not in _ALGEBRAIC]
    rooted = [name for name in unary if name not in _ALGEBRAIC or name == "sqrt"]
    functions = [
        [Program.apply(name, part) for part in parts for name in names][:most]
        for names, parts, most in (
            (rooted, [*plain, *powers], 2 * share),
            (algebraic, sums, share),
            (others, sums, share),
        )
    ]
    return _different([*trees, *powers, *sums, *itertools.chain(*functions)], width)


def arguments(operators: Collection[str], variables: int, width: int, most: int) -> Genomes:
    """Return products of powers, and sums of two variables; shortest first."""
    plain = list(itertools.islice(_products(operators, variables, (-1, 1)), most // 2))
    single = [Program.variable(place) for place in range(variables)]
    powers = itertools.islice(_products(operators, variables), most)
    sums = _sums(operators, single, most, np.random.default_rng(0))
    return _different([*plain, *sums, *powers][:most], width)


def _different(programs: Sequence[Program], width: int) -> Genomes:
    genomes = Genomes.of([program for program in programs if len(program) <= width])
    _, first = np.unique(hashes(genomes), return_index=True)
    return genomes[first[np.argsort(genomes.sizes[first], kind="stable")]]


def _sums(
    operators: Collection[str], powers: Sequence[Program], most: int, rng: np.random.Generator
) -> list[Program]:
    """Return 1 + u and 1 - u of products of powers, then the shortest u + v and u - v."""
    names = [name for name in ("add", "sub") if name in operators]
    pairs = list(itertools.combinations(powers[:_MOST_TERMS], 2))
    pairs = [pairs[place] for place in rng.permutation(len(pairs)).tolist()]
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    one = Program.constant(1.0)
    chosen = [*((one, term) for term in powers[: most // 4]), *pairs][: most // max(len(names), 1)]
    return [Program.apply(name, *pair) for pair in chosen for name in names]


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


def _products(
    operators: Collection[str], variables: int, allowed: Sequence[int] = _EXPONENTS
) -> Iterator[Program]:
    """Yield products of powers of variables by ascending sum of the exponents' sizes."""
    if not {"mul", "div"} <= set(operators):
        return
    for total in range(1, 3 * _MOST_FACTORS):
        for factors in range(1, min(_MOST_FACTORS, variables) + 1):
            exponents = [
                e for e in itertools.product(allowed, repeat=factors) if sum(map(abs, e)) == total
            ]
            for chosen in itertools.combinations(range(variables), factors):
                for powers in exponents:
                    yield product(dict(zip(chosen, powers, strict=True)), operators)


def product(powers: Mapping[int, float], operators: Collection[str]) -> Program:
    """Return a product of powers of variables, with exponents that are multiples of 1/2."""
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


def _power(index: int, power: float, operators: Collection[str]) -> Program:
    variable = Program.variable(index)
    if power % 1:
        root = Program.apply("sqrt", variable)
        return (
            root if power < 1 else Program.apply("mul", _power(index, power // 1, operators), root)
        )
    if power == 1:
        return variable
    if power == 3 and "cube" in operators:
        return Program.apply("cube", variable)
    if "square" not in operators:
        return Program.apply("mul", *[variable] * int(power))
    even = Program.apply("square", _power(index, power // 2, operators))
    return Program.apply("mul", even, variable) if power % 2 else even
