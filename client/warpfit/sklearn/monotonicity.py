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
from warpfit.sklearn.genomes import ADD, Floats, Genomes, Mask, packed

#: Names of the constraint's directions.
_DIRECTIONS: Final = {"increasing": 1.0, "decreasing": -1.0}

#: Derivatives below this part of a formula's largest are rounding.
_ROUNDING: Final = 1e-9
#: Returns the part of the rows in which a + b f violates a constraint; takes f, b and the rows.
Violations = Callable[[Genomes, Floats, DatasetHandle], Floats]


def check_directions(given: Mapping[str, str], names: Sequence[str]) -> None:
    """Check ``"increasing"`` or ``"decreasing"`` for names of variables.

    Raises:
        InvalidArgumentError: for other names or directions.

    """
    for name, direction in given.items():
        if name not in names or direction not in _DIRECTIONS:
            raise InvalidArgumentError(
                f"constraint of monotonicity {name!r}: {direction!r}",
                "BAD_SETTING",
                f"Say increasing or decreasing, of {', '.join(names)[:200]}",
                "constraints",
            )


def violations(given: Mapping[str, str], names: Sequence[str], client: Client) -> Violations:
    """Return a measure of violations of constraints that `check_directions` accepts.

    The derivative of a formula by a variable is that by a parameter that is added to it.
    """
    signs = {names.index(name): _DIRECTIONS[direction] for name, direction in given.items()}

    def measure(genomes: Genomes, slopes: Floats, data: DatasetHandle) -> Floats:
        found = np.zeros(len(genomes))
        for variable, sign in signs.items():
            places = (genomes.codes == VARIABLE) & (genomes.values == variable)
            used = places.any(axis=1)
            if used.any():
                plain = _shifted(genomes[used], places[used]).population()
                ones = np.ones(len(plain), np.uint32)
                batch = Batch(
                    plain.codes,
                    plain.values,
                    plain.lengths,
                    parameter_counts=ones,
                    parameters=np.zeros(len(plain)),
                )
                jacobians: Any = client.run(data, batch, jacobian=True).jacobians
                rising = np.hstack(jacobians) * sign * np.sign(slopes[used])
                least = -_ROUNDING * np.abs(rising).max(axis=0)
                found[used] += np.mean(~(rising >= least), axis=0)
        return found

    return measure


def _shifted(genomes: Genomes, places: Mask) -> Genomes:
    """Write x + p1 for the variables in some places."""
    added = [np.where(places, np.uint8(code), np.uint8(0)) for code in (PARAMETER, ADD)]
    codes = np.stack([genomes.codes, *added], axis=2)
    nothing = np.zeros(places.shape)
    values = np.stack([genomes.values, nothing, nothing], axis=2)
    width = 3 * genomes.width
    return packed([Genomes(codes.reshape(-1, width), values.reshape(-1, width))], width)
