"""What the estimators share: their server, their data, their formula and its predictions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from warpfit.client import Client, connect
from warpfit.embedded import server_at
from warpfit.expressions import reference
from warpfit.ir import Program


@contextmanager
def connected(address: str | None) -> Iterator[Client]:
    """Connect to a server, or to one that is started here on the CPU for as long as the block."""
    with server_at(address, ["--engine", "cpu"]) as place, connect(place) as client:
        yield client


def training_data(
    estimator: Any, X: Any, y: Any, sample_weight: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Check what was given to ``fit``, and add up the weights of rows that are equal.

    So a weight means repetition to the last bit, and the order of the rows does not matter.

    Returns:
        Rows [rows, variables] in ascending order, their targets [rows] and weights [rows].

    Raises:
        ValueError: as scikit-learn does, for data that are not finite numbers of fitting shapes.

    """
    X, y = validate_data(estimator, X, y, dtype=np.float64, y_numeric=True)
    weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
    table = np.column_stack([X, y])[weights > 0]
    rows, place = np.unique(table, axis=0, return_inverse=True)
    totals = np.zeros(len(rows))
    np.add.at(totals, place.ravel(), weights[weights > 0])
    return rows[:, :-1], rows[:, -1], totals


class FormulaRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """A regressor whose ``fit`` ends with one formula, its numbers included."""

    program_: Program

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:
        """Evaluate the formula on X, [rows, variables], here and without a server; [rows]."""
        check_is_fitted(self)
        rows = np.asarray(validate_data(self, X, dtype=np.float64, reset=False))
        return reference.evaluate_program(self.program_, rows.T)

    def _names(self) -> tuple[str, ...]:
        """Names of a data frame's columns; empty where ``fit`` was given none."""
        return tuple(getattr(self, "feature_names_in_", ()))
