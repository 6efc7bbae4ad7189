"""Operands at which implementations of elementary functions lose digits, for any engine.

A function is computed by reducing its operand and switching between methods. Digits are lost next
to the zeros of a reduction (multiples of pi/2 and of ln 2, powers of two, 1), at the switches, and
where operand or result is subnormal, huge or just short of an overflow (J.-M. Muller, Elementary
Functions, 3rd edition, chapter 11). Random operands meet none of them.
"""

from typing import Any, Final

import mpmath
import numpy as np
from numpy.typing import DTypeLike, NDArray

from support.engines.accuracy import BOUNDS
from warpfit.ops import Operator

Array = NDArray[Any]
_WIDE = np.longdouble
_HALF_PI: Final = np.arctan2(_WIDE(1), _WIDE(0))
_LN2: Final = np.log(_WIDE(2))
#: The float64 that is closest to a multiple of pi/2, relative to its size (Muller, chapter 11.1).
CLOSEST_TO_HALF_PI: Final = 6381956970095103 * 2.0**797
#: Where the engines' functions, or C libraries', change their method.
_SWITCHES: Final = (1e-200, 1e-9, 1e-3, 0.25, 0.35, 0.5, 2 / 3, 0.75, 4 / 3, 22, 40, 1e5, 1e9, 1e77)
#: Functions that NumPy has not, in mpmath's arithmetic, which takes long.
SLOW: Final = {
    "erf": mpmath.erf,
    "erfc": lambda x: mpmath.erfc(min(x, 30)),  # 1e-393 at 30
    "gamma": mpmath.gamma,
    "lgamma": lambda x: mpmath.log(abs(mpmath.gamma(x))) if x <= -9 else mpmath.loggamma(x).real,
}


def near_multiples_of_half_pi(dtype: DTypeLike, count: int) -> Array:
    """Give the floats next to k pi/2 on both sides, for k from 1 to ``count``; [3 * count]."""
    return _neighbours(np.arange(1, count + 1) * _HALF_PI, dtype)


def hard_operands(operator: Operator, dtype: DTypeLike) -> Array:
    """Operands [arity, rows] for one operator, the same in every run."""
    rng = np.random.default_rng(operator.code)
    single = _single(rng, np.dtype(dtype))
    if operator.arity == 1:
        return single[np.newaxis]
    columns = [rng.permutation(single)[:20_000] for _ in range(operator.arity)]
    rows = [np.stack(columns)]
    if operator.arity == 2:
        rows += [_close_pairs(rng, columns[0]), _powers(rng, columns[0])]
    return np.concatenate(rows, axis=1)


def exact_values(operator: Operator, operands: Array) -> Array:
    """Values of an operator with more digits than float64 has; [rows] of operands [arity, rows].

    NumPy's extended precision does for all but those of `SLOW`, which it has not; ``fma``, which
    means NumPy's float64; and what must be rounded to the nearest number, for which float64 rounds
    rightly and extended precision, rounded again, does not always.
    """
    with np.errstate(all="ignore"):
        if operator.name in SLOW:
            return np.array([_by_mpmath(operator, x) for x in operands[0].tolist()], dtype=_WIDE)
        nearest = operator.name == "fma" or BOUNDS[operator.name].precise_cpu.ulp == "0"
        kind = np.float64 if nearest else _WIDE
        return np.asarray(operator.numpy(*operands.astype(kind)))


def _by_mpmath(operator: Operator, x: float) -> np.longdouble:
    value = float(operator.numpy(x))
    is_pole = operator.name in ("gamma", "lgamma") and x <= 0 and x.is_integer()
    if not np.isfinite(x) or is_pole or (operator.name == "gamma" and abs(x) > 1700):
        return _WIDE(value)
    with mpmath.workprec(150 if operator.name == "lgamma" else 80):
        return _WIDE(mpmath.nstr(SLOW[operator.name](x), 24))


def _neighbours(values: Array, dtype: DTypeLike) -> Array:
    """Round to the type, and give the floats below and above, too."""
    kind = np.dtype(dtype).type
    with np.errstate(over="ignore", under="ignore"):
        middle = np.asarray(values).astype(kind)
    below, above = (np.nextafter(middle, kind(side)) for side in (-np.inf, np.inf))
    return np.concatenate([below, middle, above])


def _single(rng: np.random.Generator, dtype: np.dtype[Any]) -> Array:
    info = np.finfo(dtype)
    bits = rng.integers(0, 2 ** (8 * dtype.itemsize), 40_000, dtype=f"u{dtype.itemsize}")
    exponents = np.arange(info.minexp - info.nmant, info.maxexp)
    significands = np.array([1.0, 4 / 3, 2**0.5, 1.5])[:, np.newaxis]
    limits = [np.log(_WIDE(x)) for x in (info.max, info.tiny, info.smallest_subnormal)]
    near_limits = np.concatenate([limit * (1 + rng.normal(size=300) * 1e-5) for limit in limits])
    near_one = 1 + rng.uniform(-1, 1, 4_000) * 2.0 ** -rng.integers(0, info.nmant, 4_000)
    many = rng.integers(1, 1_000_000, 4_000)
    positive = [
        _neighbours(np.ldexp(significands.astype(_WIDE), exponents).ravel(), dtype),
        _neighbours(np.arange(1, 4400) * _LN2 / 4, dtype),
        _neighbours(np.concatenate([np.arange(1, 4_000), many]) * _HALF_PI / 2, dtype),
        _neighbours(np.arange(1, 400) / _WIDE(2), dtype),
        _neighbours(np.array([*limits, *_SWITCHES, CLOSEST_TO_HALF_PI]), dtype),
        near_limits.astype(dtype),
        near_one.astype(dtype),
        *(rng.uniform(0, size, 8_000).astype(dtype) for size in (2, 20, 750)),
    ]
    both = np.concatenate(positive)
    return np.concatenate([bits.view(dtype), both, -both])


def _close_pairs(rng: np.random.Generator, first: Array) -> Array:
    """Second operands of nearly the first's size, or of a size that makes the quotient extreme."""
    info = np.finfo(first.dtype)
    sizes = [0, 1, 30, info.maxexp, info.minexp, info.minexp - info.nmant]
    exponents = rng.choice(sizes, first.size)
    with np.errstate(all="ignore"):
        factor = rng.uniform(0.5, 2, first.size) * rng.choice([-1, 1], first.size)
        second = first.astype(_WIDE) * factor * np.ldexp(_WIDE(1), -exponents)
        return np.stack([first, second.astype(first.dtype)])


def _powers(rng: np.random.Generator, first: Array) -> Array:
    """Exponents that give powers of every size: of any base, of one near 1, of a negative one."""
    info = np.finfo(first.dtype)
    near = 1 + rng.uniform(-0.5, 0.5, first.size) * 2.0 ** -rng.integers(0, info.nmant, first.size)
    base = np.where(rng.random(first.size) < 0.5, np.abs(first), near.astype(first.dtype))
    target = rng.uniform(info.minexp - info.nmant - 5, info.maxexp + 5, first.size)
    with np.errstate(all="ignore"):
        exponent = target / np.log2(base.astype(_WIDE))
        whole = rng.random(first.size) < 0.3
        exponent = np.where(whole, np.rint(exponent), exponent).astype(first.dtype)
    return np.stack([np.where(whole, -base, base), exponent])
