"""The parameter vectors of a batch as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True, eq=False)
class ParameterVectors:
    """The parameter vectors of all programs of a batch."""

    counts: NDArray[np.uint32]
    """Length of each program's vector; [programs]."""
    numbers: NDArray[np.float64]
    """For each program in turn its K vectors, C order [K, count]; flat."""
    count: int = 1
    """K, the number of vectors for each program."""
    leading_axis: bool = False
    """Whether a caller gave K vectors [K, n] for a program, so that answers have an axis of K."""

    @classmethod
    def of(cls, programs: int, entries: Sequence[ArrayLike] | None) -> ParameterVectors:
        """Take one vector [n] or K vectors [K, n] for each program; None gives none to any.

        Raises:
            InvalidArgumentError: if the number of entries is not the number of programs, if K
                differs between programs, or if an entry is no array of numbers.
        """
        if entries is None:
            return cls(np.zeros(programs, dtype=np.uint32), np.empty(0))
        if len(entries) != programs:
            raise InvalidArgumentError(
                f"{len(entries)} parameter entries for {programs} programs",
                "LENGTH_MISMATCH",
                "Give one vector [n] or K vectors [K, n] for each program, [] where it has none",
                "parameters",
            )
        return _join_vectors(entries) or _join_any(entries)


def _join_vectors(entries: Sequence[ArrayLike]) -> ParameterVectors | None:
    """Join the entries in one step if each is one vector [n], as most are; else return None."""
    try:
        # First, because so quick a pass has the cache fetch many arrays at a time.
        counts = list(map(len, entries))  # type: ignore[arg-type]
        if set(map(type, entries)) == {list} and _are_numbers(entries):
            # Half of the time that NumPy takes to make an array of each list.
            numbers = np.fromiter(chain.from_iterable(entries), np.float64)  # type: ignore[arg-type]
        else:
            numbers = np.concatenate(entries, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    if numbers.ndim != 1 or sum(counts) != len(numbers):
        return None
    return ParameterVectors(np.array(counts, np.uint32), numbers)


def _are_numbers(lists: Sequence[Any]) -> bool:
    """Return whether all elements are plain numbers, and not arrays of one."""
    return set(map(type, chain.from_iterable(lists))) <= {float, int, np.float64}


def _join_any(entries: Sequence[ArrayLike]) -> ParameterVectors:
    arrays = [float_array(entry, index) for index, entry in enumerate(entries)]
    dimensions = {array.ndim for array in arrays}
    if dimensions == {1}:
        return ParameterVectors(np.array(list(map(len, arrays)), np.uint32), np.concatenate(arrays))
    vectors = {array.shape[0] for array in arrays if array.ndim == 2}
    if len(vectors) != 1:
        raise InvalidArgumentError(
            f"parameter entries disagree about the number of vectors: {sorted(vectors)}",
            "VECTOR_MISMATCH",
            "Give each program one vector [n], or the same number K of vectors [K, n]",
            "parameters",
        )
    k = vectors.pop()
    blocks = [a if a.ndim == 2 else a.reshape(1, -1).repeat(k, axis=0) for a in arrays]
    return ParameterVectors(
        np.array([block.shape[1] for block in blocks], np.uint32),
        np.concatenate([block.ravel() for block in blocks]),
        k,
        leading_axis=True,
    )


def float_array(entry: ArrayLike, index: int | None = None) -> NDArray[np.float64]:
    """Return the parameter vector [n] or vectors [K, n] of the expression of this index."""
    why, reason = f"{entry!r}", "VECTOR_MISMATCH"
    try:
        array = np.asarray(entry, dtype=np.float64)
        if array.ndim in (1, 2):
            return array
    except (TypeError, ValueError, OverflowError) as error:
        why, reason = str(error), "NOT_NUMBERS"
    raise InvalidArgumentError(
        f"the parameters of an expression are no vector of numbers: {why}",
        reason,
        "Give one vector [n] or K vectors [K, n] of numbers, [] where it has no parameters",
        "parameters",
        expression=index,
    )
