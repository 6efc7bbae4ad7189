"""The intermediate representation: `Program`, `Population` and `Batch`.

A program is one expression, a population many, a batch a population with parameter vectors. All are
postfix: operands come before their operator, the first operand first, so ``x1 - p1`` is
``[variable 0, parameter 0, sub]``. Each token is a code and a float64 value. The code is VARIABLE,
PARAMETER, CONSTANT or the code of an operator of `warpfit.ops`; the value is the index of the
variable or parameter (from 0), the constant itself, or 0 for an operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Self, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.errors import InvalidArgumentError
from warpfit.expressions import token_checks
from warpfit.expressions.parameter_vectors import ParameterVectors
from warpfit.expressions.printing import to_text
from warpfit.expressions.program import Program as Program
from warpfit.ops import CONSTANT, PARAMETER


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
        return Population.joining(programs)

    @staticmethod
    def joining(programs: Sequence[Program]) -> Population:
        """Join what are known to be programs."""
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
    def token_count(self) -> int:
        """Tokens of all programs."""
        return len(self.codes)

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
        """Make the programs one after the other; raise ProgramError first if any is malformed."""
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
        """Return one program, by its index from 0; raise ProgramError if it is malformed."""
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
        return token_checks.needed_parameters(self.codes, self.values, self.starts).astype(np.int64)

    def check_dtypes(self) -> None:
        """Check the dtypes of the arrays, which a message would change without a word."""
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
        if len(self) and not token_checks.are_well_formed(
            self.codes, self.values, self.starts, self.lengths
        ):
            token_checks.check_structure(self.codes, self.values, self.starts)

    def _chosen(self, programs: slice | NDArray[np.int64]) -> Population:
        tokens = pieces(self.starts, programs)
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
        cls, programs: Sequence[Program], parameters: Sequence[ArrayLike] | None = None
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
        """Return a batch of programs, whose arrays it shares, and parameter vectors."""
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
            parameters=self.parameters[pieces(self.parameter_starts, programs)],
            vectors=self.vectors,
        )

    def check(self, variables: int) -> None:
        """Check every token against the operator table and the number of variables of the data.

        Raises:
            InvalidArgumentError: if the arrays do not fit together.
            ProgramError: for the first bad token, with expression, token and remedy.
        """
        self.check_shapes()
        starts, counts = self.starts, self.parameter_counts
        if token_checks.are_well_formed(
            self.codes, self.values, starts, self.lengths, variables, counts
        ):
            return
        token_checks.check_structure(self.codes, self.values, starts)
        token_checks.check_indices(self.codes, self.values, starts, variables, counts)

    def check_shapes(self) -> None:
        """Check that there are programs, and that the arrays fit together."""
        if not len(self.lengths):
            raise InvalidArgumentError(
                "the batch holds no programs", "EMPTY_BATCH", "Send at least one", "lengths"
            )
        tokens = int(np.add.reduce(self.lengths))
        numbers = self.vectors * int(np.add.reduce(self.parameter_counts))
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


def _starts(lengths: NDArray[Any]) -> NDArray[np.int64]:
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.add.accumulate(lengths, out=starts[1:])  # half the time of cumsum
    return starts


def pieces(
    starts: NDArray[np.int64], chosen: slice | NDArray[np.int64]
) -> slice | NDArray[np.int64]:
    """Return the place of the chosen pieces in a flat array, given where each piece starts."""
    if isinstance(chosen, slice):
        return slice(int(starts[chosen.start]), int(starts[chosen.stop]))
    first, lengths = starts[chosen], starts[chosen + 1] - starts[chosen]
    before = _starts(lengths)
    return np.arange(before[-1]) + np.repeat(first - before[:-1], lengths)
