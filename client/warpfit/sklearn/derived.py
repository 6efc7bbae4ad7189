"""`SymbolicClassifier` and `SymbolicTransformer`: estimators that are made of a search.

Both take the settings of a `SymbolicRegressor` as one parameter, ``search``, which they clone, as
scikit-learn's meta-estimators do.
"""

from __future__ import annotations

from inspect import signature
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin, clone
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from warpfit.errors import InvalidArgumentError
from warpfit.expressions import reference
from warpfit.expressions.language import to_text
from warpfit.expressions.real_numbers import require_order
from warpfit.ir import Program
from warpfit.losses import LossFunction
from warpfit.sklearn.estimator import Floats, unchanged_by_failure
from warpfit.sklearn.keywords import (
    OF_OTHER_ESTIMATORS,
    AnswersOtherWords,
    Translation,
    Without,
    explains_keywords,
    is_code,
    renamed,
)
from warpfit.sklearn.regressor import SymbolicRegressor

#: Log loss of a target of 0 and 1 by the logarithm of the odds, written so that it overflows
#: nowhere; a negative log likelihood.
LOG_LOSS: Final = LossFunction.parse("max(f, 0) + log(1 + exp(-abs(f))) - y*f", "sum")
#: Logarithms of odds beyond this are certainty.
_MOST_ODDS: Final = 700.0
#: A feature whose standard deviation is at most this part of its mean is a constant.
_CONSTANT: Final = 1e-9
#: Features that are correlated more than this are one.
_SAME: Final = 0.99


def _in_search(name: str, other: Translation | None) -> Translation:
    """Return what to write instead of a keyword that belongs into the search."""
    if isinstance(other, Without) or (isinstance(other, str) and " of fit" in other):
        return other

    def translation(value: Any) -> str:
        text = other(value) if callable(other) else other or f"{name}={value!r}"
        is_whole = is_code(text)
        return f"search=SymbolicRegressor({text if is_whole else '...'})" + f": {text}" * (
            not is_whole
        )

    return translation


#: Where keywords of a search belong.
_OF_SEARCH: Final[dict[str, Translation]] = {
    name: _in_search(name, OF_OTHER_ESTIMATORS.get(name))
    for name in [*signature(SymbolicRegressor).parameters, *OF_OTHER_ESTIMATORS]
}
_OF_CLASSIFIERS: Final = _OF_SEARCH | dict.fromkeys(
    ("loss", "metric", "elementwise_loss", "loss_function", "objectives"),
    Without("a classifier minimises the log loss"),
)
_OF_TRANSFORMERS: Final = _OF_SEARCH | {"hall_of_fame": renamed("n_components")}


