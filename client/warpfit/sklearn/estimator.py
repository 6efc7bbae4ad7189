"""The base of all estimators, and `ParameterOptimizer`, which fits a formula that is known.

The base checks the data, connects to a server, and predicts by a formula.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, Literal, NamedTuple, ParamSpec, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import _safe_indexing, check_random_state
from sklearn.utils.validation import (
    _check_sample_weight,
    _num_samples,
    check_is_fitted,
    validate_data,
)

from warpfit.calls.arguments import member, whole_number
from warpfit.client import Client, connect
from warpfit.embedded import server_at
from warpfit.errors import InvalidArgumentError, bad_setting, did_you_mean
from warpfit.expressions import reference
from warpfit.expressions.language import DIGITS, to_latex, to_text
from warpfit.expressions.real_numbers import float_array, real_numbers, require_order
from warpfit.frontends import as_program
from warpfit.ir import Program
from warpfit.losses import Closing, Loss, LossFunction, as_function, as_loss
from warpfit.parse import MACROS
from warpfit.request import Accuracy, Method, Reason
from warpfit.sklearn.keywords import OF_OTHER_OPTIMIZERS, AnswersOtherWords, explains_keywords
from warpfit.transport.connection import TlsConfig

P = ParamSpec("P")
T = TypeVar("T")
Floats = NDArray[np.float64]

#: Fewest rows that are drawn of a table that is too large.
_FEWEST_DRAWN: Final = 10_000


class SearchWarning(UserWarning):
    """Something about the data or the search that makes its result doubtful; it says a remedy."""


class TrainingData(NamedTuple):
    """Different rows [rows, variables], in an order that only they decide, targets and weights."""

    rows: Floats
    target: Floats
    weights: Floats
    unit: float = 1.0
    """Power of two by which the target was divided."""
    variable_units: tuple[float, ...] = ()
    """The same of each variable; empty if none was divided."""
    groups: NDArray[np.int64] | None = None
    """Number of each row's group; None without groups."""


def unchanged_by_failure(fit: Callable[P, T]) -> Callable[P, T]:
    """Have a ``fit`` that fails leave its estimator as it was: fitted before, or not at all."""

    @wraps(fit)
    def fit_or_restore(*args: P.args, **kwargs: P.kwargs) -> T:
        attributes = vars(args[0])
        before = dict(attributes)
        try:
            return fit(*args, **kwargs)
        except BaseException:
            attributes.clear()
            attributes.update(before)
            raise

    return fit_or_restore


