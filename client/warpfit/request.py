"""Requests and results of Evaluate and Optimize, and how they are split by programs into parts.

A batch is split where a server refuses it as too large. Each part is an evaluation or a fit of its
own, one is sent after the other, and the results come back in the order of the programs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import lru_cache
from itertools import compress, pairwise
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.display import Shown, TextTable
from warpfit.errors import InvalidArgumentError, ResourceExhaustedError, WarpfitError, bad_setting
from warpfit.ir import Batch
from warpfit.losses import BUILT_IN, LossFunction
from warpfit.losses import Loss as Loss

if TYPE_CHECKING:
    from warpfit.dataset import Layout


class Precision(StrEnum):
    """The mode of arithmetic in float32; float64 data is always computed precisely."""

    PRECISE = "precise"
    """Each operator within 2 ulp of the correctly rounded result (CUDA: at most 4 ulp)."""
    FAST = "fast"
    """Approximate division, exponentials, logarithms and powers; subnormals may flush to zero."""


class Tier(StrEnum):
    """Which evaluator of a CUDA engine to use; a CPU engine has only an interpreter.

    AUTO moves a batch that repeats to compiled kernels, whose results in fast mode differ from the
    interpreter's in the last bits; the other two always give the same bits. Values, and the
    built-in losses with their gradients, can be interpreted or compiled; Jacobians, derivatives by
    variables, custom losses, statistics and fits are always interpreted. `Timings.tier` says which
    evaluator was used; the kernels of derivatives interpret, and count as INTERPRETER there and in
    the metrics.
    """

    AUTO = "auto"
    """Interpreted, and compiled where a batch repeats and that pays."""
    INTERPRETER = "interpreter"
    """Always interpreted."""
    COMPILED = "compiled"
    """Compiled; the call waits for its kernels."""


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """An array that an evaluation may return: a row of the table of outputs."""

    name: str
    """Field of `Result`, of EvaluateResponse and of the segment between front end and engine."""
    asked_by: str
    """Attribute of `Evaluation` that asks for it."""
    axes: tuple[str, ...]
    """Shape in the memory order of the wire: sizes of an `Evaluation`, and numbers."""
    rows: str
    """``"all"`` rows of the range, or those that have a weight (``"weighted"``)."""
    made_of: str = "engine"
    """``"engine"``, which fills it, or ``"moments"``, of which
    `warpfit_server.engine.evaluation.Finalizer` makes it."""
    is_of_data: bool = False
    """Whether it has the data set's dtype, not float64. Such arrays come in pieces."""
    needs: str = ""
    """``"target"`` if the data set must have a target, ``"loss"`` if a loss must be asked for."""


