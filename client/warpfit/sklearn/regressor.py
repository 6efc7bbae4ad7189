"""`SymbolicRegressor`: finds a formula for data."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from warpfit.calls.arguments import whole_number
from warpfit.client import Client
from warpfit.dataset.tables import caller_level
from warpfit.errors import InvalidArgumentError, did_you_mean
from warpfit.expressions import reference
from warpfit.expressions.language import to_latex, to_text
from warpfit.formulas.units import dimension, dimensions, exponents, exponents_of
from warpfit.frontends import as_program
from warpfit.ir import Program
from warpfit.losses import Closing, LossFunction, as_function, as_loss
from warpfit.ops import BY_CODE, VARIABLE
from warpfit.parse import function_names
from warpfit.searching import Units
from warpfit.sklearn import equations as eq
from warpfit.sklearn.chance import Chance, chance_of
from warpfit.sklearn.constraints import (
    FormulaRules,
    check_constraints,
    complexity_measure,
    directions,
    operator_code,
    operator_name,
    operator_names,
    reachable,
    with_unit,
)
from warpfit.sklearn.engine_search import INTERRUPTIONS, Terminated
from warpfit.sklearn.estimator import (
    Floats,
    FormulaRegressor,
    SearchWarning,
    TrainingData,
    check_common,
    power_of_two,
)
from warpfit.sklearn.genomes import Genomes, joined, macros_of, recoded
from warpfit.sklearn.groups import GroupedClient, GroupTable, check_sizes, encoded, values_of
from warpfit.sklearn.keywords import (
    OF_OTHER_ESTIMATORS,
    OF_OTHER_FITS,
    OF_OTHER_PREDICTIONS,
    check_loss,
    explains_keywords,
)
from warpfit.sklearn.selection import FEWEST_DIVIDED
from warpfit.sklearn.target_search import Progress, TargetSearch, load, save_table
from warpfit.sklearn.templates import Form, GroupedForm, Template, TemplateForm
from warpfit.transport.call import CallingBack
from warpfit.transport.connection import TlsConfig

#: Operators of the default: those of physics and engineering that have no steps.
OPERATORS_OF_SCIENCE: Final = (
    *("add", "sub", "mul", "div", "square", "sqrt"),
    *("exp", "log", "sin", "cos"),
)

#: Least and greatest values of settings, and most tokens of a population.
_RANGES: Final = {
    "population": (2, 100_000),
    "generations": (0, 10**9),
    "max_size": (1, 1000),
    "fit_iterations": (1, 10_000),
    "sample_rows": (1, 10**9),
    "early_stopping": (1, 10**9),
    "digits": (1, 17),
}
#: Settings of these that may be None.
_OPTIONAL: Final = ("population", "max_size", "early_stopping", "digits")
#: Greatest complexity of a formula by default, and what slope and intercept take of it.
_MAX_SIZE: Final = 41
_SLOPE_AND_INTERCEPT: Final = 4
_MOST_TOKENS: Final = 5_000_000
#: Attributes that have formulas of the last searches by target.
_OF_SEARCHES: Final = ("_formulas", "_wholes")
#: Numbers of a table for each second of the time that is given.
_NUMBERS_A_SECOND: Final = 1e6

#: A value above this, and above this multiple of all but a twentieth of the others, may be none.
_MARKER: Final = 1e9
#: A function of a template that is as similar as this to a known one may be a slip.
_SLIP: Final = 0.8


class SymbolicRegressor(FormulaRegressor):
    """Symbolic regression by the search of a server's engine, on a GPU as well as on a CPU.

    The engine searches for formulas a + b f, or for the functions of a template, by other losses
    than squares in rounds of rows that are weighted around the best formula so far. Targets and
    features are float64.

    Parameters
    ----------
    address : str or Client, optional
        What `warpfit.connect` takes, such as ``"HOST:PORT"``, or a client, as that of
        `warpfit.local` for many fits on one server; by default WARPFIT_ADDRESS, and without it a
        server is started on this machine for each fit.
    token : str, optional
        Bearer token, where the server asks for one; by default WARPFIT_TOKEN. A pickle of the
        estimator holds it.
    tls : TlsConfig or bool, optional
        As for `warpfit.connect`.
    engine : str
        What a server that is started here computes on: ``"auto"`` takes the GPUs if there are some,
        ``"cpu"`` does not.
    operators : sequence of str
        Names or symbols from `warpfit.ops.OPERATORS`, and functions of `warpfit.define`, that
        formulas are made of.
    loss : str or LossFunction
        What is minimised: a name or an expression, as in `warpfit.Client.optimize`. Structures are
        proposed by (iteratively reweighted) least squares, and compared by this loss. It may be
        negative, but has to have a least value. A sum that is not one of squares is taken for a
        negative log likelihood.
    model_selection : str
        Which equation ``predict`` uses. ``"prediction"`` takes the equation that predicts new rows
        best: a cross-validation fits the constants to other rows, the structure's tokens count,
        too, and so does a value that no row makes expect, on rows unlike all others. The null model
        is the linear regression of all variables, whose structure counts nothing: it is chosen
        unless another equation predicts better by two nats and what its own structure counts, or
        predicts better both in the cross-validation and on the rows that no fit has seen. Of
        equations that predict alike, within two nats, the shortest is chosen. Linear regression
        takes part for 40 rows or more, at most 30 variables, half as many as rows, losses of
        squares, and where there are "add" and "mul" and neither constraints, dimensionless
        constants, a template nor groups. Where an equation leaves less than a hundredth of the
        variance of rows that its constants have not seen, and for losses that are no squares,
        ``"prediction"`` is the same as ``"description_length"``, the shortest description of the
        data, which counts tokens and constants (`warpfit.sklearn.equations.Equation`). The others
        are ``"evidence"``, the largest fractional Bayes factor, for losses of squares
        (`warpfit.evidence.fractional_bayes_factor`);
        ``"accuracy"``, the least loss; ``"score"``, the steepest decrease of the loss; or
        ``"best"``, the highest score among those with at most 1.5 times the least loss, as in PySR,
        both above the least that any prediction could have.
        Equations with variables that have no value on one of the rows held out or, if squares
        are minimised, an R^2 below 0 there, or that explain the rows with the farthest targets
        alone, are chosen by none of them if there are others; a `SearchWarning` says so.
    population : int, optional
        Formulas of all islands together, each of which has a child in a generation; None for as
        many as suit the engine.
    generations : int
        Most generations. With 0 the engine pairs short formulas and breeds once. A million and
        ``max_seconds`` let time alone end the search, which then runs on all devices of a server.
    max_size : int, optional
        Greatest complexity of a formula as it is shown, slope and intercept included; by default 41
        and, of the linear regression of all variables, any. One that is given holds for this, too.
    complexity_of_operators : dict, optional
        Complexity of operators that do not count as 1.
    constraints : dict, optional
        ``{"depth": 5, "count": {"exp": 1}, "nesting": {"sin": {"sin": 0}}}``, all optional: height
        of the tree, most uses of an operator, and how often one may be nested in another. They hold
        for the formula f in a + b f. ``{"monotonic": {"dose": "increasing"}}``, or "decreasing",
        leaves out equations that fall, or rise, with a variable (by name, or x1, x2, ...) in any
        row of the training data.
    units : dict or sequence, optional
        Units of the variables, such as ``{"m": "kg", "v": "m/s"}`` by name (x1, x2, ... without
        names) or one for each column: the search keeps to formulas that add and compare only what
        has one dimension, and apply functions such as exp to numbers. Constants, also a factor of
        1 that is not written, may have the dimension that this takes. SI units without prefixes are
        known, and all of pint if it is installed.
    target_unit : str or dict, optional
        Unit of the target, which each formula has as it is written. Without
        `dimensionless_constants` a factor that is written may have any.
    dimensionless_constants : bool
        Whether constants are plain numbers, so that all dimensions come from the variables: the
        formula has the unit of the target, and an intercept only if that is a number. A unit that
        no product of powers of the variables has is refused.
    fit_iterations : int
        Iterations of the fit of the constants of each promising formula.
    sample_rows : int
        Most rows on which structures are compared; the last formulas are fitted to all that are not
        held out.
    held_out : float
        Part of the rows, of 40 or more, that neither the search nor any fit of constants sees: for
        ``r2_held_out`` of the table of equations, and to refuse formulas that predict them worse
        than their mean. 0 fits all rows, and nothing is refused.
    frequency_weights : bool
        Whether ``sample_weight`` says how often a row occurs. Then the sum of the weights is the
        amount of data for the description length. By default it is the number of different rows, so
        that the scale of the weights, such as that of 1/sigma^2, does not choose the formula.
    simplify : bool
        Whether formulas are simplified, and those that a criterion may choose are made shorter
        where the loss allows it: short constants, fewer terms, and rules such as sqrt(x^2) = x that
        hold for the data.
    snap : str or bool
        What constants become then, as far as the loss allows it: ``"constants"``, short numbers,
        fractions and, in formulas of little noise whose constants no number of four digits is near
        enough to, multiples of pi and e; ``"numbers"``, the same without pi and e; False, nothing.
    digits : int, optional
        Significant digits of constants in ``expression_``, ``equations_`` and LaTeX; None for all
        of them. ``program_`` has all digits, and is what ``predict`` computes.
    tolerance : float
        The search ends when the error is below this part of the loss of the best constant.
    max_seconds : float, optional
        Time of ``fit``, which several targets share. It begins when the server is ready: the start
        of one, and its compiler, which works for up to a minute at the first start on a machine,
        take none of it; `start_seconds_` is their time. A tenth of it, of many rows or few seconds
        a fifth, is kept for the last fits, the cross-validation and the simplification, which take
        fewer rows where they would not end in time, as a `SearchWarning` and `undone_` say. Of a
        table with more than a million numbers for each second so many rows are drawn, and the
        others are never looked at. Results depend on the speed of the machine. If the time is over
        before the first generation, ``n_iter_`` is 0, and the formulas are the best pairs and sums
        of short ones, or linear regression and the constant.
    early_stopping : int, optional
        The search ends after so many generations without a better formula: one whose loss is
        lower by a thousandth.
    guesses : sequence of str or Program
        Formulas that the search begins with, beside those that are drawn: texts over the columns'
        names, or x1, x2, ..., whose numbers are starts of a fit: exp(-1*x1) has a factor that is
        fitted, and exp(-x1) has none. They may have operators that are not among `operators`. With
        a template a guess is a dict, such as ``{"f": "x1*x2", "g": "x3", "p1": 2.0}``.
    template : str, optional
        Outer form of the formulas, such as ``"f(x1, x2) * exp(-g(x3))"``, without a slope and an
        intercept of its own. Names that are neither operators nor columns are functions that are
        searched: each sees its arguments alone, and one that is called twice is the same formula of
        other arguments. p1, p2, ... are fitted. `max_size` holds for all functions together, and
        constraints for each of them.
    group : str or int, optional
        Column of X, by name or number, that says of which group a row is, such as a station, by
        texts or numbers: one formula for all groups, whose constants are those of each group. Only
        constants with a short form, such as 2, are common to all. Then programs have parameters p1,
        p2, ..., `constants_` has them by group, and ``predict`` takes the column, too. 2 to 100
        groups of at least 5 different rows, and losses that are means or sums of the rows'.
    warm_start : bool
        Whether ``fit`` goes on from the formulas of the last one.
    checkpoint : path, optional
        File to which the formulas are saved from time to time, and from which ``fit`` goes on if it
        exists.
    output : path, optional
        CSV file of the equations so far, which is written from time to time while the search runs
        and replaced in one step; in the end it has the columns of ``equations_``. Further targets
        have files with their number, such as ``front.1.csv``.
    callback : callable, optional
        Called about once a second, and at the end, with the estimator, the number of generations
        and the equations so far; the search ends if it returns True.
    verbose : bool
        Show lines of progress: what is done before the first generation, and the best formula.
    random_state : int, RandomState instance or None
        Seed of the search; with an int the same data give the same formula.

    Attributes
    ----------
    equations_ : EquationTable
        The best equation of each complexity, simplest first, as far as more complex ones are more
        accurate, and what a criterion prefers to it, such as one of shorter constants. It prints,
        with a star at the chosen one, and ``to_pandas()`` makes a DataFrame of it. For a target of
        several columns a list with one for each.
    front_ : list of Equation
        The same with their programs.
    program_ : Program
        The chosen formula, with its constants; for several targets a list.
    expression_ : str
        The same as text, with `digits` digits; for several targets a list.
    subformulas_ : dict
        Text of each function and parameter of the template in the chosen formula, by name; empty
        without a template. For several targets a list.
    groups_ : ndarray
        The groups in ascending order, if there are some.
    constants_ : GroupTable
        Constants of the chosen formula by group; it prints, and ``to_pandas()`` makes a DataFrame
        of it. For several targets a list.
    n_iter_ : int
        Generations until the end, 0 if the time was over before the first one or a pair of short
        formulas met the tolerance.
    start_seconds_ : float
        Seconds for which ``fit`` waited until a server had started and compiled its code.
    undone_ : tuple of str
        What there was no time for, as sentences; for several targets that of the last one.
    reason_ : str
        Why the search ended: ``"generations"``, ``"tolerance"``, ``"max_seconds"``,
        ``"early_stopping"``, ``"callback"``, ``"interrupt"``, ``"terminate"`` (SIGTERM) or
        ``"server"``, which was lost; for several targets that of the last one.

    """

    reason_: str
    n_iter_: int
    undone_: tuple[str, ...]
    groups_: NDArray[Any]

    @explains_keywords(OF_OTHER_ESTIMATORS)
    def __init__(
        self,
        *,
        address: str | Client | None = None,
        token: str | None = None,
        tls: TlsConfig | bool | None = None,
        engine: Literal["auto", "cpu"] = "auto",
        operators: Sequence[str] = OPERATORS_OF_SCIENCE,
        loss: str | LossFunction = "mse",
        model_selection: eq.ModelSelection = "prediction",
        population: int | None = None,
        generations: int = 200,
        max_size: int | None = None,
        complexity_of_operators: Mapping[str, int] | None = None,
        constraints: Mapping[str, Any] | None = None,
        units: Mapping[str, Any] | Sequence[Any] | None = None,
        target_unit: Any = None,
        dimensionless_constants: bool = False,
        fit_iterations: int = 15,
        sample_rows: int = 500,
        held_out: float = 0.1,
        frequency_weights: bool = False,
        simplify: bool = True,
        snap: Any = "constants",
        digits: int | None = 4,
        tolerance: float = 1e-18,
        max_seconds: float | None = None,
        early_stopping: int | None = None,
        guesses: Sequence[Any] = (),
        template: str | None = None,
        group: str | int | None = None,
        warm_start: bool = False,
        checkpoint: str | Path | None = None,
        output: str | Path | None = None,
        callback: Callable[[SymbolicRegressor, int, list[eq.Equation]], Any] | None = None,
        verbose: bool = False,
        random_state: Any = None,
    ) -> None:
        self.address = address
        self.token = token
        self.tls = tls
        self.engine = engine
        self.operators = operators
        self.loss = loss
        self.model_selection = model_selection
        self.population = population
        self.generations = generations
        self.max_size = max_size
        self.complexity_of_operators = complexity_of_operators
        self.constraints = constraints
        self.units = units
        self.target_unit = target_unit
        self.dimensionless_constants = dimensionless_constants
        self.fit_iterations = fit_iterations
        self.sample_rows = sample_rows
        self.held_out = held_out
        self.frequency_weights = frequency_weights
        self.simplify = simplify
        self.snap = snap
        self.digits = digits
        self.tolerance = tolerance
        self.max_seconds = max_seconds
        self.early_stopping = early_stopping
        self.guesses = guesses
        self.template = template
        self.group = group
        self.warm_start = warm_start
        self.checkpoint = checkpoint
        self.output = output
        self.callback = callback
        self.verbose = verbose
        self.random_state = random_state

    @explains_keywords(OF_OTHER_PREDICTIONS)
    @np.errstate(all="ignore")  # NaN and infinities are in the result
    def predict(self, X: ArrayLike, index: int | None = None) -> Floats:
        """Evaluate the chosen formula, or another one of the front, on X; needs no server.

        Args:
            X: features, [rows, variables].
            index: row of ``equations_``, by default the chosen one.

        Returns:
            Predictions, [rows] or, for a target of several columns, [rows, targets].

        """
        check_is_fitted(self)
        rows, numbers = self._features(X).T, None
        if self.group is not None:
            numbers = rows[self._group_place].astype(np.int64)
            rows = np.delete(rows, self._group_place, axis=0)
        columns = []
        for output in range(len(self._fronts)):
            equation = self._equation(index, output)
            if equation.constants and numbers is not None:
                table = np.array(equation.constants)
                columns.append(values_of(equation.program, table, rows, numbers))
            else:
                columns.append(reference.evaluate_program(equation.program, rows))
        return columns[0] if isinstance(self.program_, Program) else np.column_stack(columns)

    def program(self, index: int | None = None, output: int = 0, group: Any = None) -> Program:
        """Return a formula of the front, by default the chosen one, of one of the targets.

        ``group`` is one of `groups_`, whose constants take the place of the parameters.
        """
        check_is_fitted(self)
        equation = self._equation(index, output)
        if group is None or not equation.constants:
            return equation.program
        if group not in self.groups_:
            raise _unknown_word("group", group, self.groups_[:20].tolist())
        place = int(np.flatnonzero(self.groups_ == group)[0])
        return equation.program.bind(equation.constants[place])

    def programs_found(self, output: int = 0) -> list[Program]:
        """Return all formulas of the search's last populations without slope and intercept.

        The best come first.
        """
        check_is_fitted(self)
        self._front(output)
        found = getattr(self, "_wholes", {}).get(output, Genomes.of([]))
        return [found.program(row) for row in range(len(found))]

    def latex(self, index: int | None = None, output: int = 0, group: Any = None) -> str:
        """Return the LaTeX of a formula; arguments as for `program`."""
        return to_latex(self.program(index, output, group), self._names(), self.digits)

    def sympy(self, index: int | None = None, output: int = 0, group: Any = None) -> Any:
        """Return a formula as a SymPy expression over the names of the columns, or x1, x2, ...."""
        return self.program(index, output, group).sympy(self._names())

    def to_numpy(
        self, index: int | None = None, output: int = 0, group: Any = None
    ) -> Callable[..., Floats]:
        """Return a formula as a function of its variables that needs NumPy alone."""
        return self.program(index, output, group).to_numpy(self._names())

    def code(
        self, language: str, index: int | None = None, output: int = 0, group: Any = None
    ) -> str:
        """Return a formula as text in a language, as `warpfit.Program.code`."""
        return self.program(index, output, group).code(language, self._names())

    def chance(self, n: int = 200, seed: int = 0, output: int = 0) -> Chance:
        """Say how often a search as this one finds as good a formula in targets that hold nothing.

        The search runs once more on half of the rows. Its formulas as short as the chosen one are
        fitted to the other half, with its target and with n shuffles of this: see
        `warpfit.sklearn.chance`. Losses have to depend on the differences of predictions and
        targets alone, and an estimator that comes from a pickle has no rows.

        Args:
            n: number of shuffles, all of which are fitted by one call.
            seed: of the halves and the shuffles.
            output: target, where there are several.

        Returns:
            The share of shuffles in which a formula as short fits as well, and the p-value.

        Raises:
            InvalidArgumentError: if the rows are too few or gone, the loss does not suit, or there
                is no such target.

        """
        check_is_fitted(self)
        self._front(output)
        given = getattr(self, "_given", None)
        if given is None:
            raise InvalidArgumentError(
                "the estimator comes from a pickle, which holds no rows",
                "NO_DATA",
                "Call fit again before chance",
            )
        if self.group is not None:
            raise _bad_setting("group", self.group, "None for chance")
        with np.errstate(all="ignore"), self._client() as client:
            return chance_of(self, given[output], self._names(), n, seed, client)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the rows, and with the names of the macros of its formulas."""
        state: dict[str, Any] = super().__getstate__()
        known = [each for name in _OF_SEARCHES for each in state.get(name, {}).values()]
        macros = macros_of(joined([Genomes.of([]), *known]))
        return {k: v for k, v in state.items() if k != "_given"} | {"_macros": macros}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the codes that the macros of the formulas have in this process."""
        macros = state.pop("_macros", {})
        super().__setstate__(state)
        for name in _OF_SEARCHES if macros else ():
            known = getattr(self, name, {})
            setattr(self, name, {place: recoded(each, macros) for place, each in known.items()})

    def plot_front(self, ax: Any = None, output: int = 0) -> Any:
        """Draw loss over complexity with matplotlib; return the axes."""
        check_is_fitted(self)
        return eq.plot_front(self._front(output), self._equation(None, output), ax)

    def plot_fit(self, X: ArrayLike, y: ArrayLike, index: int | None = None, ax: Any = None) -> Any:
        """Draw predictions over the target with matplotlib; return the axes."""
        return eq.plot_fit(np.asarray(y), self.predict(X, index), ax)

    @property
    def equations_(self) -> eq.EquationTable | list[eq.EquationTable]:
        """The equations as a table; one for each target."""
        check_is_fitted(self)
        linear = [[each.is_linear_regression for each in front] for front in self._fronts]
        below = [
            f"equation {places.index(True)} is the linear regression of all variables"
            if any(places)
            else ""
            for places in linear
        ]
        if self.group is not None:
            below = [str(self._constants(output)) for output in range(len(self._fronts))]
        tables = [
            eq.EquationTable(
                tuple(front),
                self.digits or 17,
                text,
                eq.selected(front, self.model_selection),
                self.model_selection,
            )
            for front, text in zip(self._fronts, below, strict=True)
        ]
        return tables[0] if isinstance(self.program_, Program) else tables

    @property
    def subformulas_(self) -> Any:
        """Functions and parameters of the template in the chosen formula; a dict by target."""
        check_is_fitted(self)
        found = [self._equation(None, place).subformulas for place in range(len(self._fronts))]
        return found[0] if isinstance(self.program_, Program) else found

    @property
    def constants_(self) -> GroupTable | list[GroupTable]:
        """Constants of the chosen formula by group; one table for each target."""
        check_is_fitted(self)
        tables = [self._constants(output) for output in range(len(self._fronts))]
        return tables[0] if isinstance(self.program_, Program) else tables

    @property
    def size_limit(self) -> int:
        """Greatest complexity of a formula, slope and intercept included."""
        return _MAX_SIZE if self.max_size is None else self.max_size

    @property
    def searched_size(self) -> int:
        """Greatest complexity of f in a + b f, which may do without slope and intercept."""
        return _MAX_SIZE - _SLOPE_AND_INTERCEPT if self.max_size is None else self.max_size

    def rules(
        self, form: Form, training: TrainingData, names: Sequence[str], guesses: Sequence[Program]
    ) -> FormulaRules:
        """Return what a formula has to keep to.

        Args:
            form: of the formulas.
            training: rows.
            names: of the variables, or empty.
            guesses: formulas of the user, whose operators others may have.

        """
        codes = {int(code) for program in guesses for code in program.codes.tolist()}
        own = [BY_CODE[code].name for code in sorted(codes) if code in BY_CODE]
        count = training.rows.shape[1]
        monotonic = (self.constraints or {}).get("monotonic", {})
        known = None if self.units is None else dimensions(self.units, names, count)
        given = known is not None and self.target_unit is not None
        units = None
        if self.units is not None:
            units = Units(
                exponents_of(self.units, names, count),
                exponents(self.target_unit, "target_unit") if given else None,
                self.dimensionless_constants,
            )
        return FormulaRules(
            form=form,
            operators=tuple(dict.fromkeys([*operator_names(self.operators), *own])),
            constraints=self.constraints or {},
            measure=complexity_measure(self.complexity_of_operators),
            most=self.size_limit,
            most_searched=self.searched_size,
            rows=training.rows,
            signs=directions(monotonic, names, count),
            dimensions=known,
            target=dimension(self.target_unit, "target_unit") if given else None,
            dimensionless=self.dimensionless_constants,
            complexities={
                operator_name(name): int(size)
                for name, size in (self.complexity_of_operators or {}).items()
            },
            units=units,
        )

    def _constants(self, output: int) -> GroupTable:
        constants = self._equation(None, output).constants
        names = tuple(f"p{place + 1}" for place in range(len(constants[0]) if constants else 0))
        groups = tuple(getattr(self, "groups_", np.empty(0)).tolist()) if constants else ()
        return GroupTable(names, groups, constants, self.digits or 17)

    @property
    def front_(self) -> Any:
        """The equations with their programs; one list for each target."""
        check_is_fitted(self)
        return self._fronts[0] if isinstance(self.program_, Program) else self._fronts

    def _front(self, output: int) -> list[eq.Equation]:
        """Return the equations of a target; raise InvalidArgumentError if there is none."""
        if not -len(self._fronts) <= output < len(self._fronts):
            raise InvalidArgumentError(
                f"there is no target {output}",
                "OUT_OF_RANGE",
                f"Give an output from 0 to {len(self._fronts) - 1}",
                "output",
            )
        return self._fronts[output]

    def _equation(self, index: int | None, output: int) -> eq.Equation:
        front = self._front(output)
        wanted = f"an index from 0 to {len(front) - 1}"
        place = eq.selected(front, self.model_selection)
        place = place if index is None else whole_number(index, "index", wanted)
        if not -len(front) <= place < len(front):
            raise InvalidArgumentError(
                f"there is no equation {place}",
                "OUT_OF_RANGE",
                f"Give {wanted}",
                "index",
            )
        return front[place]

    def _check_settings(self) -> None:
        operator_names(self.operators)
        check_loss(self.loss)
        as_loss(self.loss)
        eq.check_selection(self.model_selection)
        if self.model_selection == "evidence" and not as_function(as_loss(self.loss)).is_squares:
            raise _bad_setting("loss", self.loss, "one of squares, whose evidence is known")
        complexity_measure(self.complexity_of_operators)
        check_constraints(self.constraints)
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            whole = isinstance(value, int | np.integer) and least <= value <= most
            if not whole and (value is not None or name not in _OPTIONAL):
                raise _bad_setting(name, value, f"a whole number from {least} to {most}")
        if (self.population or 0) * self.size_limit > _MOST_TOKENS:
            raise _bad_setting(
                "population", self.population, f"at most {_MOST_TOKENS // self.size_limit} formulas"
                f" of max_size={self.size_limit}"
            )  # fmt: skip
        monotonic = (self.constraints or {}).get("monotonic", {})
        directions(monotonic, self._names(), self._variables)
        if self.units is not None:
            dimensions(self.units, self._names(), self._variables)
        elif self.dimensionless_constants:
            raise _bad_setting("dimensionless_constants", True, "units of the variables, too")
        if self.group is not None:
            function = as_function(as_loss(self.loss))
            if function.closing not in (Closing.MEAN, Closing.SUM) or function.is_score:
                raise _bad_setting("loss", self.loss, "a mean or sum over rows with group=")
            if monotonic or self.model_selection == "evidence":
                raise _bad_setting("group", self.group, "None where constraints are monotonic, or "
                                   "evidence selects the model")  # fmt: skip
        if self.target_unit is not None:
            wanted = exponents(self.target_unit, "target_unit")
            if self.units is not None and self.dimensionless_constants:
                own = exponents_of(self.units, self._names(), self._variables)
                if not reachable(own, wanted):
                    raise InvalidArgumentError(
                        f"no product of powers of the variables has the unit {self.target_unit!r}",
                        "UNITS_DIFFER",
                        "Give the target's unit, a variable that has what is missing, or "
                        "dimensionless_constants=False",
                        "target_unit",
                    )
        if self.max_seconds is not None and not 0.0 < _number(self.max_seconds) < math.inf:
            raise _bad_setting("max_seconds", self.max_seconds, "a number above 0, or None")
        if not 0.0 <= _number(self.held_out) < 1.0:
            raise _bad_setting("held_out", self.held_out, "a part from 0 to below 1")
        if not 0.0 <= _number(self.tolerance) < math.inf:
            raise _bad_setting("tolerance", self.tolerance, "a number from 0")
        template = self._template()
        if template is None:
            self._guessed()
        else:
            form = TemplateForm(template, self._given[0].rows)
            for guess in self.guesses:
                form.guessed(guess)
            if self.model_selection == "evidence":
                raise _bad_setting("model_selection", "evidence", "another one with a template")
            for name in template.functions:
                meant = get_close_matches(name, function_names(), n=1, cutoff=_SLIP)
                if meant and len(name) > len(meant[0]) > 2:
                    _warn(f"{name} in the template is a function that is searched. Write {meant[0]}"
                          " if that is meant, or else a name that is less like it")  # fmt: skip
        if self.snap not in ("constants", "numbers", False):
            raise _unknown_word("snap", self.snap, ("constants", "numbers", "False"))
        check_common(self)
        if not (self.callback is None or callable(self.callback)):
            raise _bad_setting("callback", self.callback, "a function, or None")
        for name in ("checkpoint", "output"):
            path = getattr(self, name)
            is_path = isinstance(path, str | os.PathLike)
            if path is not None and not (
                is_path and Path(path).parent.is_dir() and not Path(path).is_dir()
            ):
                raise _bad_setting(name, path, "a file in a folder that exists")

    def _trainings(self, X: Any, y: Any, sample_weight: Any) -> list[TrainingData]:
        self._fresh_fronts: list[list[eq.Equation]] = []
        if getattr(getattr(y, "dtype", None), "kind", "") == "b":
            _warn("the target is true or false: SymbolicClassifier finds a formula for the odds")
        # So many as are prepared, sent and measured in a part of the time.
        seconds = _number(self.max_seconds)  # NaN for None, and for what is refused later
        self._most_numbers = seconds * _NUMBERS_A_SECOND if seconds > 0.0 else math.inf
        if self.group is None:
            self._given = super()._trainings(X, y, sample_weight)
            own, targets = self._names(), [training.target for training in self._given]
            names = [to_text(Program.variable(place), own) for place in range(self._variables)]
            names += ["the target"] * len(targets)
            # Values so far from all others may stand for missing ones.
            for name, column in zip(names, [*self._given[0].rows.T, *targets], strict=True):
                sizes = np.sort(np.abs(column[column != 0.0]))
                last = sizes[len(sizes) - max(1, len(sizes) // 20) - 1 :]
                far = np.flatnonzero(last[1:] > _MARKER * last[:-1])
                if len(far) and last[-1] > _MARKER and len(sizes) > 2:
                    _warn(f"{name} is up to {last[-1]:.4g} in size, and otherwise at most "
                          f"{last[far[0]]:.4g}. If this stands for a missing value, leave its row "
                          "out, or give it a sample_weight of 0")  # fmt: skip
            return self._given
        X, self._group_place, groups = encoded(X, self.group, None)
        self._given = []
        for training in super()._trainings(X, y, sample_weight):
            numbers = training.rows[:, self._group_place].astype(np.int64)
            check_sizes(groups, numbers)
            rows = np.ascontiguousarray(np.delete(training.rows, self._group_place, axis=1))
            self._given.append(training._replace(rows=rows, groups=numbers))
        self.groups_ = groups
        return self._given

    def _features(self, X: Any) -> Floats:
        if self.group is not None:
            X, _, _ = encoded(X, self.group, self.groups_)
        return super()._features(X)

    def _names(self) -> tuple[str, ...]:
        names = super()._names()
        if self.group is None or not names:
            return names
        return tuple(np.delete(np.array(names, object), self._group_place))

    @property
    def _variables(self) -> int:
        """Number of columns that formulas may have."""
        return int(self.n_features_in_) - (self.group is not None)

    @explains_keywords(OF_OTHER_FITS)
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Find the formula, on the server at ``address`` or on one that is started for it.

        An interrupt (Ctrl-C), SIGTERM where it would end the process, and the loss of the server
        end the search, as `reason_` says: the estimator is fitted with what has been found until
        then, and a `SearchWarning` says so. Where nothing has been found they raise as usual, as a
        second interrupt does.

        Args:
            X: features, [rows, variables].
            y: target, [rows] or [rows, targets].
            sample_weight: non-negative weight of each row, [rows]; in losses one of k counts as k
                equal rows.

        Rows of weight 0 are left out before anything else is done, whatever is in them.

        Raises:
            ValueError: for data that scikit-learn refuses, such as NaN.
            InvalidArgumentError: for data that `warpfit.Client.upload` refuses, such as masked
                elements and numbers as text, and for settings that make no sense or do not fit the
                data.
            UnavailableError: if the server cannot be reached or started.

        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            return super().fit(X, y, sample_weight)

        def terminate(*_: Any) -> None:
            raise Terminated

        signal.signal(signal.SIGTERM, terminate)
        try:
            return super().fit(X, y, sample_weight)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _find(self, client: Client, training: TrainingData, begun: float, targets: int) -> Program:
        is_plain = self.template is None and self.group is None
        if is_plain and as_function(as_loss(self.loss)).is_squares:
            # Numbers are divided whose squares could overflow or vanish. Other losses are minimised
            # as they are, and so are those of a template and of groups.
            unit, units = power_of_two(training.target), tuple(map(power_of_two, training.rows.T))
            if {unit, *units} != {1.0}:
                rows, target = training.rows / np.array(units), training.target / unit
                training = training._replace(
                    rows=rows, target=target, unit=unit, variable_units=units
                )
        rng = np.random.default_rng(check_random_state(self.random_state).randint(2**31))
        template = self._template()
        grouped = training.groups is not None
        form: Form = GroupedForm(training.rows) if grouped else Form()
        if template is not None:
            form = TemplateForm(template, training.rows, grouped)
        if training.groups is not None:
            client = cast(Client, GroupedClient(client, len(self.groups_)))
        if isinstance(form, TemplateForm):
            guesses = [form.program(form.guessed(guess), 0) for guess in self.guesses]
        else:
            guesses = self._guessed()
        output = len(self._fresh_fronts)
        # The time of fit is shared by the targets.
        spans = [(self.max_seconds or math.inf) * (output + step) / targets for step in (1, 0)]
        task = TargetSearch(
            self,
            client,
            training,
            rng,
            self._start(output, training, form),
            self._names(),
            begun if output == 0 or self.max_seconds is None else begun + spans[1],
            begun + spans[0],
            form,
            guesses,
        )
        if output and self.reason_ in INTERRUPTIONS:
            front = task.nothing()
        else:
            file = self._checkpoint_file(output)
            own = nullcontext() if self.callback is None else CallingBack(self.callback)
            with own as callback:
                progress = Progress(
                    file, begun, self.verbose, callback, table=self._table_file(output)
                )
                front = task.run(progress)
            self.n_iter_, self.reason_ = task.generation, task.reason
            if len(task.formulas):
                known = getattr(self, "_formulas", {}) if output else {}
                self._formulas = {**known, output: task.formulas}
                known = getattr(self, "_wholes", {}) if output else {}
                self._wholes = {**known, output: task.form.whole(task.formulas)}
                progress.save(task.formulas)
            self._warn_of_end(task.undone)
        if self.model_selection == "evidence":
            # It is that of their constants as they are, on all rows.
            lifted = [equation.program.lift_constants() for equation in front]
            with client.upload(*self._given[output][:3], dtype="float64") as data:
                fit = client.optimize(
                    data, *zip(*lifted, strict=True), max_iterations=0, evidence=True
                )
            assert fit.evidence is not None  # it was asked for
            factors = fit.evidence.bayes_factor.tolist()
            front = [replace(e, evidence=value) for e, value in zip(front, factors, strict=True)]
        self._fresh_fronts.append(front)
        table = self._table_file(output)
        if table is not None:
            save_table(table, front)
        favourite = eq.SELECTIONS[self.model_selection](front)
        if not favourite.is_supported:
            chosen = front[eq.selected(front, self.model_selection)]
            is_few = len(training.target) < FEWEST_DIVIDED
            why = eq.reason_against(favourite, chosen, len(training.target), is_few=is_few)
            _warn(
                f"the equation that {self.model_selection!r} prefers, "
                f"{favourite.equation[:200]}, {why}"
            )
        self._fronts = self._fresh_fronts
        return self._equation(None, output).program

    def _warn_of_end(self, undone: Sequence[str]) -> None:
        """Warn of a search that could not do what was asked for.

        Args:
            undone: what there was no time for.

        """
        self.undone_ = tuple(dict.fromkeys(undone))
        if self.reason_ in INTERRUPTIONS:
            what = {"server": "the server is lost", "terminate": "SIGTERM has come"}
            message = (
                f"{what.get(self.reason_, 'an interrupt has come')}, and the search ends in "
                f"generation {self.n_iter_}: the formulas are those that were found until then"
            )
        elif self.reason_ == "max_seconds" and not self.n_iter_:
            self.undone_ = ("no generation has run", *self.undone_)
            message = (
                f"max_seconds={self.max_seconds} left no time for a generation: the formulas are "
                "pairs of short ones, with constants as far as they were fitted"
            )
        elif self.undone_:
            message = f"max_seconds={self.max_seconds} were too few"
            if self.max_seconds is None:
                message = "the server has answered too late"
            if self.reason_ == "tolerance":
                message = f"a formula meets the tolerance; what follows was cut short: {message}"
        else:
            return
        what_else = "; ".join(self.undone_)
        if self.undone_ and self.reason_ not in INTERRUPTIONS:
            message += f" ({what_else}). Give more time, or less population, sample_rows or rows"
        _warn(message)

    def _checkpoint_file(self, output: int) -> Path | None:
        """Return the file of a target; those of further targets have a number behind the name."""
        if self.checkpoint is None:
            return None
        path = Path(self.checkpoint)
        return path if output == 0 else path.with_name(f"{path.name}.{output}")

    def _table_file(self, output: int) -> Path | None:
        """Return the file of a target's equations."""
        if self.output is None:
            return None
        path = Path(self.output)
        return path if output == 0 else path.with_name(f"{path.stem}.{output}{path.suffix}")

    def _start(self, output: int, training: TrainingData, form: Form) -> Genomes:
        """Return the formulas that the search of a target goes on from, guesses first."""
        path, variables = self._checkpoint_file(output), training.rows.shape[1]
        width = self.searched_size + form.overhead
        known = getattr(self, "_formulas", {}).get(output) if self.warm_start else None
        if known is None and path is not None:
            known = load(path, form, width, variables)
        if known is None or not form.fits(known):
            known = Genomes.of([])
        used = np.where(known.codes == VARIABLE, known.values, -1.0)
        most = np.maximum.reduceat(used, known.starts[:-1]) if len(known) else np.empty(0)
        older = known[(known.sizes <= width) & (most < variables)]
        guessed = [] if isinstance(form, TemplateForm) else self._guessed()
        codes = {operator_code(name) for name in operator_names(self.operators)}
        codes |= {code for guess in guessed for code in guess.codes.tolist()}
        others = [code for code in {*older.codes.tolist()} - codes if code in BY_CODE]
        if others and not form.is_template:
            _warn(
                f"formulas of the last search have {', '.join(BY_CODE[c].name for c in others)}, "
                "which operators= has not: they are left out"
            )
            older = older[older.totals(np.isin(older.codes, others)) == 0]
        if isinstance(form, TemplateForm):
            return joined([*map(form.guessed, self.guesses), older])
        begun = guessed
        if self.units is not None and self.target_unit is not None and self.dimensionless_constants:
            own = dimensions(self.units, self._names(), variables)
            target = dimension(self.target_unit, "target_unit")
            begun += with_unit(operator_names(self.operators), own, target)
        return joined([Genomes.of(begun), older])

    @contextmanager
    def _client(self) -> Iterator[Client]:
        if self.verbose and self.connected_client is None:
            progress = Progress(None, time.monotonic(), True)
            progress.phase("connection to a server")
        with super()._client() as client:
            yield client

    def _get_ready(self, client: Client) -> None:
        """Wait until the server has compiled its code, which a small fit shows."""
        X = np.arange(1.0, 4.0)[:, None]
        with client.upload(X, np.ones(3), dtype="float64") as data:
            client.evaluate(data, ["x1"], loss="mse", linear_scaling=True)
            client.optimize(data, ["p1*x1"], [[1.0]])
        with client.upload(X, X[:, 0] ** 2, dtype="float64") as data:
            client.search(data, generations=1, population=2, pairs=False)

    def _template(self) -> Template | None:
        if self.template is None:
            return None
        return Template.of(self.template, self._names(), self._variables)

    def _guessed(self) -> list[Program]:
        """Return the guesses as programs; parameters begin as 1."""
        if isinstance(self.guesses, str) or not isinstance(self.guesses, Sequence):
            raise _bad_setting("guesses", self.guesses, "a list of formulas")
        programs = []
        for guess in self.guesses:
            program = as_program(guess, self._names())
            program = program.bind(np.ones(program.parameters))
            whole = Genomes.of([program])
            size = int(complexity_measure(self.complexity_of_operators)(whole)[0])
            if program.variables > self._variables or size > self.size_limit:
                what = f"at most {self._variables} variables and a size of at most max_size="
                raise _bad_setting("guesses", str(program)[:100], f"{what}{self.size_limit}")
            programs.append(program)
        return programs

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that the target may have several columns."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


def _warn(text: str) -> None:
    warnings.warn(text, SearchWarning, stacklevel=caller_level())


def _number(value: Any) -> float:
    """Return a number as it is, and NaN for anything else."""
    return float(value) if isinstance(value, int | float | np.number) else math.nan


def _unknown_word(name: str, value: Any, known: Sequence[Any]) -> InvalidArgumentError:
    remedy = did_you_mean(value, known, f"Give one of {', '.join(map(str, known))}")
    return InvalidArgumentError(f"{name} is {value!r}", "BAD_SETTING", remedy, name)


def _bad_setting(name: str, value: Any, wanted: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name} is {value!r}", "BAD_SETTING", f"Give {wanted}", name)
