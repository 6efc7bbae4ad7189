"""A search for formulas as one call: what it is given, and what it gives.

`TargetSearch` prepares a `SearchTask`, calls `engine_search.search`, and works with the
`Candidates` that come back; it knows nothing of populations, libraries or pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client
from warpfit.ir import Program
from warpfit.losses import Loss, LossFunction
from warpfit.sklearn.constraints import FormulaRules
from warpfit.sklearn.estimator import TrainingData
from warpfit.sklearn.forms import Form
from warpfit.sklearn.genomes import Floats, Genomes, Indices

#: A slope this close to 1 is 1, and an intercept below this part of the target's spread is 0.
NO_INTERCEPT: Final = 1e-10


#: Reasons of the end of a search that leave no time for anything else.
INTERRUPTIONS: Final = ("interrupt", "terminate", "server")


class Terminated(KeyboardInterrupt):
    """SIGTERM came while a search ran."""


def reason_of(error: BaseException) -> str:
    """Return the word for what has interrupted a search."""
    if isinstance(error, Terminated):
        return "terminate"
    return "interrupt" if isinstance(error, KeyboardInterrupt) else "server"


@dataclass(frozen=True, slots=True)
class SearchTask:
    """What to look for, in which rows, and for how long."""

    client: Client
    training: TrainingData
    """All rows."""
    seen: Indices
    """Rows that may be looked at."""
    sample: Indices
    """Those on which formulas are compared."""
    compared: DatasetHandle
    """The latter, uploaded."""
    rng: np.random.Generator
    form: Form
    rules: FormulaRules
    operators: tuple[str, ...]
    """Names of what formulas are made of."""
    start: Genomes
    """Formulas to begin with, beside those that are drawn."""
    loss: Loss | LossFunction
    floor: float
    """Least loss on the sample that any prediction could have; losses are counted from it."""
    stop_loss: float
    """The search ends when a formula is at least this good."""
    amount: float
    """Amount of data in the sample."""
    population: int | None
    """Formulas of a population; None for as many as suit the search."""
    generations: int
    fit_iterations: int
    early_stopping: int | None
    ends: float
    """Time of `time.monotonic` at which the search ends; infinite for any."""
    report: Callable[[Found], bool]
    """Called after each generation; True ends the search."""
    phase: Callable[[str], None]
    """Called with what the search does next, before the first generation."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Formulas of a search as they are computed."""

    programs: list[Program]
    losses: Floats
    """Losses on the sample above the least possible, [programs]."""


class Found(Protocol):
    """What a search has found, while it runs and behind its end."""

    @property
    def generation(self) -> int:
        """Generations until now."""

    @property
    def tried(self) -> int:
        """Formulas that were scored."""

    @property
    def distinct(self) -> int:
        """Different structures among them, constants not counted."""

    @property
    def reason(self) -> str:
        """Why the search has ended, as `SymbolicRegressor.reason_`."""

    def front(self) -> Candidates:
        """Return the formulas that nothing dominates, simplest first."""

    def promising(self) -> Candidates:
        """Return the formulas that are worth a fit to all rows, the most likely first."""

    def formulas(self) -> Genomes:
        """Return formulas with their constants, from which a search can go on, best first."""
