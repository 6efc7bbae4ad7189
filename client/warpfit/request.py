"""What an evaluation asks for, and what comes back: the types between the stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpfit.dataset import Layout
from warpfit.errors import InvalidArgumentError
from warpfit.ir import Batch


class Precision(StrEnum):
    """How float32 is computed; float64 data is always precise."""

    PRECISE = "precise"
    """Within 2 ulp of the correctly rounded result for each operator (CUDA: its documented ulp)."""
    FAST = "fast"
    """Approximate division, exponentials, logarithms and powers; subnormals may flush to zero."""


class Loss(StrEnum):
    """Loss of predictions f against the target y with weights w (1 without weights).

    Computed in float64 whatever the data's type; in fast mode a GPU thread may add up its own rows
    in float32. NaN in any used row makes the loss NaN, also
    where the weight is 0.
    """

    SSE = "sse"
    """Sum of w (f - y)^2."""
    MSE = "mse"
    """SSE divided by the sum of w."""
    RMSE = "rmse"
    """Square root of MSE."""
    MAE = "mae"
    """Sum of w |f - y| divided by the sum of w."""
    R2 = "r2"
    """1 - SSE / sum of w (y - m)^2, where m is the weighted mean of y; a score: 1 is best."""
    NMSE = "nmse"
    """SSE / sum of w (y - m)^2, that is 1 - R2."""


class Tier(StrEnum):
    """Which evaluator of a CUDA engine to use; a CPU engine has only an interpreter."""

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

    def check(self, layout: Layout) -> None:
        """Check the whole evaluation against the data set that it names.

        Raises:
            InvalidArgumentError: for a bad row range, a missing target, or nothing wanted.
            ProgramError: for the first bad token.

        """
        self.check_options(layout)
        self.batch.check(layout.variables)

    def check_options(self, layout: Layout) -> None:
        """Check everything but the batch.

        Raises:
            InvalidArgumentError: for a bad row range, a missing target, or nothing wanted.

        """
        start, stop = self.row_range(layout)
        if not 0 <= start < stop <= layout.rows:
            raise InvalidArgumentError(
                f"row range {start}:{stop} does not fit the data set's {layout.rows} rows",
                "ROWS_OUT_OF_RANGE",
                "Give 0 <= start < stop <= rows",
                "rows",
            )
        if self.loss is not None and not layout.has_target:
            raise InvalidArgumentError(
                f"loss {self.loss.value} needs a target, and the data set has none",
                "TARGET_MISSING",
                "Upload the data set with y, or ask for values only",
                "loss",
            )
        if self.loss is None and not self.values:
            raise InvalidArgumentError(
                "neither values nor a loss is asked for",
                "NOTHING_WANTED",
                "Set values or loss",
                "values",
            )

    def row_range(self, layout: Layout) -> tuple[int, int]:
        """Half-open range of the rows to evaluate."""
        return (0, layout.rows) if self.rows is None else self.rows

    def shape(self, layout: Layout) -> tuple[int, int, int]:
        """Shape of the value matrix in wire order: programs, K, rows."""
        start, stop = self.row_range(layout)
        return len(self.batch), self.batch.vectors, stop - start


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


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Answer of an evaluation, in the memory order of the wire."""

    values: NDArray[Any] | None = None
    """[programs, K, rows], C order, the data set's dtype; None if not asked for."""
    losses: NDArray[np.float64] | None = None
    """[programs, K], C order; None if not asked for."""
    timings: Timings = field(default_factory=Timings)
