"""Calibration against chance: how often a search finds as much in targets that hold nothing.

A search that tries many formulas finds one that fits noise. So its own losses do not say whether
there is anything to find. A permutation test does, if the formulas that it compares know nothing of
the rows that it shuffles:

1. The rows are divided in two halves, at random.
2. The search runs on the first half, with the settings of the estimator.
3. Its formulas, as far as they are as short as the chosen one, are fitted again to the second half:
   to its target, and to n targets that are this one in random orders. All fits are one call. The
   weights stay where they are, so they must not depend on the target.

If the target does not depend on the variables, the n + 1 least losses are those of targets that are
alike. So each rank of the true one among them is equally likely, however long the search took
(Phipson and Smyth, "Permutation p-values should never be zero", Stat. Appl. Genet. Mol. Biol. 9,
2010).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from sklearn.base import clone

from warpfit.calls.arguments import whole_number
from warpfit.errors import InvalidArgumentError, bad_setting
from warpfit.expressions.reference import evaluate_program
from warpfit.ir import Program
from warpfit.losses import Loss, as_function, as_loss
from warpfit.sklearn.equations import Equation, selected
from warpfit.sklearn.estimator import Floats, FormulaRegressor, TrainingData

if TYPE_CHECKING:
    from warpfit.client import Client

#: Least number of rows of both halves together.
_LEAST_ROWS: Final = 20
#: Most rows of the second half that formulas are fitted to, and most formulas.
_MOST_ROWS: Final = 2000
_MOST_FORMULAS: Final = 8
_MOST_SHUFFLES: Final = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class Chance:
    """How well the formulas of a search fit the true target and shuffled ones."""

    share: float
    """Share of the shuffled targets that a formula as short fits as well as the true one."""
    probability: float
    """(1 + their number) / (1 + n), the p-value of a permutation test: if there is nothing to find,
    it is at most q in a share q of all data sets."""
    loss: float
    """Least loss of the formulas, fitted to the second half."""
    shuffled_losses: Floats
    """The same for each shuffled target, [n]."""
    expression: str
    """The formula that fits the second half best, as it was found in the first one."""
    complexity: int
    """Greatest complexity of the formulas that are compared."""

    def __str__(self) -> str:
        """Return the result as a sentence."""
        n = len(self.shuffled_losses)
        return (
            f"{round(self.share * n)} of {n} shuffled targets are fitted as well by a formula of "
            f"complexity {self.complexity} as the true one: p = {self.probability:.3g}"
        )


def chance_of(
    model: FormulaRegressor,
    training: TrainingData,
    names: Sequence[str],
    n: int,
    seed: int,
    client: Client,
) -> Chance:
    """Test a search against chance; see `warpfit.sklearn.SymbolicRegressor.chance`.

    Args:
        model: with the settings of the search; it need not be fitted.
        training: the rows.
        names: of the variables, or empty.
        n: number of shuffles.
        seed: of the halves and the shuffles.
        client: of the server.
    """
    wanted = f"a number of shuffles from 1 to {_MOST_SHUFFLES}"
    if not 1 <= whole_number(n, "n", wanted) <= _MOST_SHUFFLES:
        raise bad_setting("n", n, wanted)
    if whole_number(seed, "seed") < 0:
        raise bad_setting("seed", seed, "a whole number from 0")
    rows = len(training.rows)
    if rows < _LEAST_ROWS:
        raise InvalidArgumentError(
            f"there are {rows} different rows, which are divided into two halves",
            "TOO_FEW_ROWS",
            f"Give at least {_LEAST_ROWS}",
            "X",
        )
    function = as_function(as_loss(model.get_params()["loss"]))
    loss = Loss.MSE if function.is_squares else function  # which ranks as the given one
    if not function.is_squares:
        f, y, w = np.random.default_rng(0).normal(size=(3, 64))
        given, moved = np.stack([f, y, np.abs(w)]), np.stack([f - y, np.zeros(64), np.abs(w)])
        own, others = (evaluate_program(function.row, each) for each in (given, moved))
        if not np.allclose(own, others, equal_nan=True):
            raise InvalidArgumentError(
                "the loss does not depend on the differences of predictions and targets alone",
                "LOSS_UNSUITABLE",
                'Use one that does, such as "mse", "mae" or "huber"',
                "loss",
            )
    rng = np.random.default_rng(seed)
    first, second = np.array_split(rng.permutation(rows), 2)
    search = clone(model).set_params(checkpoint=None, callback=None, verbose=False)
    search.connected_client = client
    search.variable_names = tuple(names)
    search.fit(training.rows[first], training.target[first], training.weights[first])
    front: list[Equation] = search.front_
    chosen = front[selected(front, search.model_selection)].complexity
    formulas = [equation for equation in front if equation.program.variables]
    # A constant fits all orders alike: the shortest formula with a variable takes its place.
    limit = max(chosen, min((e.complexity for e in formulas), default=chosen))
    formulas = [e for e in formulas if e.complexity <= limit][-_MOST_FORMULAS:]
    second = second[:_MOST_ROWS]
    target = training.target[second]
    orders = [np.arange(len(second)), *(rng.permutation(len(second)) for _ in range(n))]
    if not formulas:
        expression = front[0].equation
        return Chance(1.0, 1.0, float(front[0].loss), np.full(n, front[0].loss), expression, limit)
    # Targets are variables: f - t is fitted to 0, so that all fits are one call on one data set.
    variables = training.rows.shape[1]
    table = np.column_stack([training.rows[second], *(target[order] for order in orders)])
    programs, starts = [], []
    for shift in range(n + 1):
        other = Program.variable(variables + shift)
        for equation in formulas:
            # a + b f with the constants of f as parameters, too
            inner, start = equation.program.lift_constants()
            slope, intercept = map(Program.parameter, (inner.parameters, inner.parameters + 1))
            scaled = Program.apply("add", Program.apply("mul", slope, inner), intercept)
            programs.append(Program.apply("sub", scaled, other))
            starts.append(np.concatenate([start, [1.0, 0.0]]))
    weights = training.weights[second]
    with client.upload(table, np.zeros(len(second)), weights, dtype="float64") as data:
        fit = client.optimize(data, programs, starts, loss=loss, standard_errors=False)
    losses = np.where(np.isnan(fit.loss), np.inf, fit.loss).reshape(n + 1, len(formulas))
    best = losses.min(axis=1)
    # Fits of one target from the same starts end with rounding errors of their own.
    count = int((best[1:] <= best[0] * (1.0 + 1e-9)).sum())
    return Chance(
        share=count / n,
        probability=(1 + count) / (1 + n),
        loss=float(best[0]),
        shuffled_losses=best[1:],
        expression=formulas[int(losses[0].argmin())].equation,
        complexity=limit,
    )
