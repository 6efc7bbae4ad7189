"""Variation: new formulas from old ones, thousands at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ops import CONSTANT, VARIABLE
from warpfit.sklearn.genomes import (
    OPERANDS,
    Codes,
    Floats,
    Genomes,
    Indices,
    Mask,
    simplified,
    subtree_starts,
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

    def offspring(self, mothers: Genomes, fathers: Genomes) -> Genomes:
        """Cross or mutate each pair of parents; children that would be too long are left out."""
        count = len(mothers)
        kind = self.rng.choice(len(_KINDS), count, p=list(_KINDS.values()))
        joins = np.isin(kind, (_JOIN, _EXTEND))
        starts = subtree_starts(mothers.codes)
        whole = joins & (self.rng.random(count) < _WHOLE_CHANCE)
        end = np.where(whole, mothers.sizes - 1, self._positions(mothers))
        start = _at(starts, end)
        inner = start + (self.rng.random(count) * (end + 1 - start)).astype(np.int64)
        drawn = self._grown(count, rounds=2)
        donor_kind = np.where(kind == _HOIST, 0, np.where(np.isin(kind, (_CROSS, _JOIN)), 1, 2))
        donors = _rowwise(donor_kind, (mothers, fathers, drawn))
        donor_starts = subtree_starts(donors.codes)
        donor_end = np.where(kind == _HOIST, inner, self._positions(donors))
        donor_end = np.where(kind == _GRAFT, drawn.sizes - 1, donor_end)
        donor_start = _at(donor_starts, donor_end)
        tails = np.where(joins, self._operator(count), 0)
        stays = kind == _SUBSTITUTE
        children = splice(
            mothers,
            (np.where(stays, 0, start), np.where(stays, 0, end + 1)),
            donors,
            (donor_start, np.where(stays, donor_start, donor_end + 1)),
            tails,
            self.rng.random(count) < 0.5,
        )
        fits = children.sizes > 0
        self._substitute(children, fits & stays)
        return simplified(children[fits])

    def _grown(self, count: int, rounds: int = _ROUNDS) -> Genomes:
        """Draw leaves, and join random parts of them with further leaves, round by round."""
        grown = self._leaves(count)
        everybody = np.arange(count)
        for _ in range(rounds):
            chosen = everybody[self.rng.random(count) < _GROWTH_CHANCE]
            base, leaves = grown[chosen], self._leaves(len(chosen))
            end = self._positions(base)
            start = _at(subtree_starts(base.codes), end)
            nothing = np.zeros(len(chosen), np.int64)
            made = splice(
                base,
                (start, end + 1),
                leaves,
                (nothing, nothing + 1),
                self._operator(len(chosen)),
                self.rng.random(len(chosen)) < 0.5,
            )
            fits = made.sizes > 0
            grown.codes[chosen[fits]], grown.values[chosen[fits]] = (
                made[fits].codes,
                made[fits].values,
            )
        return grown

    def _leaves(self, count: int) -> Genomes:
        codes, values = np.zeros((count, self.width), np.uint8), np.zeros((count, self.width))
        codes[:, 0], values[:, 0] = self._leaf(count)
        return Genomes(codes, values)

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

    def _positions(self, genomes: Genomes) -> Indices:
        """Draw one token of each formula."""
        return (self.rng.random(len(genomes)) * genomes.sizes).astype(np.int64)

    def _substitute(self, genomes: Genomes, which: Mask) -> None:
        """Put another token with as many operands in the place of one, in place."""
        rows = np.flatnonzero(which)
        place = self._positions(genomes[rows])
        old = genomes.codes[rows, place]
        fresh, values = self._leaf(len(rows))
        # A constant is as often moved as replaced.
        moved = (old == CONSTANT) & (self.rng.random(len(rows)) < 0.5)
        nudged = genomes.values[rows, place] * self.rng.normal(1.0, 0.5, len(rows))
        values = np.where(moved, nudged, values)
        fresh = np.where(moved, np.uint8(CONSTANT), fresh)
        for arity in range(1, 4):
            same = OPERANDS[old] == arity
            peers = self._codes[OPERANDS[self._codes] == arity]
            if same.any():
                fresh[same], values[same] = self.rng.choice(peers, int(same.sum())), 0.0
        genomes.codes[rows, place], genomes.values[rows, place] = fresh, values


def splice(
    base: Genomes,
    hole: tuple[Indices, Indices],
    donors: Genomes,
    part: tuple[Indices, Indices],
    tails: NDArray[Any],
    part_first: Mask,
) -> Genomes:
    """Replace a subtree of each formula by a part of another, or join the two by an operator.

    Args:
        base: the formulas, [formulas].
        hole: first column of each formula's subtree, and the one behind it.
        donors: formulas that the parts come from, as wide as the base.
        part: first column of each part, and the one behind it.
        tails: operator that joins subtree and part, whose further operands are all the part; or 0,
            and the part replaces the subtree.
        part_first: whether the part comes before the subtree.

    Returns:
        The new formulas; one that would be too long is empty.

    """
    width = base.width
    start, stop = (bound[:, None] for bound in hole)
    donor, length = part[0][:, None], (part[1] - part[0])[:, None]
    tail, ahead = tails[:, None], part_first[:, None]
    joins = tail > 0
    own = np.where(joins, stop - start, 0)
    copies = np.where(joins, OPERANDS[tail] - 1, 1) * length
    column = np.arange(width)
    offset = column - start
    in_part = np.where(ahead, offset < copies, offset >= own)
    in_donor = donor + np.where(ahead, offset, offset - own) % np.maximum(length, 1)
    middle = np.where(in_part, width + in_donor, start + np.where(ahead, offset - copies, offset))
    after = offset - own - copies
    source = np.where(
        offset < 0,
        column,
        np.where(
            after < 0, middle, np.where(joins & (after == 0), 2 * width, stop + after - joins)
        ),
    )
    sizes = base.sizes[:, None] - (stop - start) + own + copies + joins
    source = np.where((column < sizes) & (sizes <= width), source, 2 * width + 1)
    nothing = np.zeros((len(base), 1))
    codes = np.hstack([base.codes, donors.codes, tail.astype(np.uint8), nothing.astype(np.uint8)])
    values = np.hstack([base.values, donors.values, nothing, nothing])
    return Genomes(
        np.take_along_axis(codes, source, axis=1), np.take_along_axis(values, source, axis=1)
    )


def _at(matrix: Indices, columns: Indices) -> Indices:
    return np.asarray(np.take_along_axis(matrix, columns[:, None], axis=1)[:, 0])


def _rowwise(choice: Indices, sources: tuple[Genomes, ...]) -> Genomes:
    """Take each row from one of the sources."""
    which = choice[:, None]
    return Genomes(
        np.choose(which, [source.codes for source in sources]),
        np.choose(which, [source.values for source in sources]),
    )
