"""Programs as functions in other languages.

NumPy, JAX, PyTorch and C have templates here: the operators' definitions in the kernel language of
`warpfit.ops` are expressions of all of these, but for the names of functions. The other languages
are left to SymPy's printers.
"""

from __future__ import annotations

import ast
import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from warpfit.errors import InvalidArgumentError, require
from warpfit.expressions.printing import to_text
from warpfit.formulas.rules import check_length
from warpfit.ops import CONSTANT, KERNEL_FUNCTIONS, VARIABLE, Operator

if TYPE_CHECKING:
    from warpfit.ir import Program

#: Most tokens of a program; the time grows with the square of the length, to a second.
_MOST_TOKENS: Final = 10_000
#: Longest operand, in nodes of its syntax tree, that is not given a name of its own.
_LONGEST: Final = 40
_ARC: Final = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "atan2": "arctan2"}
#: Names of columns that are kept; t1, t2, ... are taken.
_IDENTIFIER: Final = re.compile(r"(?!t[0-9]+$)[A-Za-z][A-Za-z0-9_]*")
_WORDS: Final = frozenset(
    {
        *keyword.kwlist,
        *("X", "x", "p", "np", "jnp", "jax", "torch", "math", "formula", "fabs", "choose", "where"),
        *("auto", "case", "char", "const", "default", "do", "double", "enum", "extern", "float"),
        *("goto", "inline", "int", "long", "register", "restrict", "short", "signed", "sizeof"),
        *("static", "struct", "switch", "typedef", "union", "unsigned", "void", "volatile"),
        *KERNEL_FUNCTIONS,
    }
)


#: Operators that every library's arrays have between themselves and numbers.
_ARITHMETIC: Final = frozenset({"add", "sub", "mul", "div", "neg", "pow"})


@dataclass(frozen=True, slots=True)
class Language:
    """Spelling of the kernel language's functions and operators in another language."""

    module: str
    """Name before each function."""
    functions: Mapping[str, str]
    """Functions of the kernel language that have another name."""
    header: str
    assignment: str
    function: str
    """With ``{header}``, ``{arguments}``, ``{text}``, ``{body}``, ``{result}``."""
    constant: str = "{}"
    """A number among the operands of a function."""
    infinite: tuple[str, str] = ("inf", "nan")
    has_ufuncs: bool = False
    """Whether NumPy's own functions exist."""


_PYTHON: Final = '''{header}


def formula({arguments}):
    """Return {text}, for X of shape [rows, variables]."""
{body}    return {result}
'''
_C: Final = """{header}

/* {text} */
double formula({arguments})
{{
{body}    return {result};
}}
"""
LANGUAGES: Final[Mapping[str, Language]] = MappingProxyType(
    {
        "numpy": Language(
            "np", {**_ARC, "pow": "power", "select": "where"}, "import numpy as np",
            "    {0} = {1}\n", _PYTHON, has_ufuncs=True,
        ),
        "jax": Language(
            "jnp", {**_ARC, "pow": "power", "select": "where"}, "import jax.numpy as jnp",
            "    {0} = {1}\n", _PYTHON, has_ufuncs=True,
        ),
        "torch": Language(
            "torch", {"select": "where"}, "import torch",
            "    {0} = {1}\n", _PYTHON, constant="X.new_tensor({})",
        ),
        "c": Language(
            "", {"abs": "fabs", "select": "choose"}, "#include <math.h>",
            "    const double {0} = {1};\n", _C, infinite=("INFINITY", "NAN"),
        ),
    }
)  # fmt: skip
#: SymPy's printers of expressions by language, and their keywords.
_PRINTERS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = MappingProxyType(
    {
        "fortran": ("fcode", {"standard": 95, "source_format": "free"}),
        **{"julia": ("julia_code", {}), "r": ("rcode", {}), "rust": ("rust_code", {})},
        **{"matlab": ("octave_code", {}), "octave": ("octave_code", {})},
        **{"javascript": ("jscode", {}), "mathematica": ("mathematica_code", {})},
    }
)
#: Functions that a language lacks: what is imported, and what is called instead.
_ERF: Final = {
    "numpy": ("import math", "np.vectorize(math.erf, otypes=[float])"),
    "jax": ("import jax.scipy.special", "jax.scipy.special.erf"),
}


