"""Programs as NumPy functions, and as text in other languages by SymPy's printers."""

from __future__ import annotations

import ast
import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from warpfit.errors import InvalidArgumentError, require
from warpfit.expressions.printing import to_text
from warpfit.formulas.rules import check_length
from warpfit.ops import CONSTANT, VARIABLE, Operator

if TYPE_CHECKING:
    from warpfit.ir import Program

#: Most tokens of a program; the time grows with the square of the length, to a second.
_MOST_TOKENS: Final = 10_000
#: Longest operand, in nodes of its syntax tree, that is not given a name of its own.
_LONGEST: Final = 40
#: Names of columns that are kept; t1, t2, ... are taken.
_IDENTIFIER: Final = re.compile(r"(?!t[0-9]+$)[A-Za-z][A-Za-z0-9_]*")
_WORDS: Final = frozenset({*keyword.kwlist, "X", "x", "p", "np", "math", "formula"})
#: Functions of the kernel language that NumPy calls otherwise.
_FUNCTIONS: Final = {
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "atan2": "arctan2", "pow": "power",
    "select": "where",
}  # fmt: skip
_ERF: Final = "np.vectorize(math.erf, otypes=[float])"
#: SymPy's printers of expressions by language, and their keywords.
_PRINTERS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "c": ("ccode", {}),
    "fortran": ("fcode", {"standard": 95, "source_format": "free"}),
    "jax": ("printing.numpy.JaxPrinter", {}),
    "torch": ("printing.pytorch.TorchPrinter", {}),
    **{"julia": ("julia_code", {}), "r": ("rcode", {}), "rust": ("rust_code", {})},
    **{"matlab": ("octave_code", {}), "octave": ("octave_code", {})},
    **{"javascript": ("jscode", {}), "mathematica": ("mathematica_code", {})},
}


def to_code(program: Program, language: str, names: Sequence[str] = ()) -> str:
    """Return a program as source text; see `warpfit.Program.code`."""
    check_length(program, _MOST_TOKENS, "code")
    if language == "numpy":
        return _Writer(_identifiers(program, names)).source(program, names)
    if language not in _PRINTERS:
        known = ", ".join(["numpy", *_PRINTERS])
        raise InvalidArgumentError(
            f"there is no code in {language!r}", "BAD_ENUM", f"Use one of {known}", "language"
        )
    require("sympy", "warpfit[sympy]", "language")
    try:
        return _printed(program, language, _identifiers(program, names))
    except NotImplementedError as error:
        raise InvalidArgumentError(
            f"SymPy writes no {language} for {to_text(program, names)}",
            "NO_CODE",
            "Use numpy, which has all operators",
            "language",
        ) from error


def _printed(program: Program, language: str, identifiers: Sequence[str]) -> str:
    import sympy
    import sympy.printing.pytorch

    from warpfit.frontends.sympy import to_sympy

    name, options = _PRINTERS[language]
    printer: Any = sympy
    for part in name.split("."):
        printer = getattr(printer, part)
    written = printer(options).doprint if isinstance(printer, type) else printer
    keywords = {} if isinstance(printer, type) else options
    text = str(written(to_sympy(program, identifiers), **keywords))
    if "Not supported" in text or "Not Supported" in text:
        raise NotImplementedError(text)
    return text


def to_numpy(program: Program, names: Sequence[str] = ()) -> Callable[..., Any]:
    """Return a program as a function; see `warpfit.Program.to_numpy`."""
    source = to_code(program, "numpy", names)
    namespace: dict[str, Any] = {}
    # The text consists of the operator table and of identifiers that `_identifiers` has made.
    exec(compile(source, "<formula>", "exec"), namespace)
    function: Callable[..., Any] = namespace["formula"]
    function.source = source  # type: ignore[attr-defined]
    return function


