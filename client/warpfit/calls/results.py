"""The results of `evaluate` and `optimize` as users see them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import accumulate, islice, pairwise
from numbers import Integral
from operator import attrgetter
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warpfit.calls.arguments import number
from warpfit.calls.dataset_handle import DatasetHandle
from warpfit.dataset import open_table
from warpfit.display import MOST_ROWS, Shown, ShownFormulas, TextTable, numbers, shortened
from warpfit.errors import InvalidArgumentError, bad_setting
from warpfit.evidence import Evidence, student_t
from warpfit.expressions.language import to_latex, to_text
from warpfit.expressions.reference import differentiate
from warpfit.ir import Batch, Program
from warpfit.losses import coefficients_of_determination
from warpfit.request import (
    OUTPUTS,
    REASONS,
    FitRequest,
    FitResult,
    FitSettings,
    Missing,
    Reason,
    Result,
    Timings,
)

#: Values of expressions, float32 or float64 as the data set's.
Values: TypeAlias = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Reductions(Shown):
    """Statistics of the values of each expression, [expressions] or [K, expressions].

    They are not weighted. A NaN in any row makes the first four NaN.
    """

    sum: NDArray[np.float64]
    mean: NDArray[np.float64]
    min: NDArray[np.float64]
    max: NDArray[np.float64]
    non_finite: NDArray[np.int64]
    """Number of rows with NaN or an infinity."""

    def _table(self) -> TextTable:
        names = [field.name for field in fields(self)]
        columns = [getattr(self, name) for name in names]
        rows = [
            (", ".join(map(str, index)), *(f"{column[index]:.6g}" for column in columns))
            for index in islice(np.ndindex(self.sum.shape), MOST_ROWS)
        ]
        return TextTable(("expression", *names), rows, total=self.sum.size)


#: One output of an evaluation: an array, a list with one for each expression, or statistics.
Output: TypeAlias = Values | list[Values] | Reductions


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Answer(Shown):
    """All outputs of one evaluation; None for outputs not requested. Prints as a small table.

    With K parameter vectors for each expression, all arrays have a leading axis of length K.
    """

    values: Values | None
    """[rows, expressions] or [K, rows, expressions], the data set's dtype."""
    losses: NDArray[np.float64] | None
    """[expressions] or [K, expressions]."""
    timings: Timings
    """Durations of the stages on the server."""
    gradients: list[NDArray[np.float64]] | None = None
    """For each expression the derivatives of its loss by its parameters, [n] or [K, n]."""
    slopes: NDArray[np.float64] | None = None
    """b of the best a + b f, [expressions] or [K, expressions]."""
    intercepts: NDArray[np.float64] | None = None
    """a of the best a + b f, [expressions] or [K, expressions]."""
    jacobians: list[Values] | None = None
    """For each expression the derivatives of its values by its parameters, [rows, n] or
    [K, rows, n], the data set's dtype."""
    variable_gradients: NDArray[np.float64] | None = None
    """Derivatives of the losses by a shift of each variable, [expressions, variables] or
    [K, expressions, variables]."""
    reductions: Reductions | None = None
    correlations: NDArray[np.float64] | None = None
    """Pearson's correlation of values and target, [expressions] or [K, expressions]."""

    @classmethod
    def of(cls, result: Result, batch: Batch, *, leading_axis: bool) -> Answer:
        """Return views of a result, which is in the memory order of the wire."""

        def shaped(array: NDArray[Any], *axes: int) -> Any:
            turned = array.transpose(*axes) if axes else array.swapaxes(0, 1)
            return turned if leading_axis else turned[0]

        found: dict[str, Any] = {
            each.name: _by_program(array, batch, leading_axis=leading_axis)
            if each.axes[0] == "parameters"
            else shaped(array, *((1, 2, 0) if each.name == "values" else ()))
            for each in OUTPUTS
            if (array := getattr(result, each.name)) is not None
        }
        if (scaling := found.pop("scaling", None)) is not None:
            found["slopes"], found["intercepts"] = scaling[..., 0], scaling[..., 1]
        if (reductions := found.get("reductions")) is not None:
            total, mean, least, most, odd = np.moveaxis(reductions, -1, 0)
            found["reductions"] = Reductions(total, mean, least, most, odd.astype(np.int64))
        if "jacobian" in found:
            found["jacobians"] = found.pop("jacobian")
        return cls(**{"values": None, "losses": None} | found, timings=result.timings)

    def _table(self) -> TextTable:
        rows = []
        for field in fields(self):
            output = getattr(self, field.name)
            if output is None or field.name == "timings":
                continue
            name, first = field.name, output
            if isinstance(output, Reductions):
                name, first = "reductions.sum", output.sum
            elif isinstance(output, list):
                first = output[0]
            shape = " x ".join(map(str, first.shape))
            shape = f"{len(output)} of {shape}" if isinstance(output, list) else shape
            shown = numbers(first.ravel()[:7].tolist())
            rows.append((name, shape, str(first.dtype), shown))
        return TextTable(("output", "shape", "dtype", "first numbers"), rows, self.timings.summary)

    @property
    def array(self) -> Output | tuple[Output, ...]:
        """The requested outputs: one array, or a tuple in the order of the fields."""
        first = self.losses if self.values is None else self.values
        found = tuple(part for part in (first, *_FURTHER(self)) if part is not None)
        return found[0] if len(found) == 1 else found


