"""CUDA C++ that every generated kernel starts with, and the kernel language translated to it."""

from __future__ import annotations

import re
from importlib import resources
from typing import Final

from warpfit.expressions.special import SERIES
from warpfit.ops import Operator
from warpfit_server.engine.cuda.math.modes import Mode
from warpfit_server.engine.cuda.math.precise import precise_calls, precise_source

#: Functions of fast mode that the operator table calls; their errors are stated in
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


def prelude(mode: Mode) -> str:
    """Return the functions that operators and derivatives call in addition to CUDA's own."""
    functions = "" if mode.is_fast else precise_source(mode.real)
    remainder = re.sub(r"\b(BITS|FUSED|QUOTIENT)\b", lambda m: _MOD_WORDS[mode.real][m[1]], _MOD)
    shared = (_PRODUCT + _CALLED + remainder).replace("REAL", mode.real)
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


def operator_source(operator: Operator, mode: Mode) -> str:
    """Return the CUDA C++ expression over ``a``, ``b``, ``c`` for an operator.

    It must be compiled with the options of its mode.
    """
    if mode.is_fast:
        return render(operator.cuda_approximate, mode.real)
    return render(precise_calls(operator.cuda_precise), mode.real)
