"""How operators are written in other languages: a table of templates for each language.

A template is the text of one operator, of one function of the kernel language (`warpfit.ops`), or
of one symbol of it. ``{a}``, ``{b}`` and ``{c}`` are the operands; ``{a:61}`` gets parentheses
unless
it has at least that precedence. What has no template is called by its own name, ``Language.call``
says how. An operator that mentions an operand twice, or selects, is written as a function beside
the
formula, whose name begins with ``formula_``; so is a function that a language has not, in the
language itself (``Language.texts``) or in the kernel language (``Language.helpers``, `HELPERS`).
"""

from __future__ import annotations

import inspect
import keyword
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from warpfit import ops


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Language:
    """Syntax and functions of a language, as templates for `warpfit.formulas.code`."""

    head: str
    """First line of a function, over ``{name}`` and ``{arguments}``."""
    tail: str
    """Last lines of a function, over ``{name}`` and ``{value}``."""
    let: str
    """Statement that gives ``{value}`` a ``{name}``."""
    as_float: str = ""
    """float64 of ``{name}``, where the formula may be given another type of numbers."""
    comment: str
    """A line of comment, over ``{}``."""
    number: Callable[[float], str] = repr
    """A finite number."""
    infinity: str
    nan: str
    call: str = "{name}"
    """How a function of the kernel language is called that has no template, over ``{name}``."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Templates by the name of an operator, or of a function or symbol of the kernel language."""
    missing: frozenset[str] = frozenset()
    """Functions of the kernel language that are written in it, see `HELPERS`."""
    helpers: Mapping[str, str] = field(default_factory=dict)
    """More functions, or better ones, over a, b, c in the kernel language."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Functions in the language itself, by the name after ``formula_``."""
    words: str
    """Names that are no variables: keywords, macros, built-in names."""
    argument: str = "{}"
    """A parameter of a function."""
    no_argument: str = ""
    """All parameters of a function that has none."""
    declared: str = ""
    """Declaration of the parameters of a function, over ``{}``."""
    declared_lets: str = ""
    """Declaration of the names that statements give, over ``{}``."""
    private: str = ""
    """Keywords before the definition of a helper function."""
    public: str = ""
    """Keywords before the definition of the formula's function."""
    first: str = ""
    """First lines of the text."""
    last: str = ""
    """Last lines of the text."""
    columns: str = ""
    """Statement that reads the columns of a table X, over ``{columns}`` (a dict of names to
    indices,
    or indices), ``{indices}`` and ``{names}``; empty where each variable is an argument."""
    vector: str = ""
    """Statement that reads the vector p of parameters; empty where each of them is an argument."""
    rows: str = "{value}"
    """The result of a formula without variables, for each row of X."""
    operand: str = "{}"
    """A number as operand of a function."""
    line: int = 10_000
    """Longest line, beyond which ``continuation`` breaks it."""
    continuation: str = ""
    folds_case: bool = False
    """Whether names that differ in case alone are the same."""
    formula_first: bool = False
    """Whether the formula stands before the functions that it calls."""

    def folded(self, name: str) -> str:
        """Return a name so that equal ones mean the same."""
        return name.lower() if self.folds_case else name


# Functions over a, b, c that some languages have not
# ---------------------------------------------------

#: (1 + 2 a) exp(a^2) erfc(a) for a >= 0 as a polynomial of (a - 4) / (a + 4), from 60 digits of
#: mpmath by interpolation at Chebyshev points; the idea is Shepherd's and Laframboise's
#: (Mathematics
#: of Computation 36, 1981, 249). Its error is 7e-16 of the value.
_ERFC: Final = (
    *(1.2329951186255526, -0.1396211168405625, 0.015379652102619604, 0.0680970542546904),
    *(-0.10103906603630056, 0.09373283499843826, -0.06633036581218697, 0.03716751553592911),
    *(-0.016197734059799265, 0.005031969992669933, -0.0007577732613730956, -0.0001992567757633648),
    *(0.0001506214900124047, -2.4398944545280832e-05, -1.1221287012353486e-05),
    *(5.709206053072183e-06, 2.919733377963012e-07, -8.249198427508354e-07, 7.746992727017941e-08),
    *(1.1009737295274889e-07, -2.05606492756992e-08, -1.4709550868669278e-08),
    *(3.1695881915648173e-09, 1.7903326159489847e-09, -2.659599690242689e-10),
    -1.374652989001164e-10,
)
#: Terms of erf(a) / a by a^2, for |a| < 1/2.
_ERF: Final = tuple(
    2 / math.sqrt(math.pi) * (-1) ** k / (math.factorial(k) * (2 * k + 1)) for k in range(12)
)
#: Coefficients of 1/z, 1/z^3, ... in Stirling's series of log gamma(z) (Abramowitz and Stegun 1964,
#: 6.1.41); above 8.5 its error is 1e-16.
_STIRLING: Final = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)

