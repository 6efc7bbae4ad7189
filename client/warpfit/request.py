"""What an evaluation asks for, and what comes back: the types between the stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpfit.calls.display import TextTable
from warpfit.dataset import Layout
from warpfit.errors import InvalidArgumentError
from warpfit.ir import Batch
from warpfit.losses import BUILT_IN, LossFunction
from warpfit.losses import Loss as Loss


class Precision(StrEnum):
    """How float32 is computed; float64 data is always precise."""

    PRECISE = "precise"
    """Within 2 ulp of the correctly rounded result for each operator (CUDA: its documented ulp)."""
    FAST = "fast"
    """Approximate division, exponentials, logarithms and powers; subnormals may flush to zero."""


class Tier(StrEnum):
    """Which evaluator of a CUDA engine to use; a CPU engine has only an interpreter.

    AUTO moves a batch that repeats to compiled kernels, whose results in fast mode differ from the
    interpreter's in the last bits; the other two always give the same bits. Values, and the
    built-in losses with their gradients, have both; Jacobians, derivatives by variables, losses of
    one's own, statistics and fits are always interpreted. The timings say which it was.
    """

    AUTO = "auto"
    INTERPRETER = "interpreter"
    COMPILED = "compiled"


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """One call of Evaluate: programs, data set and what is wanted back."""

    dataset_id: bytes
    """SHA-256 content id of the data set, 32 bytes."""
    batch: Batch
    rows: tuple[int, int] | None = None
    """Half-open row range; None for all rows."""
    precision: Precision = Precision.PRECISE
    loss: Loss | None = None
    """Loss to compute for each program and parameter vector; None for none."""
    values: bool = True
    """Whether the values of all rows are wanted."""
    tier: Tier = Tier.AUTO
    gradient: bool = False
    """Whether the derivatives of the loss with respect to the parameters are wanted."""
    jacobian: bool = False
    """Whether the derivatives of all values with respect to the parameters are wanted."""
    variable_gradient: bool = False
    """Whether the derivatives of the loss with respect to a shift of each variable are wanted."""
    reductions: bool = False
    """Whether sum, mean, least, greatest and the count of non-finite values are wanted."""
    linear_scaling: bool = False
    """Whether the loss is that of the best a + b f (Keijzer 2003), and a and b are wanted."""
    correlation: bool = False
    """Whether Pearson's correlation of values and target is wanted."""
    custom_loss: LossFunction | None = None
    """Loss of the caller's own, instead of ``loss``."""

    @property
    def loss_function(self) -> LossFunction | None:
        """Row loss and closing of the loss that is wanted; None if none is."""
        return BUILT_IN[self.loss] if self.loss is not None else self.custom_loss

    @property
    def differentiates(self) -> bool:
        """Whether anything is wanted that needs derivatives."""
        return self.gradient or self.jacobian or self.variable_gradient

    @property
    def needs_moments(self) -> bool:
        """Whether anything is wanted that is computed from the moments of values and target."""
        return self.linear_scaling or self.correlation

    def check(self, layout: Layout) -> None:
        """Check the whole evaluation against the data set that it names.

        Raises:
            InvalidArgumentError: for a bad row range, a missing target, nothing wanted, or wishes
                that exclude each other.
            ProgramError: for the first bad token.

        """
        self.check_options(layout)
        self.batch.check(layout.variables)

    def check_options(self, layout: Layout) -> None:
        """Check everything but the batch.

        Raises:
            InvalidArgumentError: for a bad row range, a missing target, nothing wanted, or wishes
                that exclude each other.

        """
        check_rows(self.row_range(layout), layout)
        loss = self.loss_function
        for wish, wanted in (("loss", loss is not None), ("correlation", self.correlation)):
            if wanted:
                check_target(layout, wish)
        if loss is None:
            self._check_wishes_without_loss()
        elif self.linear_scaling:
            self._check_scaling(loss)
        if self.loss is not None and self.custom_loss is not None:
            raise InvalidArgumentError(
                "two losses are asked for", "WISHES_CONFLICT", "Ask for one", "loss_function"
            )

    def _check_wishes_without_loss(self) -> None:
        for wish in ("gradient", "variable_gradient", "linear_scaling"):
            if getattr(self, wish):
                raise InvalidArgumentError(
                    f"{wish} needs a loss", "LOSS_MISSING", "Ask for a loss too", wish
                )
        if not any((self.values, self.jacobian, self.reductions, self.correlation)):
            raise InvalidArgumentError(
                "neither values nor a loss is asked for",
                "NOTHING_WANTED",
                "Set values, loss, jacobian, reductions or correlation",
                "values",
            )

    def _check_scaling(self, loss: LossFunction) -> None:
        if self.gradient or self.variable_gradient:
            raise InvalidArgumentError(
                "the gradient of a linearly scaled loss is not computed",
                "WISHES_CONFLICT",
                "Write the scaling into the expression (p1 + p2*(...)), or ask for one of the two",
                "linear_scaling",
            )
        if not loss.is_squares:
            raise InvalidArgumentError(
                "linear scaling has a closed form for losses of squared differences only",
                "SCALING_UNDEFINED",
                "Use sse, mse, rmse, nmse or r2, or fit slope and intercept with optimize",
                "linear_scaling",
            )

    def row_range(self, layout: Layout) -> tuple[int, int]:
        """Half-open range of the rows to evaluate."""
        return (0, layout.rows) if self.rows is None else self.rows

    def shape(self, layout: Layout) -> tuple[int, int, int]:
        """Shape of the value matrix in wire order: programs, K, rows."""
        start, stop = self.row_range(layout)
        return len(self.batch), self.batch.vectors, stop - start

    def token_rows(self, layout: Layout) -> int:
        """Tokens x parameter vectors x rows: how much there is to compute."""
        _, vectors, rows = self.shape(layout)
        return len(self.batch.codes) * vectors * rows


