"""A batch on its way to the device: lowered into one piece of memory, for one copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit.tokens import INDEX_LIMIT
from warpfit_server.engine import numba_cache
from warpfit_server.engine.cuda.lower import (
    READ_AHEAD,
    UNSOUND,
    check_length,
    check_levels,
    lower_into,
)
from warpfit_server.engine.cuda.tokens import Tokens
from warpfit_server.engine.sound import sound_tokens

_ALIGNMENT: Final = 64
_compiled = numba_cache.njit(nogil=True)


class Parts(NamedTuple):
    """Where each part of a staged batch begins, in bytes.

    The lowering fills ``instructions`` and ``slots`` as far as it needs them.
    """

    programs: int
    order: int
    """Job numbers, uint32 [jobs]."""
    values: int
    parameters: int
    codes: int
    instructions: int
    slots: int
    end: int

    @classmethod
    def of(cls, batch: Batch) -> Parts:
        """Lay a batch out."""
        sizes = len(batch.codes), len(batch), len(batch.parameters), batch.vectors
        return cls(*lay_out(*sizes))


@_compiled  # type: ignore[untyped-decorator]
def slots_at_most(tokens: int, programs: int) -> int:
    """Most row-invariant subtrees: the leaves, if every operator had the most operands, three."""
    return int((2 * tokens + programs) // 3)


@_compiled  # type: ignore[untyped-decorator]
def lay_out(tokens: int, programs: int, parameters: int, vectors: int) -> Parts:
    """Lay out a batch of so many tokens, programs, parameters in all vectors, and vectors."""
    order = _aligned(16 * programs)
    values = order + _aligned(4 * programs * vectors)
    numbers = values + _aligned(8 * tokens)
    codes = numbers + _aligned(8 * parameters)
    instructions = codes + _aligned(tokens)
    slots = instructions + _aligned(8 * (tokens + programs + READ_AHEAD))
    end = slots + _aligned(16 * slots_at_most(tokens, programs))
    return Parts(0, order, values, numbers, codes, instructions, slots, end)


@_compiled  # type: ignore[untyped-decorator]
def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Extent(NamedTuple):
    """What the lowering has made of a batch."""

    instructions: int
    slots: int
    """Row-invariant subtrees."""
    levels: int
    """Stack levels that the deepest program needs below the top; below 0: not lowered."""
    costly: bool
    """Whether an operator needs scratch levels."""


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A batch in the memory that goes to the device."""

    memory: NDArray[np.uint8]
    parts: Parts
    extent: Extent

    @property
    def used(self) -> NDArray[np.uint8]:
        """What must be copied."""
        return self.memory[: self.parts.slots + 16 * self.extent.slots]

    @property
    def instructions(self) -> NDArray[np.uint32]:
        """[instructions + READ_AHEAD, 2]."""
        count = self.extent.instructions + READ_AHEAD
        return self._part(self.parts.instructions, 8 * count).reshape(-1, 2)

    @property
    def programs(self) -> NDArray[np.uint32]:
        """First instruction, number of instructions, first slot, 0; [programs, 4]."""
        return self._part(self.parts.programs, self.parts.order).reshape(-1, 4)

    @property
    def order(self) -> NDArray[np.uint32]:
        """Job numbers, and what pads them."""
        return self._part(self.parts.order, self.parts.values - self.parts.order)

    @property
    def slots(self) -> NDArray[np.uint32]:
        """First token, end token, first parameter value, parameters of the program; [slots, 4]."""
        return self._part(self.parts.slots, 16 * self.extent.slots).reshape(-1, 4)

    def _part(self, start: int, size: int) -> NDArray[np.uint32]:
        return self.memory[start : start + size].view(np.uint32)


def stage(
    batch: Batch,
    variables: int,
    costly: NDArray[np.bool_],
    chunk: int,
    allocate: Callable[[int], NDArray[np.uint8]],
) -> Staged:
    """Check and lower a batch.

    Args:
        batch: whose arrays fit together.
        variables: of the data set.
        costly: whether an operator needs scratch levels, by wire code; [256].
        chunk: jobs of each launch.
        allocate: gives memory of a number of bytes, uint8.

    Raises:
        ProgramError: for the first bad token.
        ResourceExhaustedError: if a program or a variable's index is too large to encode.

    """
    longest, parts = check_length(batch), Parts.of(batch)
    memory = allocate(parts.end)
    extent = Extent(*stage_into(Tokens.of(batch), variables, longest, costly, chunk, parts, memory))
    check_levels(extent.levels, batch, variables)
    return Staged(memory, parts, extent)


@_compiled  # type: ignore[untyped-decorator]
def stage_into(
    tokens: Tokens,
    variables: int,
    longest: int,
    costly: NDArray[np.bool_],
    chunk: int,
    parts: Parts,
    memory: NDArray[np.uint8],
) -> tuple[int, int, int, bool]:
    """Check and lower a batch into memory laid out as ``parts``; return the fields of `Extent`."""
    limit = float(min(variables, INDEX_LIMIT))
    if not sound_tokens(
        tokens.codes, tokens.values, tokens.lengths, tokens.parameter_counts, limit
    ):
        return 0, 0, UNSOUND, False
    programs = memory[parts.programs : 16 * len(tokens.lengths)].view(np.uint32).reshape(-1, 4)
    instructions, slots, levels = lower_into(
        tokens,
        longest,
        memory[parts.instructions : parts.slots].view(np.uint64),
        programs,
        memory[parts.slots : parts.end].view(np.uint32).reshape(-1, 4),
    )
    if levels < 0:
        return 0, 0, levels, False
    _copy(tokens.values, memory[parts.values : parts.parameters].view(np.float64))
    _copy(tokens.parameters, memory[parts.parameters : parts.codes].view(np.float64))
    _copy(tokens.codes, memory[parts.codes : parts.instructions])
    jobs = len(programs) * tokens.vectors
    order = memory[parts.order : parts.values].view(np.uint32)
    for first in range(0, jobs, chunk):
        last = min(first + chunk, jobs)
        _longest_first(programs, tokens.vectors, longest, first, order[first:last])
    return instructions, slots, levels, _is_any(costly, tokens.codes)


@_compiled  # type: ignore[untyped-decorator]
def _copy(source: NDArray[Any], target: NDArray[Any]) -> None:
    for index in range(len(source)):
        target[index] = source[index]


@_compiled  # type: ignore[untyped-decorator]
def _longest_first(
    programs: NDArray[np.uint32],
    vectors: int,
    longest: int,
    first: int,
    order: NDArray[np.uint32],
) -> None:
    """Number jobs from ``first`` on by falling length: the short ones fill the gaps in the end."""
    places = np.zeros(longest + 3, dtype=np.int64)  # where the jobs of a length begin
    for job in range(first, first + len(order)):
        places[longest + 1 - programs[job // vectors, 1]] += 1
    place = 0
    for rank in range(len(places)):
        place, places[rank] = place + places[rank], place
    for job in range(first, first + len(order)):
        rank = longest + 1 - programs[job // vectors, 1]
        order[places[rank]] = job
        places[rank] += 1


@_compiled  # type: ignore[untyped-decorator]
def _is_any(flags: NDArray[np.bool_], codes: NDArray[np.uint8]) -> bool:
    """Whether a code is flagged."""
    index = 0
    while index < len(codes) and not flags[codes[index]]:
        index += 1
    return index < len(codes)
