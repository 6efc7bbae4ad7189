"""The shape of an expression: what a compiled kernel depends on, without any number in it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch
from warpfit.ops import CONSTANT, OPERATORS, PARAMETER, VARIABLE
from warpfit_server.engine.cuda.runtime.tokens import Tokens
from warpfit_server.engine.native import numba_cache

_POW: Final = OPERATORS["pow"].code
#: Constant exponents that get code of their own, in the kernel language.
POWERS: Final = {
    -2: "(1 / a) * (1 / a)",
    -1: "1 / a",
    1: "a",
    2: "a * a",
    3: "a * a * a",
    4: "(a * a) * (a * a)",
}
#: Their derivatives.
POWER_DERIVATIVES: Final = {
    -2: "-2 * (1 / a) * (1 / a) * (1 / a)",
    -1: "-(1 / a) * (1 / a)",
    1: "1",
    2: "2 * a",
    3: "3 * a * a",
    4: "4 * a * a * a",
}
#: Operand of a `pow` token whose exponent is part of the shape: the exponent plus this.
EXPONENT_BIAS: Final = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of one expression after lifting.

    A VARIABLE token carries the variable's index, a PARAMETER token the number of a slot (a value
    that the kernel reads at run time), an operator 0, and ``pow`` with a literal exponent that
    exponent plus `EXPONENT_BIAS` (it then has one operand).
    """

    codes: bytes
    operands: tuple[int, ...]
    slots: int
    """Number of slots."""
    key: bytes
    """16-byte BLAKE2b hash of the tokens, and of ``wanted`` if there are any."""
    wanted: tuple[int, ...] = ()
    """Slots that derivatives are wanted by, ascending."""


class SlotSources(NamedTuple):
    """Where the value of each slot comes from; arrays [slots]."""

    tokens: NDArray[np.int64]
    """First token of the batch that has it."""
    programs: NDArray[np.int64]
    """The token's program, ascending."""
    from_parameter: NDArray[np.bool_]
    """Whether the token is a parameter, not a constant."""


