"""Forms: how the formulas f of a search become the programs that are computed and fitted.

Without a template the program is a + b f, whose slope and intercept have a closed form. Within a
template f is a part of the program, and all numbers are fitted (`templates`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client
from warpfit.errors import DeadlineExceededError
from warpfit.formulas.snapping import lift
from warpfit.ir import Program
from warpfit.losses import Loss, LossFunction
from warpfit.sklearn.genomes import GLUE, Floats, Genomes


def seconds_until(end: float) -> float | None:
    """Return the seconds until a time of `time.monotonic`; None for infinity.

    Raises:
        DeadlineExceededError: if it has passed.

    """
    if end == math.inf:
        return None
    left = end - time.monotonic()
    if left <= 0.0:
        raise DeadlineExceededError("the time of the search is over", "SEARCH_TIME_OVER")
    return left


class Shortening(NamedTuple):
    """How formulas are made shorter; see `warpfit.Client.simplify`."""

    client: Client
    data: DatasetHandle
    loss: Loss | LossFunction
    tolerance: float
    snap: Any
    ends: float
    """Time of `time.monotonic` at which it should have ended; infinite for any time."""
    allows: Callable[[Program], bool]
    """Tells whether a formula may be shown."""


class Form:
    """Formulas a + b f."""

    overhead: int = 0
    """Tokens of a formula of the search that are not counted in its complexity."""
    is_template: bool = False
    """Whether the outer form is given, so that no constant is one of the formulas."""

    def whole(self, genomes: Genomes) -> Genomes:
        """Return what is computed of f, but for slope and intercept."""
        return genomes

    def cores(self, genomes: Genomes) -> list[Genomes]:
        """Return the functions that are searched, each for all formulas."""
        return [genomes]

    def fits(self, genomes: Genomes) -> bool:
        """Tell whether formulas of another search may be those of this one."""
        return not (genomes.codes == GLUE).any()

    def parts_of(self, program: Program) -> tuple[Program, ...]:
        """Return what is counted of a program that the search has found: all of it."""
        return (program,)

    def knows(self, program: Program) -> bool:
        """Tell whether a program has this form."""
        return True

    def simplified(self, program: Program) -> Program:
        """Return an equal program in canonical order."""
        return program.simplify()

    def lifted(self, program: Program, free: bool = False) -> tuple[Program, Floats]:
        """Return a program with its constants, or those without a short form, as parameters."""
        return lift(program) if free else program.lift_constants()

    def bound(self, program: Program, numbers: Floats) -> Program:
        """Return a program with other constants, in the order of `lifted`."""
        return self.lifted(program)[0].bind(numbers)

    def shortened(self, program: Program, how: Shortening) -> Program:
        """Return a shorter form whose loss is hardly worse."""
        return how.client.simplify(
            how.data,
            [program],
            loss=how.loss,
            tolerance=how.tolerance,
            snap=how.snap,
            assume_defined=True,
            allows=how.allows,
            timeout=seconds_until(how.ends),
        ).programs[0]
