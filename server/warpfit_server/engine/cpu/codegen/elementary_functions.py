"""Elementary functions on vectors: what kernels of the operator table may call on a CPU.

A C library computes one number a call, which is 5 to 20 times slower than the arithmetic around it,
so the functions that matter are written here with the textbook method and no branch:

* exp: x = k ln 2 + r, exp(x) = 2^k exp(r), a polynomial for exp(r) on |r| <= ln(2) / 2;
* log: x = 2^e m with m in [sqrt(1/2), sqrt(2)), log(x) = e ln 2 + log(m), a polynomial for log(m);
* pow: exp2(b log2(a)), with more digits inside than the result has;
* sin, cos: x = k pi/2 + r, a polynomial for the quarter that k names;
* tanh: expm1(2x) / (expm1(2x) + 2);
* gamma of float32: Stirling's series in float64;
* mod: the exact remainder of a division by b 2^k, for smaller and smaller k;
* digamma: as the reference (`warpfit.ops`).

(J.-M. Muller, Elementary Functions, 3rd edition, chapters 9 to 11.) The polynomials are Chebyshev
fits on the reduced interval. All others call the C library on doubles, lane by lane.

There are three sets: `functions` gives float64 functions of float64 accuracy for float64 data, and
for float32 data either precise ones (within 2 ulp) or fast ones. Precise functions of float32 may
compute in float64 where that is the simplest way to 2 ulp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import Decimal, localcontext
from functools import cache
from typing import Any, Final

from llvmlite import ir

from warpfit.ops import KERNEL_FUNCTIONS, digamma
from warpfit_server.engine.cpu.codegen.vector import (
    BIAS,
    INTEGER,
    MANTISSA,
    Trace,
    Vector,
    Vectors,
    absolute,
    nearest,
    polynomial,
)

Function = Callable[..., Vector]
Functions = Mapping[str, Function]
_INFINITY: Final = float("inf")
_NAN: Final = float("nan")
_LOG2_E: Final = 1.4426950408889634
#: ln 2 as a sum of numbers of the type, by bits.
_LN2: Final = {32: (0.6931471824645996, -1.9046542121259336e-09),
               64: (0.6931471805599453, 2.3190468138462996e-17)}  # fmt: skip
#: Arguments of exp and exp2 beyond which the result is 0 or infinite.
_EXP_RANGE: Final = {32: (-104.0, 89.0), 64: (-746.0, 710.0)}
_EXP2_RANGE: Final = {32: (-151.0, 129.0), 64: (-1080.0, 1030.0)}
#: (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2.
_EXP: Final = {
    32: (0.5, 0.1666657702559799, 0.041666554662050534, 0.008363173074513711,
         0.001392617611993558),
    64: (0.5, 0.1666666666666667, 0.04166666666666667, 0.008333333333326141,
         0.0013888888888883752, 0.00019841269874800493, 2.4801587325533363e-05,
         2.7557255425746435e-06, 2.7557273661348637e-07, 2.510520637395701e-08,
         2.0914679376583935e-09),
}  # fmt: skip
#: 2^r on |r| <= 1/2, with relative errors of 2e-9 and 4e-11.
_EXP2: Final = {
    32: (1.0, 0.6931472067028326, 0.24022650922288757, 0.05550327226670302,
         0.009618056678524637, 0.0013400428177615838, 0.0001546144469856913),
    64: (0.9999999999595618, 0.6931471805568324, 0.24022651213498092, 0.055504109063258665,
         0.009618025613318034, 0.0013333478473685416, 0.00015469729214118296,
         1.5303700711365693e-05),
}  # fmt: skip
#: (log(1 + f) - f + f^2 / 2) / f^3 on [sqrt(1/2) - 1, sqrt(2) - 1].
_LOG_SINGLE: Final = (
    0.33333331180030046, -0.24999996957950882, 0.200007157488921, -0.16667802319501254,
    0.1424905764569748, -0.12425687331451106, 0.1168541992348674, -0.11479733846637635,
    0.06971611471451178,
)  # fmt: skip
#: (log((1 + s) / (1 - s)) - 2 s) / s^3 as a polynomial in s^2, s = f / (2 + f).
_LOG_DOUBLE: Final = (
    0.666666666666667, 0.39999999999899505, 0.28571428625975487, 0.2222221113479508,
    0.18182889125261723, 0.15331721600556042, 0.14616449685043406,
)  # fmt: skip
#: log2(1 + f) / f on [sqrt(1/2) - 1, sqrt(2) - 1], with relative errors of 3e-8 and 2e-11.
_LOG2: Final = {
    32: (1.4426950035679822, -0.7213474682495624, 0.48091075345941253, -0.36069326813533614,
         0.28790326092450147, -0.2391698814010418, 0.21607822552243777, -0.20586188051276055,
         0.1231096846719146),
    64: (1.4426950408708794, -0.7213475209631551, 0.4808983601762459, -0.3606736553159396,
         0.28853739437873954, -0.24045433696411997, 0.20617283226751987, -0.1802710257711494,
         0.15878356832510718, -0.14349039375280995, 0.14495052999815844, -0.1414478821058739,
         0.07553790398013412),
}  # fmt: skip

#: gamma(z) e^z / z^(z - 1/2) in powers of 1 / z.
_STIRLING: Final = tuple(
    (2 * math.pi) ** 0.5 * c
    for c in (1, 1 / 12, 1 / 288, -139 / 51840, -571 / 2488320, 163879 / 209018880)
)


def functions(trace: Trace, *, fast: bool) -> Functions:
    """Return the functions of the kernel language for vectors of the trace's data type."""
    wide = _double_functions()
    if not trace.is_single:
        return wide
    single = {name: _through_double(function) for name, function in wide.items()}
    single |= {"abs": absolute, "sqrt": square_root, "exp": exponential, "log": logarithm}
    single |= {name: _rounding(name) for name in ("floor", "ceil", "rint")}
    single["pow"] = _fast_power if fast else _through_double(_power_for_single)
    single["hypot"] = _through_double(_hypotenuse_for_single)
    single["tgamma"] = _through_double(_gamma_for_single)
    return single