class FormulaRegressor(AnswersOtherWords, RegressorMixin, BaseEstimator, ABC):  # type: ignore[misc]
    """A regressor whose ``fit`` ends with one formula, its numbers included."""

    address: str | Client | None
    token: str | None
    tls: TlsConfig | bool | None
    engine: str
    connected_client: Client | None = None
    """Set it to a client to use that one in place of ``address``; it is no parameter."""
    variable_names: tuple[str, ...] = ()
    """Set it to name the columns of arrays, which have no names; it is no parameter."""
    digits: int | None = DIGITS
    """Significant digits of constants in texts and LaTeX; None for all of them."""
    program_: Any
    """The formula; a list of them for a target of several columns."""
    expression_: str | list[str]
    """The same as text."""
    _most_numbers: float = math.inf
    """Numbers of a table, target included, for which there is time; of more rows some are taken."""
    start_seconds_: float
    """Seconds for which ``fit`` waited until a server was ready."""

    @unchanged_by_failure
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Find the formula, on the server at ``address`` or on one that is started for it.

        Args:
            X: features, [rows, variables].
            y: target, [rows].
            sample_weight: non-negative weight of each row, [rows]; in losses one of k counts as k
                equal rows.

        Rows of weight 0 are left out before anything else is done, whatever is in them.

        Raises:
            ValueError: for data that scikit-learn refuses, such as NaN.
            InvalidArgumentError: for data that `warpfit.Client.upload` refuses, such as masked
                elements and numbers as text.
            ParseError: for a text that is no expression.
            InvalidArgumentError: for settings that make no sense or do not fit the data.
            UnavailableError: if the server cannot be reached or started.

        """
        begun = time.monotonic()
        for given, name in ((X, "X"), (y, "y")):
            require_order(given, name)
        trainings = self._trainings(X, y, sample_weight)
        self._check_settings()
        prepared = time.monotonic()
        with (
            np.errstate(all="ignore"),  # formulas overflow, which is dealt with
            self._client() as client,
        ):
            self._get_ready(client)
            # The start of a server and its compiler take none of the time.
            self.start_seconds_ = time.monotonic() - prepared
            begun += self.start_seconds_
            programs = [
                self._find(client, training, begun, len(trainings)) for training in trainings
            ]
        texts = [to_text(program, self._names(), self.digits) for program in programs]
        self.program_ = programs[0] if len(programs) == 1 else programs
        self.expression_ = texts[0] if len(texts) == 1 else texts
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Pickle with the functions of `warpfit.define` that the settings name."""
        state: dict[str, Any] = super().__getstate__()
        settings = {name: state.get(name) for name in self.get_params(deep=False)}
        definitions = MACROS.used_in(repr(settings))
        return {**state, "_definitions": definitions} if definitions else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Define functions that are not known here before anything asks for them."""
        different = MACROS.define_all(state.pop("_definitions", {}))
        super().__setstate__(state)
        if different:
            warnings.warn(
                f"{', '.join(different)} of the pickle is defined otherwise here, and stays so: "
                "another fit may find other formulas",
                SearchWarning,
                stacklevel=2,
            )

    def __sklearn_is_fitted__(self) -> bool:
        """Tell scikit-learn whether there is a formula; ``fit`` sets other attributes before."""
        return "program_" in vars(self)

    @np.errstate(all="ignore")  # NaN and infinities are in the result
    def predict(self, X: ArrayLike) -> Floats:
        """Evaluate the formula on X, [rows, variables], here and without a server; [rows]."""
        check_is_fitted(self)
        return reference.evaluate_program(self.program_, self._features(X).T)

    @np.errstate(all="ignore")
    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return R^2 of the predictions for X, [rows, variables], and y, [rows].

        Rows of weight 0 do not count. It is right for targets whose squares overflow, too.
        """
        from sklearn.metrics import r2_score  # whose package takes a while to import

        X, y, sample_weight = _rows_with_weight(X, y, sample_weight)
        y = np.asarray(real_numbers(y, "y"), np.float64)
        unit = power_of_two(y)
        return float(r2_score(y / unit, self.predict(X) / unit, sample_weight=sample_weight))

    def latex(self) -> str:
        """Return the LaTeX of the formula."""
        return to_latex(self.program_, self._names(), self.digits)

    @contextmanager
    def _client(self) -> Iterator[Client]:
        """Yield the client that was given, or one of the server at ``address``, or of a new one."""
        given = self.address if self.connected_client is None else self.connected_client
        if isinstance(given, Client):
            yield given
            return
        is_there = bool(self.address or os.environ.get("WARPFIT_ADDRESS"))
        with (
            server_at(given, ["--devices", self.engine]) as place,
            # A server that is started here speaks plain text.
            connect(place, token=self.token, tls=self.tls if is_there else False) as client,
        ):
            yield client

    def _get_ready(self, client: Client) -> None:  # nothing by default
        """Wait until the server is ready for what ``fit`` asks."""

    @abstractmethod
    def _check_settings(self) -> None:
        """Raise InvalidArgumentError for settings that make no sense."""

    @abstractmethod
    def _find(self, client: Client, training: TrainingData, begun: float, targets: int) -> Program:
        """Return the formula, and set the other attributes of a fitted estimator.

        Args:
            client: of the server.
            training: rows of one target, as they were given.
            begun: time of `time.monotonic` from which the time of ``fit`` counts.
            targets: number of targets, for each of which this is called.

        """

    def _names(self) -> tuple[str, ...]:
        """Return the names of the columns; empty where there are none."""
        return tuple(getattr(self, "feature_names_in_", self.variable_names))

    def _trainings(self, X: Any, y: Any, sample_weight: Any) -> list[TrainingData]:
        """Check what was given to ``fit``, and return the rows of each target."""
        _check_columns(X)
        X, y, sample_weight = _rows_with_weight(X, y, sample_weight)
        multiple = bool(self.__sklearn_tags__().target_tags.multi_output)
        options = {"y_numeric": True, "multi_output": multiple}
        try:
            found = validate_data(self, X, y, dtype=np.float64, **options)
        except (TypeError, ValueError) as error:
            for given, name in ((X, "X"), (y, "y")):
                is_record = getattr(getattr(given, "dtype", None), "names", None)
                if is_record or "convert string to float" in str(error):
                    real_numbers(given, name)  # which names the place
            raise
        for given, name in ((X, "X"), (y, "y")):
            real_numbers(given, name)
        X, y = found
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        count = max(_FEWEST_DRAWN, self._most_numbers / (X.shape[1] + 1))
        if len(X) > count:
            chosen = check_random_state(getattr(self, "random_state", None)).permutation(len(X))
            taken = np.sort(chosen[: int(count)])
            X, y, weights = X[taken], y[taken], weights[taken]
        # The weights of rows that are equal are added up: so a weight means repetition to the last
        # bit, and the order of the rows does not matter.
        trainings = []
        for target in (y[:, None] if y.ndim == 1 else y).T:
            table = np.column_stack([X, np.asarray(target, np.float64)]) + 0.0  # -0 is 0
            # By the first column and a hash of all: no more time where rows are much alike.
            factors = np.random.default_rng(0).integers(2**62, size=table.shape[1], dtype=np.uint64)
            order = np.lexsort((table.view(np.uint64) @ (2 * factors + 1), table[:, 0]))
            table = table[order]
            first = np.flatnonzero(np.append(True, (table[1:] != table[:-1]).any(axis=1)))
            rows, totals = table[first], np.add.reduceat(weights[order], first)
            trainings.append(TrainingData(rows[:, :-1], rows[:, -1], totals))
        return trainings

    def _features(self, X: Any) -> Floats:
        """Check what was given to ``predict``; return it as [rows, variables]."""
        require_order(X, "X")
        _check_columns(X)
        rows = np.asarray(validate_data(self, X, dtype=np.float64, reset=False))
        real_numbers(X, "X")
        return rows


