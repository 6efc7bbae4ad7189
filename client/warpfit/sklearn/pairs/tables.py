"""Tables of formulas' values, and the parts of a target that all pairs of two tables explain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ops import CONSTANT
from warpfit.sklearn.genomes import DIV, Floats, Genomes, Indices, Mask, joined, packed, tokens
from warpfit.sklearn.pairs.views import View

#: Left formulas that are scored at a time.
BLOCK: Final = 256
#: Pairs that vary by less than this part of what they are made of are not resolved in float32.
LEAST_VARIATION: Final = 1e-3
#: Decimals to which values are compared.
_DIGITS: Final = 4

Singles = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Formulas f with finite values that differ."""

    genomes: Genomes
    values: Singles
    """Values of f or 1/f, each formula's with root mean square 1; [formulas, rows]."""
    scales: Floats
    """Root mean squares of the values themselves; [formulas]."""
    inverted: Mask
    """Whether the values are those of 1/f; [formulas]."""

    def __len__(self) -> int:
        """Count the formulas."""
        return len(self.genomes)

    def __getitem__(self, index: Any) -> Table:
        """Select formulas by a slice, a mask or indices."""
        return Table(*(getattr(self, entry.name)[index] for entry in fields(self)))

    def with_reciprocals(self) -> Table:
        """Add 1/f of each f that is not too close to 0; shortest first."""
        far = np.abs(self.values).min(axis=1) > LEAST_VARIATION
        values = 1.0 / self.values[far].astype(float)
        sizes = np.sqrt(np.mean(np.square(values), axis=1))
        singles = (values / sizes[:, None]).astype(np.float32)
        inverted = np.ones(len(sizes), bool)
        part = Table(self.genomes[far], singles, sizes / self.scales[far], inverted)
        both = stacked([self, part])
        return both[np.argsort(both.genomes.sizes + both.inverted, kind="stable")].distinct()

    def distinct(self) -> Table:
        """Leave out what has the same values, to a factor, as a formula before."""
        keys = (self.values * np.sign(self.values[:, :1])) @ _probes(self.values.shape[1])
        _, first = np.unique(np.round(keys, _DIGITS), axis=0, return_index=True)
        return self[np.sort(first)]

    @property
    def spreads(self) -> Floats:
        """Standard deviations of the values, with root mean square 1."""
        return np.asarray(np.std(self.values, axis=1, dtype=float))

    def written(self) -> Genomes:
        """Return the formulas, 1/f where the values are those."""
        one = tokens(np.where(self.inverted, CONSTANT, 0), 1.0)
        return packed([one, self.genomes, tokens(np.where(self.inverted, DIV, 0))])


def stacked(tables: Sequence[Table]) -> Table:
    return Table(
        joined([table.genomes for table in tables]),
        *(
            np.concatenate([getattr(table, entry.name) for table in tables])
            for entry in fields(Table)[1:]
        ),
    )


def _probes(rows: int) -> Floats:
    """Return numbers, [rows, 3], whose scalar products with values tell formulas apart."""
    return np.asarray(np.cos(np.arange(rows)[:, None] ** 2.0 * np.array([1.0, 2.0, 3.0])))


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The parts R^2 of t's variance that pairs explain, in single precision."""

    roots: Singles
    """Square roots of the weights, which all rows below are multiplied with."""
    known: Singles
    """Orthonormal rows that are fitted beside each pair: the constant, and a base."""
    target: Singles
    """Residual of the target after a fit of the known rows alone; [rows]."""
    right: Singles
    squares: Singles
    """Values of the right formulas, and their squares; [rows, formulas]."""
    centred: Singles
    """The right formulas' orthonormal parts, [rows, formulas]."""

    @classmethod
    def of(cls, view: View, base: Singles, right: Singles) -> Scores:
        roots = np.sqrt(view.weights).astype(np.float32)
        known = roots[None]
        target = (view.target * np.sqrt(view.weights)).astype(np.float32)
        if len(base):
            known = np.concatenate([known, _orthonormal(base, roots, known)])
        target = np.asarray(target - (known @ target) @ known, np.float32)
        centred = np.ascontiguousarray(_orthonormal(right, roots, known).T)
        return cls(roots, known, target, np.ascontiguousarray(right.T), np.square(right).T, centred)

    def products(self, left: Singles) -> Singles:
        """Score a + b u v + c u, [left, right]."""
        weighted, own = left * self.roots, _orthonormal(left, self.roots, self.known)
        alone = own @ self.target
        scores: Singles = (weighted * (self.target - alone[:, None] * own)) @ self.right
        squares = np.square(weighted) @ self.squares
        projections = [(weighted * row) @ self.right for row in (own, *self.known)]
        # One formula after the other: its numbers stay in the caches.
        for score, square, part, *others in zip(scores, squares, alone, *projections, strict=True):
            variance = square - sum(map(np.square, others))
            sound = variance > LEAST_VARIATION * square
            score[:] = part**2 + _ratio(np.square(score), variance, sound)
        return scores

    def sums(self, left: Singles) -> Singles:
        """Score a + b u + c v, [left, right]."""
        own = _orthonormal(left, self.roots, self.known)
        other, scores = self.target @ self.centred, own @ self.centred
        for both, part in zip(scores, own @ self.target, strict=True):
            rest = 1 - both * both
            explained = part**2 + other**2 - 2 * part * other * both
            both[:] = _ratio(explained, rest, rest > LEAST_VARIATION)
        return scores


def _ratio(above: Singles, below: Singles, sound: Mask) -> Singles:
    quotient: Singles = np.divide(above, below, out=np.zeros_like(above), where=sound)
    return quotient


def _orthonormal(values: Singles, roots: Singles, known: Singles) -> NDArray[Any]:
    """Return rows times the roots of the weights, without what is known, of length 1 or 0."""
    weighted = values * roots
    before = np.sqrt(np.square(weighted).sum(axis=1, keepdims=True))
    for row in known:
        weighted = weighted - (weighted @ row)[:, None] * row
    length = np.sqrt(np.square(weighted).sum(axis=1, keepdims=True))
    return np.where(length > LEAST_VARIATION * before, weighted / length, 0)


def top(score: Callable[[Singles], Singles], left: Singles, count: int) -> tuple[Indices, Indices]:
    """Return the places of the best pairs of each block."""
    ones, others = [], []
    for start in range(0, len(left), BLOCK):
        scores = score(left[start : start + BLOCK])
        # At least as many are above the bound as are kept, and hardly more.
        bests = np.sort(scores.max(axis=1))
        places = np.flatnonzero(scores >= bests[-min(count, len(bests))])
        one, other = np.divmod(places, scores.shape[1])
        order = np.argsort(-scores[one, other])[:count]
        ones.append(one[order] + start)
        others.append(other[order])
    return np.concatenate(ones), np.concatenate(others)
