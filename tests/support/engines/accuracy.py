"""Distances in units in the last place, and the table of error bounds by engine and mode.

The error of a result is its distance from the exact value for the given operands (for ``fma``, from
NumPy's float64 value) rounded to the data's type. Wherever ``where`` holds, it is at most ``ulp``
units in the last place of that value or ``absolute``, whichever is larger; elsewhere there is no
bound. The three are expressions in the kernel language of `warpfit.ops` over the operands and
``r``, the exact value, so that documentation and tests of every engine read the same numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from warpfit.expressions.reference import FUNCTIONS
from warpfit.ops import OPERATORS

Array = NDArray[Any]
#: Functions whose NumPy float64 form may itself be several ulp off need more digits as the truth.
_WIDE = np.longdouble


def ulps(got: Array, truth: Array) -> NDArray[np.float64]:
    """Distance of ``got`` from ``truth`` in ulp of got's type; 0 where both are special alike.

    A NaN, or an infinity, that only one of them has counts as infinitely far, but for an overflow
    on one side only, right at the type's largest number. ``truth`` may have more digits.
    """
    with np.errstate(all="ignore"):
        rounded = truth.astype(got.dtype)
        info = np.finfo(got.dtype)  # whose largest number NumPy gives an infinite ulp
        below = info.max - np.spacing(info.max / 2)
        spacing = np.spacing(np.minimum(np.abs(rounded), below)).astype(_WIDE)
        distance = np.abs(got.astype(_WIDE) - truth.astype(_WIDE)) / spacing
        limit = _WIDE(np.finfo(got.dtype).max)
        overflow = np.isinf(got) & (np.abs(truth) >= limit * (1 - _WIDE(np.finfo(got.dtype).eps)))
        overflow &= np.signbit(got) == np.signbit(truth)
        overflow |= np.isinf(rounded) & (got == np.copysign(limit, truth))
    alike = (got == rounded) | (np.isnan(got) & np.isnan(truth)) | overflow
    return np.where(alike, 0.0, np.where(np.isnan(distance), np.inf, distance)).astype(np.float64)


def rounded_threshold(operands: list[Array], dtype: DTypeLike) -> NDArray[np.bool_]:
    """Rows whose operand is the protected operators' threshold rounded to ``dtype``.

    There the definition on float64 and the operator on ``dtype`` take different branches: the
    table says that the threshold is rounded to the data's type.
    """
    threshold = np.dtype(dtype).type(0.001)
    return np.any([np.abs(x) == threshold for x in operands], axis=0)


@dataclass(frozen=True, slots=True)
class Bound:
    """Largest error of one operator in one mode."""

    ulp: str = "2"
    """Units in the last place of the exact value rounded to the data's type."""
    absolute: str = "0"
    """Bound where it is larger than that of ``ulp``."""
    where: str = ""
    """Condition on the operands under which the bound holds; empty for all."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of one operator; those of precise mode are for float32 and float64."""

    precise_cpu: Bound = Bound()
    precise_cuda: Bound = Bound()
    fast_cpu: Bound = Bound()
    fast_cuda: Bound = Bound()


_EXACT: Final = Bounds(*[Bound("0")] * 4)
#: CUDA's fast division treats divisors above 2^126 as infinite.
_DIVISOR: Final = Bound("2", where="(abs({0}) >= 1.2e-38) & (abs({0}) <= 8.5e37)")
_LOGARITHM: Final = Bound("3", "3.6e-7")
#: The error of log2 |a|, 2^-22 absolute or relative, is multiplied by the exponent.
_CUDA_POWER: Final = Bound(
    # Beyond this exponent the error of the logarithm changes the result by more than a few percent.
    "4 + 4 * abs(b) * (1 + abs(log2(abs(a))))",
    where="abs(b) <= 65536",
)
#: The logarithm has an error of 2^-23, which grows with the logarithm of the result.
_CPU_POWER: Final = Bound("4 + 2 * abs(log2(abs(r)))")
#: Functions of CUDA's library that divide or take roots, which fast mode approximates.
_LIBRARY: Final = Bounds(fast_cuda=Bound("8"))
_CIRCULAR: Final = Bound("2", "select(abs(a) <= 6.28, 7e-7, 4e-5)", "abs(a) <= 314")
_TANGENT: Final = Bound(
    "2", "1e-6 * (1 + abs(r)) * (1 + abs(r))", "(abs(a) <= 6.28) & (abs(r) <= 1000)"
)
_POWER: Final = Bounds(precise_cuda=Bound("4"), fast_cpu=_CPU_POWER, fast_cuda=_CUDA_POWER)
_LOGISTIC: Final = Bound("5 + 1.173 * abs(a)", where="abs(a) <= 87")
#: CUDA's lgamma has only an absolute accuracy between its largest and its smallest negative zero.
_OUTSIDE_ZEROS: Final = "(a < -11.001) | (a > -2.26)"


