"""The intermediate representation: `Program`, `Population` and `Batch`, and the checks of tokens.

A program is one expression, a population many, a batch a population with parameter vectors. All are
postfix: operands come before their operator, the first operand first, so ``x1 - p1`` is
``[variable 0, parameter 0, sub]``. Each token is a code and a float64 value. The code is VARIABLE,
PARAMETER, CONSTANT or the code of an operator of `warpfit.ops`; the value is the index of the
variable or parameter (from 0), the constant itself, or 0 for an operator.

The checks take programs as a `Batch` has them: ``codes`` uint8 [tokens] and ``values`` float64
[tokens] of all programs one after the other, ``starts`` int64 [programs + 1] with the index of each
program's first token and the total, ``counts`` [programs] with the length of each program's
parameter vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from struct import pack
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.errors import (
    InvalidArgumentError,
    ProgramError,
    did_you_mean,
    no_attribute,
    require,
)
from warpfit.expressions.real_numbers import (
    ParameterVectors,
    float_array,
    lengths_array,
    real_numbers,
)
from warpfit.ops import ARITIES, BY_CODE, CONSTANT, OPERATORS, PARAMETER, VARIABLE, Operator

# -------------------------------------------------------------------------------------- one program

T = TypeVar("T")
#: Module that prints programs; it imports this one.
_PRINTER: Final = "warpfit.expressions.language"


_COMPUTED: Final = (
    "to_numpy(), which returns a function of X, or a client's evaluate(data, [program])"
)
#: What to use instead of attributes of other packages.
_OF_PROGRAMS: Final = {
    **dict.fromkeys(("evaluate", "eval", "execute", "predict"), _COMPUTED),
    **dict.fromkeys(("text", "to_string", "expression", "equation", "formula"), "str(program)"),
    **dict.fromkeys(("size", "length", "complexity", "length_"), "len(program)"),
    **{"to_latex": "latex()", "to_sympy": "sympy()", "sympy_format": "sympy()"},
    **{"optimize": "a client's optimize(data, [program])", "fit": "a client's optimize()"},
}


class Program:
    """One expression: immutable postfix tokens.

    ``codes`` is uint8 [tokens] and ``values`` float64 [tokens], both read-only. Equality and hash
    are those of the tokens (NaN constants with equal bits are equal).

    Raises:
        ProgramError: if the tokens are not one well-formed expression, or a value is no real number
            that float64 can hold.

    """

    # Stored as bytes, because joining bytes to a batch takes a tenth of the time that arrays take.
    __slots__ = ("__dict__", "__weakref__", "_codes", "_values")

    _codes: bytes
    _values: bytes

    def __init__(self, codes: ArrayLike, values: ArrayLike = ()) -> None:
        """Copy and validate the tokens; text is refused, which `warpfit.parse` reads."""
        try:
            if isinstance(codes, str):
                raise TypeError(f"{codes[:100]!r} is a text")
            given = np.array(codes, ndmin=1)
            code_array = given.astype(np.uint8)
            numbers = real_numbers(values, "values", place="token")
        except InvalidArgumentError as error:
            raise ProgramError(error.message, error.reason, error.remedy, "values") from error
        except (TypeError, ValueError, OverflowError) as error:
            what = f"the tokens are no numbers: {error}"
            raise ProgramError(what, "BAD_TOKENS", "Parse texts with warpfit.parse") from error
        value_array = np.array(numbers, np.float64, ndmin=1)
        if value_array.shape != code_array.shape or code_array.ndim != 1:
            raise ProgramError("codes and values differ in length", "LENGTH_MISMATCH")
        if (code_array != given).any():
            raise ProgramError("a code is no whole number from 0 to 255", "BAD_TOKENS")
        starts = np.array([0, len(code_array)])
        if not are_well_formed(code_array, value_array, starts, starts[1:]):
            check_structure(code_array, value_array, starts)
        self._codes, self._values = code_array.tobytes(), value_array.tobytes()

    @classmethod
    def _unchecked(
        cls, codes: bytes | NDArray[np.uint8], values: bytes | NDArray[np.float64]
    ) -> Program:
        """Make a program of tokens, or their bytes, that are known to be well-formed."""
        program = object.__new__(cls)
        program._codes, program._values = bytes(codes), bytes(values)
        return program

    @classmethod
    def _leaf(cls, code: int, value: float) -> Program:
        """Make a program of one token; checking arrays takes twenty times as long."""
        is_plain = type(value) is float or (type(value) is int and abs(value) < INDEX_LIMIT)
        if is_plain and (code == CONSTANT or (0 <= value < INDEX_LIMIT and value == int(value))):
            return cls._unchecked(bytes([code]), pack("=d", float(value)))
        return cls([code], [value])

    if not TYPE_CHECKING:  # checkers are to refuse attributes that there are not

        def __getattr__(self, name: str) -> NoReturn:
            """Raise AttributeError with what is meant."""
            raise no_attribute("Program", name, dir(Program), _OF_PROGRAMS)

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
        return cls._leaf(VARIABLE, index)

    @classmethod
    def parameter(cls, index: int) -> Program:
        """Return the program that is one parameter, by its index from 0."""
        return cls._leaf(PARAMETER, index)

    @classmethod
    def constant(cls, value: float) -> Program:
        """Return the program that is one constant, any float64 including NaN and infinities."""
        return cls._leaf(CONSTANT, value)

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
        if op is None:
            remedy = did_you_mean(operator, OPERATORS, "Use a name of OPERATORS.md")
            raise ProgramError(f"{operator!r} is no operator", "UNKNOWN_OPERATOR", remedy)
        if not all(isinstance(operand, Program) for operand in operands):
            raise ProgramError(
                f"an operand of {op.name} is no Program",
                "NOT_PROGRAMS",
                "Use Program.variable(0), Program.constant(2.0), and the like",
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

    def bind(self, parameters: ArrayLike) -> Program:
        """Return the program with its parameters replaced by constants.

        Args:
            parameters: one number for each parameter, or more, [n].

        Raises:
            InvalidArgumentError: for fewer numbers than parameters, or another shape.

        """
        vector = float_array(parameters)
        if vector.ndim != 1 or len(vector) < self.parameters:
            raise InvalidArgumentError(
                f"{self.parameters} parameters, and numbers of shape {vector.shape}",
                "BAD_PARAMETERS",
                "Give one number for each parameter",
                "parameters",
            )
        is_parameter = self.codes == PARAMETER
        values = self.values.copy()
        values[is_parameter] = vector[values[is_parameter].astype(np.int64)]
        return Program._unchecked(np.where(is_parameter, np.uint8(CONSTANT), self.codes), values)

    def simplify(
        self,
        parameters: ArrayLike | None = None,
        *,
        assume_defined: bool = False,
        algebra: bool = False,
    ) -> Program:
        """Return an equal program in canonical order that is not longer.

        Equal formulas get equal programs as far as the rules go: constants are computed, like terms
        and powers combined, sums and products sorted. See `warpfit.formulas.rules` for what stays
        as it is to the last bit and what is rounded elsewhere. `warpfit.Client.simplify` goes
        further, with data.

        Args:
            parameters: numbers that replace the parameters, [n]; None leaves them as they are. The
                simplified program may have fewer parameters.
            assume_defined: also apply rules that hold only where the formula is defined, such as
                x/x = 1 and exp(log(x)) = x, as for a publication. By default NaN and infinities
                stay where they are for finite variables, as long as sums, products and powers of
                finite numbers are finite: ``x2/x1*x3`` becomes ``x2*x3/x1``, which overflows for
                other numbers (`warpfit.Client.simplify` looks at the data). The sign of a zero no
                rule keeps: ``0 - x1`` is ``-x1``, which is -0 at 0. Only an operator that tells -0
                from 0 makes more of it: ``1/(0 - x1)`` is inf at 0, and ``-1/x1`` is -inf there.
            algebra: also ask SymPy, for at most ten seconds; what it finds is taken if it is
                shorter and agrees with the program on random rows.

        Raises:
            InvalidArgumentError: if ``parameters`` are too few, or SymPy is asked for and missing.
            ResourceExhaustedError: if the program has more than 1,000 tokens.

        """
        bound = self if parameters is None else self.bind(parameters)
        if algebra:
            function = import_module("warpfit.formulas.algebra").algebraic
        else:
            function = import_module("warpfit.formulas.rules").simplified
        simplified: Program = function(bound, assume_defined)
        return simplified

    def to_numpy(self, names: Sequence[str] = ()) -> Callable[..., NDArray[np.float64]]:
        """Return a function of X [rows, variables] that needs NumPy alone, and gives values [rows].

        It computes in float64, whatever the dtype of X is, and raises TypeError for what are no
        numbers, such as text. Masked cells are NaN. X [rows] is one variable. A pandas or Polars
        frame is read by ``names``, by position without them. A program with parameters gives a
        function of X and p [parameters]. The attribute ``source`` of the function is its text,
        which a project can keep instead of warpfit; ``names`` is that of `code`.

        Args:
            names: names of the variables, for the text and for frames.

        """
        code = import_module("warpfit.formulas.code")
        function: Callable[..., NDArray[np.float64]] = code.to_numpy(self, names)
        return function

    def code(self, language: str, names: Sequence[str] = ()) -> str:
        """Return the program as a function called ``formula``, in source text of a language.

        Its values are those of the operator table, in float64. ``"numpy"``, ``"jax"`` and
        ``"torch"`` are functions of X [rows, variables] and, with parameters, p [parameters]. The
        others are functions of the variables that occur, in their order, and then of the parameters
        p1, p2, ...: of numbers in ``"c"``, ``"c++"``, ``"cuda"``, ``"javascript"``, ``"python"``
        and ``"rust"``, of numbers or arrays in ``"fortran"`` (elemental), ``"octave"`` and ``"r"``.
        JAX takes subnormal numbers for 0, and computes in float64 if it is told to.

        Args:
            language: one of these.
            names: names of the variables; those that are no identifiers, or that the language uses
                itself, become x1, x2, ..., which a comment says. The attribute ``names`` of the
                text is a dict from the names of the variables that occur to their identifiers.

        Raises:
            InvalidArgumentError: for another language; `sympy` has printers for more.
            ResourceExhaustedError: if the program has more than 10,000 tokens.

        """
        source: str = import_module("warpfit.formulas.code").to_code(self, language, names)
        return source

    def latex(self, names: Sequence[str] = ()) -> str:
        """Return the program as LaTeX for mathematical mode.

        Args:
            names: names of the variables; those beyond them become x_{1}, x_{2}, ....

        """
        text: str = import_module(_PRINTER).to_latex(self, names)
        return text

    def sympy(self, names: Sequence[str] = ()) -> Any:
        """Return the program as a SymPy expression, which SymPy simplifies by its own rules.

        Args:
            names: names of the variables; those beyond them become x1, x2, .... Where a name has
                taken x1 or p1, the first variable or parameter is x01 or p01, as in the text.

        Raises:
            InvalidArgumentError: if SymPy is not installed.
            ResourceExhaustedError: if the program is nested too deeply for SymPy's recursion.

        """
        require("sympy", "warpfit[sympy]")
        return import_module("warpfit.frontends.sympy").to_sympy(self, names)

    def __str__(self) -> str:
        """Return the text that `warpfit.parse` reads back, over x1, x2, ... and p1, p2, ...."""
        text: str = import_module(_PRINTER).to_text(self)
        return text

    def __repr__(self) -> str:
        """Show the text form."""
        return f"Program({str(self)!r})"

    def _repr_latex_(self) -> str:
        return f"${self.latex()}$"


# ------------------------------------------------------------------------------------ many programs


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
        try:
            given: Sequence[Program] | None = list(programs)
        except TypeError:  # of one program, an array without axes, a number
            given = None
        # Few types of many programs: checking each one takes longer than all that follows.
        kinds = set(map(type, given or ()))
        if given is None or not (kinds <= {Program} or all(issubclass(k, Program) for k in kinds)):
            raise InvalidArgumentError(
                f"a population is a list of Programs, and this is {type(programs).__name__}"
                if given is None
                else "a population is made of Programs",
                "NOT_PROGRAMS",
                "Write a single one as [program]. Convert texts, trees and the like with "
                "warpfit.frontends.as_population",
                "programs",
            )
        return Population.joining(given)

    @staticmethod
    def joining(programs: Sequence[Program]) -> Population:
        """Join what are known to be programs."""
        codes = [program._codes for program in programs]
        return Population(
            np.frombuffer(b"".join(codes), dtype=np.uint8),
            np.frombuffer(b"".join([program._values for program in programs])),
            lengths_array(map(len, codes)),
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
        if len(self) and not are_well_formed(self.codes, self.values, self.starts, self.lengths):
            check_structure(self.codes, self.values, self.starts)
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
        """Return the text of each program, as `warpfit.expressions.language.to_text`."""
        to_text = import_module(_PRINTER).to_text
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
        population = Population.of(programs)
        return cls.joined(population, ParameterVectors.of(len(population), parameters))

    @classmethod
    def joined(cls, programs: Population, vectors: ParameterVectors) -> Batch:
        """Return a batch of programs, whose arrays it shares, and parameter vectors."""
        if not len(programs.lengths):
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

    @property
    def occurring(self) -> NDArray[np.bool_]:
        """Whether each parameter occurs in its program, bool [sum of the counts]."""
        is_parameter, firsts = self.codes == PARAMETER, _starts(self.parameter_counts)
        places = np.repeat(firsts[:-1], self.lengths)[is_parameter]
        found = np.zeros(int(firsts[-1]), dtype=bool)
        found[places + self.values[is_parameter].astype(np.int64)] = True
        return found

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
        if are_well_formed(self.codes, self.values, starts, self.lengths, variables, counts):
            return
        check_structure(self.codes, self.values, starts)
        check_indices(self.codes, self.values, starts, variables, counts)

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


# --------------------------------------------------------------------------------- checks of tokens

Codes = NDArray[np.uint8]
Values = NDArray[np.float64]
Starts = NDArray[np.int64]
#: Indices of variables and parameters are below this.
INDEX_LIMIT: Final = 2**31
_INDEX_LIMIT_BITS: Final = np.float64(INDEX_LIMIT).view(np.uint64)


#: Change of the height of the stack by each code, int64 [256]. A code that is no token code removes
#: more than any program can have put there.
_HEIGHT_CHANGES: Final = np.where(
    ARITIES < 0, np.iinfo(np.int64).min // 2, 1 - ARITIES.astype(np.int64)
)
_HEIGHT_CHANGES.setflags(write=False)


def are_well_formed(
    codes: Codes,
    values: Values,
    starts: Starts,
    lengths: NDArray[Any],
    variables: int = INDEX_LIMIT,
    counts: NDArray[Any] | None = None,
) -> bool:
    """Test in few passes whether `check_structure` and `check_indices` would pass.

    The result is False, too, where an index is -0.0, which the checks accept. Without ``counts``
    parameters may have any index.
    """
    if not lengths.all():
        return False
    # Every operator finds its operands, and each program leaves one value. Each program but the
    # first begins by removing the value of the one before, so that heights are its own, up to the
    # first program that leaves another number of values.
    height = _HEIGHT_CHANGES.take(codes)
    height[starts[1:-1]] -= 1
    np.add.accumulate(height, out=height)
    if height.min() < 1 or (height[starts[1:] - 1] != 1).any():
        return False
    # The bits of floats from 0 on, read as integers, are ordered as the floats are, and lie below
    # those of all negative floats and NaN.
    bits, bound = values.view(np.uint64), np.float64(min(variables, INDEX_LIMIT)).view(np.uint64)
    bounds: Any = _INDEX_LIMIT_BITS
    if counts is not None:
        limits = np.minimum(counts, INDEX_LIMIT, dtype=np.float64)
        bounds = np.repeat(limits.view(np.uint64), lengths)
    is_variable, is_parameter = codes == VARIABLE, codes == PARAMETER
    fits = is_variable & (bits < bound)
    fits |= is_parameter & (bits < bounds)
    with np.errstate(invalid="ignore"):  # a constant may be a signaling NaN
        fits &= np.floor(values) == values
    if counts is not None and (needed_parameters(codes, values, starts) != counts).any():
        return False
    return bool((fits == (is_variable | is_parameter)).all())


def needed_parameters(codes: Codes, values: Values, starts: Starts) -> NDArray[np.float64]:
    """Return the length of the parameter vector that each program needs, float64 [programs]."""
    highest = np.where(codes == PARAMETER, values, -1.0)
    with np.errstate(invalid="ignore"):  # a constant may be a signaling NaN
        return np.asarray(np.maximum.reduceat(highest, starts[:-1]) + 1.0)


def check_structure(codes: Codes, values: Values, starts: Starts) -> None:
    """Check codes, indices and stacks; raise ProgramError for the first bad token."""
    lengths = np.diff(starts)
    if not lengths.all():
        raise ProgramError(
            "the program is empty",
            "EMPTY_PROGRAM",
            "Send at least one token for each expression",
            "lengths",
            int(np.argmin(lengths)),
        )
    check = _TokenCheck(values, starts)
    check(
        ARITIES[codes] < 0,
        "UNKNOWN_OPERATOR",
        lambda _, token: f"code {codes[token]} is no token code",
        "GetServerInfo lists the operators that this server knows",
    )
    with np.errstate(invalid="ignore"):
        index = (values >= 0) & (values < INDEX_LIMIT) & (values == np.floor(values))
    check(
        ((codes == VARIABLE) | (codes == PARAMETER)) & ~index,
        "BAD_INDEX",
        lambda value, _: f"{value} is not an index",
        "Variables and parameters carry a whole number from 0",
    )
    change = _HEIGHT_CHANGES[codes]
    height = np.cumsum(change)
    first, last = starts[:-1], starts[1:] - 1
    height -= np.repeat(height[first] - change[first], lengths)
    check(
        height < 1,
        "STACK_UNDERFLOW",
        lambda _, token: f"operator {BY_CODE[int(codes[token])].name} lacks operands",
        "In postfix, operands stand before their operator",
    )
    left = np.zeros(len(height), dtype=bool)
    left[last] = height[last] != 1
    check(
        left,
        "STACK_LEFTOVERS",
        lambda _, token: f"{height[token]} values are left at the end, not one",
        "Combine them with operators, or send them as separate programs",
    )


def check_indices(
    codes: Codes, values: Values, starts: Starts, variables: int, counts: NDArray[Any]
) -> None:
    """Check the indices of variables and parameters against the numbers that exist.

    A ProgramError names the first token whose index is out of range, or the first program that does
    not use its last parameter.
    """
    check = _TokenCheck(values, starts)
    check(
        (codes == VARIABLE) & (values >= variables),
        "VARIABLE_OUT_OF_RANGE",
        lambda value, _: (
            f"variable x{value + 1:.0f} is out of range: the data set has {variables} variables"
        ),
        f"Use x1 to x{variables}, whose indices are 0 to {variables - 1}",
    )
    bounds = np.repeat(counts, np.diff(starts))
    check(
        (codes == PARAMETER) & (values >= bounds),
        "PARAMETER_OUT_OF_RANGE",
        lambda value, token: f"p{value + 1:.0f} is used, and {_parameters(bounds[token])} given",
        "Give a longer parameter vector for this expression",
    )
    needed = needed_parameters(codes, values, starts)
    if (needed != counts).any():
        program = int(np.argmax(needed != counts))
        used = (
            f"p{needed[program]:.0f} is the last that is used"
            if needed[program]
            else "none is used"
        )
        raise ProgramError(
            f"{_parameters(counts[program])} given, and {used}",
            "TOO_MANY_PARAMETERS",
            "Give as many parameters as the expression has, [] where it has none",
            "parameters",
            program,
        )


def _parameters(count: int) -> str:
    return f"{count} parameter{' was' if count == 1 else 's were'}"


class _TokenCheck:
    """Raises a ProgramError for the first bad token, if there is one."""

    def __init__(self, values: Values, starts: Starts) -> None:
        self._values = values
        self._starts = starts

    def __call__(
        self, bad: NDArray[np.bool_], reason: str, message: Callable[[float, int], str], remedy: str
    ) -> None:
        token = int(bad.argmax())
        if not bad[token]:
            return
        expression = int(np.searchsorted(self._starts, token, side="right")) - 1
        raise ProgramError(
            message(float(self._values[token]), token),
            reason,
            remedy,
            "programs",
            expression,
            token - int(self._starts[expression]),
        )


# ----------------------------------------------------------------------------------------- subtrees


def subtree_starts(operands: NDArray[np.int64], longest: int = 1_000) -> NDArray[np.int64]:
    """Return the first token of the subtree that ends at each token; int64 [tokens].

    It is the last leaf so far that left the stack as high as the subtree does.

    Args:
        operands: number of operands of each token of programs in postfix order, one after the
            other; [tokens].
        longest: at least the number of tokens of the longest program.

    """
    # NumPy sorts 16-bit integers by radix. That they overflow from program to program does no harm.
    kind = np.uint16 if longest < 2**16 else np.int64
    order = np.argsort(np.cumsum(1 - operands).astype(kind), kind="stable")
    leaves = np.flatnonzero(operands.take(order) == 0)
    starts = np.empty_like(order)
    starts[order] = np.repeat(order.take(leaves), np.diff(leaves, append=len(order)))
    return starts
