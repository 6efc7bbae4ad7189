"""The parameter vectors of a batch as flat arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.errors import InvalidArgumentError
from warpfit.expressions.real_numbers import real_numbers

#: The remedy for parameters that are none.
_REMEDY: Final = "Give one vector [n] or K vectors [K, n] of numbers, [] where it has no parameters"

_FLOAT64: Final = np.dtype(np.float64)
_DTYPE, _NDIM = attrgetter("dtype"), attrgetter("ndim")


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
        return join_vectors(entries) or _join_any(entries)


def join_vectors(entries: Sequence[ArrayLike]) -> ParameterVectors | None:
    """Join the entries in one step if each is one plain vector [n]; else return None."""
    try:
        # First, because so quick a pass has the cache fetch many arrays at a time.
        counts = list(map(len, entries))  # type: ignore[arg-type]
        kinds = set(map(type, entries))
        if kinds == {np.ndarray} and set(map(_DTYPE, entries)) == {_FLOAT64}:
            if set(map(_NDIM, entries)) != {1}:
                return None
            # A third of the time of np.concatenate.
            numbers = np.frombuffer(bytearray().join(entries))  # type: ignore[arg-type]
        elif not (kinds <= {list, np.ndarray} and _are_numbers(entries)):
            return None
        elif kinds == {list}:
            # Half of the time that NumPy takes to make an array of each list.
            numbers = np.fromiter(chain.from_iterable(entries), np.float64)  # type: ignore[arg-type]
        else:
            numbers = np.concatenate(entries, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, BufferError):
        return None
    if numbers.ndim != 1 or sum(counts) != len(numbers):
        return None
    return ParameterVectors(np.array(counts, np.uint32), numbers)


def _are_numbers(entries: Sequence[Any]) -> bool:
    """Return whether all elements of the lists are plain numbers, and not arrays of one."""
    lists = (entry for entry in entries if type(entry) is list)
    return set(map(type, chain.from_iterable(lists))) <= {float, int, bool, np.float64}


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
    try:
        array = real_numbers(entry, "parameters", place="position")
    except InvalidArgumentError as error:
        error.expression, error.remedy = index, _REMEDY
        raise
    if array.ndim in (1, 2):
        return array.astype(np.float64, copy=False)
    raise InvalidArgumentError(
        f"the parameters of an expression are no vector of numbers: {entry!r}",
        "VECTOR_MISMATCH",
        _REMEDY,
        "parameters",
        expression=index,
    )
