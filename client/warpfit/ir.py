"""The intermediate representation: `Program`, `Population` and `Batch`.

A program is one expression, a population many, a batch a population with parameter vectors. All are
postfix: operands come before their operator, the first operand first, so ``x1 - p1`` is
``[variable 0, parameter 0, sub]``. Each token is a code and a float64 value. The code is VARIABLE,
PARAMETER, CONSTANT or the code of an operator of `warpfit.ops`; the value is the index of the
variable or parameter (from 0), the constant itself, or 0 for an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.errors import InvalidArgumentError, ProgramError
from warpfit.expressions.parameter_vectors import ParameterVectors
from warpfit.expressions.printing import to_latex, to_text
from warpfit.expressions.token_checks import (
    are_well_formed,
    check_indices,
    check_structure,
    needed_parameters,
)
from warpfit.formulas import methods
from warpfit.ops import ARITIES, BY_CODE, CONSTANT, OPERATORS, PARAMETER, VARIABLE, Operator

T = TypeVar("T")


class Program:
    """One expression: immutable postfix tokens.

    ``codes`` is uint8 [tokens] and ``values`` float64 [tokens], both read-only. Equality and hash
    are those of the tokens (NaN constants with equal bits are equal).

    Raises:
        ProgramError: if the tokens are not one well-formed expression.

    """

    # Stored as bytes, because joining bytes to a batch takes a tenth of the time that arrays take.
    __slots__ = ("__dict__", "__weakref__", "_codes", "_values")

    _codes: bytes
    _values: bytes

    def __init__(self, codes: ArrayLike, values: ArrayLike) -> None:
        """Copy and validate the tokens."""
        code_array, value_array = _token_arrays(codes, values)
        Population(code_array, value_array, np.array([len(code_array)]))._check_structure()
        self._codes, self._values = code_array.tobytes(), value_array.tobytes()

    @classmethod
    def _unchecked(
        cls, codes: bytes | NDArray[np.uint8], values: bytes | NDArray[np.float64]
    ) -> Program:
        """Make a program of tokens, or their bytes, that are known to be well-formed."""
        program = object.__new__(cls)
        program._codes, program._values = bytes(codes), bytes(values)
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
        """Return the program that is one variable, by its index from 0."""
        return cls([VARIABLE], [index])

    @classmethod
    def parameter(cls, index: int) -> Program:
        """Return the program that is one parameter, by its index from 0."""
        return cls([PARAMETER], [index])

    @classmethod
    def constant(cls, value: float) -> Program:
        """Return the program that is one constant, any float64 including NaN and infinities."""
        return cls([CONSTANT], [value])

    @classmethod
    def apply(cls, operator: str | Operator, *operands: Program) -> Program:
        """Apply an operator to programs.

        Args:
            operator: the operator or its name.
            operands: as many as the operator takes; for ``add`` and ``mul`` two or more, which are
                combined from left to right.

        Raises:
            ProgramError: for another number of operands.

        """
        op = OPERATORS.get(operator) if isinstance(operator, str) else operator
        if op is None or not all(isinstance(operand, Program) for operand in operands):
            raise ProgramError(
                f"{operator!r} is no operator, or an operand is no Program",
                "UNKNOWN_OPERATOR",
                "Use a name of OPERATORS.md, and Program.variable(0) and the like as operands",
            )
        is_chain = op.name in ("add", "mul") and len(operands) > 2
        if len(operands) != op.arity and not is_chain:
            raise ProgramError(
                f"operator {op.name} takes {op.arity} operands, got {len(operands)}",
                "WRONG_ARITY",
                "Give each operand of the operator",
            )
        root = bytes([op.code]), bytes(8)
        pieces = [(operand._codes, operand._values) for operand in operands]
        if is_chain:
            pieces = [pieces[0], *(part for piece in pieces[1:] for part in (piece, root))]
        else:
            pieces.append(root)
        codes, values = zip(*pieces, strict=True)
        return cls._unchecked(b"".join(codes), b"".join(values))

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
        """Number of variables that the program needs: the highest index plus one."""
        return self._needed(VARIABLE)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters that the program needs: the highest index plus one."""
        return self._needed(PARAMETER)

    def _needed(self, code: int) -> int:
        used = self.values[self.codes == code]
        return int(used.max()) + 1 if len(used) else 0

    @cached_property
    def depth(self) -> int:
        """Height of the evaluation stack that the program needs."""
        return int(np.cumsum(1 - ARITIES[self.codes].astype(np.int64)).max())

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
        return Program._unchecked(codes, values), self.values[constant]

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

    bind = methods.bind
    simplify = methods.simplify
    to_numpy = methods.to_numpy
    code = methods.code
    latex = methods.latex
    sympy = methods.sympy

    def __str__(self) -> str:
        """Return the text that `warpfit.parse` reads back, over x1, x2, ... and p1, p2, ...."""
        return to_text(self)

    def __repr__(self) -> str:
        """Show the text form."""
        return f"Program({str(self)!r})"

    def _repr_latex_(self) -> str:
        return f"${to_latex(self)}$"


