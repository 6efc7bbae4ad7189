"""Constraints on the formulas of a search: limits of complexity, monotonicity and units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client
from warpfit.errors import InvalidArgumentError
from warpfit.formulas.units import joined
from warpfit.ir import Batch
from warpfit.ops import CONSTANT, OPERATORS, PARAMETER, VARIABLE
from warpfit.parse import MACROS, function, function_names
from warpfit.sklearn.genomes import (
    ADD,
    OPERANDS,
    Codes,
    Floats,
    Genomes,
    Indices,
    Mask,
    depths,
    fold,
    packed,
    tokens,
)

#: Dimensions closer to each other than this are equal.
_SAME_DIMENSION: Final = 1e-9
_KINDS: Final = ("depth", "count", "nesting", "monotonic")
#: Operators by the symbols that users write; "-" with two operands.
_BY_SYMBOL: Final = {
    **{row.symbol: name for name, row in OPERATORS.items() if row.symbol and row.arity == 2},
    "**": "pow",
}


def operator_name(given: str, field: str = "operators") -> str:
    """Return the name of an operator that is given by its name or its symbol.

    Raises:
        InvalidArgumentError: if there is none.

    """
    name = _BY_SYMBOL.get(given, given)
    if name not in OPERATORS and MACROS.find(name) is None:
        raise InvalidArgumentError(
            f"operator {given!r} is not known",
            "UNKNOWN_OPERATOR",
            f"Choose from {', '.join([*function_names(), *_BY_SYMBOL])}",
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
    is_one = isinstance(given, str) or not isinstance(given, Sequence)
    several: Sequence[Any] = [given] if is_one else given
    names = tuple(dict.fromkeys(map(operator_name, several)))
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


def admission(
    constraints: Mapping[str, Any] | None, complexity: Callable[[Genomes], Indices], most: int
) -> Callable[[Genomes], Mask]:
    """Return which formulas have a variable, are not too complex, and meet the constraints.

    Args:
        constraints: ``{"depth": 5, "count": {"exp": 1}, "nesting": {"sin": {"sin": 0}}}``: height
            of the tree, most uses of an operator, and how often one may be nested in another.
        complexity: as `complexity_measure`.
        most: greatest complexity.

    Raises:
        InvalidArgumentError: for constraints that are not known or are no numbers.

    """
    checks = [
        check
        for kind, given in _limits(constraints or {}).items()
        for check in _checks(kind, given)
    ]

    def admit(genomes: Genomes) -> Mask:
        kept = (genomes.totals(genomes.codes == VARIABLE) > 0) & (complexity(genomes) <= most)
        for check in checks:
            kept &= check(genomes)
        return np.asarray(kept)

    return admit


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
    raise InvalidArgumentError(
        f"constraint {kind!r} is not known",
        "BAD_SETTING",
        f"Choose from {', '.join(_KINDS)}",
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
#: Returns the part of the rows in which a + b f violates a constraint; takes f, b and the rows.
Violations = Callable[[Genomes, Floats, DatasetHandle], Floats]


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
                f"Say increasing or decreasing, of {', '.join(known)[:200]}",
                "constraints",
            )
    return {known.index(name): _DIRECTIONS[direction] for name, direction in named}


def violations(
    given: Mapping[str, str], names: Sequence[str], variables: int, client: Client
) -> Violations:
    """Return a measure of violations; arguments as for `directions`.

    The derivative of a formula by a variable is that by a parameter that is added to it.
    """
    signs = directions(given, names, variables)

    def measure(genomes: Genomes, slopes: Floats, data: DatasetHandle) -> Floats:
        found = np.zeros(len(genomes))
        for variable, sign in signs.items():
            places = (genomes.codes == VARIABLE) & (genomes.values == variable)
            used = genomes.totals(places) > 0
            if used.any():
                plain = _shifted(genomes, places)[used].population()
                ones = np.ones(len(plain), np.uint32)
                batch = Batch(
                    plain.codes,
                    plain.values,
                    plain.lengths,
                    parameter_counts=ones,
                    parameters=np.zeros(len(plain)),
                )
                jacobians: Any = client.run(data, batch, jacobian=True).jacobians
                with np.errstate(invalid="ignore"):
                    rising = np.hstack(jacobians) * sign * np.sign(slopes[used])
                least = -_ROUNDING * np.abs(rising).max(axis=0)
                found[used] += np.mean(~(rising >= least), axis=0)
        return found

    return measure


def _shifted(genomes: Genomes, places: Mask) -> Genomes:
    """Write x + p1 for the variables in some places."""
    above = [tokens(np.where(places, code, 0)) for code in (PARAMETER, ADD)]
    one = Genomes(genomes.codes, genomes.values, np.arange(len(places) + 1))
    made = packed([one, *above])
    return Genomes(made.codes, made.values, made.starts[genomes.starts])


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