@dataclass(frozen=True, slots=True, eq=False)
class LiftedBatch:
    """Shapes of a whole batch, and where the value of each slot comes from."""

    shapes: tuple[Shape, ...]
    slot_starts: NDArray[np.int64]
    """Index of each expression's first slot, and the total; [programs + 1]."""
    key: bytes
    """Hash of the shapes in their order."""
    sources: SlotSources

    def with_derivatives(self) -> LiftedBatch:
        """Ask for derivatives by all slots that are parameters."""
        shapes = []
        for shape, start in zip(self.shapes, self.slot_starts.tolist(), strict=False):
            flags = self.sources.from_parameter[start : start + shape.slots]
            key = hashlib.blake2b(shape.key + flags.tobytes(), digest_size=16).digest()
            shapes.append(replace(shape, key=key, wanted=tuple(np.flatnonzero(flags).tolist())))
        joined = hashlib.blake2b(b"".join(shape.key for shape in shapes), digest_size=16).digest()
        return replace(self, shapes=tuple(shapes), key=joined)

    def parameter_places(self, batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Program and parameter of each slot wanted, in their order."""
        wanted = self.sources.from_parameter
        tokens = self.sources.tokens[wanted]
        return self.sources.programs[wanted], batch.values[tokens].astype(np.int64)

    def fill(self, batch: Batch, slots: NDArray[Any]) -> None:
        """Fill slots with their values for each parameter vector.

        Args:
            batch: the lifted batch, or one of the same shapes with other numbers.
            slots: to fill; float32 or float64 [K, slots].

        """
        tokens = Tokens.of(batch)
        fill_slots(tokens.values, tokens.parameter_counts, tokens.parameters, self.sources, slots)


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def fill_slots(
    values: NDArray[np.float64],
    parameter_counts: NDArray[np.uint32],
    parameters: NDArray[np.float64],
    sources: SlotSources,
    slots: NDArray[Any],
) -> None:
    """Fill slots from constants and parameters.

    Args:
        values: of the batch, likewise the next two.
        parameter_counts: of its programs.
        parameters: of all programs and vectors.
        sources: where the values come from.
        slots: to fill; float32 or float64 [K, slots].

    """
    vectors = len(slots)
    program, start = 0, 0  # first parameter value of the program
    for slot in range(len(sources.tokens)):
        while program < sources.programs[slot]:
            start += int(parameter_counts[program]) * vectors
            program += 1
        value = values[sources.tokens[slot]]
        for vector in range(vectors):
            if sources.from_parameter[slot]:
                place = start + vector * int(parameter_counts[program]) + int(value)
                slots[vector, slot] = parameters[place]
            else:
                slots[vector, slot] = value


def lift(batch: Batch) -> LiftedBatch:
    """Replace constants and parameters of a checked batch by slots, in order of appearance."""
    literal = _literal_exponents(batch)
    is_slot = (batch.codes == PARAMETER) | ((batch.codes == CONSTANT) & ~literal)
    program = np.repeat(np.arange(len(batch)), batch.lengths)
    tokens = np.flatnonzero(is_slot)
    first, number = _number_slots(batch, tokens, program[tokens])
    slot_tokens = tokens[first]
    slot_starts = np.searchsorted(program[slot_tokens], np.arange(len(batch) + 1))
    operands = np.where(batch.codes == VARIABLE, batch.values, 0.0).astype(np.int64)
    operands[tokens] = number - slot_starts[program[tokens]]
    exponents = np.flatnonzero(literal)
    operands[exponents + 1] = batch.values[exponents].astype(np.int64) + EXPONENT_BIAS
    codes = np.where(batch.codes == CONSTANT, np.uint8(PARAMETER), batch.codes)
    starts = np.zeros(len(batch) + 1, dtype=np.int64)
    np.cumsum(np.bincount(program[~literal], minlength=len(batch)), out=starts[1:])
    shapes = _shapes(codes[~literal], operands[~literal].astype("<u4"), starts, slot_starts)
    return LiftedBatch(
        shapes=shapes,
        slot_starts=slot_starts,
        key=hashlib.blake2b(b"".join(shape.key for shape in shapes), digest_size=16).digest(),
        sources=SlotSources(
            slot_tokens, program[slot_tokens], batch.codes[slot_tokens] == PARAMETER
        ),
    )


def _literal_exponents(batch: Batch) -> NDArray[np.bool_]:
    literal: NDArray[np.bool_] = (batch.codes == CONSTANT) & np.isin(batch.values, list(POWERS))
    literal[:-1] &= batch.codes[1:] == _POW
    literal[-1] = False
    return literal


def _number_slots(
    batch: Batch, tokens: NDArray[np.int64], programs: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number slots through the batch: equal parameters of a program share one, constants do not.

    Returns:
        The index into ``tokens`` of each slot's first appearance, and each token's slot.

    """
    constant = batch.codes[tokens] == CONSTANT
    identity = np.empty(len(tokens), dtype=[("program", "i8"), ("constant", "i8"), ("index", "i8")])
    identity["program"] = programs
    identity["constant"] = constant
    identity["index"] = np.where(constant, tokens, batch.values[tokens] * ~constant).astype(
        np.int64
    )
    _, first, inverse = np.unique(identity, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order))
    return first[order], number[inverse]


def _shapes(
    codes: NDArray[np.uint8],
    operands: NDArray[np.uint32],
    starts: NDArray[np.int64],
    slot_starts: NDArray[np.int64],
) -> tuple[Shape, ...]:
    code_bytes, operand_list, operand_bytes = codes.tobytes(), operands.tolist(), operands.tobytes()
    bounds = starts.tolist()
    slots = np.diff(slot_starts).tolist()
    shapes = []
    for start, stop, count in zip(bounds, bounds[1:], slots, strict=False):
        piece = code_bytes[start:stop]
        digest = hashlib.blake2b(piece + operand_bytes[4 * start : 4 * stop], digest_size=16)
        shapes.append(Shape(piece, tuple(operand_list[start:stop]), count, digest.digest()))
    return tuple(shapes)