def check_common(estimator: Any) -> None:
    """Raise InvalidArgumentError for a seed or an engine that makes no sense."""
    try:
        check_random_state(estimator.random_state)
    except ValueError:
        wanted = "a whole number from 0, a RandomState, or None"
        raise bad_setting("random_state", estimator.random_state, wanted) from None
    if estimator.engine not in ("auto", "cpu"):
        wanted = "Give 'auto', which takes the GPUs if there are some, or 'cpu'"
        remedy = did_you_mean(estimator.engine, ("auto", "cpu"), wanted)
        what = f"engine is {estimator.engine!r}"
        raise InvalidArgumentError(what, "BAD_SETTING", remedy, "engine")


def _check_columns(X: Any) -> None:
    """Refuse columns of a frame that hold text or dates, of which scikit-learn names none.

    Raises:
        InvalidArgumentError: with the column.
    """
    names = getattr(X, "columns", ())
    for name in names if len(set(names)) == len(names) else ():
        column = X[name]
        if getattr(column.dtype, "kind", "O") not in "fiub":
            try:
                real_numbers(column, f"column {str(name)!r}")
            except InvalidArgumentError as error:
                remedy = f"{error.remedy}; group={str(name)!r} of SymbolicRegressor takes its texts"
                raise InvalidArgumentError(
                    error.message, error.reason, f"{remedy} for names of groups", error.field
                ) from None


