"""warpfit as a method of SRBench: the names that its harness imports.

``est`` is the estimator, ``model`` writes a fitted one for SymPy, and ``eval_kwargs`` are options
of the harness. In the container of `Dockerfile` a server runs beside it, which WARPFIT_ADDRESS
names; without that variable each fit starts its own.
"""

from __future__ import annotations

from typing import Any

from warpfit.sklearn import SymbolicRegressor

#: Seconds of a fit of at most 1,000 rows, and of a larger one; SRBench allows an hour and ten.
SHORT, LONG = 3500, 35000

est = SymbolicRegressor(
    operators=("+", "-", "*", "/", "square", "sqrt", "exp", "log", "sin", "cos", "asin", "tanh"),
    generations=10**6,
    early_stopping=4000,
    max_seconds=SHORT,
)


def model(est: SymbolicRegressor, X: Any = None) -> str:
    """Return the chosen formula as text for SymPy.

    Args:
        est: a fitted estimator.
        X: features; the names of a data frame's columns are used, else x_0, x_1, ....

    """
    columns = getattr(X, "columns", None)
    names = [f"x_{i}" for i in range(est.n_features_in_)] if columns is None else list(columns)
    return str(est.program().sympy(names))


def pre_train(est: SymbolicRegressor, X: Any, y: Any) -> None:
    """Choose the time by the number of rows."""
    est.set_params(max_seconds=SHORT if len(X) <= 1000 else LONG)


eval_kwargs = {
    "test_params": {"max_seconds": 10.0, "population": 100},
    "pre_train": pre_train,
    "scale_x": False,
    "scale_y": False,
}
