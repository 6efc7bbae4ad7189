"""Short formulas that pairs are made of, and how formulas are put together.

Formulas are a `Population`, without parameters. `packed` joins the tokens of several: ``packed([u,
v, plus])[i]`` is ``u[i] v[i] +`` in postfix. The library has small trees, products of powers, sums
of two of these, and functions of both; each kind has about a seventh of it.

All pairs of them are weighed by matrix products, which finds the best products and sums. The simple
form, for values u of m formulas, v of n others, weights w and a target t:

    for each u, v:
        error[u, v] = least sum of w (t - a - c u - b u v)^2     (a sum: - a - c u - b v)
    return the ``count`` pairs with the least errors

With all rows multiplied by sqrt(w), and with the target r and the formula f = u v (or v) without
what the *known* rows and u explain (the constant is known), the error is r.r - (f.r)^2 / f.f. Here
f.f = (uv).(uv) - sum of (uv.row)^2 over an orthonormal basis of what is fitted beside, and all
products of one kind are a matrix product: u r, u and u row with v, u^2 with v^2. That takes four
matrix products for products and two for sums.

An engine weighs pairs by its `Weigher`, which keeps the best pairs exactly: ties go by the order of
the pairs, and the errors that it returns are fitted in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Population, pieces
from warpfit.ops import ARITIES, BY_CODE, CONSTANT, OPERATORS, VARIABLE
from warpfit_server.engine.interface import Steps

Floats: TypeAlias = NDArray[np.float64]
Singles: TypeAlias = NDArray[np.float32]
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
#: Numbers of columns that are ranked in one step.
_RANKED_NUMBERS: Final = 1 << 14
#: Operators whose operands may swap.
_COMMUTATIVE: Final = frozenset({"add", "mul", "min", "max"})
#: Whether an operator of each code may be inside of one that is algebraic, or is not.
_MAY_BE_INSIDE: Final = {
    is_algebraic: np.array(
        [
            ARITIES[code] != 1 or (BY_CODE[code].name in _ALGEBRAIC) != is_algebraic
            for code in range(len(ARITIES))
        ]
    )
    for is_algebraic in (False, True)
}
#: A formula whose variance beside what is fitted with it is below this part of its mean square is
#: left out: it is a rounding error of a constant.
LEAST_VARIATION: Final = 1e-4
#: Error with which a formula u explains a target of variance 1, so that its pairs are left out:
#: values are rounded to float32.
LEAST_REST: Final = 1e-12


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
    powers = _products(operators, columns, share)
    yield None
    plain = _products(operators, columns, share, (-1, 1))
    yield None
    sums = _shortest_first(_sums(operators, powers, share, rng))
    yield None
    unary = [name for name in operators if OPERATORS[name].arity == 1]
    algebraic = [name for name in unary if name in _ALGEBRAIC]
    others = [name for name in unary if name not in _ALGEBRAIC]
    rooted = [name for name in unary if name not in _ALGEBRAIC or name == "sqrt"]
    trees = _small_trees(operators, columns, share, rng)
    yield None
    found = [
        trees,
        powers,
        sums,
        _functions(rooted, joined([plain, powers]), 2 * share),
        _functions(algebraic, sums, share),
        _functions(others, sums, share),
    ]
    return _shortest_first(joined(found))


def arguments(operators: Sequence[str], columns: Sequence[int], most: int) -> Population:
    """Return products of powers, and sums of two variables; shortest first."""
    single = _variables(columns)
    plain = _products(operators, columns, most // 2, (-1, 1))
    powers = _products(operators, columns, most)
    sums = _sums(operators, single, most, np.random.default_rng(0))
    return _shortest_first(joined([single, plain, sums, powers])[:most])


def _shortest_first(formulas: Population) -> Population:
    return formulas[np.argsort(formulas.lengths, kind="stable")]


def applied(name: str, *operands: Formula) -> Formula:
    """Apply an operator."""
    return (*itertools.chain(*operands), (OPERATORS[name].code, 0.0))


def _applied(name: str, *operands: Population) -> Population:
    """Apply an operator to each formula of its operands."""
    return packed([*operands, tokens(np.full(len(operands[0]), OPERATORS[name].code))])


def _functions(names: Sequence[str], parts: Population, most: int) -> Population:
    """Apply all operators of one operand to the first formulas, at most ``most`` in all."""
    if not names:
        return parts[:0]
    parts = parts[: -(-most // len(names))]
    codes = np.array([OPERATORS[name].code for name in names])
    inner = parts[np.repeat(np.arange(len(parts)), len(names))]
    return packed([inner, tokens(np.tile(codes, len(parts)))])[:most]


def _variables(columns: Sequence[int]) -> Population:
    return tokens(np.full(len(columns), VARIABLE), np.asarray(columns, float))


def _sums(
    operators: Collection[str], powers: Population, most: int, rng: np.random.Generator
) -> Population:
    """Return 1 + u and 1 - u of products of powers, then the shortest u + v and u - v."""
    names = [name for name in ("add", "sub") if name in operators]
    if not names:
        return powers[:0]
    pairs = np.array(np.triu_indices(min(len(powers), _MOST_TERMS), 1))
    pairs = pairs[:, rng.permutation(pairs.shape[1])]
    sizes = powers.lengths[pairs].sum(axis=0)
    first, second = pairs[:, np.argsort(sizes, kind="stable")[:most]]
    alone = powers[: most // 4]
    left = joined([_of_one(len(alone)), powers[first]])[: most // len(names)]
    right = joined([alone, powers[second]])[: most // len(names)]
    both = joined([_applied(name, left, right) for name in names])
    return both[np.arange(len(both)).reshape(len(names), -1).T.ravel()]


def _of_one(count: int) -> Population:
    return tokens(np.full(count, CONSTANT), 1.0)


def _small_trees(
    operators: Sequence[str], columns: Sequence[int], most: int, rng: np.random.Generator
) -> Population:
    """Return all trees over the variables and 1 by size, and a sample of the last size."""
    leaves = _variables(columns)
    sizes = {1: joined([leaves, _of_one(1)])}
    found, left = [leaves], most - len(columns)
    for size in range(2, _TREE_SIZE + 1):
        groups, rest = list[tuple[str, Population, Population]](), size - 1
        for name in operators:
            arity = OPERATORS[name].arity
            if arity == 1:  # which has anything as its second operand
                parts = sizes[rest]
                roots = parts.codes[parts.starts[1:] - 1]
                inner = parts[_MAY_BE_INSIDE[name in _ALGEBRAIC][roots]]
                groups.append((name, inner, sizes[1][:1]))
            if arity == 2:
                last = rest // 2 if name in _COMMUTATIVE else rest - 1
                groups += [(name, sizes[a], sizes[rest - a]) for a in range(1, last + 1)]
        ends = np.cumsum([0, *(len(one) * len(other) for _, one, other in groups)])
        count = int(ends[-1])
        if count > left:
            drawn = np.sort(rng.choice(count, max(left, 0), replace=False, shuffle=False))
        else:
            drawn = np.arange(count)
        made = [leaves[:0]]
        for (name, one, other), first, stop in zip(groups, ends, ends[1:], strict=False):
            own = drawn[slice(*np.searchsorted(drawn, (first, stop)))] - first
            operands = [one[own // len(other)], other[own % len(other)]]
            made.append(_applied(name, *operands[: OPERATORS[name].arity]))
        trees = joined(made)
        owners = np.repeat(np.arange(len(trees)), trees.lengths)
        variables = np.bincount(owners[trees.codes == VARIABLE], minlength=len(trees))
        sizes[size] = trees[variables > 0]
        found.append(sizes[size])
        left -= len(drawn)
    return joined(found)


def _products(
    operators: Collection[str],
    columns: Sequence[int],
    most: int,
    allowed: Sequence[int] = _EXPONENTS,
) -> Population:
    """Return products of powers of variables by ascending sum of the exponents' sizes."""
    found = [formulas_of([])]
    if not {"mul", "div"} <= set(operators):
        return found[0]
    for total in range(1, 3 * _MOST_FACTORS):
        for factors in range(1, min(_MOST_FACTORS, len(columns)) + 1):
            exponents = [
                e for e in itertools.product(allowed, repeat=factors) if sum(map(abs, e)) == total
            ]
            room = most - sum(map(len, found))
            if not exponents or room <= 0:
                continue
            wanted = -(-room // len(exponents))
            chosen = np.array([*itertools.islice(itertools.combinations(columns, factors), wanted)])
            made = []
            for one in exponents:  # its variable i becomes column ``chosen[:, i]``
                formula = product(dict(enumerate(one)), operators)
                codes, values = (np.array(part) for part in zip(*formula, strict=True))
                numbers, variables = np.tile(values, (len(chosen), 1)), codes == VARIABLE
                numbers[:, variables] = chosen[:, values[variables].astype(np.int64)]
                codes = np.tile(codes.astype(np.uint8), len(chosen))
                lengths = np.full(len(chosen), len(formula), np.uint32)
                made.append(Population(codes, numbers.reshape(-1), lengths))
            order = np.arange(len(made) * len(chosen)).reshape(len(made), -1).T.ravel()
            found.append(joined(made)[order[:room]])
    return joined(found)


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
    variable: Formula = ((VARIABLE, float(column)),)
    if power % 1:
        root = applied("sqrt", variable)
        return root if power < 1 else _times([_power(column, power // 1, operators), root])
    if power == 3 and "cube" in operators:
        return applied("cube", variable)
    if power == 1 or "square" not in operators:
        return _times([variable] * int(power))
    even = applied("square", _power(column, power // 2, operators))
    return _times([even, variable]) if power % 2 else even


def relevant(X: Floats, target: Floats, most: int) -> Steps[Indices]:
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

    own = ranked(target[None])[0], ranked(np.abs(target - np.median(target))[None])[0]
    found = np.empty(len(X))
    some = max(1, _RANKED_NUMBERS // len(target))
    for part in (slice(first, first + some) for first in range(0, len(X), some)):
        columns = X[part]
        spreads = ranked(np.abs(columns - np.median(columns, axis=1, keepdims=True)))
        sides = ranked(columns) @ own[0], spreads @ own[0], spreads @ own[1]
        found[part] = np.abs(sides).max(axis=0)
        yield None
    return np.sort(np.argsort(-found, kind="stable")[:most])


# -------------------------------------------------------------------------------- weighing of pairs


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """What pairs are fitted to, and what is fitted beside them."""

    roots: Floats
    """Square roots of the weights, [rows]; the weights' sum is 1."""
    known: Floats
    """Orthonormal rows that are fitted beside each pair, times the roots: the constant, and a
    formula that pairs are added to; [known, rows]."""
    target: Floats
    """Target times the roots without what the known rows explain, [rows]."""
    is_product: bool
    """Whether pairs are products u v, or sums u + v."""
    beside: bool = True
    """Whether u is fitted beside a product; it always is beside a sum."""

    @classmethod
    def of(
        cls, target: Floats, weights: Floats, base: Floats, is_product: bool, beside: bool = True
    ) -> Fit:
        """Describe a fit beside the formulas of which ``base`` has the values, [formulas, rows]."""
        roots = np.sqrt(weights)
        basis = np.vstack([np.ones_like(roots), base]) * roots
        known = np.zeros((0, len(roots)))
        for row in basis:
            length = np.linalg.norm(row)
            for _ in range(2):
                row = row - (known @ row) @ known
            rest = np.linalg.norm(row)
            if rest > np.sqrt(LEAST_VARIATION) * length:
                known = np.vstack([known, row / rest])
        own = target * roots
        return cls(roots, known, own - (known @ own) @ known, is_product, beside)

    def sides(self, left: Singles) -> Sides:
        """Prepare left formulas, [formulas, rows]."""
        weighted = left * self.roots
        own = np.zeros_like(weighted)
        if self.beside:
            own = weighted.copy()
            for _ in range(2):
                own -= (own @ self.known.T) @ self.known
            length, before = np.linalg.norm(own, axis=1), np.linalg.norm(weighted, axis=1)
            sound = length > np.sqrt(LEAST_VARIATION) * before
            own = np.where(sound[:, None], own, 0.0) / np.where(sound, length, 1.0)[:, None]
        target = self.target - (own @ self.target)[:, None] * own
        return Sides(left, own, target, np.square(target).sum(axis=1))


@dataclass(frozen=True, slots=True, eq=False)
class Sides:
    """Left formulas of a fit."""

    values: Singles
    """[formulas, rows]."""
    own: Floats
    """Unit rows of what each formula adds to the known rows, or 0; [formulas, rows]."""
    targets: Floats
    """The target without what the known rows and the formula explain, [formulas, rows]."""
    rest: Floats
    """Squared lengths of the targets, [formulas]."""

    def factors(self, fit: Fit) -> Floats:
        """Return the left factors of the matrix products with v, [products, formulas, rows].

        The first is that of f.r, the others are those of the projections of f.
        """
        shape = self.own.shape
        if not fit.is_product:
            return np.stack([self.targets, self.own]) * fit.roots
        rows = [self.targets, *([self.own] if fit.beside else [])]
        rows += [np.broadcast_to(row, shape) for row in fit.known]
        return np.stack(rows) * (self.values * fit.roots)


class Weigher(Protocol):
    """Weighs pairs on an engine."""

    block: int
    """Most left formulas that are weighed together, and of which the best pairs are kept."""
    kept: int
    """Pairs of a block that are worth keeping."""
    rows: int
    """Rows on which it is worth to weigh pairs, about; what is best is fitted on all rows."""

    def prepared(self, values: Singles) -> Any:
        """Return values of formulas, [formulas, rows], in the form in which `best` takes them.

        Its length is the number of formulas. What is prepared once may be used by many calls.
        """

    def best(
        self, fit: Fit, left: Singles, right: Sequence[Any], count: int
    ) -> Steps[tuple[Floats, Indices, Indices]]:
        """Return errors in ascending order and the places of the best pairs, at most ``count``.

        Args:
            fit: what pairs are fitted to.
            left: values of at most ``block`` formulas, [left, rows].
            right: the others, as `prepared` returns them; a place counts through all of them.
            count: of pairs to return.
        """

    def close(self) -> None:
        """End its threads, and free its memory."""

    def bytes_needed(self, rows: int, count: int) -> int:
        """Return the bytes of memory beside the arguments, at most."""