@dataclass(slots=True)
class _Writer:
    """Writes one function. The kernels of `warpfit.ops` are Python, but for names of functions."""

    identifiers: Sequence[str]
    body: list[str] = field(default_factory=list)
    used: set[int] = field(default_factory=set)

    def source(self, program: Program, names: Sequence[str]) -> str:
        program = _without_constant_operands(program)
        result = ast.unparse(program.fold(self._leaf, self._apply))
        columns = [f"{self.identifiers[i]} = X[:, {i}]" for i in sorted(self.used)]
        if not self.used:
            result = f"np.zeros(len(X)) + {result}"
        lines = [*columns, *self.body, f"return {result}"]
        header = ["import math"] * any(_ERF in line for line in lines) + ["import numpy as np"]
        start = f"def formula({'X, p' if program.parameters else 'X'}):"
        # No text ends the docstring, whatever names it contains.
        text = re.sub(r"[^\w .,+\-*/^<>=!()#`]", "?", to_text(program, names))
        doc = f'"""Return {text}, for X of shape [rows, variables]."""'
        return "\n".join([*header, "", "", start, *(f"    {x}" for x in (doc, *lines)), ""])

    def _leaf(self, code: int, value: float) -> ast.expr:
        if code == CONSTANT:
            return _number(value)
        if code == VARIABLE:
            self.used.add(int(value))
            return ast.Name(self.identifiers[int(value)])
        return ast.Subscript(ast.Name("p"), ast.Constant(int(value)))

    def _apply(self, row: Operator, operands: list[ast.expr]) -> ast.expr:
        if isinstance(row.numpy, np.ufunc) and row.precedence > 80:
            function = ast.Name(f"np.{row.numpy.__name__}")
            return ast.Call(function, [self._short(node) for node in operands], [])
        kernel = ast.parse(row.kernel, mode="eval").body
        mentions = [node.id for node in ast.walk(kernel) if isinstance(node, ast.Name)]
        named = {
            name: self._short(node, 1 if mentions.count(name) > 1 else _LONGEST)
            for name, node in zip(row.operands, operands, strict=True)
        }
        written: ast.expr = _Substitution(named).visit(kernel)
        return written

    def _short(self, node: ast.expr, most: int = _LONGEST) -> ast.expr:
        """Return a name for an expression that is longer, after a line that computes it."""
        if isinstance(node, ast.Name | ast.Constant) or sum(1 for _ in ast.walk(node)) <= most:
            return node
        name = f"t{len(self.body) + 1}"
        self.body.append(f"{name} = {ast.unparse(node)}")
        return ast.Name(name)


class _Substitution(ast.NodeTransformer):
    """Writes a kernel with its operands."""

    def __init__(self, operands: Mapping[str, ast.expr]) -> None:
        self._operands = operands

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return deepcopy(self._operands.get(node.id, node))

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Constant(float(node.value))  # type: ignore[arg-type]

    def visit_Call(self, node: ast.Call) -> ast.expr:
        assert isinstance(node.func, ast.Name)
        name = node.func.id
        function = _ERF if name == "erf" else f"np.{_FUNCTIONS.get(name, name)}"
        return ast.Call(ast.Name(function), [self.visit(operand) for operand in node.args], [])


def _number(value: float) -> ast.expr:
    if math.isnan(value):
        return ast.Name("np.nan")
    size = ast.Name("np.inf") if math.isinf(value) else ast.Constant(abs(value))
    return ast.UnaryOp(ast.USub(), size) if math.copysign(1.0, value) < 0.0 else size


def _without_constant_operands(program: Program) -> Program:
    """Compute subexpressions of constants, in which Python raises errors."""

    def leaf(code: int, value: float) -> Program:
        return type(program)([code], [value])

    def operator(row: Operator, operands: list[Program]) -> Program:
        if all(operand.codes[-1] == CONSTANT for operand in operands):
            with np.errstate(all="ignore"):
                return leaf(CONSTANT, float(row.numpy(*(o.values[0] for o in operands))))
        return type(program).apply(row, *operands)

    return program.fold(leaf, operator)


def _identifiers(program: Program, names: Sequence[str]) -> list[str]:
    """Return names for the columns that every language takes, all different."""
    found: dict[str, None] = {}
    for index in range(max(len(names), program.variables)):
        name = names[index] if index < len(names) else ""
        is_plain = _IDENTIFIER.fullmatch(name) and name not in _WORDS
        name = name if is_plain else f"x{index + 1}"
        while name in found:
            name += "_"
        found[name] = None
    return list(found)