_CELLS: Final = ("programs", "vectors")
#: Every output. Messages, segments, limits, the parts of an evaluation and results are made of it.
OUTPUTS: Final = (
    Output("losses", "loss_function", _CELLS, "weighted", needs="target"),
    Output("gradients", "gradient", ("parameters",), "weighted", needs="loss"),
    Output(
        "variable_gradients", "variable_gradient", (*_CELLS, "variables"), "weighted", needs="loss"
    ),
    Output("reductions", "reductions", (*_CELLS, "5"), "all"),
    Output("scaling", "linear_scaling", (*_CELLS, "2"), "weighted", "moments", needs="loss"),
    Output("correlations", "correlation", _CELLS, "weighted", "moments", needs="target"),
    Output("values", "values", (*_CELLS, "rows"), "all", is_of_data=True),
    Output("jacobian", "jacobian", ("parameters", "rows"), "all", is_of_data=True),
)
#: Names of further outputs beside values and losses, which a caller, a message and an `Evaluation`
#: ask for by the same names.
FURTHER_OUTPUTS: Final = tuple(
    [output.asked_by for output in OUTPUTS if output.name not in ("values", "losses")]
)
_ASKED_BY: Final = attrgetter(*[output.asked_by for output in OUTPUTS])
_MADE_OF_MOMENTS: Final = attrgetter(*[o.asked_by for o in OUTPUTS if o.made_of == "moments"])
_NUMBERS: Final = {str(number): number for number in range(10)}
#: Most bytes of the arrays of an answer of one message, says the contract.
MOST_WHOLE_BYTES: Final = 4_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """One call of Evaluate: programs, data set and the outputs that are requested."""

    dataset_id: bytes
    """Names the data set, 32 bytes: for clients its SHA-256 content id; inside a server the key of
    the tenant's data set, see `warpfit_server.tenants.key_of`."""
    batch: Batch
    rows: tuple[int, int] | None = None
    """Half-open row range; None for all rows."""
    precision: Precision = Precision.PRECISE
    loss: Loss | None = None
    """Loss to compute for each program and parameter vector; None for none."""
    values: bool = True
    """Whether to return the values of all rows."""
    tier: Tier = Tier.AUTO
    gradient: bool = False
    """Whether to return the derivatives of the loss by the parameters."""
    jacobian: bool = False
    """Whether to return the derivatives of all values by the parameters."""
    variable_gradient: bool = False
    """Whether to return the derivatives of the loss by a shift of each variable."""
    reductions: bool = False
    """Whether to return sum, mean, least, greatest and the count of non-finite values."""
    linear_scaling: bool = False
    """Whether the loss is that of the best a + b f (Keijzer 2003), and to return a and b."""
    correlation: bool = False
    """Whether to return Pearson's correlation of values and target."""
    custom_loss: LossFunction | None = None
    """Loss function of the caller, instead of ``loss``."""

    @property
    def loss_function(self) -> LossFunction | None:
        """The loss as a loss function; None if no loss is requested."""
        return BUILT_IN[self.loss] if self.loss is not None else self.custom_loss

    @property
    def needs_moments(self) -> bool:
        """Whether an output is computed from the moments of values and target."""
        return any(_MADE_OF_MOMENTS(self))

    def check(self, layout: Layout) -> None:
        """Check the whole request; raise as `check_options`, and ProgramError for a bad token."""
        self.check_options(layout)
        self.batch.check(layout.variables)

    def check_options(self, layout: Layout) -> None:
        """Check everything but the batch.

        Raises:
            InvalidArgumentError: for a bad row range, a missing target, no requested output, or
                outputs that exclude each other.
        """
        if self.rows is not None:
            check_rows(self.rows, layout)
        loss, asked = self.loss_function, [*compress(OUTPUTS, _ASKED_BY(self))]
        for output in asked:
            if output.needs == "target":
                check_target(layout, "loss" if output.name == "losses" else output.asked_by)
        if loss is None:
            needing = [output.asked_by for output in asked if output.needs == "loss"]
            if needing:
                raise InvalidArgumentError(
                    f"{needing[0]} needs a loss", "LOSS_MISSING", "Ask for a loss too", needing[0]
                )
            if not asked:
                raise InvalidArgumentError(
                    "neither values nor a loss is asked for",
                    "NO_OUTPUT_REQUESTED",
                    "Set values, loss, jacobian, reductions or correlation",
                    "values",
                )
        elif self.linear_scaling:
            if self.gradient or self.variable_gradient:
                raise InvalidArgumentError(
                    "the gradient of a linearly scaled loss is not computed",
                    "CONFLICTING_OUTPUTS",
                    "Write the scaling into the expression (p1 + p2*(...)), or ask for one of the "
                    "two",
                    "linear_scaling",
                )
            if not loss.is_squares:
                raise InvalidArgumentError(
                    "linear scaling has a closed form for losses of squared differences only",
                    "SCALING_UNDEFINED",
                    "Use sse, mse, rmse, nmse or r2, or fit slope and intercept with optimize",
                    "linear_scaling",
                )
        if self.loss is not None and self.custom_loss is not None:
            raise InvalidArgumentError(
                "two losses are asked for", "CONFLICTING_OUTPUTS", "Ask for one", "loss_function"
            )

    def row_range(self, layout: Layout) -> tuple[int, int]:
        """Return the half-open range of the rows to evaluate."""
        return (0, layout.rows) if self.rows is None else self.rows

    def shape(self, layout: Layout) -> tuple[int, int, int]:
        """Return the shape of the value matrix in wire order: programs, K, rows."""
        rows = layout.rows if self.rows is None else self.rows[1] - self.rows[0]
        return len(self.batch), self.batch.vectors, rows

    def outputs(self, layout: Layout) -> Mapping[Output, tuple[int, ...]]:
        """Return the outputs that are asked for, with their shapes."""
        asked = tuple(map(bool, _ASKED_BY(self)))
        shape, parameters = self.shape(layout), len(self.batch.parameters)
        return _outputs_of(asked, shape, layout.variables, parameters)

    def token_rows(self, layout: Layout) -> int:
        """Return tokens x parameter vectors x rows, the measure of the work."""
        _, vectors, rows = self.shape(layout)
        return self.batch.token_count * vectors * rows


