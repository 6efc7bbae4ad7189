"""A batch on its way to the device: packed into one block of memory, for one copy."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit_server.engine.native import numba_cache

_ALIGNMENT: Final = 64
#: Instructions after the last one that the interpreter prefetches and does not run.
READ_AHEAD: Final = 1
#: Flags of an operator: whether it needs scratch levels, and whether it has three operands.
COSTLY: Final = 1
TERNARY: Final = 2
_compiled = numba_cache.njit(nogil=True)


class TokenArrays(NamedTuple):
    """The arrays of a `Batch`, as functions compiled by Numba take them."""

    codes: NDArray[np.uint8]
    values: NDArray[np.float64]
    lengths: NDArray[np.uint32]
    parameter_counts: NDArray[np.uint32]
    parameters: NDArray[np.float64]
    vectors: int

    @classmethod
    def of(cls, batch: Batch) -> TokenArrays:
        """View a batch, always read-only, so that Numba compiles for one set of types."""
        return cls(
            _read_only(batch.codes),
            _read_only(batch.values),
            _read_only(batch.lengths),
            _read_only(batch.parameter_counts),
            _read_only(batch.parameters),
            batch.vectors,
        )


def _read_only(array: Any) -> Any:
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


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
    parameter_starts = _aligned(4 * (programs + 1))
    values = 2 * parameter_starts
    numbers = values + _aligned(8 * tokens)
    codes = numbers + _aligned(8 * parameters)
    records = codes + _aligned(tokens)
    order = records + _aligned(16 * programs)
    slots = order + _aligned(4 * programs)
    instructions = slots + _aligned(16 * max_slots(tokens, programs))
    scratch = instructions + _aligned(8 * (tokens + programs + READ_AHEAD))
    end = scratch + _aligned(8 * tokens)
    return BatchLayout(
        *(0, parameter_starts, values, numbers, codes, records),
        *(records, order, slots, instructions, scratch, end),
    )


@_compiled  # type: ignore[untyped-decorator]
def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


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
def bound_batch(tokens: TokenArrays, flags: NDArray[np.uint8]) -> BatchBounds:
    """Bound what a batch will need, by the flags `COSTLY` and `TERNARY` of each code, [256]."""
    found, longest, squares = np.uint8(0), np.int64(0), np.int64(0)
    for code in tokens.codes:
        found |= flags[code]
    for length in tokens.lengths:
        tokens_of_one = np.int64(length)
        longest = max(longest, tokens_of_one)
        squares += tokens_of_one * tokens_of_one
    has_ternary = bool(found & TERNARY)
    return BatchBounds(
        int(longest),
        max_levels(longest, has_ternary),
        # Length of the program that a token is in, averaged over all tokens.
        max_levels(squares // max(1, len(tokens.codes)), has_ternary),
        bool(found & COSTLY),
    )


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
def pack(tokens: TokenArrays, memory: NDArray[np.uint8]) -> None:
    """Write the part of a batch that is uploaded to memory, uint8 [at least layout.uploaded]."""
    layout = lay_out(len(tokens.codes), len(tokens.lengths), len(tokens.parameters))
    size = 4 * (len(tokens.lengths) + 1)
    prefix_sums(tokens.lengths, memory[:size].view(np.uint32))
    second = layout.parameter_starts
    prefix_sums(tokens.parameter_counts, memory[second : second + size].view(np.uint32))
    _copy(tokens.values, memory[layout.values : layout.parameters].view(np.float64))
    _copy(tokens.parameters, memory[layout.parameters : layout.codes].view(np.float64))
    _copy(tokens.codes, memory[layout.codes : layout.uploaded])


@_compiled  # type: ignore[untyped-decorator]
def prefix_sums(lengths: NDArray[np.uint32], starts: NDArray[np.uint32]) -> None:
    """Write the exclusive prefix sums of ``lengths``, and then their total."""
    total = np.uint32(0)
    for index in range(len(lengths)):
        starts[index] = total
        total += lengths[index]
    starts[len(lengths)] = total


@_compiled  # type: ignore[untyped-decorator]
def _copy(source: NDArray[Any], target: NDArray[Any]) -> None:
    for index in range(len(source)):
        target[index] = source[index]