def _rows_with_weight(X: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """Leave out the rows of weight 0, before scikit-learn looks at what is in them."""
    if sample_weight is None:
        return X, y, None
    weights = real_numbers(sample_weight, "sample_weight")
    kept = np.flatnonzero(weights != 0)
    if 0 < len(kept) < weights.size == _num_samples(X) == _num_samples(y):
        return _safe_indexing(X, kept), _safe_indexing(y, kept), weights[kept]
    return X, y, weights


def power_of_two(numbers: Floats, exponent: float = 1.0) -> float:
    """Return the power of two next to the largest size of numbers, raised to ``exponent``.

    It is 1 unless squares of the numbers, or of their differences, could overflow or vanish.
    """
    largest = float(np.max(np.abs(numbers), initial=0.0))
    if largest == 0.0 or not np.isfinite(largest) or 1e-100 < largest < 1e100:
        return 1.0
    return math.ldexp(1.0, round(exponent * math.log2(largest)))


def loss_unit(loss: Loss | LossFunction, unit: float) -> float:
    """Return the factor of a loss of squares whose target and predictions are multiplied."""
    closing = as_function(loss).closing
    if closing in (Closing.RELATIVE, Closing.SCORE):
        return 1.0
    return unit if closing is Closing.ROOT else unit * unit


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
    address : str or Client, optional
        What `warpfit.connect` takes, such as ``"HOST:PORT"``, or a client; by default
        WARPFIT_ADDRESS, and without it a server is started on this machine for each fit.
    token : str, optional
        Bearer token, where the server asks for one; by default WARPFIT_TOKEN. A pickle of the
        estimator holds it.
    tls : TlsConfig or bool, optional
        As for `warpfit.connect`.
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
        The same as text, with six digits of each number.

    """

    _other_parameters = OF_OTHER_OPTIMIZERS
    parameters_: Floats
    standard_errors_: Floats | None
    loss_: float
    reason_: Reason
    n_iter_: int

    @explains_keywords(OF_OTHER_OPTIMIZERS)
    def __init__(
        self,
        expression: Any = "p1 + p2*x1",
        *,
        start: ArrayLike | None = None,
        starts: int = 1,
        loss: str = "mse",
        method: Literal["auto", "lm", "bfgs"] = "auto",
        accuracy: Literal["screening", "final"] = "final",
        max_iterations: int | None = None,
        bounds: tuple[Any, Any] | None = None,
        address: str | Client | None = None,
        token: str | None = None,
        tls: TlsConfig | bool | None = None,
        engine: Literal["auto", "cpu"] = "auto",
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
        self.token = token
        self.tls = tls
        self.engine = engine
        self.random_state = random_state

    def _check_settings(self) -> None:
        as_program(self.expression, self._names())
        as_loss(self.loss)
        check_common(self)
        wanted = "a whole number from 1"
        if self.start is None and whole_number(self.starts, "starts", wanted) < 1:
            raise bad_setting("starts", self.starts, wanted)
        if self.start is not None and not np.isfinite(float_array(self.start)).all():
            raise bad_setting("start", self.start, "numbers that are finite")

    def _find(self, client: Client, training: TrainingData, begun: float, targets: int) -> Program:
        program = fitted = as_program(self.expression, self._names())
        loss, target, unit = as_loss(self.loss), training.target, 1.0
        if as_function(loss).is_squares:
            # Divided by the root of its size: squares of derivatives must not vanish.
            unit = power_of_two(target, 0.5)
            target = target / unit
        if unit != 1.0:
            fitted = Program.apply("div", program, Program.constant(unit))
        if self.start is not None:
            starts = np.atleast_2d(float_array(self.start))
        else:
            draw = check_random_state(self.random_state).standard_normal
            drawn = draw((self.starts - 1, program.parameters))
            starts = np.vstack([np.ones((1, program.parameters)), drawn])
        table = training.rows, target, training.weights
        with client.upload(*table, names=self._names(), dtype="float64") as data:
            fit = client.optimize(
                data,
                [fitted],
                [starts],
                loss=loss,
                method=member(Method, self.method, "method"),
                accuracy=member(Accuracy, self.accuracy, "accuracy"),
                max_iterations=self.max_iterations,
                bounds=self.bounds,
                standard_errors=as_function(loss).is_squares,
            )
        self.parameters_ = fit.parameters[0]
        self.standard_errors_ = fit.standard_errors[0] if fit.standard_errors else None
        self.loss_ = float(fit.loss[0]) * loss_unit(loss, unit)
        self.reason_ = fit.reason[0]
        # scikit-learn wants at least one iteration to be reported.
        self.n_iter_ = max(1, int(fit.iterations[0]))
        return program.bind(self.parameters_)

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that the score depends on the formula that was given."""
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags
