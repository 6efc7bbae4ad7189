"""The base of both estimators: checked data, a connection, and predictions by a formula."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.client import Client, connect
from warpfit.embedded import server_at
from warpfit.expressions import reference
from warpfit.expressions.printing import to_latex, to_text
from warpfit.ir import Program

Floats = NDArray[np.float64]


class TrainingData(NamedTuple):
    """Different rows [rows, variables] in ascending order, their targets and weights [rows]."""

    rows: Floats
    target: Floats
    weights: Floats


class FormulaRegressor(RegressorMixin, BaseEstimator, ABC):  # type: ignore[misc]
    """A regressor whose ``fit`` ends with one formula, its numbers included."""

    address: str | None
    program_: Program
    expression_: str

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Find the formula, on the server at ``address`` or on one that is started for it.

        Args:
            X: features, [rows, variables].
            y: target, [rows].
            sample_weight: non-negative weight of each row, [rows]; one of k counts as k rows.

        Raises:
            ValueError: for data that scikit-learn refuses.
            ParseError: for a text that is no expression.
            InvalidArgumentError: for settings that make no sense or do not fit the data.
            UnavailableError: if the server cannot be reached or started.

        """
        training = self._training_data(X, y, sample_weight)
        self._check_settings()
        with (
            server_at(self.address, ["--devices", "cpu"]) as place,
            connect(place) as client,
            client.upload(*training, names=self._names(), dtype="float64") as data,
        ):
            self.program_ = self._find(client, data, training)
        self.expression_ = to_text(self.program_, self._names())
        return self

    def predict(self, X: ArrayLike) -> Floats:
        """Evaluate the formula on X, [rows, variables], here and without a server; [rows]."""
        check_is_fitted(self)
        rows = np.asarray(validate_data(self, X, dtype=np.float64, reset=False))
        return reference.evaluate_program(self.program_, rows.T)

    def latex(self) -> str:
        """Return the LaTeX of the formula."""
        return to_latex(self.program_, self._names())

    @abstractmethod
    def _check_settings(self) -> None:
        """Raise InvalidArgumentError for settings that make no sense."""

    @abstractmethod
    def _find(self, client: Client, data: DatasetHandle, training: TrainingData) -> Program:
        """Return the formula, and set the other attributes of a fitted estimator."""

    def _names(self) -> tuple[str, ...]:
        """Return the names of a data frame's columns; empty where ``fit`` was given none."""
        return tuple(getattr(self, "feature_names_in_", ()))

    def _training_data(self, X: Any, y: Any, sample_weight: Any) -> TrainingData:
        """Check what was given to ``fit``, and add up the weights of rows that are equal.

        So a weight means repetition to the last bit, and the order of the rows does not matter.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        table = np.column_stack([X, y])[weights > 0]
        rows, place = np.unique(table, axis=0, return_inverse=True)
        totals = np.zeros(len(rows))
        np.add.at(totals, place.ravel(), weights[weights > 0])
        return TrainingData(rows[:, :-1], rows[:, -1], totals)