@lru_cache(1 << 8)  # the evaluations of a search have the same outputs and shapes
def _outputs_of(
    asked: tuple[bool, ...], shape: tuple[int, int, int], variables: int, parameters: int
) -> Mapping[Output, tuple[int, ...]]:
    sizes = dict(zip(("programs", "vectors", "rows"), shape, strict=True))
    sizes |= {"variables": variables, "parameters": parameters, **_NUMBERS}
    shapes = [tuple(map(sizes.__getitem__, output.axes)) for output in OUTPUTS]
    return MappingProxyType(dict(compress(zip(OUTPUTS, shapes, strict=True), asked)))


def check_rows(rows: tuple[int, int], layout: Layout) -> None:
    """Check a half-open row range; raise InvalidArgumentError if it does not fit the data set."""
    start, stop = rows
    if not 0 <= start < stop <= layout.rows:
        raise InvalidArgumentError(
            f"row range {start}:{stop} does not fit the data set's {layout.rows} rows",
            "ROWS_OUT_OF_RANGE",
            "Give 0 <= start < stop <= rows",
            "rows",
        )


def check_target(layout: Layout, field: str) -> None:
    """Check that a data set has a target, which the output named ``field`` needs."""
    if not layout.has_target:
        raise InvalidArgumentError(
            f"{field} needs a target, and the data set has none",
            "TARGET_MISSING",
            "Upload the data set with y, or ask for values only",
            field,
        )


#: Durations among the fields of `Timings`.
STAGES: Final = ("decode", "queue", "copy_in", "compute", "copy_out")


@dataclass(frozen=True, slots=True, repr=False)
class Timings(Shown):
    """Durations of the stages of one evaluation on the server, in nanoseconds."""

    decode: int = 0
    queue: int = 0
    copy_in: int = 0
    compute: int = 0
    copy_out: int = 0
    tier: Tier = Tier.INTERPRETER
    cache_hits: int = 0
    """Expressions that an already compiled kernel computed."""
    device: str = ""
    """Labels of the devices that computed, with commas, such as ``"cuda:0"``."""

    @property
    def summary(self) -> str:
        """The time in microseconds, the tier and the devices, in a line."""
        total = sum(getattr(self, stage) for stage in STAGES) / 1000
        device = f", {self.device}" if self.device else ""
        return f"{total:.1f} us on the server, tier {self.tier}{device}"

    def _table(self) -> TextTable:
        rows = [(stage, f"{getattr(self, stage) / 1000:.1f}") for stage in STAGES]
        note = f"tier {self.tier}, cache hits {self.cache_hits}"
        note += f", {self.device}" if self.device else ""
        return TextTable(("stage", "microseconds"), rows, note)


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Result of an evaluation, in the memory order of the wire; None for outputs not requested."""

    values: NDArray[Any] | None = None
    """[programs, K, rows], C order, the data set's dtype."""
    losses: NDArray[np.float64] | None = None
    """[programs, K], C order."""
    timings: Timings = field(default_factory=Timings)
    gradients: NDArray[np.float64] | None = None
    """Derivatives of the losses by the parameters, laid out as `Batch.parameters`, flat."""
    jacobian: NDArray[Any] | None = None
    """Derivatives of the values by the parameters, [K * sum(parameter_counts), rows]: one row for
    each number of `Batch.parameters`, in the data set's dtype."""
    variable_gradients: NDArray[np.float64] | None = None
    """Derivatives of the losses by a shift of each variable, [programs, K, variables]."""
    reductions: NDArray[np.float64] | None = None
    """Sum, mean, least, greatest and number of non-finite values, [programs, K, 5]."""
    scaling: NDArray[np.float64] | None = None
    """Slope and intercept of the best linear scaling, [programs, K, 2]."""
    correlations: NDArray[np.float64] | None = None
    """Pearson's correlation of values and target, [programs, K]."""