def _division(divisor: str) -> Bound:
    return Bound(_DIVISOR.ulp, where=_DIVISOR.where.format(divisor))


_BOUNDS: Final[Mapping[str, Bounds]] = {
    **dict.fromkeys(("add", "sub", "mul", "square", "neg", "abs", "min", "max"), _EXACT),
    **dict.fromkeys(("floor", "ceil", "round", "sign", "where", "relu"), _EXACT),
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"), _EXACT),
    **dict.fromkeys(("div", "pdiv", "zdiv"), Bounds(fast_cuda=_division("b"))),
    **dict.fromkeys(("inv", "pinv"), Bounds(fast_cuda=_division("a"))),
    **dict.fromkeys(("asin", "acos", "atan", "cosh", "log1p", "expm1", "erf", "cbrt"), _LIBRARY),
    **dict.fromkeys(("log", "logabs"), Bounds(fast_cuda=_LOGARITHM)),
    **dict.fromkeys(("sin", "cos"), Bounds(fast_cuda=_CIRCULAR)),
    **dict.fromkeys(("pow", "powabs"), _POWER),
    "exp": Bounds(fast_cuda=Bound("2 + 1.173 * abs(a)")),
    "tan": Bounds(precise_cuda=Bound("4"), fast_cuda=_TANGENT),
    "atan2": Bounds(precise_cuda=Bound("3"), fast_cuda=Bound("8", where="abs(b) <= 8.5e37")),
    "sinh": Bounds(precise_cuda=Bound("3"), fast_cuda=Bound("8")),
    "tanh": Bounds(fast_cuda=Bound("8192")),
    "log2": Bounds(fast_cuda=Bound("2", "2.4e-7")),
    "log10": Bounds(fast_cuda=Bound("3", "6e-8")),
    "aq": Bounds(precise_cuda=Bound("4"), fast_cuda=Bound("4", where="abs(b) <= 1e19")),
    "logistic": Bounds(precise_cuda=Bound("3"), fast_cpu=Bound("3"), fast_cuda=_LOGISTIC),
    # A remainder that is subnormal counts as 0 before b is added.
    "mod": Bounds(Bound("0"), Bound("0"), Bound("0"), Bound("0", where="abs(b) >= 2e-31")),
    "erfc": Bounds(precise_cpu=Bound("5"), precise_cuda=Bound("6"), fast_cuda=Bound("16")),
    "gamma": Bounds(precise_cpu=Bound("10"), precise_cuda=Bound("11"), fast_cuda=Bound("16")),
    "lgamma": Bounds(
        Bound("4"), Bound("6", where=_OUTSIDE_ZEROS), fast_cuda=Bound("12", where=_OUTSIDE_ZEROS)
    ),
    "plog": Bounds(precise_cuda=Bound("3"), fast_cuda=Bound("3")),
}
#: Bounds of every operator by name.
BOUNDS: Final[Mapping[str, Bounds]] = MappingProxyType(
    {name: _BOUNDS.get(name, Bounds()) for name in OPERATORS}
)


def error_limit(bound: Bound, operands: Sequence[Array], exact: Array) -> Array:
    """Return the largest allowed distance from the exact values, float64 [rows].

    It is infinite where there is no bound. Operands and exact values are of the data's type.
    """
    names = dict(zip("abc", (x.astype(np.float64) for x in operands), strict=False))
    names["r"] = exact.astype(np.float64)
    with np.errstate(all="ignore"):
        info = np.finfo(exact.dtype)  # NumPy's spacing of the largest number is infinite
        size = np.minimum(np.abs(exact), info.max - np.spacing(info.max / 2))
        ulp = np.spacing(size).astype(np.float64)
        limit = np.maximum(_value(bound.ulp, names) * ulp, _value(bound.absolute, names))
        holds = _value(bound.where, names) if bound.where else True
    return np.asarray(np.where(holds, limit, np.inf))


def _value(text: str, names: Mapping[str, Array]) -> Any:
    return eval(text, {"__builtins__": {}, **FUNCTIONS, **names})


def excess(bound: Bound, operands: Sequence[Array], got: Array, exact: Array) -> Array:
    """Return the error of each result as a share of its limit, float64 [rows]; at most 1 is right.

    An infinity is compared as the largest finite number. Where only one of result and exact value
    is NaN, the error is infinite. The exact values have at least the digits of ``got``.
    """
    with np.errstate(all="ignore"):
        rounded = exact.astype(got.dtype)
        largest = np.longdouble(np.finfo(got.dtype).max)
        wide = [np.clip(x.astype(np.longdouble), -largest, largest) for x in (got, rounded)]
        distance = np.abs(wide[0] - wide[1]).astype(np.float64)
        limit = error_limit(bound, operands, rounded)
        share = np.where(distance == 0, 0.0, distance / limit)
    share = np.where(np.isnan(got) != np.isnan(rounded), np.inf, share)
    return np.where(np.isinf(limit) | (np.isnan(got) & np.isnan(rounded)), 0.0, share)
