"""Short formulas that pairs are made of, and how formulas are put together.

Formulas are a `Population`, without parameters. `packed` joins the tokens of several: ``packed([u,
v, plus])[i]`` is ``u[i] v[i] +`` in postfix. The library has small trees, products of powers, sums
of two of these, and functions of both; each kind has about a seventh of it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Population, pieces
from warpfit.ops import ARITIES, BY_CODE, CONSTANT, OPERATORS, VARIABLE
from warpfit_server.engine.interface import Steps

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]
#: Tokens of one formula: code and value.
Formula: TypeAlias = tuple[tuple[int, float], ...]

ADD, SUB, MUL, DIV = (OPERATORS[name].code for name in ("add", "sub", "mul", "div"))
_ONE: Final[Formula] = ((CONSTANT, 1.0),)
#: Most tokens of a small tree.
_TREE_SIZE: Final = 6
#: Exponents of products of powers, as they can be written.
_EXPONENTS: Final = (-3, -2, -1, 1, 2, 3)
_MOST_FACTORS: Final = 4
#: Most products of powers whose sums are taken.
_MOST_TERMS: Final = 120
#: Operators of one operand that are roots and powers. One of the others inside of another of them,
#: and these inside of each other, are left out of small trees.
_ALGEBRAIC: Final = frozenset({"square", "cube", "sqrt", "cbrt", "inv", "neg", "abs"})
#: Operators whose operands may swap.
_COMMUTATIVE: Final = frozenset({"add", "mul", "min", "max"})
#: Formulas that are written without a pause.
_AT_ONCE: Final = 2_000


# -------------------------------------------------------------------------------------- formulas


def formulas_of(formulas: Sequence[Formula]) -> Population:
    """Lay out formulas."""
    tokens = [*itertools.chain.from_iterable(formulas)]
    codes, values = zip(*tokens, strict=True) if tokens else ((), ())
    lengths = np.array([*map(len, formulas)], np.uint32)
    return Population(np.array(codes, np.uint8), np.array(values, np.float64), lengths)


def joined(parts: Sequence[Population]) -> Population:
    """Return the formulas of all parts, one part after the other."""
    arrays = ((part.codes, part.values, part.lengths) for part in parts)
    return Population(*map(np.concatenate, zip(*arrays, strict=True)))


def packed(blocks: Sequence[Population]) -> Population:
    """Concatenate blocks formula by formula: result[i] is block0[i] block1[i] ..."""
    together, count = joined(blocks), len(blocks[0])
    order = np.arange(len(together)).reshape(len(blocks), count).T
    tokens = pieces(together.starts, order.ravel())
    lengths = together.lengths[order].sum(axis=1, dtype=np.uint32)
    return Population(together.codes[tokens], together.values[tokens], lengths)


def tokens(codes: Any, values: Any = 0.0) -> Population:
    """Return formulas of one token each, or none where the code is 0."""
    codes = np.asarray(codes, np.uint8)
    used = codes > 0
    return Population(
        codes[used], np.broadcast_to(values, codes.shape)[used] * 1.0, used.astype(np.uint32)
    )


# --------------------------------------------------------------------------------------- library


def library(operators: Sequence[str], columns: Sequence[int], most: int) -> Steps[Population]:
    """Return short formulas, about ``most``, shortest first; some have the same values.

    Args:
        operators: names of the operators that formulas may have.
        columns: variables that they may have.
        most: number of formulas.
    """
    rng = np.random.default_rng(1)
    share = max(most // 7, 1)
    trees = yield from _taken(_small_trees(operators, columns, share, rng), share)
    powers = yield from _taken(_products(operators, columns), share)
    plain = yield from _taken(_products(operators, columns, (-1, 1)), share)
    sums = sorted(_sums(operators, powers, share, rng), key=len)
    yield None
    unary = [name for name in operators if OPERATORS[name].arity == 1]
    algebraic = [name for name in unary if name in _ALGEBRAIC]
    others = [name for name in unary if name not in _ALGEBRAIC]
    rooted = [name for name in unary if name not in _ALGEBRAIC or name == "sqrt"]
    found = [*trees, *powers, *sums]
    for names, parts, count in (
        (rooted, [*plain, *powers], 2 * share),
        (algebraic, sums, share),
        (others, sums, share),
    ):
        made = (applied(name, part) for part in parts for name in names)
        found += yield from _taken(made, count)
    return (yield from _laid_out(found))


def arguments(operators: Sequence[str], columns: Sequence[int], most: int) -> Steps[Population]:
    """Return products of powers, and sums of two variables; shortest first."""
    plain = yield from _taken(_products(operators, columns, (-1, 1)), most // 2)
    powers = yield from _taken(_products(operators, columns), most)
    single = [_variable(column) for column in columns]
    sums = _sums(operators, single, most, np.random.default_rng(0))
    return (yield from _laid_out([*single, *plain, *sums, *powers][:most]))


def _taken(formulas: Iterable[Formula], most: int) -> Steps[list[Formula]]:
    source, found = iter(formulas), list[Formula]()
    while len(found) < most:
        part = list(itertools.islice(source, min(_AT_ONCE, most - len(found))))
        if not part:
            break
        found += part
        yield None
    return found


def _laid_out(formulas: list[Formula]) -> Steps[Population]:
    """Lay out formulas, shortest first."""
    ordered = sorted(formulas, key=len)
    parts = [formulas_of([])]
    for start in range(0, len(ordered), _AT_ONCE):
        parts.append(formulas_of(ordered[start : start + _AT_ONCE]))
        yield None
    return joined(parts)


def applied(name: str, *operands: Formula) -> Formula:
    """Apply an operator."""
    return (*itertools.chain(*operands), (OPERATORS[name].code, 0.0))


def _variable(column: int) -> Formula:
    return ((VARIABLE, float(column)),)


def _sums(
    operators: Collection[str], powers: Sequence[Formula], most: int, rng: np.random.Generator
) -> list[Formula]:
    """Return 1 + u and 1 - u of products of powers, then the shortest u + v and u - v."""
    names = [name for name in ("add", "sub") if name in operators]
    pairs = list(itertools.combinations(powers[:_MOST_TERMS], 2))
    pairs = [pairs[place] for place in rng.permutation(len(pairs)).tolist()]
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    chosen = [*((_ONE, term) for term in powers[: most // 4]), *pairs][: most // max(len(names), 1)]
    return [applied(name, *pair) for pair in chosen for name in names]


def _small_trees(
    operators: Sequence[str], columns: Sequence[int], most: int, rng: np.random.Generator
) -> Iterator[Formula]:
    """Yield all trees over the variables and 1 by size, and a sample of the last size."""
    sizes: dict[int, list[Formula]] = {1: [*map(_variable, columns), _ONE]}
    yield from sizes[1][:-1]
    left = most - len(columns)
    for size in range(2, _TREE_SIZE + 1):
        groups = [group for name in operators for group in _operands(name, size, sizes)]
        ends = np.cumsum([count for count, _ in groups], dtype=np.int64)
        count = int(ends[-1]) if len(ends) else 0
        drawn = range(count)
        if count > left:
            drawn = np.sort(rng.choice(count, max(left, 0), replace=False)).tolist()
        sizes[size] = []
        for place in drawn:
            group = bisect_right(ends, place)
            formula = groups[group][1](place - int(ends[group]) + groups[group][0])
            if any(code == VARIABLE for code, _ in formula):
                sizes[size].append(formula)
                yield formula
        left -= len(drawn)


def _operands(
    name: str, size: int, sizes: Mapping[int, list[Formula]]
) -> Iterator[tuple[int, Callable[[int], Formula]]]:
    """Yield numbers of trees with this operator at the root, and a function that makes each."""
    arity = OPERATORS[name].arity
    if arity == 1:
        parts = [part for part in sizes[size - 1] if _may_be_inside(part[-1][0], name)]
        yield len(parts), lambda place: applied(name, parts[place])
    for first in range(1, size - 1) if arity == 2 else ():
        if name in _COMMUTATIVE and first > size - 1 - first:
            return
        left, right = sizes[first], sizes[size - 1 - first]

        def pair(place: int, left: Any = left, right: Any = right) -> Formula:
            return applied(name, left[place // len(right)], right[place % len(right)])

        yield len(left) * len(right), pair


def _may_be_inside(code: int, name: str) -> bool:
    if ARITIES[code] != 1:
        return True
    return (name in _ALGEBRAIC) != (BY_CODE[code].name in _ALGEBRAIC)


def _products(
    operators: Collection[str], columns: Sequence[int], allowed: Sequence[int] = _EXPONENTS
) -> Iterator[Formula]:
    """Yield products of powers of variables by ascending sum of the exponents' sizes."""
    if not {"mul", "div"} <= set(operators):
        return
    for total in range(1, 3 * _MOST_FACTORS):
        for factors in range(1, min(_MOST_FACTORS, len(columns)) + 1):
            exponents = [
                e for e in itertools.product(allowed, repeat=factors) if sum(map(abs, e)) == total
            ]
            for chosen in itertools.combinations(columns, factors) if exponents else ():
                for powers in exponents:
                    yield product(dict(zip(chosen, powers, strict=True)), operators)