def wide_functions() -> Functions:
    """Return float64 functions of float32 accuracy, for kernels of several steps on float32."""
    return _double_functions() | {"pow": _power_for_single, "hypot": _hypotenuse_for_single}


def lifted(known: Functions) -> dict[str, Function]:
    """Return the same functions for operands of which some are numbers."""

    def lift(function: Function) -> Function:
        def call(*operands: Vector | float) -> Vector:
            model = next(v for v in operands if isinstance(v, Vector))
            return function(*map(model.like, operands))

        return call

    return {name: lift(function) for name, function in known.items()}


def _double_functions() -> dict[str, Function]:
    library = {name: _library(name) for name in KERNEL_FUNCTIONS}
    return library | {
        "abs": absolute,
        "sqrt": square_root,
        **{name: _rounding(name) for name in ("floor", "ceil", "rint")},
        "mod": remainder,
        "cbrt": cube_root,
        "exp": exponential,
        "log": logarithm,
        "sin": sine,
        "cos": cosine,
        "tan": tangent,
        "tanh": hyperbolic_tangent,
        "digamma": lambda x: digamma(x, x.trace.select, _rounding("floor"), logarithm, tangent),
    }


def _library(name: str) -> Function:
    return lambda *operands: operands[0].trace.call(name, *operands)


def _through_double(function: Function) -> Function:
    return lambda *operands: function(*(v.widen() for v in operands)).narrow()


def _rounding(name: str) -> Function:
    return lambda x: x.trace.intrinsic(name, x)


def _gamma_for_single(a: Vector) -> Vector:
    """Gamma in float64 with about 40 correct bits, for float32 operands widened to float64.

    Reflection where a < 1/2, recurrence to z >= 8.5, and there Stirling's series (Abramowitz and
    Stegun 1964, 6.1.17, 6.1.15 and 6.1.37).
    """
    select, floor = a.trace.select, _rounding("floor")
    x = _clamp(select(a < 0.5, 1.0 - a, a), 0.5, 200.0)
    product = x
    for k in range(1, 8):
        product = product * (x + float(k))
    z = x + 8.0
    series = polynomial(1.0 / z, _STIRLING)
    value = exponential((z - 0.5) * logarithm(z) - z) * series / product
    near = floor(a + 0.5)
    sign = 1.0 - 4.0 * (near * 0.5 - floor(near * 0.5))
    reflected = math.pi / (sine(math.pi * (a - near)) * sign * value)
    is_pole = (a < 0) & (floor(a) == a)
    return select(is_pole, _NAN, select(a < 0.5, reflected, value))


