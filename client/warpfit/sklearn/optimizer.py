"""`ParameterOptimizer`: fits the parameters of a formula that is known."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils import check_random_state

from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client
from warpfit.errors import InvalidArgumentError
from warpfit.expressions.parameter_vectors import float_array
from warpfit.frontends import as_program
from warpfit.ir import Program
from warpfit.losses import as_function, as_loss
from warpfit.sklearn.estimator import (
    Floats,
    FormulaRegressor,
    TrainingData,
    loss_unit,
    power_of_two,
)


class ParameterOptimizer(FormulaRegressor):
    """Fit the parameters p1, p2, ... of a formula to data, on a server.

    Parameters
    ----------
    expression : str, Program, or an expression of another library
        The formula, over x1, x2, ... or the names of a DataFrame's columns.
    start : array-like, optional
        Start of the parameters, [n] or [starts, n]; by default `starts` vectors: ones, then
        numbers from a standard normal distribution.
    starts : int
        Number of start vectors if `start` is not given; the best outcome is kept.
    loss : str
        What to minimise: a name or an expression, as in `warpfit.Client.optimize`.
    method : str
        ``"auto"``, ``"lm"`` or ``"bfgs"``.
    accuracy : str
        ``"final"`` or ``"screening"``: tolerances, and iterations where `max_iterations` is None.
    max_iterations : int, optional
        Most iterations of each search.
    bounds : tuple, optional
        Least and greatest values, each one number or one for each parameter.
    address : str, optional
        What `warpfit.connect` takes, such as ``"HOST:PORT"``; by default WARPFIT_ADDRESS, and
        without it a server is started on this machine for each fit.
    engine : str
        What a server that is started here computes on: ``"auto"`` or ``"cpu"``.
    random_state : int, RandomState instance or None
        Seed of the start vectors.

    Attributes
    ----------
    parameters_ : ndarray of shape (n,)
    standard_errors_ : ndarray of shape (n,) or None
        For losses of squared differences.
    loss_ : float
    reason_ : Reason
        Why the search ended.
    n_iter_ : int
    program_ : Program
        The formula with its fitted numbers.
    expression_ : str
        The same as text.

    """

    def __init__(
        self,
        expression: Any = "p1 + p2*x1",
        *,
        start: ArrayLike | None = None,
        starts: int = 1,
        loss: str = "mse",
        method: str = "auto",
        accuracy: str = "final",
        max_iterations: int | None = None,
        bounds: tuple[Any, Any] | None = None,
        address: str | None = None,
        engine: str = "auto",
        random_state: Any = None,
    ) -> None:
        self.expression = expression
        self.start = start
        self.starts = starts
        self.loss = loss
        self.method = method
        self.accuracy = accuracy
        self.max_iterations = max_iterations
        self.bounds = bounds
        self.address = address
        self.engine = engine
        self.random_state = random_state

    def _check_settings(self) -> None:
        as_program(self.expression, self._names())
        as_loss(self.loss)
        if self.start is None and self.starts < 1:
            raise InvalidArgumentError(
                f"starts is {self.starts}", "BAD_SETTING", "Give a number from 1", "starts"
            )

    def _in_units(self, training: TrainingData) -> TrainingData:
        """Divide the target by the root of its size: squares of derivatives must not vanish."""
        if not as_function(as_loss(self.loss)).is_squares:
            return training
        unit = power_of_two(training.target, 0.5)
        return training._replace(target=training.target / unit, unit=unit)

    def _find(self, client: Client, data: DatasetHandle, training: TrainingData) -> Program:
        program = fitted = as_program(self.expression, self._names())
        loss = as_loss(self.loss)
        if training.unit != 1.0:
            fitted = Program.apply("div", program, Program.constant(training.unit))
        fit = client.optimize(
            data,
            [fitted],
            [self._start_vectors(program)],
            loss=loss,
            method=self.method,
            accuracy=self.accuracy,
            max_iterations=self.max_iterations,
            bounds=self.bounds,
            standard_errors=as_function(loss).is_squares,
        )
        self.parameters_ = fit.parameters[0]
        self.standard_errors_ = fit.standard_errors[0] if fit.standard_errors else None
        self.loss_ = float(fit.loss[0]) * loss_unit(loss, training.unit)
        self.reason_ = fit.reason[0]
        # scikit-learn wants at least one iteration to be reported.
        self.n_iter_ = max(1, int(fit.iterations[0]))
        return program.bind(self.parameters_)

    def _start_vectors(self, program: Program) -> Floats:
        """Return the start vectors, [starts, n]."""
        if self.start is not None:
            return np.atleast_2d(float_array(self.start))
        draw = check_random_state(self.random_state).standard_normal
        return np.vstack(
            [np.ones((1, program.parameters)), draw((self.starts - 1, program.parameters))]
        )

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that the score depends on the formula that was given."""
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags
