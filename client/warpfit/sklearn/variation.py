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


@dataclass(frozen=True)
class Breeder:
    """Draws formulas and varies them."""

    rng: np.random.Generator
    operators: tuple[int, ...]
    """Wire codes to draw from."""
    variables: int
    width: int
    """Most tokens of a formula."""

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
        joins, stays = (kind == _JOIN) | (kind == _EXTEND), kind == _SUBSTITUTE
        grafts = np.flatnonzero((kind == _GRAFT) | (kind == _EXTEND))
        source = joined([genomes, self._grown(len(grafts), rounds=2)])
        donors = np.where(kind == _HOIST, mothers, fathers)
        donors[grafts] = len(genomes) + np.arange(len(grafts))
        trees = source.trees
        whole = joins & (self.rng.random(count) < _WHOLE_CHANCE)
        end = np.where(whole, source.starts[mothers + 1] - 1, self._positions(source, mothers))
        start = trees[end]
        donor_end = self._positions(source, donors)
        inner = start + (self.rng.random(count) * (end + 1 - start)).astype(np.int64)
        donor_end = np.where(kind == _HOIST, inner, donor_end)
        donor_end = np.where(kind == _GRAFT, source.starts[donors + 1] - 1, donor_end)
        tails = np.where(joins, self._operator(count), 0)
        part = trees[donor_end], donor_end + 1
        children, made = self._spliced(source, mothers, (start, end + 1), part, tails, ~stays)
        self._substitute(children, ~made)
        return simplified(children)

    def _grown(self, count: int, rounds: int = _ROUNDS) -> Genomes:
        """Draw leaves, and join random parts of them with further leaves, round by round."""
        grown, everybody = self._leaves(count), np.arange(count)
        for _ in range(rounds):
            source, end = joined([grown, self._leaves(count)]), self._positions(grown, everybody)
            hole, leaf = (grown.trees[end], end + 1), source.starts[count:]
            grows = self.rng.random(count) < _GROWTH_CHANCE
            part, tails = (leaf[:-1], leaf[1:]), self._operator(count)
            grown, _ = self._spliced(source, everybody, hole, part, tails, grows)
        return grown

    def _spliced(
        self,
        source: Genomes,
        base: Indices,
        hole: tuple[Indices, Indices],
        part: tuple[Indices, Indices],
        tails: Codes,
        wanted: Mask,
    ) -> tuple[Genomes, Mask]:
        """Replace a subtree of formulas by a part of others, or join the two by an operator.

        Args:
            source: the formulas, and those that the parts come from.
            base: rows of the formulas to change, [formulas].
            hole: first token of each formula's subtree, and the one behind it.
            part: first token of each part, and the one behind it.
            tails: operator that joins subtree and part, in either order, whose further operands are
                all the part; or 0, and the part replaces the subtree.
            wanted: formulas that are changed.

        Returns:
            The formulas, and which are changed: those that are wanted and would not be too long.

        """
        ends, (start, stop), length = tokens(tails), hole, part[1] - part[0]
        copies = np.where(tails > 0, OPERANDS[tails] - 1, 1)
        own, once = np.where(tails > 0, stop - start, 0), np.where(copies > 0, length, 0)
        twice, ahead = np.where(copies > 1, length, 0), self.rng.random(len(base)) < 0.5
        first, behind, tail = source.starts[base], source.starts[base + 1], ends.starts[:-1]
        sides = np.where(ahead, (part[0], once, start, own), (start, own, part[0], twice))
        firsts = (first, sides[0], part[0], sides[2], tail + len(source.codes), stop)
        middle = np.where(ahead, twice, once)
        sizes = (start - first, sides[1], middle, sides[3], ends.sizes, behind - stop)
        lengths = np.stack(sizes, axis=1)
        made = wanted & (lengths.sum(axis=1) <= self.width)
        lengths[~made] = 0
        lengths[:, 0] = np.where(made, lengths[:, 0], behind - first)
        return joined([source, ends]).assembled(np.stack(firsts, axis=1), lengths), made

    def _leaves(self, count: int) -> Genomes:
        return tokens(*self._leaf(count))

    def _leaf(self, count: int) -> tuple[Codes, Floats]:
        """Draw variables and constants."""
        constant = self.rng.random(count) < _CONSTANT_CHANCE
        ones = self.rng.random(count) < _ONE_CHANCE
        number = np.where(ones, 1.0, self.rng.normal(size=count))
        variable = self.rng.integers(self.variables, size=count)
        return np.where(constant, np.uint8(CONSTANT), np.uint8(VARIABLE)), np.where(
            constant, number, variable
        )

    def _operator(self, count: int) -> Codes:
        return self.rng.choice(self._codes, count, p=self._operator_weights)

    def _positions(self, genomes: Genomes, rows: Indices) -> Indices:
        """Draw one token of each of some formulas."""
        first, behind = genomes.starts[rows], genomes.starts[rows + 1]
        return first + (self.rng.random(len(rows)) * (behind - first)).astype(np.int64)

    def _substitute(self, genomes: Genomes, which: Mask) -> None:
        """Put another token with as many operands in the place of one, in place."""
        place = self._positions(genomes, np.flatnonzero(which))
        old = genomes.codes[place]
        fresh, values = self._leaf(len(place))
        # A constant is as often moved as replaced.
        moved = (old == CONSTANT) & (self.rng.random(len(place)) < 0.5)
        nudged = genomes.values[place] * self.rng.normal(1.0, 0.5, len(place))
        values = np.where(moved, nudged, values)
        fresh = np.where(moved, np.uint8(CONSTANT), fresh)
        for arity in range(1, 4):
            same = OPERANDS[old] == arity
            peers = self._codes[OPERANDS[self._codes] == arity]
            if same.any():
                fresh[same], values[same] = self.rng.choice(peers, int(same.sum())), 0.0
        genomes.codes[place], genomes.values[place] = fresh, values
