"""Monotonicity: in how many rows formulas rise or fall where they should not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client
from warpfit.errors import InvalidArgumentError
from warpfit.ir import Batch
from warpfit.ops import PARAMETER, VARIABLE
from warpfit.sklearn.genomes import ADD, Floats, Genomes, Mask, packed, tokens

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
