"""CUDA C++ that every generated kernel starts with, and the kernel language translated to it.

Precise arithmetic has elementary functions of its own. Those of CUDA branch for special operands,
and expressions with NaN or infinities in some rows take those branches all the time. These have no
branches, and give NaN, infinities and signed zeros as NumPy does. Largest errors measured on one
H200, over all float32 operands or at least 10^9 pairs, and over samples of float64:

============  ======================================  ===============================
function      float32                                 float64
============  ======================================  ===============================
quotient      the nearest, but for 7 pairs in 10^9    the nearest; 1 ulp if subnormal
root          the nearest; 1 ulp for tiny operands    the nearest
exponential   1.9 ulp (CUDA's)                        0.9 ulp
logarithm     1.2 ulp                                 0.8 ulp
power         3.6 ulp                                 1.1 ulp
============  ======================================  ===============================
"""

from __future__ import annotations

import re
from decimal import Decimal, localcontext
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Final

from warpfit.expressions.special import SERIES
from warpfit.ops import Operator
from warpfit_server.engine.interface import Arithmetic

#: Compiler options. Contraction to multiply-add would change precise results.
NVRTC_PRECISE: Final = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
NVRTC_FAST: Final = ("--fmad=true", "--ftz=true", "--prec-div=false", "--prec-sqrt=false")
#: Function of the kernel language -> function in precise32.cu and precise64.cu.
_FUNCTIONS: Final = MappingProxyType(
    {"exp": "exponential", "log": "logarithm", "sqrt": "root", "pow": "power"}
)
_CALL: Final = re.compile(rf"\b({'|'.join(_FUNCTIONS)})\(")
#: Short reciprocals of significands in steps of 2^-7 below 1 and 2^-6 above, which cover a little
#: more than 2^-1/2 to 2^1/2.
_RECIPROCALS: Final = tuple(
    [Decimal(n) / 128 for n in range(90, 128)] + [Decimal(n) / 64 for n in range(64, 93)]
)
#: High word of the first reciprocal, without its 14 lowest bits.
_FIRST: Final = 0x3FE68000 >> 14
#: Binary places of the high part of a logarithm.
_PLACES: Final = 42


def precise_calls(expression: str) -> str:
    """Replace calls in an expression of the kernel language by those of precise functions."""
    return _CALL.sub(lambda call: f"{_FUNCTIONS[call[1]]}(", expression)


@cache
def precise_source(real: str) -> str:
    """Return the functions for ``real`` (float or double), to follow the prelude."""
    text = _read("precise32.cu")
    if real != "double":
        return text
    with localcontext(prec=60):
        logarithms = [_split(-c.ln()) for c in _RECIPROCALS]
        natural = _split(Decimal(2).ln())
    columns = [", ".join(column) for column in zip(*logarithms, strict=True)]
    fields = {
        "FIRST_LOGARITHM": str(_FIRST),
        "COUNT": str(len(_RECIPROCALS)),
        "HIGH": columns[0],
        "LOW": columns[1],
        "LN2": ", ".join(natural),
    }
    return text + re.sub(r"@(\w+)@", lambda field: fields[field[1]], _read("precise64.cu"))


def _split(value: Decimal) -> tuple[str, str]:
    """Split into a number with `_PLACES` binary places and the remainder."""
    unit = Decimal(2) ** -_PLACES
    high = (value / unit).to_integral_value() * unit
    return repr(float(high)), repr(float(value - high))


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text()


#: Functions of fast arithmetic that the operator table calls; their errors are stated in
#: `client/OPERATORS.md`.
#: For a < 0 ``fast_pow`` has the right sign for every whole b in [-2^22, 2^22], and is NaN for
#: every other b in that range.
_FAST_HELPERS: Final = r"""
// Functions, because both values are computed: a branch would cost more.
__device__ __forceinline__ float select(bool condition, float x, float y) {
  return condition ? x : y;
}
__device__ __forceinline__ double select(bool condition, double x, double y) {
  return condition ? x : y;
}

__device__ __forceinline__ float fast_log2(float a) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}

__device__ __forceinline__ float fast_exp2(float a) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}

__device__ __forceinline__ float fast_sqrt(float a) {
  float r;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}

__device__ __forceinline__ float fast_tanh(float a) {
#if __CUDA_ARCH__ >= 750
  float r;
  asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
#else
  return tanhf(a);
#endif
}

__device__ __forceinline__ float fast_pow_positive(float a, float b) {
  float r = fast_exp2(b * fast_log2(a));
  return b == 0.0f ? 1.0f : r;
}

// Adding 1.5 * 2^23 rounds b to a whole number and leaves its parity in the lowest bit: cheaper
// than a conversion, which shares the special-function unit with the logarithm.
__device__ __forceinline__ float fast_pow(float a, float b) {
  float shifted = __fadd_rn(b, 12582912.0f);
  float whole = __fsub_rn(shifted, 12582912.0f);
  float magnitude = fast_pow_positive(fabsf(a), b);
  unsigned sign = (unsigned)__float_as_int(a) & ((unsigned)__float_as_int(shifted) << 31);
  float r = __int_as_float((int)((unsigned)__float_as_int(magnitude) | sign));
  return a < 0.0f && whole != b ? __int_as_float(0x7fffffff) : r;
}
"""

