"""`SymbolicRegressor`: finds a formula for data."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from sklearn.utils import check_random_state

from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client
from warpfit.errors import InvalidArgumentError
from warpfit.expressions.printing import to_text
from warpfit.ir import Program
from warpfit.ops import CONSTANT, OPERATORS
from warpfit.sklearn.estimator import FormulaRegressor, TrainingData
from warpfit.sklearn.genome import Breeder, to_program
from warpfit.sklearn.search import Formula, Search, Settings

#: Operators of the default: those of physics and engineering that have no steps.
OPERATORS_OF_SCIENCE: Final = (
    *("add", "sub", "mul", "div", "square", "sqrt"),
    *("exp", "log", "sin", "cos"),
)
#: Errors below this part of the target's variance count as equal: rounding.
_ROUNDING: Final = 1e-18
#: An intercept below this part of the target's spread is rounding.
_NO_INTERCEPT: Final = 1e-10


@dataclass(frozen=True, slots=True)
class Equation:
    """A formula that no shorter one equals in accuracy."""

    size: int
    """Number of operators, variables and constants, slope and intercept not counted."""
    loss: float
    """Mean squared error on the training data."""
    program: Program
    text: str


class SymbolicRegressor(FormulaRegressor):
    """Symbolic regression: genetic programming over structure, constants fitted by a server.

    The whole of a generation is scored by one call and its constants are fitted by another, so the
    time goes into the engine, on a GPU as well as here. Targets and features are float64.

    Parameters
    ----------
    address : str, optional
        What `warpfit.connect` takes, such as ``"HOST:PORT"``; by default WARPFIT_ADDRESS, and
        without it a server is started on this machine's CPU for each fit.
    operators : sequence of str
        Names from `warpfit.ops.OPERATORS` that formulas are made of.
    population : int
        Formulas that survive a generation, and new ones in each.
    generations : int
        Most generations.
    max_size : int
        Most operators, variables and constants of a formula.
    fit_iterations : int
        Iterations of the fit of each new formula's constants.
    tolerance : float
        The search ends when the error is below this part of the target's variance.
    max_seconds : float, optional
        The search ends at the generation during which this time passes; results then depend on the
        speed of the machine.
    verbose : bool
        Print the best formula of each generation.
    random_state : int, RandomState instance or None
        Seed of the search; with an int the same data give the same formula.

    Attributes
    ----------
    program_ : Program
        The chosen formula, with its constants.
    expression_ : str
        The same as text.
    equations_ : list of Equation
        The best formula of each size, shortest first, as far as longer ones are more accurate.
    n_iter_ : int
        Generations until the end.

    The chosen formula is the one with the least Bayesian information criterion (Schwarz 1978),
    which counts each operator, variable and constant as a parameter.

    """

    def __init__(
        self,
        *,
        address: str | None = None,
        operators: Sequence[str] = OPERATORS_OF_SCIENCE,
        population: int = 500,
        generations: int = 100,
        max_size: int = 25,
        fit_iterations: int = 15,
        tolerance: float = 1e-18,
        max_seconds: float | None = None,
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        self.address = address
        self.operators = operators
        self.population = population
        self.generations = generations
        self.max_size = max_size
        self.fit_iterations = fit_iterations
        self.tolerance = tolerance
        self.max_seconds = max_seconds
        self.verbose = verbose
        self.random_state = random_state

    def _check_settings(self) -> None:
        unknown = [name for name in self.operators if name not in OPERATORS]
        if unknown or not self.operators:
            raise InvalidArgumentError(
                f"operators {unknown} are not known" if unknown else "there are no operators",
                "UNKNOWN_OPERATOR",
                f"Choose from {', '.join(OPERATORS)}",
                "operators",
            )
        for name, least in (("population", 2), ("max_size", 1), ("fit_iterations", 1)):
            value = getattr(self, name)
            if value < least:
                raise InvalidArgumentError(
                    f"{name} is {value}", "BAD_SETTING", f"Give a number from {least}", name
                )

    def _find(self, client: Client, data: DatasetHandle, training: TrainingData) -> Program:
        rows, target, weights = training
        mean = np.average(target, weights=weights)
        variance = float(np.average((target - mean) ** 2, weights=weights))
        seed = int(check_random_state(self.random_state).randint(2**31))
        codes = tuple(OPERATORS[name].code for name in self.operators)
        breeder = Breeder(random.Random(seed), codes, rows.shape[1], self.max_size)
        search = Search(client, data, breeder, self._settings(variance))
        front = search.run()
        self.n_iter_ = search.generation
        self.equations_ = [self._equation(formula, variance) for formula in front]
        return _choose(self.equations_, float(weights.sum()), variance).program

    def _settings(self, variance: float) -> Settings:
        def report(generation: int, best: Formula) -> None:
            if self.verbose:
                text = self._equation(best, variance).text
                print(f"generation {generation:4}  mse {best.loss:.6g}  {text}", flush=True)

        return Settings(
            population=self.population,
            generations=self.generations,
            fit_iterations=self.fit_iterations,
            stop_loss=self.tolerance * variance,
            max_seconds=self.max_seconds,
            report=report,
        )

    def _equation(self, formula: Formula, variance: float) -> Equation:
        program = _whole(formula, math.sqrt(variance))
        return Equation(formula.size, formula.loss, program, to_text(program, self._names()))


def _whole(formula: Formula, spread: float) -> Program:
    """Build a + b f with its numbers, without an a or b that changes nothing."""
    program = to_program(formula.genome, fitted=True)
    if (program.codes == CONSTANT).all():
        value = formula.slope * float(program.values[0]) if len(program) == 1 else 0.0
        return Program.constant(value + formula.intercept)
    if abs(formula.slope - 1.0) > _NO_INTERCEPT:
        program = Program.apply("mul", Program.constant(formula.slope), program)
    if abs(formula.intercept) > _NO_INTERCEPT * spread:
        program = Program.apply("add", program, Program.constant(formula.intercept))
    return program


def _choose(equations: Sequence[Equation], rows: float, variance: float) -> Equation:
    def criterion(equation: Equation) -> float:
        error = max(equation.loss, _ROUNDING * variance, math.ulp(0.0))
        return rows * math.log(error) + equation.size * math.log(max(rows, 2.0))

    return min(equations, key=criterion)