#: Coefficients of a, a^2, ... in log(gamma(2 + a)): 1 minus Euler's constant, then
#: (-1)^k (zeta(k) - 1) / k (Abramowitz and Stegun 1964, 6.1.33). For |a| <= 1/2 the rest is 1e-18.
_LGAMMA: Final = (
    *(0.42278433509846713, 0.3224670334241132, -0.0673523010531981, 0.020580808427784546),
    *(-0.007385551028673986, 0.0028905103307415234, -0.001192753911703261, 0.0005096695247430425),
    *(
        -0.00022315475845357939,
        9.945751278180853e-05,
        -4.492623673813314e-05,
        2.050721277567069e-05,
    ),
    *(-9.439488275268397e-06, 4.374866789907488e-06, -2.039215753801366e-06, 9.55141213040742e-07),
    *(
        -4.492469198764566e-07,
        2.1207184805554665e-07,
        -1.0043224823968099e-07,
        4.7698101693639804e-08,
    ),
    *(
        -2.2711094608943164e-08,
        1.0838659214896955e-08,
        -5.183475041970047e-09,
        2.4836745438024785e-09,
    ),
    *(-1.1921401405860912e-09, 5.731367241678862e-10, -2.7595228851242334e-10),
)


def _polynomial(coefficients: tuple[float, ...], name: str) -> str:
    text = repr(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        text = f"({text}) * {name} + {coefficient!r}"
    return text


_WHOLE: Final = repr(2.0**52)
#: Functions that languages may lack, in the kernel language; ``power`` is a power of a number that
#: is not negative, ``fmod`` the remainder of C.
HELPERS: Final[Mapping[str, str]] = {
    "mod": "to_sign_of(fmod(a, b), b)",
    "to_sign_of": "select(a < 0, select(b > 0, a + b, a), select(a > 0, select(b < 0, a + b, a), "
    "select(a == 0, select(b < 0, -0, 0), a)))",
    # Adding 2^52 rounds to a whole number, halves to the even one.
    "rint": f"select(a == 0, a, select(abs(a) < {_WHOLE}, select(a < 0, "
    f"-({_WHOLE} - a - {_WHOLE}), a + {_WHOLE} - {_WHOLE}), a))",
    "cbrt": "select(a == 0, a, select(abs(a) < inf, refined_cbrt("
    "select(a < 0, -power(abs(a), 0.3333333333333333), power(abs(a), 0.3333333333333333)), a), a))",
    "refined_cbrt": "a - (a - b / (a * a)) / 3",
    "pow": "with_sign(power(abs(a), b), a, b)",
    # Of a negative b, whose power is a: its sign, or NaN where the exponent c is no whole number.
    "with_sign": "select(negative(b) != 0, select(abs(c) < inf, select(floor(c) == c, "
    "select(floor(c * 0.5) == c * 0.5, a, -a), select(abs(b) < inf, select(b == 0, a, nan), a)), "
    "select(c != c, c, a)), a)",
    "negative": "select(a == 0, select(1 / a < 0, 1, 0), select(a < 0, 1, 0))",
    "erf": "select(abs(a) < 0.5, erf_near_zero(a * a) * a, "
    "select(a < 0, erfc(-a) - 1, 1 - erfc(a)))",
    "erf_near_zero": _polynomial(_ERF, "a"),
    "erfc": "select(a < 0, 2 - erfc_tail(-a), erfc_tail(a))",
    "erfc_tail": "select(a > 28, 0, exp_minus_square(a, floor(a * 16 + 0.5) * 0.0625) "
    "* erfc_series((a - 4) / (a + 4)) / (1 + 2 * a))",
    "exp_minus_square": "exp(-(b * b)) * exp((b - a) * (a + b))",
    "erfc_series": _polynomial(_ERFC, "a"),
    # Below -170 the reflected value is infinite before the result is 0.
    "tgamma": "select(a == 0, 1 / a, select(a < 0.5, select(floor(a) == a, nan, "
    "select(a < -170, gamma_left(a + 8) / rising(a), gamma_left(a))), "
    "select(a < 23, select(floor(a) == a, floor(gamma_right(a) + 0.5), gamma_right(a)), "
    "gamma_right(a))))",
    "gamma_left": "3.141592653589793 / (sinpi(a) * gamma_right(1 - a))",
    "gamma_right": "select(a > 171.7, inf, "
    "select(a < 9, gamma_stirling(a + 8) / rising(a), gamma_stirling(a)))",
    "gamma_stirling": "2.5066282746310007 * power(a, 0.5 * a - 0.25) * exp(-a) "
    "* power(a, 0.5 * a - 0.25) * exp(stirling(1 / a))",
    "rising": "a * (a + 1) * (a + 2) * (a + 3) * (a + 4) * (a + 5) * (a + 6) * (a + 7)",
    "stirling": f"a * ({_polynomial(_STIRLING, '(a * a)')})",
    "sinpi": "select(floor(0.5 * floor(a + 0.5)) == 0.5 * floor(a + 0.5), "
    "sin(3.141592653589793 * (a - floor(a + 0.5))), "
    "-sin(3.141592653589793 * (a - floor(a + 0.5))))",
    # Next to the zeros at 1 and 2 most libraries have only an absolute accuracy.
    "lgamma": "lgamma_by_place(a, select(abs(a - 1.5) <= 1, a, 1.5))",
    "lgamma_by_place": "select(a == b, select(b < 1.5, lgamma_near_two(b - 1) - log(b), "
    "lgamma_near_two(b - 2)), lgamma_elsewhere(a))",
    "lgamma_near_two": f"({_polynomial(_LGAMMA, 'a')}) * a",
    "lgamma_elsewhere": "select(a < 0.5, select(abs(a) < 1e-30, -log(abs(a)), "
    "select(floor(a) == a, inf, 1.1447298858494002 - log(abs(sinpi(a))) "
    "- lgamma_right(1 - a))), lgamma_right(a))",
    "lgamma_right": "select(a < 9, lgamma_stirling(a + 8) - log(rising(a)), lgamma_stirling(a))",
    "lgamma_stirling": "(a - 0.5) * (log(a) - 1) + 0.4189385332046727 + stirling(1 / a)",
}


def _fortran_number(value: float) -> str:
    digits, _, exponent = repr(value).partition("e")
    return f"{digits}d{int(exponent or 0)}"


# Languages of the family of C
# ----------------------------

#: Types in the names of glibc's constants, which C++ always sees and C with _GNU_SOURCE.
_GNU_TYPES: Final = ("", "l", "f", "f32", "f32x", "f64", "f64x", "f128")
_GNU_CONSTANTS: Final = """
M_E M_LOG2E M_LOG10E M_LN2 M_LN10 M_PI M_PI_2 M_PI_4 M_1_PI M_2_PI M_2_SQRTPI M_SQRT2 M_SQRT1_2
"""
_C_WORDS: Final = f"""
auto break case char const continue default do double else enum extern float for goto if inline int
long register restrict return short signed sizeof static struct switch typedef union unsigned void
volatile while _Alignas asm typeof true false bool alignas alignof constexpr nullptr static_assert
thread_local typeof_unqual NULL EOF INFINITY NAN HUGE_VAL HUGE_VALF HUGE_VALL HUGE MAXFLOAT FP_NAN
FP_INFINITE FP_ZERO FP_SUBNORMAL FP_NORMAL FP_ILOGB0 FP_ILOGBNAN FP_LLOGB0 FP_LLOGBNAN FP_INT_UPWARD
FP_INT_DOWNWARD FP_INT_TOWARDZERO FP_INT_TONEAREST FP_INT_TONEARESTFROMZERO DOMAIN SING OVERFLOW
UNDERFLOW PLOSS TLOSS MATH_ERRNO MATH_ERREXCEPT math_errhandling errno linux unix i386 isnan isinf
isfinite isnormal signbit fpclassify isgreater isgreaterequal isless islessequal islessgreater
isunordered complex I min max near far huge main signgam stdin stdout stderr BUFSIZ EXIT_SUCCESS
EXIT_FAILURE RAND_MAX MB_CUR_MAX FD_SETSIZE NFDBITS BYTE_ORDER BIG_ENDIAN LITTLE_ENDIAN PDP_ENDIAN
WNOHANG WUNTRACED WSTOPPED WEXITED WCONTINUED WNOWAIT
{" ".join(name + end for name in _GNU_CONSTANTS.split() for end in _GNU_TYPES)}
{" ".join(f"SNAN{end.upper()} HUGE_VAL_{end.upper()}" for end in _GNU_TYPES)}
"""
_CPP_WORDS: Final = """
alignas alignof and and_eq asm bitand bitor bool catch char8_t char16_t char32_t class compl concept
consteval constexpr constinit const_cast co_await co_return co_yield decltype delete dynamic_cast
explicit export false friend mutable namespace new noexcept not not_eq nullptr operator or or_eq
private protected public reinterpret_cast requires static_assert static_cast template this
thread_local throw true try typeid typename using virtual wchar_t xor xor_eq std
"""
_C: Final = Language(
    head="double {name}({arguments}) {{",
    tail="    return {value};\n}}",
    let="    const double {name} = {value};",
    argument="double {}",
    no_argument="void",
    comment="// {}",
    infinity="INFINITY",
    nan="NAN",
    first="#include <math.h>",
    private="static ",
    templates={"abs": "fabs({a})", "select": "({a:41} ? {b} : {c})"},
    missing=frozenset({"mod"}),
    words=_C_WORDS,
)
_CPP: Final = Language(
    head="double {name}({arguments}) {{",
    tail="    return {value};\n}}",
    let="    const double {name} = {value};",
    argument="double {}",
    comment="// {}",
    infinity="std::numeric_limits<double>::infinity()",
    nan="std::numeric_limits<double>::quiet_NaN()",
    first="#include <cmath>\n#include <limits>",
    private="static inline ",
    call="std::{name}",
    templates={"select": "({a:41} ? {b} : {c})"},
    missing=frozenset({"mod"}),
    words=_C_WORDS + _CPP_WORDS,
)
_CUDA: Final = Language(
    head="double {name}({arguments}) {{",
    tail="    return {value};\n}}",
    let="    const double {name} = {value};",
    argument="double {}",
    comment="// {}",
    infinity="(1.0 / 0.0)",
    nan="(0.0 / 0.0)",
    private="static __host__ __device__ inline ",
    public="__host__ __device__ inline ",
    templates={"abs": "fabs({a})", "select": "({a:41} ? {b} : {c})"},
    missing=frozenset({"mod"}),
    words=_C_WORDS
    + _CPP_WORDS
    + "threadIdx blockIdx blockDim gridDim warpSize dim3 uint3 double2 double3 double4 clock",
)
_JAVASCRIPT: Final = Language(
    head="function {name}({arguments}) {{",
    tail="  return {value};\n}}",
    let="  const {name} = {value};",
    comment="// {}",
    infinity="Infinity",
    nan="NaN",
    call="Math.{name}",
    templates={
        **{"select": "({a:41} ? {b} : {c})", "fmod": "({a:61} % {b:61})"},
        **{"==": "{a:41} === {b:41}", "!=": "{a:41} !== {b:41}", "power": "Math.pow({a}, {b})"},
    },
    missing=frozenset({"mod", "rint", "erf", "erfc", "tgamma", "lgamma"}),
    # Of 1 to any power, and -1 to an infinite one, JavaScript makes NaN.
    helpers={
        "pow": "select(a == 1, 1, select(a == -1, select(abs(b) == inf, 1, power(a, b)), "
        "power(a, b)))"
    },
    words="""
    abstract arguments as async await boolean break byte case catch char class const continue
    debugger
    default delete do double else enum eval export extends false final finally float for from
    function
    get goto if implements import in Infinity instanceof int interface let long Math module NaN
    native
    new null of package private protected public require return set short static super switch
    synchronized this throw throws transient true try typeof undefined var void volatile while with
    yield
    """,
)
_RUST: Final = Language(
    head="fn {name}({arguments}) -> f64 {{",
    tail="    {value}\n}}",
    let="    let {name} = {value};",
    argument="{}: f64",
    comment="// {}",
    infinity="f64::INFINITY",
    nan="f64::NAN",
    call="f64::{name}",
    private="#[allow(unused_parens)]\n",
    public="#[allow(non_snake_case, unused_parens, clippy::all)]\npub ",
    templates={
        **{"select": "(if {a} {{ {b} }} else {{ {c} }})", "fmod": "({a:61} % {b:61})"},
        **{"log": "f64::ln({a})", "log1p": "f64::ln_1p({a})", "expm1": "f64::exp_m1({a})"},
        **{"pow": "f64::powf({a}, {b})", "power": "f64::powf({a}, {b})"},
    },
    missing=frozenset({"mod", "rint", "erf", "erfc", "tgamma", "lgamma"}),
    words="""
    abstract as async await become box break const continue crate do dyn else enum extern false
    final
    fn for gen if impl in let loop macro match mod move mut override priv pub ref return self Self
    static struct super trait true try type typeof unsafe unsized use virtual where while yield
    union
    None Some Ok Err f64 main std core
    """,
)

# Fortran
# -------

#: Functions of C that elemental functions call, and their operands.
_FROM_C: Final = {"pow": "a, b", "fmod": "a, b"} | dict.fromkeys(
    ("log1p", "expm1", "cbrt", "log2", "rint", "floor", "ceil"), "a"
)


_FORTRAN: Final = Language(
    head="function {name}({arguments})",
    tail="  {name} = {value}\nend function",
    let="  {name} = {value}",
    comment="! {}",
    declared="  double precision, intent(in) :: {}",
    declared_lets="  double precision :: {}",
    number=_fortran_number,
    infinity="ieee_value(1d0, ieee_positive_inf)",
    nan="ieee_value(1d0, ieee_quiet_nan)",
    private="elemental double precision ",
    public="elemental double precision ",
    templates={
        **{"select": "merge({b}, {c}, {a})", "!=": "{a:41} /= {b:41}"},
        **{"tgamma": "gamma({a})", "lgamma": "log_gamma({a})"},
    },
    missing=frozenset({"mod"}),
    texts={
        name: f"elemental double precision function formula_{name}({operands})\n"
        f"  double precision, intent(in) :: {operands}\n  interface\n"
        f"    pure real(c_double) function c_{name}({operands}) bind(c, name='{name}')\n"
        f"      import :: c_double\n      real(c_double), value, intent(in) :: {operands}\n"
        f"    end function\n  end interface\n"
        f"  formula_{name} = c_{name}({operands})\nend function"
        for name, operands in _FROM_C.items()
    },
    first="module formula_module\n  use, intrinsic :: iso_c_binding, only: c_double\n"
    "  use, intrinsic :: ieee_arithmetic, only: ieee_value, ieee_positive_inf, ieee_quiet_nan\n"
    "  implicit none\n  private\n  public :: formula\ncontains",
    last="end module",
    line=120,
    continuation=" &\n    & ",
    folds_case=True,
    words="""
    abs acos asin atan atan2 call case common contains continue cosh cycle data do double dimension
    elemental else elseif end enddo endif entry equivalence erf erfc exit exp external format
    function
    gamma go goto hypot if implicit import inquire integer intent interface intrinsic log log10
    logical
    log_gamma merge module mod modulo none only parameter pause print private program public pure
    read
    real recursive result return rewind save select sign sin sinh sqrt stop subroutine tan tanh then
    type use where while write bind c_double value ieee_value ieee_positive_inf ieee_quiet_nan
    ieee_arithmetic iso_c_binding precision
    """,
)

# Languages of arrays
# -------------------

_R: Final = Language(
    head="{name} <- function({arguments}) {{",
    tail="  {value}\n}}",
    let="  {name} <- {value}",
    # A product keeps the dimensions of an array; integers of R overflow.
    as_float="{name} * 1",
    comment="# {}",
    # R reads long decimals with an error, but not hexadecimal numbers.
    number=lambda value: (
        repr(value) if len(repr(value)) <= 8 and "e" not in repr(value) else value.hex()
    ),
    infinity="Inf",
    nan="NaN",
    templates={
        # A comparison with NaN is NA in R.
        **{
            symbol: f"formula_true({{a:41}} {symbol} {{b:41}})" for symbol in ("<", "<=", ">", ">=")
        },
        **{"==": "formula_true({a:41} == {b:41})", "!=": "!formula_true({a:41} == {b:41})"},
        **{"select": "formula_select({a}, {b}, {c})", "fmod": "formula_fmod({a}, {b})"},
        **{"power": "({a:91}^{b:91})", "square": "{a:91}^2", "rint": "round({a})"},
        **{"ceil": "ceiling({a})", "hypot": "Mod(complex(real = {a}, imaginary = {b}))"},
        **{"lgamma_elsewhere": "suppressWarnings(lgamma({a}))", "max": "pmax({a}, {b})"},
        **{"min": "pmin({a}, {b})", "sign": "sign({a})"},
    },
    # R's own gamma loses four digits next to its overflow, and is 0 where it is subnormal.
    missing=frozenset({"mod", "pow", "cbrt", "erf", "erfc", "tgamma", "lgamma"}),
    texts={
        "true": "formula_true <- function(a) a & !is.na(a)",
        "select": """
formula_select <- function(test, yes, no) {
  rows <- max(length(test), length(yes), length(no))
  ifelse(rep_len(test, rows), rep_len(yes, rows), rep_len(no, rows))
}""",
        "fmod": """
formula_fmod <- function(a, b) {
  rows <- max(length(a), length(b))
  rest <- abs(rep_len(a, rows))
  b <- abs(rep_len(b, rows))
  rest[is.na(b) | is.infinite(rest) | b == 0] <- NaN
  go <- which(rest >= b)
  while (length(go) > 0) {
    k <- floor(log2(rest[go])) - floor(log2(b[go]))
    third <- k %/% 3
    k <- k - (b[go] * 2^third * 2^third * 2^(k - 2 * third) > rest[go])
    third <- k %/% 3
    step <- b[go] * 2^third * 2^third * 2^(k - 2 * third)
    rest[go] <- rest[go] - step
    go <- go[rest[go] >= b[go]]
  }
  ifelse(rep_len(a, rows) < 0, -rest, rest)
}""",
    },
    words="""
    if else repeat while function for next break TRUE FALSE NULL Inf NaN NA NA_integer_ NA_real_
    NA_complex_ NA_character_ in T F c pi
    """,
)
_OCTAVE: Final = Language(
    head="function formula_value = {name}({arguments})",
    tail="  formula_value = {value};\nend",
    let="  {name} = {value};",
    as_float="double({name})",
    comment="% {}",
    infinity="Inf",
    nan="NaN",
    templates={
        **{"*": "{a:60} .* {b:61}", "/": "{a:60} ./ {b:61}", "power": "({a:91} .^ {b:91})"},
        **{"select": "formula_select({a}, {b}, {c})", "fmod": "formula_fmod({a}, {b})"},
        "square": "{a:91} .^ 2",
        **{f: f"formula_real({f}({{a}}))" for f in ("sqrt", "log", "log1p", "log2", "log10")},
        **{f: f"formula_real({f}({{a}}))" for f in ("asin", "acos")},
        "lgamma": "real(gammaln({a}))",
    },
    missing=frozenset({"mod", "pow", "rint"}),
    helpers={
        "tgamma": "select(a == 0, 1 / a, select(floor(a) == a, select(a < 0, nan, "
        "gamma_of_octave(a)), gamma_of_octave(a)))"
    },
    texts={
        "real": """
function value = formula_real(value)
  value(imag(value) != 0) = NaN;
  value = real(value);
end""",
        "select": """
function value = formula_select(test, yes, no)
  [~, test, yes, value] = common_size(test, yes, no);
  value(test) = yes(test);
end""",
        "fmod": """
function rest = formula_fmod(a, b)
  [~, a, b] = common_size(a, b);
  rest = abs(a);
  b = abs(b);
  rest(isnan(b) | isinf(rest) | b == 0) = NaN;
  go = find(rest >= b);
  while (! isempty(go))
    k = floor(log2(rest(go))) - floor(log2(b(go)));
    third = floor(k / 3);
    k = k - (b(go) .* 2 .^ third .* 2 .^ third .* 2 .^ (k - 2 * third) > rest(go));
    third = floor(k / 3);
    step = b(go) .* 2 .^ third .* 2 .^ third .* 2 .^ (k - 2 * third);
    rest(go) = rest(go) - step;
    go = go(rest(go) >= b(go));
  end
  rest(a < 0) = -rest(a < 0);
end""",
        "gamma_of_octave": """
function value = formula_gamma_of_octave(a)
  value = gamma(a);
end""",
    },
    words="""
    __FILE__ __LINE__ break case catch continue do else elseif end end_try_catch end_unwind_protect
    endclassdef endenumeration endevents endfor endfunction endif endmethods endparfor endproperties
    endswitch endwhile enumeration events for function global if methods otherwise parfor persistent
    properties return switch try until unwind_protect unwind_protect_cleanup while classdef ans i j
    e
    pi eps Inf NaN inf nan NA double varargin varargout nargin nargout
    """,
    formula_first=True,
)

# Languages of the family of Python
# ---------------------------------

_PYTHON_WORDS: Final = f"{' '.join(keyword.kwlist)} np math jnp jax torch X p"
_INVERSE: Final = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "atan2": "arctan2"}
_COPIED: Final = {
    "pow": ops.power,
    **{name: getattr(ops, name) for name in ("erf", "erfc", "tgamma")},
    "lgamma_elsewhere": ops.lgamma,
}
_NUMPY: Final = Language(
    head="def {name}({arguments}):",
    tail="    return {value}",
    let="    {name} = {value}",
    comment="# {}",
    infinity="np.inf",
    nan="np.nan",
    call="np.{name}",
    first="import math\nimport numpy as np",
    columns="    {names} = formula_columns(X, {columns})",
    vector="    p = formula_numbers(p)",
    rows="np.zeros(len(X)) + {value}",
    templates={
        **{name: f"np.{name}({{a}})" for name in ("square", "sign")},
        "select": "np.where({a}, {b}, {c})",
        **{"max": "np.maximum({a}, {b})", "min": "np.minimum({a}, {b})"},
        **{f: f"np.{name}({{a}}{', {b}' * (f == 'atan2')})" for f, name in _INVERSE.items()},
    },
    missing=frozenset({"lgamma"}),
    texts={
        "numbers": '''
def formula_numbers(data):
    """Return real numbers in float64; masked ones are NaN, and anything else is a TypeError."""
    data = np.asanyarray(data)
    others = [
        x
        for x in (data.flat if data.dtype.kind == "O" else ())
        if isinstance(x, (str, bytes, complex)) or not hasattr(x, "__float__")
    ]
    if data.dtype.kind not in "biufO" or others:
        raise TypeError("text, dates and what is missing are no numbers")
    return np.ma.filled(data.astype(np.float64), np.nan)''',
        "columns": '''
def formula_columns(X, columns):
    """Return columns of an array [rows, variables] or [rows], or of a frame by name, in float64."""
    if isinstance(columns, dict) and hasattr(X, "columns"):
        return [formula_numbers(X[name]) for name in columns]
    X = formula_numbers(X)
    X = X[:, None] if X.ndim == 1 else X
    return [X[:, i] for i in (columns.values() if isinstance(columns, dict) else columns)]''',
        **{
            name: inspect.getsource(function)
            .rstrip()
            .replace(f"def {function.__name__}(", f"def formula_{name}(")
            .replace(": Any", "")
            .replace(" -> Any", "")
            for name, function in _COPIED.items()
        },
    },
    words=_PYTHON_WORDS,
)
_JAX: Final = Language(
    head="def {name}({arguments}):",
    tail="    return {value}",
    let="    {name} = {value}",
    comment="# {}",
    infinity="jnp.inf",
    nan="jnp.nan",
    call="jnp.{name}",
    first="import jax\nimport jax.numpy as jnp\n\n"
    '# For float64: jax.config.update("jax_enable_x64", True)',
    columns="    X = jnp.asarray(X, dtype=float)\n    {names} = [X[:, i] for i in {indices}]",
    vector="    p = jnp.asarray(p, dtype=float)",
    rows="jnp.zeros(len(X)) + {value}",
    templates={
        "square": "jnp.square({a})",
        **{"select": "jnp.where({a}, {b}, {c})", "pow": "jnp.power({a}, {b})"},
        **{"max": "jnp.maximum({a}, {b})", "min": "jnp.minimum({a}, {b})"},
        **{f: f"jnp.{name}({{a}}{', {b}' * (f == 'atan2')})" for f, name in _INVERSE.items()},
        **{name: f"jax.scipy.special.{name}({{a}})" for name in ("erf", "erfc")},
        "lgamma_elsewhere": "jax.scipy.special.gammaln({a})",
        **{"fmod": "jnp.fmod({a}, {b})", "power": "jnp.power({a}, {b})"},
    },
    missing=frozenset({"tgamma", "lgamma", "mod"}),
    words=_PYTHON_WORDS + " float",
)
_TORCH: Final = Language(
    head="def {name}({arguments}):",
    tail="    return {value}",
    let="    {name} = {value}",
    comment="# {}",
    infinity="torch.inf",
    nan="torch.nan",
    call="torch.{name}",
    first="import torch",
    columns="    X = formula_number(X)\n    {names} = [X[:, i] for i in {indices}]",
    vector="    p = formula_number(p)",
    rows="torch.zeros(len(X), dtype=torch.float64) + {value}",
    operand="formula_number({})",
    templates={
        **{"select": "formula_select({a}, {b:0}, {c:0})", "rint": "torch.round({a})"},
        **{"max": "torch.maximum({a}, {b})", "min": "torch.minimum({a}, {b})"},
        **{"power": "torch.pow({a}, {b})", "square": "torch.square({a})"},
        **{"short_sinh": "torch.sinh({a})", "short_cosh": "torch.cosh({a})"},
        "short_fmod": "torch.fmod({a}, {b})",
    },
    missing=frozenset({"tgamma", "mod", "cbrt"}),
    # Torch's own sinh and cosh overflow before their results do, its fmod where the quotient does.
    helpers={
        "fmod": f"short_fmod(short_fmod(short_fmod(a, b * {2.0**700} * {2.0**700}), "
        f"b * {2.0**700}), b)",
        "sinh": "select(abs(a) < 709, short_sinh(a), select(a < 0, -long_cosh(-a), long_cosh(a)))",
        "cosh": "select(abs(a) < 709, short_cosh(a), long_cosh(abs(a)))",
        "long_cosh": "exp(a * 0.5) * 0.5 * exp(a * 0.5)",
    },
    texts={
        "number": """
def formula_number(value):
    return torch.as_tensor(value, dtype=torch.float64)""",
        "select": """
def formula_select(test, yes, no):
    return torch.where(test, formula_number(yes), formula_number(no))""",
    },
    words=_PYTHON_WORDS,
)
_RAISING: Final = (
    *("sqrt", "exp", "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan", "asin"),
    *("acos", "sinh", "cosh"),
)
_LOGS: Final = ("log", "log1p", "log2", "log10", "sinh")
_PYTHON: Final = Language(
    head="def {name}({arguments}):",
    tail="    return {value}",
    let="    {name} = {value}",
    as_float="float(+{name})",
    comment="# {}",
    infinity="math.inf",
    nan="math.nan",
    call="math.{name}",
    first="import math",
    templates={
        **{"select": "({b} if {a} else {c})", "abs": "abs({a})", "/": "formula_quotient({a}, {b})"},
        **{f"raw_{f}": f"formula_call(math.{f}, {{a}})" for f in _LOGS},
        **{f: f"formula_call(math.{f}, {{a}})" for f in _RAISING if f not in _LOGS},
        **{"remainder": "({a:61} % {b:61})", "floored": "({a:61} // 1.0)"},
    },
    missing=frozenset({"rint", "lgamma"}),
    helpers={
        **{f: f"select(a == 0, -inf, raw_{f}(a))" for f in ("log", "log2", "log10")},
        "log1p": "select(a == 0, a, select(a == -1, -inf, raw_log1p(a)))",
        "sinh": "select(a < 0, -raw_sinh(-a), raw_sinh(a))",
        "floor": f"select(abs(a) < {_WHOLE}, floored(a), a)",
        "ceil": f"select(abs(a) < {_WHOLE}, -floored(-a), a)",
        "mod": "select(b == 0, nan, remainder(a, b))",
    },
    texts={
        "call": '''
def formula_call(function, a):
    """Return a function's value, NaN where there is none, and inf where it is too large."""
    try:
        return function(a)
    except ValueError:
        return math.nan
    except OverflowError:
        return math.inf''',
        "quotient": """
def formula_quotient(a, b):
    if b != 0.0:
        return a / b
    if a != a or a == 0.0:
        return math.nan
    return math.copysign(math.inf, a) * math.copysign(1.0, b)""",
        "pow": """
def formula_pow(a, b):
    is_odd = math.isfinite(b) and b % 2.0 == 1.0
    try:
        return math.pow(a, b)
    except OverflowError:
        return -math.inf if a < 0.0 and is_odd else math.inf
    except ValueError:
        if a != 0.0:
            return math.nan
        return math.copysign(math.inf, a) if is_odd else math.inf""",
        "tgamma": """
def formula_tgamma(a):
    try:
        return math.gamma(a)
    except (OverflowError, ValueError):
        return math.copysign(math.inf, a) if a > -1.0 else math.nan""",
        "lgamma_elsewhere": """
def formula_lgamma_elsewhere(a):
    try:
        return math.lgamma(a)
    except (OverflowError, ValueError):
        return math.inf""",
    },
    words=_PYTHON_WORDS + " abs float",
)

#: The languages of `warpfit.Program.code`.
LANGUAGES: Final[Mapping[str, Language]] = {
    **{"numpy": _NUMPY, "jax": _JAX, "torch": _TORCH, "python": _PYTHON, "c": _C, "c++": _CPP},
    **{"cuda": _CUDA, "fortran": _FORTRAN, "javascript": _JAVASCRIPT, "rust": _RUST, "r": _R},
    "octave": _OCTAVE,
}
