"""A batch on the device: where its arrays are, and bounds of what it needs there."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from warpfit.ir import Batch
from warpfit.ops import OPERATORS
from warpfit_server.engine.native import numba_cache
from warpfit_server.engine.native.intrinsics import aligned
from warpfit_server.shared_batch import BatchSummary

_ALIGNMENT: Final = 64
#: Instructions after the last one that the interpreter prefetches and does not run.
READ_AHEAD: Final = 1
#: Operators with three operands, as `BatchSummary.operators` has them.
_TERNARY: Final = sum(1 << row.code for row in OPERATORS.values() if row.arity == 3)
_compiled = numba_cache.njit(nogil=True)


class BatchLayout(NamedTuple):
    """Byte offsets of a batch's arrays in one block of device memory.

    The host uploads everything before ``uploaded``, laid out as in a segment; kernels write the
    rest.
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

    levels: int
    """Stack levels below the top that any program needs."""
    typical_levels: int
    """Stack levels that are enough for most programs."""
    costly: bool
    """Whether an operator needs scratch levels."""

    @classmethod
    def of(cls, summary: BatchSummary, costly: int) -> BatchBounds:
        """Bound what a batch needs; ``costly`` has the operators that need scratch levels."""
        has_ternary = bool(summary.operators & _TERNARY)
        levels = max_levels(summary.longest, has_ternary)
        typical = max_levels(summary.typical, has_ternary)
        return cls(levels, typical, bool(summary.operators & costly))


@lru_cache(1 << 12)
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
