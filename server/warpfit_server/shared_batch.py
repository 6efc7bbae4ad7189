"""The form of a batch that front ends and engines share, and what is known of it before it runs.

A front end writes the arrays of `BATCH_ARRAYS` into a segment, one after the other, as the CUDA
interpreter reads them: its engine copies them to the device from there. What the front end has
learnt as it wrote them, a `BatchSummary`, goes with the request, so that no engine reads the tokens
to find that out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_uint32
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit.ops import OPERATORS

#: Arrays of a batch in a segment and their types, in their order. Starts are indices of the first
#: token, or parameter of one vector, of each program, and the end; [programs + 1].
BATCH_ARRAYS: Final[Mapping[str, np.dtype[Any]]] = MappingProxyType(
    {
        "starts": np.dtype("<u4"),
        "parameter_starts": np.dtype("<u4"),
        "values": np.dtype("<f8"),
        "parameters": np.dtype("<f8"),
        "codes": np.dtype("u1"),
    }
)
#: Their numbers, in places.
STARTS, PARAMETER_STARTS, VALUES, PARAMETERS, CODES = range(len(BATCH_ARRAYS))
#: Address and bytes of each of the arrays.
Places = Sequence[tuple[int, int]]
#: Arrays of a `Batch`, which a `SharedBatch` makes when they are read.
_MADE: Final = ("values", "parameters", "lengths", "parameter_counts", "codes")
_OPERATORS: Final = tuple([row.code for row in OPERATORS.values()])


class BatchSummary(NamedTuple):
    """Identity and bounds of a batch, in plain numbers."""

    identity: int
    """Hash of tokens, constants and numbers of parameters, without the parameters themselves. Equal
    ones mean that a batch has probably come before; where a wrong match could give wrong numbers,
    `contents` are compared, too."""
    longest: int
    """Tokens of the longest program, or more."""
    typical: int
    """Tokens of the program that a token is in, averaged over all tokens."""
    operators: int
    """Sum of ``1 << code`` of the operators that occur, and perhaps of others."""

    @classmethod
    def of(cls, batch: Batch) -> BatchSummary:
        """Summarise a batch, which is read for that unless it was shared."""
        if type(batch) is SharedBatch:  # `isinstance` asks the abstract class of sequences
            return batch.summary
        lengths, codes = batch.lengths.astype(np.int64), batch.codes.tobytes()
        # The same in all processes of a machine; the seed tells where the other arrays begin.
        hashed = xxhash.xxh3_64(codes, seed=len(codes))
        for array in (batch.values, batch.lengths, batch.parameter_counts):
            hashed.update(array.data)
        return cls(
            identity=hashed.intdigest() >> 1,  # 63 bits
            longest=int(np.maximum.reduce(lengths, initial=0)),
            typical=int(lengths.dot(lengths)) // max(1, len(codes)),
            operators=sum([1 << code for code in _OPERATORS if code in codes]),
        )

    @classmethod
    def joining(cls, parts: Sequence[tuple[BatchSummary, int]]) -> BatchSummary:
        """Summarise several batches, each with its number of tokens, as one."""
        summaries, tokens = zip(*parts, strict=True)
        if len(parts) == 1:
            return parts[0][0]
        operators = 0
        for summary in summaries:
            operators |= summary.operators
        weighted = sum(one.typical * count for one, count in parts)
        return cls(
            identity=hash(tuple([one.identity for one in summaries])),
            longest=max([one.longest for one in summaries]),
            typical=weighted // max(1, sum(tokens)),
            operators=operators,
        )


def contents(batch: Batch) -> tuple[bytes, ...]:
    """Return the arrays of the programs as bytes: what `BatchSummary.identity` is the hash of.

    Bytes compare without giving Python's lock up; NumPy would wait for it behind other threads.
    """
    arrays = (batch.codes, batch.values, batch.lengths, batch.parameter_counts)
    return tuple([array.tobytes() for array in arrays])


class BatchPart(NamedTuple):
    """The programs of one request in shared memory."""

    places: Places
    """Places of the arrays of `BATCH_ARRAYS` in this process."""
    summary: BatchSummary
    arrays: Callable[[], Mapping[str, NDArray[Any]]]
    """Makes views of the arrays of a `Batch`, by name; it keeps the memory in place."""


class SharedBatch(Batch):
    """The programs of one or several requests in turn, which stay where front ends wrote them.

    The arrays of a batch are made on first access, and those of several requests are copied
    together then. The CUDA interpreter never needs that, because it copies the parts to the device
    from their places.

    Args:
        parts: the programs of each request.
        vectors: parameter vectors of every program.
    """

    parts: Sequence[BatchPart]
    places: NDArray[np.int64]
    """Address and bytes of each array of each part; [parts, arrays, 2]."""
    _sizes: list[int]

    def __init__(self, parts: Sequence[BatchPart], vectors: int) -> None:
        set_field = object.__setattr__  # batches are frozen
        places = np.array([part.places for part in parts], np.int64)
        set_field(self, "parts", parts)
        set_field(self, "places", places)
        set_field(self, "vectors", vectors)
        set_field(self, "_sizes", np.add.reduce(places[:, :, 1]).tolist())

    @classmethod
    def viewing(cls, batch: Batch) -> SharedBatch:
        """Return a batch of this process in the same form; arrays but those of starts are views."""
        if isinstance(batch, SharedBatch):
            return batch
        arrays = {name: np.ascontiguousarray(getattr(batch, name)) for name in BATCH_ARRAYS}
        arrays["parameter_starts"] = arrays["parameter_starts"] // batch.vectors
        arrays = {
            name: arrays[name].astype(dtype, copy=False) for name, dtype in BATCH_ARRAYS.items()
        }
        places = [(array.ctypes.data, array.nbytes) for array in arrays.values()]

        def views() -> dict[str, NDArray[Any]]:
            return arrays | {name: getattr(batch, name) for name in ("lengths", "parameter_counts")}

        return cls([BatchPart(places, BatchSummary.of(batch), views)], batch.vectors)

    def __len__(self) -> int:
        """Count the programs."""
        return self._sizes[STARTS] // 4 - len(self.parts)

    @property
    def token_count(self) -> int:
        """Tokens of all programs."""
        return self._sizes[CODES]

    @property
    def parameter_total(self) -> int:
        """Parameter values of all programs."""
        return self._sizes[PARAMETERS] // 8

    @property
    def is_apart(self) -> bool:
        """Whether the arrays cannot be copied as they are, because the starts have to be changed.

        There are several parts, or one that is a part of a larger request.
        """
        return (
            len(self.parts) > 1 or c_uint32.from_address(int(self.places[0, STARTS, 0])).value > 0
        )

    @property
    def room(self) -> int:
        """Bytes for all parts as they are, each array from a multiple of 64 bytes on."""
        return sum(self._sizes) + 64 * self.places[:, :, 0].size

    def alone(self) -> list[SharedBatch]:
        """Return the programs of each request as a batch."""
        return [SharedBatch([part], self.vectors) for part in self.parts]

    @cached_property
    def summary(self) -> BatchSummary:
        """Return the summary of all parts together."""
        return BatchSummary.joining([(part.summary, part.places[CODES][1]) for part in self.parts])

    def __getattr__(self, name: str) -> NDArray[Any]:
        """Make the arrays when the first of them is read."""
        if name not in _MADE:
            raise AttributeError(name)
        first, *others = [part.arrays() for part in self.parts]
        for field in _MADE:
            array = first[field]
            if others:
                array = np.concatenate([array, *[one[field] for one in others]])
            object.__setattr__(self, field, array)
        return getattr(self, name)  # type: ignore[no-any-return]