def square_root(x: Vector) -> Vector:
    """Square root, correctly rounded."""
    return x.trace.intrinsic("sqrt", x)


def cube_root(x: Vector) -> Vector:
    """Cube root: the C library's (3 ulp) and one step of Newton's method, in float64."""
    trace = x.trace
    tiny = absolute(x) < 1e-200
    scaled = trace.select(tiny, x * 2.0**300, x)
    y = trace.call("cbrt", scaled)
    square = y * y
    residual = square.fma(y, -scaled) + y * y.fma(y, -square)
    better = y - residual / (square * 3.0)
    regular = (x != 0) & (absolute(x) < _INFINITY)
    y = trace.select(regular, better, y)
    return trace.select(tiny, y * 2.0**-100, y)


def remainder(a: Vector, b: Vector) -> Vector:
    """Return a - floor(a / b) b, exactly: `numpy.mod` in float64.

    Where |a / b| < 2^53, the quotient rounded to a whole number q is at most 1 too large, and
    |a| - q |b|, a number of float64, is what one fused multiply-add gives. Only a vector with a
    larger quotient enters the loop of `_far_remainder`.
    """
    select, intrinsic = a.trace.select, a.trace.intrinsic
    size, divisor = absolute(a), absolute(b)
    quotient = size / divisor
    far = (quotient >= 2.0**53) & (size < _INFINITY) & (divisor > 0)
    rest = _without_multiple(size, divisor)
    (rest,) = a.trace.repair((rest,), far, lambda: (_far_remainder(size, divisor, far),))
    rest = select(size < divisor, size, rest)
    signed = intrinsic("copysign", rest, a)
    signed = select((a < 0) ^ (b < 0), signed + b, signed)
    return select(rest == 0, intrinsic("copysign", rest, b), signed)


def _without_multiple(x: Vector, step: Vector) -> Vector:
    """Return x - floor(x / step) step, for x >= 0 and a quotient below 2^53."""
    rest = x.trace.intrinsic("trunc", x / step).fma(-step, x)
    return x.trace.select(rest < 0, rest + step, rest)


def _far_remainder(x: Vector, divisor: Vector, far: Vector) -> Vector:
    """Remainder of positive finite numbers in the lanes that are far; others give anything.

    With k, the difference of the exponents less 51, x / (divisor 2^k) is below 2^53, and what is
    left of x is less than divisor 2^k. Turns for k - 51, k - 102, ... and at last 0 follow: 42 at
    most, because no exponents of float64 differ by more than 1023 + 1074 = 2097.
    """
    trace = x.trace
    zero = x.like(0.0).bits()
    k = _exponent(x) - _exponent(divisor) - 51
    k = trace.select(far, trace.select(k > 0, k, zero), zero)

    def turn(state: tuple[Vector, ...]) -> tuple[Vector, ...]:
        rest, k, _ = state
        following = trace.select(k > 51, k - 51, zero)
        left = trace.select(k > 0, zero + 1, zero)
        return _without_multiple(rest, _scale(divisor, k)), following, left

    return trace.repeat(turn, (x, k, zero + 1), most=42)[0]


def _exponent(x: Vector) -> Vector:
    """Exponent of a positive finite number, as an integer."""
    tiny = x < 2.0 ** (1 - BIAS[x.size])
    scaled = x.trace.select(tiny, x * 2.0 ** MANTISSA[x.size], x)
    exponent = (scaled.bits() >> MANTISSA[x.size]) - BIAS[x.size]
    return x.trace.select(tiny, exponent - MANTISSA[x.size], exponent)


def _clamp(x: Vector, low: float, high: float) -> Vector:
    """Limit x; NaN stays NaN."""
    select = x.trace.select
    x = select(x > high, x.like(high), x)
    return select(x < low, x.like(low), x)


def _power_of_two(exponent: Vector) -> Vector:
    """2^k as a float, for k in the range of normal numbers."""
    return ((exponent + BIAS[exponent.size]) << MANTISSA[exponent.size]).real()


