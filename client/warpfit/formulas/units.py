"""The units of formulas: which add and compare only what has one dimension.

A dimension is one number: the sum of the exponents of the base units, each times the square root of
another prime. These are independent over the rationals, so dimensions are equal exactly if the
numbers are, and they add up in products. NaN is the dimension of a constant, which may be any;
infinity that of a formula that is not consistent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.errors import InvalidArgumentError, ProgramError, did_you_mean, nearest_first
from warpfit.expressions.language import locate
from warpfit.expressions.real_numbers import unwrapped
from warpfit.ir import Program
from warpfit.ops import OPERATORS, VARIABLE, Operator
from warpfit.parse import MACROS

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

BASES: Final = dict(zip(("m", "kg", "s", "A", "K", "mol", "cd"), (2, 3, 5, 7, 11, 13, 17),
                         strict=True))  # fmt: skip
_PLACES: Final = {name: place for place, name in enumerate(BASES)}
_DERIVED: Final = {
    "1": "", "rad": "", "sr": "", "g": "kg", "Hz": "s^-1", "N": "kg*m/s^2", "Pa": "kg/m/s^2",
    "J": "kg*m^2/s^2", "W": "kg*m^2/s^3", "C": "A*s", "V": "kg*m^2/s^3/A", "F": "s^4*A^2/kg/m^2",
    "ohm": "kg*m^2/s^3/A^2", "S": "s^3*A^2/kg/m^2", "Wb": "kg*m^2/s^2/A", "T": "kg/s^2/A",
    "H": "kg*m^2/s^2/A^2",
}  # fmt: skip
#: pint's names of the base dimensions.
_OF_PINT: Final = {
    "[length]": "m", "[mass]": "kg", "[time]": "s", "[current]": "A", "[temperature]": "K",
    "[substance]": "mol", "[luminosity]": "cd",
}  # fmt: skip
_PART: Final = re.compile(r"([*/]?)\s*([A-Za-z]+|1)\s*(?:(?:\^|\*\*)\s*(-?\d+(?:\.\d+)?))?\s*")
#: pint's units, which take a while to read.
_registry: Final = cache(lambda: import_module("pint").UnitRegistry())
#: Most characters of a unit for pint.
_LONGEST: Final = 100
#: Dimensions closer to each other than this are equal.
_EQUAL: Final = 1e-9

#: Operators whose operands have one dimension, which is that of the result; and those whose result
#: has none.
_ALIKE: Final = ("add", "sub", "min", "max", "neg", "abs", "floor", "ceil", "round", "relu", "mod")
_COMPARED: Final = ("lt", "le", "gt", "ge", "eq", "ne", "atan2", "sign")
#: Operators of one operand that multiply its dimension.
_POWERS: Final = {
    "square": 2.0, "cube": 3.0, "sqrt": 0.5, "sqrtabs": 0.5, "cbrt": 1 / 3, "inv": -1.0,
    "pinv": -1.0,
}  # fmt: skip
#: The share of the second operand's dimension in the result.
_FACTORS: Final = {"mul": 1.0, "div": -1.0, "pdiv": -1.0, "zdiv": -1.0}


#: What the exponents of the base units are multiplied by in a dimension.
_ROOTS: Final = np.sqrt(list(BASES.values()))


def dimension(unit: Any, field: str = "units") -> float:
    """Return the dimension of a unit; arguments and errors as of `exponents`."""
    return float(exponents(unit, field) @ _ROOTS)


def exponents(unit: Any, field: str = "units") -> Floats:
    """Return the exponents of the base units m, kg, s, A, K, mol and cd in a unit, [7].

    Args:
        unit: text such as ``"kg*m/s^2"`` or ``"J/K"``, a mapping of base units to exponents, or
            None or "" for a number. Other names than those of SI's base and derived units without
            prefixes need pint.
        field: what an error names.

    Raises:
        InvalidArgumentError: for a unit that is not known.

    """
    total, place = np.zeros(len(BASES)), 0
    if isinstance(unit, Mapping):
        for name, power in unit.items():
            total += float(power) * exponents(name, field)
        return total
    text = str(unit or "").strip()
    while place < len(text):
        part = _PART.match(text, place)
        if part is None or bool(part[1]) != bool(place):
            return _by_pint(text, field)
        known = part[2] in BASES or part[2] in _DERIVED
        if not known:
            return _by_pint(text, field)
        power = float(part[3] or 1.0) * (-1.0 if part[1] == "/" else 1.0)
        if part[2] in BASES:
            total[_PLACES[part[2]]] += power
        else:
            total += power * exponents(_DERIVED[part[2]])
        place = part.end()
    return total


def _by_pint(text: str, field: str) -> Floats:
    if len(text) > _LONGEST:
        raise _unknown(text, field, f"Give a unit of at most {_LONGEST} characters")
    if find_spec("pint") is None:
        raise _unknown(text, field, "Use SI units without prefixes, or install pint")
    import pint

    try:
        found = _registry().get_dimensionality(text)
        total = np.zeros(len(BASES))
        for name, power in found.items():
            total[_PLACES[_OF_PINT[name]]] = float(power)
        return total
    except (pint.errors.PintError, AssertionError, LookupError, SyntaxError, ValueError) as error:
        raise _unknown(text, field, "Give a unit such as kg*m/s^2, or a mapping") from error


def _unknown(text: str, field: str, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"unit {text[:80]!r} is not known", "UNKNOWN_UNIT", remedy, field)


def dimensions(
    units: Mapping[str, Any] | Sequence[Any], names: Sequence[str], variables: int
) -> Floats:
    """Return the dimension of each variable; arguments and errors as of `exponents_of`."""
    return np.asarray(exponents_of(units, names, variables) @ _ROOTS)


def exponents_of(
    units: Mapping[str, Any] | Sequence[Any], names: Sequence[str], variables: int
) -> Floats:
    """Return the `exponents` of the unit of each variable, [variables, 7].

    Args:
        units: of each variable in turn, or by name (x1, x2, ... without names); those that a
            mapping leaves out are numbers.
        names: of the variables, or empty.
        variables: their number.

    Raises:
        InvalidArgumentError: for units that do not fit the variables, or are not known.

    """
    units = unwrapped(units)
    known = list(names) or [f"x{place + 1}" for place in range(variables)]
    if isinstance(units, Mapping):
        strange = [name for name in units if name not in known]
        given = [units.get(name) for name in known]
    else:
        strange, given = [], list(units) if isinstance(units, Iterable) else [units]
    if strange or isinstance(units, str) or len(given) != variables:
        what = f"there is no variable {strange[0]!r}" if strange else f"{len(given)} units"
        raise InvalidArgumentError(
            what,
            "BAD_SETTING",
            did_you_mean(
                strange[0] if strange else "",
                known,
                f"Give a unit for each of {nearest_first(strange[0] if strange else '', known)}",
            ),
            "units",
        )
    return np.array(
        [exponents(unit, f"units of {n}") for n, unit in zip(known, given, strict=True)]
    )


def _masks(names: Sequence[str]) -> Mask:
    return np.isin(np.arange(256), [OPERATORS[name].code for name in names])


_IS_ALIKE: Final = _masks(_ALIKE)
_IS_COMPARED: Final = _masks(_COMPARED)
_POWER_OF: Final = np.full(256, np.nan)
_POWER_OF[[OPERATORS[name].code for name in _POWERS]] = list(_POWERS.values())
_FACTOR_OF: Final = np.full(256, np.nan)
_FACTOR_OF[[OPERATORS[name].code for name in _FACTORS]] = list(_FACTORS.values())
_POW: Final = _masks(("pow", "powabs"))
_WHERE, _FMA = OPERATORS["where"].code, OPERATORS["fma"].code


def joined(codes: NDArray[np.uint8], a: Floats, b: Floats, c: Floats) -> Floats:
    """Return the dimensions of operators' results, of one shape, from those of their operands.

    Args:
        codes: of the operators, macros among them.
        a: dimension of the first operand.
        b: of the second one; ignored where there is none.
        c: of the third one, likewise.
    """
    arity = MACROS.operands[codes]
    b, c = np.where(arity > 1, b, a), np.where(arity > 2, c, a)
    # A function takes numbers and returns one; a power of a number by one is one.
    numbers = np.where(_no(a) & _no(b) & _no(c), 0.0, np.inf)
    power = np.where(_no(a) & _no(b), 0.0, np.where(np.isnan(b), np.nan, np.inf))
    choice = np.where(_no(a), _common(b, c), np.inf)
    result = np.select(
        [
            _IS_ALIKE[codes],
            _IS_COMPARED[codes],
            ~np.isnan(_POWER_OF[codes]),
            ~np.isnan(_FACTOR_OF[codes]),
            _POW[codes],
            codes == _WHERE,
            codes == _FMA,
        ],
        [
            _common(a, b),
            np.where(np.isinf(_common(a, b)), np.inf, 0.0),
            a * _POWER_OF[codes],
            a + b * _FACTOR_OF[codes],
            power,
            choice,
            _common(a + b, c),
        ],
        numbers,
    )
    return np.where(np.isinf(a) | np.isinf(b) | np.isinf(c), np.inf, result)


def _no(a: Floats) -> Mask:
    """Return where a dimension is none, or unknown."""
    return np.isnan(a) | (np.abs(a) < _EQUAL)


def _common(a: Floats, b: Floats) -> Floats:
    """Return the dimension of both, infinity if they differ."""
    either = np.where(np.isnan(a), b, a)
    return np.where(np.isnan(a) | np.isnan(b) | (np.abs(a - b) < _EQUAL), either, np.inf)


def check_units(
    program: Program, variables: Floats, target: float | None, names: Sequence[str] = ()
) -> None:
    """Check that a formula adds and compares only what has one dimension.

    Parameters and constants have the dimension that is wanted.

    Args:
        program: the formula.
        variables: dimension of each variable, at least as many as the formula uses.
        target: dimension that the formula has to have; None for any.
        names: of the variables, or empty.

    Raises:
        ProgramError: for the first operator whose operands do not fit, with its place, or if the
            formula as a whole has another dimension than the target.

    """
    place = -1

    def leaf(code: int, value: float) -> float:
        nonlocal place
        place += 1
        return float(variables[int(value)]) if code == VARIABLE else np.nan

    def operator(row: Operator, operands: list[float]) -> float:
        nonlocal place
        place += 1
        a, b, c = (np.array([x]) for x in (*operands, *[np.nan] * (3 - len(operands))))
        found = float(joined(np.array([row.code], np.uint8), a, b, c)[0])
        if np.isinf(found):
            raise wrong(f"the operands of {row.name} have dimensions that do not fit", place)
        return found

    def wrong(message: str, token: int) -> ProgramError:
        text, position = locate(program, token, names)
        remedy = "Add and compare what has one unit, and give functions such as exp plain numbers"
        return ProgramError(
            message, "UNITS_DIFFER", remedy, token=token, text=text, position=position
        )

    with np.errstate(invalid="ignore"):
        whole = program.fold(leaf, operator)
    if target is not None and not np.isnan(whole) and abs(whole - target) >= _EQUAL:
        raise wrong("the formula has another unit than the target", len(program) - 1)
