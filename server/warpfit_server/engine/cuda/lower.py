"""Lowering of a batch from postfix to the interpreter's instructions; no device needed.

For each program, in one pass over its tokens each::

    1. for every subtree: where it starts, whether it is row-invariant (no variable inside), and
       how many stack levels it needs (Sethi and Ullman 1970, "The generation of optimal code for
       arithmetic expressions": evaluating the operand that needs more first keeps the need
       logarithmic in the program's length)
    2. emit the instructions: an atom (a variable, or a row-invariant subtree) never costs an
       instruction of its own, it is the operand of the operator above it; every maximal
       row-invariant subtree becomes a slot, computed once for each parameter vector

The loops are compiled by Numba and run without the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numba
import numpy as np
from numpy.typing import NDArray

from warpfit.errors import ResourceExhaustedError
from warpfit.ir import Batch
from warpfit.ops import ARITIES, VARIABLE
from warpfit_server.engine.cuda.bytecode import (
    FROM_SLOT,
    FROM_STACK,
    FROM_VARIABLE,
    INDEX_LIMIT,
    INDEX_SHIFT,
    LOAD_SLOT,
    LOAD_VARIABLE,
    PUSH,
    SLOT_LEVELS,
    labels,
)

_LABELS: Final = labels()
_compiled = numba.njit(cache=True, nogil=True)


#: Gives a buffer of a name and a size in bytes, uint8 [size].
Memory = Callable[[str, int], NDArray[np.uint8]]


def _fresh(_: str, size: int) -> NDArray[np.uint8]:
    return np.empty(size, dtype=np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class Lowered:
    """What the interpreter runs."""

    instructions: NDArray[np.uint32]
    """[instructions + 1, 2]; the last one pads the kernel's read ahead."""
    programs: NDArray[np.uint32]
    """First instruction, number of instructions, first slot, 0; [programs, 4]."""
    slots: NDArray[np.uint32]
    """First token, end token, first parameter value, parameters of the program; [slots, 4]."""
    levels: int
    """Stack levels that the deepest program needs below the top."""


def lower(batch: Batch, memory: Memory = _fresh) -> Lowered:
    """Lower a checked batch.

    Args:
        batch: the programs.
        memory: gives the named buffers, uint8 [size], that the result lies in; memory that has
            been used before saves the page faults of fresh memory.

    Raises:
        ResourceExhaustedError: if a program or a variable's index is too large to encode.

    """
    longest = int(batch.lengths.max())
    if longest >= INDEX_LIMIT:
        raise ResourceExhaustedError(
            f"a program of {longest} tokens is longer than the interpreter can encode",
            "PROGRAM_TOO_LONG",
            "Split the program",
            needed=longest,
            available=INDEX_LIMIT - 1,
        )
    tokens = len(batch.codes)
    instructions = memory("instructions", (tokens + 1) * 8).view(np.uint32).reshape(-1, 2)
    programs = memory("programs", len(batch) * 16).view(np.uint32).reshape(-1, 4)
    slots = memory("slots", tokens * 16).view(np.uint32).reshape(-1, 4)
    written, slot_count, levels = _lower(
        batch.codes,
        batch.values,
        batch.lengths.astype(np.int64),
        batch.parameter_counts.astype(np.int64),
        batch.vectors,
        longest,
        ARITIES,
        _LABELS,
        instructions,
        programs,
        slots,
    )
    if levels < 0:
        raise ResourceExhaustedError(
            "a variable's index is larger than the interpreter can encode",
            "VARIABLE_TOO_FAR",
            f"Use the first {INDEX_LIMIT} variables",
            available=INDEX_LIMIT,
        )
    instructions[written] = 0
    return Lowered(instructions[: written + 1], programs, slots[:slot_count], levels)


@_compiled  # type: ignore[untyped-decorator]
def _lower(
    codes: NDArray[np.uint8],
    values: NDArray[np.float64],
    lengths: NDArray[np.int64],
    parameter_counts: NDArray[np.int64],
    vectors: int,
    longest: int,
    arities: NDArray[np.int8],
    operator_labels: NDArray[np.int64],
    instructions: NDArray[np.uint32],
    programs: NDArray[np.uint32],
    slots: NDArray[np.uint32],
) -> tuple[int, int, int]:
    """Fill the outputs; return instructions, slots and levels (-1: an index does not fit)."""
    first = np.empty(longest, dtype=np.int32)
    need = np.empty(longest, dtype=np.int32)
    height = np.empty(longest, dtype=np.int32)
    work = np.empty((2 * longest + 2, 2), dtype=np.int32)
    start, written, slot_count, parameter, levels = 0, 0, 0, 0, 0
    for program in range(len(lengths)):
        length = int(lengths[program])
        count = int(parameter_counts[program])
        code = codes[start : start + length]
        value = values[start : start + length]
        _survey(code, arities, first, need, height, work)
        if _too_far(code, value):
            return 0, 0, -1
        emitted, new_slots = _emit(
            code, value, arities, operator_labels, first, need, height, work,
            instructions[written:], slots[slot_count:],
        )  # fmt: skip
        for slot in range(slot_count, slot_count + new_slots):
            slots[slot, 0] += start
            slots[slot, 1] += start
            slots[slot, 2] = parameter
            slots[slot, 3] = count
        programs[program, 0] = written
        programs[program, 1] = emitted
        programs[program, 2] = slot_count
        programs[program, 3] = 0
        levels = max(levels, need[length - 1])
        start += length
        written += emitted
        slot_count += new_slots
        parameter += count * vectors
    return written, slot_count, levels


