"""A program: one expression as immutable postfix tokens, and what is done with one formula.

The modules that do the work build on this one, so they are loaded by name, on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.errors import InvalidArgumentError, ProgramError, require
from warpfit.expressions.parameter_vectors import float_array
from warpfit.expressions.printing import to_latex, to_text
from warpfit.expressions.real_numbers import real_numbers
from warpfit.expressions.token_checks import are_well_formed, check_structure
from warpfit.ops import BY_CODE, CONSTANT, OPERATORS, PARAMETER, VARIABLE, Operator

T = TypeVar("T")


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

    def __init__(self, codes: ArrayLike, values: ArrayLike) -> None:
        """Copy and validate the tokens."""
        code_array, value_array = _token_arrays(codes, values)
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
        return Program(np.where(is_parameter, np.uint8(CONSTANT), self.codes), values)

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
                stay where they are for finite variables, but for the sign of a zero, which no rule
                keeps: ``0 - x1`` is ``-x1``, which is -0 at 0. Only an operator that tells -0 from
                0 makes more of it: ``1/(0 - x1)`` is inf at 0, and ``-1/x1`` is -inf there.
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
        numbers, such as text. Masked cells are NaN. A pandas or Polars frame is read by ``names``,
        by position without them. A program with parameters gives a function of X and p
        [parameters]. The attribute ``source`` of the function is its text, which a project can keep
        instead of warpfit; ``names`` is that of `code`.

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
        return to_latex(self, names)

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
        return to_text(self)

    def __repr__(self) -> str:
        """Show the text form."""
        return f"Program({str(self)!r})"

    def _repr_latex_(self) -> str:
        return f"${to_latex(self)}$"


def _token_arrays(
    codes: ArrayLike, values: ArrayLike
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    try:
        given = np.array(codes, ndmin=1)
        code_array = given.astype(np.uint8)
        numbers = real_numbers(values, "values", place="token")
    except InvalidArgumentError as error:
        raise ProgramError(error.message, error.reason, error.remedy, "values") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise ProgramError(
            f"the tokens are no numbers: {error}", "BAD_TOKENS", "Parse texts with warpfit.parse"
        ) from error
    value_array = np.array(numbers, np.float64, ndmin=1)
    if value_array.shape != code_array.shape or code_array.ndim != 1:
        raise ProgramError("codes and values differ in length", "LENGTH_MISMATCH")
    if (code_array != given).any():
        raise ProgramError("a code is no whole number from 0 to 255", "BAD_TOKENS")
    return code_array, value_array
