"""Numbers that a publication would print: integers, short decimals, fractions, multiples of pi, e.

Of each number there is a cost, by which formulas are compared: that of a token is 1, so a number of
one digit costs 1.25 with its token and one of many digits `FREE` + 1.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final

#: Cost of a number that has no short form; a fit may change it.
FREE: Final = 2.0
#: Cost of a digit.
_DIGIT: Final = 0.25
#: Most significant digits of a short decimal.
_MOST_DIGITS: Final = 4
_LARGEST_DENOMINATOR: Final = 12
#: Numerators and integer factors of pi and e.
_LARGEST_NUMERATOR: Final = 99
#: Units and the denominators that occur with them.
_UNITS: Final = (("pi", math.pi, (1, 2, 3, 4, 6, 8)), ("e", math.e, (1, 2)))
#: Part by which a number may differ from its short form, integers excepted.
_NEAR: Final = 0.1


@dataclass(frozen=True, slots=True)
class ShortForm:
    """A number that is written as it is, or as numerator / denominator times a unit."""

    value: float
    cost: float
    numerator: int = 0
    """0 for a number that is written as it is."""
    denominator: int = 1
    unit: str = ""
    """``"pi"``, ``"e"`` or nothing."""


def is_free(value: float) -> bool:
    """Tell whether a number is one that a fit may change, because it has no short form."""
    return short_form(value) is None


def cost(value: float) -> float:
    """Return what a number costs beside its token."""
    form = short_form(value)
    return FREE if form is None else form.cost


@lru_cache(maxsize=4096)
def short_form(value: float) -> ShortForm | None:
    """Return the cheapest short form that is this number to the last bit; None without one."""
    if not math.isfinite(value):
        return ShortForm(value, _DIGIT)
    forms = [form for form in _forms_near(value) if form.value == value]
    return min(forms, key=lambda form: form.cost, default=None)


def shorter_numbers(value: float) -> list[float]:
    """Return numbers near this one that cost less, the cheapest first; 0 is none of them."""
    own = cost(value)
    found = sorted(_forms_near(value), key=lambda form: (form.cost, abs(form.value - value)))
    cheaper = [form.value for form in found if form.cost < own and form.value != 0.0]
    return list(dict.fromkeys(cheaper))


def rounded(value: float, digits: int) -> float:
    """Return a number to so many significant digits; one in short form as it is."""
    return float(f"{value:.{digits}g}") if is_free(value) else value


def _forms_near(value: float) -> Iterator[ShortForm]:
    for digits in range(1, _MOST_DIGITS + 1):
        yield ShortForm(float(f"{value:.{digits}g}"), _DIGIT * digits)
    if not 1e-3 < abs(value) < 1e6:
        return
    integer = round(value)
    if integer:
        yield ShortForm(float(integer), _DIGIT * len(str(abs(integer)).rstrip("0")))
    for largest in (2, 3, 4, 6, 9, _LARGEST_DENOMINATOR):
        fraction = Fraction(value).limit_denominator(largest)
        yield from _fraction(value, fraction.numerator, fraction.denominator, "", 1.0)
    for name, unit, denominators in _UNITS:
        for denominator in denominators:
            numerator = round(value / unit * denominator)
            if math.gcd(numerator, denominator) == 1:
                yield from _fraction(value, numerator, denominator, name, unit)


def _fraction(
    value: float, numerator: int, denominator: int, name: str, unit: float
) -> Iterator[ShortForm]:
    number = numerator * unit / denominator
    is_near = abs(number - value) <= _NEAR * abs(value)
    if not numerator or abs(numerator) > _LARGEST_NUMERATOR or not is_near:
        return
    digits = len(str(denominator)) if denominator > 1 else 0
    digits += len(str(abs(numerator))) if abs(numerator) > 1 or not name else 0
    yield ShortForm(number, _DIGIT * (2 * bool(name) + digits), numerator, denominator, name)