def to_code(program: Program, language: str, names: Sequence[str] = ()) -> str:
    """Return a program as source text; see `warpfit.Program.code`."""
    check_length(program, _MOST_TOKENS, "code")
    if language in LANGUAGES:
        return _Writer(language, names).source(program)
    if language in _PRINTERS:
        return _printed(program, language, names)
    raise InvalidArgumentError(
        f"there is no code in {language!r}",
        "BAD_ENUM",
        f"Use one of {', '.join([*LANGUAGES, *_PRINTERS])}",
        "language",
    )


def _printed(program: Program, language: str, names: Sequence[str]) -> str:
    require("sympy", "warpfit[sympy]", "language")
    import sympy

    from warpfit.frontends.sympy import to_sympy

    identifiers = _identifiers(max(len(names), program.variables), names)
    printer, options = _PRINTERS[language]
    try:
        text = str(getattr(sympy, printer)(to_sympy(program, identifiers), **options))
    except NotImplementedError as error:
        text = f"Not supported: {error}"
    if "Not supported" in text:
        raise InvalidArgumentError(
            f"SymPy writes no {language} for {to_text(program, names)}",
            "NO_CODE",
            f"Use one of {', '.join(LANGUAGES)}, which have all operators",
            "language",
        )
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
    """Writes one function."""

    name: str
    names: Sequence[str]
    body: str = ""
    used: set[int] = field(default_factory=set)
    locals: int = 0
    functions: set[str] = field(default_factory=set)

    @property
    def language(self) -> Language:
        return LANGUAGES[self.name]

    def source(self, program: Program) -> str:
        identifiers = _identifiers(max(len(self.names), program.variables), self.names)
        program = _without_constant_operands(program)
        result = _unparsed(
            program.fold(lambda code, value: self._leaf(code, value, identifiers), self._apply)
        )
        language, is_c = self.language, self.name == "c"
        columns = "".join(
            language.assignment.format(identifiers[i], f"x[{i}]" if is_c else f"X[:, {i}]")
            for i in sorted(self.used)
        )
        arguments = ["const double *x" if is_c else "X"]
        if program.parameters:
            arguments.append("const double *p" if is_c else "p")
        if not self.used and not is_c:
            zeros = "X.new_zeros" if self.name == "torch" else f"{language.module}.zeros"
            result = f"{zeros}(len(X)) + {result}"
        return language.function.format(
            header="\n".join(self._header()),
            arguments=", ".join(arguments),
            text=_comment(to_text(program, self.names)),
            body=columns + self.body,
            result=result,
        )

    def _header(self) -> list[str]:
        lines = [self.language.header]
        if "erf" in self.functions and self.name in _ERF:
            lines.insert(0, _ERF[self.name][0])
        if "select" in self.functions and self.name == "c":
            lines.append(
                "\nstatic double choose(int condition, double a, double b)\n"
                "{\n    return condition ? a : b;\n}"
            )
        return lines

    def _leaf(self, code: int, value: float, identifiers: Sequence[str]) -> ast.expr:
        if code == CONSTANT:
            return self._number(value)
        if code == VARIABLE:
            self.used.add(int(value))
            return ast.Name(identifiers[int(value)])
        return ast.Subscript(ast.Name("p"), ast.Constant(int(value)))

    def _number(self, value: float) -> ast.expr:
        if math.isfinite(value):
            return _signed(value)
        infinity, nan = self.language.infinite
        module = f"{self.language.module}." if self.language.module else ""
        text = module + (nan if math.isnan(value) else infinity)
        return ast.Name(self.language.constant.format(f"-{text}" if value < 0 else text))

    def _apply(self, row: Operator, operands: list[ast.expr]) -> ast.expr:
        if self.language.has_ufuncs and isinstance(row.numpy, np.ufunc) and row.precedence > 80:
            name = f"{self.language.module}.{row.numpy.__name__}"
            return ast.Call(ast.Name(name), [self._short(node) for node in operands], [])
        if row.name not in _ARITHMETIC:
            operands = [self._operand(node) for node in operands]
        kernel = ast.parse(self._kernel(row), mode="eval").body
        mentions = [node.id for node in ast.walk(kernel) if isinstance(node, ast.Name)]
        counts = [mentions.count(name) for name in row.operands]
        named = {
            name: self._short(node, 1 if count > 1 else _LONGEST)
            for name, node, count in zip(row.operands, operands, counts, strict=True)
        }
        written: ast.expr = _Substitution(self, named).visit(kernel)
        return written

    def _kernel(self, row: Operator) -> str:
        if row.name == "cbrt" and self.name == "torch":
            return "sign(a) * pow(abs(a), 0.3333333333333333)"
        return row.kernel

    def _short(self, node: ast.expr, most: int = _LONGEST) -> ast.expr:
        """Return a name for an expression that is longer, after a line that computes it."""
        if isinstance(node, ast.Name | ast.Constant) or sum(1 for _ in ast.walk(node)) <= most:
            return node
        self.locals += 1
        name = f"t{self.locals}"
        self.body += self.language.assignment.format(name, _unparsed(node))
        return ast.Name(name)

    def call(self, name: str, operands: list[ast.expr]) -> ast.expr:
        """Return a call of a function of the kernel language."""
        self.functions.add(name)
        language = self.language
        written = language.functions.get(name, name)
        written = f"{language.module}.{written}" if language.module else written
        if name == "erf" and self.name in _ERF:
            written = _ERF[self.name][1]
        if name != "pow":
            operands = [self._operand(node) for node in operands]
        return ast.Call(ast.Name(written), operands, [])

    def _operand(self, node: ast.expr) -> ast.expr:
        value = node.operand if isinstance(node, ast.UnaryOp) else node
        if self.language.constant == "{}" or not isinstance(value, ast.Constant):
            return node
        return ast.Name(self.language.constant.format(_unparsed(node)))


