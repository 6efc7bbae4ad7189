"""Sine, cosine and tangent on vectors of float64: x = k pi/2 + r, and a polynomial in r.

Numbers up to `_LIMIT` are reduced with pi/2 in three parts. Larger ones take seven times as long:
they are reduced exactly, with integers (Payne and Hanek 1983). With x = m 2^e, m a whole number of
53 bits, only 192 bits of 2 / pi matter for x 2 / pi modulo 4: those before give multiples of 4,
those behind less than 2^-137. No float64 is closer than 2^-62 quarter turns to a multiple of one
(J.-M. Muller, Elementary Functions, 3rd edition, chapter 11), so the remainder has at least 75
right bits.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import cache
from typing import Any, Final

from llvmlite import ir

from warpfit_server.engine.cpu.codegen import vector

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


_INFINITY: Final = float("inf")
_NAN: Final = float("nan")
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


def sine(x: vector.Vector) -> vector.Vector:
    """Sine, in float64."""
    return _sine(x, 0)


def cosine(x: vector.Vector) -> vector.Vector:
    """Cosine, in float64."""
    return _sine(x, 1)


def _sine(x: vector.Vector, quarter: int) -> vector.Vector:
    """Sine of x plus ``quarter`` quarter turns, in float64."""
    trace = x.trace
    reduced = _reduced_by_half_pi(x)
    r, tail, count = trace.repair(reduced, _is_large(x), lambda: _large_reduced_by_half_pi(x))
    square = r * r
    sine = r + (square * r).fma(vector.polynomial(square, _SIN), square.fma(tail * -0.5, tail))
    rest = square.fma(square * vector.polynomial(square, _COS), -(r * tail))
    half = square * 0.5
    start = 1.0 - half
    cosine = start + ((1.0 - start - half) + rest)
    count = count + quarter
    result = trace.select((count & 1) == 0, sine, cosine)
    result = (result.bits() ^ ((count & 2) << 62)).real()
    near_zero = vector.absolute(x) < 1e-9
    return trace.select(near_zero, x if quarter == 0 else x * 0.0 + 1.0, result)


def _reduced_by_half_pi(x: vector.Vector) -> vector.Vectors:
    """Return r, what its rounding has lost, and k with x = k pi/2 + r, in float64.

    The reduction is that of Cody and Waite. ``near`` is exact: a multiple of 2^-53 below 1. The
    product of k, below 2^16, and the second part of pi / 2 is exact, too, because that part has 33
    bits. So ``near - r`` is exact: it is that product where near is the smaller of the two (r is
    then exact), and a step of Dekker's sum elsewhere.
    """
    k, count = vector.nearest(x * (2 / 3.141592653589793))
    first, second, third = _HALF_PI
    near = k.fma(-first, x)
    r = k.fma(-second, near)
    return r, k.fma(-third, k.fma(-second, near - r)), count


def _is_large(x: vector.Vector) -> vector.Vector:
    return vector.absolute(x) > _LIMIT


def _large_reduced_by_half_pi(x: vector.Vector) -> vector.Vectors:
    """`_reduced_by_half_pi` where `_is_large`; NaN for an infinite x."""
    trace = x.trace
    large = trace.select(_is_large(x) & (vector.absolute(x) < _INFINITY), x, 1.0)
    function = reduction(trace.builder.module)
    r, tail, count = trace.call_for_results(
        function, large, (x.element, x.element, vector.INTEGER[64])
    )
    return trace.select(vector.absolute(x) < _INFINITY, r, _NAN), tail, count


def tangent(x: vector.Vector) -> vector.Vector:
    """Tangent: the C library's; large numbers are reduced before exactly.

    A C library may lose digits there: glibc's is 14 ulp off where x is closest to a multiple.
    """
    trace, large = x.trace, _is_large(x)
    zero = x.like(0.0)
    reduced = (x, zero, zero.bits())
    r, tail, count = trace.repair(reduced, large, lambda: _large_reduced_by_half_pi(x))
    tangent = trace.call("tan", r)

    def turned() -> vector.Vectors:
        rest = tangent.fma(tangent, 1.0) * tail
        total = tangent + rest
        inverse = -1.0 / total
        error = inverse.fma(total, 1.0) + inverse * (tangent - total + rest)
        return (trace.select((count & 1) == 0, total, inverse + inverse * error),)

    return trace.repair((tangent,), large, turned)[0]
