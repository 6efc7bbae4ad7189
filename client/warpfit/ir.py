"""Programs in postfix form, alone (`Program`) and as flat arrays for a whole batch (`Batch`).

A token is a code and a float64 value. The code is VARIABLE, PARAMETER, CONSTANT or the code of an
operator of `warpfit.ops`; the value is the index of the variable or parameter (from 0), the
constant itself, or 0 for an operator. Operands come before their operator, the first operand
first, so ``x1 - p1`` is ``[variable 0, parameter 0, sub]``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.errors import InvalidArgumentError, ProgramError
from warpfit.expressions.tokens import check_indices, check_structure, is_sound
from warpfit.expressions.vectors import Vectors
from warpfit.ops import ARITIES, BY_CODE, CONSTANT, OPERATORS, PARAMETER, VARIABLE, Operator

T = TypeVar("T")


class Program:
    """One expression: immutable postfix tokens.

    ``codes`` is uint8 [tokens] and ``values`` float64 [tokens], both read-only. Equality and hash
    are those of the tokens (NaN constants with equal bits are equal).

    Raises:
        ProgramError: if the tokens are not one well-formed expression.

    """

    # Kept as bytes, of which a batch is joined in a tenth of the time that arrays would take.
    __slots__ = ("__dict__", "__weakref__", "_codes", "_values")

    _codes: bytes
    _values: bytes

    def __init__(self, codes: ArrayLike, values: ArrayLike) -> None:
        """Copy and validate the tokens."""
        code_array = np.array(codes, dtype=np.uint8, ndmin=1)
        value_array = np.array(values, dtype=np.float64, ndmin=1)
        if value_array.shape != code_array.shape or code_array.ndim != 1:
            raise ProgramError("codes and values differ in length", "LENGTH_MISMATCH")
        starts = np.array([0, len(code_array)])
        if not is_sound(code_array, value_array, starts, starts[1:]):
            check_structure(code_array, value_array, starts)
        self._codes, self._values = code_array.tobytes(), value_array.tobytes()

    @classmethod
    def _trusted(cls, codes: NDArray[np.uint8], values: NDArray[np.float64]) -> Program:
        program = object.__new__(cls)
        program._codes, program._values = codes.tobytes(), values.tobytes()
        return program

    @cached_property
    def codes(self) -> NDArray[np.uint8]:
        """Token codes, [tokens], read-only."""
        return np.frombuffer(self._codes, dtype=np.uint8)

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """Token values, [tokens], read-only."""
        return np.frombuffer(self._values)

    @classmethod
    def variable(cls, index: int) -> Program:
        """Leaf: variable ``index`` (from 0)."""
        return cls([VARIABLE], [index])

    @classmethod
    def parameter(cls, index: int) -> Program:
        """Leaf: parameter ``index`` (from 0)."""
        return cls([PARAMETER], [index])

    @classmethod
    def constant(cls, value: float) -> Program:
        """Leaf: a constant, any float64 including NaN and infinities."""
        return cls([CONSTANT], [value])

    @classmethod
    def apply(cls, operator: str | Operator, *operands: Program) -> Program:
        """Apply an operator to programs; ``add`` and ``mul`` take two or more (a left chain)."""
        op = OPERATORS[operator] if isinstance(operator, str) else operator
        n = len(operands)
        chains = (n - 1) if op.name in ("add", "mul") and n > 2 else 1
        if chains == 1 and n != op.arity:
            raise ProgramError(
                f"operator {op.name} takes {op.arity} operands, got {n}",
                "WRONG_ARITY",
                "Give each operand of the operator",
            )
        pieces: list[Program | None] = list(operands) if chains == 1 else [operands[0]]
        if chains == 1:
            pieces.append(None)
        else:
            for operand in operands[1:]:
                pieces += [operand, None]
        code = np.array([op.code], dtype=np.uint8)
        zero = np.zeros(1)
        return cls._trusted(
            np.concatenate([code if piece is None else piece.codes for piece in pieces]),
            np.concatenate([zero if piece is None else piece.values for piece in pieces]),
        )

    def __len__(self) -> int:
        """Count the tokens."""
        return len(self._codes)

    def __eq__(self, other: object) -> bool:
        """Compare token for token."""
        if not isinstance(other, Program):
            return NotImplemented
        return self._codes == other._codes and self._values == other._values

    def __hash__(self) -> int:
        """Agree with ``==``."""
        return hash((self._codes, self._values))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as the two arrays."""
        return Program, (self.codes, self.values)

    @cached_property
    def variables(self) -> int:
        """Number of variables needed: the highest index plus one."""
        return self._needed(VARIABLE)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters needed: the highest index plus one."""
        return self._needed(PARAMETER)

    def _needed(self, code: int) -> int:
        used = self.values[self.codes == code]
        return int(used.max()) + 1 if len(used) else 0

    @cached_property
    def depth(self) -> int:
        """Height of the evaluation stack that the program needs."""
        return int(np.cumsum(1 - ARITIES[self.codes].astype(np.int64)).max())

    @cached_property
    def structure_hash(self) -> bytes:
        """16-byte BLAKE2b hash of the structure, with constants and parameters lifted.

        Each constant and each distinct parameter becomes a numbered slot in order of appearance,
        so ``x1 + p1`` and ``x1 + 2.5`` hash alike: one compiled kernel serves both.
        """
        codes, operands = lift(self.codes, self.values)
        return hashlib.blake2b(codes.tobytes() + operands.tobytes(), digest_size=16).digest()

    def lift_constants(self) -> tuple[Program, NDArray[np.float64]]:
        """Make every constant a parameter, so that it can be fitted.

        Returns:
            The program, whose new parameters follow those that it has, in the order of the
            constants; and the constants, float64 [constants].

        """
        constant = self.codes == CONSTANT
        values = self.values.copy()
        values[constant] = self.parameters + np.arange(int(constant.sum()))
        codes = np.where(constant, np.uint8(PARAMETER), self.codes)
        return Program._trusted(codes, values), self.values[constant]

    def fold(
        self, leaf: Callable[[int, float], T], operator: Callable[[Operator, list[T]], T]
    ) -> T:
        """Evaluate the program over any algebra.

        Args:
            leaf: called with the code (VARIABLE, PARAMETER or CONSTANT) and the value of a leaf.
            operator: called with the operator and the list of its operands' results.

        """
        stack: list[T] = []
        for code, value in zip(self.codes.tolist(), self.values.tolist(), strict=True):
            row = BY_CODE.get(code)
            if row is None:
                stack.append(leaf(code, value))
            else:
                operands = stack[-row.arity :]
                del stack[-row.arity :]
                stack.append(operator(row, operands))
        return stack.pop()

    def __str__(self) -> str:
        """Text that `warpfit.parse` reads back, with variables x1... and parameters p1...."""
        from warpfit.expressions.printing import to_text

        return to_text(self)

    def __repr__(self) -> str:
        """Show the text form."""
        return f"Program({str(self)!r})"

    def _repr_latex_(self) -> str:
        from warpfit.expressions.printing import to_latex

        return f"${to_latex(self)}$"


def lift(
    codes: NDArray[np.uint8], values: NDArray[np.float64]
) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """Lift constants and parameters of one program to numbered slots.

    Returns:
        Codes with every CONSTANT replaced by PARAMETER, and the operand of each token, uint32:
        the variable's index, the slot's number in order of appearance, or 0 for an operator.

    """
    operands = np.where(codes == VARIABLE, values, 0.0).astype(np.uint32)
    slots: dict[int, int] = {}
    fresh = 0
    for position in np.flatnonzero((codes == PARAMETER) | (codes == CONSTANT)).tolist():
        if codes[position] == CONSTANT:
            operands[position] = fresh
            fresh += 1
            continue
        index = int(values[position])
        if index not in slots:
            slots[index] = fresh
            fresh += 1
        operands[position] = slots[index]
    return np.where(codes == CONSTANT, np.uint8(PARAMETER), codes), operands


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Tokens of several programs, flat: what of a `Batch` stays the same with other parameters."""

    codes: NDArray[np.uint8]
    """Token codes of all programs, one after the other; [tokens]."""
    values: NDArray[np.float64]
    """Token values; [tokens]."""
    lengths: NDArray[np.uint32]
    """Tokens of each program; [programs]."""

    @classmethod
    def of(cls, programs: Sequence[Program]) -> Tokens:
        """Join the tokens of programs.

        Raises:
            InvalidArgumentError: if there are none.

        """
        if not len(programs):
            raise InvalidArgumentError(
                "the batch holds no programs", "EMPTY_BATCH", "Send at least one", "programs"
            )
        codes = [program._codes for program in programs]
        return cls(
            np.frombuffer(b"".join(codes), dtype=np.uint8),
            np.frombuffer(b"".join([program._values for program in programs])),
            np.fromiter(map(len, codes), np.uint32, len(codes)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A batch of programs with their parameter vectors, as flat arrays.

    Made by `Batch.of` or by the codec. `check` must pass before an engine sees the batch.
    """

    codes: NDArray[np.uint8]
    """Token codes of all programs, one after the other; [tokens]."""
    values: NDArray[np.float64]
    """Token values; [tokens]."""
    lengths: NDArray[np.uint32]
    """Tokens of each program; [programs]."""
    parameter_counts: NDArray[np.uint32]
    """Length of each program's parameter vector; [programs]."""
    parameters: NDArray[np.float64]
    """For each program in turn its K parameter vectors, C order [K, count]; flat."""
    vectors: int = 1
    """K, the number of parameter vectors for each program; at least 1."""

    @classmethod
    def of(
        cls,
        programs: Sequence[Program],
        parameters: Sequence[ArrayLike] | None = None,
    ) -> Batch:
        """Build a batch from programs and, for each, one vector [n] or K vectors [K, n].

        Raises:
            InvalidArgumentError: if the number of parameter entries is not the number of
                programs, or if K differs between programs.

        """
        return cls.joined(Tokens.of(programs), Vectors.of(len(programs), parameters))

    @classmethod
    def joined(cls, tokens: Tokens, vectors: Vectors) -> Batch:
        """Build a batch from its two halves, which must be of the same programs."""
        return cls(
            tokens.codes,
            tokens.values,
            tokens.lengths,
            parameter_counts=vectors.counts,
            parameters=vectors.numbers,
            vectors=vectors.count,
        )

    def __len__(self) -> int:
        """Count the programs."""
        return len(self.lengths)

    def copy(self) -> Batch:
        """Copy the arrays, for a batch that outlives the memory it lies in."""
        return replace(self.without_parameters(), parameters=self.parameters.copy())

    def without_parameters(self) -> Batch:
        """Copy the arrays of the programs; there are no parameter values."""
        return Batch(
            codes=self.codes.copy(),
            values=self.values.copy(),
            lengths=self.lengths.copy(),
            parameter_counts=self.parameter_counts.copy(),
            parameters=np.empty(0),
            vectors=self.vectors,
        )

    @property
    def starts(self) -> NDArray[np.int64]:
        """Index of each program's first token, and the total at the end; int64 [programs + 1]."""
        return _starts(self.lengths)

    @property
    def parameter_starts(self) -> NDArray[np.int64]:
        """Index of each program's first parameter value, and the total; int64 [programs + 1]."""
        return _starts(self.parameter_counts) * self.vectors

    def program(self, index: int) -> Program:
        """Take one program out of the batch."""
        start, stop = self.starts[index : index + 2]
        return Program(self.codes[start:stop], self.values[start:stop])

    def program_parameters(self, index: int) -> NDArray[np.float64]:
        """Parameter vectors of one program, [K, count]."""
        start, stop = self.parameter_starts[index : index + 2]
        return self.parameters[start:stop].reshape(self.vectors, -1)

    def check(self, variables: int) -> None:
        """Check every token against the operator table and the data set; vectorised.

        Args:
            variables: number of variables in the data set.

        Raises:
            InvalidArgumentError: if the arrays do not fit together.
            ProgramError: for the first bad token, with expression, token and remedy.

        """
        self.check_shapes()
        starts, counts = self.starts, self.parameter_counts
        if is_sound(self.codes, self.values, starts, self.lengths, variables, counts):
            return
        check_structure(self.codes, self.values, starts)
        check_indices(self.codes, self.values, starts, variables, counts)

    def check_shapes(self) -> None:
        """Check that there are programs, and that the arrays fit together.

        Raises:
            InvalidArgumentError: naming the array that does not.

        """
        if not len(self.lengths):
            raise InvalidArgumentError(
                "the batch holds no programs", "EMPTY_BATCH", "Send at least one", "lengths"
            )
        tokens = int(self.lengths.sum(dtype=np.int64))
        numbers = self.vectors * int(self.parameter_counts.sum(dtype=np.int64))
        for field, array, wanted in (
            ("codes", self.codes, tokens),
            ("values", self.values, len(self.codes)),
            ("parameter_counts", self.parameter_counts, len(self.lengths)),
            ("parameters", self.parameters, numbers),
        ):
            if len(array) != wanted:
                raise InvalidArgumentError(
                    f"{field} holds {len(array)} elements where the other fields imply {wanted}",
                    "LENGTH_MISMATCH",
                    "Make lengths, codes, values, parameter_counts and parameters agree",
                    field,
                )


def _starts(lengths: NDArray[np.uint32]) -> NDArray[np.int64]:
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts
