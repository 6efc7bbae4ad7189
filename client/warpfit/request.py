"""The request and the result of Evaluate."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import compress
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.display import Shown, TextTable
from warpfit.errors import InvalidArgumentError
from warpfit.ir import Batch
from warpfit.losses import BUILT_IN, LossFunction
from warpfit.losses import Loss as Loss


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
    the tenant's data set, see `warpfit_server.tenancy.tenants.key_of`."""
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