class _Substitution(ast.NodeTransformer):
    """Writes a kernel with its operands, in a language."""

    def __init__(self, writer: _Writer, operands: Mapping[str, ast.expr]) -> None:
        self._writer = writer
        self._operands = operands

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return deepcopy(self._operands.get(node.id, node))

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Constant(float(node.value))  # type: ignore[arg-type]

    def visit_Call(self, node: ast.Call) -> ast.expr:
        assert isinstance(node.func, ast.Name)
        return self._writer.call(node.func.id, [self.visit(operand) for operand in node.args])


def _unparsed(node: ast.expr) -> str:
    # In C two signs together would be one operator.
    return ast.unparse(node).replace("--", "- -")


def _signed(value: float) -> ast.expr:
    negative = math.copysign(1.0, value) < 0.0
    number = ast.Constant(abs(value))
    return ast.UnaryOp(ast.USub(), number) if negative else number


def _without_constant_operands(program: Program) -> Program:
    """Compute subexpressions of constants, which some libraries' functions do not take."""

    def leaf(code: int, value: float) -> Program:
        return type(program)([code], [value])

    def operator(row: Operator, operands: list[Program]) -> Program:
        if all(operand.codes[-1] == CONSTANT for operand in operands):
            with np.errstate(all="ignore"):
                return leaf(CONSTANT, float(row.numpy(*(o.values[0] for o in operands))))
        return type(program).apply(row, *operands)

    return program.fold(leaf, operator)


def _identifiers(count: int, names: Sequence[str]) -> list[str]:
    """Return names for the columns that every language takes, all different."""
    found: dict[str, None] = {}
    for index in range(count):
        name = names[index] if index < len(names) else ""
        is_plain = _IDENTIFIER.fullmatch(name) and name not in _WORDS
        name = name if is_plain else f"x{index + 1}"
        while name in found:
            name += "_"
        found[name] = None
    return list(found)


def _comment(text: str) -> str:
    """Return a text that ends neither a comment nor a docstring, whatever names it contains."""
    return re.sub(r"[^\w .,+\-*/^<>=!()#`]", "?", text).replace("*/", "* /")
