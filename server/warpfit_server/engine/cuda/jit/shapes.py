"""Shapes: what a compiled kernel depends on of an expression, which is all but its numbers.

The constants and parameters of an expression become inputs, which its kernel reads at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch, Program
from warpfit.ops import CONSTANT, OPERATORS, PARAMETER, VARIABLE
from warpfit_server.engine.native import numba_cache

_POW: Final = OPERATORS["pow"].code
#: Powers with literal exponents that have code of their own, in the kernel language.
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
#: Added to a literal exponent to give the operand of its ``pow`` token.
EXPONENT_BIAS: Final = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of one expression with its numbers replaced by inputs.

    The operand of a VARIABLE token is the variable's index, that of a PARAMETER token the index of
    an input, and that of an operator 0. The exception is ``pow`` with a literal exponent: it takes
    one operand from the stack, and its operand here is that exponent plus `EXPONENT_BIAS`.
    """

    codes: bytes
    operands: tuple[int, ...]
    inputs: int
    """Number of inputs."""
    wanted: tuple[int, ...] = ()
    """Inputs by which derivatives are wanted, ascending."""


class InputSources(NamedTuple):
    """Sources of the values of the inputs; arrays [inputs]."""

    tokens: NDArray[np.int64]
    """Index of the first token with this number."""
    programs: NDArray[np.int64]
    """The token's program; ascending."""
    from_parameter: NDArray[np.bool_]
    """Whether the token is a parameter, not a constant."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchShapes:
    """Shapes of a whole batch, and where the value of each input comes from."""

    shapes: tuple[Shape, ...]
    input_starts: NDArray[np.int64]
    """Index of each expression's first input, and the total; [programs + 1]."""
    sources: InputSources

    def with_derivatives(self) -> BatchShapes:
        """Return the same shapes with derivatives by all inputs that are parameters."""
        shapes = []
        for shape, start in zip(self.shapes, self.input_starts.tolist(), strict=False):
            flags = self.sources.from_parameter[start : start + shape.inputs]
            shapes.append(replace(shape, wanted=tuple(np.flatnonzero(flags).tolist())))
        return replace(self, shapes=tuple(shapes))

    def parameter_places(self, batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return program and parameter of each input that is a parameter, in their order."""
        wanted = self.sources.from_parameter
        tokens = self.sources.tokens[wanted]
        return self.sources.programs[wanted], batch.values[tokens].astype(np.int64)

    def fill(self, batch: Batch, inputs: NDArray[Any]) -> None:
        """Fill inputs, [K, inputs], with the numbers of this batch or one of the same shapes."""
        # Always read-only, so that Numba compiles for one set of types.
        numbers, counts = _read_only(batch.values), _read_only(batch.parameter_counts)
        fill_inputs(numbers, counts, _read_only(batch.parameters), self.sources, inputs)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


@numba_cache.njit(nogil=True)  # type: ignore[untyped-decorator]
def fill_inputs(
    values: NDArray[np.float64],
    parameter_counts: NDArray[np.uint32],
    parameters: NDArray[np.float64],
    sources: InputSources,
    inputs: NDArray[Any],
) -> None:
    """Fill inputs, float32 or float64 [K, inputs], from constants and parameters."""
    vectors = len(inputs)
    program, start = 0, 0  # first parameter value of the program
    for number in range(len(sources.tokens)):
        while program < sources.programs[number]:
            start += int(parameter_counts[program]) * vectors
            program += 1
        value = values[sources.tokens[number]]
        for vector in range(vectors):
            if sources.from_parameter[number]:
                place = start + vector * int(parameter_counts[program]) + int(value)
                inputs[vector, number] = parameters[place]
            else:
                inputs[vector, number] = value


def load() -> None:
    """Load the compiled functions, or compile them, for the arrays of requests."""
    for dtype in (np.float32, np.float64):
        batch = Batch.of([Program.variable(0)]).copy()  # the arrays of requests are writable
        shapes_of_batch(batch).fill(batch, np.zeros((1, 0), dtype))


def shapes_of_batch(batch: Batch) -> BatchShapes:
    """Replace constants and parameters of a checked batch by inputs, in order of appearance."""
    literal = _literal_exponents(batch)
    is_input = (batch.codes == PARAMETER) | ((batch.codes == CONSTANT) & ~literal)
    program = np.repeat(np.arange(len(batch)), batch.lengths)
    tokens = np.flatnonzero(is_input)
    first, number = _number_inputs(batch, tokens, program[tokens])
    input_tokens = tokens[first]
    input_starts = np.searchsorted(program[input_tokens], np.arange(len(batch) + 1))
    operands = np.where(batch.codes == VARIABLE, batch.values, 0.0).astype(np.int64)
    operands[tokens] = number - input_starts[program[tokens]]
    exponents = np.flatnonzero(literal)
    operands[exponents + 1] = batch.values[exponents].astype(np.int64) + EXPONENT_BIAS
    codes = np.where(batch.codes == CONSTANT, np.uint8(PARAMETER), batch.codes)
    starts = np.zeros(len(batch) + 1, dtype=np.int64)
    np.cumsum(np.bincount(program[~literal], minlength=len(batch)), out=starts[1:])
    shapes = _shapes(codes[~literal], operands[~literal], starts, input_starts)
    return BatchShapes(
        shapes=shapes,
        input_starts=input_starts,
        sources=InputSources(
            input_tokens, program[input_tokens], batch.codes[input_tokens] == PARAMETER
        ),
    )


def _literal_exponents(batch: Batch) -> NDArray[np.bool_]:
    literal: NDArray[np.bool_] = (batch.codes == CONSTANT) & np.isin(batch.values, list(POWERS))
    literal[:-1] &= batch.codes[1:] == _POW
    literal[-1] = False
    return literal


def _number_inputs(
    batch: Batch, tokens: NDArray[np.int64], programs: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number the inputs of a batch: equal parameters of a program share one, constants do not.

    Returns:
        The index into ``tokens`` of each input's first appearance, and each token's input.
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
    operands: NDArray[np.int64],
    starts: NDArray[np.int64],
    input_starts: NDArray[np.int64],
) -> tuple[Shape, ...]:
    code_bytes, operand_list, inputs = codes.tobytes(), operands.tolist(), np.diff(input_starts)
    return tuple(
        Shape(code_bytes[start:stop], tuple(operand_list[start:stop]), count)
        for (start, stop), count in zip(pairwise(starts.tolist()), inputs.tolist(), strict=True)
    )