def check_rows(rows: tuple[int, int], layout: Layout) -> None:
    """Check a half-open row range.

    Raises:
        InvalidArgumentError: if it does not fit the data set.

    """
    start, stop = rows
    if not 0 <= start < stop <= layout.rows:
        raise InvalidArgumentError(
            f"row range {start}:{stop} does not fit the data set's {layout.rows} rows",
            "ROWS_OUT_OF_RANGE",
            "Give 0 <= start < stop <= rows",
            "rows",
        )


def check_target(layout: Layout, field: str) -> None:
    """Check that there is a target for the wish named ``field``.

    Raises:
        InvalidArgumentError: if there is none.

    """
    if not layout.has_target:
        raise InvalidArgumentError(
            f"{field} needs a target, and the data set has none",
            "TARGET_MISSING",
            "Upload the data set with y, or ask for values only",
            field,
        )


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one evaluation went, in nanoseconds."""

    decode: int = 0
    queue: int = 0
    copy_in: int = 0
    compute: int = 0
    copy_out: int = 0
    tier: Tier = Tier.INTERPRETER
    cache_hits: int = 0
    """Expressions served by an already compiled kernel."""

    def __str__(self) -> str:
        """Small table in microseconds."""
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> TextTable:
        stages = ("decode", "queue", "copy_in", "compute", "copy_out")
        rows = [(stage, f"{getattr(self, stage) / 1000:.1f}") for stage in stages]
        note = f"tier {self.tier}, cache hits {self.cache_hits}"
        return TextTable(("stage", "microseconds"), rows, note)


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Answer of an evaluation, in the memory order of the wire."""

    values: NDArray[Any] | None = None
    """[programs, K, rows], C order, the data set's dtype; None if not asked for."""
    losses: NDArray[np.float64] | None = None
    """[programs, K], C order; None if not asked for."""
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