@_compiled  # type: ignore[untyped-decorator]
def _too_far(code: NDArray[np.uint8], value: NDArray[np.float64]) -> bool:
    for token in range(len(code)):
        if code[token] == VARIABLE and value[token] >= INDEX_LIMIT:
            return True
    return False


@_compiled  # type: ignore[untyped-decorator]
def _survey(
    code: NDArray[np.uint8],
    arities: NDArray[np.int8],
    first: NDArray[np.int32],
    need: NDArray[np.int32],
    height: NDArray[np.int32],
    work: NDArray[np.int32],
) -> None:
    """Describe the subtree that ends at each token.

    ``first`` is its first token, ``need`` the stack levels below the top that it needs, ``height``
    its scalar stack if it is row-invariant and fits, else 0.
    """
    top = 0
    for token in range(len(code)):
        arity = int(arities[code[token]])
        first[token] = token
        need[token] = 0
        height[token] = 0 if code[token] == VARIABLE else 1
        top -= arity
        for operand in range(arity):
            root = work[top + operand, 0]
            if operand == 0:
                first[token] = first[root]
            if height[root] == 0 or height[token] == 0:
                height[token] = 0
            else:
                height[token] = max(height[token], height[root] + operand)
        if height[token] > SLOT_LEVELS:
            height[token] = 0
        if arity > 0 and height[token] == 0:
            need[token] = _levels(code, first, need, height, token, arity)
        work[top, 0] = token
        top += 1


@_compiled  # type: ignore[untyped-decorator]
def _levels(
    code: NDArray[np.uint8],
    first: NDArray[np.int32],
    need: NDArray[np.int32],
    height: NDArray[np.int32],
    token: int,
    arity: int,
) -> int:
    """Levels below the top that an operator needs when its neediest operand goes first."""
    right = token - 1
    if arity == 1:
        return int(need[right])
    left = int(first[right]) - 1
    if arity == 2:
        if _is_atom(code, height, left) or _is_atom(code, height, right):
            return int(max(need[left], need[right]))
        low, high = min(need[left], need[right]), max(need[left], need[right])
        return int(max(high, low + 1))
    third = int(first[left]) - 1
    low = min(need[left], need[right], need[third])
    high = max(need[left], need[right], need[third])
    middle = need[left] + need[right] + need[third] - low - high
    return int(max(high, middle + 1, low + 2))


@_compiled  # type: ignore[untyped-decorator]
def _is_atom(code: NDArray[np.uint8], height: NDArray[np.int32], token: int) -> bool:
    return bool(code[token] == VARIABLE or height[token] > 0)


@_compiled  # type: ignore[untyped-decorator]
def _rank(
    code: NDArray[np.uint8], need: NDArray[np.int32], height: NDArray[np.int32], token: int
) -> int:
    """Evaluate operands of higher rank first: atoms last, then by need."""
    return 0 if _is_atom(code, height, token) else int(need[token]) + 1