#: The fields of an answer beside values and losses.
_FURTHER: Final = attrgetter(
    *[each.name for each in fields(Answer) if each.name not in ("values", "losses", "timings")]
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Fit(ShownFormulas):
    """Result of `optimize`; None for outputs not requested. Prints as a small table.

    With ``all_starts``, all arrays have a leading axis of K, the number of start vectors.
    """

    parameters: list[NDArray[np.float64]]
    """For each expression its best parameters, [n] or [K, n]."""
    loss: NDArray[np.float64]
    """Loss at ``parameters``, [expressions] or [K, expressions]."""
    initial_loss: NDArray[np.float64]
    """Loss at the start that led there, [expressions] or [K, expressions]."""
    iterations: NDArray[np.uint32]
    """Iterations of each search, [expressions] or [K, expressions]."""
    evaluations: NDArray[np.uint32]
    """Evaluations of loss and derivatives, [expressions] or [K, expressions]."""
    reason: NDArray[np.object_]
    """Why each search ended, `warpfit.Reason`, [expressions] or [K, expressions]."""
    start: NDArray[np.uint32]
    """Index of the start vector that led there, [expressions] or [K, expressions]."""
    standard_errors: list[NDArray[np.float64]] | None
    """Like ``parameters``; NaN where the data do not determine a parameter, 0 where it is fixed."""
    covariance: list[NDArray[np.float64]] | None
    """A matrix for each expression, [n, n] or [K, n, n]."""
    timings: Timings
    """Durations of the stages on the server."""
    r2: NDArray[np.float64] | None
    """Coefficient of determination, [expressions] or [K, expressions]; None if the loss is not one
    of squared differences, or the handle came from another process."""
    batch: Batch
    """The expressions and their starts."""
    names: tuple[str, ...]
    """Names of the variables, or empty."""
    dtype: np.dtype[Any] | None = None
    """Type of the data: float32 or float64; None if it is not known."""
    freedom: NDArray[np.int64] | None = None
    """Rows with a weight minus free parameters that occur in each expression, [expressions]; rows
    of weight 0 count if the handle came from another process. None with ``absolute_sigma``."""
    evidence: Evidence | None = None
    """The evidence for each expression; None if not requested."""
    settings: FitSettings | None = None
    """The settings of the call."""
    has_finite_target: bool = True
    """False if a search could not begin, and the target is NaN or infinite in a row that counts."""

    _others: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("popt", "best_values", "params"), "parameters, a list for expressions"),
        "pcov": "covariance, of a fit with covariance=True",
        **dict.fromkeys(("perr", "stderr"), "standard_errors"),
        **dict.fromkeys(("aic", "bic", "redchi"), "evidence, of a fit with evidence=True"),
        **dict.fromkeys(("best_fit", "predict", "eval"), "formula().to_numpy()(X)"),
        **dict.fromkeys(("expression_", "program_"), "formula()"),
        "fit_report": "print(fit)",
        "message": "reason",
    }

    @classmethod
    def of(cls, result: FitResult, request: FitRequest, data: DatasetHandle | None = None) -> Fit:
        """Return views of a result in the memory order of the wire; R2 needs the data's numbers."""
        batch, all_starts = request.problem.batch, request.settings.all_starts
        absolute = request.settings.absolute_sigma
        r2 = None
        if data is not None and data.has_numbers and request.loss.is_squares:
            statistics = data.statistics(request.problem.rows)
            closing = request.loss.closing
            r2 = coefficients_of_determination(closing, result.losses, statistics)

        freedom = None
        if data is not None and not absolute:  # rows with a weight minus free parameters that occur
            fixed = request.settings.fixed
            start, stop = request.problem.row_range(data.layout)
            rows = stop - start
            if data.has_numbers and (weights := data.dataset.weights) is not None:
                rows = int(np.count_nonzero(weights[start:stop]))
            is_free = batch.occurring
            if fixed is not None:
                is_free &= ~fixed
            counts = batch.parameter_counts.astype(np.int64)
            stops = np.cumsum(counts)
            ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(is_free)])
            free: NDArray[np.int64] = ends[stops] - ends[stops - counts]
            freedom = rows - free

        def shaped(array: NDArray[Any]) -> NDArray[Any]:
            return array.T if all_starts else array[:, 0]

        def split(array: NDArray[Any] | None, square: bool = False) -> Any:
            vectors = result.losses.shape[1]
            return _by_program(
                array, batch, leading_axis=all_starts, vectors=vectors, square=square
            )

        reasons = np.array([None, *REASONS], dtype=object)
        return cls(
            parameters=split(result.parameters),
            loss=shaped(result.losses),
            initial_loss=shaped(result.initial_losses),
            iterations=shaped(result.iterations),
            evaluations=shaped(result.evaluations),
            reason=reasons[shaped(result.reasons)],
            start=shaped(result.starts),
            standard_errors=split(result.standard_errors),
            covariance=split(result.covariances, square=True),
            timings=result.timings,
            r2=None if r2 is None else shaped(r2),
            batch=batch,
            names=() if data is None else data.names,
            dtype=None if data is None else data.layout.dtype,
            freedom=freedom,
            settings=request.settings,
            has_finite_target=not (
                data is not None
                and data.has_numbers
                and (result.reasons == REASONS.index(Reason.NOT_FINITE) + 1).any()
                and not math.isfinite(data.statistics(request.problem.rows).largest)
            ),
        )

    @property
    def correlation(self) -> list[NDArray[np.float64]] | None:
        """Correlations of the parameters of each expression, [n, n] or [K, n, n].

        They are NaN for parameters that are fixed, or not determined by the data. None if the
        covariance was not requested.
        """
        if self.covariance is None:
            return None
        matrices = []
        with np.errstate(all="ignore"):
            for covariance in self.covariance:
                scale = np.sqrt(np.diagonal(covariance, axis1=-2, axis2=-1))
                matrices.append(covariance / (scale[..., :, None] * scale[..., None, :]))
        return matrices

    def band(
        self,
        X: Any,
        expression: int | None = None,
        start: int | None = None,
        *,
        level: float = 0.95,
        prediction: bool = False,
    ) -> Band:
        """Return the values of a fitted expression with their confidence band, point by point.

        The band is the value plus and minus Student's t times the standard error that the
        covariance of the parameters gives a value to first order (the delta method; Seber and Wild
        2003, section 5.1). It needs ``covariance=True`` in `warpfit.Client.optimize`.

        Args:
            X: rows [rows, variables], or a table with the columns of the data set.
            expression: index of the expression; None if there is one.
            start: index of the start, with ``all_starts``; None if there is one.
            level: probability that the band covers the true value in a row.
            prediction: whether it is to cover a new measurement of weight 1 instead, whose variance
                is added; needs ``evidence=True`` in `warpfit.Client.optimize`.

        Raises:
            InvalidArgumentError: if covariance or evidence was not requested, if X does not fit,
                or if an index is missing or out of range.
        """
        if self.covariance is None:
            raise InvalidArgumentError(
                "a band needs the covariance of the parameters",
                "COVARIANCE_MISSING",
                "Fit with covariance=True",
                "covariance",
            )
        if prediction and self.evidence is None:
            raise bad_setting("prediction", prediction, "False, or fit with evidence=True")
        expression, start = self._place(expression, start)
        wanted = "a probability between 0 and 1"
        if not 0.0 < number(level, "level", wanted) < 1.0:
            raise bad_setting("level", level, wanted)
        columns = open_table(X).variables
        is_named = set(self.names) <= set(columns.names) and bool(self.names)
        columns = columns.select(self.names) if is_named else columns
        rows, variables = columns.shape
        blocks = [np.ravel(block) for block in columns.blocks()]
        matrix = np.concatenate(blocks).reshape(variables, rows) if blocks else np.empty((0, rows))
        program = self.batch.program(expression)
        if program.variables > variables:
            raise InvalidArgumentError(
                f"X has {variables} columns, and the expression uses {program.variables} variables",
                "BAD_SHAPE",
                "Give the columns of the data set",
                "X",
            )
        vector, covariance = self.parameters[expression], self.covariance[expression]
        if vector.ndim == 2:
            vector, covariance = vector[start], covariance[start]
        values, slopes = differentiate(program, matrix, vector)
        moves = slopes.any(axis=1)  # what moves no value here need not be determined
        slopes, covariance = slopes[moves], covariance[np.ix_(moves, moves)]
        freedom = math.inf if self.freedom is None else float(self.freedom[expression])
        noise = 0.0
        if prediction and self.evidence:  # weights that are inverse variances say what it is
            noise = 1.0 if self.freedom is None else float(self.evidence.variance[expression])
        with np.errstate(invalid="ignore"):
            error = np.sqrt(noise + np.einsum("ir,ij,jr->r", slopes, covariance, slopes))
        half = student_t(level, freedom) * error
        return Band(values, values - half, values + half)

    @property
    def hint(self) -> str:
        """Remedy for searches that could not begin or stalled, or missing parameters, or empty."""
        begun, own = self.reason != Reason.NOT_FINITE, self.settings
        if not begun.all():
            odd = int(begun.size - begun.sum())
            what = "1 search" if odd == 1 else f"{odd} searches"
            if not self.has_finite_target:
                return (
                    f"{what} could not begin: the target has rows that are NaN or infinite. Leave "
                    "them out, or give them weight 0"
                )
            more = [] if own and own.restarts else ["restarts=8"]
            more += [] if own and own.missing is Missing.DROP else ['missing="drop"']
            return (
                f"{what} could not begin: where they start, the loss, derivatives or their squares "
                "are not finite, or vanish. Give another start at which the expression is finite "
                f"in all rows, {', '.join([*more, 'or other units'])}"
            )
        count = self.reason.ravel().tolist().count(Reason.STALLED)
        if count:
            what = "1 search has stalled" if count == 1 else f"{count} searches have stalled"
            if self.dtype == np.float32:
                return f'{what}, for which float32 may be too coarse: upload with dtype="float64"'
            return (
                f"{what} at a point that may be no minimum: try other starts, fewer parameters, "
                "or, where a column is far from 0, the powers of x1 - its mean, which keep their "
                "digits"
            )
        ends = np.cumsum(self.batch.parameter_counts)
        for index, occurs in enumerate(np.split(self.batch.occurring, ends[:-1])[:MOST_ROWS]):
            gaps = np.flatnonzero(~occurs)
            if len(gaps) and occurs[gaps[0] :].any():
                name = f"p{gaps[0] + 1}"
                return f"expression {index} has no {name}: number parameters without gaps"
        # Which parameters the data do not determine, or have ended at a bound.
        errors = self.standard_errors
        if own is None or own.all_starts:
            return ""
        values = np.concatenate([*self.parameters, np.empty(0)])
        at_bound = np.zeros(len(values), dtype=bool)
        for bound in (own.lower, own.upper):
            at_bound |= False if bound is None else values == bound
        at_bound &= True if own.fixed is None else ~own.fixed
        remarks = []
        end = "at a bound" + ", where standard errors are those without it" * (errors is not None)
        for index, is_at in enumerate(np.split(at_bound, ends[:-1])[:MOST_ROWS]):
            # With too few rows no parameter has an error.
            has_errors = errors is not None and (self.freedom is None or self.freedom[index] > 0)
            lost = np.isnan(errors[index]) if errors and has_errors else np.zeros_like(is_at)
            which = f" of expression {index}" if len(self.batch) > 1 else ""
            for those, verbs, what in (
                (lost, ("is", "are"), "not determined by the data"),
                (is_at & ~lost, ("ends", "end"), end),
            ):
                if names := [f"p{i + 1}" for i in np.flatnonzero(those).tolist()]:
                    remarks.append(f"{', '.join(names)}{which} {verbs[len(names) > 1]} {what}")
        return "; ".join(remarks[:3])

    def _place(self, expression: int | None, start: int | None) -> tuple[int, int]:
        """Return the indices of an expression and a start; those of several have to be given."""
        place: list[int] = []
        starts = self.loss.shape[0] if self.loss.ndim == 2 else 1
        for name, given, count in (
            ("expression", expression, len(self.batch)),
            ("start", start, starts),
        ):
            index = 0 if given is None and count == 1 else given
            if not isinstance(index, Integral) or not -count <= index < count:
                several = f"a whole number from 0 to {count - 1}, because the fit has {count}"
                raise bad_setting(name, given, several if count > 1 else "0, or leave it out")
            place.append(int(index) % count)
        return place[0], place[1]

    def formula(self, expression: int | None = None, start: int | None = None) -> Program:
        """Return an expression with its fitted parameters as constants, by the indices of both.

        An index may be left out where there is one expression, or one start.

        Raises:
            InvalidArgumentError: if an index is missing or out of range.
        """
        expression, start = self._place(expression, start)
        vector = self.parameters[expression]
        return self.batch.program(expression).bind(vector[start] if vector.ndim == 2 else vector)

    @property
    def texts(self) -> list[str]:
        """The text of each expression with its fitted numbers, over the names of the variables.

        Raises:
            InvalidArgumentError: with ``all_starts``, where `formula` needs the index of a start.
        """
        return [to_text(self.formula(index), self.names) for index in range(len(self.batch))]

    def _table(self, latex: bool = False) -> TextTable:
        """Return a row for each expression, and each start of ``all_starts``."""
        by_start = self.loss.ndim == 2
        rows = []
        for index in list(np.ndindex(self.loss.shape))[:MOST_ROWS]:
            *start, expression = index
            vector = self.parameters[expression][tuple(start)].tolist()
            errors = self.standard_errors
            rounded = [float(f"{value:.5g}") for value in vector]
            program = self.batch.program(expression).bind(rounded)
            plain = shortened(to_text(program, self.names))
            rows.append(
                (
                    *map(str, (expression, *start)),
                    f"${to_latex(program, self.names)}$" if latex else plain,
                    numbers(vector, None if errors is None else errors[expression][tuple(start)]),
                    *([] if self.r2 is None else [f"{self.r2[index]:.6g}"]),
                    *(f"{losses[index]:.6g}" for losses in (self.initial_loss, self.loss)),
                    *map(str, (self.iterations[index], self.reason[index])),
                )
            )
        places = ("expression", "start") if by_start else ("expression",)
        score = () if self.r2 is None else ("R2",)
        header = (*places, "formula", "parameters", *score, "initial loss", "loss")
        header = (*header, "iterations", "reason")
        below: tuple[TextTable, ...] = ()
        if self.loss.size == 1 and self.correlation is not None:
            matrix = self.correlation[0].reshape(self.correlation[0].shape[-2:])
            if 2 <= len(matrix) <= MOST_ROWS:
                names = [f"p{number}" for number in range(1, len(matrix) + 1)]
                lines = [
                    (name, *(f"{row[j]:.2f}" if j <= i else "" for j in range(len(names))))
                    for i, (name, row) in enumerate(zip(names, matrix, strict=True))
                ]
                below = (TextTable(("correlation", *names), lines),)
        return TextTable(header, rows, self.hint, total=self.loss.size, below=below)

    @property
    def x(self) -> list[NDArray[np.float64]]:
        """``parameters``, by SciPy's name."""
        return self.parameters

    @property
    def fun(self) -> NDArray[np.float64]:
        """``loss``, by SciPy's name."""
        return self.loss

    @property
    def nit(self) -> NDArray[np.uint32]:
        """``iterations``, by SciPy's name."""
        return self.iterations

    @property
    def nfev(self) -> NDArray[np.uint32]:
        """``evaluations``, by SciPy's name."""
        return self.evaluations

    @property
    def success(self) -> NDArray[np.bool_]:
        """Whether each search converged; see `warpfit.Reason`."""
        flat = [reason.converged for reason in self.reason.ravel().tolist()]
        return np.array(flat, dtype=bool).reshape(self.reason.shape)


