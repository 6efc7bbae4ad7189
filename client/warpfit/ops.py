"""The operator table, with one row for each operator.

The parser, the printers, the NumPy reference, the CPU engine, the CUDA interpreter, the PTX
renderer, ``GetServerInfo`` and the documentation are generated from these rows, and the tests are
parametrised over them. To add an operator, add one row; `client/README.md` says what else there may
be to do. A wire code is never reused and never changes its meaning.

Kernel language
---------------
``kernel`` and ``derivative`` are expressions that are valid both in Python and in CUDA C++, so that
every engine can insert them into the code that it generates. They consist of

* the operands ``a``, ``b``, ``c``, and in a derivative also ``r``, the operator's own result;
* ``+ - * /``, unary minus, comparisons, parentheses and decimal literals (the code generators give
  each literal the data's floating type);
* ``select(condition, x, y)``, which is ``x`` where the condition holds and ``y`` elsewhere;
* the functions in ``KERNEL_FUNCTIONS``, with their meaning in C, but for two that C has not:
  ``digamma``, the derivative of ``lgamma``, and ``mod``, which is NumPy's.

In CUDA code ``cuda`` replaces ``kernel``. For float32 in fast mode ``cuda_fast`` replaces both, and
in kernels that are compiled for their expressions ``cuda_fast_compiled`` replaces all three. The
PTX renderer reads the same expressions.

Derivatives
-----------
A derivative is 0 where it does not exist or is not unique (abs, sign and relu at 0; floor, ceil,
comparisons and logic everywhere); on a tie ``min`` and ``max`` pass it to their first operand. So
it is 0 at ``a = 0`` for every function of ``abs(a)``, including the protected operators:
``logabs(a)`` has the derivatives of ``log(abs(a))``. ``slope_notes`` of a row lists its other
conventions; a one-sided or infinite limit, such as that of ``sqrt`` at 0, is none.

In the chain rule, a product of derivatives is 0 where one factor is 0, even if the other factor is
infinite or NaN. So ``where`` passes nothing to the branch that it does not take.

Functions of the kernel language that NumPy has not, or not for all numbers.

`power`, `erf`, `erfc`, `tgamma` and `lgamma` need nothing but NumPy and the standard library: their
text is copied into the functions that `warpfit.Program.code` writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray


def power(a: Any, b: Any) -> Any:
    """Return a to the power of b, also where NumPy has sqrt(a) for b = 0.5: at -inf and -0."""
    is_other = (np.asarray(b) == 0.5) & ((np.asarray(a) == 0.0) | (np.asarray(a) == -np.inf))
    return np.where(is_other, np.abs(a), np.power(a, b))


def erf(a: np.ndarray) -> np.ndarray:
    """Return the error function in float64."""
    return np.asarray(np.vectorize(math.erf, otypes=[float])(a))


def erfc(a: np.ndarray) -> np.ndarray:
    """Return 1 - erf(a) in float64, without the cancellation."""
    return np.asarray(np.vectorize(math.erfc, otypes=[float])(a))


def tgamma(a: np.ndarray) -> np.ndarray:
    """Return the gamma function in float64, at its poles as C: ±inf at ±0, else NaN."""

    def one(x: float) -> float:
        try:
            return math.gamma(x)
        except (OverflowError, ValueError):
            return math.copysign(math.inf, x) if x > -1.0 else math.nan

    return np.asarray(np.vectorize(one, otypes=[float])(a))


def lgamma(a: np.ndarray) -> np.ndarray:
    """Return log |gamma(a)| in float64; next to 1 and 2 with an absolute error of 1e-15."""

    def one(x: float) -> float:
        try:
            return math.lgamma(x)
        except (OverflowError, ValueError):
            return math.inf

    return np.asarray(np.vectorize(one, otypes=[float])(a))


#: Coefficients of 1 / z^2, 1 / z^4, ... in log(z) - 1 / (2 z) - digamma(z).
SERIES = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)


def digamma(
    a: Any,
    select: Callable[..., Any] = np.where,
    floor: Callable[..., Any] = np.floor,
    log: Callable[..., Any] = np.log,
    tan: Callable[..., Any] = np.tan,
) -> Any:
    """Return the derivative of `lgamma`: ∓inf at ±0, and 0 at its other poles.

    Reflection where a < 1/2, recurrence to z >= 8.5, and there the asymptotic series (Abramowitz
    and Stegun 1964, 6.3.7, 6.3.6 and 6.3.18). Other arguments than NumPy arrays bring their own
    functions.
    """
    is_reflected = a < 0.5
    x = select(is_reflected, 1.0 - a, a)
    z = x + 8.0
    inverse_square = 1.0 / (z * z)
    series = SERIES[-1] * inverse_square
    for coefficient in SERIES[-2::-1]:
        series = (series + coefficient) * inverse_square
    steps = 1.0 / x
    for k in range(1, 8):
        steps = steps + 1.0 / (x + float(k))
    result = log(z) - 0.5 / z - series - steps
    fraction = a - floor(a + 0.5)
    reflected = result - math.pi / tan(math.pi * fraction)
    is_pole = (a < 0.0) & (floor(a) == a)
    return select(is_pole, 0.0, select(is_reflected, reflected, result))


Array = NDArray[Any]

#: Token codes below the first operator. Code 0 is never valid.
VARIABLE: Final = 1
PARAMETER: Final = 2
CONSTANT: Final = 3
FIRST_OPERATOR: Final = 16

#: Functions that a ``kernel`` or ``derivative`` may call, beside ``select``.
KERNEL_FUNCTIONS: Final = frozenset(
    {
        *("abs", "sqrt", "cbrt", "exp", "expm1", "log", "log1p", "log2", "log10", "pow", "hypot"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "erf"),
        *("floor", "ceil", "rint", "mod", "erfc", "tgamma", "lgamma", "digamma"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One row of the operator table."""

    code: int
    """Wire code, 16 to 255; it never changes."""
    name: str
    """Name of the function in the text language, and key of the row."""
    arity: int
    """Number of operands, 1 to 3."""
    numpy: Callable[..., Array]
    """Definition on float64 arrays, against which every engine is tested."""
    kernel: str
    """Definition in the kernel language."""
    derivative: tuple[str, ...]
    """Partial derivative by each operand, in the kernel language with ``r`` as the result."""
    latex: str
    """LaTeX with ``{a}``, ``{b}``, ``{c}`` for the operands. ``{a:51}`` gets parentheses unless the
    operand's own LaTeX has at least precedence 51; a plain ``{a}`` never gets any."""
    latex_precedence: int | None = None
    """Precedence of the LaTeX form; None for ``precedence``."""
    symbol: str | None = None
    """Infix or prefix symbol; None prints as a function call."""
    precedence: int = 100
    """Precedence of the infix or prefix form; 100 for a call."""
    cpu: str | None = None
    """Kernel of the CPU engine, where ``kernel`` would lose digits; None for ``kernel``."""
    cuda: str | None = None
    """CUDA C++ for float32 and float64; None for ``kernel``."""
    cuda_fast: str | None = None
    """CUDA C++ for float32 in fast mode (approximate, subnormals may flush to zero)."""
    cuda_fast_compiled: str | None = None
    """``cuda_fast`` for compiled kernels, which move work that no row changes out of the loop."""
    sympy: str | None = None
    """Python expression over ``a``, ``b``, ``c`` and the names of the sympy module."""
    notes: str = ""
    """Domain, and result outside it."""
    slope_notes: str = ""
    """Conventions of the derivatives."""

    @property
    def operands(self) -> str:
        """Names of the operands: ``"a"``, ``"ab"`` or ``"abc"``."""
        return "abc"[: self.arity]

    @property
    def cuda_precise(self) -> str:
        """CUDA C++ expression for precise mode."""
        return self.cuda or self.kernel

    @property
    def cuda_approximate(self) -> str:
        """CUDA C++ expression for fast mode."""
        return self.cuda_fast or self.cuda_precise


