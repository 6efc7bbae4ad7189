"""A batch on its way to the device: packed into one block of memory, for one copy."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.arguments import array_address, pointer64
from warpfit_server.engine.native.intrinsics import aligned, inlined, pointer_to
from warpfit_server.joined_batch import (
    BATCH_ARRAYS,
    CODES,
    COUNTS,
    LENGTHS,
    PARAMETERS,
    VALUES,
    JoinedBatch,
)

_ALIGNMENT: Final = 64
#: Instructions after the last one that the interpreter prefetches and does not run.
READ_AHEAD: Final = 1
#: Flags of an operator: whether it needs scratch levels, and whether it has three operands.
COSTLY: Final = 1
TERNARY: Final = 2
_octets, _pointer_to_integers = pointer_to(types.uint8), pointer_to(types.uint32)
_compiled = numba_cache.njit(nogil=True)


def places_of(batch: Batch) -> NDArray[np.int64]:
    """Return address and bytes of the arrays of a batch, [batches, arrays, 2].

    There is more than one batch only in a `JoinedBatch`.
    """
    if isinstance(batch, JoinedBatch):
        return batch.places
    arrays = [getattr(batch, name) for name in BATCH_ARRAYS]
    return np.array([[(array_address(array), array.nbytes) for array in arrays]], np.int64)


def count_arrays(places: NDArray[np.int64]) -> tuple[int, int, int]:
    """Return the tokens, the programs and the parameters that lie in some places."""
    sizes = np.add.reduce(places[:, :, 1]).tolist()
    return sizes[CODES], sizes[LENGTHS] // 4, sizes[PARAMETERS] // 8


class BatchLayout(NamedTuple):
    """Byte offsets of a batch's arrays in one block of device memory.

    The host uploads everything before ``uploaded``; kernels write the rest.
    """

    starts: int
    """Index of each program's first token, and the total; uint32 [programs + 1]."""
    parameter_starts: int
    """Likewise for parameters, counting one vector of each program."""
    values: int
    parameters: int
    codes: int
    uploaded: int
    programs: int
    """Records of the struct Program in lowering.cu; 16 bytes each."""
    order: int
    """Programs in the order in which they are interpreted; uint32 [programs]."""
    slots: int
    """Row-invariant subtrees, 16 bytes each; [`max_slots`]."""
    instructions: int
    """Instructions, 8 bytes each; those of program p begin at index starts[p] + p."""
    scratch: int
    """8 bytes for each token."""
    end: int

    @classmethod
    def of(cls, batch: Batch) -> BatchLayout:
        """Lay out a batch."""
        return lay_out(len(batch.codes), len(batch), len(batch.parameters))  # type: ignore[no-any-return]


@_compiled  # type: ignore[untyped-decorator]
def max_slots(tokens: int, programs: int) -> int:
    """Bound the row-invariant subtrees by the leaves, if all operators were ternary."""
    return int((2 * tokens + programs) // 3)


@_compiled  # type: ignore[untyped-decorator]
def lay_out(tokens: int, programs: int, parameters: int) -> BatchLayout:
    """Lay out a batch by its number of tokens, programs, and parameters in all vectors."""
    parameter_starts = aligned(4 * (programs + 1), _ALIGNMENT)
    values = 2 * parameter_starts
    numbers = values + aligned(8 * tokens, _ALIGNMENT)
    codes = numbers + aligned(8 * parameters, _ALIGNMENT)
    records = codes + aligned(tokens, _ALIGNMENT)
    order = records + aligned(16 * programs, _ALIGNMENT)
    slots = order + aligned(4 * programs, _ALIGNMENT)
    instructions = slots + aligned(16 * max_slots(tokens, programs), _ALIGNMENT)
    scratch = instructions + aligned(8 * (tokens + programs + READ_AHEAD), _ALIGNMENT)
    end = scratch + aligned(8 * tokens, _ALIGNMENT)
    return BatchLayout(
        *(0, parameter_starts, values, numbers, codes, records),
        *(records, order, slots, instructions, scratch, end),
    )


class BatchBounds(NamedTuple):
    """Upper bounds of what a batch needs, which the host knows before the device lowers it."""

    longest: int
    """Tokens of the longest program."""
    levels: int
    """Stack levels below the top that any program needs."""
    typical_levels: int
    """Stack levels that are enough for most programs."""
    costly: bool
    """Whether an operator needs scratch levels."""


@_compiled  # type: ignore[untyped-decorator]
def max_levels(tokens: int, has_ternary: bool) -> int:
    """Bound the stack levels below the top that a program with so many tokens needs.

    A binary operator needs one level more than its operands if both need equally many; an operand
    on the stack has at least two tokens. A ternary operator evaluates all three operands, leaves
    included, so the third finds two levels in use.
    """
    if not has_ternary:
        levels, least = 0, 5  # fewest tokens of a program that needs one level more
        while least <= tokens:
            levels, least = levels + 1, 2 * least + 1
        return levels
    levels, before, least = 0, 1, 4
    while least <= tokens:
        levels += 1
        before, least = least, min(3 * before + 1, 2 * least + 1)
    return levels


@_compiled  # type: ignore[untyped-decorator]
def pack(
    places: NDArray[np.int64], flags: NDArray[np.uint8], memory: NDArray[np.uint8]
) -> BatchBounds:
    """Write the part of a batch that is uploaded, and bound what the device will need.

    Args:
        places: from `places_of`.
        flags: `COSTLY` and `TERNARY` of each code, [256].
        memory: receives the batch, uint8 [at least layout.uploaded].
    """
    sizes = places[:, :, 1]
    tokens, programs = int(np.sum(sizes[:, CODES])), int(np.sum(sizes[:, LENGTHS])) // 4
    layout = lay_out(tokens, programs, np.sum(sizes[:, PARAMETERS]) // 8)
    size = 4 * (programs + 1)
    starts = memory[:size].view(np.uint32)
    parameter_starts = memory[layout.parameter_starts :][:size].view(np.uint32)
    values = memory[layout.values : layout.parameters].view(np.float64)
    parameters = memory[layout.parameters : layout.codes].view(np.float64)
    codes = memory[layout.codes : layout.uploaded]
    found, longest, squares = np.uint8(0), 0, 0
    token, program, parameter = 0, 0, 0
    starts[0] = parameter_starts[0] = 0
    for part in places:
        _copy(_floats(part[VALUES]), values[token:])
        parameter += _copy(_floats(part[PARAMETERS]), parameters[parameter:])
        for code in carray(_octets(part[CODES][0]), part[CODES][1]):
            codes[token] = code
            found |= flags[code]
            token += 1
        lengths, counts = _integers(part[LENGTHS]), _integers(part[COUNTS])
        for index in range(len(lengths)):
            length = int(lengths[index])
            longest = max(longest, length)
            squares += length * length
            starts[program + 1] = starts[program] + lengths[index]
            parameter_starts[program + 1] = parameter_starts[program] + counts[index]
            program += 1
    has_ternary = bool(found & TERNARY)
    return BatchBounds(
        int(longest),
        max_levels(longest, has_ternary),
        # Length of the program that a token is in, averaged over all tokens.
        max_levels(squares // max(1, tokens), has_ternary),
        bool(found & COSTLY),
    )


@inlined
def _copy(source: Any, target: Any) -> int:
    for index in range(len(source)):
        target[index] = source[index]
    return len(source)


@inlined
def _floats(place: Any) -> Any:
    return carray(pointer64(place[0]), place[1] // 8)


@inlined
def _integers(place: Any) -> Any:
    return carray(_pointer_to_integers(place[0]), place[1] // 4)
