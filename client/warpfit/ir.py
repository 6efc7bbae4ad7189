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
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.errors import InvalidArgumentError, ProgramError
from warpfit.ops import ARITIES, BY_CODE, CONSTANT, OPERATORS, PARAMETER, VARIABLE, Operator

T = TypeVar("T")


class Program:
    """One expression: immutable postfix tokens.

    ``codes`` is uint8 [tokens] and ``values`` float64 [tokens], both read-only. Equality and hash
    are those of the tokens (NaN constants with equal bits are equal).

    Raises:
        ProgramError: if the tokens are not one well-formed expression.

    """

    codes: NDArray[np.uint8]
    values: NDArray[np.float64]

    def __init__(self, codes: ArrayLike, values: ArrayLike) -> None:
        """Copy and validate the tokens."""
        self.codes = np.array(codes, dtype=np.uint8, ndmin=1)
        self.values = np.array(values, dtype=np.float64, ndmin=1)
        self.codes.setflags(write=False)
        self.values.setflags(write=False)
        lengths = np.array([len(self.codes)], dtype=np.int64)
        if len(self.values) != len(self.codes):
            raise ProgramError("codes and values differ in length", "LENGTH_MISMATCH")
        _check_structure(self.codes, self.values, lengths)

    @classmethod
    def _trusted(cls, codes: NDArray[np.uint8], values: NDArray[np.float64]) -> Program:
        program = object.__new__(cls)
        program.codes, program.values = codes, values
        codes.setflags(write=False)
        values.setflags(write=False)
        return program

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
        return len(self.codes)

    def __eq__(self, other: object) -> bool:
        """Compare token for token."""
        if not isinstance(other, Program):
            return NotImplemented
        return (self.codes.tobytes(), self.values.tobytes()) == (
            other.codes.tobytes(),
            other.values.tobytes(),
        )

    def __hash__(self) -> int:
        """Agree with ``==``."""
        return hash((self.codes.tobytes(), self.values.tobytes()))

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
        from warpfit.printing import to_text

        return to_text(self)

    def __repr__(self) -> str:
        """Show the text form."""
        return f"Program({str(self)!r})"

    def _repr_latex_(self) -> str:
        from warpfit.printing import to_latex

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
        if not len(programs):
            raise InvalidArgumentError(
                "the batch holds no programs", "EMPTY_BATCH", "Send at least one", "programs"
            )
        counts, flat, vectors = _flat_parameters(len(programs), parameters)
        codes: list[Any] = [program.codes for program in programs]
        values: list[Any] = [program.values for program in programs]
        return cls(
            # Joined as bytes: a quarter of the time of np.concatenate for many short arrays.
            codes=np.frombuffer(b"".join(codes), dtype=np.uint8),
            values=np.frombuffer(b"".join(values)),
            lengths=np.fromiter(map(len, codes), np.uint32, len(codes)),
            parameter_counts=np.array(counts, dtype=np.uint32),
            parameters=flat,
            vectors=vectors,
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

    def check(self, variables: int) -> int:
        """Check every token against the operator table and the data set; vectorised.

        Args:
            variables: number of variables in the data set.

        Returns:
            The height of stack that the deepest program needs.

        Raises:
            InvalidArgumentError: if the arrays do not fit together.
            ProgramError: for the first bad token, with expression, token and remedy.

        """
        self._check_shapes()
        depth = _check_structure(self.codes, self.values, self.lengths.astype(np.int64))
        is_variable, is_parameter = self.codes == VARIABLE, self.codes == PARAMETER
        _refuse(
            is_variable & (self.values >= variables),
            self,
            "VARIABLE_OUT_OF_RANGE",
            lambda value, _: (
                f"variable index {value:.0f} is out of range: "
                f"the data set has {variables} variables"
            ),
            f"Use indices 0 to {variables - 1}",
        )
        counts = np.repeat(self.parameter_counts, self.lengths)
        _refuse(
            is_parameter & (self.values >= counts),
            self,
            "PARAMETER_OUT_OF_RANGE",
            lambda value, token: (
                f"parameter index {value:.0f} is out of range: "
                f"{counts[token]} parameters were given"
            ),
            "Give a longer parameter vector for this expression",
        )
        return depth

    def _check_shapes(self) -> None:
        if not len(self.lengths):
            raise InvalidArgumentError(
                "the batch holds no programs", "EMPTY_BATCH", "Send at least one", "lengths"
            )
        expected = {
            "codes": (len(self.codes), int(self.lengths.sum(dtype=np.int64))),
            "values": (len(self.values), len(self.codes)),
            "parameter_counts": (len(self.parameter_counts), len(self.lengths)),
            "parameters": (
                len(self.parameters),
                self.vectors * int(self.parameter_counts.sum(dtype=np.int64)),
            ),
        }
        for field, (got, wanted) in expected.items():
            if got != wanted:
                raise InvalidArgumentError(
                    f"{field} holds {got} elements where the other fields imply {wanted}",
                    "LENGTH_MISMATCH",
                    "Make lengths, codes, values, parameter_counts and parameters agree",
                    field,
                )


def _flat_parameters(
    programs: int, parameters: Sequence[ArrayLike] | None
) -> tuple[list[int], NDArray[np.float64], int]:
    """Return each program's parameter count, all numbers in the order of `Batch`, and K."""
    if parameters is None:
        return [0] * programs, np.empty(0), 1
    if len(parameters) != programs:
        raise InvalidArgumentError(
            f"{len(parameters)} parameter entries for {programs} programs",
            "LENGTH_MISMATCH",
            "Give one vector [n] or K vectors [K, n] for each program, [] where it has none",
            "parameters",
        )
    arrays = [np.asarray(entry, dtype=np.float64) for entry in parameters]
    dimensions = {array.ndim for array in arrays}
    if dimensions == {1}:
        return list(map(len, arrays)), np.concatenate(arrays), 1
    vectors = {array.shape[0] for array in arrays if array.ndim == 2}
    if len(vectors) != 1 or not dimensions <= {1, 2}:
        raise InvalidArgumentError(
            f"parameter entries disagree about the number of vectors: {sorted(vectors)}",
            "VECTOR_MISMATCH",
            "Give each program one vector [n], or the same number K of vectors [K, n]",
            "parameters",
        )
    k = vectors.pop()
    blocks = [a if a.ndim == 2 else a.reshape(1, -1).repeat(k, axis=0) for a in arrays]
    flat = np.concatenate([block.ravel() for block in blocks])
    return [block.shape[1] for block in blocks], flat, k


def _starts(lengths: NDArray[np.uint32]) -> NDArray[np.int64]:
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _check_structure(
    codes: NDArray[np.uint8], values: NDArray[np.float64], lengths: NDArray[np.int64]
) -> int:
    """Check codes, indices and stack discipline of concatenated programs; return the depth."""
    batch = Batch(codes, values, lengths.astype(np.uint32), np.empty(0, np.uint32), np.empty(0))
    if not lengths.all():
        raise ProgramError(
            "the program is empty",
            "EMPTY_PROGRAM",
            "Send at least one token for each expression",
            "lengths",
            int(np.argmin(lengths)),
        )
    arities = ARITIES[codes]
    _refuse(
        arities < 0,
        batch,
        "UNKNOWN_OPERATOR",
        lambda _, token: f"code {codes[token]} is no token code",
        "GetServerInfo lists the operators that this server knows",
    )
    with np.errstate(invalid="ignore"):
        _refuse(
            ((codes == VARIABLE) | (codes == PARAMETER))
            & ~((values >= 0) & (values < 2**31) & (values == np.floor(values))),
            batch,
            "BAD_INDEX",
            lambda value, _: f"{value} is not an index",
            "Variables and parameters carry a whole number from 0",
        )
    return _check_stack(batch, arities)


def _check_stack(batch: Batch, arities: NDArray[np.int8]) -> int:
    change = 1 - arities.astype(np.int64)
    height = np.cumsum(change)
    first = batch.starts[:-1]
    height -= np.repeat(height[first] - change[first], batch.lengths)
    _refuse(
        height < 1,
        batch,
        "STACK_UNDERFLOW",
        lambda _, token: f"operator {BY_CODE[int(batch.codes[token])].name} lacks operands",
        "In postfix, operands stand before their operator",
    )
    last = batch.starts[1:] - 1
    left = np.zeros(len(height), dtype=bool)
    left[last] = height[last] != 1
    _refuse(
        left,
        batch,
        "STACK_LEFTOVERS",
        lambda _, token: f"{height[token]} values are left at the end, not one",
        "Combine them with operators, or send them as separate programs",
    )
    return int(height.max())


def _refuse(
    bad: NDArray[np.bool_],
    batch: Batch,
    reason: str,
    message: Callable[[float, int], str],
    remedy: str,
) -> None:
    """Raise ProgramError for the first token that is bad, if any is."""
    token = int(bad.argmax())
    if not bad[token]:
        return
    starts = batch.starts
    expression = int(np.searchsorted(starts, token, side="right")) - 1
    raise ProgramError(
        message(float(batch.values[token]), token),
        reason,
        remedy,
        "programs",
        expression,
        token - int(starts[expression]),
    )