def _scale(x: Vector, exponent: Vector) -> Vector:
    """Multiply by 2^k in two steps, so that overflow and subnormals come out right."""
    half = exponent >> 1
    return x * _power_of_two(half) * _power_of_two(exponent - half)


def exponential(x: Vector) -> Vector:
    """e^x."""
    r, _, exponent = _reduced(_clamp(x, *_EXP_RANGE[x.size]))
    p = (r * r).fma(polynomial(r, _EXP[x.size]), r)
    return _scale(p + 1.0, exponent)


def _reduced(x: Vector) -> tuple[Vector, Vector, Vector]:
    """Return r, what its rounding has lost, and k with x = k ln 2 + r."""
    high, low = _LN2[x.size]
    k, exponent = nearest(x * _LOG2_E)
    near = k.fma(-high, x)
    r = k.fma(-low, near)
    return r, k.fma(-low, near - r), exponent


def _split(x: Vector) -> tuple[Vector, Vector]:
    """Return m - 1 and e, a float: x = 2^e m, m in [sqrt(1/2), sqrt(2)); x positive, finite."""
    trace, size = x.trace, x.size
    mantissa = MANTISSA[size]
    tiny = x < 2.0 ** (1 - BIAS[size])
    x = trace.select(tiny, x * 2.0 ** (mantissa + 2), x)
    low = x.like(0.5**0.5).bits()
    offset = x.bits() - low
    exponent = (offset >> mantissa).to_real()
    exponent = trace.select(tiny, exponent - (mantissa + 2.0), exponent)
    return ((offset & ((1 << mantissa) - 1)) + low).real() - 1.0, exponent


def logarithm(x: Vector) -> Vector:
    """Natural logarithm."""
    f, e = _split(x)
    high, low = _LN2[x.size]
    square = f * f
    if x.size == 32:
        rest = e.fma(low, f * square * polynomial(f, _LOG_SINGLE))
        result = e.fma(high, f + square.fma(-0.5, rest))
    else:
        s = f / (f + 2.0)
        z = s * s
        half_square = square * 0.5
        tail = s.fma(half_square + z * polynomial(z, _LOG_DOUBLE), e * low)
        result = e.fma(high, f - (half_square - tail))
    select = x.trace.select
    outside = select(x == 0, x.like(-_INFINITY), _NAN)
    return select(x > 0, select(x < _INFINITY, result, x), outside)


def _power_for_single(a: Vector, b: Vector) -> Vector:
    """a^b in float64 with about 33 correct bits, for float32 operands widened to float64."""
    magnitude = absolute(a)
    # As `_split`, but for subnormals, of which there are none among widened float32.
    mantissa, low = MANTISSA[magnitude.size], magnitude.like(0.5**0.5).bits()
    offset = magnitude.bits() - low
    f = ((offset & ((1 << mantissa) - 1)) + low).real() - 1.0
    e = (offset >> mantissa).to_real()
    exponent = b * _power_log2(magnitude, f.fma(polynomial(f, _LOG2[64]), e))
    exponent = _clamp(exponent, -200.0, 200.0)
    k, scale = nearest(exponent)
    return _power_signs(a, b, polynomial(exponent - k, _EXP2[64]) * _power_of_two(scale))


def _power_log2(magnitude: Vector, result: Vector) -> Vector:
    """Replace log2 where a number without sign is 0 (by -inf), infinite or NaN."""
    select = magnitude.trace.select
    zero = select(magnitude == 0, magnitude.like(-_INFINITY), result)
    return select(magnitude < _INFINITY, zero, magnitude)


def _fast_power(a: Vector, b: Vector) -> Vector:
    """a^b in float32 with log2 in two parts: a relative error of about 1e-7 (2 + |log2 a^b|/4)."""
    trace = a.trace
    magnitude = absolute(a)
    f, e = _split(magnitude)
    fraction = f * polynomial(f, _LOG2[32])
    high = e + fraction
    low = fraction - (high - e)
    log2 = _power_log2(magnitude, high)
    low = trace.select(absolute(log2) < _INFINITY, low, 0.0)
    product = b * log2
    rest = b.fma(low, b.fma(log2, -product))
    clamped = _clamp(product, *_EXP2_RANGE[32])
    k, exponent = nearest(clamped)
    rest = trace.select(clamped == product, rest, 0.0)
    result = _scale(polynomial(clamped - k + rest, _EXP2[32]), exponent)
    return _power_signs(a, b, result)