class Method(StrEnum):
    """Method of the search for parameters."""

    AUTO = "auto"
    """LM for losses of squared differences, BFGS for the others."""
    LM = "lm"
    """Levenberg-Marquardt with Marquardt's scaling and gain-ratio damping (Madsen, Nielsen and
    Tingleff 2004), with variable projection for parameters that the program is linear in (Golub
    and Pereyra 1973); for losses of squared differences."""
    BFGS = "bfgs"
    """Quasi-Newton with the update of Broyden, Fletcher, Goldfarb and Shanno and a weak Wolfe
    line search (Lewis and Overton 2013); for every loss."""


class Missing(StrEnum):
    """Treatment of rows in which a program is NaN or infinite."""

    REFUSE = "refuse"
    """Such a row makes the loss NaN, so that a search refuses the point, or cannot begin there."""
    DROP = "drop"
    """Such a row counts as if the program had the weighted mean of the target there, which is the
    penalty, and has no derivatives. A program without any finite row is not fitted."""


class Reason(StrEnum):
    """Why a search ended."""

    GRADIENT = "gradient"
    """The gradient is as small as the tolerance asks, or there is nothing to fit."""
    STEP = "step"
    """The next step would be smaller than the tolerance, or no step makes the loss less."""
    LOSS = "loss"
    """The last step changed the loss by less than the tolerance, or the next one would."""
    ITERATIONS = "iterations"
    """The search has taken as many iterations as are allowed."""
    DEADLINE = "deadline"
    """The time is over; these are the best parameters until then."""
    NOT_FINITE = "not_finite"
    """The search could not begin: the loss at the start is NaN or infinite; or the derivatives near
    it are, or are so small that their squares are 0; so may be the squares of the target; or no row
    has a weight. The parameters are the start."""
    STALLED = "stalled"
    """The search cannot make progress, and its point is not known to be a minimum: the gradient
    along parameters that may move is not small, or the data hardly tell the parameters apart there,
    which they may do at a minimum, too. Of float32 data, an upload with ``dtype="float64"`` may
    help; else another start, or fewer parameters."""

    @property
    def converged(self) -> bool:
        """Whether the search ended at a point that the tests of convergence accept."""
        return self in (Reason.GRADIENT, Reason.STEP, Reason.LOSS)


#: Reasons in the order of their wire codes, from 1.
REASONS: Final = tuple(Reason)


class Accuracy(StrEnum):
    """Purpose of a fit; chooses the tolerances and iterations that are not given."""

    SCREENING = "screening"
    """To compare many expressions: 50 iterations and tolerances of 1e-6 (float32 data) or 1e-8
    (float64), which leave about half of the digits that the data type has."""
    FINAL = "final"
    """To report the parameters: 2,000 iterations, and tolerances near the rounding errors."""

    @property
    def max_iterations(self) -> int:
        """Most iterations of one search."""
        return 2000 if self is Accuracy.FINAL else 50


@dataclass(frozen=True, slots=True)
class Tolerances:
    """Tolerances of the tests of convergence; 0 switches a test off.

    All are relative, so that the units of data and parameters do not matter.
    """

    gradient: float
    """Limit of the largest cosine between the residuals and a column of their Jacobian; for other
    losses than squares, between the derivatives of the row losses by the predictions and a
    column."""
    step: float
    """Limit of the length of a step relative to the length of the parameter vector, where each
    parameter counts as much as it moves the values."""
    loss: float
    """Limit of the change of the loss in one step relative to the loss."""

    @classmethod
    def of(cls, dtype: np.dtype[Any], accuracy: Accuracy = Accuracy.SCREENING) -> Tolerances:
        """Choose the default for data of a type: 1e-6 in float32, 1e-8 in float64.

        Final answers take 1e-7 and 1e-12, and for the loss, which changes with the square of the
        parameters' error, 1e-10 and 1e-16.
        """
        single = dtype.itemsize == 4
        if accuracy is Accuracy.FINAL:
            return cls(1e-7, 1e-7, 1e-10) if single else cls(1e-12, 1e-12, 1e-16)
        usual = 1e-6 if single else 1e-8
        return cls(usual, usual, usual)


