"""The request and the result of Search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from warpfit.ir import Batch, Program
from warpfit.losses import BUILT_IN, Loss, LossFunction

#: Operators of a search that names none.
DEFAULT_OPERATORS: Final = (
    *("add", "sub", "mul", "div", "square", "sqrt", "exp", "log", "sin", "cos"),
)
#: Base units by whose exponents a unit is written, see `warpfit.formulas.units`.
BASE_UNITS: Final = 7


class Form(StrEnum):
    """How the formula f that is searched for predicts the target."""

    SCALED = "scaled"
    """The prediction is a + b f with the best intercept and slope (Keijzer 2003)."""
    PLAIN = "plain"
    """The prediction is f."""


class SearchReason(StrEnum):
    """Why a search ended."""

    TIME = "time"
    """The seconds are over."""
    GENERATIONS = "generations"
    """As many generations as were asked for have run."""
    FORMULAS = "formulas"
    """As many formulas as were asked for have been tried."""
    TARGET_LOSS = "target_loss"
    """A formula of the returned front has at most the loss that was asked for."""
    IDLE = "idle"
    """No formula became better for as many generations as were allowed."""
    CANCELLED = "cancelled"
    """The caller has ended the search."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a formula f has to keep to; operators by their names."""

    max_size: int = 25
    """Greatest size: the sum of the complexities of the tokens of f."""
    max_depth: int = 0
    """Greatest height of the tree, a leaf having 1; 0 for any."""
    complexities: Mapping[str, int] = field(default_factory=dict)
    """Complexity of operators that do not count as 1."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Most uses of an operator."""
    nesting: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """For (outer, inner) the most uses of ``inner`` on any path below a use of ``outer``."""
    arguments: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Greatest size of each operand of an operator; -1 for any."""


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Dimensions of the variables and of the target, as exponents of the base units."""

    variables: NDArray[np.float64]
    """[variables, BASE_UNITS]."""
    target: NDArray[np.float64] | None = None
    """[BASE_UNITS], for dimensionless constants; None if the formula may have any dimension."""
    dimensionless_constants: bool = False
    """Whether constants are plain numbers; otherwise a constant may have any dimension."""


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """Outer form of the formula, over variables, fitted parameters and searched functions."""

    program: Program
    """Tokens of the form. Function i is the variable token ``variables + i``, where ``variables``
    is the number of columns of the data set; parameters are fitted."""
    functions: tuple[tuple[int, ...], ...]
    """For each function the columns that it may use."""


@dataclass(frozen=True, slots=True, eq=False)
class SearchRequest:
    """One call of Search: what to look for, on which data, and for how long."""

    dataset_id: bytes
    """As `warpfit.request.Evaluation.dataset_id`."""
    rows: tuple[int, int] | None = None
    """Half-open row range that the search sees; None for all rows."""
    screening_rows: int = 512
    """Most of these rows on which new formulas are scored; they are drawn by the seed."""
    operators: Mapping[str, float] = field(
        default_factory=lambda: dict.fromkeys(DEFAULT_OPERATORS, 1.0)
    )
    """Operators that formulas are made of, with the weight by which each is drawn."""
    variables: tuple[int, ...] | None = None
    """Columns that formulas may use; None for all."""
    rules: Rules = field(default_factory=Rules)
    units: Units | None = None
    loss: Loss | None = Loss.MSE
    custom_loss: LossFunction | None = None
    """Loss function of the caller, instead of ``loss``."""
    form: Form = Form.SCALED
    template: Template | None = None
    """Instead of ``form``."""
    group: int | None = None
    """Column whose value is a row's group, by which constants differ; formulas do not use it."""
    guesses: Batch | None = None
    """Formulas that the search begins with; their parameters are starts of a fit."""
    islands: int = 0
    """Populations that evolve side by side; 0 for as many as suit the engine."""
    population: int = 0
    """Formulas of all islands together; 0 for as many as suit the engine."""
    pairs: bool = True
    """Whether pairs and sums of short formulas are searched."""
    fit_iterations: int = 15
    """Most iterations of a fit of a promising formula's constants; 0 for no fits."""
    seed: int = 0
    max_seconds: float = 0.0
    """Seconds of the search on the engine; 0 for no limit."""
    max_generations: int = 0
    """Most generations; 0 for no limit."""
    max_formulas: int = 0
    """Most formulas to score; 0 for no limit."""
    idle_generations: int = 0
    """Generations without progress after which the search ends; 0 for no limit."""
    target_loss: float = -math.inf
    """Loss at which the search ends."""

    @property
    def loss_function(self) -> LossFunction:
        """The loss that formulas are compared by."""
        if self.custom_loss is not None:
            return self.custom_loss
        return BUILT_IN[Loss.MSE if self.loss is None else self.loss]


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """The best formula of each size, simplest first, as far as larger ones are better."""

    batch: Batch
    """Whole formulas, slope and intercept included, with all fitted numbers as parameters; one
    vector for each."""
    sizes: NDArray[np.int64]
    """Size of f by the rules' complexities, without slope and intercept; [formulas]."""
    losses: NDArray[np.float64]
    """Loss on the rows of the request, [formulas]."""


@dataclass(frozen=True, slots=True, eq=False)
class SearchProgress:
    """How far a search is, and what it has found; the last one has a reason."""

    front: Front
    seconds: float = 0.0
    """Seconds since the engine began the search."""
    generations: int = 0
    formulas: int = 0
    """New formulas that were scored."""
    distinct: int = 0
    """Different structures among them, constants not counted; an estimate."""
    fits: int = 0
    pairs: int = 0
    """Pairs of short formulas that were weighed."""
    restarts: int = 0
    """Islands that were given up without progress and begun anew."""
    reason: SearchReason | None = None
    """None while the search goes on."""