def _power_signs(a: Vector, b: Vector, magnitude: Vector) -> Vector:
    """Turn |a|^b into a^b as C defines it: signs, NaN for fractional b, and 1 at a = 1 or b = 0."""
    trace = a.trace
    select, floor = trace.select, _rounding("floor")
    half = b * 0.5
    whole = floor(b) == b
    odd = whole & (floor(half) != half)
    negative = a.bits() < 0
    result = select(negative & odd, -magnitude, magnitude)
    undefined = (a < 0) & (a > -_INFINITY) & (floor(b) != b) & (b == b)
    result = select(undefined, _NAN, result)
    minus_one = (a == -1) & (absolute(b) == _INFINITY)
    return select((a == 1) | (b == 0) | minus_one, a.like(1.0), result)


def hyperbolic_tangent(x: Vector) -> Vector:
    """tanh, in float64, with the rounding errors of expm1(2 |x|) = d carried along.

    Where 2 |x| is reduced by ln 2 they would be doubled: 2.6 ulp of the result at |x| = 0.2.
    """
    r, lost, exponent = _reduced(_clamp(absolute(x) * 2.0, 0.0, 64.0))
    rest = r * r * polynomial(r, _EXP[64])
    p = r + rest
    p_low = (r - p) + rest + lost
    power = _power_of_two(exponent)
    d = power.fma(p, power - 1.0)
    d_low = power.fma(p_low, power.fma(p, power - 1.0 - d))
    divisor = d + 2.0
    divisor_low = d - (divisor - 2.0) + d_low
    inverse = x.like(1.0) / divisor
    quotient = d * inverse
    left = quotient.fma(-divisor, d) + (d_low - quotient * divisor_low)
    return x.trace.intrinsic("copysign", left.fma(inverse, quotient), x)


def _hypotenuse_for_single(a: Vector, b: Vector) -> Vector:
    """sqrt(a^2 + b^2), which cannot overflow for float32 operands in float64."""
    infinite = (absolute(a) == _INFINITY) | (absolute(b) == _INFINITY)
    return a.trace.select(infinite, _INFINITY, square_root(a * a + b * b))


# ------------------------------------------------------------------------- sine, cosine and tangent

# On vectors of float64: x = k pi/2 + r, and a polynomial in r. Numbers up to `_LIMIT` are reduced
# with pi/2 in three parts. Larger ones take seven times as long: they are reduced exactly, with
# integers (Payne and Hanek 1983). With x = m 2^e, m a whole number of 53 bits, only 192 bits of
# 2 / pi matter for x 2 / pi modulo 4: those before give multiples of 4, those behind less than
# 2^-137. No float64 is closer than 2^-62 quarter turns to a multiple of one (J.-M. Muller,
# Elementary Functions, 3rd edition, chapter 11), so the remainder has at least 75 right bits.

_DOUBLE: Final = ir.DoubleType()
_I64: Final = ir.IntType(64)
_WINDOW: Final = ir.IntType(192)
_WORDS: Final = ir.IntType(256)
_NAME: Final = "warpfit_reduce_by_half_pi"
#: Zeros before the first bit of 2 / pi in the table: x may be as small as 2^-11, e as -63.
_LEADING: Final = 64
#: Bits of the table; the last window starts at bit 970 of 2 / pi, or 971 for an infinite x.
_BITS: Final = 1280
_HALF_PI_PAIR: Final = (1.5707963267948966, 6.123233995736766e-17)


