"""Lowering of a batch from postfix to the interpreter's instructions; no device needed.

One pass over the tokens of each program. An atom (a variable, or a row-invariant subtree, which has
no variable inside) never costs an instruction of its own: it is the operand of the operator above
it, and every maximal row-invariant subtree becomes a slot, computed once for each parameter vector.
The code of any other subtree is a linked list of instructions, so that an operator can put its
operands' code in either order: the operand that needs more stack levels goes first (Sethi and
Ullman 1970, "The generation of optimal code for arithmetic expressions"), which keeps the need
logarithmic in the program's length.

The loops are compiled by Numba and run without the interpreter lock.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import ResourceExhaustedError
from warpfit.ir import Batch
from warpfit.ops import ARITIES, VARIABLE
from warpfit_server.engine import numba_cache
from warpfit_server.engine.cuda.bytecode import (
    END,
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
from warpfit_server.engine.cuda.tokens import Tokens
from warpfit_server.engine.sound import check_sound

_LABELS: Final = labels()
_compiled = numba_cache.njit(nogil=True, inline="always")

#: What is known of a subtree: stack height of the scalar kernel if it is row-invariant, else 0;
#: first token (for a variable its index) and last token; stack levels below the top that its code
#: needs; first instruction of its code, -1 for an atom, and last one.
_HEIGHT, _FIRST, _LAST, _NEED, _HEAD, _TAIL, _FIELDS = range(7)
#: Counters: instructions of the program so far, slots so far, first slot of the program.
_NODES, _SLOTS, _FIRST_SLOT, _COUNTERS = range(4)


#: What is said instead of levels: that the tokens are no programs, or that an index is too large.
UNSOUND: Final = -2
_TOO_FAR: Final = -1
#: Instructions behind the last one that the kernel reads, and does not run.
READ_AHEAD: Final = 1


def check_length(batch: Batch) -> int:
    """Return the length of the longest program.

    Raises:
        ResourceExhaustedError: if it is too long to encode.

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
    return longest


def check_levels(levels: int, batch: Batch, variables: int) -> None:
    """Refuse a batch that was not lowered.

    Args:
        levels: what the lowering returned.
        batch: that was to be lowered.
        variables: of the data set.

    Raises:
        ProgramError: for the first bad token.
        ResourceExhaustedError: if a variable's index is too large.

    """
    if levels == UNSOUND:
        check_sound(batch, variables)
    if levels < 0:
        raise ResourceExhaustedError(
            "a variable's index is larger than the interpreter can encode",
            "VARIABLE_TOO_FAR",
            f"Use the first {INDEX_LIMIT} variables",
            available=INDEX_LIMIT,
        )


@_compiled  # type: ignore[untyped-decorator]
def lower_into(
    tokens: Tokens,
    longest: int,
    instructions: NDArray[np.uint64],
    programs: NDArray[np.uint32],
    slots: NDArray[np.uint32],
) -> tuple[int, int, int]:
    """Lower a checked batch; compiled code alone can call this.

    Args:
        tokens: the batch.
        longest: length of its longest program.
        instructions: to fill; [tokens + programs + READ_AHEAD].
        programs: to fill with first instruction, number of instructions but for the one that
            ends the program, first slot, 0; [programs, 4].
        slots: to fill with first token, end token, first parameter value, parameters of the
            program; [at most tokens, 4].

    Returns:
        Instructions, slots, and stack levels that the deepest program needs below the top, below 0
        if the index of a variable is too large.

    """
    stack = np.empty((longest + 1, _FIELDS), dtype=np.int64)
    nodes = np.empty((longest + 3, 2), dtype=np.int64)
    state = np.zeros(_COUNTERS, dtype=np.int64)
    start, written, parameter, levels = 0, 0, 0, 0
    for program in range(len(tokens.lengths)):
        stop = start + int(tokens.lengths[program])
        count = int(tokens.parameter_counts[program])
        state[_NODES], state[_FIRST_SLOT] = 0, state[_SLOTS]
        if not _lower_program(tokens, start, stop, stack, nodes, slots, state):
            return 0, 0, _TOO_FAR
        programs[program, 0] = written
        programs[program, 2] = state[_FIRST_SLOT]
        programs[program, 3] = 0
        written = _write(stack[0, _HEAD], nodes, instructions, written)
        programs[program, 1] = written - programs[program, 0]
        instructions[written] = END
        written += 1
        for slot in range(state[_FIRST_SLOT], state[_SLOTS]):
            slots[slot, 2] = parameter
            slots[slot, 3] = count
        levels = max(levels, stack[0, _NEED])
        start = stop
        parameter += count * tokens.vectors
    for place in range(written, written + READ_AHEAD):
        instructions[place] = 0
    return written, state[_SLOTS], levels


