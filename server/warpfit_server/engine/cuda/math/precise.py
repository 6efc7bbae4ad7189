"""CUDA C++ of the elementary functions of precise mode.

CUDA's own functions branch for special operands, and expressions with NaN or infinities in some
rows take those branches all the time. These functions have no branches, and give NaN, infinities
and signed zeros as NumPy does. Largest errors measured on one H200, over all float32 operands or at
least 10^9 pairs, and over samples of float64:

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
    return text + _double_source() if real == "double" else text


def _double_source() -> str:
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
    return re.sub(r"@(\w+)@", lambda field: fields[field[1]], _read("precise64.cu"))


def _split(value: Decimal) -> tuple[str, str]:
    """Split into a number with `_PLACES` binary places and the remainder."""
    unit = Decimal(2) ** -_PLACES
    high = (value / unit).to_integral_value() * unit
    return repr(float(high)), repr(float(value - high))


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text()
