"""pyoperon trees to `Program` and back, with their coefficients as parameters.

In Operon every number is a coefficient: each variable carries a weight, a constant has its value,
and any other node may have a factor. A coefficient whose ``Optimize`` flag is set becomes a
parameter, so that tree and program are fitted alike: ``tree.GetCoefficients()`` is the program's
parameter vector, and ``tree.SetCoefficients(fitted.astype("float32"))`` takes a fit back.

Operon keeps coefficients in float32, and the lesser or greater of NaN and a number is the number
there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit.errors import InvalidArgumentError, list_of_texts
from warpfit.ir import Program
from warpfit.ops import CONSTANT, OPERATORS, PARAMETER, VARIABLE, Operator

#: Operator for each type of node, by what pyoperon's evaluator and formatter do: in 0.6.2 its
#: ``Fmin`` is the greater and its ``Fmax`` the lesser of two.
TYPES: Final[Mapping[str, str]] = {
    **{"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Fmin": "max", "Fmax": "min"},
    **{"Aq": "aq", "Pow": "pow", "Powabs": "powabs", "Square": "square", "Cbrt": "cbrt"},
    **{"Abs": "abs", "Sqrt": "sqrt", "Sqrtabs": "sqrtabs", "Exp": "exp", "Log": "log"},
    **{"Logabs": "logabs", "Log1p": "log1p", "Sin": "sin", "Cos": "cos", "Tan": "tan"},
    **{"Asin": "asin", "Acos": "acos", "Atan": "atan", "Sinh": "sinh", "Cosh": "cosh"},
    **{"Tanh": "tanh", "Floor": "floor", "Ceil": "ceil"},
}
_TYPE_OF: Final[Mapping[str, str]] = {name: kind for kind, name in TYPES.items()}
#: Operators that are nodes of these types with one operand.
_UNARY: Final[Mapping[str, str]] = {"neg": "Sub", "inv": "Div"}
_OF_ONE: Final[Mapping[str, str]] = {"Sub": "neg", "Div": "inv"}
_CHAINS: Final = frozenset({"add", "sub", "mul", "div"})
#: What Operon's infix parser reads; it knows fewer functions than there are nodes.
_INFIX: Final = frozenset({"add", "sub", "mul", "div", "pow"})
_FUNCTIONS: Final = frozenset(
    {
        *("abs", "acos", "asin", "atan", "cbrt", "ceil", "cos", "cosh", "exp", "floor", "log"),
        *("sin", "sinh", "sqrt", "square", "tan", "tanh"),
    }
)

#: Codes and values of a subtree in postfix order.
_Piece = tuple[list[int], list[float]]


def from_operon(tree: Any, variables: Any) -> tuple[Program, NDArray[np.float64]]:
    """Convert a pyoperon tree.

    Args:
        tree: a ``pyoperon.Tree``.
        variables: the ``pyoperon.Dataset`` that it was made for, or its ``Variables``; a variable's
            column there is its index in the program. Or ``variables_`` of pyoperon's estimator.

    Returns:
        The program and its parameters, float64 [parameters], in the order of
        ``tree.GetCoefficients()``. A factor of 1 that is not to be optimised leaves no trace.

    Raises:
        InvalidArgumentError: for a type of node or a variable that is not known.
    """
    if isinstance(variables, Mapping):  # hashes with names, in the order of the columns
        indices = {key: index for index, key in enumerate(variables)}
    else:
        indices = {variable.Hash: variable.Index for variable in _listed(variables)}
    stack: list[_Piece] = []
    parameters: list[float] = []
    for node in tree.Nodes:
        coefficient: _Piece | None = None
        if node.Optimize:
            coefficient = [PARAMETER], [float(len(parameters))]
            parameters.append(node.Value)
        elif node.IsConstant or node.Value != 1.0:
            coefficient = [CONSTANT], [node.Value]
        if node.IsConstant:
            assert coefficient is not None
            stack.append(coefficient)
            continue
        # The first operand stands last.
        operands = [stack.pop() for _ in range(node.Arity)]
        if not node.IsVariable:
            kind = node.Type.name
            name = TYPES.get(kind)
            if len(operands) == 1:
                name = _OF_ONE.get(kind, name)
            wanted = 0 if name is None else OPERATORS[name].arity
            if name is None or not (len(operands) == wanted or name in _CHAINS):
                raise InvalidArgumentError(
                    f"Operon's {kind} of {len(operands)} operands is no operator of warpfit",
                    "UNKNOWN_FUNCTION",
                    f"Use {', '.join(TYPES)}",
                    "expressions",
                )
            # One operand of a sum or product is itself.
            piece = _joined(operands, name)
        elif node.HashValue in indices:
            piece = [VARIABLE], [float(indices[node.HashValue])]
        else:
            raise InvalidArgumentError(
                "a variable of the Operon tree is not in the data set",
                "UNKNOWN_NAME",
                "Pass the data set that the tree was made for",
                "variables",
            )
        stack.append(piece if coefficient is None else _joined([coefficient, piece], "mul"))
    return Program(*stack.pop()), np.array(parameters, dtype=np.float64)


def _listed(variables: Any) -> Sequence[Any]:
    listed = getattr(variables, "Variables", variables)
    if not isinstance(listed, Iterable) or not all(hasattr(one, "Hash") for one in listed):
        raise InvalidArgumentError(
            f"variables is of type {type(variables).__name__}",
            "BAD_SETTING",
            "Pass the pyoperon.Dataset, or variables_ of pyoperon's estimator",
            "variables",
        )
    return list(listed)


def _joined(operands: list[_Piece], name: str) -> _Piece:
    """Apply an operator; of more operands than it has, a chain from the left."""
    row = OPERATORS[name]
    codes, values = list(operands[0][0]), list(operands[0][1])
    if row.arity == 1:
        return [*codes, row.code], [*values, 0.0]
    for more_codes, more_values in operands[1:]:
        codes += [*more_codes, row.code]
        values += [*more_values, 0.0]
    return codes, values


def to_operon(program: Program, variables: Any, parameters: ArrayLike = ()) -> Any:
    """Convert a program to a ``pyoperon.Tree``.

    Args:
        program: the program.
        variables: a ``pyoperon.Dataset`` or its ``Variables``; the program's variables are its
            columns, in order.
        parameters: values of the program's parameters [parameters]. They become constants to be
            optimised, those of the program's constants are not; a parameter that occurs twice
            becomes two coefficients.

    Raises:
        InvalidArgumentError: for an operator that Operon has not, a variable that the data set has
            not, a parameter without a value, or a number that float32 cannot hold.
    """
    import pyoperon

    hashes = {variable.Index: variable.Hash for variable in _listed(variables)}
    vector = np.asarray(parameters, dtype=np.float64)
    _check(program, len(hashes), len(vector))

    def leaf(code: int, value: float) -> list[Any]:
        if code == VARIABLE:
            node = pyoperon.Node.Variable(1.0)
            node.HashValue = node.CalculatedHashValue = hashes[int(value)]
        else:
            number = vector[int(value)] if code == PARAMETER else value
            node = pyoperon.Node.Constant(_coefficient(number))
        node.Optimize = code == PARAMETER
        return [node]

    def operator(row: Operator, operands: list[list[Any]]) -> list[Any]:
        kind = _UNARY.get(row.name, _TYPE_OF.get(row.name))
        if kind is None:
            raise _unknown(row)
        node = pyoperon.Node(getattr(pyoperon.NodeType, kind))
        node.Arity = row.arity
        return [*(part for operand in reversed(operands) for part in operand), node]

    return pyoperon.Tree(program.fold(leaf, operator)).UpdateNodes()


def to_operon_infix(program: Program, names: Sequence[str], parameters: ArrayLike = ()) -> str:
    """Write a program as text that ``pyoperon.InfixParser.Parse`` reads.

    Args:
        program: the program.
        names: names of the variables in order.
        parameters: values of the program's parameters, [parameters].

    Raises:
        InvalidArgumentError: for an operator that Operon's infix parser does not read, a variable
            without a name, a parameter without a value, or a number that float32 cannot hold.
    """
    vector, names = np.asarray(parameters, dtype=np.float64), list_of_texts(names)
    _check(program, len(names), len(vector))

    def leaf(code: int, value: float) -> str:
        if code == VARIABLE:
            return names[int(value)]
        return f"({_coefficient(vector[int(value)] if code == PARAMETER else value)!r})"

    def operator(row: Operator, operands: list[str]) -> str:
        if row.name in _INFIX:
            return f"({operands[0]} {row.symbol} {operands[1]})"
        if row.name == "neg":
            # The parser does not survive a minus before anything but a number.
            return f"((-1) * {operands[0]})"
        if row.name == "inv":
            return f"(1 / {operands[0]})"
        if row.name in _FUNCTIONS:
            return f"{row.name}({operands[0]})"
        raise _unknown(row)

    return program.fold(leaf, operator)


def _coefficient(number: float) -> float:
    """Return a number; raise InvalidArgumentError if it is infinite or 0 in float32 alone."""
    with np.errstate(all="ignore"):
        single = np.float32(number)
    if (np.isinf(single) and np.isfinite(number)) or (single == 0.0 and number != 0.0):
        raise InvalidArgumentError(
            f"Operon's coefficients are float32, which cannot hold {number:g}",
            "OVERFLOW",
            "Choose other units",
            "program",
        )
    return float(number)


def _check(program: Program, variables: int, parameters: int) -> None:
    for what, needed, given in (
        ("variables", program.variables, variables),
        ("parameters", program.parameters, parameters),
    ):
        if needed > given:
            raise InvalidArgumentError(
                f"the program needs {needed} {what}, {given} are given",
                "LENGTH_MISMATCH",
                f"Give all {what} of the program",
                what,
            )


def _unknown(row: Operator) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"Operon has no {row.name}",
        "UNKNOWN_FUNCTION",
        f"Write it with {', '.join(sorted(_TYPE_OF))}",
        "expressions",
    )