@_compiled  # type: ignore[untyped-decorator]
def _lower_program(
    tokens: Tokens,
    start: int,
    stop: int,
    stack: NDArray[np.int64],
    nodes: NDArray[np.int64],
    slots: NDArray[np.uint32],
    state: NDArray[np.int64],
) -> bool:
    """Make the list of a program's instructions; False if a variable's index is too large."""
    top = 0
    for token in range(start, stop):
        code = tokens.codes[token]
        arity = ARITIES[code]
        top -= arity
        if arity == 0:
            variable = code == VARIABLE
            if variable and tokens.values[token] >= INDEX_LIMIT:
                return False
            stack[top, _HEIGHT] = 0 if variable else 1
            stack[top, _FIRST] = int(tokens.values[token]) if variable else token
            stack[top, _LAST] = token
            stack[top, _HEAD] = -1
            stack[top, _NEED] = 0
        elif _is_row_invariant(stack, top, arity):
            stack[top, _LAST] = token
        elif arity == 1:
            _emit_unary(_LABELS[code], stack, top, nodes, slots, state)
        elif arity == 2:
            _emit_binary(_LABELS[code], stack, top, nodes, slots, state)
        else:
            _emit_ternary(_LABELS[code], stack, top, nodes, slots, state)
        top += 1
    if stack[0, _HEAD] < 0:
        _load(stack, 0, nodes, slots, state)
    return True


@_compiled  # type: ignore[untyped-decorator]
def _write(
    node: int, nodes: NDArray[np.int64], instructions: NDArray[np.uint64], place: int
) -> int:
    """Write a list of instructions from a place on; return where it ends."""
    while node >= 0:
        instructions[place] = nodes[node, 0]
        node = nodes[node, 1]
        place += 1
    return place


@_compiled  # type: ignore[untyped-decorator]
def _is_row_invariant(stack: NDArray[np.int64], top: int, arity: int) -> bool:
    """Whether the operator on the operands at ``top`` is; if so, set the height of its result."""
    height = 0
    for operand in range(arity):
        if stack[top + operand, _HEIGHT] == 0:
            return False
        height = max(height, stack[top + operand, _HEIGHT] + operand)
    if height > SLOT_LEVELS:
        return False
    stack[top, _HEIGHT] = height
    return True


@_compiled  # type: ignore[untyped-decorator]
def _emit_unary(
    label: int,
    stack: NDArray[np.int64],
    top: int,
    nodes: NDArray[np.int64],
    slots: NDArray[np.uint32],
    state: NDArray[np.int64],
) -> None:
    if stack[top, _HEAD] < 0:
        word = label | _load_word(stack, top, slots, state)
        _begin(word, stack, top, nodes, state)
    else:
        _append(label, stack, top, top, nodes, state)


@_compiled  # type: ignore[untyped-decorator]
def _emit_binary(
    label: int,
    stack: NDArray[np.int64],
    left: int,
    nodes: NDArray[np.int64],
    slots: NDArray[np.uint32],
    state: NDArray[np.int64],
) -> None:
    right = left + 1
    left_atom, right_atom = stack[left, _HEAD] < 0, stack[right, _HEAD] < 0
    if left_atom and right_atom:
        # Load the variable and take the slot as the other operand, not the reverse.
        held = right if stack[left, _HEIGHT] > 0 else left
        other = left + right - held
        word = label | _load_word(stack, held, slots, state)
        word += _operand_word(stack, other, slots, state) + (1 if other == left else 0)
        _begin(word, stack, left, nodes, state)
    elif left_atom or right_atom:
        other = left if left_atom else right
        word = label + _operand_word(stack, other, slots, state) + (1 if left_atom else 0)
        _append(word, stack, left, left + right - other, nodes, state)
    else:
        left_first = stack[left, _NEED] >= stack[right, _NEED]
        first = left if left_first else right
        _join(stack, first, left + right - first, nodes)
        _append(label + FROM_STACK + (1 if left_first else 0), stack, left, first, nodes, state)


@_compiled  # type: ignore[untyped-decorator]
def _emit_ternary(
    label: int,
    stack: NDArray[np.int64],
    top: int,
    nodes: NDArray[np.int64],
    slots: NDArray[np.uint32],
    state: NDArray[np.int64],
) -> None:
    """All three operands are evaluated, atoms last; word 1 says in which order."""
    places = 0
    order = (_place(stack, top, 0), _place(stack, top, 1), _place(stack, top, 2))
    for operand in range(3):
        places |= order[operand] << (2 * operand)
        if stack[top + operand, _HEAD] < 0:
            _load(stack, top + operand, nodes, slots, state)
    first = -1
    for place in range(3):
        for operand in range(3):
            if order[operand] == place and first < 0:
                first = top + operand
            elif order[operand] == place:
                _join(stack, first, top + operand, nodes)
                # What is evaluated third finds two levels taken, not one.
                if place == 2:
                    stack[first, _NEED] = max(stack[first, _NEED], stack[top + operand, _NEED] + 2)
    _append(label | places << 32, stack, top, first, nodes, state)


