"""Weighing all pairs: the best products and sums of two formulas, by matrix products.

The simple form, for values u of m formulas, v of n others, weights w and a target t:

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warpfit_server.engine.interface import Steps

Floats: TypeAlias = NDArray[np.float64]
Singles: TypeAlias = NDArray[np.float32]
Indices: TypeAlias = NDArray[np.int64]

#: A formula whose variance beside what is fitted with it is below this part of its mean square is
#: left out: it is a rounding error of a constant.
LEAST_VARIATION: Final = 1e-4
#: Error with which a formula u explains a target of variance 1, so that its pairs are left out:
#: values are rounded to float32.
LEAST_REST: Final = 1e-12


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