@dataclass(frozen=True, slots=True, eq=False)
class FitSettings:
    """Settings of a fit; arrays have one entry for each parameter of each program, in turn."""

    method: Method = Method.AUTO
    max_iterations: int = 50
    """Most iterations of one search: trial steps (LM) or line searches (BFGS), which end as well
    when four evaluations for each of these are used up."""
    gradient_tolerance: float | None = None
    """None for the default of the data's type; see `Tolerances`."""
    step_tolerance: float | None = None
    loss_tolerance: float | None = None
    lower: NDArray[np.float64] | None = None
    """Least value of each parameter, may be -inf; None for no bounds."""
    upper: NDArray[np.float64] | None = None
    """Greatest value of each parameter, may be inf; None for no bounds."""
    fixed: NDArray[np.bool_] | None = None
    """Parameters that stay at their start; None for none."""
    restarts: int = 0
    """Starts that the server draws for each program, beside the given ones, which come first."""
    seed: int = 0
    """Seed of the drawn starts."""
    missing: Missing = Missing.REFUSE
    all_starts: bool = False
    """Whether to return the outcome of each start, not of the best one alone."""
    standard_errors: bool = False
    covariance: bool = False
    absolute_sigma: bool = False
    """Whether weights are inverse variances of the target, so that residuals do not scale the
    covariance; the name is SciPy's."""
    curvature: bool = False
    """Whether to return J^T W J, which evidence is computed from."""
    partial: bool = False
    """Whether to return the best parameters so far at the call's deadline, instead of an error."""
    progress: bool = False
    """Whether to send progress while the searches run."""

    def tolerances(self, dtype: np.dtype[Any]) -> Tolerances:
        """Return the tolerances, with the defaults of the data's type where none are given."""
        usual = Tolerances.of(dtype)
        names = ("gradient", "step", "loss")
        given = {name: getattr(self, f"{name}_tolerance") for name in names}
        return replace(usual, **{name: v for name, v in given.items() if v is not None})


@dataclass(frozen=True, slots=True, eq=False)
class FitRequest:
    """One call of Optimize."""

    problem: Evaluation
    """Data set, rows, programs with their K start vectors, precision, tier and loss."""
    settings: FitSettings = field(default_factory=FitSettings)

    @property
    def method(self) -> Method:
        """The method that is used, never AUTO."""
        if self.settings.method != Method.AUTO:
            return self.settings.method
        return Method.LM if self.loss.is_squares else Method.BFGS

    @property
    def loss(self) -> LossFunction:
        """The loss to minimise; an InvalidArgumentError says that there is none."""
        loss = self.problem.loss_function
        if loss is None:
            what = "a fit needs a loss"
            raise InvalidArgumentError(what, "LOSS_MISSING", "Give one, such as mse", "loss")
        return loss

    @property
    def starts(self) -> int:
        """K, the number of starts of each program, given and drawn ones."""
        return self.problem.batch.vectors + self.settings.restarts

    @property
    def vectors(self) -> int:
        """Number of outcomes for each program: K or 1."""
        return self.starts if self.settings.all_starts else 1

    def check(self, layout: Layout) -> None:
        """Check the whole request; raise as `check_options`, and ProgramError for a bad token."""
        self.check_options(layout)
        self.problem.batch.check(layout.variables)

    def check_options(self, layout: Layout) -> None:
        """Check everything but the tokens; raise InvalidArgumentError for wrong settings."""
        self.problem.check_options(layout)
        squares = self.loss.is_squares
        if self.settings.method == Method.LM and not squares:
            raise InvalidArgumentError(
                "Levenberg-Marquardt minimises squared differences, and the loss is another",
                "METHOD_UNSUITABLE",
                "Use method bfgs or auto, or one of sse, mse, rmse, nmse, r2",
                "method",
            )
        settings = self.settings
        if (settings.covariance or settings.standard_errors or settings.curvature) and not squares:
            raise InvalidArgumentError(
                "covariances and evidence are for losses of squared differences only",
                "COVARIANCE_UNDEFINED",
                "Use sse, mse, rmse, nmse or r2, or leave them out",
                "curvature" if settings.curvature else "covariance",
            )
        for name, most in (("max_iterations", np.inf), ("restarts", 2**32), ("seed", 2**64)):
            if not 0 <= getattr(settings, name) < most:
                wanted = "a number from 0" + (f", below {most}" if most < np.inf else "")
                raise bad_setting(name, getattr(settings, name), wanted)
        for name in ("gradient_tolerance", "step_tolerance", "loss_tolerance"):
            value = getattr(settings, name)
            if value is not None and not 0.0 <= value < np.inf:
                raise bad_setting(name, value, "a number from 0, or none for the default")
        self._check_bounds()

    def _check_bounds(self) -> None:
        settings, batch = self.settings, self.problem.batch
        total = int(batch.parameter_counts.sum(dtype=np.int64))
        for name in ("lower", "upper", "fixed"):
            array = getattr(settings, name)
            if array is not None and array.shape != (total,):
                raise InvalidArgumentError(
                    f"{name} holds {array.size} numbers for {total} parameters",
                    "LENGTH_MISMATCH",
                    "Give one number for each parameter of each program",
                    name,
                )
        # The counts are not checked yet, so no array of the length that they claim is allocated.
        lower = np.float64(-np.inf) if settings.lower is None else settings.lower
        upper = np.float64(np.inf) if settings.upper is None else settings.upper
        bad = ~np.atleast_1d((lower <= upper) & (lower < np.inf) & (upper > -np.inf))
        if bad.any():
            index = int(bad.argmax())
            low, high = (float(np.broadcast_to(end, bad.shape)[index]) for end in (lower, upper))
            what = "a lower bound above its upper bound"
            if low != low or high != high:
                what = "a bound that is not a number (NaN)"
            elif low <= high:
                what = "bounds between which no number is finite"
            ends = np.cumsum(batch.parameter_counts, dtype=np.int64)
            program = int(np.searchsorted(ends, index, side="right"))
            own = index - int(ends[program]) + int(batch.parameter_counts[program])
            raise InvalidArgumentError(
                f"p{own + 1} has {what}",
                "BAD_BOUNDS",
                "Give numbers lower <= upper, with -inf and inf for no bound",
                "lower",
                program,
            )