class SymbolicClassifier(AnswersOtherWords, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Find a formula for the logarithm of the odds of the second of two classes.

    Parameters
    ----------
    search : SymbolicRegressor, optional
        The settings of the search, by default all defaults; its loss is replaced by the log loss.
    random_state : int, RandomState instance or None
        Seed of the search; None for that of ``search``.

    Attributes
    ----------
    classes_ : ndarray of shape (2,)
    search_ : SymbolicRegressor
        The search, with its table of equations, plots and other forms of the formula.
    expression_ : str
        The formula for the logarithm of the odds.

    """

    _other_parameters = _OF_CLASSIFIERS
    search_: SymbolicRegressor
    expression_: str
    classes_: Any
    n_iter_: int

    @explains_keywords(_OF_CLASSIFIERS)
    def __init__(self, search: SymbolicRegressor | None = None, random_state: Any = None) -> None:
        self.search = search
        self.random_state = random_state

    @unchanged_by_failure
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Find the formula.

        Args:
            X: features, [rows, variables].
            y: class of each row, [rows]; two different ones.
            sample_weight: non-negative weight of each row, [rows].

        Raises:
            ValueError: for data that scikit-learn refuses, and for other than two classes.
            UnavailableError: if the server cannot be reached or started.

        """
        require_order(X, "X")
        require_order(y, "y")
        found, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        if len(self.classes_) == 1:
            raise ValueError(f"the target has one class, {self.classes_[0]}: give two")
        if len(self.classes_) > 2:
            raise ValueError(
                "Only binary classification is supported. The type of the target is multiclass."
            )
        search = _search_of(self)
        names = getattr(self, "feature_names_in_", None)
        self.search_ = search.set_params(loss=LOG_LOSS)
        self.search_.fit(X if names is not None else found, numbers + 0.0, sample_weight)
        self.expression_ = str(self.search_.expression_)
        self.n_iter_ = max(1, self.search_.n_iter_)
        return self

    def decision_function(self, X: ArrayLike) -> Floats:
        """Return the logarithm of the odds of the second class, [rows]; 0 where it has no value."""
        check_is_fitted(self)
        validate_data(self, X, dtype=np.float64, reset=False)
        values = self.search_.predict(X)
        return np.clip(np.where(np.isnan(values), 0.0, values), -_MOST_ODDS, _MOST_ODDS)

    def predict_proba(self, X: ArrayLike) -> Floats:
        """Return the probability of each class, [rows, 2]."""
        second = 1.0 / (1.0 + np.exp(-self.decision_function(X)))
        return np.column_stack([1.0 - second, second])

    def predict(self, X: ArrayLike) -> Any:
        """Return the more likely class of each row, [rows]."""
        check_is_fitted(self)
        return self.classes_[(self.decision_function(X) > 0.0).astype(int)]

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that there are two classes."""
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


def _search_of(estimator: Any) -> SymbolicRegressor:
    """Return a search with the settings and the seed of an estimator that is made of it."""
    search = SymbolicRegressor() if estimator.search is None else clone(estimator.search)
    if estimator.random_state is not None:
        search.set_params(random_state=estimator.random_state)
    return search


class SymbolicTransformer(AnswersOtherWords, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Make features of the best formulas that a search finds, for another estimator.

    The formulas are those of the search's last populations, best first, but for those that are
    nearly a linear function of one that is taken already.

    Parameters
    ----------
    search : SymbolicRegressor, optional
        The settings of the search, by default all defaults.
    n_components : int
        Most features.
    random_state : int, RandomState instance or None
        Seed of the search; None for that of ``search``.

    Attributes
    ----------
    programs_ : list of Program
        The formula of each feature.
    search_ : SymbolicRegressor
        The search.

    """

    _other_parameters = _OF_TRANSFORMERS
    search_: SymbolicRegressor
    programs_: list[Program]

    @explains_keywords(_OF_TRANSFORMERS)
    def __init__(
        self,
        search: SymbolicRegressor | None = None,
        n_components: int = 10,
        random_state: Any = None,
    ) -> None:
        self.search = search
        self.n_components = n_components
        self.random_state = random_state

    @unchanged_by_failure
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Find the formulas.

        Args:
            X: features, [rows, variables].
            y: target, [rows].
            sample_weight: non-negative weight of each row, [rows].

        Raises:
            ValueError: for data that scikit-learn refuses.
            InvalidArgumentError: if ``n_components`` is no number from 1, or the search has groups.
            UnavailableError: if the server cannot be reached or started.

        """
        if not isinstance(self.n_components, int | np.integer) or self.n_components < 1:
            raise InvalidArgumentError(
                f"n_components is {self.n_components!r}",
                "BAD_SETTING",
                "Give a number from 1",
                "n_components",
            )
        require_order(X, "X")
        require_order(y, "y")
        found, _ = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        search = _search_of(self)
        if search.group is not None:
            raise InvalidArgumentError(
                f"group is {search.group!r}", "BAD_SETTING", "Make features without groups", "group"
            )
        names = getattr(self, "feature_names_in_", None)
        self.search_ = search.fit(X if names is not None else found, y, sample_weight)
        self.programs_ = []
        self._means: list[float] = []
        taken: list[Floats] = []
        weights = _check_sample_weight(sample_weight, found, dtype=np.float64)
        roots = np.sqrt(weights / weights.sum())
        for program in [self.search_.program_, *self.search_.programs_found()]:
            if len(taken) == self.n_components:
                break
            with np.errstate(all="ignore"):
                values = reference.evaluate_program(program, found.T)
                mean = float(np.average(values, weights=weights))
                shifted = (values - mean) * roots
                length = float(np.linalg.norm(shifted))
            if not np.isfinite(length) or length <= _CONSTANT * abs(mean):
                continue
            unit = shifted / length
            if all(abs(float(unit @ other)) < _SAME for other in taken):
                taken.append(unit)
                self.programs_.append(program)
                self._means.append(mean)
        if not self.programs_:
            self.programs_, self._means = [Program.variable(0)], [float(found[:, 0].mean())]
        return self

    @property
    def _n_features_out(self) -> int:
        return len(self.programs_)

    def transform(self, X: ArrayLike) -> Floats:
        """Return the features, [rows, components].

        Where a formula has no value it is its mean over the rows of ``fit``.
        """
        check_is_fitted(self)
        rows = np.asarray(validate_data(self, X, dtype=np.float64, reset=False)).T
        with np.errstate(all="ignore"):
            columns = [reference.evaluate_program(program, rows) for program in self.programs_]
        pairs = zip(columns, self._means, strict=True)
        return np.column_stack([np.where(np.isfinite(c), c, mean) for c, mean in pairs])

    def get_feature_names_out(self, input_features: Any = None) -> Any:
        """Return the formulas as text, over the names of the columns that ``fit`` was given."""
        check_is_fitted(self)
        names = tuple(getattr(self, "feature_names_in_", ()))
        texts = [to_text(program, names, self.search_.digits) for program in self.programs_]
        return np.array(texts, dtype=object)

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that a target is needed."""
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        return tags