class Band(NamedTuple):
    """Values of an expression and their confidence band, each float64 [rows]."""

    values: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


def _by_program(
    flat: NDArray[Any] | None,
    batch: Batch,
    *,
    leading_axis: bool,
    vectors: int | None = None,
    square: bool = False,
) -> Any:
    """Split an array [P] or [P, rows], in the order of `Batch.parameters`, by programs.

    The list has views [n], [rows, n] or, where ``square`` says that each vector has a matrix,
    [n, n], after the axis of vectors if it is kept. Their number is the batch's by default.
    """
    if flat is None:
        return None
    k = batch.vectors if vectors is None else vectors
    counts = batch.parameter_counts.tolist()
    ends = [0, *accumulate(k * n * (n if square else 1) for n in counts)]
    parts = [flat[start:stop] for start, stop in pairwise(ends)]
    if k == 1 and flat.ndim == 1 and not (square or leading_axis):
        return parts  # the usual case, for which reshaping would take most of the time
    pieces = []
    for n, part in zip(counts, parts, strict=True):
        piece = part.reshape((k, n, n) if square else (k, n, *flat.shape[1:]))
        piece = piece.swapaxes(1, 2) if flat.ndim == 2 else piece
        pieces.append(piece if leading_axis else piece[0])
    return pieces
