"""Combinations of parameters, of which some cover all pairs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def covering_first(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations; those that are not needed for a covering of pairs are thorough.

    Each pair of values of two axes is in a combination that the short suite runs. They are taken
    greedily: next is the one with most pairs that are not covered yet.
    """
    places = list(product(*(range(len(axis)) for axis in axes)))
    pairs = {place: set(combinations(enumerate(place), 2)) for place in places}
    left, chosen = set().union(*pairs.values()), set()
    while left:
        best = max(places, key=lambda place: len(pairs[place] & left))
        chosen.add(best)
        left -= pairs[best]
    return [
        pytest.param(
            *(axis[k] for axis, k in zip(axes, place, strict=True)),
            marks=() if place in chosen else pytest.mark.thorough,
        )
        for place in places
    ]
