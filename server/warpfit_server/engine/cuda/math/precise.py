"""CUDA C++ of precise mode's elementary functions; pure.

CUDA's own branch off for special operands, and expressions with NaN or infinities in some rows take
those branches all the time. These give NaN, infinities and signed zeros as NumPy does. Largest
errors measured on one H200, over all float32 operands or 10^9 pairs and more, and samples of
float64:

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

#: Function of the kernel language -> its form here.
_FUNCTIONS: Final = MappingProxyType(
    {"exp": "exponential", "log": "logarithm", "sqrt": "root", "pow": "power"}
)
_CALL: Final = re.compile(rf"\b({'|'.join(_FUNCTIONS)})\(")
#: Significands' short reciprocals in steps of 2^-7 below 1 and 2^-6 above: a little more than from
#: 2^-1/2 to 2^1/2.
_RECIPROCALS: Final = tuple(
    [Decimal(n) / 128 for n in range(90, 128)] + [Decimal(n) / 64 for n in range(64, 93)]
)
#: High word of the first, without its 14 lowest bits.
_FIRST: Final = 0x3FE68000 >> 14
#: Binary places of the larger part of a logarithm.
_PLACES: Final = 42


def precise_calls(expression: str) -> str:
    """Have an expression of the kernel language call the functions of precise mode."""
    return _CALL.sub(lambda call: f"{_FUNCTIONS[call[1]]}(", expression)


@cache
def precise_source(real: str) -> str:
    """Text of the functions for ``real``, to stand after the prelude."""
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
    """Split into a number with `_PLACES` binary places and the rest."""
    unit = Decimal(2) ** -_PLACES
    high = (value / unit).to_integral_value() * unit
    return repr(float(high)), repr(float(value - high))


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text()
