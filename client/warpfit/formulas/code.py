"""Programs as NumPy functions, and as text in other languages by SymPy's printers."""

from __future__ import annotations

import ast
import inspect
import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from warpfit.errors import InvalidArgumentError, require
from warpfit.expressions import special
from warpfit.expressions.printing import to_text
from warpfit.formulas.rules import check_length
from warpfit.ops import CONSTANT, VARIABLE, Operator

if TYPE_CHECKING:
    from warpfit.ir import Program

#: Most tokens of a program; the time grows with the square of the length, to a second.
_MOST_TOKENS: Final = 10_000
#: Longest operand, in characters, that is not given a name of its own.
_LONGEST: Final = 100
#: A name or a number.
_ATOM: Final = re.compile(r"-?[\w.]+")
#: Names, and whole numbers, which become floats.
_WORD: Final = re.compile(r"(?<![\w.])(?:[a-z]\w*|\d+)(?![\w.])")
#: Names of columns that are kept; t1, t2, ... are taken.
_IDENTIFIER: Final = re.compile(r"(?!t[0-9]+$)[A-Za-z][A-Za-z0-9_]*")
#: Functions that NumPy has not; their text becomes part of the code.
_COPIED: Final = {name: getattr(special, name) for name in ("erf", "erfc", "tgamma", "lgamma")}
_WORDS: Final = frozenset({*keyword.kwlist, *_COPIED, "X", "x", "p", "np", "math", "formula"})
#: Functions of the kernel language that NumPy calls otherwise.
_FUNCTIONS: Final = {
    **{"asin": "np.arcsin", "acos": "np.arccos", "atan": "np.arctan", "atan2": "np.arctan2"},
    **{"pow": "np.power", "select": "np.where", **{name: name for name in _COPIED}},
}
_OF_JAX: Final = {"erf": "erf", "gamma": "gamma", "loggamma": "gammaln"}
#: SymPy's printers of expressions by language, and their keywords, among them the names of
#: functions that they do not know.
_PRINTERS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "c": ("ccode", {}),
    "fortran": (
        "fcode",
        {
            **{"standard": 95, "source_format": "free"},
            "user_functions": {"gamma": "gamma", "loggamma": "log_gamma"},
        },
    ),
    "jax": (
        "printing.numpy.JaxPrinter",
        {"user_functions": {name: f"jax.scipy.special.{f}" for name, f in _OF_JAX.items()}},
    ),
    "torch": ("printing.pytorch.TorchPrinter", {}),
    "julia": ("julia_code", {"user_functions": {"loggamma": "loggamma"}}),
    **{"r": ("rcode", {"user_functions": {"loggamma": "lgamma"}}), "rust": ("rust_code", {})},
    **{"matlab": ("octave_code", {}), "octave": ("octave_code", {})},
    **{"javascript": ("jscode", {}), "mathematica": ("mathematica_code", {})},
}


def to_code(program: Program, language: str, names: Sequence[str] = ()) -> str:
    """Return a program as source text; see `warpfit.Program.code`."""
    check_length(program, _MOST_TOKENS, "code")
    if language == "numpy":
        return _source(program, names)
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
    expression = to_sympy(program, identifiers)
    if language == "torch":
        expression = _for_torch(expression)
    text = str(written(expression, **keywords))
    if "Not supported" in text or "Not Supported" in text:
        raise NotImplementedError(text)
    return text


def _for_torch(expression: Any) -> Any:
    """Write what PyTorch has not: gamma, and numbers in max and min, which take tensors only.

    Gamma is the exponential of its logarithm but for the sign below 0.
    """
    from sympy import Abs, Max, Min, Symbol, cos, erf, erfc, exp, floor, gamma, loggamma, pi

    def of_tensors(found: Any) -> Any:
        tensor = "torch.tensor({}, dtype=torch.float64)"
        return found.func(
            *(Symbol(tensor.format(float(a))) if a.is_number else a for a in found.args)
        )

    expression = expression.replace(
        gamma, lambda a: exp(loggamma(a)) * cos(pi * floor((a - Abs(a)) / 2))
    )
    expression = expression.replace(erfc, lambda a: 1 - erf(a))
    return expression.replace(lambda node: isinstance(node, Max | Min), of_tensors)


def to_numpy(program: Program, names: Sequence[str] = ()) -> Callable[..., Any]:
    """Return a program as a function; see `warpfit.Program.to_numpy`."""
    source = to_code(program, "numpy", names)
    namespace: dict[str, Any] = {}
    # The text consists of the operator table and of identifiers that `_identifiers` has made.
    exec(compile(source, "<formula>", "exec"), namespace)
    function: Callable[..., Any] = namespace["formula"]
    function.source = source  # type: ignore[attr-defined]
    return function


def _source(program: Program, names: Sequence[str]) -> str:
    """Return a program as a function. The kernels of `warpfit.ops` are Python but for names."""
    program, columns = _without_constant_operands(program), _identifiers(program, names)
    lines: list[str] = []

    def leaf(code: int, value: float) -> str:
        if code == CONSTANT:
            return repr(value) if math.isfinite(value) else f"{'-' * (value < 0)}np.{abs(value)}"
        return columns[int(value)] if code == VARIABLE else f"p[{int(value)}]"

    def short(text: str, most: int = _LONGEST) -> str:
        """Return a name for an expression that is longer, after a line that computes it."""
        if len(text) > most and not _ATOM.fullmatch(text):
            lines.append(f"t{len(lines) + 1} = {text}")
            text = f"t{len(lines)}"
        return text

    def operator(row: Operator, operands: list[str]) -> str:
        if isinstance(row.numpy, np.ufunc) and row.precedence > 80:
            return f"np.{row.numpy.__name__}({', '.join(map(short, operands))})"
        words = _WORD.findall(row.kernel)
        known = {
            name: f"({short(text, 0 if words.count(name) > 1 else _LONGEST)})"
            for name, text in zip(row.operands, operands, strict=True)
        }
        known |= {word: f"{word}.0" for word in words if word.isdigit()}
        functions = {word: f"np.{word}" for word in words} | _FUNCTIONS
        return f"({_WORD.sub(lambda m: known.get(m[0]) or functions[m[0]], row.kernel)})"

    result = program.fold(leaf, operator)
    used = sorted(set(program.values[program.codes == VARIABLE].astype(int).tolist()))
    lines = [*(f"{columns[i]} = X[:, {i}]" for i in used), *lines]
    lines.append(f"return {result if used else f'np.zeros(len(X)) + {result}'}")
    # No text ends the docstring, whatever names it contains.
    text = re.sub(r"[^\w .,+\-*/^<>=!()#`]", "?", to_text(program, names))
    doc = f'"""Return {text}, for X of shape [rows, variables]."""'
    start = f"def formula({'X, p' if program.parameters else 'X'}):"
    body = ast.unparse(ast.parse("\n    ".join([start, doc, *lines])))  # without idle parentheses
    copied = [f for name, f in _COPIED.items() if f"{name}(" in "".join(lines)]
    header = "import math\nimport numpy as np" if copied else "import numpy as np"
    parts = [header, *(inspect.getsource(function).rstrip() for function in copied), body]
    return "\n\n\n".join(parts) + "\n"


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
