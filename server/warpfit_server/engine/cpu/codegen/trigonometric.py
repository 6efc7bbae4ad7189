"""Sine, cosine and tangent on vectors of float64: x = k pi/2 + r, and a polynomial in r.

Numbers up to `_LIMIT` are reduced with pi/2 in three parts, larger ones by `argument_reduction`,
which takes seven times as long.
"""

from __future__ import annotations

from typing import Final

from warpfit_server.engine.cpu.codegen import vector
from warpfit_server.engine.cpu.codegen.argument_reduction import reduction

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
    """Tangent: the C library's; large numbers are reduced before by `argument_reduction`.

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