def _logical(function: np.ufunc) -> Callable[..., Array]:
    """Return a function of NumPy with the results 1.0 and 0.0 instead of True and False."""
    return lambda *operands: np.asarray(function(*operands), dtype=np.float64)


def _comparison(
    code: int, name: str, symbol: str, function: np.ufunc, latex: str, sympy: str, notes: str = ""
) -> Operator:
    return Operator(
        code=code, name=name, arity=2, symbol=symbol, precedence=40, numpy=_logical(function),
        kernel=f"select(a {symbol} b, 1, 0)", derivative=("0", "0"),
        latex=rf"\left[{{a:41}} {latex} {{b:41}}\right]", latex_precedence=100,
        sympy=f"Piecewise((1, {sympy}), (0, True))", notes=notes,
    )  # fmt: skip


def _function(
    code: int, name: str, numpy: Callable[..., Array], *derivative: str, **fields: Any
) -> Operator:
    """Return a row that is called by its name everywhere, as far as ``fields`` say nothing else."""
    call = f"{name}({', '.join('abc'[: len(derivative)])})"
    usual = {"kernel": call, "sympy": call, "latex": rf"\{name}\left({{a}}\right)"}
    same = {"code": code, "name": name, "numpy": numpy, "derivative": derivative}
    return Operator(arity=len(derivative), **same, **(usual | fields))  # type: ignore[arg-type]