@_compiled  # type: ignore[untyped-decorator]
def _emit(
    code: NDArray[np.uint8],
    value: NDArray[np.float64],
    arities: NDArray[np.int8],
    operator_labels: NDArray[np.int64],
    first: NDArray[np.int32],
    need: NDArray[np.int32],
    height: NDArray[np.int32],
    work: NDArray[np.int32],
    out: NDArray[np.uint32],
    slots: NDArray[np.uint32],
) -> tuple[int, int]:
    """Write one program's instructions and slots; return how many of each.

    ``work`` holds subtrees to evaluate (phase 0) and operators whose operands that are no atoms
    have been evaluated (phase 1).
    """
    written, slot_count, live = 0, 0, 0
    work[0, 0], work[0, 1] = len(code) - 1, 0
    top = 1
    while top > 0:
        top -= 1
        token, phase = int(work[top, 0]), work[top, 1]
        if _is_atom(code, height, token):
            head, slot_count = _load(code, value, first, height, token, live, slots, slot_count)
            out[written, 0], out[written, 1] = head, 0
            written += 1
            live += 1
            continue
        arity = int(arities[code[token]])
        if phase == 0:
            work[top, 1] = 1
            top = _schedule(code, first, need, height, work, top + 1, token, arity)
            continue
        head, operand = int(operator_labels[code[token]]), 0
        right = token - 1
        left = int(first[right]) - 1
        if arity == 1 and _is_atom(code, height, right):
            load, slot_count = _load(code, value, first, height, right, live, slots, slot_count)
            head |= load
            live += 1
        elif arity == 2:
            left_atom = _is_atom(code, height, left)
            right_atom = _is_atom(code, height, right)
            if left_atom and right_atom:
                # Load the variable and take the slot as the other operand, not the reverse.
                held = right if height[left] > 0 else left
                load, slot_count = _load(code, value, first, height, held, live, slots, slot_count)
                head |= load
                live += 1
                other = left + right - held
                form, operand, slot_count = _source(
                    code, value, first, height, other, slots, slot_count
                )
                head += form + (1 if other == left else 0)
            elif left_atom or right_atom:
                other = left if left_atom else right
                form, operand, slot_count = _source(
                    code, value, first, height, other, slots, slot_count
                )
                head += form + (1 if left_atom else 0)
            else:
                left_first = need[left] >= need[right]
                head += FROM_STACK + (1 if left_first else 0)
                live -= 1
        elif arity == 3:
            third = int(first[left]) - 1
            operand = _places(code, need, height, third, left, right)
            live -= 2
        out[written, 0], out[written, 1] = head, operand
        written += 1
    return written, slot_count


@_compiled  # type: ignore[untyped-decorator]
def _schedule(
    code: NDArray[np.uint8],
    first: NDArray[np.int32],
    need: NDArray[np.int32],
    height: NDArray[np.int32],
    work: NDArray[np.int32],
    top: int,
    token: int,
    arity: int,
) -> int:
    """Put an operator's operands on the work list, the one to evaluate first on top."""
    base = top
    operand = token - 1
    for position in range(arity):
        if position > 0:
            operand = int(first[operand]) - 1
        # Atoms are loaded by their operator, but a ternary takes all its operands evaluated.
        if arity < 3 and _is_atom(code, height, operand):
            continue
        rank = _rank(code, need, height, operand)
        place = top
        # Equal ranks keep the leftmost operand on top.
        while place > base and _rank(code, need, height, int(work[place - 1, 0])) > rank:
            work[place, 0], work[place, 1] = work[place - 1, 0], 0
            place -= 1
        work[place, 0], work[place, 1] = operand, 0
        top += 1
    return top


@_compiled  # type: ignore[untyped-decorator]
def _places(
    code: NDArray[np.uint8],
    need: NDArray[np.int32],
    height: NDArray[np.int32],
    a: int,
    b: int,
    c: int,
) -> int:
    """Order of evaluation of a ternary's operands: 2 bits each for a, b and c."""
    ranks = (
        _rank(code, need, height, a),
        _rank(code, need, height, b),
        _rank(code, need, height, c),
    )
    places = 0
    for i in range(3):
        earlier = 0
        for j in range(3):
            if ranks[j] > ranks[i] or (ranks[j] == ranks[i] and j < i):
                earlier += 1
        places |= earlier << (2 * i)
    return places


@_compiled  # type: ignore[untyped-decorator]
def _source(
    code: NDArray[np.uint8],
    value: NDArray[np.float64],
    first: NDArray[np.int32],
    height: NDArray[np.int32],
    token: int,
    slots: NDArray[np.uint32],
    slot_count: int,
) -> tuple[int, int, int]:
    """Case offset and operand index of an atom, and the new number of slots."""
    if height[token] == 0:
        return FROM_VARIABLE, int(value[token]), slot_count
    slots[slot_count, 0], slots[slot_count, 1] = first[token], token + 1
    return FROM_SLOT, slot_count, slot_count + 1


@_compiled  # type: ignore[untyped-decorator]
def _load(
    code: NDArray[np.uint8],
    value: NDArray[np.float64],
    first: NDArray[np.int32],
    height: NDArray[np.int32],
    token: int,
    live: int,
    slots: NDArray[np.uint32],
    slot_count: int,
) -> tuple[int, int]:
    """Word 0 that loads an atom to the top of the stack, and the new number of slots."""
    form, index, slot_count = _source(code, value, first, height, token, slots, slot_count)
    flag = LOAD_VARIABLE if form == FROM_VARIABLE else LOAD_SLOT
    return flag | (PUSH if live > 0 else 0) | index << INDEX_SHIFT, slot_count
