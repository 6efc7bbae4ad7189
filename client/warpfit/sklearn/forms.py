"""Forms: how the formulas f of a search become the programs that are computed and fitted.

Without a template the program is a + b f, whose slope and intercept have a closed form. Within a
template f is a part of the program, and all numbers are fitted (`templates`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client
from warpfit.errors import DeadlineExceededError
from warpfit.formulas.snapping import lift
from warpfit.ir import Batch, Program
from warpfit.losses import Loss, LossFunction, as_function
from warpfit.sklearn.genomes import GLUE, Floats, Genomes, Mask

#: Formulas, their losses, slopes and intercepts, and which of them a fit would not change.
Scores: TypeAlias = tuple[Genomes, Floats, Floats, Floats, Mask]


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

    def scored(self, search: Any, genomes: Genomes) -> Scores:
        """Find the slope and the intercept of every formula, by least squares, and its loss."""
        losses, slopes, intercepts = search.client.evaluate(
            search.proposals or search.sample,
            genomes.population(),
            loss=Loss.MSE,
            linear_scaling=True,
            timeout=search.timeout(),
        )
        loss = search.settings.loss
        if loss is not Loss.MSE:
            losses = search.client.evaluate(
                search.sample,
                self.fit_batch(genomes, slopes, intercepts),
                loss=loss,
                timeout=search.timeout(),
            )
        settled = (genomes.constants == 0) & as_function(loss).is_squares
        return genomes, losses, slopes, intercepts, settled

    def fit_batch(self, genomes: Genomes, slopes: Floats, intercepts: Floats) -> Batch:
        """Return what is computed, with all numbers as parameters."""
        return genomes.fit_batch(slopes, intercepts)

    def fitted(self, genomes: Genomes, vectors: Sequence[Floats]) -> tuple[Genomes, Floats, Floats]:
        """Return formulas, slopes and intercepts of the parameters that fit `fit_batch`."""
        ends: Floats = np.array([vector[-2:] for vector in vectors])
        inner = np.concatenate([vector[:-2] for vector in vectors])
        return genomes.with_constants(inner), ends[:, 0], ends[:, 1]

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