def product(powers: Mapping[int, float], operators: Collection[str]) -> Formula:
    """Return a product of powers of variables, with exponents that are multiples of 1/2."""
    above = [_power(column, power, operators) for column, power in powers.items() if power > 0]
    below = [_power(column, -power, operators) for column, power in powers.items() if power < 0]
    sides = [_times(side) for side in (above, below)]
    return applied("div", *sides) if below else sides[0]


def _times(factors: Sequence[Formula]) -> Formula:
    made = factors[0] if factors else _ONE
    for factor in factors[1:]:
        made = applied("mul", made, factor)
    return made


def _power(column: int, power: float, operators: Collection[str]) -> Formula:
    variable = _variable(column)
    if power % 1:
        root = applied("sqrt", variable)
        return root if power < 1 else _times([_power(column, power // 1, operators), root])
    if power == 3 and "cube" in operators:
        return applied("cube", variable)
    if power == 1 or "square" not in operators:
        return _times([variable] * int(power))
    even = applied("square", _power(column, power // 2, operators))
    return _times([even, variable]) if power % 2 else even


def relevant(X: Floats, target: Floats, most: int) -> Indices:
    """Return the variables that say most about a target alone, at most so many; ascending.

    Spearman's correlation is taken of the target with each variable, and with its square, and of
    the square of the target with the latter, which a product of two variables makes.

    Args:
        X: [variables, rows].
        target: [rows].
        most: number of variables.
    """
    if len(X) <= most:
        return np.arange(len(X))

    def ranked(rows: Floats) -> Floats:
        ranks = rows.argsort(axis=1).argsort(axis=1) + 0.0
        ranks[np.ptp(rows, axis=1) == 0.0] = 0.0
        ranks -= ranks.mean(axis=1, keepdims=True)
        length = np.linalg.norm(ranks, axis=1, keepdims=True)
        return np.asarray(ranks / np.maximum(length, 1e-300))

    sides = ranked(X), ranked(np.abs(X - np.median(X, axis=1, keepdims=True)))
    own = ranked(target[None])[0], ranked(np.abs(target - np.median(target))[None])[0]
    found = np.abs([sides[0] @ own[0], sides[1] @ own[0], sides[1] @ own[1]]).max(axis=0)
    return np.sort(np.argsort(-found, kind="stable")[:most])