@dataclass(frozen=True, slots=True, eq=False)
class Population(Sequence[Program]):
    """Many programs as flat arrays, a sequence of `Program` that is made of them when it is read.

    A slice is a view, ``+`` joins two, ``==`` compares token for token. The constructor checks
    nothing, because a server checks what it computes; `of`, the parser and the front ends make
    well-formed programs.
    """

    codes: NDArray[np.uint8]
    """Token codes of all programs, one after the other; [tokens]."""
    values: NDArray[np.float64]
    """Token values; [tokens]."""
    lengths: NDArray[np.uint32]
    """Tokens of each program; [programs]."""

    @classmethod
    def of(cls, programs: Sequence[Program]) -> Population:
        """Join programs; raise InvalidArgumentError for anything but a `Program`."""
        if isinstance(programs, Population):
            return Population(programs.codes, programs.values, programs.lengths)
        # Few types of many programs: checking each one takes longer than all that follows.
        if not all(issubclass(kind, Program) for kind in set(map(type, programs))):
            raise InvalidArgumentError(
                "a population is made of Programs",
                "NOT_PROGRAMS",
                "Convert texts, trees and the like with warpfit.frontends.as_population",
                "programs",
            )
        codes = [program._codes for program in programs]
        return Population(
            np.frombuffer(b"".join(codes), dtype=np.uint8),
            np.frombuffer(b"".join([program._values for program in programs])),
            np.fromiter(map(len, codes), np.uint32, len(codes)),
        )

    def __len__(self) -> int:
        """Count the programs."""
        return len(self.lengths)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Index of each program's first token, and the total at the end; int64 [programs + 1]."""
        return _starts(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Program: ...

    @overload
    def __getitem__(self, index: slice | ArrayLike) -> Self: ...

    def __getitem__(self, index: Any) -> Any:
        """Return one program, or those of a slice, of indices [n] or of a mask [programs]."""
        if isinstance(index, int | np.integer):
            return self.program(range(len(self))[index])
        if isinstance(index, slice) and index.step in (None, 1):
            start, stop, _ = index.indices(len(self))
            return self._chosen(slice(start, max(start, stop)))
        return self._chosen(np.arange(len(self))[index])

    def __iter__(self) -> Iterator[Program]:
        """Make the programs one after the other, after one check of all.

        Raises:
            ProgramError: for the first bad token.

        """
        self._check_structure()
        codes, values = self.codes.tobytes(), self.values.tobytes()
        for start, stop in pairwise(self.starts.tolist()):
            yield Program._unchecked(codes[start:stop], values[8 * start : 8 * stop])

    def __add__(self, other: Population) -> Population:
        """Join two populations."""
        if not isinstance(other, Population):
            return NotImplemented
        return Population(
            np.concatenate([self.codes, other.codes]),
            np.concatenate([self.values, other.values]),
            np.concatenate([self.lengths, other.lengths]),
        )

    def __eq__(self, other: object) -> bool:
        """Compare token for token."""
        if not isinstance(other, Population):
            return NotImplemented
        return all(
            getattr(self, name).tobytes() == getattr(other, name).tobytes()
            for name in ("codes", "values", "lengths")
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Show the sizes and the first programs."""
        shown = ", ".join([*map(str, self[:3]), *["..."] * (len(self) > 3)])
        return f"<{type(self).__name__} of {len(self)}: {shown}>"

    def program(self, index: int) -> Program:
        """Return one program, by its index from 0.

        Raises:
            ProgramError: if its tokens are not one well-formed expression.

        """
        start, stop = self.starts[index : index + 2]
        return Program(self.codes[start:stop], self.values[start:stop])

    def texts(self, names: Sequence[str] = ()) -> list[str]:
        """Return the text of each program, as `warpfit.expressions.printing.to_text`."""
        return [to_text(program, names) for program in self]

    def lift_constants(self) -> tuple[Population, list[NDArray[np.float64]]]:
        """Make every constant a parameter, as `Program.lift_constants`, in all programs at once.

        Returns:
            The programs, and for each its constants, float64 [constants].

        """
        constant, starts = self.codes == CONSTANT, self.starts
        before = _starts(constant)
        own = np.arange(before[-1]) - np.repeat(before[starts[:-1]], np.diff(before[starts]))
        needed = self.needed_parameters()
        values = self.values.copy()
        values[constant] = own + np.repeat(needed, np.diff(before[starts]))
        codes = np.where(constant, np.uint8(PARAMETER), self.codes)
        constants = np.split(self.values[constant], before[starts[1:-1]])
        return Population(codes, values, self.lengths), constants[: len(self)]

    def needed_parameters(self) -> NDArray[np.int64]:
        """Return the number of parameters that each program needs, int64 [programs]."""
        return needed_parameters(self.codes, self.values, self.starts).astype(np.int64)

    def check_dtypes(self) -> None:
        """Check the dtypes of the arrays, which a message would change without a word.

        Raises:
            InvalidArgumentError: naming the array that has another one.

        """
        for name, dtype in (("codes", "u1"), ("values", "f8"), ("lengths", "u4")):
            found = getattr(getattr(self, name), "dtype", None)
            if found != dtype:
                raise InvalidArgumentError(
                    f"{name} of the population are of dtype {found}",
                    "BAD_DTYPE",
                    f"Give an array of {np.dtype(dtype).name}",
                    name,
                )

    def _check_structure(self) -> None:
        if len(self) and not are_well_formed(self.codes, self.values, self.starts, self.lengths):
            check_structure(self.codes, self.values, self.starts)

    def _chosen(self, programs: slice | NDArray[np.int64]) -> Population:
        tokens = _pieces(self.starts, programs)
        return Population(self.codes[tokens], self.values[tokens], self.lengths[programs])


@dataclass(frozen=True, slots=True, eq=False, repr=False, weakref_slot=True)
class Batch(Population):
    """A population with the parameter vectors of each program.

    A slice keeps the vectors. Batches are equal only if they are the same object. `check` must pass
    before an engine computes it.
    """

    parameter_counts: NDArray[np.uint32]
    """Length of each program's parameter vector; [programs]."""
    parameters: NDArray[np.float64]
    """For each program in turn its K parameter vectors, C order [K, count]; flat."""
    vectors: int = 1
    """K, the number of parameter vectors for each program; at least 1."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]

    @classmethod
    def of(
        cls,
        programs: Sequence[Program],
        parameters: Sequence[ArrayLike] | None = None,
    ) -> Batch:
        """Build a batch from programs and, for each, one vector [n] or K vectors [K, n].

        Raises:
            InvalidArgumentError: if there are no programs, if the number of parameter entries is
                not the number of programs, or if K differs between programs.

        """
        vectors = ParameterVectors.of(len(programs), parameters)
        return cls.joined(Population.of(programs), vectors)

    @classmethod
    def joined(cls, programs: Population, vectors: ParameterVectors) -> Batch:
        """Return a batch of programs, whose arrays it shares, and parameter vectors.

        Raises:
            InvalidArgumentError: if there are no programs.

        """
        if not len(programs):
            raise InvalidArgumentError(
                "the batch holds no programs", "EMPTY_BATCH", "Send at least one", "programs"
            )
        return cls(
            *(programs.codes, programs.values, programs.lengths),
            parameter_counts=vectors.counts,
            parameters=vectors.numbers,
            vectors=vectors.count,
        )

    def copy(self) -> Batch:
        """Return a copy of the batch with arrays of its own."""
        return replace(self.without_parameters(), parameters=self.parameters.copy())

    def without_parameters(self) -> Batch:
        """Return a copy of the batch with arrays of its own and no parameter values."""
        return Batch(
            codes=self.codes.copy(),
            values=self.values.copy(),
            lengths=self.lengths.copy(),
            parameter_counts=self.parameter_counts.copy(),
            parameters=np.empty(0),
            vectors=self.vectors,
        )

    @property
    def parameter_starts(self) -> NDArray[np.int64]:
        """Index of each program's first parameter value, and the total; int64 [programs + 1]."""
        return _starts(self.parameter_counts) * self.vectors

    def program_parameters(self, index: int) -> NDArray[np.float64]:
        """Return the parameter vectors of one program, [K, count]."""
        start, stop = self.parameter_starts[index : index + 2]
        return self.parameters[start:stop].reshape(self.vectors, -1)

    def _chosen(self, programs: slice | NDArray[np.int64]) -> Batch:
        tokens = Population._chosen(self, programs)
        return Batch(
            *(tokens.codes, tokens.values, tokens.lengths),
            parameter_counts=self.parameter_counts[programs],
            parameters=self.parameters[_pieces(self.parameter_starts, programs)],
            vectors=self.vectors,
        )

    def check(self, variables: int) -> None:
        """Check every token against the operator table and the data set.

        Args:
            variables: number of variables in the data set.

        Raises:
            InvalidArgumentError: if the arrays do not fit together.
            ProgramError: for the first bad token, with expression, token and remedy.

        """
        self.check_shapes()
        starts, counts = self.starts, self.parameter_counts
        if are_well_formed(self.codes, self.values, starts, self.lengths, variables, counts):
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


def _token_arrays(
    codes: ArrayLike, values: ArrayLike
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    try:
        given = np.array(codes, ndmin=1)
        code_array, value_array = given.astype(np.uint8), np.array(values, np.float64, ndmin=1)
    except (TypeError, ValueError) as error:
        raise ProgramError(
            f"the tokens are no numbers: {error}", "BAD_TOKENS", "Parse texts with warpfit.parse"
        ) from error
    if value_array.shape != code_array.shape or code_array.ndim != 1:
        raise ProgramError("codes and values differ in length", "LENGTH_MISMATCH")
    if (code_array != given).any():
        raise ProgramError("a code is no whole number from 0 to 255", "BAD_TOKENS")
    return code_array, value_array


def _starts(lengths: NDArray[Any]) -> NDArray[np.int64]:
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def _pieces(
    starts: NDArray[np.int64], chosen: slice | NDArray[np.int64]
) -> slice | NDArray[np.int64]:
    """Return the place of the chosen pieces in a flat array, given where each piece starts."""
    if isinstance(chosen, slice):
        return slice(int(starts[chosen.start]), int(starts[chosen.stop]))
    first, lengths = starts[chosen], starts[chosen + 1] - starts[chosen]
    before = _starts(lengths)
    return np.arange(before[-1]) + np.repeat(first - before[:-1], lengths)