@_compiled  # type: ignore[untyped-decorator]
def _place(stack: NDArray[np.int64], top: int, operand: int) -> int:
    """When a ternary's operand is evaluated: the neediest first, atoms last, else from the left."""
    rank = -1 if stack[top + operand, _HEAD] < 0 else stack[top + operand, _NEED]
    place = 0
    for other in range(3):
        earlier = -1 if stack[top + other, _HEAD] < 0 else stack[top + other, _NEED]
        if earlier > rank or (earlier == rank and other < operand):
            place += 1
    return place


@_compiled  # type: ignore[untyped-decorator]
def _join(stack: NDArray[np.int64], first: int, second: int, nodes: NDArray[np.int64]) -> None:
    """Put the code of one operand behind that of another, whose result it pushes."""
    nodes[stack[second, _HEAD], 0] |= PUSH
    nodes[stack[first, _TAIL], 1] = stack[second, _HEAD]
    stack[first, _TAIL] = stack[second, _TAIL]
    stack[first, _NEED] = max(stack[first, _NEED], stack[second, _NEED] + 1)


@_compiled  # type: ignore[untyped-decorator]
def _begin(
    word: int,
    stack: NDArray[np.int64],
    top: int,
    nodes: NDArray[np.int64],
    state: NDArray[np.int64],
) -> None:
    """Make an instruction that starts a subtree's code."""
    node = state[_NODES]
    state[_NODES] = node + 1
    nodes[node, 0], nodes[node, 1] = word, -1
    stack[top, _HEIGHT] = 0
    stack[top, _HEAD] = node
    stack[top, _TAIL] = node
    stack[top, _NEED] = 0


@_compiled  # type: ignore[untyped-decorator]
def _append(
    word: int,
    stack: NDArray[np.int64],
    top: int,
    operand: int,
    nodes: NDArray[np.int64],
    state: NDArray[np.int64],
) -> None:
    """Make an instruction that ends a subtree's code, after the code of its operands."""
    node = state[_NODES]
    state[_NODES] = node + 1
    nodes[node, 0], nodes[node, 1] = word, -1
    nodes[stack[operand, _TAIL], 1] = node
    stack[top, _HEIGHT] = 0
    stack[top, _HEAD] = stack[operand, _HEAD]
    stack[top, _TAIL] = node
    stack[top, _NEED] = stack[operand, _NEED]


@_compiled  # type: ignore[untyped-decorator]
def _load(
    stack: NDArray[np.int64],
    place: int,
    nodes: NDArray[np.int64],
    slots: NDArray[np.uint32],
    state: NDArray[np.int64],
) -> None:
    """Make an instruction of its own for an atom."""
    _begin(_load_word(stack, place, slots, state), stack, place, nodes, state)


@_compiled  # type: ignore[untyped-decorator]
def _load_word(
    stack: NDArray[np.int64], place: int, slots: NDArray[np.uint32], state: NDArray[np.int64]
) -> int:
    """Word 0 that loads an atom to the top of the stack."""
    if stack[place, _HEIGHT] == 0:
        return int(LOAD_VARIABLE | stack[place, _FIRST] << INDEX_SHIFT)
    return int(LOAD_SLOT | _slot(stack, place, slots, state) << INDEX_SHIFT)


@_compiled  # type: ignore[untyped-decorator]
def _operand_word(
    stack: NDArray[np.int64], place: int, slots: NDArray[np.uint32], state: NDArray[np.int64]
) -> int:
    """Both words, to be added, of an instruction whose second operand is an atom."""
    if stack[place, _HEIGHT] == 0:
        return int(FROM_VARIABLE + (stack[place, _FIRST] << 32))
    return int(FROM_SLOT + (_slot(stack, place, slots, state) << 32))


@_compiled  # type: ignore[untyped-decorator]
def _slot(
    stack: NDArray[np.int64], place: int, slots: NDArray[np.uint32], state: NDArray[np.int64]
) -> int:
    """Make a slot for a row-invariant subtree; return its index in the program."""
    slot = state[_SLOTS]
    state[_SLOTS] = slot + 1
    slots[slot, 0], slots[slot, 1] = stack[place, _FIRST], stack[place, _LAST] + 1
    return int(slot - state[_FIRST_SLOT])