@dataclass(frozen=True, slots=True)
class FitProgress:
    """Progress of the searches of one call."""

    iterations: int
    """Iterations of the searches that still run."""
    active: int
    """Number of searches that still run."""
    searches: int
    """Number of all searches: programs times starts, given and drawn ones."""


@dataclass(frozen=True, slots=True, eq=False)
class FitResult:
    """Result of a fit in the memory order of the wire.

    V is K if the outcome of each start was requested, else 1.
    """

    parameters: NDArray[np.float64]
    """For each program in turn V vectors of its parameters; flat."""
    losses: NDArray[np.float64]
    """Losses at ``parameters``, [programs, V]."""
    initial_losses: NDArray[np.float64]
    """Losses at the start that led to ``parameters``, [programs, V]."""
    iterations: NDArray[np.uint32]
    """Trial steps (LM) or line searches (BFGS), [programs, V]."""
    evaluations: NDArray[np.uint32]
    """Evaluations of loss and derivatives, [programs, V]."""
    reasons: NDArray[np.uint8]
    """Index into `REASONS` plus 1, [programs, V]."""
    starts: NDArray[np.uint32]
    """Index of the start, [programs, V]."""
    standard_errors: NDArray[np.float64] | None = None
    """Standard errors in the order of ``parameters``; None if not requested."""
    covariances: NDArray[np.float64] | None = None
    """For each program and vector in turn a matrix [n, n]; flat; None if not requested."""
    curvatures: NDArray[np.float64] | None = None
    """J^T W J for each program and vector in turn, [n, n]; flat; None if not requested."""
    timings: Timings = field(default_factory=Timings)


R = TypeVar("R", Evaluation, FitRequest)
S = TypeVar("S", Result, FitResult)


def split(request: R, bounds: Sequence[int]) -> list[R]:
    """Split by programs; ``bounds`` are those of the parts, 0 and the number of programs too."""
    return [_part(request, start, stop) for start, stop in pairwise(bounds)]


def _part(request: R, start: int, stop: int) -> R:
    if isinstance(request, Evaluation):
        return replace(request, batch=request.batch[start:stop])
    problem, settings = request.problem, request.settings
    ends = np.concatenate([[0], np.cumsum(problem.batch.parameter_counts, dtype=np.int64)])
    own = slice(int(ends[start]), int(ends[stop]))
    arrays: dict[str, Any] = {
        name: None if (array := getattr(settings, name)) is None else array[own]
        for name in ("lower", "upper", "fixed")
    }
    return replace(
        request, problem=_part(problem, start, stop), settings=replace(settings, **arrays)
    )


