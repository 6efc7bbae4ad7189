"""Batches whose programs lie in several places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import memmove
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch

#: Arrays of a batch and their types, those with the largest elements first.
BATCH_ARRAYS: Final[Mapping[str, np.dtype[Any]]] = MappingProxyType(
    {
        "values": np.dtype("<f8"),
        "parameters": np.dtype("<f8"),
        "lengths": np.dtype("<u4"),
        "parameter_counts": np.dtype("<u4"),
        "codes": np.dtype("u1"),
    }
)
#: Their numbers, in places.
VALUES, PARAMETERS, LENGTHS, COUNTS, CODES = range(len(BATCH_ARRAYS))
#: Address and bytes of each of the arrays.
Places = Sequence[tuple[int, int]]


def _joined_array(name: str) -> Any:
    return property(lambda batch: batch._joined[name])


class JoinedBatch(Batch):
    """The programs of several batches in turn, which stay where they are.

    The arrays are copied together on first access. The CUDA interpreter never needs that, because
    it reads the batches from their places.

    Args:
        parts: places of the arrays of each batch.
        vectors: parameter vectors of every program.
        owners: what keeps the memory in place.
    """

    places: NDArray[np.int64]
    """Address and bytes of each array of each batch; [batches, arrays, 2]."""
    _owners: Sequence[object]
    _sizes: list[int]
    values, parameters, lengths, parameter_counts, codes = map(_joined_array, BATCH_ARRAYS)

    def __init__(self, parts: Sequence[Places], vectors: int, owners: Sequence[object]) -> None:
        set_field = object.__setattr__  # batches are frozen
        set_field(self, "places", np.array(parts, np.int64))
        set_field(self, "vectors", vectors)
        set_field(self, "_owners", owners)
        set_field(self, "_sizes", np.add.reduce(self.places[:, :, 1]).tolist())

    def __len__(self) -> int:
        """Count the programs."""
        return self._sizes[LENGTHS] // BATCH_ARRAYS["lengths"].itemsize

    @property
    def token_count(self) -> int:
        """Tokens of all programs."""
        return self._sizes[CODES]

    @property
    def parameter_total(self) -> int:
        """Parameter values of all programs."""
        return self._sizes[PARAMETERS] // BATCH_ARRAYS["parameters"].itemsize

    @cached_property
    def _joined(self) -> dict[str, NDArray[Any]]:
        memory = np.empty(sum(self._sizes), np.uint8)
        start, end, arrays = memory.ctypes.data, 0, {}
        for number, (name, dtype) in enumerate(BATCH_ARRAYS.items()):
            begin = end
            for address, size in self.places[:, number].tolist():
                memmove(start + end, address, size)
                end += size
            arrays[name] = memory[begin:end].view(dtype)
        return arrays
