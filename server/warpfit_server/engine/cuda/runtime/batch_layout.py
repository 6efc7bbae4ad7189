"""A batch on its way to the device: raw tokens in one piece of memory, for one copy."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit_server.engine.cuda.runtime.tokens import Tokens
from warpfit_server.engine.native import numba_cache

_ALIGNMENT: Final = 64
#: Instructions behind the last one that the interpreter reads, and does not run.
READ_AHEAD: Final = 1
#: Flags of an operator: whether it needs scratch levels, whether it has three operands.
COSTLY: Final = 1
TERNARY: Final = 2
_compiled = numba_cache.njit(nogil=True)


class Parts(NamedTuple):
    """Where each part of a batch begins in device memory, in bytes.

    What is in front of ``uploaded`` comes from the host; the device makes the rest.
    """

    starts: int
    """Index of each program's first token, and the total; uint32 [programs + 1]."""
    parameter_starts: int
    """The same of parameters, with one vector for each program."""
    values: int
    parameters: int
    codes: int
    uploaded: int
    programs: int
    """See `Program` in lowering.cu; 16 bytes each."""
    order: int
    """Programs in the order in which they are interpreted; uint32 [programs]."""
    slots: int
    """Row-invariant subtrees, 16 bytes each; [`slots_at_most`]."""
    instructions: int
    """Those of program p begin at starts[p] + p; 8 bytes each."""
    scratch: int
    """8 bytes for each token."""
    end: int

    @classmethod
    def of(cls, batch: Batch) -> Parts:
        """Lay a batch out."""
        return lay_out(len(batch.codes), len(batch), len(batch.parameters))  # type: ignore[no-any-return]


@_compiled  # type: ignore[untyped-decorator]
def slots_at_most(tokens: int, programs: int) -> int:
    """Most row-invariant subtrees: the leaves, if every operator had the most operands, three."""
    return int((2 * tokens + programs) // 3)


@_compiled  # type: ignore[untyped-decorator]
def lay_out(tokens: int, programs: int, parameters: int) -> Parts:
    """Lay out a batch of so many tokens, programs, and parameters in all vectors."""
    parameter_starts = _aligned(4 * (programs + 1))
    values = 2 * parameter_starts
    numbers = values + _aligned(8 * tokens)
    codes = numbers + _aligned(8 * parameters)
    records = codes + _aligned(tokens)
    order = records + _aligned(16 * programs)
    slots = order + _aligned(4 * programs)
    instructions = slots + _aligned(16 * slots_at_most(tokens, programs))
    scratch = instructions + _aligned(8 * (tokens + programs + READ_AHEAD))
    end = scratch + _aligned(8 * tokens)
    return Parts(
        *(0, parameter_starts, values, numbers, codes, records),
        *(records, order, slots, instructions, scratch, end),
    )


@_compiled  # type: ignore[untyped-decorator]
def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Extent(NamedTuple):
    """What the host knows of a batch before it has been lowered."""

    slots: int
    """Places for row-invariant subtrees with one parameter vector; see `slots_at_most`."""
    levels: int
    """Stack levels below the top that no program needs more than."""
    usual: int
    """Levels that are enough for most."""
    costly: bool
    """Whether an operator needs scratch levels."""


@_compiled  # type: ignore[untyped-decorator]
def survey(tokens: Tokens, flags: NDArray[np.uint8]) -> Extent:
    """Bound what a batch will need.

    Args:
        tokens: the batch.
        flags: `COSTLY` and `TERNARY` of each wire code; [256].

    """
    found, longest, squares = np.uint8(0), np.int64(0), np.int64(0)
    for code in tokens.codes:
        found |= flags[code]
    for length in tokens.lengths:
        tokens_of_one = np.int64(length)
        longest = max(longest, tokens_of_one)
        squares += tokens_of_one * tokens_of_one
    count, programs = len(tokens.codes), len(tokens.lengths)
    has_ternary = bool(found & TERNARY)
    return Extent(
        slots_at_most(count, programs),
        most_levels(longest, has_ternary),
        # Of the program that a token is in, on average.
        most_levels(squares // max(1, count), has_ternary),
        bool(found & COSTLY),
    )


@_compiled  # type: ignore[untyped-decorator]
def most_levels(tokens: int, has_ternary: bool) -> int:
    """Most stack levels below the top that a program of so many tokens may need.

    A binary operator needs a level more than its operands if both need the same; one on the stack
    has at least two tokens. A ternary evaluates all three, atoms too: the third one finds two
    levels taken.
    """
    if not has_ternary:
        levels, least = 0, 5  # fewest tokens with a level more
        while least <= tokens:
            levels, least = levels + 1, 2 * least + 1
        return levels
    levels, before, least = 0, 1, 4
    while least <= tokens:
        levels += 1
        before, least = least, min(3 * before + 1, 2 * least + 1)
    return levels


@_compiled  # type: ignore[untyped-decorator]
def pack(tokens: Tokens, parts: Parts, memory: NDArray[np.uint8]) -> None:
    """Fill host memory with what is uploaded.

    Args:
        tokens: the batch.
        parts: of it.
        memory: uint8 [at least parts.uploaded].

    """
    size = 4 * (len(tokens.lengths) + 1)
    add_up(tokens.lengths, memory[:size].view(np.uint32))
    second = parts.parameter_starts
    add_up(tokens.parameter_counts, memory[second : second + size].view(np.uint32))
    _copy(tokens.values, memory[parts.values : parts.parameters].view(np.float64))
    _copy(tokens.parameters, memory[parts.parameters : parts.codes].view(np.float64))
    _copy(tokens.codes, memory[parts.codes : parts.uploaded])


@_compiled  # type: ignore[untyped-decorator]
def add_up(lengths: NDArray[np.uint32], starts: NDArray[np.uint32]) -> None:
    """Write where each of so long parts begins, and the total."""
    total = np.uint32(0)
    for index in range(len(lengths)):
        starts[index] = total
        total += lengths[index]
    starts[len(lengths)] = total


@_compiled  # type: ignore[untyped-decorator]
def _copy(source: NDArray[Any], target: NDArray[Any]) -> None:
    for index in range(len(source)):
        target[index] = source[index]