def join(results: Sequence[S]) -> S:
    """Join the results of the parts of one request, in their order.

    Every array of a result has the programs, or numbers in the order of the programs, on its first
    axis. The durations of the stages are added.
    """
    first = results[0]
    if len(results) == 1:
        return first
    joined: dict[str, Any] = {}
    for member in fields(first):
        parts = [getattr(result, member.name) for result in results]
        if isinstance(parts[0], np.ndarray):
            joined[member.name] = np.concatenate(parts)
    sums = {
        name: sum(getattr(result.timings, name) for result in results)
        for name in (*STAGES, "cache_hits")
    }
    return replace(first, timings=replace(first.timings, **sums), **joined)


def even_bounds(weights: NDArray[np.float64], parts: int) -> list[int]:
    """Return the bounds of at most ``parts`` parts of about the same weight, none of them empty."""
    ends = np.cumsum(weights)
    targets = ends[-1] * np.arange(1, parts) / parts
    cuts = np.searchsorted(ends - weights / 2, targets)
    return sorted({0, *cuts.tolist(), len(weights)})


def searches(request: FitRequest) -> int:
    """Return the number of searches of a fit."""
    return len(request.problem.batch) * request.starts


class KnownLimits:
    """The most work of each kind of request that a server takes; shared by one client's calls.

    A refused batch is split by how far it is above the limit, and a part that is refused again;
    later batches of the kind are split before they are sent.
    """

    def __init__(self) -> None:
        self._most: dict[tuple[Any, ...], float] = {}

    def call_in_parts(self, request: R, layout: Layout, call: Callable[[R], S]) -> S:
        """Return the result of a request, or of its parts where the server refuses it as too large.

        Args:
            request: an evaluation or a fit.
            layout: of its data set.
            call: sends a request and returns its result.

        Raises:
            WarpfitError: what ``call`` raises, with the index of the expression in the whole batch.
        """
        bounds = self._bounds(request, layout)
        if len(bounds) == 2:
            try:
                return call(request)
            except ResourceExhaustedError as error:
                programs = len(problem_of(request).batch)
                needed, limit = error.needed, error.available
                cannot_help = error.reason not in _REASONS or error.retry_after is not None
                if cannot_help or not needed or not limit or programs == 1:
                    raise
                # Programs of the same weight may differ a little in what the server counts.
                most = 0.95 * min(limit / needed, 1.0) * _weights(request).sum()
                kind = _kind(request, layout)
                self._most[kind] = min(most, self._most.get(kind, math.inf))
                bounds = self._bounds(request, layout)
                bounds = bounds if len(bounds) > 2 else [0, programs // 2, programs]
        results = []
        for start, part in zip(bounds, split(request, bounds), strict=False):
            try:
                results.append(self.call_in_parts(part, layout, call))
            except WarpfitError as error:
                error.expression = None if error.expression is None else error.expression + start
                raise
        return join(results)

    def _bounds(self, request: Evaluation | FitRequest, layout: Layout) -> list[int]:
        """Return the bounds of the parts of a request that a server has not refused yet."""
        most = self._most.get(_kind(request, layout)) if self._most else None
        if most is None:
            return [0, len(problem_of(request).batch.lengths)]
        weights = _weights(request)
        return even_bounds(weights, math.ceil(min(weights.sum() / most, len(weights))))


_REASONS: Final = frozenset(
    {"TOO_MANY_PROGRAMS", "TOO_MANY_TOKENS", "RESULT_TOO_LARGE", "MESSAGE_TOO_LARGE"}
)


def problem_of(request: Evaluation | FitRequest) -> Evaluation:
    """Return the evaluation of a request."""
    return request if isinstance(request, Evaluation) else request.problem


def _weights(request: Evaluation | FitRequest) -> NDArray[np.float64]:
    """Return the weight of each program in work and messages: its tokens and parameters."""
    batch = problem_of(request).batch
    return np.add(batch.lengths, batch.parameter_counts, dtype=np.float64) + 1.0


def _kind(request: Evaluation | FitRequest, layout: Layout) -> tuple[Any, ...]:
    """Return the options of a request that decide, beside its programs, how much work it is."""
    problem = problem_of(request)
    outputs = (getattr(problem, name) for name in ("values", *FURTHER_OUTPUTS))
    _, vectors, rows = problem.shape(layout)
    starts = request.starts if isinstance(request, FitRequest) else vectors
    return type(request), starts, rows, layout.variables, *outputs