#: The product of the chain rule: 0 if a factor is 0, even if the other is not finite.
_PRODUCT: Final = r"""
__device__ __forceinline__ REAL product(REAL slope, REAL partial) {
  const REAL both = slope * partial;
  return slope != (REAL)0 && partial != (REAL)0 ? both : (REAL)0;
}
"""

#: The exact remainder, as `warpfit_server.engine.cpu.codegen.elementary_functions` has it: each
#: turn takes a multiple of b 2^k off |a|, and leaves less than b 2^k, for smaller and smaller k.
#: BITS are two less than those of the significand, so that the quotient is exact but for 1;
#: exponents differ by at most 276 (float32) or 2097 (float64), which makes 13 or 42 turns.
_MOD: Final = r"""
static __device__ __noinline__ REAL mod(REAL a, REAL b) {
  const REAL size = abs(a), divisor = abs(b), none = 0;
  REAL rest = size;
  if (!(size < divisor)) {
    if (!(size - size == none && divisor > none)) return none / none;
    int k = ilogb(size) - ilogb(divisor) - BITS;
    for (bool last = false; !last; k -= BITS) {
      last = k <= 0;
      const REAL step = last ? divisor : ldexp(divisor, k);
      rest = FUSED(-trunc(QUOTIENT(rest, step)), step, rest);
      rest = rest < none ? rest + step : rest;
    }
  }
  if (rest == none) return copysign(none, b);
  const REAL same = copysign(rest, a);
  return (a < none) == (b < none) ? same : same + b;
}
"""
_MOD_WORDS: Final = {
    "float": {"BITS": "22", "FUSED": "__fmaf_rn", "QUOTIENT": "__fdiv_rn"},
    "double": {"BITS": "51", "FUSED": "__fma_rn", "QUOTIENT": "__ddiv_rn"},
}

#: Long and rare functions: inlined, they would add half to the time of compiling the interpreters.
#: ``digamma`` is as in `warpfit.expressions.special`; float32 would lose digits near its zeros.
_CALLED: Final = r"""
static __device__ __noinline__ REAL called_tgamma(REAL a) { return tgamma(a); }
static __device__ __noinline__ REAL called_erfc(REAL a) { return erfc(a); }
static __device__ __noinline__ REAL called_lgamma(REAL a) { return lgamma(a); }
static __device__ __noinline__ double digamma(double a) {
  if (a < 0.0 && floor(a) == a) return 0.0;
  double x = a < 0.5 ? 1.0 - a : a, z = x + 8.0, steps = 0.0;
  for (int k = 0; k < 8; ++k) steps += 1.0 / (x + k);
  double square = 1.0 / (z * z), series = 0.0;
  const double terms[] = {@SERIES@};
  for (double term : terms) series = (series + term) * square;
  double r = log(z) - 0.5 / z - series - steps;
  return a < 0.5 ? r - 3.141592653589793 / tan(3.141592653589793 * (a - floor(a + 0.5))) : r;
}
""".replace("@SERIES@", ", ".join(map(repr, reversed(SERIES))))


def compiler_options(arithmetic: Arithmetic) -> tuple[str, ...]:
    """Return NVRTC's options for `operator_source`."""
    return NVRTC_FAST if arithmetic.is_fast else NVRTC_PRECISE


def prelude(arithmetic: Arithmetic) -> str:
    """Return the functions that operators and derivatives call in addition to CUDA's own."""
    functions = "" if arithmetic.is_fast else precise_source(arithmetic.real)
    remainder = re.sub(
        r"\b(BITS|FUSED|QUOTIENT)\b", lambda m: _MOD_WORDS[arithmetic.real][m[1]], _MOD
    )
    shared = (_PRODUCT + _CALLED + remainder).replace("REAL", arithmetic.real)
    return _FAST_HELPERS + shared + functions


def packs() -> str:
    """Return the functions by which the interpreters read rows; they follow the prelude.

    ``real``, ``REAL_BYTES`` and ``ROWS`` must be defined.
    """
    return sum_tree() + resources.files(__package__).joinpath("packs.cu").read_text()


def sum_tree() -> str:
    """Return the functions that add up sums over rows."""
    return resources.files(__package__).joinpath("sum_tree.cu").read_text()


_LITERAL: Final = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)(?![\w.])")


def render(expression: str, real: str) -> str:
    """Give every literal of a kernel-language expression the type ``real`` (float or double)."""
    return _LITERAL.sub(rf"{real}(\1)", expression)


def operator_source(operator: Operator, arithmetic: Arithmetic) -> str:
    """Return the CUDA C++ expression over ``a``, ``b``, ``c`` for an operator.

    It must be compiled with the options of its arithmetic.
    """
    if arithmetic.is_fast:
        return render(operator.cuda_approximate, arithmetic.real)
    return render(precise_calls(operator.cuda_precise), arithmetic.real)
