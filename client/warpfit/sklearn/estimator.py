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
    engine: str
    program_: Any
    """The formula; a list of them for a target of several columns."""
    expression_: Any
    """The same as text."""

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
        trainings = self._trainings(X, y, sample_weight)
        self._check_settings()
        names, programs = self._names(), []
        with server_at(self.address, ["--devices", self.engine]) as place, connect(place) as client:
            for training in trainings:
                with client.upload(*training, names=names, dtype="float64") as data:
                    programs.append(self._find(client, data, training))
        texts = [to_text(program, names) for program in programs]
        self.program_ = programs[0] if len(programs) == 1 else programs
        self.expression_ = texts[0] if len(texts) == 1 else texts
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

    def _trainings(self, X: Any, y: Any, sample_weight: Any) -> list[TrainingData]:
        """Check what was given to ``fit``, and return the rows of each target."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        return [self._training(X, y, sample_weight)]

    def _training(self, X: Floats, y: Floats, sample_weight: Any) -> TrainingData:
        """Add up the weights of rows that are equal.

        So a weight means repetition to the last bit, and the order of the rows does not matter.
        """
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        table = np.column_stack([X, np.asarray(y, np.float64)])[weights > 0]
        rows, place = np.unique(table, axis=0, return_inverse=True)
        totals = np.zeros(len(rows))
        np.add.at(totals, place.ravel(), weights[weights > 0])
        return TrainingData(rows[:, :-1], rows[:, -1], totals)
