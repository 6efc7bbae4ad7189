"""Variation: new formulas from old ones, thousands at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from warpfit.ops import CONSTANT, VARIABLE
from warpfit.sklearn.genomes import (
    OPERANDS,
    Codes,
    Floats,
    Genomes,
    Indices,
    Mask,
    joined,
    ranges,
    simplified,
    tokens,
)

#: Chance that a drawn leaf is a constant, and that this constant is 1.
_CONSTANT_CHANCE: Final = 0.2
_ONE_CHANCE: Final = 0.5
#: Chance that a drawn operator has one operand, if there are others.
_UNARY_CHANCE: Final = 0.3
#: Chance that a formula is joined as a whole, not one of its parts.
_WHOLE_CHANCE: Final = 0.5
#: Rounds of growth of a drawn formula, each taken with a chance.
_ROUNDS: Final = 5
_GROWTH_CHANCE: Final = 0.6
#: Small formulas that are drawn at a time.
_STOCK: Final = 1 << 12
#: Chances of the kinds of offspring.
_KINDS: Final = {
    "replace by a part of the other parent": 0.3,
    "join with a part of the other parent": 0.2,
    "replace by a drawn part": 0.1,
    "join with a drawn part": 0.12,
    "hoist": 0.1,
    "substitute": 0.18,
}
_CROSS, _JOIN, _GRAFT, _EXTEND, _HOIST, _SUBSTITUTE = range(len(_KINDS))


@dataclass
class Breeder:
    """Draws formulas and varies them."""

    rng: np.random.Generator
    operators: tuple[int, ...]
    """Wire codes to draw from."""
    variables: int
    width: int
    """Most tokens of a formula."""

    def __post_init__(self) -> None:
        """Begin with an empty stock of small formulas, of which many are drawn at a time."""
        self._stock, self._used = tokens([]), 0
        np.empty(1 << 21)  # Once it is freed, the C library keeps the memory of smaller arrays.

    @cached_property
    def _codes(self) -> Codes:
        return np.array(self.operators, np.uint8)

    @cached_property
    def _operator_weights(self) -> Floats:
        """Chance of each operator: those of one operand share a fixed part."""
        unary = OPERANDS[self._codes] == 1
        if unary.all() or not unary.any():
            return np.full(len(unary), 1.0 / len(unary))
        others = np.count_nonzero(~unary)
        chances = (_UNARY_CHANCE / (len(unary) - others), (1 - _UNARY_CHANCE) / others)
        return np.where(unary, *chances)

    def first(self, count: int) -> Genomes:
        """Draw formulas for a first generation, or immigrants; simplified."""
        return simplified(self._grown(count))

    def offspring(self, genomes: Genomes, mothers: Indices, fathers: Indices) -> Genomes:
        """Cross each pair of parents, or mutate the mother, also where a child would be too long.

        Args:
            genomes: the population.
            mothers: rows of the first parents, [pairs].
            fathers: rows of the second ones.

        """
        count = len(mothers)
        kind = self.rng.choice(len(_KINDS), count, p=list(_KINDS.values()))
        joins, grafts = (kind == _JOIN) | (kind == _EXTEND), (kind == _GRAFT) | (kind == _EXTEND)
        donors = np.where(kind == _HOIST, mothers, fathers)
        donors[grafts] = len(genomes) + self._drawn(int(grafts.sum()))
        source = joined([genomes, self._stock])
        whole = joins & (self.rng.random(count) < _WHOLE_CHANCE)
        hole = np.where(whole, source.starts[mothers + 1] - 1, self._positions(source, mothers))
        inner = hole - (self.rng.random(count) * source.spans.take(hole)).astype(np.int64)
        part = np.where(kind == _HOIST, inner, self._positions(source, donors))
        part = np.where(kind == _GRAFT, source.starts[donors + 1] - 1, part)
        tails = np.where(joins, self._operator(count), 0)
        children, places = self._spliced(source, mothers, hole, part, tails, kind != _SUBSTITUTE)
        self._substitute(children, places)
        return simplified(children)

    def _drawn(self, count: int) -> Indices:
        """Return rows of the stock that have not been used."""
        self._used += count
        if self._used > len(self._stock):
            self._stock, self._used = self._grown(max(count, _STOCK), rounds=2), count
        return np.arange(self._used - count, self._used)

    def _grown(self, count: int, rounds: int = _ROUNDS) -> Genomes:
        """Draw leaves, and join random parts of them with further leaves, round by round."""
        grown, everybody = self._leaves(count), np.arange(count)
        for _ in range(rounds):
            source, hole = joined([grown, self._leaves(count)]), self._positions(grown, everybody)
            grows = self.rng.random(count) < _GROWTH_CHANCE
            leaf, tails = source.starts[count:-1], self._operator(count)
            grown, _ = self._spliced(source, everybody, hole, leaf, tails, grows)
        return grown

    def _spliced(
        self,
        source: Genomes,
        base: Indices,
        hole: Indices,
        part: Indices,
        tails: Codes,
        wanted: Mask,
    ) -> tuple[Genomes, Indices]:
        """Replace a subtree of formulas by a part of others, or join the two by an operator.

        Args:
            source: the formulas, and those that the parts come from.
            base: rows of the formulas to change, [formulas].
            hole: last token of each formula's subtree.
            part: last token of each part.
            tails: operator that joins subtree and part, in either order, whose further operands are
                all the part; or 0, and the part replaces the subtree.
            wanted: formulas that are changed.

        Returns:
            The formulas, and a drawn token of each that is not changed: not wanted, or too long.

        """
        old, length, joins = source.spans[hole], source.spans[part], tails > 0
        first, behind = source.starts[base], source.starts[base + 1]
        copies = np.where(joins, OPERANDS[tails] - 1, 1)
        new = copies * length + joins * (old + 1)
        made = wanted & (behind - first + new - old <= self.width)
        hole = np.where(made, hole, self._positions(source, base))
        ahead = joins & (self.rng.random(len(base)) < 0.5)
        start, donor = hole + 1 - old, part + 1 - length
        # An operator takes the place of the last token before the rest, which comes once more.
        rest = hole + 1 - joins
        before = np.where(made, np.where(ahead | ~joins, start, hole + 1), behind) - first
        sizes = (length * (copies > 0), length * (copies > 1), old * ahead, behind - rest)
        firsts = np.stack([first, donor, donor, start, rest], axis=1)
        lengths = np.stack([before, *(made * size for size in sizes)], axis=1)
        children = source.assembled(firsts, lengths)
        end = children.starts[1:] + hole - behind
        _widen(children, end, made * (new - old))
        top, joins = end[made & joins], made & joins
        children.codes[top], children.values[top] = tails[joins], 0.0
        children.spans[top] = new[joins]
        return children, end[~made]

    def _leaves(self, count: int) -> Genomes:
        known = np.ones(count, np.int64), np.zeros(count, np.uint64)
        return Genomes(*self._leaf(count), np.arange(count + 1), known)

    def _leaf(self, count: int) -> tuple[Codes, Floats]:
        """Draw variables and constants."""
        constant = self.rng.random(count) < _CONSTANT_CHANCE
        ones = self.rng.random(count) < _ONE_CHANCE
        number = np.where(ones, 1.0, self.rng.normal(size=count))
        variable = self.rng.integers(self.variables, size=count)
        codes = np.where(constant, np.uint8(CONSTANT), np.uint8(VARIABLE))
        return codes, np.where(constant, number, variable)

    def _operator(self, count: int) -> Codes:
        return self.rng.choice(self._codes, count, p=self._operator_weights)

    def _positions(self, genomes: Genomes, rows: Indices) -> Indices:
        """Draw one token of each of some formulas."""
        first, behind = genomes.starts[rows], genomes.starts[rows + 1]
        return first + (self.rng.random(len(rows)) * (behind - first)).astype(np.int64)

    def _substitute(self, genomes: Genomes, place: Indices) -> None:
        """Put other tokens with as many operands in the place of some, in place."""
        old = genomes.codes[place]
        fresh, values = self._leaf(len(place))
        # A constant is as often moved as replaced.
        moved = (old == CONSTANT) & (self.rng.random(len(place)) < 0.5)
        nudged = genomes.values[place] * self.rng.normal(1.0, 0.5, len(place))
        fresh[moved], values[moved] = CONSTANT, nudged[moved]
        for arity in {*OPERANDS[old].tolist()} - {0}:
            same = OPERANDS[old] == arity
            peers = self._codes[OPERANDS[self._codes] == arity]
            fresh[same], values[same] = self.rng.choice(peers, int(same.sum())), 0.0
        genomes.codes[place], genomes.values[place] = fresh, values


def _widen(genomes: Genomes, ends: Indices, change: Indices) -> None:
    """Correct what is known of all that contains one subtree of each formula, which has grown."""
    spans, hashes = genomes.known
    behind = genomes.starts[1:] - 1 - ends
    index, rows = ranges(ends + 1, behind)[0], np.repeat(np.arange(len(ends)), behind)
    above = spans.take(index) > index - ends.take(rows)
    index, rows = index[above], rows[above]
    spans[index] += change.take(rows)
    hashes[index] = hashes[ends] = 0
