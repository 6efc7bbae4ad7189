"""warpfit as a method of SRBench in its form of 2025: the names that its harness imports.

The folders of SRBench's branch ``srbench_2025`` are ``algorithms/warpfit`` for `metadata.yml`,
`install.sh` and `Dockerfile`, and ``experiment/methods/warpfit`` for this file. The harness sets
``max_time``, calls ``fit``, and reads the formula by ``model``, its size by ``complexity``, and the
others that were found by ``get_population``. Each fit starts a server, with as many threads as
OMP_NUM_THREADS allows, unless WARPFIT_ADDRESS names one.
"""

from __future__ import annotations

import os
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted

import warpfit
from warpfit.sklearn import SymbolicRegressor

#: What formulas are made of.
OPERATORS = ("+", "-", "*", "/", "square", "sqrt", "exp", "log", "sin", "cos", "asin", "tanh")
#: Most formulas of a population that the harness looks at.
MOST = 100

# Jobs may use the cores that the harness allows, and all engines of a server share its threads.
os.environ.setdefault("WARPFIT_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))


class Formula(RegressorMixin, BaseEstimator):
    """A formula of a search, which predicts without a server."""

    def __init__(self, program: warpfit.Program) -> None:
        self.program = program

    def predict(self, X: Any) -> np.ndarray[Any, Any]:
        """Evaluate it on X, [rows, variables]."""
        return self.program.to_numpy()(np.asarray(X, dtype=np.float64))


class WarpfitRegressor(RegressorMixin, BaseEstimator):
    """`SymbolicRegressor` by the names of parameters that the harness sets.

    Parameters
    ----------
    max_time : float
        Seconds of ``fit``, without the start of a server.
    max_size : int
        Greatest size of a formula.
    random_state : int, optional

    """

    def __init__(
        self, max_time: float = 3600.0, max_size: int = 29, random_state: Any = None
    ) -> None:
        self.max_time = max_time
        self.max_size = max_size
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Search for formulas of X, [rows, variables], that predict y, [rows]."""
        self.search_ = SymbolicRegressor(
            operators=OPERATORS,
            generations=10**6,
            early_stopping=4000,
            max_size=self.max_size,
            max_seconds=self.max_time,
            random_state=self.random_state,
        ).fit(np.asarray(X, dtype=np.float64), np.asarray(y, dtype=np.float64))
        self.program = self.search_.program_
        return self

    def predict(self, X: Any) -> np.ndarray[Any, Any]:
        """Evaluate the chosen formula on X, [rows, variables]."""
        check_is_fitted(self)
        return self.search_.predict(np.asarray(X, dtype=np.float64))


est = WarpfitRegressor()
#: No settings to choose from: the harness then fits once, with these.
hyper_params: list[dict[str, list[Any]]] = []


def model(est: WarpfitRegressor | Formula, X: Any = None) -> str:
    """Return a formula as text for SymPy.

    Args:
        est: a fitted estimator, or a formula of its population.
        X: features; the names of a data frame's columns are used, else x_0, x_1, ....

    """
    columns = getattr(X, "columns", None)
    names = [f"x_{i}" for i in range(est.program.variables)] if columns is None else list(columns)
    return str(est.program.sympy(names))


def complexity(est: WarpfitRegressor | Formula) -> int:
    """Return the nodes of a formula's tree; the harness asks where SymPy cannot count them."""
    return len(est.program.codes)


def get_population(est: WarpfitRegressor | Formula) -> list[WarpfitRegressor | Formula]:
    """Return the best formula of each size, then others of the search's last populations."""
    if isinstance(est, Formula):
        return [est]
    front = [equation.program for equation in est.search_.front_]
    found = dict.fromkeys([*front, *est.search_.programs_found()])
    return [Formula(program) for program in list(found)[:MOST]]


def get_best_solution(est: WarpfitRegressor | Formula) -> WarpfitRegressor | Formula:
    """Return the formula that the search chooses."""
    return est if isinstance(est, Formula) else Formula(est.program)


def pre_train(est: Any, X: Any, y: Any) -> None:
    """Change nothing: the search chooses its settings by the data."""


eval_kwargs = {"test_params": {"max_time": 10.0}, "pre_train": pre_train}