_TOTAL: Final = "(1 + exp(-abs(a)))"
_QUOTIENT: Final = f"(select(a < 0, exp(-abs(a)), 1) / {_TOTAL})"
#: A kernel that takes off the quotient what rounding 1 + exp(-|a|) puts into it: of 2.5 units in
#: the last place 1.5 are left.
_EXACT_LOGISTIC: Final = (
    f"{_QUOTIENT} - {_QUOTIENT} * (exp(-abs(a)) - ({_TOTAL} - 1)) * "
    f"select(a < 0, 1 - {_QUOTIENT}, {_QUOTIENT})"
)
_CIRCULAR: Final = "radians; NaN at ±inf"
_ROWS: Final = (
    # Arithmetic
    Operator(
        code=16, name="add", arity=2, symbol="+", precedence=50, numpy=np.add,
        kernel="a + b", derivative=("1", "1"), latex="{a:50} + {b:51}", sympy="a + b",
    ),
    Operator(
        code=17, name="sub", arity=2, symbol="-", precedence=50, numpy=np.subtract,
        kernel="a - b", derivative=("1", "-1"), latex="{a:50} - {b:51}", sympy="a - b",
    ),
    Operator(
        code=18, name="mul", arity=2, symbol="*", precedence=60, numpy=np.multiply,
        kernel="a * b", derivative=("b", "a"), latex=r"{a:60} \cdot {b:61}", sympy="a * b",
    ),
    Operator(
        code=19, name="div", arity=2, symbol="/", precedence=60, numpy=np.divide,
        kernel="a / b", derivative=("1 / b", "-r / b"), latex=r"\frac{{{a}}}{{{b}}}",
        latex_precedence=90, cuda="quotient(a, b)", cuda_fast="__fdividef(a, b)", sympy="a / b",
        notes="x/0 is ±inf, 0/0 is NaN",
    ),
    Operator(
        code=20, name="pow", arity=2, symbol="^", precedence=80, numpy=power,
        kernel="pow(a, b)",
        derivative=(
            "select(b == 0, 0, select(a == 0, "
            "select(b == 1, 1, select(b > 1, 0, b / abs(a))), b * r / a))",
            "select(a == 0, 0, r * log(a))",
        ),
        latex="{{{a:91}}}^{{{b}}}", cuda_fast="fast_pow(a, b)",
        cuda_fast_compiled="pow_by_masks(a, b)", sympy="a ** b",
        notes="NaN for finite a < 0 unless b is an integer; right-associative; `**` is the same",
        slope_notes="at a = 0 by a: 1 for b = 1, 0 for b = 0 and b > 1, else inf times b; "
        "by b: 0 at a = 0, NaN for a < 0",
    ),
    Operator(
        code=21, name="neg", arity=1, symbol="-", precedence=70, numpy=np.negative,
        kernel="-a", derivative=("-1",), latex="-{a:60}", latex_precedence=51, sympy="-a",
    ),
    _function(
        22, "abs", np.abs, "select(a > 0, 1, select(a < 0, -1, 0))", latex=r"\left|{a}\right|",
        sympy="Abs(a)", slope_notes="0 at 0",
    ),
    # Exponentials, logarithms, roots and powers
    _function(
        23, "log", np.log, "1 / a", latex=r"\ln\left({a}\right)", cuda_fast="__logf(a)",
        notes="natural; NaN for a < 0, -inf at 0",
    ),
    _function(
        24, "exp", np.exp, "r", latex="e^{{{a}}}", latex_precedence=80, cuda_fast="__expf(a)"
    ),
    _function(
        25, "sqrt", np.sqrt, "0.5 / r", latex=r"\sqrt{{{a}}}", cuda_fast="fast_sqrt(a)",
        notes="NaN for a < 0",
    ),
    Operator(
        code=26, name="inv", arity=1, numpy=np.reciprocal, kernel="1 / a",
        derivative=("-r * r",), latex=r"\frac{{1}}{{{a}}}", latex_precedence=90,
        cuda="quotient(1, a)", cuda_fast="__fdividef(1.0f, a)", sympy="1 / a", notes="±inf at ±0",
    ),
    Operator(
        code=27, name="square", arity=1, numpy=np.square, kernel="a * a",
        derivative=("2 * a",), latex="{{{a:91}}}^2", latex_precedence=80, sympy="a ** 2",
    ),
    Operator(
        code=28, name="cube", arity=1, numpy=lambda a: a * a * a, kernel="a * a * a",
        derivative=("3 * a * a",), latex="{{{a:91}}}^3", latex_precedence=80, sympy="a ** 3",
    ),
    _function(
        29, "cbrt", np.cbrt, "1 / (3 * r * r)", latex=r"\sqrt[3]{{{a}}}",
        sympy="sign(a) * Abs(a) ** Rational(1, 3)", notes="real root, also for a < 0",
    ),
    # Selection
    Operator(
        code=30, name="min", arity=2, numpy=np.minimum,
        kernel="select(a < b, a, select(a != a, a, b))",
        derivative=("select(a <= b, 1, 0)", "select(a <= b, 0, 1)"),
        latex=r"\min\left({a}, {b}\right)", sympy="Min(a, b)", notes="NaN if either is NaN",
        slope_notes="a tie passes to a",
    ),
    Operator(
        code=31, name="max", arity=2, numpy=np.maximum,
        kernel="select(a > b, a, select(a != a, a, b))",
        derivative=("select(a >= b, 1, 0)", "select(a >= b, 0, 1)"),
        latex=r"\max\left({a}, {b}\right)", sympy="Max(a, b)", notes="NaN if either is NaN",
        slope_notes="a tie passes to a",
    ),
    # Trigonometric and hyperbolic
    _function(32, "sin", np.sin, "cos(a)", cuda_fast="__sinf(a)", notes=_CIRCULAR),
    _function(33, "cos", np.cos, "-sin(a)", cuda_fast="__cosf(a)", notes=_CIRCULAR),
    _function(34, "tan", np.tan, "1 + r * r", cuda_fast="__tanf(a)", notes=_CIRCULAR),
    _function(
        35, "asin", np.arcsin, "1 / sqrt((1 - a) * (1 + a))", latex=r"\arcsin\left({a}\right)",
        notes="NaN for |a| > 1",
    ),
    _function(
        36, "acos", np.arccos, "-1 / sqrt((1 - a) * (1 + a))", latex=r"\arccos\left({a}\right)",
        notes="NaN for |a| > 1",
    ),
    _function(37, "atan", np.arctan, "1 / (1 + a * a)", latex=r"\arctan\left({a}\right)"),
    _function(
        38, "atan2", np.arctan2,
        "select(abs(b) >= abs(a), select(b == 0, 0, 1 / (b * (1 + (a / b) * (a / b)))), "
        "(b / a) / (a * (1 + (b / a) * (b / a))))",
        "select(abs(a) >= abs(b), select(a == 0, 0, -1 / (a * (1 + (b / a) * (b / a)))), "
        "-(a / b) / (b * (1 + (a / b) * (a / b))))",
        latex=r"\operatorname{{atan2}}\left({a}, {b}\right)", notes="angle of the point (b, a)",
        slope_notes="0 at a = b = 0",
    ),
    _function(39, "sinh", np.sinh, "cosh(a)"),
    _function(40, "cosh", np.cosh, "sinh(a)"),
    _function(
        41, "tanh", np.tanh,
        "4 * exp(-2 * abs(a)) / ((1 + exp(-2 * abs(a))) * (1 + exp(-2 * abs(a))))",
        cuda_fast="fast_tanh(a)",
    ),
    _function(
        42, "log1p", np.log1p, "1 / (1 + a)", latex=r"\ln\left(1 + {a:52}\right)",
        sympy="log(1 + a)", notes="NaN for a < -1",
    ),
    _function(
        43, "expm1", np.expm1, "exp(a)", latex="e^{{{a}}} - 1", latex_precedence=50,
        sympy="exp(a) - 1",
    ),
    _function(
        44, "log2", np.log2, "1.4426950408889634 / a", latex=r"\log_2\left({a}\right)",
        cuda_fast="__log2f(a)", sympy="log(a, 2)", notes="NaN for a < 0, -inf at 0",
    ),
    _function(
        45, "log10", np.log10, "0.4342944819032518 / a", latex=r"\log_{{10}}\left({a}\right)",
        cuda_fast="__log10f(a)", sympy="log(a, 10)", notes="NaN for a < 0, -inf at 0",
    ),
    # Steps
    _function(46, "floor", np.floor, "0", latex=r"\left\lfloor {a} \right\rfloor"),
    _function(
        47, "ceil", np.ceil, "0", latex=r"\left\lceil {a} \right\rceil", sympy="ceiling(a)"
    ),
    Operator(
        code=48, name="sign", arity=1, numpy=np.sign,
        kernel="select(a > 0, 1, select(a < 0, -1, select(a == 0, 0, a)))", derivative=("0",),
        latex=r"\operatorname{{sgn}}\left({a}\right)", sympy="sign(a)",
    ),
    # Comparisons and logic: 1.0 or 0.0; any value but 0 is true, NaN too
    _comparison(49, "lt", "<", np.less, "<", "a < b"),
    _comparison(50, "le", "<=", np.less_equal, r"\le", "a <= b"),
    _comparison(51, "gt", ">", np.greater, ">", "a > b"),
    _comparison(52, "ge", ">=", np.greater_equal, r"\ge", "a >= b"),
    _comparison(53, "eq", "==", np.equal, "=", "Eq(a, b)"),
    _comparison(54, "ne", "!=", np.not_equal, r"\ne", "Ne(a, b)", "1 if either is NaN"),
    Operator(
        code=55, name="and", arity=2, symbol="and", precedence=20,
        numpy=_logical(np.logical_and),
        kernel="select(a != 0, select(b != 0, 1, 0), 0)", derivative=("0", "0"),
        latex=r"{a:20} \wedge {b:21}", sympy="Piecewise((1, And(Ne(a, 0), Ne(b, 0))), (0, True))",
    ),
    Operator(
        code=56, name="or", arity=2, symbol="or", precedence=10,
        numpy=_logical(np.logical_or),
        kernel="select(a != 0, 1, select(b != 0, 1, 0))", derivative=("0", "0"),
        latex=r"{a:10} \vee {b:11}", sympy="Piecewise((1, Or(Ne(a, 0), Ne(b, 0))), (0, True))",
    ),
    Operator(
        code=57, name="not", arity=1, symbol="not", precedence=30,
        numpy=_logical(np.logical_not), kernel="select(a != 0, 0, 1)",
        derivative=("0",), latex=r"\neg {a:61}", sympy="Piecewise((1, Eq(a, 0)), (0, True))",
    ),
    Operator(
        code=58, name="where", arity=3, numpy=lambda a, b, c: np.asarray(np.where(a != 0, b, c)),
        kernel="select(a != 0, b, c)",
        derivative=("0", "select(a != 0, 1, 0)", "select(a != 0, 0, 1)"),
        latex=r"\begin{{cases}} {b} & {a:41} \ne 0 \\ {c} & \text{{otherwise}} \end{{cases}}",
        latex_precedence=40,
        sympy="Piecewise((b, Ne(a, 0)), (c, True))", notes="b where a is not 0, else c",
        slope_notes="of the branch taken; 0 for the condition",
    ),
    Operator(
        code=59, name="fma", arity=3, numpy=lambda a, b, c: a * b + c, kernel="a * b + c",
        derivative=("b", "a", "1"), latex=r"{a:60} \cdot {b:61} + {c:52}", latex_precedence=50,
        sympy="a * b + c", cuda="product_sum(a, b, c)", cuda_fast="__fmaf_rn(a, b, c)",
        notes="NumPy's float64 a * b + c: the product is exact in float32, rounded in float64",
    ),
    # Protected forms of genetic-programming libraries
    Operator(
        code=60, name="aq", arity=2, numpy=lambda a, b: a / np.hypot(1.0, b),
        kernel="a / hypot(1, b)", cuda="a / select(abs(b) > 1e9, abs(b), sqrt(1 + b * b))",
        cuda_fast="a * rsqrtf(1.0f + b * b)",
        derivative=(
            "1 / select(abs(b) > 1e9, abs(b), sqrt(1 + b * b))", "-r * b / (1 + b * b)",
        ),
        latex=r"\frac{{{a}}}{{\sqrt{{1 + {{{b:91}}}^2}}}}", latex_precedence=90,
        sympy="a / sqrt(1 + b ** 2)", notes="analytic quotient a / sqrt(1 + b^2) (Ni et al. 2013)",
    ),
    Operator(
        code=61, name="logabs", arity=1, numpy=lambda a: np.log(np.abs(a)),
        kernel="log(abs(a))", cuda_fast="__logf(abs(a))",
        derivative=("select(a == 0, 0, 1 / a)",),
        latex=r"\ln\left|{a}\right|", sympy="log(Abs(a))", notes="-inf at 0",
        slope_notes="0 at 0",
    ),
    Operator(
        code=62, name="sqrtabs", arity=1, numpy=lambda a: np.sqrt(np.abs(a)),
        kernel="sqrt(abs(a))", cuda_fast="fast_sqrt(abs(a))",
        derivative=("select(a > 0, 0.5 / r, select(a < 0, -0.5 / r, 0))",),
        latex=r"\sqrt{{\left|{a}\right|}}", sympy="sqrt(Abs(a))",
        slope_notes="0 at 0",
    ),
    Operator(
        code=63, name="powabs", arity=2, numpy=lambda a, b: np.power(np.abs(a), b),
        kernel="pow(abs(a), b)", cuda_fast="fast_pow_positive(abs(a), b)",
        derivative=(
            "select(b == 0, 0, select(a == 0, 0, b * r / a))",
            "select(a == 0, 0, r * log(abs(a)))",
        ),
        latex=r"{{\left|{a}\right|}}^{{{b}}}", latex_precedence=80, sympy="Abs(a) ** b",
        slope_notes="by both: 0 at a = 0",
    ),
    # Statistics and learning
    Operator(
        code=64, name="logistic", arity=1,
        numpy=lambda a: np.where(a < 0, (small := np.exp(-np.abs(a))), 1.0) / (1.0 + small),
        kernel="select(a < 0, exp(-abs(a)), 1) / (1 + exp(-abs(a)))",
        cpu=_EXACT_LOGISTIC,
        cuda_fast="__fdividef(1.0f, 1.0f + __expf(-a))",
        derivative=("exp(-abs(a)) / ((1 + exp(-abs(a))) * (1 + exp(-abs(a))))",),
        latex=r"\sigma\left({a}\right)", sympy="1 / (1 + exp(-a))",
        notes="1 / (1 + exp(-a)), without overflow",
    ),
    _function(
        65, "erf", erf, "1.1283791670955126 * exp(-a * a)",
        latex=r"\operatorname{{erf}}\left({a}\right)",
    ),
    Operator(
        code=66, name="relu", arity=1, numpy=lambda a: np.maximum(a, 0.0),
        kernel="select(a <= 0, 0, a)", derivative=("select(a > 0, 1, 0)",),
        latex=r"\max\left(0, {a}\right)", sympy="Max(0, a)",
        slope_notes="0 at 0",
    ),
    # Protected forms with a threshold; the threshold is rounded to the data's type
    Operator(
        code=67, name="pdiv", arity=2,
        numpy=lambda a, b: np.where(np.abs(b) > 0.001, a / b, 1.0),
        kernel="select(abs(b) > 0.001, a / b, 1)",
        derivative=("select(abs(b) > 0.001, 1 / b, 0)", "select(abs(b) > 0.001, -r / b, 0)"),
        latex=r"\operatorname{{pdiv}}\left({a}, {b}\right)",
        sympy="Piecewise((a / b, Abs(b) > 0.001), (1, True))",
        notes="gplearn's div: 1 where |b| <= 0.001",
        slope_notes="0 up to the threshold",
    ),
    Operator(
        code=68, name="plog", arity=1,
        numpy=lambda a: np.where(np.abs(a) > 0.001, np.log(np.abs(a)), 0.0),
        kernel="select(abs(a) > 0.001, log(abs(a)), 0)",
        derivative=("select(abs(a) > 0.001, 1 / a, 0)",),
        latex=r"\operatorname{{plog}}\left({a}\right)",
        sympy="Piecewise((log(Abs(a)), Abs(a) > 0.001), (0, True))",
        notes="gplearn's log: log|a|, 0 where |a| <= 0.001",
        slope_notes="0 up to the threshold",
    ),
    Operator(
        code=69, name="pinv", arity=1,
        numpy=lambda a: np.where(np.abs(a) > 0.001, 1.0 / a, 0.0),
        kernel="select(abs(a) > 0.001, 1 / a, 0)",
        derivative=("-r * r",), latex=r"\operatorname{{pinv}}\left({a}\right)",
        sympy="Piecewise((1 / a, Abs(a) > 0.001), (0, True))",
        notes="gplearn's inv: 1/a, 0 where |a| <= 0.001",
        slope_notes="0 up to the threshold",
    ),
    Operator(
        code=70, name="zdiv", arity=2,
        numpy=lambda a, b: np.where(b != 0, a / b, 1.0),
        kernel="select(b != 0, a / b, 1)",
        derivative=("select(b != 0, 1 / b, 0)", "select(b != 0, -r / b, 0)"),
        latex=r"\operatorname{{zdiv}}\left({a}, {b}\right)",
        sympy="Piecewise((a / b, Ne(b, 0)), (1, True))",
        notes="protectedDiv of the DEAP examples: 1 where b is 0",
        slope_notes="0 at b = 0",
    ),
    # The gamma function
    _function(
        71, "gamma", tgamma, "r * digamma(a)", kernel="tgamma(a)",
        cuda="called_tgamma(a)", latex=r"\Gamma\left({a}\right)",
        notes="±inf at ±0, NaN at -1, -2, ... and -inf",
    ),
    _function(
        72, "lgamma", lgamma, "digamma(a)", cuda="called_lgamma(a)",
        latex=r"\ln\left|\Gamma\left({a}\right)\right|", sympy="log(Abs(gamma(a)))",
        notes="log|gamma(a)|; inf at 0, -1, -2, ...", slope_notes="0 at -1, -2, ...",
    ),
    # Remainder and rounding. ``(r - a) / b`` is the negative of the whole number floor(a / b), but
    # for rounding errors.
    _function(
        73, "mod", np.mod, "1", "rint((r - a) / b)", latex_precedence=45,
        latex=r"{a:61} \bmod {b:61}", sympy="Mod(a, b)",
        notes="exact remainder with b's sign, as numpy.mod; NaN for b = 0 and infinite a",
        slope_notes="at a jump those of the side to which it belongs",
    ),
    _function(
        74, "round", np.rint, "0", kernel="rint(a)",
        latex=r"\operatorname{{round}}\left({a}\right)",
        sympy="floor(a + 0.5) - Piecewise((1, Eq(Mod(a, 2), 0.5)), (0, True))",
        notes="to the nearest whole number; halves to the even one",
    ),
    _function(
        75, "erfc", erfc, "-1.1283791670955126 * exp(-a * a)", cuda="called_erfc(a)",
        latex=r"\operatorname{{erfc}}\left({a}\right)", notes="1 - erf(a), without cancellation",
    ),
)  # fmt: skip


#: All operators by name, in the order of their codes.
OPERATORS: Final[Mapping[str, Operator]] = MappingProxyType({row.name: row for row in _ROWS})
#: All operators by wire code.
BY_CODE: Final[Mapping[int, Operator]] = MappingProxyType({op.code: op for op in _ROWS})


#: Arity for each token code, shape [256], int8; leaves have 0, invalid codes have -1.
ARITIES: Final = np.full(256, -1, dtype=np.int8)
ARITIES[[VARIABLE, PARAMETER, CONSTANT]] = 0
ARITIES[[row.code for row in _ROWS]] = [row.arity for row in _ROWS]
ARITIES.setflags(write=False)
