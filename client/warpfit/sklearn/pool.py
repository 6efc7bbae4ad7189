"""Scored formulas of a search, and which of them survive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from warpfit.sklearn.genomes import Floats, Genomes, Indices, Mask, joined

#: Errors are compared to this many binary digits: equal formulas differ in the last bits.
_DIGITS: Final = 30


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Formulas a + b f with their losses."""

    genomes: Genomes
    losses: Floats
    slopes: Floats
    intercepts: Floats
    complexities: Indices
    settled: Mask
    """Whether further iterations would not change a formula's numbers."""

    def __len__(self) -> int:
        """Count the formulas."""
        return len(self.losses)

    def __getitem__(self, index: Any) -> Pool:
        """Select formulas by a slice, a mask or indices."""
        return Pool(*(getattr(self, entry.name)[index] for entry in fields(self)))

    @property
    def layers(self) -> Indices:
        """Layer of each formula by complexity and loss; nothing dominates those of layer 0."""
        return pareto_layers(self.complexities, self.losses)

    def front(self) -> Pool:
        """Return the formulas that nothing dominates, simplest first."""
        undominated = self[self.layers == 0]
        return undominated[np.argsort(undominated.complexities, kind="stable")]

    def distinct(self) -> Pool:
        """Leave out non-finite losses, and formulas as good as a simpler one."""
        mantissas, exponents = np.frexp(self.losses)
        keys = np.ldexp(np.round(np.ldexp(mantissas, _DIGITS)), exponents - _DIGITS)
        order = np.lexsort((self.complexities, keys))
        ordered = keys[order]
        first = np.concatenate([[True], ordered[1:] != ordered[:-1]]) & np.isfinite(ordered)
        return self[order[first]]

    def best(self, count: int) -> Pool:
        """Return the survivors by layer, then by loss, in this order."""
        return self[np.lexsort((self.complexities, self.losses, self.layers))[:count]]


def merged(pools: Sequence[Pool]) -> Pool:
    """Return the formulas of several pools."""
    return Pool(
        joined([pool.genomes for pool in pools]),
        *(
            np.concatenate([getattr(pool, entry.name) for pool in pools])
            for entry in fields(Pool)[1:]
        ),
    )


def pareto_layers(complexities: Indices, losses: Floats) -> Indices:
    """Return the layer of each formula (Deb et al. 2002, without the crowding distance)."""
    layers = np.zeros(len(losses), np.int64)
    # Among formulas at most as complex, the best loss of each layer; it grows with the layer.
    best = np.full(len(losses), np.nan)
    order = np.lexsort((losses, complexities))
    for group in np.split(order, np.flatnonzero(np.diff(complexities[order])) + 1):
        # Each formula is in a layer behind that of the one before it, and behind what is better.
        places = np.arange(len(group))
        behind = np.searchsorted(best, losses[group], side="right")
        layers[group] = places + np.maximum.accumulate(behind - places)
        best[layers[group]] = losses[group]
    return layers
