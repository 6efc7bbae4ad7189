"""Values, derivatives and whole evaluations in NumPy float64, the reference for all engines.

The module shares nothing with the engines but the operator table and the closings of losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from warpfit import ops
from warpfit.dataset import Dataset
from warpfit.ir import Program
from warpfit.losses import (
    PREDICTION,
    LossFunction,
    TargetStatistics,
    close_gradients,
    close_losses,
    mentions_weight,
)
from warpfit.ops import CONSTANT, PARAMETER, VARIABLE, Operator
from warpfit.request import Evaluation, Result

# -------------------------------------------------------------------------------------- one program

Floats = NDArray[np.float64]

#: Code of a derivative's text.
_compiled: Final = cache(lambda text: compile(text, "derivative", "eval"))


def evaluate_program(program: Program, variables: ArrayLike, parameters: ArrayLike = ()) -> Floats:
    """Evaluate one program on [variables, rows] and [parameters]; return float64 [rows]."""
    columns = np.asarray(variables, dtype=np.float64)
    vector = np.asarray(parameters, dtype=np.float64)

    def leaf(code: int, value: float) -> Floats:
        if code == VARIABLE:
            return np.asarray(columns[int(value)])
        return np.asarray(value if code == CONSTANT else vector[int(value)], dtype=np.float64)

    def operator(op: Operator, operands: list[Floats]) -> Floats:
        return np.asarray(op.numpy(*operands), dtype=np.float64)

    with np.errstate(all="ignore"):
        result = program.fold(leaf, operator)
    return np.broadcast_to(result, columns.shape[1:]).copy()


def evaluate_programs(
    programs: Sequence[Program], variables: ArrayLike, parameters: Sequence[ArrayLike] | None = None
) -> Floats:
    """Evaluate programs with one parameter vector each; return float64 [programs, rows]."""
    vectors = [()] * len(programs) if parameters is None else parameters
    return np.stack(
        [evaluate_program(p, variables, v) for p, v in zip(programs, vectors, strict=True)]
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Dual:
    """A value [rows] and its derivatives [rows] by the index of the parameter or variable."""

    value: Floats
    slopes: dict[int, Floats]


def differentiate(
    program: Program, variables: ArrayLike, parameters: ArrayLike = (), *, by: int = PARAMETER
) -> tuple[Floats, Floats]:
    """Compute the values of a program, [rows], and their derivatives, [leaves, rows], in float64.

    Variables are [variables, rows], parameters [parameters]; ``by`` is PARAMETER or VARIABLE.
    """
    columns = np.asarray(variables, dtype=np.float64)
    vector = np.asarray(parameters, dtype=np.float64)
    rows = columns.shape[1:]

    def leaf(code: int, value: float) -> _Dual:
        if code == CONSTANT:
            return _Dual(np.full(rows, value), {})
        index = int(value)
        number = columns[index] if code == VARIABLE else np.full(rows, vector[index])
        return _Dual(number, {index: np.ones(rows)} if code == by else {})

    def apply(operator: Operator, operands: list[_Dual]) -> _Dual:
        values = [operand.value for operand in operands]
        result = np.asarray(operator.numpy(*values), dtype=np.float64)
        names = dict(zip(operator.operands, values, strict=True)) | {"r": result}
        slopes: dict[int, Floats] = {}
        for operand, text in zip(operands, operator.derivative, strict=True):
            if operand.slopes:
                partial = eval(_compiled(text), {"__builtins__": {}, **FUNCTIONS}, names)
                for index, slope in operand.slopes.items():
                    passes = (partial != 0) & (slope != 0)
                    slopes[index] = slopes.get(index, 0.0) + np.where(passes, partial * slope, 0.0)
        return _Dual(result, slopes)

    with np.errstate(all="ignore"):
        result = program.fold(leaf, apply)
    slopes = np.zeros((len(vector) if by == PARAMETER else len(columns), *rows))
    for index, slope in result.slopes.items():
        slopes[index] = slope
    return result.value, slopes


#: Functions of the kernel language of `warpfit.ops` in NumPy.
FUNCTIONS: Final[Mapping[str, Any]] = {
    **{name: getattr(np, name) for name in ("sqrt", "cbrt", "exp", "expm1", "log", "log1p")},
    **{name: getattr(np, name) for name in ("log2", "log10", "hypot", "sin", "cos", "tan")},
    **{name: getattr(np, name) for name in ("sinh", "cosh", "tanh", "floor", "ceil", "abs")},
    **{"rint": np.rint, "mod": np.mod},
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "pow": ops.power,
    **{name: getattr(ops, name) for name in ("erf", "erfc", "tgamma", "lgamma", "digamma")},
    "select": np.where,
}


# --------------------------------------------------------------------- evaluations with all outputs


@dataclass(frozen=True, slots=True, eq=False)
class EvaluatedRows:
    """The rows of a data set that an evaluation uses, in float64."""

    dataset: Dataset
    variables: Floats
    target: Floats
    weights: Floats

    @classmethod
    def of(cls, dataset: Dataset, evaluation: Evaluation) -> EvaluatedRows:
        """Return the rows of an evaluation; a missing target is 0, missing weights are 1."""
        rows = slice(*evaluation.row_range(dataset.layout))
        variables = dataset.variables[:, rows].astype(np.float64)
        count = variables.shape[1]
        target = np.zeros(count) if dataset.target is None else dataset.target[rows]
        weights = np.ones(count) if dataset.weights is None else dataset.weights[rows]
        return cls(dataset, variables, target.astype(np.float64), weights.astype(np.float64))

    def weighted(self) -> EvaluatedRows:
        """Return the rows that have a weight: no other counts in losses, moments and fits."""
        own = self.of_weighted(self.variables), *map(self.of_weighted, (self.target, self.weights))
        return EvaluatedRows(self.dataset, *own)

    def of_weighted(self, values: Floats) -> Floats:
        """Select the rows that have a weight, the last axis of an array.

        They lie in a row again: NumPy's sums depend on that.
        """
        return np.ascontiguousarray(values[..., self.weights > 0])


@dataclass(frozen=True, slots=True, eq=False)
class RowLossSums:
    """Sum of the row losses of one program and parameter vector, and its derivatives."""

    loss: float
    gradient: Floats
    """[parameters]."""
    variable_gradient: Floats
    """[variables]."""
    curvature: Floats
    """Sum of w (df/dp_i) (df/dp_j), [parameters, parameters]."""


def linearise(
    program: Program, parameters: Floats, rows: EvaluatedRows, row_loss: Program
) -> RowLossSums:
    """Sum the row losses of a program, and their derivatives, over the rows."""
    values, jacobian = differentiate(program, rows.variables, parameters)
    _, by_variables = differentiate(program, rows.variables, parameters, by=VARIABLE)
    inputs = np.stack([_rounded(values, rows), rows.target, rows.weights])
    terms, slopes = differentiate(row_loss, inputs, by=VARIABLE)
    factor = np.ones(1) if mentions_weight(row_loss) else rows.weights
    with np.errstate(all="ignore"):
        each = factor * slopes[PREDICTION]
        return RowLossSums(
            float(np.sum(factor * terms)),
            jacobian @ each,
            by_variables @ each,
            (jacobian * rows.weights) @ jacobian.T,
        )


def evaluate(evaluation: Evaluation, dataset: Dataset) -> Result:
    """Compute a checked evaluation."""
    rows = EvaluatedRows.of(dataset, evaluation)
    batch = evaluation.batch
    cells = [
        (batch.program(index), parameters)
        for index in range(len(batch))
        for parameters in batch.program_parameters(index)
    ]
    values = np.stack([evaluate_program(p, rows.variables, v) for p, v in cells])
    values = _rounded(values, rows)
    weighted, weighted_values = rows.weighted(), rows.of_weighted(values)
    shape = len(batch), batch.vectors
    arrays: dict[str, Any] = {}
    if evaluation.values:
        with np.errstate(over="ignore"):
            arrays["values"] = values.astype(dataset.layout.dtype).reshape(*shape, -1)
    if evaluation.jacobian:
        pieces = [differentiate(p, rows.variables, v)[1] for p, v in cells]
        with np.errstate(over="ignore"):
            arrays["jacobian"] = np.concatenate(pieces).astype(dataset.layout.dtype)
    if evaluation.reductions:
        with np.errstate(all="ignore"):
            numbers = [f(values, axis=1) for f in (np.sum, np.mean, np.min, np.max)]
        not_finite = (~np.isfinite(values)).sum(axis=1)
        arrays["reductions"] = np.stack([*numbers, not_finite], axis=1).reshape(*shape, 5)
    if evaluation.correlation:
        arrays["correlations"] = _scaled(weighted_values, weighted)[2].reshape(shape)
    loss = evaluation.loss_function
    if loss is None:
        return Result(**arrays)
    weights = None if weighted.dataset.weights is None else weighted.weights
    statistics = TargetStatistics(weighted.target, weights)
    if evaluation.linear_scaling:
        slopes, intercepts, _, summed = _scaled(weighted_values, weighted)
    else:
        factor = np.ones(1) if loss.mentions_weight else weighted.weights
        with np.errstate(all="ignore"):
            inputs = (np.stack([f, weighted.target, weighted.weights]) for f in weighted_values)
            terms = np.stack([evaluate_program(loss.row, each) for each in inputs])
            summed = np.asarray(np.sum(factor * terms, axis=1))
    losses = close_losses(loss.closing, summed, statistics)
    arrays["losses"] = losses.reshape(shape)
    if evaluation.linear_scaling:
        arrays["scaling"] = np.stack([slopes, intercepts], axis=1).reshape(*shape, 2)
    if evaluation.gradient or evaluation.variable_gradient:
        sums = [linearise(program, vector, weighted, loss.row) for program, vector in cells]
    if evaluation.gradient:
        pieces = [s.gradient for s in sums]
        arrays["gradients"] = np.concatenate(_closed(loss, pieces, losses, statistics))
    if evaluation.variable_gradient:
        pieces = [s.variable_gradient for s in sums]
        closed = np.stack(_closed(loss, pieces, losses, statistics))
        arrays["variable_gradients"] = closed.reshape(*shape, -1)
    return Result(**arrays)


def _closed(
    loss: LossFunction, pieces: list[Floats], losses: Floats, statistics: TargetStatistics
) -> list[Floats]:
    return [
        close_gradients(loss.closing, piece, cell, statistics)
        for piece, cell in zip(pieces, losses, strict=True)
    ]


def _rounded(values: Floats, rows: EvaluatedRows) -> Floats:
    """Return values rounded to the data set's type."""
    with np.errstate(over="ignore"):
        return values.astype(rows.dataset.layout.dtype).astype(np.float64)


def _scaled(values: Floats, rows: EvaluatedRows) -> tuple[Floats, Floats, Floats, Floats]:
    """Return slope, intercept, correlation and sum of squared residuals of the best a + b f.

    Each is an array with one entry for each row of ``values``. Numbers are taken relative to the
    first row of the data, so that a large mean costs no digits.
    """
    # The sums over at most one row are 0 if there is none.
    first_y, first_f = rows.target[:1].sum(), values[:, :1].sum(axis=1)
    with np.errstate(all="ignore"):
        w, y = rows.weights, rows.target - first_y
        total = w.sum()
        f = values - first_f[:, None]
        mean_f, mean_y = (f * w).sum(axis=1) / total, (y * w).sum() / total
        f, y = f - mean_f[:, None], y - mean_y
        squares = (w * np.square(f)).sum(axis=1)
        products = (w * f * y).sum(axis=1)
        slopes = np.where(squares == 0.0, 0.0, products / squares)
        correlations = products / np.sqrt(squares) / np.sqrt((w * np.square(y)).sum())
        residuals = (w * np.square(y - slopes[:, None] * f)).sum(axis=1)
        intercepts = (mean_y + first_y) - slopes * (mean_f + first_f)
    return slopes, intercepts, correlations, residuals
