"""Constraints on the formulas of a search: limits of complexity, monotonicity and units."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from warpfit.errors import InvalidArgumentError, bad_setting, did_you_mean
from warpfit.expressions.language import ALIASES
from warpfit.expressions.reference import evaluate_program
from warpfit.formulas.units import joined
from warpfit.ir import Program
from warpfit.ops import BY_CODE, CONSTANT, OPERATORS, PARAMETER, VARIABLE
from warpfit.parse import MACROS, function, function_names
from warpfit.searching import Units
from warpfit.sklearn.genomes import (
    DIV,
    GLUE,
    OPERANDS,
    Codes,
    Floats,
    Genomes,
    Indices,
    Mask,
    depths,
    fold,
    simplified,
)

if TYPE_CHECKING:
    from warpfit.sklearn.templates import Form

#: Dimensions closer to each other than this are equal.
_SAME_DIMENSION: Final = 1e-9
_KINDS: Final = ("depth", "count", "nesting", "monotonic")
#: Operators by the symbols that users write; "-" with two operands.
_BY_SYMBOL: Final = {
    **{row.symbol: name for name, row in OPERATORS.items() if row.symbol and row.arity == 2},
    "**": "pow",
}


def operator_name(given: str, field: str = "operators") -> str:
    """Return the name of an operator that is given by its name, its symbol or an alias of texts.

    Raises:
        InvalidArgumentError: if there is none.

    """
    name = _BY_SYMBOL.get(given, ALIASES.get(given, given))
    if name not in OPERATORS and MACROS.find(name) is None:
        begins = [one for one in function_names() if len(one) > 2 and given.startswith(one)]
        meant = f"Did you mean {max(begins, key=len)}?" if begins else ""
        raise InvalidArgumentError(
            f"operator {given!r} is not known",
            "UNKNOWN_OPERATOR",
            meant
            or did_you_mean(
                given,
                [*function_names(), *ALIASES],
                "OPERATORS.md lists them, and warpfit.define(name, formula) adds one",
            ),
            field,
        )
    return name


def operator_code(given: str, field: str = "operators") -> int:
    """Return the code of an operator or macro, as `operator_name`."""
    row = function(operator_name(given, field))
    assert row is not None
    return row.code


def operator_names(given: Sequence[str]) -> tuple[str, ...]:
    """Return the names of different operators, as `operator_name`.

    Raises:
        InvalidArgumentError: if one is not known, or there is none.

    """
    if not isinstance(given, Sequence):
        raise bad_setting("operators", given, "a list; client.search takes weights of operators")
    several: Sequence[Any] = [given] if isinstance(given, str) else given
    names = tuple(dict.fromkeys(operator_name(str(one)) for one in several))
    if not names:
        raise InvalidArgumentError(
            "there are no operators", "UNKNOWN_OPERATOR", "Name at least one", "operators"
        )
    return names


def complexity_measure(weights: Mapping[str, int] | None) -> Callable[[Genomes], Indices]:
    """Return the sum of the tokens' weights: 1, or what is given for an operator.

    Raises:
        InvalidArgumentError: for an unknown operator, or a weight that is no number from 1.

    """
    table = np.ones(256, np.int64)
    table[0] = 0
    for given, weight in _limits(weights or {}, "complexity_of_operators").items():
        code = operator_code(given, "complexity_of_operators")
        _require_count(weight, f"complexity_of_operators[{given!r}]", 1)
        table[code] = weight
    return lambda genomes: genomes.totals(table[genomes.codes])


def check_constraints(constraints: Any) -> None:
    """Raise InvalidArgumentError for constraints that are not known or are no numbers.

    They are ``{"depth": 5, "count": {"exp": 1}, "nesting": {"sin": {"sin": 0}}}``: height of the
    tree, most uses of an operator, and how often one may be nested in another.
    """
    for kind, given in _limits(constraints or {}).items():
        _checks(kind, given)


def _checks(kind: str, given: Any) -> list[Callable[[Genomes], Mask]]:
    if kind == "depth":
        _require_count(given, "constraints['depth']", 1)
        return [lambda genomes: depths(genomes) <= given]
    if kind == "count":
        return [_count_check(_code(name), limit) for name, limit in _limits(given).items()]
    if kind == "nesting":
        return [
            _nesting_check(_code(outer), _code(inner), limit)
            for outer, limits in _limits(given).items()
            for inner, limit in _limits(limits).items()
        ]
    if kind == "monotonic":
        return []  # Numbers decide, not the structure; see `monotonicity`.
    remedy = did_you_mean(kind, _KINDS, f"Choose from {', '.join(_KINDS)}")
    if kind in (*OPERATORS, *_BY_SYMBOL):  # as in PySR, for the size of an operator's arguments
        remedy = "client.search(data, arguments=...) limits the arguments of an operator, or write "
        remedy += f"constraints={{'count': {{{kind!r}: 1}}}} for how often it may occur"
    raise InvalidArgumentError(
        f"constraint {kind!r} is not known",
        "BAD_SETTING",
        remedy,
        "constraints",
    )


def _limits(given: Any, field: str = "constraints") -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    raise InvalidArgumentError(
        f"{given!r} is no dict", "BAD_SETTING", "Give a number by operator, as {'sin': 1}", field
    )


def _code(name: str) -> int:
    return operator_code(name, "constraints")


def _count_check(code: int, limit: int) -> Callable[[Genomes], Mask]:
    _require_count(limit, "a limit of constraints['count']", 0)
    return lambda genomes: genomes.totals(genomes.codes == code) <= limit


def _nesting_check(outer: int, inner: int, limit: int) -> Callable[[Genomes], Mask]:
    _require_count(limit, "a limit of constraints['nesting']", 0)

    def check(genomes: Genomes) -> Mask:
        def join(code: Codes, a: Any, b: Any, c: Any) -> Any:
            second = np.where(OPERANDS[code] > 1, b, 0)
            third = np.where(OPERANDS[code] > 2, c, 0)
            return np.maximum(np.maximum(a, second), third) + (code == inner)

        nested = fold(genomes, np.zeros(genomes.codes.shape, np.int64), join)
        own = int(outer == inner)
        return np.asarray(genomes.totals((genomes.codes == outer) & (nested - own > limit)) == 0)

    return check


def _require_count(value: Any, what: str, least: int) -> None:
    if not isinstance(value, int | np.integer) or value < least:
        raise InvalidArgumentError(
            f"{what} is {value!r}", "BAD_SETTING", f"Give a number from {least}"
        )


#: Names of the constraint's directions.
_DIRECTIONS: Final = {"increasing": 1.0, "decreasing": -1.0}

#: Derivatives below this part of a formula's largest are rounding.
_ROUNDING: Final = 1e-9
#: Step of a difference as part of a variable's range, and differences that are rounding as part of
#: the values.
_STEP: Final = 1e-6
_FLAT: Final = 1e-12


def directions(given: Mapping[str, str], names: Sequence[str], variables: int) -> dict[int, float]:
    """Return 1 for variables in which a formula has to increase, -1 for those where it decreases.

    Args:
        given: ``"increasing"`` or ``"decreasing"`` by name (x1, x2, ... without names).
        names: of the variables, or empty.
        variables: their number.

    Raises:
        InvalidArgumentError: for other names or directions.

    """
    known = list(names) or [f"x{place + 1}" for place in range(variables)]
    named = given.items() if isinstance(given, Mapping) else [(given, "no direction")]
    for name, direction in named:
        if name not in known or direction not in _DIRECTIONS:
            raise InvalidArgumentError(
                f"constraint of monotonicity {name!r}: {direction!r}",
                "BAD_SETTING",
                did_you_mean(
                    direction if name in known else name,
                    _DIRECTIONS if name in known else known,
                    f"Say increasing or decreasing, of {', '.join(known)[:200]}",
                ),
                "constraints",
            )
    return {known.index(name): _DIRECTIONS[direction] for name, direction in named}


def consistency(
    dimensions_of_variables: Floats, constants: float = np.nan, target: float | None = None
) -> Callable[[Genomes], Mask]:
    """Return which formulas add and compare only what has one dimension.

    Functions such as exp take numbers.

    Args:
        dimensions_of_variables: [variables].
        constants: dimension of constants; NaN for that which is wanted, which the slope and the
            intercept of a formula have, too.
        target: dimension of the whole formula; None for any.

    """

    def check(genomes: Genomes) -> Mask:
        places = np.where(genomes.codes == VARIABLE, genomes.values, 0).astype(np.int64)
        leaves = np.where(genomes.codes == CONSTANT, constants, dimensions_of_variables[places])
        with np.errstate(invalid="ignore"):
            found = fold(genomes, leaves, joined)
            kept = np.asarray(genomes.totals(np.isinf(found)) == 0)
            if target is not None:
                whole = found[genomes.starts[1:] - 1]
                kept &= np.isnan(whole) | (np.abs(whole - target) < _SAME_DIMENSION)
        return kept

    return check


#: Operators that others stand for: each set on the left writes what is on the right. So formulas
#: that are simplified may have operators that a user has not named, as x^2 for x*x.
_WRITTEN: Final = (
    ({"mul"}, {"square", "cube", "neg"}),
    ({"sub"}, {"add", "neg"}),
    ({"add", "neg"}, {"sub"}),
    ({"div"}, {"mul", "inv", "square", "cube", "neg"}),
    ({"inv", "mul"}, {"div"}),
    ({"pow"}, {"square", "cube", "inv", "sqrt"}),
)
#: Whole powers are products, and these multiples of 1 roots of them.
_ROOTS: Final = {"sqrt": 2.0, "cbrt": 3.0}
_LARGEST_POWER: Final = 9.0
_POW: Final = OPERATORS["pow"].code


def writing(names: Sequence[str]) -> Callable[[Genomes], Mask]:
    """Return which formulas are made of some operators, or of others that these stand for.

    A power with a constant exponent is a product if the exponent is a whole number, and one of
    roots if these are known; a quotient by a constant is a product.

    Args:
        names: operators and functions that are written with operators.

    """
    known = set(names)
    for name in names:
        macro = MACROS.find(name)
        if macro is not None:
            known |= {BY_CODE[code].name for code in macro.codes if code in BY_CODE}
    size = -1
    while size < len(known):
        size = len(known)
        for given, written in _WRITTEN:
            known |= written if given <= known else set()
    codes = {row.code for name in known if (row := function(name)) is not None}
    allowed = np.zeros(256, bool)
    allowed[[CONSTANT, VARIABLE, PARAMETER, GLUE, *codes]] = True
    parts = [1.0] * bool(known & {"square", "cube"})
    parts += [_ROOTS[name] for name in sorted(known & _ROOTS.keys())]
    least = -_LARGEST_POWER if "inv" in known else 0.0

    def check(genomes: Genomes) -> Mask:
        strange = ~allowed[genomes.codes]
        before = np.concatenate([[False], (genomes.codes == CONSTANT)[:-1]])
        if "mul" in known:
            strange &= ~((genomes.codes == DIV) & before)
        exponent = np.concatenate([[np.nan], genomes.values[:-1]])
        with np.errstate(invalid="ignore"):
            of_roots = np.any([(exponent * part) % 1.0 == 0.0 for part in parts], axis=0)
            in_range = (exponent >= least) & (exponent <= _LARGEST_POWER)
        strange &= ~((genomes.codes == _POW) & before & of_roots & in_range)
        return np.asarray(genomes.totals(strange) == 0)

    return check


@dataclass(frozen=True)
class FormulaRules:
    """The rules of a user for formulas: operators, sizes, constraints, units and a template."""

    form: Form
    operators: tuple[str, ...]
    """Names of all operators that are given, those of guesses and of the template included."""
    constraints: Mapping[str, Any]
    measure: Callable[[Genomes], Indices]
    """Complexity; see `complexity_measure`."""
    most: int
    """Greatest complexity of a formula as it is shown, slope and intercept included."""
    most_searched: int
    """The same of the formula f of a + b f in the search."""
    rows: Floats
    """Rows on which monotonicity holds, [rows, variables]."""
    signs: Mapping[int, float]
    """Directions by variable; see `directions`."""
    complexities: Mapping[str, int] = field(default_factory=dict)
    """Complexity of operators that do not count as 1, by their names."""
    dimensions: Floats | None = None
    """Dimension of each variable; None without units."""
    target: float | None = None
    """Dimension of the target; None for any."""
    dimensionless: bool = False
    """Whether constants are numbers without a unit."""
    units: Units | None = None
    """The same three as exponents of the base units; None without units."""

    @cached_property
    def _structure(self) -> Callable[[Genomes], Mask]:
        """Return which functions that are searched keep to operators and constraints."""
        written = writing(self.operators)
        checks = [
            check for kind, given in self.constraints.items() for check in _checks(kind, given)
        ]

        def check(cores: Genomes) -> Mask:
            kept = written(cores)
            for one in checks:
                kept &= one(cores)
            return np.asarray(kept)

        return check

    def size(self, program: Program) -> int:
        """Return the complexity of a formula as it is shown."""
        return int(self.measure(Genomes.of(self.form.parts_of(program))).sum())

    def fits_unit(self, program: Program) -> bool:
        """Tell whether a formula, slope and intercept included, has a unit that fits."""
        if self.dimensions is None:
            return True
        constant = 0.0 if self.dimensionless else np.nan
        is_consistent = consistency(self.dimensions, constant, self.target)
        return bool(is_consistent(Genomes.of([program]))[0])

    def allows(self, program: Program) -> bool:
        """Tell whether a formula may be shown: whether it keeps to all that a user has ruled.

        Whatever has made the formula, a search, a simplification or a fit, this decides.
        """
        if not self.fits_unit(program):
            return False
        if not program.variables:
            return not self.form.is_template
        if self.form.is_template and not self.form.knows(program):
            return False
        # Functions that are written with operators are one token in the search alone, which has
        # weighed them.
        if all(name in OPERATORS for name in self.operators):
            parts = simplified(Genomes.of(self.form.parts_of(program)))
            parts = parts[parts.totals(parts.codes == VARIABLE) > 0]
            if self.size(program) > self.most or not self._structure(parts).all():
                return False
        if not self.signs:
            return True
        values = evaluate_program(program, self.rows.T)
        for place, sign in self.signs.items():
            step = np.zeros(self.rows.shape[1])
            step[place] = _STEP * np.ptp(self.rows[:, place])
            ahead = evaluate_program(program, (self.rows + step).T)
            if not (sign * (ahead - values) >= -_FLAT * np.abs(values)).all():
                return False
        return True


#: Greatest sum of the sizes of a product's exponents, most factors, and most variables and products
#: of each kind in formulas that have the unit of the target.
_MOST_EXPONENTS: Final = 6
_MOST_FACTORS: Final = 3
_MOST_VARIABLES: Final = 10
_MOST_PRODUCTS: Final = 6


def reachable(variables: Floats, target: Floats) -> bool:
    """Tell whether a product of powers of variables has the unit of a target.

    Args:
        variables: exponents of the base units of each variable, [variables, base units].
        target: those of the target, [base units].

    """
    powers = np.linalg.lstsq(variables.T, target, rcond=None)[0]
    return bool(np.allclose(variables.T @ powers, target, atol=_SAME_DIMENSION))


def with_unit(operators: Sequence[str], variables: Floats, target: float) -> list[Program]:
    """Return formulas m f(c d), shortest first, that have the unit of a target.

    The constant c has none: m is a product of powers with the unit of the target, d one without a
    unit, and f one of the operators (Buckingham, "On physically similar systems", 1914).

    Args:
        operators: names.
        variables: dimension of each variable.
        target: dimension of the target.

    """
    if not {"mul", "div"} <= {*operators}:
        return []
    found: dict[bool, list[dict[int, float]]] = {True: [], False: []}
    places = range(min(len(variables), _MOST_VARIABLES))
    whole = [e for e in range(-_MOST_EXPONENTS, _MOST_EXPONENTS + 1) if e]
    for total in range(1, _MOST_EXPONENTS + 1):
        for count in range(1, min(_MOST_FACTORS, total, len(places)) + 1):
            several = [
                e for e in itertools.product(whole, repeat=count) if sum(map(abs, e)) == total
            ]
            for chosen in itertools.combinations(places, count):
                own = variables[[*chosen]]
                for exponents in several:
                    dimension = float(own @ exponents)
                    for is_plain, wanted in ((False, target), (True, 0.0)):
                        if abs(dimension - wanted) < _SAME_DIMENSION:
                            found[is_plain].append(dict(zip(chosen, exponents, strict=True)))
    plain = [product(each, operators) for each in found[True][:_MOST_PRODUCTS]]
    outer = [product(each, operators) for each in found[False][:_MOST_PRODUCTS]]
    unary = [name for name in operators if name in OPERATORS and OPERATORS[name].arity == 1]
    scaled = [Program.apply("mul", Program.constant(c), d) for d in plain for c in (1.0, -1.0)]
    inner = [Program.apply(name, each) for each in scaled for name in unary]
    if abs(target) < _SAME_DIMENSION:
        return sorted(inner, key=len)
    made = [Program.apply("mul", m, each) for m in outer for each in inner]
    return sorted([*outer, *made], key=len)


def product(powers: Mapping[int, float], operators: Collection[str]) -> Program:
    """Return a product of powers of variables, with exponents that are multiples of 1/2."""
    above = [_power(index, power, operators) for index, power in powers.items() if power > 0]
    below = [_power(index, -power, operators) for index, power in powers.items() if power < 0]
    sides = [
        side[0]
        if len(side) == 1
        else Program.apply("mul", *side)
        if side
        else Program.constant(1.0)
        for side in (above, below)
    ]
    return Program.apply("div", *sides) if below else sides[0]


def _power(index: int, power: float, operators: Collection[str]) -> Program:
    variable = Program.variable(index)
    if power % 1:
        root = Program.apply("sqrt", variable)
        return (
            root if power < 1 else Program.apply("mul", _power(index, power // 1, operators), root)
        )
    if power == 1:
        return variable
    if power == 3 and "cube" in operators:
        return Program.apply("cube", variable)
    if "square" not in operators:
        return Program.apply("mul", *[variable] * int(power))
    even = Program.apply("square", _power(index, power // 2, operators))
    return Program.apply("mul", even, variable) if power % 2 else even