@cache
def _two_over_pi() -> tuple[int, ...]:
    """Return the words of 2 / pi, the most significant first, behind `_LEADING` zeros.

    Pi is 16 arctan(1/5) - 4 arctan(1/239) (Machin 1706).
    """

    def arctan_of_inverse(n: int) -> Decimal:
        power = total = 1 / Decimal(n)
        k = 1
        while abs(power) > Decimal(10) ** -_BITS:
            power /= -n * n
            k += 2
            total += power / k
        return total

    with localcontext(prec=_BITS // 3):
        pi = 16 * arctan_of_inverse(5) - 4 * arctan_of_inverse(239)
        bits = int(2 / pi * 2 ** (_BITS - _LEADING))
    return tuple(bits >> shift & (1 << 64) - 1 for shift in range(_BITS - 64, -1, -64))


def reduction(module: ir.Module) -> ir.Function:
    """Return the function ``void (double x, double *r, double *tail, int64 *count)`` of a module.

    x = (4 n + count) pi / 2 + r + tail for some whole n, with |r| at most pi / 4 and the tail below
    half an ulp of r; x is finite, and |x| at least 2^-11.
    """
    known = module.globals.get(_NAME)
    if known is not None:
        return known
    kinds = [_DOUBLE, _DOUBLE.as_pointer(), _DOUBLE.as_pointer(), _I64.as_pointer()]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), _NAME)
    function.linkage = "internal"
    for attribute in ("nounwind", "noinline"):  # in every kernel it would cost time to compile
        function.attributes.add(attribute)
    b = ir.IRBuilder(function.append_basic_block())
    x, r, tail, count = function.args
    bits = b.bitcast(x, _I64)
    significand = b.or_(b.and_(bits, _I64((1 << 52) - 1)), _I64(1 << 52))
    exponent = b.and_(b.lshr(bits, _I64(52)), _I64(0x7FF))
    turns = b.mul(b.zext(significand, _WINDOW), _window(b, b.sub(exponent, _I64(1075))))
    nearest = b.trunc(b.lshr(b.add(turns, _WINDOW(1 << 189)), _WINDOW(190)), _I64)
    fraction = b.shl(turns, _WINDOW(2))
    below = b.icmp_signed("<", fraction, _WINDOW(0))
    magnitude = b.select(below, b.neg(fraction), fraction)
    # The fraction, in bits behind the point, as the sum of two doubles.
    zeros = b.ctlz(b.trunc(b.lshr(magnitude, _WINDOW(128)), _I64), ir.IntType(1)(0))
    shifted = b.shl(magnitude, b.zext(zeros, _WINDOW))
    scale = b.bitcast(b.shl(b.sub(_I64(1023 - 53), zeros), _I64(52)), _DOUBLE)
    high = b.fmul(b.uitofp(b.trunc(b.lshr(shifted, _WINDOW(139)), _I64), _DOUBLE), scale)
    rest = b.and_(b.trunc(b.lshr(shifted, _WINDOW(86)), _I64), _I64((1 << 53) - 1))
    low = b.fmul(b.fmul(b.uitofp(rest, _DOUBLE), scale), _DOUBLE(2.0**-53))
    negative = b.icmp_signed("<", bits, _I64(0))
    sign = b.select(b.xor(below, negative), _DOUBLE(-1.0), _DOUBLE(1.0))
    # Times pi / 2, each in two parts.
    first, second = (_DOUBLE(part) for part in _HALF_PI_PAIR)
    product = b.fmul(high, first)
    rest = b.fma(high, first, b.fneg(product))
    rest = b.fma(high, second, b.fma(low, first, rest))
    whole = b.fadd(product, rest)
    rest = b.fsub(rest, b.fsub(whole, product))
    b.store(b.fmul(whole, sign), r)
    b.store(b.fmul(rest, sign), tail)
    b.store(b.select(negative, b.neg(nearest), nearest), count)
    b.ret_void()
    return function


def _window(b: ir.IRBuilder, exponent: Any) -> Any:
    """Load 192 bits of 2 / pi; the first has weight 2 in the product with 2^exponent."""
    words = _two_over_pi()
    kind = ir.ArrayType(_I64, len(words))
    table = b.module.globals.get(_NAME + "_table")
    if table is None:
        table = ir.GlobalVariable(b.module, kind, _NAME + "_table")
        table.linkage, table.global_constant = "internal", True
        table.initializer = ir.Constant(kind, list(words))
    start = b.add(exponent, _I64(_LEADING - 2))
    index, shift = b.lshr(start, _I64(6)), b.and_(start, _I64(63))
    found: Any = _WORDS(0)
    for k in range(4):
        word = b.load(b.gep(table, [_I64(0), b.add(index, _I64(k))]))
        found = b.or_(b.shl(found, _WORDS(64)), b.zext(word, _WORDS))
    return b.trunc(b.lshr(b.shl(found, b.zext(shift, _WORDS)), _WORDS(64)), _WINDOW)


#: pi / 2 as a sum of three numbers, of which the second has 33 bits: see `_reduced_by_half_pi`.
_HALF_PI: Final = (1.5707963267948966, 6.12323399538461e-17, 3.5215598651832e-27)
#: (sin(r) - r) / r^3 and (cos(r) - 1 + r^2 / 2) / r^4 as polynomials in r^2, |r| <= pi / 4.
_SIN: Final = (
    -0.16666666666666666, 0.008333333333330936, -0.00019841269836740532, 2.7557316093198404e-06,
    -2.5051129896450185e-08, 1.5917988979397435e-10,
)  # fmt: skip
_COS: Final = (
    0.041666666666666664, -0.0013888888888887389, 2.48015872987544e-05, -2.755731726587808e-07,
    2.087614504941318e-09, -1.138254464534925e-11,
)  # fmt: skip
#: Largest |x| for which `_reduced_by_half_pi` keeps its digits.
_LIMIT: Final = 1e5


def sine(x: Vector) -> Vector:
    """Sine, in float64."""
    return _sine(x, 0)


def cosine(x: Vector) -> Vector:
    """Cosine, in float64."""
    return _sine(x, 1)


def _sine(x: Vector, quarter: int) -> Vector:
    """Sine of x plus ``quarter`` quarter turns, in float64."""
    trace = x.trace
    reduced = _reduced_by_half_pi(x)
    r, tail, count = trace.repair(reduced, _is_large(x), lambda: _large_reduced_by_half_pi(x))
    square = r * r
    sine = r + (square * r).fma(polynomial(square, _SIN), square.fma(tail * -0.5, tail))
    rest = square.fma(square * polynomial(square, _COS), -(r * tail))
    half = square * 0.5
    start = 1.0 - half
    cosine = start + ((1.0 - start - half) + rest)
    count = count + quarter
    result = trace.select((count & 1) == 0, sine, cosine)
    result = (result.bits() ^ ((count & 2) << 62)).real()
    near_zero = absolute(x) < 1e-9
    return trace.select(near_zero, x if quarter == 0 else x * 0.0 + 1.0, result)


def _reduced_by_half_pi(x: Vector) -> Vectors:
    """Return r, what its rounding has lost, and k with x = k pi/2 + r, in float64.

    The reduction is that of Cody and Waite. ``near`` is exact: a multiple of 2^-53 below 1. The
    product of k, below 2^16, and the second part of pi / 2 is exact, too, because that part has 33
    bits. So ``near - r`` is exact: it is that product where near is the smaller of the two (r is
    then exact), and a step of Dekker's sum elsewhere.
    """
    k, count = nearest(x * (2 / 3.141592653589793))
    first, second, third = _HALF_PI
    near = k.fma(-first, x)
    r = k.fma(-second, near)
    return r, k.fma(-third, k.fma(-second, near - r)), count


def _is_large(x: Vector) -> Vector:
    return absolute(x) > _LIMIT


def _large_reduced_by_half_pi(x: Vector) -> Vectors:
    """`_reduced_by_half_pi` where `_is_large`; NaN for an infinite x."""
    trace = x.trace
    large = trace.select(_is_large(x) & (absolute(x) < _INFINITY), x, 1.0)
    function = reduction(trace.builder.module)
    r, tail, count = trace.call_for_results(function, large, (x.element, x.element, INTEGER[64]))
    return trace.select(absolute(x) < _INFINITY, r, _NAN), tail, count


def tangent(x: Vector) -> Vector:
    """Tangent: the C library's; large numbers are reduced before exactly.

    A C library may lose digits there: glibc's is 14 ulp off where x is closest to a multiple.
    """
    trace, large = x.trace, _is_large(x)
    zero = x.like(0.0)
    reduced = (x, zero, zero.bits())
    r, tail, count = trace.repair(reduced, large, lambda: _large_reduced_by_half_pi(x))
    tangent = trace.call("tan", r)

    def turned() -> Vectors:
        rest = tangent.fma(tangent, 1.0) * tail
        total = tangent + rest
        inverse = -1.0 / total
        error = inverse.fma(total, 1.0) + inverse * (tangent - total + rest)
        return (trace.select((count & 1) == 0, total, inverse + inverse * error),)

    return trace.repair((tangent,), large, turned)[0]
